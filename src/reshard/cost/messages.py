"""The seconds of messages that are all sent at once, each over the link between its ranks.

A rank sends one message at a time and receives one at the same time, so no schedule takes less
than its busiest rank does::

    rank 0 sends:   | alpha | bytes to 1 (host) | alpha | bytes to 2 (network)       |
    rank 1 sends:   | alpha | bytes to 0 (host) |
    seconds:        |<-- the longest of all ranks, and of both directions ---------->|

Where the topology's `Overhead` says so, three things more are counted:

- A rank packs and unpacks (`reshard.cost.copies`) while it neither sends nor receives.
- The ranks of a host share its network card, and the hosts of a rack its uplink, each way.
- The ranks of a host share it: no host takes less than its messages and copies take of all its
  ranks together.

Messages and bytes are summed as whole numbers, for each rank and each level of links, before
they are multiplied. So the answer does not depend on the order, and is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from reshard.cost.copies import FloatArray, LocalCopies, copy_s
from reshard.cost.estimate import Part
from reshard.cost.links import LEVELS, link_levels, link_of
from reshard.errors import UsageError
from reshard.runs import IntArray
from reshard.topology import Topology


def message_cost(
    sender: ArrayLike,
    receiver: ArrayLike,
    size_bytes: ArrayLike,
    topology: Topology,
    name: str = "exchange",
    copies: LocalCopies | None = None,
) -> Part:
    """The seconds until the last message has arrived, and is where it belongs.

    Args:
        sender, receiver, size_bytes: of each piece, all of shape `(pieces,)`. The pieces from
            one rank to another are one message; those that stay on a rank take no time.
        topology: the hosts of the ranks, and the links.
        name: for people.
        copies: what ranks copy beside; it takes time where the topology's overhead says so.

    Raises:
        UsageError: columns of different lengths, or a negative size.
        LayoutError: a rank outside the topology, or a link whose speed is not given.

    >>> from reshard.topology import Link
    >>> links = {"within_host": Link(1e9, 1e-6), "between_hosts": Link(1e8, 1e-5)}
    >>> topology = Topology.of(hosts=2, ranks_per_host=2, **links)
    >>> part = message_cost([0, 0], [1, 2], [1000, 1000], topology)
    >>> part.messages, part.busiest_bytes, round(part.seconds_s, 9)
    (2, 2000.0, 2.2e-05)
    """
    columns = [np.asarray(column, dtype=np.int64) for column in (sender, receiver, size_bytes)]
    if len({column.shape for column in columns}) > 1 or columns[0].ndim != 1:
        raise UsageError(
            f"columns of shapes {[column.shape for column in columns]}; one sender, one receiver "
            "and one size for each piece were expected"
        )
    if columns[2].size and columns[2].min() < 0:
        raise UsageError(f"a piece of {columns[2].min()} bytes; 0 or more were expected")
    moving = columns[0] != columns[1]
    begin, end, size = (column[moving] for column in columns)
    levels = link_levels(topology, begin, end)
    # All pieces from one rank to another are one message; both ranks are one number here.
    pair, of_piece = np.unique(begin * topology.ranks + end, return_inverse=True)
    total = np.zeros(len(pair), dtype=np.int64)
    np.add.at(total, of_piece.reshape(-1), size)
    of_pair = np.zeros(len(pair), dtype=np.int64)
    # All pieces of a pair of ranks have one link.
    of_pair[of_piece.reshape(-1)] = levels
    work = _MessageWork(name, topology, of_pair, total, copies or LocalCopies.none())
    best = Part.nothing(name)
    # The busiest sender, and the busiest receiver.
    for ranks in (pair // topology.ranks, pair % topology.ranks):
        best = max(best, work.of_busiest_rank(ranks), key=_sum_seconds)
        for part in work.of_shared_links(ranks):
            best = max(best, part, key=_sum_seconds)
    return max(best, work.of_busiest_host(pair // topology.ranks), key=_sum_seconds)


def _sum_seconds(part: Part) -> float:
    return part.seconds_s


@dataclass(frozen=True, slots=True, eq=False)
class _MessageWork:
    """Messages by their pair of ranks, with the level of the link and bytes, and copies."""

    name: str
    topology: Topology
    levels: IntArray
    size_bytes: IntArray
    copies: LocalCopies

    def of_busiest_rank(self, ranks: IntArray) -> Part:
        """What the rank that takes longest sends, or receives; the first of equals."""
        topology = self.topology
        # Messages of each rank on each kind of link: shape `(levels, ranks)`.
        count = np.zeros((len(LEVELS), topology.ranks), dtype=np.int64)
        total = np.zeros_like(count)
        np.add.at(count, (self.levels, ranks), 1)
        np.add.at(total, (self.levels, ranks), self.size_bytes)
        latency_s = np.zeros(topology.ranks)
        transfer_s = np.zeros(topology.ranks)
        for level in np.unique(self.levels).tolist():
            link = link_of(topology, level)
            latency_s += count[level] * link.latency_s
            transfer_s += total[level] / link.bandwidth_bytes_per_s
        overhead = topology.overhead
        copying_s = copy_s(self.copies, topology.ranks, overhead.copies, overhead.combining)
        return self._find_longest(
            count.sum(axis=0), total.sum(axis=0), latency_s, transfer_s, copying_s
        )

    def of_busiest_host(self, sender: IntArray) -> Part:
        """What takes longest of what all ranks of a host do together, as far as they share it."""
        topology, overhead = self.topology, self.topology.overhead
        count = np.zeros(topology.hosts, dtype=np.int64)
        total = np.zeros_like(count)
        # Only messages within a host share its processors and memory.
        near = self.levels == 0
        host = topology.host_of(sender[near])
        np.add.at(count, host, 1)
        np.add.at(total, host, self.size_bytes[near])
        shared = overhead.shared_messages
        latency_s = np.zeros(topology.hosts)
        transfer_s = np.zeros(topology.hosts)
        if shared is not None:
            latency_s += count * shared.latency_s
            transfer_s += total / shared.bandwidth_bytes_per_s
        of_host = replace(self.copies, rank=topology.host_of(self.copies.rank))
        copying_s = copy_s(of_host, topology.hosts, overhead.shared_copies, overhead.combining)
        return self._find_longest(count, total, latency_s, transfer_s, copying_s)

    def of_shared_links(self, ranks: IntArray) -> Iterator[Part]:
        """What the busiest host sends to others, or receives, and the busiest rack likewise."""
        topology, overhead = self.topology, self.topology.overhead
        host = topology.host_of(ranks)
        for link, least_level, box in (
            (overhead.shared_network, 1, host),
            (overhead.shared_uplink, 2, topology.host_rack[host]),
        ):
            crosses = self.levels >= least_level
            if link is None or not crosses.any():
                continue
            count = np.bincount(box[crosses])
            total = np.zeros(len(count), dtype=np.int64)
            np.add.at(total, box[crosses], self.size_bytes[crosses])
            latency_s: FloatArray = np.asarray(count * link.latency_s, dtype=np.float64)
            transfer_s = total / link.bandwidth_bytes_per_s
            yield self._find_longest(count, total, latency_s, transfer_s, np.zeros_like(latency_s))

    def _find_longest(
        self,
        messages: IntArray,
        size_bytes: IntArray,
        latency_s: FloatArray,
        transfer_s: FloatArray,
        copying_s: FloatArray,
    ) -> Part:
        at = int((latency_s + transfer_s + copying_s).argmax())
        return Part(
            self.name,
            "direct",
            int(messages[at]),
            float(size_bytes[at]),
            float(latency_s[at]),
            float(transfer_s[at]),
            float(copying_s[at]),
        )
