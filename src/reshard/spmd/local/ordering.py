"""Local functions of operators that order elements."""

from __future__ import annotations

from typing import Any

from reshard.spmd.core.local_work import Function, LocalWork


def sorted_along(space: Any, x: Any, axis: int, descending: bool) -> Any:
    """Elements in order along an axis."""
    made = space.sort(x, axis=axis)
    return space.flip(made, axis=axis) if descending else made


def order_of(space: Any, x: Any, axis: int, descending: bool) -> Any:
    """The indices that sort an axis; equal elements keep their order."""
    if not descending:
        return space.argsort(x, axis=axis, stable=True)
    # Equal elements keep their order: flipped, sorted, and flipped back.
    places = space.argsort(space.flip(x, axis=axis), axis=axis, stable=True)
    return x.shape[axis] - 1 - space.flip(places, axis=axis)


def sort(work: LocalWork) -> Function:
    """Elements in order along an axis."""
    space, axis = work.library.namespace, work.attributes["axis"]
    descending = work.attributes["descending"]
    return lambda x: sorted_along(space, x, axis, descending)


def argsort(work: LocalWork) -> Function:
    """The indices that sort an axis; equal elements keep their order."""
    space, axis = work.library.namespace, work.attributes["axis"]
    descending = work.attributes["descending"]
    return lambda x: order_of(space, x, axis, descending)


def top_k(work: LocalWork) -> Function:
    """The largest along an axis, and where they were; of equal ones the first."""
    space, k, axis = work.library.namespace, work.attributes["k"], work.attributes["axis"]

    def function(x: Any) -> tuple[Any, Any]:
        flipped = space.flip(x, axis=axis)
        places = space.flip(space.argsort(flipped, axis=axis, stable=True), axis=axis)
        places = x.shape[axis] - 1 - places[(slice(None),) * axis + (slice(0, k),)]
        return space.take_along_axis(x, places, axis=axis), places

    return function
