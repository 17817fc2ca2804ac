"""Shardings of fused parameters, from those of their members.

Every rank has its part of each member, in the order of the parameter's stretches::

    queries of 8 heads, keys and values of 4, over two ranks

    blocks, one member behind the other       0 0 0 0 1 1 1 1 | 0 0 1 1 | 0 0 1 1
    groups of a key/value head each           0 0 0 0 | 0 0 0 0 | 1 1 1 1 | 1 1 1 1

1. In blocks, each member is cut by its own rule.
2. Groups that follow one another are dealt out whole, like heads.
3. An axis that only divides storage (`fsdp`) cuts what is there, as it cuts any other parameter.
4. All other dimensions must be cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from reshard.block_rules import Blocks, Pieces
from reshard.cut_rules import CutRule, Heads
from reshard.errors import RecipeError
from reshard.mesh import Axis
from reshard.recipes.fusion import Fusion
from reshard.sharding import DimSpec, Level, ShardingSpec


def fused_spec(
    name: str,
    fusion: Fusion,
    specs: Mapping[str, ShardingSpec],
    shapes: Mapping[str, Sequence[int]],
    storage_axes: Collection[Axis] = (),
) -> ShardingSpec:
    """The sharding of the fused parameter `name`.

    Args:
        name: for messages.
        fusion: with numbers for its shares and groups.
        specs, shapes: of its members, by name; shapes are those of whole tensors.
        storage_axes: of the mesh, that cut what is there whatever it is.

    Raises:
        RecipeError: members that are not cut alike, or a cut that stretches cannot have, such as
            more ranks than groups.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding_text import spec
    >>> cut = spec(DeviceMesh.of(tp=2), "tp, -")
    >>> shapes = {"gate": (6, 4), "up": (6, 4)}
    >>> print(fused_spec("fc1", Fusion(("gate", "up")), dict.fromkeys(shapes, cut), shapes))
    tp@blocks[6,6], -
    """
    first, *others = (specs[member] for member in fusion.members)
    at = fusion.dimension
    dims = [one.dim_specs[at] for one in (first, *others)]
    for member, other in zip(fusion.members[1:], others, strict=True):
        # The members' other dimensions must be cut alike; the fused one over the same axes.
        apart = (*first.dim_specs[:at], None, *first.dim_specs[at + 1 :])
        alike = (*other.dim_specs[:at], None, *other.dim_specs[at + 1 :]) == apart
        axes = [tuple(level.axes for level in dim.levels) for dim in (dims[0], other.dim_specs[at])]
        if not alike or axes[0] != axes[1] or first.only != other.only:
            raise RecipeError(
                f"{name!r} is fused of {fusion.members[0]!r}, cut as `{first}`, and {member!r}, "
                f"cut as `{other}`; cut them over the same axes, or keep them apart"
            )
    levels = []
    for number, level in enumerate(dims[0].levels):
        rules = [dim.levels[number].rule for dim in dims]
        # Storage axes cut what is there by one rule; other levels need a rule for the stretches.
        if not set(level.axes) <= set(storage_axes):
            if number:
                raise RecipeError(
                    f"{name!r} is fused along dimension {at}, which `{first}` cuts over "
                    f"{' '.join(map(str, level.axes))} below another cut; take a mesh without one"
                )
            parts = math.prod(first.mesh.axis_size(axis) for axis in level.axes)
            lengths = tuple(shapes[member][at] for member in fusion.members)
            groups = fusion.groups if isinstance(fusion.groups, int) else 0
            rule = _find_rule(groups, tuple(rules), lengths, parts)
            if isinstance(rule, str):
                raise RecipeError(f"{name!r} {rule}")
            level = Level(level.axes, rule)
        elif len(set(rules)) > 1:
            raise RecipeError(f"the members of {name!r} are cut by {len(set(rules))} rules")
        levels.append(level)
    cuts = (*first.dim_specs[:at], DimSpec(levels), *first.dim_specs[at + 1 :])
    return ShardingSpec(first.mesh, cuts, first.replicated_axes, only=first.only)


# Many layers and experts are fused alike.
@lru_cache(maxsize=1024)
def _find_rule(
    groups: int, rules: tuple[CutRule, ...], lengths: tuple[int, ...], parts: int
) -> CutRule | str:
    """The rule of a fused dimension of members of such lengths; or why there is none."""
    if groups != 1:
        if parts > groups:
            return (
                f"has its members in {groups} groups, which {parts} ranks cannot be given whole; "
                f"cut it over at most {groups}"
            )
        return Heads(groups)
    tables = [rule.table(length, parts) for rule, length in zip(rules, lengths, strict=True)]
    pieces = Pieces(tuple(tuple(table.local_lengths.tolist()) for table in tables))
    # Run tables are interned: `is` says that pieces cut each member exactly as its own rule does.
    exact = all(
        sum(piece) == length and Pieces((piece,)).table(length, parts) is table
        for piece, length, table in zip(pieces.pieces, lengths, tables, strict=True)
    )
    if not exact:
        return (
            f"has members cut by {' and '.join(sorted({r.text for r in rules}))} over {parts} "
            "ranks, so that several hold the same of one, or padding; inside a fused parameter "
            "that cannot be said. Cut it over fewer ranks"
        )
    total = sum(lengths)
    # A key/value head and a query head differ in number, often not in where they are cut.
    shared = [Blocks(lengths, rules[0])] if len(set(rules)) == 1 else []
    for rule in (*shared, Blocks(lengths)):
        if rule.table(total, parts) is pieces.table(total, parts):
            return rule
    return pieces
