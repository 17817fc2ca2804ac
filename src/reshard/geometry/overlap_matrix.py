"""The overlap matrix: how much each rank holds of what each rank of the target needs.

No transfer is built, and the ranks of both layouts are compared with one another whatever
their numbers:

1. along each dimension, the overlap says how many indices a target part takes from each set of
   source parts, and so how many it shares with each part;
2. for a source key and a target key, which are a part a dimension, the numbers are multiplied;
3. each slot holds what its keys hold, and needs what its cells need.

Where cells of one slot share elements of the source, those count once (see `lower_bound`).
"""

from __future__ import annotations

import numpy as np

from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.lower_bound import held_elements
from reshard.geometry.overlap import Overlap
from reshard.runs import IntArray, distinct, ragged_arange


def needed_elements(plan: LayoutChange) -> int:
    """Elements of all cells of the target, times the contributions combined in each."""
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    return int((plan.target.cell_elements * counts[plan.target.cell_contribution]).sum())


def overlap_elements(plan: LayoutChange) -> IntArray:
    """Elements that slot `i` of the source holds of what slot `j` of the target needs.

    Shape `(source.slots, target.slots)`. On the diagonal is what stays.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=2)
    >>> source, target = (reshard.spec(mesh, text).layout((4, 4)) for text in ("x, y", "y, x"))
    >>> overlap_elements(LayoutChange(source, target)).tolist()
    [[4, 0, 0, 0], [0, 0, 4, 0], [0, 4, 0, 0], [0, 0, 0, 4]]
    """
    source, target, holders = plan.source, plan.target, plan.holders
    # One row for each source key, one column for each target key.
    key_cell = holders.cells[holders.cell_begin[:-1]]
    described = np.column_stack((target.cell_contribution, target.cell_part))
    _, first, target_key = np.unique(described, axis=0, return_index=True, return_inverse=True)
    # Versions of NumPy differ in the shape of the inverse where an axis is given.
    target_key = target_key.reshape(-1)
    # Elements that a source key and a target key share: the product of what their parts share,
    # or none where the target does not combine the key's contribution.
    shared = np.ones((len(key_cell), len(first)), dtype=np.int64)
    for d, overlap in enumerate(plan.overlaps):
        table = _count_shared_indices(overlap, target.tables[d].parts)
        shared *= table[source.cell_part[key_cell, d][:, None], target.cell_part[first, d]]
    combined = np.zeros((source.contributions, target.contributions), dtype=bool)
    for contribution, sources in enumerate(plan.combines):
        combined[list(sources), contribution] = True
    carried = source.cell_contribution[key_cell][:, None]
    shared *= combined[carried, target.cell_contribution[first]]
    # A slot that has a key twice holds it once.
    key = np.repeat(np.arange(len(key_cell)), np.diff(holders.cell_begin))
    owned = distinct(key * source.slots + source.cell_slot[holders.cells])
    held = np.zeros((source.slots, len(first)), dtype=np.int64)
    if len(owned):
        np.add.at(held, owned % source.slots, shared[owned // source.slots])
    if not holders.is_exclusive:
        _count_once(plan, first, held)
    # Cells that are copies of a target key each need what it needs.
    kept = np.zeros((target.slots, source.slots), dtype=np.int64)
    np.add.at(kept, target.cell_slot, held.T[target_key])
    return kept.T


def _count_shared_indices(overlap: Overlap, target_parts: int) -> IntArray:
    """Indices that each source part shares with each target part: `(parts, target_parts)`."""
    sets = overlap.holders
    begin = sets.set_begin[overlap.pair_set]
    count = sets.set_begin[overlap.pair_set + 1] - begin
    pair = np.repeat(np.arange(len(count)), count)
    member = np.repeat(begin, count) + ragged_arange(count)
    shared = np.zeros((sets.parts, target_parts), dtype=np.int64)
    where = (sets.set_part[member], overlap.pair_part[pair])
    np.add.at(shared, where, overlap.pair_length[pair])
    return shared


def _count_once(plan: LayoutChange, cells: IntArray, held: IntArray) -> None:
    """Count again, exactly, for the slots whose cells may share elements."""
    source = plan.source
    slots, count = np.unique(source.cell_slot, return_counts=True)
    known: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for slot in slots[count > 1].tolist():
        for column, cell in enumerate(cells.tolist()):
            wanted = plan.combines[int(plan.target.cell_contribution[cell])]
            held[slot, column] = sum(
                held_elements(source, slot, plan.target, cell, contribution, known)
                for contribution in wanted
            )
