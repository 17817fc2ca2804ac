"""Moves of a refit: which rank sends which slice of a tensor to which rank, known before a run.

A slice that a rank copies from its source to its target is a move from that rank to itself.
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
    """A box of a tensor that moves from a rank to a rank.

    Attributes:
        name: of the target's tensor.
        source_name: of the source's tensor.
        sender, receiver: ranks, which are equal for a local copy.
        slices: the box in the target's tensor, `(start, stop)` of each dimension.
        dtype: of the elements as they are sent.
        size_bytes: of the sent elements.
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
        origin = "" if self.source_name == self.name else f", of {self.source_name}"
        return f"{goes}: {self.name}[{box}]{origin}, {self.dtype}, {bytes_text(self.size_bytes)}"


@dataclass(frozen=True, slots=True)
class RefitMoves(Sequence[TensorMove]):
    """All moves known on this rank, in the order of the tensors. Its text has a line for each.

    With local planning these are the moves of all ranks; with centralized planning, the moves that
    this rank takes part in. Tensors that move by programs are listed in the refit's report instead.
    """

    moves: tuple[TensorMove, ...]

    def __getitem__(self, index: int) -> TensorMove:  # type: ignore[override]
        return self.moves[index]

    def __len__(self) -> int:
        return len(self.moves)

    def sent_by(self, rank: int) -> tuple[TensorMove, ...]:
        """Return the moves from a rank to other ranks."""
        return tuple(move for move in self.moves if rank == move.sender != move.receiver)

    def received_by(self, rank: int) -> tuple[TensorMove, ...]:
        """Return the moves to a rank from other ranks."""
        return tuple(move for move in self.moves if rank == move.receiver != move.sender)

    def __str__(self) -> str:
        lines = [str(move) for move in self.moves[:_SHOWN]]
        more = len(self.moves) - _SHOWN
        return "\n".join([*lines, *([f"... {more} more"] if more > 0 else [])])


def list_moves(items: Iterable[PartItem], receiver: int | None = None) -> Iterator[TensorMove]:
    """Yield the moves of a part's items: those to `receiver`, or all that are known."""
    for item in items:
        match = item.match
        rows = Transfers.joined(rows for _, rows in item.stages)
        if receiver is not None:
            rows = rows.take(rows.target_slot == receiver)
        begin = np.zeros(rows.start.shape[1], dtype=np.int64)
        if match.target_range is not None:
            # The slices of a piece are relative to its offset in the fused tensor.
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
