"""An interpreter of `shard` modules on arrays: all processes at once, operation by operation.

What is padding holds values that no program may show: not-a-number, or the largest integer. So a
module that took padding for elements gives them away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.collectives.lowering.mlir_elements import ELEMENTS
from reshard.collectives.lowering.shard_module import (
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
    Operation,
    ProcessIndexOp,
    ShardingOp,
    ShardModule,
    ShardOp,
    TensorType,
)
from reshard.errors import ShardError
from reshard.testing.shard_types import check_types, sharding_spec

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
        module: what to do.
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
        """Every process's part of a global tensor; of what was cast back, without its padding."""
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
    """A tensor of values that stand for no element."""
    if dtype.kind in "iu":
        return np.full(type_.shape, np.iinfo(dtype).max, dtype)
    return np.full(type_.shape, True if dtype.kind == "b" else np.nan, dtype)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))


def _place_at(into: Array, array: Array, offsets: Sequence[int]) -> Array:
    found = into.copy()
    found[_box(offsets, array.shape)] = array
    return found


def _run_collective(op: CollectiveOp, grid: Grid, held: Sequence[Array]) -> list[Array]:
    """Run a collective on the arrays of every group, its processes in the order of the axes."""
    rest = [axis for axis in range(len(grid.shape)) if axis not in op.grid_axes]
    # The collective's axes last: after the reshape each row is one group of processes.
    numbers = np.arange(len(held)).reshape(grid.shape).transpose(*rest, *op.grid_axes)
    size = math.prod(grid.shape[axis] for axis in op.grid_axes)
    found: dict[int, Array] = {}
    for group in numbers.reshape(-1, size).tolist():
        made = _of_group(op, [held[process] for process in group])
        found |= dict(zip(group, made, strict=True))
    return [found[process] for process in range(len(held))]


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
