"""Ranks that train models cut by other parallelisms, save, and say what they hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engines.deepspeed import parallel_models as models
from engines.deepspeed.training import STATES, Case, client_state, digests, held, take_steps


@dataclasses.dataclass(frozen=True)
class ParallelCase(Case):
    """A run over `over` ranks of experts, stages or tensor parallelism, too."""

    over: int = 2

    @property
    def name(self) -> str:
        return f"{super().name}-over{self.over}"


def make_parallel_engine(case: ParallelCase) -> tuple[Any, Any]:
    """DeepSpeed's engine on this rank, and its model."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    config = case.ds_config()
    mpu: Any = None
    if case.kind == "experts":
        models.LOCAL_EXPERTS[0] = 4 // case.over
        model: Any = models.Experts(4, case.over)
        groups = models.expert_groups(model)
    elif case.kind.startswith("pipeline"):
        model = models.make_pipeline(
            case.over, case.ranks // case.over, case.kind == "pipelinetied"
        )
        groups = [{"params": [*model.parameters()]}]
        config["train_batch_size"] = case.ranks // case.over
    elif case.kind == "autotp":
        model = models.Layers()
        groups = [{"params": [*model.parameters()]}]
        if case.over > 1:
            config["tensor_parallel"] = {
                "autotp_size": case.over,
                "partition_config": models.PARTITIONS,
            }
    else:
        from deepspeed.runtime.pipe.topology import (
            PipelineParallelGrid,
            PipeModelDataParallelTopology,
        )

        topology = PipeModelDataParallelTopology(1, case.over, case.ranks // case.over)
        mpu = PipelineParallelGrid(topology=topology)
        model = models.Slices(mpu.get_model_parallel_rank(), case.over)
        groups = [{"params": [*model.parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    if case.kind == "autotp" and case.over > 1:
        from deepspeed.utils import groups as mpu
    return engine, mpu


def batches(case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a pipeline is fed."""
    while True:
        value = torch.arange(6.0).view(1, 6).to(case.element_type) / 8
        yield value, value.flip(1)


def save_parallel(rank: int, case: ParallelCase, folder: Path, steps: int, more: int = 0) -> None:
    """Train, save, train `more`, and write what all ranks held together then and then."""
    engine, mpu = make_parallel_engine(case)
    data = batches(case)
    for step in range(steps):
        if case.kind.startswith("pipeline"):
            engine.train_batch(data)
        else:
            take_steps(engine, case, step, 1)
    engine.save_checkpoint(folder, client_state=client_state())
    found = {"saved": held_together(engine, mpu, case)}
    if more:
        take_steps(engine, case, steps, more)
        found["later"] = held_together(engine, mpu, case)
    if rank == 0:
        torch.save(found, folder / "held.pt")
        (folder / "held.json").write_text(json.dumps(digests(found["saved"]), indent=0))


def resume_parallel(rank: int, case: ParallelCase, folder: Path, first: int, target: Path) -> None:
    """Load a checkpoint, and take one more step; what is held before and after is written."""
    engine, mpu = make_parallel_engine(case)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None, f"nothing was loaded from {folder}"
    loaded = held_together(engine, mpu, case)
    take_steps(engine, case, first, 1)
    after = held_together(engine, mpu, case)
    if rank == 0:
        torch.save({"loaded": loaded, "after": after}, target)


def held_together(engine: Any, mpu: Any, case: ParallelCase) -> dict[str, Any]:
    """What all ranks hold, under the names of the whole model; tensors are whole."""
    own = held(engine, STATES[case.optimizer])
    if case.kind == "experts":
        named = dict(engine.module.named_parameters())
        own = {models.in_whole_model(name, named[name]): states for name, states in own.items()}
    slices = {} if mpu is None else {"slice": mpu.get_tensor_model_parallel_rank()}
    everyone: list[Any] = [None] * case.ranks
    torch.distributed.all_gather_object(everyone, (own, slices.get("slice", 0)))
    found = {s: {} for _, s in everyone}
    for states, s in everyone:
        found[s].update(states)
    return found[0] if mpu is None else join(found)


def join(slices: dict[int, dict[str, dict[str, torch.Tensor]]]) -> dict[str, Any]:
    """The whole tensors of tensor-parallel ranks, as `Slices` cut them."""
    found: dict[str, Any] = {}
    for name in slices[0]:
        found[name] = {}
        for key in slices[0][name]:
            parts = [slices[s][name][key] for s in sorted(slices)]
            if name in ("row.weight", "down.weight"):
                whole = torch.cat(parts, 1)
            elif name in ("norm.weight", "norm.bias", "row.bias", "down.bias", "last.weight"):
                whole = parts[0]
            elif name in ("gated.weight", "gates.weight", "gates.bias"):
                halves = zip(*(part.chunk(2) for part in parts), strict=True)
                whole = torch.cat([torch.cat(half) for half in halves])
            else:
                whole = torch.cat(parts)
            found[name][key] = whole[:15] if name == "embed.weight" else whole
    return found
