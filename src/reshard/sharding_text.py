"""The native text of a sharding, read: `parse_spec(mesh, str(spec)) is spec`.

::

    dp tp, -                     rows over dp x tp by one flat cut, columns not cut
    dp / tp, -                   rows over dp, each part again over tp
    -, x:(1)2 y                  columns over a part of x, and y
    tp@stride2, -                rows by another cut rule (see `reshard.cut_rules`)
    tp ?, - !1                   open to propagation; priority 1
    tp, - | replicated(dp) sum(pp)   copies along dp, contributions to a sum along pp
    tp, - | only(pp=0,3)         nothing but where the coordinate along pp is 0 or 3

One item a dimension, separated by commas; in it axes from major to minor, separated by
spaces; ` / ` between levels. The text of a tensor without dimensions is empty. Where the
number of dimensions is given, `...` stands for as many `-` as are missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from reshard._validation import check_int
from reshard.errors import LayoutError, NotationError
from reshard.layout import REDUCTIONS
from reshard.mesh import DeviceMesh
from reshard.rule_text import parse_rule, split_outside_brackets
from reshard.sharding import DimSpec, Level, ShardingSpec, expect_mesh

# A word and its brackets, in which those of sub-axes may be: `sum(x:(1)2 y)`.
_MARK = re.compile(r"(\w+)\(([^()]*(?:\(\d+\)[^()]*)*)\)\s*")
_COORDINATES = re.compile(r"([^=]+)=(\d+(?:,\d+)*)")
_OPEN = re.compile(r"(\?)?(?:!(\d+))?")


def spec(mesh: DeviceMesh, text: str, *, ndim: int | None = None) -> ShardingSpec:
    """The sharding that `text` writes over `mesh`.

    Args:
        mesh: the devices whose axes the text names.
        text: in the native notation.
        ndim: dimensions of the tensors it is for, so that `...` can be used.

    Raises:
        NotationError: text that cannot be read.
        SpecError, MeshError: axes that are unknown, used twice, or overlap.

    >>> mesh = DeviceMesh.of(dp=2, tp=4)
    >>> print(spec(mesh, "dp / tp@stride2 ?, -"))
    dp / tp@stride2 ?, -
    >>> print(spec(mesh, "tp, ...", ndim=3))
    tp, -, -
    """
    expect_mesh(mesh)
    if not isinstance(text, str):
        raise NotationError(f"sharding {text!r}; give it as a text, such as 'dp, tp'")
    if ndim is not None:
        ndim = check_int(ndim, "ndim")
    try:
        return _parse(mesh, text, ndim)
    except LayoutError as error:
        # Some errors show the text themselves.
        if f"`{text}`" in str(error):
            raise
        raise type(error)(f"{error} (in the sharding `{text}` over the mesh {mesh.text})") from None


def _parse(mesh: DeviceMesh, text: str, ndim: int | None) -> ShardingSpec:
    # Without blanks in brackets, items can be split at the blanks that are left.
    dims, bar, marks = _pack_brackets(text).partition("|")
    items = [item.strip() for item in split_outside_brackets(dims, ",")]
    if not dims.strip():
        items = []
    if items.count("...") == 1 and ndim is not None:
        at = items.index("...")
        items[at : at + 1] = ["-"] * max(0, ndim - len(items) + 1)
    if "..." in items:
        raise NotationError("`...` can be used once, and where the number of dimensions is known")
    found = _parse_marks(marks if bar else "")
    return ShardingSpec(
        mesh,
        [_parse_dim(item) for item in items],
        found.replicated,
        found.partial,
        found.reduction or "sum",
        found.only,
    )


def _pack_brackets(text: str) -> str:
    depth, kept = 0, []
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if not (depth > 0 and letter.isspace()):
            kept.append(letter)
    return "".join(kept)


def _parse_dim(item: str) -> DimSpec:
    if not item:
        raise NotationError("an empty item; write `-` for a dimension that is not cut")
    words = item.split()
    match = _OPEN.fullmatch(words[-1]) if words else None
    is_open, priority = False, 0
    if match:
        is_open, priority = match[1] is not None, int(match[2] or 0)
        words = words[:-1]
    if words == ["-"]:
        words = []
    body = " ".join(words)
    levels = split_outside_brackets(body, "/") if body else []
    return DimSpec([_parse_level(level.strip(), item) for level in levels], is_open, priority)


def _parse_level(level: str, item: str) -> Level:
    axes, at, rule = level.partition("@")
    if at and (not rule.strip() or not axes.strip()):
        raise NotationError(f"cannot read {level!r}; write `axis@rule`, such as tp@stride2")
    if not axes.strip():
        raise NotationError(f"an empty level in {item!r}; write axes on both sides of `/`")
    return Level(axes.split(), parse_rule(rule.strip()) if at else None)


@dataclass(slots=True)
class _Marks:
    """What stands behind the bar."""

    replicated: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    reduction: str | None = None
    only: list[tuple[str, list[int]]] = field(default_factory=list)


def _parse_marks(text: str) -> _Marks:
    found = _Marks()
    rest = text.strip()
    while rest:
        match = _MARK.match(rest)
        known = ("replicated", "only", *REDUCTIONS)
        if not match or match[1] not in known or not match[2].split():
            raise NotationError(
                f"cannot read {rest!r} behind the bar; write replicated(axes), only(axis=0), or a "
                f"reduction with its axes such as sum(x y): {', '.join(REDUCTIONS)}"
            )
        if match[1] == "replicated":
            found.replicated += match[2].split()
        elif match[1] == "only":
            found.only += _parse_coordinates(match[2])
        elif found.reduction is None:
            found.partial, found.reduction = match[2].split(), match[1]
        else:
            raise NotationError(
                f"two reductions, {found.reduction} and {match[1]}; a tensor is partial in one "
                "way, reduce the other axes first"
            )
        rest = rest[match.end() :]
    return found


def _parse_coordinates(text: str) -> list[tuple[str, list[int]]]:
    found = []
    for item in re.sub(r"\s*([=,])\s*", r"\1", text).split():
        match = _COORDINATES.fullmatch(item)
        if not match:
            raise NotationError(
                f"cannot read {item!r} in only({text}); write an axis and its coordinates, such as "
                "only(pp=0) or only(pp=0,3 ep=1)"
            )
        found.append((match[1], [int(number) for number in match[2].split(",")]))
    return found
