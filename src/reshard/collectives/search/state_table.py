"""A table of all shardings over the same prime axes.

It has what they hold of the target, what they share with another sharding, and their largest
shards, counted together, since an exact search asks for all.

1. The prime axes are assigned to the dimensions in every way, and ordered in every way.
2. The part that each rank has of a dimension is found once for each order, and looked up.
3. What two shardings share is a product over dimensions, summed over ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from reshard.collectives.search.problems import Problem
from reshard.collectives.search.states import Cut, RankBoxes, State, flatten_cut
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
