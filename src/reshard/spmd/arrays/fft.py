"""Fourier transforms: the array API's `fft` extension.

Transformed axes are replicated first; the others stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError, UsageError
from reshard.spmd.arrays.sharded_array import array
from reshard.spmd.functions.array_arguments import as_whole, of_arrays, whole_number, whole_numbers
from reshard.spmd.functions.data_types import check_device
from reshard.spmd.functions.manipulation import read_axes, roll
from reshard.spmd.rules.shapes import axis_of
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


def _make_along_one(name: str, text: str) -> Callable[..., Any]:
    def function(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Any:
        _check_norm(norm)
        size = None if n is None else whole_number(f"{name} of length", n, least=1)
        return call(name, (x,), {"axis": axis_of(x.ndim, axis), "n": size}, {"norm": norm})

    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return of_arrays(function)


def _make_along_many(name: str, text: str) -> Callable[..., Any]:
    def function(
        x: Any, /, *, s: Sequence[int] | None = None, axes: Axes = None, norm: str = "backward"
    ) -> Any:
        _check_norm(norm)
        # As the standard says: lengths without axes are those of the last ones.
        if axes is None:
            count = len(s) if isinstance(s, Sequence) else 1
            axes = range(x.ndim) if s is None else range(x.ndim - count, x.ndim)
        places = read_axes(axes, x.ndim)
        sizes = None if s is None else whole_numbers(f"{name} of lengths", s, len(places), least=1)
        if not places:
            raise SpecError(f"{name} of {x.type} over no axes; at least one was expected")
        return call(name, (x,), {"axis": places, "n": sizes}, {"norm": norm})

    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return of_arrays(function)


def _check_norm(norm: str) -> None:
    if not isinstance(norm, str) or norm not in ("backward", "ortho", "forward"):
        raise UsageError(f"norm {norm!r}; it is 'backward', 'ortho' or 'forward'")


fft = _make_along_one("fft", "The Fourier transform along an axis.")
ifft = _make_along_one("ifft", "The inverse Fourier transform along an axis.")
rfft = _make_along_one("rfft", "The Fourier transform of real numbers along an axis.")
irfft = _make_along_one("irfft", "The inverse of `rfft`.")
hfft = _make_along_one("hfft", "The Fourier transform of a Hermitian-symmetric signal.")
ihfft = _make_along_one("ihfft", "The inverse of `hfft`.")
fftn = _make_along_many("fftn", "The Fourier transform along several axes; along all when None.")
ifftn = _make_along_many("ifftn", "The inverse Fourier transform along several axes.")
rfftn = _make_along_many("rfftn", "The Fourier transform of real numbers along several axes.")
irfftn = _make_along_many("irfftn", "The inverse of `rfftn`.")


def fftfreq(n: int, /, *, d: float = 1.0, dtype: object = None, device: object = None) -> Any:
    """The frequencies of `fft`."""
    return _make_frequencies(np.fft.fftfreq, n, d, dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: object = None, device: object = None) -> Any:
    """The frequencies of `rfft`."""
    return _make_frequencies(np.fft.rfftfreq, n, d, dtype, device)


def _make_frequencies(function: Any, n: Any, d: Any, dtype: object, device: object) -> Any:
    check_device(device)
    count = as_whole(n)
    if count is None or count < 1 or not isinstance(d, Real) or not d:
        raise UsageError(
            f"frequencies of {n!r} samples {d!r} apart; give 1 or more of them, and a distance "
            "that is not 0"
        )
    found = function(count, d)
    return array(found, dtype=None if dtype is None else as_dtype(dtype), runner=runner_for())


@of_arrays
def fftshift(x: Any, /, *, axes: int | Axes = None) -> Any:
    """Move the zero frequency to the middle."""
    return _shift(x, axes, 1)


@of_arrays
def ifftshift(x: Any, /, *, axes: int | Axes = None) -> Any:
    """The inverse of `fftshift`."""
    return _shift(x, axes, -1)


def _shift(x: Any, axes: int | Axes, sign: int) -> Any:
    places = read_axes(range(x.ndim) if axes is None else axes, x.ndim)
    # The same shift both ways, so that one undoes the other for odd sizes as well.
    return roll(x, tuple(sign * (x.shape[one] // 2) for one in places), axis=places)
