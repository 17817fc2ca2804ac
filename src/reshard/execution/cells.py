"""The cells of a layout, as parts of the arrays of its slots.

A slot with one cell has it as its whole array; a slot with several has them one after another
in a flat array. A cell's array shares the slot's memory, so what is written to it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.execution.arrays import Storage
from reshard.layout import Layout
from reshard.runs import PAD


def cell_arrays(layout: Layout, arrays: Mapping[int, Storage]) -> dict[int, Storage]:
    """The arrays of the cells of the slots in `arrays`, by the cells' numbers."""
    if layout.cells == len(layout.holders):
        return {cell: arrays[slot] for cell, slot in enumerate(layout.holders) if slot in arrays}
    cells: dict[int, Storage] = {}
    for slot, array in arrays.items():
        numbers = layout.cells_of(slot)
        if len(numbers) == 1:
            cells[numbers[0]] = array
            continue
        for cell in numbers:
            begin, shape = int(layout.cell_offset[cell]), layout.cell_shape[cell]
            # A rank of several boxes has a flat array, with its boxes one after another.
            stretch = array[begin : begin + int(shape.prod())]
            cells[cell] = stretch.reshape(tuple(shape.tolist()))
    return cells


def clear_pads(layout: Layout, cells: Mapping[int, Storage]) -> None:
    """Write zeros where the arrays of cells are padding."""
    if not layout.is_padded:
        return
    padded = layout.cell_elements != layout.cell_shape.prod(axis=1)
    for cell, array in cells.items():
        if not padded[cell]:
            continue
        for dimension, table in enumerate(layout.tables):
            for start, stop, local, role in table.runs_of(int(layout.cell_part[cell, dimension])):
                if role == PAD:
                    window: list[Any] = [slice(None)] * dimension
                    array[(*window, slice(local, local + stop - start))] = np.zeros((), array.dtype)


def element_positions(layout: Layout, cell: int) -> Any:
    """An index of a cell's array that leaves out its padding."""
    real = []
    for dimension, table in enumerate(layout.tables):
        part = int(layout.cell_part[cell, dimension])
        is_real = np.zeros(int(table.local_lengths[part]), dtype=bool)
        for start, stop, local, role in table.runs_of(part):
            is_real[local : local + stop - start] = role != PAD
        real.append(np.flatnonzero(is_real))
    return np.ix_(*real) if real else ...
