"""The steps of a program: what each collective does to a sharding, and in which groups.

======================  ==================================================================
`Slice`                 every rank keeps a part of what it holds; nothing moves
`AllGather`             the minor axes of dimensions are dropped, groups share their shards
`AllToAll`              the minor axes of one dimension become those of another
`JointAllToAll`         the same axes, anywhere: one all-to-all of the group they span, packed
                        at both ends; several dimensions and orders change at once
`Permute`               whole shards change places
`ReduceScatter`         contributions are combined, each rank of a group gets a part
`AllReduce`             contributions are combined, each rank of a group gets all
`Exchange`              the direct plan, over all ranks; axes may appear and vanish
======================  ==================================================================

A step is a value. What moves is a change for each of its groups that knows only its own ranks:
where a group lacks what it needs there is none, so running and counting prove that
the step is legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from reshard.errors import PlanError, ShardError
from reshard.execution.copies import CopyColumns
from reshard.execution.engine import TensorArrays, TensorCopies, run
from reshard.execution.memory import check_by_slot, sort_for_reading
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.mesh import Axis
from reshard.plans.plan import plan
from reshard.plans.run import copies_of_change
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Step:
    """From one sharding of a tensor of `shape` to another, within groups of ranks.

    Args:
        shape: of the tensor.
        source: the sharding before.
        target: the sharding after.
        axes: of the source's mesh, that the groups span.
        dims: dimensions of the tensor whose cut changes.

    Raises:
        SpecError: shardings that are not for tensors of this shape.
    """

    shape: tuple[int, ...]
    source: ShardingSpec
    target: ShardingSpec
    axes: tuple[Axis, ...] = ()
    dims: tuple[int, ...] = ()

    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        # A sharding that does not fit the shape is refused here.
        self.source_layout, self.target_layout  # noqa: B018

    @cached_property
    def source_layout(self) -> Layout:
        """Where the elements are before."""
        return self.source.layout(self.shape)

    @cached_property
    def target_layout(self) -> Layout:
        """Where the elements are after."""
        return self.target.layout(self.shape)

    @cached_property
    def groups(self) -> Groups:
        """The ranks that exchange elements with one another."""
        return self.source.mesh.groups(self.axes)

    @cached_property
    def changes(self) -> tuple[LayoutChange, ...]:
        """One change a group, of what its ranks hold and need."""
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
        return max(_find_largest(self.source_layout), _find_largest(self.target_layout))

    @property
    def extra_elements(self) -> int:
        """Elements of the largest buffers a rank packs and receives into, beyond its shards."""
        return int((self.sent_elements + self.received_elements).max(initial=0))

    def extra_bytes(self, itemsize_bytes: int) -> int:
        """Bytes of the largest buffers a rank packs and receives into, beyond its shards."""
        return self.extra_elements * itemsize_bytes

    def verify(self) -> None:
        """Check that every group holds what its ranks need, element by element.

        Raises:
            PlanError: a group that lacks what its ranks need.
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
        """Carry the step out on arrays in this process: `{rank: array}` to `{rank: array}`.

        A group's arrays are all that its change sees, so a step that reaches outside its groups
        fails. Arguments as of `Plan.run`.

        Raises:
            ShardError: an array that is missing, or does not fit; as `Plan.run` does.
            PlanError: a group that lacks what its ranks need.
        """
        shards = complete_shards(self.source, self.source_layout, shards)
        tensors = [(copies, TensorArrays(shards, out)) for copies in self._copies]
        found: dict[int, Any] = {}
        for arrays in run(tensors, threads):
            found |= arrays
        return found

    @property
    def _copies(self) -> Iterable[TensorCopies]:
        """What is done for each of the groups."""
        return map(copies_of_change, self.changes)

    def __str__(self) -> str:
        axes = " ".join(map(str, self.axes))
        return f"{self.name}({axes})" if axes else self.name


def _restrict_to_ranks(layout: Layout, ranks: Sequence[int]) -> Layout:
    """What some ranks hold of a layout, the contributions that they carry numbered from 0."""
    chosen = np.isin(layout.cell_slot, ranks)
    carried, number = np.unique(layout.cell_contribution[chosen], return_inverse=True)
    count = max(len(carried), 1)
    return Layout(
        layout.shape,
        layout.tables,
        layout.slots,
        layout.cell_slot[chosen],
        layout.cell_part[chosen],
        number,
        count,
        layout.reduction if count > 1 else None,
    )


def _find_largest(layout: Layout) -> int:
    return int(layout.cell_shape.prod(axis=1).max(initial=0))


class Slice(Step):
    """Every rank keeps a part of what it holds. `axes` are those that cut it."""

    name = "slice"

    @cached_property
    def groups(self) -> Groups:
        """Every rank by itself."""
        return tuple((rank,) for rank in self.source.mesh.devices)


class AllGather(Step):
    """The ranks of a group share their shards. `axes` are those that are dropped."""

    name = "all-gather"


class AllToAll(Step):
    """The minor axes of one dimension become those of another: `dims` is `(from, to)`."""

    name = "all-to-all"


class JointAllToAll(Step):
    """The same axes cut the tensor in another way: one all-to-all of the group they span."""

    name = "joint all-to-all"


class Permute(Step):
    """Whole shards change places: every rank sends at most one, and receives at most one."""

    name = "permute"

    @cached_property
    def groups(self) -> Groups:
        """All ranks that carry the same contribution."""
        return self.source.mesh.groups(self.source.mesh.remaining_axes(self.source.partial_axes))

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Which rank's shard each rank has afterwards: `(from, to)`, sorted by `to`.

        Ranks that hold what they need keep it.

        Raises:
            PlanError: shardings whose shards are not the same.
        """
        found: list[tuple[int, int]] = []
        for group in self.groups:
            held = {rank: _find_box(self.source_layout, rank) for rank in group}
            wanted = {rank: _find_box(self.target_layout, rank) for rank in group}
            # Ranks whose shard is wanted elsewhere, by shard; the others keep their own.
            spare: dict[Box | None, list[int]] = {}
            for rank in group:
                if held[rank] != wanted[rank]:
                    spare.setdefault(held[rank], []).append(rank)
            for rank in group:
                if held[rank] == wanted[rank]:
                    found.append((rank, rank))
                elif spare.get(wanted[rank]):
                    found.append((spare[wanted[rank]].pop(0), rank))
                else:
                    raise PlanError(
                        f"no shard is left for rank {rank} when `{self.source}` becomes "
                        f"`{self.target}`; a permute needs as many of each before and after"
                    )
        return tuple(sorted(found, key=lambda pair: pair[1]))

    @property
    def _copies(self) -> Iterable[TensorCopies]:
        """Whole shards are copied as they are, their padding too."""
        source, target = self.source_layout, self.target_layout
        # Each contribution of the target is the same one of the source: nothing is combined.
        unchanged = [[contribution] for contribution in range(target.contributions)]
        return (TensorCopies(source, target, unchanged, (1, 1), self._find_stages),)

    def _find_stages(self) -> tuple[CopyColumns, ...]:
        source, target = self.source_layout, self.target_layout
        sender, receiver = np.array(self.pairs, dtype=np.int64).reshape(-1, 2).T
        # A rank of a sharding has one cell. Empty ones may be of different shapes.
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
        """None: shards are sent from where they are and received where they stay."""
        return 0

    def verify(self) -> None:
        """Check that every rank gets exactly its shard. Raises PlanError where it does not."""
        self.pairs  # noqa: B018


def complete_shards(
    source: ShardingSpec, layout: Layout, shards: Mapping[int, Any]
) -> Mapping[int, Any]:
    """Return arrays of all ranks: those given, and empty ones of ranks without elements.

    Raises ShardError where no array is given for a rank that holds elements.
    """
    check_by_slot(shards, "shards")
    missing = [rank for rank in layout.holders if rank not in shards]
    if not missing:
        return shards
    needed = [rank for rank in missing if rank in layout.element_holders]
    known: Any = next((shards[rank] for rank in layout.holders if rank in shards), None)
    if needed or not hasattr(known, "reshape"):
        raise ShardError(
            f"no array for rank {(needed or missing)[0]}; `{source}` holds data on ranks "
            f"{list(layout.element_holders or layout.holders)}, got {sort_for_reading(shards)}"
        )
    nothing = known.reshape(-1)[:0]
    return {**shards, **{rank: nothing.reshape(layout.local_shapes[rank]) for rank in missing}}


def _find_box(layout: Layout, rank: int) -> Box | None:
    """A rank's box; None for an empty one, wherever it is."""
    boxes = layout.boxes(rank)
    return boxes[0] if boxes and boxes[0].elements else None


class ReduceScatter(Step):
    """Contributions are combined, each rank of a group gets a part. `axes` were partial."""

    name = "reduce-scatter"


class AllReduce(Step):
    """Contributions are combined, each rank of a group gets all. `axes` were partial.

    What moves is counted for a reduce-scatter of the flat shard and an all-gather.
    """

    name = "all-reduce"

    @cached_property
    def received_elements(self) -> IntArray:
        """Elements each rank receives: shape `(slots,)`."""
        total = self._sum_over_groups([])
        for group in self.groups:
            held = int(self.source_layout.cell_shape[self.source_layout.cells_of(group[0])].prod())
            for place, rank in enumerate(group):
                mine = held * (place + 1) // len(group) - held * place // len(group)
                # Its part from each other rank to combine, then the rest of the result from them.
                total[rank] = (len(group) - 1) * mine + held - mine
        return total

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each rank sends: shape `(slots,)`. As many as it receives."""
        return self.received_elements


class Exchange(Step):
    """The direct plan: every rank gets what it lacks from any other. Always legal."""

    name = "exchange"

    @cached_property
    def groups(self) -> Groups:
        """All ranks of both sides."""
        return (tuple(sorted({*self.source.mesh.devices, *self.target.mesh.devices})),)

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each rank sends to others, as a plan shows them: shape `(slots,)`."""
        return self._sum_over_groups([plan(self.source_layout, self.target_layout).sent_elements])

    @cached_property
    def changes(self) -> tuple[LayoutChange, ...]:
        """The whole change, all ranks together."""
        return (LayoutChange(self.source_layout, self.target_layout),)
