"""Whole numbers that callers give: sizes, counts, ranks and offsets.

A number is taken by `operator.index`: an int, a NumPy integer, or whatever else Python itself
would take as an index. 2.7 is no size, nor is "7" or True; a function that rounded them would
lay out another tensor than the one that was meant.

Everything behind these functions counts elements and bytes in 64 bits. `LARGEST` is the number
from which bytes of the widest elements (16 bytes) would no longer fit, and nothing larger gets in.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reshard.errors import ReshardError, UsageError

LARGEST = 2**59 - 1

# Far beyond any machine, and small enough that a typing error is not a memory error.
LARGEST_RANKS = 1 << 22


def as_integer(
    value: object, what: str, error: type[ReshardError] = UsageError, least: int = 0
) -> int:
    """`value` as an int from `least` to `LARGEST`.

    Args:
        value: as the caller gave it.
        what: the value is, for the message: "size of axis 'x'".
        error: the kind of error to raise.

    Raises `error` for anything else.

    >>> as_integer(np.int64(7), "size")
    7
    >>> as_integer(7.9, "size")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: size 7.9 must be a whole number
    """
    try:
        number: int = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
        is_whole = False
    else:
        is_whole = type(value) is not bool
    if not is_whole:
        raise error(f"{what} {value!r} must be a whole number")
    if number < least:
        raise error(f"{what} {number} must {_limit_text(least)}")
    if number > LARGEST:
        raise error(f"{what} {number} must be at most {LARGEST}; its bytes would not fit 64 bits")
    return number


def as_integers(
    values: Any, what: str, error: type[ReshardError] = UsageError, least: int | None = 0
) -> tuple[int, ...]:
    """`values` as a tuple of ints from `least` (unless it is None) to `LARGEST`.

    Raises `error` for anything else, the whole of which the message shows.

    >>> as_integers("75", "shape")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: shape '75' must be a list of whole numbers
    """
    items: tuple[Any, ...] = ()
    try:
        items = tuple(values)
        numbers = tuple(map(index, items))
    except TypeError:
        # An iterator was used up: what it gave is shown instead of it.
        shown = list(items) if items and not isinstance(values, str) else values
        raise error(f"{what} {shown!r} must be a list of whole numbers") from None
    if bool in map(type, items):
        raise error(f"{what} {list(items)!r} must be a list of whole numbers")
    if numbers and least is not None and min(numbers) < least:
        raise error(f"{what} {list(numbers)} must {_limit_text(least)}")
    if numbers and (max(numbers) > LARGEST or min(numbers) < -LARGEST):
        raise error(
            f"{what} {list(numbers)} must be at most {LARGEST} each; their bytes would not fit 64 "
            "bits"
        )
    return numbers


def _limit_text(least: int) -> str:
    return f"be at least {least}" if least else "not be negative"


def as_integer_array(
    values: ArrayLike | Iterable[int], what: str, error: type[ReshardError] = UsageError
) -> NDArray[np.int64]:
    """`values` as an int64 array of the same shape; the same array where it is one already.

    Raises `error` for floats, bools, texts, lists of unequal lengths and numbers beyond 64 bits.

    >>> as_integer_array([[0, 1], [2, 3]], "ranks").shape
    (2, 2)
    """
    try:
        column = np.asarray(values)
        if not column.size:
            # An empty list says nothing about its kind, NumPy takes it for floats.
            return np.zeros(column.shape, dtype=np.int64)
        if column.dtype.kind in "iu":
            numbers = column.astype(np.int64, copy=False)
            if column.dtype.kind == "i" or int(column.max()) <= LARGEST:
                return numbers
    except (TypeError, ValueError, OverflowError):
        pass
    raise error(f"{what} {values!r} must be whole numbers in 64 bits")
