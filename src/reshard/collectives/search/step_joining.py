"""Steps of a program that are taken at once, for no more elements.

A search moves axes part by part, and of programs that move as much it finds any::

    x / 4 rows over 2, then 2       slice(x:(1)2), slice(x:(2)2)      becomes    slice(x)
    a sum in three steps            reduce-scatter, all-reduce, all-gather       all-reduce

1. From each state of a path, every later one is tried: a legal step of an allowed kind that costs
   at most what the path pays between them is one step instead.
2. Of the programs that this gives, one with the fewest steps is taken: they are found from the
   end to the beginning.

The states are some of the path's, so no shard is larger than before.
"""

from __future__ import annotations

import itertools

from reshard.collectives.search.constructive import Path, step_cost
from reshard.collectives.search.problems import JOINT, Problem
from reshard.collectives.search.step_naming import name_step
from reshard.collectives.steps import JointAllToAll


def join_steps(problem: Problem, path: Path) -> Path:
    """The states of a path that are left where steps are taken at once.

    >>> from reshard.collectives.search.problems import problem_of
    >>> from reshard.collectives.search.states import State
    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=4)
    >>> problem = problem_of(spec(mesh, "-"), spec(mesh, "x"), (8,))
    >>> half = State(0, (((0,),),))
    >>> len(join_steps(problem, (problem.source, half, problem.target)))
    2
    """
    paid = [0]
    for before, after in itertools.pairwise(path):
        paid.append(paid[-1] + step_cost(problem, before, after))
    last = len(path) - 1
    # From each state: how many steps are left, and where the first of them leads.
    best: dict[int, tuple[int, int]] = {last: (0, last)}
    for begin in reversed(range(last)):
        best[begin] = best[begin + 1][0] + 1, begin + 1
        # A step that skips states is taken where fewer steps are left behind it.
        for end in range(begin + 2, last + 1):
            steps = best[end][0] + 1
            if steps < best[begin][0] and _is_step(problem, path, begin, end, paid):
                best[begin] = steps, end
    kept = [0]
    while kept[-1] != last:
        kept.append(best[kept[-1]][1])
    return tuple(path[number] for number in kept)


def _is_step(problem: Problem, path: Path, begin: int, end: int, paid: list[int]) -> bool:
    before, after = path[begin], path[end]
    if step_cost(problem, before, after) > paid[end] - paid[begin]:
        return False
    named = name_step(problem.space, before, after)
    return named is not None and (problem.steps == JOINT or named[0] is not JointAllToAll)
