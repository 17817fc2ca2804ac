"""Execution of plans and jobs on arrays in one process.

Nothing is sent between arrays of one process, so the result depends only on the two layouts:
what a rank holds stays, and the rest is copied from any rank that holds it. A plan or a
job is executed as the changes of its tensors. Only stages, which forward what other ranks have
received, need copies of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from reshard.dtypes import DType
from reshard.errors import ShardError
from reshard.execution.copies import CopyColumns
from reshard.execution.engine import TensorArrays, TensorCopies, run, run_slot
from reshard.execution.memory import check_by_name, sort_for_reading
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers

Array = TypeVar("Array")
NamedChange = tuple[str, DType, LayoutChange]


def copies_of_change(change: LayoutChange) -> TensorCopies:
    """The copies of a change of layouts, for the engine."""
    return TensorCopies(
        change.source,
        change.target,
        change.combines,
        change.scale,
        # Found only when the engine asks, after all arrays have been checked.
        lambda: (CopyColumns.of_routes(change.routes, change.pieces),),
    )


def run_change(
    change: LayoutChange,
    shards: Mapping[int, Array],
    out: Mapping[int, Array] | None = None,
    threads: int | None = None,
    dtype: DType | None = None,
) -> dict[int, Array]:
    """The target's shards, from the source's.

    Args:
        change: what to do.
        shards: for every source slot that holds something, its array: of the slot's local
            shape (`change.source.local_shape(slot)`), all of one dtype and kind.
        out: arrays to write to, one for every target slot that holds something: of its local
            shape, and of the sources' dtype and kind. New arrays are made when None, which
            takes about twice as long, and more where memory has to come from a virtual
            machine's host: the system has to find and clear it first.
        threads: how many copy at most; one for each processor when None. The result is the
            same for any number.
        dtype: what the arrays have to be of; anything when None.

    Returns:
        For every target slot that holds something its array: that of `out`, or a new one.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that cannot be written, or that shares memory with another.
        PlanError: a source that leaves out an element.
        UsageError: fewer than one thread.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2)
    >>> rows, columns = (spec(mesh, text).layout((2, 4)) for text in ("x, -", "-, x"))
    >>> change = LayoutChange(rows, columns)
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run_change(change, shards)[1].tolist()
    [[2, 3], [6, 7]]
    >>> whole = np.zeros((2, 4), int)
    >>> found = run_change(change, shards, {0: whole[:, :2], 1: whole[:, 2:]})
    >>> whole.tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    (found,) = run([(copies_of_change(change), TensorArrays(shards, out, dtype))], threads)
    return found


def run_changes(
    changes: Sequence[NamedChange],
    arrays: Mapping[str, Mapping[int, Any]],
    out: Mapping[str, Mapping[int, Any]] | None = None,
    threads: int | None = None,
) -> dict[str, dict[int, Any]]:
    """The target's arrays of every tensor, from the source's: `{name: {rank: array}}`.

    Args:
        changes: the name, the dtype and the change of every tensor.
        arrays: for every tensor and source rank that holds something, its array.
        out: arrays to write to, for every tensor and target rank, as in `run_change`.
        threads: how many copy at most, all tensors together; one for each processor when None.

    Raises:
        ShardError: a tensor or an array that is missing, or has another shape or dtype; an
            array of `out` that cannot be written, or shares memory with one of any tensor.
        PlanError: a source that leaves out an element.
        UsageError: fewer than one thread.

    >>> import numpy as np
    >>> from reshard import Layout
    >>> from reshard.dtypes import dtype
    >>> change = LayoutChange(Layout.replicated((3,), 2), Layout.whole((3,), [2], 3))
    >>> copy = np.array([1, 2, 3], np.int8)
    >>> run_changes([("a", dtype("int8"), change)], {"a": {0: copy, 1: copy}})["a"][2].tolist()
    [1, 2, 3]
    """
    copies = [(name, dtype, copies_of_change(change)) for name, dtype, change in changes]
    return _run_named(copies, arrays, out, threads)


def run_stages(
    changes: Sequence[NamedChange],
    stages: Callable[[int], Iterable[Transfers]],
    arrays: Mapping[str, Mapping[int, Any]],
) -> dict[str, dict[int, Any]]:
    """The target's arrays by the transfers of stages: `stages(number)` are those of a tensor.

    The first fill target arrays from source arrays, the next from target arrays.
    """
    copies = [
        (name, dtype, _copies_of_stages(change, partial(stages, number)))
        for number, (name, dtype, change) in enumerate(changes)
    ]
    return _run_named(copies, arrays, None, None)


def _copies_of_stages(
    change: LayoutChange, stages: Callable[[], Iterable[Transfers]]
) -> TensorCopies:
    return TensorCopies(
        change.source,
        change.target,
        change.combines,
        change.scale,
        lambda: tuple(map(CopyColumns.of_transfers, stages())),
    )


def _run_named(
    copies: Sequence[tuple[str, DType, TensorCopies]],
    arrays: Mapping[str, Mapping[int, Any]],
    out: Mapping[str, Mapping[int, Any]] | None,
    threads: int | None,
) -> dict[str, dict[int, Any]]:
    names = [name for name, _, _ in copies]
    check_by_name(arrays, "what is given")
    _check_names(names, arrays, "")
    if out is not None:
        check_by_name(out, "out")
        _check_names(names, out, " in out")
    tensors = [
        (what, TensorArrays(arrays[name], None if out is None else out[name], dtype, name))
        for name, dtype, what in copies
    ]
    return dict(zip(names, run(tensors, threads), strict=True))


def _check_names(names: Iterable[str], arrays: Mapping[str, Any], where: str) -> None:
    for name in names:
        if name not in arrays:
            raise ShardError(
                f"no arrays for tensor {name!r}{where}; got {sort_for_reading(arrays)}"
            )


def run_rank(
    change: LayoutChange,
    rank: int,
    shards: Mapping[int, Array],
    before_copy: Callable[[], None] = lambda: None,
) -> tuple[Array, int]:
    """The array of a target rank that holds something, and how many elements were copied to it.

    A job may be carried out rank by rank: each target rank's arrays follow from the source's
    alone, so that ranks can be treated at the same time, or in different processes, and only
    those sources are read that the rank gets something from.

    Args:
        change: of the tensor, whose arrays were checked (`reshard.execution.memory`).
        rank: whose array is wanted.
        shards: the arrays of the source's ranks; only read.
        before_copy: called before every copy; what it raises ends the work.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, Layout, spec
    >>> halves = spec(DeviceMesh.of(x=2), "x").layout((4,))
    >>> run_rank(LayoutChange(Layout.replicated((4,), 1), halves), 1, {0: np.arange(4)})
    (array([2, 3]), 2)
    """
    # Only what ends on this rank is planned, so ranks can be treated apart.
    routes = change.routes_into(rank)
    columns = CopyColumns.of_routes(routes, change.pieces_of(routes))
    copies = TensorCopies(
        change.source, change.target, change.combines, change.scale, lambda: (columns,)
    )
    array: Array = run_slot(copies, rank, shards, before_copy)
    return array, int(routes.elements.sum())
