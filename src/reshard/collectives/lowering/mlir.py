"""A program as a module of MLIR's `shard` dialect.

::

    slice             shard.all_slice
    all-gather        shard.all_gather
    all-to-all        shard.all_to_all
    permute           shard.send and shard.recv, to and from the process that a table says
    reduce-scatter    shard.reduce_scatter
    all-reduce        shard.all_reduce

A dimension that is not divisible by its axes is sharded by ceil, with padding: every process has
a shard as large as the first one. A tensor is copied into a longer one before it is sliced
(`tensor.insert_slice`), and truncated after it is gathered (`tensor.extract_slice`). The dialect
has whole mesh axes, so an axis of which a part is used becomes two axes of the grid. Its
shardings have no partial axes: a contribution is written as an ordinary shard, and only the
reductions show that it is one.

In a permute every process sends before it receives, also to itself: a send must not block until
its receiver is ready.

The dialect has no all-to-all of several dimensions at once, and no levels in a dimension: such a
step is refused, with its number. The devices of a grid are always in row-major order.

Source: the LLVM project, `mlir/include/mlir/Dialect/Shard/IR/ShardOps.td`; and the steps of
`ReshardingSpmdizationDoc.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from reshard.collectives.lowering.ceil_shards import (
    ceil_shape,
    check_ceil,
    lines_up,
    part_length,
)
from reshard.collectives.lowering.mlir_elements import element_text
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
from reshard.collectives.lowering.shardings import (
    axes_dropped,
    plain_shardings,
    with_own_mesh_names,
)
from reshard.collectives.lowering.whole_axes import WholeAxes
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
from reshard.errors import NotationError
from reshard.mesh import Axis
from reshard.notation.mlir import mlir_mesh_text
from reshard.sharding import ShardingSpec

_SYSTEM = "MLIR"


def mlir_module(program: Program, dtype: DType | str = "float32") -> str:
    """The text of a module with a function `reshard` that does what the program does.

    Args:
        program: its steps, in order, become operations.
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
    """The same as a value. Raises NotationError as `mlir_module` does."""
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
    """Operations one after another; `here` is the value that they lead to, and its type."""

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
        """A name for one more value."""
        self._count += 1
        return str(self._count)

    def add(self, operation: Operation) -> str:
        """Put an operation behind the others; the name of its result."""
        self.operations.append(operation)
        return operation.result

    def _add_result(self, operation: Operation, type_: TensorType) -> None:
        self.here, self.type = self.add(operation), type_

    def _annotate(self, spec: ShardingSpec) -> None:
        lists = tuple(_axis_numbers(spec, dim.axes) for dim in spec.dim_specs)
        # The dialect has at least one list, also for a scalar's none.
        sharding = self.add(ShardingOp(self.name(), spec.mesh.name, lists or ((),)))
        self._add_result(ShardOp(self.name(), self.here, sharding, self.whole), self.whole)

    def module(self, grids: Iterable[Grid], target: ShardingSpec) -> ShardModule:
        """The module, with the sharding that was reached."""
        # Global again, annotated with the sharding that was reached.
        self._add_result(CastOp(self.name(), self.here, self.type, self.whole), self.whole)
        self._annotate(target)
        operations = tuple(self.operations)
        return ShardModule(
            tuple(grids), "reshard", "0", self.whole, operations, self.here, self.whole
        )

    def padded(self, dim: int, length: int) -> None:
        """Make the tensor longer, where it is not as long."""
        if self.type.shape[dim] == length:
            return
        longer = self.type.resized(dim, length)
        empty = self.add(EmptyOp(self.name(), longer))
        start, sizes = (0,) * len(self.shape), self.type.shape
        operation = InsertSliceOp(self.name(), self.here, empty, start, sizes, self.type, longer)
        self._add_result(operation, longer)

    def cut(self, dim: int, length: int) -> None:
        """Make the tensor shorter, where it is longer."""
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
        """One collective within the groups along some axes."""
        numbers = _axis_numbers(spec, axes)
        operation = CollectiveOp(
            kind, self.name(), self.here, spec.mesh.name, numbers, settings, self.type, after
        )
        self._add_result(operation, after)

    def step(self, step: Step, before: ShardingSpec, after: ShardingSpec) -> None:
        """The operations of one step. Raises NotationError where there are none."""
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
                    self.cut(dim, part_length(after, self.shape, dim))
        elif isinstance(step, Slice | ReduceScatter):
            for dim in range(len(self.shape)):
                axes = axes_dropped(before, after, dim)
                if axes:
                    self._check_lines_up(before, after, dim)
                    length = part_length(after, self.shape, dim)
                    # The dialect splits evenly: padded until all parts are as long as the first.
                    self.padded(dim, length * _count_devices(before, axes))
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
            raise NotationError("its axes change their order on the way; its axes must keep theirs")
        self._check_lines_up(after, before, giver)
        self._check_lines_up(before, after, taker)
        length = part_length(after, self.shape, taker)
        self.padded(taker, length * _count_devices(before, axes))
        moved = self._find_gathered_type(before, axes, giver).resized(taker, length)
        self.collective("all_to_all", before, axes, (taker, giver), moved)
        self.cut(giver, part_length(after, self.shape, giver))

    def _permute(self, step: Permute, before: ShardingSpec, after: ShardingSpec) -> None:
        """Every process sends its shard to one other, or to itself, and receives one."""
        if ceil_shape(after, self.shape) != self.type.shape:
            raise NotationError(
                f"`{after}` has shards of another shape than `{before}`, whose shards it takes"
            )
        grid = before.mesh.shape
        source, target = np.array(sorted(step.pairs, key=lambda pair: pair[1])).T
        # Where each process's shard goes, and where its new one comes from: `(axes, processes)`.
        to = np.array(np.unravel_index(np.argsort(source), grid))
        back = np.array(np.unravel_index(source, grid))
        own = np.array(np.unravel_index(target, grid))
        axes = np.flatnonzero((back != own).any(axis=1)).tolist()
        if not axes:
            return
        process = self.add(ProcessIndexOp(self.name(), before.mesh.name))
        # Each process looks up its peer, axis by axis, in a table of all processes.
        for kind, places in (("send", to), ("recv", back)):
            peer = []
            for axis in axes:
                table = self.add(ConstantOp(self.name(), tuple(places[axis].tolist())))
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
