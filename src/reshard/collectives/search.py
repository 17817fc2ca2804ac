"""Which program leads from one sharding to another at the least cost?

Searches are registered under names, with one signature: a `Problem` in, the states of a program
out, or None.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

from reshard.collectives.constructive_search import constructive_search
from reshard.collectives.naming import name_step
from reshard.collectives.problems import JOINT, Problem, problem_of
from reshard.collectives.program import Program
from reshard.collectives.states import State
from reshard.collectives.steps import Exchange, Permute, Step
from reshard.errors import PlanError
from reshard.sharding import ShardingSpec

Search = Callable[[Problem], tuple[State, ...] | None]
SEARCHES: dict[str, Search] = {"constructive": constructive_search}


@lru_cache(maxsize=4096)
def _find(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: tuple[int, ...],
    search: str,
    steps: str,
    live_shard: int | None,
) -> Program:
    problem = problem_of(source, target, shape, live_shard, steps)
    states = None if problem is None else SEARCHES[search](problem)
    if problem is None or states is None:
        return Program(shape, source, target, (Exchange(shape, source, target),))
    return program_of(problem, states, source, target)


def program_of(
    problem: Problem, states: Sequence[State], source: ShardingSpec, target: ShardingSpec
) -> Program:
    """The program whose shardings are these states; its ends are written as they were given.

    Raises:
        PlanError: states between which no collective is legal.
    """
    space, shape = problem.space, problem.space.shape
    reduction = source.reduction
    specs = [source, *(space.spec(state, reduction) for state in states[1:-1]), target]
    steps: list[Step] = []
    for (before, after), (one, other) in zip(
        itertools.pairwise(states), itertools.pairwise(specs), strict=False
    ):
        named = name_step(space, before, after)
        if named is None:
            raise PlanError(f"no collective leads from `{one}` to `{other}` within its groups")
        kind, atoms, dims = named
        axes = space.frames[before.frame].axes(atoms, one.mesh)
        steps.append(kind(shape, one, other, axes, dims))
    if len(states) == 1 and source.layout(shape) is not target.layout(shape):
        # The same elements on every rank, but empty shards of another shape.
        steps.append(Permute(shape, source, target))
    return Program(shape, source, target, tuple(steps))


def find_program(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: Sequence[int],
    *,
    search: str = "constructive",
    steps: str = JOINT,
    live_shard: int | None = None,
) -> Program:
    """The cheapest program."""
    return _find(source, target, tuple(int(n) for n in shape), search, steps, live_shard)
