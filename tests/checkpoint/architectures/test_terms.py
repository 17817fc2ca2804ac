"""Terms of records: numbers and conditions of a config."""

from __future__ import annotations

import pytest

from reshard.checkpoint.architectures.terms import find_number, holds

CONFIG = {
    "a": 3,
    "b": 4,
    "no": None,
    "dense": [1],
    "kinds": ["full", "linear"],
    "pattern": "M*E",
    "inner": {"c": 2},
}


@pytest.mark.parametrize(
    ("term", "numbers"),
    [
        ("a", [0, 1, 2]),
        ("!no", [0, 1, 2]),
        ("a<>b", [0, 1, 2]),
        ("a==b", []),
        ("n>=inner.c", [2]),
        ("n<inner.c", [0, 1]),
        ("n>=absent", []),
        ("(n+1)%inner.c=0", [1]),
        ("(n+1)%inner.c!=0", [0, 2]),
        ("n in dense", [1]),
        ("n not in dense", [0, 2]),
        ("kinds[n]=linear", [1]),
        ("pattern[n]!=M", [1, 2]),
        ("pattern[n]=*", [1]),
    ],
)
def test_where_a_term_holds(term: str, numbers: list[int]) -> None:
    assert [n for n in range(3) if holds(term, CONFIG, (n,))] == numbers


def test_numbers_of_a_config() -> None:
    assert find_number("no|a*inner.c+1", CONFIG) == 7
    assert find_number("absent", CONFIG) is None
    assert find_number("a//no", CONFIG) is None
