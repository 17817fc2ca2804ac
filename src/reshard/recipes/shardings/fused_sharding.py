"""Shardings of fused parameters, from those of their members.

Every rank has its part of each member, in the order of the parameter's stretches::

    queries of 8 heads, keys and values of 4, over two ranks

    blocks, one member behind the other       0 0 0 0 1 1 1 1 | 0 0 1 1 | 0 0 1 1
    groups of a key/value head each           0 0 0 0 | 0 0 0 0 | 1 1 1 1 | 1 1 1 1

1. In blocks, each member is cut by its own rule.
2. Groups that follow one another are dealt out whole, like heads; alternating indices as those of
   the members are.
3. A stack is cut over the axes at whose coordinates the members of different numbers live.
4. An axis that only divides storage (`fsdp`) cuts what is there, as it cuts any other parameter.
5. All other dimensions must be cut alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from reshard.block_rules import Blocks, Grouped, Joined, Pieces
from reshard.cut_rules import CutRule, Heads, Sizes
from reshard.errors import RecipeError, RuleError
from reshard.mesh import Axis
from reshard.recipes.fusion import Fusion
from reshard.runs import RunTable
from reshard.sharding import DimSpec, Level, ShardingSpec

_Coordinates = tuple[tuple[str, tuple[int, ...]], ...]


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
        fusion: with numbers for its shares, groups and stack.
        specs, shapes: of its tensors, by name; shapes are those of whole tensors.
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
    tensors, together = fusion.tensors, len(fusion.members)
    members, at = tensors[:together], fusion.dimension
    first, *others = (specs[member] for member in members)
    dims = [one.dim_specs[at] for one in (first, *others)]
    # 1. The members' other dimensions must be cut alike; the fused one over the same axes.
    for member, other in zip(members[1:], others, strict=True):
        apart = (*first.dim_specs[:at], None, *first.dim_specs[at + 1 :])
        alike = (*other.dim_specs[:at], None, *other.dim_specs[at + 1 :]) == apart
        axes = [tuple(level.axes for level in dim.levels) for dim in (dims[0], other.dim_specs[at])]
        if not alike or axes[0] != axes[1] or first.only != other.only:
            raise RecipeError(
                f"{name!r} is fused of {members[0]!r}, cut as `{first}`, and {member!r}, "
                f"cut as `{other}`; cut them over the same axes, or keep them apart"
            )
    # 2. The fused dimension, level by level.
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
            lengths = tuple(shapes[member][at] for member in members)
            groups = fusion.groups if isinstance(fusion.groups, int) else 0
            rule = _find_rule(groups, tuple(rules), lengths, parts)
            if isinstance(rule, str):
                raise RecipeError(f"{name!r} {rule}")
            level = Level(level.axes, rule)
        elif len(set(rules)) > 1:
            raise RecipeError(f"the members of {name!r} are cut by {len(set(rules))} rules")
        levels.append(level)
    cuts = [*first.dim_specs[:at], DimSpec(levels), *first.dim_specs[at + 1 :]]
    if fusion.transposed:
        cuts[-2:] = cuts[:-3:-1]
    only = first.only
    # 3. The stack, by where the members of each number live.
    if fusion.stacked:
        for number, tensor in enumerate(tensors):
            alike_one = specs[members[number % together]]
            of_number = specs[tensors[number - number % together]]
            if specs[tensor].dim_specs != alike_one.dim_specs or (
                specs[tensor].only != of_number.only
            ):
                raise RecipeError(
                    f"{name!r} is a stack of {members[0]!r}, cut as `{first}`, and {tensor!r}, cut "
                    f"as `{specs[tensor]}`; cut all of them alike, or keep them apart"
                )
        leading, only = _cut_stack(name, [specs[one] for one in tensors[::together]])
        cuts.insert(0, leading)
    return ShardingSpec(first.mesh, cuts, first.replicated_axes, only=only)


def _cut_stack(name: str, specs: Sequence[ShardingSpec]) -> tuple[DimSpec, _Coordinates]:
    """The cut of a stack whose tensors are those of `specs`, and where all of it lives."""
    mesh, places = specs[0].mesh, [dict(one.only) for one in specs]
    axes = [axis for axis in mesh.axis_names if len({one.get(axis) for one in places}) > 1]
    only = tuple((axis, at) for axis, at in specs[0].only if axis not in axes)
    if not axes:
        return DimSpec([]), only
    # Of several axes, the one that changes more slowly comes first.
    for order in itertools.permutations(axes):
        sizes = [mesh.axis_size(axis) for axis in order]
        found = list(_find_joint_coordinates(places, order, sizes))
        if len(found) == len(specs) and found == sorted(found):
            counts = [found.count(part) for part in range(math.prod(sizes))]
            rule: CutRule = Sizes(tuple(counts))
            by_ceil = Level(order, None)
            if by_ceil.rule.table(len(specs), len(counts)) is rule.table(len(specs), len(counts)):
                rule = by_ceil.rule
            return DimSpec([Level(order, rule)]), only
    raise RecipeError(
        f"{name!r} is a stack of {len(specs)} tensors that do not live one behind the other along "
        f"{' '.join(axes)}; deal them out in order, such as by ceil, or keep them apart"
    )


def _find_joint_coordinates(
    places: Sequence[Mapping[str, tuple[int, ...]]], axes: Sequence[str], sizes: Sequence[int]
) -> Iterator[int]:
    """The coordinate over all of some axes together, where a tensor lives at just one."""
    for one in places:
        joint = 0
        for axis, size in zip(axes, sizes, strict=True):
            if len(one.get(axis, ())) != 1:
                return
            joint = joint * size + one[axis][0]
        yield joint


# Many layers and experts are fused alike.
@lru_cache(maxsize=1024)
def _find_rule(
    groups: int, rules: tuple[CutRule, ...], lengths: tuple[int, ...], parts: int
) -> CutRule | str:
    """The rule of a fused dimension of members of such lengths; or why there is none."""
    tables = [rule.table(length, parts) for rule, length in zip(rules, lengths, strict=True)]
    sizes = [tuple(table.local_lengths.tolist()) for table in tables]
    # Run tables are interned: `is` says that a rule cuts exactly as another does.
    exact = all(
        sum(of_parts) == length and Sizes(of_parts).table(length, parts) is table
        for of_parts, length, table in zip(sizes, lengths, tables, strict=True)
    )
    total = sum(lengths)
    if groups != 1:
        if parts > groups:
            return (
                f"has its members in {groups} groups, which {parts} ranks cannot be given whole; "
                f"cut it over at most {groups}"
            )
        found: CutRule = Heads(groups)
        # Members of single indices in turn are cut alike, index by index.
        if len(set(rules)) == 1 and set(lengths) == {groups}:
            return Grouped(len(lengths), rules[0])
        return found
    if len(lengths) == 1:
        return rules[0]
    pieces = Pieces(tuple(sizes))
    # A key/value head and a query head differ in number, often not in where they are cut.
    shared = [Blocks(lengths, rules[0])] if len(set(rules)) == 1 else []
    # Where several ranks hold the same of a member, or padding, every member keeps its own rule.
    joined = Joined(lengths, rules)
    table = joined.table(total, parts)
    for rule in (*shared, Blocks(lengths), *([pieces] if exact else [])):
        if _fits(rule, total, parts, table):
            return rule
    return joined


def _fits(rule: CutRule, length: int, parts: int, table: RunTable) -> bool:
    """Whether a rule cuts as the table says."""
    try:
        return rule.table(length, parts) is table
    except RuleError:
        return False
