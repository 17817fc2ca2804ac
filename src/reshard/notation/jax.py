"""The texts of JAX's shardings: `PartitionSpec`, and what `NamedSharding` prints.

One entry a dimension says which mesh axes cut it, major to minor::

    PartitionSpec('x', ('y', 'z'), None)       rows over x, columns over y and z, the rest whole
    P(UNCONSTRAINED, 'x')                      rows are left to propagation
    P('x', unreduced={'y'})                    contributions to a sum along y

Cuts are by ceil, as GSPMD makes them; JAX itself puts only shapes that divide on devices.
Objects of JAX are read and made in `reshard.notation.jax_objects`.

Source: JAX, `jax.sharding`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.mesh_order import in_mesh_order
from reshard.notation.scanner import reading
from reshard.notation.vocabulary import Vocabulary
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
    """The sharding that a JAX text writes.

    Args:
        text: `PartitionSpec(...)` or `P(...)`, or what `NamedSharding` prints.
        mesh: whose axes are named; None where the text is a `NamedSharding`, which prints its
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
    with reading("JAX", text):
        body = text.strip()
        if re.match(r"(?:\w+\.)*NamedSharding\(", body):
            body, mesh = _read_named_sharding(body, mesh)
        if mesh is None:
            raise NotationError("a PartitionSpec names mesh axes; give a mesh, such as x=2,y=3")
        return sharding_of_entries(mesh, *_read_partition_spec(body), shape)


def _read_named_sharding(text: str, mesh: DeviceMesh | None) -> tuple[str, DeviceMesh]:
    """The text of the PartitionSpec in what a `NamedSharding` prints, and its mesh."""
    match = re.search(r"\b(?:PartitionSpec|P)\(", text)
    if not match:
        raise NotationError("a NamedSharding without a PartitionSpec; write its spec as P(...)")
    depth = 0
    # Up to the bracket that closes the PartitionSpec: its entries may have brackets of their own.
    for end in range(match.start(), len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if text[end] == ")" and not depth:
            break
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
        # The printed mesh has no devices, so a given one with the same axes knows more.
        mesh = mesh or written
    if mesh is None:
        raise NotationError("a NamedSharding whose mesh is not printed; give a mesh")
    return text[match.start() : end + 1], mesh


def _read_partition_spec(text: str) -> tuple[list[Entry], list[str], list[str]]:
    """The entries, the unreduced and the reduced axes of a text."""
    try:
        # A backslash would be an escape in Python; no axis name has one.
        call = None if "\\" in text else ast.parse(text, mode="eval").body
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
    """The last name of `P` or `jax.sharding.P`."""
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
    except RecursionError:
        return "..."


def sharding_of_entries(
    mesh: DeviceMesh,
    entries: Sequence[Entry],
    unreduced: Iterable[str],
    reduced: Iterable[str],
    shape: Sequence[int] | None,
) -> ShardingSpec:
    """The sharding whose dimensions are cut over `entries`; see `parse_jax`.

    Args:
        mesh: whose axes the entries name.
        entries: the axes of each dimension.
        unreduced: axes along which there are contributions to a sum.
        reduced: axes along which copies are asked for.
        shape: of the tensor, to add entries that were left out.

    Raises:
        NotationError: more entries than dimensions.
        MeshError, SpecError: axes that are unknown or used twice.
    """
    entries = list(entries)
    if shape is not None:
        if len(entries) > len(shape):
            raise NotationError(
                f"{len(entries)} entries for a tensor of shape {list(shape)}; give at most one a "
                "dimension"
            )
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
    """The `PartitionSpec` of a sharding, as text. The mesh stays apart.

    Raises:
        NotationError: a part of the sharding that JAX cannot express, such as a cut rule.

    >>> from reshard.sharding_text import spec
    >>> jax_text(spec(DeviceMesh.of(x=2, y=2, z=2), "x y, -, ? | sum(z)"))
    "PartitionSpec(('x', 'y'), None, PartitionSpec.UNCONSTRAINED, unreduced={'z'})"
    """
    entries, unreduced = entries_of(spec)
    words = [_write_entry(entry) for entry in entries]
    if unreduced:
        words.append(f"unreduced={{{', '.join(map(repr, unreduced))}}}")
    return f"PartitionSpec({', '.join(words)})"


def entries_of(spec: ShardingSpec) -> tuple[list[Entry], list[str]]:
    """The axes of each dimension of a sharding, and the unreduced axes.

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
