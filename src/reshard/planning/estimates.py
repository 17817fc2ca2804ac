"""How long does a plan's exchange take on a topology?

The slots of a plan are ranks; all pieces from one rank to another are one message, and all are
sent at once (`reshard.cost.messages`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.cost.estimate import Estimate, Part
from reshard.cost.messages import message_cost
from reshard.errors import PlanError
from reshard.topology import Topology

if TYPE_CHECKING:
    from reshard.planning.plan import Plan


def exchange_part(
    plan: Plan, itemsize_bytes: int, topology: Topology, name: str = "exchange"
) -> Part:
    """The messages of a plan for elements of so many bytes.

    Raises LayoutError for a rank that the topology has not, or a link that it does not know.
    """
    routes = plan.routes
    return message_cost(
        plan.source.cell_slot[routes.source_cell],
        plan.target.cell_slot[routes.target_cell],
        routes.elements * itemsize_bytes,
        topology,
        name,
    )


def plan_estimate(plan: Plan, topology: Topology) -> Estimate:
    """The seconds of a plan with a dtype, see `Plan.estimate`.

    >>> import reshard
    >>> from reshard.topology import Link
    >>> mesh = reshard.DeviceMesh.of(x=4)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("x, -", "-, x"))
    >>> topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e6, 1e-3))
    >>> plan_estimate(reshard.plan(rows, columns, "float32"), topology).seconds_s
    0.003048
    """
    if plan.dtype is None:
        raise PlanError(
            "seconds of a plan without a dtype; give one: reshard.plan(source, target, "
            "dtype='bfloat16')"
        )
    return Estimate((exchange_part(plan, plan.dtype.itemsize_bytes, topology),))
