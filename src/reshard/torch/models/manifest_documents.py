"""Manifests as JSON documents, for ranks of other jobs and versions.

The message of a rank of another job is validated like any input: nothing is unpickled. Tensors of
many layers differ only in their names, so a document contains each kind of tensor once, and refers
to it by number::

    {"reshard": "names", "version": 1, ...,
     "names":       ["layers.0.up", "layers.1.up", ...],     common names
     "own_names":   [...], "local_names": [...]}             empty if equal, or if absent

    {"reshard": "roster", "version": 1, "tables": ..., "layouts": ...,
     "first_rank": 0, "problems": [], "unmatched": [], "megatron": [names of its ranks],
     "kinds":   [{"dtype", "shape", "layout", ...}],
     "kind_of": [column of kinds],
     "samples": [...]}                                       empty without samples

Names are a separate document, since ranks with different parts of the same tensors have the same
names, which are then sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import asdict, fields
from typing import Any

from reshard.errors import NotationError, ReshardError
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.parameters import LocalParameter
from reshard.megatron.ranks import MegatronGrids, MegatronRanks
from reshard.plans.documents import (
    DocumentReader,
    DocumentWriter,
    pack_column,
    read_dtype,
    read_int,
    read_ints,
    read_strings,
    unpack_column,
)
from reshard.recipes.naming import Fusion
from reshard.sharding import ShardingSpec
from reshard.sharding import spec as parse_spec
from reshard.torch.models.model_manifest import Entry, EntryColumns, ModelManifest, NameColumns

_KIND, _NAMES = "roster", "names"


def write_names(manifest: ModelManifest) -> str:
    """Return the document of the names of a rank's tensors."""
    columns = manifest.columns.columns
    content = {
        "names": list(columns.names),
        "own_names": [] if columns.are_own else list(columns.own_names),
        "local_names": list(columns.local_names),
    }
    return DocumentWriter().document(_NAMES, content)


def write_manifest(manifest: ModelManifest) -> str:
    """Return the document of a rank's manifest, without the names.

    >>> manifest = ModelManifest((Entry("up", "int8", (4, 2)), Entry("down", "int8", (4, 2))))
    >>> read_manifest(write_manifest(manifest), read_names(write_names(manifest))) == manifest
    True
    """
    writer, columns = DocumentWriter(), manifest.columns
    content = {
        "first_rank": manifest.first_rank,
        "problems": list(manifest.problems),
        "unmatched": list(manifest.unmatched),
        "megatron": [] if manifest.names is None else [_write_names(manifest.names)],
        "kinds": [_write_kind(kind, writer) for kind in columns.kinds],
        # Numbers of several kinds have no order that packing as a grid would shorten.
        "kind_of": list(columns.kind_of)
        if len(columns.kinds) > 1
        else pack_column(columns.kind_of),
        "samples": list(columns.samples),
    }
    return writer.document(_KIND, content)


def _write_kind(kind: Entry, writer: DocumentWriter) -> dict[str, Any]:
    written: dict[str, Any] = {"dtype": kind.dtype, "shape": kind.shape}
    if kind.layout is not None:
        written["layout"] = writer.layout(kind.layout)
    if kind.parameter is not None:
        written["parameter"] = asdict(kind.parameter)
    if kind.chunk:
        written["chunk"] = kind.chunk
    if kind.fusion is not None:
        written["fusion"] = asdict(kind.fusion)
    if kind.spec is not None:
        written["spec"] = [writer.mesh(kind.spec.mesh), str(kind.spec)]
    if kind.alias_of:
        written["alias_of"] = kind.alias_of
    return written


def _write_names(names: MegatronNames) -> dict[str, Any]:
    ranks = names.ranks
    if isinstance(ranks, MegatronRanks):
        written: dict[str, Any] = {"sizes": asdict(ranks)}
    else:
        written = {"grids": [DocumentWriter.mesh(mesh) for mesh in (ranks.dense, ranks.expert)]}
    layers = None if names.layers is None else [list(chunk) for chunk in names.layers.counts]
    return {**written, "layers": layers, "num_experts": names.num_experts, "stack": names.stack}


def read_names(text: str) -> NameColumns:
    """Return the names in a document.

    Raises:
        ReshardError: text that is not such a document.
    """
    reader = DocumentReader(text, [_NAMES])
    names, own_names, local_names = (
        read_strings(reader.field(column, list), column)
        for column in ("names", "own_names", "local_names")
    )
    for column, column_values in (("own_names", own_names), ("local_names", local_names)):
        _check_length(column_values, names, column)
    return NameColumns(names, own_names or names, local_names)


def read_manifest(text: str, names: NameColumns) -> ModelManifest:
    """Return the manifest in a document, of tensors with these names.

    Raises:
        ReshardError: text that is not such a document, or invalid values.
    """
    reader = DocumentReader(text, [_KIND])
    field = reader.field
    kinds = reader.all_of("kinds", lambda value, where: _read_kind(reader, value, where))
    kind_of = unpack_column(field("kind_of", list), "kind_of")
    if len(kind_of) != len(names.names):
        raise NotationError(f"kind_of: {len(kind_of)} kinds of {len(names.names)} tensors")
    for number in (kind_of.min(), kind_of.max()) if len(kind_of) else ():
        reader.chosen(kinds, int(number), "kind_of")
    samples = read_strings(field("samples", list), "samples")
    _check_length(samples, names.names, "samples")
    megatron = reader.all_of("megatron", lambda value, where: _read_names(reader, value, where))
    return ModelManifest(
        EntryColumns(names, kinds, kind_of.tolist(), samples),
        megatron[0] if megatron else None,
        read_int(field("first_rank", int), "first_rank"),
        tuple(read_strings(field("problems", list), "problems")),
        tuple(read_strings(field("unmatched", list), "unmatched")),
    )


def _check_length(column: Sized, names: Sized, what: str) -> None:
    if column and len(column) != len(names):
        raise NotationError(f"{what}: {len(column)} of {len(names)} tensors")


def write_manifests(before: ModelManifest, after: ModelManifest) -> tuple[bytes, bytes]:
    """Return the names of both models of a rank, and the rest of both manifests."""
    # JSON text contains no line breaks.
    names, others = (
        f"{write(before)}\n{write(after)}".encode() for write in (write_names, write_manifest)
    )
    return names, others


def read_manifests(
    messages: Mapping[int, tuple[bytes, bytes]],
) -> dict[int, tuple[ModelManifest, ModelManifest]]:
    """Return both manifests of every rank; equal messages are parsed once.

    Raises ReshardError for a message that `write_manifests` does not write, naming the rank.

    >>> message = write_manifests(ModelManifest(first_rank=2), ModelManifest())
    >>> read_manifests({0: message, 1: message})[1][0].first_rank
    2
    """
    names: dict[bytes, list[NameColumns]] = {}
    known: dict[tuple[bytes, bytes], tuple[ModelManifest, ModelManifest]] = {}
    for rank, message in messages.items():
        if message in known:
            continue
        try:
            both = message[0].decode().split("\n")
            if message[0] not in names:
                names[message[0]] = [read_names(text) for text in both]
            before, after = (
                read_manifest(text, names_of)
                for text, names_of in zip(
                    message[1].decode().split("\n"), names[message[0]], strict=True
                )
            )
            known[message] = before, after
        except (ReshardError, ValueError) as error:
            raise NotationError(f"what rank {rank} says of its models: {error}") from error
    return {rank: known[message] for rank, message in messages.items()}


def _read_kind(reader: DocumentReader, value: Any, where: str) -> Entry:
    """Return what several tensors have in common."""
    if not isinstance(value, dict):
        raise NotationError(f"{where}: {value!r} is not a JSON object")
    dtype, shape = value.get("dtype"), value.get("shape")
    fields_read: dict[str, Any] = {
        "dtype": None if dtype is None else read_dtype(dtype, f"{where}.dtype").name,
        "shape": None if shape is None else read_ints(shape, f"{where}.shape", 0),
        "chunk": read_int(value.get("chunk", 0), f"{where}.chunk", 0),
    }
    if "layout" in value:
        fields_read["layout"] = reader.chosen(reader.layouts, value["layout"], f"{where}.layout")
    if "parameter" in value:
        fields_read["parameter"] = _read_parameter(value["parameter"], f"{where}.parameter")
    if "fusion" in value:
        fields_read["fusion"] = _read_fusion(value["fusion"], f"{where}.fusion")
    if "spec" in value:
        fields_read["spec"] = _read_spec(reader, value["spec"], f"{where}.spec")
    if "alias_of" in value:
        (fields_read["alias_of"],) = read_strings([value["alias_of"]], f"{where}.alias_of")
    return Entry("", **fields_read)


def _read_spec(reader: DocumentReader, value: Any, where: str) -> ShardingSpec:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
        raise NotationError(f"{where}: {value!r} is not a mesh and a sharding")
    return parse_spec(reader.mesh(value[0], where), value[1])


def _read_parameter(value: Any, where: str) -> LocalParameter:
    values = _check_fields(value, LocalParameter, where)
    values["shape"] = read_ints(values["shape"], f"{where}.shape", 0)
    for name in ("tensor_model_parallel", "is_expert"):
        if not isinstance(values[name], bool):
            raise NotationError(f"{where}.{name}: {values[name]!r} is not true or false")
    for name in ("partition_dim", "partition_stride", "heads", "true_length"):
        if values[name] is not None or name.startswith("partition"):
            read_int(values[name], f"{where}.{name}")
    if values["partition_sizes"] is not None:
        values["partition_sizes"] = read_ints(values["partition_sizes"], f"{where}.sizes", 0)
    if values["dtype"] is not None:
        values["dtype"] = read_dtype(values["dtype"], f"{where}.dtype").name
    return LocalParameter(**values)


def _read_fusion(value: Any, where: str) -> Fusion:
    values = _check_fields(value, Fusion, where)
    values["members"] = tuple(read_strings(values["members"], f"{where}.members"))
    if not isinstance(values["when"], str):
        raise NotationError(f"{where}.when: {values['when']!r} is not a text")
    return Fusion(**values)


def _read_names(reader: DocumentReader, value: Any, where: str) -> MegatronNames:
    if not isinstance(value, dict):
        raise NotationError(f"{where}: {value!r} is not a JSON object")
    if "sizes" in value:
        sizes = _check_fields(value["sizes"], MegatronRanks, where)
        if not isinstance(sizes["order"], str):
            raise NotationError(f"{where}.order: {sizes['order']!r} is not a text")
        ranks: MegatronRanks | MegatronGrids = MegatronRanks(**sizes)
    else:
        grids = reader.field("grids", list, of=value)
        if len(grids) != 2:
            raise NotationError(f"{where}: {len(grids)} grids; expected two")
        ranks = MegatronGrids(*(reader.mesh(grid, where) for grid in grids))
    layers, num_experts = value.get("layers"), value.get("num_experts")
    if layers is not None:
        chunks = reader.field("layers", list, of=value)
        layers = PipelineLayers(tuple(read_ints(chunk, where) for chunk in chunks))
    if num_experts is not None:
        read_int(num_experts, f"{where}.num_experts", 1)
    stack = reader.field("stack", str, of=value)
    return MegatronNames(ranks, layers, num_experts, stack)


def _check_fields(value: Any, of: type, where: str) -> dict[str, Any]:
    """Return a JSON object that has exactly the fields of a dataclass."""
    expected = {field.name for field in fields(of)}
    if not isinstance(value, dict) or set(value) != expected:
        raise NotationError(f"{where}: {value!r} does not say {', '.join(sorted(expected))}")
    return dict(value)
