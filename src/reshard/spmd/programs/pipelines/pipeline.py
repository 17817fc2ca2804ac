"""Execution of pipelines: stages of a function on separate meshes, by a schedule.

    stage 0  mesh of ranks 0, 1    F0 F1 .. B0 ..           F: activations go to the next mesh
                 |      ^
    stage 1  mesh of ranks 2, 3    .. F0 B0 F1 B1           B: their gradients come back

A stage is a function of its parameters and of the output of the previous stage. Each task of the
schedule is a pass of a stage for a micro-batch: a forward pass stores what the backward pass
needs, and a backward pass computes cotangents, in a single task or in two. Passes run as programs.
Activations and gradients move between meshes by planned movements; gradients of parameters are
accumulated in the sharding of the parameters.

Costs of stages are estimated from a trace, of which each task has a part::

    F  the output of the stage              | values that later tasks read of it, and the input,
    I  the cotangent of its input           | are stored by a rank until W
    W  the gradients of the parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from reshard.errors import SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.core.array_type import settled
from reshard.spmd.gradients.transforms import vjp_in_two
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, StageCosts
from reshard.spmd.programs.pipelines.stages import PipelineRun, Stage, StagePasses
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import placed
from reshard.spmd.shards.runner import runner_for
from reshard.spmd.tracing.estimates import held_bytes
from reshard.spmd.tracing.graph_recording import type_of
from reshard.spmd.tracing.trace import trace
from reshard.topology import Topology


def _costs_of(
    function: Stage,
    parameters: Any,
    inputs: tuple[Any, ...],
    specs: Any,
    is_first: bool,
    topology: Topology,
    library: str,
) -> StageCosts:
    """Estimate the costs of a stage, except for sending.

    `inputs` are its array and the targets, `specs` the shardings of its gradients.
    """

    def run(tasks: int, parameters: Any, cotangent: Any, x: Any, *more: Any) -> Any:
        """Run the first tasks of the stage."""
        if is_first:
            output, pullback = vjp_in_two(lambda p: function(p, x, *more), parameters, None, specs)
        else:
            output, pullback = vjp_in_two(lambda p, x: function(p, x, *more), parameters, x, specs)
        values = [output]
        if tasks > 1:
            slope, rest = pullback(cotangent)
            values += [slope, rest() if tasks > 2 else None]
        return [leaf for _, leaf in leaves(values) if leaf is not None]

    (output,) = trace(function, parameters, *inputs).outputs
    cotangent = settled(output)
    # Operations are traced in order, so the lengths of the shorter traces are where tasks end.
    first, second = (
        len(trace(run, tasks, parameters, cotangent, *inputs).operations) for tasks in (1, 2)
    )
    both = trace(run, 3, parameters, cotangent, *inputs, topology=topology, library=library)
    # A parameter as the stage reads it takes neither time nor memory.
    is_same = [operation.operation.operator == "identity" for operation in both.operations]
    times = [
        0.0 if is_it else operation.seconds_s
        for operation, is_it in zip(both.operations, is_same, strict=True)
    ]
    read = {number for operation in both.graph.operations[first:] for number in operation.operands}
    stored = [
        kind
        for operation, is_it in zip(both.operations[:first], is_same, strict=False)
        if not is_it
        for number, kind in zip(operation.operation.results, operation.results, strict=True)
        if number in read
    ]
    # The first stage's array is the caller's; that of another lies here for its sake.
    array = None if is_first else type_of(inputs[0])
    return StageCosts(
        sum(times[:first]),
        sum(times[first:second]),
        sum(times[second:]),
        activation_bytes=max(held_bytes([array, *stored], both.ranks)),
    )


@dataclass(frozen=True)
class Pipeline:
    """Compute the mean loss of micro-batches and its gradients, stage by stage, by a schedule.

    Called with the parameters of each stage and the micro-batches, it returns the mean of their
    losses and the gradients of that mean, in the structure of the parameters. Stages are traced as
    by `sp.jit`, once per kind of arrays. A data-dependent stage runs eagerly.

    Over processes, all processes call it. Each passes the arrays of the stages whose meshes it is
    in (None for other stages), over the group of that mesh's ranks, `sp.over_processes(group)`. The
    loss is None except on the ranks of the last stage, the gradients of other stages are None, and
    all stages need a spec.

    Args:
        stages: functions of parameters and an array, which return an array. The last stage also
            takes the targets of the micro-batch, and returns its loss, a zero-dimensional array.
        schedule: a schedule with the same number of stages.
        specs: the sharding in which each stage takes its array. That of the first stage is the
            sharding of the micro-batches, which are not moved, and may be None. Each mesh must be
            that of the stage's parameters.
        gradient_specs: for each stage, shardings of its gradients, in the structure of its
            parameters: sharded over data parallel ranks, for instance, as in ZeRO 2. The gradients
            of each micro-batch are reduced to them before those of the next are computed. The
            shardings of the parameters if None, for all stages or for a single stage.

    Raises:
        UsageError: stages that are not functions, or not as many as the schedule has.
        SpecError: a wrong number of specs, or invalid shardings.

    >>> import reshard, reshard.spmd as sp
    >>> meshes = [reshard.DeviceMesh.of(tp=2), reshard.DeviceMesh.of(tp=2, devices=(2, 3))]
    >>> rows = [reshard.spec(mesh, "tp, -") for mesh in meshes]
    >>> pipeline = sp.Pipeline(
    ...     [lambda w, x: x * w, lambda w, x, y: sp.mean((x * w - y) ** 2)],
    ...     sp.pipeline_schedule("1f1b", n_ranks=2, n_microbatches=2),
    ...     rows,
    ... )
    >>> weights = [sp.array(2.0), sp.array(3.0)]
    >>> batch = [(sp.ones((2, 2), spec=rows[0]), sp.ones((2, 2), spec=rows[1]))] * 2
    >>> value, gradients = pipeline(weights, batch)
    >>> float(value), [float(slope) for slope in gradients]
    (25.0, [30.0, 20.0])
    """

    stages: Sequence[Stage]
    schedule: PipelineSchedule
    specs: Sequence[ShardingSpec | None]
    gradient_specs: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not all(map(callable, self.stages)):
            raise UsageError(
                f"stages={list(self.stages)!r}; functions of parameters and an array were expected"
            )
        if len(self.stages) != self.schedule.n_stages:
            raise UsageError(
                f"{len(self.stages)} stages for a schedule of {self.schedule.n_stages}; join or "
                "cut them, or make a schedule for as many"
            )
        if self.gradient_specs is not None and len(self.gradient_specs) != len(self.stages):
            raise SpecError(
                f"gradient_specs of {len(self.gradient_specs)} stages for {len(self.stages)}; give "
                "a tree of shardings for each, or None"
            )
        fits = len(self.specs) == len(self.stages) and all(
            isinstance(spec, ShardingSpec) for spec in self.specs[1:]
        )
        if not fits:
            raise SpecError(
                f"specs={list(self.specs)!r} for {len(self.stages)} stages; give the sharding in "
                "which each takes its array, None at most for the first"
            )

    @cached_property
    def _passes(self) -> list[StagePasses]:
        return [
            StagePasses(function, stage > 0, specs)
            for stage, (function, specs) in enumerate(zip(self.stages, self._ends, strict=True))
        ]

    @property
    def _ends(self) -> Sequence[Any]:
        """The shardings of each stage's gradients, None for those of its parameters."""
        return [None] * len(self.stages) if self.gradient_specs is None else self.gradient_specs

    def __call__(
        self, parameters: Sequence[Any], microbatches: Sequence[tuple[Any, Any]]
    ) -> tuple[Any, list[Any]]:
        """Return the mean loss, and its gradients by each stage's parameters.

        Args:
            parameters: a tree of arrays for each stage.
            microbatches: pairs of what the first stage takes and the last stage's targets.

        Raises:
            UsageError: other numbers of parameters or microbatches than the schedule has, a loss
                that is not a real number, or an error of `sp.vjp`; over processes microbatches of
                different shapes, or a stage's array that is not over its mesh.
            SpecError: over processes, a first stage without a sharding.
            RunError: over processes, a neighbouring stage that failed.
        """
        self._check_parameters(parameters)
        if len(microbatches) != self.schedule.n_microbatches:
            raise UsageError(
                f"{len(microbatches)} microbatches for a schedule of "
                f"{self.schedule.n_microbatches}; cut the batch otherwise"
            )
        for number, microbatch in enumerate(microbatches):
            if not isinstance(microbatch, list | tuple) or len(microbatch) != 2:
                raise UsageError(
                    f"microbatch {number} of {type(microbatch).__name__}; a pair of what the first "
                    "stage takes and the last stage's targets was expected"
                )
        arrays = (leaf for _, leaf in leaves(list(parameters)) if isinstance(leaf, ArrayValue))
        keeper = next((leaf.runner for leaf in arrays), runner_for())
        boundaries = None
        if not keeper.has_every_shard:
            from reshard.spmd.programs.pipelines.boundaries import Boundaries

            boundaries = Boundaries(
                self.schedule, self.specs, parameters, len(microbatches), keeper
            )
        passes, schedule, specs = self._passes, self.schedule, self.specs
        run = PipelineRun(passes, schedule, specs, parameters, microbatches, boundaries)
        return run.result()

    def costs(
        self,
        parameters: Sequence[Any],
        microbatch: tuple[Any, Any],
        topology: Topology,
        library: str = "nccl",
    ) -> tuple[StageCosts, ...]:
        """Estimate the costs of each stage for a micro-batch, in seconds, without running it.

        `sp.Timetable(pipeline.schedule, pipeline.costs(...))` has the bubble, and the memory of
        ranks. A stage stores the parts of its input and its intermediate values that its backward
        pass reads.

        Args:
            parameters: a tree for each stage, of arrays or of results of `sp.abstract`.
            microbatch: the input of the first stage and the targets of the last, in the same form.
            topology: of the ranks of all meshes, which describes their devices.
            library: whose collectives are assumed, a key of `reshard.cost.LIBRARIES`.

        Raises:
            UsageError: a topology that does not describe devices, or an error of `sp.trace` or
                `sp.vjp`.

        >>> import reshard, reshard.cost, reshard.spmd as sp
        >>> meshes = [reshard.DeviceMesh.of(tp=2), reshard.DeviceMesh.of(tp=2, devices=(2, 3))]
        >>> specs = [reshard.spec(mesh, "-, -") for mesh in meshes]
        >>> weights = [sp.abstract((64, 64), "float32", spec) for spec in specs]
        >>> pipeline = sp.Pipeline(
        ...     [lambda w, x: sp.tanh(x @ w), lambda w, x, y: sp.mean((x @ w - y) ** 2)],
        ...     sp.pipeline_schedule("1f1b", n_ranks=2, n_microbatches=2),
        ...     specs,
        ... )
        >>> x, y = (sp.abstract((32, 64), "float32", spec) for spec in specs)
        >>> topology = reshard.cost.load_preset("h100-8").topology()
        >>> [int(cost.activation_bytes) for cost in pipeline.costs(weights, (x, y), topology)]
        [8192, 16384]
        """
        self._check_parameters(parameters)
        if topology.device is None:
            raise UsageError(
                "a topology without a device: computing has no times; give one that knows of its "
                "devices, such as reshard.cost.load_preset('h100-8').topology()"
            )
        x, targets = microbatch
        stage_costs = []
        for number, (function, stage_parameters) in enumerate(
            zip(self.stages, parameters, strict=True)
        ):
            is_last = number == len(self.stages) - 1
            inputs = (x, targets) if is_last else (x,)
            ends = self._ends[number]
            cost = _costs_of(
                function, stage_parameters, inputs, ends, number == 0, topology, library
            )
            if not is_last:
                (output,) = trace(function, stage_parameters, x).outputs
                spec = self.specs[number + 1]
                x = output if spec is None else output.with_spec(spec)
                send_s = trace(placed, output, x.spec, topology=topology, library=library).seconds_s
                cost = replace(cost, send=send_s or 0.0)
            stage_costs.append(cost)
        return tuple(stage_costs)

    def _check_parameters(self, parameters: Sequence[Any]) -> None:
        if len(parameters) != len(self.stages):
            raise UsageError(
                f"parameters of {len(parameters)} stages for {len(self.stages)}; give a tree for "
                "each, an empty list for none"
            )
