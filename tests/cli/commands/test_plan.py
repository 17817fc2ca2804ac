"""What `plan` says of memory, against what a conversion takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

LARGER = pytest.mark.exhaustive(reason="more tensors, in other formats")
ROWS = ("--rule", "*=tp, -")
# The command in a process of its own, which says at the end what was resident at most. What
# `getrusage` says has the memory of the process that forked.
COMMAND = """
import runpy, sys
sys.argv[0] = "reshard"
try:
    runpy.run_module("reshard.cli", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print("\\n" + line.split()[1])
"""


def run(*arguments: str | Path) -> tuple[str, int]:
    """What the command writes, and the peak of its resident memory in bytes."""
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    written, _, peak = out.rstrip().rpartition("\n")
    return written, int(peak) * 1024


def write_source(folder: Path, tensors: int, shape: tuple[int, int]) -> Path:
    folder.mkdir()
    random = np.random.default_rng(1)
    values = {f"layers.{n}.w": random.random(shape, dtype=np.float32) for n in range(tensors)}
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.linux_only(reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("tensors", "shape", "asked"),
    [
        pytest.param(4, (2048, 2048), ("--to", "tp=2", "--rule", "*=-, tp"), id="few large"),
        pytest.param(4, (2048, 2048), ("--to", "full", "--memory", "9MiB"), id="one thread"),
        pytest.param(2, (8, 8), ("--to", "tp=2", *ROWS), id="tiny"),
        pytest.param(4_000, (16, 32), ("--to", "tp=8", *ROWS), id="several ranks"),
        pytest.param(10_000, (16, 32), ("--to", "full"), id="many small", marks=LARGER),
        pytest.param(
            *(3_000, (16, 32), ("--to", "tp=4", *ROWS, "--format", "torch-dcp")),
            id="chunks",
            marks=LARGER,
        ),
    ],
)
def test_plan_estimates_the_peak_memory_of_a_conversion(
    tmp_path: Path, tensors: int, shape: tuple[int, int], asked: tuple[str, ...]
) -> None:
    source = write_source(tmp_path / "source", tensors, shape)
    told, _ = run("plan", source, *asked, "--json")
    plan, peak_bytes = json.loads(told), 0
    # Threads that get no processor in a run fill none of their buffers.
    for turn in range(3):
        peak_bytes = max(peak_bytes, run("convert", source, tmp_path / str(turn), *asked)[1])
        if plan["peak_bytes"] <= 1.2 * peak_bytes:
            break
    assert plan["extra_bytes"] < plan["peak_bytes"]
    assert 0.8 * peak_bytes <= plan["peak_bytes"] <= 1.2 * peak_bytes, (
        plan["peak_bytes"],
        peak_bytes,
    )
