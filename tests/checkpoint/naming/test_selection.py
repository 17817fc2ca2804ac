"""Which tensors are taken, and by which names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint.checkpoint_files import read_file, tensor, write_file
from cli.command_runs import entries, run_here
from reshard import checkpoint
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.naming.selection import (
    TensorSelection,
    by_new_names,
    move_path,
    select_from,
)
from reshard.errors import RecipeError, UsageError

NAMES = ("model.layers.0.w1", "model.layers.1.w1", "model.layers.1.w2", "model.norm", "step")


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    write_file(
        tmp_path / "model.safetensors",
        {name: tensor("float32", (4, 2), seed) for seed, name in enumerate(NAMES)},
    )
    return checkpoint.open(tmp_path / "model.safetensors")


def test_globs_take_and_leave_out(source: Checkpoint) -> None:
    chosen = checkpoint.select(source, include=["model.*"], exclude=["*.w2", "*.norm"])
    assert [*chosen] == ["model.layers.0.w1", "model.layers.1.w1"]
    assert chosen.notes[-1] == (
        "3 tensors left out by --include and --exclude (first: model.layers.1.w2)"
    )
    assert checkpoint.select(source) is source
    several = checkpoint.select(source, include=["step", "*.w[12]"])
    assert [*several] == [name for name in NAMES if name != "model.norm"]


def test_names_change_and_bytes_stay(source: Checkpoint) -> None:
    chosen = checkpoint.select(
        source, strip_prefix=["model."], rename=["layers.*.w1=model.layers.*.gate", "norm=n"]
    )
    assert [*chosen] == ["model.layers.0.gate", "model.layers.1.gate", "layers.1.w2", "n", "step"]
    for old, new in zip(NAMES, chosen, strict=True):
        assert chosen[new].name == new
        assert chosen[new].binding == source[old].binding
        found = checkpoint.read_tensor(chosen, new)
        assert (found == checkpoint.read_tensor(source, old)).all() or found.tobytes()


def test_one_model_is_selected(source: Checkpoint) -> None:
    chosen = checkpoint.select(source, select="model", exclude=["*.w2"])
    assert [*chosen] == ["layers.0.w1", "layers.1.w1", "norm"]
    assert chosen.notes[-1].startswith(
        "2 tensors left out by --select model, --include and --exclude (first: model.layers.1.w2)"
    )
    deeper = checkpoint.select(source, select="model.layers.", strip_prefix=["0."])
    assert [*deeper] == ["w1", "1.w1", "1.w2"]
    assert TensorSelection(select="ema", rename=["*.w=*.v"]).new_name("ema.a.w") == "a.v"
    assert TensorSelection(select="ema").new_name("ema_other.w") is None
    assert TensorSelection(select="ema").to_json() == {"select": "ema"}


@pytest.mark.parametrize(
    ("rename", "name", "becomes"),
    [
        ("a.*.b.*=x.*.y.*", "a.1.b.2", "x.1.y.2"),
        ("*.layers.*.w=layers.{2}.{1}.w", "decoder.layers.3.w", "layers.3.decoder.w"),
        ("*.w={1}.{1}", "a.w", "a.a"),
        ("*=model.*", "w", "model.w"),
        ("a.*=b", "a.anything.at.all", "b"),
        ("a.[0]*=b*", "a.[0].w", "b.w"),
        ("a=b", "aa", "aa"),
    ],
)
def test_renamings(rename: str, name: str, becomes: str) -> None:
    assert TensorSelection(rename=[rename]).new_name(name) == becomes


def test_the_first_renaming_counts() -> None:
    chosen = TensorSelection(rename=["a.*=first.*", "*=second.*"])
    assert [chosen.new_name(name) for name in ("a.w", "b.w")] == ["first.w", "second.b.w"]


def test_prefixes_are_stripped_in_order() -> None:
    chosen = TensorSelection(strip_prefix=["state.", "module."])
    names = ("state.module.w", "module.w", "state.w", "module.state.w")
    assert [chosen.new_name(name) for name in names] == ["w", "w", "w", "state.w"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"include": ["modle.*"]}, r"--include 'modle\.\*' matches none of 5 names.*'model"),
        ({"exclude": ["x"]}, "--exclude 'x' matches none"),
        ({"strip_prefix": ["module."]}, r"--strip-prefix 'module\.' matches none.*a prefix is"),
        ({"rename": ["layers.*=a.*"]}, r"--rename 'layers\.\*=a\.\*' matches none"),
        ({"exclude": ["*"]}, "no tensor is left of 5 tensors"),
        ({"rename": ["nothing"]}, "cannot read the renaming 'nothing'; write pattern=name"),
        ({"rename": ["a=b=c"]}, "cannot read the renaming"),
        ({"rename": ["=b"]}, "cannot read the renaming"),
        ({"rename": ["a.*=*.*"]}, r"has 2 `\*` in the new name, and its pattern has 1"),
        ({"rename": ["a=*"]}, r"has 1 `\*` in the new name, and its pattern has no `\*`"),
        ({"rename": ["a.*={2}"]}, r"has \{2\} in the new name.*numbers from \{1\} to \{1\}"),
        ({"rename": ["*.*=*.{2}"]}, r"has `\*` and numbers"),
        ({"include": "model.*"}, r"include 'model\.\*'; give a list"),
        ({"rename": [3]}, "rename has 3; expected a text"),
        ({"select": "ema"}, r"--select 'ema': no tensor .* begins with 'ema\.'; names .* 'model'"),
        ({"select": "step"}, "--select 'step': no tensor"),
        ({"select": "."}, r"select '\.'; give the prefix"),
        ({"select": ["model"]}, r"select \['model'\]; give the prefix"),
    ],
)
def test_ambiguous_selections_are_refused(source: Checkpoint, options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        checkpoint.select(source, **options)


def test_two_tensors_of_the_same_name_are_refused(source: Checkpoint) -> None:
    says = r"'model\.layers\.0\.w1' and 'model\.layers\.1\.w1' in .* would both be 'w'; leave one"
    with pytest.raises(RecipeError, match=says):
        checkpoint.select(source, rename=["model.layers.*.w1=w"])
    with pytest.raises(RecipeError, match="would have an empty name"):
        checkpoint.select(source, strip_prefix=["step"])


@pytest.mark.parametrize(
    ("path", "name", "moved"),
    [
        (("model", "layers.0.w"), "layers.0.w", ("layers.0.w",)),
        (("model", "layers", 0, "w"), "layers.0.w", ("layers", 0, "w")),
        (("model", "layers", 0, "w1"), "model.layers.0.gate", ("model", "layers", 0, "gate")),
        (("model", "w"), "other.w", ("other", "w")),
        (("a", "b", "c"), "x", ("x",)),
        (("a", "b", "c"), "a.x.c", ("a", "x", "c")),
    ],
)
def test_paths_follow_names(path: tuple, name: str, moved: tuple) -> None:
    assert move_path(path, name) == moved
    assert ".".join(map(str, moved)) == name


def test_everything_follows_names(source: Checkpoint) -> None:
    held = Checkpoint(
        source.folder,
        source.format,
        source.tensors,
        source.files,
        values={"step_size": 3, "lost": 4},
        paths={"model.norm": ("model", "norm"), "lost": ("lost",)},
    )
    new = {"model.norm": "norm", "lost": None, "step_size": "size"}
    found = by_new_names(held, new)
    assert (found.values, found.paths) == ({"size": 3}, {"norm": ("norm",)})
    assert "norm" in found.tensors


TENSORS = {
    "model.layers.0.w1": tensor("float32", (6, 4), 1),
    "model.layers.1.w1": tensor("float32", (6, 4), 2),
    "model.norm": tensor("float32", (4,), 3),
    "optim.state.layers.0.w1.exp_avg": tensor("float32", (6, 4), 4),
    "optim.state.layers.1.w1.exp_avg": tensor("float32", (6, 4), 5),
    "optim.state.layers.0.w1.step": tensor("float32", (), 6),
    "optim.state.layers.1.w1.step": tensor("float32", (), 6),
}
RENAME = "model.layers.*.w1=model.layers.*.gate"
OPTIONS = ("--include", "model.*", "--strip-prefix", "model.", "--rename", "layers.*.w1=l.*.up")


@pytest.fixture
def training_source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", TENSORS)
    return tmp_path / "source"


def test_convert_and_verify(training_source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert run_here("convert", training_source, target, "--to", "full", *OPTIONS, "-q").code == 0
    found = read_file(target / "model.safetensors")
    assert found == {
        "l.0.up": TENSORS["model.layers.0.w1"],
        "l.1.up": TENSORS["model.layers.1.w1"],
        "norm": TENSORS["model.norm"],
    }
    assert run_here("verify", training_source, target, *OPTIONS).code == 0
    assert run_here("verify", training_source, target).code == 1
    assert run_here("verify", training_source, target, "--include", "model.*").code == 1


def test_verify_chooses_of_both(training_source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_file(
        other / "model.safetensors",
        {**TENSORS, "model.norm": tensor("float32", (4,), 9), "model.extra": TENSORS["model.norm"]},
    )
    assert run_here("verify", training_source, other).code == 1
    assert run_here("verify", training_source, other, "--include", "*.w1").code == 0
    assert run_here("verify", training_source, other, "--include", "model.*").code == 1
    assert run_here("verify", training_source, other, "--exclude", "model.norm").code == 1
    wrong = run_here("verify", training_source, other, "--exclude", "nothing")
    assert (wrong.code, "matches none of 7 names" in wrong.errors) == (2, True)


def test_plan_has_the_names_and_rules_match_them(training_source: Path) -> None:
    run = run_here(
        "plan", training_source, "--to", "tp=2", "--rule", "l.*=tp, -", *OPTIONS, "--json"
    )
    assert run.code == 2, "norm is not matched"
    arguments = ("plan", training_source, "--to", "tp=2", "--rule", "l.*=tp, -", "--rule", "norm=-")
    run = run_here(*arguments, *OPTIONS, "--json")
    assert [(one["name"], one["cut"]) for one in run.json["tensors"]] == [
        ("l.0.up", "tp, -"),
        ("l.1.up", "tp, -"),
        ("norm", "-"),
    ]


def test_a_dry_run_writes_nothing_and_is_refused_as_a_run(
    training_source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    before = entries(tmp_path)
    arguments = ("convert", training_source, target, "--to", "full", *OPTIONS)
    run = run_here(*arguments, "--dry-run")
    assert (run.code, run.errors, entries(tmp_path)) == (0, "", before)
    for text in ("would be written to", "l.1.up", "6x4", "model.safetensors"):
        assert text in run.output
    said = run_here(*arguments, "--dry-run", "--json").json
    assert said["dry_run"] and [one["name"] for one in said["tensors"]] == [
        "l.0.up",
        "l.1.up",
        "norm",
    ]
    assert run_here(*arguments, "-q").code == 0
    assert said["size_bytes"] == checkpoint.open(target).size_bytes
    for more in ((), ("--memory", "1kB", "--overwrite")):
        real = run_here(*arguments, *more)
        dry = run_here(*arguments, *more, "--dry-run")
        assert (real.code, real.errors) == (dry.code, dry.errors)
        assert real.code == 2


def test_options_are_of_the_conversion(training_source: Path, tmp_path: Path) -> None:
    plain = checkpoint.plan_conversion(training_source, tmp_path / "t", to="full")
    assert "rename" not in plain.resolved
    chosen = checkpoint.plan_conversion(training_source, tmp_path / "t", to="full", rename=[RENAME])
    assert chosen.resolved["rename"] == (RENAME,)
    with pytest.raises(UsageError, match="cannot read the renaming"):
        checkpoint.ConversionRequest(to="full", rename=["x"])
    with pytest.raises(UsageError, match="give a list"):
        checkpoint.ConversionRequest(to="full", include="x")
    checkpoint.convert(training_source, tmp_path / "t", to="full", exclude=["optim.*"])
    assert len(checkpoint.open(tmp_path / "t")) == 3


def test_optimizer_state_follows_its_parameter(training_source: Path) -> None:
    opened = checkpoint.open(training_source)
    assert [*checkpoint.select(opened, rename=[RENAME])] == [
        "model.layers.0.gate",
        "model.layers.1.gate",
        "model.norm",
        "optim.state.layers.0.gate.exp_avg",
        "optim.state.layers.1.gate.exp_avg",
        "optim.state.layers.0.gate.step",
        "optim.state.layers.1.gate.step",
    ]
    # A pattern of its own is stronger.
    own = checkpoint.select(opened, rename=[RENAME, "optim.state.*.exp_avg=m.*"])
    assert "m.layers.0.w1" in own
    assert "optim.state.layers.0.gate.step" in own
    # With the weights' prefix gone, the state still has the name of the parameter.
    bare = checkpoint.select(opened, strip_prefix=["model."], rename=["layers.*.w1=l.*.up"])
    assert "l.0.up" in bare
    assert "optim.state.l.0.up.exp_avg" in bare


def test_groups_follow_parameters(training_source: Path) -> None:
    opened = checkpoint.open(training_source)
    groups = [{"lr": 0.1, "params": ["layers.0.w1", "layers.1.w1", "norm"]}]
    held = type(opened)(
        opened.folder,
        opened.format,
        opened.tensors,
        opened.files,
        values={"optimizer.param_groups": groups, "optim.param_groups.layers.0.w1.lr": 0.1},
    )
    found = select_from(held, TensorSelection(rename=[RENAME])).values
    assert found == {
        "optimizer.param_groups": [
            {"lr": 0.1, "params": ["layers.0.gate", "layers.1.gate", "norm"]}
        ],
        "optim.param_groups.layers.0.gate.lr": 0.1,
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_items_and_paths_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0), "b": torch.ones(2)}, "step": 7, "extra": "text"}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    target = tmp_path / "target"
    checkpoint.convert(
        tmp_path / "dcp", target, to="full", format="torch-dcp", exclude=["extra"],
        rename=["model.*=net.*", "step=steps"],
    )  # fmt: skip
    loaded = {"net": {"w": torch.zeros(6), "b": torch.zeros(2)}, "steps": 0}
    dcp.load(loaded, checkpoint_id=target, no_dist=True)
    assert loaded["steps"] == 7
    assert np.array_equal(loaded["net"]["w"].numpy(), np.arange(6, dtype=np.float32))


def test_an_interrupted_run_is_of_its_selection(training_source: Path, tmp_path: Path) -> None:
    """Another selection is another conversion, and does not go on with the first."""
    first = checkpoint.plan_conversion(
        training_source, tmp_path / "t", to="full", rename=["*norm=*n"]
    )
    other = checkpoint.plan_conversion(
        training_source, tmp_path / "t", to="full", rename=["*norm=*m"]
    )
    assert json.dumps(first.resolved) != json.dumps(other.resolved)
