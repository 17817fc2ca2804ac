"""A table of all shardings over the same prime axes.

It has what they hold of the target, what they share with another sharding, and their largest
shards, counted together, since an exact search asks for all.

1. The prime axes are assigned to the dimensions in every way, and ordered in every way.
2. The part that each rank has of a dimension is found once for each order, and looked up.
3. What two shardings share is a product over dimensions, summed over ranks.

The problem of a search over whole axes, not their prime parts: small for a large mesh.

A mesh of 8x8x4 has three axes and eight prime parts; of the parts there are so many shardings
that a search may have to give up. Of the axes, or the parts of them that the source and the target
use, there are few. The cheapest program over these is one over the parts too, not always the
cheapest one::

    prime mesh x=8  ->  0: x:(1)2   1: x:(2)2   2: x:(4)2         y=4  ->  3, 4
    whole      x=8  ->  0: x                                      y=4  ->  1

The exact search for the cheapest program: A* over all shardings of the axes' prime factors.

1. A state is a sharding. An edge is a legal step; its cost is the number of elements that arrive.
2. The queue is ordered by the cost so far plus a lower bound on what must still arrive. The bound
   is exact where one exchange suffices, and never too high, so the first time the target is taken
   from the queue, its path is the cheapest.
3. One rearrangement of the same axes reaches every state that two reach, at no higher cost, so
   no rearrangement follows another.
4. The constructive search gives an upper bound: paths that cannot cost less are dropped.

The work is limited, and counted in comparisons of boxes, not in time, so every rank stops at the
same state. A search that stops early returns the best program that it has found, without a proof.

Source of the method: Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of
minimum cost paths" (1968).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.collectives.search.constructive import constructive_search
from reshard.collectives.search.states import (
    JOINT,
    Cut,
    PrimeMesh,
    Problem,
    RankBoxes,
    Space,
    State,
    flatten_cut,
    shorter,
)
from reshard.collectives.search.transitions import (
    Path,
    is_covered,
    is_inside,
    is_permutation,
    path_cost,
    step_cost,
)
from reshard.runs import IntArray

# Rank boxes that are compared at a time, so that memory stays small.
AT_A_TIME = 1 << 18


class StateTable:
    """The shardings of one prime mesh over one set of prime axes that fit into memory."""

    def __init__(self, problem: Problem, prime_mesh: int, used: frozenset[int]) -> None:
        space = problem.space
        self.problem = problem
        self.prime_mesh = prime_mesh
        self.used = used
        dims = range(len(space.shape))
        self.cuts: list[list[Cut]] = [[] for _ in dims]
        by_primes: list[dict[frozenset[int], IntArray]] = [{} for _ in dims]
        for dim in dims:
            for size in range(len(used) + 1):
                for chosen in itertools.combinations(sorted(used), size):
                    begin = len(self.cuts[dim])
                    self.cuts[dim] += find_cuts(problem, dim, chosen)
                    by_primes[dim][frozenset(chosen)] = np.arange(begin, len(self.cuts[dim]))
        rows = []
        # All ways to give the axes to dimensions, and for each, all combinations of their cuts.
        for assigned in _assign_to_dims(used, len(space.shape)):
            grid = np.meshgrid(
                *(by_primes[d][primes] for d, primes in enumerate(assigned)), indexing="ij"
            )
            rows.append(np.array([column.reshape(-1) for column in grid], dtype=np.int64))
        # Of shape `(dims, states)`: which of `cuts` each state has in each dimension.
        self.ids: IntArray = np.concatenate(rows, axis=1)
        pairs = [
            [space.intervals(prime_mesh, space.shape[d], cut) for cut in self.cuts[d]] for d in dims
        ]
        # Per dimension, shape `(cuts, ranks)`.
        self.low = [np.array([low for low, _ in column]) for column in pairs]
        self.high = [np.array([high for _, high in column]) for column in pairs]
        # The rank at the first place along every axis has the largest part of each dimension.
        first = space.ranks.index(space.prime_meshes[prime_mesh].mesh.devices[0])
        largest = math.prod(
            (high - low)[:, first][ids]
            for low, high, ids in zip(self.low, self.high, self.ids, strict=True)
        )
        self.ids = self.ids[:, np.asarray(largest) <= problem.live_shard]
        self.total = self._count_shared(None)
        self.shared_with_target = self._count_shared(space.boxes(problem.target))

    def __len__(self) -> int:
        return int(self.ids.shape[1])

    def shared(self, state: State) -> IntArray:
        """Elements that ranks hold both here and under a state: shape `(shardings,)`."""
        return self._count_shared(self.problem.space.boxes(state))

    def _count_shared(self, boxes: RankBoxes | None) -> IntArray:
        ranks = len(self.problem.space.ranks)
        columns = []
        for d, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if boxes is not None:
                low = np.maximum(low, boxes.low[d])
                high = np.minimum(high, boxes.high[d])
            # Of each dimension, shape `(cuts, ranks)`: how many indices are shared.
            columns.append(np.maximum(high - low, 0))
        # So many states at a time that their products with all ranks stay in little memory.
        width = max(1, AT_A_TIME // ranks)
        parts = []
        for begin in range(0, len(self), width):
            ids = self.ids[:, begin : begin + width]
            product = columns[0][ids[0]]
            for column, chosen in zip(columns[1:], ids[1:], strict=True):
                product = product * column[chosen]
            parts.append(product.sum(axis=1))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def state(self, number: int, pending: frozenset[int]) -> State:
        """One of the shardings."""
        chosen = self.ids[:, number].tolist()
        return State(
            self.prime_mesh, tuple(c[i] for c, i in zip(self.cuts, chosen, strict=True)), pending
        )

    def with_parts(self, parts: tuple[int, ...]) -> IntArray:
        """The shardings that cut each dimension into so many parts."""
        chosen = np.ones(len(self), dtype=bool)
        for counts, ids, count in zip(self._parts, self.ids, parts, strict=True):
            chosen &= counts[ids] == count
        return np.flatnonzero(chosen)

    @cached_property
    def _parts(self) -> list[IntArray]:
        """For each dimension, into how many parts each of its cuts cuts it."""
        prime_mesh = self.problem.space.prime_meshes[self.prime_mesh]
        return [
            np.array([math.prod(map(prime_mesh.size, flatten_cut(cut))) for cut in cuts])
            for cuts in self.cuts
        ]


def find_cuts(problem: Problem, dim: int, primes: tuple[int, ...]) -> list[Cut]:
    """The cuts of a dimension over exactly these prime axes.

    Flat ones; and where the source or the target has levels, those, shortened, and any others
    in a level of their own below.
    """
    if not primes:
        return [()]
    found: dict[Cut, None] = {(order,): None for order in itertools.permutations(primes)}
    for nested in problem.nested_cuts[dim]:
        for count in range(1, len(flatten_cut(nested)) + 1):
            # The cut begins as one in levels does; axes behind that are a level of their own.
            upper = _take_first(nested, count)
            rest = [prime for prime in primes if prime not in set(flatten_cut(upper))]
            if not set(flatten_cut(upper)) <= set(primes):
                continue
            lower = itertools.permutations(rest) if rest else [()]
            found |= {(*upper, order) if order else upper: None for order in lower}
    return list(found)


def _take_first(cut: Cut, count: int) -> Cut:
    found: list[tuple[int, ...]] = []
    for level in cut:
        if count > 0:
            found.append(level[:count])
        count -= len(level)
    return tuple(found)


def _assign_to_dims(primes: frozenset[int], dims: int) -> Iterator[tuple[frozenset[int], ...]]:
    """Every way to deal prime axes to dimensions."""
    ordered = sorted(primes)
    for where in itertools.product(range(dims), repeat=len(ordered)):
        yield tuple(
            frozenset(prime for prime, at in zip(ordered, where, strict=True) if at == dim)
            for dim in range(dims)
        )


def count_states(primes: int, dims: int) -> int:
    """How many flat shardings use exactly so many prime axes.

    >>> count_states(3, 2)
    24
    """
    if not dims:
        return int(not primes)
    return math.factorial(primes) * math.comb(primes + dims - 1, dims - 1)


Unit = tuple[int, ...]


class AxisProblem:
    """A problem over whole axes, and the way back to the parts.

    >>> from reshard.collectives.search.states import problem_of
    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=8, y=4)
    >>> fine = problem_of(spec(mesh, "x, y"), spec(mesh, "y, x"), (64, 64), None, "classical")
    >>> whole = AxisProblem(fine)
    >>> fine.source.cuts, whole.problem.source.cuts
    ((((0, 1, 2),), ((3, 4),)), (((0,),), ((1,),)))
    >>> whole.parts(whole.problem.source) == fine.source
    True
    """

    def __init__(self, problem: Problem) -> None:
        prime_meshes: list[PrimeMesh] = []
        self._prime: dict[int, int] = {}
        self._units: dict[int, Unit] = {}
        for fine in problem.space.prime_meshes:
            # Axes of all meshes are numbered one after another, as prime axes are.
            first = sum(len(prime_mesh.primes) for prime_mesh in prime_meshes)
            prime_meshes.append(PrimeMesh(fine.mesh, fine.boundaries, first, has_whole_axes=True))
            for prime, unit in zip(prime_meshes[-1].primes, fine.units, strict=True):
                self._prime |= dict.fromkeys(unit, prime)
                self._units[prime] = unit
        self.problem = Problem(
            Space(prime_meshes, problem.space.shape),
            self._join_primes(problem.source),
            self._join_primes(problem.target),
            problem.live_shard,
            problem.steps,
        )

    def _join_primes(self, state: State) -> State:
        cuts = tuple(
            # A level of a sharding is made of whole axes: each stands at its first part.
            tuple(tuple(dict.fromkeys(self._prime[prime] for prime in level)) for level in cut)
            for cut in state.cuts
        )
        return State(
            state.prime_mesh, cuts, frozenset(self._prime[prime] for prime in state.pending)
        )

    def parts(self, state: State) -> State:
        """A state over whole axes as one over their parts."""

        def cut_of(cut: Cut) -> Cut:
            return tuple(tuple(a for prime in level for a in self._units[prime]) for level in cut)

        pending = frozenset(a for prime in state.pending for a in self._units[prime])
        return State(state.prime_mesh, tuple(map(cut_of, state.cuts)), pending)


# How many boxes of ranks may be compared before the search gives up.
DEFAULT_BUDGET = 3_000_000
# What looking at a state costs beside its boxes.
LOOKED_AT = 1_000
# Without joint steps: over whole axes first, for a program to fall back on, then over their parts.
AXES_BUDGET = 20_000_000
CLASSICAL_BUDGET = 40_000_000


@dataclass(frozen=True)
class Outcome:
    """What a search found: the states, and whether nothing cheaper exists."""

    path: Path | None
    is_cheapest: bool
    work: int = 0


class _OverBudgetError(Exception):
    """The allowed work is done."""


class _Search:
    """The steps from a state, within a budget of work."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.work = 0
        self._state_tables: dict[tuple[int, frozenset[int]], StateTable] = {}

    def spend(self, boxes: int) -> None:
        self.work += boxes + LOOKED_AT
        if self.work > self.budget:
            raise _OverBudgetError

    def state_table(self, prime_mesh: int, used: frozenset[int]) -> StateTable:
        key = (prime_mesh, used)
        if key not in self._state_tables:
            space = self.problem.space
            size = count_states(len(used), len(space.shape))
            self.spend(3 * size * len(space.ranks))
            self._state_tables[key] = StateTable(self.problem, prime_mesh, used)
        return self._state_tables[key]

    def edges(
        self, state: State, limit: int, was_rearranged: bool
    ) -> Iterator[tuple[State, int, bool]]:
        """States one step on, what the step costs, and whether it was a rearrangement.

        `limit` is the most that the step and what must follow it may cost.
        """
        problem, space = self.problem, self.problem.space
        prime_mesh = space.prime_meshes[state.prime_mesh]
        ranks = len(space.ranks)
        # Axes along which ranks hold replicas.
        free = [a for a in prime_mesh.primes if a not in state.used and a not in state.pending]
        # Slices only drop elements, so they cost nothing.
        for after in self._find_slices(state, free):
            yield after, 0, False
        for after in self._find_gathers(state):
            yield after, space.arriving(state, after), False
        # A reduce-scatter into any dimension, or an all-reduce.
        for prime in sorted(state.pending - problem.target.pending):
            left = state.pending - {prime}
            for after in self._extend_cuts(state, prime):
                self.spend(ranks)
                if is_inside(space, after, state):
                    scattered = after._replace(pending=left)
                    yield scattered, step_cost(problem, state, scattered), False
            combined = state._replace(pending=left)
            yield combined, step_cost(problem, state, combined), False
        # Two rearrangements in a row are one, so that none follows another.
        if problem.steps == JOINT and not was_rearranged and space.shape:
            state_table = self.state_table(state.prime_mesh, state.used)
            for after, cost in self._choose_states(state_table, None, state, limit):
                yield after, cost, True
        if problem.steps != JOINT:
            yield from self._find_all_to_alls(state)
        yield from self._find_permutes(state, limit)

    def _choose_states(
        self, state_table: StateTable, among: np.ndarray | None, state: State, limit: int
    ) -> Iterator[tuple[State, int]]:
        problem = self.problem
        self.spend(len(state_table) * len(problem.space.ranks))
        # What arrives is what ranks hold afterwards, less what they held before.
        cost = state_table.total - state_table.shared(state)
        left = problem.distance(state)
        rest = problem.target_total - state_table.shared_with_target
        if problem.contributions_left(state) > 1:
            rest = np.full_like(rest, left)
        good = np.flatnonzero(cost + rest <= limit)
        if among is not None:
            good = np.intersect1d(good, among)
        for number in good.tolist():
            after = state_table.state(number, state.pending)
            if after.cuts != state.cuts or after.prime_mesh != state.prime_mesh:
                yield after, int(cost[number])

    def _find_permutes(self, state: State, limit: int) -> Iterator[tuple[State, int, bool]]:
        space = self.problem.space
        if not space.shape:
            return
        dims = range(len(space.shape))
        parts = tuple(space.parts(state, dim) for dim in dims)
        count = math.prod(parts)
        # Contributions lie along axes of one prime mesh, and keep a state there.
        prime_meshes = range(len(space.prime_meshes)) if not state.pending else [state.prime_mesh]
        for number in prime_meshes:
            prime_mesh = space.prime_meshes[number]
            primes = [prime for prime in prime_mesh.primes if prime not in state.pending]
            for size in range(len(primes) + 1):
                for chosen in itertools.combinations(primes, size):
                    used = frozenset(chosen)
                    same = number == state.prime_mesh and used == state.used
                    if math.prod(map(prime_mesh.size, chosen)) != count:
                        continue
                    # Another order of the same axes is a rearrangement, found already.
                    if same and self.problem.steps == JOINT:
                        continue
                    state_table = self.state_table(number, used)
                    alike = state_table.with_parts(parts)
                    for after, cost in self._choose_states(state_table, alike, state, limit):
                        if is_permutation(space, state, after):
                            yield after, cost, False

    def _extend_cuts(self, state: State, prime: int) -> Iterator[State]:
        for dim, cut in enumerate(state.cuts):
            for longer in self.problem.extensions(dim, cut, prime):
                yield _replace_cut(state, dim, longer)

    def _find_slices(self, state: State, free: Sequence[int]) -> Iterator[State]:
        """One dimension cut by one more prime axis, or by several at once where it is uneven.

        Where all free prime axes divide a dimension, many slices are one behind another.
        """
        problem, space = self.problem, self.problem.space
        prime_mesh = space.prime_meshes[state.prime_mesh]
        most = math.prod(map(prime_mesh.size, free))
        for dim, length in enumerate(space.shape):
            # Even parts nest, so one axis at a time reaches every cut. Uneven ones do not: cutting
            # twice by ceil gives other parts than cutting once.
            deep = length % (space.parts(state, dim) * most) > 0
            waiting = [(state.cuts[dim], prime) for prime in free]
            while waiting:
                cut, prime = waiting.pop()
                for longer in problem.extensions(dim, cut, prime):
                    after = _replace_cut(state, dim, longer)
                    self.spend(len(space.ranks))
                    if is_inside(space, after, state):
                        yield after
                    if deep:
                        held = set(flatten_cut(longer))
                        waiting += [(longer, other) for other in free if other not in held]

    def _find_gathers(self, state: State) -> Iterator[State]:
        """One dimension without its minor prime axis, or without several where it is uneven."""
        problem, space = self.problem, self.problem.space
        for dim, cut in enumerate(state.cuts):
            rest, dropped = cut, frozenset[int]()
            while rest:
                dropped |= {rest[-1][-1]}
                rest = shorter(rest)
                after = _replace_cut(state, dim, rest)
                self.spend(len(space.ranks))
                if problem.fits(after) and is_covered(space, state, after, dropped):
                    yield after
                # Even parts nest: a gather of several axes is found as several gathers.
                if space.shape[dim] % space.parts(state, dim) == 0:
                    break

    def _find_all_to_alls(self, state: State) -> Iterator[tuple[State, int, bool]]:
        """All-to-alls from one dimension to another."""
        problem, space = self.problem, self.problem.space
        for giver, cut in enumerate(state.cuts):
            rest = cut
            moved: tuple[int, ...] = ()
            while rest:
                moved = (rest[-1][-1], *moved)
                rest = shorter(rest)
                for taker in range(len(state.cuts)):
                    if taker == giver:
                        continue
                    taken: list[Cut] = []
                    for order in itertools.permutations(moved):
                        longer_cuts: list[Cut] = [state.cuts[taker]]
                        for prime in order:
                            longer_cuts = [
                                longer
                                for cut_so_far in longer_cuts
                                for longer in problem.extensions(taker, cut_so_far, prime)
                            ]
                        taken += longer_cuts
                    for longer in taken:
                        after = _replace_cut(_replace_cut(state, giver, rest), taker, longer)
                        self.spend(len(space.ranks))
                        if problem.fits(after) and is_covered(
                            space, state, after, frozenset(moved)
                        ):
                            yield after, space.arriving(state, after), False


def _replace_cut(state: State, dim: int, cut: Cut) -> State:
    return state._replace(cuts=(*state.cuts[:dim], cut, *state.cuts[dim + 1 :]))


def exact_outcome(problem: Problem, budget: int | None = DEFAULT_BUDGET) -> Outcome:
    """The cheapest path, or the best known when the work allowed is done; None for no limit."""
    # The program to fall back on, whose cost others must get below.
    known = constructive_search(problem) if problem.steps == JOINT else _search_whole_axes(problem)
    bar = math.inf if known is None else path_cost(problem, known)
    least = problem.distance(problem.source)
    # No path can be cheaper than the distance.
    if bar == least:
        return Outcome(known, True)
    search = _Search(problem, (1 << 62) if budget is None else budget)
    try:
        found = _run_a_star(search, problem.source, least, bar)
    except _OverBudgetError:
        return Outcome(known, False, search.work)
    return Outcome(known if found is None else found, True, search.work)


def _search_whole_axes(problem: Problem) -> Path | None:
    """The cheapest path that moves whole axes, or None where none is found in the work allowed."""
    if all(
        len(unit) == 1 for prime_mesh in problem.space.prime_meshes for unit in prime_mesh.units
    ):
        # The axes are prime: the same search follows anyway.
        return None
    whole = AxisProblem(problem)
    least = whole.problem.distance(whole.problem.source)
    try:
        found = _run_a_star(
            _Search(whole.problem, AXES_BUDGET), whole.problem.source, least, math.inf
        )
    except _OverBudgetError:
        return None
    return None if found is None else tuple(map(whole.parts, found))


def _run_a_star(search: _Search, source: State, least: int, bar: float) -> Path | None:
    """The cheapest path that costs less than `bar`, or None."""
    problem = search.problem
    # A node is a state and whether a rearrangement led to it, since none may follow that.
    paid = {(source, False): 0}
    came: dict[tuple[State, bool], tuple[State, bool] | None] = {(source, False): None}
    # Of equals, the one found first: states have no order, and all ranks must choose alike.
    order = itertools.count()
    queue = [(least, 0, next(order), source, False)]
    done: set[tuple[State, bool]] = set()
    while queue:
        state, rearranged = heapq.heappop(queue)[-2:]
        node = (state, rearranged)
        if node in done:
            continue
        done.add(node)
        if problem.is_reached(state):
            path: list[State] = []
            here: tuple[State, bool] | None = node
            while here is not None:
                path.append(here[0])
                here = came[here]
            return tuple(reversed(path))
        cost = paid[node]
        # Costs are whole numbers: to be better is to cost one less.
        limit = (1 << 62) if bar == math.inf else int(bar) - 1 - cost
        for after, step, is_rearrangement in search.edges(state, limit, rearranged):
            total = cost + step
            after_node = (after, is_rearrangement)
            # A node from which everything may follow is as good as one with restrictions.
            if total >= paid.get(after_node, math.inf) or total >= paid.get(
                (after, False), math.inf
            ):
                continue
            estimate = total + problem.distance(after)
            if estimate >= bar:
                continue
            paid[after_node] = total
            came[after_node] = node
            # Of equal estimates, the node that has paid most is nearest to the end.
            heapq.heappush(queue, (estimate, -total, next(order), after, is_rearrangement))
    return None


def exact_search(problem: Problem) -> Path | None:
    """The states of the cheapest program, whatever work it takes; None where there is none."""
    return exact_outcome(problem, None).path


def budgeted_search(problem: Problem) -> Path | None:
    """The exact search within its budget, and the constructive one beyond."""
    budget = DEFAULT_BUDGET if problem.steps == JOINT else CLASSICAL_BUDGET
    return exact_outcome(problem, budget).path
