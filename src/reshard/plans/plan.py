"""The plan of a tensor: the transfers that lead from a layout to another, and their amounts.

A plan is a job of a single tensor. The elements that move follow from the two layouts
(`LayoutChange`). If several ranks hold an element, its sender is that of the job, as in the
exchange between live ranks (`reshard.plans.source_selection`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from reshard._interning import Interned
from reshard._validation import check_int, check_ints, check_type
from reshard.cost.estimate import Estimate
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError, PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.estimates import estimate_change
from reshard.plans.job import Job, JobItem
from reshard.plans.run import run_change
from reshard.plans.tables import format_plan
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec
from reshard.topology import Topology

Array = TypeVar("Array")

# The name of the tensor in the job.
_NAME = "tensor"


class Plan(Interned):
    """A plan from layout `source` to layout `target` of the same shape, made by `reshard.plan`.

    Slots with the same number in both layouts are the same rank, which keeps the elements that it
    already holds. If several ranks hold an element, senders are balanced by bytes, or by elements
    for a plan without a dtype.

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

    field_names = ("source", "target", "dtype")

    def __init__(self, source: Layout, target: Layout, dtype: DType | None = None) -> None:
        self.change = LayoutChange(source, target)
        self.dtype = dtype

    @property
    def source(self) -> Layout:
        """The layout before."""
        return self.change.source

    @property
    def target(self) -> Layout:
        """The layout after."""
        return self.change.target

    @cached_property
    def job(self) -> Job:
        """The job of this tensor. Without a dtype, elements count as a byte each."""
        dtype = as_dtype("uint8") if self.dtype is None else self.dtype
        return Job([JobItem.between_ranks(_NAME, dtype, self.source, self.target)])

    @cached_property
    def transfers(self) -> Transfers:
        """All boxes, including those that stay. Raises PlanError if no rank holds an element."""
        # If each element has a single holder, the change determines the senders without a job.
        if self.change.is_determined:
            return self.change.transfers
        # A job leaves out tensors without transfers.
        return self.job.transfers.get(_NAME, Transfers.none(self.source.ndim))

    def for_rank(self, rank: int) -> Transfers:
        """Return the transfers to, within and from a rank, without computing all others.

        A rank beyond both layouts has none. Raises LayoutError for an invalid rank.
        """
        rank = check_int(rank, "rank", LayoutError)
        if self.change.is_determined:
            return self.change.for_rank(rank)
        return self.job.for_rank(rank).get(_NAME, Transfers.none(self.source.ndim))

    @cached_property
    def sent_elements(self) -> IntArray:
        """The elements that each source rank sends to others: shape `(source.slots,)`."""
        if self.change.is_determined:
            return self.change.sent_elements
        return self.job.sent_bytes // self.job.items[0].dtype.itemsize_bytes

    @property
    def received_elements(self) -> IntArray:
        """The elements that each target rank receives from others: shape `(target.slots,)`."""
        return self.change.received_elements

    @property
    def moved_elements(self) -> int:
        """Elements that move between ranks."""
        return self.change.moved_elements

    @property
    def lower_bound_elements(self) -> int:
        """The minimum number of elements that any direct exchange moves."""
        return self.change.lower_bound_elements

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between slots. Raises PlanError for a plan without a dtype."""
        return self.moved_elements * self.expect_dtype("moved_bytes").itemsize_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """The minimum bytes that any direct exchange moves. Raises PlanError without a dtype."""
        return self.lower_bound_elements * self.expect_dtype("lower_bound_bytes").itemsize_bytes

    def expect_dtype(self, what: str) -> DType:
        """Return the dtype of the elements. Raises PlanError for a plan without a dtype.

        `what` depends on it, for the error.
        """
        if self.dtype is None:
            raise PlanError(
                f"{what} of a plan without a dtype; give it: reshard.plan(source, target, "
                "dtype='bfloat16')"
            )
        return self.dtype

    def estimate(self, topology: Topology) -> Estimate:
        """Estimate the seconds that the exchange takes, see `reshard.cost`.

        Raises:
            PlanError: a plan without a dtype.
            LayoutError: a rank outside the topology, or a link of unknown speed.
        """
        dtype = self.expect_dtype("seconds")
        if self.change.is_determined:
            return estimate_change(self.change, dtype.itemsize_bytes, topology)
        return self.job.estimate(topology)

    def verify(self, transfers: Transfers | None = None) -> None:
        """Check `transfers`, by default those of this plan, against the two layouts.

        Raises:
            PlanError: a box that is missing, duplicated, misplaced, sent by a rank that does not
                hold it, or held by the receiver already; or more elements that move than must.
        """
        if transfers is not None:
            check_type(transfers, Transfers, "transfers", "such as plan.transfers", PlanError)
        self.change.verify(self.transfers if transfers is None else transfers)

    def run(
        self,
        shards: Mapping[int, Array],
        out: Mapping[int, Array] | None = None,
        threads: int | None = None,
    ) -> dict[int, Array]:
        """Run the plan on arrays in this process: `{rank: array}` to `{rank: array}`.

        Writes to the arrays in `out` if given, with at most `threads` threads, by default
        as many as processors. See `reshard.plans.run.run_change`.
        """
        return run_change(self.change, shards, out, threads, self.dtype)

    def __str__(self) -> str:
        return format_plan(self.change, self.transfers, self.dtype)

    def __repr__(self) -> str:
        element_type = "" if self.dtype is None else f" {self.dtype.name}"
        return (
            f"<Plan of{element_type} {list(self.source.shape)} from {len(self.source.holders)} to "
            f"{len(self.target.holders)} ranks>"
        )


def plan(
    source: Layout | ShardingSpec,
    target: Layout | ShardingSpec,
    dtype: object = None,
    *,
    shape: Sequence[int] | None = None,
) -> Plan:
    """Return the cheapest plan from a layout to another of the same shape.

    Args:
        source, target: layouts, or specs.
        dtype: of the elements, required for bytes: a name, or a NumPy or torch dtype.
        shape: of the tensor, for specs; by default the shape of the other layout.

    Raises:
        PlanError: layouts of different shapes, or specs without a shape.
        LayoutError: a spec that does not fit the shape.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(tp=4)
    >>> plan(spec(mesh, "tp, -"), spec(mesh, "-, tp"), "bfloat16", shape=(8, 8)).moved_bytes
    96
    """
    ends = {"source": source, "target": target}
    # A spec fits any shape: it takes that of the tensor, or of the other layout.
    shapes = [end.shape for end in ends.values() if isinstance(end, Layout)]
    size = check_ints(shape, "shape", PlanError) if shape is not None else next(iter(shapes), None)
    before, after = (_as_layout(name, end, size) for name, end in ends.items())
    return Plan(before, after, None if dtype is None else as_dtype(dtype))


def _as_layout(name: str, value: object, shape: tuple[int, ...] | None) -> Layout:
    if isinstance(value, ShardingSpec):
        if shape is None:
            raise PlanError(
                f"the {name} is {value!r}, which is for tensors of any shape; give the tensor's: "
                "reshard.plan(source, target, shape=(4096, 4096))"
            )
        return value.layout(shape)
    if not isinstance(value, Layout):
        raise PlanError(
            f"the {name} is {value!r}, neither a Layout nor a spec; make one: reshard.spec(mesh, "
            "'tp, -').layout((4096, 4096))"
        )
    if shape is not None and value.shape != shape:
        raise PlanError(
            f"the {name} has shape {list(value.shape)}, but the tensor has shape {list(shape)}; "
            "both layouts must be of the same tensor"
        )
    return value
