"""Where is a stretch of one dimension of a tensor, and what is it here?

A stretch of a tensor is a tensor: its layout is the tensor's, of those indices only, and on each
rank it is a view of the rank's part::

    8 rows over 2 ranks         rows 3:6 of it         in the memory of
    rank 0   0 1 2 3            rank 0   0             rank 0   . . . x
    rank 1   4 5 6 7            rank 1   1 2           rank 1   x x . .

So the members of a fused parameter, and the pieces that both sides have in common, are moved like
any other tensor, from where they lie to where they belong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.runs import PAD, IntArray, RunTable


@dataclass(frozen=True, slots=True)
class Span:
    """Indices `start:stop` of dimension `dimension` of a tensor of a layout."""

    whole: Layout
    dimension: int
    start: int
    stop: int

    @property
    def layout(self) -> Layout:
        """The layout of the stretch.

        Raises ShardError where a rank has several boxes of the tensor, or holds the indices in
        another order.

        >>> whole = Layout.replicated((8, 2), 2)
        >>> Span(whole, 0, 3, 6).layout is Layout.replicated((3, 2), 2)
        True
        """
        return _cut(self.whole, self.dimension, self.start, self.stop)[0]

    def of(self, local: torch.Tensor | None, rank: int) -> torch.Tensor | None:
        """The view of a rank's part of the tensor that is its part of the stretch."""
        if local is None or rank >= self.whole.slots or not self.whole.cells_of(rank):
            return None
        _, begins = _cut(self.whole, self.dimension, self.start, self.stop)
        (cell,) = self.whole.cells_of(rank)
        shape = self.layout.local_shape(rank) or ()
        part = int(self.whole.cell_part[cell, self.dimension])
        return local.narrow(self.dimension, int(begins[part]), shape[self.dimension])


# Layers of a model are cut alike.
@lru_cache(maxsize=4096)
def _cut(whole: Layout, dimension: int, start: int, stop: int) -> tuple[Layout, IntArray]:
    """The layout of a stretch, and where it begins in each part: shape `(parts,)`."""
    if any(len(whole.cells_of(slot)) > 1 for slot in whole.holders):
        raise ShardError(
            "a part of it is another tensor, but a rank has it in several boxes; give the fused "
            "tensor one box on each rank"
        )
    tables = list(whole.tables)
    tables[dimension], begins = table_between(tables[dimension], start, stop)
    layout = Layout(
        tuple(table.dimension_length for table in tables),
        tables,
        whole.slots,
        whole.cell_slot,
        whole.cell_part,
        whole.cell_contribution,
        whole.contributions,
        whole.reduction,
    )
    return layout, begins


def table_between(table: RunTable, start: int, stop: int) -> tuple[RunTable, IntArray]:
    """The runs of indices `start:stop`, counted from 0, and where they begin in each part.

    Raises ShardError where a part has other indices between them.

    >>> from reshard.block_rules import Strided
    >>> found, begins = table_between(Strided(2).table(8, 2), 4, 8)
    >>> print(found, begins)
    part 0: 2 from 0
    part 1: 2 from 2 [2 2]
    """
    runs = table.single_runs()
    low, high = np.maximum(runs.start, start), np.minimum(runs.stop, stop)
    inside = (high > low) & (runs.role != PAD)
    runs, low, high = runs.take(inside), low[inside], high[inside]
    local = runs.local_start + low - runs.start
    begins = np.zeros(table.parts, dtype=np.int64)
    is_first = np.diff(runs.part, prepend=-1) != 0
    begins[runs.part[is_first]] = local[is_first]
    follows = local[1:] == (local + high - low)[:-1]
    if not (follows | is_first[1:]).all():
        raise ShardError(
            f"indices {start}:{stop} do not lie one behind the other on a rank; a fused tensor's "
            "members must"
        )
    columns = (runs.part, low - start, high - low, local - begins[runs.part], runs.role)
    return RunTable.from_columns(stop - start, table.parts, *columns), begins
