"""What a pickle is described by: names of things to import, calls of them, references.

`restricted_pickle` reads pickles into these, `pickle_writing` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """What a pickle would call: `function(*arguments)`, then given `state`.

    `is_new` tells an object made without its constructor from a plain call. A dict gets its
    `items`, a list its `members`, after its construction. Two are equal when they are the same
    object, so that to hash one never goes deep.
    """

    function: Global
    arguments: tuple[Any, ...]
    state: Any = None
    is_new: bool = False
    items: dict[Any, Any] | None = None
    members: list[Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.function}>"


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Something that lies outside the pickle; `key` says what (a storage, for tensors)."""

    key: Any

    def __repr__(self) -> str:
        return "<a reference>"


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A dict of very many items that are made while they are written: those `iterate()` gives.

    What is in an item is in no other, so that nothing of it is remembered.
    """

    iterate: Callable[[], Iterator[tuple[Any, Any]]]

    def __repr__(self) -> str:
        return "<items>"


class Builder(Protocol):
    """Makes values of the calls and references that it knows."""

    def make(self, function: Global, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """The value of a call, and whether its arguments are part of nothing else; None where
        it is unknown."""

    def refer(self, key: Any) -> Any:
        """The value of a reference."""


def shortened(text: str, most: int = 120) -> str:
    """Text from a file, at a length that fits into a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
