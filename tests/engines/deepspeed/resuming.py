"""Runs that DeepSpeed takes up from what reshard wrote, on other ranks and under other stages."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

import reshard
from engines.deepspeed.ranks import run_ranks
from engines.deepspeed.training import Case, client_state, resume_and_train, train_and_save

STEPS = 2


def train(case: Case, folder: Path) -> Path:
    """A run of some steps, saved, and one more; the folder of the save."""
    target = folder / case.name
    if not target.exists():
        logs = folder / f"{case.name}.log"
        run_ranks(train_and_save, case.ranks, logs, case, target, STEPS, 1)
    return target


def resume(source: Path, goal: Case, format: str, folder: Path) -> dict[str, Any]:
    """Convert a save for another run, which takes one more step; what it held."""
    target = folder / "converted"
    shutil.rmtree(target, ignore_errors=True)
    to = "full" if format == "deepspeed-universal" else f"dp={goal.ranks}"
    reshard.checkpoint.convert(source, target, to=to, format=format)
    return take_up(target, goal, folder, universal=format == "deepspeed-universal")


def take_up(target: Path, goal: Case, folder: Path, *, universal: bool) -> dict[str, Any]:
    """What a run holds that takes up a checkpoint, before and after its next step."""
    result = folder / "resumed.pt"
    arguments = (goal, target, None, universal, STEPS, result)
    run_ranks(resume_and_train, goal.ranks, folder / "resumed.log", *arguments)
    return torch.load(result)


def differences(source: Path, found: dict[str, Any]) -> list[str]:
    """What differs of what a run held, from what the run that it came from held."""
    held = torch.load(source / "held.pt")
    wrong = []
    for before, after in (("saved", "loaded"), ("later", "after")):
        for name, states in held[before].items():
            for key, value in states.items():
                own = found[after][name].get(key)
                if own is None or not torch.equal(own, value):
                    wrong.append(f"{after} {name} {key}")
    for key, value in client_state().items():
        own = found["client"].get(key)
        same = torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value
        if not same:
            wrong.append(f"client state {key}")
    if found["steps"] != STEPS + 1:
        wrong.append(f"{found['steps']} steps")
    return wrong


def on(case: Case, stage: int, ranks: int) -> Case:
    """The same run under another stage, on other ranks."""
    return dataclasses.replace(case, stage=stage, ranks=ranks)
