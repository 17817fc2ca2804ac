"""Messages that are sent at once, against a count pair by pair."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import message_cost
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link, Topology

# Whole numbers of seconds, so that sums are exact.
NEAR, FAR, FARTHEST = Link(1.0, 1.0), Link(0.5, 8.0), Link(0.25, 64.0)
TOPOLOGY = Topology([0, 0, 1, 1, 2, 2], [0, 0, 1], NEAR, FAR, FARTHEST)
Pieces = list[tuple[int, int, int]]
pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 50)), max_size=30)


def seconds_of(found: Pieces) -> float:
    columns = [[piece[place] for piece in found] for place in range(3)]
    return message_cost(*columns, TOPOLOGY).seconds_s


def link_between(one: int, other: int) -> Link:
    if one // 2 == other // 2:
        return NEAR
    return FAR if max(one, other) < 4 else FARTHEST


def counted(found: Pieces) -> float:
    """The longest that any rank sends or receives, message by message."""
    messages: dict[tuple[int, int], int] = {}
    for sender, receiver, size_bytes in found:
        if sender != receiver:
            messages[sender, receiver] = messages.get((sender, receiver), 0) + size_bytes
    busy = {(side, rank): 0.0 for side in (0, 1) for rank in range(6)}
    for pair, size_bytes in messages.items():
        link = link_between(*pair)
        for side in (0, 1):
            busy[side, pair[side]] += link.latency_s + size_bytes / link.bandwidth_bytes_per_s
    return max(busy.values())


@given(pieces)
def test_seconds_are_those_of_the_busiest_rank(found: Pieces) -> None:
    assert seconds_of(found) == counted(found)


@given(pieces, st.randoms(use_true_random=False), st.tuples(*[st.integers(0, 5)] * 3))
def test_order_does_not_matter_and_more_never_takes_less(
    found: Pieces, order: random.Random, more: tuple[int, int, int]
) -> None:
    shuffled = found[:]
    order.shuffle(shuffled)
    assert seconds_of(shuffled) == seconds_of(found)
    assert seconds_of([*found, more]) >= seconds_of(found)


def test_by_hand() -> None:
    # Rank 0 sends 3 bytes next door in two pieces, one message, and 2 bytes to the other host.
    part = message_cost([0, 0, 0, 4], [1, 1, 2, 4], [1, 2, 2, 1000], TOPOLOGY, "mine")
    assert (part.name, part.algorithm, part.messages, part.busiest_bytes) == (
        "mine",
        "direct",
        2,
        5,
    )
    assert (part.latency_s, part.transfer_s, part.seconds_s) == (9.0, 7.0, 16.0)


def test_a_receiver_may_be_the_busiest() -> None:
    part = message_cost([0, 1, 3], [2, 2, 2], [1, 1, 1], TOPOLOGY)
    assert (part.messages, part.seconds_s) == (3, 2 * (8 + 2) + 2)


def test_nothing_takes_no_time() -> None:
    assert seconds_of([]) == 0
    assert seconds_of([(3, 3, 100)]) == 0


def test_large_sizes_are_counted_exactly() -> None:
    size_bytes = (1 << 52) + 1
    assert message_cost([0], [1], [size_bytes], TOPOLOGY).busiest_bytes == size_bytes


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (([0], [1, 2], [3]), UsageError, r"shapes \[\(1,\), \(2,\), \(1,\)\]"),
        (([[0]], [[1]], [[1]]), UsageError, "one sender, one receiver"),
        (([0], [1], [-3]), UsageError, "a piece of -3 bytes"),
        (([0], [6], [1]), LayoutError, "rank 6 of a topology over ranks 0 to 5"),
    ],
)
def test_what_cannot_be_is_refused(
    columns: tuple[list[int], list[int], list[int]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        message_cost(*columns, TOPOLOGY)


def test_a_link_in_use_must_be_known() -> None:
    with pytest.raises(LayoutError, match="no within_host link"):
        message_cost([0], [1], [1], Topology([0, 0]))
    assert message_cost([0], [0], [1], Topology([0, 0])).seconds_s == 0
