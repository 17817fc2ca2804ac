"""A module of MLIR's `shard` dialect as a value: its grids, one function, its operations.

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

Every process of a grid runs the function. A tensor is global up to the cast that follows its
sharding, and a process's own from there on; so MLIR's own partitioning has it.

Operations of one syntax are one class here; `kind` is the word that stands for them in the text.

Source: the LLVM project, `mlir/include/mlir/Dialect/Shard/IR/ShardOps.td` and
`mlir/test/Dialect/Shard/*.mlir`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reshard.mesh import DeviceMesh
from reshard.notation.mlir import mlir_mesh_text
from reshard.notation.parsing import symbol_text

# The settings of each collective beside its groups, in the order of the text.
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_gather": ("gather_axis",),
    "all_slice": ("slice_axis",),
    "all_to_all": ("split_axis", "concat_axis"),
    "all_reduce": ("reduction",),
    "reduce_scatter": ("reduction", "scatter_axis"),
}
MESSAGES = {"send": "destination", "recv": "source"}
REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "product": "product", "mean": "average"}
"""Our name of a reduction, and the dialect's."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class TensorType:
    """The shape and the element type of a tensor: `tensor<2x6xf32>`."""

    shape: Numbers
    element: str

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{self.element}>"

    def resized(self, axis: int, size: int) -> TensorType:
        """The same with another size of one dimension."""
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
    """`shard.sharding`: which axes of a grid cut each dimension."""

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
    """`shard.shard`: a global tensor has a sharding."""

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
    """A key of `COLLECTIVES`, within the groups along some axes of a grid.

    `settings` are in the order that `COLLECTIVES` has: axes of the tensor, a reduction.
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
        """What the settings are called."""
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
    """`shard.send` or `shard.recv`; `peer` are values, the other's place along `grid_axes`."""

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
    """`arith.constant`: numbers, one a process."""

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
    """`tensor.empty`: a tensor whose elements may be anything."""

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
    """Grids, and one function of one tensor.

    Args:
        grids: that the operations name.
        function: its name.
        argument: the name of its argument.
        argument_type: its type.
        operations: in order.
        returned: the name of the value that is returned.
        result_type: its type.
    """

    grids: tuple[Grid, ...]
    function: str
    argument: str
    argument_type: TensorType
    operations: tuple[Operation, ...]
    returned: str
    result_type: TensorType

    def grid(self, name: str) -> Grid | None:
        """The grid of a name."""
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
