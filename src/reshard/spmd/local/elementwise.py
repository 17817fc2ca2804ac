"""Local functions of elementwise operators, and results written into existing memory.

The functions here are of operators that a library has not, or has with other arguments.

    np.multiply(x, y)               a new array
    np.multiply(x, y, out=x)        the same numbers, in the memory of x

Functions that work element by element read each element before they write it, so that the memory
may be that of an operand. NumPy's ufuncs say of themselves that they can write; of PyTorch's
functions `writing` has a list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.spmd.core.backend import library
from reshard.spmd.core.local_work import Function, LocalWork

_TORCH_NAMES = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift
bitwise_or bitwise_right_shift bitwise_xor copysign cos cosh divide equal erf exp exp2 expm1
floor_divide fmod gcd greater greater_equal heaviside hypot lcm less less_equal log
log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor maximum
minimum multiply negative nextafter not_equal pow reciprocal rsqrt sigmoid sin sinc sinh sqrt
square subtract tan tanh
"""
_ATEN_NAMES = "relu silu"


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


def silu_gradient(work: LocalWork) -> Function:
    """A cotangent of SiLU's result times its slope at the operand, in one pass by PyTorch."""
    own, (_, operand) = sigmoid(work), work.operands
    if work.library.name == "torch" and operand is not None and "float" in operand.dtype.name:
        return import_module("torch").ops.aten.silu_backward  # type: ignore[no-any-return]

    def function(g: Any, x: Any) -> Any:
        share = own(x)
        slope = 1 - share
        slope *= x
        slope += 1
        slope *= share
        return g * slope

    return function


def relu(work: LocalWork) -> Function:
    """The number where it is positive, 0 elsewhere; no number stays one that is none."""
    (operand,) = work.operands
    if work.library.name == "torch" and operand is not None and "float" in operand.dtype.name:
        return import_module("torch").nn.functional.relu  # type: ignore[no-any-return]
    maximum = work.library.namespace.maximum
    return lambda x: maximum(x, 0)


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


def writing(function: Function) -> Callable[..., Any] | None:
    """A function that takes an argument `out` as well, and returns it; None where there is none.

    A function of PyTorch returns a new tensor where it cannot write: where a gradient is recorded,
    say.

    >>> x = np.array([1.0, 2.0])
    >>> writing(np.negative)(x, out=x) is x, x.tolist()
    (True, [-1.0, -2.0])
    >>> print(writing(np.sum), writing(np.matmul))
    None None
    """
    if isinstance(function, np.ufunc):
        # Those with a signature do not work element by element.
        return function if function.signature is None else None
    return _torch_writing().get(function) if "torch" in sys.modules else None


@cache
def _torch_writing() -> dict[Function, Callable[..., Any]]:
    torch, space = sys.modules["torch"], library("torch").namespace
    found: dict[Function, Callable[..., Any]] = {}
    for name in _TORCH_NAMES.split():
        function = getattr(space, name)
        found[function] = partial(_write, function, function)
    for name in _ATEN_NAMES.split():
        function = getattr(torch.nn.functional, name)
        found[function] = partial(_write, function, getattr(torch.ops.aten, name).out)
    return found


def _write(function: Function, write: Callable[..., Any], *operands: Any, out: Any) -> Any:
    torch = sys.modules["torch"]
    is_recorded = torch.is_grad_enabled() and any(
        getattr(one, "requires_grad", False) for one in operands
    )
    # A subclass says itself what its functions do, and some functions take no number before `out`.
    if is_recorded or type(out) is not torch.Tensor or not isinstance(operands[0], torch.Tensor):
        return function(*operands)
    return write(*operands, out=out)
