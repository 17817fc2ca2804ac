"""`reshard verify`: a summary and the first differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cli.command_runs import run_here, write_model


def test_the_first_differences_and_a_summary_are_shown(folder: Path) -> None:
    left = {f"layers.{n}.w": np.full(4, n, np.float32) for n in range(30)}
    right = {name: value + (name != "layers.0.w") for name, value in left.items()}
    right["layers.1.w"] = right["layers.1.w"].astype(np.float16)
    right["new"] = right.pop("layers.2.w")
    write_model(folder / "a", **left)
    write_model(folder / "b", **right)
    run = run_here("verify", "a", "b")
    assert run.code == 1
    *shown, more, summary = run.output.splitlines()
    assert len(shown) == 12
    assert more == "... and 18 more differences; --all lists them"
    assert summary.startswith(
        "30 of 31 tensors differ: 1 of other dtypes, 1 only in a, 1 only in b, "
        "27 with other elements; compared "
    )
    everything = run_here("verify", "a", "b", "--all")
    assert everything.code == 1
    assert len(everything.output.splitlines()) == 31
    assert len(run_here("verify", "a", "b", "--json").json["differences"]) == 30


def test_other_names_are_recognised(folder: Path) -> None:
    write_model(folder / "a", **{"model.w": np.ones(3, np.float32)})
    write_model(folder / "b", w=np.ones(3, np.float32))
    assert "no name is in both: --left-names" in run_here("verify", "a", "b").output
    write_model(folder / "c", w=np.ones(3, np.float32), x=np.ones(3, np.float32))
    assert "no name is in both" not in run_here("verify", "b", "c").output
