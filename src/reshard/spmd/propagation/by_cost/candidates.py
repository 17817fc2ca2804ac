"""Candidates of the cost strategy: shardings of a value, and shardings of an operator.

The strategy "cost" chooses among these. The mesh's axes are taken in the pieces in which
annotations use them. An operator may run with each piece

- sharding a factor of it, where each device can then compute its part by itself;
- carrying contributions through, where the operator is linear in the operands that have them;
- unused, the devices along it doing the same;
- sharding space that windows reach over, if the operator defines which halos it needs.

A value may have every sharding that an operator around it would read or make, and those that the
other strategies give it. An annotated value has the sharding it was given; where that is open,
those that extend it as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from reshard.mesh import DeviceMesh
from reshard.spmd.core.operator import operators
from reshard.spmd.graph import Operation
from reshard.spmd.propagation.axes import (
    AxisTable,
    FactorSharding,
    Part,
    Parts,
    Sharding,
    collected,
    joined,
    size_of,
    updated,
)
from reshard.spmd.propagation.reshards import common_axes
from reshard.spmd.rules.sharding_rule import Mapping, OpShardingRule

# Ways of an operator, and shardings of a value; those of other strategies come first, so that none
# of theirs is left out.
MAX_WAYS = 256
MAX_SHARDINGS = 96


@dataclass(frozen=True, slots=True)
class RunOption:
    """One way in which an operator may run.

    Args:
        cuts: axes of each factor.
        reads: shardings of the operands as they come.
        makes: shardings of the results, contributions included.
        runs_with: shardings of the operands while it runs, with the edges of other parts; None if
            they are those that it reads.
    """

    cuts: tuple[Parts, ...]
    reads: tuple[Sharding, ...]
    # Ways that differ only in what they make are few: hashes do without it.
    makes: tuple[Sharding, ...] = field(hash=False)
    runs_with: tuple[Sharding, ...] | None = None

    @classmethod
    def of(
        cls,
        rule: OpShardingRule,
        cuts: tuple[Parts, ...],
        carried: Parts = (),
        partial: Collection[int] = (),
        reduction: str = "sum",
    ) -> RunOption:
        """Create the way with cuts that a rule can express.

        Args:
            rule: of the operator.
            cuts: axes of each factor.
            carried: axes along which contributions are carried through.
            partial: positions of the operands that have those.
            reduction: how those combine.
        """
        reads = tuple(
            [
                _make_sharding(mapping, rule, cuts, carried if place in partial else (), reduction)
                for place, mapping in enumerate(rule.operands)
            ]
        )
        makes = []
        for mapping, contributed in zip(rule.results, rule.contributed, strict=True):
            reduced = tuple(part for factor in contributed for part in cuts[factor])
            axes: Parts = ()
            for part in sorted((*carried, *reduced)):
                axes = joined(axes, part)
            operator = rule.reduction_operator if reduced else reduction
            makes.append(_make_sharding(mapping, rule, cuts, axes, operator))
        return cls(cuts, reads, tuple(makes))


def _make_sharding(
    mapping: Mapping, rule: OpShardingRule, cuts: Sequence[Parts], partial: Parts, reduction: str
) -> Sharding:
    """Return the sharding of a tensor whose factors are cut so."""
    dims = tuple(
        [
            cuts[dim[0]]
            if len(dim) == 1
            else _join_cuts(tuple((rule.sizes[f], cuts[f]) for f in dim))
            for dim in mapping
        ]
    )
    return Sharding(dims, (True,) * len(dims), (), partial, reduction if partial else None)


@lru_cache(maxsize=4096)
def _join_cuts(factors: tuple[tuple[int, Parts], ...]) -> Parts:
    """Return the cut of a dimension of several factors, or none, from their sizes and cuts."""
    sizes = [size for size, _ in factors]
    cuts = {place: FactorSharding(axes) for place, (_, axes) in enumerate(factors)}
    return updated((tuple(range(len(factors))),), sizes, cuts, None).dims[0]


def pieces_of(shardings: Iterable[Sharding]) -> Parts:
    """Return the mesh's axes in the pieces in which shardings use them, in mesh order.

    >>> used = Sharding((((0, 1, 2, 0),), ((1, 1, 3, 0),)), (True, True))
    >>> whole = Sharding((((0, 1, 8, 0),),), (True,))
    >>> pieces_of([used, whole])
    ((0, 1, 2, 0), (0, 2, 4, 0), (1, 1, 3, 0))
    """
    bounds: dict[int, set[int]] = {}
    for sharding in shardings:
        for part in (*itertools.chain.from_iterable(sharding.dims), *sharding.partial):
            bounds.setdefault(part[0], set()).update((part[1], part[1] * part[2]))
    pieces: list[Part] = []
    for axis, numbers in sorted(bounds.items()):
        ordered = sorted(numbers)
        if any(high % low for low, high in itertools.pairwise(ordered)):
            # No split has them all, so the axis is used as a whole.
            ordered = [ordered[0], ordered[-1]]
        pieces += [(axis, low, high // low, 0) for low, high in itertools.pairwise(ordered)]
    return tuple(pieces)


def every_piece(pieces: Parts, mesh: DeviceMesh) -> Parts:
    """Return the pieces, and each axis of the mesh without a piece as a whole.

    >>> every_piece(((1, 1, 2, 0), (1, 2, 2, 0)), DeviceMesh.of(x=2, y=4))
    ((0, 1, 2, 0), (1, 1, 2, 0), (1, 2, 2, 0))
    """
    used = {part[0] for part in pieces}
    whole = [(axis, 1, size, 0) for axis, size in enumerate(mesh.shape) if size > 1]
    return tuple(sorted((*pieces, *(part for part in whole if part[0] not in used))))


def cuts_of(shape: Sequence[int], pieces: Parts) -> Iterator[Sharding]:
    """Yield every sharding of an array by pieces of axes, each along a dimension or none.

    >>> [cut.dims for cut in cuts_of((4, 3), ((0, 1, 2, 0),))]
    [((), ()), (((0, 1, 2, 0),), ())]
    """
    for chosen in itertools.product((None, *range(len(shape))), repeat=len(pieces)):
        dims: list[Parts] = [()] * len(shape)
        for piece, dim in zip(pieces, chosen, strict=True):
            if dim is not None:
                dims[dim] = joined(dims[dim], piece)
        if all(size % size_of(axes) == 0 for size, axes in zip(shape, dims, strict=True)):
            yield Sharding(tuple(dims), (True,) * len(dims))


def ways_of(
    operation: Operation,
    shapes: Sequence[tuple[int, ...]],
    pieces: Parts,
    known_shardings: Sequence[Sequence[Sharding]],
    mesh: DeviceMesh,
    reductions: Sequence[str] = ("sum",),
    in_any_order: bool = False,
) -> list[RunOption]:
    """Return the ways in which an operation may run.

    Args:
        operation: of the graph.
        shapes: of its operands, then of its results.
        pieces: of the mesh's axes.
        known_shardings: for each other strategy, the shardings of the operation's tensors.
        mesh: whose axes they are.
        reductions: how contributions that may be carried through combine.
        in_any_order: whether pieces cut a factor in any order, not in that of the mesh alone.
    """
    rule = operation.rule
    # First the operator on whole operands, which is always possible, then as other strategies run
    # it: neither is lost where the list is cut off at MAX_WAYS.
    ways: dict[RunOption, None] = {RunOption.of(rule, ((),) * len(rule.sizes)): None}
    elements = [_count_parts(shape) for shape in shapes]
    for shardings in known_shardings:
        tensors = [
            collected(mapping, rule.sizes, sharding, frozenset(), closed_if_missing=True)
            for mapping, sharding in zip(rule.tensors, shardings, strict=True)
        ]
        cuts = tuple(common_axes(rule, tensors, elements, mesh))
        if _may_run(rule, cuts, _find_cuttable(rule, tuple(shapes))):
            ways[RunOption.of(rule, cuts)] = None
    for way in _list_placed(operation, tuple(shapes), pieces, mesh):
        ways.setdefault(way)
    carried = _find_carried(operation, len(rule.operands), reductions)
    for way in _list_ways(rule, tuple(shapes), pieces, carried, in_any_order):
        ways.setdefault(way)
        if len(ways) >= MAX_WAYS:
            break
    return list(ways)


def _list_placed(
    operation: Operation, shapes: tuple[tuple[int, ...], ...], pieces: Parts, mesh: DeviceMesh
) -> Iterator[RunOption]:
    """Yield the ways that need halos: those that shard dimensions which windows reach over."""
    operator, rule = operators.get(operation.operator), operation.rule
    if operator is None or operator.placed is None:
        return
    table, count = AxisTable.of(mesh), len(rule.operands)
    cuttable = _find_cuttable(rule, shapes)
    moving = frozenset(rule.permutation)
    for chosen in itertools.product([None, *sorted(cuttable | moving)], repeat=len(pieces)):
        cuts: list[Parts] = [()] * len(rule.sizes)
        for piece, factor in zip(pieces, chosen, strict=True):
            if factor is not None:
                cuts[factor] = joined(cuts[factor], piece)
        if moving.isdisjoint(chosen) or not _may_run(rule, cuts, cuttable | moving):
            continue
        way = RunOption.of(rule, tuple(cuts))
        specs = [*map(table.decoded, way.reads)]
        placed = operator.placed(specs, shapes[:count], operation.attributes)
        if placed is not None:
            runs_with, makes = (tuple(map(table.encoded, some)) for some in placed)
            yield RunOption(way.cuts, way.reads, makes, runs_with)


def _count_parts(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


Carried = tuple[tuple[str, tuple[int, ...]], ...]


def _find_carried(operation: Operation, count: int, reductions: Sequence[str]) -> Carried:
    """Return reductions, each with operands that may have such contributions together."""
    operator = operators.get(operation.operator)
    if operator is None:
        return ()
    return tuple(
        (reduction, operands)
        for reduction in reductions
        for operands in operator.partial_operands(count, reduction, **operation.attributes)
    )


@lru_cache(maxsize=4096)
def _find_cuttable(rule: OpShardingRule, shapes: tuple[tuple[int, ...], ...]) -> frozenset[int]:
    """Return the factors along which each device can compute its part by itself."""
    whole = {*rule.need_replication, *rule.permutation, *rule.blocked}
    for mapping, shape in zip(rule.tensors, shapes, strict=True):
        for dim, size in zip(mapping, shape, strict=True):
            if _count_parts([rule.sizes[factor] for factor in dim]) != size:
                whole.update(dim)
    # Cut along a factor that it lacks and that is not reduced, a result would be incomplete.
    of_results = [{factor for dim in mapping for factor in dim} for mapping in rule.results]
    of_operands = {factor for mapping in rule.operands for dim in mapping for factor in dim}
    for factor in range(len(rule.sizes)):
        if factor not in rule.reduction and not all(factor in factors for factors in of_results):
            whole.add(factor)
        # A device computes all of a factor that only results have, as of a broadcast, and slices
        # it afterwards.
        if factor not in of_operands:
            whole.add(factor)
    return frozenset(range(len(rule.sizes))) - whole


def _may_run(rule: OpShardingRule, cuts: Sequence[Parts], cuttable: frozenset[int]) -> bool:
    """Return whether each device has what its part of the results needs, uneven parts included."""
    for factor, axes in enumerate(cuts):
        shards, size = size_of(axes), rule.sizes[factor]
        if shards == 1:
            continue
        if factor not in cuttable or shards > size:
            return False
        # A mean of means, and a maximum of nothing, are not the whole's.
        is_exact = factor in rule.reduction and rule.reduction_operator != "sum"
        is_compound = any(
            factor in dim and len(dim) > 1 for mapping in rule.tensors for dim in mapping
        )
        if size % shards and (is_exact or is_compound):
            return False
    # Within a dimension, a factor may be cut where all before it are cut to single indices.
    for mapping in rule.tensors:
        for dim in mapping:
            is_open = True
            for factor in dim:
                shards = size_of(cuts[factor])
                if shards > 1 and not is_open:
                    return False
                is_open = is_open and shards == rule.sizes[factor]
    return True


@lru_cache(maxsize=4096)
def _list_ways(
    rule: OpShardingRule,
    shapes: tuple[tuple[int, ...], ...],
    pieces: Parts,
    carried: Carried,
    in_any_order: bool,
) -> tuple[RunOption, ...]:
    cuttable = _find_cuttable(rule, shapes)
    places: list[tuple[str, int]] = [("unused", 0)]
    places += [("factor", factor) for factor in sorted(cuttable)]
    # The carried and the reduced contributions are the same sum, or the same maximum.
    places += [
        ("carried", number)
        for number, (reduction, _) in enumerate(carried)
        if not rule.reduction or rule.reduction_operator == reduction
    ]
    ways: dict[RunOption, None] = {}
    for ordered in itertools.permutations(pieces) if in_any_order else [pieces]:
        # Each piece of the axes is unused, or belongs to a factor or to contributions of operands.
        for chosen in itertools.product(places, repeat=len(ordered)):
            cuts: list[Parts] = [()] * len(rule.sizes)
            carried_axes: dict[int, Parts] = {}
            for piece, (kind, number) in zip(ordered, chosen, strict=True):
                if kind == "factor":
                    cuts[number] = joined(cuts[number], piece)
                elif kind == "carried":
                    carried_axes[number] = joined(carried_axes.get(number, ()), piece)
            if len(carried_axes) > 1 or not _may_run(rule, cuts, cuttable):
                continue
            number, axes = next(iter(carried_axes.items()), (0, ()))
            reduction, operands = carried[number] if axes else ("sum", ())
            way = RunOption.of(rule, tuple(cuts), tuple(sorted(axes)), operands, reduction)
            ways[way] = None
            if len(ways) >= MAX_WAYS:
                return tuple(ways)
    return tuple(ways)


def shardings_of(
    annotation: Sharding | None,
    around: Iterable[Sharding],
    known_shardings: Iterable[Sharding],
    is_output: bool,
) -> list[Sharding]:
    """Return the shardings that a value may have.

    Args:
        annotation: its annotation, or None.
        around: what operators around it would read or make.
        known_shardings: its shardings by other strategies.
        is_output: whether the function returns it: no contributions then.
    """
    candidates: dict[Sharding, None] = {}
    if annotation is not None:
        candidates[annotation] = None
        if all(annotation.is_closed):
            return list(candidates)
    for sharding in itertools.chain(known_shardings, around):
        closed = sharding.plain
        # An open annotation may be extended; a closed annotation was returned above.
        if annotation is not None and not _extends(closed, annotation):
            continue
        if is_output and closed.partial:
            continue
        candidates.setdefault(closed)
        if len(candidates) >= MAX_SHARDINGS:
            break
    return list(candidates)


def _extends(sharding: Sharding, annotation: Sharding) -> bool:
    """Return whether a sharding keeps an annotation, and cuts further only where that is open."""
    taken = (*annotation.replicated, *annotation.partial)
    return sharding.partial == annotation.partial and all(
        (new == old if is_closed else new[: len(old)] == old)
        and all(part[0] not in {other[0] for other in taken} for part in new[len(old) :])
        for new, old, is_closed in zip(
            sharding.dims, annotation.dims, annotation.is_closed, strict=True
        )
    )
