"""What of plain values is a difference, and what formats say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.formats.megatron import recordings
from deepspeed_records import unpack
from reshard.checkpoint import compare, convert, open_checkpoint

torch = pytest.importorskip("torch")

STATE = {"w": torch.arange(12.0).reshape(3, 4), "epoch": 3, "loss": float("nan"), "names": ["a"]}
TARGETS: dict[str, dict[str, Any]] = {
    "megatron-legacy": {"to": "tp=1"},
    "orbax": {"to": "x=2", "rules": ["*=..."]},
    "rank-files": {"to": "fsdp=2", "rules": ["*=fsdp, ..."]},
    "torch-dcp": {"to": "fsdp=2", "rules": ["*=fsdp, ..."]},
    "torch-dist": {"to": "full"},
    "torch-pickle": {"to": "full"},
}


@pytest.mark.parametrize("format", TARGETS)
def test_what_a_format_adds_is_no_difference(tmp_path: Path, format: str) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "b", format=format, **TARGETS[format])
    assert not any("not in the target" in note for note in report.notes)
    assert compare(tmp_path / "a.pt", tmp_path / "b").differences == ()
    assert compare(tmp_path / "b", tmp_path / "a.pt").differences == ()
    # Another iteration than the one that files have by default is one.
    torch.save({**STATE, "iteration": 7, "epoch": 4}, tmp_path / "c.pt")
    found = {
        one.name: one.problem for one in compare(tmp_path / "c.pt", tmp_path / "b").differences
    }
    is_megatron = format in ("torch-dist", "megatron-legacy")
    only = f"is only in {open_checkpoint(tmp_path / 'c.pt').folder}"
    assert found == {"epoch": "is 4 and 3", "iteration": "is 7 and 0" if is_megatron else only}
    assert not any(one.is_tensor for one in compare(tmp_path / "c.pt", tmp_path / "b").differences)


def test_the_ranks_of_megatron_are_no_difference(tmp_path: Path) -> None:
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
def test_values_without_a_place_are_said(tmp_path: Path, format: str, to: str) -> None:
    """DeepSpeed's limit of gradients, which neither its stage 3 nor Megatron keeps."""
    source = unpack("zero1-bf16-2-plain", tmp_path)
    assert "optimizer.clip_grad" in open_checkpoint(source).values
    report = convert(source, tmp_path / "made", to=to, format=format)
    is_said = any("no place for them: optimizer.clip_grad" in note for note in report.notes)
    found = {one.name for one in compare(source, tmp_path / "made").differences}
    assert is_said == ("optimizer.clip_grad" in found) == (format != "torch-dcp")
    assert not found & {"ds_config.zero_optimization.stage", "checkpoint_version", "iteration"}
