"""Models that vLLM serves, filled with other weights: they generate what these do when loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

from engines.vllm.generation import engine_variables
from engines.vllm.link_models import FAMILIES
from live_processes import run_rank_programs

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "reloaded_engine.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_model_generates_what_a_loaded_one_does(family: str, tmp_path: Path) -> None:
    environment = {
        **engine_variables(1),
        # The model is in this process, where its parameters can be reached.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
    }
    found = []
    for seed in (0, 1):
        result = tmp_path / f"{seed}.json"
        command = [sys.executable, PROGRAM, family, tmp_path / family, seed, result]
        run_rank_programs(command, 1, environment, timeout_s=600)
        found.append(json.loads(result.read_text()))
    for one, other in (found, found[::-1]):
        assert one["filled"] == other["loaded"]
        assert one["filled"] != one["loaded"]
        assert one["unread"] == []
