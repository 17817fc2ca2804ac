"""Which notation is a text written in, and what does it say?

1. A prefix says it outright: `jax:P('x', None)`. So does the caller's `notation`.
2. Otherwise each notation looks for what only its own texts have: `[[0], [1]]` is MLIR's,
   `Replicate()` is DTensor's. One that finds it reads the text.
3. Where none does, the text is native (`reshard.sharding_text`). Where several do, or nobody
   can read it, the error shows an example of each.

A notation's module `reshard.notation.NAME` has `parse_NAME` and `NAME_text`; it is loaded when
it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from reshard.errors import LayoutError, NotationError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.sharding_text import spec

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Notation:
    """A way to write shardings.

    Attributes:
        name: for `--notation`, and before a colon in a text.
        example: a text of it.
        mark: a pattern that its texts have and those of others have not; None for the native
            one, which has what is left.
    """

    name: str
    example: str
    mark: str | None

    def is_recognised(self, text: str) -> bool:
        """Whether a text has what only this notation has."""
        return self.mark is not None and re.search(self.mark, text) is not None

    def parse(
        self, text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
    ) -> ShardingSpec | Layout:
        """What a text of this notation says.

        Args:
            text: without a prefix.
            mesh: the devices; None where the text itself has them.
            shape: of the tensor, where it is known.

        Raises:
            LayoutError: a text that cannot be read, or that says what cannot be.
        """
        if self.name == NATIVE:
            if mesh is None:
                raise NotationError(
                    f"`{text}` names mesh axes; give a mesh, such as `--mesh dp=2,tp=4`"
                )
            return spec(mesh, text, ndim=None if shape is None else len(shape))
        parse = cast(
            "Callable[[str, DeviceMesh | None, Sequence[int] | None], ShardingSpec | Layout]",
            self._function(f"parse_{self.name}"),
        )
        return parse(text, mesh, shape)

    def text(self, sharding: ShardingSpec) -> str:
        """The text that says a sharding. Raises NotationError for what it cannot say."""
        if self.name == NATIVE:
            return str(sharding)
        return cast("Callable[[ShardingSpec], str]", self._function(f"{self.name}_text"))(sharding)

    def _function(self, name: str) -> object:
        return getattr(
            import_module(f"reshard.notation.{_MODULES.get(self.name, self.name)}"), name
        )


# Notations whose module does not have their name.
_MODULES = {
    "dtensor": "dtensor.text",
    "partitioned": "dtensor.partitioned",
    "ragged": "dtensor.ragged",
}

_REDUCTION = r"(?:sum|avg|mean|max|min|product|premul_sum|band|bor|bxor)"
_NO_OTHER_SHARD = r"^(?![\s\S]*\b(?:Partitioned|Ragged|StridedRagged)Shard\()"
_NO_PLACEMENT = r"^(?![\s\S]*(?:DeviceMesh|Shard)\()[\s\S]*?"

NOTATIONS = {
    notation.name: notation
    for notation in (
        Notation(NATIVE, "dp tp, -", None),
        Notation(
            "mlir",
            "[[0, 1], [2]]",
            rf"{_NO_PLACEMENT}(?:(?<!=)\[\s*\[[\d,\s]*\]|\bsplit_axes\b|"
            r"\b(?:shard|mesh)\.(?:shard|grid|mesh))",
        ),
        Notation(
            "jax",
            "P(('dp', 'tp'), None)",
            rf"^\s*(?:[\w.]*\.)?(?:PartitionSpec|NamedSharding|P)\((?!\s*{_REDUCTION}\s*\))",
        ),
        Notation("shardy", '[{"dp", "tp"}, {}]', r"\[\s*\{|\bsdy\.|<\s*@\w+\s*,\s*\[\s*\]"),
        Notation(
            "dtensor",
            "[Shard(0), Replicate()]",
            rf"{_NO_OTHER_SHARD}[\s\S]*(?:\b(?:_Strided)?Shard\(|\bReplicate\b|\b_?Partial\(|"
            rf"\b[RP]*_?S\(-?\d|\bP\(\s*{_REDUCTION}\s*\))",
        ),
        Notation("partitioned", "PartitionedShard(0, 2, (4, 6))", r"\bPartitionedShard\("),
        Notation(
            "ragged", "RaggedShard(dims=(0,), local_units=(1, 3))", r"\b_?(?:Strided)?RaggedShard\("
        ),
        Notation(
            "scalapack",
            "8 6 2 2 0 0 grid=2x3",
            r"^\W*\d+(?:[,\s]+\d+){5}|\bDESC|\bgrid\s*=|\b[mn]b_?\s*=",
        ),
        Notation(
            "megatron",
            "tp=2 dp=4 | partition_dim=0",
            r"\bpartition_(?:dim|stride|sizes)\b|^\s*(?:e?tp|cp|e?dp|pp|ep|order|offset)\s*=(?!\s*(?:row|column)\b)",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text said, and in which notation."""

    notation: Notation
    sharding: ShardingSpec | Layout


def read_sharding(
    text: str,
    mesh: DeviceMesh | None = None,
    shape: Sequence[int] | None = None,
    notation: str | None = None,
) -> Reading:
    """Read a text of any notation. A prefix such as `jax:` wins over `notation`.

    Args:
        text: a sharding.
        mesh: the devices; None where the text itself has them.
        shape: of the tensor, where it is known.
        notation: its name; recognised from the text when None.

    Raises:
        NotationError: a text that nobody, or more than one notation, can read.
        LayoutError: one that says what cannot be.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> reading = read_sharding("y, x", mesh)
    >>> reading.notation.name, str(reading.sharding)
    ('native', 'y, x')
    """
    chosen, rest = _named(text, notation)
    if chosen is not None:
        return Reading(chosen, chosen.parse(rest, mesh, shape))
    found = [candidate for candidate in NOTATIONS.values() if candidate.is_recognised(text)]
    if len(found) > 1:
        names = " or ".join(candidate.name for candidate in found)
        raise NotationError(f"`{text}` may be {names}; {_advice()}")
    if found:
        try:
            return Reading(found[0], found[0].parse(text, mesh, shape))
        except LayoutError as error:
            raise type(error)(f"{error} (read as {found[0].name})") from None
    native = NOTATIONS[NATIVE]
    try:
        return Reading(native, native.parse(text, mesh, shape))
    except NotationError as error:
        if mesh is None:
            raise
        raise NotationError(f"{error}; if it is of another notation, {_advice()}") from None


def _named(text: str, notation: str | None) -> tuple[Notation | None, str]:
    """The notation that a prefix or the caller names, and the text without the prefix."""
    prefix, colon, rest = text.partition(":")
    if colon and prefix.strip() in NOTATIONS:
        return NOTATIONS[prefix.strip()], rest
    if notation is None:
        return None, text
    if notation not in NOTATIONS:
        raise NotationError(f"no notation {notation!r}; {_advice()}")
    return NOTATIONS[notation], text


def _advice() -> str:
    examples = "\n".join(f"  {item.name}:{item.example}" for item in NOTATIONS.values())
    return f"name the notation before a colon:\n{examples}"
