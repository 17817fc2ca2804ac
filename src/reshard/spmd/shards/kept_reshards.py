"""Kept reshards: an array that was moved to another sharding has those shards at hand for a while.

A value that several operations need in one other sharding moves once: contributions are combined,
or parts gathered, at the first use. What is kept goes with the array, and all together is bounded
for each runner, the oldest going first: weights that are gathered layer by layer are not all there
at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from reshard.sharding import ShardingSpec
from reshard.spmd.local.library import Library
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Movement, Shards

MOST_KEPT_BYTES = 256 << 20
"""Of one runner, in this process."""


class KeptShards:
    """An array's shards in another sharding, and what they were made from."""

    __slots__ = ("__weakref__", "shards", "size_bytes", "state")

    def __init__(self, shards: Shards, state: object, size_bytes: int) -> None:
        self.shards: Shards | None = shards
        self.state = state
        self.size_bytes = size_bytes


class KeptReshards:
    """The reshards that one runner keeps.

    Args:
        library: of the shards.
        most_bytes: that are kept together.
    """

    def __init__(self, library: Library, most_bytes: int | None = None) -> None:
        self._library = library
        self._most_bytes = most_bytes
        self._order: deque[_SizedReference] = deque()
        self.size_bytes = 0

    def moved(self, array: ArrayValue, spec: ShardingSpec, move: Movement) -> Shards:
        """The shards of an array in another sharding: those that are kept, or moved ones."""
        state = self._library.state_of(array._shards)
        kept = array.kept_reshards()
        found = kept.get(spec)
        if found is not None and found.shards is not None and found.state == state:
            there: Shards = found.shards
            return there
        shards = move(array._shards)
        size_bytes = self._library.size_bytes(shards)
        most_bytes = MOST_KEPT_BYTES if self._most_bytes is None else self._most_bytes
        if size_bytes <= most_bytes and _may_keep(array, state):
            made = kept[spec] = KeptShards(shards, state, size_bytes)
            self._order.append(_SizedReference(made, self))
            self._drop_oldest(most_bytes)
        return shards

    def _drop_oldest(self, most_bytes: int) -> None:
        # Some are gone with their arrays.
        while self._order and (self.size_bytes > most_bytes or self._order[0]() is None):
            reference = self._order.popleft()
            oldest = reference()
            if oldest is not None:
                oldest.shards = None
                reference.release()


class _SizedReference(weakref.ref[KeptShards]):
    """A reference whose bytes count until what it refers to is dropped, or gone with its array."""

    __slots__ = ("_keeper", "_size_bytes")

    def __new__(cls, kept: KeptShards, keeper: KeptReshards) -> _SizedReference:
        return super().__new__(cls, kept, cls.release)

    def __init__(self, kept: KeptShards, keeper: KeptReshards) -> None:
        super().__init__(kept, type(self).release)  # type: ignore[call-arg]
        self._keeper = keeper
        self._size_bytes = kept.size_bytes
        keeper.size_bytes += kept.size_bytes

    def release(self) -> None:
        """Count no more."""
        self._keeper.size_bytes -= self._size_bytes
        self._size_bytes = 0


def take_moved(array: ArrayValue, spec: ShardingSpec, move: Movement) -> Shards:
    """The shards of an array in another sharding, by its movement; moved once for a while."""
    runner = array.runner
    # Without elements there is nothing to keep.
    return (
        move(array._shards) if runner.is_abstract else _keeper_of(runner).moved(array, spec, move)
    )


def _keeper_of(runner: Runner) -> KeptReshards:
    found: KeptReshards | None = runner.kept
    if found is None:
        found = runner.kept = KeptReshards(runner.library)
    return found


def _may_keep(array: ArrayValue, state: Any) -> bool:
    spec = array.type.spec
    if spec is None:
        return False
    # PyTorch frees what the greatest of contributions needs for its gradient when that is taken.
    return state is None or not state[0] or spec.reduction not in ("max", "min", "product")
