"""A check of programs for tests: legal, within memory, and correct on arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import reshard
from conformance.checked_movement import same
from oracle import contents_of_spec, shards_of
from reshard.collectives import Exchange, Program, Slice


def contributions(spec: reshard.ShardingSpec, shape: tuple[int, ...]) -> list[Any]:
    """One dense array for each contribution, with numbers that reduce without loss."""
    count = spec.layout(shape).contributions
    kind = np.float64 if spec.reduction == "mean" else np.int64
    numbers = np.arange(math.prod(shape), dtype=kind).reshape(shape)
    return [numbers * (2 * number + 1) % 7 + 1 for number in range(count)]


def check(program: Program, live_shard: int | None = 0) -> None:
    """Every step legal, memory within bound, and the result that of the direct plan.

    `live_shard` is the bound, None for no bound; 0 stands for the larger of both ends.
    """
    source, target = (side.layout(program.shape) for side in (program.source, program.target))
    program.verify()
    dense = contributions(program.source, program.shape)
    held = shards_of(contents_of_spec(program.source, program.shape), dense)
    before = {rank: array.copy() for rank, array in held.items()}
    plan = reshard.plan(source, target)
    wanted = plan.run(held)
    for found in (program.run(held, stepwise=True), program.run(held)):
        assert found.keys() == wanted.keys()
        if program.target.partial_axes:
            # Contributions may be combined in other places; what they combine to is the same.
            assert same(whole(program, found), whole(program, wanted))
        else:
            assert same(found, wanted)
    assert same(held, before)
    if live_shard is not None:
        ends = max(int(side.cell_shape.prod(axis=1).max()) for side in (source, target))
        assert program.live_shard <= (live_shard or ends)
    assert is_exchange(program) or program.moved_elements >= program.lower_bound_elements
    # Messages alone send every contribution to whoever wants it; programs combine on the way.
    assert program.lower_bound_elements <= plan.lower_bound_elements
    if plan.source.contributions <= plan.target.contributions:
        assert program.lower_bound_elements == plan.lower_bound_elements
    for step in program.steps:
        assert step.sent_elements.sum() == step.received_elements.sum() == step.moved_elements
        assert not isinstance(step, Slice) or step.moved_elements == 0


def is_exchange(program: Program) -> bool:
    """Whether a step of it is the direct plan."""
    return any(isinstance(step, Exchange) for step in program.steps)


def whole(program: Program, shards: dict[int, Any]) -> dict[int, Any]:
    """The reduced tensor, on every slot of the target."""
    layout = program.target.layout(program.shape)
    full = reshard.Layout.replicated(program.shape, layout.slots)
    return reshard.plan(layout, full).run(shards)
