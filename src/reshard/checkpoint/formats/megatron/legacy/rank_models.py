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
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.formats.megatron.legacy.rank_folders import RankPlace
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.checkpoint.formats.torch_files.saved_values import explain
from reshard.errors import CheckpointError, FormatError

_LAYER = re.compile(r"^((?:.*?\.)?layers\.)(\d+)(\..+)$")
_LOCAL = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)")
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_STACKED = re.compile(r"\.experts\.weight[12]$")
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

    def parameters(self) -> Iterator[tuple[str, ArchivedTensor]]:
        """The parameters in the order of the modules."""
        for name, tensor in self.tensors.items():
            if not _BUFFERS.search(name):
                yield name, tensor

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


def chunks_of(state: Mapping[str, Any], place: RankPlace, path: str) -> list[RankChunk]:
    """The chunks of the model in a rank's file.

    Raises:
        CheckpointError: experts in a form that is not read.
        FormatError: a file without a model.
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
        stacked = next((name for name in parts if _STACKED.search(name)), None)
        if stacked is not None:
            raise CheckpointError(
                f"{path} has {stacked!r}, all experts of a layer in one weight (GroupedMLP), which "
                "is not read; save it as torch_dist with Megatron-core"
            )
        tensors = {n: v for n, v in parts.items() if isinstance(v, ArchivedTensor)}
        others = {n: v for n, v in parts.items() if n not in tensors}
        found.append(RankChunk(place, number, path, tensors, others))
    return found


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
