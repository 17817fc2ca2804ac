"""Steps of pipelines over processes: each process runs the tasks of its stages.

The output of a stage is sent to the ranks of the next one by messages (`stage_boundary`). Receives
are posted some tasks before they are needed, in the schedule's `run_order`, which is the same for
all ranks. So the sender of each message has already started to send it, or will without waiting for
the receiver.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work
from reshard.spmd.programs.pipelines.stage_boundary import StageBoundary
from reshard.spmd.programs.pipelines.stage_passes import StagePasses
from reshard.spmd.programs.pipelines.stage_run import PipelineRun
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import Runner
from reshard.torch.exchange.groups import rank_group

# How many tasks of each rank before it is taken what another stage makes is asked for.
_AHEAD = 2


def run_over_processes(
    stages: Sequence[StagePasses],
    schedule: PipelineSchedule,
    specs: Sequence[ShardingSpec | None],
    parameters: Sequence[Any],
    microbatches: Sequence[tuple[Any, Any]],
    keeper: Runner,
) -> tuple[Any, list[Any]]:
    """One step of a pipeline whose stages are in several processes, all of which call this.

    Args:
        stages: the passes of each.
        schedule: the same on all processes.
        specs: of each stage.
        parameters: of the stages that are here; None for others.
        microbatches: pairs, of which only the first and the last stage's processes read a part.
        keeper: the runner of this process's arrays, over the group of its stage's ranks.

    Returns:
        The mean loss, None but on the last stage's ranks, and the gradients of the stages here.

    Raises as `Pipeline`, PlanError where the stage before means another step, and RunError on
    processes that wait for one that failed.
    """
    run = _ProcessRun(stages, schedule, specs, parameters, microbatches)
    run.prepare(keeper)
    try:
        return run.result()
    except BaseException as error:
        # Ranks of the stages beside this one wait for it.
        for among in run.among:
            among.break_off(error)
        raise


class _ProcessRun(PipelineRun):
    """One process's part of a step.

    `boundaries` are those between an own stage and one beside it on other ranks, by the first of
    both, and `among` the ranks of each.
    """

    def prepare(self, keeper: Runner) -> None:
        """Find the stages that are here, and the boundaries to those beside them."""
        rank = dist.get_rank()
        taken = [one for one in self.specs if one is not None]
        if len(taken) < len(self.stages):
            raise SpecError(
                "a pipeline over processes whose first stage has no sharding; give one, whose mesh "
                "is where the stage is"
            )
        meshes = [one.mesh for one in taken]
        self.here = [rank in mesh.devices for mesh in meshes]
        self.device = _device_of(self.parameters)
        groups = {}
        for stage, (one, other) in enumerate(pairwise(meshes)):
            ranks = tuple(sorted({*one.devices, *other.devices}))
            group = None if one is other else _group_of(ranks)
            if group is not None and rank in ranks:
                groups[stage] = group
        # Known before anything can fail: what is broken is met anew.
        self.among = [rank_group(group) for group in groups.values()]
        digest = self._digest(taken)
        self.boundaries = {
            stage: StageBoundary(
                stage,
                among,
                meshes[stage],
                taken[stage + 1],
                len(self.microbatches),
                digest,
                keeper,
                self.device,
            )
            for stage, among in zip(groups, self.among, strict=True)
        }

    def _digest(self, specs: Sequence[ShardingSpec]) -> str:
        """Of what ranks of neighbouring stages have to mean alike."""
        tasks = [[str(task) for task in line] for line in self.schedule.tasks]
        meant = tasks, [(one.mesh.text, one.mesh.devices, str(one)) for one in specs]
        return hashlib.blake2b(repr(meant).encode(), digest_size=16).hexdigest()

    def result(self) -> tuple[Any, list[Any]]:
        """As `PipelineRun.result`, with what crosses asked for before it is taken."""
        order = self.schedule.run_order
        # On devices messages have one order on both sides.
        ahead = _AHEAD * self.schedule.n_ranks if self.device.type == "cpu" else 0
        asked = 0
        for place, task in enumerate(order):
            while asked < min(len(order), place + ahead + 1):
                if not self._ask(order[asked], asked > place):
                    break
                asked += 1
            if self.here[task.stage]:
                self.do(task)
                for boundary in self.boundaries.values():
                    boundary.let_go()
        for boundary in self.boundaries.values():
            boundary.let_go(waits=True)
        return self.found()

    def _ask(self, task: PipelineTask, is_ahead: bool) -> bool:
        """Ask for what a task makes, if another rank makes it for a stage that is here.

        Returns False where that cannot be done ahead: nothing is known of it yet.
        """
        if self.here[task.stage] or task.work is Work.BACKWARD_WEIGHTS:
            return True
        is_back = task.work is not Work.FORWARD
        boundary = self.boundaries.get(task.stage - is_back)
        taker = task.stage - 1 if is_back else task.stage + 1
        if boundary is None or not self.here[taker]:
            return True
        if is_ahead and not boundary.knows_kind:
            return False
        boundary.begin((task.microbatch, is_back))
        return True

    def bring_forward(self, stage: int, microbatch: int, made: Any) -> None:
        """Begin to bring what a stage made to the next one's mesh."""
        if stage in self.boundaries:
            self.boundaries[stage].begin((microbatch, False), made)
        else:
            super().bring_forward(stage, microbatch, made)

    def take_input(self, stage: int, microbatch: int) -> Any:
        """What the stage before made, once it is there."""
        if stage - 1 in self.boundaries:
            return self.boundaries[stage - 1].take((microbatch, False))
        return super().take_input(stage, microbatch)

    def bring_back(self, stage: int, microbatch: int, slope: Any) -> None:
        """Begin to bring the cotangent of a stage's input to where that was made."""
        if stage - 1 in self.boundaries:
            self.boundaries[stage - 1].begin((microbatch, True), slope)
        else:
            super().bring_back(stage, microbatch, slope)

    def take_cotangent(self, stage: int, microbatch: int) -> Any:
        """The cotangent of what a stage made, once it is there."""
        if stage in self.boundaries:
            return self.boundaries[stage].take((microbatch, True))
        return super().take_cotangent(stage, microbatch)


def _device_of(parameters: Sequence[Any]) -> torch.device:
    """Of the parameters' shards here."""
    given = (leaf for _, leaf in leaves(list(parameters)) if isinstance(leaf, ArrayValue))
    shards = (shard for leaf in given for shard in leaf._shards)
    return next(
        (one.device for one in shards if isinstance(one, torch.Tensor)), torch.device("cpu")
    )


# By the group of all processes: one that is made anew has other groups.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks, made once: all processes of the job come here, in one order."""
    made = _MADE.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks))
    return made[ranks]
