"""Blocks of ranks: their boxes in the whole parameter, and their locations in flat buffers.

A rank has a block of each parameter. Along the dimension of tensor parallelism, the block is a
stretch of the whole, or several: of a gated layer a part of the gate, then a part of the other half
(`BlockPlace`)::

    whole  | gate 0 | gate 1 | up 0 | up 1 |        block of rank 1  | gate 1 | up 1 |
                                                    boxes  0:4 at 4, 4:8 at 12

A block is stored as a tensor, or flat in a bucket of the distributed optimizer
(`flat_block`): as regions, whose container is a file and whose unit is a byte, each with the rank
that has it. `WholeTensors` assembles the blocks of all ranks.

Megatron-core's optimizer puts the parameters of a dtype on a rank into a buffer, in reversed order,
each at a multiple of 64 elements, and divides the buffer into buckets that data-parallel ranks can
share (`plan_buffer`)::

    buffer   | output_layer | final_layernorm |pad| ... | pad || word_embeddings | pad |
             |<----------------- bucket 0 ----------->|        |<---- bucket 1 ------->|
                                                  unpadded: without the padding at its end

1. A bucket ends when it has the requested number of elements, if gradients are reduced during the
   backward pass.
2. An embedding that two pipeline stages share has a bucket of its own.
3. A `coalesced` buffer consists of the buckets without the padding at their ends.

The lengths are compared with the lengths in the checkpoint (`find_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoint.blocks.fusing import StoredRegion
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.megatron.modules import is_expert
from reshard.checkpoint.formats.torch_files.reading import region_of
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.dtypes import DType
from reshard.errors import FormatError
from reshard.geometry.regions import bind_regions, flat_regions
from reshard.layout import Box
from reshard.megatron.names import EMBEDDING, OUTPUT

Shape = tuple[int, ...]


class BlockPlace(NamedTuple):
    """The place of a rank's block in the whole of `shape`.

    `pieces` are boxes of the block, each with its first index in the whole.
    """

    shape: Shape
    block_shape: Shape
    pieces: tuple[tuple[Box, Shape], ...]

    @classmethod
    def cut(
        cls, block: Sequence[int], dimension: int | None, part: int, parts: int, stride: int = 1
    ) -> BlockPlace:
        """Return the place of block number `part` of `parts` blocks of the shape `block`.

        `stride` is the number of stretches of a block, as Megatron's `partition_stride`.

        >>> [str(box) for box in BlockPlace.cut((8, 4), 0, 1, 2, 2).boxes()]
        ['[4:8, 0:4]', '[12:16, 0:4]']
        """
        shape, zeros = tuple(block), (0,) * len(block)
        if dimension is None or parts == 1:
            return cls(shape, shape, ((Box(zeros, shape), zeros),))
        d, length = dimension, shape[dimension] // stride
        pieces = []
        for n in range(stride):
            start = (*zeros[:d], n * length, *zeros[d + 1 :])
            stop = (*shape[:d], (n + 1) * length, *shape[d + 1 :])
            to = (*zeros[:d], (n * parts + part) * length, *zeros[d + 1 :])
            pieces.append((Box(start, stop), to))
        whole = (*shape[:d], shape[d] * parts, *shape[d + 1 :])
        return cls(whole, shape, tuple(pieces))

    def boxes(self) -> list[Box]:
        """Return the boxes of the block in the whole, in the block's order."""
        return [
            Box(to, tuple(a + n for a, n in zip(to, box.shape, strict=True)))
            for box, to in self.pieces
        ]

    def place(self, regions: Iterable[StoredRegion]) -> Iterator[StoredRegion]:
        """Yield regions of the block as regions of the whole."""
        for slot, region in regions:
            for box, to in self.pieces:
                # A block without elements does not intersect with itself.
                common = region if 0 in self.block_shape else region.intersect(*box)
                if common is not None:
                    by = [a - b for a, b in zip(to, box.start, strict=True)]
                    yield slot, common.translate(by)


def flat_block(regions: Iterable[StoredRegion], start: int, shape: Shape) -> Iterator[StoredRegion]:
    """Yield the block of `shape` that is flat in a 1-D tensor, from index `start` on.

    `regions` are the regions in which the 1-D tensor is stored.
    """
    stop = start + math.prod(shape)
    for slot, region in regions:
        low, high = max(start, region.start[0]), min(stop, region.stop[0])
        if low < high:
            part = region.narrow(0, low, high)
            for own in flat_regions(
                shape, low - start, high - start, part.container, part.offset, part.strides[0]
            ):
                yield slot, own


class WholeTensors:
    """The tensors that are assembled from the blocks of ranks, by name."""

    def __init__(self) -> None:
        # By tensor: its type and shape, the label of its first block, and its regions.
        self.tensors: dict[str, tuple[DType, Shape, str, list[StoredRegion]]] = {}

    def add(
        self,
        name: str,
        dtype: DType,
        place: BlockPlace,
        block: Iterable[StoredRegion],
        label: str,
    ) -> None:
        """Add a rank's block, in regions of the block; `label` names its rank in errors.

        Raises FormatError if ranks have different dtypes or shapes.
        """
        known = self.tensors.setdefault(name, (dtype, place.shape, label, []))
        if known[:2] != (dtype, place.shape):
            raise FormatError(
                f"{label} has a part of {name!r}, {dtype.name} {list(place.shape)} in all, where "
                f"{known[2]} has one of {known[0].name} {list(known[1])}; they are of "
                "different saves"
            )
        known[3].extend(place.place(block))

    def stored(self, slots: int) -> Mapping[str, StoredTensor]:
        """Return the tensors over `slots` ranks.

        Raises CoverageError if a part of a tensor is missing.
        """
        tensors = {}
        for name, (dtype, shape, _, regions) in self.tensors.items():
            binding = bind_regions(shape, regions, slots, dtype.itemsize_bytes)
            tensors[name] = StoredTensor(name, dtype, binding)
        for tensor in tensors.values():
            _ = tensor.assembly
        return tensors


# Megatron begins each parameter at a multiple of 128 bytes; parameters have 16 bits or more.
_ALIGNMENT = 64


class RankParameter(NamedTuple):
    """A parameter of a rank, in the order of its modules.

    Attributes:
        chunk: the chunk of the model, by its number on the rank.
        name: in the chunk.
        dtype, shape: of its block.
        is_shared: whether two stages share it.
    """

    chunk: int
    name: str
    dtype: DType
    shape: Shape
    is_shared: bool = False


class BufferPlan(NamedTuple):
    """The buckets of a buffer: their lengths without padding, and the places of parameters.

    A place is a parameter, its bucket, and its first index there.
    """

    lengths: tuple[int, ...]
    places: tuple[tuple[RankParameter, int, int], ...]

    def coalesced(self) -> BufferPlan:
        """Return the plan of the buffer without padding, a single bucket."""
        ahead = [sum(self.lengths[:bucket]) for bucket in range(len(self.lengths))]
        places = tuple((of, 0, ahead[bucket] + start) for of, bucket, start in self.places)
        return BufferPlan((sum(self.lengths),), places)


def plan_buffer(
    parameters: Sequence[RankParameter], bucket_elements: int | None = None
) -> BufferPlan:
    """Plan the buckets of parameters, given in the order of the modules.

    `bucket_elements` is the requested number of elements of a bucket, or None for a single bucket.

    >>> from reshard.dtypes import dtype
    >>> both = [RankParameter(0, name, dtype("int8"), (n,)) for name, n in (("a", 5), ("b", 70))]
    >>> [(of.name, bucket, start) for of, bucket, start in plan_buffer(both).places]
    [('b', 0, 0), ('a', 0, 128)]
    """
    lengths: list[int] = []
    places: list[tuple[RankParameter, int, int]] = []
    # Indices in the bucket: buckets begin at multiples of the alignment.
    at, is_empty = 0, True
    # Roughly in the order of the backward pass: the first bucket has the first gradients.
    for parameter in reversed(parameters):
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        # The first and the last stage each have a shared embedding: alone in its bucket, it is
        # divided over data-parallel ranks in the same way on both, which add up their gradients.
        if parameter.is_shared and not is_empty:
            lengths.append(at)
            at = 0
        places.append((parameter, len(lengths), at))
        at += math.prod(parameter.shape)
        is_empty = False
        is_full = bucket_elements is not None and at >= bucket_elements
        if is_full or parameter.is_shared:
            lengths.append(at)
            at, is_empty = 0, True
    if not is_empty:
        lengths.append(at)
    return BufferPlan(tuple(lengths), tuple(places))


# The buckets of a buffer by number: length, type, and the regions of a 1-D tensor. The bucket of a
# coalesced buffer has the number -1.
Buckets = dict[int, tuple[int, DType, list[StoredRegion]]]
_COALESCED = -1


def read_buffers(
    state: Any, slot: int, path: str, start_bytes: int = 0
) -> dict[int, dict[str, Buckets]]:
    """Return the coalesced buffers in the state of a distributed optimizer, by number and key.

    A buffer has the parameters of a single type, by which its tensors are stored. The state begins
    at `start_bytes` of a file, which rank `slot` has.
    """
    buffers: dict[int, dict[str, Buckets]] = {}
    for number, types in state.items() if isinstance(state, dict) else ():
        tensors = next(iter(types.values()), None) if isinstance(types, dict) else None
        if type(number) is int and isinstance(tensors, dict):
            buffers[number] = {
                key: {
                    _COALESCED: (of.shape[0], of.dtype, [(slot, region_of(path, of, start_bytes))])
                }
                for key, of in tensors.items()
                if isinstance(of, ArchivedTensor) and len(of.shape) == 1
            }
    return buffers


def lengths_of(buffer: Mapping[str, Buckets]) -> int | tuple[int, ...] | None:
    """Return the lengths of a buffer's buckets, or its length if it is coalesced.

    None if they differ by key, or if there are none.
    """
    found = {tuple((n, buckets[n][0]) for n in sorted(buckets)) for buckets in buffer.values()}
    if len(found) != 1:
        return None
    numbers, lengths = zip(*found.pop(), strict=True)
    return lengths[0] if _COALESCED in numbers else lengths


def take_block(
    buckets: Buckets, bucket: int, start: int, shape: Shape
) -> tuple[DType, list[StoredRegion]]:
    """Return the block of `shape` that begins at an index of a bucket of a plan."""
    _, dtype, regions = buckets[sorted(buckets)[bucket]]
    return dtype, [*flat_block(regions, start, shape)]


def find_plan(
    parameters: Sequence[RankParameter],
    lengths: int | Sequence[int] | None,
    bucket_elements: Iterable[int] = (),
) -> BufferPlan | None:
    """Return a plan whose buckets have the lengths in a checkpoint, or None.

    For a sum of lengths it is the plan of a coalesced buffer.

    Args:
        parameters: in the order of the modules.
        lengths: of each bucket without padding, or their sum; None if they are not known.
        bucket_elements: possible requested numbers of elements of a bucket.
    """
    if lengths is None:
        return None
    sizes: list[int | None] = [None, *bucket_elements]
    if not isinstance(lengths, int):
        # The first bucket was full when it was closed, and not before.
        sizes += list(dict.fromkeys(lengths))
    for size in sizes:
        plan = plan_buffer(parameters, size)
        if isinstance(lengths, int):
            if sum(plan.lengths) == lengths:
                return plan.coalesced()
        elif plan.lengths == tuple(lengths):
            return plan
    return None


# Megatron's default: with many ranks, smaller buckets would make the parts that ranks send each
# other so small that their latency counts.
_MIN_BUCKET_ELEMENTS = 40_000_000
_BUCKET_ELEMENTS_PER_RANK = 1_000_000


def split_chain(parameters: Sequence[RankParameter], members: int) -> list[list[RankParameter]]:
    """Return the parameters of each optimizer of a chain: two are for dense layers and experts."""
    if members != 2:
        return [list(parameters)]
    return [
        [parameter for parameter in parameters if is_expert(parameter.name) == flag]
        for flag in (False, True)
    ]


def list_buffers(
    parameters: Sequence[RankParameter], *, is_embedding_shared: bool
) -> list[list[RankParameter]]:
    """Return the buffers of an optimizer's parameters, by chunk and element type."""
    buffers: dict[tuple[int, str], list[RankParameter]] = {}
    for parameter in parameters:
        is_embedding = parameter.name.endswith((EMBEDDING, OUTPUT))
        buffered = parameter._replace(is_shared=is_embedding_shared and is_embedding)
        buffers.setdefault((parameter.chunk, parameter.dtype.name), []).append(buffered)
    return [buffers[key] for key in sorted(buffers, key=lambda key: key[0])]


def bucket_sizes(arguments: Mapping[str, Any]) -> list[int]:
    """Return the elements that a bucket may have been asked to have, by Megatron's arguments."""
    ranks = arguments.get("data_parallel_size")
    usual = max(
        _MIN_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * (ranks if type(ranks) is int else 1)
    )
    asked = arguments.get("ddp_bucket_size")
    return [asked, usual] if type(asked) is int and asked > 0 else [usual]
