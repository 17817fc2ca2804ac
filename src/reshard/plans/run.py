"""Execution of plans and jobs on arrays in a process.

Nothing is sent between the arrays of a process, so the result depends only on the two layouts: a
rank keeps the elements that it holds, and the others are copied from any rank that holds them. A
plan or a job is run as the layout changes of its tensors. Only staged jobs, which forward received
elements, need copies stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from reshard.dtypes import DType
from reshard.errors import ShardError
from reshard.execution.copies import CopyColumns
from reshard.execution.engine import TensorRun, run, run_slot
from reshard.execution.memory import BY_NAME, check_mapping, sort_for_reading
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers

Array = TypeVar("Array")
NamedChange = tuple[str, DType, LayoutChange]


def run_change(
    change: LayoutChange,
    shards: Mapping[int, Array],
    out: Mapping[int, Array] | None = None,
    threads: int | None = None,
    dtype: DType | None = None,
) -> dict[int, Array]:
    """Return the shards of the target, copied from those of the source.

    Args:
        change: from the source layout to the target layout.
        shards: the array of every non-empty source slot: of the slot's local shape
            (`change.source.local_shape(slot)`), all of the same dtype and array library.
        out: arrays to write to, one for every non-empty target slot: of its local shape, and of
            the dtype and library of the sources. By default new arrays are allocated, which takes
            about twice as long, and more if a virtual machine has to get memory from its host.
        threads: the maximum number of threads; by default as many as processors. The result does
            not depend on it.
        dtype: that the arrays must have, or None for any.

    Returns:
        The array of every non-empty target slot, from `out` if given.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that is read-only or shares memory with another.
        PlanError: an element that no source slot holds.
        UsageError: a number of threads below 1.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2)
    >>> rows, columns = (spec(mesh, text).layout((2, 4)) for text in ("x, -", "-, x"))
    >>> change = LayoutChange(rows, columns)
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run_change(change, shards)[1].tolist()
    [[2, 3], [6, 7]]
    >>> whole = np.zeros((2, 4), int)
    >>> _ = run_change(change, shards, {0: whole[:, :2], 1: whole[:, 2:]})
    >>> whole.tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    (arrays,) = run([TensorRun(change, shards, out, dtype)], threads)
    return arrays


def run_changes(
    changes: Sequence[NamedChange],
    arrays: Mapping[str, Mapping[int, Any]],
    out: Mapping[str, Mapping[int, Any]] | None = None,
    threads: int | None = None,
) -> dict[str, dict[int, Any]]:
    """Return the target's arrays of every tensor as `{name: {rank: array}}`.

    Args:
        changes: the name, the dtype and the change of every tensor.
        arrays: the array of every tensor and every non-empty source rank.
        out: arrays to write to, for every tensor and target rank, as in `run_change`.
        threads: the maximum number of threads for all tensors; by default as many as processors.

    Raises:
        ShardError: a tensor or an array that is missing, or has another shape or dtype; an
            array of `out` that is read-only or shares memory with another.
        PlanError: an element that no source slot holds.
        UsageError: a number of threads below 1.

    >>> import numpy as np
    >>> from reshard import Layout
    >>> from reshard.dtypes import dtype
    >>> change = LayoutChange(Layout.replicated((3,), 2), Layout.whole((3,), [2], 3))
    >>> copy = np.array([1, 2, 3], np.int8)
    >>> run_changes([("a", dtype("int8"), change)], {"a": {0: copy, 1: copy}})["a"][2].tolist()
    [1, 2, 3]
    """
    return _run_named([(*named, None) for named in changes], arrays, out, threads)


def run_stages(
    changes: Sequence[NamedChange],
    stages: Callable[[int], Iterable[Transfers]],
    arrays: Mapping[str, Mapping[int, Any]],
) -> dict[str, dict[int, Any]]:
    """Return the target's arrays, where `stages(number)` are the transfers of a tensor by stage.

    The first stage copies from source arrays, the next ones from target arrays.
    """

    def find_stages(number: int) -> Sequence[CopyColumns]:
        return tuple(map(CopyColumns.of_transfers, stages(number)))

    staged = [(*named, partial(find_stages, number)) for number, named in enumerate(changes)]
    return _run_named(staged, arrays, None, None)


def _run_named(
    changes: Sequence[tuple[str, DType, LayoutChange, Callable[[], Sequence[CopyColumns]] | None]],
    arrays: Mapping[str, Mapping[int, Any]],
    out: Mapping[str, Mapping[int, Any]] | None,
    threads: int | None,
) -> dict[str, dict[int, Any]]:
    names = [name for name, *_ in changes]
    check_mapping(arrays, "shards", BY_NAME)
    _check_names(names, arrays, "")
    if out is not None:
        check_mapping(out, "out", BY_NAME)
        _check_names(names, out, " in out")
    # A single run for all tensors: every array is checked before any is written, and threads are
    # shared by the copies of all.
    tensors = [
        TensorRun(
            change, arrays[name], None if out is None else out[name], dtype, name, find_stages
        )
        for name, dtype, change, find_stages in changes
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
    """Return the array of a non-empty target rank, and the number of elements copied to it.

    A job can be run rank by rank, concurrently or in several processes, because the arrays of a
    target rank depend only on those of the source. Only the sources that it needs are read.

    Args:
        change: of the tensor, whose arrays were checked (`reshard.execution.memory`).
        rank: of the target.
        shards: the arrays of the source's ranks, which are only read.
        before_copy: called before every copy; an exception that it raises propagates.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, Layout, spec
    >>> halves = spec(DeviceMesh.of(x=2), "x").layout((4,))
    >>> run_rank(LayoutChange(Layout.replicated((4,), 1), halves), 1, {0: np.arange(4)})
    (array([2, 3]), 2)
    """
    return run_slot(change, rank, shards, before_copy)
