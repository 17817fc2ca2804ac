"""Blocks: each element of a tensor lies in one, in row-major order, and they are not too large."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.blocks.grid import BLOCK_BYTES, BlockGrid, block_digest, tensor_digest
from strategies import shapes


def elements_of(grid: BlockGrid, index: int, numbers: np.ndarray) -> list[int]:
    box = grid.box(index)
    window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return numbers[window].ravel().tolist()


@given(shapes(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 200))
def test_the_blocks_in_order_are_the_tensor_in_row_major_order(
    shape: tuple[int, ...], itemsize: int, block_bytes: int
) -> None:
    grid = BlockGrid.of(shape, itemsize, block_bytes)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = [elements_of(grid, index, numbers) for index in range(grid.count)]
    assert [element for block in found for element in block] == list(range(math.prod(shape)))
    for index, block in enumerate(found):
        assert block, "no block is empty"
        assert grid.size_bytes(index) == len(block) * itemsize
        assert len(block) * itemsize <= max(block_bytes, itemsize)
        assert grid.size_bytes(index) <= grid.largest_bytes


@given(shapes(min_rank=1), st.integers(1, 64))
def test_a_block_could_not_take_one_more_index_of_a_dimension_before_its_own(
    shape: tuple[int, ...], block_bytes: int
) -> None:
    grid = BlockGrid.of(shape, 1, block_bytes)
    if grid.dimension > 0:
        assert math.prod(shape[grid.dimension :]) > block_bytes
    if grid.dimension < len(shape) - 1:
        assert math.prod(shape[grid.dimension + 1 :]) <= block_bytes


@pytest.mark.parametrize(
    ("shape", "itemsize", "count", "box"),
    [
        ((), 8, 1, "[]"),
        ((0,), 8, 0, None),
        ((3, 0, 2), 8, 0, None),
        ((1, 2**40), 2, 2**19, "[0:1, 0:2097152]"),
        ((2**40, 1), 2, 2**19, "[0:2097152, 0:1]"),
        ((3, 5 * 2**20), 1, 6, "[0:1, 0:2621440]"),
        ((2**20, 1024), 4, 1024, "[0:1024, 0:1024]"),
        ((2**62,), 1, 2**40, "[0:4194304]"),
        ((2**53 + 1,), 1, 2**31 + 1, "[0:4194304]"),
    ],
)
def test_blocks_of_large_tensors(
    shape: tuple[int, ...], itemsize: int, count: int, box: str | None
) -> None:
    grid = BlockGrid.of(shape, itemsize)
    assert grid.count == count
    assert (str(grid.box(0)) if count else None) == box
    if count:
        assert grid.box(count - 1).stop == shape
        assert grid.largest_bytes <= BLOCK_BYTES


def test_digests_tell_order_and_content() -> None:
    blocks = [block_digest(b"one"), block_digest(b"two")]
    assert len(set(blocks)) == 2
    assert all(len(digest) == 16 for digest in blocks)
    digest = tensor_digest(blocks)
    assert digest.blocks == tuple(blocks)
    assert digest.tensor != tensor_digest(reversed(blocks)).tensor
    assert tensor_digest([]).blocks == ()


def test_the_digest_of_a_block_is_that_of_every_release() -> None:
    # Written into manifests: another algorithm would need another format version.
    assert block_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
