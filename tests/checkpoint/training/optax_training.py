"""A model of two layers that Optax trains, and how PyTorch goes on with it.

`tests/golden/engines/optax.tar.xz` has what Orbax saved after three steps, and the weights after
the next one (`engines.orbax.training` records them). As a script this is a rank of FSDP2 that takes
that step: `python optax_training.py CASE FOLDER RESULT`.
"""

from __future__ import annotations

import sys
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RECORDS = Path(__file__).parents[2] / "golden" / "engines" / "optax.tar.xz"
STEPS, RATE, DECAY, NORM = 3, 1e-2, 0.1, 0.05
SIZES = (6, 10, 4)
# Both sum in orders of their own; updates are of the size of the learning rate.
TOLERANCE = 2e-6


def batch(number: int) -> np.ndarray[Any, Any]:
    """What the model sees in a step."""
    return np.random.default_rng(number).standard_normal((8, SIZES[0])).astype(np.float32)


def schedule(step: Any) -> Any:
    """The learning rate of a step, of either program."""
    return RATE / (1 + 0.5 * step)


def first_weights() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """The weights before the first step."""
    random = np.random.default_rng(5)
    made = {}
    for name, rows, columns in (("up", *SIZES[:2]), ("down", *SIZES[1:])):
        kernel = random.standard_normal((rows, columns)).astype(np.float32) / 2
        made[name] = {"kernel": kernel, "bias": random.standard_normal(columns, np.float32)}
    return made


class Dense(torch.nn.Module):
    """A layer with the names and shapes of Flax."""

    def __init__(self, kernel: np.ndarray[Any, Any], bias: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.kernel = torch.nn.Parameter(torch.from_numpy(kernel.copy()))
        self.bias = torch.nn.Parameter(torch.from_numpy(bias.copy()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel + self.bias


class Layers(torch.nn.Module):
    """The model; `is_new` for other weights than those that were trained."""

    def __init__(self, *, is_new: bool) -> None:
        super().__init__()
        weights = first_weights()
        if is_new:
            weights = {n: {k: a + 1 for k, a in one.items()} for n, one in weights.items()}
        self.up, self.down = Dense(**weights["up"]), Dense(**weights["down"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def adamw(model: Layers, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, **more)


def masked(model: Layers) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)


def frozen(model: Layers) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)


@dataclass(frozen=True)
class Resumed:
    """How PyTorch goes on: its optimizer, and what of it the checkpoint says."""

    optimizer: Callable[[Layers], torch.optim.Optimizer] = adamw
    has_groups: bool = False
    norm: float | None = None
    is_scheduled: bool = False


CASES = {
    "adamw": Resumed(),
    "masked-decay": Resumed(masked),
    "chain": Resumed(norm=NORM, is_scheduled=True),
    # Hyper-parameters of its own are others: the checkpoint has them.
    "injected": Resumed(lambda model: torch.optim.AdamW(model.parameters()), has_groups=True),
    "frozen": Resumed(frozen),
    "accumulated": Resumed(),
    "averaged": Resumed(),
    "momentum": Resumed(lambda model: torch.optim.SGD(model.parameters(), RATE, momentum=0.9)),
    "linen": Resumed(),
    "nnx": Resumed(),
}


def take_step(
    model: Layers, optimizer: torch.optim.Optimizer, number: int, norm: float | None = None
) -> None:
    model(torch.from_numpy(batch(number))).square().mean().backward()
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    optimizer.zero_grad()


def resume(case: str, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The weights after the next step of a converted checkpoint."""
    own, model = CASES[case], Layers(is_new=True)
    if dist.is_initialized():
        fully_shard(model)
    optimizer = own.optimizer(model)
    weights, state = get_state_dict(model, optimizer)
    # Where the checkpoint does not say them, the hyper-parameters are this program's.
    asked = state if own.has_groups else {"state": state["state"]}
    dcp.load({"model": weights, "optim": asked}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if own.is_scheduled:
        for group in optimizer.param_groups:
            group["lr"] = schedule(STEPS)
    take_step(model, optimizer, STEPS, own.norm)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in model.named_parameters()
    }


def extract(folder: Path) -> Path:
    """The records in `folder`: a checkpoint `CASE/saved` and weights `CASE/next.npz`."""
    with tarfile.open(RECORDS) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main(case: str, folder: str, result: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = resume(case, Path(folder))
    if dist.get_rank() == 0:
        np.savez(result, **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
