"""What Megatron-core holds of small models, recorded, and the same by recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reshard.mesh import DeviceMesh
from reshard.recipes import assign, load_recipe
from reshard.recipes.naming import Fusion, Meaning, find_by_pattern, make_fused_spec

# For each tensor in Megatron's names, the boxes `[start, stop]` that every rank has.
Held = dict[str, dict[str, list[Any]]]

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "megatron"

CONFIG = {
    "hidden_size": 40,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "num_experts": 6,
    "tie_word_embeddings": False,
}


SIZES: tuple[tuple[dict[str, int], int | None], ...] = (
    ({"tp": 1}, None),
    ({"tp": 2}, None),
    ({"tp": 4}, None),
    ({"pp": 2, "dp": 1, "tp": 2}, None),
    ({"pp": 4, "dp": 2, "tp": 1}, None),
    ({"tp": 2}, 6),
    ({"pp": 2, "ep": 2, "tp": 1}, 6),
    ({"ep": 2, "tp": 2, "etp": 2}, 6),
    ({"ep": 3, "tp": 2, "etp": 2}, 6),
)


def shapes(experts: int | None) -> dict[str, tuple[int, ...]]:
    """The tensors of the model by the Hub's names."""
    hidden, heads, keys, wide = (
        CONFIG["hidden_size"],
        CONFIG["num_attention_heads"] * CONFIG["head_dim"],
        CONFIG["num_key_value_heads"] * CONFIG["head_dim"],
        CONFIG["moe_intermediate_size" if experts else "intermediate_size"],
    )
    found = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads),
        }
        if experts:
            found[f"{at}.mlp.gate.weight"] = (experts, hidden)
        for mlp in [f"{at}.mlp.experts.{e}" for e in range(experts or 0)] or [f"{at}.mlp"]:
            found[f"{mlp}.gate_proj.weight"] = found[f"{mlp}.up_proj.weight"] = (wide, hidden)
            found[f"{mlp}.down_proj.weight"] = (hidden, wide)
    return found | {
        "model.norm.weight": (hidden,),
        "lm_head.weight": (CONFIG["vocab_size"], hidden),
    }


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    """The ranks: experts' own tensor parallelism is over those of `tp`."""
    return DeviceMesh.of(**{axis: size for axis, size in sizes.items() if axis != "etp"})


def meaning_of(name: str, table: dict[str, Meaning]) -> Meaning:
    """What a name of Megatron's is in the Hub's."""
    return table[name] if name in table else find_by_pattern(name, table)


def hold_by_recipe(
    sizes: dict[str, int], experts: int | None, names: Iterable[str]
) -> tuple[Held, set[str]]:
    """The same by recipe and Megatron's names, and the Hub's names that these stand for."""
    recipe = load_recipe("qwen3_moe" if experts else "llama")
    config = {"model_type": recipe.name, **CONFIG}
    wholes = shapes(experts)
    assignment = assign(wholes, mesh_of(sizes), (), recipe, config)
    table = recipe.naming("megatron", config)
    held: Held = {}
    used: set[str] = set()
    for name in names:
        own = meaning_of(name, table)
        if isinstance(own, Fusion):
            length = sum(wholes[member][0] for member in own.members)
            shape = (length, *wholes[own.members[0]][1:])
            layout = make_fused_spec(name, own, assignment.specs, wholes).layout(shape)
        else:
            layout = assignment.layouts[own]
        used |= set(own.members) if isinstance(own, Fusion) else {own}
        held[name] = {
            str(rank): sorted([list(box.start), list(box.stop)] for box in layout.boxes(rank))
            for rank in layout.holders
        }
    return held, used


def path_of(sizes: dict[str, int], experts: int | None) -> Path:
    """The record of a parallelism."""
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    return GOLDEN / f"{'experts' if experts else 'dense'}-{text}.json"


def write_record(sizes: dict[str, int], experts: int | None, version: str, held: Held) -> None:
    """Write what Megatron-core of a version holds."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    record = {"megatron-core": version, "held": held}
    path_of(sizes, experts).write_text(json.dumps(record) + "\n")
