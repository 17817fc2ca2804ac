"""Stages of messages: what arrives is handed on, part by part, while the next parts arrive.

Between hosts every byte travels once; within the host that it has entered, it goes from the rank
that has it to the others. `reshard.plans.hosts` says who sends what in which stage, and cuts it
into the parts of a pipeline. Here each step of that pipeline is one exchange of messages, all of
them in the same memory::

    step 0    part 0: source -> target
    step 1    part 1: source -> target     part 0: target -> target, on another rank of the host
    step 2    ...

A rank begins a step when its own messages of the step before are done; no rank waits for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.hosts.pipeline import PipelineSpan, list_steps
from reshard.plans.hosts.staged_job import StagedJob
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.topology import Topology
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES, MessageExchange
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.messages import RankTransfers


def stage_transfers(
    change: LayoutChange,
    stages: Sequence[Transfers],
    span: PipelineSpan,
    rank: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[int, RankTransfers]]:
    """The transfers of one tensor on one rank, with the step that each belongs to.

    The first of the stages goes from the source to the target, all others from target to target.
    """
    within = LayoutChange(change.target, change.target)
    for step, stage, rows in list_steps(stages, change.target.shape, span):
        ends = (change, source) if stage == 0 else (within, target)
        yield step, RankTransfers.of(ends[0], rows, rank, ends[1], target, dtype)


def collect_steps(
    transfers: Iterable[tuple[int, RankTransfers]], steps: int
) -> list[list[RankTransfers]]:
    """The transfers of each of so many steps."""
    found: list[list[RankTransfers]] = [[] for _ in range(steps)]
    for step, tensor in transfers:
        found[step].append(tensor)
    return found


class StepExchanges:
    """Exchanges of one rank that run one after the other, in the same memory.

    It has what a `MessageExchange` has. `steps` are the tensors' transfers of each, as many on
    every rank; the other arguments are those of the exchanges.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[RankTransfers]],
        group: RankGroup,
        device: torch.device,
        extra_bytes: int = DEFAULT_EXTRA_BYTES,
        memory: torch.Tensor | None = None,
    ) -> None:
        if memory is None and len(steps) > 1:
            memory = torch.empty(extra_bytes, dtype=torch.uint8, device=device)
        self.exchanges = [
            MessageExchange(tensors, group.rank, group, device, extra_bytes, memory=memory)
            for tensors in steps
        ]
        self.sent_bytes = sum(one.sent_bytes for one in self.exchanges)
        self.received_bytes = sum(one.received_bytes for one in self.exchanges)
        # They take turns in the memory.
        self.extra_bytes = max((one.extra_bytes for one in self.exchanges), default=0)
        self.has_failed = False

    @property
    def can_leave_its_thread(self) -> bool:
        """Whether another thread may run it."""
        return all(one.can_leave_its_thread for one in self.exchanges)

    @property
    def tag(self) -> int:
        """Of all its messages."""
        return self.exchanges[0].tag

    @tag.setter
    def tag(self, tag: int) -> None:
        for one in self.exchanges:
            one.tag = tag

    def run(self) -> None:
        """`start` and `finish`."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Begin the first step. Raises as `MessageExchange.start` does."""
        self.exchanges[0].start()

    def finish(self) -> None:
        """All steps. Raises as `MessageExchange.finish` does."""
        self.exchanges[0].finish()
        for one in self.exchanges[1:]:
            one.run()


MessageRun = MessageExchange | StepExchanges


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
) -> StepExchanges:
    """The exchanges of this rank, of a job of one tensor."""
    (item,) = staged.job.items
    stages, span = stages_of(staged, group.rank), PipelineSpan(0, staged.parts)
    found = stage_transfers(item.change, stages, span, group.rank, source, target)
    return StepExchanges(collect_steps(found, staged.steps), group, device, extra_bytes)
