"""What the real ranks of vLLM hold: the origin of every element of every parameter.

Processes of gloo build each model as vLLM's workers do, on the CPU and in float32, and feed its own
`load_weights` tensors whose values are their places, twice: once counted from the front and once
from the back, so that only what is copied agrees. What a rank holds before weights are processed
after loading is written to `rank-R.npz` of the model's folder: for each parameter the place of each
element, counted over all tensors of `names.json` in its order, or one of the marks below.

Usage: python real_ranks.py OUT TP PP EP DP FOLDER...   (EP is 0 or 1)
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
import uuid
from pathlib import Path
from typing import Any

UNFILLED, COMPUTED, CONSTANT = -1, -2, -3


def run_rank(out: Path, tp: int, pp: int, ep: bool, dp: int, folders: list[Path]) -> None:
    """Load every model on this rank, and write what it holds."""
    import numpy as np
    import torch
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def fill(model: Any, names: dict[str, tuple[str, list[int]]], backwards: bool) -> None:
        total = sum(math.prod(shape) for _, shape in names.values())
        if total >= 1 << 24:
            raise ValueError(f"{total} elements: float32 counts to {1 << 24}")

        def tensors() -> Any:
            first = 1
            for name, (_, shape) in names.items():
                size = math.prod(shape)
                places = torch.arange(first, first + size, dtype=torch.float32)
                yield name, (total + 1 - places if backwards else places).reshape(shape)
                first += size

        with torch.no_grad():
            for tensor in model.state_dict().values():
                # Single numbers that no checkpoint has, such as scales, are those of the engine.
                if tensor.numel() > 1:
                    tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        model.load_weights(tensors())

    for folder in folders:
        done = out / folder.name
        done.mkdir(parents=True, exist_ok=True)
        try:
            names = json.loads((folder / "names.json").read_text())
            total = sum(math.prod(shape) for _, shape in names.values())
            config = VllmConfig(
                model_config=ModelConfig(
                    model=str(folder),
                    tokenizer=str(folder),
                    skip_tokenizer_init=True,
                    dtype="float32",
                    max_model_len=64,
                    enforce_eager=True,
                ),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=tp,
                    pipeline_parallel_size=pp,
                    data_parallel_size=dp,
                    enable_expert_parallel=ep,
                    distributed_executor_backend="external_launcher",
                ),
                device_config=DeviceConfig("cpu"),
                load_config=LoadConfig(load_format="dummy"),
            )
            with set_current_vllm_config(config):
                init_distributed_environment(world, rank, "env://", rank, "gloo")
                initialize_model_parallel(tp, pp)
                with set_default_torch_dtype(torch.float32), torch.device("cpu"):
                    model = initialize_model(vllm_config=config)
                held = []
                for backwards in (False, True):
                    fill(model, names, backwards)
                    held.append({n: t.double().numpy() for n, t in model.state_dict().items()})
                    held[-1] = {n: t.copy() for n, t in held[-1].items()}
            origins = {}
            for name, first in held[0].items():
                second = held[1][name]
                place = np.full(first.shape, COMPUTED, dtype=np.int64)
                copied = first + second == total + 1
                place[copied] = first[copied].astype(np.int64) - 1
                # What grows beyond all numbers in both was computed.
                place[~copied & (first == second) & np.isfinite(first)] = CONSTANT
                place[np.isnan(first) & np.isnan(second)] = UNFILLED
                origins[name] = place
            np.savez(done / f"rank-{rank}.npz", **origins)
        except Exception:
            (done / f"rank-{rank}.failed").write_text(traceback.format_exc())
        finally:
            destroy_model_parallel()


def run_ranks(
    out: Path, folders: list[Path], tp: int, pp: int = 1, ep: bool = False, dp: int = 1
) -> None:
    """Start all ranks, each a process, and wait for them."""
    # Ranks run this file, and need no other of the tests.
    from live_processes import run_rank_programs

    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_DIST_IDENT": f"reshard-{uuid.uuid4().hex[:8]}",
    }
    command = [sys.executable, __file__, "--rank", out, tp, pp, int(ep), dp, *folders]
    run_rank_programs(command, tp * pp * dp, environment, timeout_s=1800)


if __name__ == "__main__":
    rest = sys.argv[2:] if sys.argv[1] == "--rank" else sys.argv[1:]
    where, tp, pp, ep, dp, *folders = rest
    if sys.argv[1] == "--rank":
        run_rank(Path(where), int(tp), int(pp), ep == "1", int(dp), [Path(f) for f in folders])
    else:
        run_ranks(Path(where), [Path(f) for f in folders], int(tp), int(pp), ep == "1", int(dp))
