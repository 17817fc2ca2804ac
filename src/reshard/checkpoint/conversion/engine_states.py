"""Engine layouts in conversions: from a model's tensors to an engine's ranks, and back.

`shard_by_engine` gives each rank of the target the parts that the engine's rank reads; tensors keep
their names and shapes. A part that no rank reads is stored by rank 0.

`as_model` reads a layout the other way: from the parameters of an engine's ranks to the model's own
tensors. The layout specifies the source region that each part of a parameter is copied from, so a
source tensor is a set of boxes in the ranks' files::

    gate_up_proj, rank 1 of 2            up_proj
    0:2   gate_proj, rows 2:4
    2:4   up_proj, rows 2:4     ---->    rows 2:4: rows 2:4 of rank 1's gate_up_proj

1. A region of a parameter corresponds to a box of its source; if it takes every second index of a
   dimension, to a box for each index.
2. A part that several ranks hold is read from the first of these ranks. If no rank holds a part,
   the tensor is incomplete and refused.
3. A computed part is not a copy of its source; it is refused by name. A parameter whose shape or
   type is not as the loader filled it, since it was repacked for a kernel, is refused too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.blocks.fusing import MAX_BOXES
from reshard.checkpoint.contents import Checkpoint, StoredTensor, missing_box
from reshard.checkpoint.formats.vllm_sharded_state import NAME, rank_prefix
from reshard.errors import CoverageError, RecipeError
from reshard.geometry.regions import Region, bind_regions
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts.source_layouts import find_steps
from reshard.text import count_text

if TYPE_CHECKING:
    from reshard.recipes.engine_layouts import EngineLayout, RankLayout, SourcePiece, SourceTensor

#: The file with the layout of the ranks, in a state that reshard wrote.
LAYOUT_NAME = "reshard.engine-layout.json"


# The parts of a source that ranks hold: from each box to the rank and the region of its file.
_Parts = dict[Box, tuple[int, Region]]


def find_layout(checkpoint: Checkpoint) -> EngineLayout | None:
    """Return the layout that reshard wrote with a state of an engine's ranks, or None."""
    path: Path = checkpoint.folder / LAYOUT_NAME
    if not path.is_file():
        return None
    from reshard.recipes.engine_layouts.document import read_layout_file

    return read_layout_file(path)


def as_model(checkpoint: Checkpoint, layout: EngineLayout) -> Checkpoint:
    """Return the model's own tensors, bound to the files of the ranks' parameters.

    Args:
        checkpoint: the state of an engine's ranks, of the format `vllm-sharded-state`.
        layout: the layout of these ranks.

    Raises:
        RecipeError: a layout of other ranks; parameters that are not copies.
        CoverageError: a tensor that the ranks hold only in part.
    """
    if checkpoint.format != NAME:
        raise RecipeError(
            f"a layout of ranks for {checkpoint.folder}, which is of the format "
            f"{checkpoint.format}; it is for what an engine's ranks hold ({NAME})"
        )
    sizes = dict(zip(layout.mesh.axis_names, layout.mesh.shape, strict=True))
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    prefixes = {rank.rank: f"{rank_prefix(rank.rank, tp, pp)}/" for rank in layout.ranks}
    there = {name.partition("/")[0] for name in checkpoint.tensors}
    expected = {prefix.rstrip("/") for prefix in prefixes.values()}
    if there != expected:
        raise RecipeError(
            f"the layout is for {layout.mesh.text}, {count_text(len(expected), 'rank')}; "
            f"{checkpoint.folder} has the files of {', '.join(sorted(there))}"
        )
    sources: dict[str, _Parts] = {name: {} for name in layout.sources}
    computed: dict[str, str] = {}
    used: set[str] = set()
    for rank in layout.ranks:
        stored = _find_parameters(checkpoint, rank, prefixes[rank.rank])
        used |= {tensor.name for tensor in stored.values()}
        _add_rank(rank, stored, layout.sources, sources, computed)
    tensors: dict[str, StoredTensor] = {}
    missing: list[str] = []
    for name, parts in sources.items():
        if not parts:
            if name in computed:
                raise _explain_computed(name, computed[name])
            missing.append(name)
            continue
        tensors[name] = _bind(name, layout, parts, computed)
    notes = list(checkpoint.notes)
    if missing:
        notes.append(
            f"{count_text(len(missing), 'tensor')} of the model are on no rank, so they are not in "
            f"the target (first: {missing[0]})"
        )
    others = [name for name in checkpoint.tensors if name not in used]
    if others:
        notes.append(
            f"{count_text(len(others), 'tensor')} of the ranks are none that their loader fills, "
            f"and are left out (first: {others[0]})"
        )
    return checkpoint.replace(
        tensors=tensors,
        carried=tuple(name for name in checkpoint.carried if name != LAYOUT_NAME),
        checksums=(),
        notes=tuple(notes),
    )


def _find_parameters(
    checkpoint: Checkpoint, rank: RankLayout, prefix: str
) -> dict[str, StoredTensor]:
    """Return a rank's parameters in the state; tied parameters are stored under a single name."""
    tied = {name: group for group in rank.tied for name in group}
    parameters: dict[str, StoredTensor] = {}
    for name, parameter in rank.parameters.items():
        names = (name, *sorted(tied.get(name, ())))
        stored = next(
            (checkpoint.tensors[prefix + name] for name in names if prefix + name in checkpoint),
            None,
        )
        if stored is None:
            raise RecipeError(
                f"{checkpoint.folder} has no {prefix + name!r}, which the layout's rank "
                f"{rank.rank} holds. Either the engine has put it into the form of a kernel after "
                "loading, and it cannot be taken apart again, or the layout is of another model; "
                "then derive it again"
            )
        if (stored.shape, stored.dtype) != (parameter.shape, parameter.dtype):
            raise RecipeError(
                f"{stored.name!r} is {stored.dtype.name} {list(stored.shape)}, and the loader "
                f"fills {parameter.dtype.name} {list(parameter.shape)}: it was changed after "
                "loading, as weights are for the kernels of quantised ones, and cannot be taken "
                "apart again"
            )
        parameters[name] = stored
    return parameters


def _add_rank(
    rank: RankLayout,
    stored: Mapping[str, StoredTensor],
    source_tensors: Mapping[str, SourceTensor],
    sources: Mapping[str, _Parts],
    computed: dict[str, str],
) -> None:
    """Add the parts of the sources from which a rank's parameters are copied."""
    for name, parameter in rank.parameters.items():
        tensor = stored[name]
        (slot,) = tensor.stored_slots
        place, itemsize = tensor.file_range(slot), tensor.dtype.itemsize_bytes
        whole = Region.dense(tensor.shape, place.path, place.start_bytes, itemsize)
        for part in parameter.computed:
            how = f"{name!r} is made of it by {', '.join(part.operations)}"
            computed |= {source: how for source in part.sources if source not in computed}
        for piece in parameter.pieces:
            changes = [step for step in piece.steps if not step.startswith("bits as ")]
            source = source_tensors[piece.source]
            if changes:
                computed.setdefault(piece.source, f"{name!r} is made of it by {', '.join(changes)}")
            elif source.dtype.itemsize_bytes != parameter.dtype.itemsize_bytes:
                computed.setdefault(piece.source, f"{name!r} has its bits in other elements")
            else:
                for region in _list_regions(name, piece, source.shape, whole):
                    # If several ranks hold a copy, the first rank's is read.
                    sources[piece.source].setdefault(region.box, (rank.rank, region))


def _list_regions(
    name: str, piece: SourcePiece, shape: tuple[int, ...], parameter: Region
) -> Iterator[Region]:
    """Yield the regions of a source, of the given shape, that a piece of a parameter stores."""
    own = parameter.intersect(*piece.box)
    if own is None:
        return
    sizes = piece.box.shape
    found = find_steps(shape, sizes, piece.view.offset, piece.view.strides)
    first, steps = found or ([], [None] * len(sizes))
    if any(step is None and size > 1 for step, size in zip(steps, sizes, strict=True)):
        raise RecipeError(
            f"{name!r} takes elements of {piece.source!r} across its dimensions; that is not taken "
            "apart here"
        )
    # For each dimension of the source: the number of indices, their step in the source, and their
    # stride in the parameter.
    along = {
        step[0]: (size, step[1], apart)
        for step, size, apart in zip(steps, sizes, parameter.strides, strict=True)
        if step is not None
    }
    # Dimensions with a step over 1 are looped over index by index.
    single = [d for d, (_, by, _) in along.items() if by > 1]
    if math.prod(along[d][0] for d in single) > MAX_BOXES:
        raise RecipeError(f"{name!r} takes {piece.source!r} in more than {MAX_BOXES} pieces")
    for indices in itertools.product(*(range(along[d][0]) for d in single)):
        start, stop, strides = list(first), [a + 1 for a in first], [0] * len(shape)
        offset = own.offset
        for d, index in zip(single, indices, strict=True):
            _, by, apart = along[d]
            start[d] += index * by
            stop[d] = start[d] + 1
            offset += index * apart
        for d, (size, by, apart) in along.items():
            if by == 1:
                stop[d] = start[d] + size
                strides[d] = apart
        yield Region(tuple(start), tuple(stop), own.container, offset, tuple(strides))


def _bind(
    name: str, layout: EngineLayout, parts_by_box: _Parts, computed: Mapping[str, str]
) -> StoredTensor:
    """Return a tensor of the model. Raises if the ranks do not hold all of it."""
    source = layout.sources[name]
    parts = sorted(parts_by_box.values(), key=lambda part: part[0])
    slots = max(layout.mesh.devices) + 1
    binding = bind_regions(source.shape, parts, slots, source.dtype.itemsize_bytes)
    tensor = StoredTensor(name, source.dtype, binding)
    try:
        _ = tensor.assembly
    except CoverageError:
        if name in computed:
            raise _explain_computed(name, computed[name]) from None
        raise
    return tensor


def _explain_computed(name: str, how: str) -> RecipeError:
    return RecipeError(
        f"{name!r} is not in what the ranks hold: {how}, which is not undone; take it from the "
        "model's own checkpoint"
    )


def shard_by_engine(
    checkpoint: Checkpoint, engine: EngineLayout
) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """Return the layout of every tensor over the engine's ranks, and notes for the user.

    Raises:
        RecipeError: a layout of another checkpoint, whose names or shapes differ.
    """
    check_sources(checkpoint, engine)
    layouts = engine.source_layouts()
    slots = max(engine.mesh.devices) + 1
    complete_layouts: dict[str, Layout] = {}
    whole: list[str] = []
    completed: dict[Layout, Layout | None] = {}
    for name, tensor in checkpoint.tensors.items():
        layout = layouts[name]
        if layout not in completed:
            is_there = missing_box(layout) is None
            completed[layout] = layout if is_there else None
        complete = completed[layout]
        if complete is None:
            whole.append(name)
            holders = sorted({0, *layout.holders})
            complete = Layout.whole(tensor.shape, holders, slots)
        complete_layouts[name] = complete
    notes = []
    if whole:
        notes.append(
            f"{len(whole)} tensors (first: {whole[0]}) are not, or not wholly, read by "
            f"{engine.engine}: they are whole, on rank 0 and on the ranks that read some of them"
        )
    return complete_layouts, tuple(notes)


def check_sources(checkpoint: Checkpoint, engine: EngineLayout) -> None:
    """Raise RecipeError if an engine's layout belongs to another checkpoint."""
    described = f"the layout of {engine.engine} {engine.version} for {engine.mesh.text}"
    missing = [name for name in checkpoint.tensors if name not in engine.sources]
    if missing:
        raise RecipeError(
            f"{len(missing)} tensors of {checkpoint.folder} (first: {missing[0]!r}) are not in "
            f"{described}; derive it from this checkpoint"
        )
    absent = [name for name in engine.sources if name not in checkpoint.tensors]
    if absent:
        raise RecipeError(
            f"{described} has {len(absent)} tensors (first: {absent[0]!r}) that are missing from "
            f"{checkpoint.folder}; derive it from this checkpoint"
        )
    for name, tensor in checkpoint.tensors.items():
        shape = engine.sources[name].shape
        if shape != tensor.shape:
            raise RecipeError(
                f"{name!r} has shape {list(tensor.shape)} in {checkpoint.folder}, and "
                f"{list(shape)} in {described}; derive it from this checkpoint"
            )
