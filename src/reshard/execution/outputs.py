"""The arrays that a run writes: new memory, or arrays that the caller gives.

What is given is written in place, so all that can be wrong with it is found before the first
element is copied:

1. an array for every slot of the target that holds something, of its local shape, and of the
   kind and dtype of the sources;
2. memory that can be written, where every element has a place of its own;
3. none that another array of the run has too: neither a source, which is read meanwhile, nor
   another target.

Given arrays need not be contiguous: columns of one array may be targets of several slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import ShardError
from reshard.execution.arrays import ArrayKind, Storage, kind_of
from reshard.execution.fresh_memory import FreshMemory
from reshard.execution.inputs import check_by_slot, sort_for_reading
from reshard.layout import Layout

# Two arrays of one memory are told apart by solving for indices of a common element; what takes
# more attempts than this is refused.
_MOST_ATTEMPTS = 1_000_000
# NumPy's types know only two of the numbers of attempts that it takes.
_shares_memory: Any = np.shares_memory


class NamedStorage(NamedTuple):
    """The memory of an array, and what an error calls it."""

    name: str
    storage: Storage


def new_storages(layout: Layout, kind: ArrayKind, memory: FreshMemory) -> dict[int, Storage]:
    """New memory for each slot that holds something; its contents are undefined."""
    return {
        slot: memory.array(layout.local_shapes[slot], kind.dtype.storage) for slot in layout.holders
    }


def given_storages(
    layout: Layout, kind: ArrayKind, out: Mapping[int, Any], tensor: str = ""
) -> dict[int, Storage]:
    """The memory of the arrays in `out`, one for each slot that holds an element.

    Args:
        layout: of the target.
        kind: of the sources' arrays.
        out: arrays by slot; those of other slots are not looked at.
        tensor: what errors call the tensor, where a run has several.

    Raises:
        ShardError: one that is missing, of another shape, kind or dtype, or not to be written.
    """
    check_by_slot(out, f"out{tensor}")
    missing = [slot for slot in layout.element_holders if slot not in out]
    if missing:
        raise ShardError(
            f"no array{tensor} for rank {missing[0]} in out; the target holds data on ranks "
            f"{list(layout.holders)}, got {sort_for_reading(out)}"
        )
    found = {}
    for slot in layout.holders:
        if slot not in out:
            # It has no elements, so that nothing is written.
            found[slot] = np.empty(layout.local_shapes[slot], dtype=kind.dtype.storage)
            continue
        name, array = output_name(slot, tensor), out[slot]
        other = kind_of(array, name)
        shape = layout.local_shapes[slot]
        if tuple(array.shape) != shape:
            raise ShardError(
                f"{name} has shape {list(array.shape)}, but the target layout says {list(shape)}"
            )
        if other.dtype is not kind.dtype or type(other) is not type(kind):
            raise ShardError(
                f"{name} is {type(other).__name__} of {other.dtype.name}, the sources are "
                f"{type(kind).__name__} of {kind.dtype.name}; nothing is cast"
            )
        found[slot] = other.writable(array, name)
        if _repeats_itself(found[slot]):
            raise ShardError(
                f"{name} has several elements in one place of its memory (strides "
                f"{list(found[slot].strides)} in bytes for shape {list(shape)}); each must have "
                "its own, as in a copy"
            )
    return found


def output_name(slot: int, tensor: str = "") -> str:
    """What an error calls the array given for a slot."""
    return f"the array{tensor} for rank {slot} in out"


def check_apart(written: Iterable[NamedStorage], read: Iterable[NamedStorage]) -> None:
    """Raise ShardError where an array that is written shares an element with any other.

    >>> memory = np.zeros(4)
    >>> ends = NamedStorage("the left", memory[:2]), NamedStorage("the right", memory[2:])
    >>> check_apart([ends[0]], [ends[1]])
    >>> check_apart([ends[0]], [NamedStorage("the middle", memory[1:3])])
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: the left shares memory with the middle; each array that is written
    needs memory of its own
    """
    entries = [(*_bounds(named.storage), True, named) for named in written if named.storage.size]
    # A source may stand for many slots.
    sources = {_place(named.storage): named for named in read if named.storage.size}
    entries += [(*_bounds(named.storage), False, named) for named in sources.values()]
    entries.sort(key=lambda entry: entry[0])
    # A sweep by address: `reaching` are the arrays whose bytes go on where the next one begins.
    reaching: list[tuple[int, bool, NamedStorage]] = []
    for low, high, is_written, named in entries:
        reaching = [entry for entry in reaching if entry[0] > low]
        for _, other_is_written, other in reaching:
            if is_written or other_is_written:
                first, second = (named, other) if is_written else (other, named)
                _check_pair(first, second)
        reaching.append((high, is_written, named))


def _check_pair(written: NamedStorage, other: NamedStorage) -> None:
    try:
        # Arrays whose bounds cross may be disjoint all the same, as columns of one matrix are.
        shared = _shares_memory(written.storage, other.storage, max_work=_MOST_ATTEMPTS)
    except np.exceptions.TooHardError:
        raise ShardError(
            f"{written.name} lies in the same memory as {other.name}, and whether they share an "
            "element takes too long to find out; give memory of its own"
        ) from None
    if shared:
        raise ShardError(
            f"{written.name} shares memory with {other.name}; each array that is written needs "
            "memory of its own"
        )


def _place(array: Storage) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides


def _bounds(array: Storage) -> tuple[int, int]:
    """The addresses of the first byte and behind the last."""
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
    return low, high + array.itemsize


def _repeats_itself(array: Storage) -> bool:
    """Whether two elements lie in one place, or not each dimension steps over those below it."""
    reach = array.itemsize
    dims = zip(array.strides, array.shape, strict=True)
    # From the smallest stride up: `reach` is how far all dimensions so far go.
    for stride, size in sorted((abs(stride), size) for stride, size in dims if size != 1):
        if stride < reach and array.size:
            return True
        reach += stride * (size - 1)
    return False
