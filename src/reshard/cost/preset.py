"""A machine: how many ranks a host has, the links between them, and the library they use."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.cost.formulas import check_kind, check_library
from reshard.errors import LayoutError
from reshard.topology import NO_OVERHEAD, Device, Link, Overhead, Topology


@dataclass(frozen=True, slots=True)
class Preset:
    """The links of a kind of machine. `load_preset` reads one from a file.

    Args:
        name: for people and messages.
        description: one line on what it is.
        library: a key of `reshard.cost.LIBRARIES`.
        ranks_per_host: how many ranks the fastest links join.
        within_host: the link between ranks of a host.
        between_hosts: the link between hosts; None for a machine of one host.
        hosts_per_rack: hosts that `between_hosts` joins; all of them when None.
        between_racks: the link beyond.
        overhead: what takes time besides messages; nothing by default.
        device: how fast a rank computes; None where not known.

    Raises:
        LayoutError: a number of ranks or hosts below 1, or racks without a link between them.
        UsageError: an unknown library, or an unknown kind of collective.
    """

    name: str
    description: str
    library: str
    ranks_per_host: int
    within_host: Link
    between_hosts: Link | None = None
    hosts_per_rack: int | None = None
    between_racks: Link | None = None
    overhead: Overhead = NO_OVERHEAD
    device: Device | None = None

    def __post_init__(self) -> None:
        check_library(self.library)
        for kind, _ in self.overhead.collectives:
            check_kind(kind)
        if (self.hosts_per_rack is None) != (self.between_racks is None):
            raise LayoutError(
                f"preset {self.name!r} gives one of hosts_per_rack and between_racks; give both "
                "or none"
            )
        self.topology()

    def topology(self, hosts: int = 1) -> Topology:
        """The topology of so many hosts.

        Raises LayoutError for a number below 1, or more hosts than there are links for.

        >>> Preset("one", "", "gloo", 4, Link(1e9)).topology()
        <Topology of 4 ranks on 1 hosts>
        """
        if hosts != 1 and self.between_hosts is None:
            raise LayoutError(
                f"preset {self.name!r} is of one host, {hosts!r} were asked for; write a preset "
                "with a table [between_hosts]"
            )
        return Topology.of(
            hosts=hosts,
            ranks_per_host=self.ranks_per_host,
            hosts_per_rack=self.hosts_per_rack,
            within_host=self.within_host,
            between_hosts=self.between_hosts,
            between_racks=self.between_racks,
            overhead=self.overhead,
            device=self.device,
        )
