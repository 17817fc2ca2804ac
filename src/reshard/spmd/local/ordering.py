"""Local functions of operators that order elements."""

from __future__ import annotations

from typing import Any

from reshard.spmd.local.local_work import Function, LocalWork


def sort(work: LocalWork) -> Function:
    """Elements in order along an axis."""
    space, axis = work.library.namespace, work.attributes["axis"]
    if not work.attributes["descending"]:
        return lambda x: space.sort(x, axis=axis)
    return lambda x: space.flip(space.sort(x, axis=axis), axis=axis)


def argsort(work: LocalWork) -> Function:
    """The indices that sort an axis; equal elements keep their order."""
    space, axis = work.library.namespace, work.attributes["axis"]
    if not work.attributes["descending"]:
        return lambda x: space.argsort(x, axis=axis, stable=True)

    def descending(x: Any) -> Any:
        # Equal elements keep their order: flipped, sorted, and flipped back.
        places = space.argsort(space.flip(x, axis=axis), axis=axis, stable=True)
        return x.shape[axis] - 1 - space.flip(places, axis=axis)

    return descending


def top_k(work: LocalWork) -> Function:
    """The largest along an axis, and where they were; of equal ones the first."""
    space, k, axis = work.library.namespace, work.attributes["k"], work.attributes["axis"]

    def function(x: Any) -> tuple[Any, Any]:
        flipped = space.flip(x, axis=axis)
        places = space.flip(space.argsort(flipped, axis=axis, stable=True), axis=axis)
        places = x.shape[axis] - 1 - places[(slice(None),) * axis + (slice(0, k),)]
        return space.take_along_axis(x, places, axis=axis), places

    return function
