"""The files of a rank: its parameters, their names in the whole model, and its optimizer state.

A rank numbers layers and experts from 0; the whole model continues the numbers of other ranks::

    stage 1 of 2, two layers each      decoder.layers.0 is layer 2
    chunks of virtual stages           model0 of all stages first, then model1
    expert-parallel rank 1 of 2        local_experts.0 is expert 4 of 8

The number of layers of each chunk is determined by its file, so that uneven stages are read too.

Megatron saves optimizer state without names, in the order of its parameters::

    not distributed     state of each number, and `fp32_from_fp16_params`: the parameters of each
                        group in the order of the modules, groups concatenated
    distributed         flat buffers of all data-parallel ranks, in `distrib_optim.pt`: for each
                        chunk, the parameters of a type in reverse order (`rank_blocks`)

Dense parameters and experts have separate optimizers if experts are parallel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.binding import View
from reshard.checkpoint.blocks.fusing import StoredRegion
from reshard.checkpoint.formats.megatron.common_state import chain_of, find_groups
from reshard.checkpoint.formats.megatron.parameters import common_key, count_layers, split_layer
from reshard.checkpoint.formats.megatron.rank_blocks import (
    RankParameter,
    bucket_sizes,
    find_plan,
    flat_block,
    list_buffers,
    split_chain,
)
from reshard.checkpoint.formats.megatron.rank_layouts import Parallelism, RankPlace
from reshard.checkpoint.formats.torch_files.reading import region_of
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError

_LOCAL = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)")
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_STACKED = re.compile(r"^(.*\.experts)\.weight([12])$")
# Tensors of a state that are not parameters.
_BUFFERS = re.compile(r"(?:^|\.)(?:expert_bias|local_tokens_per_expert|inv_freq|_extra_state\d*)$")


class RankChunk(NamedTuple):
    """A chunk of the model on a rank: its tensors by their names there."""

    place: RankPlace
    number: int
    path: str
    tensors: dict[str, ArchivedTensor]
    others: dict[str, Any]
    # The common weights of the experts of layers, in the order of the file, each with the names of
    # its parts in `tensors`.
    stacks: Mapping[str, tuple[str, ...]]
    # The first layer and the first expert in the whole model.
    first_layers: Mapping[str, int]
    first_expert: int = 0

    @property
    def layers(self) -> dict[str, int]:
        """The number of layers of each sequence of layers."""
        return count_layers(self.tensors)

    @property
    def experts(self) -> int:
        """The number of experts of each layer on this rank."""
        numbers = [
            int(match[2])
            for name in self.tensors
            if (match := _LOCAL.search(name) or _GROUPED.search(name))
        ]
        return max(numbers, default=-1) + 1

    def parameters(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        """Yield the parameters in the order of the modules: name, type and shape.

        Experts with a common weight are a single parameter, with a leading dimension of experts.
        """
        stack_of = {members[0]: name for name, members in self.stacks.items()}
        inside = {member for members in self.stacks.values() for member in members}
        for name, tensor in self.tensors.items():
            stack = stack_of.get(name)
            if stack is not None:
                shape = (len(self.stacks[stack]), *reversed(tensor.shape))
                yield stack, tensor.dtype, shape
            elif name not in inside and not _BUFFERS.search(name):
                yield name, tensor.dtype, tensor.shape

    def whole_name(self, name: str) -> str:
        """Return the name in the whole model."""
        if (layer := split_layer(name)) is not None:
            row, number, rest = layer
            name = f"{row}{number + self.first_layers.get(row, 0)}{rest}"

        def count_on(match: re.Match[str]) -> str:
            rest = match[3] if match.lastindex == 3 else ""
            return f"{match[1]}{int(match[2]) + self.first_expert}{rest}"

        return _GROUPED.sub(count_on, _LOCAL.sub(count_on, name))


class RankFiles(NamedTuple):
    """The contents of a rank's files; `name` is the name of the model's file, with its folder."""

    place: RankPlace
    slot: int
    name: str
    state: Mapping[str, Any]
    optimizer_file: str | None
    optimizer_state: Any
    chunks: list[RankChunk]


def chunks_of(
    state: Mapping[str, Any], place: RankPlace, path: str, experts: int | None = None
) -> list[RankChunk]:
    """Return the chunks of the model in a rank's file.

    `experts` is the number of experts of a layer on the rank; None if unknown.

    Raises:
        CheckpointError: an unknown number of experts.
        FormatError: a file without a model; experts that differ from the arguments.
    """
    keys = ["model"] if "model" in state else sorted(k for k in state if _is_chunk(k))
    if not keys:
        raise FormatError(
            f"{path} has no model: expected `model`, or `model0` and on for virtual stages"
        )
    chunks = []
    for number, key in enumerate(keys):
        if key not in ("model", f"model{number}"):
            raise FormatError(f"{path} has {key!r}, but no `model{number}`; a chunk is missing")
        parts = dict(_flatten(state[key], "", path))
        stored = {n: v for n, v in parts.items() if isinstance(v, ArchivedTensor)}
        others = {n: v for n, v in parts.items() if n not in stored}
        tensors: dict[str, ArchivedTensor] = {}
        stacks: dict[str, tuple[str, ...]] = {}
        for name, tensor in stored.items():
            match = _STACKED.match(name)
            own = {name: tensor}
            if match is not None:
                own = dict(_unstack(match, stored, path, experts))
                stacks[name] = tuple(own)
            tensors |= own
        chunks.append(RankChunk(place, number, path, tensors, others, stacks, {}))
    return chunks


def _unstack(
    match: re.Match[str], stored: Mapping[str, ArchivedTensor], path: str, experts: int | None
) -> Iterator[tuple[str, ArchivedTensor]]:
    """Yield the weights of experts as views of their common weight (`GroupedMLP`).

    It is the concatenated memory of all experts, each with as many rows as inputs, so a linear
    layer's weight is transposed; its shape does not determine the number of experts::

        weight1 (inputs, experts * outputs)      weight2 (experts * inputs, outputs)
    """
    name, tensor = match[0], stored[match[0]]
    if experts is None:
        raise CheckpointError(
            f"{path} has {name!r}, all experts of a layer in one weight (GroupedMLP), and no "
            "args.num_experts; save it as torch_dist with "
            "Megatron-core"
        )
    along = 1 if match[2] == "1" else 0
    is_whole = len(tensor.shape) == 2 and tensor.view.is_dense(tensor.shape)
    if not is_whole or tensor.shape[along] % experts:
        raise FormatError(
            f"{path}: {name!r} is {list(tensor.shape)}, expected the weights of {experts} experts "
            f"concatenated along dimension {along}, by args.num_experts"
        )
    rows, columns = tensor.shape
    rows, columns = (rows, columns // experts) if along else (rows // experts, columns)
    for number in range(experts):
        view = View(tensor.view.offset + number * rows * columns, (1, columns))
        own = f"{match[1]}.local_experts.{number}.linear_fc{match[2]}.weight"
        yield own, replace(tensor, shape=(columns, rows), view=view)


def _is_chunk(key: object) -> bool:
    return isinstance(key, str) and key.startswith("model") and key[5:].isdigit()


def _flatten(value: Any, name: str, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state; older states nest their modules."""
    if not isinstance(value, dict):
        if not name:
            raise FormatError(f"{path}: the model is {explain(value)}, expected its state")
        yield name, value
        return
    if depth > 16:
        raise FormatError(f"{path}: the model's state is nested too deep at {name!r}")
    for key, inner in value.items():
        yield from _flatten(inner, f"{name}.{key}" if name else str(key), path, depth + 1)


def number_chunks(ranks: Sequence[RankFiles]) -> list[RankFiles]:
    """Return the files of ranks, with the first layer and the first expert of every chunk."""
    chunks = [chunk for rank in ranks for chunk in rank.chunks]
    counts: dict[tuple[int, int], dict[str, int]] = {}
    experts: dict[int, int] = {}
    for chunk in chunks:
        counts.setdefault((chunk.number, chunk.place.pp), chunk.layers)
        experts[chunk.place.ep] = max(experts.get(chunk.place.ep, 0), chunk.experts)
    starts: dict[tuple[int, int], dict[str, int]] = {}
    reached: dict[str, int] = {}
    # Virtual stages are interleaved: the first chunks of all stages precede the second chunks.
    for key in sorted(counts):
        starts[key] = dict(reached)
        for row, count in counts[key].items():
            reached[row] = reached.get(row, 0) + count
    first_expert = {ep: sum(n for at, n in experts.items() if at < ep) for ep in experts}

    def number(chunk: RankChunk) -> RankChunk:
        first_layers = starts[chunk.number, chunk.place.pp]
        return chunk._replace(first_layers=first_layers, first_expert=first_expert[chunk.place.ep])

    return [rank._replace(chunks=[*map(number, rank.chunks)]) for rank in ranks]


class StateBlock(NamedTuple):
    """A block of optimizer state: its chunk and parameter, and where it is stored.

    `tensor` is the tensor of the file if the block is all of it.
    """

    chunk: int
    parameter: str
    key: str
    dtype: DType
    shape: tuple[int, ...]
    path: str
    stored: tuple[StoredRegion, ...]
    tensor: ArchivedTensor | None = None


class RankOptimizer:
    """The optimizer state in a rank's files. `unread` lists the parts that are not read."""

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
        """Yield every block of state."""
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
            # Optimizers whose first data-parallel rank is elsewhere do not store state here.
            if isinstance(member, dict):
                yield from self._read_buffers(path, member, own)

    def _read_buffers(
        self, path: str, state: Mapping[Any, Any], parameters: Sequence[RankParameter]
    ) -> Iterator[StateBlock]:
        buffers = list_buffers(parameters, is_embedding_shared=self._is_shared)
        for number, buffer in enumerate(buffers):
            by_types = state.get(number)
            tensors = next(iter(by_types.values()), None) if isinstance(by_types, dict) else None
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
            plan = find_plan(buffer, length, bucket_sizes(self._arguments))
            if plan is None:
                held = sum(math.prod(param.shape) for param in buffer)
                self._skip(
                    f"buffer {number} of {path}",
                    f"it has {length} elements, and the {len(buffer)} parameters that should be in "
                    f"it {held}; the parts of parameters are ambiguous",
                )
                continue
            for param, _, start in plan.places:
                for key, tensor in flat.items():
                    regions = self._locate(param, tensor, path, start)
                    yield from self._split(param, common_key(key), tensor, path, regions)

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
        for param in parameters:
            for number in find_groups(plain, param.name, param.shape)[:1]:
                names[number].append(param)
        masters = member.get("fp32_from_fp16_params", member.get("fp32_from_fp16"))
        for number, (group, own) in enumerate(zip(plain, names, strict=True)):
            numbers = group.get("params")
            if not isinstance(numbers, list) or len(numbers) != len(own):
                self._skip(
                    f"group {number} of the optimizer",
                    f"it has {len(numbers) if isinstance(numbers, list) else 'no'} parameters, and "
                    f"{len(own)} of the model's should be in it; their order is ambiguous",
                )
                continue
            narrow = [param for param in own if param.dtype.name in ("float16", "bfloat16")]
            wide = masters[number] if isinstance(masters, list) and number < len(masters) else []
            if isinstance(wide, list) and len(wide) == len(narrow):
                for param, tensor in zip(narrow, wide, strict=True):
                    yield from self._make_blocks(param, "master", tensor)
            for param, index in zip(own, numbers, strict=True):
                kept = state.get(index)
                for key, tensor in kept.items() if isinstance(kept, dict) else ():
                    yield from self._make_blocks(param, str(key), tensor)

    def _make_blocks(self, param: RankParameter, key: str, tensor: Any) -> Iterator[StateBlock]:
        if not isinstance(tensor, ArchivedTensor):
            return
        path = self._rank.name
        if (param.chunk, param.name) in self._stacks:
            # The state has the shape of the stacked weight, and the memory order of the experts.
            is_dense = tensor.view.is_dense(tensor.shape)
            if math.prod(tensor.shape) != math.prod(param.shape) or not is_dense:
                self._skip(f"{key} of {param.name!r}", "it is not of the weight's shape")
                return
            yield from self._split(param, key, tensor, path, self._locate(param, tensor, path, 0))
            return
        block = ((self._rank.slot, region_of(path, tensor)),)
        yield StateBlock(
            param.chunk, param.name, key, tensor.dtype, tensor.shape, path, block, tensor
        )

    def _locate(
        self, param: RankParameter, tensor: ArchivedTensor, path: str, start: int
    ) -> tuple[StoredRegion, ...]:
        """Return the parameter's state, flat from index `start` on of the memory of a tensor."""
        flat = replace(
            tensor, shape=(math.prod(tensor.shape),), view=View(tensor.view.offset, (1,))
        )
        return tuple(flat_block([(self._rank.slot, region_of(path, flat))], start, param.shape))

    def _split(
        self,
        param: RankParameter,
        key: str,
        tensor: ArchivedTensor,
        path: str,
        regions: tuple[StoredRegion, ...],
    ) -> Iterator[StateBlock]:
        """Yield state as the block of its parameter, or as transposed blocks of stacked experts."""
        members = self._stacks.get((param.chunk, param.name))
        if members is None:
            yield StateBlock(param.chunk, param.name, key, tensor.dtype, param.shape, path, regions)
            return
        for number, name in enumerate(members):
            own = tuple(
                (slot, region.drop(0, number).permute((1, 0)))
                for slot, region in regions
                if region.start[0] <= number < region.stop[0]
            )
            shape = param.shape[:0:-1]
            yield StateBlock(param.chunk, name, key, tensor.dtype, shape, path, own)
