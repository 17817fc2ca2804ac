"""Modules of MLIR's `shard` dialect: their types, a parser, and an interpreter.

*Types.* Every operation must fit the types of its values:

1. A name is defined before it is used, and defined once.
2. A tensor with a sharding is cast to a type that has `K ceildiv P` elements along a dimension of
   `K` in `P` parts, and a tensor that is cast back has an equivalent sharding.
3. A collective changes the shape of its operand by its group: a gathered dimension is `n` times as
   long, a sliced dimension an `n`-th, which `n` must divide.

MLIR's own verifier checks the third only; the first two make a text a program.

*The parser* reads the operations that programs are written with, in any order, with any names and
line breaks, and with comments. Other operations are refused by name.

*The interpreter* runs a module on arrays, all processes at once, operation by operation. Padding
holds values that no program may show: not-a-number, or the largest integer. A module that takes
padding for elements therefore reveals them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.collectives.lowering.mlir import (
    COLLECTIVES,
    ELEMENTS,
    MESSAGES,
    REDUCTIONS,
    CastOp,
    CollectiveOp,
    Computed,
    ConstantOp,
    EmptyOp,
    ExtractOp,
    ExtractSliceOp,
    Grid,
    InsertSliceOp,
    MessageOp,
    Numbers,
    Operation,
    ProcessIndexOp,
    ShardingOp,
    ShardModule,
    ShardOp,
    TensorType,
)
from reshard.collectives.lowering.shardings import ceil_shape
from reshard.errors import LayoutError, NotationError, ShardError
from reshard.notation.mlir import parse_mlir_mesh
from reshard.notation.parsing import Scanner, symbol_text
from reshard.sharding import DimSpec, Level, ShardingSpec


@dataclass(frozen=True)
class _Value:
    """The known properties of a value.

    `is_own` marks a process's tensor; `sharding` is that of a global tensor, or a sharding itself;
    `own` is the type a global tensor was cast from; `count` is the length of a table.
    """

    word: str
    type: TensorType | None = None
    is_own: bool = False
    sharding: ShardingOp | None = None
    own: TensorType | None = None
    count: int = 0


def sharding_spec(grid: Grid, sharding: ShardingOp, ndim: int) -> ShardingSpec:
    """Return the sharding that a `shard.sharding` gives a tensor of `ndim` dimensions.

    Raises:
        NotationError: axes that are not in the grid, more lists than dimensions.
        SpecError: an axis used twice.
    """
    mesh = grid.mesh
    for axis in (axis for axes in sharding.split_axes for axis in axes):
        _check_axis(grid, axis)
    cuts = [*sharding.split_axes, *[()] * (ndim - len(sharding.split_axes))]
    # Lists beyond the tensor's dimensions are allowed while they are empty.
    if any(cuts[ndim:]):
        raise NotationError(
            f"{len(cuts)} lists of axes for a tensor of {ndim} dimensions; give at most one a "
            "dimension"
        )
    return ShardingSpec(
        mesh,
        [
            DimSpec([Level([mesh.axis_names[a] for a in axes])] if axes else [])
            for axes in cuts[:ndim]
        ],
    )


class TypeCheck:
    """The values of a module up to some operation. Feed it operations in order with `take`."""

    def __init__(self, grids: Iterable[Grid], argument: str, type_: TensorType) -> None:
        self._grids = {grid.name: grid for grid in grids}
        sizes = {math.prod(grid.shape) for grid in self._grids.values()}
        if len(sizes) != 1:
            raise NotationError(
                f"grids of {sorted(sizes)} processes in one module; the same processes run all of "
                "it, so there must be a grid and all must be of one size"
            )
        self._values = {argument: _Value("tensor", type_)}

    def take(self, operation: Operation) -> None:
        """Check an operation, and remember its result. Raises NotationError where it is wrong."""
        value = self._result(operation)
        if operation.result in self._values:
            raise NotationError(f"%{operation.result} is a value already; give each its own name")
        self._values[operation.result] = value

    def finish(self, returned: str, type_: TensorType) -> None:
        """Check the returned value: a global tensor with a sharding, of this type."""
        value = self._tensor(returned, type_)
        if value.is_own or value.sharding is None:
            raise NotationError(
                f"%{returned} is returned without a sharding; cast a process's tensor back and "
                "give it one by shard.shard"
            )

    def _grid(self, name: str) -> Grid:
        if name not in self._grids:
            known = ", ".join(map(symbol_text, self._grids)) or "none"
            raise NotationError(f"there is no grid {symbol_text(name)}; the module has {known}")
        return self._grids[name]

    def _value(self, name: str, word: str) -> _Value:
        value = self._values.get(name)
        if value is None:
            raise NotationError(f"%{name} is no value here; it must be defined before it is used")
        if value.word != word:
            raise NotationError(f"%{name} is of type {value.word}; a {word} was expected")
        return value

    def _tensor(self, name: str, type_: TensorType) -> _Value:
        value = self._value(name, "tensor")
        if value.type != type_:
            raise NotationError(f"%{name} is a {value.type}, not a {type_}")
        return value

    def _own(self, name: str, type_: TensorType) -> None:
        if not self._tensor(name, type_).is_own:
            raise NotationError(
                f"%{name} is a global tensor; collectives and slices take a process's own, cast "
                "it after shard.shard"
            )

    def _result(self, op: Operation) -> _Value:
        if isinstance(op, ShardingOp):
            sharding_spec(self._grid(op.grid), op, len(op.split_axes))
            return _Value("sharding", sharding=op)
        if isinstance(op, ShardOp):
            return self._annotate(op)
        if isinstance(op, CastOp):
            return self._cast(op)
        if isinstance(op, CollectiveOp):
            self._own(op.operand, op.before)
            _check_shape(op.after, _infer_collective(op, self._grid(op.grid)))
            return _Value("tensor", op.after, is_own=True)
        if isinstance(op, MessageOp):
            return self._message(op)
        if isinstance(op, ProcessIndexOp):
            self._grid(op.grid)
            return _Value("index")
        if isinstance(op, ConstantOp):
            return _Value("table", count=len(op.numbers))
        if isinstance(op, ExtractOp):
            self._value(op.index, "index")
            count = self._value(op.table, "table").count
            if count != op.count:
                raise NotationError(f"%{op.table} has {count} numbers, not {op.count}")
            return _Value("index")
        if isinstance(op, EmptyOp):
            return _Value("tensor", op.type, is_own=True)
        # The remaining operations are slices, which read from or write to a process's tensor.
        self._own(op.operand, op.before)
        if isinstance(op, ExtractSliceOp):
            _check_box(op, op.before, op.after)
        else:
            self._own(op.into, op.after)
            _check_box(op, op.after, op.before)
        return _Value("tensor", op.after, is_own=True)

    def _annotate(self, op: ShardOp) -> _Value:
        value = self._tensor(op.operand, op.type)
        if value.is_own:
            raise NotationError(
                f"%{op.operand} is a process's own tensor; shard.shard takes global ones"
            )
        sharding = self._value(op.sharding, "sharding").sharding
        if value.sharding is not None:
            raise NotationError(
                f"%{op.operand} has a sharding already; programs say by collectives how it changes"
            )
        # The tensor cast back must have the shape that this sharding gives each process.
        if sharding is not None and value.own is not None:
            self._check_part(value.own, sharding, op.type)
        return _Value("tensor", op.type, sharding=sharding)

    def _cast(self, op: CastOp) -> _Value:
        value = self._tensor(op.operand, op.before)
        # From a process's tensor back to a global tensor; otherwise the reverse.
        if value.is_own:
            return _Value("tensor", op.after, own=op.before)
        if value.sharding is None:
            raise NotationError(
                f"%{op.operand} has no sharding; give it one by shard.shard before it is cast"
            )
        self._check_part(op.after, value.sharding, op.before)
        return _Value("tensor", op.after, is_own=True)

    def _check_part(self, own: TensorType, sharding: ShardingOp, whole: TensorType) -> None:
        spec = sharding_spec(self._grid(sharding.grid), sharding, len(whole.shape))
        expected = TensorType(ceil_shape(spec, whole.shape), whole.element)
        if own != expected:
            raise NotationError(
                f"a process has a {expected} of a {whole} that is sharded {sharding.lists}, not a "
                f"{own}"
            )

    def _message(self, op: MessageOp) -> _Value:
        self._own(op.operand, op.before)
        _group_size(self._grid(op.grid), op.grid_axes)
        if len(op.peer) != len(op.grid_axes):
            raise NotationError(
                f"{len(op.peer)} numbers for a process among the axes {list(op.grid_axes)}; give "
                "one for each axis"
            )
        for name in op.peer:
            self._value(name, "index")
        _check_shape(op.after, op.before)
        return _Value("tensor", op.after, is_own=True)


def check_types(module: ShardModule) -> None:
    """Check a module that was not read from a text. Raises NotationError with the operation."""
    check = TypeCheck(module.grids, module.argument, module.argument_type)
    for operation in module.operations:
        try:
            check.take(operation)
        except LayoutError as error:
            raise NotationError(f"`{operation}`: {error}") from None
    check.finish(module.returned, module.result_type)


def _check_axis(grid: Grid, axis: int) -> None:
    if not 0 <= axis < len(grid.shape):
        raise NotationError(
            f"axis {axis} of {symbol_text(grid.name)}, whose axes are 0 to {len(grid.shape) - 1}"
        )


def _group_size(grid: Grid, axes: Iterable[int]) -> int:
    listed = list(axes)
    for axis in listed:
        _check_axis(grid, axis)
    if len(set(listed)) < len(listed):
        raise NotationError(f"an axis occurs twice in grid_axes {listed}")
    return math.prod(grid.shape[axis] for axis in listed)


def _infer_collective(op: CollectiveOp, grid: Grid) -> TensorType:
    """Return the result type of a collective."""
    count = _group_size(grid, op.grid_axes)
    if "reduction" in op.names and op.word not in REDUCTIONS.values():
        raise NotationError(
            f"the reduction {op.word!r}; it is one of {', '.join(REDUCTIONS.values())}"
        )
    for name in op.names:
        if name != "reduction" and not 0 <= op.setting(name) < len(op.before.shape):
            raise NotationError(
                f"{name} = {op.setting(name)} of a {op.before}; its axes are 0 to "
                f"{len(op.before.shape) - 1}"
            )
    if op.kind == "all_gather":
        return _grow(op.before, op.setting("gather_axis"), count)
    if op.kind == "all_slice":
        return _shrunk(op.before, op.setting("slice_axis"), count)
    if op.kind == "reduce_scatter":
        return _shrunk(op.before, op.setting("scatter_axis"), count)
    if op.kind == "all_to_all":
        split = _shrunk(op.before, op.setting("split_axis"), count)
        return _grow(split, op.setting("concat_axis"), count)
    return op.before


def _grow(type_: TensorType, axis: int, count: int) -> TensorType:
    return type_.resized(axis, type_.shape[axis] * count)


def _shrunk(type_: TensorType, axis: int, count: int) -> TensorType:
    if type_.shape[axis] % count:
        raise NotationError(
            f"axis {axis} of a {type_} is not a multiple of the {count} processes of a group; pad "
            "it first"
        )
    return type_.resized(axis, type_.shape[axis] // count)


def _check_shape(actual: TensorType, expected: TensorType) -> None:
    if actual != expected:
        raise NotationError(f"its result is a {expected}, not a {actual}")


def _check_box(op: ExtractSliceOp | InsertSliceOp, outer: TensorType, inner: TensorType) -> None:
    if op.sizes != inner.shape or outer.element != inner.element:
        raise NotationError(f"a box of sizes {list(op.sizes)} of a {outer} is not a {inner}")
    if len(op.offsets) != len(op.sizes) or len(op.sizes) != len(outer.shape):
        raise NotationError(
            f"{len(op.offsets)} offsets and {len(op.sizes)} sizes in a {outer}; give one per "
            "dimension"
        )
    for offset, size, length in zip(op.offsets, op.sizes, outer.shape, strict=True):
        if not 0 <= offset <= offset + size <= length:
            raise NotationError(
                f"the box at {list(op.offsets)} of sizes {list(op.sizes)} is not inside a {outer}"
            )


_GRID = r"shard\.grid\b[^)\n]*\)?"
_TENSOR = r"tensor<((?:\d{1,18}x)*)((?:complex<f(?:32|64)>)|[a-z]\w*)>"
_SHARDING = "!shard.sharding"


def parse_shard_module(text: str) -> ShardModule:
    """Parse the text of a module, and check every operation against its types.

    Raises:
        NotationError: text that cannot be parsed or type-checked, with its line.

    >>> print(parse_shard_module('''
    ... shard.grid @g(shape = 2)
    ... func.func @f(%a: tensor<5xf32>) -> tensor<5xf32> {
    ...   %s = shard.sharding @g split_axes = [[0]] : !shard.sharding
    ...   %b = shard.shard %a to %s : tensor<5xf32>
    ...   %c = builtin.unrealized_conversion_cast %b : tensor<5xf32> to tensor<2xf32>
    ...   return %b : tensor<5xf32>
    ... }'''))
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: line 6: a process has a tensor<3xf32> of a tensor<5xf32> that \
is sharded [[0]], not a tensor<2xf32>
    """
    return _ModuleReader(text).module()


class _ModuleReader:
    def __init__(self, text: str) -> None:
        self.scanner = Scanner(text)
        self._begin = 0

    def module(self) -> ShardModule:
        """Parse the whole text."""
        try:
            return self._module()
        except LayoutError as error:
            line = self.scanner.text.count("\n", 0, self._begin) + 1
            raise NotationError(f"line {line}: {error}") from None

    def _module(self) -> ShardModule:
        scanner = self.scanner
        self._next()
        # 1. Grids, inside a `module` or without.
        is_wrapped = scanner.accept("module")
        if is_wrapped:
            scanner.expect("{")
        grids: list[Grid] = []
        self._next()
        while scanner.looks_at(_GRID):
            grids.append(self._grid(grids))
            self._next()
        # 2. The function's head: one argument, one result.
        scanner.expect("func.func")
        scanner.take(r"(?:public|private)\b")
        function = self._symbol()
        scanner.expect("(")
        argument = self._name()
        scanner.expect(":")
        argument_type = self._tensor()
        scanner.expect(")")
        scanner.expect("->")
        result_type = self._tensor()
        scanner.expect("{")
        # 3. Operations, each checked before the next is read, so that errors have its line.
        operations: list[Operation] = []
        check = TypeCheck(grids, argument, argument_type)
        self._next()
        while not scanner.take(r"(?:func\.)?return\b"):
            operation = self._operation()
            check.take(operation)
            operations.append(operation)
            self._next()
        # 4. The value that is returned, of the type that the head gives.
        returned = self._name()
        scanner.expect(":")
        if (given := self._tensor()) != result_type:
            raise NotationError(f"a {given} is returned by a function of {result_type}")
        check.finish(returned, result_type)
        self._next()
        scanner.expect("}")
        if is_wrapped:
            scanner.expect("}")
        scanner.expect_end()
        return ShardModule(
            tuple(grids),
            function,
            argument,
            argument_type,
            tuple(operations),
            returned,
            result_type,
        )

    def _next(self) -> None:
        """Start an operation, so that errors name its line."""
        self._begin = self.scanner.position

    def _grid(self, known: list[Grid]) -> Grid:
        match = self.scanner.take(_GRID)
        mesh = parse_mlir_mesh(match[0] if match else "")
        if any(grid.name == mesh.name for grid in known):
            raise NotationError(f"two grids are called @{mesh.name}; give each its own name")
        return Grid(mesh.name, mesh.shape)

    def _symbol(self) -> str:
        name = self.scanner.symbol()
        if name is None:
            raise self.scanner.failure("a name such as @mesh")
        return name

    def _name(self) -> str:
        match = self.scanner.take(r"%([A-Za-z0-9_$.-]+)")
        if not match:
            raise self.scanner.failure("a value such as %0")
        return match[1]

    def _names(self) -> tuple[str, ...]:
        return tuple(self.scanner.listed("[", self._name, "]"))

    def _numbers(self) -> Numbers:
        return tuple(self.scanner.numbers())

    def _tensor(self) -> TensorType:
        match = self.scanner.take(_TENSOR)
        if not match:
            raise self.scanner.failure("a type such as tensor<4x8xf32>, with every size known")
        return TensorType(tuple(int(size) for size in match[1].split("x")[:-1]), match[2])

    def _setting(self, name: str, read: Callable[[], Numbers]) -> Numbers:
        self.scanner.expect(name)
        self.scanner.expect("=")
        return read()

    def _operation(self) -> Operation:
        result = self._name()
        self.scanner.expect("=")
        match = self.scanner.take(r"([a-z]\w*)\.([a-z]\w*)\b")
        if not match:
            raise self.scanner.failure("an operation such as shard.all_gather")
        dialect, word = match[1], match[2]
        if dialect == "shard" and word in COLLECTIVES:
            return self._collective(result, word)
        if dialect == "shard" and word in MESSAGES:
            return self._message(result, word)
        read: dict[str, Callable[[str], Operation]] = {
            "shard.sharding": self._sharding,
            "shard.shard": self._annotation,
            "shard.process_linear_index": self._process_index,
            "builtin.unrealized_conversion_cast": self._cast,
            "arith.constant": self._table,
            "tensor.extract": self._lookup,
            "tensor.empty": self._empty,
            "tensor.extract_slice": self._slice_of,
            "tensor.insert_slice": self._slice_into,
        }
        if match[0].strip() not in read:
            known = [*(f"shard.{kind}" for kind in (*COLLECTIVES, *MESSAGES)), *read]
            raise NotationError(
                f"no operation {match[0].strip()!r} in programs; they have {', '.join(known)}"
            )
        return read[match[0].strip()](result)

    def _sharding(self, result: str) -> ShardingOp:
        grid = self._symbol()
        self.scanner.expect("split_axes")
        self.scanner.expect("=")
        lists = tuple(self.scanner.listed("[", self._numbers, "]"))
        self.scanner.expect(":")
        self.scanner.expect(_SHARDING)
        return ShardingOp(result, grid, lists)

    def _annotation(self, result: str) -> ShardOp:
        operand = self._name()
        self.scanner.expect("to")
        sharding = self._name()
        # The annotation holds for the users of the value, with these words or without.
        self.scanner.accept("annotate_for_users")
        self.scanner.expect(":")
        return ShardOp(result, operand, sharding, self._tensor())

    def _types(self, between: str) -> tuple[TensorType, TensorType]:
        self.scanner.expect(":")
        before = self._tensor()
        self.scanner.expect(between)
        return before, self._tensor()

    def _cast(self, result: str) -> CastOp:
        return CastOp(result, self._name(), *self._types("to"))

    def _group(self) -> tuple[str, str, Numbers]:
        operand = self._name()
        self.scanner.expect("on")
        grid = self._symbol()
        has_axes = self.scanner.looks_at("grid_axes")
        return operand, grid, self._setting("grid_axes", self._numbers) if has_axes else ()

    def _collective(self, result: str, kind: str) -> CollectiveOp:
        operand, grid, axes = self._group()
        settings: list[int | str] = []
        for name in COLLECTIVES[kind]:
            # Without a word a reduction is a sum.
            if name == "reduction" and not self.scanner.looks_at("reduction"):
                settings.append("sum")
                continue
            self.scanner.expect(name)
            self.scanner.expect("=")
            if name != "reduction":
                settings.append(self.scanner.number())
                continue
            match = self.scanner.take(r"<?\s*([a-z_]+)\s*>?")
            if not match:
                raise self.scanner.failure("a reduction such as sum")
            settings.append(match[1])
        return CollectiveOp(kind, result, operand, grid, axes, tuple(settings), *self._types("->"))

    def _message(self, result: str, kind: str) -> MessageOp:
        operand, grid, axes = self._group()
        self.scanner.expect(MESSAGES[kind])
        self.scanner.expect("=")
        peer = self._names()
        self.scanner.expect(":")
        self.scanner.expect("(")
        before = self._tensor()
        for _ in peer:
            self.scanner.expect(",")
            self.scanner.expect("index")
        self.scanner.expect(")")
        self.scanner.expect("->")
        return MessageOp(kind, result, operand, grid, axes, peer, before, self._tensor())

    def _process_index(self, result: str) -> ProcessIndexOp:
        self.scanner.expect("on")
        grid = self._symbol()
        self.scanner.expect(":")
        self.scanner.expect("index")
        return ProcessIndexOp(result, grid)

    def _index_table(self) -> int:
        self.scanner.expect(":")
        type_ = self._tensor()
        if type_.element != "index" or len(type_.shape) != 1:
            raise NotationError(f"a table of {type_}; tables are such as tensor<4xindex>")
        return type_.shape[0]

    def _table(self, result: str) -> ConstantOp:
        self.scanner.expect("dense<")
        numbers = self._numbers()
        self.scanner.expect(">")
        if (count := self._index_table()) != len(numbers):
            raise NotationError(f"{len(numbers)} numbers in a table of {count}")
        return ConstantOp(result, numbers)

    def _lookup(self, result: str) -> ExtractOp:
        table = self._name()
        self.scanner.expect("[")
        index = self._name()
        self.scanner.expect("]")
        return ExtractOp(result, table, index, self._index_table())

    def _empty(self, result: str) -> EmptyOp:
        self.scanner.expect("(")
        self.scanner.expect(")")
        self.scanner.expect(":")
        return EmptyOp(result, self._tensor())

    def _box(self) -> tuple[Numbers, Numbers]:
        offsets, sizes, steps = self._numbers(), self._numbers(), self._numbers()
        if steps != (1,) * len(sizes):
            raise NotationError(f"steps {list(steps)} of a slice; they are 1 each")
        return offsets, sizes

    def _slice_of(self, result: str) -> ExtractSliceOp:
        return ExtractSliceOp(result, self._name(), *self._box(), *self._types("to"))

    def _slice_into(self, result: str) -> InsertSliceOp:
        operand = self._name()
        self.scanner.expect("into")
        return InsertSliceOp(result, operand, self._name(), *self._box(), *self._types("into"))


Array = NDArray[Any]
_DTYPES = {theirs: ours for ours, theirs in ELEMENTS.items()}
_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
    REDUCTIONS["mean"]: np.mean,
}


def run_shard_module(module: ShardModule, shards: Mapping[int, Array]) -> dict[int, Array]:
    """Run the function of a module on the shards of all processes.

    Args:
        module: the module to run.
        shards: for every process its NumPy array, a shard or a contribution to one, not padded.

    Returns:
        For every process its new array.

    Raises:
        NotationError: a module whose types do not fit.
        ShardError: an array that is missing, or of another shape or dtype; a process that is to
            receive what no other sends it.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> from reshard.collectives.lowering.mlir import shard_module
    >>> mesh = DeviceMesh.of(x=2)
    >>> program = find_program(spec(mesh, "x, -"), spec(mesh, "-, x"), (2, 4))
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run_shard_module(shard_module(program, "int64"), shards)[1].tolist()
    [[2, 3], [6, 7]]
    """
    check_types(module)
    run = _Run(module, shards)
    for operation in module.operations:
        run.carry_out(operation)
    return dict(enumerate(run.arrays[module.returned]))


class _Run:
    """The values of all processes: tensors, tables and numbers."""

    def __init__(self, module: ShardModule, shards: Mapping[int, Array]) -> None:
        self._grids = {grid.name: grid for grid in module.grids}
        self._processes = range(math.prod(module.grids[0].shape))
        self._shardings: dict[str, ShardingOp] = {}
        # Values that were cast back from a process's own; values with a sharding.
        self._returning: set[str] = set()
        self._annotated: set[str] = set()
        self._sent: dict[int, tuple[int, Array]] = {}
        missing = [process for process in self._processes if process not in shards]
        if missing:
            raise ShardError(
                f"no array for process {missing[0]}; the grid has {len(self._processes)}, got "
                f"arrays for {sorted(shards)}"
            )
        given = [np.asarray(shards[process]) for process in self._processes]
        element = module.argument_type.element
        for process, array in enumerate(given):
            if array.dtype.name != _DTYPES.get(element):
                raise ShardError(
                    f"the array of process {process} is of {array.dtype}; the module is for "
                    f"{element}"
                )
        self.arrays: dict[str, list[Array]] = {module.argument: given}

    def carry_out(self, op: Operation) -> None:
        """Run one operation in every process."""
        if isinstance(op, ShardingOp):
            self._shardings[op.result] = op
        else:
            self.arrays[op.result] = list(self._result(op))

    def _result(self, op: Computed) -> Sequence[Array]:
        if isinstance(op, ProcessIndexOp):
            return [np.array(process) for process in self._processes]
        if isinstance(op, ConstantOp):
            return [np.array(op.numbers) for _ in self._processes]
        if isinstance(op, ExtractOp):
            pairs = zip(self.arrays[op.table], self.arrays[op.index], strict=True)
            return [table[int(index)] for table, index in pairs]
        if isinstance(op, EmptyOp):
            return [_padding(op.type, self._dtype) for _ in self._processes]
        if isinstance(op, InsertSliceOp):
            pairs = zip(self.arrays[op.into], self.arrays[op.operand], strict=True)
            return [_place_at(into, array, op.offsets) for into, array in pairs]
        held = self.arrays[op.operand]
        if isinstance(op, ShardOp):
            return self._parts(op, held)
        if isinstance(op, CastOp):
            # A cast of what has no sharding yet leads back to a global tensor, whose padding the
            # next `shard` takes off; the other way, a shard is padded to the size of the largest.
            if op.operand not in self._annotated:
                self._returning.add(op.result)
                return held
            start = (0,) * len(op.after.shape)
            return [_place_at(_padding(op.after, self._dtype), array, start) for array in held]
        if isinstance(op, ExtractSliceOp):
            return [array[_box(op.offsets, op.sizes)] for array in held]
        if isinstance(op, MessageOp):
            return self._messages(op, held)
        return _run_collective(op, self._grids[op.grid], held)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return next(iter(self.arrays.values()))[0].dtype

    def _parts(self, op: ShardOp, held: Sequence[Array]) -> list[Array]:
        """Return every process's part of a global tensor; without padding if it was cast back."""
        sharding = self._shardings[op.sharding]
        spec = sharding_spec(self._grids[sharding.grid], sharding, len(op.type.shape))
        layout = spec.layout(op.type.shape)
        self._annotated.add(op.result)
        found = []
        for process, array in enumerate(held):
            shape = layout.local_shape(process) or ()
            if op.operand in self._returning:
                array = array[_box((0,) * len(shape), shape)]
            elif array.shape != shape:
                raise ShardError(
                    f"the array of process {process} has shape {list(array.shape)}; its part of "
                    f"{op.type} that is sharded {sharding.lists} is {list(shape)}"
                )
            found.append(array)
        return found

    def _messages(self, op: MessageOp, held: Sequence[Array]) -> list[Array]:
        shape = self._grids[op.grid].shape
        peers = []
        for process in self._processes:
            place = [int(number) for number in np.unravel_index(process, shape)]
            for axis, value in zip(op.grid_axes, op.peer, strict=True):
                place[axis] = int(self.arrays[value][process])
                if not 0 <= place[axis] < shape[axis]:
                    raise ShardError(
                        f"process {process} names process {place[axis]} along axis {axis} of "
                        f"{shape[axis]} processes in `{op}`"
                    )
            peers.append(int(np.ravel_multi_index(place, shape)))
        # A send is kept until the receive that follows it, in which every process takes its own.
        if op.kind == "send":
            self._sent = {}
            for sender, (receiver, array) in enumerate(zip(peers, held, strict=True)):
                if receiver in self._sent:
                    raise ShardError(
                        f"processes {self._sent[receiver][0]} and {sender} both send to "
                        f"{receiver} in `{op}`"
                    )
                self._sent[receiver] = sender, array
            return list(held)
        for receiver, sender in enumerate(peers):
            if self._sent.get(receiver, (None,))[0] != sender:
                raise ShardError(
                    f"process {receiver} waits for process {sender}, which sends it nothing, in "
                    f"`{op}`"
                )
        return [self._sent.pop(receiver)[1] for receiver in self._processes]


def _padding(type_: TensorType, dtype: np.dtype[Any]) -> Array:
    """Return a tensor of values that represent padding."""
    if dtype.kind in "iu":
        return np.full(type_.shape, np.iinfo(dtype).max, dtype)
    return np.full(type_.shape, True if dtype.kind == "b" else np.nan, dtype)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))


def _place_at(into: Array, array: Array, offsets: Sequence[int]) -> Array:
    result = into.copy()
    result[_box(offsets, array.shape)] = array
    return result


def _run_collective(op: CollectiveOp, grid: Grid, held: Sequence[Array]) -> list[Array]:
    """Run a collective on the arrays of every group, its processes in the order of the axes."""
    rest = [axis for axis in range(len(grid.shape)) if axis not in op.grid_axes]
    # The axes of the collective last: after the reshape each row is a group of processes.
    numbers = np.arange(len(held)).reshape(grid.shape).transpose(*rest, *op.grid_axes)
    size = math.prod(grid.shape[axis] for axis in op.grid_axes)
    results: dict[int, Array] = {}
    for group in numbers.reshape(-1, size).tolist():
        combined = _of_group(op, [held[process] for process in group])
        results |= dict(zip(group, combined, strict=True))
    return [results[process] for process in range(len(held))]


def _of_group(op: CollectiveOp, arrays: Sequence[Array]) -> Sequence[Array]:
    count = len(arrays)
    if op.kind == "all_gather":
        return [np.concatenate(arrays, axis=op.setting("gather_axis"))] * count
    if op.kind == "all_slice":
        axis = op.setting("slice_axis")
        return [np.split(array, count, axis)[place] for place, array in enumerate(arrays)]
    if op.kind == "all_to_all":
        pieces = [np.split(array, count, op.setting("split_axis")) for array in arrays]
        axis = op.setting("concat_axis")
        return [np.concatenate([row[place] for row in pieces], axis) for place in range(count)]
    whole = _COMBINE[op.word](np.stack(arrays), axis=0).astype(arrays[0].dtype)
    if op.kind == "all_reduce":
        return [whole] * count
    return np.split(whole, count, op.setting("scatter_axis"))
