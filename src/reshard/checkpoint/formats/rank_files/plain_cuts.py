"""Plain tensors of ranks, cut by rules that the user gives.

Files of ranks with plain tensors do not say how they are cut. A mesh and rules do
(`--source-mesh tp=2 --source-rule '*.weight=tp, -'`), or a recipe. Shapes of whole tensors follow
(`formats.source_cut`). What an optimizer keeps of a parameter is cut as the parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.rank_files.joining import Parts, bind_sharding
from reshard.checkpoint.formats.rank_files.rank_states import list_parameters
from reshard.checkpoint.formats.source_cut import SourceCut, find_layouts, join_shapes
from reshard.checkpoint.formats.torch_files.optimizer_states import split_state_name
from reshard.errors import CoverageError, FormatError, ShardError, UsageError
from reshard.sharding import DimSpec, ShardingSpec

Shape = tuple[int, ...]


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
    shapes = {
        name: {rank: part.shape for rank, (_, part) in found.items()}
        for name, found in parts.items()
    }
    led = {name: own for name, own in shapes.items() if name not in followed}
    tensors = {}
    try:
        cuts = find_layouts(led, cut.mesh, cut.find_shardings, may_lack=True)
        for name, leader in followed.items():
            sharding = _follow(cuts[leader][0], local[leader], local[name], cut)
            layout = join_shapes(name, shapes[name], sharding, may_lack=True)
            cuts[name] = sharding, layout
    except ShardError as error:
        raise FormatError(f"{folder}: tensor {error}") from error
    for name, found in parts.items():
        sharding, layout = cuts[name]
        try:
            tensors[name] = bind_sharding(folder, name, found, sharding, ranks, layout.shape)
            _ = tensors[name].assembly
        except CoverageError as error:
            raise CoverageError(f"{folder}: {error}") from error
    return tensors


def _follow(sharding: ShardingSpec, parameter: Shape, state: Shape, cut: SourceCut) -> ShardingSpec:
    """The sharding of what an optimizer keeps of a parameter: the same, or none for scalars."""
    return sharding if state == parameter else ShardingSpec(cut.mesh, [DimSpec() for _ in state])
