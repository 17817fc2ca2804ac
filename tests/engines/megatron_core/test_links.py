"""Megatron-core to transformers, each in its own environment: equal logits, and nothing named.

And to Megatron-core itself, other jobs of other parallelism.

What the ranks had is recorded with RESHARD_UPDATE_GOLDEN, for `torch/refit_recorded_process.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "megatron":
    pytest.skip("needs Megatron-core", allow_module_level=True)

import torch

from live_processes import free_port, run_rank_programs

from . import model_records
from .link_cases import CASES, CONFIG, JOB

HERE = Path(__file__).parent
PYTHON = Path(sys.prefix).parent / "transformers" / "bin" / "python"
# In 32 bits, whose sums are in another order.
TOLERANCE, LIMIT_S = 1e-4, 300


@pytest.mark.skipif(not PYTHON.exists(), reason="needs transformers in an environment beside")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_megatrons(case: str, tmp_path: Path) -> None:
    ranks, more, job = CASES[case]
    config, order = tmp_path / "config.json", tmp_path / "job.json"
    config.write_text(json.dumps(CONFIG | more))
    order.write_text(json.dumps(JOB | job))
    result = tmp_path / "result.pt"
    url = f"tcp://127.0.0.1:{free_port()}"
    environment = {"PYTHONPATH": f"{HERE.parents[2] / 'src'}:{HERE.parents[1]}"}
    told = tmp_path / "engine.txt"
    with told.open("wb") as output:
        engine = subprocess.Popen(
            [PYTHON, HERE / "link_engine.py", config, url, tmp_path / "given.pt", result],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        command = [sys.executable, HERE / "link_trainer.py", order, url, tmp_path]
        run_rank_programs(command, ranks, environment, timeout_s=LIMIT_S)
        assert engine.wait(LIMIT_S) == 0, told.read_text()[-4000:]
    except (RuntimeError, TimeoutError) as error:
        pytest.fail(f"{error}\n--- engine\n{told.read_text()[-4000:]}")
    finally:
        engine.kill()
        engine.wait()
    right, found = torch.load(tmp_path / "given.pt")["logits"], torch.load(result)
    assert right.abs().max() > 0.5
    # What is padding has no logits.
    right = right[..., : CONFIG["vocab_size"]]
    torch.testing.assert_close(found["logits"], right, rtol=TOLERANCE, atol=TOLERANCE)
    if os.environ.get("RESHARD_UPDATE_GOLDEN"):
        of_ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(ranks)]
        model_records.write(case, of_ranks, found["saved"])


MOE: dict[str, Any] = {"experts": 4, "ffn": 48}
# By name: what both jobs say, and ranks and sizes of the one that gives and the one that gets.
JOBS: dict[str, tuple[dict[str, Any], tuple[int, dict[str, int]], tuple[int, dict[str, int]]]] = {
    "cut": ({}, (1, {}), (2, {"tp": 2})),
    "joined": ({"bias": True}, (2, {"tp": 2}), (1, {})),
    "cut_further": ({"heads": 4, "groups": 4}, (2, {"tp": 2}), (4, {"tp": 4})),
    "stages": ({"tied": True}, (2, {"pp": 2}), (2, {"tp": 2})),
    "experts_joined": (MOE, (2, {"tp": 2}), (1, {})),
    "experts_cut": (MOE, (2, {"ep": 2}), (2, {"tp": 2})),
    "grouped_joined": (MOE | {"grouped": True}, (2, {"tp": 2}), (1, {})),
    "grouped_cut": (MOE | {"grouped": True}, (2, {"ep": 2}), (2, {"tp": 2})),
    "grouped_to_modules": (MOE | {"grouped": True}, (2, {"tp": 2}), (1, {"grouped": 0})),
}


@pytest.mark.parametrize("case", JOBS)
def test_logits_of_another_job(case: str, tmp_path: Path) -> None:
    same, *ends = JOBS[case]
    url, result = f"tcp://127.0.0.1:{free_port()}", tmp_path / "result.pt"
    environment = {"PYTHONPATH": f"{HERE.parents[2] / 'src'}:{HERE.parents[1]}"}
    commands = []
    for program, (_, sizes) in zip(("link_trainer", "link_receiver"), ends, strict=True):
        order = tmp_path / f"{program}.json"
        told = {**JOB, "vocab": 32, **same, "sizes": dict(sizes)}
        if not told["sizes"].pop("grouped", 1):
            told["grouped"] = False
        order.write_text(json.dumps(told))
        commands.append([sys.executable, HERE / f"{program}.py", order, url])
    commands[0].append(tmp_path)
    commands[1] += [tmp_path / "given.pt", result]
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run_rank_programs, command, ranks, environment, timeout_s=LIMIT_S)
            for command, (ranks, _) in zip(commands, ends, strict=True)
        ]
        for job in jobs:
            job.result()
    right = torch.load(tmp_path / "given.pt")["logits"]
    assert right.abs().max() > 0.5
    torch.testing.assert_close(torch.load(result), right, rtol=TOLERANCE, atol=TOLERANCE)
