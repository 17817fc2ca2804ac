"""Batches of blocks: many small tensors, read and written by few calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import check_shards, read_file, tensor, write_file
from reshard import DeviceMesh, checkpoint, spec


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often files are read and written, by the name of the call."""
    counts = {"preadv": 0, "pwritev": 0}

    def count(name: str, call: Any) -> None:
        def counted(*arguments: Any) -> int:
            counts[name] += 1
            return int(call(*arguments))

        monkeypatch.setattr(os, name, counted)

    for name in counts:
        count(name, getattr(os, name))
    return counts


WHOLE = {
    f"layers.{number:03}.{part}": tensor(kind, shape, number)
    for number in range(200)
    for part, kind, shape in (
        ("up", "float32", (8, 16)),
        ("down", "bfloat16", (16, 8)),
        ("norm", "float32", (3,)),
    )
}
RULES = ["*.up=tp, -", "*.down=-, tp", "*.norm=..."]


def test_small_tensors_share_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    counts = count_calls(monkeypatch)
    checkpoint.convert(
        tmp_path / "model.safetensors", tmp_path / "cut", to="tp=4", rules=RULES, threads=1
    )
    assert counts["preadv"] < 20
    assert counts["pwritev"] < 50
    mesh = DeviceMesh.of(tp=4)
    specs = {"up": spec(mesh, "tp, -"), "down": spec(mesh, "-, tp"), "norm": spec(mesh, "-")}
    check_shards(tmp_path / "cut", WHOLE, {name: specs[name.split(".")[2]] for name in WHOLE})
    counts.update(preadv=0, pwritev=0)
    # Without the reads of copies that are compared.
    checkpoint.convert(
        tmp_path / "cut", tmp_path / "full", to="full", threads=1, check_copies="none"
    )
    assert counts["preadv"] < 50
    assert counts["pwritev"] < 20
    assert read_file(tmp_path / "full" / "model.safetensors") == WHOLE


@pytest.mark.parametrize("limit_bytes", [20_000, 60_000, 1 << 20])
def test_batches_are_smaller_where_memory_is_short(tmp_path: Path, limit_bytes: int) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    plan = checkpoint.plan_conversion(
        tmp_path / "model.safetensors", tmp_path / "cut", to="tp=4", rules=RULES
    )
    assert plan.extra_bytes(limit_bytes) <= limit_bytes
    report = checkpoint.run_conversion(plan, extra_bytes=limit_bytes)
    assert sum(report.buffers_by_process) == plan.extra_bytes(limit_bytes)
    checkpoint.convert(tmp_path / "cut", tmp_path / "full", to="full", extra_bytes=limit_bytes)
    assert read_file(tmp_path / "full" / "model.safetensors") == WHOLE


def test_an_order_of_files_that_is_not_that_of_the_tensors(tmp_path: Path) -> None:
    """Equal steps end at every tensor, and nothing lies together."""
    names = sorted(WHOLE, key=lambda name: hash(name) * 7919 % 1009)
    half = {name: WHOLE[name] for name in names[::2]}
    rest = {name: WHOLE[name] for name in names[1::2]}
    write_file(tmp_path / "model.safetensors", half | rest)
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "cut", to="tp=3", rules=RULES)
    mesh = DeviceMesh.of(tp=3)
    specs = {"up": spec(mesh, "tp, -"), "down": spec(mesh, "-, tp"), "norm": spec(mesh, "-")}
    check_shards(tmp_path / "cut", WHOLE, {name: specs[name.split(".")[2]] for name in WHOLE})
