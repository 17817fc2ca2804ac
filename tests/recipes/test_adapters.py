"""Adapters are cut so that each rank's part of `B @ A` is its part of the weight's change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from reshard.errors import RecipeError, UnmatchedError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.library import load_recipe
from reshard.recipes.rules import Rule

PREFIX = "base_model.model."
RANK = 3
LLAMA = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 36,
}
LAYER = "model.layers.1"
# Of Llama, with 12 heads of 3 and a feed-forward of 20.
WEIGHTS = {
    f"{LAYER}.self_attn.q_proj.weight": (36, 36),
    f"{LAYER}.self_attn.k_proj.weight": (12, 36),
    f"{LAYER}.self_attn.o_proj.weight": (36, 36),
    f"{LAYER}.mlp.up_proj.weight": (20, 36),
    f"{LAYER}.mlp.down_proj.weight": (36, 20),
    "model.embed_tokens.weight": (50, 36),
}


def adapters_of(weights: dict[str, tuple[int, ...]], swapped: bool = False) -> dict[str, Any]:
    """The names and shapes that PEFT gives the adapters of some weights."""
    found = {}
    for name, (rows, columns) in weights.items():
        module = PREFIX + name.removesuffix(".weight")
        if "embed" in name:
            found[f"{module}.lora_embedding_A"] = (RANK, rows)
            found[f"{module}.lora_embedding_B"] = (columns, RANK)
            continue
        out, into = (columns, rows) if swapped else (rows, columns)
        found[f"{module}.lora_A.weight"] = (RANK, into)
        found[f"{module}.lora_B.weight"] = (out, RANK)
    return found


def held(layout: Layout, rank: int, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """What a rank holds of a tensor."""
    shape = layout.local_shape(rank)
    if shape is None or not layout.cells_of(rank):
        return None
    found = np.zeros(shape)
    (cell,) = layout.cells_of(rank)
    axes = []
    for dimension, table in enumerate(layout.tables):
        runs = table.runs_of(int(layout.cell_part[cell, dimension]))
        order = sorted((local, start, stop) for start, stop, local, _ in runs)
        axes.append([i for _, start, stop in order for i in range(start, stop)])
    found[...] = whole[np.ix_(*axes)]
    return found


def check_products(
    weights: dict[str, tuple[int, ...]], base: Assignment, found: Assignment, swapped: bool = False
) -> None:
    """Each rank's B @ A is what the rank has of the whole product, as its weight is cut."""
    generator = np.random.default_rng(0)
    ranks = math.prod(next(iter(found.specs.values())).mesh.shape)
    for name in weights:
        module = PREFIX + name.removesuffix(".weight")
        is_embedding = "embed" in name
        names = (
            [f"{module}.lora_embedding_{m}" for m in "AB"]
            if is_embedding
            else [f"{module}.lora_{m}.weight" for m in "AB"]
        )
        a, b = (generator.normal(size=found.layouts[one].shape) for one in names)
        turn = swapped or is_embedding
        product = (b @ a).T if turn else b @ a
        for rank in range(ranks):
            part = held(base.layouts[name], rank, product)
            mine = [held(found.layouts[one], rank, m) for one, m in zip(names, (a, b), strict=True)]
            if part is None:
                assert mine == [None, None]
                continue
            assert mine[0] is not None and mine[1] is not None
            # Storage axes divide A and B as they divide the weight: here they are not in the mesh.
            np.testing.assert_allclose(
                (mine[1] @ mine[0]).T if turn else mine[1] @ mine[0], part, err_msg=f"{name} {rank}"
            )


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "tp=2,pp=2", "tp=2,dp=3", "tp=2,fsdp=2", "tp=12"])
def test_products_of_ranks_are_their_parts_of_the_change(mesh: str) -> None:
    devices, recipe = DeviceMesh.parse(mesh), load_recipe("llama")
    base = assign(WEIGHTS, devices, (), recipe, LLAMA)
    found = assign(adapters_of(WEIGHTS), devices, (), recipe, LLAMA)
    assert found.unknown == ()
    check_products(WEIGHTS, base, found)


def test_column_parallel_and_row_parallel() -> None:
    found = assign(adapters_of(WEIGHTS), DeviceMesh.of(tp=2), (), load_recipe("llama"), LLAMA)
    cuts = {name.removeprefix(f"{PREFIX}{LAYER}."): str(cut) for name, cut in found.specs.items()}
    assert cuts["self_attn.q_proj.lora_A.weight"] == "-, -"
    assert cuts["self_attn.q_proj.lora_B.weight"] == "tp@heads12, -"
    assert cuts["self_attn.o_proj.lora_A.weight"] == "-, tp@heads12"
    assert cuts["self_attn.o_proj.lora_B.weight"] == "-, -"
    rule = found.matched[f"{PREFIX}{LAYER}.self_attn.q_proj.lora_B.weight"]
    assert rule.pattern == f"{PREFIX}*layers.{{layer}}.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    "known", [{"model_type": "gpt2"}, {"adapter_config": {"fan_in_fan_out": True}}]
)
def test_weights_stored_input_by_output(known: dict[str, Any]) -> None:
    config = {"n_head": 4, "n_embd": 12, "n_layer": 2, **known}
    weights = {
        "transformer.h.0.attn.c_attn.weight": (12, 36),
        "transformer.h.0.attn.c_proj.weight": (12, 12),
        "transformer.h.0.mlp.c_fc.weight": (12, 20),
    }
    recipe, mesh = load_recipe("gpt2"), DeviceMesh.of(tp=2)
    base = assign(weights, mesh, (), recipe, config)
    found = assign(adapters_of(weights, swapped=True), mesh, (), recipe, config)
    check_products(weights, base, found, swapped=True)


def test_a_model_type_that_is_not_text_is_ignored() -> None:
    adapters, mesh, recipe = adapters_of(WEIGHTS), DeviceMesh.of(tp=2), load_recipe("llama")
    odd: dict[str, Any] = {**LLAMA, "model_type": {"name": "llama"}}
    found, expected = (assign(adapters, mesh, (), recipe, config) for config in (odd, LLAMA))
    assert found.layouts == expected.layouts


def test_layers_live_on_their_stages() -> None:
    found = assign(adapters_of(WEIGHTS), DeviceMesh.of(pp=2), (), load_recipe("llama"), LLAMA)
    for name, layout in found.layouts.items():
        assert bool(layout.cells_of(1)) == (LAYER in name), name


def test_other_tensors_of_an_adapter() -> None:
    module = f"{PREFIX}{LAYER}.self_attn.q_proj"
    shapes = {
        f"{module}.lora_A.default.weight": (RANK, 36),
        f"{module}.lora_B.default.weight": (36, RANK),
        f"{module}.lora_B.default.bias": (36,),
        f"{module}.lora_magnitude_vector.default.weight": (36,),
        f"{PREFIX}score.weight": (2, 36),
    }
    found = assign(shapes, DeviceMesh.of(tp=2), (), load_recipe("llama"), LLAMA)
    assert [str(cut) for cut in found.specs.values()] == [
        *("-, -", "tp@heads12, -", "tp@heads12", "tp@heads12", "-, -"),
    ]
    assert found.unknown == ()


def test_rules_by_hand_come_first() -> None:
    shapes = adapters_of({f"{LAYER}.mlp.up_proj.weight": (20, 36)})
    rules = [Rule("*.lora_A.weight", "tp, -"), Rule("*.lora_B.weight", "-, tp")]
    found = assign(shapes, DeviceMesh.of(tp=3), rules, load_recipe("llama"), LLAMA)
    assert [str(cut) for cut in found.specs.values()] == ["tp, -", "-, tp"]


def test_adapters_of_unmatched_weights() -> None:
    shapes = adapters_of({"model.strange.weight": (20, 36)})
    mesh, recipe = DeviceMesh.of(tp=2), load_recipe("llama")
    with pytest.raises(UnmatchedError, match=r"model\.strange\.weight"):
        assign(shapes, mesh, (), recipe, LLAMA)
    found = assign(shapes, mesh, (), recipe, LLAMA, allow=["unknown"])
    assert found.unknown == tuple(shapes)


def test_layers_by_bytes() -> None:
    recipe = load_recipe("llama").with_options({"layer": "bytes"})
    shapes = adapters_of(WEIGHTS)
    found = assign(shapes, DeviceMesh.of(pp=2), (), recipe, LLAMA, dict.fromkeys(shapes, 2))
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"up.lora_A.weight": (2, 4)}, "an A and a B with the same name"),
        ({"up.lora_A.weight": (2, 4), "up.lora_B.weight": (8, 3)}, "as many rows of A as columns"),
    ],
)
def test_halves_that_do_not_go_together(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        assign(shapes, DeviceMesh.of(tp=2), (), load_recipe("llama"), LLAMA)
