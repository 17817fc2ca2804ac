"""A collective of a group of a topology's ranks."""

from __future__ import annotations

import pytest

from reshard.cost import collective_cost
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link, Topology

TOPOLOGY = Topology.of(
    hosts=2, ranks_per_host=4, within_host=Link(1000.0, 1.0), between_hosts=Link(100.0, 5.0)
)


def test_on_one_host_and_across_two() -> None:
    near = collective_cost("all-gather", range(4), 4000, TOPOLOGY)
    assert (near.latency_s, near.transfer_s) == (3.0, 3.0)
    far = collective_cost("all-gather", [0, 1, 2, 4], 4000, TOPOLOGY)
    assert (far.latency_s, far.transfer_s, far.seconds_s) == (15.0, 30.0, 45.0)
    assert (far.name, far.algorithm, far.messages, far.busiest_bytes) == (
        "all-gather",
        "ring",
        3,
        3000.0,
    )


def test_a_library_decides_the_algorithm() -> None:
    any_one = collective_cost("all-gather", range(4), 40, TOPOLOGY, "any", "mine")
    assert (any_one.name, any_one.algorithm, any_one.latency_s) == ("mine", "doubling", 2.0)
    assert collective_cost("all-gather", range(4), 40, TOPOLOGY).algorithm == "ring"


def test_a_rank_by_itself_needs_no_link() -> None:
    assert collective_cost("all-reduce", [1], 1000, Topology([0, 0])).seconds_s == 0


@pytest.mark.parametrize("ranks", [[], [1, 1]])
def test_a_group_is_of_different_ranks(ranks: list[int]) -> None:
    with pytest.raises(UsageError, match=r"a group of ranks \["):
        collective_cost("all-reduce", ranks, 1, TOPOLOGY)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 8 "):
        collective_cost("all-reduce", [8], 1, TOPOLOGY)
    with pytest.raises(LayoutError, match="no between_hosts link"):
        collective_cost("all-reduce", [0, 1], 1, Topology([0, 1]))
    with pytest.raises(UsageError, match="unknown kind"):
        collective_cost("gossip", [0, 1], 1, TOPOLOGY)
    with pytest.raises(UsageError, match="unknown library"):
        collective_cost("permute", [0], 1, TOPOLOGY, "mpi")
