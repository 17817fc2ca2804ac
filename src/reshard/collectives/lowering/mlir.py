"""A program as a module of MLIR's `shard` dialect.

::

    module {
      shard.grid @mesh(shape = 3)
      func.func @reshard(%0: tensor<6x6xi8>) -> tensor<6x6xi8> {
        %1 = shard.sharding @mesh split_axes = [[0], []] : !shard.sharding
        %2 = shard.shard %0 to %1 : tensor<6x6xi8>
        %3 = builtin.unrealized_conversion_cast %2 : tensor<6x6xi8> to tensor<2x6xi8>
        %4 = shard.all_to_all %3 on @mesh grid_axes = [0] split_axis = 1 concat_axis = 0
            : tensor<2x6xi8> -> tensor<6x2xi8>
        ...

Every process of a grid runs the function. As in MLIR's own partitioning, a tensor is global up to
the cast that follows its sharding, and local to the process from there on. A `ShardModule` is such
a module as a value: operations with the same syntax are a class, and `kind` is their word in the
text. Steps become operations::

    slice             shard.all_slice
    all-gather        shard.all_gather
    all-to-all        shard.all_to_all
    permute           shard.send and shard.recv, to and from the process in a table
    reduce-scatter    shard.reduce_scatter
    all-reduce        shard.all_reduce

A dimension that its axes do not divide is sharded by ceil, with padding: every process has a shard
as large as the first. A tensor is copied into a longer tensor before it is sliced
(`tensor.insert_slice`), and truncated after it is gathered (`tensor.extract_slice`). The dialect
has whole mesh axes, so an axis of which a part is used becomes two axes of the grid. Its shardings
have no partial axes: a contribution is written as an ordinary shard, and only the reductions show
that it is partial.

In a permute every process sends before it receives, also to itself: a send must not block until
its receiver is ready.

The dialect has no all-to-all of several dimensions at once, and no levels in a dimension: such a
step is refused, with its number. The devices of a grid are always in row-major order.

Source: the LLVM project, `mlir/include/mlir/Dialect/Shard/IR/ShardOps.td` and
`mlir/test/Dialect/Shard/*.mlir`; and the steps of `ReshardingSpmdizationDoc.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.collectives.lowering.shardings import (
    WholeAxes,
    axes_dropped,
    ceil_shape,
    check_ceil,
    lines_up,
    part_length,
    plain_shardings,
    with_own_mesh_names,
)
from reshard.collectives.program import Program
from reshard.collectives.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.mlir import mlir_mesh_text
from reshard.notation.parsing import symbol_text
from reshard.sharding import ShardingSpec

ELEMENTS = {
    "bool": "i1",
    "bfloat16": "bf16",
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"ui{bits}" for bits in (8, 16, 32, 64)},
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
    **{
        f"float8_{kind}": f"f8{kind.upper()}"
        for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu", "e3m4", "e4m3")
    },
}
"""MLIR's names of element types by our names of dtypes, for the `shard` dialect and Shardy."""


def element_text(dtype: DType | str, system: str) -> str:
    """Return MLIR's name of a dtype. Raises NotationError if it has none.

    >>> element_text("bfloat16", "MLIR")
    'bf16'
    """
    element = as_dtype(dtype).name
    if element not in ELEMENTS:
        raise NotationError(
            f"{system} has no element type for {element!r}; it has {', '.join(ELEMENTS)}"
        )
    return ELEMENTS[element]


# The settings of each collective besides its groups, in the order of the text.
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_gather": ("gather_axis",),
    "all_slice": ("slice_axis",),
    "all_to_all": ("split_axis", "concat_axis"),
    "all_reduce": ("reduction",),
    "reduce_scatter": ("reduction", "scatter_axis"),
}
MESSAGES = {"send": "destination", "recv": "source"}
REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "product": "product", "mean": "average"}
"""The dialect's names of reductions by ours."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class TensorType:
    """The shape and the element type of a tensor: `tensor<2x6xf32>`."""

    shape: Numbers
    element: str

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{self.element}>"

    def resized(self, axis: int, size: int) -> TensorType:
        """Return the type with another size of a dimension."""
        return TensorType((*self.shape[:axis], size, *self.shape[axis + 1 :]), self.element)


@dataclass(frozen=True)
class Grid:
    """`shard.grid`: processes, numbered in row-major order."""

    name: str
    shape: Numbers

    def __str__(self) -> str:
        return mlir_mesh_text(self.mesh)

    @property
    def mesh(self) -> DeviceMesh:
        """The processes as a mesh, whose axes are called axis0, axis1 and so on."""
        return DeviceMesh(self.name, self.shape, [f"axis{n}" for n in range(len(self.shape))])


@dataclass(frozen=True)
class ShardingOp:
    """`shard.sharding`: the axes of a grid that shard each dimension."""

    result: str
    grid: str
    split_axes: tuple[Numbers, ...]

    @property
    def lists(self) -> str:
        """The axes of every dimension: `[[0], []]`."""
        return f"[{', '.join(map(_write_numbers, self.split_axes))}]"

    def __str__(self) -> str:
        words = f"shard.sharding {symbol_text(self.grid)} split_axes = {self.lists}"
        return f"%{self.result} = {words} : !shard.sharding"


@dataclass(frozen=True)
class ShardOp:
    """`shard.shard`: the annotation of a global tensor with a sharding."""

    result: str
    operand: str
    sharding: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.result} = shard.shard %{self.operand} to %{self.sharding} : {self.type}"


@dataclass(frozen=True)
class CastOp:
    """`builtin.unrealized_conversion_cast`: from a global tensor to a process's, or back."""

    result: str
    operand: str
    before: TensorType
    after: TensorType

    def __str__(self) -> str:
        word = "builtin.unrealized_conversion_cast"
        return f"%{self.result} = {word} %{self.operand} : {self.before} to {self.after}"


@dataclass(frozen=True)
class CollectiveOp:
    """A collective within the groups along axes of a grid; `kind` is a key of `COLLECTIVES`.

    `settings` are axes of the tensor and a reduction, in the order of `COLLECTIVES`.
    """

    kind: str
    result: str
    operand: str
    grid: str
    grid_axes: Numbers
    settings: tuple[int | str, ...]
    before: TensorType
    after: TensorType

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the settings."""
        return COLLECTIVES[self.kind]

    def setting(self, name: str) -> int:
        """An axis of the tensor."""
        return int(self.settings[self.names.index(name)])

    @property
    def word(self) -> str:
        """The reduction."""
        return str(self.settings[self.names.index("reduction")])

    def __str__(self) -> str:
        words = zip(self.names, self.settings, strict=True)
        return (
            f"%{self.result} = shard.{self.kind} %{self.operand} on {symbol_text(self.grid)} "
            f"grid_axes = {_write_numbers(self.grid_axes)} "
            f"{' '.join(f'{name} = {value}' for name, value in words)} "
            f": {self.before} -> {self.after}"
        )


@dataclass(frozen=True)
class MessageOp:
    """`shard.send` or `shard.recv`; `peer` are values, the peer's coordinates on `grid_axes`."""

    kind: str
    result: str
    operand: str
    grid: str
    grid_axes: Numbers
    peer: tuple[str, ...]
    before: TensorType
    after: TensorType

    def __str__(self) -> str:
        peer = ", ".join(f"%{value}" for value in self.peer)
        types = ", ".join([str(self.before), *["index"] * len(self.peer)])
        return (
            f"%{self.result} = shard.{self.kind} %{self.operand} on {symbol_text(self.grid)} "
            f"grid_axes = {_write_numbers(self.grid_axes)} {MESSAGES[self.kind]} = [{peer}] "
            f": ({types}) -> {self.after}"
        )


@dataclass(frozen=True)
class ProcessIndexOp:
    """`shard.process_linear_index`: the number of the process that runs."""

    result: str
    grid: str

    def __str__(self) -> str:
        grid = symbol_text(self.grid)
        return f"%{self.result} = shard.process_linear_index on {grid} : index"


@dataclass(frozen=True)
class ConstantOp:
    """`arith.constant`: a number for each process."""

    result: str
    numbers: Numbers

    def __str__(self) -> str:
        numbers, count = _write_numbers(self.numbers), len(self.numbers)
        return f"%{self.result} = arith.constant dense<{numbers}> : tensor<{count}xindex>"


@dataclass(frozen=True)
class ExtractOp:
    """`tensor.extract`: a number of a table."""

    result: str
    table: str
    index: str
    count: int

    def __str__(self) -> str:
        return (
            f"%{self.result} = tensor.extract %{self.table}[%{self.index}] "
            f": tensor<{self.count}xindex>"
        )


@dataclass(frozen=True)
class EmptyOp:
    """`tensor.empty`: an uninitialized tensor."""

    result: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.result} = tensor.empty() : {self.type}"


@dataclass(frozen=True)
class ExtractSliceOp:
    """`tensor.extract_slice`, with steps of 1."""

    result: str
    operand: str
    offsets: Numbers
    sizes: Numbers
    before: TensorType
    after: TensorType

    def __str__(self) -> str:
        where = _write_box(self.offsets, self.sizes)
        return (
            f"%{self.result} = tensor.extract_slice %{self.operand}{where} "
            f": {self.before} to {self.after}"
        )


@dataclass(frozen=True)
class InsertSliceOp:
    """`tensor.insert_slice`, with steps of 1: `operand` in a box of `into`."""

    result: str
    operand: str
    into: str
    offsets: Numbers
    sizes: Numbers
    before: TensorType
    after: TensorType

    def __str__(self) -> str:
        where = _write_box(self.offsets, self.sizes)
        return (
            f"%{self.result} = tensor.insert_slice %{self.operand} into %{self.into}{where} "
            f": {self.before} into {self.after}"
        )


Computed = (
    ShardOp
    | CastOp
    | CollectiveOp
    | MessageOp
    | ProcessIndexOp
    | ConstantOp
    | ExtractOp
    | EmptyOp
    | ExtractSliceOp
    | InsertSliceOp
)
"""Operations whose results are tensors, tables or numbers."""

Operation = ShardingOp | Computed


@dataclass(frozen=True)
class ShardModule:
    """A module with grids and a function of a tensor.

    Args:
        grids: of the operations.
        function: the name of the function.
        argument, argument_type: the name and the type of its argument.
        operations: in order.
        returned, result_type: the name and the type of the returned value.
    """

    grids: tuple[Grid, ...]
    function: str
    argument: str
    argument_type: TensorType
    operations: tuple[Operation, ...]
    returned: str
    result_type: TensorType

    def grid(self, name: str) -> Grid | None:
        """Return the grid with a name, or None."""
        return next((grid for grid in self.grids if grid.name == name), None)

    def __str__(self) -> str:
        head = (
            f"  func.func {symbol_text(self.function)}(%{self.argument}: {self.argument_type}) "
            f"-> {self.result_type} {{"
        )
        return "\n".join(
            [
                "module {",
                *(f"  {grid}" for grid in self.grids),
                head,
                *(f"    {operation}" for operation in self.operations),
                f"    return %{self.returned} : {self.result_type}",
                "  }",
                "}",
            ]
        )


def _write_numbers(numbers: Iterable[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _write_box(offsets: Numbers, sizes: Numbers) -> str:
    return "".join(map(_write_numbers, (offsets, sizes, [1] * len(sizes))))


_SYSTEM = "MLIR"


def mlir_module(program: Program, dtype: DType | str = "float32") -> str:
    """Return the text of a module with a function `reshard` that runs a program.

    Args:
        program: whose steps become operations.
        dtype: of the elements.

    Raises:
        NotationError: a step, a mesh, a sharding or a dtype that the dialect cannot express.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=3)
    >>> program = find_program(spec(mesh, "x, -"), spec(mesh, "-, x"), (6, 6))
    >>> print("\\n".join(line.strip() for line in mlir_module(program, "int8").splitlines()[5:8]))
    %3 = builtin.unrealized_conversion_cast %2 : tensor<6x6xi8> to tensor<2x6xi8>
    %4 = shard.all_to_all %3 on @mesh grid_axes = [0] split_axis = 1 concat_axis = 0 : \
tensor<2x6xi8> -> tensor<6x2xi8>
    %5 = builtin.unrealized_conversion_cast %4 : tensor<6x2xi8> to tensor<6x6xi8>
    """
    return str(shard_module(program, dtype))


def shard_module(program: Program, dtype: DType | str = "float32") -> ShardModule:
    """Return the module as a value. Raises NotationError as `mlir_module` does."""
    element = element_text(dtype, _SYSTEM)
    specs = with_own_mesh_names(plain_shardings(program))
    for number, spec in enumerate(specs):
        where = f"step {number}, {program.steps[number - 1]}," if number else "the source"
        mlir_mesh_text(spec.mesh)
        check_ceil(where, _SYSTEM, spec, program.shape)
    meshes = {
        mesh: WholeAxes(mesh, [spec for spec in specs if spec.mesh is mesh], _SYSTEM)
        for mesh in dict.fromkeys(spec.mesh for spec in specs)
    }
    specs = [meshes[spec.mesh].spec(spec) for spec in specs]
    writer = _ModuleWriter(program.shape, element, specs[0])
    for number, step in enumerate(program.steps):
        try:
            writer.step(step, specs[number], specs[number + 1])
        except NotationError as error:
            raise NotationError(
                f"step {number + 1}, {step}, cannot be expressed in MLIR: {error}"
            ) from error
    grids = [Grid(whole.mesh.name, whole.mesh.shape) for whole in meshes.values()]
    return writer.module(grids, specs[-1])


class _ModuleWriter:
    """A writer of operations; `here` and `type` are the current value and its type."""

    def __init__(self, shape: tuple[int, ...], element: str, source: ShardingSpec) -> None:
        self.shape = shape
        self.whole = TensorType(shape, element)
        self.operations: list[Operation] = []
        self.here, self.type = "0", self.whole
        self._count = 0
        self._annotate(source)
        own = TensorType(ceil_shape(source, shape), element)
        self._add_result(CastOp(self.name(), self.here, self.whole, own), own)

    def name(self) -> str:
        """Return the name of a new value."""
        self._count += 1
        return str(self._count)

    def add(self, operation: Operation) -> str:
        """Append an operation, and return the name of its result."""
        self.operations.append(operation)
        return operation.result

    def _add_result(self, operation: Operation, type_: TensorType) -> None:
        self.here, self.type = self.add(operation), type_

    def _annotate(self, spec: ShardingSpec) -> None:
        lists = tuple(_axis_numbers(spec, dim.axes) for dim in spec.dim_specs)
        # The dialect requires at least one list, even for a scalar.
        sharding = self.add(ShardingOp(self.name(), spec.mesh.name, lists or ((),)))
        self._add_result(ShardOp(self.name(), self.here, sharding, self.whole), self.whole)

    def module(self, grids: Iterable[Grid], target: ShardingSpec) -> ShardModule:
        """Return the module, with the target sharding of its result."""
        # The result is cast to a global tensor with its sharding.
        self._add_result(CastOp(self.name(), self.here, self.type, self.whole), self.whole)
        self._annotate(target)
        operations = tuple(self.operations)
        return ShardModule(
            tuple(grids), "reshard", "0", self.whole, operations, self.here, self.whole
        )

    def pad(self, dim: int, length: int) -> None:
        """Pad a dimension of the tensor to `length`, if it is shorter."""
        if self.type.shape[dim] == length:
            return
        longer = self.type.resized(dim, length)
        empty = self.add(EmptyOp(self.name(), longer))
        start, sizes = (0,) * len(self.shape), self.type.shape
        operation = InsertSliceOp(self.name(), self.here, empty, start, sizes, self.type, longer)
        self._add_result(operation, longer)

    def truncate(self, dim: int, length: int) -> None:
        """Truncate a dimension of the tensor to `length`, if it is longer."""
        if self.type.shape[dim] == length:
            return
        shorter = self.type.resized(dim, length)
        start = (0,) * len(self.shape)
        operation = ExtractSliceOp(self.name(), self.here, start, shorter.shape, self.type, shorter)
        self._add_result(operation, shorter)

    def collective(
        self,
        kind: str,
        spec: ShardingSpec,
        axes: Sequence[Axis],
        settings: tuple[int | str, ...],
        after: TensorType,
    ) -> None:
        """Append a collective within the groups along `axes`."""
        numbers = _axis_numbers(spec, axes)
        operation = CollectiveOp(
            kind, self.name(), self.here, spec.mesh.name, numbers, settings, self.type, after
        )
        self._add_result(operation, after)

    def step(self, step: Step, before: ShardingSpec, after: ShardingSpec) -> None:
        """Append the operations of a step. Raises NotationError if the dialect has none."""
        reduction = REDUCTIONS[before.reduction or "sum"]
        if isinstance(step, Permute):
            self._permute(step, before, after)
        elif isinstance(step, AllReduce):
            reduced = [axis for axis in before.partial_axes if axis not in after.partial_axes]
            self.collective("all_reduce", before, reduced, (reduction,), self.type)
        elif isinstance(step, AllToAll):
            self._all_to_all(step, before, after)
        elif isinstance(step, AllGather):
            for dim in range(len(self.shape)):
                axes = axes_dropped(after, before, dim)
                if axes:
                    longer = self._find_gathered_type(before, axes, dim)
                    self.collective("all_gather", before, axes, (dim,), longer)
                    self._check_lines_up(after, before, dim)
                    self.truncate(dim, part_length(after, self.shape, dim))
        elif isinstance(step, Slice | ReduceScatter):
            for dim in range(len(self.shape)):
                axes = axes_dropped(before, after, dim)
                if axes:
                    self._check_lines_up(before, after, dim)
                    length = part_length(after, self.shape, dim)
                    # The dialect splits evenly: all parts are padded to the length of the first.
                    self.pad(dim, length * _count_devices(before, axes))
                    part = self.type.resized(dim, length)
                    if isinstance(step, Slice):
                        self.collective("all_slice", before, axes, (dim,), part)
                    else:
                        self.collective("reduce_scatter", before, axes, (reduction, dim), part)
        else:
            raise NotationError(
                "it has slices, gathers, all-to-alls between two dimensions, messages and "
                "reductions; take a program of those: --steps classical or mlir, or "
                "steps='classical' in find_program"
            )

    def _find_gathered_type(self, spec: ShardingSpec, axes: Sequence[Axis], dim: int) -> TensorType:
        return self.type.resized(dim, self.type.shape[dim] * _count_devices(spec, axes))

    def _check_lines_up(self, short: ShardingSpec, long: ShardingSpec, dim: int) -> None:
        if not lines_up(short, long, self.shape, dim):
            raise NotationError(
                f"the parts of `{long}` along dimension {dim} are not parts of those of `{short}`"
            )

    def _all_to_all(self, step: Step, before: ShardingSpec, after: ShardingSpec) -> None:
        giver, taker = step.dims
        axes = axes_dropped(after, before, giver)
        if axes != axes_dropped(before, after, taker):
            raise NotationError("it changes the order of its axes; the order must be kept")
        self._check_lines_up(after, before, giver)
        self._check_lines_up(before, after, taker)
        length = part_length(after, self.shape, taker)
        self.pad(taker, length * _count_devices(before, axes))
        moved = self._find_gathered_type(before, axes, giver).resized(taker, length)
        self.collective("all_to_all", before, axes, (taker, giver), moved)
        self.truncate(giver, part_length(after, self.shape, giver))

    def _permute(self, step: Permute, before: ShardingSpec, after: ShardingSpec) -> None:
        """Append messages in which every process sends its shard, and receives another."""
        if ceil_shape(after, self.shape) != self.type.shape:
            raise NotationError(
                f"the shards of `{after}` have another shape than those of `{before}`; a permute "
                "needs equal shards"
            )
        grid = before.mesh.shape
        source, target = np.array(sorted(step.pairs, key=lambda pair: pair[1])).T
        # The coordinates of each process's receiver and sender: `(axes, processes)`.
        to = np.array(np.unravel_index(np.argsort(source), grid))
        back = np.array(np.unravel_index(source, grid))
        own = np.array(np.unravel_index(target, grid))
        axes = np.flatnonzero((back != own).any(axis=1)).tolist()
        if not axes:
            return
        process = self.add(ProcessIndexOp(self.name(), before.mesh.name))
        # Each process looks up its peer, axis by axis, in a table of all processes.
        for kind, coordinates in (("send", to), ("recv", back)):
            peer = []
            for axis in axes:
                table = self.add(ConstantOp(self.name(), tuple(coordinates[axis].tolist())))
                peer.append(self.add(ExtractOp(self.name(), table, process, before.mesh.size)))
            operation = MessageOp(
                kind,
                self.name(),
                self.here,
                before.mesh.name,
                tuple(axes),
                tuple(peer),
                self.type,
                self.type,
            )
            if kind == "send":
                self.add(operation)
            else:
                self._add_result(operation, self.type)


def _axis_numbers(spec: ShardingSpec, axes: Iterable[Axis]) -> tuple[int, ...]:
    return tuple(spec.mesh.axis_names.index(axis.name) for axis in axes)


def _count_devices(spec: ShardingSpec, axes: Iterable[Axis]) -> int:
    return math.prod(map(spec.mesh.axis_size, axes))
