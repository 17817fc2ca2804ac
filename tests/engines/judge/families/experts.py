"""Mixtures of experts: experts stacked in one tensor, and routers that choose among all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..experts import share_experts
from ..family import EXPERTS, Family
from .dense import HEADS, VARIANTS, tiny


def share(experts: str) -> Callable[[Any], None]:
    """What the experts' modules need."""
    return lambda rank: share_experts(rank, experts)


def local_keys(
    module: str, experts: str, width: str, widths: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The keys of a config that a rank has a share of, in a model with experts.

    Args:
        module: a glob of the modules with stacked experts.
        experts, width: the keys of how many there are, and of how wide each is.
        widths: keys of other widths, with the parameter and the dimension that say them.
    """
    return {
        **{key: share for key, share in HEADS.items() if key != "intermediate_size"},
        width: (f"{module}.down_proj", 2),
        experts: (f"{module}.down_proj", 0),
        **(widths or {}),
    }


# Seven experts: unequal shares of two, three and five ranks.
NUMBERS = {"num_experts_per_tok": 3}
SPARSE = {"moe_intermediate_size": 13, "mlp_only_layers": [1], "decoder_sparse_step": 1}
MLP = "*.mlp.experts"
DENSE_WIDTH = {"intermediate_size": ("*layers.*.mlp.down_proj.weight", 1)}
SHARED_WIDTH = {
    "shared_expert_intermediate_size": ("*.mlp.shared_expert.down_proj.weight", 1),
}

# Why a cut differs from that of transformers' own plan.
NO_PLAN = {"*": "transformers plans experts of this family over ranks, and no tensor parallelism"}
WIDE_NORMS = {
    "*.self_attn.[qk]_norm.weight": "the plan puts queries and keys together before their norms"
}
WHOLE_SHARED = {
    "*.mlp.shared_expert.*": "the plan keeps the shared expert whole; rows and columns compute so"
}
WHOLE_HEADS = {
    "*.self_attn.*": "the plan keeps attention whole; it is by heads in engines, and computes so"
}
LATENT_SHARE = lambda shapes, whole: next(  # noqa: E731
    shape[1] // whole.v_head_dim for name, shape in shapes.items() if "o_proj" in name
)


def latent(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config of latent attention; a head's parts have widths of their own."""
    return tiny(
        model_type,
        **{
            "num_key_value_heads": 12,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 13,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 10,
            "kv_lora_rank": 11,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 5,
            "v_head_dim": 7,
            **changes,
        },
    )


LATENT = {
    "vocab_size": HEADS["vocab_size"],
    "num_attention_heads": LATENT_SHARE,
    "num_key_value_heads": LATENT_SHARE,
    "moe_intermediate_size": (f"{MLP}.down_proj", 2),
    "n_routed_experts": (f"{MLP}.down_proj", 0),
    **DENSE_WIDTH,
}
LATENT_VARIANTS = (
    {"num_attention_heads": 15, "num_key_value_heads": 15, "hidden_size": 45},
    {
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "hidden_size": 40,
        "q_lora_rank": None,
    },
    {"n_shared_experts": 2},
)
ROUTED = {"n_routed_experts": ("*.mlp.gate",)}
# Two shared experts are one of twice the width, of which a rank's share is no multiple.
SHARED = ("*.mlp.shared_experts.*",)


def share_stacked(rank: Any) -> None:
    """The experts of Llama 4, each of which sees all tokens, weighed by the router."""
    for name, module in rank.modules("*.feed_forward.experts"):
        weight = f"{name}.gate_up_proj"
        axes = tuple(axis for dimension in range(3) for axis in rank.axes(weight, dimension))
        if axes:
            _share_tokens(rank, name, module, weight, axes)


def _share_tokens(rank: Any, name: str, module: Any, weight: str, axes: tuple[str, ...]) -> None:
    answer, held = module.forward, rank.indices(weight, 0)
    experts = rank.cut.assignment.layouts[weight].shape[0]

    def forward(x: Any) -> Any:
        by_expert = x.view(experts, -1, x.shape[-1])
        found = x.new_zeros(by_expert.shape)
        found[held] = answer(by_expert[held].reshape(-1, x.shape[-1])).view(found[held].shape)
        return rank.add_up(name, found, axes).view(x.shape)

    module.forward = forward


LLAMA_4 = tiny(
    "llama4_text",
    num_local_experts=7,
    num_experts_per_tok=1,
    intermediate_size=13,
    intermediate_size_mlp=43,
    interleave_moe_layer_step=2,
    no_rope_layer_interval=3,
    attention_chunk_size=5,
    use_qk_norm=True,
)
LLAMA_4_LOCAL = {
    **local_keys("*.feed_forward.experts", "num_local_experts", "intermediate_size"),
    "intermediate_size": ("*.feed_forward.experts.down_proj", 1),
    "intermediate_size_mlp": ("*.layers.0.feed_forward.down_proj.weight", 1),
}


def make_image(config: Any, generator: Any) -> dict[str, Any]:
    """A picture of four by four patches, which are four tokens of a sentence."""
    import torch

    tokens = torch.randint(0, config.image_token_id, (1, 9), generator=generator)
    tokens[0, 2:6] = config.image_token_id
    shape = (1, 3, config.vision_config.image_size, config.vision_config.image_size)
    picture = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"input_ids": tokens, "pixel_values": picture}


FAMILIES = [
    Family(
        name="mixtral",
        config=tiny("mixtral", num_local_experts=7, **NUMBERS),
        variants=VARIANTS,
        local=local_keys(MLP, "num_local_experts", "intermediate_size"),
        whole={"num_local_experts": ("*.mlp.gate",)},
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="qwen2_moe",
        config=tiny(
            "qwen2_moe", num_experts=7, shared_expert_intermediate_size=17, **NUMBERS, **SPARSE
        ),
        variants=VARIANTS,
        local=local_keys(MLP, "num_experts", "moe_intermediate_size", DENSE_WIDTH | SHARED_WIDTH),
        whole={"num_experts": ("*.mlp.gate",)},
        differs=WHOLE_SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="qwen3_moe",
        config=tiny("qwen3_moe", num_local_experts=7, **NUMBERS, **SPARSE),
        variants=VARIANTS,
        local=local_keys(MLP, "num_local_experts", "moe_intermediate_size", DENSE_WIDTH),
        whole={"num_local_experts": ("*.mlp.gate",)},
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="olmoe",
        # Norms of queries are as wide as the model.
        config=tiny("olmoe", num_experts=7, hidden_size=72, **NUMBERS),
        variants=tuple(
            {**change, "hidden_size": 6 * change["num_attention_heads"]} for change in VARIANTS
        ),
        local=local_keys(MLP, "num_experts", "intermediate_size"),
        whole={"num_experts": ("*.mlp.gate",)},
        wide_norms=("*.self_attn.[qk]_norm",),
        sized_by_shard=("*.self_attn.[qk]_norm.weight",),
        differs=WIDE_NORMS,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="minimax_m2",
        config=tiny("minimax_m2", num_local_experts=7, **NUMBERS),
        variants=VARIANTS,
        local=local_keys(MLP, "num_local_experts", "intermediate_size"),
        whole={"num_local_experts": ("*.mlp.gate",)},
        wide_norms=("*.self_attn.[qk]_norm",),
        sized_by_shard=("*.mlp.e_score_correction_bias",),
        differs=WIDE_NORMS,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="glm4_moe",
        config=tiny(
            "glm4_moe",
            n_routed_experts=8,
            n_shared_experts=1,
            moe_intermediate_size=13,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            use_qk_norm=True,
            attention_bias=True,
            **NUMBERS,
        ),
        variants=(*VARIANTS, {"n_shared_experts": 2}),
        local=local_keys(MLP, "n_routed_experts", "moe_intermediate_size", DENSE_WIDTH),
        whole=ROUTED,
        sized_by_shard=SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="ernie4_5_moe",
        config=tiny(
            "ernie4_5_moe",
            moe_num_experts=7,
            moe_num_shared_experts=1,
            moe_intermediate_size=13,
            moe_k=3,
            moe_layer_start_index=1,
            moe_layer_end_index=2,
            use_bias=True,
        ),
        variants=(*VARIANTS, {"moe_num_shared_experts": 2}),
        local=local_keys(MLP, "moe_num_experts", "moe_intermediate_size", DENSE_WIDTH),
        whole={"moe_num_experts": ("*.mlp.gate",)},
        sized_by_shard=SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="granitemoe",
        config=tiny("granitemoe", num_local_experts=7, **NUMBERS),
        variants=VARIANTS,
        local=local_keys("*.block_sparse_moe.experts", "num_local_experts", "intermediate_size"),
        whole={"num_local_experts": ("*.block_sparse_moe.router",)},
        prepare=share("*.block_sparse_moe.experts"),
        differs=WHOLE_HEADS,
        parallelisms=EXPERTS,
    ),
    Family(
        name="granitemoeshared",
        config=tiny(
            "granitemoeshared", num_local_experts=7, shared_intermediate_size=17, **NUMBERS
        ),
        variants=VARIANTS,
        local=local_keys(
            "*.block_sparse_moe.experts",
            "num_local_experts",
            "intermediate_size",
            {"shared_intermediate_size": ("*.shared_mlp.output_linear.weight", 1)},
        ),
        whole={"num_local_experts": ("*.block_sparse_moe.router",)},
        prepare=share("*.block_sparse_moe.experts"),
        differs={
            **WHOLE_HEADS,
            "*.shared_mlp.*": "the plan keeps the shared expert whole; halves compute so",
        },
        parallelisms=EXPERTS,
    ),
    Family(
        name="gpt_oss",
        config=tiny("gpt_oss", num_local_experts=7, **NUMBERS),
        variants=VARIANTS,
        local={
            **local_keys(MLP, "num_local_experts", "intermediate_size"),
            "intermediate_size": (f"{MLP}.down_proj", 1),
        },
        whole={"num_local_experts": ("*.mlp.router",)},
        prepare=lambda rank: share_experts(rank, MLP, added_once="down_proj_bias"),
        differs=NO_PLAN,
        parallelisms=EXPERTS,
    ),
    Family(
        name="llama4",
        config=LLAMA_4,
        variants=VARIANTS,
        local=LLAMA_4_LOCAL,
        whole={"num_local_experts": ("*.feed_forward.router",)},
        sized_by_shard=("*.feed_forward.shared_expert.*",),
        prepare=share_stacked,
        parallelisms=EXPERTS,
    ),
    Family(
        name="llama4-vision",
        auto="Llama4ForConditionalGeneration",
        config={
            "model_type": "llama4",
            "image_token_index": 60,
            "tie_word_embeddings": False,
            "text_config": LLAMA_4,
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 12,
                "intermediate_size": 384,
                "image_size": 8,
                "patch_size": 2,
                "projector_input_dim": 21,
                "projector_output_dim": 21,
                "vision_output_dim": 21,
            },
        },
        local={
            f"text_config.{key}": (share[0].replace("*", "language_model*", 1), share[1])
            for key, share in LLAMA_4_LOCAL.items()
        },
        inputs=make_image,
        whole={"text_config.num_local_experts": ("*.feed_forward.router",)},
        # Heads of the tower are counted from their width.
        sized_by_shard=("*.feed_forward.shared_expert.*", "vision_model.*"),
        prepare=share_stacked,
        differs={
            "vision_model.*": "the tower's plan has other layers, which compute so as well",
            "multi_modal_projector.*": "the plan cuts its rows; it computes whole as well",
        },
        parallelisms=EXPERTS,
    ),
    Family(
        name="deepseek_v2",
        # Pairs of rotated elements are read as complex numbers, so all strides are even.
        config=latent(
            "deepseek_v2", topk_method="group_limited_greedy", qk_nope_head_dim=8, kv_lora_rank=10
        ),
        variants=LATENT_VARIANTS,
        local=LATENT,
        whole=ROUTED,
        sized_by_shard=SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="deepseek_v3",
        config=latent("deepseek_v3"),
        variants=LATENT_VARIANTS,
        local=LATENT,
        differs=WHOLE_HEADS,
        whole=ROUTED,
        sized_by_shard=SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="deepseek_v32",
        config=latent("deepseek_v32", index_n_heads=3, index_head_dim=8, index_topk=4),
        variants=(LATENT_VARIANTS[0], LATENT_VARIANTS[2]),
        local=LATENT,
        whole=ROUTED,
        sized_by_shard=SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
    Family(
        name="glm_moe_dsa",
        config=latent("glm_moe_dsa", index_n_heads=3, index_head_dim=8, index_topk=4),
        variants=(LATENT_VARIANTS[0], LATENT_VARIANTS[2]),
        local=LATENT,
        whole=ROUTED,
        sized_by_shard=SHARED,
        prepare=share(MLP),
        parallelisms=EXPERTS,
    ),
]
