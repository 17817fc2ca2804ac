"""Messages are as large as a limit allows, and all ranks have them in one order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import UsageError
from reshard.plans.schedule.messages import (
    ALIGNMENT_BYTES,
    MESSAGE_BYTES,
    MOST_SMALL_MESSAGES,
    SMALL_MESSAGE_BYTES,
    align,
    are_cut_alike,
    fill_batches,
    group_pieces,
    limit_message_bytes,
    order_message,
)


@given(st.lists(st.integers(1, 1 << 19), max_size=30), st.integers(1, 1 << 16))
def test_every_piece_is_in_one_message_that_has_room_for_it(
    sizes_bytes: list[int], units: int
) -> None:
    message_bytes = units * ALIGNMENT_BYTES
    together, alone = group_pieces(sizes_bytes, message_bytes)
    numbers = [number for message in together for number in message]
    assert numbers == sorted(numbers)
    assert sorted(numbers + alone) == list(range(len(sizes_bytes)))
    for message in together:
        *others, last = (sizes_bytes[number] for number in message)
        assert sum(map(align, others)) + last <= message_bytes
    for before, message in itertools.pairwise(together):
        filled_bytes = sum(align(sizes_bytes[number]) for number in before)
        assert filled_bytes + sizes_bytes[message[0]] > message_bytes


@given(st.integers(0, 1 << 32), st.integers(1, 64))
def test_messages_of_all_peers_fit_in_a_limit(extra_bytes: int, peers: int) -> None:
    if extra_bytes < 4 * ALIGNMENT_BYTES * peers:
        with pytest.raises(UsageError, match=f"give at least {4 * ALIGNMENT_BYTES * peers}"):
            limit_message_bytes(extra_bytes, peers)
        return
    each = limit_message_bytes(extra_bytes, peers)
    assert each % ALIGNMENT_BYTES == 0
    assert ALIGNMENT_BYTES <= each <= MESSAGE_BYTES
    assert 4 * each * peers <= extra_bytes


@given(st.integers(64, 1 << 20), st.integers(1, 64), st.integers(0, 1 << 44))
def test_small_messages_are_few(extra_bytes: int, peers: int, moved_bytes: int) -> None:
    try:
        each = limit_message_bytes(extra_bytes, peers, moved_bytes)
    except UsageError as error:
        # What it says is enough is enough, and less is not.
        least = int(str(error).rpartition(" ")[2])
        assert extra_bytes < least
        each = limit_message_bytes(least, peers, moved_bytes)
        with pytest.raises(UsageError):
            limit_message_bytes(least - 1, peers, moved_bytes)
    assert each >= SMALL_MESSAGE_BYTES or moved_bytes <= each * MOST_SMALL_MESSAGES


@pytest.mark.parametrize("by_region", [False, True])
def test_no_two_messages_have_one_place(by_region: bool) -> None:
    pairs = [pair for pair in itertools.product(range(5), repeat=2) if pair[0] != pair[1]]
    # By region, a rank sends each region of one contribution to a rank once.
    messages = list(itertools.product(range(2), range(3), pairs))
    keys = [order_message(o, n, *pair, 5, 2, by_region) for o, n, pair in messages]
    assert len(set(keys)) == len(keys)
    first = sorted(zip(keys, messages, strict=True))[: len(pairs)]
    assert {(o, n) for _, (o, n, _) in first} <= ({(0, 0)} if by_region else {(0, 0), (0, 1)})


def test_contributions_are_cut_alike_where_each_rank_gets_the_same_boxes_of_all() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    for source, target, expected in (
        ("-, - | sum(x)", "x, -", True),
        ("-, - | sum(x)", "-, -", True),
        ("y, - | sum(x)", "x, -", True),
        ("y, - | sum(x)", "-, -", False),
    ):
        layouts = (reshard.spec(mesh, one).layout((8, 8)) for one in (source, target))
        assert are_cut_alike(reshard.plan(*layouts).change) is expected, (source, target)


@given(st.lists(st.integers(0, 10), max_size=20))
def test_batches_follow_one_another_and_fit(sizes: list[int]) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    batches = fill_batches(named, 10)
    assert list(batches.values()) == sorted(batches.values())
    for number in set(batches.values()):
        assert sum(named[name] for name, one in batches.items() if one == number) <= 10


@pytest.mark.parametrize("given", ["64M", 1.5, None, True, -1])
def test_limits_that_are_no_numbers_of_bytes(given: Any) -> None:
    with pytest.raises(UsageError, match=f"extra_bytes {given!r} must"):
        limit_message_bytes(given)
