"""Numbers in names: which coordinate of an axis a layer or an expert lives at."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cut_rules import parse_rule
from reshard.errors import RecipeError, RuleError
from reshard.recipes.layer_placement import LayerPlacement, Numbering, balance_weights


@given(st.integers(1, 40), st.integers(1, 12))
def test_ceil_places_a_number_by_its_quotient(count: int, parts: int) -> None:
    places = LayerPlacement.cut(parse_rule("ceil"), count, parts)
    chunk = -(-count // parts)
    assert places.coordinates == tuple((number // chunk,) for number in range(count))


@given(st.integers(0, 40), st.integers(1, 12))
def test_balanced_is_the_split_of_numpy(count: int, parts: int) -> None:
    places = LayerPlacement.cut(parse_rule("balanced"), count, parts)
    for part, numbers in enumerate(np.array_split(np.arange(count), parts)):
        assert all(places.of_number(int(number)) == (part,) for number in numbers)


def test_any_cut_rule_can_deal() -> None:
    assert LayerPlacement.cut(parse_rule("sizes[0,3,1]"), 4, 3).coordinates == (
        (1,),
        (1,),
        (1,),
        (2,),
    )
    assert LayerPlacement.cut(parse_rule("cyclic1"), 4, 3).coordinates == ((0,), (1,), (2,), (0,))
    # Interleaved stages of two layers each, and a thing at two places.
    cyclic = LayerPlacement.cut(parse_rule("cyclic2"), 8, 2)
    assert [at for (at,) in cyclic.coordinates] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert LayerPlacement.cut(parse_rule("heads2"), 2, 4).coordinates == ((0, 1), (2, 3))
    assert LayerPlacement.cut(parse_rule("windows[0:2,1:3]"), 3, 2).coordinates == (
        (0,),
        (0, 1),
        (1,),
    )
    with pytest.raises(RuleError, match="add up to 3, but the length is 4"):
        LayerPlacement.cut(parse_rule("sizes[2,1]"), 4, 2)


def test_ends_are_the_first_and_last_coordinates() -> None:
    places = LayerPlacement.cut(parse_rule("sizes[0,2,0]"), 2, 3)
    assert places.of_ends(["first"]) == (0,)
    assert places.of_ends(["last"]) == (2,)
    assert places.of_ends(["last", "first"]) == (0, 2)
    assert LayerPlacement.cut(parse_rule("ceil"), 2, 1).of_ends(["first", "last"]) == (0,)


def test_a_number_beyond_the_count() -> None:
    places = LayerPlacement.cut(parse_rule("ceil"), 3, 2)
    with pytest.raises(RecipeError, match="number 3 of a name, but the count"):
        places.of_number(3)
    assert LayerPlacement(2, places.coordinates, beyond_last=True).of_number(3) == (1,)


def test_an_invalid_cut_is_refused() -> None:
    with pytest.raises(RecipeError, match="the cut 'by' is not a cut rule such as balanced or siz"):
        Numbering("pp", "layers", "by")
    assert Numbering("pp", "layers", "bytes").cut == "bytes"


@given(
    st.lists(st.integers(0, 20), max_size=6),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_the_balanced_cut_minimises_the_heaviest_group_then_squares(
    weights: list[int], parts: int, first: int, last: int
) -> None:
    def loads(sizes: tuple[int, ...]) -> list[int]:
        edges = [0, *itertools.accumulate(sizes)]
        found = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
        found[0] += first
        found[-1] += last
        return found

    def cost(sizes: tuple[int, ...]) -> tuple[int, int]:
        return max(loads(sizes)), sum(load * load for load in loads(sizes))

    every = [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(weights))))
        for cuts in itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    ]
    found = balance_weights(weights, parts, first, last).sizes
    assert sum(found) == len(weights)
    assert cost(found) == min(map(cost, every))
