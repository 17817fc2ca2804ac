"""A trainer of one rank that starts vLLM itself, and sends it weights by vLLM's own interface.

Usage: python transfer_trainer.py FOLDER SAVED RESULT

FOLDER has a `config.json`. SAVED gets the weights of each version, RESULT what vLLM generates.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1, 17, 42, 9, 101, 7], [3, 250, 8, 8, 30]]
VERSIONS = (3, 4)


class Client:
    """vLLM's control plane in front of an engine in this process; its workers are others."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
        self.engine.init_weight_transfer_engine({"init_info": told})

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, told: dict[str, Any]) -> None:
        self.engine.update_weights({"update_info": told})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update(weight_version)


def main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from reshard.torch.vllm.worker import ReshardTrainerInit

    folder, saved, result = sys.argv[1:]
    engine = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        weight_transfer_config={"backend": "reshard"},
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        seed=0,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    init = ReshardTrainerInit(
        f"tcp://127.0.0.1:{port}", model, 1, rank=0, timeout_s=300, options={"cast": True}
    )
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=Client(engine))
    found = {}
    for version in VERSIONS:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        trainer.send_weights(version)
        assert engine.get_weight_version() == str(version)
        engine.reset_prefix_cache()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        found[version] = [list(one.outputs[0].token_ids) for one in outputs]
        model.save_pretrained(f"{saved}/{version}")
    trainer.shutdown()
    engine.shutdown_weight_transfer_engine()
    # Without it, the exit below leaves the engine's processes behind.
    engine.llm_engine.engine_core.shutdown()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    os._exit(0)
