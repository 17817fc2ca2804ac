"""Block-cyclic matrices of ScaLAPACK: array descriptors as shardings, and back.

A matrix of `m` x `n` is divided into blocks of `mb` x `nb`, which are assigned round robin: rows of
blocks to rows of processes, beginning with row `rsrc`, and columns of blocks to columns of
processes, beginning with column `csrc`::

    m=5 n=7 mb=2 nb=2 over a 2x3 grid in row order

              0   1   2   0
            +---+---+---+---+        process (i, j) is rank
          0 | 0 | 1 | 2 | 0 |          row order       column order
          1 | 3 | 4 | 5 | 3 |          0  1  2         0  2  4
          0 | 0 | 1 | 2 | 0 |          3  4  5         1  3  5
            +---+---+---+---+

Each dimension is a level with the rule `BlockCyclic` over an axis of a mesh whose ranks follow
the grid. A sharding does not store sizes, so `m` and `n` are checked against a shape only.

Source: the ScaLAPACK Users' Guide (Blackford et al. 1997), sections 4.1 and 4.3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from reshard._records import Record
from reshard._validation import check_int, check_ints
from reshard.cut_rules import BlockCyclic, CutRule
from reshard.errors import NotationError
from reshard.mesh import DeviceMesh
from reshard.notation.parsing import Vocabulary, reading
from reshard.sharding import DimSpec, Level, ShardingSpec

# Rules that are not block-cyclic are refused by `_find_block_cyclic`, which may know the length.
_VOCABULARY = Vocabulary("ScaLAPACK", rules=(CutRule,))
DENSE = 1
ORDERS = ("row", "column")
_ENTRIES = ("dtype", "ctxt", "m", "n", "mb", "nb", "rsrc", "csrc", "lld")
_SHORT = ("m", "n", "mb", "nb", "rsrc", "csrc")
_PREFIX = re.compile(r"\s*DESC\w*\s*=?", re.IGNORECASE)
_BETWEEN = r"[\s,()\[\]]"
# A name with a value (sizes, a number, a word, nested brackets), or a number by itself; of at
# most 18 digits, which fit in 64 bits.
_WORD = re.compile(
    rf"{_BETWEEN}*(?:([A-Za-z]+)_?\s*=\s*"
    r"(\d{1,9}\s*x\s*\d{1,9}|-?\d{1,18}|[A-Za-z]+|\[(?:[\s,\[\]]|\b\d{1,9}\b)*\])"
    rf"|(-?\d{{1,18}}))(?={_BETWEEN}|$){_BETWEEN}*"
)
_SIZES = re.compile(r"(\d+)\s*x\s*(\d+)")


class Descriptor(Record):
    """The array descriptor of a dense matrix, without its context.

    Args:
        m, n: rows and columns of the matrix; None if it fits any.
        mb, nb: rows and columns of a block.
        rsrc, csrc: the process row and column of the first block.
        lld: the leading dimension of a process's local array, which is in column order; it implies
            nothing about the location of elements.

    Raises:
        NotationError: sizes that are negative, blocks without elements.

    >>> Descriptor.from_array((1, 0, 5, 7, 2, 2, 0, 0, 3))
    Descriptor(m=5, n=7, mb=2, nb=2, rsrc=0, csrc=0, lld=3)
    """

    m: int | None
    n: int | None
    mb: int
    nb: int
    rsrc: int = 0
    csrc: int = 0
    lld: int | None = None

    def __post_init__(self) -> None:
        minima = {"m": 0, "n": 0, "mb": 1, "nb": 1, "rsrc": 0, "csrc": 0, "lld": 1}
        for name, minimum in minima.items():
            value = getattr(self, name)
            # Only these may be None: the size of a matrix, and an unknown leading dimension.
            if value is not None or name not in ("m", "n", "lld"):
                number = check_int(value, f"a descriptor's {name}", NotationError, minimum=minimum)
                object.__setattr__(self, name, number)

    @classmethod
    def from_array(cls, entries: Sequence[int]) -> Descriptor:
        """Return the descriptor in an array of 9: type, context, m, n, mb, nb, rsrc, csrc, lld.

        Raises:
            NotationError: another length, or a matrix that is not dense and in memory.
        """
        values = check_ints(entries, "a descriptor", NotationError, minimum=None)
        if len(values) != len(_ENTRIES):
            raise NotationError(
                f"a descriptor of {len(values)} numbers; a dense one has 9, {' '.join(_ENTRIES)}"
            )
        if values[0] != DENSE:
            raise NotationError(
                f"a descriptor of type {values[0]}; only dense matrices in memory, of type 1, are "
                "read (501 and 502 are banded, 601 is in files)"
            )
        return cls(*values[2:])

    def sharding(self, grid: DeviceMesh) -> ShardingSpec:
        """Return the sharding over a grid of processes, a mesh of two axes: rows, then columns.

        Raises:
            NotationError: a mesh of another number of axes, a first process outside the grid, or
                a leading dimension that no process can have.

        >>> print(Descriptor(5, 7, 2, 2, rsrc=1).sharding(process_grid(2, 3)))
        row@cyclic2+1, column@cyclic2
        """
        _expect_two_axes(grid)
        firsts = (("rsrc", self.rsrc, grid.shape[0]), ("csrc", self.csrc, grid.shape[1]))
        for name, first, size in firsts:
            if first >= size:
                raise NotationError(
                    f"{name}={first} on a grid of {grid.shape[0]}x{grid.shape[1]} processes; it "
                    f"must be below {size}"
                )
        rows = BlockCyclic(self.mb, self.rsrc)
        if self.lld is not None and self.m is not None:
            # A leading dimension is at least the local rows. It may be any process's, so only less
            # than the fewest rows is an error.
            fewest = max(1, int(rows.table(self.m, grid.shape[0]).local_lengths.min()))
            if self.lld < fewest:
                raise NotationError(
                    f"lld={self.lld}, but every process has at least {fewest} rows of {self.m} in "
                    f"blocks of {self.mb} over {grid.shape[0]}"
                )
        rules = (rows, BlockCyclic(self.nb, self.csrc))
        levels = [Level([axis], rule) for axis, rule in zip(grid.axis_names, rules, strict=True)]
        return ShardingSpec(grid, [DimSpec([level]) for level in levels])


def process_grid(rows: int, columns: int, order: str = "row") -> DeviceMesh:
    """Return a grid of processes, ranks in row or column order, as `blacs_gridinit` makes it.

    Raises:
        NotationError: an order that is not `row` or `column`.
        MeshError: no rows or columns.

    >>> process_grid(2, 3, "column")
    DeviceMesh('grid', row=2,column=3, devices=[0, 2, 4, 1, 3, 5])
    """
    if order not in ORDERS:
        raise NotationError(f"order {order!r} of a process grid; it is row or column")
    grid = DeviceMesh("grid", (rows, columns), ("row", "column"))
    if order == "row":
        return grid
    # In column order rank `k` is in row `k % rows`, column `k // rows`.
    ranks = np.arange(grid.size).reshape(columns, rows).T.reshape(-1)
    return grid.replace(devices=ranks.tolist())


def parse_scalapack(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that a block-cyclic descriptor describes.

    Args:
        text: `m n mb nb rsrc csrc` as six numbers, an array descriptor `DESC_A = (1, 0, ...)` of
            nine, or by name: `mb=2 nb=2`, where `m`, `n`, `rsrc` and `csrc` may be left out.
            After them the grid of processes: `grid=2x3 order=column`, or rank by rank,
            `grid=[[3, 1], [2, 0]]`.
        mesh: the grid, rows and then columns, if the text has none. If both describe the same
            grid, the mesh gives its axes their names.
        shape: of the matrix.

    Raises:
        NotationError: text that cannot be read, or that does not fit the mesh or the shape.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> print(parse_scalapack("9 9 2 2 0 1", mesh))
    x@cyclic2, y@cyclic2+1
    >>> print(parse_scalapack("mb=2 nb=4 grid=2x3 order=column").mesh)
    DeviceMesh('grid', row=2,column=3, devices=[0, 2, 4, 1, 3, 5])
    """
    with reading("descriptor", text):
        numbers, named = _read_words(text)
        grid = _choose_grid(named.pop("grid", None), named.pop("order", None), mesh)
        descriptor = _make_descriptor(numbers, named)
        sizes = (descriptor.m, descriptor.n)
        if shape is not None and (
            len(shape) != 2
            or any(size not in (None, length) for size, length in zip(sizes, shape, strict=True))
        ):
            expected = " x ".join("any" if size is None else str(size) for size in sizes)
            raise NotationError(
                f"a descriptor of a matrix of {expected} for shape {list(shape)}; both must agree"
            )
        return descriptor.sharding(grid)


def _read_words(text: str) -> tuple[list[int], dict[str, str]]:
    """Return the numbers without and the values with a name."""
    numbers: list[int] = []
    named: dict[str, str] = {}
    prefix = _PREFIX.match(text)
    at = prefix.end() if prefix else 0
    while at < len(text.rstrip()):
        match = _WORD.match(text, at)
        if not match:
            raise NotationError(
                f"cannot read {text[at : at + 40]!r}; write m n mb nb rsrc csrc as six numbers or "
                "by name, such as mb=2 nb=2 grid=2x3 order=row"
            )
        at = match.end()
        if match[1] is None:
            numbers.append(int(match[3]))
            continue
        name = match[1].lower()
        if name in named or name not in (*_ENTRIES, "grid", "order"):
            problem = "is given twice" if name in named else "is not known"
            raise NotationError(
                f"{name} {problem}; a descriptor has {', '.join(_ENTRIES)}, grid and order"
            )
        named[name] = match[2].lower()
    return numbers, named


def _make_descriptor(numbers: list[int], named: dict[str, str]) -> Descriptor:
    if numbers and named:
        raise NotationError(
            f"numbers {numbers} and names {', '.join(named)}; give only numbers, or only names"
        )
    if len(numbers) == len(_SHORT):
        return Descriptor(*numbers)
    if numbers:
        return Descriptor.from_array(numbers)
    wrong = [f"{name}={value}" for name, value in named.items() if not _is_number(value)]
    missing = [name for name in ("mb", "nb") if name not in named]
    if wrong or missing:
        problem = f"{wrong[0]} is not a number" if wrong else f"{' and '.join(missing)} missing"
        raise NotationError(f"{problem}; give at least the sizes of a block, such as mb=2 nb=2")
    # The context, `ctxt`, is a number of the process that wrote it, and is not used.
    values = {name: int(value) for name, value in named.items()}
    if values.get("dtype", DENSE) != DENSE:
        raise NotationError(f"dtype={named['dtype']}; only dense matrices, of type 1, are read")
    return Descriptor(
        values.get("m"),
        values.get("n"),
        values["mb"],
        values["nb"],
        values.get("rsrc", 0),
        values.get("csrc", 0),
        values.get("lld"),
    )


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdecimal()


def _choose_grid(text: str | None, order: str | None, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the grid of the text, or the mesh if the text has none or the same grid."""
    if text is not None:
        grid = _read_grid_ranks(text, order) if "[" in text else _read_grid_sizes(text, order)
        is_same = mesh is not None and (mesh.shape, mesh.devices) == (grid.shape, grid.devices)
        return mesh if mesh is not None and is_same else grid
    if mesh is None:
        raise NotationError("the grid of processes is missing; give a mesh, or grid=2x3")
    _expect_two_axes(mesh)
    if (
        order is not None
        and process_grid(mesh.shape[0], mesh.shape[1], order).devices != mesh.devices
    ):
        raise NotationError(
            f"order={order} for the mesh {mesh.text} with ranks {list(mesh.devices)}, which has "
            "another order; leave out the order, or the mesh"
        )
    return mesh


def _read_grid_sizes(text: str, order: str | None) -> DeviceMesh:
    sizes = _SIZES.fullmatch(text)
    if not sizes:
        raise NotationError(f"grid={text}; write rows and columns, such as grid=2x3")
    return process_grid(int(sizes[1]), int(sizes[2]), order or "row")


def _read_grid_ranks(text: str, order: str | None) -> DeviceMesh:
    if order is not None:
        raise NotationError(f"grid={text} has every rank, so order={order} is left out")
    rows = [re.findall(r"\d+", row) for row in re.findall(r"\[([\s\d,]*)\]", text)]
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise NotationError(f"grid={text}; write equal rows of ranks, such as [[0, 1], [2, 3]]")
    ranks = [int(rank) for row in rows for rank in row]
    return DeviceMesh("grid", (len(rows), len(rows[0])), ("row", "column"), ranks)


def _expect_two_axes(mesh: DeviceMesh) -> None:
    if len(mesh.shape) != 2:
        raise NotationError(
            f"a mesh of {len(mesh.shape)} axes ({mesh.text}) is not a grid of processes; give an "
            "axis for rows and an axis for columns, of size 1 if need be"
        )


def scalapack_text(spec: ShardingSpec, shape: Sequence[int] | None = None) -> str:
    """Return the descriptor of a sharding, by name, with its grid; with `m` and `n` for a shape.

    With a shape, any rule that divides its indices as a block-cyclic rule would is written so.

    Raises:
        NotationError: a sharding that a descriptor cannot express; the message names the part.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> blocks = [Level(["x"], BlockCyclic(2)), Level(["y"], BlockCyclic(4, 1))]
    >>> scalapack_text(ShardingSpec(mesh, [DimSpec([level]) for level in blocks]))
    'mb=2 nb=4 rsrc=0 csrc=1 grid=2x3 order=row'
    >>> scalapack_text(ShardingSpec(mesh, [["x"], ["y"]]), (9, 9))
    'm=9 n=9 mb=5 nb=3 rsrc=0 csrc=0 grid=2x3 order=row'
    """
    mesh = spec.mesh
    _VOCABULARY.check(spec)
    if spec.ndim != 2:
        why = f"it is for matrices, not for tensors of {spec.ndim} dimensions"
        raise _VOCABULARY.refusal(spec, str(spec), why)
    if shape is not None and len(shape) != 2:
        raise NotationError(f"shape {list(shape)} is not that of a matrix; give rows and columns")
    lengths = (None, None) if shape is None else tuple(shape)
    rules = [_find_block_cyclic(spec, dim, length) for dim, length in enumerate(lengths)]
    axes = [dim.axes[0].name for dim in spec.dim_specs]
    if sorted(axes) != sorted(mesh.axis_names):
        why = f"it has no copies; use every axis of the mesh {mesh.text}"
        raise _VOCABULARY.refusal(spec, str(spec), why)
    ranks = np.array(mesh.devices).reshape(mesh.shape)
    # The text has rows first, whichever axis of the mesh shards them.
    ranks = ranks if axes == list(mesh.axis_names) else ranks.T
    sizes = "" if shape is None else f"m={shape[0]} n={shape[1]} "
    return (
        f"{sizes}mb={rules[0].block} nb={rules[1].block} rsrc={rules[0].first} "
        f"csrc={rules[1].first} {_write_grid(ranks.tolist())}"
    )


def _find_block_cyclic(spec: ShardingSpec, dim: int, length: int | None) -> BlockCyclic:
    """Return the rule of a dimension as a block-cyclic rule."""
    levels = spec.dim_specs[dim].levels
    if len(levels) != 1 or len(levels[0].axes) != 1:
        why = "every dimension is sharded over a single axis of the grid"
        raise _VOCABULARY.refusal(spec, str(spec.dim_specs[dim]), why)
    rule = levels[0].rule
    if isinstance(rule, BlockCyclic):
        return rule
    if length is not None:
        parts = spec.mesh.axis_size(levels[0].axes[0])
        table = rule.table(length, parts)
        runs = table.runs_of(0)
        # The first part's first run is a block. Run tables are interned, so `is` compares them.
        candidate = BlockCyclic(runs[0][1] - runs[0][0] if runs else 1)
        if candidate.table(length, parts) is table:
            return candidate
    why = "blocks are assigned in turn; give a shape, for which other rules may be equal"
    if length is not None:
        why = f"for length {length} its blocks are not assigned in turn"
    raise _VOCABULARY.refusal(spec, str(levels[0]), why)


def _write_grid(ranks: list[list[int]]) -> str:
    """Return `grid=2x3 order=row`, or every rank if they are in neither order."""
    rows, columns = len(ranks), len(ranks[0])
    for order in ORDERS:
        devices = [rank for row in ranks for rank in row]
        if process_grid(rows, columns, order).devices == tuple(devices):
            return f"grid={rows}x{columns} order={order}"
    return f"grid={ranks}".replace(" ", "")
