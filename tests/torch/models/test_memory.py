"""What is found by columns of addresses is what comparing each with each finds."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from reshard.torch.models.memory import _are_apart

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda one: ("cpu", one[0], sum(one), "")),
    max_size=6,
)


@given(SPANS, SPANS)
def test_memory_is_apart_where_no_target_reaches_into_anything(
    sources: list[tuple[str, int, int, str]], targets: list[tuple[str, int, int, str]]
) -> None:
    pairs = [*itertools.combinations(targets, 2), *itertools.product(sources, targets)]
    expected = not any(one[1] < other[2] and other[1] < one[2] for one, other in pairs)
    assert _are_apart(sources, targets) == expected


def test_addresses_of_several_devices_are_not_compared() -> None:
    assert not _are_apart([("cpu", 0, 8, "a")], [("cuda:0", 16, 24, "b")])
