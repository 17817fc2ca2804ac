"""All shardings over the same axes at once: what they hold of the target, what they share with
another sharding, their largest shards. Counted together, for an exact search asks for all.

1. The atoms are dealt to the dimensions in every way, and ordered in every way.
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
from reshard.collectives.search.states import Boxes, Cut, State, flat_atoms
from reshard.runs import IntArray

# Rank boxes that are compared at a time, so that memory stays small.
AT_A_TIME = 1 << 18


class Catalogue:
    """The shardings of one frame over one set of atoms that fit into memory."""

    def __init__(self, problem: Problem, frame: int, used: frozenset[int]) -> None:
        space = problem.space
        self.problem = problem
        self.frame = frame
        self.used = used
        dims = range(len(space.shape))
        self.cuts: list[list[Cut]] = [[] for _ in dims]
        by_atoms: list[dict[frozenset[int], IntArray]] = [{} for _ in dims]
        for dim in dims:
            for size in range(len(used) + 1):
                for chosen in itertools.combinations(sorted(used), size):
                    begin = len(self.cuts[dim])
                    self.cuts[dim] += cuts_of(problem, dim, chosen)
                    by_atoms[dim][frozenset(chosen)] = np.arange(begin, len(self.cuts[dim]))
        rows = []
        for dealt in _deals(used, len(space.shape)):
            grid = np.meshgrid(
                *(by_atoms[d][atoms] for d, atoms in enumerate(dealt)), indexing="ij"
            )
            rows.append(np.array([column.reshape(-1) for column in grid], dtype=np.int64))
        self.ids: IntArray = np.concatenate(rows, axis=1)
        pairs = [
            [space.intervals(frame, space.shape[d], cut) for cut in self.cuts[d]] for d in dims
        ]
        # Per dimension, shape `(cuts, ranks)`.
        self.low = [np.array([low for low, _ in column]) for column in pairs]
        self.high = [np.array([high for _, high in column]) for column in pairs]
        # The rank at the first place along every axis has the largest part of each dimension.
        first = space.ranks.index(space.frames[frame].mesh.devices[0])
        largest = math.prod(
            (high - low)[:, first][ids]
            for low, high, ids in zip(self.low, self.high, self.ids, strict=True)
        )
        self.ids = self.ids[:, np.asarray(largest) <= problem.live_shard]
        self.total = self._counted(None)
        self.kept = self._counted(space.boxes(problem.target))

    def __len__(self) -> int:
        return int(self.ids.shape[1])

    def shared(self, state: State) -> IntArray:
        """Elements that ranks hold both here and under a state: shape `(shardings,)`."""
        return self._counted(self.problem.space.boxes(state))

    def _counted(self, boxes: Boxes | None) -> IntArray:
        ranks = len(self.problem.space.ranks)
        columns = []
        for d, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if boxes is not None:
                low = np.maximum(low, boxes.low[d])
                high = np.minimum(high, boxes.high[d])
            columns.append(np.maximum(high - low, 0))
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
            self.frame, tuple(c[i] for c, i in zip(self.cuts, chosen, strict=True)), pending
        )

    def alike(self, parts: tuple[int, ...]) -> IntArray:
        """The shardings that cut each dimension into so many parts."""
        chosen = np.ones(len(self), dtype=bool)
        for counts, ids, count in zip(self._parts, self.ids, parts, strict=True):
            chosen &= counts[ids] == count
        return np.flatnonzero(chosen)

    @cached_property
    def _parts(self) -> list[IntArray]:
        """For each dimension, into how many parts each of its cuts cuts it."""
        frame = self.problem.space.frames[self.frame]
        return [
            np.array([math.prod(map(frame.size, flat_atoms(cut))) for cut in cuts])
            for cuts in self.cuts
        ]


def cuts_of(problem: Problem, dim: int, atoms: tuple[int, ...]) -> list[Cut]:
    """The cuts of a dimension over exactly these atoms.

    Flat ones; and where the source or the target has levels, those, shortened, and any others
    in a level of their own below.
    """
    if not atoms:
        return [()]
    found: dict[Cut, None] = {(order,): None for order in itertools.permutations(atoms)}
    for nested in problem.nested_cuts[dim]:
        for count in range(1, len(flat_atoms(nested)) + 1):
            upper = _first(nested, count)
            rest = [atom for atom in atoms if atom not in set(flat_atoms(upper))]
            if not set(flat_atoms(upper)) <= set(atoms):
                continue
            lower = itertools.permutations(rest) if rest else [()]
            found |= {(*upper, order) if order else upper: None for order in lower}
    return list(found)


def _first(cut: Cut, count: int) -> Cut:
    found: list[tuple[int, ...]] = []
    for level in cut:
        if count > 0:
            found.append(level[:count])
        count -= len(level)
    return tuple(found)


def _deals(atoms: frozenset[int], dims: int) -> Iterator[tuple[frozenset[int], ...]]:
    """Every way to deal atoms to dimensions."""
    ordered = sorted(atoms)
    for where in itertools.product(range(dims), repeat=len(ordered)):
        yield tuple(
            frozenset(atom for atom, at in zip(ordered, where, strict=True) if at == dim)
            for dim in range(dims)
        )


def catalogue_size(atoms: int, dims: int) -> int:
    """How many flat shardings use exactly so many atoms.

    >>> catalogue_size(3, 2)
    24
    """
    if not dims:
        return int(not atoms)
    return math.factorial(atoms) * math.comb(atoms + dims - 1, dims - 1)
