"""The buffers of Megatron's distributed optimizer: the locations of ranks' blocks in them.

A rank has a block of each parameter (`formats.chunks`). Its optimizer state is stored as tensors,
or flat in the buckets of buffers: as regions, whose container is a file and whose unit is a byte,
each with the rank that has it.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoint.blocks.fusing import StoredRegion
from reshard.checkpoint.formats.chunks import flat_block
from reshard.checkpoint.formats.megatron.modules import is_expert
from reshard.checkpoint.formats.torch_files.reading import region_of
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.dtypes import DType
from reshard.megatron.names import EMBEDDING, OUTPUT

Shape = tuple[int, ...]


# Megatron begins each parameter at a multiple of 128 bytes; parameters have 16 bits or more.
_ALIGNMENT = 64
# The types of parameters for which an optimizer has masters, in float32.
NARROW = ("float16", "bfloat16")


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
        places = tuple(
            (buffered, 0, ahead[bucket] + start) for buffered, bucket, start in self.places
        )
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
                    _COALESCED: (
                        tensor.shape[0],
                        tensor.dtype,
                        [(slot, region_of(path, tensor, start_bytes))],
                    )
                }
                for key, tensor in tensors.items()
                if isinstance(tensor, ArchivedTensor) and len(tensor.shape) == 1
            }
    return buffers


def lengths_of(buffer: Mapping[str, Buckets]) -> int | tuple[int, ...] | None:
    """Return the lengths of a buffer's buckets, or its length if it is coalesced.

    None if they differ by key, or if there are none.
    """
    distinct = {tuple((n, buckets[n][0]) for n in sorted(buckets)) for buckets in buffer.values()}
    if len(distinct) != 1:
        return None
    numbers, lengths = zip(*distinct.pop(), strict=True)
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
