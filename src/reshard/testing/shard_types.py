"""The types of a `shard` module: every operation fits those of its values.

1. A name is a value before it is used, and names one value.
2. A tensor with a sharding is cast to a type that has `K ceildiv P` elements along a dimension
   of `K` in `P` parts; and what is cast back has a sharding that says the same.
3. A collective makes of its operand's shape what its group makes of it: `n` times as long what
   is gathered, an `n`-th what is sliced, which `n` must divide.

MLIR's own verifier checks the third alone; the first two are what makes a text a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reshard.collectives.lowering.ceil_shards import ceil_shape
from reshard.collectives.lowering.shard_module import (
    REDUCTIONS,
    CastOp,
    CollectiveOp,
    ConstantOp,
    EmptyOp,
    ExtractOp,
    ExtractSliceOp,
    Grid,
    InsertSliceOp,
    MessageOp,
    Operation,
    ProcessIndexOp,
    ShardingOp,
    ShardModule,
    ShardOp,
    TensorType,
)
from reshard.errors import LayoutError, NotationError
from reshard.notation.parsing import symbol_text
from reshard.sharding import DimSpec, Level, ShardingSpec


@dataclass(frozen=True)
class _Value:
    """What is known of a value.

    `is_own` is for a process's tensor; `sharding` that of a global one, or of a sharding itself;
    `own` what a global one was cast from; `count` the length of a table.
    """

    word: str
    type: TensorType | None = None
    is_own: bool = False
    sharding: ShardingOp | None = None
    own: TensorType | None = None
    count: int = 0


def sharding_spec(grid: Grid, sharding: ShardingOp, ndim: int) -> ShardingSpec:
    """What a `shard.sharding` says of a tensor of `ndim` dimensions.

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
        """Check what is returned: a global tensor with a sharding, of this type."""
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
        # Slices are left, which take from a process's own tensor or put into one.
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
        # What was cast back had the shape that this sharding gives each process.
        if sharding is not None and value.own is not None:
            self._check_part(value.own, sharding, op.type)
        return _Value("tensor", op.type, sharding=sharding)

    def _cast(self, op: CastOp) -> _Value:
        value = self._tensor(op.operand, op.before)
        # From a process's own tensor back to a global one; else the other way.
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
    found = list(axes)
    for axis in found:
        _check_axis(grid, axis)
    if len(set(found)) < len(found):
        raise NotationError(f"an axis stands twice in grid_axes {found}")
    return math.prod(grid.shape[axis] for axis in found)


def _infer_collective(op: CollectiveOp, grid: Grid) -> TensorType:
    """The type that a collective makes of its operand's."""
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


def _check_shape(given: TensorType, expected: TensorType) -> None:
    if given != expected:
        raise NotationError(f"its result is a {expected}, not a {given}")


def _check_box(op: ExtractSliceOp | InsertSliceOp, outer: TensorType, inner: TensorType) -> None:
    if op.sizes != inner.shape or outer.element != inner.element:
        raise NotationError(f"a box of sizes {list(op.sizes)} of a {outer} is not a {inner}")
    if len(op.offsets) != len(op.sizes) or len(op.sizes) != len(outer.shape):
        raise NotationError(
            f"{len(op.offsets)} offsets and {len(op.sizes)} sizes in a {outer}; give one a "
            "dimension"
        )
    for offset, size, length in zip(op.offsets, op.sizes, outer.shape, strict=True):
        if not 0 <= offset <= offset + size <= length:
            raise NotationError(
                f"the box at {list(op.offsets)} of sizes {list(op.sizes)} is not inside a {outer}"
            )
