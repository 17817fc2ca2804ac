"""The `.metadata` of a PyTorch distributed checkpoint, read and written.

`torch.distributed.checkpoint` (DCP) writes files for each rank, and `.metadata`, a
pickle of dataclasses::

    Metadata
      state_dict_metadata   {name: shape, dtype and chunks of a tensor; or bytes}
      storage_data          {name and offset of a chunk: file, offset, length}
      planner_data          {name: its path in the nested state dict}
      storage_meta, version

1. The pickle is read without executing it (`restricted_pickle`). Instances of unknown classes are
   kept as their names; a tensor that such an instance describes is unreadable.
2. Every chunk of every tensor must be in `storage_data`.
3. Other attributes, such as Megatron's, do not affect the tensors. Plain values among them are kept
   (`plain_attributes`); the others are listed.

`metadata_pickle` writes the same pickle by the names of PyTorch's classes, without PyTorch.

`torch.distributed.checkpoint.save(..., use_collectives=False)` makes every rank write metadata of
its own, `__R.metadata`, which describes only that rank's part. `merge_rank_metadata` merges them::

    __0.metadata   w = w[0:4] of [8], b = b[0:2], step      w = w[0:4] + w[4:8]
    __1.metadata   w = w[4:8] of [8], b = b[0:2], step      b = b[0:2] (of rank 0), step (of rank 0)

1. All ranks must agree on a tensor's shape and dtype.
2. A box that several ranks have is a copy. All copies are kept, so that they can be compared
   (`reshard.checkpoint.copy_checks`), and a user can specify that they are different parts.
3. Bytes that are not tensors may differ between ranks. The bytes of the lowest rank are used; the
   others are returned for the caller to compare.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, NamedTuple

from reshard._records import Record
from reshard.checkpoint.formats.safetensors.header import check_shape
from reshard.checkpoint.formats.torch_files.pickles import (
    Call,
    Global,
    Pairs,
    read_pickle,
    shortened,
    write_pickle,
)
from reshard.checkpoint.formats.torch_files.values import (
    as_sizes,
    explain,
    is_size,
    plain_attributes,
)
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CoverageError, FormatError, UnreadableTensorError, UsageError
from reshard.layout import Box

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"

_KNOWN_ATTRIBUTES = {
    "state_dict_metadata",
    "storage_data",
    "planner_data",
    "storage_meta",
    "version",
    # A cache of the next save.
    "all_local_plans",
}
VERSION = "1.0.0"
_ROOT = Global(_METADATA, "Metadata")
StatePath = tuple[str | int, ...]


class StoredBytes(NamedTuple):
    """A range of a file; `transforms` are the transforms of its bytes, innermost first."""

    file: str
    start_bytes: int
    size_bytes: int
    transforms: tuple[str, ...] = ()


class DcpChunk(NamedTuple):
    """A box of a tensor, and the archive that holds it."""

    box: Box
    place: StoredBytes


class DcpTensor(NamedTuple):
    """A tensor, and the chunks in which it is stored."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


class DcpMetadata(Record):
    """The contents of a distributed checkpoint.

    Attributes:
        tensors: by name.
        items: bytes that are not tensors, by name.
        paths: the path of each name in the nested state dict, if known.
        other_attributes: the names of attributes that PyTorch does not define, and that are not
            plain values.
        attributes: plain values of attributes that PyTorch does not define.
        unreadable: the reason for each tensor that cannot be read, such as its type.
    """

    tensors: Mapping[str, DcpTensor]
    items: Mapping[str, StoredBytes]
    paths: Mapping[str, StatePath] = field(default_factory=dict)
    other_attributes: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)


def read_metadata(content: bytes, label: str) -> DcpMetadata:
    """Parse the bytes of a `.metadata` file; `label` names the file in errors.

    Raises:
        FormatError: a pickle of anything else, or a contradictory pickle.
        CoverageError: a chunk that is listed and not stored.
    """
    root = read_pickle(content, label)
    if not (isinstance(root, Call) and root.function == _ROOT):
        raise FormatError(f"{label} is not the metadata of torch.distributed.checkpoint")
    fields = _attributes(root, label)
    places = _places(_mapping(fields, "storage_data", label), label)
    tensors: dict[str, DcpTensor] = {}
    items: dict[str, StoredBytes] = {}
    unreadable: dict[str, str] = {}
    for name, described in _mapping(fields, "state_dict_metadata", label).items():
        _check_name(name, label)
        kind = described.function.name if isinstance(described, Call) else ""
        if isinstance(described, Call) and kind == "TensorStorageMetadata":
            try:
                tensors[name] = _tensor(name, described, places, label)
            except UnreadableTensorError as error:
                unreadable[name] = str(error)
        elif kind == "BytesStorageMetadata":
            if (name, None) not in places:
                raise CoverageError(f"{label} lists {name!r}, but does not say where its bytes are")
            items[name] = places[name, None]
        else:
            unreadable[name] = explain(described)
    # Attributes that PyTorch does not define: plain values are copied, the rest are listed.
    unknown = [str(name) for name in fields if name not in _KNOWN_ATTRIBUTES]
    attributes = plain_attributes({name: fields.get(name) for name in unknown})
    other = tuple(shortened(name) for name in unknown if name not in attributes)
    paths = _paths(fields.get("planner_data"))
    return DcpMetadata(tensors, items, paths or {}, other, attributes, unreadable)


def _attributes(value: object, label: str, part: str = "", name: str = "") -> dict[Any, Any]:
    """Return the attributes of an object of a pickle; the other arguments name it in errors."""
    state = value.state if type(value) is Call else None
    if type(state) is not dict:
        raise FormatError(f"{_name_part(label, part, name)} is not described as PyTorch does")
    return state


def _name_part(label: str, part: str = "", name: str = "") -> str:
    return label + (part and f": {part}") + (name and f" {name!r}")


def _mapping(attributes: Mapping[Any, Any], name: str, label: str) -> dict[Any, Any]:
    """Return an attribute that is a dict."""
    value = attributes.get(name)
    if isinstance(value, Call) and value.function.name == "OrderedDict":
        value = value.items or {}
    if not isinstance(value, dict):
        raise _wrong(attributes, name, "a dict", label)
    return value


def _wrong(attributes: Mapping[Any, Any], name: str, expected: str, label: str) -> FormatError:
    """Return the error for an attribute that is missing or of another type."""
    value = attributes.get(name)
    if isinstance(value, Call) and value.function.name == "Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    # Numbers are shown as they are, such as an offset of -1.
    parts = value if isinstance(value, tuple | list) else [value]
    is_numbers = all(type(part) is int for part in parts)
    shown = str(value) if is_numbers else repr(type(value).__name__)
    return FormatError(f"{label}: {name} is {shortened(shown)}, expected {expected}")


_Places = dict[tuple[str, tuple[int, ...] | None], StoredBytes]


def _places(storage: Mapping[Any, Any], label: str) -> _Places:
    """Return the location of every chunk and item, by name and offset."""
    places: _Places = {}
    for index, info in storage.items():
        where = _attributes(index, label, "an index of storage_data")
        name, offset = where.get("fqn"), where.get("offset")
        start = None if offset is None else as_sizes(offset)
        if type(name) is not str or (start is None and offset is not None):
            wrong = ("offset", _SIZES) if type(name) is str else ("fqn", "text")
            raise _wrong(where, *wrong, f"{label}: an index of storage_data")
        if (name, start) in places:
            raise FormatError(f"{label} has two locations for {name!r} at {start}")
        stored = _attributes(info, label, "the place of", name)
        places[name, start] = _stored_bytes(stored, label, name)
    return places


def _stored_bytes(stored: Mapping[Any, Any], label: str, name: str) -> StoredBytes:
    file, begin, size = stored.get("relative_path"), stored.get("offset"), stored.get("length")
    transforms = stored.get("transform_descriptors") or ()
    if type(transforms) not in (tuple, list) or any(type(item) is not str for item in transforms):
        wrong = "transform_descriptors", "a list of names"
    elif type(file) is not str:
        wrong = "relative_path", "text"
    elif type(begin) is not int or not is_size(begin):
        wrong = "offset", "a number of bytes of 0 or more"
    elif type(size) is not int or not is_size(size):
        wrong = "length", "a number of bytes of 0 or more"
    else:
        return StoredBytes(file, begin, size, tuple(transforms))
    raise _wrong(stored, *wrong, f"{label}: the place of {name!r}")


_SIZES = "sizes of 0 or more"


def _tensor(name: str, value: Call, places: _Places, file: str) -> DcpTensor:
    label = f"{file}: tensor {name!r}"
    fields = _attributes(value, label)
    shape = as_sizes(fields.get("size"))
    if shape is None:
        raise _wrong(fields, "size", _SIZES, label)
    dtype = _dtype(fields, label)
    try:
        check_shape(name, dtype, shape)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise _wrong(fields, "chunks", "a list", label)
    chunks = []
    for chunk in listed:
        described = _attributes(chunk, label, "a chunk")
        start, sizes = as_sizes(described.get("offsets")), as_sizes(described.get("sizes"))
        if start is None or sizes is None:
            wrong = "offsets" if start is None else "sizes"
            raise _wrong(described, wrong, _SIZES, f"{label}: a chunk")
        if not len(start) == len(sizes) == len(shape):
            raise FormatError(
                f"{label}: a chunk at {list(start)} of {list(sizes)} in a tensor of {list(shape)}"
            )
        box = Box.of(sizes, start)
        if any(map(operator.gt, box.stop, shape)):
            raise FormatError(f"{label}: the chunk {box} lies outside of {list(shape)}")
        place = places.get((name, start))
        if place is None:
            raise CoverageError(
                f"{label}: the chunk {box} is listed, but not where it is stored; a rank's part "
                "of the save is missing"
            )
        chunks.append(DcpChunk(box, place))
    return DcpTensor(dtype, shape, tuple(chunks))


def _dtype(attributes: Mapping[Any, Any], label: str) -> DType:
    """Return the dtype in the properties of a tensor."""
    properties = attributes.get("properties")
    state = properties.state if isinstance(properties, Call) else None
    named = state.get("dtype") if isinstance(state, dict) else None
    # PyTorch's class defines `__getstate__`: a tuple that begins with the dtype.
    if isinstance(state, tuple) and state:
        named = state[0]
    if not (isinstance(named, Global) and named.module == "torch"):
        raise _wrong(attributes, "properties", "the properties of a tensor, with its dtype", label)
    try:
        return as_dtype(named.name)
    except UsageError as error:
        raise UnreadableTensorError(f"of {error}") from error


def _paths(planner_data: object) -> dict[str, StatePath] | None:
    """Return the paths of names in the state dict, or None if `planner_data` is in another form."""
    if not isinstance(planner_data, dict):
        return None
    paths: dict[str, StatePath] = {}
    for name, path in planner_data.items():
        if not isinstance(name, str) or not isinstance(path, tuple):
            return None
        if not all(type(step) in (str, int) for step in path):
            return None
        paths[name] = path
    return paths


def _check_name(name: object, label: str) -> None:
    if not isinstance(name, str):
        raise FormatError(f"{label}: the name {name!r} in state_dict_metadata is not text")
    try:
        # Text of a pickle may have lone surrogates, which targets cannot write.
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"{label}: the name {name!r} is not text that UTF-8 can say") from error


def metadata_pickle(metadata: DcpMetadata) -> bytes:
    """Return the bytes of a `.metadata` file, as `torch.distributed.checkpoint` reads them."""

    # The two dicts of `Metadata`: the description of each name, and the location of each chunk.
    def describe() -> Iterator[tuple[Any, Any]]:
        for name, tensor in metadata.tensors.items():
            chunks = [
                _object(
                    "ChunkStorageMetadata",
                    offsets=_size(chunk.box.start),
                    sizes=_size(chunk.box.shape),
                )
                for chunk in tensor.chunks
            ]
            yield (
                name,
                _object(
                    "TensorStorageMetadata",
                    properties=_properties(tensor.dtype),
                    size=_size(tensor.shape),
                    chunks=chunks,
                ),
            )
        for name in metadata.items:
            yield name, _object("BytesStorageMetadata")

    def place() -> Iterator[tuple[Any, Any]]:
        for name, tensor in metadata.tensors.items():
            for number, chunk in enumerate(tensor.chunks):
                offset = _size(chunk.box.start)
                # `index` is a hint: PyTorch compares the others.
                index = _object("MetadataIndex", fqn=name, index=number, offset=offset)
                yield index, _storage_info(chunk.place)
        for name, item in metadata.items.items():
            yield _object("MetadataIndex", fqn=name, index=None), _storage_info(item)

    state = {
        "state_dict_metadata": Pairs(describe),
        "planner_data": dict(metadata.paths) or None,
        "storage_data": Pairs(place),
        "storage_meta": _object(
            "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
        ),
        "version": VERSION,
        **metadata.attributes,
    }
    root = Call(Global(_METADATA, "Metadata"), (), state, is_new=True)
    return write_pickle(root)


def _object(name: str, module: str = _METADATA, **attributes: Any) -> Call:
    # Python pickles an object without attributes without a state.
    return Call(_make_global(module, name), (), attributes or None, is_new=True)


def _size(sizes: Iterable[int]) -> Call:
    return Call(_make_global("torch", "Size"), (tuple(sizes),))


# The few classes of metadata are named for every chunk.
_make_global = cache(Global)


def _storage_info(place: StoredBytes) -> Call:
    info: dict[str, Any] = {
        "relative_path": place.file,
        "offset": place.start_bytes,
        "length": place.size_bytes,
    }
    if place.transforms:
        info["transform_descriptors"] = list(place.transforms)
    return _object("_StorageInfo", _FILESYSTEM, **info)


@cache
def _properties(dtype: DType) -> Call:
    strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    # 0 is the contiguous format. The state is the argument of `__setstate__` of PyTorch's class:
    # dtype, layout, requires_grad, memory format, pin_memory.
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Global("torch", dtype.name), strided, False, contiguous, False)
    return Call(Global(_METADATA, "TensorProperties"), (), state, is_new=True)


def merge_rank_metadata(
    parts: Sequence[tuple[str, DcpMetadata]],
) -> tuple[DcpMetadata, int, list[tuple[str, StoredBytes]]]:
    """Merge the metadata of all ranks, given with the names of their files.

    Returns:
        The metadata; the number of boxes that a lower rank has too; and the items, by name, that a
        lower rank has too.

    Raises:
        CoverageError: ranks that describe a tensor differently.
    """
    tensors: dict[str, DcpTensor] = {}
    items: dict[str, StoredBytes] = {}
    paths: dict[str, StatePath] = {}
    others: list[tuple[str, StoredBytes]] = []
    unlike: dict[str, None] = {}
    unreadable: dict[str, str] = {}
    origin: dict[str, str] = {}
    boxes: dict[str, set[Box]] = {}
    copies = 0
    for file, part in parts:
        unreadable = {**part.unreadable, **unreadable}
        for name, tensor in part.tensors.items():
            first = tensors.get(name)
            _check_same_kind(name, file, origin, is_same=name not in items)
            if first is None:
                tensors[name] = tensor
                continue
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CoverageError(
                    f"tensor {name!r} is {first.dtype} {list(first.shape)} by {origin[name]}, but "
                    f"{tensor.dtype} {list(tensor.shape)} by {file}; they belong to different "
                    "saves, or ranks gave different tensors the same name"
                )
            seen = boxes.setdefault(name, {chunk.box for chunk in first.chunks})
            copies += sum(chunk.box in seen for chunk in tensor.chunks)
            seen.update(chunk.box for chunk in tensor.chunks)
            chunks = (*first.chunks, *tensor.chunks)
            tensors[name] = DcpTensor(first.dtype, first.shape, chunks)
        for name, place in part.items.items():
            _check_same_kind(name, file, origin, is_same=name not in tensors)
            if name in items:
                others.append((name, place))
            else:
                items[name] = place
        # If ranks differ, the lowest rank's entry stays.
        paths = {**part.paths, **paths}
        unlike |= dict.fromkeys(part.other_attributes)
    attributes, differing = _join_attributes([part for _, part in parts])
    other_attributes = (*unlike, *(name for name in differing if name not in unlike))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unreadable}
    metadata = DcpMetadata(tensors, items, paths, other_attributes, attributes, unreadable)
    return metadata, copies, others


def _check_same_kind(name: str, file: str, origin: dict[str, str], *, is_same: bool) -> None:
    if not is_same:
        raise CoverageError(
            f"{name!r} is a tensor by {origin[name]} or {file}, and not by the other; "
            "they belong to different saves"
        )
    origin.setdefault(name, file)


def _join_attributes(
    parts: Sequence[DcpMetadata],
) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return the attributes of all ranks, dicts merged, and the names of differing attributes."""
    joined: dict[str, object] = {}
    differing: dict[str, None] = {}
    for part in parts:
        for name, value in part.attributes.items():
            first = joined.setdefault(name, value)
            if isinstance(first, dict) and isinstance(value, dict):
                if any(first[key] != value[key] for key in first if key in value):
                    differing[name] = None
                joined[name] = {**value, **first}
            elif first != value:
                differing[name] = None
    return {name: value for name, value in joined.items() if name not in differing}, tuple(
        differing
    )
