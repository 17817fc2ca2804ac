"""One rank of a job of four: latent attention and shared experts, as Megatron and as plain modules.

What a Megatron rank has is cut from whole tensors by hand here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import reshard
from rank_cases import reported
from refit_models import Values, expect_same, laid_out, module_of, whole, zeros
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.ranks import MegatronRanks
from reshard.recipes.assignment import assign
from reshard.recipes.library import load_recipe
from reshard.torch import MegatronModel, by_recipe, refit

HEADS, HIDDEN, INNER, SMALL, VOCABULARY, LAYERS, EXPERTS = 4, 8, 12, 6, 16, 4, 4
QUERY_RANK, KEY_RANK, PLAIN, ROTARY, VALUE = 5, 3, 2, 1, 3
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": SMALL,
}
CUT, EXPERT = {"tensor_model_parallel": True}, {"is_expert": True}
ROW = CUT | {"partition_dim": 1}


def gated(at: str, inner: int) -> dict[str, tuple[int, ...]]:
    ways = {f"{at}.{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
    return ways | {f"{at}.down_proj.weight": (HIDDEN, inner)}


def plain() -> Values:
    """The whole model by Hugging Face's names; its first layer is dense."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        at = f"{of}.self_attn"
        shapes |= {
            f"{of}.input_layernorm.weight": (HIDDEN,),
            f"{at}.q_a_proj.weight": (QUERY_RANK, HIDDEN),
            f"{at}.q_a_layernorm.weight": (QUERY_RANK,),
            f"{at}.q_b_proj.weight": (HEADS * (PLAIN + ROTARY), QUERY_RANK),
            f"{at}.kv_a_proj_with_mqa.weight": (KEY_RANK + ROTARY, HIDDEN),
            f"{at}.kv_a_layernorm.weight": (KEY_RANK,),
            f"{at}.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), KEY_RANK),
            f"{at}.o_proj.weight": (HIDDEN, HEADS * VALUE),
            f"{of}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if not layer:
            shapes |= gated(f"{of}.mlp", INNER)
            continue
        shapes |= {
            f"{of}.mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{of}.mlp.gate.e_score_correction_bias": (EXPERTS,),
        }
        for expert in range(EXPERTS):
            shapes |= gated(f"{of}.mlp.experts.{expert}", SMALL)
        shapes |= gated(f"{of}.mlp.shared_experts", INNER)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {name: whole(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}


def megatron(ranks: MegatronRanks, is_fused: bool) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """What this rank of Megatron calls it, has of it, and says of it.

    `is_fused` is with norms inside the layers behind them, as Transformer Engine has it.
    """
    values, rank = plain(), dist.get_rank()
    tp, ep = rank % ranks.tp, rank % ranks.ep
    stage = rank // (ranks.world_size // ranks.pp)
    share = LAYERS // ranks.pp

    def rows(name: str) -> torch.Tensor:
        return values[name].chunk(ranks.tp)[tp]

    def columns(name: str) -> torch.Tensor:
        return values[name].chunk(ranks.tp, dim=1)[tp]

    def both(at: str) -> torch.Tensor:
        return torch.cat([rows(f"{at}.{name}_proj.weight") for name in ("gate", "up")])

    if stage == 0:
        yield "embedding.word_embeddings.weight", rows("model.embed_tokens.weight"), CUT
    for number in range(share):
        of, layer = f"decoder.layers.{number}", f"model.layers.{stage * share + number}"
        own, at = f"{of}.self_attention", f"{layer}.self_attn"
        yield f"{of}.input_layernorm.weight", values[f"{layer}.input_layernorm.weight"], {}
        for ours, theirs, up in (("q", "q_a_proj", "q_b_proj"), ("kv", "", "kv_b_proj")):
            down = values[f"{at}.{theirs or 'kv_a_proj_with_mqa'}.weight"]
            yield f"{own}.linear_{ours}_down_proj.weight", down, {}
            yield f"{own}.linear_{ours}_up_proj.weight", rows(f"{at}.{up}.weight"), CUT
            where = f"linear_{ours}_up_proj.layer_norm_weight" if is_fused else ""
            norm = values[f"{at}.{ours}_a_layernorm.weight"]
            yield f"{own}.{where or f'{ours}_layernorm.weight'}", norm, {}
        yield f"{own}.linear_proj.weight", columns(f"{at}.o_proj.weight"), ROW
        is_dense = stage * share + number == 0
        inside = is_dense and is_fused
        before = "mlp.linear_fc1.layer_norm_weight" if inside else "pre_mlp_layernorm.weight"
        yield f"{of}.{before}", values[f"{layer}.post_attention_layernorm.weight"], {}
        shared = "mlp" if is_dense else "mlp.shared_experts"
        yield f"{of}.{shared}.linear_fc1.weight", both(f"{layer}.{shared}"), CUT
        output = columns(f"{layer}.{shared}.down_proj.weight")
        yield f"{of}.{shared}.linear_fc2.weight", output, ROW
        if is_dense:
            continue
        yield f"{of}.mlp.router.weight", values[f"{layer}.mlp.gate.weight"], {}
        bias = values[f"{layer}.mlp.gate.e_score_correction_bias"]
        yield f"{of}.mlp.router.expert_bias", bias, {}
        for local in range(EXPERTS // ranks.ep):
            theirs = f"{layer}.mlp.experts.{ep * (EXPERTS // ranks.ep) + local}"
            parts = [values[f"{theirs}.{name}_proj.weight"] for name in ("gate", "up")]
            down = values[f"{theirs}.down_proj.weight"]
            experts = f"{of}.mlp.experts"
            for number_of, value, says in (
                (1, torch.cat(parts), CUT | EXPERT),
                (2, down, ROW | EXPERT),
            ):
                grouped = f"{experts}.linear_fc{number_of}.weight{local}"
                single = f"{experts}.local_experts.{local}.linear_fc{number_of}.weight"
                yield grouped if is_fused else single, value, says
    if stage == ranks.pp - 1:
        yield "decoder.final_layernorm.weight", values["model.norm.weight"], {}
        yield "output_layer.weight", rows("lm_head.weight"), CUT


def model_of(ranks: MegatronRanks, is_fused: bool, is_empty: bool) -> MegatronModel:
    given = [
        (name, torch.zeros_like(value) if is_empty else value.clone(), says)
        for name, value, says in megatron(ranks, is_fused)
    ]
    layers = PipelineLayers.even(LAYERS, ranks.pp)
    return MegatronModel(module_of(given), MegatronNames(ranks, layers))


def main() -> None:
    dist.init_process_group("gloo")
    recipe = load_recipe("deepseek_v3")
    names = recipe.naming("megatron", CONFIG)
    values = plain()
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    cases = (
        (MegatronRanks(tp=2, pp=2, ep=2, etp=1), {"ep": 2, "tp": 2}, True),
        (MegatronRanks(tp=2, dp=2, ep=4, etp=1), {"pp": 2, "tp": 2}, False),
    )
    for ranks, sizes, is_fused in cases:
        mesh = reshard.DeviceMesh.of(**sizes)
        layouts = assign(shapes, mesh, (), recipe, CONFIG).layouts
        own, full = (
            {n: local for n, (local, _) in laid_out(of, layouts).items() if local is not None}
            for of in (zeros(values), values)
        )
        laid = by_recipe(own, mesh, shapes, recipe, config=CONFIG)
        given = model_of(ranks, is_fused, is_empty=False)
        with reported(f"{ranks} become {sizes}"):
            refit(given, laid, source_names=names, num_experts=EXPERTS)
            expect_same(own, full, f"{ranks} to {sizes}")
        with reported(f"{sizes} become {ranks}"):
            back = model_of(ranks, is_fused, is_empty=True)
            refit(laid, back, target_names=names, num_experts=EXPERTS)
            expect_same(back.chunks.state_dict(), given.chunks.state_dict(), f"{sizes} to {ranks}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
