"""Orders of elimination, and tables taken out in them, against trying every choice."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.spmd.propagation.by_cost.cost_table import CostTable, joined_table
from reshard.spmd.propagation.by_cost.elimination import (
    MOST_KEPT,
    KnownTables,
    find_cut_set,
    find_order,
    read_off,
    take_out,
)
from reshard.spmd.propagation.by_cost.least_sum import CostSum
from selection import choose

CHOICES = (2, 3, 2, 3, 2)


@st.composite
def pairs(draw: st.DrawFn) -> list[CostTable]:
    """Tables of pairs of variables, most of which hang together."""
    scopes = draw(st.lists(st.sampled_from(list(itertools.combinations(range(5), 2))), min_size=4))
    seed = draw(st.integers(0, 999))
    drawn = np.random.default_rng(seed)
    return [
        CostTable(scope, drawn.integers(0, 99, [CHOICES[v] for v in scope]).astype(float))
        for scope in scopes
    ]


def every_value(tables: list[CostTable]) -> dict[tuple[int, ...], float]:
    total = CostSum(CHOICES, tables)
    return {chosen: total.value(chosen) for chosen in itertools.product(*map(range, CHOICES))}


@given(pairs(), st.integers(2, 108))
@settings(max_examples=choose(30, 100), deadline=None)
def test_an_order_has_each_variable_once_and_no_table_that_is_too_large(
    tables: list[CostTable], largest: int
) -> None:
    scopes = [one.variables for one in tables]
    order = find_order(CHOICES, scopes, largest)
    if order is None:
        order = find_order(CHOICES, scopes, largest, apart=True)
        assert order is not None
        assert any(step.largest == largest for step in order)
    else:
        assert all(step.largest is None for step in order)
    assert sorted(step.scope[0] for step in order) == list(range(5))
    for step in order:
        assert step.size == prod(CHOICES[v] for v in step.scope)
        assert (step.size > largest) == (step.largest is not None)


@given(pairs(), pairs())
@settings(max_examples=choose(30, 100), deadline=None)
def test_what_is_known_of_other_sums_changes_nothing(
    tables: list[CostTable], others: list[CostTable]
) -> None:
    known: KnownTables = {}
    # Half of the tables are in both sums, so that some joins are known and others are not.
    for some in (tables, [*tables[::2], *others], tables):
        order = find_order(CHOICES, [one.variables for one in some], MOST_KEPT)
        assert order is not None
        chosen = read_off(take_out(order, some, CHOICES, known), CHOICES)
        values = every_value(some)
        assert values[chosen] == min(values.values())


def test_tables_alike_are_joined_once() -> None:
    """A chain of equal tables, each between a variable and the next."""
    pair = np.array([[3.0, 1.0], [2.0, 5.0]])
    tables = [CostTable((place, place + 1), pair) for place in range(0, 40, 2)]
    choices = (2,) * 41
    order = find_order(choices, [one.variables for one in tables], MOST_KEPT)
    assert order is not None
    known: KnownTables = {}
    chosen = read_off(take_out(order, tables, choices, known), choices)
    assert chosen[:40] == (0, 1) * 20
    # One variable of a pair is taken out, then the other, and one that no table has.
    assert len(known) == 3


@given(pairs())
@settings(max_examples=choose(30, 100), deadline=None)
def test_the_least_of_each_choice_where_most_hangs_together(tables: list[CostTable]) -> None:
    found = CostSum(CHOICES, tables).least_of_choices()
    assert found is not None
    values = every_value(tables)
    for variable, least_s in enumerate(found):
        assert least_s.tolist() == [
            min(value for chosen, value in values.items() if chosen[variable] == choice)
            for choice in range(CHOICES[variable])
        ]


@given(pairs(), st.permutations(range(5)))
@settings(max_examples=choose(30, 100), deadline=None)
def test_a_joined_table_has_any_variable_first(tables: list[CostTable], order: list[int]) -> None:
    used = {variable for one in tables for variable in one.variables}
    first, *rest = [variable for variable in order if variable in used]
    scope = (first, *sorted(rest))
    found = joined_table(tables, scope, CHOICES)
    assert found.shape == tuple(CHOICES[v] for v in scope)
    assert found.flags.c_contiguous
    assert not any(np.shares_memory(found, one.seconds_s) for one in tables)
    for chosen, value in every_value(tables).items():
        assert found[tuple(chosen[v] for v in scope)] == value


@given(pairs(), st.integers(1, 108), st.sets(st.integers(0, 4)))
@settings(max_examples=choose(30, 100), deadline=None)
def test_what_a_cut_set_leaves_can_be_taken_out(
    tables: list[CostTable], largest: int, free: set[int]
) -> None:
    scopes = [one.variables for one in tables]
    found = find_cut_set(CHOICES, scopes, largest, free)
    left = [variable for variable in range(5) if variable not in found]

    def find_size(order: tuple[int, ...]) -> int:
        beside = [{v for v in one if v in left} for one in scopes]
        most = 1
        for variable in order:
            joined = set().union({variable}, *(one for one in beside if variable in one))
            most = max(most, prod(CHOICES[v] for v in joined))
            beside = [one for one in beside if variable not in one] + [joined - {variable}]
        return most

    assert min(map(find_size, itertools.permutations(left))) <= largest
    if largest == 1:
        assert found == set(range(5))
    if largest == 108:
        assert not found
