"""Steps of pipelines over processes: each runs the tasks of the stages that it has.

What a stage makes goes to the ranks of the next by a redistribution of the ranks of both, which
all of them join at the task's place in the schedule's `run_order`. The order is the same for all,
so no two wait for each other; who sends waits until who receives has come to that place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.sharding_text import spec
from reshard.spmd.arrays.sharded_array import from_shards
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule
from reshard.spmd.programs.pipelines.stage_run import PipelineRun, Stage
from reshard.spmd.shards.pending_sums import without_pending
from reshard.spmd.shards.runner import Runner
from reshard.torch.exchange.agreement import share
from reshard.torch.exchange.groups import rank_group
from reshard.torch.redistribution import redistribute


def run_over_processes(
    stages: Sequence[Stage],
    schedule: PipelineSchedule,
    specs: Sequence[ShardingSpec | None],
    parameters: Sequence[Any],
    microbatches: Sequence[tuple[Any, Any]],
    keeper: Runner,
) -> tuple[Any, list[Any]]:
    """One step of a pipeline whose stages are in several processes, all of which call this.

    Args:
        stages: functions, as `Pipeline` takes them.
        schedule: the same on all processes.
        specs: of each stage.
        parameters: of the stages that are here; None for others.
        microbatches: pairs, of which only the first and the last stage's processes read a part.
        keeper: the runner of this process's arrays, over the group of its stage's ranks.

    Returns:
        The mean loss, None but on the last stage's ranks, and the gradients of the stages here.

    Raises as `Pipeline`, and RunError on processes that wait for one that failed.
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
    """One process's part of a step. `groups` are those of the ranks of two stages, by the first."""

    def prepare(self, keeper: Runner) -> None:
        """Find the stages that are here, and the groups with those beside them."""
        self.rank, self.keeper = dist.get_rank(), keeper
        self.taken = [one for one in self.specs if one is not None]
        if len(self.taken) < len(self.stages):
            raise SpecError(
                "a pipeline over processes whose first stage has no sharding; give one, whose mesh "
                "is where the stage is"
            )
        self.meshes = [one.mesh for one in self.taken]
        self.kinds: dict[int, tuple[tuple[int, ...], ShardingSpec]] = {}
        self.groups: dict[int, dist.ProcessGroup] = {}
        for stage, (one, other) in enumerate(zip(self.meshes, self.meshes[1:], strict=False)):
            ranks = tuple(sorted({*one.devices, *other.devices}))
            group = None if one is other else _group_of(ranks)
            if group is not None and self.rank in ranks:
                self.groups[stage] = group
        # Known before anything can fail: what is broken is met anew.
        self.among = [rank_group(group) for group in self.groups.values()]

    def is_here(self, stage: int) -> bool:
        """Whether this process has a part of a stage."""
        return self.rank in self.meshes[stage].devices

    def bring_forward(self, stage: int, microbatch: int, made: Any) -> None:
        """Bring what a stage made to the next one's mesh."""
        group = self.groups.get(stage)
        if group is None:
            if self.is_here(stage):
                super().bring_forward(stage, microbatch, made)
            return
        if stage not in self.kinds:
            self.kinds[stage] = self._tell_kind(stage, made, group)
        shape, origin = self.kinds[stage]
        if made is not None and (made.type.shape, made.type.spec) != self.kinds[stage]:
            raise UsageError(
                f"stage {stage} returned {made.type} for microbatch {microbatch}, and shape "
                f"{shape}, {origin} before; cut the batch into equal microbatches"
            )
        found = self._move(made, origin, self.taken[stage + 1], shape, group)
        if found is not None:
            self.inputs[stage + 1, microbatch] = found

    def bring_back(self, stage: int, microbatch: int, slope: Any) -> None:
        """Bring the cotangent of a stage's input to where that was made."""
        group = self.groups.get(stage - 1)
        if group is None:
            if self.is_here(stage):
                super().bring_back(stage, microbatch, slope)
            return
        shape, origin = self.kinds[stage - 1]
        target = without_pending(origin)
        found = self._move(slope, self.taken[stage], target, shape, group)
        if found is not None:
            self.cotangents[stage - 1, microbatch] = found

    def _tell_kind(
        self, stage: int, made: Any, group: dist.ProcessGroup
    ) -> tuple[tuple[int, ...], ShardingSpec]:
        """The shape and sharding of what a stage makes, which the next one's ranks learn."""
        mesh = self.meshes[stage]
        own = None if made is None else made.type.spec
        if made is not None and (own is None or own.mesh is not mesh):
            raise UsageError(
                f"stage {stage} returned {made.type}, which is not over its mesh {mesh!r}; shard "
                "it there"
            )
        told = None if own is None else (tuple(made.type.shape), str(own))
        shape, text = share(told, mesh.devices[0], group)
        return shape, spec(mesh, text)

    def _move(
        self,
        array: Any,
        source: ShardingSpec,
        target: ShardingSpec,
        shape: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> Any:
        """An array on another mesh; None on the ranks that sent it."""
        own = None
        if array is not None:
            array = array if array.type.spec is source else array.shard(source)
            (shard,) = array.shards.values()
            own = torch.as_tensor(shard).contiguous()
        given: dict[str, Any] = {} if own is None else {"source": source, "shape": shape}
        found = redistribute(own, target, group=group, method="exchange", **given)
        if self.rank not in target.mesh.devices:
            return None
        return from_shards({self.rank: found}, shape, target, runner=self.keeper)


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
