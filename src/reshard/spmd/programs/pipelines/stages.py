"""Stages of a pipeline: their forward and backward passes, and a step of all stages.

    F     made = begin(parameters, x)           values for the backward pass are stored
    B     slope, gradients = go_back(...)       both tasks below together
    I     slope = go_back_to_input(...)
    W     gradients = find_gradients(...)       added to those of other microbatches

A stage's function and its backward pass are recorded as a graph, which is split into a graph for
each pass::

    forward     %4 = matmul(%3, %1)         the output of the stage
                ----------------------
    back        %7 = matmul(%6, %5)         from its cotangent to that of the stage's input
                ----------------------
    weights     %9 = tensordot(%3, %6)      gradients of the parameters

A pass runs as a program, traced at the first microbatch of a kind. It runs operation by operation
if a recorder listens, such as a trace of the pipeline, or if the stage reads elements. A stored
value is freed after the last pass that reads it. Gradients of parameters are accumulated over
microbatches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.core.array_type import settled, without_partial
from reshard.spmd.core.operator import operator_of
from reshard.spmd.gradients.transforms import vjp, vjp_in_two
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.ops.filling import full_like
from reshard.spmd.programs.jit import read_kind
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work
from reshard.spmd.programs.program import Program
from reshard.spmd.programs.simplification import simplify
from reshard.spmd.programs.traced_function import as_abstract
from reshard.spmd.propagation.strategies import assign_shardings
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import placed, recorders, unrecorded
from reshard.spmd.shards.runner import Runner, runner_for
from reshard.spmd.tracing.graph_recording import GraphRecorder, filled_in_order, record

if TYPE_CHECKING:
    # With PyTorch, which pipelines of a single process do without.
    from reshard.spmd.programs.pipelines.boundaries import Boundaries, StageBoundary

Back = Callable[[Any], tuple[Any, Callable[[], Any]]]
"""From a cotangent to that of the stage's array, and what gives the gradients then."""

Differentiated = Callable[..., tuple[Any, Back]]
"""From a stage's parameters, its array and maybe targets to its output, and the backward pass."""


class RecordedStage:
    """The graph of a stage and its backward pass for arguments of a kind, and its programs.

    Args:
        whole: the graph of both.
        runner: that of the stage's arrays.
        passes: the graphs of the passes, in order. They number their values as the whole does;
            inputs are values of passes before, outputs are read by later ones.
        cotangent: the input of the backward pass.

    Attributes:
        made: the output of the stage.
        slope: the cotangent of the stage's array; None for the first stage.
        gradients: those of the parameters, as a tree of values.
        kept: for each pass, the values that later passes read or return.
    """

    def __init__(
        self,
        whole: Graph,
        runner: Runner,
        passes: tuple[Graph, ...],
        cotangent: int,
    ) -> None:
        self.whole, self.runner, self.passes = whole, runner, passes
        output, slope, self.gradients = whole.returned
        self.made: int = output.index
        self.slope: int | None = None if slope is None else slope.index
        self.cotangent = cotangent
        self.kept = [self._find_kept(place) for place in range(len(passes))]
        self._programs: dict[tuple[int, bool], tuple[Program, list[int]]] = {}

    @property
    def arguments(self) -> list[int]:
        """The inputs that the stage is given, in their order."""
        return [number for number in self.whole.arguments if number != self.cotangent]

    @property
    def returned(self) -> tuple[int | None, ...]:
        """The value that each pass returns in addition to gradients; it may be an argument."""
        return self.made, self.slope, None

    @property
    def gradient_numbers(self) -> list[int]:
        """The values of the gradients, in the order of the parameters."""
        return _numbers(self.gradients)

    def _find_kept(self, place: int) -> set[int]:
        later = range(place + 1, len(self.passes))
        read = {number for n in later for number in self.passes[n].inputs}
        return read | {number for n in later if (number := self.returned[n]) is not None}

    def graph_of(self, part: Graph, accumulates: bool) -> Graph:
        """Return the graph of a pass, from what it reads to what it makes and the gradients.

        If it `accumulates`, it takes earlier gradients as well and returns the sums. Only the last
        pass returns gradients.
        """
        values, operations, inputs = list(part.values), list(part.operations), list(part.inputs)
        returned = self.gradient_numbers if part is self.passes[-1] else []
        if accumulates:
            for place, number in enumerate(returned):
                before, total = len(values), len(values) + 1
                values += [replace(values[number], index=n) for n in (before, total)]
                shape = values[number].shape
                rule = operator_of("add").rule([shape, shape])
                add = Operation("add", (before, number), (total,), rule)
                # As soon as the gradient is computed, so that it is freed early.
                ready = [
                    n + 1 for n, operation in enumerate(operations) if number in operation.results
                ]
                operations.insert(max(ready, default=0), add)
                inputs.append(before)
                returned[place] = total
        read = {number for operation in operations for number in operation.operands}
        constants = {n: x for n, x in self.whole.constants.items() if n in read}
        inputs += constants
        outputs = (*part.outputs, *returned)
        return Graph(
            tuple(values),
            tuple(inputs),
            tuple(operations),
            outputs,
            tuple(f"%{number}" for number in inputs),
            MappingProxyType(constants),
            [values[number] for number in outputs],
            self.whole.library,
            is_checked=True,
        )

    def program(self, place: int, accumulates: bool) -> tuple[Program, list[int]]:
        """Return the program of a pass, and the places of its arguments that are donated.

        If it `accumulates`, it adds its gradients to earlier ones.
        """
        cached = self._programs.get((place, accumulates))
        if cached is None:
            part = self.passes[place]
            # Values of other passes and of the caller are kept: passes get objects of their own.
            passed = {number for other in self.passes for number in other.outputs} | {
                self.cotangent
            }
            passed -= {*self.kept[place], self.returned[place]}
            donated = [n for n, number in enumerate(part.inputs) if number in passed]
            if accumulates:
                count = len(self.gradient_numbers)
                donated += range(len(part.inputs), len(part.inputs) + count)
            graph = assign_shardings(simplify(self.graph_of(part, accumulates)), "eager")
            cached = self._programs[place, accumulates] = Program(graph), donated
        return cached


def record_stage(
    function: Differentiated, parameters: Any, inputs: Sequence[Any], is_split: bool, runner: Runner
) -> RecordedStage:
    """Record a stage for its parameters, its array and, for the last stage, targets.

    Its backward pass is a single graph, or two if it `is_split`.

    Raises what the function raises, and UsageError for a function that reads elements, or that
    returns an array that it was given.
    """
    ends: list[int] = []
    cotangents: list[int] = []
    graph_recorders: list[GraphRecorder] = []

    def run(parameters: Any, *inputs: Any) -> Any:
        recorder = next(
            recorder for recorder in recorders.active if isinstance(recorder, GraphRecorder)
        )
        graph_recorders.append(recorder)
        output, back = function(parameters, *inputs)
        if not isinstance(output, ArrayValue):
            raise UsageError(f"a stage returned a {type(output).__name__}; one array was expected")
        ends.append(len(recorder.operations))
        kind = settled(output.type)
        cotangent = as_abstract(recorder.runner, kind)
        cotangents.append(recorder.input(cotangent, kind, "cotangent").index)
        slope, rest = back(cotangent)
        if is_split:
            ends.append(len(recorder.operations))
        return output, slope, rest()

    with unrecorded():
        whole = record(run, [parameters, *inputs], has_others=True)
    output, slope, gradients = whole.returned
    returned = [_numbers(output), _numbers(slope), []][: len(ends) + 1]
    returned_numbers = {number for tree in whole.returned for number in _numbers(tree)}
    if not returned_numbers.isdisjoint(whole.constants):
        raise UsageError("a stage returned an array that it was not given")
    specs = [None if kind is None else kind.spec for kind in graph_recorders[0].types]
    passes = _split(whole.with_shardings(specs), ends, returned, _numbers(gradients))
    return RecordedStage(whole, runner, passes, cotangents[0])


def _numbers(tree: Any) -> list[int]:
    return [leaf.index for _, leaf in leaves([tree]) if isinstance(leaf, Value)]


def _split(
    whole: Graph,
    ends: Sequence[int],
    returned: Sequence[Sequence[int]],
    gradients: Sequence[int],
) -> tuple[Graph, ...]:
    """Split a graph into passes that end after given numbers of operations.

    Each pass returns some values, and the last pass the gradients, too.
    """
    pass_operations: list[list[Operation]] = [[] for _ in returned]
    needed = {number for some in (*returned, gradients) for number in some}
    for place, operation in reversed(list(enumerate(whole.operations))):
        if needed.intersection(operation.results):
            needed.update(operation.operands)
            # An end is a count of operations: the operation at that place is the next pass's first.
            pass_operations[bisect_right(ends, place)].insert(0, operation)
    passes: list[Graph] = []
    after: set[int] = set()
    ending = {*gradients}
    for operations, some in zip(reversed(pass_operations), reversed(returned), strict=True):
        computed = {number for operation in operations for number in operation.results}
        read = {number for operation in operations for number in operation.operands}
        reads = (read | ending | {*some}) - computed - whole.constants.keys()
        makes = tuple(sorted(computed & (after | {*some})))
        part = Graph(whole.values, tuple(sorted(reads)), tuple(operations), makes, is_checked=True)
        passes.insert(0, part)
        after |= {*reads, *some}
        ending = set()
    return tuple(passes)


class ProgramPass:
    """The result of a forward pass by a program, and its backward pass, which runs once."""

    def __init__(self, stage: RecordedStage, arrays: Sequence[Any]) -> None:
        self._stage = stage
        self._values = dict(zip(self._stage.arguments, arrays, strict=True))
        self._run(0)
        self.made = self._take(0, self._stage.made)

    def go_back(self, cotangent: Any, accumulated: Any) -> tuple[Any, Any]:
        """Return the cotangent of the stage's array, and the gradients `accumulated` so far."""
        self._enter(cotangent)
        gradients = self._run(1, accumulated)
        return self._slope(), self._in_places(gradients)

    def go_back_to_input(self, cotangent: Any) -> Any:
        """Return the cotangent of the stage's array; None for the first stage's."""
        self._enter(cotangent)
        self._run(1)
        return self._slope()

    def find_gradients(self, accumulated: Any) -> Any:
        """Return the gradients `accumulated` so far, after `go_back_to_input`."""
        return self._in_places(self._run(2, accumulated))

    def _enter(self, cotangent: Any) -> None:
        # Taken by the next stage by now; this pass would keep it in memory.
        self.made = None
        self._values[self._stage.cotangent] = _another(cotangent)

    def _slope(self) -> Any:
        number = self._stage.slope
        return None if number is None else self._take(1, number)

    def _take(self, place: int, number: int) -> Any:
        """Return a value for others."""
        is_kept = number in self._stage.kept[place]
        return _another(self._values[number]) if is_kept else self._values.pop(number)

    def _in_places(self, gradients: Sequence[Any]) -> Any:
        return filled_in_order([self._stage.gradients], gradients)[0]

    def _run(self, place: int, accumulated: Any = None) -> Sequence[Any]:
        """Return the gradients, of the last pass; of others nothing."""
        part, values = self._stage.passes[place], self._values
        program, donated = self._stage.program(place, accumulated is not None)
        arguments = [values[number] for number in part.inputs]
        arguments += [_another(leaf) for _, leaf in leaves([accumulated]) if leaf is not None]
        # A returned value may be an argument.
        # Before the program runs, so that nothing else keeps what it frees.
        for number in values.keys() - self._stage.kept[place] - {self._stage.returned[place]}:
            del values[number]
        outputs = program.run(arguments, self._stage.runner, donated)
        # Gradients follow the outputs.
        values.update(zip(part.outputs, outputs, strict=False))
        gradients: Sequence[Any] = outputs[len(part.outputs) :]
        return gradients


def _another(x: Any) -> Any:
    """Return the same array as another object, which can be donated alone."""
    if not isinstance(x, ShardedArray):
        return x
    make = ShardedArray.given if x.is_given else ShardedArray.of_shards
    return make(x.type, x._shards, x.runner)


Stage = Callable[..., Any]


class StagePasses:
    """The passes of a stage.

    Args:
        function: of the stage's parameters, its array, and maybe targets.
        has_gradient: whether the cotangent of its array is asked for: not of the first stage.
        specs: shardings for the gradients, in the places of the parameters; their own when None.
    """

    def __init__(self, function: Stage, has_gradient: bool, specs: Any = None) -> None:
        self._function, self._has_gradient, self._specs = function, has_gradient, specs
        # None if a stage cannot be traced.
        self._programs: dict[Any, RecordedStage | None] = {}
        self._lock = RLock()

    def begin(
        self, parameters: Any, inputs: Sequence[Any], is_split: bool
    ) -> ProgramPass | _EagerPass:
        """Return a forward pass.

        Args:
            parameters: the stage's parameters.
            inputs: its array, and the targets if it takes them.
            is_split: whether the backward pass is two tasks.

        Raises what the function does.
        """
        arrays: list[Any] = []
        stage = (
            None if recorders.active else self._find_programs(parameters, inputs, is_split, arrays)
        )
        if stage is None:
            return _EagerPass(*self._differentiate(is_split)(parameters, *inputs))
        return ProgramPass(stage, arrays)

    def _find_programs(
        self, parameters: Any, inputs: Sequence[Any], is_split: bool, arrays: list[Any]
    ) -> RecordedStage | None:
        """Return the stage recorded for arguments of a kind, and append the arrays among them."""
        key: list[Any] = [is_split]
        try:
            read_kind([parameters, *inputs], key, arrays)
        # anchor
        except ReshardError:
            return None
        runners = [array.runner for array in arrays if isinstance(array, ShardedArray)]
        if any(runner.is_abstract for runner in runners):
            return None
        runner = runners[0] if runners else runner_for(*arrays[:1])
        program_key = (*key, runner)
        with self._lock:
            if program_key not in self._programs:
                try:
                    function = self._differentiate(is_split)
                    self._programs[program_key] = record_stage(
                        function, parameters, inputs, is_split, runner
                    )
                except ReshardError:
                    # An error of the function is raised again operation by operation.
                    self._programs[program_key] = None
            return self._programs[program_key]

    def _differentiate(self, is_split: bool) -> Differentiated:
        """Return the stage with its backward pass, as a function of its parameters and inputs."""
        function, specs = self._function, self._specs

        def differentiated(parameters: Any, x: Any, *more: Any) -> tuple[Any, Back]:
            # Tokens have no gradients, and nobody asks for those of others.
            if is_split and self._has_gradient:
                return vjp_in_two(lambda p, x: function(p, x, *more), parameters, x, specs)
            if is_split:
                return vjp_in_two(lambda p: function(p, x, *more), parameters, None, specs)
            if self._has_gradient:
                output, pullback = vjp(lambda p, x: function(p, x, *more), parameters, x)
            else:
                output, pullback = vjp(lambda p: function(p, x, *more), parameters)
            gradient_specs = None if specs is None else (specs, None)[: 1 + self._has_gradient]

            def back(cotangent: Any) -> tuple[Any, Callable[[], Any]]:
                gradients, *slopes = pullback(cotangent, specs=gradient_specs)
                return (slopes[0] if slopes else None), lambda: gradients

            return output, back

        return differentiated


@dataclass
class _EagerPass:
    """A forward pass and its backward pass, executed operation by operation."""

    made: Any
    _back: Back
    _rest: Callable[[], Any] = lambda: None

    def go_back(self, cotangent: Any, accumulated: Any) -> tuple[Any, Any]:
        return self.go_back_to_input(cotangent), self.find_gradients(accumulated)

    def go_back_to_input(self, cotangent: Any) -> Any:
        slope, self._rest = self._back(cotangent)
        return slope

    def find_gradients(self, accumulated: Any) -> Any:
        gradients = self._rest()
        if accumulated is None:
            return gradients
        before = iter([leaf for _, leaf in leaves([accumulated])])
        return replaced([gradients], lambda leaf: _sum(next(before), leaf))[0]


def _sum(left: Any, right: Any) -> Any:
    return right if left is None else left if right is None else left + right


@dataclass
class PipelineRun:
    """One step: the results of tasks that later tasks take, by stage and microbatch.

    Args:
        stages: the passes of each stage.
        schedule: the tasks.
        specs: the sharding in which each stage takes its array.
        parameters: of each stage; None for a stage of other processes.
        microbatches: pairs of what the first stage takes and the last stage's targets.
        boundaries: to stages of other processes; None in a single process.

    Attributes:
        held: passes whose backward pass is still to run.
        origins: the shardings in which previous stages made the inputs.
    """

    stages: Sequence[StagePasses]
    schedule: PipelineSchedule
    specs: Sequence[ShardingSpec | None]
    parameters: Sequence[Any]
    microbatches: Sequence[tuple[Any, Any]]
    boundaries: Boundaries | None = None
    held: dict[tuple[int, int], ProgramPass | _EagerPass] = field(init=False, default_factory=dict)
    inputs: dict[tuple[int, int], Any] = field(init=False, default_factory=dict)
    origins: dict[tuple[int, int], ShardingSpec | None] = field(init=False, default_factory=dict)
    cotangents: dict[tuple[int, int], Any] = field(init=False, default_factory=dict)
    losses: list[Any] = field(init=False, default_factory=list)
    gradients: dict[int, Any] = field(init=False, default_factory=dict)

    def result(self) -> tuple[Any, list[Any]]:
        """Run the tasks that are here, in an order in which each comes after those it needs.

        Returns the mean loss, and the gradients of each stage; None for those of other processes.
        """
        order, boundaries = self.schedule.run_order, self.boundaries
        if boundaries is None:
            for task in order:
                self.do(task)
        else:
            with boundaries.step(order) as own_tasks:
                for task in own_tasks:
                    self.do(task)
        total = None
        for loss in self.losses:
            total = loss if total is None else total + loss
        mean = None if total is None else total / len(self.losses)
        return mean, [self.gradients.get(stage) for stage in range(len(self.stages))]

    def do(self, task: PipelineTask) -> None:
        """Run a task, and move its result to the stage that takes it."""
        stage, microbatch = task.stage, task.microbatch
        if task.work is Work.FORWARD:
            output = self._go_forward(stage, microbatch)
            if stage < len(self.stages) - 1:
                self._bring_forward(stage, microbatch, output)
            return
        accumulated = (
            # Removed, so that the pass can reuse its memory for the sum.
            self.gradients.pop(stage, None) if task.work is not Work.BACKWARD_INPUT else None
        )
        if task.work is Work.BACKWARD_WEIGHTS:
            self.gradients[stage] = self.held.pop((stage, microbatch)).find_gradients(accumulated)
            return
        after = self._boundary(stage)
        if after is None:
            cotangent = self.cotangents.pop((stage, microbatch))
        else:
            cotangent = after.take((microbatch, True))
        if task.work is Work.BACKWARD:
            slope, gradients = self.held.pop((stage, microbatch)).go_back(cotangent, accumulated)
            self.gradients[stage] = gradients
        else:
            slope = self.held[stage, microbatch].go_back_to_input(cotangent)
        if stage:
            self._bring_back(stage, microbatch, slope)

    def _boundary(self, stage: int) -> StageBoundary | None:
        """Return the boundary between a stage and the next, if that is on other processes."""
        return None if self.boundaries is None else self.boundaries.by_stage.get(stage)

    def _go_forward(self, stage: int, microbatch: int) -> Any:
        """Run a forward pass and return its output; that of the last stage is a loss."""
        x, targets = self.microbatches[microbatch]
        is_last = stage == len(self.stages) - 1
        if stage:
            before = self._boundary(stage - 1)
            if before is None:
                x = self.inputs.pop((stage, microbatch))
            else:
                x = before.take((microbatch, False))
        inputs = (x, targets) if is_last else (x,)
        is_split = (stage, microbatch) in self.schedule.splits_backward
        begun = self.stages[stage].begin(self.parameters[stage], inputs, is_split)
        output = begun.made
        if not isinstance(output, ArrayValue) or (is_last and output.type.shape != ()):
            expected = "the loss, an array without dimensions" if is_last else "one array"
            raise UsageError(
                f"stage {stage} returned {getattr(output, 'type', type(output).__name__)}; "
                f"{expected}, was expected"
            )
        self.held[stage, microbatch] = begun
        if is_last:
            self.losses.append(output)
            # The loss of a step is the mean, so each microbatch has this share of its gradient.
            self.cotangents[stage, microbatch] = full_like(output, 1 / len(self.microbatches))
        return output

    def _bring_forward(self, stage: int, microbatch: int, output: Any) -> None:
        """Move the output of a stage to the mesh of the next."""
        after = self._boundary(stage)
        if after is not None:
            after.begin((microbatch, False), output)
            return
        spec = self.specs[stage + 1]
        self.origins[stage + 1, microbatch] = output.type.spec
        self.inputs[stage + 1, microbatch] = output if spec is None else placed(output, spec)

    def _bring_back(self, stage: int, microbatch: int, slope: Any) -> None:
        """Move the cotangent of a stage's input to where the previous stage made that."""
        before = self._boundary(stage - 1)
        if before is not None:
            before.begin((microbatch, True), slope)
            return
        origin = self.origins.pop((stage, microbatch))
        back = slope if origin is None else placed(slope, without_partial(origin))
        self.cotangents[stage - 1, microbatch] = back
