"""The legality of a step: each group of ranks must hold the elements that it needs.

Names of axes are not sufficient. Ten rows over x=2, y=2 in one level are 3, 3, 3, 1; over x alone
they are 5, 5::

    x y     0 1 2 | 3 4 5 | 6 7 8 | 9          gathered along y, the upper half has 0 .. 5
    x       0 1 2 3 4     | 5 6 7 8 9          and the lower one 6 .. 9: row 5 is missing

so that gather, and the slice back, are not legal. The boxes of a group are every part that it has
of one dimension with every part of the next, so what it holds is found for each dimension by
itself: the parts are sorted, and what of them lies below an index is looked up.
"""

from __future__ import annotations

from reshard.collectives.search.states import Space, State, flatten_cut


def is_inside(space: Space, after: State, before: State) -> bool:
    """Whether every rank's box after lies in its own box before."""
    return space.arriving(before, after) == 0


def is_covered(space: Space, before: State, after: State, primes: frozenset[int]) -> bool:
    """Whether every rank's box after lies in what its group along `primes` held before.

    The group is that of the prime mesh of `before`.

    >>> from reshard.collectives.search.prime_axes import PrimeMesh
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
