"""Parts of stored tensors, in the terms of `torch.distributed.checkpoint`.

PyTorch plans a load by *chunks*, which are stored boxes of a tensor. Here the chunks are the boxes
that supply the tensor, with each element once: replicas are omitted, and an interleaved shard has
several chunks. A rank requests a box of the tensor, independent of its chunks; the boxes of shards
that make up this box are found when it is read::

    stored on two ranks      chunks                a rank needs    it reads

    0 0 0 1 1 1              [0:2, 0:3]            . # # # . .     columns 1:3 of rank 0,
    0 0 0 1 1 1              [0:2, 3:6]            . # # # . .     column 0 of rank 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.checkpoint.blocks.spans import Tile, source_tiles
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.layout import Box

# A tensor with more boxes than this has a single chunk in PyTorch's planner.
MOST_CHUNKS = 4096


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A box of a stored shard, and its position in a box of the tensor.

    `local` is its offset in the shard of `tile`, and `inside` its offset in the box.
    """

    tile: Tile
    local: tuple[int, ...]
    inside: tuple[slice, ...]


def list_parts(tensor: StoredTensor, box: Box) -> Iterator[ShardPart]:
    """Yield the boxes of shards that make up a box of a tensor, with each element once."""
    if not box.elements:
        return
    for tile in source_tiles(tensor.assembly).intersecting(box):
        columns = []
        for d, (low, high) in enumerate(zip(box.start, box.stop, strict=True)):
            starts, lengths, locals_ = tile.start[d], tile.length[d], tile.local[d]
            begin, end = starts.clip(min=low), (starts + lengths).clip(max=high)
            met = (end > begin).nonzero()[0]
            columns.append(
                [
                    (int(locals_[i] + begin[i] - starts[i]), int(begin[i]) - low, int(end[i]) - low)
                    for i in met.tolist()
                ]
            )
        for product in itertools.product(*columns):
            yield ShardPart(
                tile,
                tuple(local for local, _, _ in product),
                tuple(slice(begin, end) for _, begin, end in product),
            )


def _list_boxes(tensor: StoredTensor) -> list[Box]:
    """Return the boxes that supply a tensor, or the whole tensor if there are too many."""
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    if not whole.elements:
        return [whole]
    tiles = source_tiles(tensor.assembly).tiles
    if sum(math.prod(map(len, tile.start)) for tile in tiles) > MOST_CHUNKS:
        return [whole]
    boxes = []
    for tile in tiles:
        pieces = [
            zip(start.tolist(), length.tolist(), strict=True)
            for start, length in zip(tile.start, tile.length, strict=True)
        ]
        for product in itertools.product(*pieces):
            start = tuple(begin for begin, _ in product)
            boxes.append(Box(start, tuple(begin + length for begin, length in product)))
    return sorted(boxes)


def torch_type(dtype: DType, name: str) -> torch.dtype:
    """Return PyTorch's dtype of a tensor's elements.

    Raises:
        UsageError: PyTorch has no such dtype.
    """
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(
            f"tensor {name!r} is {dtype.name}, a type that PyTorch does not have; leave it out of "
            "the state dict, or convert the checkpoint to another type"
        )
    return found


def _describe_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        for box in _list_boxes(tensor)
    ]
    properties = TensorProperties(dtype=torch_type(tensor.dtype, tensor.name))
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


Value = TypeVar("Value")


class LazyDict(dict[str, Value], Generic[Value]):
    """A dict whose values are computed on first access, by `make(key)`.

    >>> lengths = LazyDict(["a", "bb"], len)
    >>> "bb" in lengths, lengths["bb"], [*lengths.items()]
    (True, 2, [('a', 1), ('bb', 2)])
    """

    def __init__(self, keys: Any, make: Callable[[str], Value]) -> None:
        super().__init__(dict.fromkeys(keys))
        self._make = make
        self._made: set[str] = set()

    def __getitem__(self, key: str) -> Value:
        if key not in self._made:
            if key not in self:
                raise KeyError(key)
            super().__setitem__(key, self._make(key))
            self._made.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Value) -> None:
        self._made.add(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`."""
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        """Return all values."""
        return [self[key] for key in self]

    def items(self) -> Any:
        """Return all keys with their values."""
        return [(key, self[key]) for key in self]

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle as a plain dict, since `make` may need files.
        return dict, (dict(self.items()),)


def describe_contents(checkpoint: Checkpoint) -> LazyDict[Any]:
    """Return PyTorch's metadata of each name of a checkpoint."""

    def describe(name: str) -> Any:
        tensor = checkpoint.tensors.get(name)
        return BytesStorageMetadata() if tensor is None else _describe_tensor(tensor)

    return LazyDict([*checkpoint.tensors, *checkpoint.items, *checkpoint.values], describe)
