"""Jobs of real processes load checkpoints of any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from live_processes import expect_all_end_well, run_ranks
from reshard import checkpoint

pytest.importorskip("torch")


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_checkpoints_of_one_to_four_ranks(tmp_path: Path, processes: int) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_file(
        model / "model.safetensors", {"w": tensor("int32", (9, 10)), "b": tensor("int8", (7,))}
    )
    folders = [model]
    for ranks in (2, 3, 4):
        folders.append(tmp_path / f"tp{ranks}")
        checkpoint.convert(model, folders[-1], to=f"tp={ranks}", rules=["*=tp, ..."])
    expect_all_end_well(run_ranks("loading_process.py", processes, model, *folders))
