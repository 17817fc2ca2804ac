"""Runs of compiled operations: the work of each call of an operation.

Operands that need another sharding are moved, each rank here computes, and the results are wrapped.
Common cases have specialized short functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import Operator
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.error_translation import REFUSALS, make_refusal, refuse
from reshard.spmd.shards.reshard_cache import may_view, take_moved
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Movement

RunCall = Callable[..., Any]


def compute(
    name: str,
    functions: Sequence[Callable[..., Any]],
    columns: Sequence[Sequence[Any]],
    operands: Sequence[Any],
    runner: Runner,
    shares_failure: bool,
) -> list[Any]:
    """Return the results of every rank here; if the elements of a rank fail, raise on all ranks."""
    rows: list[Any] = []
    failure = None
    try:
        rows = [function(*row) for function, *row in zip(functions, *columns, strict=True)]
    except REFUSALS as error:
        failure = make_refusal(name, operands, runner, error)
    # Every rank takes part, whether it failed or not: otherwise the others would wait for it.
    if shares_failure:
        failure = runner.failure_of_any(failure)
    if failure is not None:
        raise failure
    return rows


def take_column(
    operand: Any, move: Movement | None, spec: ShardingSpec | None, count: int, mover: Runner
) -> tuple[Any, ...]:
    # In an abstract runner all ranks take the same operand: it has no elements, or is a constant of
    # a traced function, which has only the shards of this process.
    if mover.is_abstract or not isinstance(operand, ArrayValue):
        return (operand,) * count
    if move is None or spec is None:
        return operand._shards
    return take_moved(operand, spec, move)


def given_on(made: ArrayValue, result: ArrayType) -> ArrayValue:
    """Return an operation's result in its final sharding."""
    if result.spec is None or made.type.spec is result.spec:
        return made
    move = made.runner.movement(made.type, result.spec)
    found: ArrayValue = made.of_shards(result, move(made._shards), made.runner)
    return found


def make_run(
    operator: Operator,
    functions: Sequence[Callable[..., Any]],
    movements: Sequence[Movement | None],
    runs_with: Sequence[ShardingSpec | None],
    types: Sequence[ArrayType | None],
    made: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    is_single: bool,
    runner: Runner,
    wrap: type[ArrayValue],
    shares_failure: bool,
) -> RunCall:
    """Return the function that runs a compiled operation; common cases have special functions."""
    name = operator.name
    result = made[0]
    new = wrap.__new__
    # If this process has no shards, there are no functions.
    is_same = len({id(one) for one in functions}) == 1
    function: Callable[..., Any] = functions[0] if is_same else compute
    arrays_only = all(one is not None for one in types)
    # A single result, one function for all ranks, only arrays as operands, and no failure that only
    # some ranks could have: elementwise operations on arrays of equal sharding, the most frequent.
    is_plain = is_single and is_same and arrays_only and not shares_failure and made == results
    is_plain = is_plain and not any(movements) and not runner.is_abstract
    if is_plain and len(types) <= 2 and not may_view(operator, len(types)):
        if len(types) == 1:

            def run_one(x: Any) -> Any:
                # Inlined from `of_shards`, which saves a call per operation.
                made = new(wrap)
                made.type = result
                try:
                    made._shards = tuple([function(shard) for shard in x._shards])
                except REFUSALS as error:
                    refuse(name, (x,), runner, error)
                made.runner = runner
                return made

            return run_one

        def run_two(x: Any, y: Any) -> Any:
            made = new(wrap)
            made.type = result
            try:
                made._shards = tuple(map(function, x._shards, y._shards))
            except REFUSALS as error:
                refuse(name, (x, y), runner, error)
            made.runner = runner
            return made

        return run_two
    count = len(functions)

    def run(*operands: Any) -> Any:
        columns = [
            take_column(operand, move, spec, count, runner)
            for operand, move, spec in zip(operands, movements, runs_with, strict=True)
        ]
        rows = compute(name, functions, columns, operands, runner, shares_failure)
        if is_single:
            return wrap.of_shards(result, tuple(rows), runner)
        return tuple(
            wrap.of_shards(one, tuple([row[n] for row in rows]), runner)
            for n, one in enumerate(made)
        )

    if made != results:
        return _give_on(run, results)
    return _mark_views(run) if may_view(operator, len(types)) else run


def _give_on(run: RunCall, results: Sequence[ArrayType]) -> RunCall:
    """Return a function that runs an operation and moves its results to their final shardings."""

    def run_moving(*operands: Any) -> Any:
        made = run(*operands)
        if not isinstance(made, tuple):
            return given_on(made, results[0])
        return tuple(map(given_on, made, results))

    return run_moving


def _mark_views(run: RunCall) -> RunCall:
    """Return a function that runs an operation whose results may be views of given arrays."""

    def run_marking(*operands: Any) -> Any:
        results = run(*operands)
        mark_views(operands, results if isinstance(results, tuple) else (results,))
        return results

    return run_marking


def mark_views(operands: Sequence[Any], results: Sequence[ArrayValue]) -> None:
    """Mark results as given if they may be views of arrays that a program passed."""
    for one in operands:
        if isinstance(one, ArrayValue) and one.is_given:
            for made in results:
                made.mark_given()
            return
