"""Selections through plan, convert, verify and the library; optimizer state follows parameters."""

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
from reshard.checkpoint.conversion.source_selection import select_from
from reshard.checkpoint.naming.selection import TensorSelection
from reshard.errors import UsageError

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
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", TENSORS)
    return tmp_path / "source"


def test_convert_and_verify(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert run_here("convert", source, target, "--to", "full", *OPTIONS, "-q").code == 0
    found = read_file(target / "model.safetensors")
    assert found == {
        "l.0.up": TENSORS["model.layers.0.w1"],
        "l.1.up": TENSORS["model.layers.1.w1"],
        "norm": TENSORS["model.norm"],
    }
    assert run_here("verify", source, target, *OPTIONS).code == 0
    assert run_here("verify", source, target).code == 1
    assert run_here("verify", source, target, "--include", "model.*").code == 1


def test_verify_chooses_of_both(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_file(
        other / "model.safetensors",
        {**TENSORS, "model.norm": tensor("float32", (4,), 9), "model.extra": TENSORS["model.norm"]},
    )
    assert run_here("verify", source, other).code == 1
    assert run_here("verify", source, other, "--include", "*.w1").code == 0
    assert run_here("verify", source, other, "--include", "model.*").code == 1
    assert run_here("verify", source, other, "--exclude", "model.norm").code == 1
    wrong = run_here("verify", source, other, "--exclude", "nothing")
    assert (wrong.code, "matches none of 7 names" in wrong.errors) == (2, True)


def test_plan_has_the_names_and_rules_match_them(source: Path) -> None:
    run = run_here("plan", source, "--to", "tp=2", "--rule", "l.*=tp, -", *OPTIONS, "--json")
    assert run.code == 2, "norm is not matched"
    arguments = ("plan", source, "--to", "tp=2", "--rule", "l.*=tp, -", "--rule", "norm=-")
    run = run_here(*arguments, *OPTIONS, "--json")
    assert [(one["name"], one["cut"]) for one in run.json["tensors"]] == [
        ("l.0.up", "tp, -"),
        ("l.1.up", "tp, -"),
        ("norm", "-"),
    ]


def test_a_dry_run_writes_nothing_and_is_refused_as_a_run(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    before = entries(tmp_path)
    arguments = ("convert", source, target, "--to", "full", *OPTIONS)
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


def test_options_are_of_the_conversion(source: Path, tmp_path: Path) -> None:
    plain = checkpoint.plan_conversion(source, tmp_path / "t", to="full")
    assert "rename" not in plain.resolved
    chosen = checkpoint.plan_conversion(source, tmp_path / "t", to="full", rename=[RENAME])
    assert chosen.resolved["rename"] == [RENAME]
    with pytest.raises(UsageError, match="cannot read the renaming"):
        checkpoint.ConversionRequest(to="full", rename=["x"])
    with pytest.raises(UsageError, match="give a list"):
        checkpoint.ConversionRequest(to="full", include="x")
    checkpoint.convert(source, tmp_path / "t", to="full", exclude=["optim.*"])
    assert len(checkpoint.open(tmp_path / "t")) == 3


def test_optimizer_state_follows_its_parameter(source: Path) -> None:
    opened = checkpoint.open(source)
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


def test_groups_follow_parameters(source: Path) -> None:
    opened = checkpoint.open(source)
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


def test_an_interrupted_run_is_of_its_selection(source: Path, tmp_path: Path) -> None:
    """Another selection is another conversion, and does not go on with the first."""
    first = checkpoint.plan_conversion(source, tmp_path / "t", to="full", rename=["*norm=*n"])
    other = checkpoint.plan_conversion(source, tmp_path / "t", to="full", rename=["*norm=*m"])
    assert json.dumps(first.resolved) != json.dumps(other.resolved)
