"""Local and global names: what a rank's tensor is called in the whole model.

A Megatron rank counts what it has from 0: the layers of each of its model chunks, and its experts.
The same local name is then another tensor on another rank. Global names count over the model::

    rank on stage 1 of 5 + 7 layers, expert rank 1 of 2, 4 experts

    decoder.layers.0.mlp.experts.linear_fc1.weight1
                   |                              |
    decoder.layers.5.mlp.experts.linear_fc1.weight3

Experts are named `linear_fc1.weight3` (grouped) or `local_experts.3.` (one module each). Two
global names may mean one tensor, where embeddings are tied: that is declared, see
`reshard.megatron.tensor_pairs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from reshard.errors import NotationError
from reshard.megatron.groups import Ranks
from reshard.megatron.layers import PipelineLayers
from reshard.megatron.ranks import places_along

# `experts.weight1` and `experts.weight2` are the stacked weights of all of a rank's experts.
_EXPERT = re.compile(
    r"((?:^|(?<!\bexperts)\.)(?:weight|bias)|(?:^|\.)local_experts\.)(\d+)(?=\.|$)"
)


@dataclass(frozen=True, slots=True)
class MegatronNames:
    """Local names to global ones and back, for the ranks of one model.

    Args:
        ranks: the parallel groups: `MegatronRanks`, or `MegatronGrids`.
        layers: how many layers each stage has; None where names count over the model already.
        num_experts: in the whole model; None for a model without experts.
        stack: the module whose numbered layers the pipeline shares out. Others, such as the
            layers of `mtp.layers`, keep their numbers.

    Raises:
        NotationError: layers for another number of stages, or experts that the ranks cannot
            share equally.

    >>> from reshard.megatron.ranks import MegatronRanks
    >>> names = MegatronNames(MegatronRanks(pp=2, dp=2, ep=2), PipelineLayers.windows([5, 7]), 4)
    >>> names.global_name("decoder.layers.0.mlp.experts.linear_fc1.weight1", rank=3)
    'decoder.layers.5.mlp.experts.linear_fc1.weight3'
    >>> names.expert_rank("decoder.layers.5.mlp.experts.linear_fc1.weight3")
    1
    """

    ranks: Ranks
    layers: PipelineLayers | None = None
    num_experts: int | None = None
    stack: str = "decoder.layers"

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers.pp != self.ranks.pp:
            raise NotationError(
                f"layers for {self.layers.pp} pipeline stages on ranks with pp={self.ranks.pp}; "
                "give the number of layers of each stage"
            )
        if self.num_experts is not None and (self.num_experts < 1 or self._uneven_experts):
            raise NotationError(
                f"{self.num_experts} experts over ep={self.ranks.ep} ranks; each rank has equally "
                "many, so ep must divide the number of experts"
            )

    @property
    def _uneven_experts(self) -> bool:
        return self.num_experts is not None and self.num_experts % self.ranks.ep != 0

    @property
    def experts_per_rank(self) -> int:
        """How many experts a rank has; 0 for a model without."""
        return (self.num_experts or 0) // self.ranks.ep

    def _place(self, axis: str, rank: int) -> int:
        # The grid of experts has `ep`, and the same stages along `pp` as the dense one.
        places = places_along(self.ranks.expert, axis)
        if rank not in places:
            raise NotationError(f"rank {rank} of the ranks {min(places)} to {max(places)}")
        return places[rank]

    def global_name(self, name: str, rank: int, chunk: int = 0) -> str:
        """The global name of `name`, which is of model chunk `chunk` on `rank`.

        Raises:
            NotationError: a rank, layer or expert that is not there.
        """

        def layer(number: int) -> int:
            if self.layers is None:
                return number
            held = self.layers.layers_of(self._place("pp", rank), chunk)
            return held[_check_within(number, len(held), f"layer of chunk {chunk}", name, rank)]

        def expert(number: int) -> int:
            _check_within(number, self.experts_per_rank, "expert", name, rank)
            return self._place("ep", rank) * self.experts_per_rank + number

        return self._renumber(name, layer, expert)

    def local_name(self, name: str) -> str:
        """The local name of the tensor of global `name`, on the ranks that have it.

        Raises NotationError for a layer or expert that is not there.

        >>> from reshard.megatron.ranks import MegatronRanks
        >>> names = MegatronNames(MegatronRanks(dp=4, ep=4), num_experts=8)
        >>> names.local_name("experts.local_experts.5.linear_fc1.bias")
        'experts.local_experts.1.linear_fc1.bias'
        """

        def layer(number: int) -> int:
            if self.layers is None:
                return number
            _check_within(number, self.layers.layers, "layer", name)
            return self.layers.place(number).number

        def expert(number: int) -> int:
            return (
                _check_within(number, self.num_experts or 0, "expert", name) % self.experts_per_rank
            )

        return self._renumber(name, layer, expert)

    def _renumber(
        self, name: str, layer: Callable[[int], int], expert: Callable[[int], int]
    ) -> str:
        found = self._layer(name)
        if found:
            begin, end = found.span(1)
            name = f"{name[:begin]}{layer(int(found[1]))}{name[end:]}"
        if self.num_experts is None:
            return name
        return _EXPERT.sub(lambda found: f"{found[1]}{expert(int(found[2]))}", name, count=1)

    def layer(self, name: str) -> int | None:
        """The layer of a global name, None for what is in none."""
        found = self._layer(name)
        return int(found[1]) if found else None

    def _layer(self, name: str) -> re.Match[str] | None:
        return re.search(rf"(?:^|\.){re.escape(self.stack)}\.(\d+)(?=\.|$)", name)

    def expert(self, name: str) -> int | None:
        """The expert of a global name, None for what belongs to none."""
        found = _EXPERT.search(name) if self.num_experts is not None else None
        return int(found[2]) if found else None

    def stage(self, name: str) -> int | None:
        """The pipeline stage that has the layer of a global name; None for what is in no layer."""
        layer = self.layer(name)
        if layer is None or self.layers is None:
            return None
        return self.layers.place(_check_within(layer, self.layers.layers, "layer", name)).stage

    def expert_rank(self, name: str) -> int | None:
        """The `ep` coordinate that has the expert of a global name; None for what is of none."""
        expert = self.expert(name)
        if expert is None:
            return None
        return _check_within(expert, self.num_experts or 0, "expert", name) // self.experts_per_rank


def _check_within(number: int, count: int, what: str, name: str, rank: int | None = None) -> int:
    if number >= count:
        where = "in the model" if rank is None else f"on rank {rank}"
        raise NotationError(
            f"{name!r} names {what} {number}, but there are {count} {where}, counted from 0"
        )
    return number
