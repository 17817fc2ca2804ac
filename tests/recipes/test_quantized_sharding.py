"""Stored tensors of quantised weights, cut as their logical weights are."""

from __future__ import annotations

import pytest

from reshard import DeviceMesh
from reshard.errors import UncomputableError
from reshard.layout import Layout
from reshard.recipes import Rule, assign, load_recipe
from reshard.recipes.assignment import Assignment

Shapes = dict[str, tuple[int, ...]]
BLOCK_FP8: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ATTENTION = "model.layers.0.self_attn"
FEED_FORWARD = "model.layers.0.mlp"


def with_scales(shapes: Shapes) -> Shapes:
    """Weights with a scale for each block of 128 by 128."""
    scales = {f"{n}_scale_inv": tuple(-(-size // 128) for size in s) for n, s in shapes.items()}
    return shapes | scales


def cut(shapes: Shapes, mesh: str, recipe: str, **config: object) -> Assignment:
    numbers: dict[str, object] = {
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    found = numbers | {"quantization_config": BLOCK_FP8} | config
    return assign(shapes, DeviceMesh.parse(mesh), (), load_recipe(recipe), found)


def expect_groups(weight: Layout, scale: Layout, rows: int, columns: int) -> None:
    """Every rank's scales are those of the groups of its elements, and these are whole groups."""
    assert weight.holders == scale.holders
    for rank in weight.holders:
        for box, of in zip(weight.boxes(rank), scale.boxes(rank), strict=True):
            for d, group in enumerate((rows, columns)):
                assert box.start[d] % group == 0
                assert box.stop[d] % group == 0 or box.stop[d] == weight.shape[d]
                assert of.start[d] == box.start[d] // group
                assert of.stop[d] == -(-box.stop[d] // group)


DEEPSEEK = {
    f"{ATTENTION}.q_b_proj.weight": (128 * 192, 1536),
    f"{ATTENTION}.kv_a_proj_with_mqa.weight": (576, 7168),
    f"{ATTENTION}.o_proj.weight": (7168, 128 * 128),
    f"{FEED_FORWARD}.gate_proj.weight": (18432, 7168),
    f"{FEED_FORWARD}.down_proj.weight": (7168, 18432),
}
QWEN3 = {
    f"{ATTENTION}.q_proj.weight": (32 * 128, 4096),
    f"{ATTENTION}.k_proj.weight": (8 * 128, 4096),
    f"{ATTENTION}.o_proj.weight": (4096, 32 * 128),
    f"{FEED_FORWARD}.up_proj.weight": (12288, 4096),
    f"{FEED_FORWARD}.down_proj.weight": (4096, 12288),
}


@pytest.mark.parametrize("mesh", ["tp=8", "tp=8,fsdp=16", "tp=4,fsdp=3", "fsdp=16", "tp=64"])
def test_blocks_of_deepseek_stay_with_their_scales(mesh: str) -> None:
    found = cut(with_scales(DEEPSEEK), mesh, "deepseek_v3", num_attention_heads=128)
    for name in DEEPSEEK:
        expect_groups(found.layouts[name], found.layouts[f"{name}_scale_inv"], 128, 128)
    assert not found.unknown


@pytest.mark.parametrize("mesh", ["tp=2", "tp=8", "tp=4,fsdp=5", "tp=2,pp=1,dp=2"])
def test_blocks_of_another_family_do_too(mesh: str) -> None:
    """No recipe has rules for scales: they follow from those of the weights."""
    found = cut(with_scales(QWEN3), mesh, "qwen3")
    for name in QWEN3:
        expect_groups(found.layouts[name], found.layouts[f"{name}_scale_inv"], 128, 128)
    assert found.matched[f"{FEED_FORWARD}.up_proj.weight_scale_inv"].pattern.endswith(".weight")


def test_heads_that_cut_a_block_are_refused_with_the_sizes_that_would_do() -> None:
    with pytest.raises(UncomputableError) as error:
        cut(with_scales(DEEPSEEK), "tp=128", "deepseek_v3", num_attention_heads=128)
    text = str(error.value)
    assert "tp=128 would have 0:192, which splits a group of 128" in text
    assert "tp of 1, 2, 4, 8, 16, 32 or 64 would do" in text
    assert "q_b_proj.weight_scale_inv" in text


def test_a_cut_by_name_is_moved_alike_for_all_its_members() -> None:
    """Rows of up are in no groups, columns of down in groups of 128: both are cut at these."""
    shapes: Shapes = {
        f"{FEED_FORWARD}.up_proj.weight_packed": (640, 32),
        f"{FEED_FORWARD}.up_proj.weight_scale": (640, 2),
        f"{FEED_FORWARD}.up_proj.weight_shape": (2,),
        f"{FEED_FORWARD}.down_proj.weight_packed": (256, 80),
        f"{FEED_FORWARD}.down_proj.weight_scale": (256, 5),
        f"{FEED_FORWARD}.down_proj.weight_shape": (2,),
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "bits": 4}
    found = cut(shapes, "tp=2", "llama", quantization_config=config)
    up = found.layouts[f"{FEED_FORWARD}.up_proj.weight_packed"]
    down = found.layouts[f"{FEED_FORWARD}.down_proj.weight_packed"]
    scale = found.layouts[f"{FEED_FORWARD}.down_proj.weight_scale"]
    assert [up.local_shape(rank) for rank in (0, 1)] == [(384, 32), (256, 32)]
    assert [down.local_shape(rank) for rank in (0, 1)] == [(256, 48), (256, 32)]
    assert [scale.local_shape(rank) for rank in (0, 1)] == [(256, 3), (256, 2)]


def test_a_stored_tensor_with_a_rule_of_its_own_keeps_it() -> None:
    rules = [Rule("*.weight_scale_inv", "..."), Rule("*.weight", "tp, -")]
    shapes = with_scales({"up.weight": (512, 256)})
    found = assign(shapes, DeviceMesh.of(tp=2), rules)
    assert str(found.specs["up.weight_scale_inv"]) == "-, -"
    assert str(assign(shapes, DeviceMesh.of(tp=2), rules[1:]).specs["up.weight_scale_inv"]) == (
        "tp, -"
    )


def test_rules_for_every_tensor_count_for_logical_weights() -> None:
    found = assign(
        with_scales({"up.weight": (384, 256)}), DeviceMesh.of(tp=2), [Rule("*", "tp, -")]
    )
    assert str(found.specs["up.weight"]) == "tp@unit128, -"
    assert str(found.specs["up.weight_scale_inv"]) == "tp, -"


def test_without_a_rule_the_stored_tensors_are_unmatched() -> None:
    shapes = with_scales({"up.weight": (384, 256)})
    found = assign(shapes, DeviceMesh.of(tp=2), [Rule("down.*", "tp, -")], allow=["unknown"])
    assert found.unknown == tuple(shapes)


def test_bytes_of_layers_count_stored_tensors() -> None:
    """A layer of 8-bit weights weighs half of one of the same shapes in 16 bits."""
    shapes: Shapes = {}
    for layer in range(4):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (1024, 1024)
    shapes |= with_scales({"model.layers.3.mlp.up_proj.weight": (1024, 1024)})
    sizes = {name: 4 if name.endswith("_inv") else 1 for name in shapes}
    for layer in (0, 1, 2):
        sizes[f"model.layers.{layer}.mlp.up_proj.weight"] = 2
    config: dict[str, object] = {"num_hidden_layers": 4, "quantization_config": BLOCK_FP8}
    recipe = load_recipe("llama").with_options({"layer": "bytes"})
    found = assign(shapes, DeviceMesh.of(pp=2), (), recipe, config, sizes)
    assert found.rank_bytes(sizes) == {0: 4 << 20, 1: (3 << 20) + 4 * 64}


def test_allowed_splits_keep_every_touched_group() -> None:
    shapes = with_scales({f"{ATTENTION}.q_proj.weight": (4 * 96, 256)})
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    recipe, mesh = load_recipe("llama"), DeviceMesh.of(tp=4)
    with pytest.raises(UncomputableError, match="--allow uncomputable"):
        assign(shapes, mesh, (), recipe, config)
    found = assign(shapes, mesh, (), recipe, config, allow=["uncomputable"])
    weight, scale = (found.layouts[name] for name in shapes)
    assert [weight.boxes(rank)[0].start[0] for rank in range(4)] == [0, 96, 192, 288]
    # Rows 96:192 lie in the groups 0:128 and 128:256, and so on.
    touched = [(scale.boxes(r)[0].start[0], scale.boxes(r)[0].stop[0]) for r in range(4)]
    assert touched == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert "which splits a group of 128" in found.uncomputable[0]


def test_unknown_methods_may_be_allowed() -> None:
    shapes: Shapes = {"layers.0.up.weight": (8, 8), "layers.0.up.codes": (8, 2)}
    config = {"quantization_config": {"quant_method": "aqlm"}}
    rules = [Rule("*.weight", "tp, -"), Rule("*.codes", "...")]
    mesh = DeviceMesh.of(tp=2)
    with pytest.raises(UncomputableError, match="'aqlm'"):
        assign(shapes, mesh, rules, None, config)
    found = assign(shapes, mesh, rules, None, config, allow=["uncomputable"])
    assert [str(one) for one in found.specs.values()] == ["tp, -", "-, -"]
