"""The parameters that an engine's ranks hold, bound to the bytes of the files or loaded.

An engine's layout specifies the regions of sources from which each parameter is copied, and a
checkpoint the file in which each source is stored. Combined, a parameter is boxes in files::

    gate_up_proj, rank 1 of 2            model.safetensors
    0:2   gate_proj, rows 2:4   ---->    byte 4096 + 2 rows
    2:4   up_proj, rows 2:4     ---->    byte 8192 + 2 rows

1. If a source is stored whole in a file, all regions are in that file, whatever their strides.
2. If a source is sharded, a region is split along the dimensions of the shards into the parts that
   are inside each shard.
3. Elements that are not copied, such as Mamba's `A = -exp(A_log)`, a router's bias in float32 or
   the padding of a vocabulary, are parts of derived files: they are computed when they are first
   read (`DerivedElements`)::

       rank-0/A     [computed ......]                    one region
       embed_tokens [copied, in model.safetensors][0 0]  the last rows

   Their size is limited (`MAX_BYTES`). Only the elementwise operations in `OPERATIONS` are
   computed; others are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.blocks.fusing import list_stored_regions
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.loading.arrays import load_layouts
from reshard.checkpoint.options import LoadOptions
from reshard.checkpoint.storage.byte_streams import ReadRange
from reshard.checkpoint.storage.derived_files import DerivedFile, DerivedPart
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RecipeError, UsageError
from reshard.geometry.regions import Region, bind_regions, dense_strides
from reshard.layout import Layout
from reshard.recipes.engine_layouts import (
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourcePiece,
    SourceTensor,
)
from reshard.recipes.engine_layouts.document import read_layout_file
from reshard.recipes.engine_layouts.parameter_layout import Computed, Constant
from reshard.recipes.engine_layouts.source_layouts import find_steps
from reshard.text import first_text


@dataclass
class RankParameters:
    """The parameters of ranks as tensors, and the files of derived elements."""

    checkpoint: Checkpoint
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    made: dict[str, DerivedFile] = field(default_factory=dict)

    def add(self, layout: RankLayout, prefix: str = "") -> None:
        """Add a rank's parameters under names with a prefix; of tied parameters, only the first.

        Raises:
            RecipeError: a parameter that cannot be derived from the checkpoint: it is computed by
                an unknown operation, is not filled, or takes elements across the dimensions of a
                sharded source.
        """
        left_out = {name for group in layout.tied for name in sorted(group)[1:]}
        unfilled = [
            name
            for name, parameter in layout.parameters.items()
            if parameter.unfilled and name not in left_out
        ]
        if unfilled:
            raise RecipeError(
                f"{len(unfilled)} parameters of rank {layout.rank} are not filled by the loader "
                f"(first: {unfilled[0]}), and what they hold then is the engine's; let it load the "
                "checkpoint as it is"
            )
        for name, parameter in layout.parameters.items():
            if name not in left_out:
                self.add_parameter(parameter, f"{prefix}{name}")

    def add_parameter(self, parameter: ParameterLayout, name: str | None = None) -> None:
        """Add a parameter, by default under its own name. Raises RecipeError as `add` does."""
        name = parameter.name if name is None else name
        self.tensors[name] = self._bind(name, parameter)

    @property
    def bound(self) -> Checkpoint:
        """The checkpoint with these tensors instead of its own."""
        # Several ranks may read the same bytes, so checksums of whole files do not apply.
        return self.checkpoint.replace(
            tensors=self.tensors,
            checksums=(),
            derived={**self.checkpoint.derived, **self.made},
        )

    def _bind(self, name: str, parameter: ParameterLayout) -> StoredTensor:
        itemsize = parameter.dtype.itemsize_bytes
        stored_regions: list[Region] = []
        derived: list[Computed | Constant] = []
        for piece in parameter.pieces:
            stored = self.checkpoint[piece.source]
            # Elements whose bits are only reinterpreted are bound to the stored bytes.
            steps = tuple(step for step in piece.steps if not step.startswith("bits as "))
            if steps:
                derived.append(Computed(piece.box, steps, (piece.source,), piece.view))
            elif stored.dtype.itemsize_bytes != itemsize:
                raise RecipeError(
                    f"{name!r} takes {piece.source!r} of {stored.dtype.name} as "
                    f"{parameter.dtype.name} by its bits; let the engine load it as it is"
                )
            else:
                stored_regions += _resolve(name, piece, stored)
        for part in parameter.computed:
            if part.view is None or len(part.sources) != 1:
                raise RecipeError(
                    f"{name!r} is computed by {', '.join(part.operations)} of "
                    f"{', '.join(part.sources)}, not element by element; let the engine load the "
                    "checkpoint as it is"
                )
            derived.append(part)
        derived += parameter.constants
        if derived:
            start, file = 0, f"{name}/made"
            for region in derived:
                if isinstance(region, Computed):
                    check_steps(name, region.operations)
                strides = dense_strides(region.box.shape, itemsize)
                stored_regions.append(Region(*region.box, file, start * itemsize, strides))
                start += region.box.elements
            if start * itemsize > MAX_BYTES:
                computed = (part for part in derived if isinstance(part, Computed))
                casts = sorted({step for part in computed for step in part.operations})
                raise RecipeError(
                    f"{name!r} has {start * itemsize:,} bytes that are made by "
                    f"{', '.join(casts) or 'one value'}, more than {MAX_BYTES:,}; convert the "
                    "checkpoint to the engine's element type first"
                )
            sources = (part.sources[0] for part in derived if isinstance(part, Computed))
            first = next(map(self._file_of, sources), self.checkpoint.files[0].name)
            elements = DerivedElements(
                name, 0, 0, start * itemsize, parameter.dtype, tuple(derived), self.checkpoint
            )
            elements.expect_computable()
            self.made[file] = DerivedFile(first, (elements,))
        placed = [(0, region) for region in stored_regions]
        binding = bind_regions(parameter.shape, placed, 1, itemsize)
        return StoredTensor(name, parameter.dtype, binding)

    def _file_of(self, source: str) -> str:
        tensor = self.checkpoint[source]
        return tensor.file_range(tensor.stored_slots[0]).path


def _resolve(name: str, piece: SourcePiece, stored: StoredTensor) -> Iterator[Region]:
    """Yield the regions of files that fill a piece of a parameter."""
    itemsize = stored.dtype.itemsize_bytes
    cells = [region for _, region in list_stored_regions(stored)]
    # A whole source: a view of the tensor is also a view of the file.
    if len(cells) == 1 and cells[0].is_dense(itemsize):
        start = cells[0].offset + piece.view.offset * itemsize
        strides = tuple(stride * itemsize for stride in piece.view.strides)
        yield Region(*piece.box, cells[0].container, start, strides)
        return
    located = find_steps(stored.shape, piece.box.shape, piece.view.offset, piece.view.strides)
    if located is None:
        raise RecipeError(
            f"{name!r} takes elements of {piece.source!r} across its dimensions, and that is cut "
            "over ranks in this checkpoint; make it whole first (--to full)"
        )
    first, along = located
    # The piece has a single index of any source dimension that is not among its own dimensions.
    steps = {
        axis[0]: (axis[1], size) for size, axis in zip(piece.box.shape, along, strict=True) if axis
    }
    for cell in cells:
        part: Region | None = cell
        for d, begin in enumerate(first):
            part = part and part.step(d, begin, *steps.get(d, (1, 1)))
        if part is None:
            continue
        columns = [
            (0, size, 0)
            if axis is None
            else (part.start[axis[0]], part.stop[axis[0]], part.strides[axis[0]])
            for size, axis in zip(piece.box.shape, along, strict=True)
        ]
        origin = piece.box.start
        yield Region(
            tuple(a + low for a, (low, _, _) in zip(origin, columns, strict=True)),
            tuple(a + high for a, (_, high, _) in zip(origin, columns, strict=True)),
            part.container,
            part.offset,
            tuple(stride for _, _, stride in columns),
        )


def check_sources(layout: EngineLayout, checkpoint: Checkpoint) -> None:
    """Raise RecipeError if a layout does not belong to this checkpoint."""
    problems = []
    sources: Mapping[str, SourceTensor] = layout.sources
    for name, source in sources.items():
        if name not in checkpoint.tensors:
            problems.append(f"{name}: not in the checkpoint")
            continue
        stored = checkpoint.tensors[name]
        if (stored.dtype, stored.shape) != (source.dtype, source.shape):
            problems.append(
                f"{name}: {stored.dtype.name} {list(stored.shape)}, in the layout "
                f"{source.dtype.name} {list(source.shape)}"
            )
    if problems:
        raise RecipeError(
            f"the layout of {layout.engine} is of another checkpoint than {checkpoint.folder}: "
            f"{first_text(problems, 3, '; ')}; derive it again"
        )


def rank_parameters(
    checkpoint: Checkpoint, ranks: Mapping[str, RankLayout] | RankLayout
) -> RankParameters:
    """Return the parameters of ranks as tensors of a checkpoint.

    Args:
        checkpoint: the sources.
        ranks: the layout of a rank, or the layouts of several by the prefix of their names.

    Raises:
        RecipeError: a parameter that cannot be derived, as in `RankParameters.add`.
    """
    result = RankParameters(checkpoint)
    for prefix, rank in ({"": ranks} if isinstance(ranks, RankLayout) else ranks).items():
        result.add(rank, prefix)
    return result


# The maximum of derived elements for a parameter. They are usually a small part of it.
MAX_BYTES = 256 << 20


def _exponentiate(values: NDArray[Any]) -> NDArray[Any]:
    """Return the exponential, by PyTorch if installed: its last bit may differ from NumPy's."""
    try:
        import torch
    except ImportError:
        result: NDArray[Any] = np.exp(values)
        return result
    return np.asarray(torch.exp(torch.from_numpy(np.ascontiguousarray(values))).numpy())


OPERATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "exp": _exponentiate,
    "neg": np.negative,
}


class DerivedElements(DerivedPart):
    """The derived elements of a parameter. They may depend on any range of any file.

    Attributes:
        dtype: the type of the elements.
        regions: the boxes of the parameter, in order, each computed elementwise from a single
            source or filled with a value.
        checkpoint: the sources.
    """

    dtype: DType
    regions: tuple[Computed | Constant, ...]
    checkpoint: Checkpoint

    def expect_computable(self) -> None:
        """Raise MissingExtraError if an element type needs a package that is not installed."""
        for region in self.regions:
            if isinstance(region, Constant):
                # Zeros can be written without the package of a type.
                kinds = [] if region.value == 0 else [self.dtype]
            else:
                casts = [step[3:] for step in region.operations if step.startswith("to ")]
                source = self.checkpoint[region.sources[0]]
                kinds = [self.dtype, source.dtype, *map(as_dtype, casts)]
            for kind in kinds:
                _ = kind.numpy

    def create(self, read: ReadRange) -> Iterator[bytes]:
        """Yield the elements of each region."""
        for region in self.regions:
            yield np.ascontiguousarray(self._compute(region)).tobytes()

    def _compute(self, region: Computed | Constant) -> NDArray[Any]:
        if isinstance(region, Constant):
            return _fill(region.box.shape, region.value, self.dtype)
        from reshard.checkpoint.loading.arrays import read_tensor

        whole = read_tensor(self.checkpoint, region.sources[0]).reshape(-1)
        view = region.view or View.row_major(region.box.shape)
        values = whole[view.positions(region.box.shape)]
        for step in region.operations:
            values = apply_step(values, step)
        return values if values.dtype == self.dtype.numpy else values.astype(self.dtype.numpy)


def _fill(shape: tuple[int, ...], value: float, dtype: DType) -> NDArray[Any]:
    if value == 0 and not np.signbit(value):
        # A positive zero is all zero bits in every type, including types that NumPy does not have.
        return np.zeros(shape, dtype=dtype.storage)
    return np.full(shape, value).astype(dtype.numpy)


def apply_step(values: NDArray[Any], step: str) -> NDArray[Any]:
    """Apply a step, such as `"to float32"` or `"exp"`, to elements.

    >>> apply_step(np.array([0.0, 1.0], np.float32), "neg").tolist()
    [-0.0, -1.0]
    """
    if step.startswith("to "):
        return values.astype(as_dtype(step.removeprefix("to ")).numpy)
    return OPERATIONS[step](values)


def check_steps(label: str, steps: Sequence[str]) -> None:
    """Raise RecipeError for unknown operations."""
    unknown = [step for step in steps if step not in OPERATIONS and not step.startswith("to ")]
    if unknown:
        raise RecipeError(
            f"{label} is computed by {', '.join(steps)}, of which {', '.join(unknown)} is not "
            f"known here (known: a change of type, {', '.join(OPERATIONS)}); let the engine load "
            "the checkpoint as it is"
        )


def load_parameters(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    layout: EngineLayout | str | os.PathLike[str],
    rank: int = 0,
    *,
    names: Iterable[str] | None = None,
    out: Mapping[str, NDArray[Any]] | None = None,
    threads: int | None = None,
    readers_on_host: int = 1,
) -> dict[str, NDArray[Any]]:
    """Return the parameters of a rank of an engine, by the engine's names.

    Only the bytes of these parameters are read. Elements that are cast, constant or computed by a
    known elementwise operation are derived. Parameters that the engine's loader does not fill are
    left out; requesting them by name is an error.

    Args:
        checkpoint: a checkpoint, or its location.
        layout: the layout of the engine, or its file (`reshard recipe derive`).
        rank: the rank.
        names: the names of the parameters; by default all that the loader fills.
        out: existing arrays to fill, with the parameters' shapes and dtypes.
        threads: the number of threads that read at the same time.
        readers_on_host: how many processes of this host load their rank's part at the same time, as
            in `load`.

    Returns:
        Each parameter by its name; parameters that share memory are the same array.

    Raises:
        RecipeError: a layout of another checkpoint, or a parameter that cannot be derived from it.
        UsageError: a rank or a name that the layout lacks, or a parameter that is not filled.
        ShardError: an array in `out` that does not fit, or cannot be written.
        CheckpointError, RunError: a checkpoint or a file that cannot be read.
    """
    if not isinstance(layout, EngineLayout):
        layout = read_layout_file(layout)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    check_sources(layout, checkpoint)
    own = layout.rank(rank)
    if names is None:
        requested = [name for name, parameter in own.parameters.items() if not parameter.unfilled]
    else:
        requested = list(names)
        for name in requested:
            if name not in own.parameters:
                raise UsageError(f"rank {rank} of {layout.engine} has no parameter {name!r}")
            if own.parameters[name].unfilled:
                raise UsageError(
                    f"{layout.engine} does not fill all of {name!r} when it loads: what it holds "
                    "then is the engine's"
                )
    # Parameters that share memory are read once.
    first = {name: group[0] for group in own.tied for name in group}
    parameters = RankParameters(checkpoint)
    for name in dict.fromkeys(first.get(name, name) for name in requested):
        parameters.add_parameter(own.parameters[name], name)
    bound = parameters.bound
    whole = {name: Layout.whole(tensor.shape, [0], 1) for name, tensor in bound.tensors.items()}
    if out is not None:
        # The last of equal keys counts: of tied parameters, the first is filled.
        out = {first.get(name, name): out[name] for name in reversed(requested) if name in out}
    options = LoadOptions(out=out, threads=threads, readers_on_host=readers_on_host)
    arrays = load_layouts(bound, whole, 0, options)
    return {name: arrays[first.get(name, name)] for name in requested}
