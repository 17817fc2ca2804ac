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
a module as a value: its operations are of one class, and `OPERATIONS` has the syntax of each. Steps
become operations::

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

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard._records import Record
from reshard.collectives import steps
from reshard.collectives.lowering import shardings
from reshard.collectives.program import Program
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


COLLECTIVES: dict[str, tuple[str, ...]] = {
    "shard.all_gather": ("gather_axis",),
    "shard.all_slice": ("slice_axis",),
    "shard.all_to_all": ("split_axis", "concat_axis"),
    "shard.all_reduce": ("reduction",),
    "shard.reduce_scatter": ("reduction", "scatter_axis"),
}
"""The attributes of each collective besides its groups, in the order of the text."""

MESSAGES = {"shard.send": "destination", "shard.recv": "source"}
"""The name of the peer's coordinates in the text of each message."""

OPERATIONS: dict[str, str] = {
    **{
        name: f" {{0}} on {{grid}} {{grid_axes}} {' '.join(f'{{{word}}}' for word in attributes)} "
        ": {type} -> {type}"
        for name, attributes in COLLECTIVES.items()
    },
    **{
        name: f" {{0}} on {{grid}} {{grid_axes}} {{{peer}}} : ({{type}}{{indices}}) -> {{type}}"
        for name, peer in MESSAGES.items()
    },
    "shard.sharding": " {grid} {split_axes} : !shard.sharding",
    "shard.shard": " {0} to {1} : {type}",
    "builtin.unrealized_conversion_cast": " {0} : {type} to {type}",
    "shard.process_linear_index": " on {grid} : index",
    "arith.constant": " dense<{numbers}> : {table}",
    "tensor.extract": " {0}[{1}] : {table}",
    "tensor.empty": "() : {type}",
    "tensor.extract_slice": " {0}{box} : {type} to {type}",
    "tensor.insert_slice": " {0} into {1}{box} : {type} into {type}",
}
"""The text of each operation after its name.

`{0}` and `{1}` are operands, `{type}` the type of an operand or of the result, `{table}` a type of
indices. The other words are attributes, most of them written with their names.
"""

REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "product": "product", "mean": "average"}
"""The dialect's names of reductions by ours."""

Numbers = tuple[int, ...]


class TensorType(Record):
    """The shape and the element type of a tensor: `tensor<2x6xf32>`."""

    shape: Numbers
    element: str

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{self.element}>"

    def resized(self, axis: int, size: int) -> TensorType:
        """Return the type with another size of a dimension."""
        return TensorType((*self.shape[:axis], size, *self.shape[axis + 1 :]), self.element)


class Operation(NamedTuple):
    """An operation; `name` is a key of `OPERATIONS`.

    The operands of a message after the first are the coordinates of the peer on `grid_axes`; the
    second operand of `insert_slice` is the tensor that is written into. `types` are those of the
    text, in its order: that of the first operand, and that of the result. `attributes` are by the
    names in the text, and for slices with steps of 1 `offsets` and `sizes`.

    >>> types = TensorType((2,), "f32"), TensorType((6,), "f32")
    >>> words = {"grid": "mesh", "grid_axes": (0,), "gather_axis": 0}
    >>> print(Operation("shard.all_gather", "1", ("0",), words, types))
    %1 = shard.all_gather %0 on @mesh grid_axes = [0] gather_axis = 0 \
: tensor<2xf32> -> tensor<6xf32>
    """

    name: str
    result: str
    operands: tuple[str, ...]
    attributes: Mapping[str, Any]
    types: tuple[TensorType, ...] = ()

    def __str__(self) -> str:
        types = iter(self.types)

        def word(match: re.Match[str]) -> str:
            field = match[1]
            if field.isdigit():
                return f"%{self.operands[int(field)]}"
            if field in ("type", "table"):
                return str(next(types))
            if field == "indices":
                return ", index" * len(self.operands[1:])
            if field == "grid":
                return symbol_text(self.attributes["grid"])
            if field == "box":
                offsets, sizes = self.attributes["offsets"], self.attributes["sizes"]
                return "".join(map(write_list, (offsets, sizes, [1] * len(sizes))))
            if field in MESSAGES.values():
                return f"{field} = {write_list(f'%{name}' for name in self.operands[1:])}"
            value = self.attributes[field]
            text = write_list(value) if isinstance(value, tuple) else value
            return text if field == "numbers" else f"{field} = {text}"

        return f"%{self.result} = {self.name}" + re.sub(r"\{(\w+)\}", word, OPERATIONS[self.name])


def write_list(values: Iterable[Any]) -> str:
    """Return numbers or words, or lists of them, as MLIR writes a list.

    >>> write_list([(0, 1), ()])
    '[[0, 1], []]'
    """
    words = (write_list(value) if isinstance(value, tuple) else str(value) for value in values)
    return f"[{', '.join(words)}]"


class ShardModule(Record):
    """A module with grids and a function of a tensor.

    Args:
        grids: the meshes of the operations, whose devices are numbered in row-major order.
        function: the name of the function.
        argument, argument_type: the name and the type of its argument.
        operations: in order.
        returned, result_type: the name and the type of the returned value.
    """

    grids: tuple[DeviceMesh, ...]
    function: str
    argument: str
    argument_type: TensorType
    operations: tuple[Operation, ...]
    returned: str
    result_type: TensorType

    def __str__(self) -> str:
        head = (
            f"  func.func {symbol_text(self.function)}(%{self.argument}: {self.argument_type}) "
            f"-> {self.result_type} {{"
        )
        return "\n".join(
            [
                "module {",
                *(f"  {mlir_mesh_text(grid)}" for grid in self.grids),
                head,
                *(f"    {operation}" for operation in self.operations),
                f"    return %{self.returned} : {self.result_type}",
                "  }",
                "}",
            ]
        )


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
    specs = shardings.with_own_mesh_names(shardings.plain_shardings(program))
    for number, spec in enumerate(specs):
        where = f"step {number}, {program.steps[number - 1]}," if number else "the source"
        mlir_mesh_text(spec.mesh)
        shardings.check_ceil(where, _SYSTEM, spec, program.shape)
    meshes = {
        mesh: shardings.WholeAxes(mesh, [spec for spec in specs if spec.mesh is mesh], _SYSTEM)
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
    # Axis names are not written: those of a module that is read are axis0, axis1 and so on.
    grids = [
        mesh.replace(axis_names=[f"axis{n}" for n in range(len(mesh.shape))])
        for mesh in (whole.mesh for whole in meshes.values())
    ]
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
        own = TensorType(shardings.ceil_shape(source, shape), element)
        self.change("builtin.unrealized_conversion_cast", own)

    def add(
        self,
        name: str,
        operands: tuple[str, ...] = (),
        types: tuple[TensorType, ...] = (),
        **attributes: Any,
    ) -> str:
        """Append an operation, and return the name of its result."""
        self._count += 1
        self.operations.append(Operation(name, str(self._count), operands, attributes, types))
        return str(self._count)

    def change(self, name: str, after: TensorType, *others: str, **attributes: Any) -> None:
        """Append an operation whose result replaces the current value, with the type `after`."""
        self.here = self.add(name, (self.here, *others), (self.type, after), **attributes)
        self.type = after

    def _annotate(self, spec: ShardingSpec) -> None:
        lists = tuple(_axis_numbers(spec, dim.axes) for dim in spec.dim_specs)
        # The dialect requires at least one list, even for a scalar.
        axes = lists or ((),)
        sharding = self.add("shard.sharding", grid=spec.mesh.name, split_axes=axes)
        self.here = self.add("shard.shard", (self.here, sharding), (self.whole,))

    def module(self, grids: Iterable[DeviceMesh], target: ShardingSpec) -> ShardModule:
        """Return the module, with the target sharding of its result."""
        # The result is cast to a global tensor with its sharding.
        self.change("builtin.unrealized_conversion_cast", self.whole)
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
        empty = self.add("tensor.empty", types=(longer,))
        start, sizes = (0,) * len(self.shape), self.type.shape
        self.change("tensor.insert_slice", longer, empty, offsets=start, sizes=sizes)

    def truncate(self, dim: int, length: int) -> None:
        """Truncate a dimension of the tensor to `length`, if it is longer."""
        if self.type.shape[dim] != length:
            shorter = self.type.resized(dim, length)
            start = (0,) * len(self.shape)
            self.change("tensor.extract_slice", shorter, offsets=start, sizes=shorter.shape)

    def collective(
        self,
        name: str,
        spec: ShardingSpec,
        axes: Sequence[Axis],
        after: TensorType,
        **attributes: int | str,
    ) -> None:
        """Append a collective within the groups along `axes`."""
        numbers = _axis_numbers(spec, axes)
        self.change(name, after, grid=spec.mesh.name, grid_axes=numbers, **attributes)

    def step(self, step: steps.Step, before: ShardingSpec, after: ShardingSpec) -> None:
        """Append the operations of a step. Raises NotationError if the dialect has none."""
        reduction = REDUCTIONS[before.reduction or "sum"]
        if isinstance(step, steps.Permute):
            self._permute(step, before, after)
        elif isinstance(step, steps.AllReduce):
            reduced = [axis for axis in before.partial_axes if axis not in after.partial_axes]
            self.collective("shard.all_reduce", before, reduced, self.type, reduction=reduction)
        elif isinstance(step, steps.AllToAll):
            self._all_to_all(step, before, after)
        elif isinstance(step, steps.AllGather):
            for dim in range(len(self.shape)):
                axes = shardings.axes_dropped(after, before, dim)
                if axes:
                    longer = self._find_gathered_type(before, axes, dim)
                    self.collective("shard.all_gather", before, axes, longer, gather_axis=dim)
                    self._check_lines_up(after, before, dim)
                    self.truncate(dim, shardings.part_length(after, self.shape, dim))
        elif isinstance(step, steps.Slice | steps.ReduceScatter):
            for dim in range(len(self.shape)):
                axes = shardings.axes_dropped(before, after, dim)
                if axes:
                    self._check_lines_up(before, after, dim)
                    length = shardings.part_length(after, self.shape, dim)
                    # The dialect splits evenly: all parts are padded to the length of the first.
                    self.pad(dim, length * before.mesh.joint_size(axes))
                    part = self.type.resized(dim, length)
                    if isinstance(step, steps.Slice):
                        self.collective("shard.all_slice", before, axes, part, slice_axis=dim)
                    else:
                        self.collective(
                            "shard.reduce_scatter",
                            before,
                            axes,
                            part,
                            reduction=reduction,
                            scatter_axis=dim,
                        )
        else:
            raise NotationError(
                "it has slices, gathers, all-to-alls between two dimensions, messages and "
                "reductions; take a program of those: --steps classical or mlir, or "
                "steps='classical' in find_program"
            )

    def _find_gathered_type(self, spec: ShardingSpec, axes: Sequence[Axis], dim: int) -> TensorType:
        return self.type.resized(dim, self.type.shape[dim] * spec.mesh.joint_size(axes))

    def _check_lines_up(self, short: ShardingSpec, long: ShardingSpec, dim: int) -> None:
        if not shardings.lines_up(short, long, self.shape, dim):
            raise NotationError(
                f"the parts of `{long}` along dimension {dim} are not parts of those of `{short}`"
            )

    def _all_to_all(self, step: steps.Step, before: ShardingSpec, after: ShardingSpec) -> None:
        giver, taker = step.dims
        axes = shardings.axes_dropped(after, before, giver)
        if axes != shardings.axes_dropped(before, after, taker):
            raise NotationError("it changes the order of its axes; the order must be kept")
        self._check_lines_up(after, before, giver)
        self._check_lines_up(before, after, taker)
        length = shardings.part_length(after, self.shape, taker)
        self.pad(taker, length * before.mesh.joint_size(axes))
        moved = self._find_gathered_type(before, axes, giver).resized(taker, length)
        self.collective(
            "shard.all_to_all", before, axes, moved, split_axis=taker, concat_axis=giver
        )
        self.truncate(giver, shardings.part_length(after, self.shape, giver))

    def _permute(self, step: steps.Permute, before: ShardingSpec, after: ShardingSpec) -> None:
        """Append messages in which every process sends its shard, and receives another."""
        if shardings.ceil_shape(after, self.shape) != self.type.shape:
            raise NotationError(
                f"the shards of `{after}` have another shape than those of `{before}`; a permute "
                "needs equal shards"
            )
        grid = before.mesh.shape
        source, target = np.array(sorted(step.pairs, key=lambda pair: pair[1])).T
        # The coordinates of each process's receiver and sender: `(axes, processes)`. `argsort`
        # inverts the permutation: process `p` sends to the process whose source is `p`.
        to = np.array(np.unravel_index(np.argsort(source), grid))
        back = np.array(np.unravel_index(source, grid))
        own = np.array(np.unravel_index(target, grid))
        axes = np.flatnonzero((back != own).any(axis=1)).tolist()
        if not axes:
            return
        grid_name, table_type = before.mesh.name, TensorType((before.mesh.size,), "index")
        process = self.add("shard.process_linear_index", grid=grid_name)
        # Each process looks up its peer, axis by axis, in a table of all processes.
        for name, coordinates in (("shard.send", to), ("shard.recv", back)):
            peer = []
            for axis in axes:
                numbers = tuple(coordinates[axis].tolist())
                table = self.add("arith.constant", types=(table_type,), numbers=numbers)
                peer.append(self.add("tensor.extract", (table, process), (table_type,)))
            words = {"grid": grid_name, "grid_axes": tuple(axes)}
            result = self.add(name, (self.here, *peer), (self.type, self.type), **words)
        # The tensor received; the tensor sent is that of before.
        self.here = result


def _axis_numbers(spec: ShardingSpec, axes: Iterable[Axis]) -> tuple[int, ...]:
    return tuple(spec.mesh.axis_names.index(axis.name) for axis in axes)
