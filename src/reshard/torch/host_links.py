"""Links between hosts of a job, measured within seconds before a plan is prepared.

Hosts are identified by the names that their ranks reported at rendezvous. The measured operation is
the exchange itself, with dense memory on both sides, on all hosts at the same time::

    nothing moves            the fixed time of a movement
    rank 0 -> rank 1         within each host
    rank 0 ----------> host 1 -> host 2 ...     one rank of each host to the next host
    all ranks -------> host 1 -> host 2 ...     all of them, which may share a network card
    all hosts of a rack -----> the next rack    if racks are given: their uplinks

Sizes increase until the transfer time can be measured. The time of a round is that of the slowest
rank; the result is the median of several rounds, or the minimum for tiny transfers. So all ranks
have the same result. `calibration` takes a minute, and measures copies and collectives as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import UsageError
from reshard.layout import Box, Layout
from reshard.topology import Link, Overhead, Topology
from reshard.torch.exchange.agreement import device_of
from reshard.torch.exchange.groups import RankGroup, rank_group
from reshard.torch.programs.methods import find_hosts
from reshard.torch.redistribution import redistribute

_SMALLEST_BYTES, _LARGEST_BYTES, _LONG_ENOUGH_S = 1 << 18, 1 << 26, 0.1
_TINY_BYTES, _TIMES, _TINY_TIMES = 8, 3, 7
# Ranks of a host share a card if all of them together are hardly faster than a single rank.
_SHARES = 0.75

_Pairs = list[tuple[int, int]]


def measure_links(
    group: dist.ProcessGroup | None = None, *, racks: Mapping[str, str] | None = None
) -> Topology:
    """Measure the hosts of a group's ranks and the speed of their links. All ranks call this.

    Pass the result as `topology=` to `redistribute` or `Refit.prepare`, whose `method="auto"` then
    uses it.

    Args:
        group: all ranks when None.
        racks: the rack of each host, by host name; the same on every rank.

    Returns:
        The topology, the same on every rank: links within a host and between hosts and racks, where
        there are two ends to measure; `overhead`, the fixed time of a movement; and the bandwidth
        that all ranks of a host, or all hosts of a rack, share.

    Raises:
        UsageError: on every rank, a host that is not in `racks`; a rank outside the group.
        RunError: a rank that does not answer within the group's timeout.
    """
    among = rank_group(group)
    hosts = _find_racks(find_hosts(among), among, racks)
    # Only hosts of the group's ranks: the topology includes others.
    members = set(among.ranks)
    ranks = [
        [rank for rank in hosts.ranks_of(host) if rank in members] for host in range(hosts.hosts)
    ]
    measuring = _PairTimes(among, group)
    call_s = measuring.tiny([])
    within = [(a[0], a[1]) for a in ranks if len(a) > 1]
    alone = _pair_boxes([of_host[:1] for of_host in ranks])
    together = _pair_boxes(ranks)
    within_host = measuring.link(within, call_s, 1)
    between_hosts = measuring.link(alone, call_s, 1)
    network = None
    most = max(map(len, ranks))
    if between_hosts is not None and most > 1:
        both = measuring.link(together, call_s, most)
        if (
            both is not None
            and both.bandwidth_bytes_per_s
            < (1 + _SHARES * (most - 1)) * between_hosts.bandwidth_bytes_per_s
        ):
            # Without latency, which the link between hosts adds.
            network = Link(both.bandwidth_bytes_per_s, 0.0)
    between_racks = uplink = None
    if hosts.racks > 1:
        of_rack: list[list[int]] = [[] for _ in range(hosts.racks)]
        for host, host_ranks in enumerate(ranks):
            of_rack[int(hosts.host_rack[host])] += host_ranks
        between_racks = measuring.link(
            _pair_boxes([rack_ranks[:1] for rack_ranks in of_rack]), call_s, 1
        )
        all_of_rack = measuring.link(_pair_boxes(of_rack), call_s, max(map(len, of_rack)))
        uplink = all_of_rack and Link(all_of_rack.bandwidth_bytes_per_s, 0.0)
    overhead = Overhead(call_s=call_s, shared_network=network, shared_uplink=uplink)
    links = within_host, between_hosts, between_racks
    return Topology(hosts.rank_host, hosts.host_rack, *links, overhead)


def _find_racks(hosts: Topology, group: RankGroup, racks: Mapping[str, str] | None) -> Topology:
    if racks is None:
        return hosts
    missing = sorted({name for name in group.hosts if name not in racks})
    if missing:
        raise UsageError(
            f"racks={dict(racks)!r} do not have the hosts {', '.join(missing)}; give the rack of "
            "every host of the group by its name"
        )
    # The rack of each host number, numbered as they first appear.
    name_of = {
        int(hosts.rank_host[rank]): name
        for rank, name in zip(group.ranks, group.hosts, strict=True)
    }
    number: dict[str, int] = {}
    of_host = [number.setdefault(racks[name_of[host]], len(number)) for host in range(hosts.hosts)]
    return Topology(hosts.rank_host, of_host)


def _pair_boxes(boxes: Sequence[Sequence[int]]) -> _Pairs:
    """Return every rank of a box with a rank of the next box."""
    if len(boxes) < 2:
        return []
    following = [*boxes[1:], boxes[0]]
    return [
        (rank, other[place % len(other)])
        for box, other in zip(boxes, following, strict=True)
        for place, rank in enumerate(box)
    ]


class _PairTimes:
    """Measured times of pairs of ranks that send at the same time."""

    def __init__(self, group: RankGroup, torch_group: dist.ProcessGroup | None) -> None:
        self._group, self._given = group, torch_group
        self._device = device_of(torch_group)

    def tiny(self, pairs: _Pairs) -> float:
        """Return the seconds of a tiny transfer between each pair."""
        return min(self._times(pairs, _TINY_BYTES, _TINY_TIMES))

    def link(self, pairs: _Pairs, call_s: float, senders: int) -> Link | None:
        """Return the link that `senders` of the pairs share, or None without pairs."""
        if not pairs:
            return None
        latency_s = max(self.tiny(pairs) - call_s, 0.0)
        size_bytes = _SMALLEST_BYTES
        while True:
            taken_s = median(self._times(pairs, size_bytes, _TIMES))
            if taken_s >= _LONG_ENOUGH_S or size_bytes >= _LARGEST_BYTES:
                break
            size_bytes *= 4
        # The fixed times vary: attribute at least half of the time to the transfer.
        moving_s = max(taken_s - call_s - latency_s, taken_s / 2)
        return Link(senders * size_bytes / moving_s, latency_s)

    def _times(self, pairs: _Pairs, size_bytes: int, times: int) -> list[float]:
        """Return the slowest rank's seconds, without the first round, which allocates memory."""
        count = max(len(pairs), 1)
        shape = (count * size_bytes,)
        slots = max(self._group.ranks) + 1
        boxes = [Box((n * size_bytes,), ((n + 1) * size_bytes,)) for n in range(count)]
        ends = list(zip(*pairs, strict=True)) or [(self._group.ranks[0],)] * 2
        before, after = (
            Layout.from_boxes(shape, list(zip(end, boxes, strict=True)), slots) for end in ends
        )
        rank = self._group.rank
        own, out = (self._allocate(layout, rank) for layout in (before, after))
        slowest_s = []
        for _ in range(times + 1):
            # A barrier: ranks begin together, so that waiting for a late rank is not measured.
            self._group.all_gather(torch.zeros(1))
            begun_s = time.perf_counter()
            redistribute(
                own,
                after,
                source=before,
                dtype=torch.uint8,
                out=out,
                group=self._given,
                method="exchange",
            )
            # Copies to the device are only queued when `redistribute` returns.
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            mine = torch.tensor([time.perf_counter() - begun_s], dtype=torch.float64)
            slowest_s.append(max(float(seconds) for seconds in self._group.all_gather(mine)))
        return slowest_s[1:]

    def _allocate(self, layout: Layout, rank: int) -> Any:
        shape = layout.local_shapes.get(rank)
        if shape is None:
            return None
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)
