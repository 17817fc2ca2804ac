"""A vLLM in one process, whose model is filled with other weights than those it was started from.

Usage: python reloaded_engine.py FAMILY FOLDER SEED RESULT

There are models of two seeds, 0 and 1. RESULT gets what vLLM generates by the weights of SEED,
which it loads itself, and by those of the other one, which fill its model; and how they do.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def run(family: str, folder: Path, seed: int, result: Path) -> None:
    import torch
    import transformers
    from vllm import LLM, SamplingParams
    from vllm.config import set_current_vllm_config

    from engines.vllm.generation import PROMPTS, TOKENS
    from engines.vllm.link_models import write_config
    from reshard.torch.vllm.reloading import ReloadedModel
    from reshard.torch.vllm.worker import find_conversion, find_sources

    write_config(family, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    trained = []
    for one_seed in (seed, 1 - seed):
        torch.manual_seed(one_seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, one in model.named_parameters():
                # Biases and norms are alike in all models that are made.
                if one.ndim < 2 or name.endswith("bias"):
                    one.copy_(torch.randn_like(one) * 0.2 + ("norm" in name))
        trained.append(model)
    trained[0].save_pretrained(folder)
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        seed=0,
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]

    def generate() -> list[Any]:
        engine.reset_prefix_cache()
        return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params)]

    found: dict[str, Any] = {"loaded": generate()}
    worker = engine.llm_engine.model_executor.driver_worker.worker
    vllm_config = worker.vllm_config
    model_config = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        sources = find_sources(model_config, "module")
        convert = find_conversion(model_config, "module")
        reloaded = ReloadedModel(
            worker.model_runner.get_model(), model_config, sources, convert=convert
        )
        whole = trained[1].state_dict()
        for source, (staged, layout) in reloaded.staged.tensors.items():
            (box,) = layout.boxes(0)
            where = zip(box.start, box.stop, strict=True)
            staged.copy_(whole[source][tuple(slice(*ends) for ends in where)])
        reloaded.apply()
        found["filled"] = generate()
    found["by_loader"] = sorted(reloaded.staged.by_loader)
    found["unread"] = sorted(set(sources) - set(reloaded.staged.tensors))
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    os._exit(0)
