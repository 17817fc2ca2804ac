"""Flat ranges of blocks: how `fully_sharded_model_space` keeps optimizer state.

Each rank has a range of the flattened block of a parameter that its tensor-parallel rank holds. In
the distributed checkpoint, the dimensions of the parameter count blocks, and one more is of the
elements in a block; the true shape stands in the attribute `mcore_data`::

    parameter (64, 32) in 2 x 1 blocks of (32, 32)       stored as (2, 1, 1024)
      block (1, 0), elements 40:72                        chunk [1:2, 0:1, 40:72]
      = rows 33, columns 8:32, and row 34, columns 0:8

A range is at most a few boxes of the parameter, each dense in the file (`flat_range_boxes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from reshard.checkpoint.blocks.fusing import StoredBox, bind_boxes, list_stored_boxes
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.torch_files.archived_tensors import as_sizes
from reshard.errors import FormatError
from reshard.layout import Box, flat_range_boxes

_SHAPE_KEY = "nd_reformulated_orig_global_shape"


def bind_flat_ranges(tensor: StoredTensor, described: object) -> StoredTensor:
    """A tensor of blocks and elements as the tensor that it was; `described` has its shape.

    Raises:
        FormatError: a shape that its blocks do not make.
    """
    shape = as_sizes(described.get(_SHAPE_KEY)) if isinstance(described, dict) else None
    stored = tensor.shape
    if shape is None:
        return tensor
    blocks = tuple(n // max(count, 1) for n, count in zip(shape, stored, strict=False))
    if (
        len(stored) != len(shape) + 1
        or any(n != size * count for n, size, count in zip(shape, blocks, stored, strict=False))
        or math.prod(blocks) != stored[-1]
    ):
        raise FormatError(
            f"tensor {tensor.name!r} is stored as {list(stored)}, blocks and the elements of one; "
            f"they do not make the shape {list(shape)} that its metadata says"
        )
    return bind_boxes(tensor.name, tensor, shape, _list_boxes(tensor, blocks))


def _list_boxes(tensor: StoredTensor, block: tuple[int, ...]) -> Iterator[StoredBox]:
    """The boxes of the true tensor, block by block."""
    itemsize_bytes = tensor.dtype.itemsize_bytes
    for one in list_stored_boxes(tensor):
        # A chunk is of one block, but a tensor that is put together may have boxes of several.
        for index in product(*map(range, one.box.start[:-1], one.box.stop[:-1])):
            steps = zip(index, one.box.start, one.strides, strict=False)
            ahead = sum((at - start) * stride for at, start, stride in steps)
            first = [at * size for at, size in zip(index, block, strict=True)]
            done = 0
            for box in flat_range_boxes(block, one.box.start[-1], one.box.stop[-1]):
                start = tuple(map(sum, zip(first, box.start, strict=True)))
                stop = tuple(map(sum, zip(first, box.stop, strict=True)))
                further = (ahead + done * one.strides[-1]) * itemsize_bytes
                strides = tuple(
                    math.prod(box.shape[d + 1 :]) * one.strides[-1] for d in range(len(block))
                )
                yield one.moved(Box(start, stop), further, strides)
                done += box.elements
