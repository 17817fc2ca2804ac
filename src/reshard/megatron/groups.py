"""Megatron's grids of ranks, from the process groups of each rank, where no sizes are known.

A running rank of Megatron has a process group along each axis. Its place is its position in that
group; what all ranks say together is both grids of `ranks`, whatever order they are in::

    rank  tp     pp     place                           tp 0   tp 1
       4  4, 6   4, 5   tp 0, pp 0               pp 0      4      6
       5  5, 7   4, 5   tp 0, pp 1               pp 1      5      7
       6  4, 6   6, 7   tp 1, pp 0
       7  5, 7   6, 7   tp 1, pp 1

1. the members of a group must agree on it;
2. ranks with equal places along all axes but one are copies: without a group of copies (`dp`,
   `edp`) they are counted in the order of their numbers;
3. every place of a grid is one rank's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from reshard.errors import MeshError
from reshard.megatron.ranks import DENSE_AXES, EXPERT_AXES, MegatronRanks
from reshard.mesh import DeviceMesh

Groups = Mapping[str, Sequence[int]]
GROUP_AXES = tuple(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES)))


@dataclass(frozen=True)
class MegatronGrids:
    """Both grids of Megatron's ranks, over any ranks in any order.

    `dense` has the axes pp, dp, cp and tp, `expert` the axes pp, edp, ep and etp. It stands where
    `MegatronRanks` does.

    >>> tp = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
    >>> grids = MegatronGrids.from_groups({rank: {"tp": of} for rank, of in tp.items()})
    >>> grids.dense.groups(["tp"]), grids.dp
    (((0, 2), (1, 3)), 2)
    """

    dense: DeviceMesh
    expert: DeviceMesh

    @classmethod
    def from_groups(cls, groups: Mapping[int, Groups]) -> MegatronGrids:
        """The grids of all ranks, from the groups that each is in.

        Args:
            groups: for every rank, the ranks of its group along each of tp, cp, dp, pp, ep, etp
                and edp, itself among them. An axis that none has a group of has size 1, but for
                etp, which is tp, and for dp and edp, which are what is left over.

        Raises:
            MeshError: another axis, a group without its rank, members that say other things of
                their group, groups that make no grid.
        """
        if not groups:
            raise MeshError("no rank says its process groups; give those of at least one")
        known = {axis for of in groups.values() for axis in of}
        for problem in _find_misfits(groups, known):
            raise MeshError(problem)
        dense, expert = dict.fromkeys(DENSE_AXES, ""), dict.fromkeys(EXPERT_AXES, "")
        for grid in (dense, expert):
            grid.update({axis: axis for axis in grid if axis in known})
        # As in Megatron, experts are cut like everything else unless they have groups of their own.
        expert["etp"] = expert["etp"] or dense["tp"]
        return cls(_build_grid(groups, dense, "dp"), _build_grid(groups, expert, "edp"))

    def _find_size(self, axis: str) -> int:
        for mesh in (self.dense, self.expert):
            if axis in mesh.axis_names:
                return mesh.shape[mesh.axis_names.index(axis)]
        return 1

    @property
    def tp(self) -> int:
        """Ranks that share a tensor."""
        return self._find_size("tp")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self._find_size("pp")

    @property
    def dp(self) -> int:
        """Ranks that hold copies of a tensor's part, and read different data."""
        return self._find_size("dp")

    @property
    def ep(self) -> int:
        """Ranks that share the experts between them."""
        return self._find_size("ep")

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self._find_size("etp")


def _find_misfits(groups: Mapping[int, Groups], known: set[str]) -> Iterator[str]:
    """The problems of the groups by themselves."""
    for axis in sorted(known - set(GROUP_AXES)):
        yield f"a process group along {axis!r}; the axes are {', '.join(GROUP_AXES)}"
    for rank, of in groups.items():
        for axis in sorted(known - of.keys()):
            yield f"rank {rank} has no process group along {axis}, which other ranks have"
    for rank, of in groups.items():
        for axis in sorted(known):
            if rank not in of[axis]:
                yield (
                    f"rank {rank} has the ranks {list(of[axis])} for its group along {axis}, and "
                    "is not among them; give each rank its own groups"
                )
            for other in of.get(axis, ()):
                if other not in groups:
                    yield (
                        f"rank {rank} has rank {other} in its group along {axis}, which has no "
                        "part of the model; give the model on every rank of its groups"
                    )
                elif tuple(groups[other].get(axis, ())) != tuple(of[axis]):
                    yield (
                        f"rank {rank} has the group {list(of[axis])} along {axis}, but rank "
                        f"{other} of it has {list(groups[other].get(axis, ()))}"
                    )


def _build_grid(groups: Mapping[int, Groups], named: Mapping[str, str], copies: str) -> DeviceMesh:
    """One grid: axes with the name of the group that says their places; empty for none."""
    # The ranks at each place, 0 along every axis that has no group; dicts for their order.
    places: dict[tuple[int, ...], dict[int, int]] = {}
    for rank in sorted(groups):
        of = groups[rank]
        at = [list(of[name]).index(rank) if name else 0 for name in named.values()]
        places.setdefault(tuple(at), {})[rank] = 0
    if not named[copies]:
        # Without a group of copies they are all at one place: the order of ranks tells them apart.
        spot = list(named).index(copies)
        places = {
            (*at[:spot], place, *at[spot + 1 :]): {rank: 0}
            for at, ranks in places.items()
            for place, rank in enumerate(ranks)
        }
    shape = [1 + max(at[i] for at in places) for i in range(len(named))]
    if len(places) != len(groups) or math.prod(shape) != len(groups):
        sizes = ", ".join(f"{axis} {size}" for axis, size in zip(named, shape, strict=True))
        raise MeshError(
            f"the process groups of {len(groups)} ranks make no grid of {sizes}: "
            + _describe_conflict(places, shape)
        )
    # As in MegatronRanks, the first axis of a grid varies fastest.
    devices = [next(iter(places[at])) for at in sorted(places, key=lambda at: tuple(reversed(at)))]
    return DeviceMesh("mesh", tuple(reversed(shape)), tuple(reversed(list(named))), devices)


def _describe_conflict(
    places: Mapping[tuple[int, ...], Mapping[int, int]], shape: Sequence[int]
) -> str:
    """The first place that no rank has, or two."""
    for at, ranks in places.items():
        if len(ranks) > 1:
            return f"ranks {list(ranks)[:2]} have one place, {at}"
    return f"{math.prod(shape) - len(places)} places are no rank's"


Ranks: TypeAlias = MegatronRanks | MegatronGrids
