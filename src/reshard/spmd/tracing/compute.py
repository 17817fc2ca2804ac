"""Compute times: the time that each rank computes at every operation of a traced function.

An operation runs on shards, which may differ between ranks: of 5 rows over 2 ranks one computes 3.
For each rank the parts of its operands and results tell how large each factor of the operator's
rule is there, and with that what it computes, reads and writes (`operator_work`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from reshard.dtypes import DType
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import WITH_SHARDING
from reshard.spmd.propagation.operator_work import least_s, moved_bytes, operations_of
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.tracing.traced_operation import TracedOperation
from reshard.topology import Device

Ranks = tuple[int, ...]
Shape = tuple[int, ...]


def with_compute(
    operations: Sequence[TracedOperation], ranks: Ranks, device: Device
) -> tuple[TracedOperation, ...]:
    """The operations with the seconds that each rank computes at each.

    Args:
        operations: of the function.
        ranks: of the mesh, in its order.
        device: of each rank.
    """
    return tuple(
        replace(one, compute_s=_estimate_seconds(one, ranks, device)) for one in operations
    )


def _estimate_seconds(one: TracedOperation, ranks: Ranks, device: Device) -> tuple[float, ...]:
    if one.operation.operator == WITH_SHARDING:
        return (0.0,) * len(ranks)
    read = [
        None if kind is None else kind.with_spec(spec)
        for kind, spec in zip(one.operands, one.runs_with, strict=True)
    ]
    kinds = (*read, *one.computed)
    shapes = [((),) * len(ranks) if kind is None else shapes_of(kind, ranks) for kind in kinds]
    widths = [0 if kind is None else kind.dtype.itemsize_bytes for kind in kinds]
    given = tuple(kind.dtype for kind in read if kind is not None and kind.ndim)
    dtypes = given or tuple(kind.dtype for kind in one.computed)
    # Most ranks have shards of the same shapes: each set of shapes is estimated once.
    found: dict[tuple[Shape, ...], float] = {}
    for here in zip(*shapes, strict=True):
        if here not in found:
            sizes_bytes = [math.prod(s) * width for s, width in zip(here, widths, strict=True)]
            found[here] = _estimate_shapes(one, here, sizes_bytes, dtypes, device)
    mesh = None if one.results[0].spec is None else one.results[0].spec.mesh
    return tuple(
        found[here] if mesh is None or rank in mesh.devices else 0.0
        for rank, here in zip(ranks, zip(*shapes, strict=True), strict=True)
    )


def _estimate_shapes(
    one: TracedOperation,
    shapes: tuple[Shape, ...],
    sizes_bytes: Sequence[int],
    dtypes: tuple[DType, ...],
    device: Device,
) -> float:
    """Seconds of a rank whose operands and results have these shapes."""
    name, rule = one.operation.operator, one.operation.rule
    count = len(one.operands)
    moved = moved_bytes(name, sizes_bytes[:count], sizes_bytes[count:])
    operations = operations_of(name, rule, local_sizes(rule, shapes), one.operation.attributes)
    return least_s(device, operations, moved, dtypes)


def local_sizes(rule: OpShardingRule, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """The sizes of a rule's factors on a rank, from the shapes of its operands and results there.

    A factor is as large as in the smallest of its dimensions. Of several factors of a dimension
    the major one is the one that is cut.

    >>> rule = OpShardingRule.parse("([ij], [ij, k]) -> ([i, j, k]) {i=4, j=3, k=8}")
    >>> local_sizes(rule, [(6,), (6, 8), (2, 3, 8)])
    (2, 3, 8)
    """
    found = list(rule.sizes)
    for mapping, shape in zip(rule.tensors, shapes, strict=True):
        for dim, length in zip(mapping, shape, strict=True):
            left = length
            # From the minor factor on each has what fits of the local length; the major one has the
            # rest.
            for factor in reversed(dim):
                here = min(rule.sizes[factor], left)
                found[factor] = min(found[factor], here)
                left = -(-left // here) if here else 0
    return tuple(found)


@lru_cache(maxsize=4096)
def shapes_of(kind: ArrayType, ranks: Ranks) -> tuple[Shape, ...]:
    """The shape of an array's shard on each rank; of nothing where there is none.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.dtypes import dtype
    >>> rows = ArrayType((5, 4), dtype("float32"), spec(DeviceMesh.of(x=3), "x, -"))
    >>> shapes_of(rows, (0, 1, 2))
    ((2, 4), (2, 4), (1, 4))
    """
    if kind.spec is None:
        return (kind.shape,) * len(ranks)
    return tuple(_find_shape(kind, rank) for rank in ranks)


def _find_shape(kind: ArrayType, rank: int) -> Shape:
    layout = kind.layout
    # Ranks of other meshes may lie beyond those of this one.
    here = layout.local_shape(rank) if rank < layout.slots else None
    if here is None:
        return (0,) * kind.ndim
    if len(here) == kind.ndim:
        return here
    # Parts in several pieces: as many whole rows as they come to.
    row = math.prod(kind.shape[1:])
    return (-(-math.prod(here) // max(row, 1)), *kind.shape[1:])
