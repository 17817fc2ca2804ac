"""The least sum of tables, against trying every choice."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.spmd.propagation.by_cost.factor_graph import (
    MAX_CACHED_ENTRIES,
    CostSum,
    CostTable,
    KnownTables,
    find_cut_set,
    find_order,
    joined_table,
    read_off,
    take_out,
    taken_apart,
)
from selection import choose


@st.composite
def sums(draw: st.DrawFn) -> CostSum:
    choices = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    tables = []
    for _ in range(draw(st.integers(0, 6))):
        scope = draw(st.lists(st.integers(0, len(choices) - 1), min_size=1, max_size=3))
        variables = tuple(sorted(set(scope)))
        shape = [choices[variable] for variable in variables]
        numbers = draw(
            st.lists(st.integers(0, 9), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
        )
        tables.append(CostTable(variables, np.array(numbers, dtype=float).reshape(shape)))
    return CostSum(tuple(choices), tables)


def every_choice(one: CostSum) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, one.choices)))


@given(sums())
@settings(max_examples=choose(60, 200), deadline=None)
def test_elimination_finds_the_least(one: CostSum) -> None:
    chosen = one.eliminated()
    assert chosen is not None
    assert one.value(chosen) == min(map(one.value, every_choice(one)))


@given(sums(), st.data())
@settings(max_examples=choose(30, 100), deadline=None)
def test_descent_ends_where_no_single_change_helps(one: CostSum, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(every_choice(one)))
    chosen = one.descended(start, sweeps=100)
    assert one.value(chosen) <= one.value(start)
    for variable, count in enumerate(one.choices):
        for other in range(count):
            changed = (*chosen[:variable], other, *chosen[variable + 1 :])
            assert one.value(chosen) <= one.value(changed)


@given(sums(), st.data())
@settings(max_examples=choose(60, 200), deadline=None)
def test_descent_from_where_another_sum_ended(one: CostSum, data: st.DataObject) -> None:
    """Some tables are others then: what is known of the rest leaves the answer as it is."""
    inner = data.draw(st.lists(st.integers(0, len(one.choices) - 1), max_size=1))
    end = one.descended(data.draw(st.sampled_from(every_choice(one))), inner, sweeps=100)
    tables = [
        CostTable(table.variables, 9 - table.seconds_s) if data.draw(st.booleans()) else table
        for table in one.tables
    ]
    anew = CostSum(one.choices, tables).descended(end, inner, sweeps=100)
    assert one.replaced(tables).descended(end, inner, sweeps=100) == anew


@given(sums(), st.data())
@settings(max_examples=choose(30, 100), deadline=None)
def test_a_window_of_all_that_hangs_together_has_the_least(
    one: CostSum, data: st.DataObject
) -> None:
    start = data.draw(st.sampled_from(every_choice(one)))
    least = min(map(one.value, every_choice(one)))
    assert one.value(one.descended_in_windows(start)) == least
    for largest in (1, 4, 30):
        assert one.value(one.descended_in_windows(start, largest=largest)) <= one.value(start)


def test_variables_with_one_choice_make_no_axes() -> None:
    """More of them than an array may have axes hang together with one that has two choices."""
    tables = [CostTable((0, n), np.array([[1.0], [0.0]])) for n in range(1, 100)]
    tables += [CostTable((98, 99), np.array([[7.0]])), CostTable((0,), np.array([0.0, 3.0]))]
    one = CostSum((2, *[1] * 99), tables)
    assert one.eliminated() == (1, *[0] * 99)
    least_s = one.least_of_choices()
    assert least_s is not None
    assert [own_s.tolist() for own_s in least_s[:2]] == [[106.0, 10.0], [10.0]]


def test_elimination_stops_before_a_table_is_too_large() -> None:
    tables = [CostTable((a, b), np.zeros((4, 4))) for a, b in itertools.combinations(range(4), 2)]
    one = CostSum((4,) * 4, tables)
    assert one.eliminated(largest=255) is None
    assert one.eliminated(largest=256) == (0, 0, 0, 0)


def test_inner_variables_change_together_with_those_beside_them() -> None:
    # Only both together help: 0 and 1 agree, or pay.
    one = CostSum((2, 2), [CostTable((0, 1), np.array([[5.0, 9], [9, 1]]))])
    assert one.descended((0, 0)) == (0, 0)
    assert one.descended((0, 0), inner=[1]) == (1, 1)


@given(sums(), st.data())
@settings(max_examples=choose(30, 100), deadline=None)
def test_descent_with_an_inner_variable_is_as_good(one: CostSum, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(every_choice(one)))
    inner = data.draw(st.integers(0, len(start) - 1))
    chosen = one.descended(start, [inner], sweeps=100)
    for variable, count in enumerate(one.choices):
        for other, inside in itertools.product(range(count), range(one.choices[inner])):
            changed = list(chosen)
            changed[inner] = inside
            changed[variable] = other if variable != inner else inside
            assert one.value(chosen) <= one.value(changed)


@given(sums())
@settings(max_examples=choose(60, 200), deadline=None)
def test_the_least_of_each_choice(one: CostSum) -> None:
    found = one.least_of_choices()
    assert found is not None
    for variable, least_s in enumerate(found):
        assert least_s.tolist() == [
            min(one.value(every) for every in every_choice(one) if every[variable] == choice)
            for choice in range(one.choices[variable])
        ]


@given(sums(), st.data())
@settings(max_examples=choose(30, 100), deadline=None)
def test_a_restricted_sum_has_the_values_of_what_is_kept(one: CostSum, data: st.DataObject) -> None:
    kept = [
        np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
        for count in one.choices
    ]
    restricted = one.restricted(kept)
    for places in every_choice(restricted):
        chosen = [int(own[place]) for own, place in zip(kept, places, strict=True)]
        assert restricted.value(places) == one.value(chosen)


@given(sums(), st.sampled_from([3, 9, 27]))
@settings(max_examples=choose(60, 200), deadline=None)
def test_tables_taken_apart(one: CostSum, largest: int) -> None:
    """What is said to be the least is it, and so it is where tables are small enough."""
    chosen, is_least = one.nearly_eliminated(largest)
    assert all(0 <= choice < count for choice, count in zip(chosen, one.choices, strict=True))
    least = min(map(one.value, every_choice(one)))
    assert one.value(chosen) >= least
    assert one.value(chosen) == least or not is_least
    assert is_least == (one.eliminated(largest) is not None)


@given(sums(), st.sampled_from([1, 3, 9, 3**5]))
@settings(max_examples=choose(60, 200), deadline=None)
def test_a_table_taken_apart_is_a_lower_bound(one: CostSum, largest: int) -> None:
    own = [table for table in one.tables if 0 in table.variables]
    if not own or one.choices[0] == 1:
        return
    left = taken_apart(0, own, one.choices, largest)
    rest = CostSum(one.choices, left)
    whole = CostSum(one.choices, own)
    for choice in every_choice(one):
        least = min(whole.value((first, *choice[1:])) for first in range(one.choices[0]))
        assert rest.value(choice) <= least + 1e-9
        # One group is the least itself.
        if largest == 3**5:
            assert rest.value(choice) == least


def test_choices_near_the_least_where_tables_are_too_large() -> None:
    """A ring with a hub: no choice but the least is good, and it is found in small tables."""
    count = 8
    tables = [
        CostTable(tuple(sorted((n, (n + 1) % count))), np.array([[0.0, 3.0], [3.0, 0.0]]))
        for n in range(count)
    ]
    tables += [CostTable((n, count), np.array([[0.0, 2.0], [2.0, 0.0]])) for n in range(count)]
    tables.append(CostTable((0,), np.array([1.0, 0.0])))
    one = CostSum((2,) * (count + 1), tables)
    chosen, is_least = one.nearly_eliminated(4)
    assert not is_least
    assert one.value(chosen) == 0.0


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
        order = find_order(CHOICES, [one.variables for one in some], MAX_CACHED_ENTRIES)
        assert order is not None
        chosen = read_off(take_out(order, some, CHOICES, known), CHOICES)
        values = every_value(some)
        assert values[chosen] == min(values.values())


def test_tables_alike_are_joined_once() -> None:
    """A chain of equal tables, each between a variable and the next."""
    pair = np.array([[3.0, 1.0], [2.0, 5.0]])
    tables = [CostTable((place, place + 1), pair) for place in range(0, 40, 2)]
    choices = (2,) * 41
    order = find_order(choices, [one.variables for one in tables], MAX_CACHED_ENTRIES)
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
