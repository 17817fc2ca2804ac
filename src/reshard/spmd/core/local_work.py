"""Local work: an operation as the ranks of this process compute it on their shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import Library

Stretch = tuple[int, int]
"""Where elements of an axis start and stop."""

Function = Callable[..., Any]
"""The function that a rank computes, from its parts of the operands."""


@dataclass(frozen=True)
class LocalWork:
    """An operation, of which every rank in this process computes its part.

    Args:
        name: of the operator.
        attributes: of the operator, its options among them.
        operands: types with the shardings that the operator runs with; None for a number.
        result_specs: of the results; empty without a mesh or a rule.
        result_shapes: of the results; empty without a rule.
        ranks: the ranks in this process.
        library: the library that computes.
        options: names of attributes that the operator's rule does not depend on.
    """

    name: str
    attributes: dict[str, Any]
    operands: tuple[ArrayType | None, ...]
    result_specs: tuple[ShardingSpec, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    library: Library
    options: tuple[str, ...] = ()

    @cached_property
    def result_layouts(self) -> tuple[Layout, ...]:
        """The layouts of the results; none without shardings."""
        if not self.result_specs:
            return ()
        return tuple(
            spec.layout(shape)
            for spec, shape in zip(self.result_specs, self.result_shapes, strict=True)
        )

    def result_shapes_here(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the first result's shape on each rank; `shape` where it is not sharded."""
        if not self.result_specs:
            return [tuple(shape)] * len(self.ranks)
        layout = self.result_layouts[0]
        return [layout.local_shape(rank) or () for rank in self.ranks]

    def starts_here(self, operand: int, axis: int) -> list[int]:
        """Return where each rank's part of an operand begins along an axis, 0 for an empty part."""
        operand_type = self.operands[operand]
        if operand_type is None or operand_type.spec is None:
            return [0] * len(self.ranks)
        boxes = [operand_type.layout.boxes(rank) for rank in self.ranks]
        return [box[0].start[axis] if box else 0 for box in boxes]

    def stretches_here(self, operand: int, axis: int) -> list[list[Stretch]]:
        """Return the stretches of an operand's axis on each rank, in the order of its memory."""
        operand_type = self.operands[operand]
        if operand_type is None or operand_type.spec is None:
            return [[] if operand_type is None else [(0, operand_type.shape[axis])]] * len(
                self.ranks
            )
        return [_find_stretches(operand_type.layout, rank, axis) for rank in self.ranks]

    def result_stretches_here(self, result: int, axis: int) -> list[list[Stretch]]:
        """Return the stretches of a result's axis on each rank, in the order of its memory."""
        if not self.result_specs:
            return [[(0, self.result_shapes[result][axis])]] * len(self.ranks)
        return [_find_stretches(self.result_layouts[result], rank, axis) for rank in self.ranks]

    def is_cut(self, operand: int, axis: int) -> bool:
        """Return whether ranks have different parts of an operand's axis."""
        operand_type = self.operands[operand]
        return (
            operand_type is not None
            and operand_type.spec is not None
            and bool(operand_type.spec.dim_specs[axis].levels)
        )

    def operand_shapes_here(self, number: int = 0) -> list[tuple[int, ...]]:
        """Return an operand's shape on each rank."""
        operand_type = self.operands[number]
        if operand_type is None:
            return [()] * len(self.ranks)
        if operand_type.spec is None:
            return [operand_type.shape] * len(self.ranks)
        return [operand_type.layout.local_shape(rank) or () for rank in self.ranks]


def _find_stretches(layout: Layout, rank: int, axis: int) -> list[Stretch]:
    cells = layout.cells_of(rank)
    if not cells:
        return []
    # All cells of a rank have the same part of an axis, so the first stands for them.
    runs = layout.tables[axis].runs_of(int(layout.cell_part[cells.start, axis]))
    return [(start, stop) for start, stop, _, _ in runs]


def has_plain_parts(spec: ShardingSpec) -> bool:
    """Return whether every part of each dimension is a single interval."""
    return all(level.rule.is_default for dim in spec.dim_specs for level in dim.levels)


def have_plain_parts(
    specs: Sequence[ShardingSpec], shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]
) -> bool:
    """Return whether ranks know the places of their parts: each is a single interval.

    This is the `knows_place` of operators whose functions find the offset of their part.
    """
    return all(map(has_plain_parts, specs))


def part_lengths(spec: ShardingSpec, axis: int, size: int) -> tuple[int, ...]:
    """Return the lengths of the parts of a dimension that have elements, in order."""
    cut = spec.dim_specs[axis]
    # The last parts may be empty: 5 indices over 4 parts are 2, 2, 1 and 0.
    lengths = cut.table(spec.mesh, size).local_lengths if cut.levels else [size]
    return tuple(int(length) for length in lengths if length)


def parts_of(spec: ShardingSpec, axis: int, size: int) -> tuple[Stretch, ...]:
    """Return the start and stop of each part of a dimension, including empty parts.

    >>> from reshard import DeviceMesh, spec
    >>> parts_of(spec(DeviceMesh.of(x=4), "x"), 0, 5)
    ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    stretches, at = [], 0
    for length in spec.dim_specs[axis].table(spec.mesh, size).local_lengths:
        stretches.append((at, at + int(length)))
        at += int(length)
    return tuple(stretches)


def stretches_of(spec: ShardingSpec, axis: int, size: int) -> tuple[tuple[Stretch, ...], ...]:
    """Return the stretches of each part of a dimension, in the order of its memory.

    >>> from reshard import DeviceMesh, spec
    >>> stretches_of(spec(DeviceMesh.of(x=2), "x@zigzag"), 0, 8)
    (((0, 2), (6, 8)), ((2, 6),))
    """
    table = spec.dim_specs[axis].table(spec.mesh, size)
    runs = [table.runs_of(part) for part in range(table.parts)]
    return tuple(tuple((start, stop) for start, stop, _, _ in part_runs) for part_runs in runs)


MakeLocal = Callable[[LocalWork], Function | list[Function]]
"""Makes the functions that the ranks here compute: one for all ranks, or a list of one per rank."""


def find_function(work: LocalWork, place: Any, name: str) -> Function:
    """Return a library's function. Raises UsageError if it lacks a function of that name."""
    function: Function | None = getattr(place, name, None)
    if function is None:
        raise UsageError(f"operator {work.name!r} is none of {work.library.name}'s")
    return function


def own_attributes(work: LocalWork) -> dict[str, Any]:
    """Return the attributes, with element types as the library calls them."""
    return {
        name: work.library.own_dtype(value) if isinstance(value, DType) else value
        for name, value in work.attributes.items()
    }


def by_name(work: LocalWork) -> Function:
    """Return the library's function of the operator's name, with the operator's attributes."""
    function = find_function(work, work.library.namespace, work.name)
    attributes = own_attributes(work)
    return partial(function, **attributes) if attributes else function
