"""Calls that `torch.compile` does not trace: calls that communicate with other ranks.

A compiled function breaks its graph at such a call and runs the call eagerly, as with
`torch.compiler.disable`. That imports the compiler, which takes seconds, so it is used here only
after another module has imported the compiler.
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
    """Return a wrapper that compiled functions call without tracing it.

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
