"""The engine: arrays of one layout from arrays of another, in this process.

1. The arrays of all tensors are checked against their layouts before anything is copied.
2. Every target slot gets new memory, unless the caller gives it; padding is set to zero.
3. Copies are carried out, stage by stage. The first contribution of an element replaces the value
   in place, the others are combined with it in order. Threads share the copies of all tensors.
4. Means are scaled. A target contribution that combines nothing is filled with the identity of the
   reduction, so that it changes nothing when it is combined later.

The array of a slot with a single cell has the cell's shape; a slot with several cells stores them
consecutively in a flat array. The array of a cell shares the memory of its slot.

Sources are only read. Arrays of NumPy, torch and JAX in CPU memory are accepted
(`reshard.execution.arrays`); results are of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.execution import memory
from reshard.execution.arrays import ArrayKind, Storage, identity, kind_of
from reshard.execution.copies import Copy, CopyColumns, carry_out, check_threads
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.runs import PAD, distinct


def cell_arrays(layout: Layout, arrays: Mapping[int, Storage]) -> dict[int, Storage]:
    """Return the arrays of the cells of the slots in `arrays`, by cell number."""
    if layout.cells == len(layout.holders):
        return {cell: arrays[slot] for cell, slot in enumerate(layout.holders) if slot in arrays}
    cells: dict[int, Storage] = {}
    for slot, array in arrays.items():
        numbers = layout.cells_of(slot)
        if len(numbers) == 1:
            cells[numbers[0]] = array
            continue
        for cell in numbers:
            begin, shape = int(layout.cell_offset[cell]), layout.cell_shape[cell]
            # A rank with several boxes stores them consecutively in a flat array.
            stretch = array[begin : begin + int(shape.prod())]
            cells[cell] = stretch.reshape(tuple(shape.tolist()))
    return cells


def clear_pads(layout: Layout, cells: Mapping[int, Storage]) -> None:
    """Set the padding in the arrays of cells to zero."""
    if not layout.is_padded:
        return
    padded = layout.cell_elements != layout.cell_shape.prod(axis=1)
    for cell, array in cells.items():
        if not padded[cell]:
            continue
        for dimension, runs in enumerate(layout.cell_runs(cell)):
            for start, stop, local, role in runs:
                if role == PAD:
                    window: list[Any] = [slice(None)] * dimension
                    array[(*window, slice(local, local + stop - start))] = np.zeros((), array.dtype)


def element_positions(layout: Layout, cell: int) -> Any:
    """Return an index of a cell's array that excludes its padding."""
    real = []
    for runs, length in zip(layout.cell_runs(cell), layout.cell_shape[cell].tolist(), strict=True):
        is_real = np.zeros(length, dtype=bool)
        for start, stop, local, role in runs:
            is_real[local : local + stop - start] = role != PAD
        real.append(np.flatnonzero(is_real))
    return np.ix_(*real) if real else ...


def complete_contributions(
    change: LayoutChange, kind: ArrayKind, cells: Mapping[int, Storage]
) -> None:
    """Scale means, and fill contributions that combine nothing with the reduction's identity.

    `cells` is the storage of target cells by cell number; some may be missing.
    """
    target, (numerator, denominator) = change.target, change.scale
    if numerator == denominator and target.reduction is None:
        return
    for cell, storage in cells.items():
        if change.combines[int(target.cell_contribution[cell])]:
            if numerator != denominator:
                storage[...] = kind.scale(storage, numerator, denominator)
        elif target.reduction is not None:
            value = kind.element(identity(target.reduction, kind.dtype))
            storage[element_positions(target, cell)] = value[0]


class TensorRun:
    """A tensor of a run: the change of its layout, and its arrays.

    Args:
        change: from the layout of the sources to the layout of the targets.
        shards: the array of every source slot that holds elements.
        out: arrays to write to, for every target slot that holds elements; new arrays if None.
        dtype: the required dtype; any if None.
        name: the tensor's name in errors, if a run has several.
        find_stages: returns the columns of copies of each stage: first from cells of the source
            to cells of the target, then between cells of the target. By default a single stage
            has the routes of the change. Called after the arrays have been checked.
    """

    kind: ArrayKind

    def __init__(
        self,
        change: LayoutChange,
        shards: Mapping[int, Any],
        out: Mapping[int, Any] | None = None,
        dtype: DType | None = None,
        name: str | None = None,
        find_stages: Callable[[], Sequence[CopyColumns]] | None = None,
    ) -> None:
        self.change, self.shards, self.out = change, shards, out
        self.dtype, self.name, self._find_stages = dtype, name, find_stages
        # The name as the end of a phrase in errors.
        self._label = "" if name is None else f" of {name!r}"
        # Sources are by slot; targets by slot and by cell, once their memory is found.
        self.held: dict[int, Storage] = {}
        self.filled: dict[int, Storage] = {}
        self.target_cells: dict[int, Storage] = {}

    def find_sources(self) -> None:
        """Find the memory of the sources. Raises ShardError for arrays that do not match."""
        source, reduction = self.change.source, self.change.target.reduction
        self.kind = memory.check_shards(source, self.shards, self._label, self.dtype, reduction)
        self.held = memory.source_storages(source, self.kind, self.shards, self._label)

    def find_given_targets(self) -> None:
        """Find the memory of the arrays in `out`, if any. Raises ShardError as `find_sources`."""
        if self.out is not None:
            self.fill(memory.given_storages(self.change.target, self.kind, self.out, self._label))

    def fill(self, filled: dict[int, Storage]) -> None:
        """Set the arrays of the target's slots."""
        self.filled = filled
        self.target_cells = cell_arrays(self.change.target, filled)

    def stages(self) -> Sequence[CopyColumns]:
        """Return the columns of copies of each stage."""
        if self._find_stages is None:
            return (CopyColumns.of_routes(self.change.routes, self.change.pieces),)
        return self._find_stages()

    def copies(self, columns: CopyColumns, is_first: bool) -> list[Copy]:
        """Return the copies of a stage, from the source or from the results of earlier stages."""
        source = self.change.source
        sources = cell_arrays(source, self.held) if is_first else self.target_cells
        combine = partial(self.kind.combine, source.reduction or "sum")
        return columns.copies(sources, self.target_cells, combine)

    def finish(self) -> dict[int, Any]:
        """Complete contributions, and return the target's arrays."""
        complete_contributions(self.change, self.kind, self.target_cells)
        if self.out is None:
            return {slot: self.kind.array(storage) for slot, storage in self.filled.items()}
        return {slot: self.out[slot] for slot in self.filled if slot in self.out}

    def name_outputs(self) -> Iterator[memory.NamedStorage]:
        """Yield the arrays that are written, with their names in errors."""
        for slot, storage in self.filled.items():
            yield memory.output_name(slot, self._label), storage

    def name_sources(self) -> Iterator[memory.NamedStorage]:
        """Yield the arrays that are read, with their names in errors."""
        prefix = (
            "the source of rank" if self.name is None else f"the source of {self.name!r} on rank"
        )
        for slot, storage in self.held.items():
            yield f"{prefix} {slot}", storage


def run(tensors: Sequence[TensorRun], threads: int | None = None) -> list[dict[int, Any]]:
    """Run the changes of tensors, and return the target's arrays of each, by slot.

    Args:
        tensors: the changes and the arrays.
        threads: maximum number of threads for all tensors together; one per processor if None.
            The result is the same for any number.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that is read-only, or shares memory with another array.
        UsageError: the number of threads is below 1.
        PlanError: raised by `find_stages`.
    """
    workers = check_threads(threads)
    check(tensors)
    fresh = memory.FreshMemory()
    for tensor in tensors:
        if tensor.out is None:
            tensor.fill(memory.new_storages(tensor.change.target, tensor.kind, fresh))
    fresh.find(workers)
    # The last step that may fail precedes all writes.
    stages = [tensor.stages() for tensor in tensors]
    for tensor in tensors:
        clear_pads(tensor.change.target, tensor.target_cells)
    # Stage by stage for all tensors together, so that threads share all copies.
    for number in range(max(map(len, stages), default=0)):
        batch: list[Copy] = []
        for tensor, columns in zip(tensors, stages, strict=True):
            if number < len(columns):
                batch += tensor.copies(columns[number], is_first=not number)
        carry_out(batch, workers)
    return [tensor.finish() for tensor in tensors]


def check(tensors: Sequence[TensorRun]) -> None:
    """Raise the errors of `run` for arrays that do not match, and copy nothing."""
    for tensor in tensors:
        tensor.find_sources()
    for tensor in tensors:
        tensor.find_given_targets()
    # After all are found: an array may also overlap the array of another tensor.
    outputs = [named for tensor in tensors for named in tensor.name_outputs()]
    if outputs:
        memory.check_apart(
            outputs, (named for tensor in tensors for named in tensor.name_sources())
        )


def run_slot(
    change: LayoutChange,
    slot: int,
    shards: Mapping[int, Any],
    before_copy: Callable[[], None] = lambda: None,
) -> tuple[Any, int]:
    """Return the array of a target slot, and the number of elements that were copied to it.

    A single thread computes it from source arrays that were checked. Only the sources of the
    slot's copies are read.

    Args:
        change: the change of the layout.
        slot: a slot that holds elements.
        shards: the arrays of the source's slots.
        before_copy: called before every copy; an exception ends the work.
    """
    # Only the routes into this slot are planned.
    routes = change.routes_into(slot)
    columns = CopyColumns.of_routes(routes, change.pieces_of(routes))
    tensor = TensorRun(change, shards)
    tensor.kind = kind = kind_of(next(iter(shards.values())), "the source's array")
    senders = distinct(change.source.cell_slot[columns.source_cell]).tolist()
    tensor.held = {sender: kind.storage(shards[sender]) for sender in senders}
    # Copies do not write to the padding, so it is zero from the start.
    tensor.fill({slot: np.zeros(change.target.local_shape(slot) or (), kind.dtype.storage)})
    # Contributions are combined in order, as by `carry_out`, so the bits of the result are equal.
    for copy in sorted(tensor.copies(columns, is_first=True), key=lambda copy: copy.order):
        before_copy()
        copy.carry_out()
    return tensor.finish()[slot], int(routes.elements.sum())
