"""The constructive search: a good program without a search of states: slice, rearrange, gather.

::

    source  --slice-->  S  --rearrange-->  R  --gather-->  target
       8 rows over z       both use the same axes            the same, axes dropped

1. The axes of the rearrangement are those that the source or the target uses. The source is
   sliced along the axes that it lacks, and the axes that the target lacks are gathered at the end.
2. The dimensions of the sliced and of the gathered axes are chosen together: the more of `R` every
   rank holds already in `S`, the less moves. All placements are tried if they are few. Otherwise
   an axis goes to the dimension in which the other side has it.
3. Contributions are reduced before the rearrangement: scattered if a dimension can take the axes,
   else all-reduced.
4. If the meshes differ, ranks exchange whole shards once, to reach the target's axes.

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
    count_overlaps,
    flatten_cut,
)
from reshard.collectives.search.transitions import (
    Path,
    is_covered,
    is_inside,
    is_permutation,
    path_cost,
)

# The maximum number of placements of a side that are tried exhaustively.
MAX_PLACEMENTS = 150
# The maximum number of sets of additional axes of a side, and of prime axes placed separately.
MAX_SETS = 16
MAX_PRIMES = 4
# The maximum number of rank boxes that are compared.
MAX_COMPARED = 8_000_000
# The maximum number of paths into the other prime mesh that are completed.
MAX_CROSSINGS = 4


def constructive_search(problem: Problem) -> Path | None:
    """Return the states of a program of legal steps, the source first, or None if none is found."""
    if problem.is_reached(problem.source):
        return (problem.source,)
    paths = list(_find_by_one_rearrangement(problem))
    if problem.source.prime_mesh != problem.target.prime_mesh:
        paths += _find_crossings(problem)
    if not paths:
        return None
    return min(paths, key=lambda path: (path_cost(problem, path), len(path)))


def _find_by_one_rearrangement(problem: Problem) -> Iterator[Path]:
    """Yield the cheapest path with a single rearrangement: of the same axes, or of whole shards."""
    space, source, target = problem.space, problem.source, problem.target
    reduced = source.partial - target.partial
    if source.prime_mesh == target.prime_mesh:
        # The axes that are sliced before the rearrangement.
        lacking = target.used - source.used - source.partial
        if reduced:
            # Ranks with the same contribution share the work of combining it.
            lacking = (
                frozenset(space.prime_meshes[source.prime_mesh].primes)
                - source.used
                - source.partial
            )
        # The axes that are gathered after it.
        dropped = (source.used | lacking | reduced) - target.used
        ways_back = source
    else:
        # Axes of two prime meshes cannot be compared: any free axes may help to exchange shards.
        lacking = (
            frozenset(space.prime_meshes[source.prime_mesh].primes) - source.used - source.partial
        )
        dropped = frozenset(space.prime_meshes[target.prime_mesh].primes) - target.used
        ways_back = target
    # Every start is compared with every end: the limit keeps the boxes compared within bounds.
    boxes = len(space.ranks) * max(1, len(space.shape))
    limit = max(MAX_SETS, math.isqrt(MAX_COMPARED // boxes))
    sets = _list_axis_sets(problem, source, lacking)
    # 1. The states in which the rearrangement may begin, after slices and reductions.
    starts = [
        path
        for primes in sets
        for path in itertools.islice(
            _find_beginnings(problem, primes, sorted(reduced)), max(1, limit // len(sets))
        )
    ]
    sets = _list_axis_sets(problem, target, dropped)
    # 2. The states in which it may end, from which gathers alone reach the target.
    ends = [
        state
        for primes in sets
        for state in itertools.islice(
            placements(problem, target, primes, ways_back), max(1, limit // len(sets))
        )
        if problem.fits(state) and is_covered(space, state, target, frozenset(primes))
    ]
    if not starts or not ends:
        return
    # 3. The cheapest of all legal pairs; cost has shape `(starts, ends)`.
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
    """Return subsets of the prime axes, the largest first; of many axes, in units."""
    units: list[tuple[int, ...]] = [(prime,) for prime in sorted(primes)]
    if len(primes) > MAX_PRIMES:
        units = problem.space.prime_meshes[state.prime_mesh].units_of(sorted(primes))
    sets = (
        tuple(prime for unit in chosen for prime in unit)
        for size in range(len(units), -1, -1)
        for chosen in itertools.combinations(units, size)
    )
    return list(itertools.islice(sets, MAX_SETS))


def _find_allowed_pairs(
    problem: Problem, starts: Sequence[State], ends: Sequence[State]
) -> np.ndarray:
    """Return the mask of pairs that use the same axes, or have the same parts of all dimensions."""
    space = problem.space

    def numbers(states: Sequence[State]) -> tuple[np.ndarray, np.ndarray]:
        used = [(used_numbers.setdefault(state.used, len(used_numbers))) for state in states]
        parts = [kinds.setdefault(space.distinct_parts(state), len(kinds)) for state in states]
        return np.array(used), np.array(parts)

    used_numbers: dict[frozenset[int], int] = {}
    kinds: dict[tuple[bytes, ...], int] = {}
    (used, parts), (end_used, end_parts) = numbers(starts), numbers(ends)
    allowed: np.ndarray = (used[:, None] == end_used) | (parts[:, None] == end_parts)
    return allowed


def _drop_repeats(path: Sequence[State]) -> Path:
    return tuple(b for a, b in zip([None, *path], path, strict=False) if a != b)


def _count_shared(problem: Problem, starts: Sequence[State], ends: Sequence[State]) -> np.ndarray:
    boxes = [problem.space.boxes(end) for end in ends]
    # Shape `(dims, ends, ranks)`: all ends are compared with a start at once.
    low = np.array([box.low for box in boxes]).transpose(1, 0, 2)
    high = np.array([box.high for box in boxes]).transpose(1, 0, 2)
    rows = []
    for start in starts:
        box = problem.space.boxes(start)
        here = RankBoxes(box.low[:, None, :], box.high[:, None, :])
        rows.append(count_overlaps(here, RankBoxes(low, high)).sum(axis=-1))
    return np.array(rows)


def _find_beginnings(
    problem: Problem, lacking: Sequence[int], reduced: Sequence[int]
) -> Iterator[Path]:
    """Yield slices along `lacking` and reductions along `reduced`, in both orders."""
    space, source, target = problem.space, problem.source, problem.target
    for sliced in placements(problem, source, lacking, target):
        if not is_inside(space, sliced, source):
            continue
        if not reduced:
            yield _drop_repeats([source, sliced])
            continue
        done = sliced.partial - frozenset(reduced)
        yield _drop_repeats([source, sliced, sliced._replace(partial=done)])
        for scattered in placements(problem, sliced, reduced, target):
            if is_inside(space, scattered, sliced):
                yield _drop_repeats([source, sliced, scattered._replace(partial=done)])
    # The other order: reductions first, then slices.
    if reduced and lacking:
        done = source.partial - frozenset(reduced)
        for scattered in placements(problem, source, reduced, target):
            if not is_inside(space, scattered, source):
                continue
            whole = scattered._replace(partial=done)
            for sliced in placements(problem, whole, lacking, target):
                if is_inside(space, sliced, whole):
                    yield _drop_repeats([source, whole, sliced])


def placements(
    problem: Problem, state: State, primes: Sequence[int], other: State
) -> Iterator[State]:
    """Yield the state with `primes` added as minor axes of its dimensions, in several ways."""
    dims = len(state.cuts)
    if not primes:
        yield state
        return
    if not dims:
        return
    ordered = [prime for cut in other.cuts for prime in flatten_cut(cut) if prime in set(primes)]
    ordered += [prime for prime in primes if prime not in set(ordered)]
    home = {prime: d for d, cut in enumerate(other.cuts) for prime in flatten_cut(cut)}
    units: list[tuple[int, ...]] = [(prime,) for prime in ordered]
    if len(primes) > MAX_PRIMES:
        units = problem.space.prime_meshes[state.prime_mesh].units_of(ordered)
    count = math.factorial(len(units)) * math.comb(len(units) + dims - 1, dims - 1)
    ways: Iterator[tuple[tuple[tuple[int, ...], int], ...]]
    if count <= MAX_PLACEMENTS:
        # Each placement is represented by the order of (unit, dim) pairs with ascending dims.
        ways = (
            tuple(zip(chosen, where, strict=True))
            for chosen in itertools.permutations(units)
            for where in itertools.combinations_with_replacement(range(dims), len(units))
        )
    # Too many orders: a single order is tried, with every choice of dimensions.
    elif dims ** len(units) <= MAX_PLACEMENTS:
        ways = (
            tuple(zip(units, where, strict=True))
            for where in itertools.product(range(dims), repeat=len(units))
        )
    else:
        ways = (tuple((unit, home.get(unit[0], d)) for unit in units) for d in range(dims))
    # The placement in which each axis is where the other sharding has it is tried first.
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
    """Yield paths that exchange whole shards once, to reach the target's prime mesh."""
    space, source = problem.space, problem.source
    first = space.prime_meshes[0]
    spare = [prime for prime in first.primes if prime not in source.used | source.partial]
    reduced = sorted(source.partial)
    ways: list[tuple[int, Path]] = []
    for size in range(len(spare) + 1):
        for lacking in itertools.combinations(spare, size):
            for begun in itertools.islice(
                _find_beginnings(problem, lacking, reduced), MAX_PLACEMENTS
            ):
                for crossed in _find_same_shards(problem, begun[-1]):
                    path = (*begun, crossed)
                    cost = path_cost(problem, path) + problem.distance(crossed)
                    ways.append((cost, path))
        if len(ways) > MAX_PLACEMENTS:
            break
    # By the cost so far plus the lower bound, then by the number of steps.
    ways.sort(key=lambda way: (way[0], len(way[1])))
    for _, path in ways[:MAX_CROSSINGS]:
        rest = replace(problem, source=path[-1])
        if rest.is_reached(path[-1]):
            yield path
        for tail in _find_by_one_rearrangement(rest):
            yield (*path[:-1], *tail)


def _find_same_shards(problem: Problem, state: State) -> Iterator[State]:
    """Yield states over the target's prime mesh with the same shards on other ranks."""
    space = problem.space
    if state.partial:
        return
    prime_mesh = len(space.prime_meshes) - 1
    primes = space.prime_meshes[prime_mesh].primes
    count = 0
    parts = [space.parts(state, dim) for dim in range(len(state.cuts))]

    def fill(dim: int, cuts: tuple[Cut, ...], free: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        if dim == len(parts):
            yield cuts
            return
        for chosen in _choose_by_product(space.prime_meshes[prime_mesh], free, parts[dim]):
            left = tuple(prime for prime in free if prime not in chosen)
            # The axes as a single level, or in the levels of the source or the target.
            for cut in dict.fromkeys(((chosen,) if chosen else (), *problem.nested_cuts[dim])):
                if flatten_cut(cut) == chosen:
                    yield from fill(dim + 1, (*cuts, cut), left)

    for cuts in fill(0, (), primes):
        crossed = State(prime_mesh, cuts, state.partial)
        if is_permutation(space, state, crossed):
            yield crossed
            count += 1
            if count >= MAX_PLACEMENTS:
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
