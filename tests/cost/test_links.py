"""Which link two ranks use, and the slowest one of a group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import slowest_link
from reshard.cost.links import link_levels
from reshard.errors import LayoutError
from reshard.topology import Link, Topology

NEAR, FAR, FARTHEST = Link(100.0, 1.0), Link(10.0, 2.0), Link(1.0, 3.0)
TOPOLOGY = Topology([0, 0, 1, 1, 2, 2], [0, 0, 1], NEAR, FAR, FARTHEST)


def test_the_level_of_every_pair() -> None:
    levels = [link_levels(TOPOLOGY, [a] * 6, range(6)).tolist() for a in (0, 3, 5)]
    assert levels == [[0, 0, 1, 1, 2, 2], [1, 1, 0, 0, 2, 2], [2, 2, 2, 2, 0, 0]]


@pytest.mark.parametrize(
    ("ranks", "link"),
    [
        ([0, 1], NEAR),
        ([0, 2], FAR),
        ([0, 1, 2], FAR),
        ([1, 5], FARTHEST),
        ([0, 2, 5], FARTHEST),
    ],
)
def test_the_slowest_link_of_a_group(ranks: list[int], link: Link) -> None:
    assert slowest_link(TOPOLOGY, ranks) == link


def test_bandwidth_and_latency_are_each_the_worst() -> None:
    mixed = Topology([0, 0, 1], None, Link(5.0, 1.0), Link(10.0, 2.0))
    assert slowest_link(mixed, [0, 1, 2]) == Link(5.0, 2.0)
    assert slowest_link(mixed, [0, 2]) == Link(10.0, 2.0)


def test_only_links_in_use_have_to_be_known() -> None:
    topology = Topology([0, 0, 1, 1], None, None, FAR)
    assert slowest_link(topology, [0, 2]) == FAR
    with pytest.raises(LayoutError, match=r"no within_host link.*preset"):
        slowest_link(topology, [0, 1, 2])
    with pytest.raises(LayoutError, match="no between_hosts link"):
        slowest_link(Topology([0, 1], None, NEAR), [0, 1])
    with pytest.raises(LayoutError, match="no between_racks link"):
        slowest_link(Topology([0, 1], [0, 1], NEAR, FAR), [0, 1])


def test_a_group_needs_two_ranks_that_are_there() -> None:
    with pytest.raises(LayoutError, match="group of 1 ranks"):
        slowest_link(TOPOLOGY, [3])
    with pytest.raises(LayoutError, match="rank 6 "):
        slowest_link(TOPOLOGY, [0, 6])


@given(st.data())
def test_the_slowest_is_that_of_all_pairs(data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=8))
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    hosts = [numbers[host] for host in hosts]
    racks = [0, *(data.draw(st.integers(0, 1)) for _ in range(max(hosts)))]
    racks = [min(rack, max(racks)) for rack in racks]
    given_links = [
        Link(data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))) for _ in range(3)
    ]
    topology = Topology(hosts, racks, *given_links)
    group = data.draw(st.lists(st.integers(0, len(hosts) - 1), min_size=2, max_size=6, unique=True))
    between = []
    for one, other in itertools.combinations(group, 2):
        same_host = hosts[one] == hosts[other]
        same_rack = racks[hosts[one]] == racks[hosts[other]]
        between.append(given_links[0 if same_host else 1 if same_rack else 2])
    assert slowest_link(topology, group) == Link(
        min(link.bandwidth_bytes_per_s for link in between),
        max(link.latency_s for link in between),
    )
