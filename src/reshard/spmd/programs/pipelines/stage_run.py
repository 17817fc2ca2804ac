"""One step of a pipeline: the passes of stages, and the data that moves between them.

    F of stage 0 --activation--> F of stage 1 --loss--> B of stage 1 --cotangent--> B of stage 0

A forward pass (`stage_passes.py`) stores the values that its backward pass needs until that has
run. Gradients of parameters are accumulated over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.ops.filling import full_like
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work
from reshard.spmd.programs.pipelines.stage_passes import StagePass, StagePasses
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import placed
from reshard.spmd.shards.pending_sums import without_pending


@dataclass
class PipelineRun:
    """One step: what tasks have made that later ones take, by stage and microbatch.

    `held` are passes whose backward pass has not run yet, and `origins` the original shardings of
    inputs.
    """

    stages: Sequence[StagePasses]
    schedule: PipelineSchedule
    specs: Sequence[ShardingSpec | None]
    parameters: Sequence[Any]
    microbatches: Sequence[tuple[Any, Any]]
    held: dict[tuple[int, int], StagePass] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Any] = field(default_factory=dict)
    origins: dict[tuple[int, int], ShardingSpec | None] = field(default_factory=dict)
    cotangents: dict[tuple[int, int], Any] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    gradients: dict[int, Any] = field(default_factory=dict)

    def do(self, task: PipelineTask) -> None:
        """Run one task, and bring what it made to the stage that takes it."""
        stage, microbatch = task.stage, task.microbatch
        if task.work is Work.FORWARD:
            made = self._go_forward(stage, microbatch)
            if stage < len(self.stages) - 1:
                self.bring_forward(stage, microbatch, made)
            return
        known = self.gradients.pop(stage, None) if task.work is not Work.BACKWARD_INPUT else None
        if task.work is Work.BACKWARD_WEIGHTS:
            self.gradients[stage] = self.held.pop((stage, microbatch)).find_gradients(known)
            return
        cotangent = self.take_cotangent(stage, microbatch)
        if task.work is Work.BACKWARD:
            slope, found = self.held.pop((stage, microbatch)).go_back(cotangent, known)
            self.gradients[stage] = found
        else:
            slope = self.held[stage, microbatch].go_back_to_input(cotangent)
        if stage:
            self.bring_back(stage, microbatch, slope)

    def _go_forward(self, stage: int, microbatch: int) -> Any:
        """What the stage makes of the microbatch; the last one's is kept as its loss."""
        x, targets = self.microbatches[microbatch]
        is_last = stage == len(self.stages) - 1
        if stage:
            x = self.take_input(stage, microbatch)
        given = (x, targets) if is_last else (x,)
        is_split = (stage, microbatch) in self.schedule.splits_backward
        begun = self.stages[stage].begin(self.parameters[stage], given, is_split)
        made = begun.made
        if not isinstance(made, ArrayValue) or (is_last and made.type.shape != ()):
            expected = "the loss, an array without dimensions" if is_last else "one array"
            raise UsageError(
                f"stage {stage} returned {getattr(made, 'type', type(made).__name__)}; {expected}, "
                "was expected"
            )
        self.held[stage, microbatch] = begun
        if is_last:
            self.losses.append(made)
            self.cotangents[stage, microbatch] = full_like(made, 1 / len(self.microbatches))
        return made

    def bring_forward(self, stage: int, microbatch: int, made: Any) -> None:
        """Bring what a stage made to the next one's mesh."""
        spec = self.specs[stage + 1]
        self.origins[stage + 1, microbatch] = made.type.spec
        self.inputs[stage + 1, microbatch] = made if spec is None else placed(made, spec)

    def take_input(self, stage: int, microbatch: int) -> Any:
        """What the stage before made."""
        return self.inputs.pop((stage, microbatch))

    def bring_back(self, stage: int, microbatch: int, slope: Any) -> None:
        """Bring the cotangent of a stage's input to where that was made."""
        origin = self.origins.pop((stage, microbatch))
        back = slope if origin is None else placed(slope, without_pending(origin))
        self.cotangents[stage - 1, microbatch] = back

    def take_cotangent(self, stage: int, microbatch: int) -> Any:
        """The cotangent of what a stage made."""
        return self.cotangents.pop((stage, microbatch))

    def result(self) -> tuple[Any, list[Any]]:
        """Run all tasks, in an order in which each comes after those it needs."""
        for task in self.schedule.run_order:
            self.do(task)
        return self.found()

    def found(self) -> tuple[Any, list[Any]]:
        """The mean loss, and the gradients of each stage; None for what is elsewhere."""
        total = None
        for one in self.losses:
            total = one if total is None else total + one
        loss = None if total is None else total / len(self.losses)
        stages = range(len(self.stages))
        return loss, [self.gradients.get(stage) for stage in stages]
