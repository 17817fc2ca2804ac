"""Tokens that vLLM generates on the CPU, greedily, from a folder by a load format.

Usage: python generation.py FOLDER LOAD_FORMAT TP RESULT [CHECKPOINT]

CHECKPOINT is where the weights are, if not in FOLDER, for the format `reshard`.

Starts TP processes with the executor `external_launcher`, one core each. Rank 0 writes RESULT:
the tokens, and for the format `reshard` what each rank read. Models need heads of 64: smaller ones
have no kernel.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

PROMPTS = [[1, 17, 42, 9, 101, 7], [3, 250, 8, 8, 30]]
TOKENS = 12


def run_rank(folder: str, load_format: str, tp: int, result: str, checkpoint: str = "") -> None:
    """Load the model on this rank, and generate."""
    from vllm import LLM, SamplingParams

    extra = {"model_loader_extra_config": {"checkpoint": checkpoint}} if checkpoint else {}
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format=load_format,
        tensor_parallel_size=tp,
        distributed_executor_backend="external_launcher",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        dtype="bfloat16",
        seed=0,
        **extra,
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    tokens = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params)]
    found: dict[str, object] = {"tokens": tokens}
    saved = os.environ.get("RESHARD_SAVED_STATE")
    if saved:
        engine.collective_rpc("save_sharded_state", kwargs={"path": saved})
    if load_format == "reshard":
        from reshard.torch.vllm import plugin

        report = plugin.last_report
        found |= {"needed_bytes": report.needed_bytes, "read_bytes": report.read_bytes}
        found |= {"by_loader": list(report.by_loader)}
    Path(f"{result}.{os.environ['RANK']}").write_text(json.dumps(found))


def engine_variables(tp: int) -> dict[str, str]:
    """vLLM on a core for each rank, with nobody outside."""
    return {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(one) for one in range(tp)),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def generate(
    folder: Path,
    load_format: str,
    tp: int,
    scratch: Path,
    saved: Path | None = None,
    checkpoint: str = "",
) -> list[dict[str, Any]]:
    """What each rank generates; it then saves its parameters into the folder `saved`, if given.

    The weights come from `checkpoint`, by default from the folder.
    """
    # Ranks run this file, and need no other of the tests.
    from live_processes import run_rank_programs

    result = scratch / f"{folder.name}-{load_format}-{tp}.json"
    environment = {
        **engine_variables(tp),
        "LOCAL_WORLD_SIZE": str(tp),
        "VLLM_DIST_IDENT": f"reshard-{uuid.uuid4().hex[:8]}",
        "RESHARD_SAVED_STATE": str(saved or ""),
    }
    command = [sys.executable, __file__, folder, load_format, tp, result, checkpoint]
    run_rank_programs(command, tp, environment, timeout_s=600)
    return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(tp)]


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
