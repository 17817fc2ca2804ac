"""Groups of ranks against their definition, and balanced shares against the optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from reshard.errors import PlanError
from reshard.plans.load_balancing import balanced_shares, group_ranks
from reshard.runs import IntArray

RANKS = 9


@given(st.lists(st.sets(st.integers(0, RANKS - 1)), max_size=6))
def test_alike_ranks_are_a_group_and_sets_are_unions(sets: list[set[int]]) -> None:
    begin = np.cumsum([0, *(len(members) for members in sets)])
    rank = np.array([r for members in sets for r in sorted(members)], dtype=np.int64)
    found = group_ranks(begin, rank, RANKS)
    roles = [tuple(r in members for members in sets) for r in range(RANKS)]
    for a in range(RANKS):
        for b in range(RANKS):
            assert (found.group[a] == found.group[b]) == (roles[a] == roles[b])
    groups = [
        found.member[found.member_begin[g] : found.member_begin[g + 1]].tolist()
        for g in range(len(found.size))
    ]
    assert sorted(r for group in groups for r in group) == list(range(RANKS))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert [found.number[r] for r in group] == list(range(len(group)))
    for number, members in enumerate(sets):
        mine = found.set_group[found.set_begin[number] : found.set_begin[number + 1]]
        assert {r for g in mine for r in groups[g]} == members
        assert sum(len(groups[g]) for g in mine) == len(members)


Classes = list[tuple[int, list[int]]]


def columns(classes: Classes) -> tuple[IntArray, IntArray, IntArray]:
    """Demand, begin and holder."""
    begin = np.cumsum([0, *(len(holders) for _, holders in classes)])
    holder = np.array([rank for _, holders in classes for rank in holders], dtype=np.int64)
    return np.array([demand for demand, _ in classes], dtype=np.int64), begin, holder


def least_largest_load(classes: Classes) -> float:
    """The optimum, by a linear program: shares of rows, and the load that bounds all."""
    demand, begin, holder = columns(classes)
    rows, ranks = len(holder), int(holder.max()) + 1
    of_row = np.repeat(np.arange(len(classes)), np.diff(begin))
    adds_up = coo_matrix((np.ones(rows), (of_row, np.arange(rows))), (len(classes), rows + 1))
    values = np.concatenate((np.ones(rows), -np.ones(ranks)))
    rank = np.concatenate((holder, np.arange(ranks)))
    column = np.concatenate((np.arange(rows), np.full(ranks, rows)))
    bounded = coo_matrix((values, (rank, column)), (ranks, rows + 1))
    cost = np.append(np.zeros(rows), 1.0)
    solved = linprog(
        cost, bounded.tocsr(), np.zeros(ranks), adds_up.tocsr(), demand, method="highs"
    )
    assert solved.success
    return float(solved.fun)


def loads(classes: Classes, unit: int = 1) -> IntArray:
    demand, begin, holder = columns(classes)
    shares = balanced_shares(demand, begin, holder, unit)
    assert (shares >= 0).all()
    assert np.add.reduceat(np.append(shares, 0), begin[:-1]).tolist() == demand.tolist()
    assert (shares % unit == 0).all()
    total = np.zeros(int(holder.max()) + 1, dtype=np.int64)
    np.add.at(total, holder, shares)
    return total


@st.composite
def class_lists(draw: st.DrawFn, largest: int) -> Classes:
    ranks = draw(st.integers(1, 9))
    holders = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)
    return draw(
        st.lists(st.tuples(st.integers(0, largest), holders.map(sorted)), min_size=1, max_size=9)
    )


@given(class_lists(10**12))
def test_the_largest_load_is_the_least(classes: Classes) -> None:
    assert loads(classes).max() <= least_largest_load(classes) * (1 + 1 / 512) + 1


@given(class_lists(6), st.sampled_from([1, 2, 4]))
def test_few_elements_are_divided_as_evenly_as_possible(classes: Classes, unit: int) -> None:
    scaled = [(demand * unit, holders) for demand, holders in classes]
    assert loads(scaled, unit).max() <= least_largest_load(scaled) + unit


def many_classes(ranks: int, count: int, most: int) -> Classes:
    """Classes of all sizes, some of them a thousand times as large as others."""
    random = np.random.default_rng(ranks)
    sizes = random.integers(1, most + 1, count)
    demands = (1e6 * (1 + random.pareto(1.2, count))).astype(np.int64)
    return [
        (int(demand), sorted(random.choice(ranks, size, replace=False).tolist()))
        for demand, size in zip(demands, sizes, strict=True)
    ]


@pytest.mark.parametrize(("ranks", "count", "most"), [(512, 2000, 8), (96, 200, 2), (40, 30, 40)])
def test_many_ranks_and_classes(ranks: int, count: int, most: int) -> None:
    classes = many_classes(ranks, count, most)
    assert loads(classes).max() <= least_largest_load(classes) * (1 + 1 / 512) + 1


def test_a_long_chain_of_classes() -> None:
    # Rank 0 has twice what the others have, and can be relieved only by moving all others' on.
    chain = [(20_000, [0]), *((10_000, [rank, rank + 1]) for rank in range(63))]
    assert loads(chain).max() <= least_largest_load(chain) * (1 + 1 / 512) + 1


def test_large_classes_are_poured_around_small_ones() -> None:
    nested = [(3000, [0]), (1000, [1]), (8000, [0, 1, 2, 3])]
    assert np.abs(loads(nested) - 3000).max() <= 3000 / 512


def test_components_are_balanced_each_by_itself() -> None:
    far = [(10**9, [0]), (600, [1]), (1000, [1, 2]), (900, [2, 3]), (500, [3])]
    total = loads(far)
    assert total[0] == 10**9
    assert total[1:].max() <= 1002


def test_alike_ranks_send_alike() -> None:
    everywhere = [(10**6 + 1, list(range(7))), (5, list(range(7))), (3 * 10**5, [5, 6])]
    total = loads(everywhere)
    assert np.ptp(total[:5]) <= 1
    assert np.ptp(total[5:]) <= 1
    assert total.max() <= 1 + total.mean() * (1 + 1 / 512)


def test_the_order_of_holders_does_not_matter() -> None:
    demand, begin, holder = columns([(1001, [3, 0, 2]), (999, [2, 1])])
    shares = balanced_shares(demand, begin, holder)
    ordered = balanced_shares(demand, begin, np.array([0, 2, 3, 1, 2]))
    assert shares[[1, 2, 0, 4, 3]].tolist() == ordered.tolist()


def test_a_demand_without_a_holder_raises() -> None:
    with pytest.raises(PlanError, match="7 bytes of class 1 have no holder"):
        balanced_shares(np.array([4, 7]), np.array([0, 1, 1]), np.array([0]))


def test_nothing_to_send() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert balanced_shares(nothing, np.zeros(1, dtype=np.int64), nothing).tolist() == []
    assert balanced_shares(np.array([0]), np.array([0, 2]), np.array([0, 1])).tolist() == [0, 0]
