"""Local functions that a library has: in its namespace, or its `linalg` and `fft`."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.spmd.local.local_work import Function, LocalWork

_FEW_ELEMENTS = 256


def find_function(work: LocalWork, place: Any, name: str) -> Function:
    """A library's function. Raises UsageError where it has none of the name."""
    function: Function | None = getattr(place, name, None)
    if function is None:
        raise UsageError(f"operator {work.name!r} is none of {work.library.name}'s")
    return function


def own_attributes(work: LocalWork) -> dict[str, Any]:
    """The attributes, with element types as the library calls them."""
    return {
        name: work.library.own_dtype(value) if isinstance(value, DType) else value
        for name, value in work.attributes.items()
    }


def by_name(work: LocalWork) -> Function:
    """The library's function of the operator's name, with the operator's attributes."""
    function = find_function(work, work.library.namespace, work.name)
    attributes = own_attributes(work)
    return partial(function, **attributes) if attributes else function


def in_linalg(work: LocalWork) -> Function:
    """The function of that name in the library's `linalg`."""
    function = find_function(work, work.library.namespace.linalg, work.name)
    return partial(function, **own_attributes(work)) if work.attributes else function


def in_fft(work: LocalWork) -> Function:
    """The function of that name in the library's `fft`."""
    names = {"axis": "axes", "n": "s"} if work.name.endswith("fftn") else {}
    options = {names.get(name, name): value for name, value in work.attributes.items()}
    function = partial(find_function(work, work.library.namespace.fft, work.name), **options)
    if work.library.name == "numpy":
        return function
    by_numpy = partial(getattr(np.fft, work.name), **options)

    def transformed(x: Any) -> Any:
        # PyTorch refuses a part without elements.
        if 0 in x.shape:
            empty = x if work.library.name == "numpy" else x.detach()
            made = work.library.array(by_numpy(work.library.numpy(empty)), beside=x)
            return work.library.linked(made, x)
        return function(x)

    return transformed


def einsum(work: LocalWork) -> Function:
    """The library's own einsum, which the array API has not."""
    name, text = work.library.name, work.attributes["subscripts"]
    if name != "numpy":
        torch = import_module("torch")
        return lambda *arrays: torch.einsum(text, *arrays)

    @lru_cache(maxsize=8)
    def find_path(shapes: tuple[tuple[int, ...], ...]) -> Any:
        # Without a path, NumPy goes through all letters in one loop: no BLAS. Few products are
        # sooner done than a path is gone.
        if sum(map(math.prod, shapes)) < _FEW_ELEMENTS:
            return False
        arrays = (np.broadcast_to(0.0, shape) for shape in shapes)
        return np.einsum_path(text, *arrays, optimize="greedy")[0]

    def function(*arrays: Any) -> Any:
        return np.einsum(text, *arrays, optimize=find_path(tuple([one.shape for one in arrays])))

    return function
