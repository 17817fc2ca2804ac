"""Plain values beside tensors, between formats that keep them in different ways."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from checkpoint.formats.megatron import recordings
from deepspeed_records import unpack
from reshard.checkpoint import compare, convert, open, open_checkpoint

torch = pytest.importorskip("torch")


STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4)},
    "optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}]},
    "step": 7,
    "name": "run",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A distributed checkpoint, in which every value is a pickle of its own."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_pickled_items_become_values_and_come_back(saved: Path, tmp_path: Path) -> None:
    report = convert(saved, tmp_path / "pickle", to="full", format="torch-pickle")
    assert not report.notes
    (file,) = (tmp_path / "pickle").glob("*.bin")
    loaded = torch.load(file, weights_only=True)
    assert loaded["step"] == 7
    assert loaded["optim"]["param_groups"] == STATE["optim"]["param_groups"]
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    convert(tmp_path / "pickle", tmp_path / "back", to=2, format="torch-dcp")
    for a in (saved, tmp_path / "pickle", tmp_path / "back"):
        for b in (saved, tmp_path / "pickle", tmp_path / "back"):
            assert compare(a, b).is_same, compare(a, b).differences


def test_a_value_may_be_pickled_in_several_ways(saved: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": STATE["model"], "step": 7}, checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "pickle", to="full", format="torch-pickle")
    convert(tmp_path / "pickle", tmp_path / "b", to="full", format="torch-dcp")
    bytes_of = [open(tmp_path / one).items["step"].size_bytes for one in "ab"]
    assert bytes_of[0] != bytes_of[1]
    assert compare(tmp_path / "a", tmp_path / "b").is_same


def test_another_value_is_a_difference(saved: Path, tmp_path: Path) -> None:
    other = {**STATE, "step": 8}
    torch.save(other, tmp_path / "other.pt")
    found = compare(saved, open(tmp_path / "other.pt")).differences
    assert [(one.name, one.problem) for one in found] == [("step", "is 7 and 8")]


torch = pytest.importorskip("torch")

PLAIN = {"w": torch.arange(12.0).reshape(3, 4), "epoch": 3, "loss": float("nan"), "names": ["a"]}
TARGETS: dict[str, dict[str, Any]] = {
    "megatron-legacy": {"to": "tp=1"},
    "orbax": {"to": "x=2", "rules": ["*=..."]},
    "rank-files": {"to": "fsdp=2", "rules": ["*=fsdp, ..."]},
    "torch-dcp": {"to": "fsdp=2", "rules": ["*=fsdp, ..."]},
    "torch-dist": {"to": "full"},
    "torch-pickle": {"to": "full"},
}


@pytest.mark.parametrize("format", TARGETS)
def test_values_added_by_a_format_are_not_differences(tmp_path: Path, format: str) -> None:
    torch.save(PLAIN, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "b", format=format, **TARGETS[format])
    assert not any("not in the target" in note for note in report.notes)
    assert compare(tmp_path / "a.pt", tmp_path / "b").differences == ()
    assert compare(tmp_path / "b", tmp_path / "a.pt").differences == ()
    # Another iteration than the one that files have by default is one.
    torch.save({**PLAIN, "iteration": 7, "epoch": 4}, tmp_path / "c.pt")
    found = {
        one.name: one.problem for one in compare(tmp_path / "c.pt", tmp_path / "b").differences
    }
    is_megatron = format in ("torch-dist", "megatron-legacy")
    only = f"is only in {open_checkpoint(tmp_path / 'c.pt').folder}"
    assert found == {"epoch": "is 4 and 3", "iteration": "is 7 and 0" if is_megatron else only}
    assert not any(one.is_tensor for one in compare(tmp_path / "c.pt", tmp_path / "b").differences)


def test_the_ranks_of_megatron_are_not_differences(tmp_path: Path) -> None:
    source = recordings.unpack("halves", tmp_path / "source") / "fully_reshardable"
    convert(source, tmp_path / "made", to="tp=1", format="megatron-legacy")
    sizes = [
        open_checkpoint(one).values["args.tensor_model_parallel_size"]
        for one in (source, tmp_path / "made")
    ]
    assert sizes == [2, 1]
    assert compare(source, tmp_path / "made").differences == ()


@pytest.mark.parametrize(
    ("format", "to"), [("deepspeed-zero3", "dp=2"), ("torch-dist", "full"), ("torch-dcp", "full")]
)
def test_values_without_a_counterpart_are_reported(tmp_path: Path, format: str, to: str) -> None:
    """DeepSpeed's limit of gradients, which neither its stage 3 nor Megatron keeps."""
    source = unpack("zero1-bf16-2-plain", tmp_path)
    assert "optimizer.clip_grad" in open_checkpoint(source).values
    report = convert(source, tmp_path / "made", to=to, format=format)
    is_said = any("no place for them: optimizer.clip_grad" in note for note in report.notes)
    found = {one.name for one in compare(source, tmp_path / "made").differences}
    assert is_said == ("optimizer.clip_grad" in found) == (format != "torch-dcp")
    assert not found & {"ds_config.zero_optimization.stage", "checkpoint_version", "iteration"}
