"""The sharding notation of MLIR's `shard` dialect, called `mesh` before.

Mesh axes have numbers, not names, and a list per dimension has the axes that shard it::

    [[0, 1], []]                                rows over axes 0 and 1, columns whole
    [[0]] partial = sum[1]                      contributions to a sum along axis 1
    [[0]] halo_sizes = [1, 2]                   copies of 1 and 2 neighbours around each part
    [[0]] sharded_dims_offsets = [0, 24, 32]    parts 0:24 and 24:32

Such lists are read alone, and in the texts of the dialect: `shard.sharding @grid
split_axes = [[0]] : !shard.sharding`, `mesh.sharding`, the older `#mesh.shard<@mesh, [[0]]>`,
each after the `shard.grid @grid(shape = 2x3)` or `mesh.mesh` that it names, if given.
Dimensions are split by ceil (`K ceildiv M`). With halos every part is equally wide, so the part of
a halo beyond the ends of a dimension is padding.

Source: the LLVM project, `mlir/include/mlir/Dialect/Shard/IR/ShardOps.td`, and `MeshOps.td`
before it, for the partial axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from reshard.cut_rules import Ceil, CutRule, Halo, Sizes
from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.parsing import Scanner, Vocabulary, reading, symbol_text
from reshard.sharding import DimSpec, Level, ShardingSpec

_REDUCTIONS = {
    "sum": "sum",
    "max": "max",
    "min": "min",
    "product": "product",
    "average": "mean",
}
_WORDS = {ours: theirs for theirs, ours in _REDUCTIONS.items()}
_VOCABULARY = Vocabulary("MLIR", rules=(Halo, Sizes), reductions=tuple(_WORDS))

_OPERATION = r"(?:%\w+\s*=\s*)?(?:shard|mesh)\.sharding\b"
_ATTRIBUTE = r"(?:#(?:shard|mesh)\.shard(?:ing)?\s*)?<(?=\s*@)"
_GRID = r"(?:shard\.grid|mesh\.mesh)\b"


def parse_mlir(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that an MLIR text describes.

    Args:
        text: axis lists, or the text of an operation or attribute of the dialect.
        mesh: whose axes are numbered; None if the text has a `shard.grid`, whose axes are
            called axis0, axis1 and so on.
        shape: of the tensor. Lists of trailing dimensions that are whole may be left out, and
            are added when it is known.

    Raises:
        NotationError: text that cannot be read, unknown axis numbers, a wrong number of
            lists, halo sizes or offsets, or dynamic sizes.
        SpecError: an axis used twice.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> print(parse_mlir("[[1, 0]]", mesh, shape=(6, 6)))
    y x, -
    >>> print(parse_mlir("shard.sharding @mesh split_axes = [[], [1]] halo_sizes = [1, 1]", mesh))
    -, y@halo[1,1,padded]
    """
    with reading("MLIR text", text):
        scanner = Scanner(text)
        grids = {}
        while scanner.take(_GRID):
            grid = _read_grid(scanner)
            grids[grid.name] = grid
        grid_name, is_attribute = _read_prefix(scanner)
        if grid_name in grids:
            mesh = grids[grid_name]
        elif grids and grid_name is not None:
            names = ", ".join(map(symbol_text, grids))
            raise NotationError(f"unknown grid @{grid_name}; the text has {names}")
        # Lists without the name of a grid belong to the only grid of the text.
        elif len(grids) == 1:
            (mesh,) = grids.values()
        if mesh is None:
            raise NotationError(
                "the axis numbers are of no mesh; give a mesh, or write `shard.grid @grid(shape = "
                "2x3)` before the sharding"
            )
        return _read_sharding(scanner, mesh, shape, is_attribute=is_attribute)


def parse_mlir_mesh(text: str) -> DeviceMesh:
    """Return the mesh of `shard.grid @grid(shape = 2x3)` or `mesh.mesh`.

    Raises:
        NotationError: text that cannot be read, a `?` for a size.

    >>> parse_mlir_mesh("shard.grid @grid(shape = 2x3)")
    DeviceMesh('grid', axis0=2,axis1=3)
    """
    with reading("MLIR text", text):
        scanner = Scanner(text)
        if not scanner.take(_GRID):
            raise scanner.failure("`shard.grid @grid(shape = 2x3)`")
        mesh = _read_grid(scanner)
        scanner.expect_end()
        return mesh


def _read_grid(scanner: Scanner) -> DeviceMesh:
    name = scanner.symbol()
    if name is None:
        raise scanner.failure("a name such as @grid")
    scanner.expect("(")
    scanner.expect("shape")
    scanner.expect("=")
    match = scanner.take(r"\d{1,18}(?:\s*x\s*\d{1,18})*(?!\d)")
    if not match:
        raise scanner.failure("the sizes of the axes, such as 2x3, each of them known")
    scanner.expect(")")
    sizes = [int(size) for size in match[0].split("x")]
    return DeviceMesh(name, sizes, [f"axis{number}" for number in range(len(sizes))])


def _read_prefix(scanner: Scanner) -> tuple[str | None, bool]:
    """Read the name of the grid, if any. Also return whether the text is an attribute."""
    # An attribute is closed by `>`, which an operation is not.
    is_attribute = False
    if not scanner.take(_OPERATION):
        is_attribute = scanner.take(_ATTRIBUTE) is not None
        if not is_attribute:
            return None, False
    name = scanner.symbol()
    if name is None:
        raise scanner.failure("the name of a grid, such as @grid")
    scanner.accept(",")
    return name, is_attribute


def _read_sharding(
    scanner: Scanner, mesh: DeviceMesh, shape: Sequence[int] | None, *, is_attribute: bool
) -> ShardingSpec:
    """Read the axis lists and the keywords after them, up to the end."""
    if scanner.accept("split_axes"):
        scanner.expect("=")
    dims = [
        [_find_axis(number, mesh) for number in numbers]
        for numbers in scanner.listed("[", scanner.numbers, "]")
    ]
    scanner.accept(",")
    reduction, partial_axes = "sum", []
    if scanner.accept("partial"):
        scanner.expect("=")
        word = scanner.take(r"\w+")
        if not word or word[0] not in _REDUCTIONS:
            described = f"the reduction {word[0]!r}" if word else "no reduction"
            raise NotationError(f"{described} of partial axes; expected {', '.join(_REDUCTIONS)}")
        reduction = _REDUCTIONS[word[0]]
        partial_axes = [_find_axis(number, mesh) for number in scanner.numbers()]
        scanner.accept(",")
    halo_sizes, offsets = (
        _read_numbers(scanner, keyword) for keyword in ("halo_sizes", "sharded_dims_offsets")
    )
    if is_attribute:
        scanner.expect(">")
    # The type of an operation, `!shard.sharding`, is always the same.
    if scanner.accept(":"):
        scanner.take(r"[!\w.<>]+")
    scanner.expect_end()
    if halo_sizes and offsets:
        raise NotationError(
            "halo_sizes and sharded_dims_offsets together; MLIR allows either, not both"
        )
    if shape is not None:
        # Empty lists are redundant, so surplus empty lists at the end are dropped.
        while len(dims) > len(shape) and not dims[-1]:
            dims.pop()
        if len(dims) > len(shape):
            raise NotationError(
                f"{len(dims)} lists of axes for a tensor of shape {list(shape)}; give at most "
                f"{len(shape)}"
            )
        dims += [[] for _ in range(len(shape) - len(dims))]
    # Halo sizes and offsets are listed for sharded dimensions only, so rules are taken in turn.
    parts = [mesh.joint_size(axes) for axes in dims if axes]
    rules = _make_rules(halo_sizes, offsets, parts)
    return ShardingSpec(
        mesh,
        [DimSpec([Level(axes, next(rules))]) if axes else DimSpec() for axes in dims],
        partial_axes=partial_axes,
        reduction=reduction,
    )


def _read_numbers(scanner: Scanner, keyword: str) -> list[int]:
    """Read `keyword = [1, 2]`, if it is here."""
    if not scanner.accept(keyword):
        return []
    scanner.expect("=")
    numbers = scanner.numbers()
    scanner.accept(",")
    return numbers


def _find_axis(number: int, mesh: DeviceMesh) -> Axis:
    if not 0 <= number < len(mesh.axis_names):
        raise NotationError(
            f"mesh axis {number} of a mesh of {len(mesh.axis_names)} axes ({mesh.text}); they are "
            "numbered from 0"
        )
    return Axis(mesh.axis_names[number])


def _make_rules(halo_sizes: list[int], offsets: list[int], parts: list[int]) -> Iterator[CutRule]:
    """Yield the rules of the sharded dimensions, which have these numbers of parts."""
    if halo_sizes:
        if len(halo_sizes) != 2 * len(parts):
            raise NotationError(
                f"halo_sizes {halo_sizes} for {len(parts)} sharded dimensions; give two numbers "
                "for each of them"
            )
        for before, after in zip(halo_sizes[::2], halo_sizes[1::2], strict=True):
            # The list has widths for every sharded dimension, 0 for those without a halo.
            yield Halo(before, after, padded_edges=True) if before or after else Ceil()
    elif offsets:
        # The starts of all parts and the end of the last, for all dimensions in a single list.
        expected = sum(parts) + len(parts)
        if len(offsets) != expected:
            raise NotationError(
                f"{len(offsets)} sharded_dims_offsets for dimensions in {parts} parts; give "
                f"{expected}: for each sharded dimension the start of every part and the end of "
                "the last"
            )
        begin = 0
        for count in parts:
            yield Sizes.from_offsets(offsets[begin : begin + count + 1])
            begin += count + 1
    else:
        yield from [Ceil()] * len(parts)


def mlir_text(spec: ShardingSpec) -> str:
    """Return the axis lists of a sharding, and the keywords after them.

    Raises:
        NotationError: a part of the sharding that MLIR cannot express, such as a sub-axis.

    >>> from reshard.sharding import spec
    >>> mlir_text(spec(DeviceMesh.of(x=2, y=3, z=2), "y x, - | max(z)"))
    '[[1, 0], []] partial = max[2]'
    """
    _VOCABULARY.check(spec)
    lists = [[_find_number(axis, spec.mesh) for axis in dim.axes] for dim in spec.dim_specs]
    # The dialect requires at least one list, even for a scalar.
    words = [str(lists or [[]])]
    if spec.reduction is not None:
        numbers = [_find_number(axis, spec.mesh) for axis in spec.partial_axes]
        words.append(f"partial = {_WORDS[spec.reduction]}{numbers}")
    levels = [level for dim in spec.dim_specs for level in dim.levels]
    if any(isinstance(level.rule, Halo) for level in levels):
        widths = [width for level in levels for width in _find_halo(level, spec)]
        words.append(f"halo_sizes = {widths}")
    elif any(isinstance(level.rule, Sizes) for level in levels):
        offsets = [offset for level in levels for offset in _find_offsets(level, spec)]
        words.append(f"sharded_dims_offsets = {offsets}")
    return " ".join(words)


def _find_number(axis: Axis, mesh: DeviceMesh) -> int:
    return mesh.axis_names.index(axis.name)


def _find_halo(level: Level, spec: ShardingSpec) -> tuple[int, int]:
    rule = level.rule
    if rule.is_default:
        return (0, 0)
    if not isinstance(rule, Halo):
        why = "halo_sizes and sharded_dims_offsets exclude each other"
        raise _VOCABULARY.refusal(spec, str(level), why)
    if not rule.rule.is_default:
        why = f"halos surround parts by ceil, not by `{rule.rule.text}`"
        raise _VOCABULARY.refusal(spec, str(level), why)
    if rule.fresh:
        raise _VOCABULARY.refusal(spec, str(level), "it has no fresh halos")
    if not rule.padded_edges:
        why = f"all its halos are equally wide; it has `halo[{rule.before},{rule.after},padded]`"
        raise _VOCABULARY.refusal(spec, str(level), why)
    return (rule.before, rule.after)


def _find_offsets(level: Level, spec: ShardingSpec) -> list[int]:
    if not isinstance(level.rule, Sizes):
        why = "offsets are given for all sharded dimensions or none; shard this one by sizes too"
        raise _VOCABULARY.refusal(spec, str(level), why)
    return [0, *itertools.accumulate(level.rule.sizes)]


def mlir_operation_text(spec: ShardingSpec, dialect: str = "shard") -> str:
    """Return the operation that defines a sharding, in the dialect `shard` or `mesh`.

    Raises:
        NotationError: a part that MLIR cannot express; in `shard`, also partial axes.

    >>> from reshard.sharding import spec
    >>> mlir_operation_text(spec(DeviceMesh.of(name="grid", x=2, y=3), "y, -"))
    'shard.sharding @grid split_axes = [[1], []] : !shard.sharding'
    """
    if dialect == "shard" and spec.reduction is not None:
        axes = " ".join(map(str, spec.partial_axes))
        why = "the dialect `shard` has no partial axes; `mesh` has"
        raise _VOCABULARY.refusal(spec, f"{spec.reduction}({axes})", why)
    _check_dialect(dialect)
    grid, lists = symbol_text(spec.mesh.name), mlir_text(spec)
    return f"{dialect}.sharding {grid} split_axes = {lists} : !{dialect}.sharding"


def mlir_mesh_text(mesh: DeviceMesh, dialect: str = "shard") -> str:
    """Return the operation that defines a mesh: `shard.grid` or `mesh.mesh`. Axis names are lost.

    Raises:
        NotationError: devices that are not 0, 1, 2... in row-major order, a mesh without axes.

    >>> mlir_mesh_text(DeviceMesh.of(name="grid", x=2, y=3))
    'shard.grid @grid(shape = 2x3)'
    """
    _check_dialect(dialect)
    if mesh.devices != tuple(range(mesh.size)):
        raise NotationError(
            f"MLIR cannot express the device order {list(mesh.devices)} of the mesh {mesh.name!r}: "
            "its devices are numbered in row-major order"
        )
    if not mesh.shape:
        raise NotationError(f"MLIR cannot express the mesh {mesh.name!r} without axes; add an axis")
    word = "grid" if dialect == "shard" else "mesh"
    return f"{dialect}.{word} {symbol_text(mesh.name)}(shape = {'x'.join(map(str, mesh.shape))})"


def _check_dialect(dialect: str) -> None:
    if dialect not in ("shard", "mesh"):
        raise NotationError(f"unknown dialect {dialect!r} of MLIR; it is shard or mesh")
