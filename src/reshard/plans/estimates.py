"""Estimates of the seconds that an exchange takes: of a plan, of a job, or in stages.

Slots are ranks; all pieces from one rank to another, of all tensors, are one message, and all
messages are sent at once (`reshard.cost.estimate`). The fan-out of a staged job follows its
exchange. Where the topology's `Overhead` counts copies, packing and unpacking are added, except for
stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reshard.binding import RankMemory
from reshard.cost.estimate import Estimate, LocalCopies, Part, message_cost
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.job_item import JobItem
from reshard.plans.job_transfers import JobTransfers
from reshard.plans.local_copies import copies_of
from reshard.topology import Topology


def exchange_part(
    plan: LayoutChange, itemsize_bytes: int, topology: Topology, name: str = "exchange"
) -> Part:
    """The messages of a plan, for elements of `itemsize_bytes`.

    Raises LayoutError for a rank that the topology has not, or a link that it does not know.
    """
    return exchanges_part([plan], itemsize_bytes, topology, name)


def exchanges_part(
    plans: Sequence[LayoutChange],
    itemsize_bytes: int,
    topology: Topology,
    name: str = "exchange",
    *,
    keeps: bool = True,
    inside: Layout | None = None,
) -> Part:
    """The messages of several plans at once; for `keeps` and `inside` see `copies_of`.

    Raises LayoutError for a rank that the topology has not, or a link that it does not know.
    """
    # Routes are enough for the messages; boxes are written out only where copies count.
    nothing = np.zeros(0, dtype=np.int64)
    routes = [(plan, plan.routes) for plan in plans]
    copies = None
    if topology.overhead.counts_copies:
        copies = LocalCopies.joined(
            copies_of(
                plan.transfers,
                plan.source,
                plan.target,
                itemsize_bytes,
                keeps=keeps,
                inside=inside,
            )
            for plan in plans
        )
    return message_cost(
        np.concatenate([nothing, *(p.source.cell_slot[r.source_cell] for p, r in routes)]),
        np.concatenate([nothing, *(p.target.cell_slot[r.target_cell] for p, r in routes)]),
        np.concatenate([nothing, *(found.elements * itemsize_bytes for _, found in routes)]),
        topology,
        name,
        copies,
    )


def change_estimate(change: LayoutChange, itemsize_bytes: int, topology: Topology) -> Estimate:
    """The seconds of one tensor's direct exchange, for elements of `itemsize_bytes`.

    >>> import reshard
    >>> from reshard.topology import Link
    >>> mesh = reshard.DeviceMesh.of(x=4)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("x, -", "-, x"))
    >>> topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e6, 1e-3))
    >>> change_estimate(LayoutChange(rows, columns), 4, topology).seconds_s
    0.003048
    """
    _check_topology(topology)
    part = exchange_part(change, itemsize_bytes, topology)
    return Estimate((part,), topology.overhead.call_s)


def exchange_estimate(
    items: Iterable[JobItem], transfers: JobTransfers, topology: Topology
) -> Estimate:
    """The seconds of the exchange of all tensors of a job, see `Job.estimate`."""
    _check_topology(topology)
    for item in items:
        _check_between_ranks(item)
    found = [(one.transfers, one.tensors.dtype.itemsize_bytes) for one in transfers.groups]
    copies = None
    if topology.overhead.counts_copies:
        copies = LocalCopies.joined(
            copies_of(
                one.transfers,
                one.tensors.change.source,
                one.tensors.change.target,
                one.tensors.dtype.itemsize_bytes,
            )
            for one in transfers.groups
        )
    part = _transfers_part(found, topology, "exchange", copies)
    return Estimate((part,), topology.overhead.call_s)


def stages_estimate(
    items: Sequence[JobItem],
    stages: Sequence[Sequence[Transfers]],
    names: Sequence[str],
    topology: Topology,
) -> Estimate:
    """The seconds of stages one after another; `stages` are those of each item, called `names`."""
    parts = (_stages_part(items, stages, [i], name, topology) for i, name in enumerate(names))
    return Estimate(tuple(parts), topology.overhead.call_s)


def across_part(
    items: Sequence[JobItem], stages: Sequence[Sequence[Transfers]], topology: Topology
) -> Part:
    """All stages but the last, which is within hosts, at once."""
    last = max((len(one) for one in stages), default=1) - 1
    return _stages_part(items, stages, range(last), "across", topology)


def _stages_part(
    items: Sequence[JobItem],
    stages: Sequence[Sequence[Transfers]],
    chosen: Iterable[int],
    name: str,
    topology: Topology,
) -> Part:
    sizes = [item.dtype.itemsize_bytes for item in items]
    found = [
        (one[stage], size) for stage in chosen for one, size in zip(stages, sizes, strict=True)
    ]
    return _transfers_part(found, topology, name)


def _check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise PlanError(f"seconds on {topology!r}; give a Topology, such as one of Topology.of")


def _transfers_part(
    found: Sequence[tuple[Transfers, int]],
    topology: Topology,
    name: str,
    copies: LocalCopies | None = None,
) -> Part:
    nothing = np.zeros(0, dtype=np.int64)
    return message_cost(
        np.concatenate([nothing, *(transfers.source_slot for transfers, _ in found)]),
        np.concatenate([nothing, *(transfers.target_slot for transfers, _ in found)]),
        np.concatenate([nothing, *(transfers.elements * size for transfers, size in found)]),
        topology,
        name,
        copies,
    )


def _check_between_ranks(item: JobItem) -> None:
    """Raises PlanError for a shard that is not in the memory of the rank of its number."""
    for binding in (item.source, item.target):
        for slot, address in binding.addresses.items():
            if address != RankMemory(slot):
                raise PlanError(
                    f"seconds of a job with shard {slot} of {item.name!r} at {address}; they are "
                    "estimated for jobs between ranks, each shard in the memory of the rank of its "
                    "number"
                )
