"""The steps of a program: the effect of each collective on a sharding, and its groups of ranks.

======================  ==================================================================
`Slice`                 every rank keeps a part of its shard; nothing moves
`AllGather`             minor axes of dimensions are removed; groups share their shards
`AllToAll`              the minor axes of a dimension become those of another dimension
`JointAllToAll`         the same axes in any dimensions and order: an all-to-all of the group
                        that they span, with packing at both ends
`Permute`               whole shards move between ranks
`ReduceScatter`         contributions are combined, each rank of a group gets a part
`AllReduce`             contributions are combined, each rank of a group gets the whole
`Exchange`              the direct plan over all ranks; axes may appear and disappear
======================  ==================================================================

A step is a value. Its data movement is a layout change for each of its groups, restricted to the
ranks of the group. If a group lacks elements that it needs, the change is impossible, so running a
step or counting its elements proves that it is legal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from reshard._records import Record
from reshard.errors import PlanError, ShardError
from reshard.execution.copies import CopyColumns
from reshard.execution.engine import TensorRun, run
from reshard.execution.memory import BY_RANK, check_mapping, sort_for_reading
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.mesh import Axis
from reshard.plans.plan import plan
from reshard.runs import IntArray, find_distinct
from reshard.sharding import ShardingSpec

Groups = tuple[tuple[int, ...], ...]


class Step(Record):
    """A step from a sharding of a tensor of `shape` to another, within groups of ranks.

    Args:
        shape: of the tensor.
        source: the sharding before.
        target: the sharding after.
        axes: the axes of the source's mesh that the groups span.
        dims: the dimensions of the tensor whose sharding changes.

    Raises:
        SpecError: shardings that do not fit tensors of this shape.
    """

    shape: tuple[int, ...]
    source: ShardingSpec
    target: ShardingSpec
    axes: tuple[Axis, ...] = ()
    dims: tuple[int, ...] = ()

    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        # Computed here so that a sharding that does not fit the shape raises.
        self.source_layout, self.target_layout  # noqa: B018

    @cached_property
    def source_layout(self) -> Layout:
        """The layout before."""
        return self.source.layout(self.shape)

    @cached_property
    def target_layout(self) -> Layout:
        """The layout after."""
        return self.target.layout(self.shape)

    @cached_property
    def groups(self) -> Groups:
        """The groups of ranks that exchange elements among themselves."""
        return self.source.mesh.groups(self.axes)

    @cached_property
    def changes(self) -> tuple[LayoutChange, ...]:
        """The layout change of each group, restricted to its ranks."""
        return tuple(
            LayoutChange(
                _restrict_to_ranks(self.source_layout, group),
                _restrict_to_ranks(self.target_layout, group),
            )
            for group in self.groups
        )

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each rank sends to others: shape `(slots,)`."""
        return self._sum_over_groups([change.sent_elements for change in self.changes])

    @cached_property
    def received_elements(self) -> IntArray:
        """Elements each rank receives from others: shape `(slots,)`."""
        return self._sum_over_groups([change.received_elements for change in self.changes])

    def _sum_over_groups(self, counts: Sequence[IntArray]) -> IntArray:
        total = np.zeros(max(self.source_layout.slots, self.target_layout.slots), dtype=np.int64)
        for count in counts:
            total[: len(count)] += count
        return total

    @property
    def moved_elements(self) -> int:
        """Elements that ranks receive from others, summed over ranks."""
        return int(self.received_elements.sum())

    @property
    def live_shard(self) -> int:
        """Elements of the largest shard before or after."""
        return max(count_largest_shard(self.source_layout), count_largest_shard(self.target_layout))

    @property
    def extra_elements(self) -> int:
        """Elements of the largest buffers of a rank for packing and receiving."""
        return int((self.sent_elements + self.received_elements).max(initial=0))

    def extra_bytes(self, itemsize_bytes: int) -> int:
        """Return the bytes of the largest buffers of a rank for packing and receiving."""
        return self.extra_elements * itemsize_bytes

    def verify(self) -> None:
        """Check that every group holds the elements that its ranks need, element by element.

        Raises:
            PlanError: a group that lacks elements that its ranks need.
        """
        for group, change in zip(self.groups, self.changes, strict=True):
            try:
                change.verify()
            except PlanError as error:
                raise PlanError(
                    f"{self} from `{self.source}` to `{self.target}` is not legal for shape "
                    f"{list(self.shape)}: within the group {list(group)}, {error}"
                ) from error

    def run(
        self,
        shards: Mapping[int, Any],
        out: Mapping[int, Any] | None = None,
        threads: int | None = None,
    ) -> dict[int, Any]:
        """Run the step on arrays in this process: `{rank: array}` to `{rank: array}`.

        The change of a group reads only the arrays of the group, so a step that is not legal
        fails. Arguments are those of `Plan.run`.

        Raises:
            ShardError: an array that is missing or does not match, as for `Plan.run`.
            PlanError: a group that lacks elements that its ranks need.
        """
        shards = complete_shards(self.source, self.source_layout, shards)
        result: dict[int, Any] = {}
        for arrays in run(self._list_runs(shards, out), threads):
            result |= arrays
        return result

    def _list_runs(
        self, shards: Mapping[int, Any], out: Mapping[int, Any] | None
    ) -> Sequence[TensorRun]:
        """Return the run of each group."""
        return [TensorRun(change, shards, out) for change in self.changes]

    def __str__(self) -> str:
        axes = " ".join(map(str, self.axes))
        return f"{self.name}({axes})" if axes else self.name


def _restrict_to_ranks(layout: Layout, ranks: Sequence[int]) -> Layout:
    """Return the part of a layout on some ranks, with its contributions numbered from 0."""
    chosen = np.isin(layout.cell_slot, ranks)
    carried, _, number = find_distinct(layout.cell_contribution[chosen])
    # A group may hold a single contribution, and then has nothing to reduce.
    count = max(len(carried), 1)
    return layout.replace(
        cell_slot=layout.cell_slot[chosen],
        cell_part=layout.cell_part[chosen],
        cell_contribution=number,
        contributions=count,
        reduction=layout.reduction if count > 1 else None,
    )


def count_largest_shard(layout: Layout) -> int:
    """Return the number of elements of the largest shard, padding included."""
    return int(layout.cell_shape.prod(axis=1).max(initial=0))


class Slice(Step):
    """A step in which every rank keeps a part of its shard. `axes` shard it further."""

    name = "slice"

    @cached_property
    def groups(self) -> Groups:
        """Every rank by itself."""
        return tuple((rank,) for rank in self.source.mesh.devices)


class AllGather(Step):
    """A step in which the ranks of a group share their shards. `axes` are removed."""

    name = "all-gather"


class AllToAll(Step):
    """A step in which the minor axes of a dimension move to another: `dims` is `(from, to)`."""

    name = "all-to-all"


class JointAllToAll(Step):
    """A step in which the same axes shard the tensor in another way, by a single all-to-all."""

    name = "joint all-to-all"


class Permute(Step):
    """A step in which whole shards move: every rank sends and receives at most one shard."""

    name = "permute"

    @cached_property
    def groups(self) -> Groups:
        """All ranks that carry the same contribution."""
        return self.source.mesh.groups(self.source.mesh.remaining_axes(self.source.partial_axes))

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The rank whose shard each rank gets: `(from, to)`, sorted by `to`.

        Ranks that already hold their target shard keep it.

        Raises:
            PlanError: shardings with different shards.
        """
        pairs: list[tuple[int, int]] = []
        for group in self.groups:
            held = {rank: _find_box(self.source_layout, rank) for rank in group}
            needed = {rank: _find_box(self.target_layout, rank) for rank in group}
            # The ranks that do not keep their shard, by shard.
            spare: dict[Box | None, list[int]] = {}
            for rank in group:
                if held[rank] != needed[rank]:
                    spare.setdefault(held[rank], []).append(rank)
            for rank in group:
                if held[rank] == needed[rank]:
                    pairs.append((rank, rank))
                elif spare.get(needed[rank]):
                    pairs.append((spare[needed[rank]].pop(0), rank))
                else:
                    raise PlanError(
                        f"no shard is left for rank {rank} when `{self.source}` becomes "
                        f"`{self.target}`; a permute needs as many of each before and after"
                    )
        return tuple(sorted(pairs, key=lambda pair: pair[1]))

    def _list_runs(
        self, shards: Mapping[int, Any], out: Mapping[int, Any] | None
    ) -> Sequence[TensorRun]:
        """Return a run of whole shards, including their padding."""
        change = LayoutChange(self.source_layout, self.target_layout)
        return [TensorRun(change, shards, out, find_stages=self._find_stages)]

    def _find_stages(self) -> tuple[CopyColumns, ...]:
        source, target = self.source_layout, self.target_layout
        sender, receiver = np.array(self.pairs, dtype=np.int64).reshape(-1, 2).T
        # Each rank of a sharding has a single cell. Empty cells may have different shapes.
        source_cell, target_cell = (
            np.searchsorted(layout.cell_slot, ranks)
            for layout, ranks in ((source, sender), (target, receiver))
        )
        is_copied = target.cell_elements[target_cell] > 0
        source_cell, target_cell = source_cell[is_copied], target_cell[is_copied]
        return (CopyColumns.of_cells(source_cell, target_cell, target.cell_shape[target_cell]),)

    @cached_property
    def _moving_shards(self) -> list[tuple[int, int, int]]:
        sizes = {rank: _find_box(self.target_layout, rank) for _, rank in self.pairs}
        return [
            (sender, receiver, box.elements)
            for sender, receiver in self.pairs
            if sender != receiver and (box := sizes[receiver]) is not None
        ]

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each rank sends to others: shape `(slots,)`."""
        return self._count_moving(0)

    @cached_property
    def received_elements(self) -> IntArray:
        """Elements each rank receives from others: shape `(slots,)`."""
        return self._count_moving(1)

    def _count_moving(self, side: int) -> IntArray:
        total = self._sum_over_groups([])
        for pair in self._moving_shards:
            total[pair[side]] += pair[2]
        return total

    @property
    def extra_elements(self) -> int:
        """Zero: shards are sent from and received into their arrays."""
        return 0

    def verify(self) -> None:
        """Check that every rank gets exactly its shard. Raises PlanError otherwise."""
        self.pairs  # noqa: B018


def complete_shards(
    source: ShardingSpec, layout: Layout, shards: Mapping[int, Any]
) -> Mapping[int, Any]:
    """Add empty arrays for ranks without elements to `shards`.

    Raises ShardError for a rank that holds elements and has no array.
    """
    check_mapping(shards, "shards", BY_RANK)
    missing = [rank for rank in layout.holders if rank not in shards]
    if not missing:
        return shards
    needed = [rank for rank in missing if rank in layout.element_holders]
    sample: Any = next((shards[rank] for rank in layout.holders if rank in shards), None)
    if needed or not hasattr(sample, "reshape"):
        raise ShardError(
            f"no array for rank {(needed or missing)[0]}; `{source}` holds data on ranks "
            f"{list(layout.element_holders or layout.holders)}, got {sort_for_reading(shards)}"
        )
    nothing = sample.reshape(-1)[:0]
    return {**shards, **{rank: nothing.reshape(layout.local_shapes[rank]) for rank in missing}}


def _find_box(layout: Layout, rank: int) -> Box | None:
    """Return the box of a rank, or None if it is empty."""
    boxes = layout.boxes(rank)
    return boxes[0] if boxes and boxes[0].elements else None


class ReduceScatter(Step):
    """A step that combines contributions; each rank of a group gets a part. `axes` were partial."""

    name = "reduce-scatter"


class AllReduce(Step):
    """A step that combines contributions; each rank of a group gets the whole. `axes` were partial.

    Elements are counted for a reduce-scatter of the flat shard and an all-gather.
    """

    name = "all-reduce"

    @cached_property
    def received_elements(self) -> IntArray:
        """Elements each rank receives: shape `(slots,)`."""
        total = self._sum_over_groups([])
        for group in self.groups:
            held = int(self.source_layout.cell_shape[self.source_layout.cells_of(group[0])].prod())
            for index, rank in enumerate(group):
                part = held * (index + 1) // len(group) - held * index // len(group)
                # Its part from each other rank to combine, then the rest of the result from them.
                total[rank] = (len(group) - 1) * part + held - part
        return total

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each rank sends, as many as it receives: shape `(slots,)`."""
        return self.received_elements


class Exchange(Step):
    """The direct plan: every rank gets the elements that it lacks from any other. Always legal."""

    name = "exchange"

    @cached_property
    def groups(self) -> Groups:
        """All ranks of both sides."""
        return (tuple(sorted({*self.source.mesh.devices, *self.target.mesh.devices})),)

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each rank sends to others, with the senders of a plan: shape `(slots,)`."""
        return self._sum_over_groups([plan(self.source_layout, self.target_layout).sent_elements])

    @cached_property
    def changes(self) -> tuple[LayoutChange, ...]:
        """The whole change, all ranks together."""
        return (LayoutChange(self.source_layout, self.target_layout),)
