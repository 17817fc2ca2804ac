"""Transfers as copies between the arrays of cells: a box of one cell to a box of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from reshard.execution.arrays import ArrayKind, Storage
from reshard.execution.copies import Copy
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray


def transfer_copies(
    transfers: Transfers,
    sources: Mapping[int, Storage],
    targets: Mapping[int, Storage],
    kind: ArrayKind,
    reduction: str | None,
) -> Iterator[Copy]:
    """The copies of transfers, by order: the first contribution replaces, the rest combine.

    Args:
        transfers: what goes where.
        sources, targets: the arrays of the cells that they name.
        kind: of the arrays.
        reduction: how contributions combine; a sum for None.
    """
    combine = partial(kind.combine, reduction or "sum")
    for row in np.argsort(transfers.order, kind="stable").tolist():
        shape, order = transfers.shape[row], int(transfers.order[row])
        target = targets[int(transfers.target_cell[row])]
        source = sources[int(transfers.source_cell[row])]
        yield Copy(
            target[_window(transfers.target_start[row], shape)],
            source[_window(transfers.source_start[row], shape)],
            order,
            combine if order else None,
        )


def _window(start: IntArray, shape: IntArray) -> Any:
    # A scalar's box is an array too, so that it can be written to.
    ends = zip(start.tolist(), shape.tolist(), strict=True)
    return tuple(slice(a, a + n) for a, n in ends) or (...,)
