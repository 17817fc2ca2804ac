"""Array values, and their cached reshards.

An array value is the type of an array, the shards of this process, and their runner.

If several operations need a value in the same other sharding, it is moved once: contributions are
reduced, or shards gathered, at the first use. The cached copy is freed with the array. A runner
limits the total size of its cached copies, and evicts the oldest first: weights that are gathered
layer by layer are not all in memory at once.

Over processes every rank must have the same copies cached, or some would wait for others. So
caching depends on the program alone, never on a single rank's shards, memory or time:

    bytes                of the rank that stores the most, by the layout
    oldest first         in the order of movements, including movements of arrays that were freed
    a program's data     and views of it are not cached, since the program may write to them

A NumPy array that shares memory with its source data copies its shards when it is first moved
(other than as views), and is cached like others from then on: in a single process, where no rank
waits for another. PyTorch arrays may be leaves of a gradient, which an optimizer writes to: they
are moved each time.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from functools import lru_cache
from threading import RLock
from typing import Any

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import Operator
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Movement, Shards


class Donated:
    """A placeholder for the shards of an array that was donated to a program."""

    def __init__(self, kind: ArrayType) -> None:
        self._kind = kind

    def _refuse(self, *_: Any) -> Any:
        raise UsageError(
            f"{self._kind} was given up to a program, by donate= of sp.jit: its memory is used "
            "for other values; use what the program returned, or leave the argument out of donate="
        )

    __iter__ = __len__ = __getitem__ = __reduce__ = _refuse


class ArrayValue:
    """An array as operations see it. Its shards are in the order of `runner.ranks(mesh)`."""

    __slots__ = ("_kept", "_shards", "runner", "type")

    type: ArrayType
    runner: Runner
    _shards: Shards
    _kept: dict[ShardingSpec, Any] | None

    @classmethod
    def of_shards(cls, type: ArrayType, shards: Shards, runner: Runner) -> Any:
        """Return an array of these shards, which must not be changed from now on."""
        array = cls.__new__(cls)
        array.type = type
        array._shards = shards
        array.runner = runner
        return array

    @classmethod
    def given(cls, type: ArrayType, shards: Shards, runner: Runner) -> Any:
        """Return an array of shards that a program passed and may write to; it caches nothing."""
        array = cls.of_shards(type, shards, runner)
        array._kept = None
        return array

    @property
    def is_given(self) -> bool:
        """Whether its shards may share memory with data that a program passed."""
        return getattr(self, "_kept", self) is None

    def mark_given(self) -> None:
        """Stop caching reshards, because a program that passed the data may write to its memory."""
        self._kept = None

    def take_over(self, shards: Shards) -> None:
        """Replace the shards by equal copies to which no program has access."""
        self._shards = shards
        self._kept = {}

    def donated(self) -> Any:
        """Move the shards to a new array. Raises UsageError if they were donated before."""
        # Iterating over the shards of an array that was donated before raises the error.
        shards = tuple(self._shards)
        make = type(self).given if self.is_given else type(self).of_shards
        array = make(self.type, shards, self.runner)
        self._shards = Donated(self.type)  # type: ignore[assignment]
        self._kept = None
        return array

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # Cached reshards are not pickled: they are computed again when they are needed.
        return None, {"type": self.type, "runner": self.runner, "_shards": self._shards}

    def cached_reshards(self) -> dict[ShardingSpec, Any] | None:
        """Return its cached reshards, see the module, or None if nothing may be cached."""
        # The cache is created at its first use: most arrays are never moved.
        try:
            return self._kept
        except AttributeError:
            self._kept = {}
            return self._kept

    def to_dense(self) -> Any:
        """Return the whole array as an array of NumPy or PyTorch, on every process.

        It may share memory with the shards: copy it before writing to it.
        """
        return self.runner.dense(self.type, self._shards)


MAX_CACHED_BYTES = 256 << 20
"""The limit of a runner, on the rank that stores the most; of all ranks together in one process."""

_VIEWING_FAMILIES = frozenset(
    ["movement", "indexing", "reductions", "users' own", "without a rule"]
)
_VIEWING_NAMES = """
astype ceil clamp clip conj diagonal floor identity imag
matrix_power positive real round stop_gradient trunc
"""
_VIEWING = frozenset(_VIEWING_NAMES.split())


class CachedShards:
    """An array's shards in another sharding, and the state of both when they were created."""

    __slots__ = ("__weakref__", "shards", "state")

    def __init__(self, shards: Shards, state: Any) -> None:
        self.shards: Shards | None = shards
        self.state = state


class ReshardCache:
    """The cached reshards of a runner.

    Args:
        runner: of the arrays.
        max_bytes: the limit of the total size; `MAX_CACHED_BYTES` when None.
    """

    def __init__(self, runner: Runner, max_bytes: int | None = None) -> None:
        self._runner = runner
        self.max_bytes = MAX_CACHED_BYTES if max_bytes is None else max_bytes
        # The limit covers the arrays of all threads.
        self._lock = RLock()
        self._order: deque[tuple[weakref.ref[CachedShards], int]] = deque()
        self.size_bytes = 0

    def moved(self, array: ArrayValue, spec: ShardingSpec, move: Movement) -> Shards:
        """Return the shards of an array in another sharding, from the cache or by moving them.

        Raises UsageError over processes if shards that operations made were written to.
        """
        cached = array.cached_reshards()
        if cached is None:
            return self._move_given(array, spec, move)
        entry = cached.get(spec)
        if entry is not None:
            # Another thread may evict it meanwhile.
            shards: Shards | None = entry.shards
            if shards is not None and self._is_valid(array, entry.state, shards):
                return shards
        return self._keep(array, cached, spec, move(array._shards))

    def _move_given(self, array: ArrayValue, spec: ShardingSpec, move: Movement) -> Shards:
        """Move the shards of an array whose memory a program may have access to."""
        moved: Shards = move(array._shards)
        library = self._runner.library
        is_small = _count_bytes(array.type, spec, self._runner.has_every_shard) <= self.max_bytes
        if library.name != "numpy" or not is_small or library.state_of(array._shards) is None:
            return moved
        views = library.find_views(moved, array._shards)
        # Views of the program's data cost nothing, and are not cached.
        if all(views):
            return moved
        with self._lock:
            # Another thread may have copied them meanwhile.
            if array.is_given:
                # By identity, since ranks of a process may share a shard.
                copies = {id(shard): library.copied(shard) for shard in array._shards}
                array.take_over(tuple([copies[id(shard)] for shard in array._shards]))
        cached = array.cached_reshards()
        if cached is None or any(views):
            return move(array._shards)
        return self._keep(array, cached, spec, moved)

    def _keep(
        self, array: ArrayValue, cached: dict[ShardingSpec, Any], spec: ShardingSpec, moved: Shards
    ) -> Shards:
        size_bytes = _count_bytes(array.type, spec, self._runner.has_every_shard)
        state = own, theirs = self._find_state(array, moved)
        source = array.type.spec
        if source is None or own is None or theirs is None or size_bytes > self.max_bytes:
            return moved
        # PyTorch frees the tensors saved for a maximum's gradient after the first backward pass, so
        # a cached result could not be differentiated again.
        is_recorded = bool(own) and own[0]
        if is_recorded and source.reduction in ("max", "min", "product"):
            return moved
        cached[spec] = entry = CachedShards(moved, state)
        with self._lock:
            self._order.append((weakref.ref(entry), size_bytes))
            self.size_bytes += size_bytes
            while self.size_bytes > self.max_bytes:
                reference, oldest_bytes = self._order.popleft()
                self.size_bytes -= oldest_bytes
                oldest = reference()
                if oldest is not None:
                    oldest.shards = None
        return moved

    def _find_state(self, array: ArrayValue, moved: Shards) -> Any:
        return self._runner.library.state_of(array._shards), self._runner.library.state_of(moved)

    def _is_valid(self, array: ArrayValue, state: Any, shards: Shards) -> bool:
        own, theirs = self._find_state(array, shards)
        if own is None or theirs is None:
            return False
        if (own, theirs) == state:
            return True
        is_written = (own[1:], theirs[1:]) != (state[0][1:], state[1][1:])
        if is_written and not self._runner.has_every_shard:
            # If only this rank moved it again, the movement would wait for the others forever.
            raise UsageError(
                f"a shard of {array.type!r} was written to after it was moved; arrays never "
                "change: copy what you write to, or give it anew with sp.from_shards"
            )
        return False


def take_moved(array: ArrayValue, spec: ShardingSpec, move: Movement) -> Shards:
    """Return the shards of an array in another sharding, cached if possible."""
    runner = array.runner
    # Arrays without elements have nothing to cache.
    if runner.is_abstract:
        return move(array._shards)
    cache: ReshardCache | None = runner.reshard_cache
    if cache is None:
        cache = runner.reshard_cache = ReshardCache(runner)
    return cache.moved(array, spec, move)


def moves_each_time(array: ArrayValue) -> bool:
    """Return whether an array is moved each time, because a program has access to its memory."""
    library = array.runner.library
    # NumPy arrays are copied first, unless a program has access to their shards.
    return array.is_given and not (
        library.name == "numpy" and library.state_of(array._shards) is not None
    )


def may_view(operator: Operator, operands: int) -> bool:
    """Return whether the results of an operator with this number of operands may be views."""
    if operator.name == "einsum":
        return operands == 1
    return operator.family in _VIEWING_FAMILIES or operator.name in _VIEWING


@lru_cache(maxsize=4096)
def _count_bytes(kind: ArrayType, spec: ShardingSpec, has_every_shard: bool) -> int:
    """Return the bytes of an array's shards in a sharding: of all ranks if a process has them,
    otherwise of the rank with the most.
    """
    sizes = [math.prod(shape) for shape in spec.layout(kind.shape).local_shapes.values()]
    count = sum(sizes) if has_every_shard else max(sizes, default=0)
    return count * kind.dtype.itemsize_bytes
