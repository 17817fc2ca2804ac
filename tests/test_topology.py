"""Topologies: who shares a host, and what cannot be one."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import slowest_link
from reshard.errors import LayoutError
from reshard.topology import Device, Link, Topology, link_levels

FAST, SLOW = Link(400e9, 2e-6), Link(50e9, 10e-6)


def test_ranks_are_numbered_host_by_host() -> None:
    topology = Topology.of(hosts=4, ranks_per_host=8)
    assert (topology.ranks, topology.hosts, topology.racks) == (32, 4, 1)
    assert topology.host_of(range(32)).tolist() == [rank // 8 for rank in range(32)]
    assert topology.ranks_of(2) == tuple(range(16, 24))


def test_ranks_may_lie_anywhere() -> None:
    topology = Topology([1, 0, 2, 1, 0])
    assert [topology.ranks_of(host) for host in range(3)] == [(1, 4), (0, 3), (2,)]
    assert topology.host_of([[0, 1], [3, 2]]).tolist() == [[1, 0], [1, 2]]
    assert topology.host_of([]).tolist() == []


def test_hosts_with_names_are_numbered_as_they_appear() -> None:
    topology = Topology.of_names(["b", "a", "b", "c"], within_host=FAST)
    assert topology.rank_host.tolist() == [0, 1, 0, 2]
    assert topology.within_host is FAST


def test_equal_topologies_are_one() -> None:
    topology = Topology.of(
        hosts=3, ranks_per_host=2, hosts_per_rack=2, within_host=FAST, between_hosts=SLOW
    )
    same = Topology(np.array([0, 0, 1, 1, 2, 2]), [0, 0, 1], FAST, Link(50e9, 10e-6))
    assert topology is same
    assert pickle.loads(pickle.dumps(topology)) is topology
    assert copy.deepcopy(topology) is topology
    others = [
        Topology.of(hosts=3, ranks_per_host=2),
        Topology.of(hosts=3, ranks_per_host=2, within_host=FAST),
        Topology([0, 0, 1, 1, 2, 2], [0, 0, 1], FAST, SLOW, SLOW),
        Topology([0, 1, 0, 1, 2, 2], [0, 0, 1], FAST, SLOW),
        Topology([0, 0, 1, 1, 2, 2], [0, 1, 1], FAST, SLOW),
        Topology([0, 0, 1, 1, 2, 2], [0, 0, 1], FAST, SLOW, device=Device(1e12)),
    ]
    assert pickle.loads(pickle.dumps(others[-1])) is others[-1]
    assert len({topology, *others}) == 7


def test_nobody_can_change_one() -> None:
    given = np.array([0, 0, 1])
    topology = Topology(given)
    given[0] = 1
    assert topology.rank_host.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        topology.rank_host[0] = 1


def test_it_prints_its_size() -> None:
    assert repr(Topology([0, 0, 1])) == "<Topology of 3 ranks on 2 hosts>"
    assert repr(Topology([0, 1], [1, 0])) == "<Topology of 2 ranks on 2 hosts in 2 racks>"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology([]), "at least one rank"),
        (lambda: Topology([0, 2]), r"hosts are numbered \[0, 2\]"),
        (lambda: Topology([-1, 0]), r"hosts are numbered \[-1, 0\]"),
        (lambda: Topology([0.0, 1.0]), r"hosts \[0\.0, 1\.0\] must be whole"),  # type: ignore[list-item]
        (lambda: Topology(["a", "b"]), "hosts .* must be whole numbers"),  # type: ignore[list-item]
        (lambda: Topology([True, False]), "hosts .* must be whole numbers"),
        (lambda: Topology([[0], [1]]), "a whole number for each rank"),  # type: ignore[list-item]
        (lambda: Topology([[0], [1, 2]]), "must be whole numbers"),  # type: ignore[list-item]
        (lambda: Topology([0, 1], [0]), "racks of 1 hosts, but there are 2 hosts"),
        (lambda: Topology([0, 1], [0, 2]), "racks are numbered"),
        (lambda: Topology.of(hosts=0, ranks_per_host=8), "hosts 0 must be at least 1"),
        (lambda: Topology.of(hosts=2, ranks_per_host=-1), "ranks_per_host -1 must be"),
        (lambda: Topology.of(hosts=2, ranks_per_host=1, hosts_per_rack=0), "hosts_per_rack 0 must"),
        (lambda: Topology.of(hosts=2.0, ranks_per_host=1), r"hosts 2\.0 must be a whole number"),  # type: ignore[arg-type]
        (lambda: Topology.of(hosts=True, ranks_per_host=1), "hosts True must be a whole number"),
        (lambda: Topology([0, 0]).host_of([0.5]), r"ranks \[0\.5\] must be whole numbers"),
        (lambda: Topology([0, 0]).ranks_of(0.0), r"host 0\.0 must be a whole number"),  # type: ignore[arg-type]
        (lambda: Topology([0, 0], within_host=5e9), "5000000000.0 is not a Link"),  # type: ignore[arg-type]
        (lambda: Topology([0, 0], overhead=1e-3), r"0\.001 is not an Overhead"),  # type: ignore[arg-type]
        (lambda: Topology.of_names("ab"), "names 'ab'; give the name of each rank's host"),
        (lambda: Topology.of(hosts=1 << 30, ranks_per_host=8), "at most 4194304 ranks"),
        (lambda: Topology([0, 0]).host_of([0, 2]), "rank 2 of a topology over ranks 0 to 1"),
        (lambda: Topology([0, 0]).host_of(-1), "rank -1 "),
        (lambda: Topology([0, 0]).ranks_of(1), "host 1 of a topology over hosts 0 to 0"),
        (lambda: Link(0), "bandwidth_bytes_per_s of a link is 0; .*, more than 0"),
        (lambda: Link(float("nan")), "bandwidth_bytes_per_s of a link is nan"),
        (lambda: Link(float("inf")), "bandwidth_bytes_per_s of a link is inf"),
        (lambda: Link("fast"), "'fast'"),  # type: ignore[arg-type]
        (lambda: Link(1e9, -1), "latency_s of a link is -1; .*, 0 or more"),
        (lambda: Device(0), "memory_bytes_per_s of a device is 0; .*, more than 0"),
        (lambda: Device(1, (("int8", -1),)), "operations_per_s of int8 of a device is -1"),
        (lambda: Device(1, (("int8", 1), ("int8", 2))), "has a type twice"),
        (lambda: Device(1, 3), "operations_per_s is 3; pairs"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


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
