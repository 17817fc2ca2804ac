"""The notations in which a sharding can be read and written, a row each.

Which notation is a text written in?

1. A prefix names it, `jax:P('x', None)`, or the caller's `notation` does.
2. Otherwise each notation looks for a form that only its own texts have: `[[0], [1]]` is MLIR's,
   `Replicate()` is DTensor's. The notation that finds its form reads the text.
3. If none does, the text is native (`reshard.sharding`). If several do, or no notation can read
   it, the error shows an example of each.

To add a notation: a module with `parse_NAME(text, mesh, shape)` and `NAME_text(sharding)`, and a
row in `NOTATIONS` with its module, which is loaded when it is used.

"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from reshard._records import Record
from reshard._validation import check_ints, check_type
from reshard.errors import LayoutError, NotationError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec, spec

NATIVE = "native"


class Notation(Record):
    """A way to write shardings.

    Attributes:
        name: for `--notation`, and before a colon in a text.
        module: has `parse_NAME` and `NAME_text`.
        example: a text of it.
        pattern: a regular expression that its texts match and those of others do not; None for
            the native notation, which reads any other text.
    """

    name: str
    module: str
    example: str
    pattern: str | None

    def recognises(self, text: str) -> bool:
        """Return whether a text has the form that only this notation has."""
        return self.pattern is not None and re.search(self.pattern, text) is not None

    def parse(
        self, text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
    ) -> ShardingSpec | Layout:
        """Return the sharding, or the layout, of a text of this notation.

        Args:
            text: without a prefix.
            mesh: the devices, or None if the text itself has them.
            shape: of the tensor, where it is known.

        Raises:
            LayoutError: a text that cannot be read, or whose sharding is invalid.
        """
        parse = cast(
            "Callable[[str, DeviceMesh | None, Sequence[int] | None], ShardingSpec | Layout]",
            self._load(f"parse_{self.name}"),
        )
        return parse(text, mesh, shape)

    def text(self, sharding: ShardingSpec) -> str:
        """Return the text of a sharding. Raises NotationError for a part that it cannot express."""
        return cast("Callable[[ShardingSpec], str]", self._load(f"{self.name}_text"))(sharding)

    def _load(self, function: str) -> object:
        return getattr(import_module(self.module), function)


# `P(` is a PartitionSpec of JAX or a Partial of DTensor, which has a reduction in its brackets.
_REDUCTION = r"(?:sum|avg|mean|max|min|product|premul_sum|band|bor|bxor)"
# These prevent a match: DTensor's texts may have placements that only other notations read, and
# brackets that MLIR's pattern would take for axis lists.
_NO_OTHER_SHARD = r"^(?![\s\S]*\b(?:Partitioned|Ragged|StridedRagged)Shard\()"
_NO_PLACEMENT = r"^(?![\s\S]*(?:DeviceMesh|Shard)\()[\s\S]*?"

NOTATIONS = {
    notation.name: notation
    for notation in (
        Notation(NATIVE, "reshard.notation.registry", "dp tp, -", None),
        Notation(
            "mlir",
            "reshard.notation.mlir",
            "[[0, 1], [2]]",
            rf"{_NO_PLACEMENT}(?:(?<!=)\[\s*\[[\d,\s]*\]|\bsplit_axes\b|"
            r"\b(?:shard|mesh)\.(?:shard|grid|mesh))",
        ),
        Notation(
            "jax",
            "reshard.notation.jax",
            "P(('dp', 'tp'), None)",
            rf"^\s*(?:[\w.]*\.)?(?:PartitionSpec|NamedSharding|P)\((?!\s*{_REDUCTION}\s*\))",
        ),
        Notation(
            "hlo",
            "reshard.notation.hlo",
            "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
            r"^\s*(?:sharding\s*=\s*|(?:\w+\.)*GSPMDSharding\()?\{+\s*"
            r"(?:devices\s*=|replicated\b|maximal\b|manual\b|unknown\b|unreduced\b)",
        ),
        Notation(
            "shardy",
            "reshard.notation.shardy",
            '[{"dp", "tp"}, {}]',
            r"\[\s*\{|\bsdy\.|<\s*@\w+\s*,\s*\[\s*\]",
        ),
        Notation(
            "dtensor",
            "reshard.notation.dtensor",
            "[Shard(0), Replicate()]",
            rf"{_NO_OTHER_SHARD}[\s\S]*(?:\b(?:_Strided)?Shard\(|\bReplicate\b|\b_?Partial\(|"
            rf"\b[RP]*_?S\(-?\d|\bP\(\s*{_REDUCTION}\s*\))",
        ),
        Notation(
            "partitioned",
            "reshard.notation.dtensor",
            "PartitionedShard(0, 2, (4, 6))",
            r"\bPartitionedShard\(",
        ),
        Notation(
            "ragged",
            "reshard.notation.ragged",
            "RaggedShard(dims=(0,), local_units=(1, 3))",
            r"\b_?(?:Strided)?RaggedShard\(",
        ),
        Notation(
            "scalapack",
            "reshard.notation.scalapack",
            "8 6 2 2 0 0 grid=2x3",
            r"^\W*\d+(?:[,\s]+\d+){5}|\bDESC|\bgrid\s*=|\b[mn]b_?\s*=",
        ),
        Notation(
            "megatron",
            "reshard.notation.megatron",
            "tp=2 dp=4 | partition_dim=0",
            # `order=row` and `order=column` are ScaLAPACK's.
            r"\bpartition_(?:dim|stride|sizes)\b|^\s*(?:e?tp|cp|e?dp|pp|ep|order|offset)\s*=(?!\s*(?:row|column)\b)",
        ),
    )
}


class ParsedSharding(Record):
    """The sharding of a text, and its notation."""

    notation: Notation
    sharding: ShardingSpec | Layout


def read_sharding(
    text: str,
    mesh: DeviceMesh | None = None,
    shape: Sequence[int] | None = None,
    notation: str | None = None,
) -> ParsedSharding:
    """Read a text of any notation. A prefix such as `jax:` wins over `notation`.

    Args:
        text: a sharding.
        mesh: the devices, or None if the text itself has them.
        shape: of the tensor, where it is known.
        notation: its name; recognised from the text when None.

    Raises:
        NotationError: a text that no notation, or more than one, can read.
        LayoutError: an invalid sharding.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> reading = read_sharding("y, x", mesh)
    >>> reading.notation.name, str(reading.sharding)
    ('native', 'y, x')
    """
    check_type(text, str, "sharding", "give a text; sharding_of takes objects", NotationError)
    if shape is not None:
        shape = check_ints(shape, "shape", NotationError)
    chosen, rest = _find_named(text, notation)
    if chosen is not None:
        return ParsedSharding(chosen, chosen.parse(rest, mesh, shape))
    candidates = [candidate for candidate in NOTATIONS.values() if candidate.recognises(text)]
    if len(candidates) > 1:
        names = " or ".join(candidate.name for candidate in candidates)
        raise NotationError(f"`{text}` may be {names}; {_list_examples()}")
    # A text that a notation recognises is not tried as another: the error is that notation's.
    if candidates:
        try:
            return ParsedSharding(candidates[0], candidates[0].parse(text, mesh, shape))
        except LayoutError as error:
            raise type(error)(f"{error} (read as {candidates[0].name})") from None
    native = NOTATIONS[NATIVE]
    try:
        return ParsedSharding(native, native.parse(text, mesh, shape))
    except NotationError as error:
        if mesh is None:
            raise
        raise NotationError(f"{error}; if it is of another notation, {_list_examples()}") from None


def write_sharding(sharding: ShardingSpec, notation: str = NATIVE) -> str:
    """Return the text of a sharding in a notation, without its prefix.

    Raises NotationError for an unknown notation, or a part that it cannot express.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> write_sharding(read_sharding("y, x", mesh).sharding, "jax")
    "PartitionSpec('y', 'x')"
    """
    if not isinstance(notation, str) or notation not in NOTATIONS:
        raise NotationError(f"no notation {notation!r}; {_list_examples()}")
    hint = "only a spec has a text in other notations"
    check_type(sharding, ShardingSpec, "sharding", hint, NotationError)
    return NOTATIONS[notation].text(sharding)


def _find_named(text: str, notation: str | None) -> tuple[Notation | None, str]:
    """Return the notation that a prefix or the caller names, and the text without the prefix."""
    prefix, colon, rest = text.partition(":")
    if colon and prefix.strip() in NOTATIONS:
        return NOTATIONS[prefix.strip()], rest
    if notation is None:
        return None, text
    if not isinstance(notation, str) or notation not in NOTATIONS:
        raise NotationError(f"no notation {notation!r}; {_list_examples()}")
    return NOTATIONS[notation], text


def _list_examples() -> str:
    examples = "\n".join(f"  {item.name}:{item.example}" for item in NOTATIONS.values())
    return f"name the notation before a colon:\n{examples}"


def list_public_names() -> dict[str, list[str]]:
    """Return `parse_NAME` and `NAME_text` of every notation, by the module of each."""
    names: dict[str, list[str]] = {}
    for notation in NOTATIONS.values():
        names.setdefault(notation.module, []).extend(
            [f"parse_{notation.name}", f"{notation.name}_text"]
        )
    return names


def parse_native(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that a text in the native notation describes.

    Raises:
        NotationError: text that cannot be read, or no mesh.

    >>> print(parse_native("x, ...", DeviceMesh.of(x=2), (4, 2, 2)))
    x, -, -
    """
    if mesh is None:
        raise NotationError(f"`{text}` names mesh axes; give a mesh, such as `--mesh dp=2,tp=4`")
    return spec(mesh, text, ndim=None if shape is None else len(shape))


def native_text(sharding: ShardingSpec) -> str:
    """Return the native text of a sharding."""
    return str(sharding)
