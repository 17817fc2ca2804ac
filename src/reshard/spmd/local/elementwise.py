"""Local functions of elementwise operators whose arguments libraries name otherwise."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from reshard.spmd.local.local_work import Function, LocalWork


def cast(work: LocalWork) -> Function:
    """The same numbers in another element type."""
    own = work.library.own_dtype(work.attributes["dtype"])
    if work.library.name == "numpy":
        return lambda x: x.astype(own)
    return lambda x: x.to(own)


def same(work: LocalWork) -> Function:
    """The array itself; without PyTorch's record of it where gradients are to stop."""
    if work.name == "stop_gradient" and work.library.name == "torch":
        return lambda x: x.detach()
    return lambda x: x


def sigmoid(work: LocalWork) -> Function:
    """`1 / (1 + exp(-x))`, by exponentials that are not above 1."""
    if work.library.name == "torch":
        return import_module("torch").sigmoid  # type: ignore[no-any-return]

    def function(x: Any) -> Any:
        small = np.exp(-np.abs(x))
        return np.where(x >= 0, np.ones_like(small), small) / (1 + small)

    return function


def silu(work: LocalWork) -> Function:
    """`x * sigmoid(x)`, in one pass where PyTorch has it: of floating numbers."""
    own, (operand,) = sigmoid(work), work.operands
    if work.library.name == "torch" and operand is not None and "float" in operand.dtype.name:
        return import_module("torch").nn.functional.silu  # type: ignore[no-any-return]
    return lambda x: x * own(x)


def imag(work: LocalWork) -> Function:
    """The imaginary part."""
    space, (operand,) = work.library.namespace, work.operands
    is_complex = operand is not None and operand.dtype.name.startswith("complex")
    # PyTorch has none for real numbers, whose imaginary part is 0.
    function: Function = space.imag if is_complex else space.zeros_like
    return function


def clip(work: LocalWork) -> Function:
    """Numbers within one bound, or two."""
    clip = work.library.namespace.clip
    if work.attributes["bounds"] == ("max",):
        return lambda x, most: clip(x, None, most)
    if work.attributes["bounds"] == ("min",):
        return lambda x, least: clip(x, least, None)
    return lambda x, least, most: clip(x, least, most)
