"""Digests of the blocks of a checkpoint that is converted, checked or compared.

The blocks are those of `Moves`, in batches; a tensor's digest follows from those of its blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from reshard.checkpoint.blocks.block_io import BatchReader, WorkspaceSize
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, block_digest
from reshard.checkpoint.blocks.tensor_columns import DigestColumns
from reshard.checkpoint.conversion.moves import Batch, Moves
from reshard.runs import IntArray


class DigestedBlocks:
    """The blocks of a checkpoint's tensors, and their digests as they are found."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        # 16 bytes a block: a checkpoint of 1 TB has 250,000 of them.
        self.found = np.zeros((moves.count, DIGEST_BYTES), dtype=np.uint8)

    def batches(self, rows: IntArray, batch_bytes: int) -> Iterator[Batch]:
        """The blocks of the tensors in these rows, those of small ones together."""
        is_wanted = np.zeros(len(self.moves.target), dtype=bool)
        is_wanted[rows] = True
        numbers = np.flatnonzero(np.repeat(is_wanted, self.moves.block_counts))
        return self.moves.batches(numbers, batch_bytes)

    def note(self, numbers: IntArray, digests: bytes) -> None:
        """The digests of blocks, one behind the other."""
        self.found[numbers] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)

    def place(self, number: int) -> tuple[int, int]:
        """The row of the tensor of a block, and the block's number in it."""
        rows, blocks = self.moves.places(np.array([number]))
        return int(rows[0]), int(blocks[0])

    def last_name(self, batch: Batch) -> str:
        """The name of the last tensor of a batch."""
        return self.moves.target.names[int(batch.written[-1].rows[-1])]

    def of(self, row: int) -> bytes:
        """The digests of the blocks of a tensor, one behind the other."""
        begin, end = self.moves.first_block[row : row + 2].tolist()
        return self.found[begin:end].tobytes()

    def columns(self) -> DigestColumns:
        """The digests of all tensors and of their blocks."""
        first, blocks = self.moves.first_block, self.found.tobytes()
        ends = (first * DIGEST_BYTES).tolist()
        memory = memoryview(blocks)
        whole = b"".join(block_digest(memory[begin:end]) for begin, end in itertools.pairwise(ends))
        return DigestColumns(first, blocks, whole)

    def digests(self, rows: Iterable[int]) -> dict[str, str]:
        """The digests of tensors, as text."""
        names = self.moves.target.names
        return {names[row]: block_digest(self.of(row)).hex() for row in rows}


def size_workspace(reader: BatchReader, rows: IntArray, batch_bytes: int) -> WorkspaceSize:
    """The memory that a thread needs to read the tensors in these rows."""
    kinds = np.unique(reader.columns.kind[rows]).tolist()
    block = max((reader.grid(kind).largest_bytes for kind in kinds), default=0)
    span = max(map(reader.span_bytes, kinds), default=0)
    return WorkspaceSize(block, span).with_batches(batch_bytes)
