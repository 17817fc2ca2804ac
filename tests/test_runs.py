"""Run tables: one canonical form, cuts of cuts, and what a table may not be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cut_rules import Ceil, CutRule, Halo
from reshard.errors import LayoutError
from reshard.runs import FRESH_HALO, HALO, OWNED, PAD, Run, RunTable, joined, ragged_arange
from rule_definitions import Part, nested_parts, parts_of
from strategies import rules

ROLES = {OWNED: "owned", HALO: "halo", FRESH_HALO: "fresh halo", PAD: "pad"}


def places_in(table: RunTable) -> list[list[tuple[int, str]]]:
    """The index and the role at every local position of every part."""
    found = []
    for part in range(table.parts):
        places: list[tuple[int, str]] = []
        for start, stop, local, role in table.runs_of(part):
            assert local == len(places)
            places += [(-1 if role == PAD else index, ROLES[role]) for index in range(start, stop)]
        found.append(places)
    return found


def as_pairs(parts: Sequence[Part]) -> list[list[tuple[int, str]]]:
    return [[tuple(place) for place in part] for part in parts]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[CutRule, int, int]:
    length, parts = draw(st.integers(0, 30)), draw(st.integers(1, 7))
    return draw(rules([length], parts)), length, parts


@given(cuts())
def test_every_rule_gives_the_places_of_its_definition(cut: tuple[CutRule, int, int]) -> None:
    rule, length, parts = cut
    table = rule.table(length, parts)
    expected = as_pairs(parts_of(rule, length, parts))
    assert places_in(table) == expected
    assert table.local_lengths.tolist() == [len(part) for part in expected]
    assert table.element_lengths.tolist() == [
        sum(role != "pad" for _, role in part) for part in expected
    ]
    assert table.uncovered() == []


@st.composite
def nested_cuts(draw: st.DrawFn) -> tuple[list[tuple[CutRule, int]], int]:
    length = draw(st.integers(0, 24))
    levels: list[tuple[CutRule, int]] = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 3))
        lengths = {len(part) for part in nested_parts(levels, length)}
        levels.append((draw(rules(lengths, count)), count))
    return levels, length


@given(nested_cuts())
def test_a_cut_of_a_cut_is_read_through_the_outer_one(
    cut: tuple[list[tuple[CutRule, int]], int],
) -> None:
    levels, length = cut
    table = RunTable(length, 1, [(0, 0, length, 0)])
    for rule, count in levels:
        table = table.cut([rule.table(size, count) for size in table.local_lengths.tolist()])
    assert places_in(table) == as_pairs(nested_parts(levels, length))


def test_a_fresh_copy_of_a_stale_copy_is_stale() -> None:
    outer = Halo(0, 2).table(4, 2)
    inner = [Halo(0, 1, fresh=True).table(size, 2) for size in outer.local_lengths.tolist()]
    assert outer.cut(inner).runs_of(0) == [(0, 2, 0, OWNED), (2, 3, 2, HALO)]


def test_a_copy_is_fresh_where_both_levels_say_so() -> None:
    outer = Halo(0, 2, fresh=True).table(4, 2)
    inner = [Halo(0, 1, fresh=True).table(size, 2) for size in outer.local_lengths.tolist()]
    assert outer.cut(inner).runs_of(0) == [(0, 2, 0, OWNED), (2, 3, 2, FRESH_HALO)]


@given(cuts(), st.randoms(use_true_random=False))
def test_any_equivalent_rows_give_the_same_table(
    cut: tuple[CutRule, int, int], random: Random
) -> None:
    rule, length, parts = cut
    table = rule.table(length, parts)
    single = [
        (part, index, 1, local, 1, 0, 0, role)
        for part in range(parts)
        for start, stop, begin, role in table.runs_of(part)
        for local, index in enumerate(range(start, stop), start=begin)
    ]
    random.shuffle(single)
    assert RunTable(length, parts, single) is table
    assert RunTable(length, parts, table.rows) is table
    assert RunTable(length, parts, [Run(*row) for row in table.rows.tolist()]) is table


@given(cuts())
def test_tables_survive_pickling_and_copying_as_themselves(cut: tuple[CutRule, int, int]) -> None:
    rule, length, parts = cut
    table = rule.table(length, parts)
    assert pickle.loads(pickle.dumps(table)) is table
    assert copy.copy(table) is table
    assert copy.deepcopy([table])[0] is table


def test_an_interleaved_cut_is_one_row_a_part() -> None:
    table = RunTable(4_000, 2, [(p, 4 * i + 2 * p, 2, 2 * i) for p in (0, 1) for i in range(1000)])
    assert table.rows.tolist() == [
        [0, 0, 2, 0, 1000, 4, 2, OWNED],
        [1, 2, 2, 0, 1000, 4, 2, OWNED],
    ]


def test_runs_that_continue_one_another_are_joined() -> None:
    assert RunTable(6, 1, [(0, 0, 2, 0), (0, 2, 4, 2)]).rows.tolist() == [[0, 0, 6, 0, 1, 0, 0, 0]]


def test_runs_of_different_roles_are_not_joined() -> None:
    rows = [Run(0, 0, 2, 0), Run(0, 2, 4, 2, role=HALO)]
    assert len(RunTable(6, 1, rows).rows) == 2


def test_empty_runs_are_dropped() -> None:
    table = RunTable(4, 2, [(0, 0, 4, 0), (1, 4, 0, 0)])
    assert table is RunTable(4, 2, [(0, 0, 4, 0)])
    assert table.local_lengths.tolist() == [4, 0]


def test_joining_keeps_what_is_alone() -> None:
    single = Ceil().table(6, 3).single_runs()
    assert joined(single) is single


def test_the_columns_cannot_be_written() -> None:
    table = Ceil().table(6, 3)
    with pytest.raises(ValueError, match="read-only"):
        table.rows[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.local_lengths[0] = 1


@pytest.mark.parametrize(
    ("length", "parts", "rows", "message"),
    [
        (-1, 1, [], "dimension length -1"),
        (4, 0, [], "number of parts 0 must be at least 1"),
        (4, 1, [(0, 0, 2.5, 0)], "runs .* must be whole numbers"),
        (4, 1, [(0, 0, 1, 0, -1)], "a run repeats 0 times or more"),
        (2**58, 1, [(0, 0, 1, 0, 2**27, 2, 1)], "cut into 134217728 runs"),
        (2**58, 1, [(0, 0, 1, 0, 2**20, 2**58, 1)], "positions must be at most"),
        (2**58, 1, [(0, 0, 2**62, 0)], "positions must be at most"),
        (4, 2, [(2, 0, 4, 0)], "part 2, but there are 2"),
        (4, 2, [(-1, 0, 4, 0)], "part -1"),
        (4, 2, [(0, 2, 3, 0)], "part 0 has indices 2:5"),
        (4, 2, [(0, -1, 2, 0)], "part 0 has indices -1:1"),
        (4, 2, [(0, 0, 2, 1)], "leave a gap: a run begins at 1 where 0"),
        (4, 2, [(0, 0, 2, 0), (0, 2, 2, 1)], "overlap: a run begins at 1 where 2"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    length: int, parts: int, rows: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        RunTable(length, parts, rows)


def test_a_part_can_be_cut_only_by_a_table_of_its_length() -> None:
    with pytest.raises(LayoutError, match="part 1 of local length 3 cannot be cut by a table of"):
        Ceil().table(6, 2).cut([Ceil().table(3, 2), Ceil().table(4, 2)])


def test_what_nobody_owns_is_listed() -> None:
    rows = [Run(0, 2, 3, 0), Run(1, 4, 2, 0), Run(1, 8, 1, 2, role=FRESH_HALO)]
    assert RunTable(9, 2, rows).uncovered() == [(0, 2), (6, 9)]


def test_a_table_prints_one_line_a_row() -> None:
    table = RunTable(6, 2, [Run(0, 0, 1, 0, 2, 3, 1), Run(1, 1, 2, 0), Run(1, 0, 2, 2, role=PAD)])
    assert str(table).splitlines() == [
        "part 0: 2 x 1 from 0 every 3",
        "part 1: 2 from 1",
        "part 1: 2 (pad)",
    ]


@given(st.lists(st.integers(0, 5)))
def test_a_ragged_range_is_the_ranges_end_to_end(counts: list[int]) -> None:
    expected = [i for count in counts for i in range(count)]
    assert ragged_arange(np.array(counts, dtype=np.int64)).tolist() == expected


def test_an_array_of_a_table_in_use_gives_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([[part, 3 * part, 3, 0, 1, 0, 0, 0] for part in range(2)])
    table = RunTable.from_matrix(6, 2, rows)
    assert table is RunTable(6, 2, rows)
    monkeypatch.setattr(RunTable, "_build", None)
    assert RunTable.from_matrix(6, 2, rows.copy()) is table
    assert RunTable.from_matrix(6, 2, rows.astype(np.int32)) is table
    many = np.array([[0, index, 1, index, 1, 0, 0, 0] for index in range(100)])
    with pytest.raises(TypeError):
        RunTable.from_matrix(100, 1, many)
