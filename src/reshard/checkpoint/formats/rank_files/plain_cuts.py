"""Plain tensors of ranks, cut by rules that the user gives.

Files of ranks with plain tensors do not say how they are cut. A mesh and rules do
(`--source-mesh tp=2 --source-rule '*.weight=tp, -'`), or a recipe. Shapes of whole tensors follow:

1. A rule gives the axes that cut each dimension. The parts of a dimension are those of the ranks
   with different places on these axes; the whole dimension is as long as all of them together.
2. The sharding of that shape must give every rank the shape that its file has.

A recipe asks for shapes itself: it is asked again with those that it gave, until they stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.rank_files.joining import Parts, bind_sharding
from reshard.checkpoint.formats.rank_files.optimizer_names import split_state_name
from reshard.checkpoint.formats.rank_files.rank_states import list_parameters
from reshard.checkpoint.formats.source_cut import SourceCut
from reshard.errors import CoverageError, FormatError, UsageError
from reshard.sharding import DimSpec, ShardingSpec

Shape = tuple[int, ...]
# How often a recipe is asked again.
_MOST_ROUNDS = 4


def cut_plain_parts(
    folder: Path, parts: Mapping[str, Parts], cut: SourceCut, ranks: int
) -> dict[str, StoredTensor]:
    """The tensors that plain parts of ranks are, by a mesh and rules.

    Raises:
        FormatError: a part of another shape than its sharding gives its rank.
        RecipeError: rules that do not fit.
        UsageError: a mesh of other ranks than there are files of.
    """
    if sorted(cut.mesh.devices) != list(range(ranks)):
        raise UsageError(
            f"the source's mesh {cut.mesh.text} has {len(cut.mesh.devices)} ranks, and {folder} "
            f"files of {ranks}; give a mesh of {ranks}"
        )
    local = {name: next(iter(found.values()))[1].shape for name, found in parts.items()}
    for name, found in parts.items():
        file, first = next(iter(found.values()))
        for other, part in found.values():
            if part.dtype is not first.dtype or len(part.shape) != len(first.shape):
                raise FormatError(
                    f"tensor {name!r} is {first.dtype} {list(first.shape)} in {folder / file}, but "
                    f"{part.dtype} {list(part.shape)} in {folder / other}"
                )
    # What an optimizer keeps of a parameter is cut as it is; rules are for the others.
    numbers = list_parameters(parts)
    followed = {}
    for name in parts:
        parameter, _ = split_state_name(name) or ("", "")
        if parameter.isdecimal() and int(parameter) < len(numbers):
            parameter = numbers[int(parameter)]
        if parameter in parts:
            followed[name] = parameter
    led = {name: found for name, found in parts.items() if name not in followed}
    shardings = _find_shardings(led, cut)
    tensors = {}
    for name, found in parts.items():
        if name in followed:
            leader = followed[name]
            sharding = _follow(shardings[leader], local[leader], local[name], cut)
        else:
            sharding = shardings[name]
        shape = _whole_shape(found, sharding)
        try:
            tensors[name] = bind_sharding(folder, name, found, sharding, ranks, shape)
            _ = tensors[name].assembly
        except CoverageError as error:
            raise CoverageError(f"{folder}: {error}") from error
    return tensors


def _find_shardings(parts: Mapping[str, Parts], cut: SourceCut) -> dict[str, ShardingSpec]:
    """The sharding of each tensor; a recipe and rules see shapes that they themselves give."""
    # At first as if every axis cut every dimension: a shape that any rule can cut.
    factor = math.prod(cut.mesh.shape)
    shapes = {
        name: tuple(size * factor for size in next(iter(found.values()))[1].shape)
        for name, found in parts.items()
    }
    for _ in range(_MOST_ROUNDS):
        shardings = cut.find_shardings(shapes)
        found = {name: _whole_shape(own, shardings[name]) for name, own in parts.items()}
        if found == shapes:
            break
        shapes = found
    return shardings


def _whole_shape(parts: Parts, sharding: ShardingSpec) -> Shape:
    """The shape of the tensor whose parts a sharding says these are."""
    mesh = sharding.mesh
    places = np.array(mesh.devices).reshape(mesh.shape)
    shape = []
    for number, dim in enumerate(sharding.dim_specs):
        names = {axis.name for level in dim.levels for axis in level.axes}
        cutting = [mesh.axis_names.index(name) for name in sorted(names)]
        sizes: dict[tuple[int, ...], int] = {}
        for rank, (_, part) in parts.items():
            place = [int(axis[0]) for axis in np.nonzero(places == rank)]
            # Ranks with the same place on these axes have the same part of the dimension.
            sizes[tuple(place[axis] for axis in cutting)] = part.shape[number]
        shape.append(sum(sizes.values()))
    return tuple(shape)


def _follow(sharding: ShardingSpec, parameter: Shape, state: Shape, cut: SourceCut) -> ShardingSpec:
    """The sharding of what an optimizer keeps of a parameter: the same, or none for scalars."""
    return sharding if state == parameter else ShardingSpec(cut.mesh, [DimSpec() for _ in state])
