"""Held blocks: what ranks hold of the blocks of a tensor that a recipe cuts by names.

1. The marks of the recipe's rule for the tensor say which of its dimensions are cut by which name.
2. Axes that only divide storage are removed from the sharding: what they shard is gathered
   before it is used.
3. A sharding by another rule is read for the same blocks, on the ranks where the recipe has the
   tensor; what other ranks hold in addition does not matter. Dimensions that the recipe does not
   shard must not be sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.mesh import Axis, DeviceMesh
from reshard.recipes.coupling.cut_marks import CutMark, CutName
from reshard.recipes.coupling.held_units import HeldUnits, held_units
from reshard.recipes.shardings.axis_mapping import map_sharding
from reshard.sharding import DimSpec, Level, ShardingSpec


@dataclass(frozen=True, eq=False, slots=True)
class HeldBlock:
    """A block of a tensor that is cut by a name: what ranks hold of it, over which axes.

    `place` tells it from other blocks of the tensor, in messages.
    """

    name: CutName
    place: str
    units: int
    axes: tuple[Axis, ...]
    held: HeldUnits


class HeldBlockReader:
    """Reads what ranks of a mesh hold of tensors that a recipe cuts.

    Args:
        mesh: the ranks.
        mapping: the axes of the mesh for each of the recipe's.
        storage: the recipe's axes that only divide storage.
    """

    def __init__(
        self, mesh: DeviceMesh, mapping: Mapping[str, tuple[Axis, ...]], storage: Collection[str]
    ) -> None:
        self._mesh = mesh
        self._mapping = {axis: () if axis in storage else to for axis, to in mapping.items()}
        # An axis that another axis of the recipe is mapped to as well divides more than storage.
        computed = {one for to in self._mapping.values() for one in to}
        self._storage = {one for axis in storage for one in mapping.get(axis, ())} - computed

    def read(
        self,
        marks: Sequence[CutMark],
        written: ShardingSpec,
        only: Sequence[tuple[str, tuple[int, ...]]],
        shape: tuple[int, ...],
        instead: ShardingSpec | None = None,
    ) -> tuple[HeldBlock, ...]:
        """The blocks of a tensor of `shape`.

        Args:
            marks: of the recipe's rule.
            written: what the rule says, over the recipe's axes.
            only: the coordinates of the mesh where the tensor lives.
            shape: of the tensor.
            instead: the sharding, over the mesh, that the tensor has by another rule.

        Raises:
            LayoutError: a recipe's rule that does not fit the shape.
        """
        own = map_sharding(self._mesh, written, self._mapping, only)
        layout = own_layout = own.layout(shape)
        ranks = None
        if instead is not None:
            layout = _drop_axes(instead, self._storage).layout(shape)
            ranks = frozenset(own_layout.holders)
        marked = [(mark, mark.item % len(shape)) for mark in marks]
        others = sorted(set(range(len(shape))) - {dimension for _, dimension in marked})
        also_cut = next((d for d in others if layout.tables[d] is not own_layout.tables[d]), None)
        found = []
        for mark, dimension in marked:
            rule = written.dim_specs[dimension].levels[mark.level].rule
            for name, start, stop, unit in mark.blocks(rule, shape[dimension]):
                held = held_units(layout, dimension, (start, stop), unit, ranks)
                is_part = stop - start < shape[dimension]
                place = f"[{', '.join([':'] * dimension + [f'{start}:{stop}'])}]" if is_part else ""
                axes = own.dim_specs[dimension].axes
                held = replace(held, also_cut=also_cut)
                found.append(HeldBlock(name, place, (stop - start) // unit, axes, held))
        return tuple(found)


def _drop_axes(sharding: ShardingSpec, dropped: Collection[Axis]) -> ShardingSpec:
    """A sharding without some axes of its mesh."""
    dims = []
    for dim in sharding.dim_specs:
        levels = [([a for a in lv.axes if a not in dropped], lv.rule) for lv in dim.levels]
        dims.append(DimSpec([Level(axes, rule) for axes, rule in levels if axes]))
    return ShardingSpec(sharding.mesh, dims, only=sharding.only)
