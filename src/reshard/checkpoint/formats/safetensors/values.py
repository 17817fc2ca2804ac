"""The contents of one safetensors file, as values in which every byte has one owner.

The values are the same whether a header was read or is about to be written, and cannot be
built unless they are right:

1. a `TensorHeader` takes exactly the bytes that its type and shape need;
2. in a `FileHeader` each tensor starts where the one before it stops, the first at the
   start of the data, and the last stops at the end of the file. That one comparison, done
   for all tensors at once, proves that there is no overlap, no hole and nothing cut off.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

import numpy as np

from reshard.checkpoint.storage.json_text import first_duplicate
from reshard.dtypes import DType
from reshard.errors import FormatError
from reshard.runs import IntArray

__all__ = ["FileHeader", "HeaderKind", "HeaderTensors", "TensorHeader", "tensor_size_bytes"]

#: The length of the header, in front of it.
LENGTH_BYTES = 8

#: Of a file, and of what NumPy can index.
LARGEST_OFFSET = 2**63 - 1

_MOST_DIMENSIONS = 32  # of an array, in the oldest NumPy supported

# What a broken header holds may be of any size and depth; an error shows its beginning.
_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 200
shown = _shortener.repr


def tensor_size_bytes(element: DType, shape: Sequence[int]) -> int:
    """How many bytes a tensor of this type and `shape` takes; 0-d tensors hold one element.

    >>> from reshard.dtypes import dtype
    >>> tensor_size_bytes(dtype("bfloat16"), (2, 3)), tensor_size_bytes(dtype("I64"), ())
    (12, 8)
    """
    return math.prod(shape) * element.itemsize_bytes


#: Type and shape: what equal tensors have in common.
HeaderKind = tuple[DType, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file: its bytes are `start_bytes` to `stop_bytes` of the whole file.

    Raises FormatError if the shape is impossible or the range does not hold exactly it.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start_bytes: int
    stop_bytes: int

    def __post_init__(self) -> None:
        check_shape(self.name, self.dtype, self.shape)
        if not 0 <= self.start_bytes <= self.stop_bytes <= LARGEST_OFFSET:
            raise FormatError(
                f"tensor {shown(self.name)}: bytes {self.start_bytes} to {self.stop_bytes} are "
                f"no range of a file, expected 0 <= start <= stop < 2**63"
            )
        expected = tensor_size_bytes(self.dtype, self.shape)
        if self.size_bytes != expected:
            raise FormatError(
                f"tensor {shown(self.name)}: bytes {self.start_bytes} to {self.stop_bytes} of "
                f"the file are {self.size_bytes}, expected {expected} for {self.dtype} of shape "
                f"{list(self.shape)}"
            )

    @property
    def size_bytes(self) -> int:
        """How many bytes of the file the tensor takes."""
        return self.stop_bytes - self.start_bytes


class HeaderTensors(Sequence[TensorHeader]):
    """The tensors of a file in the order of their offsets, as columns.

    Args:
        names: of the tensors.
        kinds: the kinds that there are.
        kind: the number of the kind of each, shape `(tensors,)`.
        starts: where in the file each begins, in bytes: shape `(tensors,)`.

    >>> from reshard.dtypes import dtype
    >>> columns = HeaderTensors(["v", "w"], [(dtype("I8"), (4,))], [0, 0], [64, 68])
    >>> columns[1].stop_bytes, columns.stops.tolist()
    (72, [68, 72])
    """

    def __init__(
        self,
        names: Iterable[str],
        kinds: Sequence[HeaderKind],
        kind: Sequence[int] | IntArray,
        starts: Sequence[int] | IntArray,
    ) -> None:
        self.names = tuple(names)
        self.kinds = tuple(kinds)
        self.kind: IntArray = np.asarray(kind, dtype=np.int64)
        self.starts: IntArray = np.asarray(starts, dtype=np.int64)

    def without(self, names: Container[str]) -> HeaderTensors:
        """Return all tensors but some."""
        rows = [row for row, name in enumerate(self.names) if name not in names]
        kept = [self.names[row] for row in rows]
        return HeaderTensors(kept, self.kinds, self.kind[rows], self.starts[rows])

    @classmethod
    def of(cls, tensors: Iterable[TensorHeader]) -> HeaderTensors:
        """The same tensors as columns."""
        if isinstance(tensors, HeaderTensors):
            return tensors
        tensors = tuple(tensors)
        numbers: dict[HeaderKind, int] = {}
        kind = [numbers.setdefault((one.dtype, one.shape), len(numbers)) for one in tensors]
        starts = [one.start_bytes for one in tensors]
        return cls([one.name for one in tensors], tuple(numbers), kind, starts)

    @cached_property
    def sizes(self) -> IntArray:
        """How many bytes of the file each tensor takes, shape `(tensors,)`."""
        sizes = [tensor_size_bytes(element, shape) for element, shape in self.kinds]
        each: IntArray = np.array(sizes or [0], dtype=np.int64)[self.kind]
        return each

    @cached_property
    def stops(self) -> IntArray:
        """Where each tensor ends, shape `(tensors,)`."""
        stops: IntArray = self.starts + self.sizes
        return stops

    @overload
    def __getitem__(self, index: int) -> TensorHeader: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[TensorHeader, ...]: ...

    def __getitem__(self, index: int | slice) -> TensorHeader | tuple[TensorHeader, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        element, shape = self.kinds[int(self.kind[index])]
        start, stop = int(self.starts[index]), int(self.stops[index])
        return TensorHeader(self.names[index], element, shape, start, stop)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one safetensors file holds, proven: every byte of data belongs to one tensor.

    `label` names the file in errors (its path, if it has one). `tensors` are in the order
    of their offsets, `metadata` cannot be changed. `unreadable` has a reason for each tensor of
    an unknown element type; in `tensors` it stands as that many bytes.

    Raises FormatError if the tensors overlap, leave holes or lie outside the file, if the
    file ends too early or goes on after them, or if two share a name.
    """

    label: str
    metadata: Mapping[str, str] = field(hash=False)
    tensors: Sequence[TensorHeader]
    data_start_bytes: int
    file_size_bytes: int
    unreadable: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_metadata(self.label, self.metadata)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        names = self.columns.names
        if len(set(names)) != len(names):
            twice = first_duplicate(names)
            raise FormatError(
                f"{self.label}: tensor {shown(twice)} is there twice, expected every name once"
            )
        _check_coverage(self)

    @property
    def columns(self) -> HeaderTensors:
        """The tensors as columns."""
        return HeaderTensors.of(self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of a dictionary cannot be pickled, the dictionary can.
        metadata = dict(self.metadata)
        places = (self.data_start_bytes, self.file_size_bytes)
        return FileHeader, (self.label, metadata, self.tensors, *places, dict(self.unreadable))


def is_text(value: object) -> bool:
    """Whether UTF-8 can encode `value`: Python's text may hold halves of UTF-16 pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_metadata(label: str, metadata: object) -> None:
    if not isinstance(metadata, Mapping):
        raise FormatError(
            f"{label}: __metadata__ is {shown(metadata)}, expected an object of texts"
        )
    for key, value in metadata.items():
        if not is_text(key) or not is_text(value):
            raise FormatError(
                f"{label}: __metadata__ key {shown(key)} has the value {shown(value)}, "
                f"expected UTF-8 text for both"
            )


def check_shape(name: str, element: DType, shape: tuple[int, ...]) -> None:
    if len(shape) > _MOST_DIMENSIONS:
        raise FormatError(
            f"tensor {shown(name)}: {len(shape)} dimensions, expected at most {_MOST_DIMENSIONS}"
        )
    for length in shape:
        if type(length) is not int or length < 0:
            raise FormatError(
                f"tensor {shown(name)}: shape {shown(list(shape))}, expected integers from 0 up"
            )
    # NumPy's own limit: it counts a dimension of 0 as 1 here, since it strides over the others.
    elements = math.prod(shape) or math.prod(length or 1 for length in shape)
    if elements * element.itemsize_bytes > LARGEST_OFFSET:
        raise FormatError(
            f"tensor {shown(name)}: shape {shown(list(shape))} of {element} is too large, "
            f"expected fewer than 2**63 bytes"
        )


def _check_coverage(header: FileHeader) -> None:
    """Raise FormatError unless the tensors follow each other from the data's start to the end."""
    label, tensors, size = header.label, header.tensors, header.file_size_bytes
    if not LENGTH_BYTES <= header.data_start_bytes <= size:
        raise FormatError(
            f"{label}: the data starts at byte {header.data_start_bytes} of a file of {size} "
            f"bytes, expected {LENGTH_BYTES} to {size}. If the file was cut off, copy it again"
        )
    starts, stops = header.columns.starts, header.columns.stops
    expected = np.concatenate(([header.data_start_bytes], stops))
    misplaced = np.flatnonzero(starts != expected[:-1])
    if len(misplaced):
        # Everything before the first misplaced tensor is in place, so it alone tells what is wrong.
        first = int(misplaced[0])
        raise _explain_place(header, first, int(expected[first]))
    end = int(expected[-1])
    if end > size:
        cut = tensors[int(np.flatnonzero(stops > size)[0])]
        raise FormatError(
            f"{label}: the file is cut off: it has {size} bytes, expected {end}; {end - size} "
            f"bytes are missing, from tensor {shown(cut.name)} on (bytes {cut.start_bytes} to "
            f"{cut.stop_bytes}). Fetch or copy it again"
        )
    if end < size:
        raise FormatError(
            f"{label}: the file has {size} bytes, expected {end}: the last {size - end} bytes "
            f"belong to no tensor"
        )


def _explain_place(header: FileHeader, index: int, expected: int) -> FormatError:
    tensor = header.tensors[index]
    found = (
        f"{header.label}: tensor {shown(tensor.name)} takes bytes {tensor.start_bytes} to "
        f"{tensor.stop_bytes} of the file"
    )
    if tensor.start_bytes > header.file_size_bytes:
        return FormatError(
            f"{found}, which lie outside it: it has {header.file_size_bytes} bytes. The tensor "
            f"was expected at byte {expected}"
        )
    if tensor.start_bytes > expected:
        return FormatError(
            f"{found}, expected a start at {expected}: the {tensor.start_bytes - expected} bytes "
            f"from {expected} to {tensor.start_bytes} belong to no tensor"
        )
    if index == 0:
        return FormatError(f"{found}, but the data starts at byte {header.data_start_bytes}")
    other = header.tensors[index - 1]
    return FormatError(
        f"{found} and overlaps tensor {shown(other.name)}, which takes bytes "
        f"{other.start_bytes} to {other.stop_bytes}. Expected no byte in two tensors"
    )
