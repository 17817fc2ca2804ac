"""Which bytes of files blocks touch, for very many blocks at once.

Blocks with one number, of tensors of one kind, touch the same ranges behind the begins of their
tensors' shards: these are found once, and added to the begins as columns. A range goes from the
first to the last byte that a block writes in a shard, so it may have bytes of other blocks in it:
`size` is what the block itself writes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from reshard.checkpoint.blocks.batches import BatchWriter
from reshard.runs import IntArray

# Ranges of so many blocks are in memory at once.
_BLOCKS_AT_A_TIME = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class TouchedRanges:
    """Ranges of files: `block` says which of the blocks asked for touches each, by its place there.

    `file` is a number of `BatchWriter.file_names`. All have shape `(ranges,)`.
    """

    block: IntArray
    file: IntArray
    start: IntArray
    stop: IntArray
    size: IntArray


def touched_ranges(
    writer: BatchWriter, rows: IntArray, blocks: IntArray
) -> Iterator[TouchedRanges]:
    """The ranges that blocks write, some blocks at a time.

    Args:
        writer: of the files.
        rows: the row of the tensor of each block, shape `(blocks,)`.
        blocks: the number of each block in its tensor.
    """
    for at in range(0, len(rows), _BLOCKS_AT_A_TIME):
        some = slice(at, at + _BLOCKS_AT_A_TIME)
        yield _find_ranges(writer, rows[some], blocks[some], at)


def _find_ranges(writer: BatchWriter, rows: IntArray, blocks: IntArray, at: int) -> TouchedRanges:
    columns = writer.columns
    kinds = columns.kind[rows]
    order = np.lexsort((blocks, kinds))
    pairs = np.stack([kinds[order], blocks[order]])
    cuts = np.flatnonzero((pairs[:, 1:] != pairs[:, :-1]).any(axis=0)) + 1
    found: list[IntArray] = [np.zeros((5, 0), dtype=np.int64)]
    for chosen in np.split(order, cuts) if len(order) else ():
        extents = writer.extents(int(kinds[chosen[0]]), int(blocks[chosen[0]]))
        file, place, low, high, size = extents.T[:, None, :]
        begin = columns.starts[columns.first[rows[chosen]][:, None] + place]
        ranges = np.stack(
            [
                np.broadcast_to(at + chosen[:, None], begin.shape),
                np.broadcast_to(file, begin.shape),
                begin + low,
                begin + high,
                np.broadcast_to(size, begin.shape),
            ]
        )
        found.append(ranges.reshape(5, -1))
    return TouchedRanges(*np.concatenate(found, axis=1))
