"""The collective that leads from one state to the next: the plainest that is legal."""

from __future__ import annotations

from reshard.collectives.search.legality import (
    is_covered,
    is_inside,
    is_permutation,
    smallest_group,
)
from reshard.collectives.search.states import Cut, Space, State, flatten_cut
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

Named = tuple[type[Step], tuple[int, ...], tuple[int, ...]]


def name_step(space: Space, before: State, after: State) -> Named | None:
    """The kind of step, its prime axes and dimensions; None where no collective is legal.

    >>> from reshard.collectives.search.prime_axes import PrimeMesh
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
