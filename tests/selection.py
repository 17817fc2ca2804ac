"""Representative cases of a product: `make test` runs them, `make test-all` the others as well.

Each function returns all cases in their order, for `pytest.mark.parametrize`. Those that are not
kept carry the mark `exhaustive` with the reason.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

is_exhaustive = os.environ.get("RESHARD_EXHAUSTIVE_TESTS") != "0"
"""Whether exhaustive cases run, which `conftest.py` sets before test files are imported.

Programs that a test starts have it from the environment.
"""


def choose(default: T, exhaustive: T) -> T:
    """Return what a test tries inside one item: a number of examples, or a list of cases."""
    return exhaustive if is_exhaustive else default


def keep_where(keep: Callable[[Any], bool], cases: Iterable[Any], reason: str) -> list[Any]:
    """Keep the cases for which `keep` is true."""
    cases = list(cases)
    return _mark(cases, [number for number, case in enumerate(cases) if keep(case)], reason)


def keep_first_of(key: Callable[[Any], Any], cases: Iterable[Any], reason: str) -> list[Any]:
    """Keep the first case for each value of `key`."""
    cases = list(cases)
    firsts = {key(case): number for number, case in reversed([*enumerate(cases)])}
    return _mark(cases, firsts.values(), reason)


def keep_spread(count: int, cases: Iterable[Any], reason: str) -> list[Any]:
    """Keep `count` evenly spaced cases, the first and the last among them."""
    cases = list(cases)
    if count >= len(cases):
        return cases
    last = len(cases) - 1
    return _mark(cases, [round(n * last / max(count - 1, 1)) for n in range(count)], reason)


def keep_alternate(first: Iterable[Any], second: Iterable[Any], reason: str) -> list[Any]:
    """Keep every other pair of values, like the squares of one color on a chessboard."""
    pairs = [*itertools.product(enumerate(first), enumerate(second))]
    kept = [number for number, ((n, _), (m, _)) in enumerate(pairs) if (n + m) % 2 == 0]
    return _mark([(a, b) for (_, a), (_, b) in pairs], kept, reason)


def keep_covering(strength: int, cases: Iterable[Sequence[Any]], reason: str) -> list[Any]:
    """Keep few cases that have every combination of `strength` of their values that any case has.

    With a strength of 1 each value of each parameter is in a case that is kept; with 2, each pair
    of values of two parameters.
    """
    cases = list(cases)
    covers = [_combinations(case, strength) for case in cases]
    missing = set().union(*covers)
    kept = []
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(covers[number] & missing), -number))
        missing -= covers[best]
        kept.append(best)
    return _mark(cases, kept, reason)


def _combinations(case: Sequence[Any], strength: int) -> set[Any]:
    values = [(number, repr(value)) for number, value in enumerate(case)]
    return set(itertools.combinations(values, strength))


def _mark(cases: list[Any], kept: Iterable[int], reason: str) -> list[Any]:
    kept = set(kept)
    assert kept, "no case is kept"
    mark = pytest.mark.exhaustive(reason=reason)
    return [case if n in kept else _with_mark(case, mark) for n, case in enumerate(cases)]


def _with_mark(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=mark)
