"""The seconds of a collective in a group of ranks of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from reshard.cost.estimate import Part
from reshard.cost.formulas import fastest_formula
from reshard.cost.links import slowest_link
from reshard.errors import UsageError
from reshard.topology import Link, Topology


def collective_cost(
    kind: str,
    ranks: Sequence[int],
    size_bytes: float | Fraction,
    topology: Topology,
    library: str = "nccl",
    name: str = "",
) -> Part:
    """The seconds of one collective, on the slowest link of its group.

    Within a host where the topology's `Overhead` has a link of this kind, that one is taken.

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
        raise UsageError(f"a group of ranks {list(ranks)}; one rank or more, each once, expected")
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
    """The link of a kind where it was measured, else the slowest one."""
    if len(ranks) < 2:
        # A rank by itself has no link, and sends nothing.
        return Link(1)
    is_one_host = len(set(topology.host_of(ranks).tolist())) == 1
    measured = topology.overhead.collective(kind) if is_one_host else None
    return measured or slowest_link(topology, ranks)
