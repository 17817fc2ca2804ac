"""Functions of arrays in shards, given something else: what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from reshard.errors import UsageError
from reshard.spmd.array_value import ArrayValue

Function = TypeVar("Function", bound=Callable[..., Any])


def of_arrays(function: Function) -> Function:
    """A function that says which of its arguments is no array, where one was expected.

    Nothing is asked ahead: an argument without an array's attributes is found when it is used.

    >>> from reshard.errors import UsageError
    >>> from reshard.spmd.statistics import sum
    >>> try:
    ...     sum([1, 2])
    ... except UsageError as error:
    ...     print(str(error).split(";")[0])
    sum of [1, 2], a list
    """
    name = function.__name__.lstrip("_")

    @wraps(function)
    def told(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except AttributeError as error:
            found = error.obj
            if isinstance(found, ArrayValue) or not any(_has(one, found) for one in arguments):
                raise
            raise UsageError(
                f"{name} of {found!r}, a {type(found).__name__}; an sp.array was expected: make "
                "it one by sp.array(...)"
            ) from error

    return cast(Function, told)


def _has(argument: Any, found: Any) -> bool:
    """Whether an argument is what was found, or a list with it."""
    if argument is found:
        return True
    return isinstance(argument, list | tuple) and any(one is found for one in argument)
