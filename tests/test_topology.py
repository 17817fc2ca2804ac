"""Topologies: who shares a host, and what cannot be one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from reshard.errors import LayoutError
from reshard.topology import Device, Link, Topology

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
        (lambda: Topology([0, 0], within_host=5e9), "5000000000.0 is no link"),  # type: ignore[arg-type]
        (lambda: Topology([0, 0], overhead=1e-3), r"0\.001 is no overhead"),  # type: ignore[arg-type]
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
        (lambda: Device(1, (("int8", 1), ("int8", 2))), "gives a type twice"),
        (lambda: Device(1, 3), "operations_per_s is 3; pairs"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
