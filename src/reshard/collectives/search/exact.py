"""The exact search for the cheapest program: A* over all shardings of the axes' prime factors.

1. A state is a sharding. An edge is a legal step; its cost is the number of elements that arrive.
2. The queue is ordered by the cost so far plus a lower bound on the elements that must still
   arrive. The bound is exact if a single exchange suffices, and never too high, so the first path
   that takes the target from the queue is the cheapest.
3. A single rearrangement of the same axes reaches every state that two reach, at no higher cost, so
   no rearrangement follows another. The states with the same axes are enumerated in a `StateTable`,
   which counts their elements together.
4. The constructive search gives an upper bound; paths that cannot cost less are pruned.
5. Without rearrangements (`steps="classical"`) the upper bound comes from a search over whole axes
   (`join_axes`), of which there are few.

The work is limited, and measured in comparisons of boxes, not in time, so every rank stops at the
same state. A search that stops early returns the best program that it has found, without a proof.

Source of the method: Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of
minimum cost paths" (1968).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
    drop_minor_axis,
    flatten_cut,
)
from reshard.collectives.search.transitions import (
    Path,
    is_covered,
    is_inside,
    is_permutation,
    path_cost,
    step_cost,
)
from reshard.runs import IntArray, concatenate

# Rank boxes that are compared at a time, to limit memory.
AT_A_TIME = 1 << 18


class StateTable:
    """The shardings over a set of prime axes of a prime mesh that fit into memory, with counts.

    1. The prime axes are assigned to the dimensions in every way, and ordered in every way.
    2. The part of each rank is computed once for each order in each dimension.
    3. The elements that two shardings share are a product over dimensions, summed over ranks.
    """

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
        # All assignments of axes to dimensions, and for each, all combinations of their cuts.
        for assigned in _assign_to_dims(used, len(space.shape)):
            grid = np.meshgrid(
                *(by_primes[d][primes] for d, primes in enumerate(assigned)), indexing="ij"
            )
            rows.append(np.array([column.reshape(-1) for column in grid], dtype=np.int64))
        # The index in `cuts` of each state in each dimension, shape `(dims, states)`.
        self.ids: IntArray = np.concatenate(rows, axis=1)
        pairs = [
            [space.intervals(prime_mesh, space.shape[d], cut) for cut in self.cuts[d]] for d in dims
        ]
        # For each dimension, shape `(cuts, ranks)`.
        self.low = [np.array([low for low, _ in column]) for column in pairs]
        self.high = [np.array([high for _, high in column]) for column in pairs]
        # The first rank along every axis has the largest part of each dimension.
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
        """Count the elements that each sharding shares with a state: shape `(shardings,)`."""
        return self._count_shared(self.problem.space.boxes(state))

    def _count_shared(self, boxes: RankBoxes | None) -> IntArray:
        ranks = len(self.problem.space.ranks)
        columns = []
        for d, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if boxes is not None:
                low = np.maximum(low, boxes.low[d])
                high = np.minimum(high, boxes.high[d])
            # The shared indices of each dimension, shape `(cuts, ranks)`.
            columns.append(np.maximum(high - low, 0))
        # The number of states at a time, limited so that products with all ranks stay small.
        width = max(1, AT_A_TIME // ranks)
        parts = []
        for begin in range(0, len(self), width):
            ids = self.ids[:, begin : begin + width]
            product = columns[0][ids[0]]
            for column, chosen in zip(columns[1:], ids[1:], strict=True):
                product = product * column[chosen]
            parts.append(product.sum(axis=1))
        return concatenate(parts)

    def state(self, number: int, partial: frozenset[int]) -> State:
        """Return a sharding of the table as a state."""
        chosen = self.ids[:, number].tolist()
        return State(
            self.prime_mesh, tuple(c[i] for c, i in zip(self.cuts, chosen, strict=True)), partial
        )

    def with_parts(self, parts: tuple[int, ...]) -> IntArray:
        """Return the shardings with the given number of parts of each dimension."""
        chosen = np.ones(len(self), dtype=bool)
        for counts, ids, count in zip(self._parts, self.ids, parts, strict=True):
            chosen &= counts[ids] == count
        return np.flatnonzero(chosen)

    @cached_property
    def _parts(self) -> list[IntArray]:
        """The number of parts of each cut, for each dimension."""
        prime_mesh = self.problem.space.prime_meshes[self.prime_mesh]
        return [
            np.array([math.prod(map(prime_mesh.size, flatten_cut(cut))) for cut in cuts])
            for cuts in self.cuts
        ]


def find_cuts(problem: Problem, dim: int, primes: tuple[int, ...]) -> list[Cut]:
    """Return the cuts of a dimension over exactly these prime axes.

    They are flat, or begin with levels of the source or the target, with all other axes in a level
    of their own below.
    """
    if not primes:
        return [()]
    cuts: dict[Cut, None] = {(order,): None for order in itertools.permutations(primes)}
    for nested in problem.nested_cuts[dim]:
        for count in range(1, len(flatten_cut(nested)) + 1):
            upper = _take_first(nested, count)
            rest = [prime for prime in primes if prime not in set(flatten_cut(upper))]
            if not set(flatten_cut(upper)) <= set(primes):
                continue
            lower = itertools.permutations(rest) if rest else [()]
            cuts |= {(*upper, order) if order else upper: None for order in lower}
    return list(cuts)


def _take_first(cut: Cut, count: int) -> Cut:
    levels: list[tuple[int, ...]] = []
    for level in cut:
        if count > 0:
            levels.append(level[:count])
        count -= len(level)
    return tuple(levels)


def _assign_to_dims(primes: frozenset[int], dims: int) -> Iterator[tuple[frozenset[int], ...]]:
    """Yield every assignment of prime axes to dimensions."""
    ordered = sorted(primes)
    for where in itertools.product(range(dims), repeat=len(ordered)):
        yield tuple(
            frozenset(prime for prime, at in zip(ordered, where, strict=True) if at == dim)
            for dim in range(dims)
        )


def count_states(primes: int, dims: int) -> int:
    """Count the flat shardings that use exactly `primes` prime axes.

    >>> count_states(3, 2)
    24
    """
    if not dims:
        return int(not primes)
    return math.factorial(primes) * math.comb(primes + dims - 1, dims - 1)


def join_axes(problem: Problem) -> tuple[Problem, Callable[[State], State]]:
    """Return a problem over whole axes instead of their prime parts, small for a large mesh.

    A mesh of 8x8x4 has three axes and eight prime parts. A search over shardings of the parts may
    exceed its budget, while there are few shardings of the axes, or of the parts of them that the
    source and the target use. The cheapest program over these is valid over the parts too, but not
    always the cheapest there::

        prime mesh x=8  ->  0: x:(1)2   1: x:(2)2   2: x:(4)2         y=4  ->  3, 4
        whole      x=8  ->  0: x                                      y=4  ->  1

    Returns:
        The problem, and a function that returns a state of it as a state over prime parts.

    >>> from reshard.collectives.search.states import make_problem
    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=8, y=4)
    >>> fine = make_problem(spec(mesh, "x, y"), spec(mesh, "y, x"), (64, 64), None, "classical")
    >>> whole, split = join_axes(fine)
    >>> fine.source.cuts, whole.source.cuts
    ((((0, 1, 2),), ((3, 4),)), (((0,),), ((1,),)))
    >>> split(whole.source) == fine.source
    True
    """
    prime_meshes: list[PrimeMesh] = []
    prime_of: dict[int, int] = {}
    units: dict[int, tuple[int, ...]] = {}
    for fine in problem.space.prime_meshes:
        # The axes of all meshes are numbered consecutively, as prime axes are.
        first = sum(len(prime_mesh.primes) for prime_mesh in prime_meshes)
        prime_meshes.append(PrimeMesh(fine.mesh, fine.boundaries, first, has_whole_axes=True))
        for prime, unit in zip(prime_meshes[-1].primes, fine.units, strict=True):
            prime_of |= dict.fromkeys(unit, prime)
            units[prime] = unit

    def join(state: State) -> State:
        cuts = tuple(
            # Levels consist of whole axes: each takes the position of its first part.
            tuple(tuple(dict.fromkeys(prime_of[prime] for prime in level)) for level in cut)
            for cut in state.cuts
        )
        return State(state.prime_mesh, cuts, frozenset(prime_of[prime] for prime in state.partial))

    def split(state: State) -> State:
        cuts = tuple(
            tuple(tuple(a for prime in level for a in units[prime]) for level in cut)
            for cut in state.cuts
        )
        partial = frozenset(a for prime in state.partial for a in units[prime])
        return State(state.prime_mesh, cuts, partial)

    space = Space(prime_meshes, problem.space.shape)
    ends = join(problem.source), join(problem.target)
    return Problem(space, *ends, problem.live_shard, problem.steps), split


# The number of rank boxes that may be compared before the search stops.
DEFAULT_BUDGET = 3_000_000
# The cost of visiting a state, besides its boxes.
VISIT_COST = 1_000
# Without joint steps: the budgets over whole axes, for an upper bound, and over their parts.
AXES_BUDGET = 20_000_000
CLASSICAL_BUDGET = 40_000_000


class _OverBudgetError(Exception):
    """The budget of work is exhausted."""


class _Search:
    """The edges of states, within a budget of work."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.work = 0
        self._state_tables: dict[tuple[int, frozenset[int]], StateTable] = {}

    def spend(self, boxes: int) -> None:
        self.work += boxes + VISIT_COST
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
        """Yield the states after a step, the cost of the step, and whether it is a rearrangement.

        `limit` is the maximum cost of the step and the lower bound after it.
        """
        problem, space = self.problem, self.problem.space
        prime_mesh = space.prime_meshes[state.prime_mesh]
        ranks = len(space.ranks)
        # The axes along which ranks hold replicas.
        free = [a for a in prime_mesh.primes if a not in state.used and a not in state.partial]
        # Slices only drop elements, so they cost nothing.
        for after in self._find_slices(state, free):
            yield after, 0, False
        for after in self._find_gathers(state):
            yield after, space.arriving(state, after), False
        # A reduce-scatter into any dimension, or an all-reduce.
        for prime in sorted(state.partial - problem.target.partial):
            left = state.partial - {prime}
            for after in self._extend_cuts(state, prime):
                self.spend(ranks)
                if is_inside(space, after, state):
                    scattered = after._replace(partial=left)
                    yield scattered, step_cost(problem, state, scattered), False
            combined = state._replace(partial=left)
            yield combined, step_cost(problem, state, combined), False
        # Two consecutive rearrangements are equal to a single rearrangement.
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
        # The elements that arrive are those held after the step, minus those held before.
        cost = state_table.total - state_table.shared(state)
        remaining = problem.target_total - state_table.shared_with_target
        if problem.contributions_left(state) > 1:
            remaining = np.full_like(remaining, problem.distance(state))
        within_limit = np.flatnonzero(cost + remaining <= limit)
        if among is not None:
            within_limit = np.intersect1d(within_limit, among)
        for number in within_limit.tolist():
            after = state_table.state(number, state.partial)
            if after.cuts != state.cuts or after.prime_mesh != state.prime_mesh:
                yield after, int(cost[number])

    def _find_permutes(self, state: State, limit: int) -> Iterator[tuple[State, int, bool]]:
        space = self.problem.space
        if not space.shape:
            return
        dims = range(len(space.shape))
        parts = tuple(space.parts(state, dim) for dim in dims)
        count = math.prod(parts)
        # Contributions are along axes of a single prime mesh, so a partial state stays on its mesh.
        prime_meshes = range(len(space.prime_meshes)) if not state.partial else [state.prime_mesh]
        for number in prime_meshes:
            prime_mesh = space.prime_meshes[number]
            primes = [prime for prime in prime_mesh.primes if prime not in state.partial]
            for size in range(len(primes) + 1):
                for chosen in itertools.combinations(primes, size):
                    used = frozenset(chosen)
                    same = number == state.prime_mesh and used == state.used
                    if math.prod(map(prime_mesh.size, chosen)) != count:
                        continue
                    # Another order of the same axes is a rearrangement, which is an edge already.
                    if same and self.problem.steps == JOINT:
                        continue
                    state_table = self.state_table(number, used)
                    same_parts = state_table.with_parts(parts)
                    for after, cost in self._choose_states(state_table, same_parts, state, limit):
                        if is_permutation(space, state, after):
                            yield after, cost, False

    def _extend_cuts(self, state: State, prime: int) -> Iterator[State]:
        for dim, cut in enumerate(state.cuts):
            for longer in self.problem.extensions(dim, cut, prime):
                yield _replace_cut(state, dim, longer)

    def _find_slices(self, state: State, free: Sequence[int]) -> Iterator[State]:
        """Yield slices of a dimension by another prime axis, or by several if it is uneven."""
        problem, space = self.problem, self.problem.space
        prime_mesh = space.prime_meshes[state.prime_mesh]
        free_size = math.prod(map(prime_mesh.size, free))
        for dim, length in enumerate(space.shape):
            # Even parts nest, so slicing by a single axis at a time reaches every cut. Uneven parts
            # do not: dividing twice by ceil gives other parts than dividing once.
            is_uneven = length % (space.parts(state, dim) * free_size) > 0
            stack = [(state.cuts[dim], prime) for prime in free]
            while stack:
                cut, prime = stack.pop()
                for longer in problem.extensions(dim, cut, prime):
                    after = _replace_cut(state, dim, longer)
                    self.spend(len(space.ranks))
                    if is_inside(space, after, state):
                        yield after
                    if is_uneven:
                        used = set(flatten_cut(longer))
                        stack += [(longer, other) for other in free if other not in used]

    def _find_gathers(self, state: State) -> Iterator[State]:
        """Yield gathers of a dimension along its minor prime axis, or several if it is uneven."""
        problem, space = self.problem, self.problem.space
        for dim, cut in enumerate(state.cuts):
            rest, dropped = cut, frozenset[int]()
            while rest:
                dropped |= {rest[-1][-1]}
                rest = drop_minor_axis(rest)
                after = _replace_cut(state, dim, rest)
                self.spend(len(space.ranks))
                if problem.fits(after) and is_covered(space, state, after, dropped):
                    yield after
                # Even parts nest: a gather of several axes is several gathers.
                if space.shape[dim] % space.parts(state, dim) == 0:
                    break

    def _find_all_to_alls(self, state: State) -> Iterator[tuple[State, int, bool]]:
        """Yield all-to-alls from a dimension to another."""
        problem, space = self.problem, self.problem.space
        for giver, cut in enumerate(state.cuts):
            rest = cut
            moved: tuple[int, ...] = ()
            while rest:
                moved = (rest[-1][-1], *moved)
                rest = drop_minor_axis(rest)
                for taker in range(len(state.cuts)):
                    if taker == giver:
                        continue
                    taken: list[Cut] = []
                    # The axes are minor in the dimension that gives them, but may be taken in any
                    # order.
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


def exact_outcome(
    problem: Problem, budget: int | None = DEFAULT_BUDGET
) -> tuple[Path | None, bool, int]:
    """Return the cheapest path, or the best known path when the budget is exhausted.

    A `budget` of None sets no limit. Return the states of the path, whether no cheaper path exists,
    and the work that was done.
    """
    # The path to fall back on is an upper bound.
    fallback = (
        constructive_search(problem) if problem.steps == JOINT else _search_whole_axes(problem)
    )
    upper_bound = math.inf if fallback is None else path_cost(problem, fallback)
    lower_bound = problem.distance(problem.source)
    if upper_bound == lower_bound:
        return fallback, True, 0
    search = _Search(problem, (1 << 62) if budget is None else budget)
    try:
        cheaper = _run_a_star(search, problem.source, lower_bound, upper_bound)
    except _OverBudgetError:
        return fallback, False, search.work
    return fallback if cheaper is None else cheaper, True, search.work


def _search_whole_axes(problem: Problem) -> Path | None:
    """Return the cheapest path that moves whole axes, or None if the budget is exhausted."""
    if all(
        len(unit) == 1 for prime_mesh in problem.space.prime_meshes for unit in prime_mesh.units
    ):
        # The axes are prime: the search over prime axes is the same.
        return None
    whole, split = join_axes(problem)
    lower_bound = whole.distance(whole.source)
    try:
        path = _run_a_star(_Search(whole, AXES_BUDGET), whole.source, lower_bound, math.inf)
    except _OverBudgetError:
        return None
    return None if path is None else tuple(map(split, path))


def _run_a_star(
    search: _Search, source: State, lower_bound: int, upper_bound: float
) -> Path | None:
    """Return the cheapest path that costs less than `upper_bound`, or None."""
    problem = search.problem
    # A node is a state and whether a rearrangement led to it, because none may follow another.
    cost_to = {(source, False): 0}
    previous: dict[tuple[State, bool], tuple[State, bool] | None] = {(source, False): None}
    # Ties are broken by the order of discovery, so that all ranks find the same path.
    order = itertools.count()
    queue = [(lower_bound, 0, next(order), source, False)]
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
                here = previous[here]
            return tuple(reversed(path))
        cost = cost_to[node]
        # Costs are integers: a better path costs at least 1 less.
        limit = (1 << 62) if upper_bound == math.inf else int(upper_bound) - 1 - cost
        for after, step, is_rearrangement in search.edges(state, limit, rearranged):
            total = cost + step
            after_node = (after, is_rearrangement)
            # A node without restrictions dominates the node of the same state with them.
            if total >= cost_to.get(after_node, math.inf) or total >= cost_to.get(
                (after, False), math.inf
            ):
                continue
            estimate = total + problem.distance(after)
            if estimate >= upper_bound:
                continue
            cost_to[after_node] = total
            previous[after_node] = node
            # Of equal estimates, the node with the larger cost so far is closer to the target.
            heapq.heappush(queue, (estimate, -total, next(order), after, is_rearrangement))
    return None


def exact_search(problem: Problem) -> Path | None:
    """Return the states of the cheapest program, without a budget, or None if there is none."""
    return exact_outcome(problem, None)[0]


def budgeted_search(problem: Problem) -> Path | None:
    """Search exactly within a budget, and return the constructive program beyond it."""
    budget = DEFAULT_BUDGET if problem.steps == JOINT else CLASSICAL_BUDGET
    return exact_outcome(problem, budget)[0]
