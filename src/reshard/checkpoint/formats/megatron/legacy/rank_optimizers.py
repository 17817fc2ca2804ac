"""The optimizer's state on one rank: which block of state is of which parameter.

Megatron saves it without names, in the order of its parameters:

    not distributed     state of each number, and `fp32_from_fp16_params`: the parameters of each
                        group in the order of the modules, groups one behind another
    distributed         flat buffers of all data-parallel ranks, in `distrib_optim.pt`: the
                        parameters of one type in the reverse order (`buckets`), for each chunk

Dense parameters and experts have optimizers of their own where experts are parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.binding import View
from reshard.checkpoint.blocks.fusing import StoredBox, split_stack, swap_last_dimensions
from reshard.checkpoint.blocks.spans import is_dense
from reshard.checkpoint.formats.megatron.common_state import chain_of, find_groups, is_expert
from reshard.checkpoint.formats.megatron.legacy.rank_folders import Parallelism
from reshard.checkpoint.formats.megatron.legacy.rank_models import RankFiles
from reshard.checkpoint.formats.megatron.parameters import common_key
from reshard.checkpoint.formats.megatron.rank_blocks import (
    BufferedParameter,
    dense_block,
    find_plan,
    flat_block,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.dtypes import DType

_LEAST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


class RankParameter(NamedTuple):
    """A parameter of a rank, in the order of its modules: the chunk, and its name there."""

    chunk: int
    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateBlock:
    """A block of optimizer state: of which parameter of which chunk, and where it lies.

    `tensor` is that of the file where the block is all of one.
    """

    chunk: int
    parameter: str
    key: str
    dtype: DType
    shape: tuple[int, ...]
    path: str
    stored: tuple[StoredBox, ...]
    tensor: ArchivedTensor | None = None


def split_chain(parameters: Sequence[RankParameter], members: int) -> list[list[RankParameter]]:
    """The parameters of each optimizer of a chain: dense ones and experts, where there are two."""
    if members != 2:
        return [list(parameters)]
    return [[one for one in parameters if is_expert(one.name) == flag] for flag in (False, True)]


def list_buffers(
    parameters: Sequence[RankParameter], *, is_embedding_shared: bool
) -> list[list[tuple[RankParameter, BufferedParameter]]]:
    """The buffers of an optimizer's parameters: one for each chunk and element type."""
    buffers: dict[tuple[int, str], list[tuple[RankParameter, BufferedParameter]]] = {}
    for one in parameters:
        is_shared = is_embedding_shared and one.name.endswith(
            ("embedding.word_embeddings.weight", "output_layer.weight")
        )
        buffered = BufferedParameter(one.name, one.shape, is_shared)
        buffers.setdefault((one.chunk, one.dtype.name), []).append((one, buffered))
    return [buffers[key] for key in sorted(buffers, key=lambda key: key[0])]


def bucket_sizes(arguments: Mapping[str, Any]) -> list[int]:
    """The elements that a bucket may have been asked to have, by Megatron's arguments."""
    ranks = arguments.get("data_parallel_size")
    usual = max(_LEAST_BUCKET, _BUCKET_PER_RANK * (ranks if type(ranks) is int else 1))
    asked = arguments.get("ddp_bucket_size")
    return [asked, usual] if type(asked) is int and asked > 0 else [usual]


class RankOptimizer:
    """The optimizer of one rank's files. `unread` says what is not read."""

    def __init__(self, rank: RankFiles, sizes: Parallelism, arguments: Mapping[str, Any]) -> None:
        self._rank = rank
        self._arguments = arguments
        self.unread: list[tuple[str, str]] = []
        self._is_shared = (
            sizes.pp > 1 and arguments.get("untie_embeddings_and_output_weights") is False
        )
        self._parameters = [
            RankParameter(chunk.number, name, dtype, shape)
            for chunk in rank.chunks
            for name, dtype, shape in chunk.parameters()
        ]
        self._stacks = {
            (chunk.number, name): members
            for chunk in rank.chunks
            for name, members in chunk.stacks.items()
        }

    def blocks(self) -> Iterator[StateBlock]:
        """Every block of state."""
        if self._rank.optimizer_file is not None:
            yield from self._list_buffered(self._rank.optimizer_file)
        else:
            yield from self._list_numbered()

    def _skip(self, what: str, why: str) -> None:
        self.unread.append((f"{self._rank.name}: {what}", why))

    def _list_buffered(self, path: str) -> Iterator[StateBlock]:
        state = self._rank.optimizer_state
        members = list(state) if isinstance(state, list | tuple) else [state]
        for member, own in zip(members, split_chain(self._parameters, len(members)), strict=False):
            # Optimizers whose first data-parallel rank is elsewhere have nothing here.
            if isinstance(member, dict):
                yield from self._read_buffers(path, member, own)

    def _read_buffers(
        self, path: str, state: Mapping[Any, Any], parameters: Sequence[RankParameter]
    ) -> Iterator[StateBlock]:
        buffers = list_buffers(parameters, is_embedding_shared=self._is_shared)
        for number, buffer in enumerate(buffers):
            found = state.get(number)
            tensors = next(iter(found.values()), None) if isinstance(found, dict) else None
            if not isinstance(tensors, dict):
                self._skip(f"buffer {number} of {path}", "it is not there, or in another form")
                continue
            flat = {
                key: tensor
                for key, tensor in tensors.items()
                if isinstance(tensor, ArchivedTensor) and len(tensor.shape) == 1
            }
            lengths = {tensor.shape[0] for tensor in flat.values()}
            if len(lengths) != 1:
                self._skip(
                    f"buffer {number} of {path}",
                    "its buckets are apart, as Megatron before 2024 wrote them; load it and save "
                    "it once more",
                )
                continue
            length = lengths.pop()
            plan = find_plan([b for _, b in buffer], length, bucket_sizes(self._arguments))
            if plan is None:
                held = sum(math.prod(one.shape) for one, _ in buffer)
                self._skip(
                    f"buffer {number} of {path}",
                    f"it has {length} elements, and the {len(buffer)} parameters that should be in "
                    f"it {held}; which part is which cannot be told",
                )
                continue
            chunk_of = {buffered: one for one, buffered in buffer}
            for buffered, start in plan.coalesced():
                one = chunk_of[buffered]
                for key, tensor in flat.items():
                    yield from self._make_flat(one, key, tensor, path, start)

    def _list_numbered(self) -> Iterator[StateBlock]:
        members = [*chain_of(self._rank.state.get("optimizer"))]
        for member, own in zip(members, split_chain(self._parameters, len(members)), strict=False):
            inner = member.get("optimizer", member)
            groups = inner.get("param_groups") if isinstance(inner, dict) else None
            state = inner.get("state") if isinstance(inner, dict) else None
            if isinstance(groups, list) and isinstance(state, dict) and state:
                yield from self._read_groups(member, groups, state, own)

    def _read_groups(
        self,
        member: Mapping[str, Any],
        groups: Sequence[Any],
        state: Mapping[Any, Any],
        parameters: Sequence[RankParameter],
    ) -> Iterator[StateBlock]:
        plain = [group if isinstance(group, dict) else {} for group in groups]
        names: list[list[RankParameter]] = [[] for _ in plain]
        for one in parameters:
            for number in find_groups(plain, one.name, one.shape)[:1]:
                names[number].append(one)
        masters = member.get("fp32_from_fp16_params", member.get("fp32_from_fp16"))
        for number, (group, own) in enumerate(zip(plain, names, strict=True)):
            numbers = group.get("params")
            if not isinstance(numbers, list) or len(numbers) != len(own):
                self._skip(
                    f"group {number} of the optimizer",
                    f"it has {len(numbers) if isinstance(numbers, list) else 'no'} parameters, and "
                    f"{len(own)} of the model's should be in it; which is which cannot be told",
                )
                continue
            narrow = [one for one in own if one.dtype.name in ("float16", "bfloat16")]
            wide = masters[number] if isinstance(masters, list) and number < len(masters) else []
            if isinstance(wide, list) and len(wide) == len(narrow):
                for one, tensor in zip(narrow, wide, strict=True):
                    yield from self._make_blocks(one, "master", tensor)
            for one, index in zip(own, numbers, strict=True):
                kept = state.get(index)
                for key, tensor in kept.items() if isinstance(kept, dict) else ():
                    yield from self._make_blocks(one, str(key), tensor)

    def _make_blocks(self, one: RankParameter, key: str, tensor: Any) -> Iterator[StateBlock]:
        if not isinstance(tensor, ArchivedTensor):
            return
        path = self._rank.name
        if (one.chunk, one.name) in self._stacks:
            # In the shape of the file, whose memory is that of the experts.
            if math.prod(tensor.shape) != math.prod(one.shape) or not is_dense(
                tensor.view, tensor.shape
            ):
                self._skip(f"{key} of {one.name!r}", "it is not of the weight's shape")
                return
            yield from self._split(one, key, tensor, path, self._boxes(one, tensor, path, 0))
            return
        start_bytes = tensor.start_bytes + tensor.view.offset * tensor.dtype.itemsize_bytes
        box = dense_block(self._rank.slot, path, start_bytes, tensor.shape, tensor.view)
        yield StateBlock(one.chunk, one.name, key, tensor.dtype, tensor.shape, path, (box,), tensor)

    def _make_flat(
        self, one: RankParameter, key: str, tensor: ArchivedTensor, path: str, start: int
    ) -> Iterator[StateBlock]:
        """The block of a parameter in a flat buffer of its state."""
        boxes = self._boxes(one, tensor, path, start)
        yield from self._split(one, common_key(key), tensor, path, boxes)

    def _boxes(
        self, one: RankParameter, tensor: ArchivedTensor, path: str, start: int
    ) -> tuple[StoredBox, ...]:
        """The parameter's state, flat from index `start` on of the memory of a tensor."""
        itemsize_bytes = tensor.dtype.itemsize_bytes
        start_bytes = tensor.start_bytes + tensor.view.offset * itemsize_bytes
        length = math.prod(tensor.shape)
        whole = dense_block(self._rank.slot, path, start_bytes, (length,), View(0, (1,)))
        return tuple(flat_block([whole], start, one.shape, itemsize_bytes))

    def _split(
        self,
        one: RankParameter,
        key: str,
        tensor: ArchivedTensor,
        path: str,
        boxes: tuple[StoredBox, ...],
    ) -> Iterator[StateBlock]:
        """State as the block of its parameter; of stacked experts, transposed, that of each."""
        members = self._stacks.get((one.chunk, one.name))
        if members is None:
            yield StateBlock(one.chunk, one.name, key, tensor.dtype, one.shape, path, boxes)
            return
        split = split_stack(boxes, tensor.dtype.itemsize_bytes, len(members))
        for name, own in zip(members, split, strict=True):
            shape, swapped = one.shape[:0:-1], tuple(map(swap_last_dimensions, own))
            yield StateBlock(one.chunk, name, key, tensor.dtype, shape, path, swapped)
