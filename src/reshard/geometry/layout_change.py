"""The change between two layouts of a tensor: the boxes that move and that stay.

A `LayoutChange` is geometry: for a shape and two layouts, the boxes that are copied from each slot
to each other. It is a value that depends on no data and is the same on every rank.

1. `holders`: the slots that hold each element of the source;
2. `overlap`: along each dimension, the indices each target part takes from each holder;
3. `routes`: the product of the dimensions, with a canonical sender for each, from which the
   elements can be read; the senders of an exchange are chosen by `reshard.plans`;
4. `transfers`: routes expanded to boxes, for a rank or for all.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from reshard._interning import Interned
from reshard.errors import LayoutError, PlanError
from reshard.geometry.holders import Holders, find_holders
from reshard.geometry.overlap import Overlap, RoutePieces
from reshard.geometry.routes import RouteFinder, Routes, contribution_sources, mean_scale
from reshard.geometry.transfers import Transfers, coalesce, expand
from reshard.geometry.verification import verify_transfers
from reshard.geometry.volumes import lower_bound_elements, overlap_elements
from reshard.layout import Layout
from reshard.runs import IntArray, sum_by


class LayoutChange(Interned):
    """The change from `source` to `target`, two layouts of the same shape, in elements.

    The plans of all tensors with the same two layouts share it. Slots of the same number in both
    layouts are the same memory: elements that a slot holds already stay there.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> source, target = (spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    >>> change = LayoutChange(source, target)
    >>> change.moved_elements, change.lower_bound_elements
    (26, 26)
    >>> print(change.for_rank(0))
    0 keeps [0:2, 0:2]
    1 -> 0 [0:2, 2:3]
    0 -> 1 [2:3, 0:2]
    """

    field_names = ("source", "target")

    def __init__(self, source: Layout, target: Layout) -> None:
        for name, layout in (("source", source), ("target", target)):
            if not isinstance(layout, Layout):
                raise PlanError(
                    f"the {name} is {layout!r}, not a Layout; a sharding becomes one with a shape: "
                    "spec.layout((4096, 4096))"
                )
        if source.shape != target.shape:
            raise PlanError(
                f"a source of shape {list(source.shape)} cannot become a target of shape "
                f"{list(target.shape)}; both layouts must be of one tensor"
            )
        self.source = source
        self.target = target

    @cached_property
    def combines(self) -> tuple[tuple[int, ...], ...]:
        """For each contribution of the target, the source contributions it combines, in order."""
        return contribution_sources(self.source, self.target)

    @cached_property
    def scale(self) -> tuple[int, int]:
        """The fraction `(numerator, denominator)` that combined contributions are scaled by."""
        return mean_scale(self.source, self.target)

    @property
    def is_determined(self) -> bool:
        """Whether each element of the source has a single holder, so that senders are
        not chosen.
        """
        copies = self.holders.copies
        return self.holders.is_exclusive and len(copies.cells) == copies.keys

    @cached_property
    def holders(self) -> Holders:
        """The holders of each element of the source."""
        return find_holders(self.source)

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The overlap of both layouts in each dimension."""
        return self._finder.overlaps

    @cached_property
    def _finder(self) -> RouteFinder:
        return RouteFinder.between(self.source, self.target, self.combines)

    @cached_property
    def routes(self) -> Routes:
        """All routes. Raises PlanError if the source lacks an element."""
        return self._finder.into(np.arange(self.target.cells))

    def routes_into(self, rank: int) -> Routes:
        """Return the routes that end on a rank, including those that stay."""
        cells = self.target.cells_of(rank) if rank < self.target.slots else range(0)
        # Most ranks do not hold any part of most tensors of a model.
        if not cells:
            return Routes.none(self.target.ndim)
        return self._finder.into(np.arange(cells.start, cells.stop))

    def routes_out_of(self, rank: int) -> Routes:
        """Return the routes from a rank to other ranks."""
        if rank >= self.source.slots or not self.source.cells_of(rank):
            return Routes.none(self.target.ndim)
        return self._finder.out_of(rank)

    @cached_property
    def pieces(self) -> tuple[RoutePieces, ...]:
        """For each dimension, the pieces of every route of `routes`."""
        return self.pieces_of(self.routes)

    def pieces_of(self, routes: Routes) -> tuple[RoutePieces, ...]:
        """Return for each dimension the pieces of the given routes."""
        return tuple(
            overlap.pieces(routes.pair[d], self.source.cell_part[routes.source_cell, d])
            for d, overlap in enumerate(self.overlaps)
        )

    @cached_property
    def transfers(self) -> Transfers:
        """All boxes, including those that stay."""
        return self.expand(self.routes)

    def expand(self, routes: Routes) -> Transfers:
        """Expand routes to boxes."""
        boxes = expand(self.source, self.target, self.overlaps, routes)
        # If no element has two keys, the pieces are joined dimension by dimension already.
        return boxes if self.holders.is_exclusive else coalesce(boxes)

    def for_rank(self, rank: int) -> Transfers:
        """Return the transfers of a rank: to it, within it and from it.

        The transfers of other ranks are not computed. The result is empty for a rank beyond both
        layouts. Raises LayoutError for an invalid rank.
        """
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
            raise LayoutError(f"rank {rank!r}; ranks are integers from 0")
        received = self.expand(self.routes_into(rank))
        sent = self.expand(self.routes_out_of(rank))
        # Transfers within the rank are among the received, and not among the sent.
        if not len(sent):
            return received
        return Transfers.joined((received, sent))

    def _sum_by(self, layout: Layout, cell: IntArray) -> IntArray:
        moving = ~self.routes.stays
        return sum_by(layout.slots, layout.cell_slot[cell[moving]], self.routes.elements[moving])

    @cached_property
    def sent_elements(self) -> IntArray:
        """Elements each source slot sends to others, shape `(source.slots,)`."""
        return self._sum_by(self.source, self.routes.source_cell)

    @cached_property
    def received_elements(self) -> IntArray:
        """Elements each target slot receives from others, shape `(target.slots,)`."""
        return self._sum_by(self.target, self.routes.target_cell)

    @property
    def moved_elements(self) -> int:
        """Number of elements that move between slots."""
        return int(self.received_elements.sum())

    @property
    def staying_elements(self) -> int:
        """Number of elements that are in place already."""
        return int(self.routes.elements[self.routes.stays].sum())

    @cached_property
    def lower_bound_elements(self) -> int:
        """The fewest elements that any direct exchange can move."""
        return int(lower_bound_elements(self.source, self.target, self.combines).sum())

    @property
    def needed_elements(self) -> int:
        """Elements of all target cells, times the contributions combined in each."""
        counts = np.array([len(sources) for sources in self.combines], dtype=np.int64)
        needed = self.target.cell_elements * counts[self.target.cell_contribution]
        return int(needed.sum())

    def overlap_elements(self) -> IntArray:
        """Count the elements that source slot `i` holds of the need of target slot `j`.

        Shape `(source.slots, target.slots)`, with the elements that stay on the diagonal. Any two
        slots are compared, whatever their numbers.

        >>> import reshard
        >>> mesh = reshard.DeviceMesh.of(x=2, y=2)
        >>> source, target = (reshard.spec(mesh, text).layout((4, 4)) for text in ("x, y", "y, x"))
        >>> LayoutChange(source, target).overlap_elements().tolist()
        [[4, 0, 0, 0], [0, 0, 4, 0], [0, 4, 0, 0], [0, 0, 0, 4]]
        """
        return overlap_elements(
            self.source, self.target, self.combines, self.holders, self.overlaps
        )

    def verify(self, transfers: Transfers | None = None) -> None:
        """Check the transfers of this change, or the given transfers, against the two layouts.

        Raises:
            PlanError: a box is missing, duplicated, misplaced, sent by a slot that does not hold
                it, or held by the receiver already; or more elements move than necessary.
        """
        if transfers is None:
            transfers = self.transfers
        verify_transfers(self.source, self.target, self.combines, transfers)
        moved = int(transfers.elements[~transfers.stays].sum())
        if moved != self.lower_bound_elements:
            raise PlanError(
                f"the plan moves {moved} elements, but {self.lower_bound_elements} suffice"
            )

    def __repr__(self) -> str:
        return (
            f"<LayoutChange of {list(self.source.shape)} from {len(self.source.holders)} to "
            f"{len(self.target.holders)} ranks>"
        )
