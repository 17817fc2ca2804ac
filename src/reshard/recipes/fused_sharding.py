"""How is a fused parameter cut, whose members are cut as a recipe says?

So that every rank has its part of each member, in the order of the parameter's stretches::

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
        if not set(level.axes) <= set(storage_axes):
            if number:
                raise RecipeError(
                    f"{name!r} is fused along dimension {at}, which `{first}` cuts over "
                    f"{' '.join(map(str, level.axes))} below another cut; take a mesh without one"
                )
            parts = math.prod(first.mesh.axis_size(axis) for axis in level.axes)
            lengths = [shapes[member][at] for member in fusion.members]
            level = Level(level.axes, _rule(name, fusion, rules, lengths, parts))
        elif len(set(rules)) > 1:
            raise RecipeError(f"the members of {name!r} are cut by {len(set(rules))} rules")
        levels.append(level)
    cuts = (*first.dim_specs[:at], DimSpec(levels), *first.dim_specs[at + 1 :])
    return ShardingSpec(first.mesh, cuts, first.replicated_axes, only=first.only)


def _rule(
    name: str, fusion: Fusion, rules: Sequence[CutRule], lengths: Sequence[int], parts: int
) -> CutRule:
    if fusion.groups != 1:
        groups = fusion.groups if isinstance(fusion.groups, int) else 0
        if parts > groups:
            raise RecipeError(
                f"{name!r} has its members in {groups} groups, which {parts} ranks cannot be given "
                f"whole; cut it over at most {groups}"
            )
        return Heads(groups)
    tables = [rule.table(length, parts) for rule, length in zip(rules, lengths, strict=True)]
    pieces = Pieces(tuple(tuple(table.local_lengths.tolist()) for table in tables))
    exact = all(
        sum(piece) == length and Pieces((piece,)).table(length, parts) is table
        for piece, length, table in zip(pieces.pieces, lengths, tables, strict=True)
    )
    if not exact:
        raise RecipeError(
            f"a member of {name!r} is cut by {' and '.join(sorted({r.text for r in rules}))} over "
            f"{parts} ranks, so that several hold the same of it, or padding; inside a fused "
            "parameter that cannot be said. Cut it over fewer ranks"
        )
    blocks = Blocks(tuple(lengths), rules[0])
    total = sum(lengths)
    if len(set(rules)) == 1 and blocks.table(total, parts) is pieces.table(total, parts):
        return blocks
    # A key/value head and a query head differ in number, not in where they are cut.
    plain = Blocks(tuple(lengths))
    return plain if plain.table(total, parts) is pieces.table(total, parts) else pieces
