"""State-space models (Mamba) and hybrids of them with attention and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from ..experts import share_experts
from ..family import EXPERTS, Family

Shapes = Mapping[str, tuple[int, ...]]


def find_shape(shapes: Shapes, ending: str) -> tuple[int, ...]:
    """The shape of the first parameter whose name ends so."""
    return next(shape for name, shape in shapes.items() if name.endswith(ending))


class Ratio:
    """What a rank's hidden size is multiplied by, so that exactly its inner width comes out."""

    def __init__(self, inner: int, hidden: int) -> None:
        self.inner, self.hidden = inner, hidden

    def __mul__(self, size: int) -> int:
        assert size == self.hidden
        return self.inner

    __rmul__ = __mul__


def expand_inner(shapes: Shapes, whole: Any) -> Ratio:
    """A rank's inner width is what its output layer has columns for."""
    return Ratio(find_shape(shapes, ".out_proj.weight")[1], whole.hidden_size)


def count_groups(state_size: str) -> Callable[[Shapes, Any], int]:
    """The groups that a rank has: of B and C, which the convolution has behind x."""

    def count(shapes: Shapes, whole: Any) -> int:
        inner = find_shape(shapes, ".out_proj.weight")[1]
        return (find_shape(shapes, ".conv1d.weight")[0] - inner) // 2 // getattr(whole, state_size)

    return count


def fill_unvisited(rank: Any) -> None:
    """Give a mixer the weights of its layers that it uses without calling them."""

    def fill(name: str, inner: Any) -> Callable[..., None]:
        return lambda module, args: rank._fill(inner, name)

    for name, mixer in rank.modules("*"):
        for child in ("conv1d", "conv", "dt_proj"):
            if isinstance(getattr(mixer, child, None), torch.nn.Conv1d | torch.nn.Linear):
                mixer.register_forward_pre_hook(fill(f"{name}.{child}", getattr(mixer, child)))


def prepare(groups: str, experts: str | None = None) -> Callable[[Any], None]:
    """What mixers need, in configs that have the number of groups under a key; and experts."""

    def arrange(rank: Any) -> None:
        fill_unvisited(rank)
        for name, norm in rank.modules("*"):
            if type(norm).__name__.endswith("RMSNormGated") and hasattr(norm, "weight"):
                share_groups(rank, name, norm, getattr(rank.whole, groups))
        if experts is not None:
            share_experts(rank, experts)

    return arrange


def share_groups(rank: Any, name: str, norm: Any, groups: int) -> None:
    """Let a norm over groups add up the squares of groups that several ranks share."""
    weight = f"{name}.weight"
    axes = rank.axes(weight, 0)
    width = rank.cut.assignment.layouts[weight].shape[0] // groups
    group = rank.indices(weight, 0) // width
    # Whole groups need nobody else: the module itself must do.
    if len(group) % width == 0:
        return

    def forward(x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        is_before = getattr(norm, "norm_before_gate", False)
        opened = torch.ones(()) if gate is None else functional.silu(gate)
        x = x if is_before else x * opened
        squares = x.new_zeros((*x.shape[:-1], groups)).index_add(-1, group, x.pow(2))
        mean = rank.add_up(f"{name} squares", squares, axes) / width
        x = norm.weight * x * torch.rsqrt(mean[..., group] + norm.variance_epsilon)
        return x * opened if is_before else x

    norm.forward = forward


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": 53,
        "hidden_size": 30,
        "num_hidden_layers": 3,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **changes,
    }


def hybrid(model_type: str, **changes: Any) -> dict[str, Any]:
    """With the keys of Bamba's config."""
    return {
        **tiny(model_type, num_attention_heads=12, num_key_value_heads=4, hidden_size=48),
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 4,
        "mamba_d_state": 3,
        "mamba_chunk_size": 4,
        **changes,
    }


# Fewer groups and key/value heads than ranks, and numbers that 5 divides.
HYBRID_VARIANTS = (
    {
        "mamba_n_heads": 24,
        "mamba_d_head": 4,
        "mamba_n_groups": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    {
        "hidden_size": 30,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "mamba_n_heads": 30,
        "mamba_d_head": 2,
        "mamba_n_groups": 5,
    },
)
HYBRID = {
    "num_attention_heads": ("*self_attn.q_proj.weight", 0),
    "num_key_value_heads": ("*self_attn.k_proj.weight", 0),
    # Without it, a head is as wide as the hidden size is for all heads.
    "head_dim": lambda shapes, whole: whole.hidden_size // whole.num_attention_heads,
    "mamba_n_heads": ("*mamba.A_log", 0),
    "mamba_n_groups": count_groups("mamba_d_state"),
    "mamba_expand": expand_inner,
    "vocab_size": ("*embed_tokens.weight", 0),
}
MAMBA = {
    "intermediate_size": ("*layers.0.mixer.out_proj.weight", 1),
    "vocab_size": ("*embeddings.weight", 0),
}

NO_PLAN = {"*": "the plan cuts the output layer only"}
NO_STATE_SPACE = "the plan leaves state-space layers whole"
NO_ATTENTION = "the plan leaves attention whole"
NO_FEED_FORWARD = "the plan cuts no feed-forward layers but experts"

FAMILIES = [
    Family(
        name="mamba2",
        config=tiny(
            "mamba2", num_heads=12, head_dim=5, expand=2, state_size=3, n_groups=4, chunk_size=4
        ),
        variants=(
            {"n_groups": 1, "tie_word_embeddings": True},
            {"num_heads": 15, "head_dim": 4, "n_groups": 5, "use_bias": True},
            {"num_heads": 20, "head_dim": 3, "n_groups": 2, "use_conv_bias": False},
        ),
        local={
            "num_heads": ("*layers.0.mixer.A_log", 0),
            "n_groups": count_groups("state_size"),
            "expand": expand_inner,
            "vocab_size": ("*embeddings.weight", 0),
        },
        prepare=prepare("n_groups"),
    ),
    Family(
        name="mamba",
        config=tiny(
            "mamba", hidden_size=15, intermediate_size=60, expand=4, state_size=3, time_step_rank=5
        ),
        variants=({"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},),
        local=MAMBA,
        prepare=fill_unvisited,
    ),
    Family(
        name="falcon_mamba",
        config=tiny(
            "falcon_mamba",
            hidden_size=15,
            intermediate_size=60,
            expand=4,
            state_size=3,
            time_step_rank=5,
        ),
        local=MAMBA,
        prepare=fill_unvisited,
    ),
    Family(
        name="bamba",
        config=hybrid(
            "bamba",
            intermediate_size=37,
            attn_layer_indices=[1],
            mamba_proj_bias=True,
        ),
        variants=HYBRID_VARIANTS,
        local=HYBRID | {"intermediate_size": ("*layers.0.feed_forward.up_proj.weight", 0)},
        prepare=prepare("mamba_n_groups"),
        differs=NO_PLAN,
    ),
    Family(
        name="falcon_h1",
        config=hybrid(
            "falcon_h1",
            intermediate_size=37,
            mamba_d_ssm=60,
            mamba_d_head=5,
            mamba_rms_norm=True,
            ssm_multipliers=[0.5, 1.5, 2.0, 0.25, 3.0],
            ssm_in_multiplier=0.7,
            key_multiplier=0.3,
            mlp_multipliers=[0.9, 1.7],
        ),
        variants=(
            *(
                {**one, "mamba_d_ssm": one["mamba_n_heads"] * one["mamba_d_head"]}
                for one in HYBRID_VARIANTS
            ),
            {"mamba_rms_norm": False},
            {"mamba_norm_before_gate": False},
        ),
        local=HYBRID
        | {
            "intermediate_size": ("*layers.0.feed_forward.up_proj.weight", 0),
            "mamba_d_ssm": ("*layers.0.mamba.out_proj.weight", 1),
        },
        prepare=prepare("mamba_n_groups"),
        differs=NO_PLAN,
    ),
    Family(
        name="granitemoehybrid",
        config=hybrid(
            "granitemoehybrid",
            intermediate_size=11,
            shared_intermediate_size=37,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=7,
            num_experts_per_tok=3,
            embedding_multiplier=3,
            residual_multiplier=0.5,
            logits_scaling=2,
            attention_multiplier=0.1,
        ),
        variants=(*HYBRID_VARIANTS, {"num_local_experts": 0, "position_embedding_type": "rope"}),
        local=HYBRID
        | {
            "shared_intermediate_size": ("*layers.0.shared_mlp.output_linear.weight", 1),
            "intermediate_size": ("*layers.0.block_sparse_moe.experts.down_proj", 2),
            "num_local_experts": ("*layers.0.block_sparse_moe.experts.down_proj", 0),
        },
        whole={"num_local_experts": ("*.block_sparse_moe.router",)},
        parallelisms=EXPERTS,
        prepare=prepare("mamba_n_groups", "*.block_sparse_moe.experts"),
        differs={
            "*.mamba.*": NO_STATE_SPACE,
            "*.self_attn.*": NO_ATTENTION,
            "*.shared_mlp.*": NO_FEED_FORWARD,
        },
    ),
    Family(
        name="nemotron_h",
        config={
            **tiny("nemotron_h", num_attention_heads=12, num_key_value_heads=4, head_dim=4),
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 12,
            "mamba_head_dim": 5,
            "n_groups": 4,
            "ssm_state_size": 3,
            "chunk_size": 4,
            "intermediate_size": 37,
            "moe_intermediate_size": 11,
            "moe_shared_expert_intermediate_size": 13,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_latent_size": 14,
        },
        variants=(
            {
                "mamba_num_heads": 24,
                "n_groups": 1,
                "num_key_value_heads": 1,
                "moe_latent_size": None,
            },
            {
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
                "mamba_num_heads": 20,
                "n_groups": 5,
                "n_routed_experts": 6,
                "n_group": 3,
                "topk_group": 2,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        local={
            "num_attention_heads": ("*mixer.q_proj.weight", 0),
            "num_key_value_heads": ("*mixer.k_proj.weight", 0),
            "mamba_num_heads": ("*mixer.A_log", 0),
            "n_groups": count_groups("ssm_state_size"),
            "intermediate_size": ("*layers.3.mixer.up_proj.weight", 0),
            "moe_intermediate_size": ("*mixer.experts.down_proj", 2),
            "moe_shared_expert_intermediate_size": ("*mixer.shared_experts.up_proj.weight", 0),
            "n_routed_experts": ("*mixer.experts.down_proj", 0),
            "vocab_size": ("*embeddings.weight", 0),
        },
        whole={"n_routed_experts": ("*.mixer.gate",)},
        parallelisms=EXPERTS,
        prepare=prepare("n_groups", "*.mixer.experts"),
        differs={
            "*.mixer.[qkvo]_proj.weight": NO_ATTENTION,
            "*.mixer.*up_proj.weight": NO_FEED_FORWARD,
            "*.mixer.*down_proj.weight": NO_FEED_FORWARD,
            "*.mixer.*": NO_STATE_SPACE,
            "lm_head.weight": "the plan leaves the output layer whole",
        },
    ),
    Family(
        name="jamba",
        config={
            **tiny("jamba", num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=4),
            "hidden_size": 36,
            "intermediate_size": 37,
            "num_experts": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 3,
            "mamba_dt_rank": 5,
        },
        variants=(
            {"num_key_value_heads": 1},
            {
                "hidden_size": 30,
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
            },
        ),
        local={
            "num_attention_heads": ("*self_attn.q_proj.weight", 0),
            "num_key_value_heads": ("*self_attn.k_proj.weight", 0),
            "head_dim": HYBRID["head_dim"],
            "mamba_expand": expand_inner,
            "intermediate_size": ("*layers.0.feed_forward.up_proj.weight", 0),
            "num_experts": ("*feed_forward.experts.down_proj", 0),
            "vocab_size": ("*embed_tokens.weight", 0),
        },
        whole={"num_experts": ("*.feed_forward.router",)},
        # Experts are as wide as feed-forward layers, so that one config says both or none cut.
        parallelisms=EXPERTS[:-1],
        prepare=lambda rank: (
            fill_unvisited(rank),
            share_experts(rank, "*.feed_forward.experts"),
        ),
        differs={
            "*.mamba.*": NO_STATE_SPACE,
            "*.self_attn.*": NO_ATTENTION,
            "*.feed_forward.*_proj.weight": NO_FEED_FORWARD,
        },
    ),
]
