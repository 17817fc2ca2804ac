"""The example that trains: the losses of every mesh are those of one device."""

from __future__ import annotations

import shutil
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import reshard.checkpoint
import reshard.spmd as sp
from live_processes import expect_all_end_well, run_ranks
from reshard import DeviceMesh
from reshard.spmd.arrays import saved_arrays
from selection import keep_where

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train

STEPS = 200
FEW_STEPS = 20
LONG = "a long run, of which 20 steps are taken by default"
STEP_COUNTS = keep_where(lambda steps: steps == FEW_STEPS, (FEW_STEPS, STEPS), LONG)


@cache
def losses_of_one_device(dtype: str, steps: int) -> list[float]:
    with sp.running(sp.in_process("torch")):
        run = train.Training(train.TINY, DeviceMesh.of(dp=1, tp=1), dtype, zero=0)
        run.run(steps)
    assert steps < STEPS or run.losses[-1] < run.losses[0] - 0.5
    return run.losses


@pytest.mark.parametrize(
    ("dp", "tp", "zero", "steps"),
    keep_where(
        lambda case: case in ((1, 4, 0, 20), (2, 2, 2, 20)),
        [(4, 1, 1, 20), (1, 4, 0, 20), (2, 2, 2, 20), (2, 2, 2, STEPS), (2, 4, 3, 20)],
        "ZeRO 1 and 3 are in the default runs in float32 and from checkpoints",
    ),
)
def test_every_mesh_has_the_losses_of_one_device(dp: int, tp: int, zero: int, steps: int) -> None:
    expected = losses_of_one_device("float64", steps)
    with sp.running(sp.in_process("torch")):
        run = train.Training(train.TINY, DeviceMesh.of(dp=dp, tp=tp), "float64", zero)
        run.run(steps)
        over_dp = run.state["exp_avg"]["norm"].shards[0].shape
    np.testing.assert_allclose(run.losses, expected, rtol=0, atol=1e-9)
    assert over_dp == (train.TINY.model // (dp if zero else 1),)
    assert run.step.traced_count == 1


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "zero", "order"),
    keep_where(
        lambda case: case[-1] in ("gpipe", "zb-v", "interleaved"),
        [
            (2, 2, 1, 1, "1f1b"),
            (2, 1, 2, 0, "gpipe"),
            (2, 2, 2, 3, "zb-h1"),
            (2, 2, 2, 2, "1f1b"),
            (2, 2, 1, 2, "zb-v"),
            (2, 1, 2, 1, "interleaved"),
        ],
        "1f1b and zb-h1 are in the default runs from checkpoints and over processes",
    ),
)
def test_stages_have_the_losses_of_one_device(
    pp: int, dp: int, tp: int, zero: int, order: str
) -> None:
    expected = losses_of_one_device("float64", FEW_STEPS)
    with sp.running(sp.in_process("torch")):
        mesh = DeviceMesh.of(pp=pp, dp=dp, tp=tp)
        run = train.PipelinedTraining(train.TINY, mesh, "float64", zero, order)
        run.run(FEW_STEPS)
    np.testing.assert_allclose(run.losses, expected, rtol=0, atol=1e-9)


# Losses are 2.5 to 7: ten times the distance of float32 numbers from 4 to 8.
FLOAT32 = 5e-6


@pytest.mark.parametrize("steps", STEP_COUNTS)
def test_losses_of_one_device_in_float32(steps: int) -> None:
    expected = losses_of_one_device("float64", steps)
    losses = losses_of_one_device("float32", steps)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("steps", STEP_COUNTS)
def test_losses_of_a_mesh_in_float32(steps: int) -> None:
    with sp.running(sp.in_process("torch")):
        run = train.Training(train.TINY, DeviceMesh.of(dp=2, tp=2), "float32", zero=1)
        run.run(steps)
    expected = losses_of_one_device("float32", steps)
    np.testing.assert_allclose(run.losses, expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize(
    "steps", keep_where(lambda steps: steps == FEW_STEPS, (FEW_STEPS, 100), LONG)
)
def test_losses_of_stages_in_float32(steps: int) -> None:
    with sp.running(sp.in_process("torch")):
        mesh = DeviceMesh.of(pp=2, dp=2, tp=1)
        run = train.PipelinedTraining(train.TINY, mesh, "float32", zero=1, microbatches=2)
        run.run(steps)
    expected = losses_of_one_device("float32", steps)
    np.testing.assert_allclose(run.losses, expected, rtol=0, atol=FLOAT32)


def test_resumed_on_another_mesh_in_one_process(tmp_path: Path) -> None:
    words = ["--tiny", "--dtype", "float64", "--every", "5", "--folder", str(tmp_path / "run")]
    for mesh, zero, steps in (
        ("dp=4", "3", "5"),
        ("pp=2,dp=2,tp=2", "1", "10"),
        ("dp=2,tp=2", "1", "15"),
    ):
        given = ["--mesh", mesh, "--zero", zero, "--steps", steps]
        run = train.train(train.read_arguments([*words, *given]))
    assert [one.name for one in sorted((tmp_path / "run").iterdir())] == [
        "step-000005",
        "step-000010",
        "step-000015",
    ]
    expected = losses_of_one_device("float64", FEW_STEPS)[:15]
    np.testing.assert_allclose(run.losses, expected, rtol=0, atol=1e-9)


def test_steps_go_on_while_a_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save is written when ten steps are taken, and has five."""
    go_on, write, take = threading.Event(), saved_arrays.run_conversion, train.Training.run

    def write_late(*what: Any, **how: Any) -> Any:
        assert go_on.wait(60), "the next steps waited for the save"
        return write(*what, **how)

    def take_steps(self: train.Training, steps: int) -> None:
        take(self, steps)
        if steps == 10:
            go_on.set()

    monkeypatch.setattr(saved_arrays, "run_conversion", write_late)
    monkeypatch.setattr(train.Training, "run", take_steps)
    words = ["--tiny", "--dtype", "float64", "--every", "5", "--folder", str(tmp_path)]
    train.train(train.read_arguments([*words, "--mesh", "dp=2", "--steps", "10"]))
    expected = losses_of_one_device("float64", FEW_STEPS)
    for steps in (5, 10):
        saved = reshard.checkpoint.open(tmp_path / f"step-{steps:06}")
        losses = reshard.checkpoint.read_tensor(saved, "losses")
        np.testing.assert_allclose(losses, expected[:steps], rtol=0, atol=1e-9)
    monkeypatch.undo()
    # Its parameters are those of five steps, too.
    shutil.rmtree(tmp_path / "step-000010")
    run = train.train(train.read_arguments([*words, "--mesh", "tp=2", "--steps", "7"]))
    np.testing.assert_allclose(run.losses, expected[:7], rtol=0, atol=1e-9)


@pytest.mark.exhaustive(reason="resumed in one process by default, and jobs save and load arrays")
@pytest.mark.parametrize("steps", STEP_COUNTS)
def test_stopped_and_resumed_on_another_mesh_over_processes(tmp_path: Path, steps: int) -> None:
    ended = run_ranks("training_example_process.py", 4, tmp_path / "run", steps, timeout_s=400)
    expect_all_end_well(ended)
    saved = reshard.checkpoint.open(tmp_path / "run" / f"step-{steps:06}")
    losses = reshard.checkpoint.read_tensor(saved, "losses")
    expected = losses_of_one_device("float64", steps)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
