"""Checks of arguments: errors for values that are not arrays, integers or pairs of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from numbers import Real
from operator import index
from typing import Any, TypeVar, cast

from reshard._validation import check_int, check_ints
from reshard.errors import ReshardError, UsageError
from reshard.spmd.shards.array_value import ArrayValue

Function = TypeVar("Function", bound=Callable[..., Any])


def of_arrays(function: Function) -> Function:
    """Raise an error that names the argument of a function that is not an array.

    Arguments are not checked in advance: an argument that lacks an array's attributes raises an
    AttributeError when it is used, which is translated.

    >>> from reshard.errors import UsageError
    >>> from reshard.spmd.ops.reductions import sum
    >>> try:
    ...     sum([1, 2])
    ... except UsageError as error:
    ...     print(str(error).split(";")[0])
    sum of [1, 2], a list
    """
    name = function.__name__.lstrip("_")

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except AttributeError as error:
            # The object that lacked the attribute. It is the caller's mistake only if the caller
            # passed the object.
            obj = error.obj
            if not any(_has_array(argument) for argument in arguments):
                obj = arguments[0] if arguments else obj
            if isinstance(obj, ArrayValue) or not any(
                _contains(argument, obj) for argument in arguments
            ):
                raise
            raise UsageError(
                f"{name} of {obj!r}, a {type(obj).__name__}; an sp.array was expected: make "
                "it one by sp.array(...)"
            ) from error

    return cast(Function, checked)


@contextmanager
def explain_errors(asked: str, expected: str) -> Iterator[None]:
    """Translate NumPy's errors inside to a UsageError that names what was requested."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        if isinstance(error, ReshardError):
            raise
        raise UsageError(f"{asked}: {error}; {expected}") from error


def has_entries(value: Any) -> bool:
    """Return whether a value can be iterated: an array without dimensions cannot.

    >>> import numpy as np
    >>> has_entries((0, 1)), has_entries(np.array(1)), has_entries(1)
    (True, False, False)
    """
    # Such an array has the method `__iter__`, which raises.
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def as_whole(value: Any) -> int | None:
    """Convert an integer of any type to an int; return None for other values.

    >>> as_whole(True), as_whole(1.5)
    (1, None)
    """
    try:
        return index(value)
    except TypeError:
        return None


def portion(what: str, value: Any) -> float:
    """Return a number from 0 to 1. Raises UsageError for other values.

    >>> portion("a rate of ", 0.5)
    0.5
    """
    number = float(value) if isinstance(value, Real) else -1.0
    if not 0 <= number <= 1:
        raise UsageError(f"{what}{value!r}; a number from 0 to 1 was expected")
    return number


def whole_numbers(what: str, value: Any, count: int, least: int = 0) -> tuple[int, ...]:
    """Return an integer for each of `count` dimensions, given a sequence or a single integer.

    >>> whole_numbers("strides", 2, count=3), whole_numbers("strides", (1, 2), count=2)
    ((2, 2, 2), (1, 2))
    """
    if hasattr(value, "__index__"):
        return (check_int(value, what, minimum=least),) * count
    # A string has a length and entries, but it is not a sequence of numbers.
    if not isinstance(value, Iterable) or isinstance(value, str) or len(list(value)) != count:
        raise UsageError(f"{what} {value!r}; give {count} whole numbers, or one for all")
    return check_ints(value, what, minimum=least)


def whole_pairs(what: str, value: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Return `(before, after)` for each of `count` dimensions; a single integer applies to all.

    >>> whole_pairs("padding", 1, count=2), whole_pairs("padding", [(0, 2)], count=1)
    (((1, 1), (1, 1)), ((0, 2),))
    """
    if hasattr(value, "__index__"):
        return ((check_int(value, what),) * 2,) * count
    pairs = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if len(pairs) != count or any(hasattr(pair, "__index__") for pair in pairs):
        raise UsageError(
            f"{what} {value!r}; give (before, after) for each of {count} dimensions, or one number"
        )
    before_and_after = [whole_numbers(what, pair, 2) for pair in pairs]
    return tuple((before, after) for before, after in before_and_after)


def _has_array(argument: Any) -> bool:
    """Return whether an argument is a sharded array, or a list that contains a sharded array."""
    is_list = isinstance(argument, list | tuple)
    return any(isinstance(item, ArrayValue) for item in (argument if is_list else [argument]))


def _contains(argument: Any, obj: Any) -> bool:
    """Return whether an argument is the object `obj`, or a list that contains it."""
    if argument is obj:
        return True
    return isinstance(argument, list | tuple) and any(item is obj for item in argument)
