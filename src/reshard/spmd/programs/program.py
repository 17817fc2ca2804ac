"""Programs: a graph compiled into calls of local kernels and movements of shards.

The first run interprets the graph, and `Preparation` records which compiled operation executes each
of its operations. Later runs execute these as steps, on registers of shards:

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
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import Body, Graph, Operation
from reshard.spmd.ops.elementwise import writing
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
from reshard.spmd.shards.runner import Runner, Transport, replicated
from reshard.spmd.shards.shard_copies import Movement, Shards
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


class Preparation:
    """Compiles a program from the operations that it observes while `interpret` executes them.

    Args:
        runner: of the shards.
        inputs: types of arrays by their numbers, and numbers as they are.

    `steps` are those so far, and `kinds` the types of what is in registers, by register; a number
    has none. `may_stop` is whether elements may be unforeseen, so that the inputs are needed anew.
    """

    def __init__(self, runner: Runner, inputs: dict[int, Any]) -> None:
        self._runner = runner
        self.steps: list[ProgramStep] = []
        self.kinds: dict[int, ArrayType] = {}
        self._operation = -1
        self._count = 0
        self._constants: dict[int, Any] = {}
        # The register of each value, and of numbers, for each count of ranks.
        self._register_of: dict[int, int] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._moved: dict[tuple[int, ShardingSpec], int] = {}
        # Of what ranks do together, in order: each has to do the same.
        self._meant = hashlib.blake2b(digest_size=16)
        self._moves_any = False
        self.may_stop = False
        # Registers that may have the memory of what a program has given.
        self._viewing: set[int] = set()
        for number, kind in inputs.items():
            if isinstance(kind, ArrayType):
                self._register_of[number] = self._add(kind)
                self._viewing.add(self._register_of[number])

    def _add(self, kind: ArrayType | None = None) -> int:
        if kind is not None:
            self.kinds[self._count] = kind
        self._count += 1
        return self._count - 1

    def _add_step(
        self, run: Run, reads: Sequence[int], makes: Sequence[int], transport: Transport = "here"
    ) -> None:
        self.steps.append(ProgramStep(run, reads, makes, transport, self._operation))

    def observe(
        self,
        operation: Operation,
        called: CompiledCall | None,
        given: Sequence[Any],
        placed: Sequence[Any],
        made: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Append the steps of an operation; see `Observe`."""
        self._operation += 1
        registers: list[Any] = [
            self._move(self._register_of[number], x.type, there.type.spec)
            if isinstance(x, ArrayValue)
            else x
            for number, x, there in zip(operation.operands, given, placed, strict=True)
        ]
        if operation.body is not None:
            made_in = self._run_step(operation.body, registers, placed, made)
        elif called is None:
            made_in = registers
        else:
            made_in = self._call_step(called, registers, placed)
        for number, register, x, there in zip(
            operation.results, made_in, made, results, strict=True
        ):
            self._register_of[number] = self._move(register, x.type, there.type.spec)

    def _move(self, register: int, kind: ArrayType, spec: ShardingSpec | None) -> int:
        """Return the register of a value in a sharding, by a movement where it is not there."""
        if spec is None or kind.spec is spec:
            return register
        found = self._moved.get((register, spec))
        if found is not None:
            return found
        move = self._runner.movement(kind, spec)
        before = kind.spec or replicated(spec.mesh, kind.ndim)
        # Layouts are interned: different specs of the same layout move nothing.
        is_same = kind.spec is not None and before.layout(kind.shape) is spec.layout(kind.shape)
        # Shards are in the order of the mesh's devices.
        is_same = is_same and before.mesh.devices == spec.mesh.devices
        made = register if is_same else self._add(kind.with_spec(spec))
        if not is_same:
            self._moves_any = True
            self._meant.update(before.layout(kind.shape).fingerprint)
            self._meant.update(spec.layout(kind.shape).fingerprint + kind.dtype.name.encode())
            run = _make_move(move, register, made)
            transport = self._runner.transport(kind, spec)
            moved = kind.with_spec(spec)
            before_bytes, after_bytes = (
                max(held_bytes([one], spec.mesh.devices)) for one in (kind, moved)
            )
            self.steps.append(
                ProgramStep(
                    run,
                    [register],
                    [made],
                    transport,
                    self._operation,
                    move,
                    (kind, spec),
                    after_bytes > before_bytes,
                )
            )
            if register in self._viewing:
                self._viewing.add(made)
        self._moved[register, spec] = made
        return made

    def _call_step(
        self,
        called: CompiledCall,
        registers: Sequence[Any],
        placed: Sequence[Any],
    ) -> list[int]:
        count = len(called.functions)
        kinds = [x.type if isinstance(x, ArrayValue) else x for x in placed]
        if called.looks_at_elements:
            self._check_step(called, registers, kinds)
        reads = [
            self._move(register, kind, spec)
            if isinstance(kind, ArrayType)
            else self._number(kind, count)
            for register, kind, spec in zip(registers, kinds, called.runs_with, strict=True)
        ]
        makes = [self._add(kind) for kind in called.made]
        run = _make_call(called, kinds, reads, makes, self._runner)
        views = may_view(find_operator(called.name), len(kinds))
        self.steps.append(
            ProgramStep(
                run,
                reads,
                makes,
                "together" if called.shares_failure else "here",
                self._operation,
                name=called.name,
                functions=called.functions,
                is_single=called.is_single,
                may_view=views,
                write_into=_make_writing(called, kinds, reads, makes, self._runner),
            )
        )
        if views and not self._viewing.isdisjoint(reads):
            self._viewing.update(makes)
        return [
            self._move(register, kind, result.spec)
            for register, kind, result in zip(makes, called.made, called.results, strict=True)
        ]

    def _run_step(
        self, body: Body, reads: Sequence[int], placed: Sequence[Any], made: Sequence[Any]
    ) -> list[int]:
        """Return a loop or a branch, on arrays of what is in registers."""
        runner = self._runner
        makes = [self._add(x.type) for x in made]
        kinds = [(type(x), x.type, register) for x, register in zip(placed, reads, strict=True)]

        def step(values: Registers) -> None:
            given = [
                wrap.of_shards(kind, values[register], runner) for wrap, kind, register in kinds
            ]
            # How often a loop goes round is not known before.
            with runner.independent():
                results = body.run(given, runner)
            for register, result in zip(makes, results, strict=True):
                values[register] = result._shards

        self._add_step(step, reads, makes, "together")
        if not self._viewing.isdisjoint(reads):
            self._viewing.update(makes)
        return makes

    def _number(self, value: Any, count: int) -> int:
        key = (repr(value), count)
        if key not in self._numbers:
            self._numbers[key] = register = self._add()
            self._constants[register] = (value,) * count
        return self._numbers[key]

    def _check_step(
        self, called: CompiledCall, registers: Sequence[Any], kinds: Sequence[Any]
    ) -> None:
        """Contributions wait only where what they are multiplied by is finite."""
        self.may_stop = True
        runner = self._runner
        # A number is as finite as it was when the function was traced.
        arrays = [n for n in called.factors if isinstance(kinds[n], ArrayType)]
        pairs = [(registers[n], kinds[n]) for n in arrays]

        def check(values: Registers) -> None:
            factors = [
                ArrayValue.of_shards(kind, values[register], runner) for register, kind in pairs
            ]
            if not are_finite(range(len(factors)), factors, runner):
                raise runner.collective_error(
                    UnforeseenElementsError(f"an infinite factor of {called.name}")
                )

        self._add_step(check, [register for register, _ in pairs], [], "together")

    def registers(self, numbers: Iterable[int]) -> list[int]:
        """In which registers values are, by their numbers."""
        return [self._register_of[number] for number in numbers]

    def order(self, outputs: Iterable[int], overlap: int) -> tuple[Action, ...]:
        """Return the order of steps, with a maximum number of reshards in flight."""
        kept = {*self._constants, *self.registers(outputs)}
        return overlapped_order(self.steps, kept, overlap)

    def program(
        self,
        inputs: Sequence[int],
        outputs: Iterable[int],
        overlap: int,
        change_runs: ChangeRuns | None = None,
    ) -> Callable[[list[Shards]], list[Shards]]:
        """Return a function from the shards of inputs to those of outputs, by their numbers.

        It empties the list of inputs, so that only registers hold them, until their last use.
        `change_runs` replaces some of the steps, such as by compiled ones.
        """
        returned = self.registers(outputs)
        order = self.order(outputs, overlap)
        for action in order:
            # Ranks with other orders would deadlock.
            if self.steps[action.step].transport != "here":
                self._meant.update(f"{action.kind} {action.step} ".encode())
        reused = find_reused(order, self.steps, self.kinds)
        runs = [
            (_make_run(one, self.steps[one.step], reused.get(place)), one.frees)
            for place, one in enumerate(order)
        ]
        if change_runs is not None:
            runs = list(change_runs(order, self.steps, self._constants, runs))
        first: Registers = [self._constants.get(register) for register in range(self._count)]
        given, digest = self.registers(inputs), self._meant.digest()
        agreed = self._runner.in_lockstep if self._moves_any else None

        def run_on(values: Registers) -> None:
            for run, frees in runs:
                run(values)
                for register in frees:
                    values[register] = None

        def program(shards: list[Shards]) -> list[Shards]:
            # The last register has the function that starts movements.
            values = [*first, None]
            # By place: a loop variable would keep the last shards.
            for place, register in enumerate(given):
                values[register] = shards[place]
            shards.clear()
            if agreed is None:
                run_on(values)
            else:
                with agreed(digest) as begin:
                    values[-1] = begin
                    run_on(values)
            return [values[register] for register in returned]

        return program

    def may_view(self, outputs: Iterable[int]) -> list[bool]:
        """Return for each output whether it may share memory with an input."""
        return [register in self._viewing for register in self.registers(outputs)]


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


def _make_move(move: Movement, source: int, target: int) -> Run:
    def run(values: Registers) -> None:
        values[target] = move(values[source])

    return run


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
    if write is None or any(one is not function for one in called.functions):
        return None
    (made,) = makes

    def write_into(register: int) -> Run:
        def run(values: Registers) -> None:
            columns = [values[one] for one in reads]
            try:
                values[made] = tuple(
                    [
                        write(*row, out=place)
                        for place, *row in zip(values[register], *columns, strict=True)
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
) -> Run:
    """Return the function of an operation on registers; common cases have short ones."""
    name, functions = called.name, called.functions
    # Without shards here there are no functions.
    is_same = len({id(one) for one in functions}) == 1
    function: Callable[..., Any] = functions[0] if is_same else compute
    if called.is_single and is_same and not called.shares_failure and len(reads) <= 2:
        made = makes[0]
        if len(reads) == 1:
            (only,) = reads

            def run_one(values: Registers) -> None:
                try:
                    values[made] = tuple(map(function, values[only]))
                except REFUSALS as error:
                    refuse(name, kinds, runner, error)

            return run_one
        one, other = reads

        def run_two(values: Registers) -> None:
            try:
                values[made] = tuple(map(function, values[one], values[other]))
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
    """A recorded function with its shardings, and its program once it was carried out.

    At most `overlap` reshards are in flight, and a `backend` of `torch.compile` compiles local
    computation: True for the default, False for none.
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
        self._outputs = tuple(dict.fromkeys(graph.outputs))
        self._fixed: dict[int, Any] = {}

    def interpret(self, given: Sequence[Any], runner: Runner) -> Any:
        """As `run`, operation by operation."""
        arrays = {
            number: self._enter(x, number, runner)
            for number, x in zip(self._arguments, given, strict=True)
        }
        return self._interpret(arrays, runner)

    def run(self, given: Sequence[Any], runner: Runner, donated: Sequence[int] = ()) -> Any:
        """Return the results for arrays among the arguments, in their order.

        `donated` are places of arrays that nobody else has: each is freed after its last use.
        """
        arrays = {
            number: self._enter(x, number, runner)
            for number, x in zip(self._arguments, given, strict=True)
        }
        if recorders or runner.is_abstract:
            # Recorders, such as a gradient's tape, observe operations.
            return self._interpret(arrays, runner)
        program = self._program
        if program is None:
            with self._lock:
                if self._program is None:
                    return self._prepare(arrays, runner)
                program = self._program
        every = arrays | self._fixed if self._fixed else arrays
        inputs = [every[number]._shards for number in self._inputs]
        if not self._may_stop:
            for place in donated:
                # Nothing but the program holds them from here on.
                given[place]._shards = ()
                every[self._arguments[place]]._shards = ()
                arrays.pop(self._arguments[place], None)
                if every is not arrays:
                    every.pop(self._arguments[place], None)
        try:
            made = program(inputs)
        except UnforeseenElementsError:
            return self._interpret(arrays, runner)
        values = {}
        for number, kind, shards, is_view in zip(
            self._outputs, self._types, made, self._views, strict=True
        ):
            # An argument that is returned is the argument.
            known = every.get(number)
            if known is None:
                make = ShardedArray.given if is_view else ShardedArray.of_shards
                known = make(kind, shards, runner)
            values[number] = known
        return filled(self._graph.returned, values)

    def _enter(self, x: Any, number: int, runner: Runner) -> Any:
        """Return an argument as the program wants it."""
        wanted = self._wanted[number]
        if isinstance(x, ShardedArray) and x.type is wanted and x.runner is runner:
            return x
        return array(x, None if wanted is None else wanted.spec, runner=runner)

    def _interpret(self, arrays: dict[int, Any], runner: Runner) -> Any:
        return filled(self._graph.returned, self._compute(arrays, runner))

    def _compute(
        self, arrays: dict[int, Any], runner: Runner, observe: Observe | None = None
    ) -> dict[int, Any]:
        if not self._fixed:
            self._fixed = {
                number: x if self._wanted[number] is None else self._enter(x, number, runner)
                for number, x in self._graph.constants.items()
            }
        return interpret(self._graph, arrays | self._fixed, observe)

    def _prepare(self, arrays: dict[int, Any], runner: Runner) -> Any:
        """Return the results of the first run, after which there is a program."""
        kinds = {number: kind for number, kind in self._wanted.items() if kind is not None}
        preparation = Preparation(runner, kinds)
        compiled = self._find_compiling(runner)
        values = self._compute(arrays, runner, preparation.observe)
        self._types = tuple(values[number].type for number in self._outputs)
        self._views = preparation.may_view(self._outputs)
        self._may_stop = preparation.may_stop
        self._program = preparation.program(self._inputs, self._outputs, self._overlap, compiled)
        return filled(self._graph.returned, values)

    def _find_compiling(self, runner: Runner) -> ChangeRuns | None:
        """Return the function that compiles steps, if there is a backend."""
        if self._backend is False:
            return None
        # With PyTorch, which programs of NumPy do without.
        from reshard.spmd.programs.compiled_work import compiled_runs, compiler

        return partial(compiled_runs, compile_whole=compiler(self._backend, runner))
