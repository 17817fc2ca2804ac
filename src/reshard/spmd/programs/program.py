"""Programs: a graph compiled into calls of local kernels and movements of shards.

The first run interprets the graph, which shows its reshards and the compiled calls of its
operations (`reshard_insertion`). Later runs execute these as steps, on registers of shards:

    r3 = move(r0)               a value is moved to a sharding once
    r4 = kernel(r3, r1)         on each local rank
    free r3, r0                 after the last step that reads them

Later runs look nothing up and apply no rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import RLock
from typing import Any

from reshard.errors import ReshardError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import Body, Graph
from reshard.spmd.ops.elementwise import writing
from reshard.spmd.programs.reshard_insertion import ReshardInsertion
from reshard.spmd.programs.steps import (
    Action,
    ProgramStep,
    Registers,
    Run,
    find_reused,
    overlapped_order,
)
from reshard.spmd.shards.array_value import ArrayValue, may_view
from reshard.spmd.shards.error_translation import REFUSALS, refuse
from reshard.spmd.shards.operation_call import CompiledCall, compute, recorders
from reshard.spmd.shards.partial_sums import are_finite
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Shards
from reshard.spmd.tracing.estimates import held_bytes
from reshard.spmd.tracing.graph_recording import filled
from reshard.spmd.tracing.trace import Observe, interpret

RunAndFrees = tuple[Run, tuple[int, ...]]
ChangeRuns = Callable[
    [Sequence[Action], Sequence[ProgramStep], dict[int, Any], Sequence[RunAndFrees]],
    Iterable[RunAndFrees],
]


class UnforeseenElementsError(ReshardError):
    """Elements for which a prepared program is not right: an infinite factor of contributions."""


def make_steps(
    inserted: ReshardInsertion, runner: Runner
) -> tuple[list[ProgramStep], dict[int, Any]]:
    """Compile the operations of a graph with reshards into steps for a runner.

    The register of a value is its number. Numbers that operators take have registers after those
    of the values; they are returned as well, by register.
    """
    graph = inserted.graph
    first = len(graph.values)
    steps: list[ProgramStep] = []
    constants: dict[int, Any] = {}
    registers: dict[tuple[str, int], int] = {}

    def enter(value: Any, count: int) -> int:
        """Return the register of a number, as the operand of so many ranks."""
        # By text: 1, 1.0 and True are equal as keys.
        register = registers.setdefault((repr(value), count), first + len(registers))
        # A number for each rank, like the shards of an array.
        constants[register] = (value,) * count
        return register

    for operation, called, types, place in zip(
        graph.operations, inserted.calls, inserted.operands, inserted.places, strict=True
    ):
        reads, makes = operation.operands, operation.results
        if operation.target is not None:
            step = _make_move(types[0], operation.target, reads[0], makes[0], runner, place)
        elif operation.body is not None:
            run = _make_body(operation.body, reads, types, makes, runner)
            step = ProgramStep(run, reads, makes, "together", place)
        elif called is not None:
            if called.looks_at_elements:
                steps.append(_make_check(called, types, reads, runner, place))
            count = len(called.functions)
            entered = [
                number if isinstance(kind, ArrayType) else enter(kind, count)
                for number, kind in zip(reads, types, strict=True)
            ]
            step = _make_call(called, types, entered, makes, runner, place)
        steps.append(step)
    return steps, constants


def compile_graph(
    inserted: ReshardInsertion,
    outputs: Sequence[int],
    runner: Runner,
    overlap: int,
    change_runs: ChangeRuns | None = None,
) -> tuple[Callable[[list[Shards]], list[Shards]], list[bool]]:
    """Return a function from the shards of a graph's inputs to those of values.

    It empties the list of inputs, so that only registers hold them, until their last use. Also
    returns for each output whether it may share memory with an input.

    Args:
        inserted: the graph with reshards.
        outputs: the values, in the numbers of that graph.
        runner: of the shards.
        overlap: the most reshards of a kind in flight.
        change_runs: replaces some of the steps, such as by compiled ones.
    """
    graph = inserted.graph
    steps, constants = make_steps(inserted, runner)
    order = overlapped_order(steps, {*constants, *outputs}, overlap)
    inputs = [number for number in graph.inputs if number in inserted.types]
    reused = find_reused(order, steps, inserted.types)
    runs = [
        (_make_run(action, steps[action.step], reused.get(place)), action.frees)
        for place, action in enumerate(order)
    ]
    if change_runs is not None:
        runs = list(change_runs(order, steps, constants, runs))
    first: Registers = [None] * len(graph.values)
    # Registers of constants directly follow the registers of values.
    first += [constants[register] for register in sorted(constants)]
    digest = _digest(order, steps)
    lockstep = runner.in_lockstep if any(step.moved is not None for step in steps) else None

    def run_on(values: Registers) -> None:
        for run, frees in runs:
            run(values)
            for register in frees:
                values[register] = None

    def program(shards: list[Shards]) -> list[Shards]:
        # The last register has the function that starts movements.
        values = [*first, None]
        # By place: a loop variable would keep the last shards.
        for place, register in enumerate(inputs):
            values[register] = shards[place]
        shards.clear()
        if lockstep is None:
            run_on(values)
        else:
            with lockstep(digest) as begin:
                values[-1] = begin
                run_on(values)
        return [values[register] for register in outputs]

    viewing = _find_viewing(inputs, steps)
    return program, [number in viewing for number in outputs]


def _find_viewing(inputs: Iterable[int], steps: Iterable[ProgramStep]) -> set[int]:
    """Return the registers that may have the memory of inputs."""
    viewing = set(inputs)
    for step in steps:
        if step.may_view and not viewing.isdisjoint(step.reads):
            viewing.update(step.makes)
    return viewing


def _digest(order: Iterable[Action], steps: Sequence[ProgramStep]) -> bytes:
    """Return a digest of what ranks do together, in order: each has to do the same."""
    digest = hashlib.blake2b(digest_size=16)
    for step in steps:
        if step.moved is not None:
            kind, spec = step.moved
            before = kind.spec or replicated(spec.mesh, kind.ndim)
            digest.update(before.layout(kind.shape).fingerprint)
            digest.update(spec.layout(kind.shape).fingerprint + kind.dtype.name.encode())
    for action in order:
        # Ranks with other orders would deadlock.
        if steps[action.step].transport != "here":
            digest.update(f"{action.kind} {action.step} ".encode())
    return digest.digest()


def _make_run(action: Action, step: ProgramStep, into: int | None = None) -> Run:
    """Return the function of an action; the last register has the function that starts movements.

    `into` is a register whose memory the result is written to.
    """
    move = step.move
    if into is not None and step.write_into is not None:
        return step.write_into(into)
    if action.kind == "run" or move is None:
        return step.run
    (source,), (target,) = step.reads, step.makes

    def begin(values: Registers) -> None:
        values[target] = values[-1](move, values[source])

    def wait(values: Registers) -> None:
        values[target] = values[target]()

    return begin if action.kind == "begin" else wait


def _make_move(
    kind: ArrayType, spec: ShardingSpec, source: int, target: int, runner: Runner, place: int
) -> ProgramStep:
    """Return the step of a reshard of an array, from a register to another."""
    move = runner.movement(kind, spec)

    def run(values: Registers) -> None:
        values[target] = move(values[source])

    before_bytes, after_bytes = (
        max(held_bytes([array_type], spec.mesh.devices))
        for array_type in (kind, kind.with_spec(spec))
    )
    return ProgramStep(
        run,
        [source],
        [target],
        runner.transport(kind, spec),
        place,
        move,
        (kind, spec),
        after_bytes > before_bytes,
    )


def _make_body(
    body: Body,
    reads: Sequence[int],
    types: Sequence[ArrayType],
    makes: Sequence[int],
    runner: Runner,
) -> Run:
    """Return the function of a loop or a branch on registers, which read arrays of some types."""
    pairs = list(zip(types, reads, strict=True))

    def run(values: Registers) -> None:
        operands = [ShardedArray.of_shards(kind, values[number], runner) for kind, number in pairs]
        # How often a loop goes round is not known before.
        with runner.independent():
            results = body.run(operands, runner)
        for register, result in zip(makes, results, strict=True):
            values[register] = result._shards

    return run


def _make_check(
    called: CompiledCall,
    kinds: Sequence[Any],
    reads: Sequence[int],
    runner: Runner,
    place: int,
) -> ProgramStep:
    """Return the step before an operator that works on contributions.

    They wait only where what they are multiplied by is finite. Arguments are those of `_make_call`.
    """
    # A number is as finite as it was when the function was traced.
    factors = [n for n in called.factors if isinstance(kinds[n], ArrayType)]
    registers = [reads[n] for n in factors]
    types = [kinds[n].with_spec(called.runs_with[n]) for n in factors]

    def check(values: Registers) -> None:
        arrays = [
            ArrayValue.of_shards(kind, values[register], runner)
            for kind, register in zip(types, registers, strict=True)
        ]
        if not are_finite(range(len(arrays)), arrays, runner):
            raise runner.collective_error(
                UnforeseenElementsError(f"an infinite factor of {called.name}")
            )

    return ProgramStep(check, registers, [], "together", place)


def _make_writing(
    called: CompiledCall,
    kinds: Sequence[Any],
    reads: Sequence[int],
    makes: Sequence[int],
    runner: Runner,
) -> Callable[[int], Run] | None:
    """Return a function that writes the result into a register's memory, or None."""
    # A mesh may have no rank here.
    function = next(iter(called.functions), None)
    if function is None or called.shares_failure or not called.is_single:
        return None
    write = writing(function)
    if write is None or any(other is not function for other in called.functions):
        return None
    (target,) = makes

    def write_into(register: int) -> Run:
        def run(values: Registers) -> None:
            columns = [values[source] for source in reads]
            try:
                values[target] = tuple(
                    [
                        write(*row, out=out)
                        for out, *row in zip(values[register], *columns, strict=True)
                    ]
                )
            except REFUSALS as error:
                refuse(called.name, kinds, runner, error)

        return run

    return write_into


def _make_call(
    called: CompiledCall,
    kinds: Sequence[Any],
    reads: Sequence[int],
    makes: Sequence[int],
    runner: Runner,
    place: int,
) -> ProgramStep:
    """Return the step of an operator.

    Args:
        called: the operator, compiled for the runner.
        kinds: its operands' types, and numbers as they are.
        reads, makes: registers of its operands and results.
        runner: of the shards.
        place: of the operation in the graph.
    """
    return ProgramStep(
        _make_call_run(called, kinds, reads, makes, runner),
        reads,
        makes,
        "together" if called.shares_failure else "here",
        place,
        name=called.name,
        functions=called.functions,
        is_single=called.is_single,
        may_view=may_view(find_operator(called.name), len(kinds)),
        write_into=_make_writing(called, kinds, reads, makes, runner),
    )


def _make_call_run(
    called: CompiledCall,
    kinds: Sequence[Any],
    reads: Sequence[int],
    makes: Sequence[int],
    runner: Runner,
) -> Run:
    """Return the function of an operation on registers; common cases have short ones."""
    name, functions = called.name, called.functions
    # Without shards here there are no functions.
    is_same = len({id(kernel) for kernel in functions}) == 1
    function: Callable[..., Any] = functions[0] if is_same else compute
    if called.is_single and is_same and not called.shares_failure and len(reads) <= 2:
        target = makes[0]
        if len(reads) == 1:
            (only,) = reads

            def run_one(values: Registers) -> None:
                try:
                    values[target] = tuple(map(function, values[only]))
                except REFUSALS as error:
                    refuse(name, kinds, runner, error)

            return run_one
        left, right = reads

        def run_two(values: Registers) -> None:
            try:
                values[target] = tuple(map(function, values[left], values[right]))
            except REFUSALS as error:
                refuse(name, kinds, runner, error)

        return run_two

    def run(values: Registers) -> None:
        columns = [values[register] for register in reads]
        rows = compute(name, functions, columns, kinds, runner, called.shares_failure)
        if called.is_single:
            values[makes[0]] = tuple(rows)
        else:
            # Without shards here there are no rows.
            for number, register in enumerate(makes):
                values[register] = tuple([row[number] for row in rows])

    return run


class Program:
    """A graph with shardings, and the program into which its first run compiles it.

    Args:
        graph: the graph.
        overlap: the maximum number of reshards of a kind in flight.
        backend: the backend of `torch.compile` that compiles local computation; True for the
            default, False for none.
    """

    def __init__(
        self,
        graph: Graph,
        overlap: int = 0,
        backend: bool | str = False,
    ) -> None:
        self._overlap = overlap
        self._backend = backend
        self._graph = graph
        self._program: Callable[[list[Shards]], list[Shards]] | None = None
        self._views: list[bool] = []
        self._may_stop = False
        self._types: tuple[ArrayType, ...] = ()
        self._lock = RLock()
        # The types in which the program takes its inputs; None for numbers.
        self._wanted = dict(zip(graph.inputs, graph.input_types, strict=True))
        self._arguments = graph.arguments
        self._inputs = [number for number, kind in self._wanted.items() if kind is not None]
        # A value that is returned several times is a single output.
        self._outputs = tuple(dict.fromkeys(graph.outputs))
        self._fixed: dict[int, Any] = {}

    def interpret(self, arguments: Sequence[Any], runner: Runner) -> Any:
        """Return the results as `run` does, executing operation by operation."""
        return self._interpret(self._enter(self._arguments, arguments, runner), runner)

    def run(self, arguments: Sequence[Any], runner: Runner, donated: Sequence[int] = ()) -> Any:
        """Return the results for arrays among the arguments, in their order.

        `donated` are places of arrays that nobody else has: each is freed after its last use.
        """
        arrays = self._enter(self._arguments, arguments, runner)
        if recorders.active or runner.is_abstract:
            # Recorders, such as a gradient's tape, observe operations.
            return self._interpret(arrays, runner)
        program = self._program
        if program is None:
            with self._lock:
                if self._program is None:
                    return self._prepare(arrays, runner)
                program = self._program
        all_arrays = arrays | self._fixed if self._fixed else arrays
        inputs = [all_arrays[number]._shards for number in self._inputs]
        # A program that may stop starts again from its arguments, which must then still have
        # shards.
        if not self._may_stop:
            for place in donated:
                # Nothing but the program holds them from here on.
                arguments[place]._shards = ()
                all_arrays[self._arguments[place]]._shards = ()
                arrays.pop(self._arguments[place], None)
                if all_arrays is not arrays:
                    all_arrays.pop(self._arguments[place], None)
        try:
            output_shards = program(inputs)
        # All ranks get here together, since the error is collective.
        except UnforeseenElementsError:
            return self._interpret(arrays, runner)
        values = {}
        for number, kind, shards, is_view in zip(
            self._outputs, self._types, output_shards, self._views, strict=True
        ):
            # An argument that is returned is the argument.
            output = all_arrays.get(number)
            if output is None:
                make = ShardedArray.given if is_view else ShardedArray.of_shards
                output = make(kind, shards, runner)
            values[number] = output
        return filled(self._graph.returned, values)

    def _enter(
        self, numbers: Iterable[int], inputs: Iterable[Any], runner: Runner
    ) -> dict[int, Any]:
        """Return inputs by number, in the shardings that the program takes."""
        arrays = {}
        for number, x in zip(numbers, inputs, strict=True):
            input_type = self._wanted[number]
            is_fitting = isinstance(x, ShardedArray) and x.type is input_type
            if input_type is not None and not (is_fitting and x.runner is runner):
                x = array(x, input_type.spec, runner=runner)
            arrays[number] = x
        return arrays

    def _interpret(self, arrays: dict[int, Any], runner: Runner) -> Any:
        return filled(self._graph.returned, self._compute(arrays, runner))

    def _compute(
        self, arrays: dict[int, Any], runner: Runner, observe: Observe | None = None
    ) -> dict[int, Any]:
        # Constants are laid out once; programs read them at each run.
        if not self._fixed:
            constants = self._graph.constants
            self._fixed = self._enter(constants, constants.values(), runner)
        return interpret(self._graph, arrays | self._fixed, observe)

    def _prepare(self, arrays: dict[int, Any], runner: Runner) -> Any:
        """Return the results of the first run, after which there is a program."""
        compiled: ChangeRuns | None = None
        if self._backend is not False:
            # With PyTorch, which programs of NumPy do without.
            from reshard.spmd.programs.compiled_work import compiled_runs, compiler

            compiled = partial(compiled_runs, compile_whole=compiler(self._backend, runner))
        inserted = ReshardInsertion(self._graph)
        values = self._compute(arrays, runner, inserted.observe)
        self._types = tuple(values[number].type for number in self._outputs)
        self._may_stop = inserted.looks_at_elements
        outputs = inserted.numbers(self._outputs)
        self._program, self._views = compile_graph(
            inserted, outputs, runner, self._overlap, compiled
        )
        return filled(self._graph.returned, values)
