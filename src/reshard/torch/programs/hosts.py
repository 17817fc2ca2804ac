"""Hosts of a group's ranks, as the ranks have told each other when they first met.

What is planned needs only which ranks share a host. How fast links are is measured
(`reshard.torch.calibration`), given, or assumed: then only the order of times counts.
"""

from __future__ import annotations

from functools import lru_cache

from reshard.topology import Link, Topology
from reshard.torch.exchange.groups import RankGroup

# For how many bytes a message counts where no topology says so, all that is done for it included.
# Links of 50 to 450 GB/s carry about a megabyte in its latency; between four ranks of gloo on one
# host programs are quicker from sizes on that follow from as much.
MESSAGE_COUNTS_BYTES = 1 << 20
# How many times as long a byte takes between hosts: as much as between eight and nine of NVLink's
# and InfiniBand's in machines with a card for each rank, and less than where ranks share one.
ASSUMED_SLOWER = 8


def find_hosts(group: RankGroup) -> Topology:
    """Which ranks of a group share a host, by the names of their hosts; no speeds are known.

    Ranks that are not in the group count as on the host of its first one.
    """
    return _place_ranks(group.ranks, group.hosts)


@lru_cache(maxsize=64)
def _place_ranks(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> Topology:
    names = [hosts[0]] * (max(ranks) + 1)
    for rank, name in zip(ranks, hosts, strict=True):
        names[rank] = name
    return Topology.of_names(names)


@lru_cache(maxsize=64)
def assume_links(hosts: Topology) -> Topology:
    """Links between hosts of which nothing else is known. Its seconds are none."""
    near = Link(bandwidth_bytes_per_s=1.0, latency_s=MESSAGE_COUNTS_BYTES)
    far = Link(1.0 / ASSUMED_SLOWER, MESSAGE_COUNTS_BYTES)
    return Topology(hosts.rank_host, hosts.host_rack, near, far, far)
