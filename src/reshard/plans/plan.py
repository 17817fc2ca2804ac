"""The plan of one tensor: what moves from one layout to another, from whom, and how much that is.

A plan is a job of one tensor, without the name. What moves and what stays follows from the two
layouts (`LayoutChange`); where several ranks hold what another lacks, the senders are those of the
job, and so those of the exchange between live ranks (see `reshard.plans.source_selection`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from reshard._interning import Interned
from reshard._validation import check_ints, check_type
from reshard.cost.estimate import Estimate
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError, PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.estimates import change_estimate
from reshard.plans.job import Job, JobItem
from reshard.plans.run import run_change
from reshard.plans.tables import plan_table
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec
from reshard.topology import Topology

Array = TypeVar("Array")

# What the tensor is called in the job.
_NAME = "tensor"


class Plan(Interned):
    """The movement from `source` to `target`, both of one shape. Make it with `reshard.plan`.

    Slots of the same number in both layouts are the same rank: what a rank holds already stays
    there. Where several ranks hold what another lacks, the senders are balanced: by bytes, or by
    elements where the plan has no dtype.

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
        self.change = LayoutChange(source, target)
        self.dtype = dtype

    def interning_key(self) -> object:
        return (self.change, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Plan, (self.source, self.target, self.dtype))

    @property
    def source(self) -> Layout:
        """Where the elements are."""
        return self.change.source

    @property
    def target(self) -> Layout:
        """Where the elements go."""
        return self.change.target

    @cached_property
    def job(self) -> Job:
        """The job of this tensor alone. Without a dtype its elements count as a byte each."""
        dtype = as_dtype("uint8") if self.dtype is None else self.dtype
        return Job([JobItem.between_ranks(_NAME, dtype, self.source, self.target)])

    @cached_property
    def transfers(self) -> Transfers:
        """Every box, those that stay included. Raises PlanError where an element is missing."""
        # With one holder of each element, the change determines the senders, and needs no job.
        if self.change.is_determined:
            return self.change.transfers
        return self.job.transfers.get(_NAME, Transfers.none(self.source.ndim))

    def for_rank(self, rank: int) -> Transfers:
        """The transfers of one rank: to it, within it and from it, found without the others'.

        Raises LayoutError for a rank that cannot be; one beyond both layouts has no part.
        """
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
            raise LayoutError(f"rank {rank!r}; ranks are whole numbers from 0")
        # As in `transfers`: a job is only needed where senders are chosen.
        if self.change.is_determined:
            return self.change.for_rank(rank)
        return self.job.for_rank(int(rank)).get(_NAME, Transfers.none(self.source.ndim))

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each source rank sends to others: shape `(source.slots,)`."""
        if self.change.is_determined:
            return self.change.sent_elements
        return self.job.sent_bytes // self.job.items[0].dtype.itemsize_bytes

    @property
    def received_elements(self) -> IntArray:
        """Elements each target rank receives from others: shape `(target.slots,)`."""
        return self.change.received_elements

    @property
    def moved_elements(self) -> int:
        """Elements that move between ranks."""
        return self.change.moved_elements

    @property
    def lower_bound_elements(self) -> int:
        """The fewest elements any direct exchange can move."""
        return self.change.lower_bound_elements

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
        if self.dtype is None:
            raise PlanError(
                "seconds of a plan without a dtype; give one: reshard.plan(source, target, "
                "dtype='bfloat16')"
            )
        if self.change.is_determined:
            return change_estimate(self.change, self.dtype.itemsize_bytes, topology)
        return self.job.estimate(topology)

    def verify(self, transfers: Transfers | None = None) -> None:
        """Check the transfers of this plan, or the given ones, against the two layouts.

        Raises:
            PlanError: a box that is missing, doubled, misplaced, or sent by a rank that has
                it not, or that the receiver held already; or more that moves than must.
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
        """Carry the plan out on arrays in this process: `{rank: array}` to `{rank: array}`.

        Writes to the arrays in `out` where they are given, by at most `threads` threads; one
        for each processor when None. See `reshard.plans.run.run_change`.
        """
        return run_change(self.change, shards, out, threads, self.dtype)

    def __str__(self) -> str:
        return plan_table(self.change, self.transfers, self.dtype)

    def __repr__(self) -> str:
        of = "" if self.dtype is None else f" {self.dtype.name}"
        return (
            f"<Plan of{of} {list(self.source.shape)} from {len(self.source.holders)} to "
            f"{len(self.target.holders)} ranks>"
        )


def plan(
    source: Layout | ShardingSpec,
    target: Layout | ShardingSpec,
    dtype: object = None,
    *,
    shape: Sequence[int] | None = None,
) -> Plan:
    """The cheapest movement from one layout to another of the same shape.

    Args:
        source, target: layouts, or specs.
        dtype: of the elements, when bytes are asked for: a name, or a NumPy or torch dtype.
        shape: of the tensor, for specs; that of the other layout when None.

    Raises:
        PlanError: layouts of different shapes, or specs without a shape.
        LayoutError: a spec that does not fit the shape.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(tp=4)
    >>> plan(spec(mesh, "tp, -"), spec(mesh, "-, tp"), "bfloat16", shape=(8, 8)).moved_bytes
    96
    """
    given = {"source": source, "target": target}
    # A spec is for any shape: it takes the given one, or that of the layout beside it.
    known = [one.shape for one in given.values() if isinstance(one, Layout)]
    size = check_ints(shape, "shape", PlanError) if shape is not None else next(iter(known), None)
    before, after = (_as_layout(name, one, size) for name, one in given.items())
    return Plan(before, after, None if dtype is None else as_dtype(dtype))


def _as_layout(name: str, given: object, shape: tuple[int, ...] | None) -> Layout:
    if isinstance(given, ShardingSpec):
        if shape is None:
            raise PlanError(
                f"the {name} is {given!r}, which is for tensors of any shape; give the tensor's: "
                "reshard.plan(source, target, shape=(4096, 4096))"
            )
        return given.layout(shape)
    if not isinstance(given, Layout):
        raise PlanError(
            f"the {name} is {given!r}, neither a Layout nor a spec; make one: reshard.spec(mesh, "
            "'tp, -').layout((4096, 4096))"
        )
    if shape is not None and given.shape != shape:
        raise PlanError(
            f"the {name} is of shape {list(given.shape)}, but the tensor of shape {list(shape)}; "
            "both layouts must be of one tensor"
        )
    return given
