"""Tools that notations share: a scanner of texts, the order of axes, and the parts of a sharding.

A `Scanner` has a position in a text. It skips blanks and comments, takes the words that it is asked
to expect, and otherwise raises an error with the rest of the text.

A sharding may have parts that another system cannot express. Each printer declares what it can, as
a `Vocabulary`, and checks the sharding before it writes anything: a text that omits a part would be
read back as another sharding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from reshard._records import Record
from reshard.cut_rules import CutRule
from reshard.errors import LayoutError, NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec

# `#` begins a comment only before a blank: `#sdy.sharding` is an attribute.
_BLANKS = re.compile(r"(?:\s|//[^\n]*|#(?=\s)[^\n]*)*")
# At most 18 digits, which fit in 64 bits.
_NUMBER = re.compile(r"-?\d{1,18}(?!\d)")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_$.]*")
_QUOTED = re.compile(r'[^"\\\n]*')
_SYMBOL = re.compile(rf'@({_PLAIN.pattern}|"{_QUOTED.pattern}")')

Item = TypeVar("Item")


@contextmanager
def reading(kind: str, text: str) -> Iterator[None]:
    """Append the text to errors about layouts inside the block.

    >>> with reading("MLIR text", "[[0]"):
    ...     raise NotationError("a bracket is missing")
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: a bracket is missing (in the MLIR text `[[0]`)
    """
    try:
        yield
    except LayoutError as error:
        raise type(error)(f"{error} (in the {kind} `{text.strip()}`)") from None


def find_closing(text: str, opening: int) -> int | None:
    """Return the position at which the bracket at `opening` closes; None if it does not.

    >>> find_closing("P(('x', 'y')), 8", 1)
    12
    """
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    return None


def symbol_text(name: str) -> str:
    """Return how MLIR writes a name that refers to something: in quotes where it must be.

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
    """A position in a text.

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
        """Return whether only blanks and comments are left."""
        return self.position == len(self.text)

    def looks_at(self, pattern: str | re.Pattern[str]) -> bool:
        """Return whether a pattern matches at this position, without moving past it."""
        return re.compile(pattern).match(self.text, self.position) is not None

    def take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern here and move past it. Return None if it does not match."""
        match = re.compile(pattern).match(self.text, self.position)
        if match:
            self.position = match.end()
            self._pass_blanks()
        return match

    def accept(self, word: str) -> bool:
        """Return whether `word` is at this position, and move past it."""
        return self.take(re.escape(word)) is not None

    def expect(self, word: str) -> None:
        """Move past `word`. Raises NotationError if it is not at this position."""
        if not self.accept(word):
            raise self.failure(f"`{word}`")

    def number(self) -> int:
        """Return the number at this position."""
        match = self.take(_NUMBER)
        if not match:
            raise self.failure("a number")
        return int(match[0])

    def symbol(self) -> str | None:
        """Take a name after `@` at this position; return None if there is none."""
        match = self.take(_SYMBOL)
        return match[1].strip('"') if match else None

    def listed(self, open_word: str, item: Callable[[], Item], close_word: str) -> list[Item]:
        """Return items separated by commas, between two words."""
        self.expect(open_word)
        if self.accept(close_word):
            return []
        items = [item()]
        while self.accept(","):
            items.append(item())
        self.expect(close_word)
        return items

    def numbers(self) -> list[int]:
        """Return a list of numbers in brackets: `[0, 2, 1]`."""
        return self.listed("[", self.number, "]")

    def expect_end(self) -> None:
        """Raise NotationError if any text is left."""
        if not self.is_at_end():
            raise self.failure("nothing more")

    @property
    def rest(self) -> str:
        """The text from this position on."""
        return self.text[self.position :].strip()

    def failure(self, expected: str) -> NotationError:
        """Return the error that something else was expected here."""
        return NotationError(f"cannot read {self.rest!r}; expected {expected}")


def in_mesh_order(mesh: DeviceMesh, axes: Iterable[Axis]) -> list[Axis]:
    """Sort axes in the order of the mesh, and sub-axes of an axis from major to minor.

    Raises:
        MeshError: an axis or sub-axis that is missing in the mesh.

    >>> in_mesh_order(DeviceMesh.of(x=8, y=2), [Axis("y"), Axis("x", 4, 2), Axis("x", 1, 2)])
    [x:(1)2, x:(4)2, y]
    """

    def place(axis: Axis) -> tuple[int, int]:
        mesh.axis_size(axis)
        return mesh.axis_names.index(axis.name), axis.pre

    return sorted(axes, key=place)


class Vocabulary(Record):
    """The parts of a sharding that a notation can express.

    Attributes:
        notation: its name, for messages.
        rules: cut rules in addition to the default, by ceil; `CutRule` for all.
        reductions: of partial axes.
        has_levels: whether the parts of a dimension can be sharded again.
        has_sub_axes: whether a dimension can be sharded over a part of a mesh axis.
        has_open_dims: whether a dimension can be open to propagation.
        has_priorities: whether dimensions can have priorities in propagation.
        has_replicated_axes: whether copies along an axis can be requested.
        has_restrictions: whether tensors can be at some coordinates of an axis only.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> Vocabulary("JAX").check(spec(DeviceMesh.of(x=2), "x@stride2"))
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: JAX cannot express `x@stride2` of the sharding `x@stride2`: it has
    no cut rule `stride2`
    """

    notation: str
    rules: tuple[type[CutRule], ...] = ()
    reductions: tuple[str, ...] = ()
    has_levels: bool = False
    has_sub_axes: bool = False
    has_open_dims: bool = False
    has_priorities: bool = False
    has_replicated_axes: bool = False
    has_restrictions: bool = False

    def check(self, spec: ShardingSpec) -> None:
        """Raise NotationError for the first part of `spec` that the notation cannot express."""
        for dim in spec.dim_specs:
            self._check_dim(spec, dim)
        if not self.has_sub_axes:
            used = [axis for dim in spec.dim_specs for axis in dim.axes]
            for axis in (*used, *spec.replicated_axes, *spec.partial_axes):
                if not axis.is_full:
                    raise self.refusal(
                        spec, str(axis), "it takes whole mesh axes; split the axis of the mesh"
                    )
        if spec.replicated_axes and not self.has_replicated_axes:
            raise self.refusal(
                spec,
                f"replicated({' '.join(map(str, spec.replicated_axes))})",
                "it keeps copies along every axis that nothing uses, and cannot ask for them; "
                "leave these axes out",
            )
        if spec.reduction is not None and spec.reduction not in self.reductions:
            available = (
                f"only {', '.join(self.reductions)}" if self.reductions else "no partial axes"
            )
            raise self.refusal(
                spec,
                f"{spec.reduction}({' '.join(map(str, spec.partial_axes))})",
                f"it has {available}; reduce the tensor first",
            )
        if spec.only and not self.has_restrictions:
            held = " ".join(f"{axis}={','.join(map(str, at))}" for axis, at in spec.only)
            raise self.refusal(
                spec,
                f"only({held})",
                "every device of its mesh holds a part; give a mesh of the devices that hold one",
            )

    def _check_dim(self, spec: ShardingSpec, dim: DimSpec) -> None:
        if len(dim.levels) > 1 and not self.has_levels:
            flat = " ".join(map(str, dim.axes))
            raise self.refusal(
                spec,
                str(dim),
                f"it shards a dimension once; `{flat}` is the same if the sizes divide",
            )
        for level in dim.levels:
            if not level.rule.is_default and not isinstance(level.rule, self.rules):
                raise self.refusal(spec, str(level), f"it has no cut rule `{level.rule.text}`")
        if dim.is_open and not self.has_open_dims:
            raise self.refusal(spec, str(dim), "it has no open dimensions; leave out the `?`")
        if dim.priority and not self.has_priorities:
            raise self.refusal(
                spec, str(dim), f"it has no priorities; leave out the `!{dim.priority}`"
            )

    def refusal(self, spec: ShardingSpec, part: str, why: str) -> NotationError:
        """Return the error for a part of a sharding that the notation cannot express."""
        return NotationError(
            f"{self.notation} cannot express `{part}` of the sharding `{spec}`: {why}"
        )
