"""Do rules say the truth? Each is tried on small arrays, cut along each of its factors.

1. A factor that passes through: what a device computes of its part of the operands is its part of
   the dense results.
2. A reduced factor: what two parts compute combines, by the rule's operator, to the dense results
   that lack it.
3. Operands that are partial: contributions, computed one by one, combine to the dense results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.spmd.core.operator import Operator, operators, shipped_operators
from reshard.spmd.rules.rule_builder import Inferred
from reshard.spmd.rules.sharding_rule import Mapping, OpShardingRule
from spmd import movement_cases, numerical_cases, operator_cases
from spmd.operator_cases import Array, Case, Part, Trial

CASES = operator_cases.CASES | movement_cases.CASES | numerical_cases.CASES

COMBINE = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def test_every_rule_of_the_table_is_tried() -> None:
    assert {name for name in shipped_operators() if operators[name].has_rule} == set(CASES)
    assert len(CASES) > 200
    tables = (operator_cases.CASES, movement_cases.CASES, numerical_cases.CASES)
    assert len(CASES) == sum(map(len, tables))


def part_of(
    x: Array, mapping: Mapping, sizes: Sequence[int], factor: int, low: int, high: int
) -> Array:
    """The elements of an array whose digit of a factor is from `low` to `high`."""
    for dim, factors in enumerate(mapping):
        if factor in factors:
            place = factors.index(factor)
            major = math.prod(sizes[f] for f in factors[:place])
            minor = math.prod(sizes[f] for f in factors[place + 1 :])
            view = x.reshape(*x.shape[:dim], major, sizes[factor], minor, *x.shape[dim + 1 :])
            taken = view[(slice(None),) * (dim + 1) + (slice(low, high),)]
            size = major * (high - low) * minor
            return taken.reshape(*x.shape[:dim], size, *x.shape[dim + 1 :])
    return x


def starts_of(mapping: Mapping, factor: int, low: int) -> tuple[int, ...]:
    return tuple(low if factors == (factor,) else 0 for factors in mapping)


def same(name: str, found: Sequence[Array], wanted: Sequence[Array]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape, name
        np.testing.assert_allclose(
            one.astype(complex), other.astype(complex), rtol=1e-9, atol=1e-9, equal_nan=True
        )


def cut(
    case: Case, trial: Trial, inferred: Inferred, dense: Sequence[Array], factor: int, where: int
) -> None:
    """Cuts a factor in two parts and compares."""
    rule = inferred.rule
    computed = []
    for low, high in ((0, where), (where, rule.sizes[factor])):
        operands = [
            part_of(x, mapping, rule.sizes, factor, low, high)
            for x, mapping in zip(trial.operands, rule.operands, strict=True)
        ]
        wanted = [
            part_of(x, mapping, rule.sizes, factor, low, high)
            for x, mapping in zip(dense, rule.results, strict=True)
        ]
        knows = factor in inferred.adjusted
        part = Part(
            tuple(x.shape for x in trial.operands) if knows else tuple(x.shape for x in operands),
            tuple(x.shape for x in dense),
            tuple(x.shape for x in wanted),
            tuple(starts_of(m, factor, low if knows else 0) for m in rule.operands),
            tuple(starts_of(m, factor, low if knows else 0) for m in rule.results),
        )
        found = case.compute(operands, trial.attributes, part)
        is_part = [factor not in reduced for reduced in rule.contributed]
        same(str(rule), list(compress(found, is_part)), list(compress(wanted, is_part)))
        computed.append(found)
    is_reduced = [factor in reduced for reduced in rule.contributed]
    combine = COMBINE[rule.reduction_operator]
    combined = [combine(*pair) for pair in compress(zip(*computed, strict=True), is_reduced)]
    same(str(rule), combined, list(compress(dense, is_reduced)))


def is_whole(rule: OpShardingRule, factor: int) -> bool:
    return factor in (*rule.need_replication, *rule.permutation, *rule.blocked)


def check_shapes(trial: Trial, inferred: Inferred, dense: Sequence[Array]) -> None:
    """The rule's factors make up the shapes, but where a factor is whole and lengths change."""
    rule = inferred.rule
    assert inferred.result_shapes == tuple(x.shape for x in dense)
    for mapping, x in zip(rule.tensors, [*trial.operands, *dense], strict=True):
        assert len(mapping) == x.ndim
        for factors, size in zip(mapping, x.shape, strict=True):
            assert factors
            if math.prod(rule.sizes[f] for f in factors) != size:
                assert all(is_whole(rule, factor) for factor in factors)


@pytest.mark.parametrize("name", sorted(CASES))
def test_parts_compute_their_parts(name: str) -> None:
    case, operator = CASES[name], operators[name]

    @settings(max_examples=20, deadline=None, database=None)
    @given(case.trials, st.integers(1, 99))
    def check(trial: Trial, seed: int) -> None:
        inferred = operator.inferred([x.shape for x in trial.operands], **trial.attributes)
        dense = case.compute(trial.operands, trial.attributes, None)
        check_shapes(trial, inferred, dense)
        rule = inferred.rule
        for factor, size in enumerate(rule.sizes):
            if size >= 2 and not is_whole(rule, factor):
                cut(case, trial, inferred, dense, factor, 1 + seed % (size - 1))

    check()


def contributions(x: Array, reduction: str, seed: int) -> tuple[Array, Array, Array]:
    """Two contributions, and what they are together."""
    if x.dtype == bool:
        other = np.random.default_rng(seed).integers(0, 2, x.shape).astype(bool)
    else:
        other = np.random.default_rng(seed).integers(-6, 9, x.shape)
    if reduction == "mean":
        return x, other, (x + other) / 2
    return x, other, COMBINE[reduction](x, other)


def check_partial(
    case: Case, operator: Operator, trial: Trial, reduction: str, together: Sequence[int], seed: int
) -> None:
    wholes, pair = list(trial.operands), ([*trial.operands], [*trial.operands])
    for operand in together:
        one, other, whole = contributions(trial.operands[operand], reduction, seed + operand)
        pair[0][operand], pair[1][operand], wholes[operand] = one, other, whole
    dense = case.compute(wholes, trial.attributes, None)
    found = [case.compute(operands, trial.attributes, None) for operands in pair]
    combined = [contributions_together(reduction, *results) for results in zip(*found, strict=True)]
    same(f"{operator.name} of partial {reduction}", combined, dense)


def contributions_together(reduction: str, one: Array, other: Array) -> Array:
    if reduction == "mean":
        return (one + other) / 2
    return COMBINE[reduction](one, other)


LINEAR = sorted(
    name for name in CASES if operators[name].linear != "none" or operators[name].commutes
)


@pytest.mark.parametrize("name", LINEAR)
def test_partial_operands_give_partial_results(name: str) -> None:
    case, operator = CASES[name], operators[name]
    tried: set[str] = set()

    @settings(max_examples=12, deadline=None, database=None)
    @given(case.trials, st.integers(0, 999))
    def check(trial: Trial, seed: int) -> None:
        truth = (
            bool(trial.operands)
            and trial.operands[0].dtype == bool
            and name
            not in (
                "where",
                "select",
            )
        )
        for reduction in ("max", "min") if truth else (*COMBINE, "mean"):
            attributes = trial.attributes
            for together in operator.partial_operands(len(trial.operands), reduction, **attributes):
                tried.add(reduction)
                check_partial(case, operator, trial, reduction, together, seed)

    check()
    assert tried >= set(operator.commutes)
    assert ("sum" in tried) == (operator.linear != "none")
