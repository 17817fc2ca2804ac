"""Blocks: the pieces into which a tensor is cut for work on files, and their digests.

A block is a fixed range of a tensor's elements in row-major order, about 4 MiB, found from
shape and element size alone. So the blocks of a tensor are the same however it is cut over
ranks, in whatever format, by however many processes, and a digest over them means the tensor.

1. Find the dimension where one index, with all dimensions behind it, fits into a block, and
   one index of the dimension before does not.
2. Cut that dimension into equal chunks that fit. A block is one index of every dimension
   before it, one chunk of it, and all of the dimensions behind: a box, and a range::

       8 x 3 x 1000000 float32     one row of 12 MB is too much, one of 4 MB fits:
                                   24 blocks [i:i+1, j:j+1, 0:1000000]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.checkpoint.contents import TensorDigest
from reshard.errors import MissingExtraError
from reshard.layout import Box

# Digests in manifests are of blocks of this size: with another one they could not be compared.
BLOCK_BYTES = 4 * 1024 * 1024
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The blocks of a tensor: chunks of `chunk` indices of `dimension`, `count` blocks in all.

    `block_bytes` is what a block may have; a single element may have more.

    >>> grid = BlockGrid.of((8, 3, 1000000), 4)
    >>> grid.count, str(grid.box(4))
    (24, '[1:2, 1:2, 0:1000000]')
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
        """The blocks of a tensor of `shape` with elements of `itemsize_bytes`.

        Blocks have `BLOCK_BYTES` when `block_bytes` is None.
        """
        shape = tuple(shape)
        block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        if not shape:
            return cls(shape, itemsize_bytes, 0, 1, 1, block_bytes)
        dimension, inner_bytes = len(shape) - 1, itemsize_bytes
        # From the last dimension on: those that fit into a block whole.
        while dimension > 0 and inner_bytes * shape[dimension] <= block_bytes:
            inner_bytes *= shape[dimension]
            dimension -= 1
        length = shape[dimension]
        most = max(1, block_bytes // max(inner_bytes, 1))
        chunks = -(-length // most)
        # Chunks of about equal length, instead of full ones and a short rest.
        chunk = -(-length // chunks) if chunks else 1
        outer = math.prod(shape[:dimension])
        count = 0 if 0 in shape else outer * -(-length // chunk)
        return cls(shape, itemsize_bytes, dimension, chunk, count, block_bytes)

    def box(self, index: int) -> Box:
        """The elements of block `index`."""
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

    def size_bytes(self, index: int) -> int:
        """Bytes of block `index`."""
        return self.box(index).elements * self.itemsize_bytes

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest block."""
        return self.size_bytes(0) if self.count else 0


def block_digest(block: bytes | memoryview) -> bytes:
    """The 16-byte digest of a block's bytes (XXH3, 128 bits).

    It finds damage; it is no protection against somebody who means to deceive.

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
    """The digest of a tensor from those of its blocks, in order."""
    ordered = tuple(blocks)
    return TensorDigest(block_digest(b"".join(ordered)), ordered)
