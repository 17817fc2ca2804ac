"""A parameter of a rank, as an engine's loader fills it.

A loader fills a parameter box by box: with elements of a source as they are (`SourcePiece`), with
computed values (`Computed`), or with a constant (`Constant`). The rest is not filled::

    parameter 4 x 3            source "up" 6 x 3, row major

    +---------+                rows 2:5 of it: offset 6, strides (3, 1)
    | up      |  SourcePiece
    |         |
    |         |
    +---------+
    | 0       |  Constant
    +---------+

A region of a source is a `View`: an element offset and a stride for each dimension of the box,
over the source's elements in row-major order. So a transposed region has its strides exchanged, an
interleaved region has them doubled, and a repeated region has a stride of 0.

The layers of a model, and the experts of a layer, are filled alike: their parameters share a
`ParameterPattern`, which numbers its sources, is checked once, and keeps its pieces in columns. A
`ParameterLayout` is a pattern with the names of its sources. Its `Binding` is a layout whose shards
have the sources' names, so checkpoints and plans can describe the fused parameter of any engine.

DTensors and Megatron's sharded state dicts describe a parameter as a part of a whole tensor
(`shard_parameter`); it has a piece for each box that its rank holds::

    layout "tp@blocks[4,4], -" of a tensor 8 x 3, rank 1 of 2        the parameter, 4 x 3

    0:2 | 2:4 || 4:6 | 6:8                                            [0:2] from row 2
          ^^^          ^^^                                            [2:4] from row 6
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from reshard._interning import Interned
from reshard._validation import check_ints, check_type
from reshard.binding import Binding, TensorName, View, dense_strides
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError
from reshard.geometry.boxes import are_disjoint
from reshard.layout import Box, Layout
from reshard.runs import PAD, IntArray


class SourcePiece(NamedTuple):
    """A box of a parameter that holds elements of a source.

    `steps` are the changes of element type on the way: none if it is empty,
    `"to float32"` for a cast, `"bits as float8_e4m3fn"` if the same bits are read as another type.

    >>> SourcePiece(Box((0, 0), (3, 3)), "up", View(6, (3, 1)))
    SourcePiece(box=Box(start=(0, 0), stop=(3, 3)), source='up',
    view=View(offset=6, strides=(3, 1)), steps=())
    """

    box: Box
    source: str
    view: View
    steps: tuple[str, ...] = ()


class Computed(NamedTuple):
    """A box of a parameter whose elements are computed from sources by some operations.

    `view` is the region of the only source if each element is computed from its counterpart, as by
    `exp` and `neg`; None if it is unknown which element of a source an element depends on. Sources
    are names; in a pattern, they are numbers.
    """

    box: Box
    operations: tuple[str, ...]
    sources: tuple[Any, ...]
    view: View | None = None


class Constant(NamedTuple):
    """A box of a parameter that the loader fills with a value, such as padding."""

    box: Box
    value: float


class PieceColumns(NamedTuple):
    """The pieces of a parameter: boxes and regions of sources, a row each.

    `start`, `stop` and `strides` have shape `(pieces, dims)`, `source`, `offset` and `steps` shape
    `(pieces,)`; the last are numbers into a list of steps.
    """

    start: IntArray
    stop: IntArray
    source: IntArray
    offset: IntArray
    strides: IntArray
    steps: IntArray

    @classmethod
    def empty(cls, dims: int) -> PieceColumns:
        """Return no pieces of a parameter of `dims` dimensions."""
        table, column = np.zeros((0, dims), np.int64), np.zeros(0, np.int64)
        return cls(table, table, column, column, table, column)

    def take(self, rows: IntArray) -> PieceColumns:
        """Return the chosen rows, in the order asked for."""
        return PieceColumns(*(column[rows] for column in self))


class ParameterPattern(Interned):
    """A description of how a parameter of `shape` is filled, interned; pieces are sorted.

    Args:
        shape, dtype: of the parameter.
        columns: its pieces.
        steps: the lists of steps that rows of `columns` have by number.
        computed, constants, unfilled: the rest of it.

    Raises:
        LayoutError: regions that overlap, leave a part of the parameter out or extend beyond it.
    """

    field_names = ("shape", "dtype", "columns", "steps", "computed", "constants", "unfilled")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DType,
        columns: PieceColumns,
        steps: Sequence[tuple[str, ...]] = ((),),
        computed: Sequence[Computed] = (),
        constants: Sequence[Constant] = (),
        unfilled: Sequence[Box] = (),
    ) -> None:
        self.shape = check_ints(shape, "shape", LayoutError)
        self.dtype = dtype
        dims = len(self.shape)
        arrays = [np.asarray(column, dtype=np.int64) for column in columns]
        # NumPy cannot infer the number of rows without elements.
        tables = [arrays[i].reshape(-1, dims) if dims else arrays[i] for i in (0, 1, 4)]
        rows = len(arrays[2])
        if any(len(column) != rows for column in (*tables, *arrays)):
            raise LayoutError(f"columns of pieces of lengths {[len(column) for column in arrays]}")
        # The last key is the first to sort by: boxes in row-major order of their first elements.
        order = np.lexsort(tables[0].T[::-1]) if dims and rows else np.arange(rows)
        self.columns = PieceColumns(
            tables[0], tables[1], arrays[2], arrays[3], tables[2], arrays[5]
        ).take(order)
        self.steps = tuple(tuple(names) for names in steps)
        self.computed = tuple(sorted(computed, key=lambda region: region.box))
        self.constants = tuple(sorted(constants, key=lambda region: region.box))
        self.unfilled = tuple(sorted(unfilled))
        self._check()
        # Patterns are interned, and their arrays are parts of their keys.
        for column in self.columns:
            column.flags.writeable = False

    def _check(self) -> None:
        columns = self.columns
        if len(columns.source) and (
            columns.source.min() < 0
            or columns.offset.min() < 0
            or columns.steps.min() < 0
            or columns.steps.max() >= len(self.steps)
        ):
            raise LayoutError(
                f"pieces of a parameter of shape {list(self.shape)} have negative numbers of "
                f"sources or offsets, or steps that are not in {list(self.steps)}"
            )
        others = [region.box for region in self.computed] + [
            region.box for region in self.constants
        ]
        others += self.unfilled
        dims = len(self.shape)
        start = np.concatenate([columns.start, _as_table([b.start for b in others], dims)])
        stop = np.concatenate([columns.stop, _as_table([b.stop for b in others], dims)])
        outside = (start < 0).any(axis=1) | (stop > np.array(self.shape, np.int64)).any(axis=1)
        outside |= (start >= stop).any(axis=1)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            box = Box(tuple(start[at].tolist()), tuple(stop[at].tolist()))
            raise LayoutError(f"box {box} has no element in a parameter of shape {self.shape}")
        # Disjoint boxes with as many elements as the parameter leave nothing out.
        held, size = int((stop - start).prod(axis=1).sum()), math.prod(self.shape)
        is_disjoint = are_disjoint(start, stop)
        if held != size or not is_disjoint:
            raise LayoutError(
                f"the boxes of a parameter of shape {list(self.shape)} have {held:,} elements of "
                f"{size:,}{'' if is_disjoint else ', some twice'}; each element is in one box: "
                "copied, computed, constant or not filled"
            )

    def interning_key(self) -> object:
        columns = tuple(column.tobytes() for column in self.columns)
        # Numbers that are equal in Python may differ: the text distinguishes -0.0 and 0.0.
        rest = (self.computed, repr(self.constants), self.unfilled)
        return (self.shape, self.dtype, len(self.columns.source), columns, self.steps, rest)

    @cached_property
    def sources(self) -> int:
        """The number of sources, which are numbered from 0."""
        numbers = [*self.columns.source.tolist(), *(n for c in self.computed for n in c.sources)]
        return max(numbers, default=-1) + 1

    @cached_property
    def reach(self) -> tuple[IntArray, IntArray]:
        """The first and the last element that it reads of each source: shape `(sources,)` each."""
        low = np.full(self.sources, np.iinfo(np.int64).max)
        high = np.full(self.sources, -1, dtype=np.int64)
        for source, first, last in zip(*self._reach_of_regions(), strict=True):
            np.minimum.at(low, source, first)
            np.maximum.at(high, source, last)
        return low, high

    def _reach_of_regions(self) -> tuple[list[Any], list[Any], list[Any]]:
        columns = self.columns
        further = (columns.stop - columns.start - 1) * columns.strides
        sources: list[Any] = [columns.source]
        first: list[Any] = [columns.offset + np.minimum(further, 0).sum(axis=1)]
        last: list[Any] = [columns.offset + np.maximum(further, 0).sum(axis=1)]
        for region in self.computed:
            if region.view is not None:
                ends = [
                    (n - 1) * s for n, s in zip(region.box.shape, region.view.strides, strict=True)
                ]
                sources.append(region.sources[0])
                first.append(region.view.offset + sum(min(end, 0) for end in ends))
                last.append(region.view.offset + sum(max(end, 0) for end in ends))
        return sources, first, last

    def __repr__(self) -> str:
        return (
            f"<ParameterPattern {self.dtype.name} {list(self.shape)}, {len(self.columns.source)} "
            f"pieces of {self.sources} sources>"
        )


def _as_table(corners: list[tuple[int, ...]], dims: int) -> IntArray:
    return np.array(corners, dtype=np.int64).reshape(len(corners), dims)


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter of a rank: its name there, and the contents of each box of it.

    Args:
        name: that the engine gives it.
        pattern: how it is filled, with numbers for sources.
        sources: their names, by those numbers.

    Raises:
        LayoutError: another number of names than the pattern has sources, or a repeated name.

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
        """Return a parameter from its regions; every element is in exactly one of them.

        Args:
            name: that the engine gives it.
            shape, dtype: of the parameter.
            pieces, computed, constants, unfilled: the boxes, by how they are filled.

        Raises:
            LayoutError: regions that overlap, leave a part out or extend beyond the parameter.
        """
        shape = check_ints(shape, f"shape of {name!r}", LayoutError)
        pieces = list(pieces)
        # Sources are numbered by the offsets of their pieces, so the order given does not matter.
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
        for region in sorted(computed, key=lambda region: region.box):
            if region.view is not None:
                _check_region(name, shape, region.box, region.view)
                if len(region.sources) != 1:
                    raise LayoutError(
                        f"{name!r} has a region of {len(region.sources)} sources; expected 1"
                    )
            source_numbers = tuple(
                numbers.setdefault(source, len(numbers)) for source in region.sources
            )
            by_number.append(
                Computed(region.box, tuple(region.operations), source_numbers, region.view)
            )
        try:
            pattern = ParameterPattern(
                shape, as_dtype(dtype), columns, tuple(steps), by_number, [*constants], [*unfilled]
            )
        except LayoutError as error:
            raise LayoutError(f"parameter {name!r}: {error}") from None
        return cls(name, pattern, tuple(numbers))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on this rank."""
        return self.pattern.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.pattern.dtype

    @cached_property
    def pieces(self) -> tuple[SourcePiece, ...]:
        """The copied regions, by their offsets."""
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
        """The computed regions, which are never copies."""
        return tuple(
            Computed(box, operations, tuple(self.sources[number] for number in sources), view)
            for box, operations, sources, view in self.pattern.computed
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The regions of a constant value."""
        return self.pattern.constants

    @property
    def unfilled(self) -> tuple[Box, ...]:
        """The regions that the loader does not write."""
        return self.pattern.unfilled

    @property
    def is_copied(self) -> bool:
        """Whether every element is copied from a source, with the same bits."""
        pattern = self.pattern
        rest = (*pattern.computed, *pattern.constants, *pattern.unfilled)
        return not rest and not any(pattern.steps[n] for n in set(pattern.columns.steps.tolist()))

    @property
    def binding(self) -> Binding:
        """The pieces as a layout of a single rank, each cell with a source's name and a view of it.

        Computed, constant and unfilled elements are in no cell.
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
        for region in self.computed:
            sources = ", ".join(region.sources)
            lines.append((region.box, f"computed by {', '.join(region.operations)} of {sources}"))
        lines += [(constant.box, f"filled with {constant.value:g}") for constant in self.constants]
        lines += [(box, "not filled") for box in self.unfilled]
        title = f"{self.name} {self.dtype.name} {list(self.shape)}"
        return "\n".join([title, *(f"  {box} {text}" for box, text in sorted(lines))])


def _check_region(name: str, shape: tuple[int, ...], box: Box, view: View) -> None:
    if not len(box.start) == len(box.stop) == len(view.strides) == len(shape):
        raise LayoutError(
            f"the box {box} of {name!r} with {len(view.strides)} strides, in a parameter of shape "
            f"{list(shape)}; give a range and a stride for every dimension"
        )


def shard_parameter(
    name: str, dtype: DType | str, layout: Layout, rank: int, source: str | None = None
) -> ParameterLayout | None:
    """Return a rank's shard of a tensor as a parameter, or None if the rank holds none of it.

    Args:
        name: of the parameter.
        dtype: of its elements.
        layout: of the whole tensor, over ranks.
        rank: in the layout.
        source: the tensor's name, if it is not the parameter's.

    Raises:
        LayoutError: an unknown rank, or a rank that holds several consecutive boxes
            (a flat buffer), which do not form a parameter with the tensor's dimensions.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> cut = spec(DeviceMesh.of(tp=2), "tp@blocks[4,4], -").layout((8, 3))
    >>> print(shard_parameter("gate_up", "float32", cut, 1))
    gate_up float32 [4, 3]
      [0:2, 0:3] gate_up from 6, strides 3, 1
      [2:4, 0:3] gate_up from 18, strides 3, 1
    """
    cells = layout.cells_of(rank)
    if not cells:
        return None
    if len(cells) > 1:
        raise LayoutError(
            f"rank {rank} holds {len(cells)} cells of {name!r}, consecutively in its "
            "memory; a parameter is one cell. Give the layout of each part by itself"
        )
    strides = dense_strides(layout.shape)
    pieces, unfilled = [], []
    for product in itertools.product(*layout.cell_runs(cells.start)):
        local = [(at, at + stop - start) for start, stop, at, _ in product]
        box = Box(tuple(low for low, _ in local), tuple(high for _, high in local))
        if any(role == PAD for _, _, _, role in product):
            # Padding is in the memory of the shard, but not in the tensor.
            unfilled.append(box)
            continue
        offset = sum(run[0] * stride for run, stride in zip(product, strides, strict=True))
        pieces.append(SourcePiece(box, source or name, View(offset, strides)))
    shape = layout.cell_shape[cells.start].tolist()
    return ParameterLayout.of(name, shape, dtype, pieces, unfilled=unfilled)
