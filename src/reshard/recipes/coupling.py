"""Tensors that an operator needs sharded together, and whether ranks can compute with them.

Attention multiplies each query head with a key/value head, and the output layer has columns for
each query head. So query, key, value and output are sharded by the same heads, whatever the
lengths of the tensors. A coupling names the counted members, the unit first::

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
   only divide storage: tensors are gathered over these before they are used. A sharding by another
   rule is read on the ranks on which the recipe has the tensor; it may not shard other dimensions.
3. Tensors of the same cut and layer are an operator; if names have no numbers, those of a module:
   its weight and its bias (`ComputabilityCheck`). Layers repeat, so few kinds are checked.
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
from typing import Any, NamedTuple

from reshard._records import Record
from reshard.cut_rules import Blocks, CutRule, Grouped, Heads, Joined, split_outside_brackets
from reshard.errors import RecipeError
from reshard.layout import Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.recipes.axis_mapping import map_sharding
from reshard.recipes.expressions import BRACES, NO_NUMBERS, Config, Numbers, parse_expression
from reshard.runs import PAD
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.text import count_text


class Coupling(Record):
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
        reshard.errors.RecipeError: 3 of key_value (`k`) for 8 of query (`q`): the
        larger must be a multiple of the smaller; correct config.json
        """
        result = {}
        for member, text in self.members:
            count = result[member] = parse_expression(text).value(config, numbers)
            units = result[self.unit]
            if not count or (units % count and count % units):
                raise RecipeError(
                    f"{count} of {member} (`{text}`) for {units} of {self.unit} "
                    f"(`{self.members[0][1]}`): the larger must be a multiple of the smaller; "
                    "correct config.json"
                )
        return result


_NAME = re.compile(r"<(\d+)>(?:@blocks\[.*\]|@groups(?:\d+|<\d+>))?")
_JOINED = re.compile(r"joined\[(.*)\]")


class ShardAnnotation(NamedTuple):
    """The names by which a dimension of a spec is sharded at one of its levels.

    Args:
        item: of the spec; after `...`, counted from the end as negative numbers.
        level: of the dimension's, in order.
        names: of each block, or a single name for all: a cut of the recipe (`feed_forward`) or a
            member of a coupling (`heads.query`); None for a block without a name.
    """

    item: int
    level: int
    names: tuple[str | None, ...]

    def list_blocks(self, rule: CutRule, length: int) -> list[tuple[str, int, int, int]]:
        """Return the named blocks of a dimension, for the rule that shards it.

        Returns:
            For each block its name, its start and stop, and the number of indices of a unit.

        >>> annotation = ShardAnnotation(0, 0, ("heads.query",))
        >>> annotation.list_blocks(Blocks((4, 4), Heads(2)), 8)[1]
        ('heads.query', 4, 8, 2)
        """
        sizes: Sequence[int] = rule.sizes if isinstance(rule, Blocks | Joined) else (length,)
        rules = rule.rules if isinstance(rule, Joined) else None
        inner = rule.rule if isinstance(rule, Blocks) else rule
        names = self.names * len(sizes) if len(self.names) == 1 else self.names
        blocks, start = [], 0
        for number, (size, name) in enumerate(zip(sizes, names, strict=True)):
            by = inner if rules is None else rules[number]
            unit = by.size if isinstance(by, Grouped) else 1
            by = by.rule if isinstance(by, Grouped) else by
            # For a cut that belongs to no coupling, every index or group of indices is a unit.
            if isinstance(by, Heads) and name is not None and "." in name:
                unit = max(size // by.count, 1)
            if name is not None:
                blocks.append((name, start, start + size, unit))
            start += size
        return blocks


def find_annotations(spec: str, known: Collection[str]) -> tuple[ShardAnnotation, ...]:
    """Return the annotated dimensions of a rule's spec.

    Args:
        spec: as the rule has it.
        known: the names that braces may hold, such as `feed_forward` and `heads.query`.

    >>> for shard in find_annotations("ep / fsdp, ..., tp@{heads.query} / fsdp", {"heads.query"}):
    ...     print(shard.item, shard.level, *shard.names)
    -1 0 heads.query
    """
    texts = [braces[1].strip() for braces in BRACES.finditer(spec)]
    if not any(text in known for text in texts):
        return ()
    numbers = iter(range(len(texts)))
    # Without braces, whose `|`, `,` and `//` are not the spec's.
    plain = BRACES.sub(lambda _: f"<{next(numbers)}>", spec).partition("|")[0]
    items = [item.strip() for item in split_outside_brackets(plain, ",")]
    after = items.index("...") if "..." in items else len(items)
    annotations = []
    for number, item in enumerate(items):
        for level, text in enumerate(split_outside_brackets(item, "/")):
            _, _, rule = text.partition("@")
            names = _read_names(rule.strip(), texts, known)
            if any(name is not None for name in names):
                at = number if number < after else number - len(items)
                annotations.append(ShardAnnotation(at, level, names))
    return tuple(annotations)


def _read_names(rule: str, texts: Sequence[str], known: Collection[str]) -> tuple[str | None, ...]:
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
    return (text if text in known else None,)


Ranges = tuple[tuple[int, int], ...]


def find_shard_units(
    layout: Layout,
    dimension: int,
    block: tuple[int, int],
    unit: int,
    ranks: Container[int] | None = None,
) -> tuple[dict[int, Ranges], tuple[int, tuple[int, int]] | None]:
    """Return the units of the block `(start, stop)` of a dimension that each rank holds.

    Args:
        layout: of the tensor, without axes that only divide storage.
        dimension, block: the indices.
        unit: how many indices a unit has.
        ranks: others are ignored, if given.

    Returns:
        By rank, stretches `(start, stop)` of units in the order of its memory; and the first rank
        and indices that split a unit, or None.

    >>> from reshard.sharding import spec
    >>> rows = spec(DeviceMesh.of(tp=2), "tp, -").layout((8, 3))
    >>> find_shard_units(rows, 0, (0, 8), 2)
    ({0: ((0, 2),), 1: ((2, 4),)}, None)
    >>> find_shard_units(rows, 0, (0, 8), 8)[1]
    (0, (0, 4))
    """
    table = layout.tables[dimension]
    of_part: dict[int, Ranges] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    split_unit = None
    parts = layout.cell_part[:, dimension].tolist()
    for rank, part in zip(layout.cell_slot.tolist(), parts, strict=True):
        if ranks is not None and rank not in ranks:
            continue
        # Many ranks hold the same part, whose runs are moved into the block once.
        if part not in of_part:
            runs = [(a, b) for a, b, _, role in table.runs_of(part) if role != PAD]
            of_part[part] = _join_ranges(_shift_into_block(runs, block))
        for start, stop in of_part[part]:
            if split_unit is None and (start % unit or stop % unit):
                split_unit = (rank, (start, stop))
            ranges.setdefault(rank, []).append((start // unit, stop // unit))
    return {rank: tuple(stretches) for rank, stretches in ranges.items()}, split_unit


def _shift_into_block(
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


class ShardBlock(Record, eq=False):
    """A named block of a tensor, and the units of it that each rank holds.

    Attributes:
        name: of the cut.
        place: the indices of the block in the tensor, for messages; empty for all of it.
        count: how many units it has.
        axes: the mesh axes that shard it.
        ranges: by rank, stretches `(start, stop)` of units in the order of its memory.
        split_unit: a rank, and indices `(start, stop)` of it that split a unit; or None.
        also_cut: another dimension that is sharded although it must not be; or None.
    """

    name: str
    place: str
    count: int
    axes: tuple[Axis, ...]
    ranges: dict[int, Ranges]
    split_unit: tuple[int, tuple[int, int]] | None
    also_cut: int | None


def read_shard_blocks(
    mesh: DeviceMesh,
    mapping: Mapping[str, tuple[Axis, ...]],
    storage: Collection[str],
    annotations: Sequence[ShardAnnotation],
    written: ShardingSpec,
    only: Sequence[tuple[str, tuple[int, ...]]],
    shape: tuple[int, ...],
    instead: ShardingSpec | None = None,
) -> tuple[ShardBlock, ...]:
    """Return the blocks of a tensor that a recipe shards, with the units that ranks hold.

    Args:
        mesh: the ranks.
        mapping: the axes of the mesh for each of the recipe's.
        storage: the recipe's axes that only divide storage.
        annotations: of the recipe's rule.
        written: the sharding of the rule, over the recipe's axes.
        only: the coordinates of the mesh where the tensor is stored.
        shape: of the tensor.
        instead: the sharding, over the mesh, that the tensor has by another rule.

    Raises:
        LayoutError: a recipe's rule that does not fit the shape.
    """
    computing = {axis: () if axis in storage else to for axis, to in mapping.items()}
    own = map_sharding(mesh, written, computing, only)
    layout = own_layout = own.layout(shape)
    ranks = None
    if instead is not None:
        # An axis to which another axis of the recipe is mapped, too, divides more than storage.
        dropped = {mesh_axis for axis in storage for mesh_axis in mapping.get(axis, ())}
        dropped -= {axis for to in computing.values() for axis in to}
        layout = _drop_axes(instead, dropped).layout(shape)
        ranks = frozenset(own_layout.holders)
    annotated = [(annotation, annotation.item % len(shape)) for annotation in annotations]
    others = sorted(set(range(len(shape))) - {dimension for _, dimension in annotated})
    also_cut = next((d for d in others if layout.tables[d] is not own_layout.tables[d]), None)
    blocks = []
    for annotation, dimension in annotated:
        rule = written.dim_specs[dimension].levels[annotation.level].rule
        axes = own.dim_specs[dimension].axes
        for name, start, stop, unit in annotation.list_blocks(rule, shape[dimension]):
            ranges, split_unit = find_shard_units(layout, dimension, (start, stop), unit, ranks)
            is_part = stop - start < shape[dimension]
            place = f"[{', '.join([':'] * dimension + [f'{start}:{stop}'])}]" if is_part else ""
            count = (stop - start) // unit
            blocks.append(ShardBlock(name, place, count, axes, ranges, split_unit, also_cut))
    return tuple(blocks)


def _drop_axes(sharding: ShardingSpec, dropped: Collection[Axis]) -> ShardingSpec:
    """Return a sharding without some axes of its mesh."""
    dims = []
    for dim in sharding.dim_specs:
        levels = [([a for a in lv.axes if a not in dropped], lv.rule) for lv in dim.levels]
        dims.append(DimSpec([Level(axes, rule) for axes, rule in levels if axes]))
    return ShardingSpec(sharding.mesh, dims, only=sharding.only)


# A block with its label in messages: the tensor's name and the block's place.
_Labelled = tuple[str, ShardBlock]


def list_valid_sizes(unit: int, others: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of ranks over which heads can be divided.

    Args:
        unit: how many units there are.
        others: how many of each other member.

    >>> list_valid_sizes(40, [10])
    (1, 2, 5, 10, 20, 40)
    """
    sizes = []
    for ranks in range(1, unit + 1):
        # Sharing is even if a rank has all units of whole parts, or a part is held by whole ranks.
        each, rest = divmod(unit, ranks)
        shares = [unit // other for other in others if other <= unit]
        if not rest and all(each % share == 0 or share % each == 0 for share in shares):
            sizes.append(ranks)
    return tuple(sizes)


def find_mismatch(blocks: Sequence[_Labelled], *, is_unit: bool) -> str | None:
    """Describe blocks of a member, or of a cut rule, of which ranks hold different units.

    `is_unit` is whether indices are heads or other units.
    """
    for label, block in blocks:
        if block.also_cut is not None:
            return (
                f"dimension {block.also_cut} of {label} would be sharded, in addition to "
                f"{block.name}"
            )
        if block.split_unit is not None:
            rank, (start, stop) = block.split_unit
            return (
                f"rank {rank} would hold {start}:{stop} of {label}, which splits a unit "
                f"({block.name})"
            )
    # The units of the first block are those that all others must have.
    (first_label, first), *others = blocks
    for label, other in others:
        if other.ranges == first.ranges:
            continue
        for rank in sorted({*first.ranges, *other.ranges}):
            ours, theirs = first.ranges.get(rank, ()), other.ranges.get(rank, ())
            if ours != theirs:
                return (
                    f"rank {rank} would hold {_format_units(first.name, ours, is_unit)} of "
                    f"{first_label}, and {_format_units(None, theirs, is_unit)} of {label}; both "
                    "are computed with together"
                )
    return None


def find_repetition(
    labelled: _Labelled, groups: Iterable[Sequence[int]], *, is_unit: bool
) -> str | None:
    """Describe a unit that is not on exactly one rank of each group that holds any."""
    label, block = labelled
    for group in groups:
        holders = [rank for rank in group if rank in block.ranges]
        if not holders:
            continue
        # In the order of units: each stretch begins where the previous stretch ends.
        stretches = sorted((*part, rank) for rank in holders for part in block.ranges[rank])
        reached, last = 0, holders[0]
        for start, stop, rank in [*stretches, (block.count, block.count, holders[-1])]:
            if start < reached:
                repeated = ((start, min(stop, reached)),)
                return (
                    f"ranks {last} and {rank} would both hold "
                    f"{_format_units(block.name, repeated, is_unit)} of {label}, which would "
                    "count twice in the sum over ranks"
                )
            if start > reached:
                missing = _format_units(block.name, ((reached, start),), is_unit)
                return f"no rank of {_list_ranks(group)} would hold {missing} of {label}"
            reached, last = stop, rank
    return None


def find_uneven(labelled: _Labelled, groups: Iterable[Sequence[int]]) -> str | None:
    """Describe ranks of a group that do not hold equally many units, if any holds some."""
    label, block = labelled
    for group in groups:
        counts = {rank: _count(block.ranges.get(rank, ())) for rank in group}
        if not any(counts.values()):
            continue
        few, many = min(group, key=counts.__getitem__), max(group, key=counts.__getitem__)
        if counts[few] != counts[many]:
            return (
                f"rank {many} would hold {counts[many]} of {block.name} of {label}, and rank "
                f"{few} {counts[few]}; every rank needs equally many"
            )
    return None


def find_unshared(unit: _Labelled, shared: _Labelled) -> str | None:
    """Describe wrong shards of a member that units share, or have several of each."""
    (unit_label, units), (shared_label, parts) = unit, shared
    # Ranks that hold the same, such as copies, are checked once.
    ranks: dict[tuple[Ranges, Ranges], int] = {}
    for rank in sorted({*units.ranges, *parts.ranges}):
        both = (units.ranges.get(rank, ()), parts.ranges.get(rank, ()))
        ranks.setdefault(both, rank)
    for (own, held), rank in ranks.items():
        used = _find_used(own, units.count, parts.count)
        if held != used:
            return (
                f"rank {rank} would hold {_format_units(parts.name, held)} of {shared_label}, and "
                f"its {_format_units(units.name, own)} of {unit_label} "
                f"{_format_units(None, used, verb='use')}"
            )
    share = max(units.count // parts.count, 1)
    for (own, _), rank in ranks.items():
        uses = Counter(number // share for start, stop in own for number in range(start, stop))
        few, many = min(uses, key=uses.__getitem__), max(uses, key=uses.__getitem__)
        if uses[few] != uses[many]:
            return (
                f"of the {_format_units(units.name, own)} of {unit_label} on rank {rank}, "
                f"{uses[many]} use {parts.name} {many} and {uses[few]} use {few}; all that a rank "
                "holds must be used by equally many"
            )
    return None


def _find_used(has: Ranges, units: int, count: int) -> Ranges:
    """Return the parts of a member with `count` parts that units use, in the order of the units."""
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


def _format_units(name: str | None, ranges: Ranges, is_unit: bool = True, verb: str = "") -> str:
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


# The numbers of a tensor's name, and the names of those beyond the last layer or expert.
NumbersOfName = tuple[tuple[tuple[str, int], ...], frozenset[str]]


class ComputabilityCheck:
    """The operators of a model, gathered tensor by tensor, and whether ranks can compute them."""

    def __init__(
        self, mesh: DeviceMesh, couplings: Mapping[str, Coupling], config: Config | None
    ) -> None:
        self.mesh, self.couplings, self.config = mesh, couplings, config
        # By the cut and the numbers of names: blocks, and the first tensor with each of them.
        self._operators: dict[tuple[Any, ...], dict[ShardBlock, str]] = {}
        self._groups: dict[tuple[Axis, ...], tuple[tuple[int, ...], ...]] = {}

    def add(self, tensor: str, numbers: NumbersOfName, blocks: Sequence[ShardBlock]) -> None:
        """Add the shards of a tensor to the operators that it belongs to."""
        for block in blocks:
            coupling, dot, _ = block.name.partition(".")
            key: tuple[Any, ...] = (coupling, numbers)
            if not dot:
                # Cuts of other lengths or axes, such as those of shared experts, are separate.
                module = None if numbers[0] else tensor.rpartition(".")[0]
                key = (*key, block.count, block.axes, module)
            self._operators.setdefault(key, {}).setdefault(block, tensor)

    def list_problems(self) -> list[str]:
        """Describe the operators that ranks could not compute with, once for each kind."""
        judged: dict[object, str | None] = {}
        counts: dict[str, int] = {}
        for key, blocks in self._operators.items():
            # Blocks are cached with layouts: the same objects for all layers sharded alike.
            kind = frozenset(blocks)
            if kind not in judged:
                judged[kind] = self._judge(key[0], key[1], blocks)
            problem = judged[kind]
            if problem is not None:
                counts[problem] = counts.get(problem, 0) + 1
        return [
            problem + (f" (and {count_text(count - 1, 'operator')} like it)" if count > 1 else "")
            for problem, count in counts.items()
        ]

    def _judge(
        self, name: str, numbers: NumbersOfName, blocks: Mapping[ShardBlock, str]
    ) -> str | None:
        labelled = [(tensor + block.place, block) for block, tensor in blocks.items()]
        if "." not in labelled[0][1].name:
            return self._judge_cut(numbers, labelled)
        return self._judge_coupling(self.couplings[name], numbers, labelled)

    def _judge_cut(self, numbers: NumbersOfName, blocks: Sequence[_Labelled]) -> str | None:
        # An embedding or output layer may be sharded in its own way, but together with its bias.
        if not numbers[0] and len(blocks) == 1:
            return None
        _, first = blocks[0]
        problem = find_mismatch(blocks, is_unit=False)
        if problem is None and numbers[0]:
            problem = find_repetition(blocks[0], self._group(first.axes), is_unit=False)
        return problem and f"{problem}; shard all tensors of {first.name} alike, each index once"

    def _judge_coupling(
        self, coupling: Coupling, numbers: NumbersOfName, blocks: Sequence[_Labelled]
    ) -> str | None:
        by_member: dict[str, list[_Labelled]] = {}
        for labelled in blocks:
            by_member.setdefault(labelled[1].name.partition(".")[2], []).append(labelled)
        problem = next(
            filter(None, (find_mismatch(same, is_unit=True) for same in by_member.values())), None
        )
        axes = blocks[0][1].axes
        if units := by_member.get(coupling.unit):
            axes = units[0][1].axes
            problem = problem or find_repetition(units[0], self._group(axes), is_unit=True)
            for member, (shared, *_) in by_member.items():
                if problem is None and member != coupling.unit:
                    problem = find_unshared(units[0], shared)
            problem = problem or find_uneven(units[0], self._group(axes))
        return problem and f"{problem}; {self._advise(coupling, numbers, axes)}"

    def _advise(self, coupling: Coupling, numbers: NumbersOfName, axes: tuple[Axis, ...]) -> str:
        unit, *others = coupling.counts(self.config, dict(numbers[0])).values()
        sizes = list_valid_sizes(unit, others)
        names = " ".join(map(str, axes)) or "the axis"
        size = self.mesh.joint_size(axes)
        if size in sizes:
            return f"{size} ranks along {names} would do if all of it were sharded alike"
        return f"{names} has size {size}; sizes that would do: {', '.join(map(str, sizes))}"

    def _group(self, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that compute together: those that differ along `axes` only."""
        if axes not in self._groups:
            self._groups[axes] = self.mesh.groups(axes)
        return self._groups[axes]
