"""Training state of every program that is read, converted for every one that is written.

Each source is what the program itself saved: recorded, or made here by PyTorch. What the target has
is compared with the source in the names and kinds of training state, not with a list of the test's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.formats.megatron import recordings
from checkpoint.training import optax_training, resuming_process
from deepspeed_records import unpack
from live_processes import run_ranks
from reshard import checkpoint
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.training.plain_state import find_groups, in_plain_values
from reshard.checkpoint.training.state import MASTER, STEP, find_training_state
from selection import keep_where

# How a target is asked for. Files of ranks are read, and not written.
TARGETS: dict[str, dict[str, Any]] = {
    "fsdp2": {"to": "fsdp=2", "rules": ["*=fsdp, ..."], "format": "torch-dcp", "training": "fsdp2"},
    "torch": {"to": "full", "format": "torch-pickle", "training": "torch"},
    "deepspeed-universal": {"to": "full", "format": "deepspeed-universal"},
    "deepspeed-zero1": {"to": "dp=2", "format": "deepspeed-zero1"},
    "deepspeed-zero3": {"to": "dp=2", "format": "deepspeed-zero3"},
    "megatron": {"to": "full", "format": "torch-dist"},
    "optax": {"to": "x=2", "rules": ["*=..."], "format": "orbax"},
}
HYPER = ("lr", "betas", "eps", "weight_decay")
KEYS = ("exp_avg", "exp_avg_sq")


def save_fsdp2(folder: Path) -> Path:
    """By two ranks of FSDP2, with a scheduler and a count."""
    for one in run_ranks(resuming_process.__file__, 2, "train", 1, f"adamw={folder / 'fsdp2'}"):
        assert one.code == 0, one.output
    return folder / "fsdp2"


def save_torch(folder: Path) -> Path:
    """By one process, with a scheduler, a scaler of gradients and a random state."""
    torch.manual_seed(3)
    model = resuming_process.Model()
    optimizer = resuming_process.groups(model, "adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    resuming_process.step(model, optimizer, 0)
    scheduler.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "rng_state": torch.get_rng_state(),
    }
    torch.save(saved, folder / "state.pt")
    return folder / "state.pt"


def save_optax(folder: Path) -> Path:
    return optax_training.extract(folder) / "injected" / "saved"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "fsdp2": save_fsdp2,
    "torch": save_torch,
    "deepspeed-universal": lambda folder: unpack("zero1-bf16-2-plain-universal", folder),
    "deepspeed-zero1": lambda folder: unpack("zero1-bf16-2-plain", folder),
    "deepspeed-zero3": lambda folder: unpack("zero3-bf16-2-plain", folder),
    "megatron": lambda folder: recordings.unpack("halves", folder) / "fully_reshardable",
    "optax": save_optax,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each program saved."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in SOURCES.items()}


class Held:
    """What a checkpoint says of training, by parameters."""

    def __init__(self, path: Path, order: Sequence[str] = ()) -> None:
        self.opened: Checkpoint = in_plain_values(checkpoint.open(path))
        state = find_training_state(self.opened)
        assert state is not None
        self.weights = {bare: self.read(name) for bare, name in state.weights.items()}
        self.kept = {
            parameter: {key: self.read(name) for key, name in kept.items()}
            for parameter, kept in state.optimizer.items()
        }
        for name, _ in state.unplaced:
            # Weights of one shape are told by the order that the source has: numbers.
            number, _, key = name.partition(".state.")[2].partition(".")
            self.kept.setdefault(order[int(number)], {})[key] = self.read(name)
        self.others = {name: self.read(name) for name in state.others}
        self.values = dict(self.opened.values)
        self.hyper: dict[str, dict[str, Any]] = {}
        self.steps = {p: float(kept[STEP]) for p, kept in self.kept.items() if STEP in kept}
        self.groups = find_groups(self.values, state)
        for group in self.groups:
            for one in group.get("params") or ():
                name = order[one] if isinstance(one, int) else one
                self.hyper[name] = {key: group[key] for key in HYPER if key in group}
                if name in self.kept and "step" in group:
                    self.steps.setdefault(name, float(group["step"]))
        for name in [n for n in self.values if n.endswith(".step") and ".state." in n]:
            self.steps[name.partition(".state.")[2].removesuffix(".step")] = self.values[name]

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return np.asarray(checkpoint.read_tensor(self.opened, name))

    @property
    def trained(self) -> dict[str, np.ndarray[Any, Any]]:
        """The weights that the optimizer moves: those of 32 bits, where there are others too."""
        return {p: kept.get(MASTER, self.weights.get(p)) for p, kept in self.kept.items()}


def expect_arrays(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], name: str) -> None:
    assert found.shape == expected.shape, name
    assert found.dtype == expected.dtype, name
    assert found.tobytes() == expected.tobytes(), name


def expect_state(found: Held, source: Held) -> None:
    """Weights, 32-bit weights, moments and steps are those of the source."""
    assert {*found.kept} == {*source.kept}
    for name, weight in source.trained.items():
        expect_arrays(found.trained[name], weight, name)
        for key in KEYS:
            expect_arrays(found.kept[name][key], source.kept[name][key], f"{name} {key}")
    assert found.steps == source.steps
    # ZeRO-3 has the 32-bit weights alone.
    assert {*found.weights, *found.kept} >= {*source.weights}
    for name, weight in source.weights.items():
        if name not in source.kept:
            expect_arrays(found.weights[name], weight, name)


@pytest.mark.parametrize(
    ("source", "target"),
    keep_where(
        lambda pair: ([*TARGETS].index(pair[1]) - [*SOURCES].index(pair[0])) % 7 in (1, 3),
        itertools.product(SOURCES, TARGETS),
        "a pair whose source and target are each in two other pairs",
    ),
)
def test_a_pair(sources: dict[str, Path], tmp_path: Path, source: str, target: str) -> None:
    report = checkpoint.convert(sources[source], tmp_path / "made", **TARGETS[target])
    before = Held(sources[source])
    order = [name for group in before.groups for name in group.get("params") or ()]
    after = Held(tmp_path / "made", [*dict.fromkeys([*order, *before.kept])])
    assert before.kept
    assert before.steps
    expect_state(after, before)
    notes = "\n".join(report.notes)
    if target == "optax":
        listed = re.search("optax has no groups of hyper-parameters: .*lr", notes)
        assert bool(listed) == (source != "optax"), notes
    elif source == "optax":
        # It has them as tensors.
        assert {round(one["lr"], 6) for one in after.hyper.values()} == {optax_training.RATE}
    elif before.hyper:
        assert {*after.hyper} == {*before.hyper}
        for name, hyper in before.hyper.items():
            for key, value in hyper.items():
                assert np.array_equal(after.hyper[name][key], value), (name, key)
    else:
        assert "hyper-parameters" in notes
