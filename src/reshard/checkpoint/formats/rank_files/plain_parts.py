"""Parts of ranks whose files do not describe their sharding: sharded by rules, or as Meta's Llama.

Files with plain tensors do not describe their sharding. The user gives a mesh and rules
(`--source-mesh tp=2 --source-rule '*.weight=tp, -'`), or a recipe. The shapes of whole tensors
follow (`formats.source_sharding`). Optimizer state is sharded as its parameter.

If some tensors are DTensors, rules apply to tensors whose own description lacks an axis: plain
tensors that several ranks have, and DTensors on several meshes, each of some ranks
(`cut_lacking_parts`).

Meta's Llama is sharded over `consolidated.*.pth` of plain tensors (`find_meta_cut`). Its model
determines the sharded dimension of each tensor, and `params.json` next to the files the lengths of
dimensions. The embedding is sharded over its columns in Llama 1 and 2, and over its rows in
Llama 3; its shape distinguishes them. Source: `llama/model.py` of Meta, with fairscale's
`ParallelEmbedding`, `ColumnParallelLinear` and `RowParallelLinear`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats import source_sharding
from reshard.checkpoint.formats.optimizer_states import split_state_name
from reshard.checkpoint.formats.rank_files.parts import (
    LocalPart,
    Parts,
    bind_sharding,
    list_parameters,
)
from reshard.checkpoint.storage.filesystem import read_json_file
from reshard.errors import FormatError, ShardError, UsageError
from reshard.layout import Box
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec

Shape = tuple[int, ...]


def lacks_axis(parts: Parts) -> bool:
    """Return whether ranks without a common mesh have the same part of a tensor, by their files."""
    shardings = {part.sharding for _, part in parts.values()}
    first = next(iter(parts.values()))[1]
    if len(parts) < 2 or not first.shape:
        return False
    if len(shardings) == 1 and (sharding := first.sharding) is not None:
        return not {*parts} <= {*sharding.mesh.devices}
    boxes = [described for rank, entry in parts.items() for described in _describe(rank, entry[1])]
    return len({box.box for box in boxes}) < len(boxes)


def _describe(rank: int, part: LocalPart) -> Iterator[source_sharding.DescribedPart]:
    """Yield the boxes of a rank's part, as its file describes them."""
    boxes, group = part.boxes_of(rank), None
    if part.sharding is not None:
        group, local = part.sharding.mesh.devices, part.tensors[0].shape
        boxes = boxes or (Box.of(local),)
    for box in boxes:
        yield source_sharding.DescribedPart(box, part.shape, group)


def cut_lacking_parts(
    folder: Path, parts: Mapping[str, Parts], cut: source_sharding.SourceSharding, ranks: int
) -> tuple[dict[str, StoredTensor], DeviceMesh]:
    """Return the tensors whose own description lacks an axis, cut by a mesh and rules.

    The mesh has its ranks as they were counted (`find_missing_axes`).

    Raises:
        FormatError: parts that contradict the rules.
        RecipeError: rules that do not fit.
        UsageError: a mesh whose ranks differ from the files'; rules that match no such tensor.
    """
    cut.expect_ranks(folder, ranks)
    lacking = [name for name, of_tensor in parts.items() if lacks_axis(of_tensor)]
    chosen = source_sharding.select_by_rules(lacking, cut)
    if not chosen:
        raise UsageError(source_sharding.describe_no_lacking(folder, lacking))
    described = {}
    for name in chosen:
        by_rank = {rank: [*_describe(rank, part)] for rank, (_, part) in parts[name].items()}
        several = next((rank for rank, of_rank in by_rank.items() if len(of_rank) != 1), None)
        if several is not None:
            raise FormatError(
                f"{folder}: tensor {name!r}: rank {several} has {len(by_rank[several])} parts, "
                "expected one that a rule can set apart; save it as one part a rank"
            )
        described[name] = {rank: of_rank[0] for rank, of_rank in by_rank.items()}
    cuts, mesh = source_sharding.find_missing_axes(described, cut, folder)
    # Optimizer state is sharded as its parameter.
    numbers = list_parameters(parts, chosen)
    for name in lacking:
        leader = _find_parameter(name, numbers)
        if name not in cuts and leader in chosen and _are_alike(parts[name], parts[leader]):
            cuts[name] = cuts[leader]
    tensors = {
        name: bind_sharding(folder, name, parts[name], sharding, ranks, layout.shape)
        for name, (sharding, layout) in cuts.items()
    }
    return tensors, mesh


def cut_plain_parts(
    folder: Path, parts: Mapping[str, Parts], cut: source_sharding.SourceSharding, ranks: int
) -> dict[str, StoredTensor]:
    """Return the tensors that consist of plain parts of ranks, by a mesh and rules.

    Raises:
        FormatError: a part of another shape than its sharding gives its rank.
        RecipeError: rules that do not fit.
        UsageError: a mesh whose ranks differ from the files'.
    """
    cut.expect_ranks(folder, ranks)
    local = {name: next(iter(of_ranks.values()))[1].shape for name, of_ranks in parts.items()}
    for name, of_ranks in parts.items():
        file, first = next(iter(of_ranks.values()))
        for other, part in of_ranks.values():
            if part.dtype is not first.dtype or len(part.shape) != len(first.shape):
                raise FormatError(
                    f"tensor {name!r} is {first.dtype} {list(first.shape)} in {folder / file}, but "
                    f"{part.dtype} {list(part.shape)} in {folder / other}"
                )
    # Optimizer state is sharded as its parameter; rules are for the other tensors.
    numbers = list_parameters(parts)
    followed = {
        name: parameter for name in parts if (parameter := _find_parameter(name, numbers)) in parts
    }
    shapes = {
        name: {rank: part.shape for rank, (_, part) in of_ranks.items()}
        for name, of_ranks in parts.items()
    }
    led = {name: own for name, own in shapes.items() if name not in followed}
    try:
        cuts = source_sharding.find_layouts(led, cut.mesh, cut.find_shardings, may_lack=True)
        for name, leader in followed.items():
            sharding = _follow(cuts[leader][0], local[leader], local[name], cut)
            layout = source_sharding.join_shapes(name, shapes[name], sharding, may_lack=True)
            cuts[name] = sharding, layout
    except ShardError as error:
        raise FormatError(f"{folder}: tensor {error}") from error
    return {
        name: bind_sharding(folder, name, of_ranks, cuts[name][0], ranks, cuts[name][1].shape)
        for name, of_ranks in parts.items()
    }


def _find_parameter(name: str, numbers: Sequence[str]) -> str:
    """Return the parameter of optimizer state, or empty text for other names."""
    parameter, _ = split_state_name(name) or ("", "")
    if parameter.isdecimal() and int(parameter) < len(numbers):
        return numbers[int(parameter)]
    return parameter


def _are_alike(state: Parts, parameter: Parts) -> bool:
    """Return whether ranks have the same parts of optimizer state as of its parameter."""
    return all(
        rank in parameter
        and part.tensors[0].shape == parameter[rank][1].tensors[0].shape
        and part.sharding == parameter[rank][1].sharding
        for rank, (_, part) in state.items()
    )


def _follow(
    sharding: ShardingSpec, parameter: Shape, state: Shape, cut: source_sharding.SourceSharding
) -> ShardingSpec:
    """Return the sharding of optimizer state: its parameter's sharding, or whole for scalars."""
    return sharding if state == parameter else ShardingSpec(cut.mesh, [DimSpec() for _ in state])


PARAMETERS = "params.json"
_EMBEDDING = "tok_embeddings.weight"
_RULES = (
    *("*.attention.w[qkv].weight=mp, -", "*.attention.wo.weight=-, mp"),
    *("*.feed_forward.w[13].weight=mp, -", "*.feed_forward.w2.weight=-, mp"),
    "output.weight=mp, -",
)


def find_meta_cut(
    folder: Path, parts: Mapping[str, Parts], ranks: int
) -> source_sharding.SourceSharding | None:
    """Return how files of Meta's Llama shard its tensors; None for files of others.

    Raises:
        UsageError: files of Meta's Llama whose sharding is not known: without `params.json`, or
            with fewer key/value heads than files.
    """
    names = {file for of_ranks in parts.values() for file, _ in of_ranks.values()}
    if not all(name.startswith("consolidated.") for name in names) or _EMBEDDING not in parts:
        return None
    lengths = read_json_file(folder / PARAMETERS)
    if lengths is None:
        raise UsageError(
            f"{folder} has consolidated.* files of {ranks} ranks and no {PARAMETERS} with the "
            f"lengths of their dimensions; put the {PARAMETERS} of this model next to the files, "
            f"or give the mesh and rules: --source-mesh tp={ranks} --source-rule 'PATTERN=tp, -'"
        )
    # Llama 1, and the smaller models of Llama 2, have as many key/value heads as heads.
    heads = lengths.get("n_kv_heads") or lengths.get("n_heads")
    if not isinstance(heads, int) or heads % ranks:
        raise UsageError(
            f"{folder} has consolidated.* files of {ranks} ranks, and {PARAMETERS} {heads} "
            "key/value heads, which they do not divide: which ranks hold which heads is not known; "
            f"give the mesh and rules: --source-mesh tp={ranks} --source-rule 'PATTERN=tp, -'"
        )
    _, first = next(iter(parts[_EMBEDDING].values()))
    is_by_columns = first.shape[-1] != lengths.get("dim")
    embedding = f"{_EMBEDDING}={'-, mp' if is_by_columns else 'mp, -'}"
    return source_sharding.SourceSharding.of(f"mp={ranks}", (embedding, *_RULES, "*=..."))
