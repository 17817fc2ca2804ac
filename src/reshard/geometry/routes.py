"""Routes: which cell of the source feeds which cell of the target.

A *route* is one target cell, one contribution, one holder set a dimension, and the source
cell chosen among the holders. It stands for a product of pieces, which stay unexpanded.

1. For each target cell, take the pairs of its part in every dimension, and every source
   contribution it combines: their product is what the cell needs, each element once. Where the
   source is no grid, take the keys that the cell meets (`key_intersections`).
2. Look up the holders of each of them; elements without a holder are an error, found by volume.
3. If the target's own slot holds it, it stays. Otherwise the route names a *canonical* holder:
   the holders take turns (`replicas.replica_turns`).

Nothing here depends on what moves to other slots, so one rank's part is computed without the
others', and every rank computes the same. The canonical holder is for readers of files and of
arrays in one process, where it does not matter who sends, and for the steps of collectives. The
senders of an exchange between ranks are chosen by bytes (`reshard.plans.senders`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.holders import BoolArray, Holders, find_holders
from reshard.geometry.key_intersections import KeyIntersections, find_key_intersections
from reshard.geometry.overlap import Overlap, find_overlap
from reshard.geometry.replicas import replica_turns
from reshard.layout import Layout
from reshard.runs import PAD, IntArray, ragged_arange, ragged_ranges


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Routes as columns of shape `(routes,)`; `pair` has one for each dimension.

    `order` counts the contributions of a target cell in the order they are combined.
    """

    target_cell: IntArray
    source_cell: IntArray
    order: IntArray
    pair: tuple[IntArray, ...]
    elements: IntArray
    stays: BoolArray

    @classmethod
    def none(cls, ndim: int) -> Routes:
        """No routes."""
        nothing = np.zeros(0, dtype=np.int64)
        pair = (nothing,) * ndim
        return cls(nothing, nothing, nothing, pair, nothing, np.zeros(0, dtype=bool))


# Target cell, order, source contribution, and a column of pairs for each dimension.
CellNeeds = tuple[IntArray, IntArray, IntArray, tuple[IntArray, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class RouteFinder:
    """Finds routes between two layouts. See the module's docstring.

    `combines[c]` are the source contributions that target contribution `c` adds up. With
    `intersections` the overlaps have only the pairs of those.
    """

    source: Layout
    target: Layout
    holders: Holders
    overlaps: tuple[Overlap, ...]
    combines: tuple[tuple[int, ...], ...]
    intersections: KeyIntersections | None = None

    @classmethod
    def between(
        cls, source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
    ) -> RouteFinder:
        """The finder of the routes from `source` to `target`.

        Of a source that is a grid, every product of pairs is a need, so there are never more
        pairs than needs. Of any other most products may have no holder, and its cells are
        compared instead; unless an element has two keys, which takes stretches cut at all edges.
        """
        holders = find_holders(source)
        if holders.is_grid or not holders.is_exclusive:
            pairs = zip(holders.dimensions, target.tables, strict=True)
            overlaps = tuple(find_overlap(dimension, table) for dimension, table in pairs)
            return cls(source, target, holders, overlaps, combines)
        intersections = find_key_intersections(source, target, combines)
        return cls(source, target, holders, intersections.overlaps, combines, intersections)

    def into(self, cells: IntArray) -> Routes:
        """The routes that end in the given target cells.

        Raises:
            PlanError: an element that no source slot holds.
        """
        routes = self._choose(self.needs(cells))
        self.check_complete(cells, routes.target_cell, routes.elements)
        return routes

    def out_of(self, slot: int) -> Routes:
        """The routes that begin on a source slot and end on another."""
        source, target = self.source, self.target
        mine = source.cells_of(slot) if slot < source.slots else range(0)
        if not mine or not target.cells:
            return Routes.none(target.ndim)
        # Only target cells that take, in every dimension, from a set with a part of this slot can
        # get anything from it; the others are not expanded.
        reached = np.ones(target.cells, dtype=bool)
        allowed = []
        for d, overlap in enumerate(self.overlaps):
            sets = overlap.holders
            touched = np.zeros(sets.parts, dtype=bool)
            touched[source.cell_part[mine.start : mine.stop, d]] = True
            if not sets.is_single:
                owns = touched[sets.set_part]
                # The appended entry is for an empty set at the end. For other empty sets reduceat
                # gives the next entry, which the line below takes back.
                touched = np.add.reduceat(np.append(owns, False), sets.set_begin[:-1]) > 0
                touched &= np.diff(sets.set_begin) > 0
            pairs = touched[overlap.pair_set] if len(touched) else np.zeros(0, dtype=bool)
            parts = np.zeros(len(overlap.part_begin) - 1, dtype=bool)
            parts[overlap.pair_part[pairs]] = True
            reached &= parts[target.cell_part[:, d]]
            allowed.append(pairs)
        routes = self._choose(self.needs(np.flatnonzero(reached), allowed))
        # What is reached may still have another sender.
        chosen = (source.cell_slot[routes.source_cell] == slot) & ~routes.stays
        return _take(routes, chosen)

    def needs(
        self,
        cells: IntArray,
        allowed: list[BoolArray] | None = None,
    ) -> CellNeeds:
        """The needs of cells: the product of their pairs, for each contribution."""
        if self.intersections is not None:
            return self._find_intersecting_needs(self.intersections, cells, allowed)
        counts = np.array([len(sources) for sources in self.combines], dtype=np.int64)
        first = np.concatenate(([0], np.cumsum(counts)))
        flat = np.array([s for sources in self.combines for s in sources], dtype=np.int64)
        carried = self.target.cell_contribution[cells]
        cell = np.repeat(cells, counts[carried])
        order = ragged_arange(counts[carried])
        contribution = flat[np.repeat(first[carried], counts[carried]) + order]
        # The product of the pairs, a dimension at a time: a row is repeated for each of its pairs.
        pairs: tuple[IntArray, ...] = ()
        for d, overlap in enumerate(self.overlaps):
            part = self.target.cell_part[cell, d]
            low = overlap.part_begin[part]
            row, pair = ragged_ranges(low, overlap.part_begin[part + 1] - low)
            if allowed is not None:
                keep = np.flatnonzero(allowed[d][pair])
                row, pair = (keep if isinstance(row, slice) else row[keep]), pair[keep]
            cell, order, contribution = cell[row], order[row], contribution[row]
            pairs = (*(column[row] for column in pairs), pair)
        return cell, order, contribution, pairs

    def _find_intersecting_needs(
        self, intersections: KeyIntersections, cells: IntArray, allowed: list[BoolArray] | None
    ) -> CellNeeds:
        """The needs of cells, from what each is known to meet."""
        key = intersections.of_cell[cells]
        row, at = ragged_ranges(intersections.begin[key], np.diff(intersections.begin)[key])
        cell = cells[row]
        if allowed is not None:
            keep = np.ones(len(at), dtype=bool)
            for pairs, column in zip(allowed, intersections.pair, strict=True):
                keep &= pairs[column[at]]
            cell, at = cell[keep], at[keep]
        pair = tuple(column[at] for column in intersections.pair)
        return cell, intersections.order[at], intersections.contribution[at], pair

    def _choose(self, needs: CellNeeds) -> Routes:
        """The source cell of each need; needs without a holder are left out."""
        cell, order, contribution, pairs = needs
        if self.holders.is_exclusive:
            return self._choose_copy(cell, order, contribution, pairs)
        holders, slot = self.holders, self.target.cell_slot[cell]
        need, key = self.candidates(contribution, pairs)
        copies = holders.cell_begin[key + 1] - holders.cell_begin[key]
        total = np.zeros(len(cell), dtype=np.int64)
        np.add.at(total, need, copies)
        # Rows are needs with each key that holds them: `before` counts the copies in all rows
        # before, `base` those before a need's first row.
        before = np.cumsum(copies) - copies
        base = np.zeros(len(cell), dtype=np.int64)
        first = np.flatnonzero(np.diff(need, prepend=-1))
        base[need[first]] = before[first]
        # Among all copies of all keys of a need, in order, the turn picks one.
        turn = base[need] + replica_turns(self.target.placement)[cell[need]] % total[need] - before
        picked = (turn >= 0) & (turn < copies)
        chosen = np.full(len(cell), -1, dtype=np.int64)
        chosen[need[picked]] = holders.cells[(holders.cell_begin[key] + turn)[picked]]
        own = holders.cell_on_slot(key, slot[need])
        # What the target's slot holds itself stays there, whosever turn it is.
        chosen[need[own >= 0]] = own[own >= 0]
        stays = np.zeros(len(cell), dtype=bool)
        stays[need[own >= 0]] = True
        elements = self.elements(pairs, len(cell))
        return _take(Routes(cell, chosen, order, pairs, elements, stays), chosen >= 0)

    def candidates(
        self, contribution: IntArray, pairs: tuple[IntArray, ...]
    ) -> tuple[IntArray, IntArray]:
        """The source keys that hold each need: columns of the need and of the key, by need."""
        need = np.arange(len(contribution))
        parts: list[IntArray] = []
        for d, overlap in enumerate(self.overlaps):
            sets = overlap.pair_set[pairs[d][need]]
            if overlap.holders.is_single:
                parts.append(sets)
                continue
            begin = overlap.holders.set_begin
            count = begin[sets + 1] - begin[sets]
            row = np.repeat(np.arange(len(need)), count)
            member = np.repeat(begin[sets], count) + ragged_arange(count)
            parts = [column[row] for column in parts] + [overlap.holders.set_part[member]]
            need = need[row]
        # Not every product of parts is taken by a cell.
        key = self.holders.key_of(contribution[need], parts)
        held = key >= 0
        return (need, key) if held.all() else (need[held], key[held])

    def _choose_copy(
        self,
        cell: IntArray,
        order: IntArray,
        contribution: IntArray,
        pairs: tuple[IntArray, ...],
    ) -> Routes:
        """The source cell of each need, where a need has one key: one of its copies."""
        holders = self.holders
        parts = [overlap.pair_set[pairs[d]] for d, overlap in enumerate(self.overlaps)]
        key = holders.key_of(contribution, parts)
        held = key >= 0
        if not held.all():
            cell, order, key = cell[held], order[held], key[held]
            pairs = tuple(column[held] for column in pairs)
        slot = self.target.cell_slot[cell]
        begin = holders.cell_begin[key]
        copies = holders.cell_begin[key + 1] - begin
        own = holders.cell_on_slot(key, slot)
        stays = own >= 0
        # Most plans have one copy of each element; then there are no turns to take.
        if (copies > 1).any():
            begin = begin + replica_turns(self.target.placement)[cell] % copies
        chosen = np.where(stays, own, holders.cells[begin])
        return Routes(cell, chosen, order, pairs, self.elements(pairs, len(cell)), stays)

    def elements(self, pairs: tuple[IntArray, ...], count: int) -> IntArray:
        """How many elements each need has: the product of its pairs."""
        elements = np.ones(count, dtype=np.int64)
        for d, overlap in enumerate(self.overlaps):
            elements *= overlap.pair_length[pairs[d]]
        return elements

    def check_complete(self, cells: IntArray, target_cell: IntArray, elements: IntArray) -> None:
        """Raise PlanError unless what was found for the given cells is all they need."""
        # Needs share no element, so equal volumes mean that none is missing.
        counts = np.array([len(sources) for sources in self.combines], dtype=np.int64)
        needed = self.target.cell_elements[cells] * counts[self.target.cell_contribution[cells]]
        found = np.zeros(self.target.cells, dtype=np.int64)
        np.add.at(found, target_cell, elements)
        short = np.flatnonzero(found[cells] != needed)
        if len(short):
            cell = int(cells[short[0]])
            slot = int(self.target.cell_slot[cell])
            raise PlanError(
                f"the source holds only {found[cell]} of the {needed[short[0]]} elements that rank "
                f"{slot} of the target needs{self._example(cell)}; every element of the tensor "
                "must be held somewhere in the source"
            )

    def _example(self, cell: int) -> str:
        """The first indices along one dimension that no source part holds, if that is why."""
        for d, table in enumerate(self.target.tables):
            holders = self.overlaps[d].holders
            for start, stop, _, role in table.runs_of(int(self.target.cell_part[cell, d])):
                at = start
                for low, high in zip(holders.start.tolist(), holders.stop.tolist(), strict=True):
                    # Stretches are sorted by start: the first gap after `at` has no holder.
                    if low > at:
                        break
                    at = max(at, high)
                if at < stop and role != PAD:
                    return f" (nobody holds index {at} of dimension {d})"
        return ""


def _take(routes: Routes, index: BoolArray) -> Routes:
    return Routes(
        routes.target_cell[index],
        routes.source_cell[index],
        routes.order[index],
        tuple(column[index] for column in routes.pair),
        routes.elements[index],
        routes.stays[index],
    )
