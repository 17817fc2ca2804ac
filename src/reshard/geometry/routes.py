"""Routes: which cell of the source feeds which cell of the target.

A *route* is a target cell, a contribution, a holder set per dimension, and the source cell chosen
among the holders. It stands for a product of pieces, which is not expanded yet.

1. For each target cell, take the pairs of its part in every dimension, and every source
   contribution it combines: their product is what the cell needs, each element once. If the source
   is not a grid, take the keys that the cell overlaps (`overlap.find_key_intersections`).
2. Look up the holders of each need. Elements without a holder are an error, detected by volume.
3. If the target's own slot holds a need, it stays. Otherwise the route names a *canonical* holder:
   the holders take turns (`holders.replica_turns`).

Nothing here depends on the transfers to other slots, so the routes of a rank are computed without
the routes of others, and every rank computes the same. The canonical holder serves readers of
files, arrays in a process, where the sender does not matter, and the steps of collectives. The
senders of an exchange between ranks are balanced by bytes (`reshard.plans`), for which `find_needs`
lists the needs of a whole plan with the slots that hold each:

1. A cell of each target key represents its replicas. Its needs, and the source keys that hold
   them, do not depend on the slots: the layers of all pipeline stages share them.
2. The holders of a need are the slots of its source keys.

*Contributions.* A tensor that is not partial has a single contribution. Data stays in place if
possible: each source contribution goes to the target contribution that most of its holders carry
themselves, and by default to the first. A target contribution that receives none is the identity of
the reduction, so a replicated tensor made partial keeps a single copy. A mean lacks an identity:
contributions of a mean are summed and scaled, and a replicated tensor becomes a copy in every
contribution.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from reshard._records import Record
from reshard.errors import PlanError
from reshard.geometry.holders import (
    BoolArray,
    Holders,
    Replicas,
    find_holders,
    find_replicas,
    replica_turns,
)
from reshard.geometry.overlap import Overlap, find_key_intersections, find_overlap, list_combined
from reshard.layout import Layout
from reshard.runs import PAD, IntArray, distinct, ragged_numbers, ragged_ranges, ragged_rows, sum_by


def contribution_sources(source: Layout, target: Layout) -> tuple[tuple[int, ...], ...]:
    """Return for each target contribution the source contributions it combines, in order.

    >>> full = Layout.replicated((4,), 2)
    >>> partial = Layout((4,), full.tables, 2, [0, 1], [[0], [0]], [0, 1], 2, "sum")
    >>> contribution_sources(full, partial), contribution_sources(partial, full)
    (((0,), ()), ((0, 1),))
    """
    if target.contributions == 1:
        return (tuple(range(source.contributions)),)
    if target.reduction == "mean" and source.reduction != "mean":
        return (tuple(range(source.contributions)),) * target.contributions
    goes_to = np.zeros(source.contributions, dtype=np.int64)
    # With a different reduction the source is reduced completely, into the first contribution.
    if source.reduction in (None, target.reduction):
        votes = np.zeros((source.contributions, target.contributions), dtype=np.int64)
        carried = {
            int(slot): int(contribution)
            for slot, contribution in zip(target.cell_slot, target.cell_contribution, strict=True)
        }
        for slot, contribution in zip(source.cell_slot, source.cell_contribution, strict=True):
            if int(slot) in carried:
                votes[int(contribution), carried[int(slot)]] += 1
        # argmax returns the first of equal counts, and 0 without votes.
        goes_to = votes.argmax(axis=1)
    return tuple(
        tuple(np.flatnonzero(goes_to == contribution).tolist())
        for contribution in range(target.contributions)
    )


def mean_scale(source: Layout, target: Layout) -> tuple[int, int]:
    """Return the fraction `(numerator, denominator)` by which summed contributions are scaled."""
    if source.reduction == "mean":
        if target.reduction == "mean":
            return (target.contributions, source.contributions)
        return (1, source.contributions)
    return (1, 1)


class Routes(Record, eq=False):
    """Routes as columns of shape `(routes,)`; `pair` has a column for each dimension.

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
        """Return an empty set of routes."""
        nothing = np.zeros(0, dtype=np.int64)
        pair = (nothing,) * ndim
        return cls(nothing, nothing, nothing, pair, nothing, np.zeros(0, dtype=bool))


# Target cell, order, source contribution, and a column of pairs for each dimension.
CellNeeds = tuple[IntArray, IntArray, IntArray, tuple[IntArray, ...]]


class RouteFinder(Record, eq=False):
    """A finder of the routes between two layouts; see the module's docstring.

    `combines[c]` are the source contributions that target contribution `c` combines. With
    `intersections`, the overlaps have only the pairs of these intersections.
    """

    source: Layout
    target: Layout
    holders: Holders
    overlaps: tuple[Overlap, ...]
    combines: tuple[tuple[int, ...], ...]
    intersections: tuple[Any, ...] | None = None

    @classmethod
    def between(
        cls, source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
    ) -> RouteFinder:
        """Return the finder of the routes from `source` to `target`.

        If the source is a grid, every product of pairs is a need, so there are never more pairs
        than needs. In other sources most products may have no holder, so the cells are compared
        instead; unless an element has two keys, which requires stretches divided at all edges.
        """
        holders = find_holders(source)
        if holders.is_grid or not holders.is_exclusive:
            pairs = zip(holders.dimensions, target.tables, strict=True)
            overlaps = tuple(find_overlap(dimension, table) for dimension, table in pairs)
            return cls(source, target, holders, overlaps, combines)
        overlaps, *intersections = find_key_intersections(source, target, combines)
        return cls(source, target, holders, overlaps, combines, tuple(intersections))

    def into(self, cells: IntArray) -> Routes:
        """Return the routes that end in the given target cells.

        Raises:
            PlanError: an element that no source slot holds.
        """
        routes = self._choose(self.needs(cells))
        self.check_complete(cells, routes.target_cell, routes.elements)
        return routes

    def out_of(self, slot: int) -> Routes:
        """Return the routes from a source slot to other slots."""
        source, target = self.source, self.target
        mine = source.cells_of(slot) if slot < source.slots else range(0)
        if not mine or not target.cells:
            return Routes.none(target.ndim)
        # Only target cells that take, in every dimension, from a set with a part of this slot can
        # receive from it; the others are not expanded.
        reached = np.ones(target.cells, dtype=bool)
        allowed = []
        for d, overlap in enumerate(self.overlaps):
            sets = overlap.holders
            touched = np.zeros(sets.parts, dtype=bool)
            touched[source.cell_part[mine.start : mine.stop, d]] = True
            if not sets.is_single:
                owns = touched[sets.set_part]
                # The appended entry is for an empty set at the end. For other empty sets reduceat
                # returns the next entry, which the line below resets.
                touched = np.add.reduceat(np.append(owns, False), sets.set_begin[:-1]) > 0
                touched &= np.diff(sets.set_begin) > 0
            pairs = touched[overlap.pair_set] if len(touched) else np.zeros(0, dtype=bool)
            parts = np.zeros(len(overlap.part_begin) - 1, dtype=bool)
            parts[overlap.pair_part[pairs]] = True
            reached &= parts[target.cell_part[:, d]]
            allowed.append(pairs)
        routes = self._choose(self.needs(np.flatnonzero(reached), allowed))
        # Reached cells may have another canonical sender.
        chosen = (source.cell_slot[routes.source_cell] == slot) & ~routes.stays
        return _take(routes, chosen)

    def needs(
        self,
        cells: IntArray,
        allowed: list[BoolArray] | None = None,
    ) -> CellNeeds:
        """Return the needs of cells: the product of their pairs, for each contribution."""
        if self.intersections is not None:
            return self._find_intersecting_needs(cells, allowed, *self.intersections)
        index, order, contribution = list_combined(
            self.combines, self.target.cell_contribution[cells]
        )
        cell = cells[index]
        # The product of the pairs, dimension by dimension: a row is repeated for each of its pairs.
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
        self,
        cells: IntArray,
        allowed: list[BoolArray] | None,
        of_cell: IntArray,
        begin: IntArray,
        order: IntArray,
        contribution: IntArray,
        pair: tuple[IntArray, ...],
    ) -> CellNeeds:
        """Return the needs of cells from the keys that each overlaps."""
        key = of_cell[cells]
        row, at = ragged_ranges(begin[key], np.diff(begin)[key])
        cell = cells[row]
        # Drop needs with a pair that is not allowed in some dimension.
        if allowed is not None:
            keep = np.ones(len(at), dtype=bool)
            for pairs, column in zip(allowed, pair, strict=True):
                keep &= pairs[column[at]]
            cell, at = cell[keep], at[keep]
        return cell, order[at], contribution[at], tuple(column[at] for column in pair)

    def _choose(self, needs: CellNeeds) -> Routes:
        """Choose the source cell of each need; needs without a holder are dropped."""
        cell, order, contribution, pairs = needs
        if self.holders.is_exclusive:
            return self._choose_copy(cell, order, contribution, pairs)
        holders, slot = self.holders, self.target.cell_slot[cell]
        need, key = self.candidates(contribution, pairs)
        copies = holders.copies.begin[key + 1] - holders.copies.begin[key]
        total = sum_by(len(cell), need, copies)
        # Rows are needs with each key that holds them: `before` counts the copies in all rows
        # before, `base` those before a need's first row.
        before = np.cumsum(copies) - copies
        base = np.zeros(len(cell), dtype=np.int64)
        first = np.flatnonzero(np.diff(need, prepend=-1))
        base[need[first]] = before[first]
        # The turn picks a replica among all keys of a need, in order.
        turn = base[need] + replica_turns(self.target.placement)[cell[need]] % total[need] - before
        picked = (turn >= 0) & (turn < copies)
        chosen = np.full(len(cell), -1, dtype=np.int64)
        chosen[need[picked]] = holders.copies.cells[(holders.copies.begin[key] + turn)[picked]]
        local_cell = holders.copies.cell_on_slot(key, slot[need])
        # Needs that the target's slot holds itself stay there, regardless of the turn.
        chosen[need[local_cell >= 0]] = local_cell[local_cell >= 0]
        stays = np.zeros(len(cell), dtype=bool)
        stays[need[local_cell >= 0]] = True
        elements = self.elements(pairs, len(cell))
        return _take(Routes(cell, chosen, order, pairs, elements, stays), chosen >= 0)

    def candidates(
        self, contribution: IntArray, pairs: tuple[IntArray, ...]
    ) -> tuple[IntArray, IntArray]:
        """Return the source keys that hold each need: columns of the need and of the
        key, by need.
        """
        need = np.arange(len(contribution))
        parts: list[IntArray] = []
        for d, overlap in enumerate(self.overlaps):
            sets = overlap.pair_set[pairs[d][need]]
            if overlap.holders.is_single:
                # Set `s` is part `s` alone.
                parts.append(sets)
                continue
            row, member = ragged_rows(overlap.holders.set_begin, sets)
            parts = [column[row] for column in parts] + [overlap.holders.set_part[member]]
            need = need[row]
        # Not every product of parts has a cell.
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
        """Choose the source cell of each need among the replicas of its single key."""
        holders = self.holders
        parts = [overlap.pair_set[pairs[d]] for d, overlap in enumerate(self.overlaps)]
        key = holders.key_of(contribution, parts)
        held = key >= 0
        if not held.all():
            cell, order, key = cell[held], order[held], key[held]
            pairs = tuple(column[held] for column in pairs)
        slot = self.target.cell_slot[cell]
        begin = holders.copies.begin[key]
        copies = holders.copies.begin[key + 1] - begin
        local_cell = holders.copies.cell_on_slot(key, slot)
        stays = local_cell >= 0
        # In most plans each element has a single holder, so a sender is not chosen by turns.
        if (copies > 1).any():
            begin = begin + replica_turns(self.target.placement)[cell] % copies
        chosen = np.where(stays, local_cell, holders.copies.cells[begin])
        return Routes(cell, chosen, order, pairs, self.elements(pairs, len(cell)), stays)

    def elements(self, pairs: tuple[IntArray, ...], count: int) -> IntArray:
        """Return the number of elements of each need: the product of its pairs."""
        elements = np.ones(count, dtype=np.int64)
        for d, overlap in enumerate(self.overlaps):
            elements *= overlap.pair_length[pairs[d]]
        return elements

    def check_complete(self, cells: IntArray, target_cell: IntArray, elements: IntArray) -> None:
        """Raise PlanError unless `elements` are all that the given cells need."""
        # Needs are disjoint, so equal volumes mean that no element is missing.
        counts = np.array([len(sources) for sources in self.combines], dtype=np.int64)
        needed = self.target.cell_elements[cells] * counts[self.target.cell_contribution[cells]]
        total = sum_by(self.target.cells, target_cell, elements)
        short = np.flatnonzero(total[cells] != needed)
        if len(short):
            cell = int(cells[short[0]])
            slot = int(self.target.cell_slot[cell])
            raise PlanError(
                f"the source holds only {total[cell]} of the {needed[short[0]]} elements that rank "
                f"{slot} of the target needs{self._example(cell)}; every element of the tensor "
                "must be held somewhere in the source"
            )

    def _example(self, cell: int) -> str:
        """Return a note on the first index of a dimension that no source part holds, if any."""
        for d, runs in enumerate(self.target.cell_runs(cell)):
            holders = self.overlaps[d].holders
            for start, stop, _, role in runs:
                at = start
                for low, high in zip(holders.start.tolist(), holders.stop.tolist(), strict=True):
                    # Stretches are sorted by start: nothing holds the first gap after `at`.
                    if low > at:
                        break
                    at = max(at, high)
                if at < stop and role != PAD:
                    return f" (no rank holds index {at} of dimension {d})"
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


KeyNeeds = tuple[
    tuple[Overlap, ...], IntArray, IntArray, tuple[IntArray, ...], IntArray, IntArray, IntArray
]
"""The fields `overlaps` to `key` of `Needs`, which do not depend on ranks."""


class Needs(Record, eq=False):
    """The needs of a plan.

    A need is a target key, a contribution, and a pair of each dimension: a product of pieces that
    the same slots hold, any of which may send it. Columns have shape `(needs,)`, and `pair` has a
    column for each dimension. The source keys of need `n` are `key[key_begin[n]:key_begin[n + 1]]`.
    The slots that hold it are set `holder_set[n]`. Set `s` has the slots
    `set_slot[set_begin[s]:set_begin[s + 1]]`, in rising order.
    """

    source: Layout
    target: Layout
    overlaps: tuple[Overlap, ...]
    target_key: IntArray
    order: IntArray
    pair: tuple[IntArray, ...]
    elements: IntArray
    key_begin: IntArray
    key: IntArray
    source_copies: Replicas
    target_copies: Replicas
    holder_set: IntArray
    set_begin: IntArray
    set_slot: IntArray

    def __len__(self) -> int:
        return len(self.holder_set)

    def source_cell(self, need: IntArray, slot: IntArray) -> IntArray:
        """Return the cell from which a holder on `slot` sends each need, or -1 if it holds none."""
        begin = self.key_begin[need]
        count = self.key_begin[need + 1] - begin
        if (count == 1).all():
            return self.source_copies.cell_on_slot(self.key[begin], slot)
        row, at = ragged_numbers(begin, count)
        cell = self.source_copies.cell_on_slot(self.key[at], slot[row])
        cells = np.full(len(need), -1, dtype=np.int64)
        # Written in reverse, so that the first of several keys on a slot is kept.
        holds = np.flatnonzero(cell >= 0)[::-1]
        cells[row[holds]] = cell[holds]
        return cells


@lru_cache(maxsize=1024)
def find_needs(source: Layout, target: Layout) -> Needs:
    """Return the needs of the movement from `source` to `target`.

    Raises:
        PlanError: an element that no source slot holds.
    """
    held, needed = find_replicas(source.placement), find_replicas(target.placement, apart=True)
    combines = contribution_sources(source, target)
    needs = _find_key_needs(
        _keep_one_a_key(source, held), _keep_one_a_key(target, needed), combines
    )
    if needs is None:
        # Keys do not have ranks. The search among the cells raises an error that names a rank.
        RouteFinder.between(source, target, combines).into(needed.first)
        raise PlanError("the source leaves out an element of the target")
    sets = _number_holder_sets(held, *needs[-2:])
    return Needs(source, target, *needs, held, needed, *sets)


@lru_cache(maxsize=1024)
def _keep_one_a_key(layout: Layout, copies: Replicas) -> Layout:
    """Return the layout with a slot for each key, shared by equal layouts on any ranks."""
    first = copies.first
    return layout.replace(
        slots=len(first),
        cell_slot=np.arange(len(first)),
        cell_part=layout.cell_part[first],
        cell_contribution=layout.cell_contribution[first],
    )


@lru_cache(maxsize=256)
def _find_key_needs(
    source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
) -> KeyNeeds | None:
    """Return the needs of layouts with a slot per key, or None if an element has no holder."""
    finder = RouteFinder.between(source, target, combines)
    target_key, order, contribution, pair = finder.needs(np.arange(target.cells))
    need, key = finder.candidates(contribution, pair)
    held = np.flatnonzero(np.bincount(need, minlength=len(target_key)))
    # Needs without a key are dropped; the check of volumes below detects missing elements.
    if len(held) < len(target_key):
        need = np.searchsorted(held, need)
        target_key, order = target_key[held], order[held]
        pair = tuple(column[held] for column in pair)
    elements = finder.elements(pair, len(target_key))
    try:
        finder.check_complete(np.arange(target.cells), target_key, elements)
    except PlanError:
        # Return a value, since exceptions would not be cached.
        return None
    key_begin = np.searchsorted(need, np.arange(len(target_key) + 1))
    return finder.overlaps, target_key, order, pair, elements, key_begin, key


def _number_holder_sets(
    copies: Replicas, key_begin: IntArray, key: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the set of each need, and the slots of the sets; equal source keys share a set."""
    if (np.diff(key_begin) == 1).all():
        # Each need has a single source key, whose slots are its set.
        return key, copies.begin, copies.slot
    numbers: dict[bytes, int] = {}
    # Equal lists of keys have equal bytes, and so the same number.
    groups = (key[a:b].tobytes() for a, b in pairwise(key_begin.tolist()))
    holder_set = np.array([numbers.setdefault(group, len(numbers)) for group in groups])
    members = [np.frombuffer(group, dtype=np.int64) for group in numbers]
    row, entry = ragged_rows(copies.begin, np.concatenate(members))
    of_key = np.repeat(np.arange(len(members)), [len(group) for group in members])
    # A slot with two keys of a set is in the set once.
    pairs = distinct(of_key[row] * copies.slots + copies.slot[entry])
    of_set, slot = np.divmod(pairs, copies.slots)
    return holder_set, np.searchsorted(of_set, np.arange(len(members) + 1)), slot
