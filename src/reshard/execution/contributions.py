"""Partial sums in one process: which types a reduction is for, and what completes a result.

A target contribution is what some source contributions add up to. Means are scaled once they are
added up; a contribution that combines none is filled with the reduction's identity, so that it
changes nothing where it is combined later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reshard.dtypes import DType
from reshard.errors import ShardError
from reshard.execution.arrays import ArrayKind, Storage, is_complex, is_integer
from reshard.execution.cells import element_positions
from reshard.layout import Layout


def check_reduction(reduction: str, dtype: DType) -> None:
    """Raise ShardError for a reduction that elements of this type do not have.

    >>> from reshard.dtypes import dtype
    >>> check_reduction("mean", dtype("int8"))
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: a mean of int8 is not exact; reduce by sum, or cast to a floating
    type
    """
    if reduction == "mean" and is_integer(dtype):
        raise ShardError(
            f"a mean of {dtype.name} is not exact; reduce by sum, or cast to a floating type"
        )
    if reduction in ("max", "min") and is_complex(dtype):
        raise ShardError(
            f"{reduction} of {dtype.name}: complex numbers have no order; reduce by sum, mean or "
            "product"
        )


def identity(reduction: str, kind: ArrayKind) -> Storage:
    """The one element that changes nothing when combined: storage of shape `(1,)`."""
    if reduction in ("sum", "mean"):
        return kind.element(0)
    if reduction == "product":
        return kind.element(1)
    # NumPy gives no limits for truth values.
    if kind.dtype.name == "bool":
        least, greatest = 0.0, 1.0
    elif is_integer(kind.dtype):
        limits = np.iinfo(kind.dtype.name)
        least, greatest = limits.min, limits.max
    else:
        least, greatest = kind.float_limits()
    return kind.element(least if reduction == "max" else greatest)


def complete_contributions(
    layout: Layout,
    combines: Sequence[Sequence[int]],
    scale: tuple[int, int],
    kind: ArrayKind,
    cells: Mapping[int, Storage],
) -> None:
    """Scale means, and fill what combines nothing with the reduction's identity.

    Args:
        layout: of the target.
        combines: for each contribution of it, those of the source that were combined.
        scale: the numerator and denominator that combined elements are multiplied by.
        kind: of the arrays.
        cells: the storages of target cells, by their number; not all need be given.
    """
    numerator, denominator = scale
    if numerator == denominator and layout.reduction is None:
        return
    for cell, storage in cells.items():
        if combines[int(layout.cell_contribution[cell])]:
            if numerator != denominator:
                storage[...] = kind.scale(storage, numerator, denominator)
        elif layout.reduction is not None:
            storage[element_positions(layout, cell)] = identity(layout.reduction, kind)[0]
