"""Megatron's model with PyTorch's AdamW, in one process: it trains and saves, or goes on.

Arguments: `train` or `resume`, a file with the job, and the folder of a distributed checkpoint.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as state_dicts

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_core"))
import cpu_shim
import training_process as megatron


class AdamW:
    """What takes the place of Megatron's optimizer in its step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        decayed = [one for one in self.parameters if one.ndim > 1]
        others = [one for one in self.parameters if one.ndim < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.inner = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def reload_model_params(self) -> None: ...

    def step(self) -> tuple[bool, torch.Tensor, None]:
        """As Megatron's: whether it stepped, the norm of gradients, and no count of zeros."""
        for one in self.parameters:
            one.grad = one.main_grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.inner.step()
        return True, norm, None


# Norms in front of a linear layer are called as parts of it in checkpoints.
NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
BACK = {theirs: own for own, theirs in NORMS.items()}


def rename(state: Any, ends: dict[str, str]) -> Any:
    """A nested state with other names of norms, as keys and in lists."""
    if isinstance(state, dict):
        return {rename(key, ends): rename(value, ends) for key, value in state.items()}
    if isinstance(state, list):
        return [rename(one, ends) for one in state]
    if isinstance(state, str):
        for end, other in ends.items():
            if state.endswith(end):
                return state.removesuffix(end) + other
    return state


def states(model: torch.nn.Module, optimizer: AdamW) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, state = state_dicts.get_state_dict(model, optimizer.inner)
    return {name: one for name, one in weights.items() if "_extra_state" not in name}, state


def main(mode: str, job_file: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = {**megatron.DEFAULTS, **json.loads(Path(job_file).read_text())}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    chunks, _, config = megatron.build({**job, "sizes": {}, "distributed_optimizer": False})
    model_parallel_cuda_manual_seed(1)
    model = megatron.unwrap(chunks[0])
    optimizer = AdamW(model)
    first = job["first"]
    if mode == "train":
        megatron.initialize(chunks, optimizer)
        for number in range(first):
            megatron.train(job, chunks, optimizer, config, number)
        weights, state = states(model, optimizer)
        saved = {"model": weights, "optim": state, "iteration": first}
        dcp.save(saved, checkpoint_id=folder)
    else:
        weights, state = states(model, optimizer)
        saved = rename({"model": weights, "optim": state}, NORMS)
        dcp.load(saved, checkpoint_id=folder)
        weights, state = rename(saved["model"], BACK), rename(saved["optim"], BACK)
        options = state_dicts.StateDictOptions(strict=False)
        state_dicts.set_state_dict(
            model,
            optimizer.inner,
            model_state_dict=weights,
            optim_state_dict=state,
            options=options,
        )
    megatron.train(job, chunks, optimizer, config, first)
    then = {name: one.detach().clone() for name, one in model.named_parameters()}
    torch.save(rename(then, NORMS), f"{folder}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    cpu_shim.install()
    cpu_shim.use_own_adam()
    main(*sys.argv[1:])
