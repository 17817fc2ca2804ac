"""Stages of messages: what arrives is handed on, part by part, while the next parts arrive.

Between hosts every byte travels once; within the host that it has entered, it goes from the rank
that has it to the others. `reshard.plans.hierarchical` says who sends what in which stage, and
cuts it into the parts of a pipeline. Here all its steps are one exchange of messages::

    step 0    part 0: source -> target
    step 1    part 1: source -> target     part 0: target -> target, on another rank of the host
    step 2    ...

Messages are in the order of steps. One that hands on follows those that bring the same part to its
sender; all others wait for nothing but memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.plans.schedule import PipelineSpan, list_steps
from reshard.topology import Topology
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import RankTransfers


def stage_transfers(
    change: LayoutChange,
    stages: Sequence[Transfers],
    span: PipelineSpan,
    rank: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> Iterator[RankTransfers]:
    """The transfers of one tensor on one rank, each with its place in the pipeline.

    The first of the stages goes from the source to the target, all others from target to target.
    """
    within = LayoutChange(change.target, change.target)
    for step, stage, rows in list_steps(stages, change.target.shape, span):
        ends = (change, source) if stage == 0 else (within, target)
        place = step, stage
        yield RankTransfers.of(ends[0], rows, rank, ends[1], target, dtype, place)


@lru_cache(maxsize=256)
def stage_change(change: LayoutChange, dtype: DType, topology: Topology) -> StagedJob:
    """One tensor's change of layout, in stages."""
    job = Job([JobItem.between_ranks("tensor", dtype, change.source, change.target)])
    return StagedJob(job, topology)


@lru_cache(maxsize=256)
def _find_stages(
    change: LayoutChange, dtype: DType, topology: Topology, rank: int
) -> tuple[Transfers, ...]:
    (stages,) = stage_change(change, dtype, topology).for_rank(rank)
    return tuple(stages)


def stages_of(staged: StagedJob, rank: int) -> tuple[Transfers, ...]:
    """What a rank receives, keeps and sends of the only tensor of a job, stage by stage."""
    (item,) = staged.job.items
    return _find_stages(item.change, item.dtype, staged.topology, rank)


def prepare_stages(
    staged: StagedJob,
    group: RankGroup,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    device: torch.device,
    extra_bytes: int,
) -> MessageExchange:
    """The exchange of this rank, of a job of one tensor."""
    (item,) = staged.job.items
    stages, span = stages_of(staged, group.rank), PipelineSpan(0, staged.parts)
    found = list(stage_transfers(item.change, stages, span, group.rank, source, target))
    return MessageExchange(found, group.rank, group, device, extra_bytes)
