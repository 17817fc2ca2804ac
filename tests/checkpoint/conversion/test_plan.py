"""Defaults of requests: the recipe of config.json for a mesh alone, and the source's layouts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.campaigns.small_checkpoints import SOURCES
from cli.command_runs import run_here
from reshard import DeviceMesh, checkpoint
from reshard.checkpoint.conversion.plan import plan_conversion
from reshard.checkpoint.example_model import write_example_model
from reshard.errors import FormatError, RecipeError, UncomputableError, UsageError

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


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": "\udcff"}'])
def test_a_damaged_config_is_noted_or_an_error(model: Path, text: str, tmp_path: Path) -> None:
    """Where nothing reads it, it is copied."""
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    says = "config.json is not (a )?JSON"
    for number, options in enumerate(({"to": "full"}, {"to": "full", "format": "torch-dcp"}, {})):
        report = checkpoint.convert(source, tmp_path / f"copied{number}", **options)
        (note,) = [note for note in report.notes if "config.json" in note]
        assert re.match(says, note) and "copied as it is" in note
    for options in ({"to": "tp=2"}, {"dtype": "bf16"}, {"to": "tp=2", "recipe": "llama"}):
        with pytest.raises(FormatError, match=says):
            plan_conversion(source, tmp_path / "new", **options)
    with pytest.raises(FormatError, match=says):
        checkpoint.compare(source, model, recipe="llama")
    # A table of names needs none, in a conversion and in a comparison.
    table = {"head.weight": "lm_head.weight"}
    renamed = tmp_path / "renamed"
    checkpoint.convert(source, renamed, to="full", target_names=table)
    assert checkpoint.compare(source, renamed, right_names=table).is_same


def list_specs(source: Path, **arguments: Any) -> dict[str, str | None]:
    tensors = plan_conversion(source, source.with_name("new"), **arguments).write_plan.tensors
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
    assert shown["recipe"] == "llama"
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
    assert not any("tp" in (tensor.spec or "") for tensor in planned.write_plan.tensors.values())


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
    copies = ",".join(axis for axis in ("dp", "cp") if axis in to)
    notes = [note for note in planned.notes if "whose ranks hold copies" in note]
    assert notes == (
        [f"no tensor is sharded over {copies}, whose ranks hold copies"] * bool(copies)
    )
    shown = run_here("plan", str(model), "--to", to).output
    assert [f"note: {note}" for note in notes] == [
        line for line in shown.splitlines() if "hold copies" in line
    ]


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
    assert {one.dtype.name for one in planned.write_plan.tensors.values()} == {"bfloat16"}
    shown = run_here("plan", str(model), "--to", "full", "--dtype", name, "--json").json
    assert {one["dtype"] for one in shown["tensors"]} == {"bfloat16"}
    done = run_here("plan", str(model), "--to", "full", "--dtype", "fp8")
    assert (done.code, "--quantize fp8-block128" in done.errors) == (2, True)


KEPT = [
    ({"to": "full", "most_file_bytes": 200_000}, "safetensors", 4),
    ({"to": "full", "most_file_bytes": 200_000, "format": "torch-pickle"}, "torch-pickle", 4),
    ({"to": "tp=2,dp=2"}, "sharded-safetensors", 4),
    ({"to": "tp=2,dp=2", "replicas": "once"}, "sharded-safetensors", 4),
    ({"to": "tp=2,fsdp=2", "format": "torch-dcp"}, "torch-dcp", 4),
    ({"to": 3}, "sharded-safetensors", 3),
    ({"to": "tp=2", "format": "orbax"}, "orbax", 2),
]


@pytest.mark.parametrize(("first", "format", "files"), KEPT, ids=lambda one: str(one)[:30])
def test_layouts_format_and_number_of_files_stay(
    model: Path, tmp_path: Path, first: dict[str, Any], format: str, files: int
) -> None:
    checkpoint.convert(model, tmp_path / "source", **first)
    source = checkpoint.open(tmp_path / "source")
    assert (
        run_here("convert", tmp_path / "source", tmp_path / "new", "--dtype", "bfloat16").code == 0
    )
    new = checkpoint.open(tmp_path / "new")
    assert (new.format, len(new.files), new.mesh) == (format, files, source.mesh)
    assert {tensor.dtype.name for tensor in new.tensors.values()} == {"bfloat16"}
    assert all(new[name].layout == tensor.layout for name, tensor in source.tensors.items())
    if format == "sharded-safetensors":
        assert all(new[name].stored_slots == source[name].stored_slots for name in source)
    if format == "safetensors":
        ranges = {
            name: one.tensors[name].file_range(0).path for one in (source, new) for name in one
        }
        assert ranges == {name: source[name].file_range(0).path for name in source}
    report = checkpoint.convert(source, tmp_path / "copy", exclude=["model.norm.*"])
    assert report.tensors == len(source) - 1
    assert checkpoint.compare(
        checkpoint.select(source, exclude=["model.norm.*"]), tmp_path / "copy"
    ).is_same


def test_a_layout_that_cannot_stay_is_an_error(model: Path, tmp_path: Path) -> None:
    checkpoint.convert(model, tmp_path / "tp2", to="tp=2")
    for arguments, message in (
        ({"rules": ["*=..."]}, "rules without `to`, the mesh to shard over"),
        ({"recipe": "llama"}, "a recipe without `to`"),
        ({"strategy": "simple"}, "a strategy without `to`"),
        (
            {"quantize": "fp8-block128"},
            "quantize without `to`: .*tp2 is sharded over tp=2, and its",
        ),
        ({"source_names": {"a": "b"}}, "names of other programs without `to`"),
        ({"format": "safetensors"}, "the format safetensors holds whole tensors; give to='full'"),
    ):
        with pytest.raises(UsageError, match=message):
            checkpoint.convert(tmp_path / "tp2", tmp_path / "new", **arguments)
    held = checkpoint.describe_ranks(
        {0: {"w": (3, 4)}, 1: {"w": (2, 4)}}, "tp=2", rules=["w=tp, -"]
    )
    with pytest.raises(UsageError, match="of the format arrays of ranks, which is not written"):
        checkpoint.plan_conversion(held, tmp_path / "new")
    # Names are those of a recipe that the user names, where tensors are whole.
    names = {"recipe": "auto", "target_names": "megatron", "allow": ["incomplete"]}
    made = plan_conversion(model, tmp_path / "new", **names)
    assert "output_layer.weight" in made.write_plan.tensors
    assert made.resolved["to"] == "full" and "cut" not in made.resolved
    assert plan_conversion(tmp_path / "tp2", tmp_path / "new").resolved["cut"] == "as the source"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Megatron ranks", "2 ranks for Megatron's folders; give a mesh"),
        ("ZeRO experts", r"does not determine the layout of .* give `to`, such as dp=2"),
    ],
)
def test_a_source_whose_layout_is_unknown_is_an_error(
    name: str, message: str, tmp_path: Path
) -> None:
    (source,) = (one for one in SOURCES if one.name == name)
    (tmp_path / "source").mkdir()
    opened = source.open(source.make(tmp_path / "source"))
    with pytest.raises(UsageError, match=message):
        checkpoint.plan_conversion(opened, tmp_path / "new")


def list_stages(checkpoint_or_path: Any) -> dict[int, set[str]]:
    """Which layers each rank stores."""
    opened = checkpoint.open(checkpoint_or_path)
    stored: dict[int, set[str]] = {}
    for name, tensor in opened.tensors.items():
        for rank in tensor.layout.holders if ".layers." in name else ():
            stored.setdefault(int(rank), set()).add(name.split(".")[2])
    return stored


@pytest.mark.parametrize(
    ("arguments", "second"),
    [
        ({"to": "tp=2,pp=2"}, {2, 3}),
        ({"to": "pp=2,tp=2"}, {2, 3}),
        ({"to": "tp=2,pp=2", "mesh_order": "text"}, {1, 3}),
        ({"to": "tp=2,pp=2", "mesh_order": "pp,tp"}, {1, 3}),
        ({"to": DeviceMesh.of(tp=2, pp=2)}, {1, 3}),
    ],
    ids=str,
)
def test_ranks_are_ordered_by_the_kinds_of_axes(
    model: Path, tmp_path: Path, arguments: dict[str, Any], second: set[int]
) -> None:
    report = checkpoint.convert(model, tmp_path / "new", **arguments)
    stages = list_stages(tmp_path / "new")
    assert {rank for rank, layers in stages.items() if layers == {"1"}} == second
    assert any("counted over pp=2,tp=2" in note for note in report.notes) == (
        arguments == {"to": "tp=2,pp=2"}
    )
    for rank in range(4):
        loaded = checkpoint.load(model, rank=rank, **arguments)
        assert ("model.layers.1.mlp.up_proj.weight" in loaded) == (rank in second)
    # Files that were written are read as they say, and keep their ranks.
    checkpoint.convert(tmp_path / "new", tmp_path / "copy")
    assert list_stages(tmp_path / "copy") == stages


def test_commands_show_which_rank_has_which_stage(model: Path, tmp_path: Path) -> None:
    mesh = ("--to", "tp=2,pp=2")
    done = run_here("convert", model, tmp_path / "new", *mesh)
    assert "for pp=2,tp=2 by the recipe llama: " in done.output
    note = "note: ranks are counted over pp=2,tp=2, the last axis fastest, not as written"
    for run in (done, run_here("plan", model, *mesh), run_here("recipe", "check", model, *mesh)):
        assert note in run.output
    shown = run_here("inspect", tmp_path / "new").output.splitlines()
    assert shown[1] == "stages: pp 0 is ranks 0,1, pp 1 is ranks 2,3"
    assert note not in run_here("plan", model, *mesh, "--mesh-order", "text").output
    for other in ((), ("--to", "full"), ("--to", "4")):
        refused = run_here("plan", model, *other, "--mesh-order", "tp")
        assert (refused.code, "has no effect here" in refused.errors) == (2, True)
