"""Reading the text of a `shard` module, and checking it line by line.

Read are the operations that programs are written with, in any order and names, over as many
lines as one likes, with comments. What else the dialects have is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable

from reshard.collectives.lowering.shard_module import (
    COLLECTIVES,
    MESSAGES,
    CastOp,
    CollectiveOp,
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
from reshard.errors import LayoutError, NotationError
from reshard.notation.mlir import parse_mlir_mesh
from reshard.notation.parsing import Scanner
from reshard.testing.shard_types import TypeCheck

_GRID = r"shard\.grid\b[^)\n]*\)?"
_TENSOR = r"tensor<((?:\d{1,18}x)*)((?:complex<f(?:32|64)>)|[a-z]\w*)>"
_SHARDING = "!shard.sharding"


def parse_shard_module(text: str) -> ShardModule:
    """The module that a text writes, every operation of which fits its types.

    Raises:
        NotationError: with the line, what cannot be read there, or what does not fit.

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
        """The whole text."""
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
        """An operation begins here: errors name its line."""
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
