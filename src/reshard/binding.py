"""Bindings: the addresses of the shards of a layout, and their strides.

A `Binding` gives the ranks of a layout their addresses: the memory of a rank, a range of a file, or
the name of another tensor. A shard that is not dense and row-major has a `View` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard._validation import check_int, check_ints, check_type
from reshard.errors import LayoutError
from reshard.layout import Layout

REPLICAS = ("once", "every")
"""How replicas are stored: a single copy, or a copy for each rank."""


def dense_strides(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a row-major tensor without gaps.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [itemsize] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * shape[d]
    return tuple(strides)


def are_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """Return whether a tensor of these strides is stored row-major without gaps.

    Strides of single indices do not matter.

    >>> are_dense((1, 4), (7, 1)), are_dense((3, 4), (1, 3))
    (True, False)
    """
    return 0 in shape or all(
        size == 1 or stride == expected
        for size, stride, expected in zip(
            shape, strides, dense_strides(shape, itemsize), strict=True
        )
    )


@dataclass(frozen=True, slots=True)
class View:
    """The storage of a shard in memory: element `offset` and `strides`.

    `strides` has an entry per dimension, in elements, which covers column-major, transposed and
    flattened shards.

    >>> View.row_major((2, 3))
    View(offset=0, strides=(3, 1))
    """

    offset: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        offset = check_int(self.offset, "offset of a view", LayoutError)
        strides = check_ints(self.strides, "strides of a view", LayoutError, minimum=None)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "strides", strides)

    @classmethod
    def row_major(cls, shape: Sequence[int], offset: int = 0) -> View:
        """Return the dense view of `shape`, last dimension fastest."""
        shape = check_ints(shape, "shape", LayoutError)
        return cls(offset, dense_strides(shape))

    def is_dense(self, shape: Sequence[int]) -> bool:
        """Return whether a shard of `shape` is stored row-major without gaps."""
        return are_dense(shape, self.strides)

    def extent(self, shape: Sequence[int]) -> int:
        """Return the number of elements from the first of a shard of `shape` to its last.

        >>> View(5, (1, 3)).extent((2, 4)), View(0, (1,)).extent((0,))
        (11, 0)
        """
        if 0 in shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(shape, self.strides, strict=True))

    def positions(self, shape: Sequence[int]) -> NDArray[np.int64]:
        """Return the position of every element of a shard of `shape`, as an array of that shape.

        Raises LayoutError for a shape with another number of dimensions.
        """
        shape = check_ints(shape, "shape", LayoutError)
        if len(shape) != len(self.strides):
            raise LayoutError(
                f"a view of {len(self.strides)} strides for a shard of shape {list(shape)}; give "
                "one stride per dimension"
            )
        index = np.full(shape, self.offset, dtype=np.int64)
        for dimension, stride in enumerate(self.strides):
            # The offsets along a dimension, broadcast over the others.
            steps = np.arange(shape[dimension], dtype=np.int64) * stride
            index += steps.reshape((-1,) + (1,) * (len(shape) - dimension - 1))
        return index


@dataclass(frozen=True, slots=True)
class RankMemory:
    """An address: the buffer of a rank."""

    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_int(self.rank, "rank", LayoutError))


@dataclass(frozen=True, slots=True)
class FileRange:
    """An address: the bytes of a file from `start_bytes` on."""

    path: str
    start_bytes: int

    def __post_init__(self) -> None:
        start = check_int(self.start_bytes, "start_bytes", LayoutError)
        object.__setattr__(self, "start_bytes", start)


@dataclass(frozen=True, slots=True)
class TensorName:
    """An address: another tensor, by name."""

    name: str


Address = RankMemory | FileRange | TensorName


class OwnRanks(Mapping[int, Address]):
    """A mapping from every rank of a layout to its own memory; addresses are created on access.

    >>> OwnRanks(Layout.whole((4,), [2], 3))[2], len(OwnRanks(Layout.whole((4,), [2], 3)))
    (RankMemory(rank=2), 1)
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __getitem__(self, slot: int) -> Address:
        if not 0 <= slot < self.layout.slots or not self.layout.cells_of(slot):
            raise KeyError(slot)
        return RankMemory(slot)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout.holders)

    def __len__(self) -> int:
        return len(self.layout.holders)

    def __eq__(self, other: object) -> bool:
        # Mappings are compared item by item, which would create the address of every rank.
        same = isinstance(other, OwnRanks) and other.layout is self.layout
        return same or super().__eq__(other)


class FileRanges(Mapping[int, Address | tuple[Address, ...]]):
    """A mapping from the ranks of a layout to ranges of files; addresses are created on access.

    Args:
        layout: the layout of the shards.
        places: `(slot, cell)` of each range, grouped by slot; the cell is None if the cells of
            the slot are contiguous.
        files: the file of each range.
        starts: the offset of each range in its file, in bytes.

    >>> ranges = FileRanges(Layout.whole((4,), [2], 3), ((2, None),), ("a",), (64,))
    >>> dict(ranges)
    {2: FileRange(path='a', start_bytes=64)}
    """

    __slots__ = ("_files", "_first", "_places", "_starts", "layout")

    def __init__(
        self,
        layout: Layout,
        places: tuple[tuple[int, int | None], ...],
        files: tuple[str, ...],
        starts: tuple[int, ...],
    ) -> None:
        self.layout = layout
        self._places, self._files, self._starts = places, files, starts
        # The first place of each slot, found when it is needed: there may be a thousand slots.
        self._first: dict[int, int] | None = None

    def __getitem__(self, slot: int) -> Address | tuple[Address, ...]:
        first = self._first
        if first is None:
            first = {}
            for number, (owner, _) in enumerate(self._places):
                first.setdefault(owner, number)
            # Stored when it is complete, since other threads may read it.
            self._first = first
        at = first[slot]
        if self._places[at][1] is None:
            return FileRange(self._files[at], self._starts[at])
        ranges = []
        while at < len(self._places) and self._places[at][0] == slot:
            ranges.append(FileRange(self._files[at], self._starts[at]))
            at += 1
        return tuple(ranges)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(slot for slot, _ in self._places))

    def __len__(self) -> int:
        return len({slot for slot, _ in self._places})


@dataclass(frozen=True, slots=True)
class Binding:
    """The storage of the shards of a layout: an address and a view for each rank that is stored.

    The shard of a rank without a view is dense and row-major. A rank without an address is not
    stored: ranks that hold the same cell may share a copy, which has a single address. A rank whose
    cells are not contiguous has a tuple of addresses, in the order of the cells, and of views.

    Raises:
        LayoutError: an address for a rank that holds nothing, or a view of the wrong dimensions.
    """

    layout: Layout
    addresses: Mapping[int, Address | tuple[Address, ...]]
    views: Mapping[int, View | tuple[View, ...]]

    def __post_init__(self) -> None:
        hint = "such as spec.layout((4096, 4096))"
        check_type(self.layout, Layout, "layout", hint, LayoutError)
        # These are valid by construction; checking them would list many thousand ranks.
        is_valid = isinstance(self.addresses, OwnRanks | FileRanges) and (
            self.addresses.layout is self.layout
        )
        if is_valid and not self.views:
            return
        hint = "give {rank: RankMemory(rank)}, or use Binding.to_ranks(layout)"
        check_type(self.addresses, Mapping, "addresses", hint, LayoutError)
        check_type(self.views, Mapping, "views", "give {rank: View(...)}, or {}", LayoutError)
        holders = set(self.layout.holders)
        for slot, address in self.addresses.items():
            if slot not in holders:
                raise LayoutError(f"rank {slot} has an address, but holds no part of the tensor")
            cells = len(self.layout.cells_of(slot))
            if isinstance(address, tuple) and len(address) != cells:
                raise LayoutError(f"rank {slot} has {len(address)} addresses for {cells} cells")
        for slot, view in self.views.items():
            shape = self.layout.local_shape(slot)
            if isinstance(view, tuple):
                # A view per cell, with a stride per dimension.
                fit = [len(cell_view.strides) == self.layout.ndim for cell_view in view]
                if not all(fit) or len(fit) != len(self.layout.cells_of(slot)):
                    raise LayoutError(f"the views of rank {slot} do not fit its cells: {view}")
            elif shape is None or len(view.strides) != len(shape):
                raise LayoutError(
                    f"the view of rank {slot} has {len(view.strides)} strides for a shard of "
                    f"shape {shape}"
                )

    @classmethod
    def to_ranks(cls, layout: Layout) -> Binding:
        """Return a binding of every shard to the memory of its rank."""
        return cls(layout, OwnRanks(layout), {})

    def view(self, slot: int) -> View | tuple[View, ...]:
        """Return the view of a rank's shard; a tuple if its cells are not contiguous."""
        shape = self.layout.local_shape(slot)
        if shape is None:
            raise LayoutError(f"rank {slot} holds no part of the tensor")
        return self.views.get(slot) or View.row_major(shape)
