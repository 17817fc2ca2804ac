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
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reshard._records import Record
from reshard.dtypes import DType
from reshard.execution.arrays import ArrayKind, Storage, identity, kind_of
from reshard.execution.copies import Copy, CopyColumns, carry_out, check_threads
from reshard.execution.memory import (
    FreshMemory,
    NamedStorage,
    check_apart,
    check_shards,
    given_storages,
    new_storages,
    output_name,
    source_storages,
)
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
        for dimension, table in enumerate(layout.tables):
            for start, stop, local, role in table.runs_of(int(layout.cell_part[cell, dimension])):
                if role == PAD:
                    window: list[Any] = [slice(None)] * dimension
                    array[(*window, slice(local, local + stop - start))] = np.zeros((), array.dtype)


def element_positions(layout: Layout, cell: int) -> Any:
    """Return an index of a cell's array that excludes its padding."""
    real = []
    for dimension, table in enumerate(layout.tables):
        part = int(layout.cell_part[cell, dimension])
        is_real = np.zeros(int(table.local_lengths[part]), dtype=bool)
        for start, stop, local, role in table.runs_of(part):
            is_real[local : local + stop - start] = role != PAD
        real.append(np.flatnonzero(is_real))
    return np.ix_(*real) if real else ...


def complete_contributions(
    layout: Layout,
    combines: Sequence[Sequence[int]],
    scale: tuple[int, int],
    kind: ArrayKind,
    cells: Mapping[int, Storage],
) -> None:
    """Scale means, and fill contributions that combine nothing with the reduction's identity.

    Args:
        layout: of the target.
        combines: for each target contribution, the source contributions that were combined.
        scale: the numerator and denominator by which combined elements are scaled.
        kind: of the arrays.
        cells: the storage of target cells, by cell number; some may be missing.
    """
    numerator, denominator = scale
    if numerator == denominator and layout.reduction is None:
        return
    for cell, storage in cells.items():
        if combines[int(layout.cell_contribution[cell])]:
            if numerator != denominator:
                storage[...] = kind.scale(storage, numerator, denominator)
        elif layout.reduction is not None:
            value = kind.element(identity(layout.reduction, kind.dtype))
            storage[element_positions(layout, cell)] = value[0]


class TensorCopies(Record, eq=False):
    """The copies of a tensor.

    Args:
        source, target: its layouts.
        combines: for each target contribution, the source contributions that are combined.
        scale: the numerator and denominator by which combined elements are scaled.
        find_stages: returns the columns of copies of each stage: first from cells of the source
            to cells of the target, then between cells of the target. Called after the arrays
            have been checked.
    """

    source: Layout
    target: Layout
    combines: Sequence[Sequence[int]]
    scale: tuple[int, int]
    find_stages: Callable[[], Sequence[CopyColumns]]


class TensorArrays(Record, eq=False):
    """The arrays of a tensor.

    Args:
        shards: the array of every source slot that holds elements.
        out: arrays to write to, for every target slot that holds elements; new arrays if None.
        dtype: the required dtype; any if None.
        name: the tensor's name in errors, if a run has several.
    """

    shards: Mapping[int, Any]
    out: Mapping[int, Any] | None = None
    dtype: DType | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """The tensor's name, as the end of a phrase in errors."""
        return "" if self.name is None else f" of {self.name!r}"


@dataclass(slots=True, eq=False)
class _Memory:
    """A tensor of a run: its copies, and the memory of its arrays.

    Sources are by cell; targets by slot, and once they are found by cell too.
    """

    copies: TensorCopies
    arrays: TensorArrays
    kind: ArrayKind
    held: dict[int, Storage]
    filled: dict[int, Storage]
    target_cells: dict[int, Storage]

    @classmethod
    def of(cls, copies: TensorCopies, arrays: TensorArrays) -> _Memory:
        """Return the memory of the sources.

        Raises ShardError for arrays that do not match the layout.
        """
        source, label = copies.source, arrays.label
        kind = check_shards(source, arrays.shards, label, arrays.dtype, copies.target.reduction)
        held = source_storages(source, kind, arrays.shards, label)
        return cls(copies, arrays, kind, held, {}, {})

    def fill(self, filled: dict[int, Storage]) -> None:
        """Set the arrays of the target's slots."""
        self.filled = filled
        self.target_cells = cell_arrays(self.copies.target, filled)

    def stage(self, columns: CopyColumns, is_first: bool) -> list[Copy]:
        """Return the copies of a stage, from the source or from the results of earlier stages."""
        sources = self.target_cells
        if is_first:
            sources = cell_arrays(self.copies.source, self.held)
        combine = partial(self.kind.combine, self.copies.source.reduction or "sum")
        return columns.copies(sources, self.target_cells, combine)

    def finish(self) -> dict[int, Any]:
        """Complete contributions, and return the target's arrays."""
        copies, out = self.copies, self.arrays.out
        complete_contributions(
            copies.target, copies.combines, copies.scale, self.kind, self.target_cells
        )
        if out is None:
            return {slot: self.kind.array(storage) for slot, storage in self.filled.items()}
        return {slot: out[slot] for slot in self.filled if slot in out}


def run(
    tensors: Sequence[tuple[TensorCopies, TensorArrays]], threads: int | None = None
) -> list[dict[int, Any]]:
    """Run the copies of tensors, and return the target's arrays of each, by slot.

    Args:
        tensors: the copies and the arrays of each tensor.
        threads: maximum number of threads for all tensors together; one per processor if None.
            The result is the same for any number.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that is read-only, or shares memory with another array.
        UsageError: the number of threads is below 1.
        PlanError: raised by `find_stages`.
    """
    workers = check_threads(threads)
    every = [_Memory.of(copies, arrays) for copies, arrays in tensors]
    _find_targets(every, workers)
    # The last step that may fail precedes all writes.
    stages = [memory.copies.find_stages() for memory in every]
    for memory in every:
        clear_pads(memory.copies.target, memory.target_cells)
    # Stage by stage for all tensors together, so that threads share all copies.
    for number in range(max(map(len, stages), default=0)):
        batch: list[Copy] = []
        for memory, columns in zip(every, stages, strict=True):
            if number < len(columns):
                batch += memory.stage(columns[number], is_first=not number)
        carry_out(batch, workers)
    return [memory.finish() for memory in every]


def check(tensors: Sequence[tuple[TensorCopies, TensorArrays]]) -> None:
    """Raise the errors of `run` for arrays that do not match, and copy nothing."""
    _find_given_targets([_Memory.of(*tensor) for tensor in tensors])


def run_slot(
    copies: TensorCopies,
    slot: int,
    shards: Mapping[int, Any],
    before_copy: Callable[[], None] = lambda: None,
) -> Any:
    """Return the array of a target slot, computed by a single thread from checked source arrays.

    Only the sources of the slot's copies are read.

    Args:
        copies: the copies of the slot, in a single stage.
        slot: a slot that holds elements.
        shards: the arrays of the source's slots.
        before_copy: called before every copy; an exception ends the work.
    """
    (columns,) = copies.find_stages()
    kind = kind_of(next(iter(shards.values())), "the source's array")
    senders = distinct(copies.source.cell_slot[columns.source_cell]).tolist()
    held = {sender: kind.storage(shards[sender]) for sender in senders}
    memory = _Memory(copies, TensorArrays(shards), kind, held, {}, {})
    # Copies do not write to the padding, so it is zero from the start.
    memory.fill({slot: np.zeros(copies.target.local_shape(slot) or (), kind.dtype.storage)})
    # Contributions are combined in order, as by `carry_out`, so the bits of the result are equal.
    for copy in sorted(memory.stage(columns, is_first=True), key=lambda copy: copy.order):
        before_copy()
        copy.carry_out()
    return memory.finish()[slot]


def _find_targets(every: Sequence[_Memory], workers: int) -> None:
    """Allocate the memory that is written, after checking the arrays in `out`."""
    _find_given_targets(every)
    fresh = FreshMemory()
    for memory in every:
        if memory.arrays.out is None:
            memory.fill(new_storages(memory.copies.target, memory.kind, fresh))
    fresh.find(workers)


def _find_given_targets(every: Sequence[_Memory]) -> None:
    """Collect the memory of the arrays in `out`.

    Raises ShardError for arrays that do not match.
    """
    outputs = [(memory, out) for memory in every if (out := memory.arrays.out) is not None]
    for memory, out in outputs:
        label = memory.arrays.label
        memory.fill(given_storages(memory.copies.target, memory.kind, out, label))
    # After all are collected: an array may also overlap the array of another tensor.
    if outputs:
        check_apart(_name_outputs([memory for memory, _ in outputs]), _name_sources(every))


def _name_outputs(every: Sequence[_Memory]) -> Iterator[NamedStorage]:
    for memory in every:
        for slot, storage in memory.filled.items():
            yield output_name(slot, memory.arrays.label), storage


def _name_sources(every: Sequence[_Memory]) -> Iterator[NamedStorage]:
    for memory in every:
        name = memory.arrays.name
        of = "the source of rank" if name is None else f"the source of {name!r} on rank"
        for slot, storage in memory.held.items():
            yield f"{of} {slot}", storage
