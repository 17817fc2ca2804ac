"""Moves of a refit: who sends which slice of which tensor to whom, to be read before it runs.

What stays on a rank, copied from its source to its target, is a move from that rank to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.geometry.transfers import Transfers
from reshard.text import bytes_text
from reshard.torch.refitting.plan import PartItem

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TensorMove:
    """A box of a tensor that goes from one rank to another.

    Attributes:
        name: of the target's tensor.
        source_name: of the source's.
        sender, receiver: ranks, which are one where it stays.
        slices: the box in the target's tensor, `(start, stop)` of each dimension.
        dtype: of what travels.
        size_bytes: of that.
    """

    name: str
    source_name: str
    sender: int
    receiver: int
    slices: tuple[tuple[int, int], ...]
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        box = ", ".join(f"{start}:{stop}" for start, stop in self.slices)
        goes = f"rank {self.sender} -> {self.receiver}"
        if self.sender == self.receiver:
            goes = f"rank {self.sender} keeps"
        of = "" if self.source_name == self.name else f", of {self.source_name}"
        return f"{goes}: {self.name}[{box}]{of}, {self.dtype}, {bytes_text(self.size_bytes)}"


@dataclass(frozen=True, slots=True)
class RefitMoves(Sequence[TensorMove]):
    """All moves that are known here, in the order of the tensors. As text, a line for each.

    Where every rank plans for itself they are those of all ranks; where one plans for all, those
    that this rank takes part in. What moves by programs of collectives is in the refit's report.
    """

    moves: tuple[TensorMove, ...]

    def __getitem__(self, index: int) -> TensorMove:  # type: ignore[override]
        return self.moves[index]

    def __len__(self) -> int:
        return len(self.moves)

    def sent_by(self, rank: int) -> tuple[TensorMove, ...]:
        """What a rank sends to others."""
        return tuple(one for one in self.moves if rank == one.sender != one.receiver)

    def received_by(self, rank: int) -> tuple[TensorMove, ...]:
        """What a rank receives from others."""
        return tuple(one for one in self.moves if rank == one.receiver != one.sender)

    def __str__(self) -> str:
        lines = [str(one) for one in self.moves[:_SHOWN]]
        more = len(self.moves) - _SHOWN
        return "\n".join([*lines, *([f"... {more} more"] if more > 0 else [])])


def list_moves(items: Iterable[PartItem], receiver: int | None = None) -> Iterator[TensorMove]:
    """The moves of items of a part: those to one rank, or all that are known of."""
    for item in items:
        match = item.match
        rows = Transfers.joined(rows for _, rows in item.stages)
        if receiver is not None:
            rows = rows.take(rows.target_slot == receiver)
        begin = np.zeros(rows.start.shape[1], dtype=np.int64)
        if match.target_range is not None:
            # A piece of a fused tensor counts from where it begins in that.
            begin[match.target_range.dimension] = match.target_range.start
        itemsize = as_dtype(match.dtype).itemsize_bytes
        starts, stops = rows.start + begin, rows.start + begin + rows.shape
        for row, elements in enumerate(rows.elements.tolist()):
            yield TensorMove(
                match.target_name,
                match.source_name,
                int(rows.source_slot[row]),
                int(rows.target_slot[row]),
                tuple(zip(starts[row].tolist(), stops[row].tolist(), strict=True)),
                match.dtype,
                elements * itemsize,
            )
