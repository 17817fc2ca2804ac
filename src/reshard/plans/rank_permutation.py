"""Relabelling: the assignment of ranks to the target's places that keeps most bytes in place.

A target says what each of its places holds; which rank stands at which place is often free.
Then ranks can be assigned to places anew, once for all tensors of a job::

    target place        0   1   2   3
    holds already  0  | 8   0   4   0 |     place 0 -> rank 2, place 1 -> rank 0, ...
                   1  | 0   4   0   8 |     the cells taken, one a row and a column,
    (bytes, by     2  | 8   8   0   0 |     add up to the most that can stay
     source rank)  3  | 0   0   4   4 |

1. Added up over tensors, a matrix says how many bytes rank `i` holds of what place `j` needs
   (see `overlap_matrix`).
2. The best assignment is a linear one (Kuhn 1955; solved by scipy, after Crouse 2016).
   Among those that keep equally many bytes, most ranks keep the place they had.
3. With hosts to be respected, each host's places go to ranks of that host. Where
   whole hosts may be exchanged, an assignment of hosts comes first: by the bytes that must
   cross into them, then by the bytes that the best assignment within them keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reshard.binding import Binding, RankMemory
from reshard.errors import MissingExtraError, PlanError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.plans.broadcast_tree import crossing_elements
from reshard.plans.job import Job, JobItem
from reshard.plans.plan import Plan
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec
from reshard.topology import Topology

# Doubles are exact up to here, and so is what scipy does with whole numbers below it.
_LARGEST_EXACT = 2**53


@dataclass(frozen=True, slots=True)
class Relabelling:
    """The rank that each rank's place in the target is given to, and what that saves.

    `rank_of` says for each old rank the new one; ranks that are not in it keep their number.
    `kept_bytes` is what need not move, `kept_bytes_before` what need not move without it, both
    of `needed_bytes`.
    """

    rank_of: Mapping[int, int]
    kept_bytes: int
    kept_bytes_before: int
    needed_bytes: int

    def __post_init__(self) -> None:
        if set(self.rank_of) != set(self.rank_of.values()):
            raise PlanError(
                f"ranks {dict(self.rank_of)} are no relabelling; each rank must be given once"
            )
        object.__setattr__(self, "rank_of", MappingProxyType(dict(self.rank_of)))

    @property
    def moved_bytes(self) -> int:
        """Bytes that move when the target is relabelled."""
        return self.needed_bytes - self.kept_bytes

    @property
    def moved_bytes_before(self) -> int:
        """Bytes that move when it is not."""
        return self.needed_bytes - self.kept_bytes_before

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """A mesh of the target with its devices in the new order."""
        devices = [self.rank_of.get(rank, rank) for rank in mesh.devices]
        return DeviceMesh(mesh.name, mesh.shape, mesh.axis_names, devices)

    def spec(self, spec: ShardingSpec) -> ShardingSpec:
        """A sharding of the target on its mesh with the devices in the new order."""
        return ShardingSpec(
            self.mesh(spec.mesh),
            spec.dim_specs,
            spec.replicated_axes,
            spec.partial_axes,
            spec.reduction or "sum",
            spec.only,
        )

    def layout(self, layout: Layout) -> Layout:
        """A layout of the target with its slots, which are ranks, renumbered."""
        renumbered = np.array([self.rank_of.get(slot, slot) for slot in range(layout.slots)])
        if not len(renumbered):
            return layout
        return Layout(
            layout.shape,
            layout.tables,
            int(renumbered.max()) + 1,
            renumbered[layout.cell_slot],
            layout.cell_part,
            layout.cell_contribution,
            layout.contributions,
            layout.reduction,
        )

    def job(self, job: Job) -> Job:
        """The job with every target relabelled.

        Raises:
            PlanError: a target shard that is not in the memory of the rank of its number.
        """
        return Job([self._item(item) for item in job.items], job.sources)

    def _item(self, item: JobItem) -> JobItem:
        item.check_in_rank_memory("a permutation of ranks requires", target_only=True)
        binding = item.target
        layout = self.layout(binding.layout)
        rank_of = {slot: self.rank_of.get(slot, slot) for slot in binding.addresses}
        target = Binding(
            layout,
            {rank: RankMemory(rank) for rank in rank_of.values()},
            {rank_of[slot]: view for slot, view in binding.views.items()},
        )
        plan = LayoutChange(item.change.source, layout)
        return JobItem(item.name, item.dtype, plan, item.source, target)

    def __repr__(self) -> str:
        moves = sum(1 for old, new in self.rank_of.items() if old != new)
        return (
            f"<Relabelling of {moves} ranks: {self.moved_bytes} bytes move instead of "
            f"{self.moved_bytes_before}>"
        )


def relabel(
    job: Job | Plan,
    *,
    ranks: Iterable[int] | None = None,
    topology: Topology | None = None,
    exchange_hosts: bool = False,
) -> Relabelling:
    """The ranks to give the target's places to, so that most bytes of a whole job stay in place.

    Args:
        job: a job between ranks, or one plan that has a dtype. All its targets are relabelled
            alike, whatever meshes they are on.
        ranks: those that may be part of the target, at least as many as it has; the target's
            own ranks when None. Where those held nothing before, nothing can be kept, and
            nothing is relabelled; a target that may shrink onto any of the old ranks is given
            them here.
        topology: when given, a place goes to a rank of the host it is on.
        exchange_hosts: places that share a host of the topology may go to another together,
            first so that the fewest bytes must go across hosts, then so that most stay.

    Raises:
        MissingExtraError: scipy is not installed.
        PlanError: fewer ranks than places, on a host or in all; a plan without a dtype.
        UsageError: hosts to exchange without a topology.
        LayoutError: a rank that the topology has not.

    A partial target of a partial source counts contributions as combined without relabelling.

    >>> import reshard
    >>> from reshard.dtypes import dtype
    >>> grids = reshard.DeviceMesh.of(p=2, q=4), reshard.DeviceMesh.of(p=4, q=2)
    >>> source, target = (reshard.spec(grid, "p@cyclic1, q@cyclic1") for grid in grids)
    >>> plan = reshard.plan(source.layout((8, 8)), target.layout((8, 8)), dtype="int8")
    >>> found = relabel(plan)
    >>> found.moved_bytes_before, found.moved_bytes
    (48, 32)
    >>> better = found.mesh(grids[1])
    >>> moved = reshard.spec(better, str(target)).layout((8, 8))
    >>> reshard.plan(source.layout((8, 8)), moved).moved_elements
    32
    """
    weights = _find_weights(job)
    places = sorted({slot for plan in weights for slot in plan.target.holders})
    candidates = places if ranks is None else sorted({int(rank) for rank in ranks})
    if candidates and candidates[0] < 0:
        raise PlanError(f"rank {candidates[0]} cannot be part of a target; ranks are 0 or more")
    held = _count_kept_bytes(weights, max([*places, *candidates], default=-1) + 1)
    if topology is not None:
        given = _assign_within_hosts(weights, held, places, candidates, topology, exchange_hosts)
    elif exchange_hosts:
        raise UsageError("exchange_hosts without a topology; say which ranks share a host")
    else:
        given = _assign_ranks(held, places, candidates)
    needed = sum(weight * plan.needed_elements for plan, weight in weights.items())
    return Relabelling(
        _complete(given, {*places, *candidates}),
        sum(int(held[rank, place]) for place, rank in given.items()),
        sum(int(held[place, place]) for place in places),
        needed,
    )


def _find_weights(job: Job | Plan) -> dict[LayoutChange, int]:
    """The bytes that one element of each geometry stands for."""
    if not isinstance(job, Job | Plan):
        raise PlanError(f"{job!r} is no job; give a Job, or a plan with a dtype")
    weights: dict[LayoutChange, int] = {}
    if isinstance(job, Plan):
        if job.dtype is None:
            raise PlanError(
                "relabelling for a plan without a dtype; give one: reshard.plan(source, target, "
                "dtype='bfloat16')"
            )
        return {job.change: job.dtype.itemsize_bytes}
    for item in job.items:
        weights[item.change] = weights.get(item.change, 0) + item.dtype.itemsize_bytes
    return weights


def _count_kept_bytes(weights: Mapping[LayoutChange, int], ranks: int) -> IntArray:
    """Bytes that a rank holds of what a place needs: shape `(ranks, ranks)`."""
    total = np.zeros((ranks, ranks), dtype=np.int64)
    for plan, weight in weights.items():
        kept = plan.overlap_elements()
        # Ranks that no place may be given to are left out: they keep nothing.
        rows, columns = min(ranks, kept.shape[0]), min(ranks, kept.shape[1])
        total[:rows, :columns] += weight * kept[:rows, :columns]
    return total


def _assign_within_hosts(
    weights: Mapping[LayoutChange, int],
    kept: IntArray,
    places: list[int],
    ranks: list[int],
    topology: Topology,
    exchange_hosts: bool,
) -> dict[int, int]:
    """The rank for each place, where places that share a host go on sharing one."""
    groups, homes = _group_by_host(places, topology), _group_by_host(ranks, topology)
    if not exchange_hosts:
        home_of = {host: host for host in groups}
    else:
        home_of = _choose_homes(weights, kept, groups, homes, topology)
    given: dict[int, int] = {}
    for host, home in home_of.items():
        given |= _assign_ranks(kept, groups[host], homes.get(home, []), f" on host {host}")
    return given


def _group_by_host(ranks: list[int], topology: Topology) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, host in zip(ranks, topology.host_of(ranks).tolist(), strict=True):
        groups.setdefault(host, []).append(rank)
    return dict(sorted(groups.items()))


def _choose_homes(
    weights: Mapping[LayoutChange, int],
    kept: IntArray,
    groups: dict[int, list[int]],
    homes: dict[int, list[int]],
    topology: Topology,
) -> dict[int, int]:
    """The host that the places of each host go to."""
    if len(homes) < len(groups):
        raise PlanError(
            f"ranks on {len(homes)} hosts for places on {len(groups)} hosts; give ranks on at "
            "least as many hosts"
        )
    crossing = sum(
        (weight * crossing_elements(plan, topology) for plan, weight in weights.items()),
        np.zeros((topology.hosts, topology.hosts), dtype=np.int64),
    )[np.ix_(list(groups), list(homes))]
    # `stays[i, j]`: bytes that stay when the places of host `i` go to host `j`; -1 where that has
    # too few ranks.
    stays = np.full(crossing.shape, -1, dtype=np.int64)
    for i, group in enumerate(groups.values()):
        for j, home in enumerate(homes.values()):
            if len(group) <= len(home):
                given = _assign_ranks(kept, group, home)
                stays[i, j] = sum(int(kept[rank, place]) for place, rank in given.items())
    fits = stays >= 0
    # In this order: as many as possible must fit, the fewest bytes cross, the most stay.
    worth = _rank_worths(
        fits.astype(np.int64), _rank_worths(crossing.max(initial=0) - crossing, stays)
    )
    chosen = _solve_assignment(worth, np.array(list(groups))[:, None] == np.array(list(homes)))
    for i, j in chosen:
        if not fits[i, j]:
            raise PlanError(
                f"the {len(list(groups.values())[i])} places on host {list(groups)[i]} find no "
                "host with as many ranks left; give more ranks"
            )
    return {list(groups)[i]: list(homes)[j] for i, j in chosen}


def _rank_worths(first: IntArray, second: IntArray) -> IntArray:
    """Worths of assignments that compare by the sum of `first`, and then by that of `second`."""
    # One number for both: `first` in steps that all of `second` together cannot reach. Common
    # divisors go, so that the numbers stay exact for scipy.
    second = second - second.min(initial=0)
    first, second = (
        some // max(int(np.gcd.reduce(some, axis=None)), 1) for some in (first, second)
    )
    room = int(second.max(initial=0)) * len(second) + 1
    _check_exact(int(first.max(initial=0)) * room + room, len(second))
    both: IntArray = first * room + second
    return both


def _check_exact(worth: int, places: int) -> None:
    if worth * 4 * max(places, 1) >= _LARGEST_EXACT:
        raise PlanError(
            f"assignments of {places} places worth up to {worth} units each cannot be compared "
            "exactly; relabel by some of the tensors"
        )


def _assign_ranks(
    kept: IntArray, places: list[int], ranks: list[int], where: str = ""
) -> dict[int, int]:
    """The rank for each place that keeps the most bytes."""
    if len(ranks) < len(places):
        raise PlanError(
            f"{len(ranks)} ranks {ranks[:8]} for {len(places)} places {places[:8]} of the target"
            f"{where}; give at least as many ranks as places"
        )
    same = np.array(places)[:, None] == np.array(ranks)
    chosen = _solve_assignment(kept[np.ix_(ranks, places)].T, same) if places else []
    return {places[i]: ranks[j] for i, j in chosen}


def _solve_assignment(worth: IntArray, same: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """For each row a column of its own, worth most in all, and then most often the `same`."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingExtraError(
            "relabelling needs scipy, which is not installed; install it with: "
            "pip install 'reshard[planning]'"
        ) from error
    rows, columns = linear_sum_assignment(_rank_worths(worth, same.astype(np.int64)), maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _complete(rank_of: dict[int, int], ranks: set[int]) -> dict[int, int]:
    """The assignment with the ranks that it leaves out added: each keeps its number where that is
    free.
    """
    # Ranks whose places were not asked about take the numbers that are left, so that the result is
    # a permutation.
    free = ranks - set(rank_of.values())
    left = ranks - set(rank_of)
    kept = free & left
    moved = zip(sorted(left - kept), sorted(free - kept), strict=True)
    return dict(sorted({**rank_of, **{rank: rank for rank in kept}, **dict(moved)}.items()))
