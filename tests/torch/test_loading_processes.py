"""Jobs of real processes load checkpoints of any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from live_processes import free_port
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
    script = Path(__file__).with_name("loading_process.py")
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, script, model, *folders],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(processes),
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, "\n".join(outputs)
