"""The notation of Shardy, the partitioner of XLA: meshes and shardings.

::

    sdy.mesh @cluster = <["dp"=2, "tp"=4]>                  two axes, devices 0 to 7
    sdy.mesh @ring = <["x"=4], device_ids=[0, 2, 3, 1]>     in an order of their own

    #sdy.sharding<@cluster, [{"dp", "tp"}, {}]>             rows over both axes
    #sdy.sharding<@cluster, [{"tp":(1)2, ?}p1, {}]>         part of an axis, open, priority 1
    #sdy.sharding<@cluster, [{}, {}], replicated={"dp"}, unreduced={"tp"}>

Read as well are `@cluster = <...>` without `sdy.mesh`, as the documents of Shardy and nabla
write it, a mesh written in a sharding's place (`<mesh<["x"=2]>, [{"x"}]>`), the sharding
without `#sdy.sharding`, and its list of dimensions alone. Dimensions are sharded by ceil.

Shardy's verifier accepts all that is written: adjacent sub-axes joined, a sub-axis
that is a whole axis called by its name, replicated and unreduced axes in the order of the mesh.
Text that it does not accept and that is meaningless is an error: an axis twice, sub-axes
that overlap or have size 1, a priority of a dimension that is empty and closed.

Source: the Shardy project, `shardy/dialect/sdy/ir/attrs.td` and `docs/sharding_representation.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.errors import MeshError, NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.parsing import Scanner, Vocabulary, in_mesh_order, reading, symbol_text
from reshard.sharding import DimSpec, ShardingSpec

_REDUCTIONS = ("sum", "max", "min")
_VOCABULARY = Vocabulary(
    "Shardy",
    reductions=_REDUCTIONS,
    has_sub_axes=True,
    has_open_dims=True,
    has_priorities=True,
    has_replicated_axes=True,
)


def parse_shardy(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that a Shardy text describes.

    Args:
        text: a sharding, after the meshes it may refer to.
        mesh: the devices, for a text without a mesh; it may have another name there.
        shape: of the tensor. On a mesh without axes, `[]` is for tensors of any shape.

    Raises:
        NotationError: text that cannot be read, an unknown mesh, a wrong number of dimensions.
        MeshError, SpecError: what Shardy's verifier refuses of meshes, axes and sub-axes.

    >>> mesh = DeviceMesh.of(x=8, y=2)
    >>> print(parse_shardy('#sdy.sharding<@mesh, [{"x":(1)2, ?}p1, {}], unreduced={"y"}>', mesh))
    x:(1)2 ?!1, - | sum(y)
    >>> print(parse_shardy('@m = <["a"=2, "b"=2]>  <@m, [{"b", "a"}]>'))
    b a
    """
    with reading("Shardy text", text):
        scanner = Scanner(text)
        meshes: dict[str, DeviceMesh] = {}
        while scanner.looks_at(r"sdy\.mesh\b|#sdy\.mesh\b|@"):
            definition = _read_mesh_definition(scanner)
            if definition.name in meshes:
                raise NotationError(
                    f"mesh @{definition.name} occurs twice; give each mesh its own name"
                )
            meshes[definition.name] = definition
        return _read_sharding(scanner, meshes, mesh, shape)


def parse_shardy_mesh(text: str) -> DeviceMesh:
    """Return the mesh that a Shardy text describes; it is called `mesh` if the text has no name.

    Raises:
        NotationError: text that cannot be read.
        MeshError: sizes below 1, a name twice, device ids that do not fit the axes.

    >>> parse_shardy_mesh('@cluster = <["dp"=2, "tp"=4]>')
    DeviceMesh('cluster', dp=2,tp=4)
    >>> parse_shardy_mesh('sdy.mesh @m = <["a"=2, "b"=2], device_ids=[0, 2, 1, 3]>').devices
    (0, 2, 1, 3)
    """
    with reading("Shardy text", text):
        scanner = Scanner(text)
        mesh = _read_mesh_definition(scanner)
        scanner.expect_end()
        return mesh


def _read_mesh_definition(scanner: Scanner) -> DeviceMesh:
    scanner.take(r"#?sdy\.mesh\b")
    name = scanner.symbol()
    if name is not None:
        scanner.expect("=")
    return _read_mesh(scanner, "mesh" if name is None else name)


def _read_mesh(scanner: Scanner, name: str) -> DeviceMesh:
    def axis() -> tuple[str, int]:
        axis_name = _read_name(scanner)
        scanner.expect("=")
        return axis_name, scanner.number()

    scanner.expect("<")
    axes = scanner.listed("[", axis, "]")
    devices = None
    if scanner.accept(","):
        scanner.expect("device_ids")
        scanner.expect("=")
        devices = scanner.numbers()
    scanner.expect(">")
    mesh = DeviceMesh(name, [size for _, size in axes], [axis for axis, _ in axes], devices)
    # A mesh without axes is a single device, whose id may be any.
    if axes and sorted(mesh.devices) != list(range(mesh.size)):
        raise MeshError(
            f"device_ids {list(mesh.devices)} of a mesh of {mesh.size} devices; each of 0 to "
            f"{mesh.size - 1} must occur once"
        )
    return mesh


def _read_name(scanner: Scanner) -> str:
    match = scanner.take(r'"([^"\\]*)"')
    if not match:
        raise scanner.failure('an axis in quotes, such as "x"')
    return match[1]


def _read_sharding(
    scanner: Scanner,
    meshes: dict[str, DeviceMesh],
    default_mesh: DeviceMesh | None,
    shape: Sequence[int] | None,
) -> ShardingSpec:
    scanner.take(r"sdy\.sharding\s*=")
    # A bare list of dimensions is over the only mesh of the text, or the given mesh.
    is_bare = not scanner.looks_at(r"#|<")
    marks: dict[str, tuple[str, list[Axis]]] = {}
    if is_bare:
        mesh = next(iter(meshes.values())) if len(meshes) == 1 else default_mesh
        dims = _read_dims(scanner)
    else:
        scanner.take(r"#sdy\.sharding\b")
        scanner.expect("<")
        mesh = _read_mesh_of_sharding(scanner, meshes, default_mesh)
        scanner.expect(",")
        dims = _read_dims(scanner)
        while scanner.accept(","):
            word, reduction, axes = _read_mark(scanner)
            if word in marks:
                raise NotationError(f"{word}={{...}} occurs twice; give its axes at once")
            marks[word] = reduction, axes
        scanner.expect(">")
    scanner.expect_end()
    if mesh is None:
        raise NotationError(
            'the axes are of no mesh; give a mesh, or write @mesh = <["x"=2, "y"=3]> before the '
            "sharding"
        )
    # On a mesh without axes Shardy prints no dimensions whatever the rank.
    if shape is not None and not mesh.axis_names and not dims:
        dims = [DimSpec()] * len(shape)
    if shape is not None and len(dims) != len(shape):
        raise NotationError(
            f"{len(dims)} dimensions for a tensor of shape {list(shape)}; write {{}} for a "
            "dimension that is not sharded"
        )
    reduction, unreduced = marks.get("unreduced", ("sum", []))
    return ShardingSpec(
        mesh,
        dims,
        marks.get("replicated", ("", []))[1],
        in_mesh_order(mesh, unreduced),
        reduction,
    )


def _read_mesh_of_sharding(
    scanner: Scanner, meshes: dict[str, DeviceMesh], default_mesh: DeviceMesh | None
) -> DeviceMesh | None:
    """Return the mesh of a sharding: its own, the mesh that its text names, or the given mesh."""
    name = scanner.symbol()
    if name is None:
        if not scanner.accept("mesh"):
            raise scanner.failure('a mesh: its name such as @mesh, or mesh<["x"=2]>')
        return _read_mesh(scanner, "mesh")
    if name in meshes:
        return meshes[name]
    if meshes:
        names = ", ".join(map(symbol_text, meshes))
        raise NotationError(f"unknown mesh {symbol_text(name)}; the text has {names}")
    return default_mesh


def _read_dims(scanner: Scanner) -> list[DimSpec]:
    return scanner.listed("[", lambda: _read_dim(scanner), "]")


def _read_dim(scanner: Scanner) -> DimSpec:
    scanner.expect("{")
    axes: list[Axis] = []
    is_open = False
    while not scanner.accept("}"):
        if axes:
            scanner.expect(",")
        # `?` comes last, whether axes precede it or not.
        if scanner.accept("?"):
            is_open = True
            scanner.expect("}")
            break
        axes.append(_read_axis(scanner))
    match = scanner.take(r"p(0|[1-9]\d{0,8})(?!\w)")
    if not match and scanner.looks_at("p"):
        raise scanner.failure("a priority such as p1")
    if match and not axes and not is_open:
        raise NotationError(
            f"the dimension {{}}{match[0]} is empty and closed and has a priority; open it as "
            f"{{?}}{match[0]}, or leave the priority out"
        )
    return DimSpec(axes, is_open, int(match[1]) if match else 0)


def _read_axis(scanner: Scanner) -> Axis:
    name = _read_name(scanner)
    if not scanner.accept(":"):
        return Axis(name)
    scanner.expect("(")
    pre = scanner.number()
    scanner.expect(")")
    axis = Axis(name, pre, scanner.number())
    if axis.size == 1:
        raise NotationError(f"sub-axis {axis} has size 1 and shards nothing; leave it out")
    return axis


def _read_mark(scanner: Scanner) -> tuple[str, str, list[Axis]]:
    match = scanner.take(r"(replicated|unreduced)\s*=")
    if not match:
        raise scanner.failure('replicated={"x"} or unreduced={"x"}')
    reduction = scanner.take(r"max|min") if match[1] == "unreduced" else None
    axes = scanner.listed("{", lambda: _read_axis(scanner), "}")
    return match[1], reduction[0] if reduction else "sum", axes


def shardy_text(spec: ShardingSpec) -> str:
    """Return the canonical attribute of a sharding, which refers to its mesh by name.

    Raises:
        NotationError: a part of the sharding that Shardy cannot express, such as a cut rule.

    >>> from reshard.sharding import spec
    >>> print(shardy_text(spec(DeviceMesh.of(x=8, y=2), "x:(1)2 ?!1, - | replicated(y)")))
    #sdy.sharding<@mesh, [{"x":(1)2, ?}p1, {}], replicated={"y"}>
    """
    _VOCABULARY.check(spec)
    used = [axis for dim in spec.dim_specs for axis in dim.axes]
    for axis in (*used, *spec.replicated_axes, *spec.partial_axes):
        if axis.size == 1:
            raise _VOCABULARY.refusal(spec, str(axis), "it has no sub-axes of size 1; leave it out")
    words = [symbol_text(spec.mesh.name), _write_dims(spec)]
    if spec.replicated_axes:
        words.append(f"replicated={write_axes(spec.replicated_axes)}")
    if spec.reduction is not None:
        reduction = "" if spec.reduction == "sum" else spec.reduction
        # In the order of the mesh, sub-axes may become adjacent.
        ordered = in_mesh_order(spec.mesh, spec.partial_axes)
        axes = ShardingSpec(spec.mesh, [], partial_axes=ordered).partial_axes
        words.append(f"unreduced={reduction}{write_axes(axes)}")
    return f"#sdy.sharding<{', '.join(words)}>"


def _write_dims(spec: ShardingSpec) -> str:
    if spec.mesh.axis_names:
        return f"[{', '.join(_write_dim(spec, dim) for dim in spec.dim_specs)}]"
    for dim in spec.dim_specs:
        if dim.is_open or dim.priority:
            raise _VOCABULARY.refusal(spec, str(dim), "on a mesh without axes it has no dimensions")
    return "[]"


def _write_dim(spec: ShardingSpec, dim: DimSpec) -> str:
    if dim.priority and not dim.axes and not dim.is_open:
        why = "it gives no priority to a dimension that is empty and closed; leave it out"
        raise _VOCABULARY.refusal(spec, str(dim), why)
    return write_axes(dim.axes, ["?"] * dim.is_open) + (f"p{dim.priority}" if dim.priority else "")


def write_axes(axes: Iterable[Axis], suffix: Sequence[str] = ()) -> str:
    """Return axes in braces, each whole or as a sub-axis, and then the words of `suffix`."""
    words = (
        f'"{axis.name}"' if axis.size is None else f'"{axis.name}":({axis.pre}){axis.size}'
        for axis in axes
    )
    return f"{{{', '.join([*words, *suffix])}}}"


def shardy_mesh_text(mesh: DeviceMesh) -> str:
    """Return the operation that defines a mesh, as Shardy prints it.

    Raises:
        NotationError: devices that are not 0 to n - 1 in some order.

    >>> print(shardy_mesh_text(DeviceMesh.of(name="ring", x=4, devices=[0, 2, 3, 1])))
    sdy.mesh @ring = <["x"=4], device_ids=[0, 2, 3, 1]>
    """
    order = list(range(mesh.size))
    if mesh.axis_names and sorted(mesh.devices) != order:
        raise NotationError(
            f"Shardy cannot express the devices {list(mesh.devices)} of the mesh {mesh.name!r}: it "
            f"numbers them 0 to {mesh.size - 1}"
        )
    axes = ", ".join(
        f'"{name}"={size}' for name, size in zip(mesh.axis_names, mesh.shape, strict=True)
    )
    # Shardy does not allow the order 0, 1, 2... to be written out; without axes it must be.
    is_written = list(mesh.devices) != order or not mesh.axis_names
    devices = f", device_ids={list(mesh.devices)}" if is_written else ""
    return f"sdy.mesh {symbol_text(mesh.name)} = <[{axes}]{devices}>"
