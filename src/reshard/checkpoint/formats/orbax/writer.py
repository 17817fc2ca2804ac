"""Planning the files of a new Orbax checkpoint.

1. Every tensor is stored in a regular grid of chunks: its target layout, if it is regular.
   Chunks at the end of a dimension have the length of the others, filled with zeros.
2. Irregular shards (uneven, interleaved) are stored in a grid whose boundaries include the
   boundaries of the shards. A dimension that would need many chunks is not divided.
3. A rank's chunks are consecutive in its file. They are not compressed, so that a chunk is a range
   of a file.
4. The database, the tree and the shardings are written last.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredFile, StoredTensor
from reshard.checkpoint.formats.orbax import FORMAT_NAME, METADATA_NAME, ZARR2_NAME, tree
from reshard.checkpoint.formats.orbax.ocdbt import StoredValue, encode_database
from reshard.checkpoint.formats.orbax.optax_states import is_count, place_states
from reshard.checkpoint.formats.orbax.reader import NARROW_TYPES, RANDOM_KEYS
from reshard.checkpoint.formats.orbax.shardings import (
    SHARDING_NAME,
    find_owners,
    sharding_bytes,
)
from reshard.checkpoint.formats.orbax.zarr import array_bytes, is_narrow, name_type
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    NewFile,
    PlannedTensor,
    WritePlan,
    are_boxes,
    check_values,
    find_storing_ranks,
)
from reshard.checkpoint.storage.local_files import PAGE_BYTES
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.runs import OWNED, PAD, RunTable

# The limit of chunks for each part of an irregularly sharded dimension.
_MAX_CHUNKS_A_PART = 8

# Smaller chunks are not aligned.
_MIN_ALIGNED_BYTES = 16 << 10
# Zarr's types are NumPy's and those of `ml_dtypes`, which have neither.
_MISSING_TYPES = ("complex32", "float8_e4m3")
# Values of these types are stored as NumPy's arrays, since JAX would cast its own.
_WIDE_TYPES = ("int64", "uint64", "float64", "complex128")
_NUMBERS = {bool: "bool", int: "int64", float: "float64"}


def plan_files(new: NewCheckpoint) -> WritePlan:
    """Plan a file of chunks for each rank.

    Raises:
        RecipeError: a partial layout.
        UsageError: a tensor without elements, or of a dtype that Zarr does not have; names of
            equal paths.
    """
    check_values(new.tensors)
    for name, tensor in new.tensors.items():
        _check_tensor(name, tensor)
    values, paths = _take_values(new)
    tensors = _merge_step_counts(new.tensors, paths)
    storing = find_storing_ranks(tensors, "once")
    ends: dict[int, int] = {}
    stored: dict[str, StoredTensor] = {}

    for name, tensor in tensors.items():
        chunk, layout, is_own = _find_grid(tensor.layout, storing[name])
        size = math.prod(chunk) * tensor.dtype.itemsize_bytes
        addresses: dict[int, FileRange | tuple[FileRange, ...]] = {}
        for slot in sorted(storing[name]) if is_own else layout.holders:
            ranges = []
            for _ in layout.cells_of(slot):
                start = ends.get(slot, 0)
                if size >= _MIN_ALIGNED_BYTES:
                    start = -(-start // PAGE_BYTES) * PAGE_BYTES
                ranges.append(FileRange(name_data_file(slot), start))
                ends[slot] = start + size
            if ranges:
                addresses[slot] = ranges[0] if len(ranges) == 1 else tuple(ranges)
        binding = Binding(layout, addresses, {})
        spec = tensor.spec if is_own else None
        stored[name] = StoredTensor(name, tensor.dtype, binding, spec)
    files = [
        NewFile(StoredFile(name_data_file(slot), end, slot)) for slot, end in sorted(ends.items())
    ]
    return WritePlan(
        FORMAT_NAME,
        new.mesh,
        stored,
        tuple(files),
        paths=paths,
        attributes=new.attributes,
        values=values,
    )


def name_data_file(rank: int) -> str:
    """Return the name of the file of a rank's chunks: as in OCDBT, 32 unique digits.

    >>> name_data_file(1)
    'ocdbt.process_1/d/099094bd7fb48367c884be3c6d70e132'
    """
    digits = hashlib.blake2b(f"rank {rank}".encode(), digest_size=16).hexdigest()
    return f"ocdbt.process_{rank}/d/{digits}"


def _check_tensor(name: str, tensor: PlannedTensor) -> None:
    if not math.prod(tensor.layout.shape):
        raise UsageError(
            f"tensor {name!r} of shape {list(tensor.layout.shape)} has no elements, and Orbax has "
            "no such arrays; leave it out"
        )
    if tensor.dtype.name in _MISSING_TYPES:
        raise UsageError(
            f"tensor {name!r} is of {tensor.dtype.name}, a type that Zarr does not have; cast it"
        )


def _take_values(new: NewCheckpoint) -> tuple[dict[str, Any], dict[str, tree.TreePath]]:
    """Return the plain values that Orbax can store, and the paths of tensors and values."""
    placed, empty = place_states(new.tensors, new.values, new.paths)
    paths = {name: placed[name] for name in new.tensors}
    values: dict[str, Any] = {}
    for path in empty:
        name = ".".join(map(str, path))
        if name not in new.values:
            values[name], paths[name] = None, path
    for name, value in new.values.items():
        path = placed[name]
        leaves = tree.flatten(path, value)
        if all(tree.kind_of(inner) is not None for _, inner in leaves) and all(
            isinstance(key, str | int) for leaf, _ in leaves for key in leaf
        ):
            values[name] = value
            paths[name] = path
    return values, paths


def _merge_step_counts(
    tensors: Mapping[str, PlannedTensor], paths: Mapping[str, tree.TreePath]
) -> dict[str, PlannedTensor]:
    """Keep a single step count of the parameters, whose step counts share a path.

    Raises UsageError for other names that share a path, or whose path is inside another's.
    """
    remaining = dict(tensors)
    by_path: dict[tuple[str, ...], str] = {}
    for name, path in paths.items():
        key = tuple(map(str, path))
        if key in by_path and is_count(path):
            remaining.pop(name, None)
            continue
        if key in by_path:
            raise UsageError(
                f"{name!r} and {by_path[key]!r} both have the path {'.'.join(key)!r} in the tree; "
                "rename one of them"
            )
        by_path[key] = name
    for key, name in by_path.items():
        for size in range(1, len(key)):
            outer = by_path.get(key[:size])
            if outer is not None:
                raise UsageError(
                    f"{outer!r} has a path in the tree that {name!r} extends; rename one of them"
                )
    return remaining


@lru_cache(maxsize=4096)
def _find_grid(layout: Layout, storing: frozenset[int]) -> tuple[tuple[int, ...], Layout, bool]:
    """Return the shape of the chunks of a tensor, their layout, and whether it is the tensor's."""
    chunk = tuple(_find_step(table) for table in layout.tables)
    counts = [-(-n // step) for n, step in zip(layout.shape, chunk, strict=True)]
    if are_boxes(layout, storing):
        shapes = {box.shape for slot in storing for box in layout.boxes(slot)}
        if shapes == {chunk} and len(storing) == math.prod(counts):
            return chunk, layout, True
    owners = [(box, slot) for slot in sorted(storing) for box in layout.boxes(slot)]
    tables = [_make_table(n, step) for n, step in zip(layout.shape, chunk, strict=True)]
    parts = np.indices(counts).reshape(len(counts), -1).T if counts else np.zeros((1, 0), int)
    starts = map(tuple, (parts * np.array(chunk, dtype=np.int64)).tolist())
    slots = find_owners(starts, owners, min(storing))
    return chunk, Layout(layout.shape, tables, layout.slots, slots, parts), False


def _find_step(table: RunTable) -> int:
    """Return the length of chunks along a dimension whose boundaries include those of shards."""
    length = table.dimension_length
    edges = set()
    for part in range(table.parts):
        for start, stop, _, role in table.runs_of(part):
            if role == OWNED and stop > start:
                edges |= {start, stop}
    inner = edges - {0, length}
    if not inner:
        return length
    step = math.gcd(*inner)
    return step if -(-length // step) <= _MAX_CHUNKS_A_PART * table.parts else length


def _make_table(length: int, step: int) -> RunTable:
    """Return equal chunks of a dimension, the last padded."""
    rows: list[tuple[int, ...]] = []
    for part, start in enumerate(range(0, length, step)):
        held = min(step, length - start)
        rows.append((part, start, held, 0))
        if held < step:
            rows.append((part, start, step - held, held, 1, 0, 0, PAD))
    return RunTable(length, -(-length // step), rows)


def list_final_files(write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
    """Yield the files that are written after the chunks: database, tree, texts and shardings."""
    pairs: list[tuple[bytes, StoredValue]] = []

    def put(key: str, content: bytes) -> None:
        pairs.append((key.encode(), StoredValue(len(content), content=content)))

    leaves: list[tuple[tree.Leaf, tuple[int, ...] | None]] = []
    is_cut = write_plan.mesh is not None
    narrow = write_plan.attributes.get(NARROW_TYPES)
    narrow = narrow if isinstance(narrow, Mapping) else {}
    for name, tensor in write_plan.tensors.items():
        # By default JAX lacks dtypes of 64 bits: its arrays would be cast.
        is_array = is_cut and tensor.dtype.name not in _WIDE_TYPES
        leaf = tree.Leaf(write_plan.paths[name], tree.ARRAY if is_array else tree.NUMPY)
        layout = tensor.layout
        chunk = tuple(layout.cell_shape[0].tolist())
        size = math.prod(chunk) * tensor.dtype.itemsize_bytes
        leaves.append((leaf, chunk if is_array else None))
        kind = name_type(tensor.dtype)
        if tensor.dtype.name == "uint8" and is_narrow(str(narrow.get(name))):
            kind = narrow[name]
        put(f"{leaf.name}/{ZARR2_NAME}", array_bytes(kind, layout.shape, chunk))
        for slot in tensor.stored_slots:
            for number, box in enumerate(_list_boxes(tensor, slot)):
                place = tensor.file_range(slot, number)
                at = ".".join(str(a // b) for a, b in zip(box, chunk, strict=True)) or "0"
                data = StoredValue(size, FileRange(place.path, place.start_bytes))
                pairs.append((f"{leaf.name}/{at}".encode(), data))
    strings: dict[str, str] = {}
    for name, value in write_plan.values.items():
        for path, part in tree.flatten(write_plan.paths[name], value):
            leaf = tree.Leaf(path, tree.kind_of(part) or "None")
            leaves.append((leaf, None))
            if leaf.kind == tree.STRING:
                strings[leaf.name] = part
            elif leaf.kind == tree.SCALAR:
                scalar = np.array(part, _NUMBERS[type(part)])
                put(f"{leaf.name}/{ZARR2_NAME}", array_bytes(scalar.dtype.str, (), ()))
                put(f"{leaf.name}/0", scalar.tobytes())
    identity = hashlib.blake2b(
        repr([(name, t.layout.fingerprint) for name, t in write_plan.tensors.items()]).encode(),
        digest_size=16,
    )
    # A node of a B+tree has its keys in order.
    if pairs:
        yield from encode_database(sorted(pairs), f"d/{identity.hexdigest()}", identity.digest())
    custom = {
        key: value
        for key, value in write_plan.attributes.items()
        if key not in (RANDOM_KEYS, NARROW_TYPES)
    }
    yield METADATA_NAME, tree.tree_bytes(leaves, _as_json(custom) or None)
    if strings:
        yield tree.STRINGS_NAME, tree.strings_bytes(strings)
    specs = {
        ".".join(map(str, write_plan.paths[name])): tensor.spec
        for name, tensor in write_plan.tensors.items()
    }
    yield SHARDING_NAME, sharding_bytes(write_plan.mesh, specs)
    keys = write_plan.attributes.get(RANDOM_KEYS)
    if isinstance(keys, Mapping) and keys:
        yield "array_metadatas/process_0", _describe_keys(write_plan, keys)


def _list_boxes(tensor: StoredTensor, slot: int) -> Iterator[tuple[int, ...]]:
    """Yield the start of each chunk of a rank, in the order of its cells."""
    layout = tensor.layout
    for cell in layout.cells_of(slot):
        parts = layout.cell_part[cell].tolist()
        yield tuple(
            int(table.runs_of(part)[0][0]) for table, part in zip(layout.tables, parts, strict=True)
        )


def _as_json(value: Any) -> Any:
    """Convert plain values to JSON values. Raises UsageError for other values."""
    try:
        return json.loads(json.dumps(value, default=list))
    except (TypeError, ValueError):
        raise UsageError(
            f"the attributes {str(value)[:200]} of the source cannot be stored in Orbax's "
            "custom_metadata, which is JSON; leave them out"
        ) from None


def _describe_keys(write_plan: WritePlan, keys: Mapping[str, Any]) -> bytes:
    """Return Orbax's metadata of arrays, which mark keys of random numbers."""
    entries = []
    for name, tensor in write_plan.tensors.items():
        chunk = tensor.layout.cell_shape[0].tolist()
        leaf = ".".join(map(str, write_plan.paths[name]))
        kind = {"random_key_impl": keys[name]} if name in keys else None
        described = {
            "param_name": leaf,
            "write_shape": chunk,
            "chunk_shape": chunk,
            "ext_metadata": kind,
        }
        entries.append({"array_metadata": described})
    return json.dumps({"array_metadatas": entries}).encode()
