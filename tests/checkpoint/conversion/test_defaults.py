"""Defaults of requests: the recipe of config.json for a mesh alone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.command_runs import run_here
from reshard import checkpoint
from reshard.checkpoint.conversion.planning import plan_conversion
from reshard.checkpoint.example_model import write_example_model
from reshard.errors import RecipeError, UncomputableError, UsageError

SINGLE_FILE = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    """The same weights without config.json."""
    folder = model.with_name("plain")
    folder.mkdir()
    shutil.copy(model / SINGLE_FILE, folder)
    return folder


@pytest.fixture(scope="module")
def unknown(model: Path) -> Path:
    """The same weights, of a type that no recipe is for."""
    folder = model.with_name("unknown")
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    return folder


def list_specs(source: Path, **arguments: Any) -> dict[str, str | None]:
    tensors = plan_conversion(source, source.with_name("new"), **arguments).arrangement.tensors
    return {name: tensor.spec for name, tensor in tensors.items()}


def test_a_mesh_alone_takes_the_recipe_of_config_json(model: Path) -> None:
    assert list_specs(model, to="tp=4") == list_specs(model, to="tp=4", recipe="llama")
    planned = plan_conversion(model, model.with_name("new"), to="tp=4")
    assert planned.resolved["recipe"] == "llama"
    part = checkpoint.load(model, to="tp=4", rank=3)
    assert part["model.layers.0.mlp.up_proj.weight"].shape == (40, 64)
    shown = run_here("plan", str(model), "--to", "tp=4", "--json").json
    assert {tensor["name"]: tensor["cut"] for tensor in shown["tensors"]} == {
        name: spec or "whole" for name, spec in list_specs(model, to="tp=4").items()
    }
    options = {"to": "tp=3", "options": ["vocabulary=pad256"], "allow": ["uncomputable"]}
    assert list_specs(model, **options)["lm_head.weight"] == "tp@pad256, -"


@pytest.mark.parametrize(
    "arguments",
    [
        {"to": "full"},
        {"to": 2},
        {"to": "tp=2", "recipe": "none"},
        {"to": "tp=2", "rules": ["*=..."]},
    ],
    ids=str,
)
def test_other_targets_take_no_recipe(model: Path, arguments: dict[str, Any]) -> None:
    planned = plan_conversion(model, model.with_name("new"), **arguments)
    assert planned.resolved["recipe"] is None
    assert not any("tp" in (tensor.spec or "") for tensor in planned.arrangement.tensors.values())


def test_a_recipe_that_cannot_be_computed_with_is_its_own_error(model: Path) -> None:
    with pytest.raises(UncomputableError, match="rank 1 would hold heads"):
        list_specs(model, to="tp=3")


@pytest.mark.parametrize("to", ["mp=4", "tp=2,ep=2", "tp=2,dp=2,etp=2"])
def test_an_axis_that_shards_nothing_is_an_error(model: Path, to: str) -> None:
    with pytest.raises(RecipeError, match=r"'llama' shards over tp, fsdp, pp, and copies are") as e:
        list_specs(model, to=to)
    assert ("--option tp=mp" in str(e.value)) == (to == "mp=4")
    with pytest.raises(RecipeError, match="shards over"):
        checkpoint.load(model, to=to)
    list_specs(model, to=to, allow=["replicas"])
    done = run_here("recipe", "check", str(model), "--to", to)
    assert done.code == 1
    assert run_here("recipe", "check", str(model), "--to", to, "--allow", "replicas").code == 0
    mapped = list_specs(model, to="mp=4", options=["tp=mp"])
    assert mapped["lm_head.weight"] == "mp, -"


@pytest.mark.parametrize("to", ["tp=2,dp=2", "dp=2", "tp=2,cp=2", "tp=2,ep=1,pp=1"])
def test_axes_of_copies_are_noted(model: Path, to: str) -> None:
    planned = plan_conversion(model, model.with_name("new"), to=to)
    assert any("their ranks hold copies" in note for note in planned.notes)


def test_a_recipe_declares_axes_of_copies(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'name = "mine"\nextends = "llama"\naxes = ["tp", "fsdp", "pp"]\nreplicas = ["node"]\n'
    )
    list_specs(model, to="tp=2,node=2", recipe=recipe)
    with pytest.raises(
        RecipeError, match="'mine' shards over tp, fsdp, pp, and copies are along node"
    ):
        list_specs(model, to="tp=2,dp=2", recipe=recipe)


@pytest.mark.parametrize("source", ["plain", "unknown"])
def test_without_a_recipe_the_error_has_rules_that_work(
    source: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(source)
    done = run_here("plan", str(folder), "--to", "ep=1,tp=4")
    assert done.code == 2
    assert "it resembles llama, whose rules match 21 of 21, then " in done.errors
    (written,) = re.findall(r"such as (--rule .*?)\. To keep", done.errors)
    rules = shlex.split(written)
    assert rules.count("--rule") == 4
    shown = run_here("plan", str(folder), "--to", "ep=1,tp=4", *rules, "--json").json
    assert sum(tensor["cut"] == "tp, -" for tensor in shown["tensors"]) >= 3
    with pytest.raises(UsageError, match="nothing says how to shard"):
        checkpoint.load(folder, to="tp=2")
    assert set(list_specs(folder, to="tp=2", allow=["replicas"]).values()) == {"-, -", "-"}
    list_specs(folder, to="dp=2")
    list_specs(folder, to="tp=1")


def test_formats_that_shard_by_themselves_take_no_recipe(unknown: Path) -> None:
    with pytest.raises(UsageError, match="no optimizer state"):
        list_specs(unknown, to="tp=2", format="deepspeed-zero1")


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_types_have_the_names_of_pytorch(model: Path, name: str) -> None:
    planned = plan_conversion(model, model.with_name("new"), to="full", dtype=name)
    assert {one.dtype.name for one in planned.arrangement.tensors.values()} == {"bfloat16"}
    shown = run_here("plan", str(model), "--to", "full", "--dtype", name, "--json").json
    assert {one["dtype"] for one in shown["tensors"]} == {"bfloat16"}
    done = run_here("plan", str(model), "--to", "full", "--dtype", "fp8")
    assert (done.code, "--quantize fp8-block128" in done.errors) == (2, True)
