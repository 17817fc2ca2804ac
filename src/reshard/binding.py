"""Addresses of the shards of a layout, and how each shard lies in memory there.

A `Binding` gives the ranks of a layout their addresses: the memory of a rank, a range of a
file, or another tensor's name. A shard that is not dense and row major has a `View` as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard._validation import check_int, check_ints, check_type
from reshard.errors import LayoutError
from reshard.layout import Layout

REPLICAS = ("once", "every")
"""How equal shards of several ranks are stored: one copy, or one for each rank."""


@dataclass(frozen=True, slots=True)
class View:
    """How a shard lies in memory that is not its own: element `offset` and `strides`.

    `strides` has one entry a dimension, in elements, so column-major, transposed and
    flattened shards are ordinary.

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
        """The dense view of `shape`, last dimension fastest."""
        shape = check_ints(shape, "shape", LayoutError)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return cls(offset, tuple(strides))

    def positions(self, shape: Sequence[int]) -> NDArray[np.int64]:
        """The position of every element of a shard of `shape`, an array of that shape.

        Raises LayoutError for a shape of another number of dimensions.
        """
        shape = check_ints(shape, "shape", LayoutError)
        if len(shape) != len(self.strides):
            raise LayoutError(
                f"a view of {len(self.strides)} strides for a shard of shape {list(shape)}; give "
                "one stride a dimension"
            )
        index = np.full(shape, self.offset, dtype=np.int64)
        for dimension, stride in enumerate(self.strides):
            # Offsets along one dimension, broadcast over the others.
            steps = np.arange(shape[dimension], dtype=np.int64) * stride
            index += steps.reshape((-1,) + (1,) * (len(shape) - dimension - 1))
        return index


@dataclass(frozen=True, slots=True)
class RankMemory:
    """An address: the buffer of one rank."""

    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_int(self.rank, "rank", LayoutError))


@dataclass(frozen=True, slots=True)
class FileRange:
    """An address: bytes `start_bytes` onwards of a file."""

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
    """Every rank of a layout in its own memory; an address is made when it is asked for.

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
        same = isinstance(other, OwnRanks) and other.layout is self.layout
        return same or super().__eq__(other)


class FileRanges(Mapping[int, Address | tuple[Address, ...]]):
    """The ranges of files in which a layout's shards are; an address is made when asked for.

    Args:
        layout: whose shards they are.
        places: `(slot, cell)` of each, those of a slot together; the cell is None where those of
            the slot lie one behind the other.
        files: the file of each.
        starts: where in it each begins, in bytes.

    >>> ranges = FileRanges(Layout.whole((4,), [2], 3), ((2, None),), ("a",), (64,))
    >>> dict(ranges)
    {2: FileRange(path='a', start_bytes=64)}
    """

    __slots__ = ("_files", "_places", "_starts", "layout")

    def __init__(
        self,
        layout: Layout,
        places: tuple[tuple[int, int | None], ...],
        files: tuple[str, ...],
        starts: tuple[int, ...],
    ) -> None:
        self.layout = layout
        self._places, self._files, self._starts = places, files, starts

    def __getitem__(self, slot: int) -> Address | tuple[Address, ...]:
        found = []
        for (one, cell), file, start in zip(self._places, self._files, self._starts, strict=True):
            if one == slot and cell is None:
                return FileRange(file, start)
            if one == slot:
                found.append(FileRange(file, start))
        if not found:
            raise KeyError(slot)
        return tuple(found)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(slot for slot, _ in self._places))

    def __len__(self) -> int:
        return len({slot for slot, _ in self._places})


@dataclass(frozen=True, slots=True)
class Binding:
    """Where the shards of a layout are: an address and a view for each rank that has one.

    The shard of a rank without a view is dense and row major. A rank without an address is not
    there: two that hold the same cell may share one copy, which then has one address. A rank whose
    cells lie apart has a tuple of addresses, one for each cell in order, and so has its view.

    Raises:
        LayoutError: an address for a rank that holds nothing, or a view that does not fit.
    """

    layout: Layout
    addresses: Mapping[int, Address | tuple[Address, ...]]
    views: Mapping[int, View | tuple[View, ...]]

    def __post_init__(self) -> None:
        hint = "such as spec.layout((4096, 4096))"
        check_type(self.layout, Layout, "layout", hint, LayoutError)
        # Of many thousand ranks or tensors, none needs to be looked at for these.
        own = isinstance(self.addresses, OwnRanks | FileRanges) and (
            self.addresses.layout is self.layout
        )
        if own and not self.views:
            return
        hint = "give {rank: RankMemory(rank)}, or use Binding.to_ranks(layout)"
        check_type(self.addresses, Mapping, "addresses", hint, LayoutError)
        check_type(self.views, Mapping, "views", "give {rank: View(...)}, or {}", LayoutError)
        holders = set(self.layout.holders)
        for slot, address in self.addresses.items():
            if slot not in holders:
                raise LayoutError(f"rank {slot} has an address, but holds nothing of the tensor")
            cells = len(self.layout.cells_of(slot))
            if isinstance(address, tuple) and len(address) != cells:
                raise LayoutError(f"rank {slot} has {len(address)} addresses for {cells} cells")
        for slot, view in self.views.items():
            shape = self.layout.local_shape(slot)
            if isinstance(view, tuple):
                # A view for each cell, with a stride for each dimension.
                fit = [len(one.strides) == self.layout.ndim for one in view]
                if not all(fit) or len(fit) != len(self.layout.cells_of(slot)):
                    raise LayoutError(f"the views of rank {slot} do not fit its cells: {view}")
            elif shape is None or len(view.strides) != len(shape):
                raise LayoutError(
                    f"the view of rank {slot} has {len(view.strides)} strides for a shard of "
                    f"shape {shape}"
                )

    @classmethod
    def to_ranks(cls, layout: Layout) -> Binding:
        """Every shard in the memory of its rank."""
        return cls(layout, OwnRanks(layout), {})

    def view(self, slot: int) -> View | tuple[View, ...]:
        """How a rank's shard lies behind its address; a tuple where its cells lie apart."""
        shape = self.layout.local_shape(slot)
        if shape is None:
            raise LayoutError(f"rank {slot} holds nothing of the tensor")
        return self.views.get(slot) or View.row_major(shape)
