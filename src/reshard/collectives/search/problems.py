"""The problem of a search: two states, a limit on intermediate shards, and a lower bound.

The minimum number of elements that must still arrive is known exactly for every state:

1. If nothing is left to reduce, it is what the target's boxes have and the state's have not.
2. If `q` contributions are left, no rank has the reduced value of any element. Each element needs
   `q - 1` arrivals until one rank has it, and one for each further rank of the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.collectives.search.prime_axes import find_prime_meshes
from reshard.collectives.search.states import Cut, Space, State
from reshard.cut_rules import Ceil
from reshard.errors import PlanError
from reshard.sharding import ShardingSpec

JOINT = "joint"
CLASSICAL = "classical"
# What a program may be made of.
STEPS = {
    JOINT: "every collective; an exchange only where no other program exists",
    CLASSICAL: "no joint all-to-all and no exchange",
    "all": "an exchange too, wherever it moves less",
    "mlir": "the basis of MLIR's notes, whatever the memory",
}
# Sums over ranks stay below this.
MOST_COUNTED = 1 << 62


@dataclass(frozen=True)
class Problem:
    """Two states of one tensor, and what a program between them may hold and do."""

    space: Space
    source: State
    target: State
    live_shard: int
    steps: str = JOINT

    @cached_property
    def target_total(self) -> int:
        """Elements that all ranks hold in the end."""
        return self.space.total(self.target)

    def contributions_left(self, state: State) -> int:
        """How many contributions are still to be combined into each one of the target."""
        prime_mesh = self.space.prime_meshes[state.prime_mesh]
        return math.prod(prime_mesh.size(prime) for prime in state.pending - self.target.pending)

    def distance(self, state: State) -> int:
        """The fewest elements that must still arrive, summed over ranks."""
        left = self.contributions_left(state)
        if left == 1:
            return self.target_total - self.space.shared(state, self.target)
        prime_mesh = self.space.prime_meshes[self.target.prime_mesh]
        # Combining `left` contributions of an element takes `left - 1` arrivals; one copy of the
        # result is where it was combined, and need not arrive.
        kept = math.prod(prime_mesh.size(prime) for prime in self.target.pending)
        return self.target_total + (left - 2) * math.prod(self.space.shape) * kept

    def is_reached(self, state: State) -> bool:
        """Whether every rank holds its target shard, and nothing else."""
        return (
            state.pending == self.target.pending
            and self.space.total(state) == self.target_total
            and self.space.shared(state, self.target) == self.target_total
        )

    def fits(self, state: State) -> bool:
        """Whether the largest shard of a state stays within memory."""
        return self.space.largest(state) <= self.live_shard

    @cached_property
    def nested_cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """For each dimension, the cuts of several levels that the source or the target has."""
        pairs = zip(self.source.cuts, self.target.cuts, strict=True)
        return tuple(tuple(cut for cut in pair if len(cut) > 1) for pair in pairs)

    def extensions(self, dim: int, cut: Cut, prime: int) -> tuple[Cut, ...]:
        """A cut with one more minor axis: in its last level, and where levels are, in its own."""
        found: list[Cut] = [(*cut[:-1], (*cut[-1], prime))] if cut else [((prime,),)]
        if cut and self.nested_cuts[dim]:
            found.append((*cut, (prime,)))
        return tuple(found)


def shorter(cut: Cut) -> Cut:
    """A cut without its minor prime axis."""
    last = cut[-1][:-1]
    return (*cut[:-1], last) if last else cut[:-1]


def problem_of(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: Sequence[int],
    live_shard: int | None = None,
    steps: str = JOINT,
) -> Problem | None:
    """The problem of two shardings, or None where only a direct exchange leads from one to another.

    That is so where they are not over the same devices, where a rule other than ceil cuts a
    dimension, where a sharding is on some coordinates only, and where the target is partial in
    a way that the source is not. So it is for counts that are no 64-bit numbers.

    Raises:
        PlanError: a limit that the source or the target itself is over.
    """
    layouts = [spec.layout(shape) for spec in (source, target)]
    needed = max(int(layout.cell_shape.prod(axis=1).max()) for layout in layouts)
    limit = needed if live_shard is None else live_shard
    if limit < needed:
        raise PlanError(
            f"a live shard of at most {limit} elements; the shards of source and target have up "
            f"to {needed} themselves, so allow at least that"
        )
    rules = [lv.rule for spec in (source, target) for dim in spec.dim_specs for lv in dim.levels]
    if (
        sorted(source.mesh.devices) != sorted(target.mesh.devices)
        or any(rule != Ceil() for rule in rules)
        or math.prod(shape) * source.mesh.size**2 >= MOST_COUNTED
        or source.only
        or target.only
        or (target.partial_axes and source.reduction != target.reduction)
    ):
        return None
    prime_meshes = find_prime_meshes(source, target)
    space = Space(prime_meshes, shape)
    first, last = space.state(0, source), space.state(len(prime_meshes) - 1, target)
    # What every rank holds in full is the same over the axes of either mesh.
    if not last.used and not last.pending:
        last = last._replace(prime_mesh=0)
    elif not first.used and not first.pending:
        first = first._replace(prime_mesh=last.prime_mesh)
    if not last.pending <= first.pending:
        return None
    return Problem(space, first, last, limit, steps)
