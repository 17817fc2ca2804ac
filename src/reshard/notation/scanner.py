"""Reading the text of MLIR attributes word by word.

A `Scanner` stands at a place in a text. It passes over blanks and comments, takes what it is
asked to expect, and otherwise raises an error with the rest of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from reshard.errors import LayoutError, NotationError

# `#` begins a comment only before a blank: `#sdy.sharding` is an attribute.
_BLANKS = re.compile(r"(?:\s|//[^\n]*|#(?=\s)[^\n]*)*")
# At most 18 digits, which fit in 64 bits.
_NUMBER = re.compile(r"-?\d{1,18}(?!\d)")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_$.]*")
_QUOTED = re.compile(r'[^"\\\n]*')
_SYMBOL = re.compile(rf'@({_PLAIN.pattern}|"{_QUOTED.pattern}")')

Item = TypeVar("Item")


@contextmanager
def reading(notation: str, text: str) -> Iterator[None]:
    """Inside, every error about a layout also names the text that is read."""
    try:
        yield
    except LayoutError as error:
        raise type(error)(f"{error} (in the {notation} text `{text.strip()}`)") from None


def symbol_text(name: str) -> str:
    """How MLIR writes a name that refers to something: in quotes where it must be.

    Raises:
        NotationError: a name with quotes, backslashes or line breaks.

    >>> symbol_text("mesh"), symbol_text("a mesh")
    ('@mesh', '@"a mesh"')
    """
    if _PLAIN.fullmatch(name):
        return f"@{name}"
    if not _QUOTED.fullmatch(name):
        raise NotationError(
            f"{name!r} cannot be written as a name of MLIR; give the mesh a name without quotes "
            "and backslashes"
        )
    return f'@"{name}"'


class Scanner:
    """A place in a text.

    >>> scanner = Scanner('[ 1, 2 ]  // two numbers')
    >>> scanner.numbers(), scanner.is_at_end()
    ([1, 2], True)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._pass_blanks()

    def _pass_blanks(self) -> None:
        match = _BLANKS.match(self.text, self.position)
        self.position = match.end() if match else self.position

    def is_at_end(self) -> bool:
        """Whether nothing is left but blanks and comments."""
        return self.position == len(self.text)

    def looks_at(self, pattern: str | re.Pattern[str]) -> bool:
        """Whether a pattern matches here; nothing is passed over."""
        return re.compile(pattern).match(self.text, self.position) is not None

    def take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """The match of a pattern here, passed over; None where there is none."""
        match = re.compile(pattern).match(self.text, self.position)
        if match:
            self.position = match.end()
            self._pass_blanks()
        return match

    def accept(self, word: str) -> bool:
        """Whether `word` stands here; it is passed over."""
        return self.take(re.escape(word)) is not None

    def expect(self, word: str) -> None:
        """Pass over `word`. Raises NotationError where it does not stand here."""
        if not self.accept(word):
            raise self.failure(f"`{word}`")

    def number(self) -> int:
        """The number that stands here."""
        match = self.take(_NUMBER)
        if not match:
            raise self.failure("a number")
        return int(match[0])

    def symbol(self) -> str | None:
        """The name behind an `@` that stands here, if one does."""
        match = self.take(_SYMBOL)
        return match[1].strip('"') if match else None

    def listed(self, open_word: str, item: Callable[[], Item], close_word: str) -> list[Item]:
        """Items separated by commas, between two words."""
        self.expect(open_word)
        if self.accept(close_word):
            return []
        items = [item()]
        while self.accept(","):
            items.append(item())
        self.expect(close_word)
        return items

    def numbers(self) -> list[int]:
        """A list of numbers in brackets: `[0, 2, 1]`."""
        return self.listed("[", self.number, "]")

    def expect_end(self) -> None:
        """Raises NotationError where something is left."""
        if not self.is_at_end():
            raise self.failure("nothing more")

    def failure(self, expected: str) -> NotationError:
        """The error that something else was expected here."""
        rest = self.text[self.position :].strip()
        return NotationError(f"cannot read {rest!r}; expected {expected}")
