"""Checkpoints, deltas and documents that a released version wrote are read by this one.

`golden/released/VERSION` has the files of that version, and `golden/journals` journals of 0.1.0.
Each release adds files, and rewrites none.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard import checkpoint
from reshard.dtypes import dtype

RELEASED = Path(__file__).parent / "golden" / "released"
VERSIONS = sorted(path.name for path in RELEASED.iterdir())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_and_its_manifest_are_read(version: str) -> None:
    folder = RELEASED / version / "sharded"
    opened = checkpoint.open(folder)
    assert opened.format == "sharded-safetensors"
    assert str(opened["embed.weight"].spec) == "tp, -"
    found = checkpoint.check_digests(opened)
    assert (found.damaged, found.without_digest) == ((), ())
    part = checkpoint.load(folder, to="tp=2", rules=["embed.*=tp, -", "*=..."], rank=1)
    assert np.array_equal(part["embed.weight"], np.arange(15, 30, dtype="f4").reshape(5, 3))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_delta_is_applied(version: str, tmp_path: Path) -> None:
    base = shutil.copytree(RELEASED / version / "sharded", tmp_path / "base")
    checkpoint.apply(base, [RELEASED / version / "step.delta"], tmp_path / "next")
    changed = checkpoint.load(tmp_path / "next")["embed.weight"]
    assert [*zip(*np.nonzero(changed != np.arange(30).reshape(10, 3)), strict=True)] == [(7, 2)]


@pytest.mark.parametrize("version", VERSIONS)
def test_layouts_plans_and_jobs_are_read(version: str) -> None:
    def read(name: str) -> object:
        text = (RELEASED / version / f"{name}.json").read_text()
        value = reshard.from_json(text)
        assert reshard.to_json(value) == text.strip()
        return value

    mesh = reshard.DeviceMesh.of(x=2, y=3)
    source = reshard.spec(mesh, "x@cyclic2, y").layout((7, 6))
    target = reshard.spec(mesh, "y, x").layout((7, 6))
    assert read("layout") is source
    assert read("plan") is reshard.plan(source, target, dtype="bfloat16")
    pair = reshard.DeviceMesh.of(tp=2)
    rows, columns = (reshard.spec(pair, text).layout((4, 4)) for text in ("tp, -", "-, tp"))
    item = reshard.JobItem.between_ranks
    assert read("job") == reshard.Job([item(name, dtype("int8"), rows, columns) for name in "ab"])
