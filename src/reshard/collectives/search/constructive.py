"""A good program at once: slice, rearrange once, gather.

::

    source  --slice-->  S  --rearrange-->  R  --gather-->  target
       8 rows over z       both use the same axes            the same, axes dropped

1. The axes of the rearrangement are those that the source or the target uses. The source is
   sliced along those it lacks, and what the target lacks is gathered in the end.
2. Where the sliced axes go, and where the gathered ones come from, is chosen together: the
   more of `R` every rank holds already in `S`, the less moves. All placements are tried while
   they are few; where they are many, an axis goes to the dimension where the other side has it.
3. Contributions are reduced before the rearrangement: scattered where a dimension can take
   them, else added up in place.
4. Where the meshes differ, ranks exchange whole shards once, to get to the target's axes.

Slices first, gathers last is the order of Rink et al., "Memory-efficient array redistribution
through portable collective communication" (2021), whose middle is several all-to-alls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from reshard.collectives.search.states import (
    Cut,
    PrimeMesh,
    Problem,
    RankBoxes,
    State,
    flatten_cut,
    overlaps,
)
from reshard.collectives.search.transitions import (
    Path,
    is_covered,
    is_inside,
    is_permutation,
    path_cost,
)

# Placements of one side that are tried; beyond, fewer are, by where the other side has the axes.
MOST_PLACEMENTS = 150
# Sets of axes that a side is cut further by, and parts of axes that are moved one by one.
MOST_SETS = 16
MOST_PRIMES = 4
# How many boxes of ranks are compared.
MOST_COMPARED = 8_000_000
# Ways into the other prime mesh that are followed to the end.
MOST_CROSSINGS = 4


def constructive_search(problem: Problem) -> Path | None:
    """The states of a program of legal steps, the source first, or None when it finds none."""
    if problem.is_reached(problem.source):
        return (problem.source,)
    found = list(_find_by_one_rearrangement(problem))
    if problem.source.prime_mesh != problem.target.prime_mesh:
        found += _find_crossings(problem)
    if not found:
        return None
    return min(found, key=lambda path: (path_cost(problem, path), len(path)))


def _find_by_one_rearrangement(problem: Problem) -> Iterator[Path]:
    """The cheapest path with one rearrangement: of the same axes, or of whole shards."""
    space, source, target = problem.space, problem.source, problem.target
    reduced = source.pending - target.pending
    if source.prime_mesh == target.prime_mesh:
        # To be sliced by, before the rearrangement.
        lacking = target.used - source.used - source.pending
        if reduced:
            # Ranks that hold the same contribution share the work of combining it.
            lacking = (
                frozenset(space.prime_meshes[source.prime_mesh].primes)
                - source.used
                - source.pending
            )
        # To be gathered along, behind it.
        dropped = (source.used | lacking | reduced) - target.used
        ways_back = source
    else:
        # Axes of two prime meshes cannot be compared: any free ones may help to exchange shards.
        lacking = (
            frozenset(space.prime_meshes[source.prime_mesh].primes) - source.used - source.pending
        )
        dropped = frozenset(space.prime_meshes[target.prime_mesh].primes) - target.used
        ways_back = target
    # Every start is compared with every end: the limit keeps the boxes compared within bounds.
    boxes = len(space.ranks) * max(1, len(space.shape))
    most = max(MOST_SETS, math.isqrt(MOST_COMPARED // boxes))
    sets = _list_axis_sets(problem, source, lacking)
    # 1. Where the rearrangement may begin: behind slices and reductions.
    starts = [
        path
        for primes in sets
        for path in itertools.islice(
            _find_beginnings(problem, primes, sorted(reduced)), max(1, most // len(sets))
        )
    ]
    sets = _list_axis_sets(problem, target, dropped)
    # 2. Where it may lead: shardings from which gathers alone reach the target.
    ends = [
        state
        for primes in sets
        for state in itertools.islice(
            placements(problem, target, primes, ways_back), max(1, most // len(sets))
        )
        if problem.fits(state) and is_covered(space, state, target, frozenset(primes))
    ]
    if not starts or not ends:
        return
    # 3. Of all legal pairs the cheapest; cost has the shape `(starts, ends)`.
    allowed = _find_allowed_pairs(problem, [path[-1] for path in starts], ends)
    if not allowed.any():
        return
    shared = _count_shared(problem, [path[-1] for path in starts], ends)
    cost = np.array([path_cost(problem, path) for path in starts])[:, None] - shared
    cost += np.array([space.total(end) + space.arriving(end, target) for end in ends])[None]
    cost[~allowed] = cost.max() + 1
    first, last = np.unravel_index(int(cost.argmin()), cost.shape)
    yield _drop_repeats([*starts[first], ends[last], target])


def _list_axis_sets(
    problem: Problem, state: State, primes: frozenset[int]
) -> list[tuple[int, ...]]:
    """All of the prime axes, then fewer of them; where they are many, in units."""
    units: list[tuple[int, ...]] = [(prime,) for prime in sorted(primes)]
    if len(primes) > MOST_PRIMES:
        units = problem.space.prime_meshes[state.prime_mesh].units_of(sorted(primes))
    sets = (
        tuple(prime for unit in chosen for prime in unit)
        for size in range(len(units), -1, -1)
        for chosen in itertools.combinations(units, size)
    )
    return list(itertools.islice(sets, MOST_SETS))


def _find_allowed_pairs(
    problem: Problem, starts: Sequence[State], ends: Sequence[State]
) -> np.ndarray:
    """Which pairs use the same axes, or have the same parts of every dimension."""
    space = problem.space

    def numbers(states: Sequence[State]) -> tuple[np.ndarray, np.ndarray]:
        used = [(known.setdefault(state.used, len(known))) for state in states]
        parts = [kinds.setdefault(space.distinct_parts(state), len(kinds)) for state in states]
        return np.array(used), np.array(parts)

    known: dict[frozenset[int], int] = {}
    kinds: dict[tuple[bytes, ...], int] = {}
    (used, parts), (end_used, end_parts) = numbers(starts), numbers(ends)
    allowed: np.ndarray = (used[:, None] == end_used) | (parts[:, None] == end_parts)
    return allowed


def _drop_repeats(path: Sequence[State]) -> Path:
    return tuple(b for a, b in zip([None, *path], path, strict=False) if a != b)


def _count_shared(problem: Problem, starts: Sequence[State], ends: Sequence[State]) -> np.ndarray:
    boxes = [problem.space.boxes(end) for end in ends]
    # Of shape `(dims, ends, ranks)`: all ends are compared with a start at once.
    low = np.array([box.low for box in boxes]).transpose(1, 0, 2)
    high = np.array([box.high for box in boxes]).transpose(1, 0, 2)
    rows = []
    for start in starts:
        box = problem.space.boxes(start)
        here = RankBoxes(box.low[:, None, :], box.high[:, None, :])
        rows.append(overlaps(here, RankBoxes(low, high)).sum(axis=-1))
    return np.array(rows)


def _find_beginnings(
    problem: Problem, lacking: Sequence[int], reduced: Sequence[int]
) -> Iterator[Path]:
    """Slices along `lacking` and reductions along `reduced`, in both orders."""
    space, source, target = problem.space, problem.source, problem.target
    for sliced in placements(problem, source, lacking, target):
        if not is_inside(space, sliced, source):
            continue
        if not reduced:
            yield _drop_repeats([source, sliced])
            continue
        done = sliced.pending - frozenset(reduced)
        yield _drop_repeats([source, sliced, sliced._replace(pending=done)])
        for scattered in placements(problem, sliced, reduced, target):
            if is_inside(space, scattered, sliced):
                yield _drop_repeats([source, sliced, scattered._replace(pending=done)])
    # The other order: reductions first, then slices.
    if reduced and lacking:
        done = source.pending - frozenset(reduced)
        for scattered in placements(problem, source, reduced, target):
            if not is_inside(space, scattered, source):
                continue
            whole = scattered._replace(pending=done)
            for sliced in placements(problem, whole, lacking, target):
                if is_inside(space, sliced, whole):
                    yield _drop_repeats([source, whole, sliced])


def placements(
    problem: Problem, state: State, primes: Sequence[int], other: State
) -> Iterator[State]:
    """The state with `primes` appended as minor ones to its dimensions, in the ways tried."""
    dims = len(state.cuts)
    if not primes:
        yield state
        return
    if not dims:
        return
    wanted = [prime for cut in other.cuts for prime in flatten_cut(cut) if prime in set(primes)]
    wanted += [prime for prime in primes if prime not in set(wanted)]
    home = {prime: d for d, cut in enumerate(other.cuts) for prime in flatten_cut(cut)}
    units: list[tuple[int, ...]] = [(prime,) for prime in wanted]
    if len(primes) > MOST_PRIMES:
        units = problem.space.prime_meshes[state.prime_mesh].units_of(wanted)
    count = math.factorial(len(units)) * math.comb(len(units) + dims - 1, dims - 1)
    ways: Iterator[tuple[tuple[tuple[int, ...], int], ...]]
    if count <= MOST_PLACEMENTS:
        # One order of (unit, dim) pairs stands for each placement: dims do not fall.
        ways = (
            tuple(zip(chosen, where, strict=True))
            for chosen in itertools.permutations(units)
            for where in itertools.combinations_with_replacement(range(dims), len(units))
        )
    # Too many orders: take one, with every choice of dimensions.
    elif dims ** len(units) <= MOST_PLACEMENTS:
        ways = (
            tuple(zip(units, where, strict=True))
            for where in itertools.product(range(dims), repeat=len(units))
        )
    else:
        ways = (tuple((unit, home.get(unit[0], d)) for unit in units) for d in range(dims))
    # Each axis where the other sharding has it is tried first.
    natural = tuple((unit, home.get(unit[0], 0)) for unit in units)
    for way in itertools.chain([natural], (way for way in ways if way != natural)):
        grown: list[list[Cut]] = [[cut] for cut in state.cuts]
        for prime, dim in ((prime, dim) for unit, dim in way for prime in unit):
            grown[dim] = [
                longer for cut in grown[dim] for longer in problem.extensions(dim, cut, prime)
            ]
        for cuts in itertools.product(*grown):
            yield state._replace(cuts=cuts)


def _find_crossings(problem: Problem) -> Iterator[Path]:
    """Paths that exchange whole shards once, to get to the target's prime mesh."""
    space, source = problem.space, problem.source
    first = space.prime_meshes[0]
    spare = [prime for prime in first.primes if prime not in source.used | source.pending]
    reduced = sorted(source.pending)
    ways: list[tuple[int, Path]] = []
    for size in range(len(spare) + 1):
        for lacking in itertools.combinations(spare, size):
            for begun in itertools.islice(
                _find_beginnings(problem, lacking, reduced), MOST_PLACEMENTS
            ):
                for crossed in _find_same_shards(problem, begun[-1]):
                    path = (*begun, crossed)
                    cost = path_cost(problem, path) + problem.distance(crossed)
                    ways.append((cost, path))
        if len(ways) > MOST_PLACEMENTS:
            break
    # By what is paid and must still be paid, then by the number of steps.
    ways.sort(key=lambda way: (way[0], len(way[1])))
    for _, path in ways[:MOST_CROSSINGS]:
        rest = replace(problem, source=path[-1])
        if rest.is_reached(path[-1]):
            yield path
        for tail in _find_by_one_rearrangement(rest):
            yield (*path[:-1], *tail)


def _find_same_shards(problem: Problem, state: State) -> Iterator[State]:
    """States over the target's prime mesh that hold the same shards, on other ranks."""
    space = problem.space
    if state.pending:
        return
    prime_mesh = len(space.prime_meshes) - 1
    primes = space.prime_meshes[prime_mesh].primes
    found = 0
    parts = [space.parts(state, dim) for dim in range(len(state.cuts))]

    def fill(dim: int, cuts: tuple[Cut, ...], free: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        if dim == len(parts):
            yield cuts
            return
        for chosen in _choose_by_product(space.prime_meshes[prime_mesh], free, parts[dim]):
            left = tuple(prime for prime in free if prime not in chosen)
            # The axes as one level, or in the levels that an end has.
            for cut in dict.fromkeys(((chosen,) if chosen else (), *problem.nested_cuts[dim])):
                if flatten_cut(cut) == chosen:
                    yield from fill(dim + 1, (*cuts, cut), left)

    for cuts in fill(0, (), primes):
        crossed = State(prime_mesh, cuts, state.pending)
        if is_permutation(space, state, crossed):
            yield crossed
            found += 1
            if found >= MOST_PLACEMENTS:
                return


def _choose_by_product(
    prime_mesh: PrimeMesh, free: Sequence[int], product: int
) -> Iterator[tuple[int, ...]]:
    if product == 1:
        yield ()
        return
    for prime in free:
        size = prime_mesh.size(prime)
        if product % size == 0:
            left = [other for other in free if other != prime]
            for rest in _choose_by_product(prime_mesh, left, product // size):
                yield (prime, *rest)
