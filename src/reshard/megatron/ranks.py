"""Megatron's parallel groups: the place of each rank, from sizes and an order or from groups.

Megatron takes the numbers of ranks that share a tensor (`tp`), a sequence (`cp`), an expert
(`etp`), the experts (`ep`), the pipeline (`pp`) and the data (`dp`), and an order string. Its ranks
are a grid in which the first word of the order varies fastest::

    tp=2 dp=2 pp=2, order tp-cp-ep-dp-pp         order tp-pp-dp

             dp 0    dp 1                                pp 0    pp 1
      pp 0   0 1     2 3                          dp 0   0 1     2 3
      pp 1   4 5     6 7                          dp 1   4 5     6 7

The same ranks form two grids. Attention, embeddings and norms see (tp, cp, dp, pp); experts see
(etp, ep, edp, pp), where `edp` is the remaining factor. A rank is on the same stage in both.

A live rank has a process group along each axis instead of sizes (`MegatronGrids`). Its place is its
position in these groups, in any order of ranks::

    rank  tp     pp     place                           tp 0   tp 1
       4  4, 6   4, 5   tp 0, pp 0               pp 0      4      6
       5  5, 7   4, 5   tp 0, pp 1               pp 1      5      7
       6  4, 6   6, 7   tp 1, pp 0
       7  5, 7   6, 7   tp 1, pp 1

1. The members of a group must agree on it.
2. Ranks with equal places are copies: without a group of copies (`dp`, `edp`) they are ordered by
   their numbers.
3. Every place of a grid has exactly one rank.

Source: `RankGenerator` of Megatron-core's `parallel_state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

from reshard._records import Record
from reshard._validation import check_int
from reshard.errors import MeshError
from reshard.mesh import DeviceMesh

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
_WORDS = ("tp", "cp", "ep", "dp", "pp")


class MegatronRanks(Record):
    """The sizes of Megatron's groups and their order over consecutive ranks.

    Args:
        tp, cp, dp, pp: tensor, context, data and pipeline parallel sizes.
        ep: ranks that share the experts between them.
        etp: ranks that share an expert; `tp` if None.
        order: words from fastest to slowest; a word of size 1 may be left out.
        offset: the first rank.

    Raises:
        MeshError: sizes below 1 or that do not fit each other, an order that leaves out or
            repeats a word, or gives a rank two pipeline stages.

    >>> ranks = MegatronRanks(tp=2, dp=4, ep=4)
    >>> ranks.dense, ranks.expert
    (DeviceMesh(pp=1,dp=4,cp=1,tp=2), DeviceMesh(pp=1,edp=1,ep=4,etp=2))
    >>> ranks.groups("dp-cp")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    offset: int = 0

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for name in ("tp", "pp", "dp", "cp", "ep", "etp"):
            size = check_int(getattr(self, name), f"parallel size {name}", MeshError, minimum=1)
            object.__setattr__(self, name, size)
        object.__setattr__(self, "offset", check_int(self.offset, "first rank", MeshError))
        share = self.expert_tp * self.ep * self.pp
        if self.world_size % share:
            raise MeshError(
                f"{self.world_size} ranks (tp {self.tp} x cp {self.cp} x dp {self.dp} x pp "
                f"{self.pp}) cannot be shared out to experts by etp {self.expert_tp} x "
                f"ep {self.ep} x pp {self.pp} = {share}; it must divide the number of ranks"
            )
        # Unless pp is last, the axes before it may be larger in one grid than in the other.
        stages = [mesh.coordinates(["pp"]) for mesh in (self.dense, self.expert)]
        if (stages[0] != stages[1]).any():
            raise MeshError(
                f"by the order {self.order!r} a rank would be on one pipeline stage for its dense "
                f"tensors (dp {self.dp}) and on another for its experts (edp {self.edp}); put pp "
                "last in the order"
            )

    @classmethod
    def of_world(cls, world_size: int, **sizes: Any) -> MegatronRanks:
        """Return `world_size` ranks; the data parallel size is the remaining factor.

        Raises MeshError when the other sizes do not divide it.

        >>> MegatronRanks.of_world(16, tp=2, pp=4).dp
        2
        """
        share = math.prod(sizes.get(name, 1) for name in ("tp", "cp", "pp"))
        if world_size < 1 or share < 1 or world_size % share:
            raise MeshError(
                f"{world_size} ranks cannot be cut into tp x cp x pp = {share} and a rest; it must "
                "divide the number of ranks"
            )
        return cls(dp=world_size // share, **sizes)

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Ranks that hold copies of a part of an expert."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def dense(self) -> DeviceMesh:
        """The grid of everything but experts: axes tp, cp, dp and pp, slowest first."""
        sizes = {name: getattr(self, name) for name in DENSE_AXES}
        return rank_grid(sizes, self.order, self.offset)

    @property
    def expert(self) -> DeviceMesh:
        """The grid of the experts: axes etp, ep, edp and pp, slowest first."""
        sizes = {"etp": self.expert_tp, "ep": self.ep, "edp": self.edp, "pp": self.pp}
        return rank_grid(sizes, self.order, self.offset)

    def groups(self, words: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups that Megatron builds for words such as `tp`, `dp-cp` or `ep-etp`.

        Groups and their ranks are in Megatron's order. Words are of the same grid: tp, cp, dp, or
        etp, ep, edp, either with pp. Raises MeshError otherwise.

        >>> MegatronRanks(tp=2, dp=2, pp=2, order="tp-pp-dp").groups("pp")
        ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        chosen = words.split("-")
        for mesh in (self.dense, self.expert):
            if set(chosen) <= set(mesh.axis_names) and len(set(chosen)) == len(chosen):
                return mesh.groups([axis for axis in mesh.axis_names if axis in chosen])
        raise MeshError(
            f"groups of {words!r}; write words of one grid once each, {', '.join(DENSE_AXES)} or "
            f"{', '.join(EXPERT_AXES)}, joined by `-`"
        )


def rank_grid(sizes: Mapping[str, int], order: str, offset: int = 0) -> DeviceMesh:
    """Return ranks from `offset` on as a grid: the first word of the order varies fastest.

    Args:
        sizes: by axis of a grid: tp, cp, dp, pp, or etp, ep, edp, pp. The words tp and dp of
            the order name etp and edp, too. Words that are not axes of the grid are ignored,
            and an axis of size 1 may be left out.
        order: words from fastest to slowest.
        offset: the first rank.

    Raises:
        MeshError: an unknown or repeated word, an axis that is left out, a size below 1.

    >>> rank_grid({"tp": 2, "dp": 2}, "tp-dp", offset=4).groups(["dp"])
    ((4, 6), (5, 7))
    """
    words = order.lower().split("-")
    if len(set(words)) != len(words) or not set(words) <= set(_WORDS):
        raise MeshError(
            f"order {order!r}; write each of {', '.join(_WORDS)} at most once, fastest first, "
            f"joined by `-`, such as {DEFAULT_ORDER}"
        )
    axes = [axis for word in words for axis in (word, f"e{word}") if axis in sizes]
    for axis in sizes:
        if axis not in axes and sizes[axis] != 1:
            raise MeshError(f"order {order!r} leaves out {axis}, whose size is {sizes[axis]}")
    axes += [axis for axis in sizes if axis not in axes]
    # The order has the fastest axis first, a mesh the slowest.
    axes.reverse()
    return _build_grid(tuple(axes), tuple(sizes[axis] for axis in axes), offset)


@lru_cache(maxsize=256)
def _build_grid(axes: tuple[str, ...], shape: tuple[int, ...], offset: int) -> DeviceMesh:
    return DeviceMesh("mesh", shape, axes, range(offset, offset + math.prod(shape)))


@lru_cache(maxsize=256)
def places_along(mesh: DeviceMesh, axis: str) -> Mapping[int, int]:
    """Return the place of every rank along an axis, by rank.

    >>> dict(places_along(MegatronRanks(tp=2, offset=4).dense, "tp"))
    {4: 0, 5: 1}
    """
    places = mesh.coordinates([axis]).tolist()
    return MappingProxyType(dict(zip(mesh.devices, places, strict=True)))


Groups = Mapping[str, Sequence[int]]
GROUP_AXES = tuple(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES)))


class MegatronGrids(Record):
    """Both grids of Megatron's ranks, over any ranks in any order.

    `dense` has the axes pp, dp, cp and tp, `expert` the axes pp, edp, ep and etp. It can be used
    instead of `MegatronRanks`.

    >>> tp = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
    >>> grids = MegatronGrids.from_groups({rank: {"tp": of} for rank, of in tp.items()})
    >>> grids.dense.groups(["tp"]), grids.dp
    (((0, 2), (1, 3)), 2)
    """

    dense: DeviceMesh
    expert: DeviceMesh

    @classmethod
    def from_groups(cls, groups: Mapping[int, Groups]) -> MegatronGrids:
        """Return the grids of all ranks, from the groups that each is in.

        Args:
            groups: for every rank, the ranks of its group along each of tp, cp, dp, pp, ep, etp
                and edp, including itself. An axis without groups has size 1, except for
                etp, which is tp, and for dp and edp, which are the remaining factors.

        Raises:
            MeshError: another axis, a group without its rank, members that disagree about
                their group, groups that make no grid.
        """
        if not groups:
            raise MeshError("there are no process groups; give those of at least one rank")
        axes = {axis for by_axis in groups.values() for axis in by_axis}
        for problem in _find_misfits(groups, axes):
            raise MeshError(problem)
        dense, expert = dict.fromkeys(DENSE_AXES, ""), dict.fromkeys(EXPERT_AXES, "")
        for grid in (dense, expert):
            grid.update({axis: axis for axis in grid if axis in axes})
        # As in Megatron, experts are sharded as everything else unless they have own groups.
        expert["etp"] = expert["etp"] or dense["tp"]
        return cls(
            _make_grid_of_groups(groups, dense, "dp"), _make_grid_of_groups(groups, expert, "edp")
        )

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
        """Ranks that share an expert."""
        return self._find_size("etp")


def _find_misfits(groups: Mapping[int, Groups], axes: set[str]) -> Iterator[str]:
    """Yield the problems of the groups by themselves."""
    for axis in sorted(axes - set(GROUP_AXES)):
        yield f"a process group along {axis!r}; the axes are {', '.join(GROUP_AXES)}"
    for rank, by_axis in groups.items():
        for axis in sorted(axes - by_axis.keys()):
            yield f"rank {rank} has no process group along {axis}, which other ranks have"
    for rank, by_axis in groups.items():
        for axis in sorted(axes):
            if rank not in by_axis[axis]:
                yield (
                    f"rank {rank} has the ranks {list(by_axis[axis])} for its group along {axis}, "
                    "and is not among them; give each rank its own groups"
                )
            for other in by_axis.get(axis, ()):
                if other not in groups:
                    yield (
                        f"rank {rank} has rank {other} in its group along {axis}, which has no "
                        "part of the model; give the model on every rank of its groups"
                    )
                elif tuple(groups[other].get(axis, ())) != tuple(by_axis[axis]):
                    yield (
                        f"rank {rank} has the group {list(by_axis[axis])} along {axis}, but rank "
                        f"{other} of it has {list(groups[other].get(axis, ()))}"
                    )


def _make_grid_of_groups(
    groups: Mapping[int, Groups], named: Mapping[str, str], copies: str
) -> DeviceMesh:
    """Return a grid; `named` has the group that gives each axis its coordinates, or "" for none."""
    # The ranks at each place, 0 along every axis without a group; dicts for their order.
    places: dict[tuple[int, ...], dict[int, int]] = {}
    for rank in sorted(groups):
        by_axis = groups[rank]
        at = [list(by_axis[name]).index(rank) if name else 0 for name in named.values()]
        places.setdefault(tuple(at), {})[rank] = 0
    if not named[copies]:
        # Without a group of copies, ranks of equal position are copies, ordered by rank.
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
    """Return the first place that no rank has, or two."""
    for at, ranks in places.items():
        if len(ranks) > 1:
            return f"ranks {list(ranks)[:2]} have one place, {at}"
    return f"{math.prod(shape) - len(places)} places are no rank's"


Ranks: TypeAlias = MegatronRanks | MegatronGrids
