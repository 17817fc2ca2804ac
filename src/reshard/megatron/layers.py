"""Layers of a pipeline: the stage and the model chunk that each layer is on.

A stage has one stretch of consecutive layers, or with virtual pipeline parallelism several: the
stages take a stretch each in turn, and then again, `vpp` times::

    12 layers, pp=2              stage 0: 0-5           stage 1: 6-11
    12 layers, pp=2, vpp=3       stage 0: 0-1 4-5 8-9   stage 1: 2-3 6-7 10-11
    12 layers, windows 5 + 7     stage 0: 0-4           stage 1: 5-11

Inside a stage, Megatron counts layers from 0 again in each of its stretches (model chunks).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from reshard.block_rules import Pieces
from reshard.cut_rules import CutRule, Sizes
from reshard.errors import RuleError


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer is: its pipeline stage, the model chunk there, and its number in it."""

    stage: int
    chunk: int
    number: int


@dataclass(frozen=True, slots=True)
class PipelineLayers:
    """How many layers every stage has, by model chunk: `counts[chunk][stage]`.

    Raises:
        RuleError: no chunk, chunks of unequally many stages, or a negative count.

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
        """Equally many layers on every stage and chunk. Raises RuleError if they do not divide."""
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
        """`first` and `last` layers on the end stages, the others even between them.

        Source: Megatron's `num_layers_in_first_pipeline_stage` and `..._last_...`. Raises
        RuleError where something does not divide.

        >>> PipelineLayers.uneven(14, pp=4, first=2).counts
        ((2, 4, 4, 4),)
        """
        # The stages without a number of their own share the rest evenly.
        ends = (first is not None) + (last is not None)
        rest, middle = layers - (first or 0) - (last or 0), pp - ends
        # Where no stage is between the ends, no layer may be left.
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
        """The number of layers of each stage, in order."""
        return cls((tuple(counts),))

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return sum(map(sum, self.counts))

    @property
    def pp(self) -> int:
        """How many stages there are."""
        return len(self.counts[0])

    @property
    def vpp(self) -> int:
        """How many model chunks a stage has."""
        return len(self.counts)

    def _find_starts(self) -> list[int]:
        """Where every stretch begins, chunk by chunk and stage by stage, and the end."""
        return [0, *itertools.accumulate(itertools.chain.from_iterable(self.counts))]

    def place(self, layer: int) -> LayerPlace:
        """Where a layer is, counted from 0. Raises RuleError for one that is not there."""
        if not 0 <= layer < self.layers:
            raise RuleError(f"layer {layer} of {self.layers}; layers are counted from 0")
        for index, (start, stop) in enumerate(itertools.pairwise(self._find_starts())):
            if start <= layer < stop:
                # Stretches go round the stages, once for each chunk.
                chunk, stage = divmod(index, self.pp)
                return LayerPlace(stage, chunk, layer - start)
        raise RuleError(f"layer {layer} is on no stage")

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """The layers of one model chunk of a stage. Raises RuleError for one not there."""
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
        """The rule that cuts a dimension of one index a layer over `pp`: a stacked KV cache.

        >>> PipelineLayers.even(4, pp=2, vpp=2).rule.text
        'pieces[1:1,1:1]'
        """
        return Sizes(self.counts[0]) if self.vpp == 1 else Pieces(self.counts)
