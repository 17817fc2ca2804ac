"""Tensors that an operator needs sharded together, and whether ranks can compute with them.

Attention multiplies each query head with a key/value head, and the output layer has columns for
each query head. So query, key, value and output are sharded by the same heads, whatever the
lengths of the tensors. A coupling names what is counted, the unit first::

    [coupled.heads]
    query = "num_attention_heads"                           8: each on exactly one rank
    key_value = "num_key_value_heads|num_attention_heads"   2: each with the queries that use it

    over 4 ranks     query        0 1 | 2 3 | 4 5 | 6 7
                     key_value    0   | 0   | 1   | 1

A member that counts fewer than the unit is shared: unit `u` of `U` uses `u * count // U`. A member
that counts more is part of the unit: unit `u` has its `count / U` of them alone.

1. Rules name the cuts of dimensions, or of the blocks of a fused dimension (`ShardAnnotation`)::

       tp@{heads.query} / fsdp, -                           dimension 0: heads.query
       -, tp@{feed_forward}@blocks[{size},{size}]           dimension 1: feed_forward in each block
       -, tp@{feed_forward}@groups2                         dimension 1: feed_forward, by pairs
       tp@joined[{q}@{heads.query},{k}@{heads.key_value}]   dimension 0: a name per block

2. Each rank's units of these blocks are read off the layouts (`ShardBlock`), without the axes that
   only divide storage: what they shard is gathered before it is used. A sharding by another rule is
   read on the ranks where the recipe has the tensor; it may not shard other dimensions.
3. Tensors of the same cut and layer are an operator; if names have no numbers, those of a module:
   its weight and its bias (`Inspection`). Layers repeat, so few kinds of operators are checked.
4. Results are concatenated over columns or summed over rows. They are correct if, along the axes
   that shard an operator, a rank holds the same units of all tensors that have them; each unit is
   on exactly one rank; every rank holds equally many heads; and of a shared member, a rank holds
   exactly the parts that its units use, each used by equally many units::

       40 query, 10 key_value heads over 4 ranks, each sharded by ceil

       query       0-9        10-19      20-29      30-39
       use         0-2        2-4        5-7        7-9
       key_value   0-2        3-5        6-8        9           rank 1 lacks its head 2

Source: tensor parallelism of attention and feed-forward layers, Shoeybi et al. 2019.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from reshard.cut_rules import Blocks, CutRule, Grouped, Heads, Joined, split_outside_brackets
from reshard.errors import RecipeError
from reshard.layout import Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.recipes.axis_mapping import map_sharding
from reshard.recipes.expressions import NO_NUMBERS, Config, Numbers, parse_expression
from reshard.runs import PAD
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.text import count_text


@dataclass(frozen=True, slots=True)
class Coupling:
    """The tensors that an operator needs sharded together.

    Args:
        members: names and the expression of config.json for their counts
            (see `reshard.recipes.expressions`); the first is the unit.

    Raises:
        RecipeError: no members, a name that is not an identifier or is repeated, an invalid count.

    >>> heads = Coupling((("query", "heads"), ("key_value", "groups|heads")))
    >>> heads.unit, heads.words("heads")
    ('query', {'heads.query': 'heads{heads}', 'heads.key_value': 'heads{groups|heads}'})
    """

    members: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise RecipeError(
                "a coupling without members; name what is counted, the unit first, such as "
                'query = "num_attention_heads"'
            )
        names = [name for name, _ in self.members]
        for name, count in self.members:
            if not name.isidentifier() or names.count(name) > 1:
                raise RecipeError(
                    f"the member {name!r} of a coupling; give each a name of letters, digits and _"
                )
            parse_expression(count)

    @property
    def unit(self) -> str:
        """The member that the others follow: each unit is on exactly one rank."""
        return self.members[0][0]

    def words(self, name: str) -> dict[str, str]:
        """Return the cut rules that rules name as `name.member`, with expressions in braces."""
        return {f"{name}.{member}": f"heads{{{count}}}" for member, count in self.members}

    def counts(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> Mapping[str, int]:
        """Return how many there are of each member, for a config and the numbers of a name.

        Raises:
            RecipeError: a count that is missing in the config, is 0, or neither divides the
                unit's nor is a multiple of it.

        >>> Coupling((("query", "q"), ("key_value", "k"))).counts({"q": 8, "k": 3})
        Traceback (most recent call last):
            ...
        reshard.errors.RecipeError: 3 of key_value (`k`) for 8 of query (`q`): one must be a
        multiple of the other; correct config.json
        """
        found = {}
        for member, text in self.members:
            count = found[member] = parse_expression(text).value(config, numbers)
            units = found[self.unit]
            if not count or (units % count and count % units):
                raise RecipeError(
                    f"{count} of {member} (`{text}`) for {units} of {self.unit} "
                    f"(`{self.members[0][1]}`): one must be a multiple of the other; correct "
                    "config.json"
                )
        return found


_BRACES = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"<(\d+)>(?:@blocks\[.*\]|@groups(?:\d+|<\d+>))?")
_JOINED = re.compile(r"joined\[(.*)\]")


class CutName(NamedTuple):
    """A cut of the recipe: a cut rule's name, or a coupling's name and member."""

    name: str
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> CutName:
        """Return the cut that `feed_forward` or `heads.query` names."""
        name, _, member = text.partition(".")
        return cls(name, member or None)

    def __str__(self) -> str:
        return self.name if self.member is None else f"{self.name}.{self.member}"


class AnnotatedBlock(NamedTuple):
    """Indices `start:stop` of a dimension that are cut by a name, in units of `unit` indices."""

    name: CutName
    start: int
    stop: int
    unit: int


@dataclass(frozen=True, slots=True)
class ShardAnnotation:
    """The names by which a dimension of a spec is sharded at one of its levels.

    Args:
        item: of the spec; after `...`, counted from the end as negative numbers.
        level: of the dimension's, in order.
        names: of each block, or a single name for all; None for a block without a name.
    """

    item: int
    level: int
    names: tuple[CutName | None, ...]

    def blocks(self, rule: CutRule, length: int) -> list[AnnotatedBlock]:
        """Return the blocks of a dimension that are cut by a name, for the rule that cuts it.

        >>> mark = ShardAnnotation(0, 0, (CutName("heads", "query"),))
        >>> mark.blocks(Blocks((4, 4), Heads(2)), 8)[1]
        AnnotatedBlock(name=CutName(name='heads', member='query'), start=4, stop=8, unit=2)
        """
        sizes: Sequence[int] = rule.sizes if isinstance(rule, Blocks | Joined) else (length,)
        rules = rule.rules if isinstance(rule, Joined) else None
        inner = rule.rule if isinstance(rule, Blocks) else rule
        names = self.names * len(sizes) if len(self.names) == 1 else self.names
        found, start = [], 0
        for number, (size, name) in enumerate(zip(sizes, names, strict=True)):
            by = inner if rules is None else rules[number]
            group = by.size if isinstance(by, Grouped) else 1
            by = by.rule if isinstance(by, Grouped) else by
            # For a cut that belongs to no coupling, every index or group of indices is a unit.
            if isinstance(by, Heads) and name is not None and name.member is not None:
                group = max(size // by.count, 1)
            if name is not None:
                found.append(AnnotatedBlock(name, start, start + size, group))
            start += size
        return found


def find_annotations(spec: str, known: Collection[str]) -> tuple[ShardAnnotation, ...]:
    """Return the marks of a rule's spec, with its braces.

    Args:
        spec: as the rule has it.
        known: the names that braces may hold, such as `feed_forward` and `heads.query`.

    >>> for mark in find_annotations("ep / fsdp, ..., tp@{heads.query} / fsdp", {"heads.query"}):
    ...     print(mark.item, mark.level, *mark.names)
    -1 0 heads.query
    """
    texts = [braces[1].strip() for braces in _BRACES.finditer(spec)]
    if not any(text in known for text in texts):
        return ()
    numbers = iter(range(len(texts)))
    # Without braces, whose `|`, `,` and `//` are not the spec's.
    plain = _BRACES.sub(lambda _: f"<{next(numbers)}>", spec).partition("|")[0]
    items = [item.strip() for item in split_outside_brackets(plain, ",")]
    behind = items.index("...") if "..." in items else len(items)
    found = []
    for number, item in enumerate(items):
        for level, text in enumerate(split_outside_brackets(item, "/")):
            _, _, rule = text.partition("@")
            names = _read_names(rule.strip(), texts, known)
            if any(name is not None for name in names):
                at = number if number < behind else number - len(items)
                found.append(ShardAnnotation(at, level, names))
    return tuple(found)


def _read_names(
    rule: str, texts: Sequence[str], known: Collection[str]
) -> tuple[CutName | None, ...]:
    """Return the name of each block of a rule, whose braces are numbered; or a name for all."""
    joined = _JOINED.match(rule)
    if joined is not None:
        blocks = split_outside_brackets(joined[1], ",")
        return tuple(
            _read_names(block.partition("@")[2].strip(), texts, known)[0] for block in blocks
        )
    # `?` opens a dimension to propagation, `!1` gives its priority: both follow the rule.
    match = _NAME.fullmatch(re.sub(r"\s+\?*(!\d+)?$", "", rule))
    text = texts[int(match[1])] if match else None
    return (CutName.parse(text) if text is not None and text in known else None,)


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ShardUnits:
    """The units of a tensor's block on each rank that has any.

    Attributes:
        ranges: by rank, stretches `(start, stop)` of units in the order of its memory.
        through: a rank and the indices `(start, stop)` of it that are no whole units; or None.
        also_cut: another dimension that is cut, and should not be; or None.
    """

    ranges: dict[int, Ranges]
    through: tuple[int, tuple[int, int]] | None = None
    also_cut: int | None = None

    @cached_property
    def key(self) -> frozenset[tuple[int, Ranges]]:
        """Equal for what is held alike."""
        return frozenset(self.ranges.items())


def find_shard_units(
    layout: Layout,
    dimension: int,
    block: tuple[int, int],
    unit: int,
    ranks: Container[int] | None = None,
) -> ShardUnits:
    """Return what each rank has of the block `(start, stop)` of a dimension, in units of `unit`
    indices.

    Other ranks than `ranks`, if given, are left out.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> rows = spec(DeviceMesh.of(tp=2), "tp, -").layout((8, 3))
    >>> find_shard_units(rows, 0, (0, 8), 2).ranges
    {0: ((0, 2),), 1: ((2, 4),)}
    >>> find_shard_units(rows, 0, (0, 8), 8).through
    (0, (0, 4))
    """
    table = layout.tables[dimension]
    of_part: dict[int, Ranges] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    through = None
    parts = layout.cell_part[:, dimension].tolist()
    for rank, part in zip(layout.cell_slot.tolist(), parts, strict=True):
        if ranks is not None and rank not in ranks:
            continue
        if part not in of_part:
            runs = [(a, b) for a, b, _, role in table.runs_of(part) if role != PAD]
            of_part[part] = _join_ranges(_bring_into_block(runs, block))
        for start, stop in of_part[part]:
            if through is None and (start % unit or stop % unit):
                through = (rank, (start, stop))
            ranges.setdefault(rank, []).append((start // unit, stop // unit))
    return ShardUnits({rank: tuple(found) for rank, found in ranges.items()}, through)


def _bring_into_block(
    runs: Iterable[tuple[int, int]], block: tuple[int, int]
) -> Iterable[tuple[int, int]]:
    first, last = block
    for start, stop in runs:
        if max(start, first) < min(stop, last):
            yield max(start, first) - first, min(stop, last) - first


def _join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge consecutive ranges."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


@dataclass(frozen=True, eq=False, slots=True)
class ShardBlock:
    """A block of a tensor that is cut by a name: what ranks hold of it, over which axes.

    `place` distinguishes it from other blocks of the tensor, in messages.
    """

    name: CutName
    place: str
    units: int
    axes: tuple[Axis, ...]
    held: ShardUnits


class ShardBlockReader:
    """Reads what ranks of a mesh hold of tensors that a recipe cuts.

    Args:
        mesh: the ranks.
        mapping: the axes of the mesh for each of the recipe's.
        storage: the recipe's axes that only divide storage.
    """

    def __init__(
        self, mesh: DeviceMesh, mapping: Mapping[str, tuple[Axis, ...]], storage: Collection[str]
    ) -> None:
        self._mesh = mesh
        self._mapping = {axis: () if axis in storage else to for axis, to in mapping.items()}
        # An axis that another axis of the recipe is mapped to as well divides more than storage.
        computed = {one for to in self._mapping.values() for one in to}
        self._storage = {one for axis in storage for one in mapping.get(axis, ())} - computed

    def read(
        self,
        marks: Sequence[ShardAnnotation],
        written: ShardingSpec,
        only: Sequence[tuple[str, tuple[int, ...]]],
        shape: tuple[int, ...],
        instead: ShardingSpec | None = None,
    ) -> tuple[ShardBlock, ...]:
        """Return the blocks of a tensor of `shape`.

        Args:
            marks: of the recipe's rule.
            written: the sharding of the rule, over the recipe's axes.
            only: the coordinates of the mesh where the tensor lives.
            shape: of the tensor.
            instead: the sharding, over the mesh, that the tensor has by another rule.

        Raises:
            LayoutError: a recipe's rule that does not fit the shape.
        """
        own = map_sharding(self._mesh, written, self._mapping, only)
        layout = own_layout = own.layout(shape)
        ranks = None
        if instead is not None:
            layout = _drop_axes(instead, self._storage).layout(shape)
            ranks = frozenset(own_layout.holders)
        marked = [(mark, mark.item % len(shape)) for mark in marks]
        others = sorted(set(range(len(shape))) - {dimension for _, dimension in marked})
        also_cut = next((d for d in others if layout.tables[d] is not own_layout.tables[d]), None)
        found = []
        for mark, dimension in marked:
            rule = written.dim_specs[dimension].levels[mark.level].rule
            for name, start, stop, unit in mark.blocks(rule, shape[dimension]):
                held = find_shard_units(layout, dimension, (start, stop), unit, ranks)
                is_part = stop - start < shape[dimension]
                place = f"[{', '.join([':'] * dimension + [f'{start}:{stop}'])}]" if is_part else ""
                axes = own.dim_specs[dimension].axes
                held = replace(held, also_cut=also_cut)
                found.append(ShardBlock(name, place, (stop - start) // unit, axes, held))
        return tuple(found)


def _drop_axes(sharding: ShardingSpec, dropped: Collection[Axis]) -> ShardingSpec:
    """Return a sharding without some axes of its mesh."""
    dims = []
    for dim in sharding.dim_specs:
        levels = [([a for a in lv.axes if a not in dropped], lv.rule) for lv in dim.levels]
        dims.append(DimSpec([Level(axes, rule) for axes, rule in levels if axes]))
    return ShardingSpec(sharding.mesh, dims, only=sharding.only)


class CutTensor(NamedTuple):
    """A tensor, or a block of it, of an operator: by what it is cut, and what ranks hold."""

    tensor: str
    name: CutName
    held: ShardUnits


def list_valid_sizes(unit: int, others: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of ranks that heads can be cut for.

    Args:
        unit: how many units there are.
        others: how many of each other member.

    >>> list_valid_sizes(40, [10])
    (1, 2, 5, 10, 20, 40)
    """
    found = []
    for ranks in range(1, unit + 1):
        each, rest = divmod(unit, ranks)
        shares = [unit // other for other in others if other <= unit]
        if not rest and all(each % share == 0 or share % each == 0 for share in shares):
            found.append(ranks)
    return tuple(found)


def find_mismatch(tensors: Sequence[CutTensor], *, is_unit: bool) -> str | None:
    """Describe tensors of a member, or of a cut, that ranks do not hold alike.

    `is_unit` for indices that are heads or the like.
    """
    for one in tensors:
        if one.held.also_cut is not None:
            return (
                f"dimension {one.held.also_cut} of {one.tensor} would be cut too, beside {one.name}"
            )
        if one.held.through is not None:
            rank, (start, stop) = one.held.through
            return (
                f"rank {rank} would hold {start}:{stop} of {one.tensor}, which cuts through what "
                f"belongs together ({one.name})"
            )
    first, *others = tensors
    for other in others:
        if other.held.key == first.held.key:
            continue
        for rank in sorted({*first.held.ranges, *other.held.ranges}):
            has, lacks = (one.held.ranges.get(rank, ()) for one in (first, other))
            if has != lacks:
                return (
                    f"rank {rank} would hold {_say(first.name, has, is_unit)} of {first.tensor}, "
                    f"and {_say(None, lacks, is_unit)} of {other.tensor}; both are computed with "
                    "together"
                )
    return None


def find_repetition(
    one: CutTensor, units: int, groups: Iterable[Sequence[int]], *, is_unit: bool
) -> str | None:
    """Describe a unit that is not on exactly one rank of each group that holds any."""
    for group in groups:
        holders = [rank for rank in group if rank in one.held.ranges]
        if not holders:
            continue
        # In the order of units: each stretch begins where the previous stretch ends.
        stretches = sorted((*part, rank) for rank in holders for part in one.held.ranges[rank])
        reached, last = 0, holders[0]
        for start, stop, rank in [*stretches, (units, units, holders[-1])]:
            if start < reached:
                twice = ((start, min(stop, reached)),)
                return (
                    f"ranks {last} and {rank} would both hold {_say(one.name, twice, is_unit)} of "
                    f"{one.tensor}, which would count twice in the sum over ranks"
                )
            if start > reached:
                return (
                    f"no rank of {_list_ranks(group)} would hold "
                    f"{_say(one.name, ((reached, start),), is_unit)} of {one.tensor}"
                )
            reached, last = stop, rank
    return None


def find_uneven(one: CutTensor, groups: Iterable[Sequence[int]]) -> str | None:
    """Return what is wrong where ranks of a group that holds any do not hold equally many units."""
    for group in groups:
        counts = {rank: _count(one.held.ranges.get(rank, ())) for rank in group}
        if not any(counts.values()):
            continue
        few, many = min(group, key=counts.__getitem__), max(group, key=counts.__getitem__)
        if counts[few] != counts[many]:
            return (
                f"rank {many} would hold {counts[many]} of {one.name} of {one.tensor}, and rank "
                f"{few} {counts[few]}; every rank needs equally many"
            )
    return None


def find_unshared(unit: CutTensor, shared: CutTensor, units: int, count: int) -> str | None:
    """Return what is wrong with what ranks hold of a member that units share, or have several of.

    Args:
        unit, shared: tensors of the unit and of the member.
        units, count: how many there are of each.
    """
    # Ranks that hold the same, such as copies, are asked once.
    ranks: dict[tuple[Ranges, Ranges], int] = {}
    for rank in sorted({*unit.held.ranges, *shared.held.ranges}):
        both = (unit.held.ranges.get(rank, ()), shared.held.ranges.get(rank, ()))
        ranks.setdefault(both, rank)
    for (has, held), rank in ranks.items():
        used = _find_used(has, units, count)
        if held != used:
            return (
                f"rank {rank} would hold {_say(shared.name, held)} of {shared.tensor}, and its "
                f"{_say(unit.name, has)} of {unit.tensor} {_say(None, used, verb='use')}"
            )
    for (has, _), rank in ranks.items():
        share = max(units // count, 1)
        uses = Counter(one // share for start, stop in has for one in range(start, stop))
        few, many = min(uses, key=uses.__getitem__), max(uses, key=uses.__getitem__)
        if uses[few] != uses[many]:
            return (
                f"of the {_say(unit.name, has)} of {unit.tensor} on rank {rank}, {uses[many]} use "
                f"{shared.name} {many} and {uses[few]} use {few}; all that a rank holds must be "
                "used by equally many"
            )
    return None


def _find_used(has: Ranges, units: int, count: int) -> Ranges:
    """Return what units use of a member that there are `count` of, in the order of the units."""
    if count >= units:
        return tuple((start * (count // units), stop * (count // units)) for start, stop in has)
    share = units // count
    used: list[tuple[int, int]] = []
    for start, stop in has:
        low, high = start // share, (stop - 1) // share + 1
        # Stretches that use the same part, or consecutive parts.
        if used and used[-1][0] <= low <= used[-1][1]:
            low, high = used.pop()[0], max(high, low)
        used.append((low, high))
    return tuple(used)


def _count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _say(name: CutName | None, ranges: Ranges, is_unit: bool = True, verb: str = "") -> str:
    """`heads.query 10-19`, `feed_forward 0:4`, or `no heads.query`."""
    if not ranges:
        return f"{verb} none".strip() if name is None else f"no {name}"
    words = []
    for start, stop in ranges[:3]:
        last = f"{start}-{stop - 1}" if stop - start > 1 else str(start)
        words.append(last if is_unit else f"{start}:{stop}")
    text = ", ".join(words) + (f" and {len(ranges) - 3} stretches more" if len(ranges) > 3 else "")
    words = [verb, "" if name is None else str(name), text]
    return " ".join(word for word in words if word)


# The numbers of a tensor's name, and those of them that count things after the last.
NumbersOfName = tuple[tuple[tuple[str, int], ...], frozenset[str]]


@dataclass(frozen=True)
class Finding:
    """An operator that ranks could not compute with, as text, and how many are like it."""

    text: str
    operators: int

    def __str__(self) -> str:
        others = self.operators - 1
        return self.text + (f" (and {count_text(others, 'operator')} like it)" if others else "")


@dataclass
class _Operator:
    """The tensors that are computed with together, the first of each kind by what it holds."""

    numbers: NumbersOfName
    blocks: dict[ShardBlock, str] = field(default_factory=dict)


class Inspection:
    """The operators of a model, gathered tensor by tensor."""

    def __init__(
        self, mesh: DeviceMesh, couplings: Mapping[str, Coupling], config: Config | None
    ) -> None:
        self.mesh, self.couplings, self.config = mesh, couplings, config
        self._operators: dict[object, _Operator] = {}
        self._groups: dict[tuple[Axis, ...], tuple[tuple[int, ...], ...]] = {}

    def add(self, tensor: str, numbers: NumbersOfName, blocks: Sequence[ShardBlock]) -> None:
        """Add what ranks hold of a tensor to the operators that it belongs to."""
        for block in blocks:
            key: tuple[object, ...] = (block.name.name, numbers)
            if block.name.member is None:
                # Cuts of other lengths or axes, such as those of shared experts, are others.
                module = None if numbers[0] else tensor.rpartition(".")[0]
                key = (*key, block.units, block.axes, module)
            operator = self._operators.get(key)
            if operator is None:
                operator = self._operators[key] = _Operator(numbers)
            operator.blocks.setdefault(block, tensor)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Descriptions of operators that ranks could not compute with, by kind."""
        judged: dict[object, str | None] = {}
        counts: dict[str, int] = {}
        for operator in self._operators.values():
            # Blocks are those of the cache of layouts: the same objects for all layers cut alike.
            key = frozenset(operator.blocks)
            if key not in judged:
                judged[key] = self._judge(operator)
            text = judged[key]
            if text is not None:
                counts[text] = counts.get(text, 0) + 1
        return tuple(Finding(text, count) for text, count in counts.items())

    def _judge(self, operator: _Operator) -> str | None:
        name = next(iter(operator.blocks)).name
        if name.member is None:
            return self._judge_cut(operator)
        return self._judge_coupling(operator, self.couplings[name.name])

    def _judge_cut(self, operator: _Operator) -> str | None:
        tensors = _list_tensors(operator)
        first = next(iter(operator.blocks))
        # An embedding or output layer may be cut in its own way, but not apart from its bias.
        if not operator.numbers[0] and len(tensors) == 1:
            return None
        problem = find_mismatch(tensors, is_unit=False)
        if problem is None and operator.numbers[0]:
            groups = self._group(first.axes)
            problem = find_repetition(tensors[0], first.units, groups, is_unit=False)
        return problem and f"{problem}; cut all tensors of {first.name} alike, each index once"

    def _judge_coupling(self, operator: _Operator, coupling: Coupling) -> str | None:
        tensors = _list_tensors(operator)
        counts = {block.name.member: block.units for block in operator.blocks}
        axes = next(iter(operator.blocks)).axes
        by_member: dict[str | None, list[CutTensor]] = {}
        for one in tensors:
            by_member.setdefault(one.name.member, []).append(one)
        units = by_member.get(coupling.unit, [])
        problem = next(
            filter(None, (find_mismatch(same, is_unit=True) for same in by_member.values())), None
        )
        if units:
            axes = next(b.axes for b in operator.blocks if b.name.member == coupling.unit)
            count = counts[coupling.unit]
            problem = problem or find_repetition(units[0], count, self._group(axes), is_unit=True)
            for member, (one, *_) in by_member.items():
                if problem is None and member != coupling.unit:
                    problem = find_unshared(units[0], one, count, counts[member])
            problem = problem or find_uneven(units[0], self._group(axes))
        return problem and f"{problem}; {self._advise(coupling, operator, axes)}"

    def _advise(self, coupling: Coupling, operator: _Operator, axes: tuple[Axis, ...]) -> str:
        unit, *others = coupling.counts(self.config, dict(operator.numbers[0])).values()
        sizes = list_valid_sizes(unit, others)
        names = " ".join(map(str, axes)) or "the axis"
        size = 1
        for axis in axes:
            size *= self.mesh.axis_size(axis)
        if size in sizes:
            return f"{size} ranks along {names} would do if all of it were cut alike"
        return f"{names} has size {size}; sizes that would do: {', '.join(map(str, sizes))}"

    def _group(self, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that compute together: those that differ along `axes` only."""
        if axes not in self._groups:
            self._groups[axes] = self.mesh.groups(axes)
        return self._groups[axes]


def _list_tensors(operator: _Operator) -> list[CutTensor]:
    return [
        CutTensor(tensor + block.place, block.name, block.held)
        for block, tensor in operator.blocks.items()
    ]
