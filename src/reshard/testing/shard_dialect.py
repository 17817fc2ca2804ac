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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.collectives.lowering.mlir import (
    COLLECTIVES,
    ELEMENTS,
    MESSAGES,
    OPERATIONS,
    REDUCTIONS,
    Numbers,
    Operation,
    ShardModule,
    TensorType,
    write_list,
)
from reshard.collectives.lowering.shardings import ceil_shape
from reshard.errors import LayoutError, NotationError, ShardError
from reshard.mesh import DeviceMesh
from reshard.notation.mlir import parse_mlir_mesh
from reshard.notation.parsing import Scanner, symbol_text
from reshard.sharding import DimSpec, Level, ShardingSpec


class _Value(Record):
    """The known properties of a value.

    `is_own` marks a process's tensor; `sharding` is that of a global tensor, or a sharding itself;
    `own` is the type a global tensor was cast from; `count` is the length of a table.
    """

    word: str
    type: TensorType | None = None
    is_own: bool = False
    sharding: Operation | None = None
    own: TensorType | None = None
    count: int = 0


def sharding_spec(grid: DeviceMesh, sharding: Operation, ndim: int) -> ShardingSpec:
    """Return the sharding that a `shard.sharding` gives a tensor of `ndim` dimensions.

    Raises:
        NotationError: axes that are not in the grid, more lists than dimensions.
        SpecError: an axis used twice.
    """
    split_axes = sharding.attributes["split_axes"]
    for axis in (axis for axes in split_axes for axis in axes):
        _check_axis(grid, axis)
    cuts = [*split_axes, *[()] * (ndim - len(split_axes))]
    # Lists beyond the tensor's dimensions are allowed while they are empty.
    if any(cuts[ndim:]):
        raise NotationError(
            f"{len(cuts)} lists of axes for a tensor of {ndim} dimensions; give at most one a "
            "dimension"
        )
    return ShardingSpec(
        grid,
        [
            DimSpec([Level([grid.axis_names[a] for a in axes])] if axes else [])
            for axes in cuts[:ndim]
        ],
    )


class TypeCheck:
    """The values of a module up to some operation. Feed it operations in order with `take`."""

    def __init__(self, grids: Iterable[DeviceMesh], argument: str, type_: TensorType) -> None:
        self._grids = {grid.name: grid for grid in grids}
        # Meshes with other axes may describe the same processes, as source and target do.
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

    def _grid(self, name: str) -> DeviceMesh:
        if name not in self._grids:
            names = ", ".join(map(symbol_text, self._grids)) or "none"
            raise NotationError(f"there is no grid {symbol_text(name)}; the module has {names}")
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
        words = op.attributes
        if op.name == "shard.sharding":
            sharding_spec(self._grid(words["grid"]), op, len(words["split_axes"]))
            return _Value("sharding", sharding=op)
        if op.name == "shard.shard":
            return self._annotate(op)
        if op.name == "builtin.unrealized_conversion_cast":
            return self._cast(op)
        if op.name in COLLECTIVES:
            self._own(op.operands[0], op.types[0])
            _check_shape(op.types[1], _infer_collective(op, self._grid(words["grid"])))
            return _Value("tensor", op.types[1], is_own=True)
        if op.name in MESSAGES:
            return self._message(op)
        if op.name == "shard.process_linear_index":
            self._grid(words["grid"])
            return _Value("index")
        if op.name == "arith.constant":
            count = op.types[0].shape[0]
            if len(words["numbers"]) != count:
                raise NotationError(f"{len(words['numbers'])} numbers in a table of {count}")
            return _Value("table", count=count)
        if op.name == "tensor.extract":
            table, index = op.operands
            self._value(index, "index")
            count, expected = self._value(table, "table").count, op.types[0].shape[0]
            if count != expected:
                raise NotationError(f"%{table} has {count} numbers, not {expected}")
            return _Value("index")
        if op.name == "tensor.empty":
            return _Value("tensor", op.types[0], is_own=True)
        # The remaining operations are slices, which read from or write to a process's tensor.
        before, after = op.types
        self._own(op.operands[0], before)
        if op.name == "tensor.extract_slice":
            _check_box(op, before, after)
        else:
            self._own(op.operands[1], after)
            _check_box(op, after, before)
        return _Value("tensor", after, is_own=True)

    def _annotate(self, op: Operation) -> _Value:
        (operand, named), (type_,) = op.operands, op.types
        value = self._tensor(operand, type_)
        if value.is_own:
            raise NotationError(
                f"%{operand} is a process's own tensor; shard.shard takes global ones"
            )
        sharding = self._value(named, "sharding").sharding
        if value.sharding is not None:
            raise NotationError(
                f"%{operand} has a sharding already; programs say by collectives how it changes"
            )
        # The tensor cast back must have the shape that this sharding gives each process.
        if sharding is not None and value.own is not None:
            self._check_part(value.own, sharding, type_)
        return _Value("tensor", type_, sharding=sharding)

    def _cast(self, op: Operation) -> _Value:
        (operand,), (before, after) = op.operands, op.types
        value = self._tensor(operand, before)
        # From a process's tensor back to a global tensor; otherwise the reverse.
        if value.is_own:
            return _Value("tensor", after, own=before)
        if value.sharding is None:
            raise NotationError(
                f"%{operand} has no sharding; give it one by shard.shard before it is cast"
            )
        self._check_part(after, value.sharding, before)
        return _Value("tensor", after, is_own=True)

    def _check_part(self, own: TensorType, sharding: Operation, whole: TensorType) -> None:
        spec = sharding_spec(self._grid(sharding.attributes["grid"]), sharding, len(whole.shape))
        expected = TensorType(ceil_shape(spec, whole.shape), whole.element)
        if own != expected:
            axes = write_list(sharding.attributes["split_axes"])
            raise NotationError(
                f"a process has a {expected} of a {whole} that is sharded {axes}, not a {own}"
            )

    def _message(self, op: Operation) -> _Value:
        (operand, *peer), (before, after) = op.operands, op.types
        axes = op.attributes["grid_axes"]
        self._own(operand, before)
        _group_size(self._grid(op.attributes["grid"]), axes)
        if len(peer) != len(axes):
            raise NotationError(
                f"{len(peer)} numbers for a process among the axes {list(axes)}; give one for each "
                "axis"
            )
        for name in peer:
            self._value(name, "index")
        _check_shape(after, before)
        return _Value("tensor", after, is_own=True)


def check_types(module: ShardModule) -> None:
    """Check a module that was not read from a text. Raises NotationError with the operation."""
    check = TypeCheck(module.grids, module.argument, module.argument_type)
    for operation in module.operations:
        try:
            check.take(operation)
        except LayoutError as error:
            raise NotationError(f"`{operation}`: {error}") from None
    check.finish(module.returned, module.result_type)


def _check_axis(grid: DeviceMesh, axis: int) -> None:
    if not 0 <= axis < len(grid.shape):
        raise NotationError(
            f"axis {axis} of {symbol_text(grid.name)}, whose axes are 0 to {len(grid.shape) - 1}"
        )


def _group_size(grid: DeviceMesh, axes: Iterable[int]) -> int:
    listed = list(axes)
    for axis in listed:
        _check_axis(grid, axis)
    if len(set(listed)) < len(listed):
        raise NotationError(f"an axis occurs twice in grid_axes {listed}")
    return math.prod(grid.shape[axis] for axis in listed)


def _infer_collective(op: Operation, grid: DeviceMesh) -> TensorType:
    """Return the result type of a collective."""
    words, before = op.attributes, op.types[0]
    count = _group_size(grid, words["grid_axes"])
    for name in COLLECTIVES[op.name]:
        if name == "reduction":
            if words[name] not in REDUCTIONS.values():
                raise NotationError(
                    f"the reduction {words[name]!r}; it is one of {', '.join(REDUCTIONS.values())}"
                )
        elif not 0 <= words[name] < len(before.shape):
            raise NotationError(
                f"{name} = {words[name]} of a {before}; its axes are 0 to {len(before.shape) - 1}"
            )
    if op.name == "shard.all_gather":
        return _grow(before, words["gather_axis"], count)
    if op.name == "shard.all_slice":
        return _shrunk(before, words["slice_axis"], count)
    if op.name == "shard.reduce_scatter":
        return _shrunk(before, words["scatter_axis"], count)
    if op.name == "shard.all_to_all":
        split = _shrunk(before, words["split_axis"], count)
        return _grow(split, words["concat_axis"], count)
    return before


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


def _check_box(op: Operation, outer: TensorType, inner: TensorType) -> None:
    offsets, sizes = op.attributes["offsets"], op.attributes["sizes"]
    if sizes != inner.shape or outer.element != inner.element:
        raise NotationError(f"a box of sizes {list(sizes)} of a {outer} is not a {inner}")
    if len(offsets) != len(sizes) or len(sizes) != len(outer.shape):
        raise NotationError(
            f"{len(offsets)} offsets and {len(sizes)} sizes in a {outer}; give one per dimension"
        )
    for offset, size, length in zip(offsets, sizes, outer.shape, strict=True):
        if not 0 <= offset <= offset + size <= length:
            raise NotationError(
                f"the box at {list(offsets)} of sizes {list(sizes)} is not inside a {outer}"
            )


_GRID = r"shard\.grid\b[^)\n]*\)?"
_TENSOR = r"tensor<((?:\d{1,18}x)*)((?:complex<f(?:32|64)>)|[a-z]\w*)>"
# The words of an operation's text: fields, and what stands between them.
_WORD = r"\{\w+\}|[\w.!<]+|->|\S"


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
        grids: list[DeviceMesh] = []
        self._next()
        while scanner.looks_at(_GRID):
            grids.append(self._grid(grids))
            self._next()
        # 2. The function's head: a single argument and result.
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
        if (returned_type := self._tensor()) != result_type:
            raise NotationError(f"a {returned_type} is returned by a function of {result_type}")
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

    def _grid(self, grids: list[DeviceMesh]) -> DeviceMesh:
        match = self.scanner.take(_GRID)
        mesh = parse_mlir_mesh(match[0] if match else "")
        if any(grid.name == mesh.name for grid in grids):
            raise NotationError(f"two grids are called @{mesh.name}; give each its own name")
        return mesh

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

    def _operation(self) -> Operation:
        result = self._name()
        self.scanner.expect("=")
        match = self.scanner.take(r"[a-z]\w*\.[a-z]\w*\b")
        if not match:
            raise self.scanner.failure("an operation such as shard.all_gather")
        name = match[0].strip()
        if name not in OPERATIONS:
            raise NotationError(
                f"no operation {name!r} in programs; they have {', '.join(OPERATIONS)}"
            )
        operands: list[str] = []
        words: dict[str, Any] = {}
        types: list[TensorType] = []
        # An operation is read as it is written: by its text in `OPERATIONS`, word by word.
        for word in re.findall(_WORD, OPERATIONS[name]):
            field = word.strip("{}")
            if word == field:
                self.scanner.expect(word)
            elif field.isdigit():
                operands.append(self._name())
            elif field == "type":
                types.append(self._tensor())
            elif field == "table":
                types.append(self._table_type())
            elif field in MESSAGES.values():
                self._expect_name(field)
                operands += self.scanner.listed("[", self._name, "]")
            elif field == "indices":
                for _ in operands[1:]:
                    self.scanner.expect(",")
                    self.scanner.expect("index")
            elif field == "box":
                words["offsets"], words["sizes"] = self._box()
            else:
                words[field] = self._attribute(field)
            if name == "shard.shard" and field == "1":
                # The annotation holds for the users of the value, with these words or without.
                self.scanner.accept("annotate_for_users")
        return Operation(name, result, tuple(operands), words, tuple(types))

    def _expect_name(self, name: str) -> None:
        self.scanner.expect(name)
        self.scanner.expect("=")

    def _attribute(self, name: str) -> Any:
        if name == "grid":
            return self._symbol()
        if name == "numbers":
            return self._numbers()
        # Without groups a collective is among all processes alone; without a word it is a sum.
        if name in ("grid_axes", "reduction") and not self.scanner.looks_at(name):
            return () if name == "grid_axes" else "sum"
        self._expect_name(name)
        if name == "split_axes":
            return tuple(self.scanner.listed("[", self._numbers, "]"))
        if name == "grid_axes":
            return self._numbers()
        if name != "reduction":
            return self.scanner.number()
        match = self.scanner.take(r"<?\s*([a-z_]+)\s*>?")
        if not match:
            raise self.scanner.failure("a reduction such as sum")
        return match[1]

    def _table_type(self) -> TensorType:
        type_ = self._tensor()
        if type_.element != "index" or len(type_.shape) != 1:
            raise NotationError(f"a table of {type_}; tables are such as tensor<4xindex>")
        return type_

    def _box(self) -> tuple[Numbers, Numbers]:
        offsets, sizes, steps = self._numbers(), self._numbers(), self._numbers()
        if steps != (1,) * len(sizes):
            raise NotationError(f"steps {list(steps)} of a slice; they are 1 each")
        return offsets, sizes


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
        self._shardings: dict[str, Operation] = {}
        # Values that were cast back from a process's own; values with a sharding.
        self._returning: set[str] = set()
        self._annotated: set[str] = set()
        # The sender and the array of each process's incoming message.
        self._sent: dict[int, tuple[int, Array]] = {}
        missing = [process for process in self._processes if process not in shards]
        if missing:
            raise ShardError(
                f"no array for process {missing[0]}; the grid has {len(self._processes)}, got "
                f"arrays for {sorted(shards)}"
            )
        arrays = [np.asarray(shards[process]) for process in self._processes]
        element = module.argument_type.element
        for process, array in enumerate(arrays):
            if array.dtype.name != _DTYPES.get(element):
                raise ShardError(
                    f"the array of process {process} is of {array.dtype}; the module is for "
                    f"{element}"
                )
        self.arrays: dict[str, list[Array]] = {module.argument: arrays}

    def carry_out(self, op: Operation) -> None:
        """Run an operation in every process."""
        if op.name == "shard.sharding":
            self._shardings[op.result] = op
        else:
            self.arrays[op.result] = list(self._result(op))

    def _result(self, op: Operation) -> Sequence[Array]:
        if op.name == "shard.process_linear_index":
            return [np.array(process) for process in self._processes]
        if op.name == "arith.constant":
            return [np.array(op.attributes["numbers"]) for _ in self._processes]
        if op.name == "tensor.empty":
            return [_padding(op.types[0], self._dtype) for _ in self._processes]
        held = self.arrays[op.operands[0]]
        if op.name == "tensor.extract":
            pairs = zip(held, self.arrays[op.operands[1]], strict=True)
            return [table[int(index)] for table, index in pairs]
        if op.name == "tensor.insert_slice":
            pairs = zip(self.arrays[op.operands[1]], held, strict=True)
            return [_place_at(into, array, op.attributes["offsets"]) for into, array in pairs]
        if op.name == "shard.shard":
            return self._parts(op, held)
        if op.name == "builtin.unrealized_conversion_cast":
            # A cast of what has no sharding yet leads back to a global tensor, whose padding the
            # next `shard` takes off; the other way, a shard is padded to the size of the largest.
            if op.operands[0] not in self._annotated:
                self._returning.add(op.result)
                return held
            after = op.types[1]
            start = (0,) * len(after.shape)
            return [_place_at(_padding(after, self._dtype), array, start) for array in held]
        if op.name == "tensor.extract_slice":
            box = _box(op.attributes["offsets"], op.attributes["sizes"])
            return [array[box] for array in held]
        if op.name in MESSAGES:
            return self._messages(op, held)
        return _run_collective(op, self._grids[op.attributes["grid"]], held)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return next(iter(self.arrays.values()))[0].dtype

    def _parts(self, op: Operation, held: Sequence[Array]) -> list[Array]:
        """Return every process's part of a global tensor; without padding if it was cast back."""
        (operand, named), (type_,) = op.operands, op.types
        sharding = self._shardings[named]
        grid = self._grids[sharding.attributes["grid"]]
        layout = sharding_spec(grid, sharding, len(type_.shape)).layout(type_.shape)
        self._annotated.add(op.result)
        parts = []
        for process, array in enumerate(held):
            shape = layout.local_shape(process) or ()
            if operand in self._returning:
                array = array[_box((0,) * len(shape), shape)]
            elif array.shape != shape:
                axes = write_list(sharding.attributes["split_axes"])
                raise ShardError(
                    f"the array of process {process} has shape {list(array.shape)}; its part of "
                    f"{type_} that is sharded {axes} is {list(shape)}"
                )
            parts.append(array)
        return parts

    def _messages(self, op: Operation, held: Sequence[Array]) -> list[Array]:
        shape = self._grids[op.attributes["grid"]].shape
        peers = []
        for process in self._processes:
            place = [int(number) for number in np.unravel_index(process, shape)]
            for axis, value in zip(op.attributes["grid_axes"], op.operands[1:], strict=True):
                place[axis] = int(self.arrays[value][process])
                if not 0 <= place[axis] < shape[axis]:
                    raise ShardError(
                        f"process {process} names process {place[axis]} along axis {axis} of "
                        f"{shape[axis]} processes in `{op}`"
                    )
            peers.append(int(np.ravel_multi_index(place, shape)))
        # A send is kept until the receive that follows it, in which every process takes its own.
        if op.name == "shard.send":
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


def _run_collective(op: Operation, grid: DeviceMesh, held: Sequence[Array]) -> list[Array]:
    """Run a collective on the arrays of every group, its processes in the order of the axes."""
    axes = op.attributes["grid_axes"]
    rest = [axis for axis in range(len(grid.shape)) if axis not in axes]
    # The axes of the collective last: after the reshape each row is a group of processes.
    numbers = np.arange(len(held)).reshape(grid.shape).transpose(*rest, *axes)
    size = math.prod(grid.shape[axis] for axis in axes)
    results: dict[int, Array] = {}
    for group in numbers.reshape(-1, size).tolist():
        combined = _of_group(op, [held[process] for process in group])
        results |= dict(zip(group, combined, strict=True))
    return [results[process] for process in range(len(held))]


def _of_group(op: Operation, arrays: Sequence[Array]) -> Sequence[Array]:
    count, words = len(arrays), op.attributes
    if op.name == "shard.all_gather":
        return [np.concatenate(arrays, axis=words["gather_axis"])] * count
    if op.name == "shard.all_slice":
        axis = words["slice_axis"]
        return [np.split(array, count, axis)[place] for place, array in enumerate(arrays)]
    if op.name == "shard.all_to_all":
        pieces = [np.split(array, count, words["split_axis"]) for array in arrays]
        axis = words["concat_axis"]
        return [np.concatenate([row[place] for row in pieces], axis) for place in range(count)]
    whole = _COMBINE[words["reduction"]](np.stack(arrays), axis=0).astype(arrays[0].dtype)
    if op.name == "shard.all_reduce":
        return [whole] * count
    return np.split(whole, count, words["scatter_axis"])
