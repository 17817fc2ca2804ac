"""A rank of FSDP2 that trains and saves, or goes on from what was converted and takes a step.

Arguments: `train`, `resume` or, where other values of the program are not there, `resume-state`;
the tensor-parallel size; then folders `OPTIMIZER=FOLDER`.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 3
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


class Model(torch.nn.Module):
    """Two linear layers and a norm, of sizes that few numbers of ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.norm = torch.nn.LayerNorm(6)
        self.down = torch.nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def make(tp: int, seed: int, *, is_mixed: bool = False) -> Model:
    """The model; `is_mixed` computes in bfloat16 with float32 weights."""
    torch.manual_seed(seed)
    model = Model()
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    for layer in (model.up, model.down, model):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else None
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy or MixedPrecisionPolicy())
    return model


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    # Every rank has the same batch: the mean over ranks is what one rank computes.
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(4, 6, generator=generator)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def groups(model: Model, name: str) -> Any:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return OPTIMIZERS[name]([{"params": decayed}, {"params": others, "weight_decay": 0.0}])


def gather(model: Model) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            name: value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
            for name, value in model.state_dict().items()
        }


def train(tp: int, name: str, folder: str) -> None:
    model = make(tp, seed=0)
    optimizer = groups(model, name)
    for number in range(STEPS):
        step(model, optimizer, number)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optim": state, "step": STEPS, "scheduler": {"last_epoch": STEPS}}
    dcp.save(saved, checkpoint_id=folder)
    now = gather(model)
    step(model, optimizer, STEPS)
    then = gather(model)
    if dist.get_rank() == 0:
        torch.save({"now": now, "then": then}, f"{folder}.pt")


def resume(
    tp: int, name: str, folder: str, *, has_values: bool = True, is_mixed: bool = False
) -> None:
    """Go on from a checkpoint, which `has_values` of this program beside its training state."""
    model = make(tp, seed=1, is_mixed=is_mixed)
    optimizer = groups(model, name)
    weights, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optim": state}
    if has_values:
        saved |= {"step": None, "scheduler": {"last_epoch": None}}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if has_values:
        assert (saved["step"], saved["scheduler"]) == (STEPS, {"last_epoch": STEPS})
    now = gather(model)
    step(model, optimizer, STEPS)
    then = gather(model)
    if dist.get_rank() == 0:
        torch.save({"now": now, "then": then}, f"{folder}.resumed.pt")


def main(mode: str, tp: str, *cases: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        name, folder = case.split("=", 1)
        assert mode == "train" or Path(folder).is_dir()
        if mode == "train":
            train(int(tp), name, folder)
        else:
            resume(int(tp), name, folder, has_values=mode == "resume")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
