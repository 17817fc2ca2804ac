"""Alignment: shardings with which each device computes its part of an operator's results.

Each device needs exactly those elements of every operand from which its part of the results is
computed. So each factor of the operator's rule has the same sharding in all tensors:

1. every operand proposes, for each factor of a dimension, the axes that shard it there;
2. proposals are accepted in the order of the operands' sizes, largest first, if the factor is not
   sharded yet, as far as their axes are free. A proposal that extends an accepted sharding (`x y`
   extends `x`) is accepted as far as its axes are free. The other operands are resharded;
3. a factor is not sharded if the operator needs it whole, or if its parts would not correspond (a
   slice's shorter result, a reshape whose parts do not divide);
4. the results are sharded like their factors; axes of reduced factors hold contributions.

    add   i:x, -   +   i:y, -            the second operand moves, the result is i:x
    dot   k:x      .   -                 the second is sliced in place, the result is a sum over x

If an axis shards a factor of the results in one operand, and a reduced factor in another, it shards
the results. Either the operator runs with that sharding, or it sums over the axis and its result is
reduce-scattered, whichever moves fewer elements (`aligned_by_bytes`):

    matmul   i:x, k    k:x, j            the result is i:x, -

A dimension of a single factor passes any sharding on, uneven or strided. A dimension of several
factors, `[ij]`, is sharded from the major factor on, in parts that divide it: an axis of 4 over
`i=2, j=6` splits both in halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.layout_change import LayoutChange
from reshard.mesh import Axis, DeviceMesh
from reshard.runs import OWNED
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.rules.sharding_rule import OpShardingRule

Shape = tuple[int, ...]
Specs = tuple[ShardingSpec, ...]
Cuts = dict[int, DimSpec]
_WHOLE = DimSpec()


class Alignment(NamedTuple):
    """A record of the shardings of an operator's tensors.

    Args:
        operands: of the operands with which it runs.
        made: of the results as the operator makes them.
        results: of the results after a reduce-scatter, if there is any.
    """

    operands: Specs
    made: Specs
    results: Specs


@lru_cache(maxsize=8192)
def aligned_by_bytes(
    rule: OpShardingRule,
    operands: Specs,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    whole: tuple[int, ...] = (),
    leading: tuple[int, ...] = (),
) -> Alignment:
    """Return the shardings of an operator's tensors that move the fewest elements.

    The results' shardings do not depend on that, because factors of results are sharded before
    reduced factors.

    Args:
        rule, operands, operand_shapes, result_shapes, whole: as of `aligned`.
        leading: factors of results that are sharded before the others.

    >>> from reshard import DeviceMesh, spec
    >>> rule = OpShardingRule.parse("([i, k], [k, j]) -> ([i, j]) {i=8, j=16, k=64} reduction={k}")
    >>> rows, shapes = spec(DeviceMesh.of(x=2), "x, -"), ((8, 64), (64, 16))
    >>> found = aligned_by_bytes(rule, (rows, rows), shapes, ((8, 16),))
    >>> [str(spec) for specs in found for spec in specs]
    ['-, x', 'x, -', '-, - | sum(x)', 'x, -']
    """
    of_results = tuple({f: None for mapping in rule.results for dim in mapping for f in dim})
    reduced = tuple(factor for factor in rule.reduction if factor not in of_results)
    # Of equal costs the first is taken, which makes results as they are wanted, and needs no
    # reduce-scatter.
    orders: list[tuple[tuple[int, ...], ...]] = [(leading, of_results), (), (reduced,)]
    # All operands agree.
    if not (reduced or leading) or sum(map(_is_cut, operands)) < 2:
        orders = [()]
    ways = dict.fromkeys(
        aligned(rule, operands, operand_shapes, result_shapes, whole, order) for order in orders
    )
    # Other orders reduce the elements of the same results, and are scattered to them.
    (_, results), *others = ways
    alignments = [Alignment(runs, computed, results) for runs, computed in ways]
    if not others:
        return alignments[0]

    def moved_elements(alignment: Alignment) -> int:
        before, after = (*operands, *alignment.made), (*alignment.operands, *alignment.results)
        return sum(
            LayoutChange(source.layout(shape), target.layout(shape)).moved_elements
            for source, target, shape in zip(
                before, after, (*operand_shapes, *result_shapes), strict=True
            )
        )

    return min(alignments, key=moved_elements)


def _is_cut(spec: ShardingSpec) -> bool:
    return any(dim.levels for dim in spec.dim_specs)


def aligned(
    rule: OpShardingRule,
    operands: Specs,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    whole: tuple[int, ...] = (),
    order: tuple[tuple[int, ...], ...] = (),
) -> tuple[Specs, Specs]:
    """Return the shardings that the operator runs with: of its operands, and of its results.

    Args:
        rule: of the operator.
        operands: shardings without partial axes, over the same mesh.
        operand_shapes, result_shapes: of the tensors, which may differ from the factors' sizes.
        whole: factors that must not be sharded.
        order: groups of factors; each group is sharded before later groups, and before all other
            factors, regardless of the operands' sizes.

    >>> from reshard import DeviceMesh, spec
    >>> rule = OpShardingRule.parse("([i, k], [k, j]) -> ([i, j]) {i=4, k=8, j=16} reduction={k}")
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> found = aligned(
    ...     rule, (spec(mesh, "y, x"), spec(mesh, "-, -")), ((4, 8), (8, 16)), ((4, 16),)
    ... )
    >>> [str(spec) for specs in found for spec in specs]
    ['y, x', 'x, -', 'y, - | sum(x)']
    """
    mesh = operands[0].mesh
    # The factors that every device needs whole.
    blocked = {*whole, *rule.need_replication, *rule.permutation, *rule.blocked}
    for mapping, shape in zip(rule.tensors, (*operand_shapes, *result_shapes), strict=True):
        for factors, size in zip(mapping, shape, strict=True):
            # A tensor shorter than its factors (a slice): equal parts of it and of the others do
            # not meet.
            if math.prod(rule.sizes[factor] for factor in factors) != size:
                blocked.update(factors)
    cuts = _choose(rule, operands, operand_shapes, blocked, order)
    # Existing shardings are reused: creating a sharding takes longer than everything else here.
    existing = {
        spec.dim_specs: spec
        for spec in operands
        if not (spec.replicated_axes or spec.partial_axes or spec.only)
    }
    placed = []
    for mapping in rule.operands:
        dims = tuple([_find_dim(dim, cuts) for dim in mapping])
        reused = existing.get(dims)
        placed.append(ShardingSpec(mesh, dims) if reused is None else reused)
    results = []
    for mapping, contributed in zip(rule.results, rule.contributed, strict=True):
        dims = tuple([_find_dim(dim, cuts) for dim in mapping])
        partial_axes = [axis for f in contributed if f in cuts for axis in cuts[f].axes]
        result = None if partial_axes else existing.get(dims)
        if result is None:
            result = ShardingSpec(
                mesh, dims, partial_axes=partial_axes, reduction=rule.reduction_operator
            )
        results.append(result)
    return tuple(placed), tuple(results)


def _find_dim(factors: Sequence[int], cuts: Cuts) -> DimSpec:
    dim_cuts = [cuts[factor] for factor in factors if factor in cuts]
    # A single cut keeps its levels, which may be uneven or strided. Several are all plain:
    # `_propose` gives factors of a dimension of several no other cut.
    if len(dim_cuts) == 1:
        return dim_cuts[0]
    if not dim_cuts:
        return _WHOLE
    return DimSpec([axis for cut in dim_cuts for axis in cut.axes])


def _choose(
    rule: OpShardingRule,
    operands: Specs,
    operand_shapes: tuple[Shape, ...],
    blocked: set[int],
    order: Sequence[Sequence[int]],
) -> Cuts:
    mesh = operands[0].mesh
    # The factors that share a dimension with other factors in any tensor.
    compound = {
        factor for mapping in rule.tensors for dim in mapping if len(dim) > 1 for factor in dim
    }
    proposals = []
    for number, (spec, mapping, shape) in enumerate(
        zip(operands, rule.operands, operand_shapes, strict=True)
    ):
        for dim, factors in zip(spec.dim_specs, mapping, strict=True):
            if not dim.levels:
                continue
            # Factors that stay whole are not read: a sharding may depend on the dimension's length,
            # which may differ from the factor's length (for instance in a concatenation).
            if blocked.issuperset(factors):
                continue
            for factor, cut in _propose(rule, mesh, dim, factors, compound).items():
                proposals.append((-math.prod(shape), number, factor, cut))
    cuts: Cuts = {}
    used: list[Axis] = []
    # The largest operand of a group first; ties by operand, then by factor, so that the answer is
    # always the same.
    # Reversed, so that a factor of several groups counts in the first.
    group = {factor: n for n, factors in reversed([*enumerate(order)]) for factor in factors}
    proposals = sorted(
        (proposal for proposal in proposals if proposal[2] not in blocked),
        key=lambda proposal: (group.get(proposal[2], len(order)), *proposal[:3]),
    )
    for _, _, factor, cut in proposals:
        free = _free_prefix(cut, used)
        if factor not in cuts and free is not None:
            cuts[factor] = free
            used += free.axes
    # Shardings are extended only after each factor has had its choice, so that an extending axis
    # is not taken from a factor that would have no axis otherwise.
    for _, _, factor, cut in proposals:
        taken = cuts.get(factor)
        longer = None if taken is None else _continue(taken, cut, used)
        if longer is not None:
            used += longer.axes
            cuts[factor] = longer
    # Removing a factor's sharding may invalidate those of its minor factors in other tensors.
    while True:
        loose = _without_major(rule, mesh, cuts)
        if not loose:
            return cuts
        for factor in loose:
            del cuts[factor]


def _free_prefix(cut: DimSpec, used: Sequence[Axis]) -> DimSpec | None:
    """Return a sharding up to its first axis that is in use, or None if nothing is left."""
    # A prefix of a plain sharding is a sharding; a prefix of a level with a special rule is not.
    taken = [any(_meet(axis, other) for other in used) for axis in cut.axes]
    if not any(taken):
        return cut
    count = taken.index(True)
    return DimSpec(cut.axes[:count]) if count and _is_flat(cut) else None


def _continue(taken: DimSpec, cut: DimSpec, used: Sequence[Axis]) -> DimSpec | None:
    """Extend an accepted sharding as far as axes are free; return None if it cannot be extended."""
    count = len(taken.axes)
    if count >= len(cut.axes) or cut.axes[:count] != taken.axes:
        return None
    if not (_is_flat(taken) and _is_flat(cut)):
        return None
    more = _free_prefix(DimSpec(cut.axes[count:]), used)
    return DimSpec([*taken.axes, *more.axes]) if more is not None and more.axes else None


def _is_flat(cut: DimSpec) -> bool:
    """Return whether a sharding is plain, over all its axes at once."""
    return len(cut.levels) == 1 and cut.levels[0].rule.is_default


def _meet(first: Axis, second: Axis) -> bool:
    """Return whether two axes overlap, or split an axis in ways that do not fit."""
    if first.name != second.name:
        return False
    if first.size is None or second.size is None:
        return True
    # Sub-axes of the same axis are disjoint if the lower ends at or before the start of the higher.
    # `pre` is the product of the sizes of all more major sub-axes.
    low, high = sorted((first, second), key=lambda axis: axis.pre)
    return high.pre % (low.pre * (low.size or 1)) != 0


def _propose(
    rule: OpShardingRule,
    mesh: DeviceMesh,
    dim: DimSpec,
    factors: Sequence[int],
    compound: set[int],
) -> Cuts:
    """Return the cuts of a dimension's factors that follow from a cut of the dimension."""
    if not factors:
        return {}
    if len(factors) == 1 and factors[0] not in compound:
        if not _is_exact(dim, mesh, rule, factors[0]):
            return {}
        # Propagation's marks are not for where elements are.
        is_plain = not (dim.is_open or dim.priority)
        return {factors[0]: dim if is_plain else DimSpec(dim.levels)}
    # A level with a special rule cannot be split among factors.
    if any(not level.rule.is_default for level in dim.levels):
        return {}
    cuts: Cuts = {}
    waiting = list(dim.axes)
    for factor in factors:
        taken, left = [], rule.sizes[factor]
        while waiting and left > 1:
            axis = waiting[0]
            size = mesh.axis_size(axis)
            if left % size == 0:
                taken.append(waiting.pop(0))
                left //= size
            # The axis is larger than the rest of this factor: its remainder shards the next factor.
            elif size % left == 0 and left > 1:
                taken.append(Axis(axis.name, axis.pre, left))
                waiting[0] = Axis(axis.name, axis.pre * left, size // left)
                left = 1
            else:
                waiting = []
        if taken:
            cuts[factor] = DimSpec(taken)
        # A more minor factor may be sharded only if this factor is split into single indices.
        if left > 1:
            break
    return cuts


def _is_exact(dim: DimSpec, mesh: DeviceMesh, rule: OpShardingRule, factor: int) -> bool:
    """Return whether each index is in a single part, and parts have no padding."""
    if all(level.rule.is_default for level in dim.levels):
        return True
    size = rule.sizes[factor]
    table = dim.table(mesh, size)
    runs = table.single_runs()
    return bool((runs.role == OWNED).all()) and int(table.local_lengths.sum()) == size


def _without_major(rule: OpShardingRule, mesh: DeviceMesh, cuts: Cuts) -> list[int]:
    """Return sharded factors after a more major factor that is not split into single indices."""
    loose = []
    for mapping in rule.tensors:
        for dim in mapping:
            if len(dim) < 2:
                continue
            # Whether all more major factors of the dimension are split into single indices.
            is_whole = True
            for factor in dim:
                if factor in cuts and not is_whole:
                    loose.append(factor)
                parts = math.prod(
                    mesh.axis_size(axis) for axis in (cuts[factor].axes if factor in cuts else ())
                )
                # Only then are the parts of the next factor contiguous in the dimension.
                is_whole = is_whole and parts == rule.sizes[factor]
    return list(dict.fromkeys(loose))
