"""Fourier transforms: the array API's `fft` extension.

Transformed axes are replicated first; the others stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError, UsageError
from reshard.spmd.arrays.sharded_array import array
from reshard.spmd.core.local_work import Function, LocalWork, find_function
from reshard.spmd.core.operator import Infer, ship
from reshard.spmd.ops.arguments import as_whole, of_arrays, whole_numbers
from reshard.spmd.ops.data_types import check_device
from reshard.spmd.ops.movement import read_axes, roll
from reshard.spmd.rules.rule_builder import Inferred, Shape, axis_of, kept, one_operand
from reshard.spmd.shards.operation_call import call
from reshard.spmd.shards.runner import runner_for

__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]

Axes = Sequence[int] | None


def _check_norm(norm: str) -> None:
    if not isinstance(norm, str) or norm not in ("backward", "ortho", "forward"):
        raise UsageError(f"norm {norm!r}; it is 'backward', 'ortho' or 'forward'")


def fourier(kind: str) -> Infer:
    """Infer a transform along axes, each of which a device needs whole.

    Args:
        kind: "same" for as many results as elements, "half" for a real operand (`n // 2 + 1`
            results), "whole" for a real result.
    """

    def infer(
        shapes: Sequence[Shape],
        n: int | Sequence[int] | None = None,
        axis: int | Axes = -1,
        norm: str = "backward",
    ) -> Inferred:
        shape = one_operand("a Fourier transform", shapes)
        rank = len(shape)
        lengths = [n] if isinstance(n, int) else None if n is None else list(n)
        if axis is None:
            # As in NumPy, lengths without axes apply to the last dimensions.
            named = list(range(rank - len(lengths) if lengths else 0, rank))
        else:
            named = [axis_of(rank, dim) for dim in ([axis] if isinstance(axis, int) else axis)]
        if not named or (lengths is not None and len(lengths) != len(named)):
            raise SpecError(f"a Fourier transform of {shape} over {named}: {lengths} lengths")
        last = named[-1]
        result = list(shape)
        for number, dim in enumerate(named):
            # irfft's default undoes rfft of an even number of elements, along the last axis alone.
            usual = 2 * (shape[dim] - 1) if kind == "whole" and dim == last else shape[dim]
            result[dim] = usual if lengths is None else lengths[number]
        if kind == "half":
            result[last] = result[last] // 2 + 1
        # Along an axis that changes its length a cut of one side does not fit the other.
        changed = [dim for dim in named if result[dim] != shape[dim]]
        return kept(shape, tuple(result), whole=named, blocked=changed)

    return infer


def _fft_kernel(work: LocalWork) -> Function:
    """Return the function of the operator's name in the library's `fft`."""
    names = {"axis": "axes", "n": "s"} if work.name.endswith("fftn") else {}
    options = {names.get(name, name): value for name, value in work.attributes.items()}
    function = partial(find_function(work, work.library.namespace.fft, work.name), **options)
    if work.library.name == "numpy":
        return function
    by_numpy = partial(getattr(np.fft, work.name), **options)

    def transformed(x: Any) -> Any:
        # PyTorch refuses a part without elements.
        if 0 in x.shape:
            result = work.library.array(by_numpy(work.library.numpy(x.detach())), like=x)
            return work.library.linked(result, x)
        return function(x)

    return transformed


_register_transform = partial(
    ship,
    example=([(4, 8)], {}),
    family="Fourier transforms",
    linear="each",
    local=_fft_kernel,
    note="the transformed axes are whole on each device",
    no_pullback="its numbers are complex, which have no gradients here",
)


def _make_along_one(name: str, text: str, kind: str) -> Callable[..., Any]:
    def function(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Any:
        _check_norm(norm)
        size = None if n is None else check_int(n, f"length n of {name}", minimum=1)
        return call(name, (x,), {"axis": axis_of(x.ndim, axis), "n": size}, {"norm": norm})

    _register_transform(name, fourier(kind))
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return of_arrays(function)


def _make_along_many(name: str, text: str, kind: str) -> Callable[..., Any]:
    def function(
        x: Any, /, *, s: Sequence[int] | None = None, axes: Axes = None, norm: str = "backward"
    ) -> Any:
        _check_norm(norm)
        # As in the standard, lengths without axes apply to the last axes.
        if axes is None:
            count = len(s) if isinstance(s, Sequence) else 1
            axes = range(x.ndim) if s is None else range(x.ndim - count, x.ndim)
        places = read_axes(axes, x.ndim)
        sizes = (
            None if s is None else whole_numbers(f"lengths s of {name}", s, len(places), least=1)
        )
        if not places:
            raise SpecError(f"{name} of {x.type} over no axes; at least one was expected")
        return call(name, (x,), {"axis": places, "n": sizes}, {"norm": norm})

    _register_transform(name, fourier(kind))
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return of_arrays(function)


fft = _make_along_one("fft", "The Fourier transform along an axis.", "same")
ifft = _make_along_one("ifft", "The inverse Fourier transform along an axis.", "same")
rfft = _make_along_one("rfft", "The Fourier transform of real numbers along an axis.", "half")
irfft = _make_along_one("irfft", "The inverse of `rfft`.", "whole")
hfft = _make_along_one("hfft", "The Fourier transform of a Hermitian-symmetric signal.", "whole")
ihfft = _make_along_one("ihfft", "The inverse of `hfft`.", "half")
fftn = _make_along_many(
    "fftn", "The Fourier transform along several axes; along all when None.", "same"
)
ifftn = _make_along_many("ifftn", "The inverse Fourier transform along several axes.", "same")
rfftn = _make_along_many(
    "rfftn", "The Fourier transform of real numbers along several axes.", "half"
)
irfftn = _make_along_many("irfftn", "The inverse of `rfftn`.", "whole")


def fftfreq(n: int, /, *, d: float = 1.0, dtype: object = None, device: object = None) -> Any:
    """Return the frequencies of `fft`."""
    return _make_frequencies(np.fft.fftfreq, n, d, dtype, device)


def _make_frequencies(function: Any, n: Any, d: Any, dtype: object, device: object) -> Any:
    check_device(device)
    count = as_whole(n)
    if count is None or count < 1 or not isinstance(d, Real) or not d:
        raise UsageError(
            f"frequencies of {n!r} samples {d!r} apart; give 1 or more of them, and a distance "
            "that is not 0"
        )
    frequencies = function(count, d)
    return array(frequencies, dtype=None if dtype is None else as_dtype(dtype), runner=runner_for())


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: object = None, device: object = None) -> Any:
    """Return the frequencies of `rfft`."""
    return _make_frequencies(np.fft.rfftfreq, n, d, dtype, device)


@of_arrays
def fftshift(x: Any, /, *, axes: int | Axes = None) -> Any:
    """Move the zero frequency to the middle."""
    return _shift(x, axes, 1)


def _shift(x: Any, axes: int | Axes, sign: int) -> Any:
    places = read_axes(range(x.ndim) if axes is None else axes, x.ndim)
    # Both functions use the same shift, so that each undoes the other for odd sizes, too.
    return roll(x, tuple(sign * (x.shape[dim] // 2) for dim in places), axis=places)


@of_arrays
def ifftshift(x: Any, /, *, axes: int | Axes = None) -> Any:
    """Undo `fftshift`."""
    return _shift(x, axes, -1)
