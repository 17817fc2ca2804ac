"""Names of a rank's tensors in the whole model, and the layers of each pipeline stage.

A Megatron rank counts its layers and experts from 0, in each of its model chunks. The same local
name is then another tensor on another rank. Global names count over the model::

    rank on stage 1 of 5 + 7 layers, expert rank 1 of 2, 4 experts

    decoder.layers.0.mlp.experts.linear_fc1.weight1
                   |                              |
    decoder.layers.5.mlp.experts.linear_fc1.weight3

Experts are named `linear_fc1.weight3` (grouped) or `local_experts.3.` (a module each). If
embeddings are tied, two global names are the same tensor, which is declared by *ties*, a table from
names to other names (`resolve_tie`).

A stage has consecutive layers; with virtual pipeline parallelism, the stages take a stretch each in
turn, `vpp` times::

    12 layers, pp=2              stage 0: 0-5           stage 1: 6-11
    12 layers, pp=2, vpp=3       stage 0: 0-1 4-5 8-9   stage 1: 2-3 6-7 10-11
    12 layers, windows 5 + 7     stage 0: 0-4           stage 1: 5-11
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from reshard._records import Record
from reshard.cut_rules import CutRule, Pieces, Sizes
from reshard.errors import NotationError, ReshardError, RuleError, UsageError
from reshard.megatron.ranks import Ranks, places_along

# The parameters that the first and the last stage share if embeddings are tied.
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def find_source_name(
    name: str,
    available: Collection[str],
    ties: Mapping[str, str],
    error: type[ReshardError] = UsageError,
) -> str | None:
    """Return the name among `available` that fills a tensor, or None.

    Args:
        name: the name of a tensor to fill.
        available: the names of the source.
        ties: names that denote the same tensor as another name.
        error: raised for cyclic ties.

    >>> find_source_name("lm_head", {"embedding"}, {"lm_head": "embedding"})
    'embedding'
    """
    if name in available:
        return name
    root = resolve_tie(name, ties, error)
    tied = [other for other in ties if resolve_tie(other, ties, error) == root]
    return next((other for other in (root, *tied) if other in available), None)


def resolve_tie(name: str, ties: Mapping[str, str], error: type[ReshardError] = UsageError) -> str:
    """Return the last name in a chain of ties; raise `error` for a cycle."""
    if name not in ties:
        return name
    seen = [name]
    while seen[-1] in ties:
        seen.append(ties[seen[-1]])
        if seen[-1] in seen[:-1]:
            raise error(f"ties go round in a circle: {' -> '.join(seen)}")
    return seen[-1]


class LayerPlace(Record):
    """The position of a layer: its pipeline stage, model chunk, and number in the chunk."""

    stage: int
    chunk: int
    number: int


class PipelineLayers(Record):
    """The number of layers of every stage, by model chunk: `counts[chunk][stage]`.

    Raises:
        RuleError: no chunk, chunks with different numbers of stages, or a negative count.

    >>> PipelineLayers.windows([5, 7]).place(5)
    LayerPlace(stage=1, chunk=0, number=0)
    >>> PipelineLayers.even(12, pp=2, vpp=3).layers_of(1, chunk=1)
    range(6, 8)
    """

    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(chunk) for chunk in self.counts}
        if len(widths) != 1 or 0 in widths or any(n < 0 for chunk in self.counts for n in chunk):
            raise RuleError(
                f"layer counts {[list(chunk) for chunk in self.counts]}; give for every model "
                "chunk one count of 0 or more for each pipeline stage"
            )

    @classmethod
    def even(cls, layers: int, pp: int, vpp: int = 1) -> PipelineLayers:
        """Divide layers evenly among stages and chunks. Raises RuleError if they do not divide."""
        if pp < 1 or vpp < 1 or layers < 0 or layers % (pp * vpp):
            raise RuleError(
                f"{layers} layers cannot be cut evenly over pp {pp} x vpp {vpp}; say how many the "
                "first and last stage have (`uneven`), or how many each has (`windows`)"
            )
        return cls(((layers // (pp * vpp),) * pp,) * vpp)

    @classmethod
    def uneven(
        cls, layers: int, pp: int, first: int | None = None, last: int | None = None, vpp: int = 1
    ) -> PipelineLayers:
        """Assign `first` and `last` layers to the end stages, and divide the others evenly.

        Source: Megatron's `num_layers_in_first_pipeline_stage` and `..._last_...`. Raises
        RuleError if layers do not divide.

        >>> PipelineLayers.uneven(14, pp=4, first=2).counts
        ((2, 4, 4, 4),)
        """
        # The stages between the ends share the remaining layers evenly.
        ends = (first is not None) + (last is not None)
        rest, middle = layers - (first or 0) - (last or 0), pp - ends
        # Without stages between the ends, no layer may be left.
        fits = middle >= 0 and rest >= 0 and (rest % middle == 0 if middle else rest == 0)
        if not fits:
            raise RuleError(
                f"{layers} layers over {pp} stages with {first} on the first and {last} on the "
                f"last: {rest} layers are left for {middle} stages, and do not divide; give the "
                "number of each stage with `windows`"
            )
        between = [rest // middle] * middle if middle else []
        of_stage = [first] if first is not None else []
        of_stage += between
        of_stage += [last] if last is not None else []
        if vpp < 1 or any(count % vpp for count in of_stage):
            raise RuleError(
                f"stages of {of_stage} layers cannot be cut into {vpp} model chunks; each must "
                "divide"
            )
        return cls((tuple(count // vpp for count in of_stage),) * vpp)

    @classmethod
    def windows(cls, counts: Iterable[int]) -> PipelineLayers:
        """Return the number of layers of each stage, in order."""
        return cls((tuple(counts),))

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(map(sum, self.counts))

    @property
    def pp(self) -> int:
        """The number of stages."""
        return len(self.counts[0])

    @property
    def vpp(self) -> int:
        """The number of model chunks of a stage."""
        return len(self.counts)

    def _find_starts(self) -> list[int]:
        """Return the first layer of every stretch, by chunk and then by stage, and the end."""
        return [0, *itertools.accumulate(itertools.chain.from_iterable(self.counts))]

    def place(self, layer: int) -> LayerPlace:
        """Return the place of a layer, counted from 0. Raises RuleError if it does not exist."""
        if not 0 <= layer < self.layers:
            raise RuleError(f"layer {layer} of {self.layers}; layers are counted from 0")
        for index, (start, stop) in enumerate(itertools.pairwise(self._find_starts())):
            if start <= layer < stop:
                # Stretches go round the stages, once for each chunk.
                chunk, stage = divmod(index, self.pp)
                return LayerPlace(stage, chunk, layer - start)
        raise RuleError(f"layer {layer} is on no stage")

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """Return the layers of a model chunk of a stage. Raises RuleError if it does not exist."""
        if not (0 <= stage < self.pp and 0 <= chunk < self.vpp):
            raise RuleError(
                f"stage {stage}, chunk {chunk} of a pipeline of {self.pp} stages with {self.vpp} "
                "chunks each"
            )
        starts = self._find_starts()
        index = chunk * self.pp + stage
        return range(starts[index], starts[index + 1])

    @property
    def rule(self) -> CutRule:
        """The rule that shards a dimension of an index per layer over `pp`: a stacked KV cache.

        >>> PipelineLayers.even(4, pp=2, vpp=2).rule.text
        'pieces[1:1,1:1]'
        """
        return Sizes(self.counts[0]) if self.vpp == 1 else Pieces(self.counts)


# `experts.weight1` and `experts.weight2` are the stacked weights of all of a rank's experts.
_EXPERT = re.compile(
    r"((?:^|(?<!\bexperts)\.)(?:weight|bias)|(?:^|\.)local_experts\.)(\d+)(?=\.|$)"
)


class MegatronNames(Record):
    """The mapping between local and global names, for the ranks of a model.

    Args:
        ranks: the parallel groups: `MegatronRanks`, or `MegatronGrids`.
        layers: the number of layers of each stage, or None if names count over the model already.
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
        """The number of experts of a rank; 0 for a model without experts."""
        return (self.num_experts or 0) // self.ranks.ep

    def _place(self, axis: str, rank: int) -> int:
        # The grid of experts has `ep`, and the same stages along `pp` as the dense one.
        places = places_along(self.ranks.expert, axis)
        if rank not in places:
            raise NotationError(f"rank {rank} of the ranks {min(places)} to {max(places)}")
        return places[rank]

    def global_name(self, name: str, rank: int, chunk: int = 0) -> str:
        """Return the global name of `name`, which is of model chunk `chunk` on `rank`.

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
        """Return the local name of the tensor of global `name`, on the ranks that have it.

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
        match = self._layer(name)
        if match:
            begin, end = match.span(1)
            name = f"{name[:begin]}{layer(int(match[1]))}{name[end:]}"
        if self.num_experts is None:
            return name
        return _EXPERT.sub(lambda match: f"{match[1]}{expert(int(match[2]))}", name, count=1)

    def layer(self, name: str) -> int | None:
        """Return the layer of a global name, or None if it is in no layer."""
        match = self._layer(name)
        return int(match[1]) if match else None

    def _layer(self, name: str) -> re.Match[str] | None:
        return re.search(rf"(?:^|\.){re.escape(self.stack)}\.(\d+)(?=\.|$)", name)

    def expert(self, name: str) -> int | None:
        """Return the expert of a global name, or None if it belongs to no expert."""
        match = _EXPERT.search(name) if self.num_experts is not None else None
        return int(match[2]) if match else None

    def stage(self, name: str) -> int | None:
        """Return the pipeline stage that has the layer of a global name; None for what is
        in no layer.
        """
        layer = self.layer(name)
        if layer is None or self.layers is None:
            return None
        return self.layers.place(_check_within(layer, self.layers.layers, "layer", name)).stage

    def expert_rank(self, name: str) -> int | None:
        """Return the `ep` coordinate that has the expert of a global name; None for what is
        of none.
        """
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
