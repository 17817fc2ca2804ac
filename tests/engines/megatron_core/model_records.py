"""What a rank of Megatron-core has of a model, recorded, and a module that has the same.

`make test` has no Megatron-core: it refits such modules.
"""

from __future__ import annotations

import io
import lzma
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

RECORDINGS = Path(__file__).parents[2] / "golden" / "megatron_models"
# What Megatron's attributes of a parameter are called.
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
AXES = ("tp", "pp", "ep", "expt_tp", "cp", "dp", "expt_dp")
CONFIGURED = (
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
    "gated_linear_unit",
    "multi_latent_attention",
    "layernorm_zero_centered_gamma",
    "rotary_interleaved",
    "attention_output_gate",
)


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


class RecordedModel(torch.nn.Module):
    """A module of a record's tensors, by the names that they have there."""

    def __init__(self, state: dict[str, Any], recorded: dict[str, Any]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name.replace(".", "/"), tensor)
        self.config = SimpleNamespace(**recorded["config"])
        self.pg_collection = SimpleNamespace(**recorded["groups"])
        self.share_embeddings_and_output_weights = recorded["tied"]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As it was recorded."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_parameters()}


def describe(chunks: list[Any]) -> dict[str, Any]:
    """A rank's tensors with their attributes, its groups as ranks, and its config."""
    first = chunks[0]
    groups = {
        axis: dist.get_process_group_ranks(found)
        for axis in AXES
        if (found := getattr(first.pg_collection, axis, None)) is not None
    }
    tensors = [
        [
            (
                name,
                tensor.detach().clone(),
                {key: getattr(tensor, key) for key in ATTRIBUTES if hasattr(tensor, key)},
            )
            for name, tensor in chunk.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        ]
        for chunk in chunks
    ]
    return {
        "groups": groups,
        "chunks": tensors,
        "config": {name: getattr(first.config, name) for name in CONFIGURED},
        "tied": first.share_embeddings_and_output_weights,
    }


def rebuild(recorded: dict[str, Any]) -> list[torch.nn.Module]:
    """Modules that have what a rank had."""
    found = []
    for tensors in recorded["chunks"]:
        state = {}
        for name, tensor, attributes in tensors:
            parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
            for key, value in attributes.items():
                setattr(parameter, key, value)
            state[name] = parameter
        found.append(RecordedModel(state, recorded))
    return found


def write(case: str, ranks: list[dict[str, Any]], saved: dict[str, torch.Tensor]) -> None:
    """Keep what the ranks of a case had, and what transformers saved of the same model: rounded.

    To so few values that a record is small: in 8 bits.
    """
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    for of_rank in ranks:
        of_rank["chunks"] = [
            [(name, _round(tensor), attributes) for name, tensor, attributes in chunk]
            for chunk in of_rank["chunks"]
        ]
    data = io.BytesIO()
    rounded = {name: _round(tensor) for name, tensor in saved.items()}
    torch.save({"ranks": ranks, "saved": rounded}, data)
    (RECORDINGS / f"{case}.pt.xz").write_bytes(lzma.compress(data.getvalue(), preset=9))


def _round(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn).bfloat16()


def read(case: str) -> dict[str, Any]:
    """What `write` kept."""
    data = lzma.decompress((RECORDINGS / f"{case}.pt.xz").read_bytes())
    found: dict[str, Any] = torch.load(io.BytesIO(data))
    return found


def stacked(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as transformers has them in a module: experts in one, gate above up."""
    found, experts = {}, {}
    for name, tensor in saved.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name.replace("block_sparse_moe", "mlp")] = tensor
        else:
            layer = match[1].replace("block_sparse_moe", "mlp")
            experts.setdefault(layer, {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for layer, of in experts.items():
        every = [of[number] for number in range(len(of))]
        gate, up, down = (
            ("w1", "w3", "w2") if "w1" in every[0] else ("gate_proj", "up_proj", "down_proj")
        )
        found[f"{layer}.gate_up_proj"] = torch.stack(
            [torch.cat([one[gate], one[up]]) for one in every]
        )
        found[f"{layer}.down_proj"] = torch.stack([one[down] for one in every])
    return found
