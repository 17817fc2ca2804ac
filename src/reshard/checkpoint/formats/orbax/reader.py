"""Opening Orbax checkpoints: arrays as tensors whose shards are chunks, and plain values.

1. Read the tree (`tree`).
2. Open the key-value store (`ocdbt`).
3. Read the description of each array, and bind each chunk to its bytes (`zarr`). It is a shard of
   the rank whose part it was in JAX (`shardings`).
4. Name the optimizer states of Optax as training state (`optax_states`).
5. Collect numbers, text, None and empty nodes as plain values; a sequence of these is a value.

Neither Orbax nor JAX nor TensorStore is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats.orbax import (
    AGGREGATE_NAME,
    FORMAT_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    ZARR2_NAME,
    ZARR3_NAME,
    is_aggregate,
    tree,
)
from reshard.checkpoint.formats.orbax.ocdbt import (
    MAX_READ_BYTES,
    KeyValues,
    StoredValue,
    open_key_values,
)
from reshard.checkpoint.formats.orbax.optax_states import name_states
from reshard.checkpoint.formats.orbax.shardings import (
    extend,
    find_mesh,
    find_owners,
    read_shardings,
)
from reshard.checkpoint.formats.orbax.zarr import (
    ArrayMetadata,
    is_narrow,
    list_chunks,
    read_array,
    read_scalar,
)
from reshard.checkpoint.storage.derived_files import DerivedFiles
from reshard.checkpoint.storage.filesystem import read_json_object
from reshard.errors import CheckpointError, CoverageError, FormatError, UnreadableTensorError
from reshard.layout import Box, Layout
from reshard.sharding import ShardingSpec
from reshard.text import count_text

# Attributes of this format: arrays that are keys of random numbers, and arrays of narrow dtypes.
RANDOM_KEYS, NARROW_TYPES = "random_keys", "narrow_types"
_PROCESS = re.compile(r"ocdbt\.process_(\d{1,6})/")
# The kind of an array that an older save has outside of its single file is not recorded.
_UNKNOWN_KIND = "Unknown"
_ARRAY_KINDS = (tree.ARRAY, tree.NUMPY, _UNKNOWN_KIND)


def read(folder: Path, notes: tuple[str, ...] = ()) -> Checkpoint:
    """Describe the checkpoint in the folder of a tree, with notes for the user.

    Raises:
        CheckpointError: a file that is missing.
        FormatError: a file that is damaged.
        CoverageError: a chunk that is missing.
    """
    has_metadata = (folder / METADATA_NAME).is_file()
    metadata = tree.read_tree(folder) if has_metadata else tree.TreeMetadata({}, has_all=False)
    values = open_key_values(folder)
    shardings = read_shardings(folder)
    mesh = find_mesh(shardings)
    tensors: dict[str, StoredTensor] = {}
    paths: dict[str, tree.TreePath] = {}
    plain: dict[tree.TreePath, Any] = {}
    # Chunks that are in no file are unpacked as parts of this file.
    anchor = MANIFEST_NAME if values.is_database else AGGREGATE_NAME
    if has_metadata:
        anchor = METADATA_NAME
    packed = DerivedFiles()
    narrow: dict[str, str] = {}
    unread: list[tuple[str, str]] = []
    unreadable: dict[str, str] = {}
    aggregate = is_aggregate(folder)
    if aggregate:
        metadata, whole = _add_aggregate(folder, metadata, plain, unreadable)
        for leaf_path, packed_array in whole.items():
            name = ".".join(map(str, leaf_path))
            tensors[name], paths[name] = _bind_whole(name, packed_array), leaf_path
    leaves = metadata.leaves
    names = name_states(leaf.path for leaf in leaves.values() if leaf.kind in _ARRAY_KINDS)
    texts = tree.read_strings(folder, [n for n in leaves.values() if n.kind == tree.STRING])
    for name, leaf in leaves.items():
        if leaf.is_empty:
            plain[leaf.path] = leaf.empty_value
        elif leaf.kind == tree.STRING:
            plain[leaf.path] = texts[name]
        elif leaf.kind not in (tree.SCALAR, *_ARRAY_KINDS):
            unread.append((name, f"a leaf of the kind {leaf.kind[:60]}, which is not known here"))
        else:
            try:
                array, label = _find_array(values, name)
            except UnreadableTensorError as error:
                unreadable |= dict.fromkeys(names.get(leaf.path, (name,)), str(error))
                continue
            if leaf.kind == tree.SCALAR:
                plain[leaf.path] = _read_number(values, name, array, label)
                continue
            chunks = list(
                list_chunks(name, array, values, packed, anchor, has_all=metadata.has_all)
            )
            sharding = shardings.get(name) if mesh is not None else None
            tensor = _bind(leaf, array, chunks, sharding)
            for state in names[leaf.path]:
                tensors[state] = tensor.replace(name=state)
                paths[state] = leaf.path
                if is_narrow(array.stored_type):
                    narrow[state] = array.stored_type
    joined = tree.join_sequences(plain, paths.values())
    for path in joined:
        paths[".".join(map(str, path))] = path
    attributes = dict(metadata.custom) if isinstance(metadata.custom, dict) else {}
    keys = _find_random_keys(folder)
    if keys:
        attributes[RANDOM_KEYS] = keys
    if narrow:
        attributes[NARROW_TYPES] = narrow
        first, kind = next(iter(narrow.items()))
        note = (
            f"{count_text(len(narrow), 'tensor')} of less than a byte an element, which Orbax "
            f"stores in the lower bits of bytes, read as uint8 (first: {first}, {kind})"
        )
        notes = (*notes, note)
    used = {
        place.path.removesuffix("/unpacked")
        for tensor in tensors.values()
        for places in tensor.binding.addresses.values()
        for place in (places if isinstance(places, tuple) else (places,))
        if isinstance(place, FileRange)
    }
    sizes = dict(values.sizes)
    if aggregate:
        sizes[AGGREGATE_NAME] = (folder / AGGREGATE_NAME).stat().st_size
    files = tuple(
        StoredFile(name, size, int(match[1]) if (match := _PROCESS.match(name)) else 0)
        for name, size in sorted(sizes.items())
        if name in used
    )
    return Checkpoint(
        folder,
        FORMAT_NAME,
        tensors,
        files,
        mesh=mesh,
        paths=paths,
        derived=packed.files,
        attributes=attributes,
        values={".".join(map(str, path)): value for path, value in joined.items()},
        unread=tuple(unread),
        unreadable=unreadable,
        notes=notes,
    )


def _add_aggregate(
    folder: Path,
    metadata: tree.TreeMetadata,
    plain: dict[tree.TreePath, Any],
    unreadable: dict[str, str],
) -> tuple[tree.TreeMetadata, dict[tree.TreePath, tree.PackedArray]]:
    """Add the contents of the single file of an older save; plain values are added to `plain`.

    Returns:
        The tree with its leaves, and the arrays that are stored in the file.
    """
    leaves = dict(metadata.leaves)
    whole: dict[tree.TreePath, tree.PackedArray] = {}
    for path, value in tree.read_aggregate(folder / AGGREGATE_NAME):
        name = ".".join(map(str, path))
        if isinstance(value, str) and value.startswith(tree.PLACEHOLDER):
            leaves.setdefault(name, tree.Leaf(path, _UNKNOWN_KIND))
            continue
        leaves.pop(name, None)
        if isinstance(value, UnreadableTensorError):
            unreadable[name] = str(value)
        elif isinstance(value, tree.PackedArray):
            whole[path] = value
        else:
            plain[path] = value
    return metadata.replace(leaves=leaves), whole


def _bind_whole(name: str, array: tree.PackedArray) -> StoredTensor:
    """Return a tensor that is stored whole in the single file of an older save."""
    place = FileRange(AGGREGATE_NAME, array.start_bytes)
    binding = Binding(Layout.whole(array.shape, [0], 1), {0: place}, {})
    return StoredTensor(name, array.dtype, binding)


def _find_array(values: KeyValues, name: str) -> tuple[ArrayMetadata, str]:
    """Read the description of an array, of either version of Zarr."""
    for metadata in (ZARR2_NAME, ZARR3_NAME):
        description = values.find(f"{name}/{metadata}")
        if description is not None:
            label = f"{values.folder / name / metadata}"
            if description.size_bytes > MAX_READ_BYTES:
                raise FormatError(f"{label} has {description.size_bytes} bytes; it is damaged")
            return read_array(description.read(values.folder), label), label
    where = "the database" if values.is_database else "the folder"
    raise CheckpointError(
        f"{values.folder}: the array {name!r} is not in {where} ({name}/{ZARR2_NAME}); the "
        "checkpoint was not written completely"
    )


def _read_number(values: KeyValues, name: str, array: ArrayMetadata, label: str) -> Any:
    """Read an array without dimensions as a Python number."""
    if array.shape:
        raise FormatError(f"{label} has the shape {list(array.shape)}, expected a number")
    key, _ = next(array.list_keys())
    stored: StoredValue | None = values.find(f"{name}/{key}")
    if stored is None:
        raise CoverageError(f"{values.folder / name / key} is missing, which is a number")
    if stored.size_bytes > MAX_READ_BYTES:
        raise FormatError(f"{label} has {stored.size_bytes} bytes for one number; it is damaged")
    content = read_scalar(stored, array, str(values.folder / name / key), values.folder)
    kind = array.dtype.name
    if kind == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return float(np.frombuffer(b"\0\0" + content, np.float32)[0])
    try:
        return np.frombuffer(content, np.dtype(kind))[0].item()
    except TypeError:
        raise CheckpointError(f"{label} is a number of the type {kind}, not known here") from None


def _bind(
    leaf: tree.Leaf,
    array: ArrayMetadata,
    chunks: list[tuple[Box, FileRange]],
    sharding: ShardingSpec | None,
) -> StoredTensor:
    """Return a tensor whose shards are chunks."""
    if not chunks:
        # Only the shape of an empty array is stored.
        raise FormatError(
            f"the array {leaf.name!r} of shape {list(array.shape)} has no elements; Orbax has no "
            "such arrays, so its metadata are damaged"
        )
    boxes = tuple(box for box, _ in chunks)
    layout, numbers, text = _lay_out(array.shape, boxes, sharding)
    addresses = {slot: tuple(chunks[n][1] for n in own) for slot, own in numbers.items()}
    views: dict[int, tuple[View, ...]] = {}
    full = View(0, array.strides)
    for slot, own in numbers.items():
        # A chunk at the end of the array extends beyond it; others may be in column-major order.
        shapes = [boxes[n].shape for n in own]
        if not all(full.is_dense(shape) for shape in shapes):
            views[slot] = tuple(full for _ in shapes)
    return StoredTensor(leaf.name, array.dtype, Binding(layout, addresses, views), text)


# Many arrays of a model have equal layouts.
@lru_cache(maxsize=4096)
def _lay_out(
    shape: tuple[int, ...], boxes: tuple[Box, ...], sharding: ShardingSpec | None
) -> tuple[Layout, Mapping[int, tuple[int, ...]], str | None]:
    """Return the layout of an array's chunks, the chunks of each rank, and the sharding's text.

    The text is None unless the shard of each rank is a chunk of its own.
    """
    sharding = None if sharding is None else extend(sharding, len(shape))
    held = None if sharding is None else sharding.layout(shape)
    slots = held.slots if held is not None else 1
    owners: list[tuple[Box, int]] = []
    if held is not None:
        seen: set[Box] = set()
        for slot in held.holders:
            for box in held.boxes(slot):
                if box not in seen:
                    seen.add(box)
                    owners.append((box, slot))
    numbers: dict[int, list[int]] = {}
    for number, slot in enumerate(find_owners([box.start for box in boxes], owners, 0)):
        numbers.setdefault(slot, []).append(number)
    is_as_held = (
        held is not None
        and len(owners) == len(held.holders) == len(boxes)
        and {box for box, _ in owners} == set(boxes)
    )
    ordered = {slot: tuple(own) for slot, own in sorted(numbers.items())}
    if is_as_held and held is not None:
        return held, ordered, str(sharding)
    layout = Layout.from_boxes(
        shape, [(slot, boxes[n]) for slot, own in ordered.items() for n in own], slots
    )
    return layout, ordered, None


def _find_random_keys(folder: Path) -> dict[str, str]:
    """Return the arrays that are keys of random numbers, and their kind."""
    result: dict[str, str] = {}
    metadatas = folder / "array_metadatas"
    if not metadatas.is_dir():
        return result
    for path in sorted(metadatas.iterdir())[:1024]:
        if not path.is_file():
            continue
        try:
            content = read_json_object(path, MAX_READ_BYTES)
            for entry in content["array_metadatas"]:
                described = entry["array_metadata"]
                kind = (described.get("ext_metadata") or {}).get("random_key_impl")
                if isinstance(kind, str):
                    result[str(described["param_name"])] = kind
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FormatError):
            # Orbax itself ignores such files.
            continue
    return result
