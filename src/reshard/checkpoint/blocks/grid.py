"""Blocks: the pieces into which a tensor is divided for file I/O, and their digests.

A block is a fixed range of a tensor's elements in row-major order, about 4 MiB, determined by shape
and element size alone. The blocks of a tensor do not depend on its sharding, its format or the
number of processes, so a digest over them identifies the tensor.

1. Find the first dimension for which an index, with all following dimensions, fits into a block.
2. Divide that dimension into equal chunks that fit. A block has a single index of every preceding
   dimension, a chunk of this dimension, and all indices of the following dimensions. It is a box,
   and a contiguous range::

       8 x 3 x 1000000 float32     3 x 1000000 (12 MB) is too large, 1000000 (4 MB) fits:
                                   24 blocks [i:i+1, j:j+1, 0:1000000]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from reshard._records import Record
from reshard.checkpoint.contents import TensorDigest
from reshard.errors import MissingExtraError
from reshard.layout import Box

# Manifests contain digests of blocks of this size; digests of other sizes are not comparable.
BLOCK_BYTES = 4 * 1024 * 1024
DIGEST_BYTES = 16


class BlockGrid(Record):
    """The blocks of a tensor: chunks of `chunk` indices of `dimension`, `count` blocks in all.

    `block_bytes` is the largest size of a block; a single element may be larger.

    >>> grid = BlockGrid.of((8, 3, 1000000), 4)
    >>> grid.count, str(grid.box(4)), grid.index_of(grid.box(4))
    (24, '[1:2, 1:2, 0:1000000]', 4)
    >>> BlockGrid.of((), 4).count, BlockGrid.of((0, 5), 4).count
    (1, 0)
    """

    shape: tuple[int, ...]
    itemsize_bytes: int
    dimension: int
    chunk: int
    count: int
    block_bytes: int

    @classmethod
    def of(
        cls, shape: Sequence[int], itemsize_bytes: int, block_bytes: int | None = None
    ) -> BlockGrid:
        """Return the blocks of a tensor of `shape` with elements of `itemsize_bytes`.

        `block_bytes` is `BLOCK_BYTES` if None.
        """
        shape = tuple(shape)
        block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        if not shape:
            return cls(shape, itemsize_bytes, 0, 1, 1, block_bytes)
        dimension, inner_bytes = len(shape) - 1, itemsize_bytes
        # From the last dimension backwards, skip dimensions that fit into a block as a whole.
        while dimension > 0 and inner_bytes * shape[dimension] <= block_bytes:
            inner_bytes *= shape[dimension]
            dimension -= 1
        length = shape[dimension]
        # `inner_bytes` is 0 if a later dimension is empty, and a single index may exceed a block.
        max_chunk = max(1, block_bytes // max(inner_bytes, 1))
        chunks = -(-length // max_chunk)
        # Chunks of about equal length, instead of full chunks and a short last chunk.
        chunk = -(-length // chunks) if chunks else 1
        outer = math.prod(shape[:dimension])
        count = 0 if 0 in shape else outer * -(-length // chunk)
        return cls(shape, itemsize_bytes, dimension, chunk, count, block_bytes)

    def box(self, index: int) -> Box:
        """Return the elements of block `index`."""
        if not self.shape:
            return Box((), ())
        length = self.shape[self.dimension]
        # Blocks are numbered in row-major order: the chunk is the last digit.
        outer, chunk = divmod(index, -(-length // self.chunk))
        lead: list[int] = []
        for size in reversed(self.shape[: self.dimension]):
            outer, at = divmod(outer, size)
            lead.insert(0, at)
        begin = chunk * self.chunk
        rest = self.shape[self.dimension + 1 :]
        return Box(
            (*lead, begin, *(0 for _ in rest)),
            (*(at + 1 for at in lead), min(begin + self.chunk, length), *rest),
        )

    def index_of(self, box: Box) -> int:
        """Return the index of the block that `box` returned."""
        if not self.shape:
            return 0
        index = 0
        for at, size in zip(box.start[: self.dimension], self.shape, strict=False):
            index = index * size + at
        chunks = -(-self.shape[self.dimension] // self.chunk)
        return index * chunks + box.start[self.dimension] // self.chunk

    def size_bytes(self, index: int) -> int:
        """Return the bytes of block `index`."""
        return self.box(index).elements * self.itemsize_bytes

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest block."""
        return self.size_bytes(0) if self.count else 0


def block_digest(block: bytes | memoryview) -> bytes:
    """Return the 16-byte digest of a block's bytes (XXH3, 128 bits).

    It detects damage; it does not protect against deliberate manipulation.

    Raises:
        MissingExtraError: xxhash is not installed.
    """
    try:
        import xxhash
    except ImportError as error:
        raise MissingExtraError(
            "checkpoints need the package xxhash for digests; pip install 'reshard[checkpoint]'"
        ) from error
    return bytes(xxhash.xxh3_128_digest(block))


def tensor_digest(blocks: Iterable[bytes]) -> TensorDigest:
    """Return the digest of a tensor, computed from the digests of its blocks, in order."""
    ordered = tuple(blocks)
    return TensorDigest(block_digest(b"".join(ordered)), ordered)
