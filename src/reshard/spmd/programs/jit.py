"""Jit: a function of sharded arrays, traced once per kind of arguments, and run as a program.

    step = sp.jit(sp.value_and_grad(loss), strategy="cost")
    value, gradients = step(parameters, batch)

The first call with arguments of new shapes, element types or shardings records the function,
simplifies it (`simplification.py`), places it by a strategy, carries it out and prepares a program
(`program.py`). Calls with such arguments run the program.

A memory limit is satisfied by the first of these that does, or an error:

1. the strategy that was requested;
2. the other strategies; among those that satisfy the limit, that which moves the fewest bytes;
3. rematerialization: with the requested strategy, then with the others, in the order of their
   peaks;
4. a PlanError, with the operation at the peak and a limit that can be satisfied.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

from reshard.errors import PlanError, UsageError
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import Graph
from reshard.spmd.programs.overlap import overlapped
from reshard.spmd.programs.program import Program
from reshard.spmd.programs.recomputation import recompute
from reshard.spmd.programs.simplification import simplify
from reshard.spmd.propagation.strategies import assign_shardings
from reshard.spmd.shards.error_translation import check_function
from reshard.spmd.shards.operation_call import recorders, unrecorded
from reshard.spmd.shards.runner import runner_for
from reshard.spmd.tracing.estimates import count_memory
from reshard.spmd.tracing.graph_recording import listening_recorder, type_of
from reshard.spmd.tracing.trace import (
    STRATEGIES,
    Trace,
    check_trace_options,
    record_for,
    trace_graph,
)
from reshard.topology import Topology


def trace_within(
    trace_by: Callable[[str], Trace],
    finish: Callable[[Trace], Trace],
    name: str,
    strategy: str,
    limit: int,
) -> Trace:
    """Return the trace of a function in a placement that satisfies a limit on every rank.

    Args:
        trace_by: traces the function by a strategy.
        finish: adds the memory and time of overlap and donation to a trace.
        name: of the function, for errors.
        strategy: the requested strategy.
        limit: the maximum of `Trace.peak_bytes` of any rank.

    Raises PlanError if no placement that is found satisfies it.
    """
    first = trace_by(strategy)
    asked = finish(first)
    if _peak(asked) <= limit:
        return asked
    # Without shardings all strategies are equal, and without priorities "prioritized" is "basic".
    names = [other for other in STRATEGIES if other not in (strategy, "prioritized") and first.mesh]
    others = [trace_by(other) for other in names]
    placed = [finish(traced) for traced in others]
    fitting = [traced for traced in placed if _peak(traced) <= limit]
    if fitting:
        return min(fitting, key=lambda traced: traced.moved_bytes)
    for traced in (first, *sorted(others, key=_peak)):
        again = recompute(traced, limit)
        if again is not None and _peak(finished := finish(again)) <= limit:
            return finished
    raise PlanError(_describe(name, asked, placed, limit))


def _peak(traced: Trace) -> int:
    return max(traced.peak_bytes.values())


def _describe(name: str, asked: Trace, others: list[Trace], limit: int) -> str:
    peak = _peak(asked)
    rank = next(rank for rank, size in asked.peak_bytes.items() if size == peak)
    index = asked.ranks.index(rank)
    at = next(
        (operation for operation in asked.operations if operation.live_bytes[index] == peak), None
    )
    where = (
        "with its arguments alone"
        if at is None
        else f"at %{at.operation.results[0]} = {at.operation}"
    )
    tried = "; ".join(f"{traced.strategy!r} holds {_peak(traced):,}" for traced in others)
    least = min(map(_peak, (asked, *others)))
    return (
        f"{name} with strategy {asked.strategy!r} holds {peak:,} bytes on rank {rank} {where}, "
        f"more than live_bytes={limit:,}"
        + (f" ({tried})" if tried else "")
        + ", and no values that could be computed again were found that would keep it. Give "
        f"live_bytes={least:,}, cut arguments over more axes, take a smaller batch or overlap, or "
        "put layers that are differentiated under @sp.rematerialized"
    )


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JitOptions:
    """Options of `jit`, where they are described; checked when made.

    Args:
        placed: the graph of the same function with the shardings of all values by the strategy
            "cost", if they are known. A graph may depend on the shardings of the inputs, such as
            by ring attention: a function that records other operations is placed anew.
    """

    strategy: str = "eager"
    topology: Topology | None = None
    library: str = "nccl"
    live_bytes: int | None = None
    overlap: int = 0
    donate: int | Sequence[int] = ()
    compile: bool | str = False
    placed: Graph | None = None

    def __post_init__(self) -> None:
        check_trace_options(self.strategy, self.topology, self.library)
        if self.live_bytes is not None and not (_is_int(self.live_bytes) and self.live_bytes > 0):
            raise UsageError(
                f"live_bytes={self.live_bytes!r}; give the most bytes that each rank may hold, a "
                "whole number above 0, such as live_bytes=8 << 30, or None for no limit"
            )
        if not _is_int(self.overlap) or self.overlap < 0:
            raise UsageError(
                f"overlap={self.overlap!r}; give how many movements may be under way beside what "
                "is computed, such as overlap=2, or 0 for none"
            )
        places = [self.donate] if isinstance(self.donate, int) else self.donate
        is_list = isinstance(places, list | tuple)
        if not is_list or any(not _is_int(n) or n < 0 for n in places):
            raise UsageError(
                f"donate={self.donate!r}; give the position of an argument, from 0 on, or several: "
                "(0, 1)"
            )
        if not isinstance(self.compile, bool | str):
            raise UsageError(
                f"compile={self.compile!r}; give True, or the name of a backend of torch.compile, "
                "such as 'inductor'"
            )

    @property
    def donated(self) -> frozenset[int]:
        """The positions of donated arguments."""
        return frozenset([self.donate] if isinstance(self.donate, int) else self.donate)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


MAX_PROGRAMS = 256
"""Programs of a function that are cached; the oldest is discarded first."""

MANY_PROGRAMS = 16
"""The number of programs of a function at which a warning is raised."""


def jit(
    function: Function,
    *,
    strategy: str = "eager",
    topology: Topology | None = None,
    library: str = "nccl",
    live_bytes: int | None = None,
    overlap: int = 0,
    donate: int | Sequence[int] = (),
    compile: bool | str = False,
) -> JittedFunction:
    """Compile a function: trace it once per kind of arguments, then run the traced program.

    The program computes common subexpressions once (except in functions decorated with
    `rematerialized`), reshards a value to each sharding once, skips values that no result depends
    on, and frees each value after its last use. The function must depend on its arguments alone.
    Arrays and other objects from the enclosing scope keep the values that they had at tracing time,
    and side effects (printing, appending) happen only at tracing time.

    Args:
        function: a function of arrays, and of lists, tuples and dictionaries of them. Arguments
            that are not arrays are static: the function is traced again for each new number or
            string. It returns the same kinds of values; results that are not arrays are those of
            the traced call.
        strategy: how reshards are placed, as for `sp.trace`: "eager", "basic",
            "prioritized", "aggressive", "widest" or "cost".
        topology, library: for the time estimates of "cost", as for `sp.trace`.
        live_bytes: a limit on the memory of each rank at any time, including arguments: the trace's
            `peak_bytes`. If the strategy's program exceeds it, the program of another strategy that
            does not, and that moves the fewest bytes, is used. If all exceed it, values are
            rematerialized. No limit when None.
        overlap: over processes, how many movements that enlarge a value (gathers), and how many
            others, may be in flight while operators run. They start as early as that allows, in one
            order on all ranks, and operations that read their results wait for them. With 0, each
            movement completes before the next operation. With a topology that describes devices,
            matrix products are split into pieces that overlap with the gather of an operand or the
            reduction of the result, where that is faster. No effect in a single process.
        donate: positions of arguments whose arrays are donated: their memory is freed after the
            last operation that reads them, and `trace` accounts for it. After the call such an
            array cannot be used, even if the program failed. An array that is returned unchanged is
            kept. Memory that the caller still refers to, by `x.shards` or by what was passed to
            `sp.array`, is not freed.
        compile: whether to compile the computation between movements with `torch.compile` when the
            program first runs, or the name of the backend to use. Requires PyTorch shards.
            Operators that the compiler does not support run uncompiled, with a warning that names
            them.

    Raises:
        UsageError: not a function, an unknown strategy or library, an invalid limit or count. When
            called: a function that reads elements, as `if x > 0:` does; arguments that cannot be
            compared.
        PlanError: when called or traced: no program stays within the limit.

    >>> import reshard.spmd as sp
    >>> norm = sp.jit(lambda x: x / sp.sqrt(sp.sum(x * x)))
    >>> norm(sp.array([3.0, 4.0])).to_dense().tolist()
    [0.6, 0.8]
    """
    check_function("jit", function, "sp.jit(f), or @sp.jit above its definition")
    options = JitOptions(
        strategy=strategy,
        topology=topology,
        library=library,
        live_bytes=live_bytes,
        overlap=overlap,
        donate=donate,
        compile=compile,
    )
    return JittedFunction(function, options)


class JittedFunction:
    """A function that runs as a program, created by `jit`."""

    def __init__(self, function: Function, options: JitOptions) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._donate = options.donated
        self._programs: dict[Any, Program] = {}
        self._traced_count = 0
        self._lock = RLock()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # A method's first argument is static, like all arguments that are not arrays.
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function, as a program."""
        arrays: list[Any] = []
        key: list[Any] = []
        read_kind(arguments, key, arrays)
        if options:
            read_kind(options, key, arrays)
        runner = None
        is_traced = bool(recorders.active) and listening_recorder() is not None
        for array in arrays:
            if isinstance(array, ShardedArray):
                runner = runner or array.runner
                is_traced = is_traced or array.runner.is_abstract
        if is_traced:
            # It is part of another function that is traced, whose arrays it may read without being
            # given any.
            return self._function(*arguments, **options)
        runner = runner or runner_for(*arrays[:1])
        program_key = (*key, runner)
        program = self._programs.get(program_key)
        if program is None:
            program = self._trace(program_key, arguments, options)
        if not self._donate or recorders.active:
            # A recorder, such as a gradient's tape, keeps the arguments.
            return program.run(arrays, runner)
        donated_arrays = [arrays[n] for n in self._find_donated(arguments)]
        # An array that is passed twice is donated once, in all its places.
        once = {id(x): x for x in donated_arrays if isinstance(x, ShardedArray)}
        donated = [n for n, x in enumerate(arrays) if id(x) in once]
        copies = {identity: x.donated() for identity, x in once.items()}
        arrays = [copies.get(id(x), x) for x in arrays]
        # Nothing else may keep what the program frees.
        del donated_arrays, once, copies
        return program.run(arrays, runner, donated)

    def _find_donated(self, arguments: Sequence[Any]) -> list[int]:
        """Return the donated arrays, by their place among all arrays of the arguments."""
        donated: list[int] = []
        arrays: list[Any] = []
        for position, argument in enumerate(arguments):
            before = len(arrays)
            arrays += [leaf for _, leaf in leaves([argument]) if type_of(leaf) is not None]
            if position in self._donate:
                donated += range(before, len(arrays))
        if self._donate and max(self._donate) >= len(arguments):
            raise UsageError(
                f"donate={sorted(self._donate)} of a call with {len(arguments)} arguments; give "
                "positions of those, which are not given by name"
            )
        return donated

    def trace(self, *arguments: Any, **options: Any) -> Trace:
        """Trace the program: its operations, bytes, time and memory; see `sp.trace`.

        Arguments are those of a call, or arrays without elements from `sp.abstract`. `peak_bytes`
        is the peak memory of the program on each rank, and `strategy` is that which satisfies the
        limit, if there is a limit.

        With `overlap`, it is the trace of the program over processes.

        Raises PlanError if no program stays within the limit.
        """
        return self._trace_program(arguments, options)

    def _trace_program(
        self, arguments: Sequence[Any], options: dict[str, Any], overlaps: bool = True
    ) -> Trace:
        """Trace as `trace` does; in a single process nothing overlaps."""

        jit_options = self._options

        def trace_by(strategy: str) -> Trace:
            graph = self._record(strategy, arguments, options)
            return trace_graph(graph, strategy, jit_options.topology, jit_options.library)

        positions = self._find_donated(arguments)

        def finish(traced: Trace) -> Trace:
            graph = traced.graph
            donated = [graph.arguments[position] for position in positions]
            if jit_options.overlap and overlaps:
                return overlapped(traced, jit_options.overlap, donated, jit_options.live_bytes)
            if not donated or any(operation.may_stop for operation in traced.operations):
                return traced
            ranks, operations = traced.ranks, traced.operations
            counted = count_memory(graph, traced.inputs, operations, ranks, donated)
            return replace(traced, operations=counted)

        if jit_options.live_bytes is None:
            return finish(trace_by(jit_options.strategy))
        return trace_within(
            trace_by, finish, repr(self), jit_options.strategy, jit_options.live_bytes
        )

    @property
    def traced_count(self) -> int:
        """How often the function was traced to be run."""
        return self._traced_count

    def _record(self, strategy: str, arguments: Sequence[Any], options: dict[str, Any]) -> Graph:
        """Return the function's graph, simplified, with the shardings of a strategy."""
        function: Function = self._function
        inputs: Sequence[Any] = arguments
        if options:
            # As a last argument, because the inputs of graphs are ordered.
            def function(*most: Any) -> Any:
                return self._function(*most[:-1], **most[-1])

            inputs = (*arguments, options)
        with unrecorded():
            graph = simplify(record_for(strategy, function, inputs, has_others=True))
        jit_options = self._options
        placed = jit_options.placed
        if placed is not None and strategy == "cost" and graph.has_same_operations(placed):
            return graph.with_shardings(*placed.shardings)
        return assign_shardings(graph, strategy, jit_options.topology, jit_options.library)

    def _trace(self, key: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Program:
        with self._lock:
            program = self._programs.get(key)
            if program is not None:
                return program
            jit_options = self._options
            overlaps = jit_options.overlap > 0 and not key[-1].has_every_shard
            if jit_options.live_bytes is None and not (
                overlaps and jit_options.topology is not None
            ):
                graph = self._record(jit_options.strategy, arguments, options)
            else:
                graph = self._trace_program(arguments, options, overlaps).graph
            self._traced_count += 1
            if self._traced_count == MANY_PROGRAMS:
                warnings.warn(
                    f"{self._function!r} was traced {MANY_PROGRAMS} times by sp.jit, for arguments "
                    "of as many kinds: numbers that change are to be arrays, sp.array(0.1), and "
                    "shapes few",
                    UserWarning,
                    # 3 is the caller of the function.
                    stacklevel=3,
                )
            while len(self._programs) >= MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            program = self._programs[key] = Program(graph, jit_options.overlap, jit_options.compile)
            return program

    def __repr__(self) -> str:
        return f"<sp.jit of {self._function!r}>"


def read_kind(tree: Any, key: list[Any], arrays: list[Any]) -> None:
    """Append the kind of a tree of arguments to a key, and its arrays to a list.

    Raises UsageError for an array without elements, and for what cannot be compared.

    >>> import reshard.spmd as sp
    >>> key, arrays = [], []
    >>> read_kind({"x": sp.array([1.0]), "count": 3}, key, arrays)
    >>> key, len(arrays)
    ([(<class 'dict'>, ('x', 'count')), ArrayType(float64[1]), (<class 'int'>, 3)], 1)
    """
    if isinstance(tree, ShardedArray):
        key.append(tree.type)
        arrays.append(tree)
    elif isinstance(tree, dict):
        # Arrays are taken in a dictionary's order, which is therefore part of the kind.
        key.append((dict, tuple(tree)))
        for value in tree.values():
            read_kind(value, key, arrays)
    elif isinstance(tree, list | tuple):
        key.append((type(tree), len(tree)))
        for value in tree:
            read_kind(value, key, arrays)
    else:
        _read_leaf(tree, key, arrays)


def _read_leaf(leaf: Any, key: list[Any], arrays: list[Any]) -> None:
    if isinstance(leaf, ArrayType):
        raise UsageError(
            f"sp.jit of {leaf!r}, which has no elements; call it with arrays, or see what it does "
            "with f.trace(...)"
        )
    kind = type_of(leaf)
    if kind is not None:
        key.append(kind)
        arrays.append(leaf)
        return
    if isinstance(leaf, float | complex):
        # By text: no number that is none equals itself, and 0.0 equals -0.0.
        key.append((type(leaf), repr(leaf)))
        return
    try:
        hash(leaf)
    except TypeError as error:
        raise UsageError(
            f"sp.jit with the argument {leaf!r}, a {type(leaf).__name__} that cannot be compared; "
            "give arrays, and numbers, texts and the like"
        ) from error
    # With the type, because 1 and True are equal.
    key.append((type(leaf), leaf))
