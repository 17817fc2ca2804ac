"""The backend `reshard` of vLLM's own weight transfer: its registries, workers and lifecycle."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

from engines.vllm.generation import engine_variables, generate
from engines.vllm.link_models import write_config
from live_processes import free_port, run_rank_programs

PROGRAM = Path(__file__).parent / "transfer_trainer.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_vllm.py"
LIMIT_S = 900


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


@pytest.mark.usefixtures("installed")
def test_a_server_generates_by_the_weights_of_each_step(tmp_path: Path) -> None:
    folder, saved, told = tmp_path / "served", tmp_path / "saved", tmp_path / "server.txt"
    write_config("llama-tied", folder)
    port = free_port()
    environment = {**engine_variables(2), "VLLM_SERVER_DEV_MODE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder]
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--load-format": "dummy",
        "--tensor-parallel-size": 2,
        "--weight-transfer-config": '{"backend": "reshard"}',
        "--dtype": "bfloat16",
        "--max-model-len": 64,
        "--max-num-seqs": 2,
        "--seed": 0,
    }
    flags = ["--skip-tokenizer-init", "--tokens-only", "--enforce-eager"]
    # The command asks for the version of `vllm`, which the CPU's package does not call itself.
    named = tmp_path / "site" / "vllm-0.32.0+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    command = [*serve, *(word for pair in options.items() for word in pair), *flags]
    with told.open("wb") as output:
        # A session of its own, with its workers.
        server = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server)
        link = f"tcp://127.0.0.1:{free_port()}"
        trainer = [sys.executable, EXAMPLE, url, link, folder, saved]
        printed = run_rank_programs(trainer, 2, environment, timeout_s=LIMIT_S)
    except (RuntimeError, TimeoutError) as error:
        pytest.fail(f"{error}\n--- server\n{told.read_text()[-8000:]}")
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    generated = [
        ast.literal_eval(line.split(": ", 1)[1])
        for line in printed[0].splitlines()
        if line.startswith("server ")
    ]
    assert len(generated) == 2 and generated[0] != generated[1]
    for step, tokens in enumerate(generated):
        ranks = generate(saved / str(step), "auto", 2, tmp_path)
        assert [one["tokens"] for one in ranks] == [tokens] * 2


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when a server answers; raises TimeoutError where it does not."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(1)
    raise TimeoutError(f"{url} does not answer")
