"""The link between two ranks, and the slowest in a group.

Between ranks of one host runs `within_host`, between hosts of a rack `between_hosts`, and
`between_racks` otherwise. Only those that are in use have to be known.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from reshard.errors import LayoutError
from reshard.runs import IntArray
from reshard.topology import Link, Topology

LEVELS = ("within_host", "between_hosts", "between_racks")


def link_levels(topology: Topology, sender: ArrayLike, receiver: ArrayLike) -> IntArray:
    """The level, a position in `LEVELS`, of the link between each pair: shape `(pairs,)`.

    Raises LayoutError for ranks outside the topology.

    >>> topology = Topology.of(hosts=3, ranks_per_host=2, hosts_per_rack=2)
    >>> link_levels(topology, [0, 0, 0], [1, 2, 4]).tolist()
    [0, 1, 2]
    """
    near, far = topology.host_of(sender), topology.host_of(receiver)
    racks = topology.host_rack
    levels: IntArray = (near != far).astype(np.int64) + (racks[near] != racks[far])
    return levels


def link_of(topology: Topology, level: int) -> Link:
    """The link of a level. Raises LayoutError where the topology does not know it."""
    link: Link | None = getattr(topology, LEVELS[level])
    if link is None:
        raise LayoutError(
            f"{topology!r} has no {LEVELS[level]} link, and ranks that exchange data are that far "
            f"apart; give it: Topology(..., {LEVELS[level]}=Link(bandwidth_bytes_per_s, "
            "latency_s)), or take a preset's"
        )
    return link


def slowest_link(topology: Topology, ranks: Iterable[int]) -> Link:
    """The least bandwidth and the largest latency of all links between ranks of a group.

    Raises:
        LayoutError: fewer than two ranks, one that is not there, or a link that is not known.

    >>> fast, slow = Link(450e9, latency_s=3e-6), Link(50e9, latency_s=14e-6)
    >>> topology = Topology.of(hosts=2, ranks_per_host=2, within_host=fast, between_hosts=slow)
    >>> slowest_link(topology, [0, 1]) is fast, slowest_link(topology, [0, 1, 2]) == slow
    (True, True)
    """
    hosts, counts = np.unique(topology.host_of(list(ranks)), return_counts=True)
    racks, of_rack = np.unique(topology.host_rack[hosts], return_counts=True)
    # Whether the group has links within a host, between hosts of a rack, and between racks.
    in_use = [(counts > 1).any(), (of_rack > 1).any(), len(racks) > 1]
    links = [link_of(topology, level) for level, is_used in enumerate(in_use) if is_used]
    if not links:
        raise LayoutError(f"no link within a group of {int(counts.sum())} ranks; give 2 or more")
    if len(links) == 1:
        return links[0]
    return Link(
        min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links)
    )
