"""Models that are cut by DeepSpeed's other parallelisms: experts, stages, tensor-parallel ranks.

Tensor-parallel ranks have their `Slices` from the model, as Megatron-DeepSpeed's do, or DeepSpeed
cuts `Layers` for them (AutoTP).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from engines.deepspeed.models import Product

UNIVERSAL_INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm\..*", r"row\.bias"],
    "parameter_with_row_parallelism_patterns": [r"row\.weight"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"gated\.weight"],
    "original_vocab_size": 15,
}
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


class Experts(nn.Module):
    """Two layers of experts, with weights beside them."""

    def __init__(self, experts: int, over: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(1)
        self.embed = Product(7, 4)
        self.moes = nn.ModuleList(
            MoE(4, nn.Linear(4, 4), num_experts=experts, ep_size=over, k=1, use_rts=False)
            for _ in range(2)
        )

    def forward(self, step: Tensor) -> Tensor:
        total = self.embed(step.new_zeros(()), step)
        value = torch.arange(24.0).view(6, 4).to(step.dtype) / 16
        for moe in self.moes:
            value = moe(value)[0]
        return total + value.sum()


def expert_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Experts' parameters in groups of their own, as ZeRO wants them."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    own = {"params": [*model.parameters()], "name": "parameters"}
    return split_params_into_different_moe_groups_for_optimizer(own)


def in_whole_model(name: str, parameter: nn.Parameter) -> str:
    """The name of an expert's parameter with the expert's number in the whole model."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    from deepspeed.utils import groups

    rank = groups._get_expert_parallel_rank(parameter.group_name)
    local = LOCAL_EXPERTS[0]
    return f"{match[1]}{rank * local + int(match[2])}{match[3]}"


# How many experts a rank has; set when the model is made.
LOCAL_EXPERTS = [1]


class Squares(nn.Linear):
    """A layer of a pipeline."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) / 4


def make_pipeline(stages: int, data: int, tied: bool) -> Any:
    """A pipeline of linear layers; the first and the last may be one."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    torch.manual_seed(1)
    layers: list[Any] = [LayerSpec(Squares, 6, 6) for _ in range(3)]
    if tied:
        ends = [TiedLayerSpec("embed", Squares, 6, 6, bias=False) for _ in range(2)]
        layers = [ends[0], *layers, ends[1]]
    else:
        layers = [LayerSpec(Squares, 6, 6), *layers, LayerSpec(Squares, 6, 6, bias=False)]
    return PipelineModule(
        layers,
        topology=PipeDataParallelTopology(stages, data),
        loss_fn=lambda output, label: ((output - label) ** 2).sum(),
        partition_method="uniform",
    )


class Slices(nn.Module):
    """What one tensor-parallel rank has of a model: columns, rows, a padded vocabulary, halves."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        whole = {
            "embed": torch.randn(16, 4),
            "column": torch.randn(8, 6),
            "row": torch.randn(6, 8),
            "gated": torch.randn(12, 5),
            "norm": torch.randn(7),
        }
        whole["embed"][15:] = 0
        gates = torch.cat([half.chunk(ranks)[rank] for half in whole["gated"].chunk(2)])
        parts = {
            "embed": whole["embed"].chunk(ranks)[rank],
            "column": whole["column"].chunk(ranks)[rank],
            "row": whole["row"].chunk(ranks, 1)[rank],
            "gated": gates,
            "norm": whole["norm"],
        }
        for name, part in parts.items():
            module = Product(*part.shape, bias=name == "row")
            module.weight.data.copy_(part)
            if name == "row":
                module.bias.data.copy_(torch.arange(6.0))
            setattr(self, name, module)
        self.universal_checkpoint_info = UNIVERSAL_INFO

    def forward(self, step: Tensor) -> Tensor:
        total = step.new_zeros(())
        for module in self.children():
            total = module(total, step)
        return total


# How DeepSpeed's AutoTP cuts `Layers`.
PARTITIONS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.?down\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.?up\.weight$"], "partition_type": "column"},
        {
            "patterns": [r".*\.?gates\.weight$"],
            "partition_type": "column",
            "shape": [2, -1],
            "partition_dim": 0,
        },
    ],
}


class Layers(nn.Module):
    """Linear layers whole, as a user has them; two of them in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(6)
        self.gates = nn.Linear(6, 16)
        self.down = nn.Linear(8, 6)
        self.up = nn.Linear(6, 10)
        self.last = nn.Linear(10, 3, bias=False)
        self.register_buffer("seen", torch.tensor([3, 1, 4]))

    def forward(self, step: Tensor) -> Tensor:
        value = torch.arange(24.0).view(4, 6).to(step.dtype) / 16 + step
        gate, value = self.gates(self.norm(value)).chunk(2, -1)
        return (self.up(self.down(gate.tanh() * value)) ** 2).sum()
