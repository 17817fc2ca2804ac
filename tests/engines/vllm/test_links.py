"""vLLM on the CPU, linked with an FSDP2 trainer of another job, by the example."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

from engines.vllm.generation import engine_variables, generate
from engines.vllm.link_models import write_config
from live_processes import free_port, run_rank_programs

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "link_vllm.py"
STEPS, LIMIT_S = 3, 900


def has_ended(session: int) -> bool:
    """Whether all processes of a session end within a few seconds."""
    for _ in range(50):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("family", ["llama-tied", "qwen3_moe"])
def test_an_engine_generates_what_one_of_the_saved_weights_does(
    family: str, tmp_path: Path
) -> None:
    folder, saved, told = tmp_path / family, tmp_path / "saved", tmp_path / "engine.txt"
    write_config(family, folder)
    url = f"tcp://127.0.0.1:{free_port()}"
    environment = {
        **engine_variables(2),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with told.open("wb") as output:
        # A session of its own, with vLLM's workers.
        engine = subprocess.Popen(
            [sys.executable, EXAMPLE, "engine", url, folder],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        command = [sys.executable, EXAMPLE, "trainer", url, folder, saved]
        run_rank_programs(command, 2, environment, timeout_s=LIMIT_S)
        assert engine.wait(LIMIT_S) == 0, told.read_text()[-4000:]
        assert has_ended(engine.pid), "processes of vLLM outlive the engine"
    except (RuntimeError, TimeoutError) as error:
        pytest.fail(f"{error}\n--- engine\n{told.read_text()[-8000:]}")
    finally:
        # Also vLLM's own processes, where it fails.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
    generated = [
        ast.literal_eval(line.split(": ", 1)[1])
        for line in told.read_text().splitlines()
        if line.startswith("engine ")
    ]
    assert len(generated) == STEPS
    # Every step changes what is generated, so none passes with the weights of another.
    assert len({str(tokens) for tokens in generated}) == STEPS
    for step, tokens in enumerate(generated):
        assert [tokens] * 2 == [
            one["tokens"] for one in generate(saved / str(step), "auto", 2, tmp_path)
        ]
