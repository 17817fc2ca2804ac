"""Arrays of ranks as a checkpoint: each rank's parts of tensors that a mesh and rules shard.

    rank 0  {"w": [0:2, 0:4]}  \\
    rank 1  {"w": [2:4, 0:4]}   >   "w" is 4 x 4, cut by `tp, -`
    rules   w=tp, -            /

The shapes of whole tensors follow from the shapes of the ranks' parts (`formats.source_sharding`).
The result is a checkpoint whose files are the arrays themselves, without copies. It can be
converted, loaded by other ranks and compared like a checkpoint on disk; a conversion writes it to
disk.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard._records import Record
from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.conversion.plan import find_recipe
from reshard.checkpoint.formats.source_sharding import find_layouts
from reshard.checkpoint.storage.local_files import BufferRegion, FileIdentity, SourceFile
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.rules import Rule, parse_rules
from reshard.sharding import ShardingSpec

if TYPE_CHECKING:
    from reshard.checkpoint.options import RecipeName

Shape = tuple[int, ...]
#: A rank's part of a tensor: an array, its shape, or its dtype and shape.
Held = Any

_FORMAT = "arrays of ranks"


class _HeldPart(Record):
    """A rank's part of a tensor; without an array, its shape only."""

    dtype: DType
    shape: Shape
    array: np.ndarray[Any, Any] | None = None


def describe_ranks(
    ranks: Mapping[int, Mapping[str, Held]],
    mesh: DeviceMesh | str,
    *,
    rules: Iterable[str | Rule] = (),
    recipe: RecipeName | None = None,
    options: Mapping[str, str] | Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    dtype: str = "float32",
) -> Checkpoint:
    """Return the arrays of ranks as a checkpoint, without copying them.

    Args:
        ranks: the arrays of each rank of the mesh, by name: NumPy arrays, PyTorch tensors, shapes,
            or pairs of a type and a shape. A rank that holds no part of a tensor does not name it.
        mesh: the mesh of the ranks.
        rules, recipe, options, allow: the shardings of the tensors, as in a `ConversionRequest`.
        config: config.json of the model, for a recipe's numbers.
        dtype: the type of shapes without a type.

    Returns:
        Every tensor with its whole shape, layout and sharding. It shares the memory of arrays and
        of tensors on the CPU, whose elements a conversion writes and `load` reads; they must not
        change meanwhile. Tensors on other devices are described by their types and shapes alone.

    Raises:
        ShardError: ranks whose parts contradict each other or the rules; the first is named.
        RecipeError: rules or a recipe that do not fit.
        UsageError: a value that is not a mapping of ranks, array or shape.

    >>> mesh = DeviceMesh.of(tp=2)
    >>> found = describe_ranks({0: {"w": (3, 4)}, 1: {"w": (2, 4)}}, mesh, rules=["w=tp, -"])
    >>> found["w"].shape, found["w"].spec
    ((5, 4), 'tp, -')
    """
    if not isinstance(mesh, DeviceMesh):
        mesh = DeviceMesh.parse(str(mesh))
    parts = _read_parts(ranks, mesh, as_dtype(dtype))
    loaded_recipe = find_recipe(recipe, _no_checkpoint(), options)
    parsed = parse_rules(rules)

    first = {name: next(iter(by_rank.values())) for name, by_rank in parts.items()}
    itemsizes = {name: part.dtype.itemsize_bytes for name, part in first.items()}

    def find_specs(shapes: Mapping[str, Shape]) -> dict[str, ShardingSpec]:
        return assign(shapes, mesh, parsed, loaded_recipe, config, itemsizes, allow=allow).specs

    found_layouts = find_layouts(
        {
            name: {rank: part.shape for rank, part in by_rank.items()}
            for name, by_rank in parts.items()
        },
        mesh,
        find_specs,
    )
    return _hold(
        parts,
        {name: layout for name, (_, layout) in found_layouts.items()},
        {name: str(spec) for name, (spec, _) in found_layouts.items()},
        mesh,
    )


def hold_arrays(
    arrays: Mapping[str, tuple[DType, Layout, Mapping[int, np.ndarray[Any, Any]]]],
) -> Checkpoint:
    """Return arrays of known layouts as a checkpoint, without copying them.

    Args:
        arrays: the dtype, the layout, and the part of each rank, by name.

    >>> whole = (as_dtype("int64"), Layout.replicated((2,)), {0: np.arange(2)})
    >>> hold_arrays({"w": whole})["w"].shape
    (2,)
    """
    parts = {
        name: {rank: _HeldPart(dtype, part.shape, part) for rank, part in own.items()}
        for name, (dtype, _, own) in arrays.items()
    }
    return _hold(parts, {name: layout for name, (_, layout, _) in arrays.items()}, {}, None)


def _no_checkpoint() -> Checkpoint:
    """Return a checkpoint without files, in which the recipe `auto` finds no config.json."""
    return Checkpoint(Path(_FORMAT), _FORMAT, {}, ())


def _read_parts(
    ranks: Mapping[int, Mapping[str, Held]], mesh: DeviceMesh, kind: DType
) -> dict[str, dict[int, _HeldPart]]:
    """Parse the arguments into each rank's part of each tensor."""
    if not isinstance(ranks, Mapping) or not all(
        isinstance(own, Mapping) for own in ranks.values()
    ):
        raise UsageError(
            f"ranks of {type(ranks).__name__}; give {{rank: {{name: array or shape}}}}"
        )
    parts: dict[str, dict[int, _HeldPart]] = {}
    for rank, own in ranks.items():
        if rank not in mesh.devices:
            raise UsageError(
                f"rank {rank!r} is none of {mesh.text}, whose ranks are "
                f"{min(mesh.devices)} to {max(mesh.devices)}"
            )
        for name, held in own.items():
            if not isinstance(name, str):
                raise UsageError(f"rank {rank} has a tensor named {name!r}; give a text")
            parts.setdefault(name, {})[rank] = _read_part(rank, name, held, kind)
    missing = [rank for rank in sorted(mesh.devices) if rank not in ranks]
    if missing:
        raise ShardError(
            f"nothing says what rank {missing[0]} of {mesh.text} holds; give an empty dict for a "
            "rank that holds nothing"
        )
    for name, by_rank in parts.items():
        first, part = next(iter(by_rank.items()))
        for rank, other in by_rank.items():
            if other.dtype is not part.dtype or len(other.shape) != len(part.shape):
                raise ShardError(
                    f"{name!r} is {part.dtype.name} {list(part.shape)} on rank {first}, and "
                    f"{other.dtype.name} {list(other.shape)} on rank {rank}; they are not of one "
                    "tensor"
                )
    return parts


def _read_part(rank: int, name: str, held: Held, kind: DType) -> _HeldPart:
    if isinstance(held, np.ndarray):
        return _HeldPart(as_dtype(held.dtype), held.shape, held)
    # Without an import of torch: a program that has a tensor has imported it.
    if type(held).__module__.partition(".")[0] == "torch" and hasattr(held, "layout"):
        return _read_tensor(rank, name, held)
    pair = held
    if isinstance(held, tuple) and len(held) == 2 and isinstance(held[1], tuple | list):
        kind, pair = as_dtype(held[0]), held[1]
    if isinstance(pair, tuple | list) and all(
        isinstance(length, int) and not isinstance(length, bool) and length >= 0 for length in pair
    ):
        return _HeldPart(kind, tuple(pair))
    raise UsageError(
        f"rank {rank} has {held!r} of {name!r}; give a NumPy array or a PyTorch tensor, a shape, "
        "or a type and a shape"
    )


def _read_tensor(rank: int, name: str, held: Any) -> _HeldPart:
    """Return a PyTorch tensor's type and shape, and its memory if NumPy can share it."""
    torch = sys.modules["torch"]
    if hasattr(held, "placements") or held.layout is not torch.strided:
        kind = type(held).__name__ if hasattr(held, "placements") else str(held.layout)
        raise UsageError(
            f"rank {rank} has a tensor of {kind} of {name!r}; give the rank's own dense part, as "
            "tensor.to_local() returns it"
        )
    part = _HeldPart(as_dtype(held.dtype), tuple(held.shape))
    # A FakeTensor lacks memory, also on the CPU.
    if held.device.type != "cpu" or type(held).__name__ == "FakeTensor":
        return part
    own = held.detach().resolve_conj().resolve_neg()
    try:
        array = own.numpy()
    except TypeError:
        # NumPy lacks the type; an integer of the same size has the same bytes.
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        array = own.view(same_size[own.element_size()]).numpy()
    return part.replace(array=array)


def _hold(
    parts: Mapping[str, Mapping[int, _HeldPart]],
    layouts: Mapping[str, Layout],
    specs: Mapping[str, str],
    mesh: DeviceMesh | None,
) -> Checkpoint:
    """Return the checkpoint of these parts, in which each rank's arrays are a file."""
    ranks = (
        {rank for by_rank in parts.values() for rank in by_rank} if mesh is None else mesh.devices
    )
    held: dict[int, list[tuple[int, _HeldPart]]] = {rank: [] for rank in sorted(ranks)}
    sizes = dict.fromkeys(held, 0)
    tensors = {}
    for name, by_rank in parts.items():
        layout, addresses = layouts[name], {}
        for rank, part in by_rank.items():
            if rank in layout.holders:
                addresses[rank] = FileRange(_file_name(rank), sizes[rank])
                held[rank].append((sizes[rank], part))
                sizes[rank] += math.prod(part.shape) * part.dtype.itemsize_bytes
        kind = next(iter(by_rank.values())).dtype
        tensors[name] = StoredTensor(name, kind, Binding(layout, addresses, {}), specs.get(name))
        # Raises CoverageError if the parts leave some of the tensor out.
        _ = tensors[name].assembly
    return Checkpoint(
        Path(_FORMAT),
        _FORMAT,
        tensors,
        tuple(StoredFile(_file_name(rank), size, rank) for rank, size in sizes.items()),
        mesh,
        held={
            _file_name(rank): partial(_open_arrays, rank, rank_parts)
            for rank, rank_parts in held.items()
        },
    )


def _file_name(rank: int) -> str:
    return f"rank {rank}"


def _open_arrays(rank: int, parts: list[tuple[int, _HeldPart]]) -> SourceFile:
    """Return the concatenated arrays of a rank as a file, or raise ShardError for shapes alone."""
    for _, part in parts:
        if part.array is None:
            raise ShardError(
                f"rank {rank} was described by shapes alone, such as {list(part.shape)}: there are "
                "no elements to read; give arrays"
            )
    return _ArraySource(rank, parts)


class _ArraySource(SourceFile):
    """A source file whose bytes are those of arrays in memory."""

    def __init__(self, rank: int, parts: list[tuple[int, _HeldPart]]) -> None:
        self.path = Path(_FORMAT) / _file_name(rank)
        self._starts = [start for start, _ in parts]
        # Contiguous arrays are not copied.
        self._bytes = [
            np.ascontiguousarray(part.array).reshape(-1).view(np.uint8) for _, part in parts
        ]
        size = self._starts[-1] + len(self._bytes[-1]) if parts else 0
        # The identity is only valid in this process: another run has other arrays.
        self.identity = FileIdentity(self.path.name, size, 0, id(parts))
        self._counter = threading.Lock()
        self._read_bytes = 0

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Fill the whole of `region` with the bytes from `offset_bytes` on."""
        memory = region.memory if isinstance(region, BufferRegion) else region
        view = np.frombuffer(memory.cast("B"), dtype=np.uint8)
        at = offset_bytes
        number = int(np.searchsorted(self._starts, offset_bytes, side="right")) - 1
        while at < offset_bytes + len(view) and number < len(self._bytes):
            begin = at - self._starts[number]
            piece = self._bytes[number][begin : offset_bytes + len(view) - self._starts[number]]
            view[at - offset_bytes : at - offset_bytes + len(piece)] = piece
            at += len(piece)
            number += 1
        with self._counter:
            self._read_bytes += len(view)

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """Fill `memory` with consecutive ranges of `size_bytes` each."""
        for number, offset in enumerate(offsets):
            self.read_into(memory[number * size_bytes : (number + 1) * size_bytes], offset)

    def check_unchanged(self) -> None:
        """Do nothing: the caller must not change the arrays."""

    def close(self) -> None:
        """Do nothing: the arrays are the caller's."""
