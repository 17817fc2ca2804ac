"""What DeepSpeed saved goes on in FSDP2 and back: the next step is that of the run that saved.

Both were recorded with their own next step (`tests/engines/training/record.py`). FSDP2's ranks run
here. In DeepSpeed's place is what it does with its files: each rank's flat float32 partition is one
parameter of AdamW, whose state is the file's, and its gradient is cut as the partition is.

The weights at the step are equal bit for bit. The step behind it was computed on the machine that
recorded it, and processors of another kind round products otherwise.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.training import resuming_process as process
from checkpoint.training.test_resuming import RULES, expect_equal, run
from deepspeed_records import STEPS_OF_BOTH, unpack_archive
from reshard import checkpoint

# A step changes weights by about 1e-2, a moment that is wrong or lacking that by more than 1e-4.
ROUNDING = 1e-7


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folders of the runs, each with a file of its weights beside."""
    return unpack_archive(STEPS_OF_BOTH, tmp_path / "runs")


def test_what_deepspeed_saved_goes_on_in_fsdp2(runs: Path, tmp_path: Path) -> None:
    """Of every stage, over 2 ranks."""
    made = {}
    for stage in (1, 2, 3):
        folder = tmp_path / f"made{stage}"
        checkpoint.convert(
            runs / f"zero{stage}",
            folder,
            to="fsdp=2,tp=1",
            rules=RULES,
            format="torch-dcp",
            training="fsdp2",
        )
        made[stage] = folder
    for stage, folder in made.items():
        run("resume-state", 2, 1, {"adamw": folder})
        expect_equal(runs / f"zero{stage}", folder, ROUNDING)


@pytest.mark.usefixtures("deepspeed_classes")
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (1, 3), (3, 2), (3, 3)])
def test_what_fsdp2_saved_goes_on_in_deepspeed(
    stage: int, ranks: int, runs: Path, tmp_path: Path
) -> None:
    """Weights and state are in every rank's partition where DeepSpeed looks."""
    made = tmp_path / "made"
    checkpoint.convert(runs / "fsdp2", made, to=f"dp={ranks}", format=f"deepspeed-zero{stage}")
    folder = made / (made / "latest").read_text()
    held = torch.load(runs / "fsdp2.pt", weights_only=True)
    model = process.Model()
    model.load_state_dict(held["now"])
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(process.STEPS))
    model(batch).square().mean().backward()
    gradients = {name: one.grad.reshape(-1) for name, one in model.named_parameters()}
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    groups = torch.load(folder / f"{prefix}mp_rank_00_model_states.pt", weights_only=False)
    shapes = groups["param_shapes"]
    after: list[list[Any]] = [[] for _ in shapes]
    for rank in range(ranks):
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        base = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        for number, shaped in enumerate(shapes):
            master = torch.nn.Parameter(saved[key][number])
            (group,) = (one for one in base["param_groups"] if number in one["params"])
            master.grad = cut(gradients, shaped, stage, rank, ranks, saved, number)
            step(master, group, base["state"][number])
            after[number].append(master.detach())
    for shaped, parts in zip(shapes, after, strict=True):
        for name, value in join(shaped, parts, stage, ranks).items():
            assert not torch.equal(value, held["now"][name]), name
            assert torch.allclose(value, held["then"][name], rtol=0, atol=ROUNDING), name


def step(master: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
    """AdamW's step of one flat parameter, with its state as the file has it."""
    optimizer = torch.optim.AdamW([master])
    # The state of a partition is as long as it is with its padding.
    own = {key: value[: master.numel()] if value.dim() else value for key, value in state.items()}
    optimizer.load_state_dict({"state": {0: own}, "param_groups": [{**group, "params": [0]}]})
    optimizer.step()


def cut(
    gradients: dict[str, Any],
    shaped: dict[str, Any],
    stage: int,
    rank: int,
    ranks: int,
    saved: dict[str, Any],
    number: int,
) -> Any:
    """A rank's part of the gradients of a group, as DeepSpeed cuts parameters."""
    if stage == 3:
        return torch.cat([padded(gradients[name], ranks)[rank] for name in shaped])
    flat = torch.cat([gradients[name] for name in shaped])
    own = saved["single_partition_of_fp32_groups"][number].numel()
    size = own + saved["group_paddings"][number]
    return flat[rank * size : rank * size + own]


def padded(flat: Any, ranks: int) -> Any:
    """A flat tensor as equal parts of all ranks, with zeros at the end."""
    size = math.ceil(flat.numel() / ranks)
    return torch.nn.functional.pad(flat, (0, size * ranks - flat.numel())).view(ranks, size)


def join(shaped: dict[str, Any], parts: list[Any], stage: int, ranks: int) -> dict[str, Any]:
    """The parameters of a group, of all ranks' partitions."""
    found, at = {}, 0
    flat = torch.cat(parts)
    for name, shape in shaped.items():
        count = shape.numel()
        size = math.ceil(count / ranks) if stage == 3 else count
        if stage == 3:
            own = torch.cat([part[at : at + size] for part in parts])[:count]
        else:
            own = flat[at : at + count]
        found[name] = own.view(shape)
        at += size
    return found
