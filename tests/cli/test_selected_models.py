"""`--select` in every command that opens a checkpoint, and in the library's functions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import run_here, write_model
from reshard import checkpoint
from reshard.errors import UsageError

WEIGHTS = {
    "layers.0.w": np.arange(8, dtype=np.float32).reshape(4, 2),
    "layers.1.w": np.ones((4, 2), np.float32),
}


def write_two(path: Path, step: float = 0) -> Path:
    """A file of weights and their average."""
    average = {f"ema.{name}": one * 2 + step for name, one in WEIGHTS.items()}
    return write_model(path, **{f"net.{name}": one for name, one in WEIGHTS.items()}, **average)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return write_two(tmp_path / "two")


def test_inspect_lists_the_models(two: Path) -> None:
    every = run_here("inspect", two)
    assert "2 models" in every.output and "Choose one with --select " in every.output
    chosen = json.loads(run_here("inspect", two, "--select", "ema", "--json").output)
    assert [one["name"] for one in chosen["tensors"]] == [*WEIGHTS]
    assert not any("2 models" in note for note in chosen["notes"])
    missing = run_here("inspect", two, "--select", "em")
    assert (missing.code, "names begin with 'ema', 'net'" in missing.errors) == (2, True)


def test_conversions_and_comparisons(two: Path, tmp_path: Path) -> None:
    plan = json.loads(run_here("plan", two, "--to", "full", "--select", "net", "--json").output)
    assert [one["name"] for one in plan["tensors"]] == [*WEIGHTS]
    target = tmp_path / "ema"
    assert run_here("convert", two, target, "--to", "full", "--select", "ema").code == 0
    assert run_here("verify", two, target, "--select", "ema").code == 0
    assert run_here("verify", two, target, "--select", "net").code == 1
    # A plain copy keeps all names apart, and needs no choice.
    assert run_here("convert", two, tmp_path / "copy", "--to", "full").code == 0
    rule = ("--to", "tp=2", "--rule", "layers.*=tp, -")
    assert run_here("recipe", "check", two, *rule, "--select", "net").code == 0


def test_a_delta_of_the_selected_model_is_created_and_applied(two: Path, tmp_path: Path) -> None:
    later, delta = write_two(tmp_path / "later", 1), tmp_path / "ema.delta"
    assert run_here("diff", two, later, "-o", delta, "--select", "ema").code == 0
    target = tmp_path / "new"
    assert run_here("apply", two, delta, target, "--select", "ema").code == 0
    assert run_here("verify", later, target, "--select", "ema").code == 0


def test_the_library_opens_loads_and_converts_the_selected_model(two: Path, tmp_path: Path) -> None:
    opened = checkpoint.open(two, select="ema")
    assert [*opened] == [*WEIGHTS]
    loaded = checkpoint.load(two, select="ema")
    for name, weight in WEIGHTS.items():
        assert (loaded[name] == weight * 2).all()
    checkpoint.convert(two, tmp_path / "out", to="full", select="ema")
    assert checkpoint.compare(two, tmp_path / "out", select="ema").is_same
    assert checkpoint.compare(opened, tmp_path / "out").is_same
    planned = checkpoint.plan_conversion(two, tmp_path / "other", to="full")
    with pytest.raises(UsageError, match="select 'ema' for a conversion"):
        checkpoint.compare(planned, tmp_path / "out", select="ema")
    with pytest.raises(UsageError, match="no tensor in"):
        checkpoint.open(two, select="emma")
