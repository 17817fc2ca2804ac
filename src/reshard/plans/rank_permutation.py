"""Rank permutation: the assignment of ranks to target positions that keeps most bytes in place.

A target defines what each of its positions holds. Which rank is at which position is often free, so
ranks can be assigned to positions anew, for all tensors of a job together::

    target position     0   1   2   3
    held already   0  | 8   0   4   0 |     position 0 -> rank 2, position 1 -> rank 0, ...
                   1  | 0   4   0   8 |     the selected cells, one in each row and column,
    (bytes, by     2  | 8   8   0   0 |     have the largest sum of bytes that stay
     source rank)  3  | 0   0   4   4 |

1. A matrix, summed over tensors, has the bytes that rank `i` holds of position `j`'s elements
   (`LayoutChange.overlap_elements`).
2. The best assignment is a linear assignment (Kuhn 1955; solved by scipy, after Crouse 2016).
   Among assignments that keep the same bytes, that with the fewest moved ranks is taken.
3. With a topology, the positions of each host go to ranks of that host. If whole hosts may be
   exchanged, hosts are assigned first: by the bytes that must be sent into them, then by the bytes
   that the best assignment within them keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
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

# The largest integer that doubles, and so scipy, represent exactly.
_MAX_EXACT = 2**53


class RankPermutation(Record):
    """A permutation of the ranks of a target, and the bytes that it saves.

    `rank_of` maps old ranks to new ones; ranks missing from it keep their number. Of
    `needed_bytes`, `kept_bytes` stay in place with the permutation, `kept_bytes_before` without it.
    """

    rank_of: Mapping[int, int]
    kept_bytes: int
    kept_bytes_before: int
    needed_bytes: int

    def __post_init__(self) -> None:
        if set(self.rank_of) != set(self.rank_of.values()):
            raise PlanError(
                f"rank_of={dict(self.rank_of)} is not a permutation; each rank must occur once"
            )
        object.__setattr__(self, "rank_of", MappingProxyType(dict(self.rank_of)))

    @property
    def moved_bytes(self) -> int:
        """Bytes that move with the permutation."""
        return self.needed_bytes - self.kept_bytes

    @property
    def moved_bytes_before(self) -> int:
        """Bytes that move without it."""
        return self.needed_bytes - self.kept_bytes_before

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh of the target with its devices in the new order."""
        devices = [self.rank_of.get(rank, rank) for rank in mesh.devices]
        return mesh.replace(devices=devices)

    def spec(self, spec: ShardingSpec) -> ShardingSpec:
        """Return a sharding of the target on its mesh with the devices in the new order."""
        return spec.replace(mesh=self.mesh(spec.mesh))

    def layout(self, layout: Layout) -> Layout:
        """Return a layout of the target with its slots, which are ranks, renumbered."""
        renumbered = np.array([self.rank_of.get(slot, slot) for slot in range(layout.slots)])
        if not len(renumbered):
            return layout
        return layout.replace(
            slots=int(renumbered.max()) + 1, cell_slot=renumbered[layout.cell_slot]
        )

    def job(self, job: Job) -> Job:
        """Return the job with every target relabelled.

        Raises:
            PlanError: a target shard that is not in the memory of the rank with its number.
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
            f"<RankPermutation of {moves} ranks: {self.moved_bytes} bytes move instead of "
            f"{self.moved_bytes_before}>"
        )


def relabel(
    job: Job | Plan,
    *,
    ranks: Iterable[int] | None = None,
    topology: Topology | None = None,
    exchange_hosts: bool = False,
) -> RankPermutation:
    """Assign ranks to the target's positions so that most bytes of a job stay in place.

    Args:
        job: a job between ranks, or a plan with a dtype. All its targets are relabelled in the
            same way, whatever meshes they are on.
        ranks: the ranks that may be in the target, at least as many as it has; by default the
            target's own ranks. If they held nothing before, no bytes can be kept and no rank is
            relabelled: pass the old ranks for a target that may shrink onto any of them.
        topology: if given, a position is assigned to a rank of its host.
        exchange_hosts: whether the positions of a host may go to another host together, to
            minimize first the bytes sent between hosts, then the bytes that move.

    Raises:
        MissingExtraError: scipy is not installed.
        PlanError: fewer ranks than positions, on a host or in total; a plan without a dtype.
        UsageError: `exchange_hosts` without a topology.
        LayoutError: a rank outside the topology.

    A partial target of a partial source counts contributions as combined without the permutation.

    >>> import reshard
    >>> from reshard.dtypes import dtype
    >>> grids = reshard.DeviceMesh.of(p=2, q=4), reshard.DeviceMesh.of(p=4, q=2)
    >>> source, target = (reshard.spec(grid, "p@cyclic1, q@cyclic1") for grid in grids)
    >>> plan = reshard.plan(source.layout((8, 8)), target.layout((8, 8)), dtype="int8")
    >>> permutation = relabel(plan)
    >>> permutation.moved_bytes_before, permutation.moved_bytes
    (48, 32)
    >>> better = permutation.mesh(grids[1])
    >>> moved = reshard.spec(better, str(target)).layout((8, 8))
    >>> reshard.plan(source.layout((8, 8)), moved).moved_elements
    32
    """
    weights = _find_weights(job)
    positions = sorted({slot for plan in weights for slot in plan.target.holders})
    candidates = positions if ranks is None else sorted({int(rank) for rank in ranks})
    if candidates and candidates[0] < 0:
        raise PlanError(f"rank {candidates[0]} in ranks: expected integers of at least 0")
    held = _count_kept_bytes(weights, max([*positions, *candidates], default=-1) + 1)
    if topology is not None:
        assigned = _assign_within_hosts(
            weights, held, positions, candidates, topology, exchange_hosts
        )
    elif exchange_hosts:
        raise UsageError("exchange_hosts=True without a topology; give the hosts of the ranks")
    else:
        assigned = _assign_ranks(held, positions, candidates)
    needed = sum(weight * plan.needed_elements for plan, weight in weights.items())
    return RankPermutation(
        _complete(assigned, {*positions, *candidates}),
        sum(int(held[rank, position]) for position, rank in assigned.items()),
        sum(int(held[position, position]) for position in positions),
        needed,
    )


def _find_weights(job: Job | Plan) -> dict[LayoutChange, int]:
    """Return the bytes of an element of each layout change, summed over tensors."""
    if not isinstance(job, Job | Plan):
        raise PlanError(f"{job!r} is not a job; give a Job, or a plan with a dtype")
    if isinstance(job, Plan):
        return {job.change: job.expect_dtype("relabel").itemsize_bytes}
    weights: dict[LayoutChange, int] = {}
    for item in job.items:
        weights[item.change] = weights.get(item.change, 0) + item.dtype.itemsize_bytes
    return weights


def _count_kept_bytes(weights: Mapping[LayoutChange, int], ranks: int) -> IntArray:
    """Count the bytes that a rank holds of the elements of a position: shape `(ranks, ranks)`."""
    total = np.zeros((ranks, ranks), dtype=np.int64)
    for plan, weight in weights.items():
        overlap = plan.overlap_elements()
        # Ranks that no position may be assigned to are left out.
        rows, columns = min(ranks, overlap.shape[0]), min(ranks, overlap.shape[1])
        total[:rows, :columns] += weight * overlap[:rows, :columns]
    return total


def _assign_within_hosts(
    weights: Mapping[LayoutChange, int],
    kept_bytes: IntArray,
    positions: list[int],
    ranks: list[int],
    topology: Topology,
    exchange_hosts: bool,
) -> dict[int, int]:
    """Return the rank of each position, such that positions stay with those of their host."""
    groups, homes = _group_by_host(positions, topology), _group_by_host(ranks, topology)
    if not exchange_hosts:
        home_of = {host: host for host in groups}
    else:
        home_of = _choose_homes(weights, kept_bytes, groups, homes, topology)
    assigned: dict[int, int] = {}
    for host, home in home_of.items():
        assigned |= _assign_ranks(kept_bytes, groups[host], homes.get(home, []), f" on host {host}")
    return assigned


def _group_by_host(ranks: list[int], topology: Topology) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, host in zip(ranks, topology.host_of(ranks).tolist(), strict=True):
        groups.setdefault(host, []).append(rank)
    return dict(sorted(groups.items()))


def _choose_homes(
    weights: Mapping[LayoutChange, int],
    kept_bytes: IntArray,
    groups: dict[int, list[int]],
    homes: dict[int, list[int]],
    topology: Topology,
) -> dict[int, int]:
    """Return the host that the positions of each host are moved to."""
    if len(homes) < len(groups):
        raise PlanError(
            f"ranks on {len(homes)} hosts for positions on {len(groups)} hosts; give ranks on at "
            "least as many hosts"
        )
    crossing = sum(
        (weight * crossing_elements(plan, topology) for plan, weight in weights.items()),
        np.zeros((topology.hosts, topology.hosts), dtype=np.int64),
    )[np.ix_(list(groups), list(homes))]
    # `stays[i, j]`: bytes that stay if the positions of host `i` go to host `j`; -1 if host `j` has
    # too few ranks.
    stays = np.full(crossing.shape, -1, dtype=np.int64)
    for i, group in enumerate(groups.values()):
        for j, home in enumerate(homes.values()):
            if len(group) <= len(home):
                assigned = _assign_ranks(kept_bytes, group, home)
                stays[i, j] = sum(
                    int(kept_bytes[rank, position]) for position, rank in assigned.items()
                )
    fits = stays >= 0
    # Lexicographically: maximize the hosts that fit, minimize crossing bytes, maximize kept bytes.
    worth = _rank_worths(
        fits.astype(np.int64), _rank_worths(crossing.max(initial=0) - crossing, stays)
    )
    chosen = _solve_assignment(worth, np.array(list(groups))[:, None] == np.array(list(homes)))
    for i, j in chosen:
        if not fits[i, j]:
            raise PlanError(
                f"no host has {len(list(groups.values())[i])} ranks left for the positions on host "
                f"{list(groups)[i]}; give more ranks"
            )
    return {list(groups)[i]: list(homes)[j] for i, j in chosen}


def _rank_worths(first: IntArray, second: IntArray) -> IntArray:
    """Combine worths so that assignments compare by the sum of `first`, then of `second`."""
    # `first` is scaled beyond the sum of all of `second`. Common divisors are divided out, so that
    # the numbers stay exact for scipy.
    second = second - second.min(initial=0)
    first, second = (
        worth // max(int(np.gcd.reduce(worth, axis=None)), 1) for worth in (first, second)
    )
    room = int(second.max(initial=0)) * len(second) + 1
    _check_exact(int(first.max(initial=0)) * room + room, len(second))
    both: IntArray = first * room + second
    return both


def _check_exact(worth: int, positions: int) -> None:
    if worth * 4 * max(positions, 1) >= _MAX_EXACT:
        raise PlanError(
            f"assignments of {positions} positions worth up to {worth} units each cannot be "
            "compared exactly; relabel by some of the tensors"
        )


def _assign_ranks(
    kept_bytes: IntArray, positions: list[int], ranks: list[int], where: str = ""
) -> dict[int, int]:
    """Return the rank of each position such that most bytes are kept."""
    if len(ranks) < len(positions):
        raise PlanError(
            f"{len(ranks)} ranks {ranks[:8]} for {len(positions)} positions {positions[:8]} of the "
            f"target{where}; give at least as many ranks as positions"
        )
    same = np.array(positions)[:, None] == np.array(ranks)
    chosen = _solve_assignment(kept_bytes[np.ix_(ranks, positions)].T, same) if positions else []
    return {positions[i]: ranks[j] for i, j in chosen}


def _solve_assignment(worth: IntArray, same: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return a distinct column for each row, with maximum total worth, then most often `same`."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingExtraError(
            "relabel needs scipy, which is not installed; install it with: "
            "pip install 'reshard[planning]'"
        ) from error
    rows, columns = linear_sum_assignment(_rank_worths(worth, same.astype(np.int64)), maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _complete(rank_of: dict[int, int], ranks: set[int]) -> dict[int, int]:
    """Extend the assignment to a permutation; remaining ranks keep their number if it is free."""
    free = ranks - set(rank_of.values())
    left = ranks - set(rank_of)
    unchanged = free & left
    moved = zip(sorted(left - unchanged), sorted(free - unchanged), strict=True)
    return dict(sorted({**rank_of, **{rank: rank for rank in unchanged}, **dict(moved)}.items()))
