"""A rank of DeepSpeed that trains, saves, resumes, and says what it holds.

What is held is asked of DeepSpeed's own live objects (`safe_get_full_fp32_param` and its like), so
nothing here depends on how checkpoints are read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adagrad": ("sum",),
}


def make_config(
    stage: int, dtype: str, *, universal: bool = False, batch: int = 1
) -> dict[str, Any]:
    """The configuration that every run here has in common."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return config


def start_engine(model: Any, optimizer: Any, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine on this rank of a job over gloo."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


@dataclass(frozen=True)
class Case:
    """One run: how many ranks, of what ZeRO stage and type, and what the model is like."""

    stage: int
    ranks: int
    dtype: str = "bf16"
    kind: str = "plain"
    optimizer: str = "adamw"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_made_universal(self) -> bool:
        """Whether `ds_to_universal` is run on it too, which takes Adam's state alone.

        It goes by a map of parameters that does not know of `round_robin_gradients`.
        """
        return (
            self.stage > 0
            and self.optimizer == "adamw"
            and not (self.zero.keys() & {"round_robin_gradients", "elastic_checkpoint"})
        )

    @property
    def name(self) -> str:
        more = "".join(f"-{key.split('_')[0]}" for key in (*self.zero, *self.config))
        optimizer = "" if self.optimizer == "adamw" else f"-{self.optimizer}"
        return f"zero{self.stage}-{self.dtype}-{self.ranks}-{self.kind}{optimizer}{more}"

    @property
    def element_type(self) -> torch.dtype:
        """The type that the model computes with."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    def ds_config(self) -> dict[str, Any]:
        """The configuration that DeepSpeed is given."""
        config = make_config(self.stage, self.dtype) | {
            # Without it gradients are scaled by their norm, a sum in another order on other ranks.
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5, "warmup_type": "linear"},
            },
        }
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 4}
        return config | self.config


def make_engine(case: Case, *, universal: bool = False) -> Any:
    """DeepSpeed's engine on this rank, for a model with its first weights."""
    from deepspeed.accelerator import get_accelerator

    from engines.deepspeed.models import Sums, parameter_groups

    # Its accelerator for processors says that it has no 16-bit floats of IEEE's; PyTorch has.
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    model = Sums(case.kind)
    groups = parameter_groups(model, case.kind)
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    options: dict[str, Any] = {"lr": 0.01}
    if case.optimizer == "sgd":
        options["momentum"] = 0.9
    config = case.ds_config()
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return start_engine(model, make[case.optimizer](groups, **options), config)


def take_steps(engine: Any, case: Case, first: int, steps: int) -> None:
    """Train: step number `first` and those that follow it."""
    for step in range(first, first + steps):
        loss = engine(torch.tensor(step, dtype=case.element_type))
        engine.backward(loss)
        engine.step()


def held(engine: Any, keys: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    """Every parameter with its float32 weights and optimizer state, whole."""
    stage = engine.zero_optimization_stage()
    find = {0: _find_whole, 3: _find_stage3}.get(stage, _find_flat)
    found = find(engine, keys)
    return {
        name: {key: value.detach().clone() for key, value in values.items()}
        for name, values in found.items()
    }


def _find_stage3(engine: Any, keys: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: {
            "master": safe_get_full_fp32_param(parameter),
            **{key: safe_get_full_optimizer_state(parameter, key) for key in keys},
        }
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def _find_flat(engine: Any, keys: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    """Gathered from the ranks' flat partitions, with the offsets that the optimizer goes by."""
    optimizer = engine.optimizer
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if masters is None:
        masters = optimizer.fp32_groups_flat_partition
    found: dict[str, dict[str, torch.Tensor]] = {}
    for number, master in enumerate(masters):
        group = optimizer.real_dp_process_group[number]
        parameters = getattr(optimizer, "round_robin_bit16_groups", None)
        parameters = (parameters or optimizer.bf16_groups)[number]
        sizes = [parameter.numel() for parameter in parameters]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        if hasattr(optimizer, "round_robin_bit16_offsets"):
            offsets = optimizer.round_robin_bit16_offsets[number]
        own = {"master": master.detach()}
        own |= {key: optimizer.optimizer.state[master][key] for key in keys}
        for key, part in own.items():
            parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(parts, part.contiguous(), group=group)
            flat = torch.cat(parts)
            for parameter, offset in zip(parameters, offsets, strict=True):
                name = optimizer.param_names[parameter]
                value = flat[offset : offset + parameter.numel()].view(parameter.shape)
                found.setdefault(name, {})[key] = value
    return found


def _find_whole(engine: Any, keys: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    """Of an optimizer without partitions; 16-bit ones have their float32 weights apart."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        return {
            names[parameter]: {key: state[key] for key in keys}
            for parameter, state in optimizer.state.items()
        }
    found = {}
    for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(low, high, strict=True):
            state = optimizer.optimizer.state[master]
            found[names[parameter]] = {"master": master, **{key: state[key] for key in keys}}
    return found


def digests(values: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """Type, shape and SHA-256 of every tensor."""
    return {
        name: {
            key: [str(value.dtype), list(value.shape), digest(value)]
            for key, value in states.items()
        }
        for name, states in values.items()
    }


def digest(value: torch.Tensor) -> str:
    """The first half of the SHA-256 of a tensor's bytes."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:32]


def client_state() -> dict[str, Any]:
    """What a user of DeepSpeed saves beside."""
    return {
        "epoch": 3,
        "note": "of a user",
        "history": [0.5, {"loss": 0.25, "grid": (2, 3)}],
        "rng": torch.arange(16, dtype=torch.uint8),
    }


def train_and_save(rank: int, case: Case, folder: Path, steps: int, more: int) -> None:
    """Train `steps` steps, save, and train `more`; what is held then is written beside."""
    engine = make_engine(case)
    take_steps(engine, case, 0, steps)
    engine.save_checkpoint(folder, client_state=client_state())
    saved = held(engine, STATES[case.optimizer])
    take_steps(engine, case, steps, more)
    later = held(engine, STATES[case.optimizer])
    if rank == 0:
        torch.save({"saved": saved, "later": later}, folder / "held.pt")
        (folder / "held.json").write_text(json.dumps(digests(saved), indent=0))


def resume_and_train(
    rank: int, case: Case, folder: Path, tag: str | None, universal: bool, first: int, target: Path
) -> None:
    """Load a checkpoint, and take one more step; what is held before and after is written."""
    engine = make_engine(case, universal=universal)
    # Before anything is loaded the state is that of a new run: another start must not do.
    path, client = engine.load_checkpoint(folder, tag=tag)
    assert path is not None, f"nothing was loaded from {folder}"
    loaded = held(engine, STATES[case.optimizer])
    take_steps(engine, case, first, 1)
    after = held(engine, STATES[case.optimizer])
    if rank == 0:
        kept = {key: value for key, value in client.items() if key in client_state()}
        found = {"loaded": loaded, "after": after, "client": kept, "steps": engine.global_steps}
        torch.save(found, target)
