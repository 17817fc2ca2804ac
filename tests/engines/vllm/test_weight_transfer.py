"""The backend `reshard` of vLLM's own weight transfer: its registries, workers and lifecycle."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

from engines.vllm.generation import engine_variables, generate
from engines.vllm.link_models import write_config
from live_processes import run_rank_programs

PROGRAM = Path(__file__).parent / "transfer_trainer.py"


@pytest.mark.usefixtures("installed")
def test_an_engine_generates_by_the_weights_of_each_version(tmp_path: Path) -> None:
    folder, saved, result = tmp_path / "served", tmp_path / "saved", tmp_path / "found.json"
    write_config("qwen3_moe", folder)
    command = [sys.executable, PROGRAM, folder, saved, result]
    # The program is a trainer of one rank; the workers are vLLM's to start.
    run_rank_programs(command, 1, engine_variables(2), timeout_s=900)
    found = json.loads(result.read_text())
    assert list(found) == ["3", "4"] and found["3"] != found["4"]
    for version, tokens in found.items():
        ranks = generate(saved / version, "auto", 2, tmp_path)
        assert [one["tokens"] for one in ranks] == [tokens] * 2
