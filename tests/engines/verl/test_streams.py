"""The backend `reshard` of verl's checkpoint engines, driven by verl's own manager and workers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "verl":
    pytest.skip("needs verl", allow_module_level=True)

from engines.verl.stream_job import STEPS, TRAINERS, WORKERS
from live_processes import run_rank_programs

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "stream_job.py"


def test_every_worker_gets_what_trainers_have(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    environment = {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    run_rank_programs([sys.executable, PROGRAM, result], 1, environment, timeout_s=300)
    steps = json.loads(result.read_text())
    assert len(steps) == STEPS
    assert steps[0]["trained"] != steps[1]["trained"]
    for number, step in enumerate(steps):
        (trained,) = {json.dumps(one) for one in step["trained"]}
        assert len(step["trained"]) == TRAINERS
        right = {"step": str(number), "form": "named_tensors", **json.loads(trained)}
        assert step["got"] == [right] * WORKERS
