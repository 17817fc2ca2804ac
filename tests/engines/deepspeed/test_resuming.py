"""DeepSpeed goes on from what reshard wrote: on other ranks, under another stage, bit for bit.

A run of 2 steps is saved, converted and taken up; what parameters and moments are then, and
after one more step, is what the first run had then and after its own next step.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "deepspeed":
    pytest.skip("needs DeepSpeed", allow_module_level=True)

import torch

import reshard
from engines.deepspeed.cases import FP32_ACCUMULATION
from engines.deepspeed.parallel_training import ParallelCase, resume_parallel, save_parallel
from engines.deepspeed.ranks import run_ranks
from engines.deepspeed.record import convert_to_universal
from engines.deepspeed.resuming import STEPS, differences, on, resume, take_up, train
from engines.deepspeed.training import Case

RANKS = [(1, 2), (2, 3), (3, 4), (4, 1)]
GOALS = [
    (1, 1, "deepspeed-zero1"),
    (1, 3, "deepspeed-zero3"),
    (3, 1, "deepspeed-zero1"),
    (3, 3, "deepspeed-zero3"),
    (1, 3, "deepspeed-universal"),
    (3, 1, "deepspeed-universal"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are kept, each trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(("before", "after"), RANKS, ids=lambda ranks: str(ranks))
@pytest.mark.parametrize(("stage", "goal", "format"), GOALS)
def test_the_next_step_is_the_same(
    stage: int, goal: int, format: str, before: int, after: int, runs: Path, tmp_path: Path
) -> None:
    """Weights, moments and steps; a user's state too."""
    case = Case(stage, before)
    source = train(case, runs)
    assert not differences(source, resume(source, on(case, goal, after), format, tmp_path))


@pytest.mark.parametrize(
    ("case", "goal", "ranks", "format"),
    [
        (Case(1, 2, "bf16", "groups"), 1, 3, "deepspeed-zero1"),
        (Case(2, 3, "fp32", "groups"), 3, 2, "deepspeed-zero3"),
        (Case(3, 2, "fp32", "groups"), 2, 3, "deepspeed-universal"),
        (Case(3, 2, "bf16", "frozen"), 3, 3, "deepspeed-zero3"),
        (Case(2, 2, "bf16", "frozen"), 3, 2, "deepspeed-zero3"),
        (Case(3, 3, "bf16", "tied"), 1, 2, "deepspeed-zero1"),
        (Case(1, 2, "bf16", "tied"), 3, 3, "deepspeed-universal"),
        (Case(1, 2, "fp16", "tied", zero={"round_robin_gradients": True}), 1, 3, "deepspeed-zero1"),
        (Case(2, 2, "bf16", zero={"parameter_alignment": True}), 2, 3, "deepspeed-zero1"),
        (Case(3, 2, "fp16", zero={"sub_group_size": 40}), 3, 3, "deepspeed-zero3"),
        (Case(1, 2, "bf16", "plain", "sgd"), 1, 3, "deepspeed-zero1"),
        (Case(1, 2, "bf16", "plain", "sgd"), 2, 3, "deepspeed-universal"),
        (Case(1, 2, "bf16", "groups", config=FP32_ACCUMULATION), 1, 3, "deepspeed-zero1"),
        (Case(0, 2, "fp32"), 1, 3, "deepspeed-zero1"),
        (Case(0, 1, "bf16"), 3, 2, "deepspeed-zero3"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_other_models_and_types(
    case: Case, goal: int, ranks: int, format: str, runs: Path, tmp_path: Path
) -> None:
    """Groups, frozen and tied parameters, other orders, other optimizers, stage 0."""
    source = train(case, runs)
    assert not differences(source, resume(source, on(case, goal, ranks), format, tmp_path))


@pytest.mark.parametrize(
    ("case", "goals"),
    [
        (
            ParallelCase(1, 4, "fp32", "experts"),
            [(2, 2, "dp=1,ep=2"), (3, 1, "dp=3"), (4, 4, "ep=4")],
        ),
        (ParallelCase(1, 4, "bf16", "experts"), [(2, 2, "ep=2"), (4, 2, "dp=2,ep=2")]),
        (ParallelCase(1, 4, "fp32", "autotp"), [(1, 1, "dp=1"), (3, 1, "dp=3")]),
        (ParallelCase(3, 2, "fp32", "autotp"), [(2, 1, "dp=2")]),
    ],
    ids=lambda value: value.name if isinstance(value, ParallelCase) else "",
)
def test_experts_and_joined_tensors(
    case: ParallelCase, goals: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    """Over other ranks that share out experts, and without tensor parallelism.

    What is loaded is equal bit for bit; the next step adds gradients in another order.
    """
    source = tmp_path / "source"
    run_ranks(save_parallel, case.ranks, tmp_path / "log", case, source, STEPS, 1)
    held = torch.load(source / "held.pt")
    stage = min(case.stage, 1) if case.kind == "experts" else case.stage
    for number, (ranks, over, to) in enumerate(goals):
        target, result = tmp_path / f"made{number}", tmp_path / f"held{number}.pt"
        form = "deepspeed-zero3" if stage == 3 else "deepspeed-zero1"
        reshard.checkpoint.convert(source, target, to=to, format=form)
        goal = dataclasses.replace(case, ranks=ranks, over=over)
        logs = tmp_path / f"log{number}"
        run_ranks(resume_parallel, ranks, logs, goal, target, STEPS, result)
        found = torch.load(result)
        assert found["loaded"].keys() == held["saved"].keys()
        moved = []
        for name, states in held["saved"].items():
            for key, value in states.items():
                assert torch.equal(found["loaded"][name][key], value), (to, name, key)
                after, later = found["after"][name][key], held["later"][name][key]
                moved += [] if torch.equal(value, later) else [name]
                tolerance = 1e-6 if case.dtype == "fp32" else 1e-2
                assert torch.allclose(after, later, rtol=tolerance, atol=tolerance), (to, name, key)
        assert len(moved) > 8


def test_from_what_deepspeed_made_universal(runs: Path, tmp_path: Path) -> None:
    """A folder of `ds_to_universal` becomes partitions; and ours is taken up as its own is."""
    case = Case(1, 2)
    source = train(case, runs)
    if not (source / "universal").exists():
        convert_to_universal(source, "universal")
    own = take_up(source, on(case, 1, 3), tmp_path, universal=True)
    assert not differences(source, own)
    folder = source / "universal"
    assert not differences(source, resume(folder, on(case, 3, 3), "deepspeed-zero3", tmp_path))
