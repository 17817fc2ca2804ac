"""JAX's shardings: texts and live objects of `PartitionSpec` and `NamedSharding`.

An entry per dimension has the mesh axes that shard it, major to minor::

    PartitionSpec('x', ('y', 'z'), None)       rows over x, columns over y and z, the rest whole
    P(UNCONSTRAINED, 'x')                      rows are left to propagation
    P('x', unreduced={'y'})                    contributions to a sum along y

Dimensions are split by ceil, as by GSPMD; JAX itself accepts only shapes that divide evenly.

Live objects are recognised by the module of their type and read without importing jax; making them
imports it. A rank is the id of a device. Memory kinds and the types of mesh axes do not affect
where elements are, and are not read.

Source: JAX, `jax.sharding`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reshard.errors import MissingExtraError, NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.hlo import parse_hlo
from reshard.notation.parsing import Vocabulary, find_closing, in_mesh_order, reading
from reshard.sharding import DimSpec, ShardingSpec

_VOCABULARY = Vocabulary("JAX", reductions=("sum",), has_open_dims=True)
PARTITION_SPECS = ("PartitionSpec", "P")
_OPEN = "UNCONSTRAINED"
_MESH_AXIS = re.compile(r"'([^']*)':\s*(\d{1,18})(?!\d)")

Entry = tuple[str, ...] | None
"""The axes of one dimension; None for one that is not constrained."""


def parse_jax(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that a JAX text describes.

    Args:
        text: `PartitionSpec(...)` or `P(...)`, or a printed `NamedSharding`.
        mesh: whose axes are named; None if the text is a `NamedSharding`, which prints its
            axes but not the order of its devices: they are then taken as 0, 1, 2...
        shape: of the tensor. Trailing entries that are None may be left out, and are added when
            it is known.

    Raises:
        NotationError: text that cannot be read, more entries than dimensions.
        MeshError, SpecError: axes that are unknown or used twice.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> print(parse_jax("P(('x', 'y'))", mesh, shape=(6, 6)))
    x y, -
    >>> print(parse_jax("PartitionSpec(UNCONSTRAINED, None, unreduced={'x'})", mesh))
    ?, - | sum(x)
    """
    with reading("JAX text", text):
        body = text.strip()
        if re.match(r"(?:\w+\.)*NamedSharding\(", body):
            body, mesh = _read_named_sharding(body, mesh)
        if mesh is None:
            raise NotationError("a PartitionSpec names mesh axes; give a mesh, such as x=2,y=3")
        return sharding_of_entries(mesh, *_read_partition_spec(body), shape)


def _read_named_sharding(text: str, mesh: DeviceMesh | None) -> tuple[str, DeviceMesh]:
    """Return the text of the PartitionSpec in a printed `NamedSharding`, and its mesh."""
    match = re.search(r"\b(?:PartitionSpec|P)\(", text)
    if not match:
        raise NotationError("a NamedSharding without a PartitionSpec; write its spec as P(...)")
    end = find_closing(text, match.end() - 1)
    printed = dict(_MESH_AXIS.findall(text[: match.start()]))
    if printed:
        written = DeviceMesh("mesh", [int(size) for size in printed.values()], list(printed))
        if mesh is not None and (mesh.axis_names, mesh.shape) != (
            written.axis_names,
            written.shape,
        ):
            raise NotationError(
                f"a NamedSharding over the mesh {written.text}, where the mesh {mesh.text} was "
                "given; give the same axes"
            )
        # The printed mesh lacks devices, so a given mesh with the same axes is preferred.
        mesh = mesh or written
    if mesh is None:
        raise NotationError("a NamedSharding whose mesh is not printed; give a mesh")
    return text[match.start() : None if end is None else end + 1], mesh


def _read_partition_spec(text: str) -> tuple[list[Entry], list[str], list[str]]:
    """Return the entries, the unreduced and the reduced axes of a text."""
    try:
        # A backslash would be an escape in Python; axis names do not contain it.
        call = None if "\\" in text else ast.parse(text, mode="eval").body
    # Python's parser reports deep nesting as a RecursionError or a MemoryError.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call) or _find_name(call.func) not in PARTITION_SPECS:
        raise NotationError(f"cannot read {text!r}; write PartitionSpec('x', ('y', 'z'), None)")
    named: dict[str | None, list[str]] = {}
    for keyword in call.keywords:
        if keyword.arg not in ("unreduced", "reduced"):
            raise NotationError(f"unknown argument {keyword.arg!r}; it is unreduced or reduced")
        if keyword.arg in named:
            raise NotationError(f"{keyword.arg} is given twice; give its axes at once")
        named[keyword.arg] = _read_axis_names(keyword.value)
    entries = [_read_entry(node) for node in call.args]
    return entries, named.get("unreduced", []), named.get("reduced", [])


def _find_name(node: ast.expr) -> str | None:
    """Return the last name of `P` or `jax.sharding.P`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _read_entry(node: ast.expr) -> Entry:
    if _find_name(node) == _OPEN:
        return None
    if isinstance(node, ast.Constant) and node.value is None:
        return ()
    return tuple(_read_axis_names(node))


def _read_axis_names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [name for item in node.elts for name in _read_axis_names(item)]
    if isinstance(node, ast.Call) and _find_name(node.func) in ("set", "frozenset"):
        return [name for item in node.args for name in _read_axis_names(item)]
    raise NotationError(
        f"cannot read the entry {_unparse(node)!r}; it is None, an axis such as 'x', a tuple of "
        f"axes, or {_OPEN}"
    )


def _unparse(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    # Deep nesting that can be parsed may be too deep to be written.
    except RecursionError:
        return "..."


def sharding_of_entries(
    mesh: DeviceMesh,
    entries: Sequence[Entry],
    unreduced: Iterable[str],
    reduced: Iterable[str],
    shape: Sequence[int] | None,
) -> ShardingSpec:
    """Return the sharding whose dimensions are sharded over `entries`; see `parse_jax`.

    Args:
        mesh: whose axes the entries name.
        entries: the axes of each dimension.
        unreduced: axes along which there are contributions to a sum.
        reduced: axes along which copies are requested.
        shape: of the tensor, to add entries that were left out.

    Raises:
        NotationError: more entries than dimensions.
        MeshError, SpecError: axes that are unknown or used twice.
    """
    entries = list(entries)
    if shape is not None:
        if len(entries) > len(shape):
            raise NotationError(
                f"{len(entries)} entries for a tensor of shape {list(shape)}; give at most "
                f"{len(shape)}"
            )
        # JAX leaves trailing dimensions that are not sharded out of a PartitionSpec.
        entries += [()] * (len(shape) - len(entries))
    return ShardingSpec(
        mesh,
        [
            DimSpec(is_open=True) if entry is None else DimSpec([Axis(name) for name in entry])
            for entry in entries
        ],
        replicated_axes=[Axis(name) for name in reduced],
        partial_axes=in_mesh_order(mesh, [Axis(name) for name in unreduced]),
    )


def jax_text(spec: ShardingSpec) -> str:
    """Return the `PartitionSpec` of a sharding, as text. The mesh is not part of it.

    Raises:
        NotationError: a part of the sharding that JAX cannot express, such as a cut rule.

    >>> from reshard.sharding import spec
    >>> jax_text(spec(DeviceMesh.of(x=2, y=2, z=2), "x y, -, ? | sum(z)"))
    "PartitionSpec(('x', 'y'), None, PartitionSpec.UNCONSTRAINED, unreduced={'z'})"
    """
    entries, unreduced = entries_of(spec)
    words = [_write_entry(entry) for entry in entries]
    if unreduced:
        words.append(f"unreduced={{{', '.join(map(repr, unreduced))}}}")
    return f"PartitionSpec({', '.join(words)})"


def entries_of(spec: ShardingSpec) -> tuple[list[Entry], list[str]]:
    """Return the axes of each dimension of a sharding, and the unreduced axes.

    Raises:
        NotationError: a part of the sharding that JAX cannot express.
    """
    _VOCABULARY.check(spec)
    for dim in spec.dim_specs:
        if dim.is_open and dim.levels:
            why = f"an open dimension is {_OPEN} and has no axes of its own"
            raise _VOCABULARY.refusal(spec, str(dim), why)
    entries = [
        None if dim.is_open else tuple(axis.name for axis in dim.axes) for dim in spec.dim_specs
    ]
    return entries, [axis.name for axis in in_mesh_order(spec.mesh, spec.partial_axes)]


def _write_entry(entry: Entry) -> str:
    if entry is None:
        return f"PartitionSpec.{_OPEN}"
    if not entry:
        return "None"
    return repr(entry[0]) if len(entry) == 1 else repr(entry)


def is_jax(value: object) -> bool:
    """Return whether an object is from JAX; jax is not imported."""
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def sharding_of_jax(
    sharding: Any, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding of a JAX object. Ranks are the ids of its devices.

    Args:
        sharding: a `PartitionSpec`, `NamedSharding` or `SingleDeviceSharding`, or an array
            with a `NamedSharding` or `SingleDeviceSharding`.
        mesh: for a `PartitionSpec`, which has none.
        shape: of the tensor, to add the entries that are left out; the shape of an array is known.

    Raises:
        NotationError: another object, a `PartitionSpec` without a mesh, a mesh that is empty.
    """
    if not is_jax(sharding):
        kind = type(sharding).__name__
        raise NotationError(f"{kind} is not an object of JAX; give a PartitionSpec or a sharding")
    if hasattr(sharding, "sharding") and hasattr(sharding, "shape"):
        sharding, shape = sharding.sharding, sharding.shape
    kind = type(sharding).__name__
    with reading("JAX sharding", repr(sharding)):
        if kind == "SingleDeviceSharding":
            (device,) = sharding.device_set
            if shape is None:
                raise NotationError("a single device; give the shape of the tensor it holds")
            return ShardingSpec(DeviceMesh("mesh", (), (), [device.id]), [()] * len(shape))
        if kind == "NamedSharding":
            return _read_spec_object(sharding.spec, mesh_of(sharding.mesh), shape)
        if kind in ("GSPMDSharding", "HloSharding"):
            return _read_tile_assignment(sharding, mesh, shape)
        if kind not in PARTITION_SPECS:
            raise NotationError(
                f"a {kind} names no mesh axes; give a PartitionSpec, NamedSharding, GSPMDSharding "
                "or SingleDeviceSharding"
            )
        if mesh is None:
            raise NotationError("a PartitionSpec names mesh axes; give a mesh")
        return _read_spec_object(sharding, mesh, shape)


def _read_tile_assignment(
    sharding: Any, mesh: DeviceMesh | None, shape: Sequence[int] | None
) -> ShardingSpec:
    """Return the sharding of an `HloSharding`, or of a `GSPMDSharding`, which has devices too."""
    if not hasattr(sharding, "_device_assignment"):
        return parse_hlo(str(sharding), mesh, shape)
    # The numbers in the text are places in this list of devices.
    # JAX lacks a public attribute for this list.
    ids = [device.id for device in sharding._device_assignment]
    text = str(sharding._hlo_sharding)
    if mesh is not None:
        if mesh.devices != tuple(ids):
            raise NotationError(
                f"a sharding of the devices {ids}, where the mesh {mesh.text} has the ranks "
                f"{[*mesh.devices]}; give the mesh in the order of the sharding's devices, or none"
            )
        return parse_hlo(text, mesh, shape)
    # `{replicated}` and `{maximal device=0}` list no devices: all of them form an axis.
    if "devices=" not in text:
        return parse_hlo(text, DeviceMesh("mesh", (len(ids),), ("devices",), ids), shape)
    # The text numbers positions in the list of devices, so the axes are its own, and their
    # devices are replaced by ids.
    spec = parse_hlo(text, None, shape)
    ranks = [ids[number] for number in spec.mesh.devices]
    return spec.replace(mesh=spec.mesh.replace(devices=ranks))


def _read_spec_object(
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
    """Return the mesh of a JAX `Mesh`, its devices by their ids, or of an `AbstractMesh`.

    Raises:
        NotationError: another object, an empty mesh, axes that are not named by texts.
    """
    kind = type(mesh).__name__
    if not is_jax(mesh) or kind not in ("Mesh", "AbstractMesh"):
        raise NotationError(f"{kind} is not a mesh of JAX; give a Mesh or an AbstractMesh")
    names = _check_names(tuple(mesh.axis_names))
    if kind == "AbstractMesh":
        return DeviceMesh("mesh", mesh.axis_sizes, names)
    if mesh.empty:
        raise NotationError("an empty mesh of JAX has no devices; give a mesh with devices")
    return DeviceMesh(
        "mesh", mesh.devices.shape, names, [device.id for device in mesh.devices.flat]
    )


def to_partition_spec(spec: ShardingSpec) -> Any:
    """Return the `jax.sharding.PartitionSpec` of a sharding. Imports jax.

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
    """Return the `jax.sharding.NamedSharding` of a sharding. Imports jax.

    Args:
        spec: whose ranks are ids of devices.
        devices: the candidates; by default `jax.devices()`.

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
        # The axis types that a mesh may mix differ between versions of JAX.
        raise NotationError(f"JAX refuses the sharding `{spec}`: {error}") from error


def _import_jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise MissingExtraError(
            "objects of JAX need jax, which is not installed; install it with: pip install jax"
        ) from error
    return jax
