"""How long do messages take that are all sent at once, each over the link between its ranks?

A rank sends one message at a time and receives one at the same time, so no schedule takes less
than its busiest rank does::

    rank 0 sends:   | alpha | bytes to 1 (host) | alpha | bytes to 2 (network)       |
    rank 1 sends:   | alpha | bytes to 0 (host) |
    seconds:        |<-- the longest of all ranks, and of both directions ---------->|

Messages and bytes are summed as whole numbers, for each rank and each level of links, before
they are multiplied. So the answer does not depend on the order, and is the same on all ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

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
) -> Part:
    """The seconds until the last message has arrived.

    Args:
        sender, receiver, size_bytes: of each piece, all of shape `(pieces,)`. The pieces from
            one rank to another are one message; those that stay on a rank take no time.
        topology: the hosts of the ranks, and the links.
        name: for people.

    Raises:
        UsageError: columns of different lengths, or a negative size.
        LayoutError: a rank that the topology has not, or a link that it does not know.

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
    pair, of_piece = np.unique(begin * topology.ranks + end, return_inverse=True)
    total = np.zeros(len(pair), dtype=np.int64)
    np.add.at(total, of_piece.reshape(-1), size)
    of_pair = np.zeros(len(pair), dtype=np.int64)
    of_pair[of_piece.reshape(-1)] = levels
    best = Part.nothing(name)
    for ranks in (pair // topology.ranks, pair % topology.ranks):
        best = max(best, _busiest(ranks, of_pair, total, topology, name), key=_seconds)
    return best


def _seconds(part: Part) -> float:
    return part.seconds_s


def _busiest(
    ranks: IntArray, levels: IntArray, size_bytes: IntArray, topology: Topology, name: str
) -> Part:
    """What the rank that takes longest sends, or receives; the first of equals."""
    count = np.zeros((len(LEVELS), topology.ranks), dtype=np.int64)
    total = np.zeros_like(count)
    np.add.at(count, (levels, ranks), 1)
    np.add.at(total, (levels, ranks), size_bytes)
    latency_s = np.zeros(topology.ranks)
    transfer_s = np.zeros(topology.ranks)
    for level in np.unique(levels).tolist():
        link = link_of(topology, level)
        latency_s += count[level] * link.latency_s
        transfer_s += total[level] / link.bandwidth_bytes_per_s
    rank = int((latency_s + transfer_s).argmax())
    return Part(
        name,
        "direct",
        int(count[:, rank].sum()),
        float(total[:, rank].sum()),
        float(latency_s[rank]),
        float(transfer_s[rank]),
    )
