"""Weights from a trainer to an engine that fuses query, key and value.

`torchrun --nproc-per-node=4 examples/engine.py`: ranks 0 and 1 have a small Llama under FSDP2,
with Hugging Face's names. Ranks 2 and 3 have it tensor parallel, as vLLM builds it: each has the
queries, keys and values of its heads in `qkv_proj`, and its rows of gate above those of up.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, Module, ModuleDict, ModuleList

import reshard
from reshard.recipes import load_recipe
from reshard.torch import Refit, by_recipe

HIDDEN, INNER, HEADS, GROUPS, HEAD, LAYERS = 16, 24, 4, 2, 8, 2
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
}
TRAINERS, ENGINES = [0, 1], [2, 3]


def linears(**sizes: tuple[int, int]) -> ModuleDict:
    return ModuleDict({name: Linear(*size, bias=False) for name, size in sizes.items()})


def layers(attention: dict[str, tuple[int, int]], mlp: dict[str, tuple[int, int]]) -> Module:
    """Layers of the given matrices, input by output, under Llama's names."""
    stack = ModuleList(
        ModuleDict({"self_attn": linears(**attention), "mlp": linears(**mlp)})
        for _ in range(LAYERS)
    )
    return ModuleDict({"model": ModuleDict({"layers": stack})})


def trainer() -> Module:
    keys = {"k_proj": (HIDDEN, GROUPS * HEAD), "v_proj": (HIDDEN, GROUPS * HEAD)}
    attention = {"q_proj": (HIDDEN, HEADS * HEAD), **keys, "o_proj": (HEADS * HEAD, HIDDEN)}
    up = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER)}
    return layers(attention, {**up, "down_proj": (INNER, HIDDEN)})


def engine(tp: int) -> Module:
    fused = {"qkv_proj": (HIDDEN, (HEADS + 2 * GROUPS) * HEAD // tp)}
    attention = {**fused, "o_proj": (HEADS * HEAD // tp, HIDDEN)}
    return layers(
        attention, {"gate_up_proj": (HIDDEN, 2 * INNER // tp), "down_proj": (INNER // tp, HIDDEN)}
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # A mesh has process groups: all ranks make it, also those that are not in it.
    training = DeviceMesh("cpu", TRAINERS)
    torch.manual_seed(0)
    full = trainer()
    source = target = None
    if rank in TRAINERS:
        source = trainer()
        source.load_state_dict(full.state_dict())
        for module in source.modules():
            if isinstance(module, Linear):
                fully_shard(module, mesh=training)
    else:
        target = engine(tp=len(ENGINES))

    recipe = load_recipe("llama")
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in trainer().state_dict().items()}
    served = by_recipe(
        target,
        reshard.DeviceMesh.of(tp=len(ENGINES)),
        shapes,
        recipe,
        config=CONFIG,
        naming=recipe.naming("vllm", CONFIG),
        first_rank=ENGINES[0],
    )
    refit = Refit.prepare(source, served)
    refit.run()

    if target is not None:
        weights, place = full.state_dict(), rank - ENGINES[0]
        for name, weight in target.state_dict().items():
            if "qkv_proj" in name:
                parts = [weights[name.replace("qkv", x)].chunk(2)[place] for x in "qkv"]
                assert torch.equal(weight, torch.cat(parts)), name
            elif "gate_up" in name:
                parts = [
                    weights[name.replace("gate_up", x)].chunk(2)[place] for x in ("gate", "up")
                ]
                assert torch.equal(weight, torch.cat(parts)), name
            else:
                assert torch.equal(weight, weights[name].chunk(2, dim=1)[place]), name
    print(f"rank {rank}: {refit.received_bytes} bytes in", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
