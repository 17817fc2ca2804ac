"""Parts of axes in integers, against the coordinates they stand for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import DeviceMesh, spec
from reshard.mesh import Axis
from reshard.spmd.propagation.axes import (
    AxisTable,
    Part,
    are_apart,
    begins,
    begins_strictly,
    covers,
    joined,
    size_of,
    without,
)

SIZE = 24


def parts(axis: int = 0) -> list[Part]:
    divisors = [d for d in range(1, SIZE + 1) if SIZE % d == 0]
    return [
        (axis, pre, size, 0)
        for pre in divisors
        for size in divisors
        if size > 1 and SIZE % (pre * size) == 0
    ]


def split(*bounds: int) -> bool:
    """Whether there is one splitting of the axis with all these bounds."""
    ordered = sorted({1, SIZE, *bounds})
    return all(high % low == 0 for low, high in itertools.pairwise(ordered))


@pytest.mark.parametrize("one", parts())
def test_apart_parts_are_parts_of_one_splitting(one: Part) -> None:
    for other in parts():
        low, high = sorted((one, other), key=lambda part: part[1])
        expected = low[1] * low[2] <= high[1] and split(
            one[1], one[1] * one[2], other[1], other[1] * other[2]
        )
        assert are_apart(one, other) == are_apart(other, one) == expected


@pytest.mark.parametrize("one", parts())
def test_the_longest_beginning_that_is_apart(one: Part) -> None:
    for other in parts():
        beginnings = [(0, one[1], size, 0) for size in range(2, one[2] + 1) if one[2] % size == 0]
        fitting = [part for part in beginnings if are_apart(part, other)]
        found = without(one, (other,))
        assert found == max(fitting, key=lambda part: part[2], default=None)


@pytest.mark.parametrize("one", parts())
def test_what_begins_and_what_covers(one: Part) -> None:
    for other in parts():
        ends = one[1] * one[2], other[1] * other[2]
        assert begins(one, other) == (one[1] == other[1] and other[2] % one[2] == 0)
        assert covers(one, other) == (one[1] <= other[1] and ends[1] <= ends[0])


def test_parts_with_a_level_stay_whole() -> None:
    levelled = (0, 1, 4, 7)
    assert not begins((0, 1, 2, 0), levelled)
    assert without(levelled, ((0, 2, 2, 0),)) is None
    assert without(levelled, ((1, 1, 2, 0),)) == levelled
    assert joined((levelled,), (0, 4, 6, 0)) == (levelled, (0, 4, 6, 0))


@given(st.lists(st.sampled_from([(a, 1, 2, 0) for a in range(3)]), max_size=4, unique=True))
def test_sequences_begin_one_another(axes: list[Part]) -> None:
    for count in range(len(axes)):
        assert begins_strictly(tuple(axes[:count]), tuple(axes))
        assert not begins_strictly(tuple(axes), tuple(axes[:count]))
    assert size_of(tuple(axes)) == 2 ** len(axes)


@pytest.mark.parametrize(
    "text",
    [
        "x:(2)4 y, - ? | replicated(x:(1)2)",
        "y / x, -",
        "y@stride2 / x:(1)2, x:(2)4 ?",
        "-, x | sum(y)",
        "y, - | max(x:(1)4) only(z=1)",
    ],
)
def test_a_sharding_there_and_back(text: str) -> None:
    table = AxisTable.of(DeviceMesh.of(x=8, y=3, z=2))
    one = spec(table.mesh, text)
    assert table.decoded(table.encoded(one)) is one


def test_a_full_axis_is_called_by_its_name() -> None:
    table = AxisTable.of(DeviceMesh.of(x=8))
    assert table.axis((0, 1, 8, 0)) == Axis("x")
    assert table.axis((0, 2, 4, 0)) == Axis("x", 2, 4)


def test_a_level_that_is_cut_short_is_left_out() -> None:
    table = AxisTable.of(DeviceMesh.of(x=2, y=2, z=2))
    parts = table.encoded(spec(table.mesh, "x / y z@stride2")).dims[0]
    assert table.whole_levels(parts) == parts
    assert table.whole_levels(parts[:2]) == parts[:1]
    assert table.whole_levels(()) == ()
