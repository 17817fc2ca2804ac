"""Weights from an FSDP2 trainer to a vLLM engine that is a job of its own, after every step.

Both are given a folder with the `config.json` of a model; neither reads or writes weights there::

    torchrun --nproc-per-node=2 examples/link_vllm.py trainer tcp://127.0.0.1:29400 FOLDER
    python examples/link_vllm.py engine tcp://127.0.0.1:29400 FOLDER

The trainer is transformers' module of the config on two ranks, in float32. The engine is vLLM,
tensor parallel on two workers, in bfloat16. After every step the engine says what it generates.
One more argument to the trainer is a folder in which the trainer saves the weights of each step.
"""

from __future__ import annotations

import os
import sys

STEPS = 3
PROMPTS = [[1, 17, 42, 9, 101, 7], [3, 250, 8, 8, 30]]


def train(url: str, folder: str, saved: str | None) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from reshard.torch import connect

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with connect(url, "trainer", rank=rank, ranks=ranks) as link:
        sync = link.prepare(model, cast=True)
        for step in range(STEPS):
            torch.manual_seed(step)
            tokens = torch.randint(config.vocab_size, (4, 16))
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sync.run(step)
            if rank == 0:
                print(f"trainer {step}: {report.trainer_bytes} bytes", flush=True)
            if saved:
                whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
                if rank == 0:
                    model.save_pretrained(f"{saved}/{step}", state_dict=whole)
    dist.destroy_process_group()


def serve(url: str, folder: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        worker_extension_cls="reshard.torch.vllm.worker.LinkedWorker",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        seed=0,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    llm.collective_rpc("link_weights", args=(url,))
    for _ in range(STEPS):
        (version, *_) = llm.collective_rpc("receive_weights")
        # What it has cached of prompts is of the weights before.
        llm.reset_prefix_cache()
        found = llm.generate(prompts, params, use_tqdm=False)
        print(f"engine {version}: {[list(o.outputs[0].token_ids) for o in found]}", flush=True)
    llm.collective_rpc("unlink_weights")
    # Ends its processes, which would outlive this one.
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    side, url, *rest = sys.argv[1:]
    if side == "trainer":
        train(url, rest[0], rest[1] if len(rest) > 1 else None)
    else:
        serve(url, rest[0])
    sys.stdout.flush()
    os._exit(0)
