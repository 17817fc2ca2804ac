"""Blocks read from shards and written to them, within the memory that is given.

Batches of blocks: many small tensors, read and written by few calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    Tensor,
    check_shards,
    cuts,
    read_file,
    small_folder,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from reshard import DeviceMesh, checkpoint, spec
from reshard.checkpoint.blocks.block_io import BlockReader, OpenFiles, Workspace, open_sources
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.errors import DigestError, RunError


@given(st.data(), tensors(most=2), st.sampled_from([16, 64, 1000]))
def test_a_workspace_of_the_size_asked_for_is_enough(
    data: st.DataObject, whole: dict[str, Tensor], block_bytes: int
) -> None:
    mesh, specs = data.draw(cuts(whole))
    with small_folder(block_bytes) as folder:
        write_ranks(folder / "cut", whole, mesh, specs)
        found = checkpoint.open(folder / "cut")
        files = open_sources(found)
        for name, expected in whole.items():
            reader = BlockReader(found[name], files)
            workspace, grid = reader.workspace_size().new_workspace(), reader.grid(0)
            for index in range(grid.count):
                memory = reader.read_block(index, workspace)
                box = grid.box(index)
                window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                assert bytes(memory) == expected.bits[window or (...,)].tobytes()
                del memory
            workspace.close()
        files.close()


def test_a_block_that_is_contiguous_in_its_file_is_read_in_place(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (64, 64), 1)})
    found = checkpoint.open(tmp_path)
    files = open_sources(found)
    reader = BlockReader(found["w"], files)
    workspace = Workspace(reader.workspace_size().block_bytes, 0)
    memory = reader.read_block(0, workspace)
    assert np.frombuffer(memory, np.uint32).size == 64 * 64
    del memory
    assert [file.read_bytes for file in files] == [64 * 64 * 4]
    workspace.close()
    files.close()


def test_a_checked_block_is_compared_with_its_recorded_digest(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (64, 64), 1)})
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "made", to="full")
    path = tmp_path / "made" / "model.safetensors"
    found = checkpoint.open(tmp_path / "made")
    files = open_sources(found)
    reader = BlockReader(found["w"], files)
    workspace = reader.workspace_size().new_workspace()
    memory, digest = reader.read_checked(0, workspace)
    assert found["w"].digest is not None
    assert found["w"].digest.blocks == (digest,)
    del memory
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x77")
    with pytest.raises(DigestError, match=f"{path} bytes 4096:20480") as caught:
        reader.read_checked(0, workspace)
    assert digest.hex() in str(caught.value)
    workspace.close()
    files.close()


def test_files_are_opened_once_and_when_needed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    opened: list[str] = []

    def open_file(name: str) -> SourceFile:
        opened.append(name)
        return SourceFile(tmp_path / name)

    files = OpenFiles(open_file)
    assert opened == []
    assert files["a"] is files["a"]
    with pytest.raises(RunError, match="cannot open"):
        files["missing"]
    assert opened == ["a", "missing"]
    assert [file.path.name for file in files] == ["a"]
    files.close()


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
