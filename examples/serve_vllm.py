"""Weights from an FSDP2 trainer to `vllm serve`, after every step, by vLLM's own weight transfer.

The server has the backend `reshard` where this package is installed beside vLLM. FOLDER has the
`config.json` of a model; neither side reads or writes weights there::

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --load-format dummy --tensor-parallel-size 2 \
        --weight-transfer-config '{"backend": "reshard"}' --skip-tokenizer-init --tokens-only
    torchrun --nproc-per-node=2 examples/serve_vllm.py \
        http://127.0.0.1:8000 tcp://127.0.0.1:29400 FOLDER

The trainer is transformers' module of the config on two ranks, in float32. Its first rank drives
the server, and after every step says what that generates. One more argument is a folder in which it
saves the weights of each step.
"""

from __future__ import annotations

import os
import sys

STEPS = 2
PROMPTS = [[1, 17, 42, 9, 101, 7], [3, 250, 8, 8, 30]]


def generate(server: str) -> list[list[int]]:
    import requests

    # What it has cached of prompts is of the weights before.
    requests.post(f"{server}/reset_prefix_cache", timeout=60).raise_for_status()
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
    found = []
    for tokens in PROMPTS:
        asked = {"token_ids": tokens, "sampling_params": params}
        answer = requests.post(f"{server}/inference/v1/generate", json=asked, timeout=600)
        answer.raise_for_status()
        found.append(answer.json()["choices"][0]["token_ids"])
    return found


def main(server: str, url: str, folder: str, saved: str | None = None) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from reshard.torch import vllm

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
    client = HTTPVLLMWeightSyncClient(server)
    init = vllm.ReshardTrainerInit(url, model, ranks, rank=rank, options={"cast": True})
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=client)
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens = torch.randint(config.vocab_size, (4, 16))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer.send_weights(step)
        if rank == 0:
            print(f"server {step}: {generate(server)}", flush=True)
        if saved:
            whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
            if rank == 0:
                model.save_pretrained(f"{saved}/{step}", state_dict=whole)
    if rank == 0:
        client.shutdown_weight_transfer_engine()
    trainer.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
