"""Optimizer state follows its parameter, under rules, recipes and strategies, in any shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard.checkpoint import plan_conversion
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.training.state_sharding import find_dims
from reshard.errors import CheckpointError, RecipeError, UnmatchedError

CONFIG = """{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 32,
    "tie_word_embeddings": false}"""
LLAMA = {
    "model.embed_tokens.weight": (32, 16),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in (0, 1)
        for name, shape in {
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
            "input_layernorm": (16,),
            "post_attention_layernorm": (16,),
        }.items()
    },
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
}


def write(folder: Path, shapes: Mapping[str, tuple[int, ...]], config: str = "") -> Path:
    folder.mkdir()
    write_file(
        folder / "model.safetensors",
        {name: tensor("float32", shape) for name, shape in shapes.items()},
    )
    if config:
        (folder / "config.json").write_text(config)
    return folder


def adam(shapes: Mapping[str, tuple[int, ...]], weights: str, container: str) -> dict[str, tuple]:
    found = {weights + name: shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for key in ("exp_avg", "exp_avg_sq", "master"):
            found[f"{container}.state.{name}.{key}"] = shape
        found[f"{container}.state.{name}.step"] = ()
    return found


def specs(conversion: Conversion) -> dict[str, str | None]:
    return {name: tensor.spec for name, tensor in conversion.write_plan.tensors.items()}


@pytest.mark.parametrize(
    ("weights", "container"),
    [("", "optimizer"), ("model.", "optim"), ("state_dict.", "optimizer_states.0")],
)
def test_a_recipe_shards_prefixed_weights_and_their_state(
    tmp_path: Path, weights: str, container: str
) -> None:
    shapes = adam(LLAMA, weights, container) | {"rng_state": (64,)}
    source = write(tmp_path / "source", shapes, CONFIG)
    plain = write(tmp_path / "plain", LLAMA, CONFIG)
    expected = specs(plan_conversion(plain, tmp_path / "t", to="tp=2,dp=2", recipe="llama"))
    conversion = plan_conversion(source, tmp_path / "t", to="tp=2,dp=2", recipe="llama")
    found = specs(conversion)
    for name in LLAMA:
        assert found[weights + name] == expected[name]
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert found[f"{container}.state.{name}.{key}"] == expected[name]
        assert found[f"{container}.state.{name}.step"] == ""
    assert found["rng_state"] == "-"
    assert not conversion.unknown
    assert expected["model.layers.0.self_attn.q_proj.weight"] != "-, -"


@pytest.mark.parametrize(
    "prefix", ["model.", "module.", "state_dict.model.", "_orig_mod.", "actor."]
)
def test_a_recipe_shards_prefixed_weights_without_optimizer(tmp_path: Path, prefix: str) -> None:
    plain = write(tmp_path / "plain", LLAMA, CONFIG)
    source = write(tmp_path / "source", {prefix + n: s for n, s in LLAMA.items()}, CONFIG)
    expected = specs(plan_conversion(plain, tmp_path / "t", to="tp=2", recipe="llama"))
    found = specs(plan_conversion(source, tmp_path / "t", to="tp=2", recipe="llama"))
    assert found == {prefix + name: spec for name, spec in expected.items()}


def test_a_recipe_cuts_each_of_several_models(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", LLAMA, CONFIG)
    prefixes = ("net.", "net_ema.")
    shapes = {prefix + name: shape for prefix in prefixes for name, shape in LLAMA.items()}
    source = write(tmp_path / "source", shapes, CONFIG)
    expected = specs(plan_conversion(plain, tmp_path / "t", to="tp=2", recipe="llama"))
    plan = plan_conversion(source, tmp_path / "t", to="tp=2", recipe="llama")
    assert "2 models with the same names are sharded: net.* (21), net_ema.* (21)" in plan.notes
    found = specs(plan)
    assert found == {p + name: spec for p in prefixes for name, spec in expected.items()}
    del shapes["net_ema.model.norm.weight"]
    source = write(tmp_path / "less", shapes, CONFIG)
    with pytest.raises(CheckpointError, match=r"1 tensor missing: model.norm.weight"):
        plan_conversion(source, tmp_path / "t", to="tp=2", recipe="llama")


def test_layers_in_stages_have_their_state_and_steps_there(tmp_path: Path) -> None:
    source = write(tmp_path / "source", adam(LLAMA, "model.", "optim"), CONFIG)
    conversion = plan_conversion(source, tmp_path / "t", to="pp=2,tp=2", recipe="llama")
    tensors = conversion.write_plan.tensors
    name = "model.layers.1.mlp.up_proj.weight"
    assert tensors["model." + name].layout.holders == (2, 3)
    for key in ("exp_avg", "step"):
        assert tensors[f"optim.state.{name}.{key}"].layout.holders == (2, 3)


def test_rules_for_weights_are_rules_for_their_state(tmp_path: Path) -> None:
    shapes = adam({"up.weight": (8, 4), "up.bias": (8,)}, "model.", "optim")
    source = write(tmp_path / "source", shapes)
    rules = ["up.weight=tp, -", "model.up.bias=tp"]
    found = specs(plan_conversion(source, tmp_path / "t", to="tp=2", rules=rules))
    assert found["optim.state.up.weight.exp_avg"] == found["model.up.weight"] == "tp, -"
    assert found["optim.state.up.bias.master"] == "tp"
    assert found["optim.state.up.bias.step"] == ""


def test_a_rule_for_state_before_that_of_its_weight_decides(tmp_path: Path) -> None:
    source = write(tmp_path / "source", adam({"up": (8, 4)}, "model.", "optim"))
    rules = ["*.exp_avg=-, tp", "*=tp, ...", "*.master=..."]
    found = specs(plan_conversion(source, tmp_path / "t", to="tp=2", rules=rules))
    assert found["optim.state.up.exp_avg"] == "-, tp"
    assert found["optim.state.up.exp_avg_sq"] == "tp, -"
    assert found["optim.state.up.master"] == "tp, -"


def test_a_rule_for_any_number_of_dimensions_replicates_scalars(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": (4, 2), "scale": ()})
    found = specs(plan_conversion(source, tmp_path / "t", to="fsdp=2", rules=["*=fsdp, ..."]))
    assert found == {"a": "fsdp, -", "scale": ""}
    with pytest.raises(RecipeError, match="for tensors of 1 dim"):
        plan_conversion(source, tmp_path / "t", to="fsdp=2", rules=["*=fsdp"])


def test_weights_that_no_rule_matches_are_an_error_still(tmp_path: Path) -> None:
    source = write(tmp_path / "source", adam({"up": (8, 4), "down": (4, 8)}, "model.", "optim"))
    with pytest.raises(UnmatchedError, match="1 of 2 tensors: model"):
        plan_conversion(source, tmp_path / "t", to="tp=2", rules=["*up=tp, -"])


def test_state_of_other_shapes_is_cut_where_it_follows(tmp_path: Path) -> None:
    shapes = {
        "model.up": (8, 4),
        "optim.state.up.exp_avg_sq_row": (8,),
        "optim.state.up.exp_avg_sq_col": (4,),
        "optim.state.up.row_var": (8, 1),
        "optim.state.up.state1": (8, 4),
        "optim.state.up.absmax1": (3,),
        "optim.state.up.RMS": (1,),
    }
    source = write(tmp_path / "source", shapes)
    conversion = plan_conversion(source, tmp_path / "t", to="tp=2", rules=["up=tp, -"])
    assert specs(conversion) == {
        "model.up": "tp, -",
        "optim.state.up.exp_avg_sq_row": "tp",
        "optim.state.up.exp_avg_sq_col": "-",
        "optim.state.up.row_var": "tp, -",
        "optim.state.up.state1": "tp, -",
        "optim.state.up.absmax1": "-",
        "optim.state.up.RMS": "-",
    }
    (note,) = [note for note in conversion.notes if "optimizer state" in note]
    assert "1 tensor of optimizer state (first: optim.state.up.absmax1, [3])" in note


@pytest.mark.parametrize(
    ("parameter", "state", "key", "dims"),
    [
        ((4, 4), (4,), "exp_avg_sq_row", (0,)),
        ((4, 4), (4,), "exp_avg_sq_col", (1,)),
        ((4, 4), (4,), "unknown", None),
        ((2, 4, 3), (2, 3), "v_col", (0, 2)),
        ((4, 3), (12,), "flat", None),
        ((4,), (1,), "step", (None,)),
        ((), (), "exp_avg", ()),
    ],
)
def test_dimensions_of_state_are_those_of_its_parameter(
    parameter: tuple[int, ...],
    state: tuple[int, ...],
    key: str,
    dims: tuple[int | None, ...] | None,
) -> None:
    assert find_dims(parameter, state, key) == dims


@pytest.mark.parametrize("strategy", ["simple", "balanced", "sharded"])
def test_strategies_put_state_where_its_parameter_is(tmp_path: Path, strategy: str) -> None:
    shapes = adam({"up": (8, 4), "down": (4, 8), "norm": (5,)}, "model.", "optim")
    source = write(tmp_path / "source", shapes)
    tensors = plan_conversion(
        source, tmp_path / "t", to=3, strategy=strategy, format="torch-dcp"
    ).write_plan.tensors
    for name in ("up", "down", "norm"):
        layout = tensors["model." + name].layout
        assert tensors[f"optim.state.{name}.exp_avg"].layout is layout
        assert {*tensors[f"optim.state.{name}.step"].layout.holders} == {*layout.holders}


def test_ambiguous_numbered_parameters_are_whole_and_reported(tmp_path: Path) -> None:
    shapes = {"model.a": (4,), "model.b": (4,), "optimizer.state.0.exp_avg": (4,)}
    source = write(tmp_path / "source", shapes)
    conversion = plan_conversion(source, tmp_path / "t", to="dp=2", rules=["model.*=dp"])
    assert specs(conversion)["optimizer.state.0.exp_avg"] == "-"
    assert any("its parameter has a number" in note for note in conversion.notes)
    rules = ["*=dp"]
    conversion = plan_conversion(source, tmp_path / "t", to="dp=2", rules=rules)
    assert specs(conversion)["optimizer.state.0.exp_avg"] == "dp"


def test_an_optimizer_alone_is_sharded_like_its_parameters(tmp_path: Path) -> None:
    shapes = {n: s for n, s in adam(LLAMA, "", "optimizer").items() if n.startswith("optimizer")}
    source = write(tmp_path / "source", shapes, CONFIG)
    plain = write(tmp_path / "plain", LLAMA, CONFIG)
    expected = specs(plan_conversion(plain, tmp_path / "t", to="tp=2", recipe="llama"))
    found = specs(plan_conversion(source, tmp_path / "t", to="tp=2", recipe="llama"))
    assert {*found} == {*shapes}
    for name in LLAMA:
        assert found[f"optimizer.state.{name}.exp_avg"] == expected[name]
