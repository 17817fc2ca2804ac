"""`_sharding`: JAX's meshes and shardings of arrays, read and written.

    {"dw==": "{\"sharding_type\": \"NamedSharding\", \"shape\": [4], \"axis_names\": [\"x\"],
               \"partition_spec\": [\"x\", null], \"device_mesh\": {\"mesh\": [{\"id\": 0}, ...]}}"}

The key is the array's name in base 64. Several axes of a dimension shard it like the flat sharding
`x y`. Other kinds of shardings, and missing entries, are ignored: the chunks suffice to read
arrays.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard._validation import MAX_RANKS
from reshard.checkpoint.formats.orbax.ocdbt import MAX_NODE_BYTES
from reshard.checkpoint.storage.filesystem import read_file
from reshard.errors import ReshardError
from reshard.layout import Box
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec, spec

SHARDING_NAME = "_sharding"


def read_shardings(folder: Path) -> dict[str, ShardingSpec]:
    """Read the shardings of arrays by name; the result is empty if the file is missing."""
    path = folder / SHARDING_NAME
    if not path.exists():
        return {}
    result: dict[str, ShardingSpec] = {}
    try:
        content = json.loads(read_file(path, MAX_NODE_BYTES))
        pairs = list(content.items())
    except (ValueError, AttributeError, RecursionError):
        return {}
    # Arrays of a model share few shardings.
    parsed: dict[str, ShardingSpec | None] = {}
    for key, text in pairs:
        try:
            name = base64.b64decode(key, validate=True).decode()
        except (binascii.Error, ValueError):
            continue
        if isinstance(text, str):
            if text not in parsed:
                parsed[text] = _read(text)
            sharding = parsed[text]
            if sharding is not None:
                result[name] = sharding
    return result


def _read(text: str) -> ShardingSpec | None:
    """Parse a sharding of JAX; return None if it is of another kind."""
    try:
        described = json.loads(text)
        if described["sharding_type"] != "NamedSharding":
            return None
        shape = [int(size) for size in described["shape"]]
        mesh = _make_mesh(shape, described["axis_names"], described.get("device_mesh"))
        dims = [_axes(entry) for entry in described["partition_spec"]]
        return spec(mesh, ", ".join(dims)) if dims else spec(mesh, "")
    except (ReshardError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _axes(entry: Any) -> str:
    if entry is None:
        return "-"
    axes = [entry] if isinstance(entry, str) else list(entry)
    return " ".join(map(str, axes)) or "-"


def _make_mesh(shape: list[int], names: Any, devices: Any) -> DeviceMesh:
    mesh = DeviceMesh("mesh", shape, [str(name) for name in names])
    if devices is None or mesh.size > MAX_RANKS:
        return mesh
    ids = list(_list_ids(devices["mesh"]))
    # Other ids of devices do not determine an order of ranks.
    return (
        DeviceMesh("mesh", shape, mesh.axis_names, ids)
        if sorted(ids) == list(range(mesh.size))
        else mesh
    )


def _list_ids(level: Any) -> Iterator[int]:
    if isinstance(level, Mapping):
        yield int(level["id"])
        return
    for inner in level:
        yield from _list_ids(inner)


def find_mesh(shardings: Mapping[str, ShardingSpec]) -> DeviceMesh | None:
    """Return the mesh of all shardings, or None if they have several or none."""
    meshes = {sharding.mesh for sharding in shardings.values()}
    return meshes.pop() if len(meshes) == 1 else None


def extend(sharding: ShardingSpec, ndim: int) -> ShardingSpec | None:
    """Extend a sharding of JAX, which may leave out the last dimensions, to `ndim` dimensions."""
    missing = ndim - len(sharding.dim_specs)
    if missing < 0:
        return None
    if not missing:
        return sharding
    text = ", ".join([str(sharding), *["-"] * missing] if sharding.dim_specs else ["-"] * ndim)
    return spec(sharding.mesh, text)


def find_owners(
    starts: Iterable[tuple[int, ...]], boxes: Sequence[tuple[Box, int]], default: int
) -> list[int]:
    """Return the rank of each chunk by its start: the rank whose box begins or extends there.

    A chunk outside all boxes belongs to the rank `default`.
    """
    # Mostly a chunk is a rank's box; only other chunks are searched for in all of the boxes.
    by_start = {box.start: slot for box, slot in boxes}
    return [
        by_start[start]
        if start in by_start
        else next((slot for box, slot in boxes if _has_index(box, start)), default)
        for start in starts
    ]


def _has_index(box: Box, index: tuple[int, ...]) -> bool:
    return all(a <= i < b for a, i, b in zip(box.start, index, box.stop, strict=True))


def sharding_bytes(mesh: DeviceMesh | None, specs: Mapping[str, str | None]) -> bytes:
    """Return the content of `_sharding` for arrays on a mesh, by name and the text of their
    sharding.

    JAX expects an entry for every array: arrays with other shardings than its own are replicated.
    """
    encoded = {}
    for name, text in specs.items():
        if mesh is None:
            continue
        entries = None if text is None else _list_entries(mesh, text)
        described = {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape),
            "axis_names": list(mesh.axis_names),
            "axis_types": ["AxisType.Auto"] * len(mesh.shape),
            "partition_spec": entries or [],
            "device_mesh": {"mesh": _nest_ids(list(mesh.devices), list(mesh.shape))},
        }
        encoded[base64.b64encode(name.encode()).decode()] = json.dumps(described)
    return json.dumps(encoded).encode()


def _list_entries(mesh: DeviceMesh, text: str) -> list[str | list[str] | None] | None:
    """Return the entries of a partition spec, or None if JAX lacks such a sharding."""
    sharding = spec(mesh, text)
    entries: list[str | list[str] | None] = []
    for dimension in sharding.dim_specs:
        if len(dimension.levels) > 1:
            return None
        axes: list[str] = []
        for level in dimension.levels:
            if not level.rule.is_default or not all(axis.is_full for axis in level.axes):
                return None
            axes += [axis.name for axis in level.axes]
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return entries


def _nest_ids(ids: list[int], shape: list[int]) -> list[Any]:
    if len(shape) <= 1:
        return [{"id": number} for number in ids]
    step = len(ids) // shape[0]
    return [_nest_ids(ids[at : at + step], shape[1:]) for at in range(0, len(ids), step)]
