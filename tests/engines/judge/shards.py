"""Shards: a state dict cut by a recipe, and what a rank computes with.

Every rank of the mesh gets its shards, cut by the layouts alone. Before computing:

1. What storage axes (`fsdp`, `dp`) divide is put together, along the dimension that the sharding
   says, in the order of their coordinates.
2. Each stage (`pp`) keeps its own, so that a layer can be asked for by the stage that runs it.

What is left has coordinates along the other axes: those that compute together (`tp`, `ep`...).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes import Assignment, Recipe, Rule, assign
from reshard.sharding import ShardingSpec

STORAGE = ("fsdp", "dp")
STAGES = "pp"

Array = NDArray[np.generic]
Coordinate = tuple[int, ...]


class JudgeError(Exception):
    """Shards that a rank cannot compute with."""


def parse_parallelism(text: str) -> tuple[DeviceMesh, dict[str, str]]:
    """The mesh and the recipe's options of text such as `tp=3 | ep=tp etp=`."""
    mesh, _, options = text.partition("|")
    pairs = (word.partition("=") for word in options.split())
    return DeviceMesh.parse(mesh.strip()), {name: value for name, _, value in pairs}


def assign_case(
    recipe: Recipe,
    parallelism: str,
    config: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
) -> Assignment:
    """The recipe's assignment at a parallelism. Raises RecipeError where it is refused."""
    mesh, options = parse_parallelism(parallelism)
    return assign(shapes, mesh, (), recipe.with_options(options), config)


def local_indices(layout: Layout, rank: int) -> list[NDArray[np.int64]] | None:
    """For each dimension the indices that a rank holds, in its order; None if it holds nothing."""
    cells = layout.cells_of(rank)
    if not cells:
        return None
    if len(cells) != 1:
        raise JudgeError(f"rank {rank} holds {len(cells)} cells of {layout!r}")
    found = []
    for dimension, table in enumerate(layout.tables):
        part = int(layout.cell_part[cells[0], dimension])
        indices = np.full(int(table.local_lengths[part]), -1, dtype=np.int64)
        for start, stop, local_start, _ in table.runs_of(part):
            indices[local_start : local_start + stop - start] = np.arange(start, stop)
        if (indices < 0).any():
            raise JudgeError(f"rank {rank} holds padding of {layout!r}")
        found.append(indices)
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """What the ranks of one computing coordinate and stage hold of a tensor together."""

    array: Array
    indices: tuple[NDArray[np.int64], ...]


class CutModel:
    """The shards of a whole model, and its pieces by stage and computing coordinate.

    Args:
        mesh: of all ranks.
        recipe: with the options of the parallelism.
        assignment: of the tensors over the mesh.
        tensors: whole, by name.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        recipe: Recipe,
        assignment: Assignment,
        tensors: Mapping[str, Array],
    ) -> None:
        self.mesh, self.assignment = mesh, assignment
        self.numbers_of_stages = {
            what for what, numbering in recipe.numbers.items() if numbering.axis == STAGES
        }
        self.sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        self.compute_axes = tuple(
            axis for axis in mesh.axis_names if axis not in (*STORAGE, STAGES)
        )
        self.stages = self.sizes.get(STAGES, 1)
        self.pieces: dict[str, dict[tuple[Coordinate, int], Piece]] = {
            name: self._gather(name, tensor) for name, tensor in tensors.items()
        }

    @cached_property
    def coordinates(self) -> list[Coordinate]:
        """Along the computing axes, row by row."""
        return [*itertools.product(*(range(self.sizes[axis]) for axis in self.compute_axes))]

    def cut_axes(self, name: str, dimension: int) -> tuple[str, ...]:
        """The computing axes that cut a dimension of a tensor, of more than one coordinate."""
        axes = self.assignment.specs[name].dim_specs[dimension].axes
        assert all(axis.is_full for axis in axes)
        return tuple(
            axis.name
            for axis in axes
            if axis.name in self.compute_axes and self.sizes[axis.name] > 1
        )

    def is_cut(self, name: str) -> bool:
        """Whether computing coordinates hold different parts of a tensor."""
        dims = self.assignment.specs[name].dim_specs
        return any(self.cut_axes(name, dimension) for dimension in range(len(dims)))

    def _gather(self, name: str, tensor: Array) -> dict[tuple[Coordinate, int], Piece]:
        """The pieces of a tensor, from the shards of all ranks."""
        spec, layout = self.assignment.specs[name], self.assignment.layouts[name]
        groups: dict[tuple[Coordinate, int], dict[Coordinate, Piece]] = {}
        storage = [axis for axis in STORAGE if axis in self.sizes]
        for rank, place in enumerate(itertools.product(*map(range, self.mesh.shape))):
            here = dict(zip(self.mesh.axis_names, place, strict=True))
            indices = local_indices(layout, rank)
            if indices is None:
                continue
            held = tensor[np.ix_(*indices)].reshape(tuple(map(len, indices)))
            shard = Piece(np.array(held, order="C"), tuple(indices))
            key = tuple(here[axis] for axis in self.compute_axes), here.get(STAGES, 0)
            groups.setdefault(key, {})[tuple(here[axis] for axis in storage)] = shard
        return {key: self._join(name, spec, storage, group) for key, group in groups.items()}

    def _join(
        self,
        name: str,
        spec: ShardingSpec,
        storage: list[str],
        group: Mapping[Coordinate, Piece],
    ) -> Piece:
        """One piece from the shards of a storage group, by their coordinates in it."""
        for number, axis in reversed([*enumerate(storage)]):
            dims = [
                d
                for d, dim in enumerate(spec.dim_specs)
                if any(one.name == axis for one in dim.axes)
            ]
            rest: dict[Coordinate, list[Piece]] = {}
            for at in sorted(group):
                rest.setdefault((*at[:number], *at[number + 1 :]), []).append(group[at])
            if len(dims) > 1:
                raise JudgeError(f"{name} is divided by {axis} in {len(dims)} dimensions")
            group = {at: _put_together(name, shards, dims) for at, shards in rest.items()}
        (piece,) = group.values()
        return piece

    def stages_of(self, name: str, coordinate: Coordinate) -> list[int]:
        """The stages that hold a tensor at a computing coordinate."""
        return sorted(stage for where, stage in self.pieces[name] if where == coordinate)

    def piece(self, name: str, coordinate: Coordinate, stage: int) -> Piece:
        """What a stage holds of a tensor. Raises JudgeError where it lacks it."""
        found = self.pieces[name].get((coordinate, stage))
        if found is None:
            raise JudgeError(
                f"stage {stage} needs {name}, which stages {self.stages_of(name, coordinate)} hold"
            )
        return found

    def stage_of_layers(self) -> dict[str, int]:
        """The stage of each layer that a recipe numbers along `pp`, by the layer's module.

        Raises JudgeError where the tensors of a layer are on different stages.
        """
        found: dict[str, int] = {}
        for name, rule in self.assignment.matched.items():
            for what in set(rule.numbers) & self.numbers_of_stages:
                module = _module_of_number(name, rule, what)
                for coordinate in self.coordinates:
                    stages = self.stages_of(name, coordinate)
                    # Of experts, each coordinate has its own.
                    if not stages:
                        continue
                    if len(stages) != 1 or found.setdefault(module, stages[0]) != stages[0]:
                        raise JudgeError(
                            f"{name} is on stages {stages}, others of {module} on {found[module]}"
                        )
        return found


def _put_together(name: str, shards: list[Piece], dims: list[int]) -> Piece:
    """One piece of several: along the dimension that divides them, or one of many copies."""
    first = shards[0]
    if not dims:
        if any(not np.array_equal(first.array, shard.array) for shard in shards[1:]):
            raise JudgeError(f"copies of {name} differ")
        return first
    (dimension,) = dims
    indices = list(first.indices)
    indices[dimension] = np.concatenate([shard.indices[dimension] for shard in shards])
    return Piece(np.concatenate([shard.array for shard in shards], axis=dimension), tuple(indices))


def _module_of_number(name: str, rule: Rule, what: str) -> str:
    """The front of a tensor's name, up to the number that a rule calls `what`."""
    number = (rule.numbers_in(name) or {})[what]
    mark = "987654321"
    return name[: rule.with_numbers(name, {what: int(mark)}).index(mark)] + str(number)
