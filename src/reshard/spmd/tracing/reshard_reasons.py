"""Reasons of reshards: the operator that needs each, and why it needs another sharding.

    %2 all-gather(tp) to `-, -`: sort needs all of [i]
    %5 all-reduce(tp) to `dp, -`: contributions to %5 alone do not go through exp

An operator's rule says which factors of its dimensions may be cut (`reshard.spmd.rules`); an axis
cuts one factor at a time, and a factor is cut in one way in all operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.mesh import Axis
from reshard.spmd.graph import WITH_SHARDING
from reshard.spmd.tracing.traced_operation import InsertedReshard, TracedOperation


def reason_of(one: TracedOperation, reshard: InsertedReshard) -> str:
    """Why a value is resharded before or after an operation, as half a sentence.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, flip, trace
    >>> rows = abstract((4, 8), "float32", spec(DeviceMesh.of(x=2), "x, -"))
    >>> (only,) = trace(lambda x: flip(x, axis=0), rows).operations
    >>> [reason_of(only, one) for one in only.reshards]
    ['flip needs all of [i]']
    """
    operation = one.operation
    if any(reshard is own for own in one.after):
        if operation.operator == WITH_SHARDING:
            return "the function asks for it"
        asking = _explain_result(one, reshard)
        return asking or f"the placement wants what {operation.operator} makes so"
    place = _find_place(one, reshard)
    if place is None:
        return f"the placement has {operation.operator} read it so"
    whole = [*_explain_contributions(one, place), *_explain_cuts(one, place)]
    reasons = dict.fromkeys(whole or _explain_gains(one, place))
    return (
        "; ".join(reasons) or f"ranks need other elements for {operation.operator} than they have"
    )


def _explain_result(one: TracedOperation, reshard: InsertedReshard) -> str:
    """As which operand a result is cut behind an operation that ran otherwise; else empty."""
    rule = one.operation.rule
    before = reshard.source.spec
    for dim, factors in enumerate(rule.results[one.operation.results.index(reshard.value)]):
        had = () if before is None else before.dim_specs[dim].axes
        gained = set(reshard.target.dim_specs[dim].axes).difference(had)
        for number, kind, mapping in zip(
            one.operation.operands, one.operands, rule.operands, strict=True
        ):
            if kind is None or kind.spec is None or factors not in mapping:
                continue
            if gained.intersection(kind.spec.dim_specs[mapping.index(factors)].axes):
                return f"{_write_factors(one, factors)} is cut as in %{number}"
    return ""


def _find_place(one: TracedOperation, reshard: InsertedReshard) -> int | None:
    """Which operand it is that the operator itself needs so."""
    for place, (number, spec) in enumerate(zip(one.operation.operands, one.runs_with, strict=True)):
        if number == reshard.value and spec is reshard.target:
            return place
    return None


def _explain_contributions(one: TracedOperation, place: int) -> Iterator[str]:
    kind, spec = one.operands[place], one.runs_with[place]
    if kind is None or kind.spec is None or spec is None:
        return
    if any(axis not in spec.partial_axes for axis in kind.spec.partial_axes):
        number, name = one.operation.operands[place], one.operation.operator
        yield f"contributions to %{number} alone do not go through {name}"


def _explain_cuts(one: TracedOperation, place: int) -> Iterator[str]:
    """Why axes that cut the operand do not when the operator runs."""
    kind, spec, operation = one.operands[place], one.runs_with[place], one.operation
    if kind is None or kind.spec is None or spec is None:
        return
    rule = operation.rule
    special = {*rule.need_replication, *rule.permutation, *rule.blocked}
    for dim, factors in enumerate(rule.operands[place]):
        gets = spec.dim_specs[dim].axes
        lost = [axis for axis in kind.spec.dim_specs[dim].axes if axis not in gets]
        said = _write_factors(one, factors)
        if lost and special.intersection(factors):
            yield f"{operation.operator} needs all of {said}"
        elif lost:
            yield _explain_lost(one, place, factors, lost, said)


def _explain_gains(one: TracedOperation, place: int) -> Iterator[str]:
    """As which operand the operand is cut, where it was not."""
    kind, spec = one.operands[place], one.runs_with[place]
    for dim, factors in enumerate(one.operation.rule.operands[place]):
        had = () if kind is None or kind.spec is None else kind.spec.dim_specs[dim].axes
        other = _find_operand(one, place, factors)
        if spec is not None and set(spec.dim_specs[dim].axes) - set(had) and other is not None:
            yield f"{_write_factors(one, factors)} is cut as in %{one.operation.operands[other]}"


def _write_factors(one: TracedOperation, factors: Sequence[int]) -> str:
    return f"[{''.join(one.operation.rule.names[factor] for factor in factors)}]"


def _explain_lost(
    one: TracedOperation,
    place: int,
    factors: Sequence[int],
    lost: Sequence[Axis],
    said: str,
) -> str:
    operation = one.operation
    axes = " ".join(map(str, lost))
    # 1. The factor is cut otherwise, as another operand has it.
    other = _find_operand(one, place, factors)
    if other is not None:
        return f"{said} is cut as in %{operation.operands[other]}, not by {axes}"
    # 2. The axis cuts another factor.
    taken = _find_taken(one, lost)
    if taken is not None:
        number, dim = taken
        letters = _write_factors(one, operation.rule.operands[number][dim])
        return f"{axes} cuts {letters} of %{operation.operands[number]}"
    # 3. Parts of it alone do not make parts of the results.
    if len(factors) > 1:
        return f"parts of {said} by {axes} are no parts of what {operation.operator} makes"
    return f"{operation.operator} does not find its places in parts of {said}"


def _find_operand(one: TracedOperation, place: int, factors: Sequence[int]) -> int | None:
    """Another operand whose own cut of the factors is the one that the operator runs with."""
    for number, mapping in enumerate(one.operation.rule.operands):
        kind, spec = one.operands[number], one.runs_with[number]
        if number == place or kind is None or kind.spec is None or spec is None:
            continue
        for dim, own in enumerate(mapping):
            cut = spec.dim_specs[dim]
            if set(own) & set(factors) and cut.axes and kind.spec.dim_specs[dim] is cut:
                return number
    return None


def _find_taken(one: TracedOperation, axes: Sequence[Axis]) -> tuple[int, int] | None:
    """An operand and its dimension that one of the axes cuts."""
    for number, spec in enumerate(one.runs_with):
        if spec is None:
            continue
        for dim, cut in enumerate(spec.dim_specs):
            if any(axis in cut.axes for axis in axes):
                return number, dim
    return None


def reason_lines(operations: Sequence[TracedOperation]) -> list[str]:
    """A line for each reshard that moves something: the operation, what moves, and why.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, trace
    >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
    >>> reason_lines(trace(lambda x: x @ x, x).operations)
    ['%1 = matmul: %0 all-gather(x) to `-, -`: x cuts [j] of %0']
    """
    return [
        f"%{one.operation.results[0]} = {one.operation.operator}: {reshard}: "
        f"{reason_of(one, reshard)}"
        for one in operations
        for reshard in one.reshards
        if reshard.moved_elements
    ]
