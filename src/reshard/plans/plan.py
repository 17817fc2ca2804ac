"""What has to move so that one layout becomes another?

A `Plan` is geometry: for one shape and two layouts, which boxes go from which slot to which.
It is a value, found without looking at any data, the same on every rank.

1. `holders`: who holds each element of the source;
2. `overlap`: along each dimension, what each target part takes from whom;
3. `routes`: the product of the dimensions, and a sender for each;
4. `transfers`: routes written out as boxes, for one rank or for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout

if TYPE_CHECKING:
    from reshard.cost.estimate import Estimate
    from reshard.sharding import ShardingSpec
    from reshard.topology import Topology

Array = TypeVar("Array")


class Plan(LayoutChange):
    """The movement from `source` to `target`, both of one shape. Make it with `reshard.plan`.

    Slots of the same number in both layouts are the same place: what a slot holds already
    stays there. Where several slots hold what another lacks, they take turns; a `Job` weighs
    the bytes of all its tensors instead.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=3)
    >>> source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    >>> plan = reshard.plan(source, target, dtype="float32")
    >>> plan.moved_elements, plan.moved_bytes, plan.lower_bound_bytes
    (26, 104, 104)
    >>> print(plan.for_rank(0))
    0 keeps [0:2, 0:2]
    1 -> 0 [0:2, 2:3]
    0 -> 1 [2:3, 0:2]
    """

    def __init__(self, source: Layout, target: Layout, dtype: DType | None = None) -> None:
        super().__init__(source, target)
        self.dtype = dtype

    def interning_key(self) -> object:
        return (self.source, self.target, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Plan, (self.source, self.target, self.dtype))

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between slots. Raises PlanError for a plan without a dtype."""
        return self.moved_elements * self._itemsize_bytes("moved_bytes")

    @property
    def lower_bound_bytes(self) -> int:
        """The fewest bytes any direct exchange can move. Raises PlanError without a dtype."""
        return self.lower_bound_elements * self._itemsize_bytes("lower_bound_bytes")

    def _itemsize_bytes(self, what: str) -> int:
        if self.dtype is None:
            raise PlanError(
                f"{what} of a plan without a dtype; give one: reshard.plan(source, target, "
                "dtype='bfloat16'), or ask for elements"
            )
        return self.dtype.itemsize_bytes

    def estimate(self, topology: Topology) -> Estimate:
        """The seconds that the exchange takes, see `reshard.cost`.

        Raises:
            PlanError: a plan without a dtype.
            LayoutError: a rank that the topology has not, or a link that it does not know.
        """
        from reshard.plans.estimates import change_estimate

        if self.dtype is None:
            raise PlanError(
                "seconds of a plan without a dtype; give one: reshard.plan(source, target, "
                "dtype='bfloat16')"
            )
        return change_estimate(self, self.dtype.itemsize_bytes, topology)

    def run(
        self,
        shards: Mapping[int, Array],
        out: Mapping[int, Array] | None = None,
        threads: int | None = None,
    ) -> dict[int, Array]:
        """Carry the plan out on arrays in this process: `{rank: array}` to `{rank: array}`.

        Writes to the arrays in `out` where they are given, by at most so many threads; one for
        each processor when None. See `reshard.execution.local.run`.
        """
        from reshard.execution.local import run

        return run(self, shards, out, threads, self.dtype)

    def to_json(self) -> str:
        """This plan as a short JSON document, see `reshard.plans.documents.plan_document`."""
        from reshard.plans.documents.plan_document import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote: the same object, where it still exists.

        Raises ReshardError for a text that is no plan's document.
        """
        from reshard.plans.documents.plan_document import plan_from_json

        return plan_from_json(text)

    def __str__(self) -> str:
        from reshard.plans.tables.plan_table import plan_table

        return plan_table(self)

    def __repr__(self) -> str:
        of = "" if self.dtype is None else f" {self.dtype.name}"
        return (
            f"<Plan of{of} {list(self.source.shape)} from {len(self.source.holders)} to "
            f"{len(self.target.holders)} slots>"
        )


def plan(
    source: Layout | ShardingSpec, target: Layout | ShardingSpec, dtype: object = None
) -> Plan:
    """The cheapest movement from one layout to another of the same shape.

    Args:
        source, target: `Layout`s.
        dtype: of the elements, when bytes are asked for: a name, or a NumPy or torch dtype.

    Raises:
        PlanError: layouts of different shapes, or specs, which have no shape yet.
    """
    return Plan(source, target, None if dtype is None else as_dtype(dtype))  # type: ignore[arg-type]
