"""Estimates of seconds: collectives in a group, messages sent at once, and local copies.

*A collective* takes the time of its fastest algorithm (`reshard.cost.formulas`) on the slowest link
of its group.

*Messages* are sent at once, each over the link between its ranks. A rank sends a single message
at a time and receives another in parallel, so no schedule is faster than the busiest rank::

    rank 0 sends:   | alpha | bytes to 1 (host) | alpha | bytes to 2 (network)       |
    rank 1 sends:   | alpha | bytes to 0 (host) |
    seconds:        |<-- the maximum over all ranks, and over both directions ------>|

With a topology's `Overhead`, three more costs are counted:

- A rank packs and unpacks while it neither sends nor receives.
- The ranks of a host share its network card, and the hosts of a rack its uplink, in each direction.
- The ranks of a host share its processors and memory: no host takes less than the messages and
  copies of all its ranks together.

Messages and bytes are summed as integers, for each rank and level of links, before they are
multiplied. So the result does not depend on the order, and is the same on all ranks.

*Local copies.* A piece that is contiguous in memory is sent or received in place. Any other piece
is packed before it is sent, or unpacked after it has arrived. Elements that stay on a rank are
copied from source to target. A copy of `n` bytes in `r` contiguous runs takes `r * latency + n /
bandwidth`. For contributions that are reduced into the target, the time of the bytes is multiplied
by a factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reshard._records import Record
from reshard.cost.formulas import fastest_formula
from reshard.errors import UsageError
from reshard.runs import IntArray, distinct, find_distinct, sum_by
from reshard.topology import LEVELS, Link, Topology, link_levels, link_of, slowest_link


class Part(Record):
    """A collective, or messages that are all sent at once.

    Args:
        name: of the part.
        algorithm: the algorithm assumed.
        messages: number that the busiest rank sends, or receives, in sequence.
        busiest_bytes: number that it sends, or receives.
        latency_s: seconds of the messages' latencies.
        transfer_s: seconds of the bytes.
        copy_s: seconds of packing, unpacking and copying, if counted.
    """

    name: str
    algorithm: str
    messages: int
    busiest_bytes: float
    latency_s: float
    transfer_s: float
    copy_s: float = 0.0

    @property
    def seconds_s(self) -> float:
        """Seconds from start to end."""
        return self.latency_s + self.transfer_s + self.copy_s

    @classmethod
    def nothing(cls, name: str) -> Part:
        """Return a part that moves nothing and takes no time."""
        return cls(name, "-", 0, 0.0, 0.0, 0.0)


class Estimate(Record):
    """The parts of an operation, which run in sequence, and their seconds.

    Args:
        parts: in their order.
        call_s: seconds before and after all of them, see `reshard.topology.Overhead`.

    >>> estimate = Estimate((Part("all-gather(x)", "ring", 7, 7e6, 7e-5, 7e-3),))
    >>> round(estimate.seconds_s, 6)
    0.00707
    >>> print(estimate)
    part           algorithm  messages    bytes  latency  transfer     time
    -------------  ---------  --------  -------  -------  --------  -------
    all-gather(x)  ring              7  7.00 MB  70.0 µs   7.00 ms  7.07 ms
    """

    parts: tuple[Part, ...]
    call_s: float = 0.0

    @property
    def seconds_s(self) -> float:
        """Seconds from start to end."""
        return sum((part.seconds_s for part in self.parts), self.call_s)

    @property
    def latency_s(self) -> float:
        """Seconds that do not depend on sizes."""
        return sum((part.latency_s for part in self.parts), self.call_s)

    @property
    def transfer_s(self) -> float:
        """Seconds of transferring bytes."""
        return sum((part.transfer_s for part in self.parts), 0.0)

    @property
    def copy_s(self) -> float:
        """Seconds of packing, unpacking and copying, if counted."""
        return sum((part.copy_s for part in self.parts), 0.0)

    def __str__(self) -> str:
        from reshard.text import bytes_text, duration_text, table

        rows = [
            (part.name, part.algorithm, f"{part.messages:,}", bytes_text(part.busiest_bytes))
            for part in self.parts
        ]
        times = [
            (part.latency_s, part.transfer_s, part.copy_s, part.seconds_s) for part in self.parts
        ]
        if self.call_s:
            rows.insert(0, ("call", "", "", ""))
            times.insert(0, (self.call_s, 0.0, 0.0, self.call_s))
        if len(rows) != 1:
            rows.append(("together", "", "", ""))
            times.append((self.latency_s, self.transfer_s, self.copy_s, self.seconds_s))
        headers = [
            "part",
            "algorithm",
            "messages",
            "bytes",
            "latency",
            "transfer",
            "copies",
            "time",
        ]
        shown = [[*row, *map(duration_text, time)] for row, time in zip(rows, times, strict=True)]
        if not self.copy_s:
            # Most topologies do not count copies.
            for line in (headers, *shown):
                del line[6]
        return table(shown, headers, "ll" + "r" * (len(headers) - 2))


FloatArray = NDArray[np.float64]


_COLUMNS = ("rank", "size_bytes", "runs", "combined_bytes")


class LocalCopies(Record, eq=False):
    """Local copies as columns of shape `(copies,)`.

    Args:
        rank: the rank that copies.
        size_bytes: of each copy.
        runs: number of contiguous runs of each copy.
        combined_bytes: bytes that are combined with the elements in place; none if None.

    Raises UsageError for columns of different lengths, or a number below 0.

    >>> LocalCopies([1, 1], [3000, 1000], [3, 1]).by_rank(2)[0].tolist()
    [0, 4000]
    """

    rank: IntArray
    size_bytes: IntArray
    runs: IntArray
    combined_bytes: IntArray | None = None

    def __post_init__(self) -> None:
        if self.combined_bytes is None:
            object.__setattr__(self, "combined_bytes", np.zeros(len(self.rank), dtype=np.int64))
        for name in _COLUMNS:
            column = np.array(getattr(self, name), dtype=np.int64)
            object.__setattr__(self, name, column)
        columns = [getattr(self, name) for name in _COLUMNS]
        if any(column.ndim != 1 or len(column) != len(self.rank) for column in columns):
            raise UsageError(
                f"copies of shapes {[column.shape for column in columns]}; as many entries "
                "in each were expected"
            )
        if len(self.rank) and min(int(column.min()) for column in columns) < 0:
            raise UsageError("copies with a number below 0; ranks, bytes and runs are 0 or more")

    @classmethod
    def none(cls) -> LocalCopies:
        """Return no copies."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing)

    @classmethod
    def joined(cls, parts: Iterable[LocalCopies]) -> LocalCopies:
        """Concatenate copies."""
        all_parts = [cls.none(), *parts]
        return cls(
            *(np.concatenate([getattr(part, name) for part in all_parts]) for name in _COLUMNS)
        )

    def by_rank(self, ranks: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return bytes, runs and combined bytes of each rank, of shapes `(ranks,)`."""
        size_bytes, runs, combined_bytes = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
        for name, total in zip(_COLUMNS[1:], (size_bytes, runs, combined_bytes), strict=True):
            np.add.at(total, self.rank, getattr(self, name))
        return size_bytes, runs, combined_bytes


def copy_s(copies: LocalCopies, ranks: int, link: Link | None, combining: float) -> FloatArray:
    """Return the seconds of each rank's copies, of shape `(ranks,)`; 0 without a link.

    `combining` is the time of combining bytes relative to copying them.
    """
    if link is None:
        return np.zeros(ranks)
    size_bytes, runs, combined_bytes = copies.by_rank(ranks)
    weighted = (size_bytes - combined_bytes) + combined_bytes * combining
    seconds_s: FloatArray = runs * link.latency_s + weighted / link.bandwidth_bytes_per_s
    return seconds_s


def message_cost(
    sender: ArrayLike,
    receiver: ArrayLike,
    size_bytes: ArrayLike,
    topology: Topology,
    name: str = "exchange",
    copies: LocalCopies | None = None,
) -> Part:
    """Return the seconds until the last message has arrived and is in place.

    Args:
        sender, receiver, size_bytes: of each piece, all of shape `(pieces,)`. The pieces from a
            rank to another are a single message; pieces that stay on a rank take no time.
        topology: the hosts of the ranks, and the links.
        name: for people.
        copies: local copies; counted if the topology's overhead has links for them.

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
    # All pieces from a rank to another are a message; both ranks are encoded as a number.
    pair, _, of_piece = find_distinct(begin * topology.ranks + end)
    total = sum_by(len(pair), of_piece, size)
    of_pair = np.zeros(len(pair), dtype=np.int64)
    # All pieces of a pair of ranks have the same link.
    of_pair[of_piece] = levels
    work = _MessageWork(name, topology, of_pair, total, copies or LocalCopies.none())
    # Ranks, hosts and shared links work at the same time, so the slowest determines the result.
    best = Part.nothing(name)
    # The busiest sender, and the busiest receiver.
    for ranks in (pair // topology.ranks, pair % topology.ranks):
        best = max(best, work.of_busiest_rank(ranks), key=_sum_seconds)
        for part in work.of_shared_links(ranks):
            best = max(best, part, key=_sum_seconds)
    return max(best, work.of_busiest_host(pair // topology.ranks), key=_sum_seconds)


def _sum_seconds(part: Part) -> float:
    return part.seconds_s


class _MessageWork(Record, eq=False):
    """Messages by their pair of ranks, with the level of the link and bytes, and copies."""

    name: str
    topology: Topology
    levels: IntArray
    size_bytes: IntArray
    copies: LocalCopies

    def of_busiest_rank(self, ranks: IntArray) -> Part:
        """Return the cost of the slowest rank, sending or receiving; the first of equals."""
        topology = self.topology
        # Messages of each rank on each kind of link: shape `(levels, ranks)`.
        count = np.zeros((len(LEVELS), topology.ranks), dtype=np.int64)
        total = np.zeros_like(count)
        np.add.at(count, (self.levels, ranks), 1)
        np.add.at(total, (self.levels, ranks), self.size_bytes)
        latency_s = np.zeros(topology.ranks)
        transfer_s = np.zeros(topology.ranks)
        # A rank sends a single message at a time, so its seconds on all kinds of links add up.
        for level in distinct(self.levels).tolist():
            link = link_of(topology, level)
            latency_s += count[level] * link.latency_s
            transfer_s += total[level] / link.bandwidth_bytes_per_s
        overhead = topology.overhead
        copying_s = copy_s(self.copies, topology.ranks, overhead.copies, overhead.combining)
        return self._find_longest(
            count.sum(axis=0), total.sum(axis=0), latency_s, transfer_s, copying_s
        )

    def of_busiest_host(self, sender: IntArray) -> Part:
        """Return the cost of the slowest host for the messages and copies that its ranks share."""
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
        """Yield the cost of the busiest network card, and of the busiest uplink."""
        topology, overhead = self.topology, self.topology.overhead
        host = topology.host_of(ranks)
        for link, min_level, box in (
            (overhead.shared_network, 1, host),
            (overhead.shared_uplink, 2, topology.host_rack[host]),
        ):
            crosses = self.levels >= min_level
            if link is None or not crosses.any():
                continue
            count = np.bincount(box[crosses])
            total = sum_by(len(count), box[crosses], self.size_bytes[crosses])
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


def collective_cost(
    kind: str,
    ranks: Sequence[int],
    size_bytes: float | Fraction,
    topology: Topology,
    library: str = "nccl",
    name: str = "",
) -> Part:
    """Return the seconds of a collective, on the slowest link of its group.

    Within a host, the link of this kind in the topology's `Overhead` is preferred.

    Args:
        kind: a key of `FORMULAS`.
        ranks: the group.
        size_bytes: `n` of the formulas; see `reshard.cost.formulas`.
        topology: the hosts of the ranks, and the links.
        library: a key of `LIBRARIES`; the fastest of its algorithms is taken.
        name: for people; the kind when empty.

    Raises:
        UsageError: an unknown kind or library, no ranks, ranks twice, or a negative size.
        LayoutError: a rank outside the topology, or a link whose speed is not given.

    >>> from reshard.topology import Link
    >>> topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e9, 1e-5))
    >>> collective_cost("all-reduce", range(4), 4_000_000, topology).seconds_s
    0.00606
    """
    group = len(ranks)
    if not group or len(set(ranks)) != group:
        raise UsageError(
            f"a group of ranks {list(ranks)}; one or more distinct ranks were expected"
        )
    # Raises LayoutError for a rank outside the topology.
    topology.host_of(ranks)
    link = _find_link(kind, ranks, topology)
    formula = fastest_formula(kind, group, size_bytes, link, library)
    return Part(
        name or kind,
        formula.name,
        formula.rounds(group),
        formula.busiest_bytes(group, size_bytes),
        formula.latency_s(group, link),
        formula.transfer_s(group, size_bytes, link),
    )


def _find_link(kind: str, ranks: Sequence[int], topology: Topology) -> Link:
    """Return the measured link of a kind, or the slowest link of the group."""
    if len(ranks) < 2:
        # A single rank does not have a link, and sends nothing.
        return Link(1)
    is_one_host = len(set(topology.host_of(ranks).tolist())) == 1
    measured = topology.overhead.collective(kind) if is_one_host else None
    return measured or slowest_link(topology, ranks)
