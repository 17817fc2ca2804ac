"""The closed set of the greatest gain, against every closed set."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from reshard.spmd.placement.largest_closure import largest_closure


@pytest.mark.parametrize("seed", range(200))
def test_no_closed_set_has_more_and_of_equals_none_is_smaller(seed: int) -> None:
    random = Random(seed)
    count = random.randint(0, 7)
    gains = [random.randint(-5, 6) for _ in range(count)]
    needs = [[other for other in range(count) if random.random() < 0.25] for _ in range(count)]
    every = [
        set(some)
        for size in range(count + 1)
        for some in itertools.combinations(range(count), size)
        if all(other in some for one in some for other in needs[one])
    ]
    most = max(sum(gains[one] for one in some) for some in every)
    # The smallest first.
    best = next(some for some in every if sum(gains[one] for one in some) == most)
    assert largest_closure(gains, needs) == best


def test_a_long_chain() -> None:
    count = 300
    gains = [-1] * (count - 1) + [count]
    needs = [[number - 1] if number else [] for number in range(count)]
    assert largest_closure(gains, needs) == set(range(count))
    gains[-1] = count - 1
    assert largest_closure(gains, needs) == set()
