"""Array values: the type of an array, the shards of this process, and their runner."""

from __future__ import annotations

from typing import Any

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Shards


class Donated:
    """Stands for the shards of an array that was given up to a program."""

    def __init__(self, kind: ArrayType) -> None:
        self._kind = kind

    def _refuse(self, *_: Any) -> Any:
        raise UsageError(
            f"{self._kind} was given up to a program, by donate= of sp.jit: its memory is used "
            "for other values; use what the program returned, or leave the argument out of donate="
        )

    __iter__ = __len__ = __getitem__ = __reduce__ = _refuse


class ArrayValue:
    """An array as operations see it. `shards` are in the order of `runner.ranks(mesh)`."""

    __slots__ = ("_kept", "_shards", "runner", "type")

    type: ArrayType
    runner: Runner
    _shards: Shards
    _kept: dict[ShardingSpec, Any] | None

    @classmethod
    def of_shards(cls, type: ArrayType, shards: Shards, runner: Runner) -> Any:
        """An array of these shards, which nobody changes from now on."""
        made = cls.__new__(cls)
        made.type = type
        made._shards = shards
        made.runner = runner
        return made

    @classmethod
    def given(cls, type: ArrayType, shards: Shards, runner: Runner) -> Any:
        """An array of shards that a program has given, and may write to: it keeps no reshards."""
        made = cls.of_shards(type, shards, runner)
        made._kept = None
        return made

    @property
    def is_given(self) -> bool:
        """Whether its shards may be the memory of what a program has given."""
        return getattr(self, "_kept", self) is None

    def mark_given(self) -> None:
        """From here on it keeps no reshards, for its memory may be what a program has given."""
        self._kept = None

    def take_over(self, shards: Shards) -> None:
        """From here on it has these shards, equal ones that no program knows of."""
        self._shards = shards
        self._kept = {}

    def donated(self) -> Any:
        """An array of its shards, which only that one has from here on. Raises UsageError."""
        # Refused here where it was given up before.
        shards = tuple(self._shards)
        make = type(self).given if self.is_given else type(self).of_shards
        found = make(self.type, shards, self.runner)
        self._shards = Donated(self.type)  # type: ignore[assignment]
        self._kept = None
        return found

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # What is kept of it in other shardings is found again where it is asked for.
        return None, {"type": self.type, "runner": self.runner, "_shards": self._shards}

    def cached_reshards(self) -> dict[ShardingSpec, Any] | None:
        """Return its cached reshards, see `reshard_cache`, or None if nothing may be cached."""
        # Made when it is first asked for: most arrays are never moved.
        try:
            return self._kept
        except AttributeError:
            self._kept = {}
            return self._kept

    def to_dense(self) -> Any:
        """The whole array as one of NumPy or PyTorch; every process gets it.

        It may share memory with the shards: copy it before writing to it.
        """
        return self.runner.dense(self.type, self._shards)
