"""The arrays that a run reads: what each slot of the source layout must be given.

Everything that can be wrong with them is found before the first element is copied: what is
missing, of another shape, kind or dtype, or in memory that cannot be shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import ShardError
from reshard.execution.arrays import ArrayKind, Storage, kind_of
from reshard.execution.contributions import check_reduction
from reshard.layout import Layout


def check_by_slot(arrays: object, name: str) -> None:
    """Raise ShardError for what is no table of arrays by rank.

    >>> import numpy as np
    >>> check_by_slot([np.zeros(2)], "out")
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: out is a list; give arrays by rank, such as {0: array}
    """
    if not isinstance(arrays, Mapping):
        raise ShardError(
            f"{name} is a {type(arrays).__name__}; give arrays by rank, such as {{0: array}}"
        )


def check_by_name(arrays: object, name: str) -> None:
    """Raise ShardError for what is no table of tensors' arrays by name.

    >>> import numpy as np
    >>> check_by_name([{0: np.zeros(2)}], "out")
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: out is a list; give arrays by tensor and rank, such as {'w': {0:
    array}}
    """
    if not isinstance(arrays, Mapping):
        raise ShardError(
            f"{name} is a {type(arrays).__name__}; give arrays by tensor and rank, such as "
            "{'w': {0: array}}"
        )


def sort_for_reading(keys: Iterable[Any]) -> list[Any]:
    """Keys as an error lists them: in their order, where they have one.

    >>> sort_for_reading([2, 1]), sort_for_reading([2, "1"])
    ([1, 2], [2, '1'])
    """
    found = list(keys)
    try:
        return sorted(found)
    except TypeError:
        return found


def check_shards(
    source: Layout,
    shards: Mapping[int, Any],
    tensor: str = "",
    dtype: DType | None = None,
    target_reduction: str | None = None,
) -> ArrayKind:
    """The kind of the arrays of a source layout. Raises ShardError where they do not fit it.

    Args:
        source: the layout.
        shards: the arrays by slot; those of slots that hold nothing are not looked at, and slots
            without elements need none.
        tensor: what errors call the tensor, where a run has several.
        dtype: what the arrays have to be of; anything when None.
        target_reduction: what they become contributions of.
    """
    check_by_slot(shards, f"what is given{tensor}")
    holders = [slot for slot in source.holders if slot in shards]
    # Of a tensor without any element, one array has to show the type.
    needed = source.element_holders or source.holders[: not holders]
    missing = [slot for slot in needed if slot not in shards]
    if missing:
        raise ShardError(
            f"no array{tensor} for rank {missing[0]}; the source holds data on ranks "
            f"{list(source.holders)}, got {sort_for_reading(shards)}"
        )
    if not holders:
        raise ShardError(f"the source layout{tensor} holds nothing, so there is nothing to run on")
    kinds = {slot: kind_of(shards[slot], source_name(slot, tensor)) for slot in holders}
    kind = kinds[holders[0]]
    for slot, other in kinds.items():
        found, expected = tuple(shards[slot].shape), source.local_shapes[slot]
        if found != expected:
            raise ShardError(
                f"{source_name(slot, tensor)} has shape {list(found)}, but the source layout "
                f"says {list(expected)}"
            )
        if other.dtype is not kind.dtype or type(other) is not type(kind):
            raise ShardError(
                f"{source_name(slot, tensor)} is {type(other).__name__} of {other.dtype.name}, "
                f"that of rank {holders[0]} {type(kind).__name__} of {kind.dtype.name}; "
                "all must be alike"
            )
    if dtype is not None and kind.dtype is not dtype:
        raise ShardError(
            f"arrays{tensor} of {kind.dtype.name} for a plan of {dtype.name}; nothing is cast"
        )
    for reduction in {source.reduction, target_reduction} - {None}:
        # Where only the target is a mean, its contributions are copies: nothing is divided.
        if reduction != "mean" or source.reduction == "mean":
            check_reduction(str(reduction), kind.dtype)
    return kind


def source_storages(
    source: Layout, kind: ArrayKind, shards: Mapping[int, Any], tensor: str = ""
) -> dict[int, Storage]:
    """The memory of a source's arrays, that were checked.

    Raises ShardError where it is elsewhere, or cannot be shared; `tensor` as in `check_shards`.
    """
    found = {}
    for slot in source.holders:
        if slot in shards:
            found[slot] = kind.storage(shards[slot], source_name(slot, tensor))
        else:
            # It has no elements, so that nothing is read.
            found[slot] = np.empty(source.local_shapes[slot], dtype=kind.dtype.storage)
    return found


def source_name(slot: int, tensor: str = "") -> str:
    """What an error calls the array that was given for a slot."""
    return f"the array of rank {slot}{tensor}"
