"""Topologies: the hosts and racks of ranks, and the speed of the links between them.

Ranks are on hosts, and hosts, if it matters, in racks. Two ranks are connected by the link of
the smallest box that contains both::

    rack 0                                 rack 1
    +------------------+------------------+------------------+
    | host 0           | host 1           | host 2           |
    | rank 0 -- rank 1 | rank 2 -- rank 3 | rank 4 -- rank 5 |
    +------------------+------------------+------------------+
        `within_host`    `between_hosts`    `between_racks`

Plans depend only on which ranks share a host. Bandwidths and latencies are for estimates of time,
and only links in use need to be given. `Overhead` is the measured time that messages do not account
for, such as that of copies. `Device` is the compute speed of a rank, for estimates of traced
functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from reshard._interning import Interned
from reshard._records import Record
from reshard._validation import MAX_RANKS, check_float, check_int, check_int_array, check_type
from reshard.errors import LayoutError
from reshard.runs import IntArray, distinct


class Link(Record):
    """The speed of messages from a rank to another: bandwidth, and latency before the first byte.

    Raises LayoutError for an invalid bandwidth or latency.

    >>> Link(50e9, latency_s=5e-6)
    Link(bandwidth_bytes_per_s=50000000000.0, latency_s=5e-06)
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "latency_s"):
            value = check_float(
                getattr(self, name),
                f"{name} of a link",
                LayoutError,
                allow_zero=name == "latency_s",
            )
            object.__setattr__(self, name, value)


class Overhead(Record):
    """Time that is not explained by each message alone on its link. A cost of None is not counted.

    Copies are described by links, too: their latency applies to each run of contiguous bytes, so
    many short runs take longer than a single long run.

    Args:
        call_s: seconds of any movement, regardless of its size: ranks agree and prepare.
        step_s: seconds of a step of a program, in addition to its messages; included in the link
            of its kind if `collectives` has it.
        copies: packing, unpacking and moving in place, by a rank.
        combining: the time of combining bytes with contributions in place, relative to copying.
        shared_messages: the messages between all ranks of a host together: they share its
            processors and its memory.
        shared_copies: the copies of all ranks of a host together.
        collectives: pairs of a kind of collective and the effective link between ranks of a host
            for that kind, including reductions; kept sorted.
        shared_network: the traffic of all ranks of a host with other hosts, in each direction, if
            they share its network card.
        shared_uplink: the traffic of all hosts of a rack with other racks, in each direction.

    Raises LayoutError for invalid seconds or links.

    >>> Overhead(call_s=2e-3, collectives=(("all-reduce", Link(1e9)),)).collective("all-reduce")
    Link(bandwidth_bytes_per_s=1000000000.0, latency_s=0.0)
    """

    call_s: float = 0.0
    step_s: float = 0.0
    copies: Link | None = None
    combining: float = 1.0
    shared_messages: Link | None = None
    shared_copies: Link | None = None
    collectives: tuple[tuple[str, Link], ...] = ()
    shared_network: Link | None = None
    shared_uplink: Link | None = None

    def __post_init__(self) -> None:
        for name in ("call_s", "step_s", "combining"):
            object.__setattr__(self, name, check_float(getattr(self, name), name, LayoutError))
        try:
            # Sorted, so that equal overheads compare and hash as equal.
            pairs = tuple(sorted(dict(self.collectives).items()))
        except (TypeError, ValueError):
            raise LayoutError(
                f"collectives {self.collectives!r}; pairs of a kind and a Link were expected"
            ) from None
        object.__setattr__(self, "collectives", pairs)
        shared = [self.shared_messages, self.shared_copies, self.shared_network, self.shared_uplink]
        for link in [*filter(None, [self.copies, *shared]), *(link for _, link in pairs)]:
            check_type(link, Link, "link", "give Link(bandwidth_bytes_per_s, ...)", LayoutError)

    @property
    def counts_copies(self) -> bool:
        """Whether copies take time."""
        return self.copies is not None or self.shared_copies is not None

    def collective(self, kind: str) -> Link | None:
        """Return the link between ranks of a host as measured for a kind of collective, or None."""
        return dict(self.collectives).get(kind)


NO_OVERHEAD = Overhead()


class Device(Record):
    """The compute and memory speed of the device of a rank.

    Args:
        memory_bytes_per_s: bandwidth of its memory.
        operations_per_s: pairs of the name of an element type and the additions and
            multiplications per second in matrix products of that type; kept sorted.

    Raises LayoutError for an invalid speed.

    >>> device = Device(3.35e12, (("bfloat16", 989e12), ("float32", 67e12)))
    >>> device.operations_for("bfloat16") / 1e12, device.operations_for("int64") / 1e12
    (989.0, 67.0)
    """

    memory_bytes_per_s: float
    operations_per_s: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        try:
            pairs = tuple(sorted((str(name), rate) for name, rate in self.operations_per_s))
        except (TypeError, ValueError):
            raise LayoutError(
                f"operations_per_s is {self.operations_per_s!r}; pairs of an element type's name "
                "and a speed were expected"
            ) from None
        if len({name for name, _ in pairs}) < len(pairs):
            raise LayoutError(f"operations_per_s has a type twice: {pairs}; give each once")
        bandwidth = check_float(
            self.memory_bytes_per_s, "memory_bytes_per_s of a device", LayoutError, allow_zero=False
        )
        object.__setattr__(self, "memory_bytes_per_s", bandwidth)
        rates = tuple(
            (
                name,
                check_float(
                    rate, f"operations_per_s of {name} of a device", LayoutError, allow_zero=False
                ),
            )
            for name, rate in pairs
        )
        object.__setattr__(self, "operations_per_s", rates)

    def operations_for(self, dtype: str) -> float | None:
        """Return the additions and multiplications per second with elements of a type.

        A type that is not listed has the speed of the slowest type listed; None if there are none.
        """
        rates = dict(self.operations_per_s)
        return rates.get(dtype, min(rates.values(), default=None))


class Topology(Interned):
    """Ranks on hosts, hosts in racks, and the links between them. Interned.

    Args:
        hosts: the host of each rank, shape `(ranks,)`: numbers 0, 1, 2... in any order, without
            gaps. `of_names` takes the names of hosts.
        racks: the rack of each host, shape `(hosts,)`, numbered alike; a single rack if None.
        within_host, between_hosts, between_racks: links, None if unknown.
        overhead: additional time; none by default.
        device: the speed of each rank's device; None if unknown.

    Raises:
        LayoutError: no ranks, numbers with gaps, a wrong number of racks.

    >>> topology = Topology([0, 0, 1, 1])
    >>> topology is Topology.of(hosts=2, ranks_per_host=2)
    True
    >>> topology.host_of([3, 0]).tolist(), topology.ranks_of(1)
    ([1, 0], (2, 3))
    """

    field_names = (
        *("rank_host", "host_rack", "within_host", "between_hosts", "between_racks"),
        *("overhead", "device"),
    )

    def __init__(
        self,
        hosts: Sequence[int] | IntArray,
        racks: Sequence[int] | IntArray | None = None,
        within_host: Link | None = None,
        between_hosts: Link | None = None,
        between_racks: Link | None = None,
        overhead: Overhead = NO_OVERHEAD,
        device: Device | None = None,
    ) -> None:
        self.rank_host = _numbers(hosts, "host", "rank")
        self.ranks = len(self.rank_host)
        # The numbers are contiguous, so the largest determines their count.
        self.hosts = int(self.rank_host.max()) + 1
        self.host_rack = _numbers([0] * self.hosts if racks is None else racks, "rack", "host")
        if len(self.host_rack) != self.hosts:
            raise LayoutError(
                f"racks of {len(self.host_rack)} hosts, but there are {self.hosts} hosts; give "
                "one rack per host"
            )
        self.racks = int(self.host_rack.max()) + 1
        self.within_host = within_host
        self.between_hosts = between_hosts
        self.between_racks = between_racks
        self.overhead = overhead
        self.device = device
        for link in filter(None, (within_host, between_hosts, between_racks)):
            check_type(link, Link, "link", "give Link(bandwidth_bytes_per_s, ...)", LayoutError)
        check_type(overhead, Overhead, "overhead", "give Overhead(call_s=...)", LayoutError)
        if device is not None:
            hint = "give Device(memory_bytes_per_s, ...)"
            check_type(device, Device, "device", hint, LayoutError)

    @classmethod
    def of(
        cls,
        *,
        hosts: int,
        ranks_per_host: int,
        hosts_per_rack: int | None = None,
        within_host: Link | None = None,
        between_hosts: Link | None = None,
        between_racks: Link | None = None,
        overhead: Overhead = NO_OVERHEAD,
        device: Device | None = None,
    ) -> Topology:
        """Return a topology of hosts with equally many ranks each, numbered host by host.

        The last rack may have fewer hosts than the others.

        >>> Topology.of(hosts=3, ranks_per_host=2, hosts_per_rack=2).host_rack.tolist()
        [0, 0, 1]
        """
        sizes = {"hosts": hosts, "ranks_per_host": ranks_per_host}
        if hosts_per_rack is not None:
            sizes["hosts_per_rack"] = hosts_per_rack
        for name, size in sizes.items():
            check_int(size, name, LayoutError, minimum=1)
        if hosts * ranks_per_host > MAX_RANKS:
            raise LayoutError(
                f"{hosts} hosts of {ranks_per_host} ranks; at most {MAX_RANKS} ranks are supported"
            )
        return cls(
            np.repeat(np.arange(hosts), ranks_per_host),
            None if hosts_per_rack is None else np.arange(hosts) // hosts_per_rack,
            within_host,
            between_hosts,
            between_racks,
            overhead,
            device,
        )

    @classmethod
    def of_names(cls, names: Iterable[Hashable], **links: Any) -> Topology:
        """Return a topology from the host name of each rank, numbered as they first appear.

        >>> Topology.of_names(["node-b", "node-a", "node-b"]).rank_host.tolist()
        [0, 1, 0]
        """
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise LayoutError(f"names {names!r}; give the name of each rank's host, in a list")
        number: dict[Hashable, int] = {}
        return cls([number.setdefault(name, len(number)) for name in names], None, **links)

    def interning_key(self) -> object:
        hosts, racks, *speeds = self._get_values(self)
        return (hosts.tobytes(), racks.tobytes(), *speeds)

    def host_of(self, ranks: ArrayLike) -> IntArray:
        """Return the host of each rank, in the shape of `ranks`.

        Raises LayoutError for a rank beyond the topology.
        """
        numbers = check_int_array(ranks, "ranks", LayoutError)
        bad = numbers[(numbers < 0) | (numbers >= self.ranks)]
        if bad.size:
            raise LayoutError(
                f"rank {bad.flat[0]} of a topology over ranks 0 to {self.ranks - 1}; describe "
                "the hosts of all ranks"
            )
        host: IntArray = self.rank_host[numbers]
        return host

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host, in order. Raises LayoutError for an unknown host."""
        host = check_int(host, "host", LayoutError)
        if host >= self.hosts:
            raise LayoutError(f"host {host} of a topology over hosts 0 to {self.hosts - 1}")
        return tuple(np.flatnonzero(self.rank_host == host).tolist())

    def __repr__(self) -> str:
        racks = f" in {self.racks} racks" if self.racks > 1 else ""
        return f"<Topology of {self.ranks} ranks on {self.hosts} hosts{racks}>"


def _numbers(values: Sequence[int] | IntArray, what: str, of: str) -> IntArray:
    """Return checked numbers of groups: 0 to n - 1, without gaps."""
    # A copy, since it becomes read-only.
    numbers = check_int_array(values, f"{what}s", LayoutError).copy()
    if numbers.ndim != 1 or not len(numbers):
        raise LayoutError(
            f"{what}s {values!r}: a whole number for each {of}, and at least one {of}, was expected"
        )
    present = distinct(numbers)
    if present[0] != 0 or present[-1] != len(present) - 1:
        raise LayoutError(
            f"{what}s are numbered {present.tolist()[:8]}; numbers from 0 up, without gaps, were "
            "expected (Topology.of_names takes names)"
        )
    numbers.flags.writeable = False
    return numbers


LEVELS = ("within_host", "between_hosts", "between_racks")


def link_levels(topology: Topology, sender: ArrayLike, receiver: ArrayLike) -> IntArray:
    """Return the level, a position in `LEVELS`, of the link between each pair: shape `(pairs,)`.

    Raises LayoutError for ranks outside the topology.

    >>> topology = Topology.of(hosts=3, ranks_per_host=2, hosts_per_rack=2)
    >>> link_levels(topology, [0, 0, 0], [1, 2, 4]).tolist()
    [0, 1, 2]
    """
    near, far = topology.host_of(sender), topology.host_of(receiver)
    racks = topology.host_rack
    # Racks contain whole hosts, so ranks in different racks differ in their hosts as well.
    levels: IntArray = (near != far).astype(np.int64) + (racks[near] != racks[far])
    return levels


def link_of(topology: Topology, level: int) -> Link:
    """Return the link of a level. Raises LayoutError if the topology does not have it."""
    link: Link | None = getattr(topology, LEVELS[level])
    if link is None:
        raise LayoutError(
            f"{topology!r} has no {LEVELS[level]} link, but ranks that exchange data need it; "
            f"give it: Topology(..., {LEVELS[level]}=Link(bandwidth_bytes_per_s, "
            "latency_s)), or take a preset's"
        )
    return link


def slowest_link(topology: Topology, ranks: Iterable[int]) -> Link:
    """Return the smallest bandwidth and largest latency of all links within a group of ranks.

    Raises:
        LayoutError: fewer than two ranks, a rank outside the topology, or an unknown link.

    >>> fast, slow = Link(450e9, latency_s=3e-6), Link(50e9, latency_s=14e-6)
    >>> topology = Topology.of(hosts=2, ranks_per_host=2, within_host=fast, between_hosts=slow)
    >>> slowest_link(topology, [0, 1]) is fast, slowest_link(topology, [0, 1, 2]) == slow
    (True, True)
    """
    counts = np.bincount(topology.host_of(list(ranks)))
    of_rack = np.bincount(topology.host_rack[np.flatnonzero(counts)])
    # Whether the group has links within a host, between hosts of a rack, and between racks.
    in_use = [(counts > 1).any(), (of_rack > 1).any(), np.count_nonzero(of_rack) > 1]
    links = [link_of(topology, level) for level, is_used in enumerate(in_use) if is_used]
    if not links:
        raise LayoutError(f"no link within a group of {int(counts.sum())} ranks; give 2 or more")
    if len(links) == 1:
        return links[0]
    return Link(
        min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links)
    )
