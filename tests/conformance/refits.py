"""Megatron's parameters in short, and a refit of one of them checked and read."""

from __future__ import annotations

from typing import Any

import reshard
from conformance.checked_movement import Side, check
from oracle import contents_of_spec
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.tensor_pairs import TensorPair
from reshard.sharding import ShardingSpec

Shape = tuple[int, ...]


def side(spec: ShardingSpec, shape: Shape) -> Side:
    return Side(spec.layout(shape), contents_of_spec(spec, shape))


def moved(pair: TensorPair) -> reshard.Plan:
    """The plan of a tensor, checked and run."""
    return check(side(pair.source, pair.shape), side(pair.target, pair.shape))


def operations(plan: reshard.Plan, rank: int, dim: int = 0) -> list[str]:
    """What a rank gets, its own included, in the order of the target's offset."""
    found = plan.change.expand(plan.change.routes_into(rank))
    columns = (found.source_start, found.target_start, found.shape)
    starts = zip(found.source_slot.tolist(), *(c[:, dim].tolist() for c in columns), strict=True)
    return [
        f"{source}[{a}:{a + length}]→[{b}:{b + length}]"
        for source, a, b, length in sorted(starts, key=lambda item: item[2])
    ]


def cut(tp: int, *shape: int, offset: int = 0, **attributes: Any) -> MegatronParameter:
    """A parameter that is marked tensor-parallel."""
    return MegatronParameter(MegatronRanks(tp=tp, offset=offset), shape, True, **attributes)


def whole(tp: int, *shape: int, **attributes: Any) -> MegatronParameter:
    """A parameter without a mark."""
    return MegatronParameter(MegatronRanks(tp=tp), shape, **attributes)


def uneven(*lengths: int, **attributes: Any) -> MegatronParameter:
    """A parameter of which rank `r` has `lengths[r]` rows of 2."""
    ranks = MegatronRanks(tp=len(lengths))
    return MegatronParameter(ranks, tuple((length, 2) for length in lengths), True, **attributes)
