"""Array values: the type of an array, the shards of this process, and their runner."""

from __future__ import annotations

from typing import Any

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Shards


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
        made = cls.__new__(cls)
        made.type = type
        made._shards = shards
        made.runner = runner
        return made

    @classmethod
    def given(cls, type: ArrayType, shards: Shards, runner: Runner) -> Any:
        """Return an array of shards that a program passed and may write to; it caches nothing."""
        made = cls.of_shards(type, shards, runner)
        made._kept = None
        return made

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
        found = make(self.type, shards, self.runner)
        self._shards = Donated(self.type)  # type: ignore[assignment]
        self._kept = None
        return found

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # Cached reshards are not pickled: they are computed again when they are needed.
        return None, {"type": self.type, "runner": self.runner, "_shards": self._shards}

    def cached_reshards(self) -> dict[ShardingSpec, Any] | None:
        """Return its cached reshards, see `reshard_cache`, or None if nothing may be cached."""
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
