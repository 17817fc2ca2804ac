"""Quantised weights: their values, and weights quantised to float8.

Values are computed from quantised tensors in boxes (`DequantizedWeight`):

1. A box of the weight is filled in parts of some hundred thousand elements.
2. The groups of each stored tensor that overlap the part are read.
3. Packed elements become numbers, with the dimensions of the weight. Groups are cropped to the
   part; numbers shared by a group are repeated.
4. Zero points are subtracted and scales multiplied in float32; the result is rounded once.

The stored tensors of each method, with their roles and codings, are in the table of
`reshard.recipes.quantization`.

Weights are quantised to float8 in blocks of 128 by 128 with a float32 scale each (`Float8Weight`).
`X.weight` becomes `X.weight` of float8_e4m3fn and `X.weight_scale_inv`; the value of an element is
their product. A scale is the block's greatest absolute value divided by 448 (`block_scaling`). A
row of blocks is read at once, in pieces of whole blocks if it is long.

A 4-bit weight of bitsandbytes is stored flat, as a single dimension of packed elements. Its shape
is stored as JSON in a tensor of bytes, `X.weight.quant_state.bitsandbytes__nf4`
(`read_flat_shapes`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.checkpoint.blocks.block_io import BlockReader, open_sources
from reshard.checkpoint.changes.computed_tensors import ReadBox
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.dtypes import DType, dtype
from reshard.elements import (
    MAX_E4M3FN,
    CastCounts,
    as_float32,
    cast_elements,
    decode_float8,
    is_castable,
    round_to_e4m3fn,
    scale_blocks,
    unpack_e2m1,
    unpack_integers,
)
from reshard.errors import FormatError, UsageError
from reshard.layout import Box
from reshard.recipes.quantization import (
    METHODS,
    QuantizedWeight,
    StoredDimension,
    find_method,
    make_stored_name,
)

# Elements of a part of a box: 1 MiB in float32.
_PART_ELEMENTS = 1 << 18


class DequantizedWeight(Record):
    """A quantised weight's values as `dtype`.

    Args:
        weight: the stored tensors and their dimensions.
        stored: these tensors, by name.
        dtype: the type of the values.
        bits: the bits of a packed integer.
        zeros_less_one: whether stored zero points are smaller by 1, as in GPTQ.

    Raises:
        UsageError: a method whose values cannot be computed.
    """

    weight: QuantizedWeight
    stored: Mapping[str, StoredTensor]
    dtype: DType
    bits: int = 4
    zeros_less_one: bool = False

    def __post_init__(self) -> None:
        method = self.weight.method
        if not find_method(method).values:
            supported = ", ".join(entry.name for entry in METHODS if entry.values)
            raise UsageError(
                f"the values of {self.weight.name!r} ({method}) cannot be computed; supported: "
                f"{supported}. Keep it quantised, or use the library that wrote it"
            )
        if self.weight.uncut:
            table = next(iter(self.weight.uncut.values()))
            raise UsageError(
                f"the values of {self.weight.name!r} ({method}) cannot be computed, since "
                f"{table!r} has its groups in any order; use the library that wrote it"
            )
        if 32 % self.bits:
            raise UsageError(
                f"the values of {self.weight.name!r} of {self.bits} bits cannot be computed; "
                "expected 2, 4 or 8 bits"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical weight."""
        return self.weight.shape

    @cached_property
    def _parts(self) -> tuple[tuple[str, str, StoredTensor], ...]:
        """The role, the coding and the stored tensor of each part of the values."""
        parts = []
        for end, role, coding in find_method(self.weight.method).values:
            name = make_stored_name(self.weight.name, end)
            if name is not None and name in self.stored:
                parts.append((role, coding, self.stored[name]))
        return tuple(parts)

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The stored tensors from which values are computed."""
        return tuple(tensor for _, _, tensor in self._parts)

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the maximum number of bytes of each source for a part of a box."""
        step = self._find_step(box)
        return tuple(
            _find_most(self.weight.members[tensor.name], tensor.shape, step)
            * tensor.dtype.itemsize_bytes
            for tensor in self.sources
        )

    def _find_step(self, box: Box) -> tuple[int, ...]:
        """Return the shape of parts: whole groups, so that no packed element is read twice."""
        shape = list(box.shape)
        for d, size in enumerate(shape):
            rest = math.prod(shape[d + 1 :])
            group = self.weight.groups[d]
            shape[d] = min(size, max(_PART_ELEMENTS // max(rest, 1) // group, 1) * group)
            if shape[d] > 1:
                break
        return tuple(shape)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the box's values, rounded."""
        counts = CastCounts()
        for part in _list_parts(box, self._find_step(box)):
            values = np.ascontiguousarray(self._compute(part, read))
            rounded = np.empty(values.size, dtype=self.dtype.storage)
            bare = values.reshape(-1).view(np.uint32)
            counts += cast_elements(bare, dtype("float32"), rounded, self.dtype)
            ends = zip(part.start, part.stop, box.start, strict=True)
            out[tuple(slice(a - o, b - o) for a, b, o in ends)] = rounded.reshape(values.shape)
        return counts

    def _compute(self, box: Box, read: ReadBox) -> NDArray[np.float32]:
        """Return the values of a box in float32."""
        roles: dict[str, NDArray[np.float32]] = {}
        for number, (role, coding, tensor) in enumerate(self._parts):
            roles[role] = self._read_part(coding, tensor, box, partial(read, number))
        values = roles["values"]
        if "zeros" in roles:
            zeros = roles["zeros"]
            if self.zeros_less_one:
                # The sum of a zero point and 1 wraps around at `bits` bits.
                zeros = np.mod(zeros + np.float32(1), np.float32(1 << self.bits))
            values = values - zeros
        scales = roles.get("scales", np.ones((), np.float32))
        if "multiplier" in roles:
            scales = scales * roles["multiplier"]
        if "divisor" in roles:
            scales = scales / roles["divisor"]
        # Infinities are counted by the cast that follows.
        with np.errstate(over="ignore", invalid="ignore"):
            return values * scales

    def _read_part(
        self, coding: str, tensor: StoredTensor, box: Box, read: Callable[[Box], NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return a stored tensor's numbers, broadcastable over a box."""
        dims = self.weight.members[tensor.name]
        own = _find_stored_box(dims, tensor.shape, box)
        packed = self._find_packed(coding, dims)
        numbers = self._decode(coding, tensor, packed, read(own))
        # 1. The dimensions of the weight, in its order; a missing dimension has length 1.
        stored_dims = [d for d, dim in enumerate(dims) if dim.dimension is not None]
        numbers = numbers.reshape([numbers.shape[d] for d in stored_dims])
        order = [int(dims[d].dimension or 0) for d in stored_dims]
        numbers = np.transpose(numbers, np.argsort(order)) if stored_dims else numbers
        lengths = dict(zip(sorted(order), numbers.shape, strict=True))
        numbers = numbers.reshape([lengths.get(d, 1) for d in range(len(self.shape))])
        # 2. Crop to the indices of the box, and repeat numbers that a group shares.
        for d in stored_dims:
            dim, at = dims[d], int(dims[d].dimension or 0)
            first = own.start[d] // dim.indices * dim.elements
            indices = np.arange(box.start[at], box.stop[at]) - first
            if d != packed and dim.elements > 1:
                indices //= dim.elements
            if len(indices) != numbers.shape[at] or (d != packed and dim.elements > 1):
                numbers = np.take(numbers, indices, axis=at)
        return numbers

    def _find_packed(self, coding: str, dims: tuple[StoredDimension, ...]) -> int | None:
        """Return the stored dimension along which elements are packed."""
        if coding in ("plain", "powers"):
            return None
        several = [d for d, dim in enumerate(dims) if dim.elements > 1]
        if coding == "e2m1":
            return several[-1]
        return next(d for d in several if dims[d].elements * self.bits == 32 * dims[d].indices)

    def _decode(
        self, coding: str, tensor: StoredTensor, packed: int | None, bare: NDArray[Any]
    ) -> NDArray[np.float32]:
        """Return the numbers of stored elements, unpacked."""
        kind = tensor.dtype
        if packed is None:
            if coding == "powers" and kind.name == "uint8":
                return decode_float8(bare, dtype("float8_e8m0fnu"))
            if is_castable(kind):
                return as_float32(bare, kind)
            if kind.name.startswith("float8"):
                return decode_float8(bare, kind)
            return bare.view(kind.name).astype(np.float32)
        if coding == "e2m1":
            # The bytes of a block may have a dimension of their own, after the block dimension.
            return unpack_e2m1(bare.reshape(*bare.shape[:packed], -1).view(np.uint8))
        numbers = unpack_integers(bare, self.bits, packed, is_awq=coding == "awq")
        if coding == "signed":
            numbers -= np.float32(1 << (self.bits - 1))
        return numbers


def _find_stored_box(dims: tuple[StoredDimension, ...], stored: tuple[int, ...], box: Box) -> Box:
    """Return the stored indices of the groups that overlap a box of the weight."""
    start, stop = [], []
    for dim, size in zip(dims, stored, strict=True):
        low, high = 0, size
        if dim.dimension is not None:
            low = box.start[dim.dimension] // dim.elements * dim.indices
            high = min(-(-box.stop[dim.dimension] // dim.elements) * dim.indices, size)
        start.append(low)
        stop.append(high)
    return Box(tuple(start), tuple(stop))


def _find_most(
    dims: tuple[StoredDimension, ...], stored: tuple[int, ...], step: tuple[int, ...]
) -> int:
    """Return the maximum of stored elements that overlap a part of shape `step`, wherever it is."""
    return math.prod(
        size
        if dim.dimension is None
        # A part may begin and end inside a group.
        else min(size, (step[dim.dimension] // dim.elements + 2) * dim.indices)
        for dim, size in zip(dims, stored, strict=True)
    )


def _list_parts(box: Box, step: tuple[int, ...]) -> Iterator[Box]:
    """Yield a box in parts of at most a shape, aligned to multiples of its lengths."""
    columns = []
    for a, b, size in zip(box.start, box.stop, step, strict=True):
        edges = [a, *range((a // size + 1) * size, b, size), b]
        columns.append(list(itertools.pairwise(edges)))
    for product in itertools.product(*columns):
        yield Box(tuple(a for a, _ in product), tuple(b for _, b in product))


# The size of the blocks in DeepSeek-V3's float8 weights.
BLOCK = 128
# The columns of a row of blocks that are read at once, and those held in float32 at once (1 MiB).
_READ_COLUMNS = 16384
_COLUMNS = 2048


class Float8Weight(Record):
    """The elements of a two-dimensional weight in float8, or its scales."""

    source: StoredTensor
    is_scales: bool

    @property
    def dtype(self) -> DType:
        """float8, or float32 for scales."""
        return dtype("float32" if self.is_scales else "float8_e4m3fn")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the source, in elements or in blocks."""
        if not self.is_scales:
            return self.source.shape
        return tuple(-(-size // BLOCK) for size in self.source.shape)

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The weight."""
        return (self.source,)

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the bytes of a piece of a row of blocks."""
        columns = min(_READ_COLUMNS, self.source.shape[1])
        return (BLOCK * columns * self.source.dtype.itemsize_bytes,)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the box's elements or scales; blocks that are partly in the box are read whole."""
        counts = CastCounts()
        for part, bare in self._read_pieces(box, read):
            # A copy, since `scale_blocks` divides the rows in place.
            rows = np.array(as_float32(bare, self.source.dtype))
            counts += CastCounts(not_finite=int(np.count_nonzero(~np.isfinite(rows))))
            scales = scale_blocks(rows, BLOCK, MAX_E4M3FN, _find_largest)
            if self.is_scales:
                row, column = (a // BLOCK - b for a, b in zip(part.start, box.start, strict=True))
                out[row, column : column + len(scales)] = np.array(scales, np.float32).view("u4")
                continue
            # The overlap of the box and the piece, in the piece and in the box.
            if (common := box.intersect(part)) is not None:
                inside = _slice(*common, part.start)
                out[_slice(*common, box.start)] = round_to_e4m3fn(rows[inside])
        return counts

    def _read_pieces(self, box: Box, read: ReadBox) -> Iterator[tuple[Box, NDArray[Any]]]:
        """Yield pieces of rows of whole blocks that cover a box of elements or of scales."""
        unit = BLOCK if self.is_scales else 1
        low = [a * unit // BLOCK * BLOCK for a in box.start]
        ends = zip(box.stop, self.source.shape, strict=True)
        high = [min(-(-b * unit // BLOCK) * BLOCK, size) for b, size in ends]
        for row in range(low[0], high[0], BLOCK):
            below = min(row + BLOCK, high[0])
            for first in range(low[1], high[1], _READ_COLUMNS):
                last = min(first + _READ_COLUMNS, high[1])
                bare = read(0, Box((row, first), (below, last)))
                for left in range(first, last, _COLUMNS):
                    right = min(left + _COLUMNS, last)
                    part = Box((row, left), (below, right))
                    yield part, bare[:, left - first : right - first]


def _slice(
    start: tuple[int, ...], stop: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, origin, strict=True))


def _find_largest(block: Any) -> Any:
    return block.max(axis=(-2, -1))


_MARK = ".quant_state.bitsandbytes__"
# The maximum size of the JSON, which has only a shape, a type and some numbers.
_MAX_BYTES = 1 << 16


def read_flat_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the flat weights of a checkpoint, by name.

    Raises:
        FormatError: bytes that are not JSON with a shape.
        RunError: a file that cannot be read.
    """
    result: dict[str, tuple[int, ...]] = {}
    states = [checkpoint[name] for name in checkpoint.tensors if _MARK in name]
    if not states:
        return result
    files = open_sources(checkpoint)
    try:
        for tensor in states:
            reader = BlockReader(tensor, files)
            # A larger tensor is not such JSON. It is not read, so parsing the empty content fails.
            content = b""
            size = reader.workspace_size()
            if reader.grid(0).count == 1 and size.block_bytes <= _MAX_BYTES:
                workspace = size.new_workspace()
                content = bytes(reader.read_block(0, workspace))
                workspace.close()
            try:
                shape = tuple(int(size) for size in json.loads(content)["shape"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise FormatError(
                    f"{tensor.name!r} in {checkpoint.folder} is no JSON with a shape, by which a "
                    f"flat weight of bitsandbytes is cut; its writer should have put one: {error}"
                ) from error
            result[tensor.name.partition(_MARK)[0]] = shape
    finally:
        files.close()
    return result
