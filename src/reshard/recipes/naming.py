"""Names of tensors in other programs, and fused parameters.

A table maps the names of a convention to those of a recipe: `*` in a pattern matches any text,
which replaces the same `*` in the entry. An entry is a name, or a `Fusion` of names, in which `{}`
is the number of a stack's member::

    "decoder.layers.*.mlp.linear_fc2.weight"  is  "model.layers.*.mlp.down_proj.weight"
    "decoder.layers.*.mlp.linear_fc1.weight"  is fused of gate_proj and up_proj of "model.layers.*"
    "layers.*.experts.down_proj"              is stacked of "layers.*.experts.{}.down_proj.weight"

Read backwards, the first entry that gives a name determines its foreign name.

Frameworks keep tensors that are multiplied by the same input in a single parameter. A `Fusion`
describes their positions: the fused dimension consists of equal groups, in each of which the
members have consecutive shares::

    queries, keys and values by group      gate above up            queries, keys, values in blocks
    shares 4, 2, 2   groups 2              shares 1, 1   groups 1   shares 4, 2, 2   groups 1

    | q q k v | q q k v |                  | g g g | u u u |        | q q q q | k k | v v |

A stack has an additional leading dimension, indexed by the number of its members, and a member can
be stored with its last two dimensions swapped.

A rank's part of a fused parameter (`make_fused_spec`) is its part of each member, in order::

    queries of 8 heads, keys and values of 4, over two ranks

    consecutive blocks of members             0 0 0 0 1 1 1 1 | 0 0 1 1 | 0 0 1 1
    groups of a key/value head each           0 0 0 0 | 0 0 0 0 | 1 1 1 1 | 1 1 1 1

1. In blocks, each member is sharded by its own rule.
2. Repeated groups are kept whole, like heads; alternating indices are sharded as the members are.
3. A stack is sharded over the axes along which members of different numbers are divided.
4. An axis that only divides storage (`fsdp`) shards it as any other parameter.
5. All other dimensions must be sharded alike.

Sources: `linear_qkv` and `linear_fc1` of Megatron-core, `qkv_proj`, `gate_up_proj` and `w13_weight`
of vLLM, `experts.gate_up_proj` of transformers 5.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard._records import Record
from reshard.cut_rules import Blocks, CutRule, Grouped, Heads, Joined, Pieces, Sizes
from reshard.errors import RecipeError, RuleError, UsageError
from reshard.mesh import Axis
from reshard.recipes.expressions import parse_condition, parse_expression
from reshard.runs import RunTable
from reshard.sharding import DimSpec, Level, ShardingSpec

# A number, or an expression of a config.json (`reshard.recipes.expressions`).
Number = int | str


class MemberSlice(NamedTuple):
    """Indices `start:stop` of the fused dimension, which begin at `member_start` of `member`."""

    member: str
    member_start: int
    start: int
    stop: int


class Fusion(Record):
    """The positions of members in a fused parameter.

    Args:
        members: their names, or patterns if the fused parameter's name is a pattern. In a
            stack, `{}` is replaced by the number.
        shares: how the members share the dimension, as any numbers in the same proportion, such
            as their heads; equal if empty. A text is an expression of config.json.
        groups: how often the members repeat; every group has all of them.
        dimension: that is shared, of a member.
        stacked: the number of each member in a stack; 0 if they are not stacked.
        transposed: whether the last two dimensions are swapped, after stacking and sharing.
        when: a condition on config.json under which there is such a parameter.

    Raises:
        RecipeError: a single member that is neither stacked nor transposed, a repeated member, a
            misplaced `{}`, or numbers that are too small or not an expression.

    >>> Fusion(("q", "k", "v"), shares=(4, 2, 2), groups=2).member_slices(8)[2:4]
    (MemberSlice(member='v', member_start=0, start=3, stop=4),
    MemberSlice(member='q', member_start=2, start=4, stop=6))
    >>> Fusion(("experts.{}.down",), stacked=3).tensors
    ('experts.0.down', 'experts.1.down', 'experts.2.down')
    """

    members: tuple[str, ...]
    shares: tuple[Number, ...] = ()
    groups: Number = 1
    dimension: int = 0
    stacked: Number = 0
    transposed: bool = False
    when: str = ""

    def __post_init__(self) -> None:
        for name, values in (("members", self.members), ("shares", self.shares)):
            # A string would pass for a tuple of letters.
            if not isinstance(values, list | tuple):
                raise RecipeError(f"{name} is {values!r}, a list or tuple was expected")
        members = tuple(self.members)
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "shares", tuple(self.shares) or (1,) * len(members))
        # A single member that is neither stacked nor transposed is the parameter itself.
        is_one_enough = bool(self.stacked) or self.transposed
        if len(members) < 2 - is_one_enough or len(set(members)) != len(members):
            raise RecipeError(
                f"a parameter fused from {list(members)}; give two members or more, each once"
            )
        places = {member.count("{}") for member in members}
        if places != {int(bool(self.stacked))}:
            raise RecipeError(
                f"members {list(members)}, stacked {self.stacked!r}; a stack's members have {{}} "
                "where their number is, once each, and others have none"
            )
        if not isinstance(self.transposed, bool):
            raise RecipeError(f"transposed is {self.transposed!r}; it is true or false")
        if len(self.shares) != len(members):
            raise RecipeError(
                f"{len(self.shares)} shares for the {len(members)} members {list(members)}; give "
                "one for each"
            )
        if self.when:
            parse_condition(self.when)
        for name, minimum, numbers in (
            ("shares", 1, self.shares),
            ("groups", 1, (self.groups,)),
            ("stacked", 0, (self.stacked,)),
            ("dimension", 0, (self.dimension,)),
        ):
            for number in numbers:
                if isinstance(number, str) and name != "dimension":
                    parse_expression(number)
                elif isinstance(number, bool) or not isinstance(number, int) or number < minimum:
                    raise RecipeError(
                        f"{name} is {number!r}, a whole number of at least {minimum} was expected"
                    )

    def applies(self, config: Mapping[str, object] | None) -> bool:
        """Return whether a model has such a parameter, by `when`.

        >>> Fusion(("q", "kv"), when="q_rank").applies({"q_rank": None})
        False
        """
        return not self.when or parse_condition(self.when).holds(config)

    def filled_in(self, config: Mapping[str, object] | None) -> Fusion:
        """Return the fusion with the numbers of `config`. Raises RecipeError for a missing
        number.

        >>> found = Fusion(("q", "k"), ("heads", "kv|heads"), "kv|heads").filled_in({"heads": 8})
        >>> found.shares, found.groups
        ((8, 8), 8)
        """

        def number(value: Number) -> int:
            return parse_expression(value).value(config) if isinstance(value, str) else value

        return self.replace(
            shares=tuple(map(number, self.shares)),
            groups=number(self.groups),
            stacked=number(self.stacked),
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that are in it: of a stack, those of each number in turn.

        Raises RecipeError for a stack whose size depends on a config.
        """
        if not self.stacked:
            return self.members
        if not isinstance(self.stacked, int):
            raise RecipeError(f"{self} needs numbers of a config.json; give them (`filled_in`)")
        numbers = map(str, range(self.stacked))
        return tuple(member.replace("{}", n) for n in numbers for member in self.members)

    def shape_of_members(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that members have together, all of one number, in a parameter of
        `shape`.

        Raises RecipeError for a shape with too few dimensions, or with another size of the stack.

        >>> Fusion(("e.{}.down",), stacked=3, transposed=True).shape_of_members((3, 4, 8))
        (8, 4)
        """
        own = list(shape[1:] if self.stacked else shape)
        if self.stacked and (not shape or shape[0] != self.stacked):
            raise RecipeError(f"shape {list(shape)}, in which {self.stacked} are stacked")
        if self.transposed and len(own) < 2:
            raise RecipeError(f"shape {list(shape)}, in which members are transposed")
        if self.dimension >= len(own):
            raise RecipeError(f"shape {list(shape)}, and is fused along dimension {self.dimension}")
        if self.transposed:
            own[-2:] = own[:-3:-1]
        return tuple(own)

    def shape_with(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the parameter in which members of a number have `shape` together.

        >>> Fusion(("e.{}.down",), stacked=3, transposed=True).shape_with((8, 4))
        (3, 4, 8)
        """
        own = list(shape)
        if self.transposed:
            own[-2:] = own[:-3:-1]
        return (self.stacked, *own) if isinstance(self.stacked, int) and self.stacked else (*own,)

    def shares_of_group(self, length: int) -> tuple[int, ...]:
        """Return how much of each member a group of a fused dimension of `length` has.

        Raises RecipeError for a length that groups and shares do not divide, and for numbers that
        depend on a config.

        >>> Fusion(("q", "k", "v"), shares=(4, 2, 2), groups=2).shares_of_group(32)
        (8, 4, 4)
        """
        shares = [share for share in self.shares if isinstance(share, int)]
        groups = self.groups
        if not isinstance(groups, int) or len(shares) != len(self.shares):
            raise RecipeError(f"{self} needs numbers of a config.json; give them (`filled_in`)")
        total = sum(shares)
        if length % groups or any(length // groups * share % total for share in shares):
            raise RecipeError(
                f"length {length} cannot be cut into {groups} groups, each in the proportion "
                f"{':'.join(map(str, shares))}; correct the heads or sizes that are given"
            )
        return tuple(length // groups * share // total for share in shares)

    def member_slices(self, length: int) -> tuple[MemberSlice, ...]:
        """Return the slices of a fused dimension of `length` that are members', in order.

        Raises RecipeError as `shares_of_group`.
        """
        slices = []
        # In each group, every member has its next piece.
        sizes = self.shares_of_group(length)
        start = 0
        for group in range(self.groups if isinstance(self.groups, int) else 0):
            for member, size in zip(self.members, sizes, strict=True):
                slices.append(MemberSlice(member, group * size, start, start + size))
                start += size
        return tuple(slices)

    def sizes(self, length: int) -> tuple[int, ...]:
        """Return the length of each member in a fused dimension of `length`. Raises
        RecipeError as above.

        >>> Fusion(("gate", "up")).sizes(6)
        (3, 3)
        """
        lengths = dict.fromkeys(self.members, 0)
        for part in self.member_slices(length):
            lengths[part.member] += part.stop - part.start
        return tuple(lengths.values())


Meaning = str | Fusion


def find_by_pattern(name: str, table: Mapping[str, str] | Mapping[str, Meaning]) -> Meaning:
    """Return the entry of the first pattern that matches a name, filled in; else the name itself.

    >>> find_by_pattern("layers.3.up", {"layers.*": "decoder.*"})
    'decoder.3.up'
    """
    for pattern, entry in table.items():
        # Entries without a pattern are looked up exactly by the callers.
        if "*" not in pattern:
            continue
        match = compile_pattern(pattern).fullmatch(name)
        if match and isinstance(entry, str):
            return _fill_in(entry, match.groups())
        if match and isinstance(entry, Fusion):
            return _fill_in_fusion(entry, match.groups())
    return name


def find_foreign_name(name: str, table: Mapping[str, Meaning]) -> tuple[str, Fusion | None] | None:
    """Return a convention's name for a name of the recipe, or None if it has none.

    Also return the `Fusion` of the parameter of that name, or None if it is not fused.

    >>> table = {"*.fc1": Fusion(("*.gate", "*.up")), "*.fc2": "*.down"}
    >>> find_foreign_name("layers.3.down", table)
    ('layers.3.fc2', None)
    >>> find_foreign_name("layers.3.up", table)[1].members
    ('layers.3.gate', 'layers.3.up')
    """
    for theirs, own in table.items():
        for member in own.members if isinstance(own, Fusion) else (own,):
            match = compile_pattern(member).fullmatch(name)
            if match is None:
                continue
            fusion = _fill_in_fusion(own, match.groups()) if isinstance(own, Fusion) else None
            return _fill_in(theirs, match.groups()), fusion
    return None


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern, with a group for each `*`.

    `{}` is the number of a stack's member, which has no group.
    """
    parts = [r"\d+".join(map(re.escape, part.split("{}"))) for part in pattern.split("*")]
    return re.compile("(.*?)".join(parts))


def _fill_in_fusion(fusion: Fusion, texts: tuple[str, ...]) -> Fusion:
    return fusion.replace(members=tuple(_fill_in(member, texts) for member in fusion.members))


def _fill_in(entry: str, texts: tuple[str, ...]) -> str:
    first, *others = entry.split("*")
    if len(others) > len(texts):
        raise UsageError(f"{entry!r} has more `*` than the pattern it stands for, {len(texts)}")
    return first + "".join(f"{text}{rest}" for text, rest in zip(texts, others, strict=False))


_Coordinates = tuple[tuple[str, tuple[int, ...]], ...]


def make_fused_spec(
    name: str,
    fusion: Fusion,
    specs: Mapping[str, ShardingSpec],
    shapes: Mapping[str, Sequence[int]],
    storage_axes: Collection[Axis] = (),
) -> ShardingSpec:
    """Return the sharding of the fused parameter `name`.

    Args:
        name: for messages.
        fusion: with numbers for its shares, groups and stack.
        specs, shapes: of its tensors, by name; shapes are those of whole tensors.
        storage_axes: the axes of the mesh that only divide storage; they shard it as any parameter.

    Raises:
        RecipeError: members with different shardings, or a sharding that no rule expresses, such as
            more ranks than groups.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> cut = spec(DeviceMesh.of(tp=2), "tp, -")
    >>> shapes = {"gate": (6, 4), "up": (6, 4)}
    >>> print(make_fused_spec("fc1", Fusion(("gate", "up")), dict.fromkeys(shapes, cut), shapes))
    tp@blocks[6,6], -
    """
    tensors, together = fusion.tensors, len(fusion.members)
    members, at = tensors[:together], fusion.dimension
    first, *others = (specs[member] for member in members)
    dims = [spec.dim_specs[at] for spec in (first, *others)]
    # 1. Members must agree in all other dimensions, and in the axes of the fused dimension.
    for member, other in zip(members[1:], others, strict=True):
        apart = (*first.dim_specs[:at], None, *first.dim_specs[at + 1 :])
        alike = (*other.dim_specs[:at], None, *other.dim_specs[at + 1 :]) == apart
        axes = [tuple(level.axes for level in dim.levels) for dim in (dims[0], other.dim_specs[at])]
        if not alike or axes[0] != axes[1] or first.only != other.only:
            raise RecipeError(
                f"{name!r} is fused of {members[0]!r}, sharded as `{first}`, and {member!r}, "
                f"sharded as `{other}`; shard them over the same axes, or keep them apart"
            )
    # 2. The fused dimension, level by level.
    levels = []
    for number, level in enumerate(dims[0].levels):
        rules = [dim.levels[number].rule for dim in dims]
        # Storage axes divide any stretches alike; other levels need a rule for the stretches.
        if not set(level.axes) <= set(storage_axes):
            if number:
                raise RecipeError(
                    f"{name!r} is fused along dimension {at}, which `{first}` shards again over "
                    f"{' '.join(map(str, level.axes))}; take a mesh with a single level there"
                )
            parts = first.mesh.joint_size(level.axes)
            lengths = tuple(shapes[member][at] for member in members)
            groups = fusion.groups if isinstance(fusion.groups, int) else 0
            rule = _find_rule(groups, tuple(rules), lengths, parts)
            if isinstance(rule, str):
                raise RecipeError(f"{name!r} {rule}")
            level = Level(level.axes, rule)
        elif len(set(rules)) > 1:
            raise RecipeError(f"the members of {name!r} are sharded by {len(set(rules))} rules")
        levels.append(level)
    cuts = [*first.dim_specs[:at], DimSpec(levels), *first.dim_specs[at + 1 :]]
    if fusion.transposed:
        cuts[-2:] = cuts[:-3:-1]
    only = first.only
    # 3. The stack, by the ranks that hold the members of each number.
    if fusion.stacked:
        for number, tensor in enumerate(tensors):
            alike_one = specs[members[number % together]]
            of_number = specs[tensors[number - number % together]]
            if specs[tensor].dim_specs != alike_one.dim_specs or (
                specs[tensor].only != of_number.only
            ):
                raise RecipeError(
                    f"{name!r} is a stack of {members[0]!r}, sharded as `{first}`, and "
                    f"{tensor!r}, sharded as `{specs[tensor]}`; shard all of them alike, or keep "
                    "them apart"
                )
        leading, only = _cut_stack(name, [specs[tensor] for tensor in tensors[::together]])
        cuts.insert(0, leading)
    return ShardingSpec(first.mesh, cuts, first.replicated_axes, only=only)


def _cut_stack(name: str, specs: Sequence[ShardingSpec]) -> tuple[DimSpec, _Coordinates]:
    """Return the sharding of the stack of the tensors in `specs`, and the ranks that hold it."""
    mesh, places = specs[0].mesh, [dict(spec.only) for spec in specs]
    axes = [axis for axis in mesh.axis_names if len({place.get(axis) for place in places}) > 1]
    only = tuple((axis, at) for axis, at in specs[0].only if axis not in axes)
    if not axes:
        return DimSpec([]), only
    # The axis that changes most slowly comes first.
    for order in itertools.permutations(axes):
        sizes = [mesh.axis_size(axis) for axis in order]
        coordinates = list(_find_joint_coordinates(places, order, sizes))
        if len(coordinates) == len(specs) and coordinates == sorted(coordinates):
            counts = [coordinates.count(part) for part in range(math.prod(sizes))]
            rule: CutRule = Sizes(tuple(counts))
            by_ceil = Level(order, None)
            if by_ceil.rule.table(len(specs), len(counts)) is rule.table(len(specs), len(counts)):
                rule = by_ceil.rule
            return DimSpec([Level(order, rule)]), only
    raise RecipeError(
        f"{name!r} is a stack of {len(specs)} tensors that are not divided consecutively along "
        f"{' '.join(axes)}; deal them out in order, such as by ceil, or keep them apart"
    )


def _find_joint_coordinates(
    places: Sequence[Mapping[str, tuple[int, ...]]], axes: Sequence[str], sizes: Sequence[int]
) -> Iterator[int]:
    """Yield the joint coordinate of each tensor, up to the first that has several."""
    for place in places:
        joint = 0
        for axis, size in zip(axes, sizes, strict=True):
            if len(place.get(axis, ())) != 1:
                return
            joint = joint * size + place[axis][0]
        yield joint


# Most layers and experts have equal fused parameters.
@lru_cache(maxsize=1024)
def _find_rule(
    groups: int, rules: tuple[CutRule, ...], lengths: tuple[int, ...], parts: int
) -> CutRule | str:
    """Return the rule of a fused dimension of members of such lengths, or why none fits."""
    tables = [rule.table(length, parts) for rule, length in zip(rules, lengths, strict=True)]
    sizes = [tuple(table.local_lengths.tolist()) for table in tables]
    # Run tables are interned: `is` compares the cuts of two rules.
    exact = all(
        sum(of_parts) == length and Sizes(of_parts).table(length, parts) is table
        for of_parts, length, table in zip(sizes, lengths, tables, strict=True)
    )
    total = sum(lengths)
    if groups != 1:
        if parts > groups:
            return (
                f"has its members in {groups} groups, which {parts} ranks cannot be given whole; "
                f"shard it over at most {groups}"
            )
        result: CutRule = Heads(groups)
        # Members that alternate index by index are sharded equally.
        if len(set(rules)) == 1 and set(lengths) == {groups}:
            return Grouped(len(lengths), rules[0])
        return result
    if len(lengths) == 1:
        return rules[0]
    pieces = Pieces(tuple(sizes))
    # The numbers of key/value and query heads differ, but the boundaries of parts often agree.
    shared = [Blocks(lengths, rules[0])] if len(set(rules)) == 1 else []
    # If ranks hold copies of a member, or padding, every member keeps its own rule.
    joined = Joined(lengths, rules)
    table = joined.table(total, parts)
    for rule in (*shared, Blocks(lengths), *([pieces] if exact else [])):
        if _fits(rule, total, parts, table):
            return rule
    return joined


def _fits(rule: CutRule, length: int, parts: int, table: RunTable) -> bool:
    """Return whether a rule has this table."""
    try:
        return rule.table(length, parts) is table
    except RuleError:
        return False
