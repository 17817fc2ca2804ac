"""Shardings of quantised weights: rules shard the logical weight, and stored tensors follow.

A stored tensor has an index for a group of logical elements: 128 that share a scale, 8 that share
an int32. A rank must have whole groups::

    384 rows in groups of 128 over 2 ranks      by ceil  0:192, 192:384   splits the second group
                                                unit128  0:256, 256:384   scales 0:2, 2:3

1. The stored tensors of each quantised weight are replaced by the logical weight, for which a
   recipe has a rule as for any other (`FoldedWeights`).
2. Cuts by name (`tp@{feed_forward}`) are aligned to groups that all weights with this cut have in
   common, since their members are sharded together: rows of gate and up, columns of down.
3. The logical sharding is aligned to groups if its rule permits: by ceil, balanced, padded, in
   blocks (`align_to_groups`). Any other cut through a group is reported (`describe_cut_group`).
4. The stored tensors take the weight's place again, each sharded as the weight (`scale_to_groups`).

A weight that no rule matches, and a stored tensor with a rule by hand for its own name, are left
as they are.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from reshard.cut_rules import (
    Balanced,
    Blocks,
    Ceil,
    CutRule,
    Heads,
    Padded,
    Sizes,
    Windows,
    parse_rule,
)
from reshard.errors import RuleError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.quantization import QuantizedWeight, Shape, Shapes, StoredDimension
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.runs import PAD, RunTable
from reshard.sharding import DimSpec, Level, ShardingSpec, split_dims

# The number of sizes of an axis that are tried for the advice in an error.
_MAX_SIZES = 256


def align_rule(rule: CutRule, group: int) -> CutRule:
    """Return a cut rule that keeps groups whole, if the rule leaves a choice.

    >>> align_rule(Ceil(unit=64), 96).text
    'unit192'
    >>> align_rule(Blocks((256, 256)), 128).text
    'unit128@blocks[256,256]'
    >>> align_rule(Heads(8), 128).text
    'heads8'
    """
    if isinstance(rule, Ceil):
        return Ceil(math.lcm(rule.unit, group))
    if isinstance(rule, Balanced):
        return Ceil(group) if group > 1 else rule
    if isinstance(rule, Padded):
        return Padded(math.lcm(rule.multiple, group))
    if isinstance(rule, Blocks):
        return rule.replace(rule=align_rule(rule.rule, group))
    return rule


def align_to_groups(dim: DimSpec, group: int) -> DimSpec:
    """Return a dimension whose rules are aligned to whole groups, where they leave a choice."""
    if group == 1:
        return dim
    levels = [Level(level.axes, align_rule(level.rule, group)) for level in dim.levels]
    return DimSpec(levels, dim.is_open, dim.priority)


def find_cut_group(table: RunTable, group: int) -> tuple[int, int, int] | None:
    """Return the first part that splits a group, `(part, start, stop)`, or None.

    >>> find_cut_group(Ceil().table(384, 2), 128)
    (0, 0, 192)
    """
    runs = table.single_runs()
    cut = table.splits_groups(group) & (runs.role != PAD)
    if not cut.any():
        return None
    at = int(np.flatnonzero(cut)[0])
    return int(runs.part[at]), int(runs.start[at]), int(runs.stop[at])


def describe_cut_group(dim: DimSpec, mesh: DeviceMesh, length: int, group: int) -> str | None:
    """Describe the part that splits a group, and the sizes of the axes that would not; None if no
    part does.

    >>> mesh = DeviceMesh.of(tp=4)
    >>> print(describe_cut_group(DimSpec([Level(["tp"], Heads(8))]), mesh, 8 * 96, 128))
    part 0 of tp=4 would have 0:192, which splits a group of 128; tp of 1 or 2 would do
    """
    for count, level in enumerate(dim.levels, start=1):
        # The first level that splits a group must change.
        cut_group = find_cut_group(DimSpec(dim.levels[:count]).table(mesh, length), group)
        if cut_group is None:
            continue
        part, start, stop = cut_group
        axes = " ".join(map(str, level.axes))
        parts = mesh.joint_size(level.axes)
        fitting = _find_sizes(level.rule, length, group, parts) if count == 1 else [1]
        sizes = f"{', '.join(map(str, fitting[:-1]))} or {fitting[-1]}".removeprefix(" or ")
        return (
            f"part {part} of {axes}={parts} would have {start}:{stop}, which splits a group of "
            f"{group}; {axes} of {sizes} would do"
        )
    return None


def _find_sizes(rule: CutRule, length: int, group: int, parts: int) -> list[int]:
    """Return numbers of parts, up to about `parts`, that split no group and divide heads evenly."""
    sizes = []
    for size in range(1, min(max(parts, 8), _MAX_SIZES) + 1):
        if isinstance(rule, Heads) and rule.count % size:
            continue
        try:
            table = rule.table(length, size)
        except RuleError:
            continue
        if find_cut_group(table, group) is None:
            sizes.append(size)
    return sizes or [1]


def scale_to_groups(
    dim: DimSpec, mesh: DeviceMesh, length: int, stored: StoredDimension, stored_length: int
) -> DimSpec:
    """Return the sharding of a stored dimension whose logical dimension is sharded as `dim`.

    If a group is on several ranks, which is refused unless allowed, each of them has it.

    >>> mesh = DeviceMesh.of(tp=2)
    >>> blocks = StoredDimension(0, 128)
    >>> print(scale_to_groups(DimSpec([Level(["tp"], Ceil(128))]), mesh, 384, blocks, 3))
    tp
    >>> print(scale_to_groups(DimSpec([Level(["tp"], Heads(2))]), mesh, 384, blocks, 3))
    tp@windows[0:2,1:3]
    """
    if not dim.levels or (stored.elements == stored.indices == 1 and stored_length == length):
        return dim
    table = dim.table(mesh, length)
    elements, indices = stored.elements, stored.indices
    runs = table.single_runs()
    if find_cut_group(table, elements) is None:
        is_pad = runs.role == PAD
        local = np.where(is_pad, -(-runs.local_start // elements), runs.local_start // elements)
        start = runs.start // elements * indices
        # The last group of the tensor may be short.
        stop = np.where(runs.stop == length, stored_length, runs.stop // elements * indices)
        pads = (-(-(runs.local_start + runs.length) // elements) - local) * indices
        sizes = np.where(is_pad, pads, stop - start)
        target = RunTable.from_columns(
            stored_length, table.parts, runs.part, start, sizes, local * indices, runs.role
        )
        # Prefer the scaled rules if they are equivalent; readers expect them.
        scaled = [_scale_rule(level.rule, elements, indices) for level in dim.levels]
        for rules in itertools.product(*scaled):
            levels = [Level(old.axes, rule) for old, rule in zip(dim.levels, rules, strict=True)]
            result = DimSpec(levels, dim.is_open, dim.priority)
            try:
                # Tables are interned: equal tables are the same object.
                if result.table(mesh, stored_length) is target:
                    return result
            except RuleError:
                continue
    return DimSpec([Level(dim.axes, _find_touched(table, elements, indices, stored_length))])


def _scale_rule(rule: CutRule, elements: int, indices: int) -> list[CutRule]:
    """Return candidates for `rule` in stored indices; usually the first is right."""
    if isinstance(rule, Ceil):
        unit = math.lcm(rule.unit, elements) // elements * indices
        return list(dict.fromkeys([Ceil(unit), Ceil()]))
    if isinstance(rule, Padded):
        return [Padded(math.lcm(rule.multiple, elements) // elements * indices)]
    if isinstance(rule, Blocks):
        if any(size % elements for size in rule.sizes[:-1]):
            return []
        sizes = tuple(-(-size // elements) * indices for size in rule.sizes)
        return [Blocks(sizes, inner) for inner in _scale_rule(rule.rule, elements, indices)]
    if isinstance(rule, Sizes):
        return [Sizes(tuple(-(-size // elements) * indices for size in rule.sizes))]
    return [rule, Ceil(), Balanced()]


def _find_touched(table: RunTable, elements: int, indices: int, stored_length: int) -> CutRule:
    """Return the indices that each part touches: sizes if these are disjoint, windows if they
    overlap.
    """
    windows: list[tuple[int, int]] = []
    for part in range(table.parts):
        runs: Sequence[tuple[int, int, int, int]] = [
            run for run in table.runs_of(part) if run[3] != PAD
        ]
        low = min((start for start, *_ in runs), default=0) // elements * indices
        high = -(-max((stop for _, stop, *_ in runs), default=0) // elements) * indices
        windows.append((low, min(high, stored_length)))
    filled = [(low, high) for low, high in windows if low < high]
    edges = [0, *(high for _, high in filled)]
    if [low for low, _ in filled] == edges[:-1] and edges[-1] == stored_length:
        return Sizes(tuple(high - low for low, high in windows))
    return Windows(tuple(windows))


class FoldedWeights:
    """The quantised weights of a checkpoint in place of their stored tensors.

    Args:
        weights: by logical name.
        shapes: of all stored tensors.
        by_hand: rules by hand; a rule for a stored tensor and not the weight keeps it apart.
    """

    def __init__(
        self, weights: Mapping[str, QuantizedWeight], shapes: Shapes, by_hand: Sequence[Rule] = ()
    ) -> None:
        self.weights = dict(weights)
        self.stored = dict(shapes)
        apart = {
            member
            for weight in weights.values()
            for member in (weight.members if by_hand else ())
            if any(rule.matches(member) and not rule.matches(weight.name) for rule in by_hand)
        }
        self._weight_of = {
            member: name
            for name, weight in weights.items()
            for member in weight.members
            if member not in apart
        }

    def drop(self, name: str) -> tuple[str, ...]:
        """Leave a weight's stored tensors as they are, and return them."""
        weight = self.weights.pop(name)
        stored = tuple(member for member in weight.members if self._weight_of.get(member) == name)
        for member in stored:
            del self._weight_of[member]
        return stored

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes, with logical weights at the position of their first stored tensor."""
        result: dict[str, Shape] = {}
        for name, shape in self.stored.items():
            logical = self._weight_of.get(name)
            if logical is None:
                result[name] = shape
            else:
                result[logical] = self.weights[logical].shape
        return result

    def itemsizes_bytes(self, stored: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes of an element of each tensor.

        An element of a logical weight has the bytes of all its stored tensors.
        """
        sizes: dict[str, float] = {n: size for n, size in stored.items() if n in self.stored}
        for name, weight in self.weights.items():
            total = sum(
                math.prod(self.stored[member]) * stored[member] for member in weight.members
            )
            sizes[name] = total / max(math.prod(weight.shape), 1)
        return sizes

    def with_units(self, recipe: Recipe, matched: Mapping[str, Rule]) -> Recipe:
        """Return the recipe with its named cut rules aligned to the groups of their weights.

        Args:
            recipe: whose rules they are.
            matched: the rule of each weight.
        """
        units: dict[str, int] = {}
        # Layers repeat, so a set of the different combinations is small.
        pairs = {
            (matched[name], len(weight.shape), weight.groups, tuple(weight.uncut))
            for name, weight in self.weights.items()
            if name in matched
        }
        for rule, ndim, groups, uncut in pairs:
            for dimension, cut in _list_named_cuts(rule.spec, ndim):
                if cut in recipe.cuts and dimension not in uncut:
                    units[cut] = math.lcm(units.get(cut, 1), groups[dimension])
        moved = {
            # The text of the default rule is empty, and braces need a word.
            name: align_rule(parse_rule(recipe.cuts[name]), unit).text or "ceil"
            for name, unit in units.items()
            if unit > 1
        }
        return recipe.replace(cuts={**recipe.cuts, **moved}) if moved else recipe

    def align(self, name: str, sharding: ShardingSpec) -> ShardingSpec:
        """Return the sharding of a logical weight, aligned to its groups if its rule permits."""
        weight = self.weights[name]
        groups = tuple(1 if d in weight.uncut else n for d, n in enumerate(weight.groups))
        return _align(sharding, groups)

    def describe_cut_groups(self, name: str, sharding: ShardingSpec) -> Iterator[str]:
        """Describe dimensions in which a weight's sharding splits groups, and sizes that fit."""
        weight = self.weights[name]
        for d, cause, problem in _find_cut_groups(
            sharding, weight.shape, weight.groups, tuple(weight.uncut)
        ):
            if cause:
                yield (
                    f"{name!r}: dimension {d} is sharded over {cause}, and {weight.uncut[d]!r} "
                    f"({weight.method}) ties its {weight.shape[d]} elements together; take a size "
                    "of 1 there"
                )
            else:
                yield (
                    f"{name!r}: dimension {d}: {problem}. The groups are those of "
                    f"{weight.grouped_by[d]!r} ({weight.method})"
                )

    def spread(self, name: str, sharding: ShardingSpec) -> dict[str, tuple[ShardingSpec, Layout]]:
        """Return the shardings and layouts of a weight's stored tensors, from its own."""
        weight = self.weights[name]
        return {
            member: _lay_out_stored(sharding, weight.shape, dims, self.stored[member])
            for member, dims in weight.members.items()
            if self._weight_of.get(member) == name
        }


def _list_named_cuts(spec: str, ndim: int) -> list[tuple[int, str]]:
    """Return the dimensions of a spec's text that have names in braces, with the names.

    >>> _list_named_cuts("ep / fsdp, etp@{feed_forward}@blocks[{a},{b}], ...", 4)
    [(1, 'feed_forward'), (1, 'a'), (1, 'b')]
    """
    return [
        (d, name.strip())
        for d, item in enumerate(split_dims(spec.partition("|")[0], ndim))
        for name in re.findall(r"\{([^{}]*)\}", item)
        if d < ndim
    ]


# Layers repeat: a few shardings serve all weights.
@lru_cache(maxsize=1024)
def _align(sharding: ShardingSpec, groups: tuple[int, ...]) -> ShardingSpec:
    dims = [align_to_groups(dim, n) for dim, n in zip(sharding.dim_specs, groups, strict=True)]
    return sharding.with_dims(dims)


@lru_cache(maxsize=1024)
def _find_cut_groups(
    sharding: ShardingSpec, shape: Shape, groups: tuple[int, ...], uncut: tuple[int, ...]
) -> tuple[tuple[int, str, str], ...]:
    """Describe the dimensions in which a sharding splits groups: by axes, or by the sizes.

    The first describes dimensions that cannot be sharded at all, the second all others.
    """
    mesh, problems = sharding.mesh, []
    for d, (dim, length) in enumerate(zip(sharding.dim_specs, shape, strict=True)):
        parts = mesh.joint_size(dim.axes)
        if d in uncut and parts > 1:
            problems.append((d, f"{' '.join(map(str, dim.axes))} of {parts}", ""))
            continue
        text = describe_cut_group(dim, mesh, length, groups[d])
        if text is not None:
            problems.append((d, "", text))
    return tuple(problems)


@lru_cache(maxsize=4096)
def _lay_out_stored(
    sharding: ShardingSpec, shape: Shape, dims: tuple[StoredDimension, ...], stored: Shape
) -> tuple[ShardingSpec, Layout]:
    """Return the sharding of a stored tensor of shape `stored`, and its layout."""
    dim_specs = []
    for dimension, length in zip(dims, stored, strict=True):
        if dimension.dimension is None:
            dim_specs.append(DimSpec())
            continue
        dim = sharding.dim_specs[dimension.dimension]
        dim_specs.append(
            scale_to_groups(dim, sharding.mesh, shape[dimension.dimension], dimension, length)
        )
    spec = sharding.with_dims(dim_specs)
    return spec, spec.layout(stored)
