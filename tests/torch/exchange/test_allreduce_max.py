"""Maxima of numbers over ranks that share memory, which are threads here."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")

from reshard.torch.exchange import allreduce_max
from reshard.torch.exchange.allreduce_max import MAX_BY_FIRST, gather_near, reduce_near_max
from reshard.torch.exchange.one_host.shared_memory import SharedMemory

pytestmark = pytest.mark.linux_only(reason="shared memory between ranks")


def connect(ranks: list[int]) -> list[SharedMemory]:
    """Memory of each rank, all of which share it."""
    sockets: dict[int, dict[int, socket.socket]] = {rank: {} for rank in ranks}
    for number, one in enumerate(ranks):
        for other in ranks[number + 1 :]:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sockets[one][other], sockets[other][one] = pair
    return [SharedMemory(sockets[rank], 60.0, is_complete=True) for rank in ranks]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, MAX_BY_FIRST, MAX_BY_FIRST + 1, 13])
def test_all_ranks_learn_the_greatest_of_each_number(count: int) -> None:
    choose = random.Random(count)
    # Their numbers are not their places.
    ranks = choose.sample(range(40), count)
    near = connect(ranks)
    numbers = np.array(
        [[[choose.randrange(-(1 << 62), 1 << 62) for _ in range(3)] for _ in ranks] for _ in "ab"]
    )

    def run(position: int) -> list[list[int]]:
        # Two in a row: what a quick rank tells of the second waits for a slow one.
        return [
            reduce_near_max(near[position], of[position], ranks, position).tolist()
            for of in numbers
        ]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(run, range(count)))
    assert found == [numbers.max(axis=1).tolist()] * count


def test_all_ranks_receive_the_notes_of_all_in_their_order() -> None:
    ranks = [7, 2, 5]
    near, notes = connect(ranks), [b"ab", b"cd", b"ef"]

    def run(position: int) -> bytes:
        return gather_near(near[position], notes[position], ranks, position)

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(run, range(len(ranks)))) == [b"abcdef"] * len(ranks)


@pytest.mark.parametrize("count", [3, MAX_BY_FIRST + 1])
def test_who_comes_after_a_rank_has_gone_is_told(count: int) -> None:
    ranks = [*range(count)]
    near = connect(ranks)
    near[1].close()
    # Also who would wait for others, which are not there yet.
    for position in (0, count - 1):
        with pytest.raises(RuntimeError, match="closed"):
            reduce_near_max(near[position], np.zeros(2, np.int64), ranks, position)


def test_who_waits_for_a_rank_that_goes_is_told() -> None:
    ranks = [0, 1, 2]
    near = connect(ranks)

    def wait(position: int) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            reduce_near_max(near[position], np.zeros(2, np.int64), ranks, position)
        # Who fails closes its end, and who waits for that one is told in turn.
        near[position].close()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, position) for position in (0, 1)]
        near[2].close()
        for one in waiting:
            one.result()


@pytest.mark.parametrize("count", [3, MAX_BY_FIRST + 1])
def test_who_waits_for_a_late_rank_learns_that_another_has_gone(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allreduce_max, "PATIENCE_S", 0.1)
    ranks = [*range(count)]
    near = connect(ranks)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reduce_near_max, near[0], np.zeros(3, np.int64), ranks, 0)
        time.sleep(0.2)
        # Rank 0 waits for another, which never comes.
        near[2].close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(30)


def test_a_rank_that_knows_all_may_end_before_others_are_told() -> None:
    ranks = [*range(MAX_BY_FIRST + 1)]
    near = connect(ranks)

    def run(position: int) -> list[int]:
        found: list[int] = reduce_near_max(
            near[position], np.array([position]), ranks, position
        ).tolist()
        near[position].close()
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(run, ranks)) == [[MAX_BY_FIRST]] * len(ranks)
