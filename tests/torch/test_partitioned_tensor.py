"""Tensors of partitions between real processes."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks
from reshard.geometry.transfers import Transfers
from reshard.torch.partitioned_tensor import Splits, owned_partitions
from selection import (
    choose,
    keep_where,
)

# Of four partitions of 6, 10, 12 and 4, rank 0 has 4, 6, 4 and 2, rank 1 the rest.
EXAMPLE = [(4, 6, 4, 2), (2, 4, 8, 2)]


@st.composite
def matrices(draw: st.DrawFn) -> list[list[int]]:
    ranks, partitions = draw(st.integers(1, 5)), draw(st.integers(0, 7))
    sizes = st.lists(st.integers(0, 3), min_size=partitions, max_size=partitions)
    return draw(st.lists(sizes, min_size=ranks, max_size=ranks))


def table(rows: Transfers) -> list[tuple[int, int, int, int, int]]:
    """Sender, receiver, where it begins in either, and how long it is."""
    columns = (
        rows.source_slot,
        rows.target_slot,
        rows.source_start[:, 0],
        rows.target_start[:, 0],
        rows.shape[:, 0],
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_example_of_the_proposal() -> None:
    zero, one = (Splits.of_matrix(rank, EXAMPLE) for rank in range(2))
    assert zero.of_side(aligned=False) == (4, 6, 4, 2)
    assert zero.of_side(aligned=True) == (4, 2, 6, 4)
    assert one.of_side(aligned=False) == (2, 4, 8, 2)
    assert one.of_side(aligned=True) == (4, 8, 2, 2)
    received, sent = zero.transfers(0, (16,), (0, 1), is_aligning=True)
    # P00 and P01 stay, P10 and P11 come; P02 and P03 go.
    assert table(received) == [(0, 0, 0, 0, 4), (1, 0, 0, 4, 2), (0, 0, 4, 6, 6), (1, 0, 0, 12, 4)]
    assert table(sent) == [(0, 1, 10, 0, 4), (0, 1, 14, 0, 2)]
    received, sent = one.transfers(0, (16,), (0, 1), is_aligning=False)
    # P12 and P13 stay, P10 and P11 come back; P02 and P03 go back.
    assert table(received) == [(0, 1, 0, 0, 2), (0, 1, 0, 2, 4), (1, 1, 4, 6, 8), (1, 1, 14, 14, 2)]
    assert table(sent) == [(1, 0, 0, 0, 4), (1, 0, 12, 0, 2)]


def test_partitions_are_assigned_by_ceil() -> None:
    assert [list(owned_partitions(2, 3, rank)) for rank in range(3)] == [[0], [1], []]
    assert [list(owned_partitions(7, 3, rank)) for rank in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert [list(owned_partitions(4, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3], []]
    assert list(owned_partitions(0, 2, 1)) == []


@given(st.integers(0, 30), st.integers(1, 9))
def test_every_partition_has_one_owner(partitions: int, ranks: int) -> None:
    owned = [b for rank in range(ranks) for b in owned_partitions(partitions, ranks, rank)]
    assert owned == list(range(partitions))


@settings(max_examples=choose(45, 150))
@given(matrices(), st.booleans(), st.integers(0, 1), st.permutations(range(5)))
def test_every_element_is_transferred_to_its_index(
    matrix: list[list[int]], is_aligning: bool, dim: int, slots: list[int]
) -> None:
    """All ranks pack what they send, and unpack what they receive, knowing only their part."""
    ranks, partitions = len(matrix), len(matrix[0])
    slots = slots[:ranks]
    # Elements are named by partition, rank of origin and number, in three columns or rows.
    names = {
        (b, q): [100 * b + 10 * q + i for i in range(matrix[q][b])]
        for b in range(partitions)
        for q in range(ranks)
    }

    def side(rank: int, aligned: bool) -> np.ndarray:
        keys = [(b, rank) for b in range(partitions)]
        if aligned:
            keys = [(b, q) for b in owned_partitions(partitions, ranks, rank) for q in range(ranks)]
        axis = np.array([name for key in keys for name in names[key]], dtype=np.int64)
        return np.repeat(np.expand_dims(axis, 1 - dim), 3, axis=1 - dim)

    wire: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    parts = {}
    for rank in range(ranks):
        before, after = side(rank, not is_aligning), side(rank, is_aligning)
        splits = Splits.of_matrix(rank, matrix)
        parts[rank] = splits.transfers(dim, after.shape, slots, is_aligning)
        received, sent = parts[rank]
        assert set(received.target_slot.tolist()) <= {slots[rank]}
        assert set(sent.source_slot.tolist()) <= {slots[rank]} and not sent.stays.any()
        for row in in_order(sent):
            box = window(sent.source_start[row], sent.shape[row])
            wire[slots[rank], int(sent.target_slot[row])].append(before[box])
    for rank in range(ranks):
        before, after = side(rank, not is_aligning), side(rank, is_aligning)
        found = np.full(after.shape, -1)
        received, _ = parts[rank]
        for row in in_order(received):
            shape = received.shape[row]
            if received.stays[row]:
                data = before[window(received.source_start[row], shape)]
            else:
                data = wire[int(received.source_slot[row]), slots[rank]].pop(0)
            assert data.shape == tuple(shape)
            found[window(received.target_start[row], shape)] = data
        assert found.tolist() == after.tolist()
    assert not any(wire.values())


def in_order(rows: Transfers) -> list[int]:
    """As both ends list them: by place in the tensor."""
    order: list[int] = np.lexsort(rows.start.T[::-1]).tolist()
    return order


def window(start: np.ndarray, shape: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start.tolist(), shape.tolist(), strict=True))


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 3, (2, 3, 4), "the same on other ranks")
)
def test_conversions(ranks: int) -> None:
    expect_all_end_well(run_ranks("partitioned_process.py", ranks))


@pytest.mark.parametrize("when", ["splits", "pieces"])
def test_a_rank_that_is_killed(when: str) -> None:
    """The others raise before their group's timeout ends, and none hangs."""
    ended = run_ranks("partitioned_process.py", 3, when, timeout_s=60)
    told = "\n".join(one.output for one in ended)
    assert [one.code for one in ended] == [0, -signal.SIGKILL, 0], told


ROOT = Path(__file__).parents[2]


def test_the_example_in_the_documents() -> None:
    example = ROOT / "examples" / "experts.py"
    document = (ROOT / "docs" / "partitioned-tensors.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```", document, flags=re.MULTILINE | re.DOTALL)
    assert shown in example.read_text()
    expect_all_end_well(ended := run_ranks(str(example), 4))
    assert [one.output.split(":")[1] for one in ended] == [
        f" {count} tokens went to their experts and back\n" for count in (6, 9, 12, 15)
    ]
