"""Megatron's parallel groups: the place of each rank, from sizes and an order.

Megatron is given how many ranks share a tensor (`tp`), a sequence (`cp`), an expert (`etp`), the
experts (`ep`), the pipeline (`pp`) and the data (`dp`), and an order string. Its ranks are a
grid in which the first word of the order varies fastest::

    tp=2 dp=2 pp=2, order tp-cp-ep-dp-pp         order tp-pp-dp

             dp 0    dp 1                                pp 0    pp 1
      pp 0   0 1     2 3                          dp 0   0 1     2 3
      pp 1   4 5     6 7                          dp 1   4 5     6 7

The same ranks form two grids. Attention, embeddings and norms see (tp, cp, dp, pp); experts see
(etp, ep, edp, pp), where `edp` is what is left over. A rank is on the same pipeline stage in both.

Source: `RankGenerator` of Megatron-core's `parallel_state`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from reshard._validation import check_int
from reshard.errors import MeshError
from reshard.mesh import DeviceMesh

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
_WORDS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class MegatronRanks:
    """The sizes of Megatron's groups and their order over consecutive ranks.

    Args:
        tp, cp, dp, pp: tensor, context, data and pipeline parallel sizes.
        ep: ranks that share the experts between them.
        etp: ranks that share one expert; `tp` when None.
        order: words from fastest to slowest; one of size 1 may be left out.
        offset: the first rank.

    Raises:
        MeshError: sizes below 1 or that do not fit each other, an order that leaves out or
            repeats a word, or one by which a rank would have two pipeline stages.

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
        # Where pp is not last, the axes before it may be larger in one grid than in the other.
        stages = [mesh.coordinates(["pp"]) for mesh in (self.dense, self.expert)]
        if (stages[0] != stages[1]).any():
            raise MeshError(
                f"by the order {self.order!r} a rank would be on one pipeline stage for its dense "
                f"tensors (dp {self.dp}) and on another for its experts (edp {self.edp}); put pp "
                "last in the order"
            )

    @classmethod
    def of_world(cls, world_size: int, **sizes: Any) -> MegatronRanks:
        """`world_size` ranks, the data parallel size being what is left over.

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
        """Ranks that share one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Ranks that hold copies of one expert's part."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
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
        """The groups that Megatron builds for words such as `tp`, `dp-cp` or `ep-etp`.

        Groups and their ranks are in Megatron's order. Words are of one grid: tp, cp, dp, or etp,
        ep, edp, either with pp. Raises MeshError otherwise.

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
    """Consecutive ranks from `offset` as a grid: the first word of the order varies fastest.

    Args:
        sizes: by axis, of one grid: tp, cp, dp, pp, or etp, ep, edp, pp. The words tp and dp of
            the order stand for etp and edp too; a word that names no axis of the grid is passed
            over, an axis of size 1 may be left out.
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
    """The place of every rank along an axis, by rank.

    >>> dict(places_along(MegatronRanks(tp=2, offset=4).dense, "tp"))
    {4: 0, 5: 1}
    """
    places = mesh.coordinates([axis]).tolist()
    return MappingProxyType(dict(zip(mesh.devices, places, strict=True)))
