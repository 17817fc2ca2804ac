"""Cuts of one dimension at the groups of a quantised weight.

A stored tensor has one index for a group of logical elements: 128 that share a scale, 8 that share
an int32. A rank must have whole groups::

    384 rows in groups of 128 over 2 ranks      by ceil  0:192, 192:384   cuts the second group
                                                unit128  0:256, 256:384   scales 0:2, 2:3

1. `at_groups` moves cuts that are free (by ceil, balanced, padded, in blocks) to whole groups.
2. `describe_cut_group` says of any other cut where it goes through a group.
3. `in_groups` is the same cut of a stored tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.block_rules import Blocks
from reshard.cut_rules import Balanced, Ceil, CutRule, Heads, Padded, Sizes, Windows
from reshard.errors import RuleError
from reshard.mesh import DeviceMesh
from reshard.runs import PAD, RunTable
from reshard.sharding import DimSpec, Level

# How many sizes of an axis are tried for an error's advice.
_MOST_SIZES = 256


@dataclass(frozen=True, slots=True)
class StoredDimension:
    """What a dimension of a stored tensor is of the logical weight.

    `indices` of it stand for `elements` of the logical `dimension`, which is None where it is
    never cut.
    """

    dimension: int | None
    elements: int = 1
    indices: int = 1

    def length_of(self, length: int) -> int:
        """The stored length for a logical one: whole groups."""
        return -(-length // self.elements) * self.indices


def move_rule(rule: CutRule, group: int) -> CutRule:
    """A cut rule that keeps groups whole, where it is free to.

    >>> move_rule(Ceil(unit=64), 96).text
    'unit192'
    >>> move_rule(Blocks((256, 256)), 128).text
    'unit128@blocks[256,256]'
    >>> move_rule(Heads(8), 128).text
    'heads8'
    """
    if isinstance(rule, Ceil):
        return Ceil(math.lcm(rule.unit, group))
    if isinstance(rule, Balanced):
        return Ceil(group) if group > 1 else rule
    if isinstance(rule, Padded):
        return Padded(math.lcm(rule.multiple, group))
    if isinstance(rule, Blocks):
        return dataclasses.replace(rule, rule=move_rule(rule.rule, group))
    return rule


def at_groups(dim: DimSpec, group: int) -> DimSpec:
    """A dimension's cut with the rules that are free moved to whole groups."""
    if group == 1:
        return dim
    levels = [Level(level.axes, move_rule(level.rule, group)) for level in dim.levels]
    return DimSpec(levels, dim.is_open, dim.priority)


def find_cut_group(table: RunTable, group: int) -> tuple[int, int, int] | None:
    """The first part that has a group in part: `(part, start, stop)`; None where none has.

    >>> find_cut_group(Ceil().table(384, 2), 128)
    (0, 0, 192)
    """
    runs, length = table.single_runs(), table.dimension_length
    ends = (runs.stop % group == 0) | (runs.stop == length)
    cut = (runs.start % group != 0) | ~ends | (runs.local_start % group != 0)
    cut &= runs.role != PAD
    if not cut.any():
        return None
    at = int(np.flatnonzero(cut)[0])
    return int(runs.part[at]), int(runs.start[at]), int(runs.stop[at])


def describe_cut_group(dim: DimSpec, mesh: DeviceMesh, length: int, group: int) -> str | None:
    """Where a cut goes through a group, and which sizes of the axes would do; None if nowhere.

    >>> mesh = DeviceMesh.of(tp=4)
    >>> print(describe_cut_group(DimSpec([Level(["tp"], Heads(8))]), mesh, 8 * 96, 128))
    part 0 of tp=4 would have 0:192, which cuts a group of 128; tp of 1 or 2 would do
    """
    for count, level in enumerate(dim.levels, start=1):
        # The first level that cuts through is the one to change.
        found = find_cut_group(DimSpec(dim.levels[:count]).table(mesh, length), group)
        if found is None:
            continue
        part, start, stop = found
        axes = " ".join(map(str, level.axes))
        parts = math.prod(mesh.axis_size(axis) for axis in level.axes)
        fitting = _find_sizes(level.rule, length, group, parts) if count == 1 else [1]
        sizes = f"{', '.join(map(str, fitting[:-1]))} or {fitting[-1]}".removeprefix(" or ")
        return (
            f"part {part} of {axes}={parts} would have {start}:{stop}, which cuts a group of "
            f"{group}; {axes} of {sizes} would do"
        )
    return None


def _find_sizes(rule: CutRule, length: int, group: int, parts: int) -> list[int]:
    """The numbers of parts up to about `parts` that cut no group, and heads evenly."""
    found = []
    for size in range(1, min(max(parts, 8), _MOST_SIZES) + 1):
        if isinstance(rule, Heads) and rule.count % size:
            continue
        try:
            table = rule.table(length, size)
        except RuleError:
            continue
        if find_cut_group(table, group) is None:
            found.append(size)
    return found or [1]


def in_groups(
    dim: DimSpec, mesh: DeviceMesh, length: int, stored: StoredDimension, stored_length: int
) -> DimSpec:
    """The cut of a stored dimension where the logical one of `length` is cut as `dim`.

    Where a group is on several ranks (which is refused, or asked for), each of them has it.

    >>> mesh = DeviceMesh.of(tp=2)
    >>> blocks = StoredDimension(0, 128)
    >>> print(in_groups(DimSpec([Level(["tp"], Ceil(128))]), mesh, 384, blocks, 3))
    tp
    >>> print(in_groups(DimSpec([Level(["tp"], Heads(2))]), mesh, 384, blocks, 3))
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
        wanted = RunTable.from_columns(
            stored_length, table.parts, runs.part, start, sizes, local * indices, runs.role
        )
        # The rules in groups, where they say the same; they are what a reader expects.
        scaled = [_scale_rule(level.rule, elements, indices) for level in dim.levels]
        for rules in itertools.product(*scaled):
            levels = [Level(old.axes, rule) for old, rule in zip(dim.levels, rules, strict=True)]
            found = DimSpec(levels, dim.is_open, dim.priority)
            try:
                if found.table(mesh, stored_length) is wanted:
                    return found
            except RuleError:
                continue
    return DimSpec([Level(dim.axes, _find_touched(table, elements, indices, stored_length))])


def _scale_rule(rule: CutRule, elements: int, indices: int) -> list[CutRule]:
    """Rules that may be `rule` in stored indices; most often the first is."""
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
    """What each part touches, as sizes where these are apart, and as windows where they overlap."""
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
