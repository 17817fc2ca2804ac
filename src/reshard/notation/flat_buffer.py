"""Flat buffers of ZeRO and FSDP: the ranges of each tensor that an even part of a buffer holds.

ZeRO and FSDP concatenate flattened tensors, pad the end, and give every rank as many
elements of the whole. A rank's part begins and ends anywhere in a tensor::

    a (2, 3) and b (5,) over 3 ranks       |a a a a|a a b b|b b b .|

    rank 0 has 0:4 of a; rank 1 has 4:6 of a and 0:2 of b; rank 2 has 2:5 of b and a pad

==============================  ==========================================================
ZeRO 1 and 2 of DeepSpeed       a buffer per parameter group, `rank_multiple=2`
ZeRO 3 of DeepSpeed             a buffer per tensor
FSDP1 of PyTorch                a buffer per wrapped module; with `use_orig_params`,
                                `alignment` is 16 bytes of elements
==============================  ==========================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard._records import Record
from reshard._validation import check_int, check_ints
from reshard.cut_rules import ceil_divide
from reshard.errors import NotationError
from reshard.layout import Layout


class BufferPiece(NamedTuple):
    """Elements `start:stop` of a flattened tensor, which begin at `offset` in a rank's part."""

    name: str
    start: int
    stop: int
    offset: int


class FlatBuffer(Record):
    """Concatenated tensors in a buffer that is divided evenly over ranks.

    Args:
        tensors: `(name, shape)` pairs in the order of the buffer, or a mapping.
        ranks: how many ranks have a part of it.
        alignment: each tensor begins at a multiple of so many elements.
        rank_multiple: each rank's part is a multiple of so many elements.

    Raises:
        NotationError: a name twice, negative sizes, numbers below 1.

    >>> buffer = FlatBuffer({"a": (2, 3), "b": (5,)}, ranks=3)
    >>> buffer.rank_elements, buffer.elements
    (4, 12)
    >>> buffer.pieces(1)
    (BufferPiece(name='a', start=4, stop=6, offset=0), BufferPiece(name='b', start=0, stop=2,
    offset=2))
    >>> [str(box) for box in buffer.layout("a").boxes(0)]
    ['[0:1, 0:3]', '[1:2, 0:1]']
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    ranks: int
    alignment: int = 1
    rank_multiple: int = 1

    def __init__(
        self,
        tensors: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
        ranks: int,
        alignment: int = 1,
        rank_multiple: int = 1,
    ) -> None:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        checked = tuple(
            (name, check_ints(shape, f"the shape of {name!r} in a flat buffer", NotationError))
            for name, shape in pairs
        )
        object.__setattr__(self, "tensors", checked)
        for name, value in (
            ("ranks", ranks),
            ("alignment", alignment),
            ("rank_multiple", rank_multiple),
        ):
            number = check_int(value, f"a flat buffer's {name}", NotationError, minimum=1)
            object.__setattr__(self, name, number)
        counts = Counter(name for name, _ in checked)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise NotationError(
                f"{twice[0]!r} occurs twice in a flat buffer; give each tensor once"
            )

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor begins in the buffer, in elements."""
        starts: list[int] = []
        at = 0
        for _, shape in self.tensors:
            # Only beginnings are aligned: padding precedes a tensor and never follows the last.
            at = ceil_divide(at, self.alignment) * self.alignment
            starts.append(at)
            at += math.prod(shape)
        return tuple(starts)

    @property
    def rank_elements(self) -> int:
        """The elements of the buffer that each rank has, padding included."""
        # All parts are equally long, so the last ranks may have padding only.
        used = 0
        if self.tensors:
            used = self.starts[-1] + math.prod(self.tensors[-1][1])
        return ceil_divide(used, self.ranks * self.rank_multiple) * self.rank_multiple

    @property
    def elements(self) -> int:
        """The length of the buffer, padding included."""
        return self.rank_elements * self.ranks

    def pieces(self, rank: int) -> tuple[BufferPiece, ...]:
        """Return the pieces of tensors that a rank has, in the order of its part.

        Raises:
            NotationError: an unknown rank.
        """
        if not 0 <= rank < self.ranks:
            raise NotationError(f"rank {rank} of a flat buffer over {self.ranks} ranks")
        low, high = rank * self.rank_elements, (rank + 1) * self.rank_elements
        pieces = []
        for (name, shape), begin in zip(self.tensors, self.starts, strict=True):
            start, stop = max(low, begin), min(high, begin + math.prod(shape))
            if start < stop:
                pieces.append(BufferPiece(name, start - begin, stop - begin, start - low))
        return tuple(pieces)

    def layout(self, name: str, devices: Sequence[int] | None = None) -> Layout:
        """Return the layout of a tensor; a rank without any of its elements holds nothing.

        Args:
            name: of the tensor.
            devices: the slot of each rank of the buffer; by default 0, 1, 2...

        Raises:
            NotationError: an unknown name, or a wrong number of devices.
        """
        shapes = dict(self.tensors)
        if name not in shapes:
            raise NotationError(
                f"{name!r} is not in the flat buffer, which has {', '.join(shapes) or 'no tensors'}"
            )
        begin = dict(zip(shapes, self.starts, strict=True))[name]
        return self._layout(shapes[name], begin, self._slots(devices))

    def layouts(self, devices: Sequence[int] | None = None) -> dict[str, Layout]:
        """Return the layout of every tensor, by name; see `layout`.

        >>> FlatBuffer({"a": (2, 3), "b": (5,)}, ranks=3).layouts()["b"].holders
        (1, 2)
        """
        slots = self._slots(devices)
        return {
            name: self._layout(shape, begin, slots)
            for (name, shape), begin in zip(self.tensors, self.starts, strict=True)
        }

    def _slots(self, devices: Sequence[int] | None) -> list[int]:
        slots = list(range(self.ranks)) if devices is None else [int(slot) for slot in devices]
        if len(set(slots)) != self.ranks or len(slots) != self.ranks:
            raise NotationError(
                f"devices {slots} for a flat buffer over {self.ranks} ranks; give a device for each"
            )
        return slots

    def _layout(self, shape: tuple[int, ...], begin: int, slots: list[int]) -> Layout:
        """Return the layout of a tensor of `shape` that begins at `begin` in the buffer."""
        each, end = self.rank_elements, begin + math.prod(shape)
        ranges = {}
        if begin < end:
            # Only the ranks that hold some of the tensor.
            for rank in range(begin // each, ceil_divide(end, each)):
                start, stop = max(rank * each, begin), min((rank + 1) * each, end)
                ranges[slots[rank]] = (start - begin, stop - begin)
        return Layout.flat_ranges(shape, ranges, slots=max(slots) + 1)
