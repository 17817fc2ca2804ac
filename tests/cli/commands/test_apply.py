"""`reshard diff` and `reshard apply`: what changed between two checkpoints, and back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import run_here, write_model


@pytest.fixture(autouse=True)
def _models(folder: Path) -> None:
    weights = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    other = weights.copy()
    other[::7, 3] += 1
    write_model(folder / "before", w=weights, b=np.ones(7, np.int16), old=np.ones(3))
    write_model(folder / "after", w=other, b=np.ones(7, np.int16), new=np.ones(3))


def test_there_and_back() -> None:
    made = run_here("diff", "before", "after", "-o", "delta", "--quiet")
    assert (made.code, made.output, made.errors) == (0, "", "")
    assert run_here("apply", "before", "delta", "out", "--quiet").code == 0
    assert run_here("verify", "after", "out").code == 0
    cut = run_here("apply", "before", "delta", "cut", "--to", "tp=2", "--rule", "*=tp, ...")
    assert (cut.code, cut.errors) == (0, "")
    assert cut.output.startswith("before to cut, for tp=2: 3 tensors")
    assert run_here("verify", "after", "cut").code == 0


def test_the_reports_of_diff_and_apply() -> None:
    text = run_here("diff", "before", "after", "-o", "delta").output
    assert text.startswith(
        "before to after: 1 of 3 tensors changed, 60 B of elements in 2 of 3 blocks"
    )
    assert "added: new\nremoved: old\n" in text
    json = run_here("diff", "before", "after", "-o", "packed", "--compress", "zstd", "--json").json
    assert (json["changed"], json["added"], json["removed"]) == (["w"], ["new"], ["old"])
    assert json["changed_bytes"] == 60 and json["size_bytes"] == os.path.getsize("packed")
    json = run_here("apply", "before", "delta", "out", "--json").json
    assert (json["deltas"], json["to"], json["format"]) == (["delta"], "full", "safetensors")


def test_a_dry_run() -> None:
    run_here("diff", "before", "after", "-o", "delta", "-q")
    arguments = ("apply", "before", "delta", "out")
    said = run_here(*arguments, "--dry-run")
    assert (said.code, os.path.exists("out")) == (0, False), said.errors
    assert said.output.startswith("before would be written to out, for full, as safetensors:")
    json = run_here(*arguments, "--dry-run", "--json").json
    assert {one["name"] for one in json["tensors"]} == {"w", "b", "new"}
    run_here(*arguments, "-q")
    assert run_here(*arguments, "--dry-run").errors == run_here(*arguments).errors != ""


def test_wrong_use_of_diff_and_apply_is_reported() -> None:
    assert run_here("diff", "before", "after").code == 2
    run_here("diff", "before", "after", "-o", "delta")
    again = run_here("diff", "before", "after", "-o", "delta")
    assert again.code == 2 and "give --overwrite" in again.errors
    assert run_here("diff", "before", "after", "-o", "delta", "--overwrite", "-q").code == 0
    wrong = run_here("apply", "after", "delta", "out")
    assert wrong.code == 2 and "tensor 'old' is not in" in wrong.errors
    none = run_here("apply", "before", "before/model.safetensors", "out")
    assert none.code == 2 and "is not a delta" in none.errors
    dtype = run_here("apply", "before", "delta", "out", "--to", "full", "--dtype", "bf16")
    assert dtype.code == 2 and "apply it, and convert the result" in dtype.errors


def test_several_deltas() -> None:
    run_here("diff", "before", "after", "-o", "there", "-q")
    run_here("diff", "after", "before", "-o", "back", "-q")
    assert run_here("apply", "before", "there", "back", "out", "-q").code == 0
    assert run_here("verify", "before", "out").code == 0
