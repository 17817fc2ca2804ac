"""Transitions between the states of a search: legal steps, their names and costs, joined steps.

A step is legal if each group of ranks holds the elements that it needs. Names of axes are not
sufficient. Ten rows over x=2, y=2 in a single level are 3, 3, 3, 1; over x alone they are 5, 5::

    x y     0 1 2 | 3 4 5 | 6 7 8 | 9          gathered along y, the upper half has 0 .. 5
    x       0 1 2 3 4     | 5 6 7 8 9          and the lower half 6 .. 9: row 5 is missing

so that gather, and the slice back, are not legal. The boxes of a group are a product of its parts
of each dimension, so the elements that it holds are found dimension by dimension.

`name_step` returns the simplest legal collective between two states, `step_cost` the elements that
arrive. A search moves axes part by part, and finds any of several programs that move as much.
`join_steps` replaces several steps by a single step that moves no more::

    x / 4 rows over 2, then 2       slice(x:(1)2), slice(x:(2)2)      becomes    slice(x)
    a sum in three steps            reduce-scatter, all-reduce, all-gather       all-reduce
"""

from __future__ import annotations

import itertools
import math

from reshard.collectives.search.states import JOINT, Cut, Problem, Space, State, flatten_cut
from reshard.collectives.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    JointAllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)


def is_inside(space: Space, after: State, before: State) -> bool:
    """Return whether every rank's box after is inside its box before."""
    return space.arriving(before, after) == 0


def is_covered(space: Space, before: State, after: State, primes: frozenset[int]) -> bool:
    """Return whether every rank's box after is held by its group along `primes` before.

    The axes are those of the prime mesh of `before`.

    >>> from reshard.collectives.search.states import PrimeMesh
    >>> from reshard.mesh import DeviceMesh
    >>> space = Space([PrimeMesh(DeviceMesh.of(x=2, y=2), [1, 2, 4])], [10])
    >>> flat, nested, gathered = (State(0, (cut,)) for cut in (((0, 1),), ((0,), (1,)), ((0,),)))
    >>> is_covered(space, flat, gathered, frozenset({1}))
    False
    >>> is_covered(space, nested, gathered, frozenset({1}))
    True
    """
    needed = space.boxes(after)
    # A box that is empty in any dimension needs nothing.
    is_needed = (needed.high > needed.low).all(axis=0)
    for dim, cut in enumerate(before.cuts):
        held = space.intervals_of_groups(before.prime_mesh, space.shape[dim], cut, primes)
        low, high = needed.low[dim], needed.high[dim]
        # An axis shards a single dimension, so a group holds a product of its parts of dimensions.
        count = held.count_below(high) - held.count_below(low)
        if ((count < high - low) & is_needed).any():
            return False
    return True


def find_group(space: Space, before: State, after: State) -> frozenset[int] | None:
    """Return the prime axes of a small group that holds the elements its ranks need, or None.

    1. The prime axes after the common prefix of both cuts of a dimension are moved.
    2. If these do not suffice, the other prime axes of the dimensions are added, minor ones first.
    """
    moved: set[int] = set()
    unmoved: list[int] = []
    for cut_before, cut_after in zip(before.cuts, after.cuts, strict=True):
        a, b = flatten_cut(cut_before), flatten_cut(cut_after)
        common = 0
        while common < min(len(a), len(b)) and a[common] == b[common]:
            common += 1
        moved |= {*a[common:], *b[common:]}
        unmoved = [*a[:common], *unmoved]
    moved &= before.used
    for prime in [None, *reversed(unmoved)]:
        if prime is not None:
            moved.add(prime)
        if is_covered(space, before, after, frozenset(moved)):
            return frozenset(moved)
    return None


def is_permutation(space: Space, before: State, after: State) -> bool:
    """Return whether ranks only exchange whole shards: all dimensions have the same parts.

    If each part of each dimension is on as many ranks as before, so is each box.
    """
    return before.partial == after.partial and space.distinct_parts(before) == space.distinct_parts(
        after
    )


Path = tuple[State, ...]
Named = tuple[type[Step], tuple[int, ...], tuple[int, ...]]


def name_step(space: Space, before: State, after: State) -> Named | None:
    """Return the simplest legal step, its prime axes and dimensions, or None if there is none.

    >>> from reshard.collectives.search.states import PrimeMesh
    >>> from reshard.mesh import DeviceMesh
    >>> space = Space([PrimeMesh(DeviceMesh.of(x=2, y=2), [1, 2, 4])], [4, 4])
    >>> rows, both, swapped = (
    ...     State(0, cuts) for cuts in ((((0, 1),), ()), (((0,),), ((1,),)), (((1,),), ((0,),)))
    ... )
    >>> name_step(space, rows, both)
    (<class 'reshard.collectives.steps.AllToAll'>, (1,), (0, 1))
    >>> name_step(space, both, swapped)[0].name
    'permute'
    """
    changed = tuple(
        d for d, (a, b) in enumerate(zip(before.cuts, after.cuts, strict=True)) if a != b
    )
    reduced = before.partial - after.partial
    if reduced:
        if not changed:
            return AllReduce, tuple(sorted(reduced)), ()
        tails = _find_tails(before.cuts, after.cuts)
        if tails is not None and reduced == frozenset(tails) and is_inside(space, after, before):
            return ReduceScatter, tails, changed
        return None
    # In the order slice, gather, permute, all-to-all, joint all-to-all.
    if before.prime_mesh == after.prime_mesh:
        tails = _find_tails(before.cuts, after.cuts)
        if tails is not None and is_inside(space, after, before):
            return Slice, tails, changed
        tails = _find_tails(after.cuts, before.cuts)
        if tails is not None and is_covered(space, before, after, frozenset(tails)):
            return AllGather, tails, changed
    if is_permutation(space, before, after):
        return Permute, (), changed
    if before.prime_mesh != after.prime_mesh or before.used != after.used:
        return None
    if len(changed) == 2:
        for giver, taker in (changed, changed[::-1]):
            sent = _find_tail(after.cuts[giver], before.cuts[giver])
            taken = _find_tail(before.cuts[taker], after.cuts[taker])
            if not sent or not taken or set(sent) != set(taken):
                continue
            if is_covered(space, before, after, frozenset(sent)):
                return AllToAll, taken, (giver, taker)
    group = find_group(space, before, after)
    return None if group is None else (JointAllToAll, tuple(sorted(group)), changed)


def _find_tail(short: Cut, long: Cut) -> tuple[int, ...] | None:
    """Return the prime axes of `long` after those of `short`, or None if it is not a prefix."""
    prefix, axes = flatten_cut(short), flatten_cut(long)
    return axes[len(prefix) :] if axes[: len(prefix)] == prefix else None


def _find_tails(short: tuple[Cut, ...], long: tuple[Cut, ...]) -> tuple[int, ...] | None:
    tails: tuple[int, ...] = ()
    for short_cut, long_cut in zip(short, long, strict=True):
        tail = _find_tail(short_cut, long_cut)
        if tail is None:
            return None
        tails += tail
    return tails


def step_cost(problem: Problem, before: State, after: State) -> int:
    """Count the elements that arrive in a step, summed over ranks."""
    space = problem.space
    reduced = before.partial - after.partial
    if not reduced:
        return space.arriving(before, after)
    prime_mesh = space.prime_meshes[before.prime_mesh]
    count = math.prod(prime_mesh.size(prime) for prime in reduced)
    if before.cuts == after.cuts:
        # Scattered and gathered again in pieces of the flat shard.
        return 2 * (count - 1) * (space.total(before) // count)
    # A reduce-scatter: each rank receives its part from the `count - 1` others.
    return (count - 1) * space.total(after)


def path_cost(problem: Problem, path: Path) -> int:
    """Count the elements that arrive in all steps of a path."""
    return sum(step_cost(problem, a, b) for a, b in itertools.pairwise(path))


def join_steps(problem: Problem, path: Path) -> Path:
    """Return the states of a path that remain when steps are joined.

    From each state of a path, every later state is tried: a legal step of an allowed kind that
    costs at most as much as the path between them replaces that part of the path. Among the
    resulting programs, that with the fewest steps is returned, found from the end to the
    beginning. All its states are states of the path, so no shard is larger than before.

    >>> from reshard.collectives.search.states import make_problem
    >>> from reshard.collectives.search.states import State
    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=4)
    >>> problem = make_problem(spec(mesh, "-"), spec(mesh, "x"), (8,))
    >>> half = State(0, (((0,),),))
    >>> len(join_steps(problem, (problem.source, half, problem.target)))
    2
    """
    cost = [0]
    for before, after in itertools.pairwise(path):
        cost.append(cost[-1] + step_cost(problem, before, after))
    last = len(path) - 1
    # For each state, the number of remaining steps, and the state after the first of them.
    best: dict[int, tuple[int, int]] = {last: (0, last)}
    for begin in reversed(range(last)):
        best[begin] = best[begin + 1][0] + 1, begin + 1
        for end in range(begin + 2, last + 1):
            steps = best[end][0] + 1
            if steps < best[begin][0] and _is_step(problem, path, begin, end, cost):
                best[begin] = steps, end
    states = [0]
    while states[-1] != last:
        states.append(best[states[-1]][1])
    return tuple(path[number] for number in states)


def _is_step(problem: Problem, path: Path, begin: int, end: int, cost: list[int]) -> bool:
    before, after = path[begin], path[end]
    if step_cost(problem, before, after) > cost[end] - cost[begin]:
        return False
    named = name_step(problem.space, before, after)
    return named is not None and (problem.steps == JOINT or named[0] is not JointAllToAll)
