"""Rounds of messages: nobody sends or receives two in one, and there are as few as possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import PlanError
from reshard.plans.schedule.rounds import fewest_rounds, message_rounds

Message = tuple[int, int]


def assert_rounds(messages: list[Message], rounds: list[int]) -> None:
    """Every rank at most once at either end of a round, and no round more than the degree."""
    sent = [(sender, number) for (sender, _), number in zip(messages, rounds, strict=True)]
    received = [(receiver, number) for (_, receiver), number in zip(messages, rounds, strict=True)]
    assert len(set(sent)) == len(sent)
    assert len(set(received)) == len(received)
    counts = [
        sum(1 for message in messages if message[end] == rank)
        for end in (0, 1)
        for rank in {message[end] for message in messages}
    ]
    assert sorted(set(rounds)) == list(range(max(counts, default=0)))


@given(
    st.integers(1, 9).flatmap(
        lambda ranks: st.lists(
            st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)), max_size=60
        )
    )
)
def test_rounds_are_a_schedule_and_no_other_is_shorter(messages: list[Message]) -> None:
    senders, receivers = [a for a, _ in messages], [b for _, b in messages]
    rounds = message_rounds(senders, receivers)
    assert_rounds(messages, rounds.tolist())
    assert fewest_rounds(senders, receivers) == len(set(rounds.tolist()))
    assert message_rounds(senders, receivers).tolist() == rounds.tolist()


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], 0),
        ([(3, 3)], 1),
        ([(0, rank) for rank in range(1, 8)], 7),
        ([(rank, 0) for rank in range(1, 8)], 7),
        ([(0, 1)] * 5, 5),
        ([(r, (r + step) % 8) for r in range(8) for step in (1, 7)], 2),
        ([(a, b) for a in range(6) for b in range(6) if a != b], 5),
        # Taken greedily in this order, the path from 0 needs three.
        ([(0, 0), (1, 1), (0, 1), (1, 2)], 2),
    ],
    ids=["none", "one", "scatter", "gather", "parallel", "two-way ring", "all to all", "path"],
)
def test_rounds_of_known_patterns(messages: list[Message], expected: int) -> None:
    rounds = message_rounds([a for a, _ in messages], [b for _, b in messages]).tolist()
    assert_rounds(messages, rounds)
    assert len(set(rounds)) == expected


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 8, 21, 31, 32, 33])
def test_a_regular_graph_of_any_degree(degree: int) -> None:
    """Every rank is busy in every round: the case in which no colour is to spare."""
    random = np.random.default_rng(degree)
    pairs = [(r, int(peer)) for _ in range(degree) for r, peer in enumerate(random.permutation(13))]
    order = random.permutation(len(pairs))
    messages = [pairs[i] for i in order]
    rounds = message_rounds([a for a, _ in messages], [b for _, b in messages])
    assert_rounds(messages, rounds.tolist())


def test_many_messages_of_few_and_of_many_ranks() -> None:
    random = np.random.default_rng(7)
    for count, senders, receivers in ((20_000, 16, 8), (20_000, 5000, 1), (20_000, 300, 4000)):
        sender = random.integers(0, senders, count)
        receiver = random.integers(0, receivers, count)
        rounds = message_rounds(sender, receiver)
        degree = max(np.bincount(sender).max(), np.bincount(receiver).max())
        assert int(rounds.max()) + 1 == degree
        for rank in (sender, receiver):
            assert len(np.unique(rank * degree + rounds)) == count


def test_larger_messages_of_two_ranks_go_first() -> None:
    sizes = [3, 9, 1, 9]
    rounds = message_rounds([0] * 4, [1] * 4, sizes)
    assert rounds.tolist() == [2, 0, 3, 1]
    assert message_rounds([0] * 4, [1] * 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sender", "receiver", "sizes", "problem"),
    [
        ([0, 1], [0], None, "2 senders for 1 receivers"),
        ([0, -1], [0, 1], None, "rank -1"),
        ([0.5], [1], None, "column of rank numbers"),
        ([[0]], [[1]], None, "column of rank numbers"),
        ([0], [1], [1, 2], "2 sizes for 1 messages"),
    ],
)
def test_columns_that_are_not_messages(
    sender: object, receiver: object, sizes: object, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        message_rounds(sender, receiver, sizes)  # type: ignore[arg-type]
