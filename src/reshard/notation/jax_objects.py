"""Live objects of JAX: `PartitionSpec`, `NamedSharding`, single devices, arrays, meshes.

They are read without importing jax, recognised by the module of their type; making them imports
it. A rank is the id of a device. Memory kinds and the types of mesh axes say nothing about where
elements are, and are not read.

Source: JAX, `jax.sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reshard.errors import MissingExtraError, NotationError
from reshard.mesh import DeviceMesh
from reshard.notation.hlo import parse_hlo
from reshard.notation.jax import PARTITION_SPECS, entries_of, sharding_of_entries
from reshard.notation.scanner import reading
from reshard.sharding import ShardingSpec


def is_jax(value: object) -> bool:
    """Whether an object is one of JAX's; jax is not imported."""
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def sharding_of_jax(
    sharding: Any, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """The sharding of a JAX object. Ranks are the ids of its devices.

    Args:
        sharding: a `PartitionSpec`, `NamedSharding` or `SingleDeviceSharding`, or an array
            with one of the last two.
        mesh: for a `PartitionSpec`, which has none.
        shape: of the tensor, to add the entries that are left out; an array has its own.

    Raises:
        NotationError: another object, a `PartitionSpec` without a mesh, a mesh that is empty.
    """
    if not is_jax(sharding):
        kind = type(sharding).__name__
        raise NotationError(f"{kind} is no object of JAX; give a PartitionSpec or a sharding")
    if hasattr(sharding, "sharding") and hasattr(sharding, "shape"):
        sharding, shape = sharding.sharding, sharding.shape
    kind = type(sharding).__name__
    with reading("JAX", repr(sharding)):
        if kind == "SingleDeviceSharding":
            (device,) = sharding.device_set
            if shape is None:
                raise NotationError("a single device; give the shape of the tensor it holds")
            return ShardingSpec(DeviceMesh("mesh", (), (), [device.id]), [()] * len(shape))
        if kind == "NamedSharding":
            return _read_partition_spec(sharding.spec, mesh_of(sharding.mesh), shape)
        if kind in ("GSPMDSharding", "HloSharding"):
            return _read_tile_assignment(sharding, mesh, shape)
        if kind not in PARTITION_SPECS:
            raise NotationError(
                f"a {kind} names no mesh axes; give a PartitionSpec, NamedSharding, GSPMDSharding "
                "or SingleDeviceSharding"
            )
        if mesh is None:
            raise NotationError("a PartitionSpec names mesh axes; give a mesh")
        return _read_partition_spec(sharding, mesh, shape)


def _read_tile_assignment(
    sharding: Any, mesh: DeviceMesh | None, shape: Sequence[int] | None
) -> ShardingSpec:
    """Return the sharding of an `HloSharding`, or of a `GSPMDSharding`, which has devices too."""
    if not hasattr(sharding, "_device_assignment"):
        return parse_hlo(str(sharding), mesh, shape)
    # The numbers in the text are places in this list of devices.
    ids = [device.id for device in sharding._device_assignment]
    text = str(sharding._hlo_sharding)
    if mesh is not None:
        if mesh.devices != tuple(ids):
            raise NotationError(
                f"a sharding of the devices {ids}, where the mesh {mesh.text} has the ranks "
                f"{[*mesh.devices]}; give the mesh in the order of the sharding's devices, or none"
            )
        return parse_hlo(text, mesh, shape)
    if "devices=" not in text:
        return parse_hlo(text, DeviceMesh("mesh", (len(ids),), ("devices",), ids), shape)
    found = parse_hlo(text, None, shape)
    ranks = [ids[number] for number in found.mesh.devices]
    own = DeviceMesh(found.mesh.name, found.mesh.shape, found.mesh.axis_names, ranks)
    return ShardingSpec(own, found.dim_specs, partial_axes=found.partial_axes)


def _read_partition_spec(
    partition_spec: Any, mesh: DeviceMesh, shape: Sequence[int] | None
) -> ShardingSpec:
    # Older versions of JAX have no `partitions`, newer ones forbid to iterate without it.
    has_partitions = hasattr(partition_spec, "partitions")
    entries = partition_spec.partitions if has_partitions else tuple(partition_spec)
    is_open = type(partition_spec).UNCONSTRAINED
    return sharding_of_entries(
        mesh,
        [None if entry is is_open else _check_names(entry) for entry in entries],
        _check_names(tuple(getattr(partition_spec, "unreduced", None) or ())),
        _check_names(tuple(getattr(partition_spec, "reduced", None) or ())),
        shape,
    )


def _check_names(entry: Any) -> tuple[str, ...]:
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    for axis in axes:
        if not isinstance(axis, str):
            raise NotationError(f"mesh axis {axis!r} is not named by a text; rename it")
    return axes


def mesh_of(mesh: Any) -> DeviceMesh:
    """The mesh of a JAX `Mesh`, its devices by their ids, or of an `AbstractMesh`.

    Raises:
        NotationError: another object, an empty mesh, axes that are not named by texts.
    """
    kind = type(mesh).__name__
    if not is_jax(mesh) or kind not in ("Mesh", "AbstractMesh"):
        raise NotationError(f"{kind} is no mesh of JAX; give a Mesh or an AbstractMesh")
    names = _check_names(tuple(mesh.axis_names))
    if kind == "AbstractMesh":
        return DeviceMesh("mesh", mesh.axis_sizes, names)
    if mesh.empty:
        raise NotationError("an empty mesh of JAX has no devices; give one with devices")
    return DeviceMesh(
        "mesh", mesh.devices.shape, names, [device.id for device in mesh.devices.flat]
    )


def to_partition_spec(spec: ShardingSpec) -> Any:
    """The `jax.sharding.PartitionSpec` of a sharding. Imports jax.

    Raises:
        MissingExtraError: jax is not installed.
        NotationError: a part of the sharding that JAX cannot express.
    """
    entries, unreduced = entries_of(spec)
    partition_spec = _import_jax().sharding.PartitionSpec
    open_entry = partition_spec.UNCONSTRAINED
    items = [open_entry if entry is None else entry or None for entry in entries]
    return partition_spec(*items, **({"unreduced": set(unreduced)} if unreduced else {}))


def to_named_sharding(spec: ShardingSpec, devices: Iterable[Any] | None = None) -> Any:
    """The `jax.sharding.NamedSharding` of a sharding. Imports jax.

    Args:
        spec: whose ranks are ids of devices.
        devices: where to look for them; `jax.devices()` when None.

    Raises:
        MissingExtraError: jax is not installed.
        NotationError: a part of the sharding that JAX cannot express, a rank without a device.
    """
    partition_spec = to_partition_spec(spec)
    jax = _import_jax()
    by_id = {device.id: device for device in (jax.devices() if devices is None else devices)}
    missing = [rank for rank in spec.mesh.devices if rank not in by_id]
    if missing:
        raise NotationError(
            f"no device for rank {missing[0]} of the mesh {spec.mesh!r}; the devices of JAX have "
            f"the ids {sorted(by_id)}"
        )
    # Filled by a slice: np.array would look into devices for sequences.
    places = np.empty(spec.mesh.size, dtype=object)
    places[:] = [by_id[rank] for rank in spec.mesh.devices]
    kinds = {}
    if spec.partial_axes:
        # JAX allows unreduced axes of this type alone.
        explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
        unreduced = {axis.name for axis in spec.partial_axes}
        types = tuple(explicit if name in unreduced else auto for name in spec.mesh.axis_names)
        kinds = {"axis_types": types}
    mesh = jax.sharding.Mesh(places.reshape(spec.mesh.shape), spec.mesh.axis_names, **kinds)
    try:
        return jax.sharding.NamedSharding(mesh, partition_spec)
    except ValueError as error:
        # What meshes of one type of axes may have differs between the versions of JAX.
        raise NotationError(f"JAX refuses the sharding `{spec}`: {error}") from error


def _import_jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise MissingExtraError(
            "objects of JAX need jax, which is not installed; install it with: pip install jax"
        ) from error
    return jax
