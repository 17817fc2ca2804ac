"""Validation of arguments at the public functions: numbers, types, arguments without effect.

Integers are taken by `operator.index`: an int, a NumPy integer, or any object that Python accepts
as an index. 2.7, "7" and True are refused: rounding them would lay out another tensor.

All internal arithmetic counts elements and bytes in int64. `MAX_ELEMENTS` is the largest count
whose bytes still fit, at 16 bytes an element; no larger number passes validation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

# The widest elements have 16 bytes (complex128), so the bytes of this many still fit into int64.
MAX_ELEMENTS = 2**59 - 1

# Far above any machine, and low enough that a typing error does not exhaust memory.
MAX_RANKS = 1 << 22


def check_int(
    value: object, name: str, error: type[ReshardError] = UsageError, minimum: int = 0
) -> int:
    """Return `value` as an int from `minimum` to `MAX_ELEMENTS`.

    Args:
        value: as the caller gave it.
        name: of the value, for the message: "size of axis 'x'".
        error: the class of error to raise.
        minimum: the smallest integer allowed.

    Raises `error` for anything else.

    >>> check_int(7, "size")
    7
    >>> check_int(7.9, "size")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: size 7.9 must be a whole number
    """
    try:
        number: int = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
        is_integer = False
    else:
        is_integer = type(value) is not bool
    if not is_integer:
        raise error(f"{name} {value!r} must be a whole number")
    if number < minimum:
        raise error(f"{name} {number} must {_minimum_text(minimum)}")
    if number > MAX_ELEMENTS:
        raise error(f"{name} {number} must be at most {MAX_ELEMENTS}; its bytes must fit 64 bits")
    return number


def check_ints(
    values: Any, name: str, error: type[ReshardError] = UsageError, minimum: int | None = 0
) -> tuple[int, ...]:
    """Return `values` as a tuple of ints from `minimum` (unbounded if None) to `MAX_ELEMENTS`.

    Raises `error` for anything else, with all values in the message.

    >>> check_ints("75", "shape")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: shape '75' must be a list of whole numbers
    """
    items: tuple[Any, ...] = ()
    try:
        items = tuple(values)
        numbers = tuple(map(index, items))
    except TypeError:
        # An iterator is exhausted by now: show its items instead.
        shown = list(items) if items and not isinstance(values, str) else values
        raise error(f"{name} {shown!r} must be a list of whole numbers") from None
    if bool in map(type, items):
        raise error(f"{name} {list(items)!r} must be a list of whole numbers")
    if numbers and minimum is not None and min(numbers) < minimum:
        raise error(f"{name} {list(numbers)} must {_minimum_text(minimum)}")
    if numbers and (max(numbers) > MAX_ELEMENTS or min(numbers) < -MAX_ELEMENTS):
        raise error(
            f"{name} {list(numbers)} must be at most {MAX_ELEMENTS} each; their bytes must fit 64 "
            "bits"
        )
    return numbers


def _minimum_text(minimum: int) -> str:
    return f"be at least {minimum}" if minimum else "not be negative"


def check_int_array(
    values: ArrayLike | Iterable[int], name: str, error: type[ReshardError] = UsageError
) -> NDArray[np.int64]:
    """Return `values` as an int64 array of the same shape, without a copy if it already is one.

    Raises `error` for floats, bools, strings, ragged lists and integers beyond 64 bits.

    >>> check_int_array([[0, 1], [2, 3]], "ranks").shape
    (2, 2)
    """
    # Loaded when used, so that the help of a command needs no NumPy.
    import numpy as np

    try:
        column = np.asarray(values)
        if not column.size:
            # NumPy makes an empty list an array of floats.
            return np.zeros(column.shape, dtype=np.int64)
        if column.dtype.kind in "iu":
            numbers = column.astype(np.int64, copy=False)
            # In int64, unsigned numbers from 2**63 on would become negative.
            if column.dtype.kind == "i" or int(column.max()) <= MAX_ELEMENTS:
                return numbers
    except (TypeError, ValueError, OverflowError):
        pass
    raise error(f"{name} {values!r} must be whole numbers in 64 bits")


def check_float(
    value: object,
    name: str,
    error: type[ReshardError] = UsageError,
    *,
    allow_zero: bool = True,
) -> float:
    """Return `value` as a finite, non-negative float.

    Raises `error` for anything else, for bools, and for 0 unless `allow_zero`.

    >>> check_float(0, "latency_s")
    0.0
    >>> check_float(0, "bandwidth", allow_zero=False)
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: bandwidth is 0; a finite number, more than 0, was expected
    """
    # True is a number in Python.
    is_refused = isinstance(value, bool) or not isinstance(value, Real)
    number = math.nan if is_refused else float(value)  # type: ignore[arg-type]
    if not 0 <= number < math.inf or (number == 0 and not allow_zero):
        range_text = "0 or more" if allow_zero else "more than 0"
        raise error(f"{name} is {value!r}; a finite number, {range_text}, was expected")
    return number


def check_type(
    value: object, expected: type, name: str, hint: str, error: type[ReshardError] = UsageError
) -> None:
    """Raise `error` unless `value` is an instance of `expected`.

    Args:
        value: as the caller gave it.
        expected: the class.
        name: of the value, for the message: "target".
        hint: how to make an instance.
        error: the class of error to raise.

    >>> check_type("tp, -", dict, "ranks", "give {rank: array}")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: ranks 'tp, -' is not a dict; give {rank: array}
    """
    if not isinstance(value, expected):
        article = "an" if expected.__name__[0] in "AEIOU" else "a"
        raise error(f"{name} {value!r} is not {article} {expected.__name__}; {hint}")


def check_used(argument: str, is_used: bool, use: str) -> None:
    """Raise UsageError for an argument that has no effect in this run.

    Such an argument is mostly a mistake: the user expects an effect that does not come.

    Args:
        argument: as the user wrote it: `--threads 2`, `adapters=['a']`.
        is_used: whether this run uses it.
        use: a clause about when it is used.

    >>> check_used("--threads 2", False, "it is for --digest")
    Traceback (most recent call last):
    reshard.errors.UsageError: --threads 2 has no effect here: it is for --digest; leave it out
    """
    if not is_used:
        raise UsageError(f"{argument} has no effect here: {use}; leave it out")
