"""The parameters of one rank's file, and their names in the whole model.

A rank numbers layers and experts from 0; the whole model counts on::

    stage 1 of 2, two layers each      decoder.layers.0 is layer 2
    chunks of virtual stages           model0 of all stages first, then model1
    expert-parallel rank 1 of 2        local_experts.0 is expert 4 of 8

How many layers each chunk has is what its file holds, so that uneven stages are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.binding import View
from reshard.checkpoint.blocks.spans import is_dense
from reshard.checkpoint.formats.megatron.legacy.rank_folders import RankPlace
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError

_LAYER = re.compile(r"^((?:.*?\.)?layers\.)(\d+)(\..+)$")
_LOCAL = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)")
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_STACKED = re.compile(r"^(.*\.experts)\.weight([12])$")
# What stands among the parameters of a state and is none.
_BUFFERS = re.compile(r"(?:^|\.)(?:expert_bias|local_tokens_per_expert|inv_freq|_extra_state\d*)$")


@dataclass
class RankChunk:
    """A chunk of the model on one rank: its tensors by the names that they have there."""

    place: RankPlace
    number: int
    path: str
    tensors: dict[str, ArchivedTensor]
    others: dict[str, Any] = field(default_factory=dict)
    # The weights of all experts of a layer in one, in the order of the file: by its name, those
    # of `tensors` that it is made of.
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The first layer and the first expert in the whole model.
    first_layers: Mapping[str, int] = field(default_factory=dict)
    first_expert: int = 0

    @property
    def layers(self) -> dict[str, int]:
        """How many layers there are of each row of them."""
        found: dict[str, int] = {}
        for name in self.tensors:
            match = _LAYER.match(name)
            if match is not None:
                found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
        return found

    @property
    def experts(self) -> int:
        """How many experts each layer has here."""
        numbers = [
            int(match[2])
            for name in self.tensors
            if (match := _LOCAL.search(name) or _GROUPED.search(name))
        ]
        return max(numbers, default=-1) + 1

    def parameters(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        """The parameters in the order of the modules: name, type and shape.

        Experts that are one weight are that one, with a dimension of experts in front.
        """
        stack_of = {members[0]: name for name, members in self.stacks.items()}
        inside = {one for members in self.stacks.values() for one in members}
        for name, tensor in self.tensors.items():
            stack = stack_of.get(name)
            if stack is not None:
                shape = (len(self.stacks[stack]), *reversed(tensor.shape))
                yield stack, tensor.dtype, shape
            elif name not in inside and not _BUFFERS.search(name):
                yield name, tensor.dtype, tensor.shape

    def whole_name(self, name: str) -> str:
        """The name in the whole model."""
        match = _LAYER.match(name)
        if match is not None:
            number = int(match[2]) + self.first_layers.get(match[1], 0)
            name = f"{match[1]}{number}{match[3]}"

        def count_on(found: re.Match[str]) -> str:
            rest = found[3] if found.lastindex == 3 else ""
            return f"{found[1]}{int(found[2]) + self.first_expert}{rest}"

        return _GROUPED.sub(count_on, _LOCAL.sub(count_on, name))


@dataclass
class RankFiles:
    """What the files of one rank hold: `name` is that of its model's, with its folder."""

    place: RankPlace
    slot: int
    name: str
    state: Mapping[str, Any]
    optimizer_file: str | None
    optimizer_state: Any
    chunks: list[RankChunk] = field(default_factory=list)


def chunks_of(
    state: Mapping[str, Any], place: RankPlace, path: str, experts: int | None = None
) -> list[RankChunk]:
    """The chunks of the model in a rank's file; `experts` are those of a layer on the rank.

    Raises:
        CheckpointError: experts of which it is not known how many they are.
        FormatError: a file without a model; experts that are not those of the arguments.
    """
    keys = ["model"] if "model" in state else sorted(k for k in state if _is_chunk(k))
    if not keys:
        raise FormatError(
            f"{path} has no model: expected `model`, or `model0` and on for virtual stages"
        )
    found = []
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
        found.append(RankChunk(place, number, path, tensors, others, stacks))
    return found


def _unstack(
    match: re.Match[str], stored: Mapping[str, ArchivedTensor], path: str, experts: int | None
) -> Iterator[tuple[str, ArchivedTensor]]:
    """The weights of experts that are one (`GroupedMLP`), as views of it.

    It is the memory of all experts one behind another, each with as many rows as it has inputs, so
    a linear layer's weight is transposed; its shape does not say how many experts these are::

        weight1 (inputs, experts * outputs)      weight2 (experts * inputs, outputs)
    """
    name, tensor = match[0], stored[match[0]]
    if experts is None:
        raise CheckpointError(
            f"{path} has {name!r}, all experts of a layer in one weight (GroupedMLP), and no "
            "args.num_experts that says how many these are; save it as torch_dist with "
            "Megatron-core"
        )
    along = 1 if match[2] == "1" else 0
    is_whole = len(tensor.shape) == 2 and is_dense(tensor.view, tensor.shape)
    if not is_whole or tensor.shape[along] % experts:
        raise FormatError(
            f"{path}: {name!r} is {list(tensor.shape)}, expected the weights of {experts} experts "
            f"one behind another, along dimension {along}, by args.num_experts"
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
    """The leaves of a state; older ones nest their modules."""
    if not isinstance(value, dict):
        if not name:
            raise FormatError(f"{path}: the model is {explain(value)}, expected its state")
        yield name, value
        return
    if depth > 16:
        raise FormatError(f"{path}: the model's state is nested too deep at {name!r}")
    for key, inner in value.items():
        yield from _flatten(inner, f"{name}.{key}" if name else str(key), path, depth + 1)


def number_chunks(chunks: list[RankChunk]) -> None:
    """Say for every chunk where its layers and experts begin in the whole model."""
    counts: dict[tuple[int, int], dict[str, int]] = {}
    experts: dict[int, int] = {}
    for chunk in chunks:
        counts.setdefault((chunk.number, chunk.place.pp), chunk.layers)
        experts[chunk.place.ep] = max(experts.get(chunk.place.ep, 0), chunk.experts)
    starts: dict[tuple[int, int], dict[str, int]] = {}
    reached: dict[str, int] = {}
    # Virtual stages are interleaved: the first chunks of all stages, then the second ones.
    for key in sorted(counts):
        starts[key] = dict(reached)
        for row, count in counts[key].items():
            reached[row] = reached.get(row, 0) + count
    for chunk in chunks:
        chunk.first_layers = starts[chunk.number, chunk.place.pp]
        chunk.first_expert = sum(n for ep, n in experts.items() if ep < chunk.place.ep)
