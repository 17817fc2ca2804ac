"""Plain values beside tensors, between formats that keep them in different ways."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

from reshard.checkpoint import compare, convert, open  # noqa: E402

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
