"""Calls that `torch.compile` does not trace: those that talk to other ranks.

A compiled function breaks its graph at such a call and runs it as it is. `torch.compiler.disable`
does that, but imports the compiler, which takes seconds: it is used here only once something else
has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def break_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function as one that compiled functions call without tracing it.

    >>> break_graph(len)([1, 2])
    2
    """
    untraced: Any = None

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal untraced
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if untraced is None:
            untraced = torch.compiler.disable(function)
        result: Result = untraced(*args, **kwargs)
        return result

    return call
