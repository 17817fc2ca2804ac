"""The legality of a step: each group of ranks must hold the elements that it needs.

Names of axes are not sufficient. Ten rows over x=2, y=2 in one level are 3, 3, 3, 1; over x alone
they are 5, 5::

    x y     0 1 2 | 3 4 5 | 6 7 8 | 9          gathered along y, the upper half has 0 .. 5
    x       0 1 2 3 4     | 5 6 7 8 9          and the lower one 6 .. 9: row 5 is missing

so that gather, and the slice back, are not legal. The boxes of a group are every part that it has
of one dimension with every part of the next, so what it holds is found for each dimension by
itself: the parts are sorted, and what of them lies below an index is looked up.

The collective that leads from one state to the next: the plainest that is legal.

Steps of a program that are taken at once, for no more elements.

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
    """Whether every rank's box after lies in its own box before."""
    return space.arriving(before, after) == 0


def is_covered(space: Space, before: State, after: State, primes: frozenset[int]) -> bool:
    """Whether every rank's box after lies in what its group along `primes` held before.

    The group is that of the prime mesh of `before`.

    >>> from reshard.collectives.search.states import PrimeMesh
    >>> from reshard.mesh import DeviceMesh
    >>> space = Space([PrimeMesh(DeviceMesh.of(x=2, y=2), [1, 2, 4])], [10])
    >>> flat, nested, gathered = (State(0, (cut,)) for cut in (((0, 1),), ((0,), (1,)), ((0,),)))
    >>> is_covered(space, flat, gathered, frozenset({1}))
    False
    >>> is_covered(space, nested, gathered, frozenset({1}))
    True
    """
    wanted = space.boxes(after)
    # Ranks whose box is empty in any dimension need nothing.
    is_wanted = (wanted.high > wanted.low).all(axis=0)
    for dim, cut in enumerate(before.cuts):
        held = space.intervals_of_groups(before.prime_mesh, space.shape[dim], cut, primes)
        low, high = wanted.low[dim], wanted.high[dim]
        # An axis cuts one dimension, so a group holds a product: each dimension counts by itself.
        found = held.count_below(high) - held.count_below(low)
        if ((found < high - low) & is_wanted).any():
            return False
    return True


def smallest_group(space: Space, before: State, after: State) -> frozenset[int] | None:
    """The prime axes of the smallest group found that holds what its ranks need, or None.

    1. The prime axes behind the part that both cuts of a dimension have in common are moved.
    2. Where these do not do, prime axes of the same dimensions join, minor ones first; then all.
    """
    moved: set[int] = set()
    kept: list[int] = []
    for one, other in zip(before.cuts, after.cuts, strict=True):
        a, b = flatten_cut(one), flatten_cut(other)
        common = 0
        while common < min(len(a), len(b)) and a[common] == b[common]:
            common += 1
        moved |= {*a[common:], *b[common:]}
        kept = [*a[:common], *kept]
    moved &= before.used
    for prime in [None, *reversed(kept)]:
        if prime is not None:
            moved.add(prime)
        if is_covered(space, before, after, frozenset(moved)):
            return frozenset(moved)
    return None


def is_permutation(space: Space, before: State, after: State) -> bool:
    """Whether ranks only exchange whole shards: every dimension is cut into the same parts.

    Where each dimension has the same parts on as many ranks, each box is on as many ranks too.
    """
    return before.pending == after.pending and space.distinct_parts(before) == space.distinct_parts(
        after
    )


Path = tuple[State, ...]
Named = tuple[type[Step], tuple[int, ...], tuple[int, ...]]


def name_step(space: Space, before: State, after: State) -> Named | None:
    """The kind of step, its prime axes and dimensions; None where no collective is legal.

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
    reduced = before.pending - after.pending
    if reduced:
        if not changed:
            return AllReduce, tuple(sorted(reduced)), ()
        tails = _find_tails(before.cuts, after.cuts)
        if tails is not None and reduced == frozenset(tails) and is_inside(space, after, before):
            return ReduceScatter, tails, changed
        return None
    # The plainest collective first: slice, gather, permute, all-to-all, joint all-to-all.
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
            given = _find_tail(after.cuts[giver], before.cuts[giver])
            taken = _find_tail(before.cuts[taker], after.cuts[taker])
            if not given or not taken or set(given) != set(taken):
                continue
            if is_covered(space, before, after, frozenset(given)):
                return AllToAll, taken, (giver, taker)
    group = smallest_group(space, before, after)
    return None if group is None else (JointAllToAll, tuple(sorted(group)), changed)


def _find_tail(short: Cut, long: Cut) -> tuple[int, ...] | None:
    """The prime axes that a cut has behind another one, or None where it does not continue it."""
    one, other = flatten_cut(short), flatten_cut(long)
    return other[len(one) :] if other[: len(one)] == one else None


def _find_tails(short: tuple[Cut, ...], long: tuple[Cut, ...]) -> tuple[int, ...] | None:
    found: tuple[int, ...] = ()
    for one, other in zip(short, long, strict=True):
        tail = _find_tail(one, other)
        if tail is None:
            return None
        found += tail
    return found


def step_cost(problem: Problem, before: State, after: State) -> int:
    """Elements that arrive in one step, summed over ranks."""
    space = problem.space
    reduced = before.pending - after.pending
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
    """Elements that arrive in all steps."""
    return sum(step_cost(problem, a, b) for a, b in itertools.pairwise(path))


def join_steps(problem: Problem, path: Path) -> Path:
    """The states of a path that are left where steps are taken at once.

    >>> from reshard.collectives.search.states import problem_of
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
