"""Rules from patterns."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.errors import SpecError
from reshard.spmd.rules.rule_builder import Inferred, from_dims, from_pattern


def written(inferred: Inferred) -> str:
    return str(inferred.rule)


def test_factors_are_numbered_as_results_name_them() -> None:
    shapes = [(4, 8), (8, 16)]
    expected = "([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}"
    assert written(from_pattern("i k, k j -> i j", shapes, reduced="k")) == expected
    expected = "([j, i], [i, k]) -> ([j, k]) {i=8, j=4, k=16} reduction={i}"
    assert written(from_pattern("i k, k j -> i j", shapes, order="k", reduced="k")) == expected


def test_dimensions_of_several_factors_need_a_size() -> None:
    found = from_pattern("gr s, g t -> gr s", [(8, 5), (4, 7)], sizes={"r": 2})
    assert written(found) == (
        "([ij, k], [i, l]) -> ([ij, k]) {i=4, j=2, k=5, l=7} need_replication={l}"
    )


@pytest.mark.parametrize("shapes", [[(2, 3, 4)] * 2, [(3, 4), (2, 3, 4)], [(2, 1, 4), (3, 4)]])
def test_leading_dimensions_broadcast(shapes: list[tuple[int, ...]]) -> None:
    assert from_pattern("... i, ... i -> ...", shapes, reduced="i").result_shapes == ((2, 3),)


def test_a_dimension_that_is_expanded_has_a_factor_by_itself() -> None:
    found = from_pattern("..., ... -> ...", [(4, 1), (4, 8)])
    assert written(found) == ("([i, j], [i, k]) -> ([i, k]) {i=4, j=1, k=8} need_replication={j}")


def test_dimensions_without_a_factor_come_last() -> None:
    found = from_pattern("_ i -> i _", [(2, 4)], [(4, 3)])
    assert written(found) == "([j, i]) -> ([i, k]) {i=4, j=2, k=3} need_replication={j}"


def test_operands_may_be_numbers_or_none() -> None:
    assert written(from_pattern("*i, -> *i", [(4, 8), ()])) == "([i, j], []) -> ([i, j]) {i=4, j=8}"
    created = from_pattern(" -> *i", [], [(4,)], lengths={"i": 1})
    assert written(created) == "() -> ([i]) {i=4}"


@pytest.mark.parametrize(
    ("pattern", "shapes", "lengths", "part"),
    [
        ("i, i -> i", [(4,)], {}, "1 operands for `i, i -> i`; 2 were expected"),
        ("i, i -> i", [(4,), (3,)], {}, "shapes (4,), (3,): 4 and 3 are sizes of i in `i, i -> i`"),
        ("i -> i", [(4, 2)], {}, "shapes of the form `i -> i` were expected"),
        ("*a i j -> *a i", [(4,)], {}, "shapes of the form `*a i j -> *a i` were expected"),
        ("*a *b -> *b", [(4,)], {"a": 2}, "shapes of the form `*a *b -> *b` were expected"),
        ("..., ... -> ...", [(4, 2), (3,)], {}, "shapes (4, 2), (3,) do not broadcast"),
    ],
)
def test_shapes_that_do_not_fit(
    pattern: str, shapes: Any, lengths: dict[str, int], part: str
) -> None:
    with pytest.raises(SpecError) as caught:
        from_pattern(pattern, shapes, lengths=lengths)
    assert part in str(caught.value)


def test_sizes_of_dims_in_lists_are_checked_too() -> None:
    with pytest.raises(SpecError, match="4 and 3 are sizes of left; they must"):
        from_dims([["left"], ["left"]], [["left"]], [(4,), (3,)])


def test_operands_of_other_numbers_of_dimensions_are_refused() -> None:
    with pytest.raises(SpecError, match=r"shapes \(4, 3\); an operand 0 of 1 dimension was"):
        from_dims([["left"]], [["left"]], [(4, 3)])
