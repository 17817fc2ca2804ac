"""One parameter of one rank, as an engine's loader fills it.

A `ParameterLayout` is a pattern and the names of its sources. As a `Binding` it is a layout whose
shards have the sources' names: the fused parameter of any engine, in the words that checkpoints
and plans use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard._validation import check_ints, check_type
from reshard.binding import Binding, TensorName, View
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts.patterns import (
    ComputedPattern,
    ParameterPattern,
    PieceColumns,
)
from reshard.recipes.engine_layouts.pieces import Computed, Constant, SourcePiece


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter of one rank: its name there, and what fills which box of it.

    Args:
        name: that the engine gives it.
        pattern: how it is filled, with numbers for sources.
        sources: their names, by those numbers.

    Raises:
        LayoutError: names that are not as many as the pattern has numbers, or one twice.

    >>> halves = [
    ...     SourcePiece(Box((0, 0), (4, 8)), "gate_proj.weight", View(32, (8, 1))),
    ...     SourcePiece(Box((4, 0), (8, 8)), "up_proj.weight", View(32, (8, 1))),
    ... ]
    >>> fused = ParameterLayout.of("gate_up_proj.weight", (8, 8), "bfloat16", halves)
    >>> fused.sources, fused.is_copied
    (('gate_proj.weight', 'up_proj.weight'), True)
    >>> print(fused)
    gate_up_proj.weight bfloat16 [8, 8]
      [0:4, 0:8] gate_proj.weight from 32, strides 8, 1
      [4:8, 0:8] up_proj.weight from 32, strides 8, 1
    """

    name: str
    pattern: ParameterPattern
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        check_type(self.name, str, "name of a parameter", "give a text", LayoutError)
        hint = "use ParameterLayout.of(name, shape, dtype, pieces)"
        check_type(self.pattern, ParameterPattern, "pattern", hint, LayoutError)
        object.__setattr__(self, "sources", tuple(self.sources))
        if len(self.sources) != self.pattern.sources:
            raise LayoutError(
                f"{self.name!r} has the names of {len(self.sources)} sources, and pieces of "
                f"{self.pattern.sources}"
            )

    @classmethod
    def of(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: object,
        pieces: Iterable[SourcePiece] = (),
        computed: Iterable[Computed] = (),
        constants: Iterable[Constant] = (),
        unfilled: Iterable[Box] = (),
    ) -> ParameterLayout:
        """A parameter by its regions, of which every element is in exactly one.

        Args:
            name: that the engine gives it.
            shape, dtype: of the parameter.
            pieces, computed, constants, unfilled: what fills which box, and what nothing does.

        Raises:
            LayoutError: regions that overlap, leave a part out or do not lie in the parameter.
        """
        shape = check_ints(shape, f"shape of {name!r}", LayoutError)
        pieces = list(pieces)
        # Sources are numbered by where their pieces begin: the order given makes no difference.
        order = sorted(range(len(pieces)), key=lambda i: pieces[i].box)
        numbers: dict[str, int] = {}
        steps: dict[tuple[str, ...], int] = {(): 0}
        rows = []
        for piece in (pieces[i] for i in order):
            _check_region(name, shape, piece.box, piece.view)
            source = numbers.setdefault(piece.source, len(numbers))
            step = steps.setdefault(tuple(piece.steps), len(steps))
            rows.append((*piece.box.start, *piece.box.stop, *piece.view.strides, source, step))
        dims = len(shape)
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 * dims + 2)
        columns = PieceColumns(
            table[:, :dims],
            table[:, dims : 2 * dims],
            table[:, -2],
            np.array([pieces[i].view.offset for i in order], dtype=np.int64),
            table[:, 2 * dims : 3 * dims],
            table[:, -1],
        )
        by_number = []
        for one in sorted(computed, key=lambda one: one.box):
            if one.view is not None:
                _check_region(name, shape, one.box, one.view)
                if len(one.sources) != 1:
                    raise LayoutError(
                        f"{name!r} has a region of {len(one.sources)} sources; a view is of one"
                    )
            of = tuple(numbers.setdefault(source, len(numbers)) for source in one.sources)
            by_number.append(ComputedPattern(one.box, tuple(one.operations), of, one.view))
        try:
            pattern = ParameterPattern(
                shape, as_dtype(dtype), columns, tuple(steps), by_number, [*constants], [*unfilled]
            )
        except LayoutError as error:
            raise LayoutError(f"parameter {name!r}: {error}") from None
        return cls(name, pattern, tuple(numbers))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on this rank."""
        return self.pattern.shape

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self.pattern.dtype

    @cached_property
    def pieces(self) -> tuple[SourcePiece, ...]:
        """What is copied, by where it begins."""
        columns, steps = self.pattern.columns, self.pattern.steps
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(
            SourcePiece(
                Box(tuple(start), tuple(stop)),
                self.sources[source],
                View(offset, tuple(strides)),
                steps[step],
            )
            for start, stop, source, offset, strides, step in rows
        )

    @property
    def computed(self) -> tuple[Computed, ...]:
        """What is computed, and never a copy."""
        return tuple(
            Computed(box, operations, tuple(self.sources[number] for number in sources), view)
            for box, operations, sources, view in self.pattern.computed
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        """What has one value."""
        return self.pattern.constants

    @property
    def unfilled(self) -> tuple[Box, ...]:
        """What the loader does not write."""
        return self.pattern.unfilled

    @property
    def is_copied(self) -> bool:
        """Whether every element is one of a source, with the bits that it has there."""
        pattern = self.pattern
        rest = (*pattern.computed, *pattern.constants, *pattern.unfilled)
        return not rest and not any(pattern.steps[n] for n in set(pattern.columns.steps.tolist()))

    @property
    def binding(self) -> Binding:
        """Its pieces as a layout of one rank, each cell with a source's name and a view of it.

        What is computed, constant or not filled is in no cell.
        """
        pieces = self.pieces
        layout = Layout.from_boxes(self.shape, [(0, piece.box) for piece in pieces], 1)
        if not pieces:
            return Binding(layout, {}, {})
        return Binding(
            layout,
            {0: tuple(TensorName(piece.source) for piece in pieces)},
            {0: tuple(piece.view for piece in pieces)},
        )

    def __str__(self) -> str:
        lines: list[tuple[Box, str]] = []
        for piece in self.pieces:
            strides = ", ".join(map(str, piece.view.strides))
            place = f"from {piece.view.offset}" + (f", strides {strides}" if strides else "")
            steps = "".join(f", {step}" for step in piece.steps)
            lines.append((piece.box, f"{piece.source} {place}{steps}"))
        for one in self.computed:
            of = ", ".join(one.sources)
            lines.append((one.box, f"computed by {', '.join(one.operations)} of {of}"))
        lines += [(one.box, f"filled with {one.value:g}") for one in self.constants]
        lines += [(box, "not filled") for box in self.unfilled]
        title = f"{self.name} {self.dtype.name} {list(self.shape)}"
        return "\n".join([title, *(f"  {box} {text}" for box, text in sorted(lines))])


def _check_region(name: str, shape: tuple[int, ...], box: Box, view: View) -> None:
    if not len(box.start) == len(box.stop) == len(view.strides) == len(shape):
        raise LayoutError(
            f"the box {box} of {name!r} with {len(view.strides)} strides, in a parameter of shape "
            f"{list(shape)}; give one of each for every dimension"
        )
