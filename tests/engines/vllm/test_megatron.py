"""vLLM on the CPU, linked with a trainer of Megatron-core: jobs and environments of their own.

What vLLM must generate, one says that was started from the weights that transformers saved, after
it had computed the logits of Megatron-core by them.

What ranks of vLLM take of the recorded models is recorded with RESHARD_UPDATE_GOLDEN, for
`torch/refit_recorded_process.py`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

import torch
import transformers

from engines.layout_records import read_layouts, write_layout
from engines.megatron_core import model_records
from engines.megatron_core.link_cases import CASES as RECORDED
from engines.megatron_core.link_cases import CONFIG
from engines.vllm.generation import engine_variables, generate
from engines.vllm.link_models import write_config
from live_processes import free_port, run_rank_programs
from reshard.torch.vllm import layouts
from reshard.torch.vllm.layouts import VllmParallelism
from reshard.torch.vllm.tracing_process import engine_version

ROOT = Path(__file__).parents[3]
MEGATRON = ROOT / "tests" / "engines" / "megatron_core"
PYTHON = Path(sys.prefix).parent / "megatron" / "bin" / "python"
LIMIT_S, TOLERANCE = 900, 1e-3
# Of the layouts of vLLM's ranks, beside those of other models.
FOLDER = "vllm_of_megatron"
# The example's engine receives as many.
UPDATES = [0, 1, 2]
# Its weights have 16 bits, and its workers have no method that verifies.
OF_VLLM = {"cast": True, "verify": False}
# Megatron-core's vocabulary is padded.
JOB = {"hidden": 256, "heads": 4, "groups": 2, "layers": 2, "vocab": 384, "true_vocab": 380}
EXPERTS = {"ffn": 256, "experts": 4, "qk_norm": True}
# By name: the family, what its config has besides, and the job of Megatron-core.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"sizes": {"tp": 2}, "ffn": 320}),
    "stages_tied": ("llama-tied", {}, {"sizes": {"pp": 2}, "ffn": 320, "tied": True}),
    "grouped": ("qwen3_moe", {}, {"sizes": {"ep": 2}, "grouped": True, **EXPERTS}),
    # Each expert is a module of its own.
    "experts": ("qwen3_moe", {}, {"sizes": {"ep": 2}, **EXPERTS}),
    "experts_in_stages_tied": (
        "qwen3_moe",
        {"tie_word_embeddings": True},
        {"sizes": {"pp": 2}, "tied": True, **EXPERTS},
    ),
}


def linked(engine: list[Any], trainer: list[Any], environment: dict[str, str], told: Path) -> str:
    """Run an engine and the trainer's two ranks; what the engine says."""
    with told.open("wb") as output:
        # A session of its own, with vLLM's workers.
        process = subprocess.Popen(
            [sys.executable, *engine],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        run_rank_programs([PYTHON, *trainer], 2, environment, timeout_s=LIMIT_S)
        assert process.wait(LIMIT_S) == 0, told.read_text()[-4000:]
    except (RuntimeError, TimeoutError) as error:
        pytest.fail(f"{error}\n--- engine\n{told.read_text()[-8000:]}")
    finally:
        # Also vLLM's own processes, where they outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return told.read_text()


@pytest.mark.skipif(not PYTHON.exists(), reason="needs Megatron-core in an environment beside")
@pytest.mark.parametrize("case", CASES)
def test_vllm_generates_what_it_does_from_the_weights_of_megatron(
    case: str, tmp_path: Path
) -> None:
    family, more, own_job = CASES[case]
    folder, saved = tmp_path / family, tmp_path / "saved"
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    write_config(family, folder, rms_norm_eps=1e-5, rope_parameters=rope, **more)
    environment = {
        **engine_variables(2),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    job, given, result = tmp_path / "job.json", tmp_path / "given.pt", tmp_path / "result.pt"
    trainer = MEGATRON / "link_trainer.py"
    # The last weights to transformers: they are Megatron's if both compute the same.
    job.write_text(json.dumps({**JOB, **own_job, "updates": UPDATES[-1:]}))
    url = f"tcp://127.0.0.1:{free_port()}"
    engine = [MEGATRON / "link_engine.py", folder / "config.json", url, given, result, saved]
    linked(engine, [trainer, job, url, tmp_path], environment, tmp_path / "transformers.txt")
    right, found = torch.load(given)["logits"][..., : JOB["true_vocab"]], torch.load(result)
    assert right.abs().max() > 0.5
    torch.testing.assert_close(found["logits"], right, rtol=TOLERANCE, atol=TOLERANCE)
    # All of them to vLLM.
    job.write_text(json.dumps({**JOB, **own_job, "updates": UPDATES, **OF_VLLM}))
    url = f"tcp://127.0.0.1:{free_port()}"
    engine = [ROOT / "examples" / "link_vllm.py", "engine", url, folder]
    told = linked(engine, [trainer, job, url, tmp_path], environment, tmp_path / "vllm.txt")
    generated = [
        ast.literal_eval(line.split(": ", 1)[1])
        for line in told.splitlines()
        if line.startswith("engine ")
    ]
    # Every update changes what is generated, so none passes with the weights of another.
    assert len({str(tokens) for tokens in generated}) == len(UPDATES)
    from_saved = [one["tokens"] for one in generate(saved, "auto", 2, tmp_path)]
    assert from_saved == generated[-1:] * 2


# By the name of a record: how vLLM's ranks share the model.
PARALLELISMS = {
    "stages_tied": (VllmParallelism(tp=2), VllmParallelism(pp=2)),
    "experts_in_stages_tied": (VllmParallelism(tp=2, ep=2), VllmParallelism(pp=2)),
}


@pytest.mark.parametrize("case", PARALLELISMS)
def test_what_ranks_take_of_a_recorded_model(case: str, tmp_path: Path) -> None:
    saved = model_records.read(case)["saved"]
    # vLLM serves no fewer positions.
    config = CONFIG | RECORDED[case][1] | {"max_position_embeddings": 128}
    model_type = transformers.AutoConfig.for_model(**config)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(model_type)]
    config |= {"architectures": [kind.__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sources = {name: ("bfloat16", tuple(tensor.shape)) for name, tensor in saved.items()}
    known = {}
    if not os.environ.get("RESHARD_UPDATE_GOLDEN"):
        known = {one.parallelism: one.layout for one in read_layouts(FOLDER, case)}
    for parallelism in PARALLELISMS[case]:
        sizes = {axis: getattr(parallelism, axis) for axis in ("tp", "pp", "ep", "dp")}
        found = layouts(tmp_path, sources=sources, cache=tmp_path / "cache", **sizes)
        if known:
            assert found == known[parallelism.text]
        else:
            write_layout(FOLDER, case, {"vllm": engine_version()}, config, parallelism.text, found)
