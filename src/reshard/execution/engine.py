"""The engine: arrays of one layout from arrays of another, in this process.

1. The arrays of all tensors are checked against their layouts before anything is copied.
2. Every target slot gets new memory, unless the caller gives it; padding is set to zero.
3. Copies are carried out, stage by stage. The first contribution of an element replaces the value
   in place, the others are combined with it in order. Threads share the copies of all tensors.
4. Means are scaled. A target contribution that combines nothing is filled with the identity of the
   reduction, so that it changes nothing when it is combined later.

A slot with one cell has it as its whole array; a slot with several stores them one after another in
a flat array. The array of a cell shares the memory of its slot.

Sources are only read. NumPy arrays and, if torch is loaded, torch CPU tensors are accepted; results
are of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

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
    """The arrays of the cells of the slots in `arrays`, by the cells' numbers."""
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
            # A rank of several boxes has a flat array, with its boxes one after another.
            stretch = array[begin : begin + int(shape.prod())]
            cells[cell] = stretch.reshape(tuple(shape.tolist()))
    return cells


def clear_pads(layout: Layout, cells: Mapping[int, Storage]) -> None:
    """Write zeros where the arrays of cells are padding."""
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
    """An index of a cell's array that leaves out its padding."""
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
    """Scale means, and fill what combines nothing with the reduction's identity.

    Args:
        layout: of the target.
        combines: for each contribution of it, those of the source that were combined.
        scale: the numerator and denominator that combined elements are multiplied by.
        kind: of the arrays.
        cells: the storages of target cells, by their number; not all need be given.
    """
    numerator, denominator = scale
    if numerator == denominator and layout.reduction is None:
        return
    for cell, storage in cells.items():
        if combines[int(layout.cell_contribution[cell])]:
            if numerator != denominator:
                storage[...] = kind.scale(storage, numerator, denominator)
        elif layout.reduction is not None:
            storage[element_positions(layout, cell)] = identity(layout.reduction, kind)[0]


@dataclass(frozen=True, slots=True, eq=False)
class TensorCopies:
    """What is done for one tensor.

    Args:
        source, target: its layouts.
        combines: for each contribution of the target, those of the source that are combined.
        scale: the numerator and denominator that combined elements are multiplied by.
        find_stages: the columns of copies, one after another: first from cells of the source
            to cells of the target, then from cells of the target to others. Called when the
            arrays were checked.
    """

    source: Layout
    target: Layout
    combines: Sequence[Sequence[int]]
    scale: tuple[int, int]
    find_stages: Callable[[], Sequence[CopyColumns]]


@dataclass(frozen=True, slots=True, eq=False)
class TensorArrays:
    """The arrays of one tensor.

    Args:
        shards: for every source slot that holds something, its array.
        out: arrays to write to, for every target slot that holds something; new ones when None.
        dtype: what all have to be of; anything when None.
        name: what errors call the tensor, where a run has several.
    """

    shards: Mapping[int, Any]
    out: Mapping[int, Any] | None = None
    dtype: DType | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """The tensor, behind what an error names of it."""
        return "" if self.name is None else f" of {self.name!r}"


@dataclass(slots=True, eq=False)
class _Memory:
    """One tensor of a run: what is done, and the memory of its arrays.

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
        """The memory of the sources. Raises ShardError for arrays that do not fit the layout."""
        source, label = copies.source, arrays.label
        kind = check_shards(source, arrays.shards, label, arrays.dtype, copies.target.reduction)
        held = source_storages(source, kind, arrays.shards, label)
        return cls(copies, arrays, kind, held, {}, {})

    def fill(self, filled: dict[int, Storage]) -> None:
        """Write to these arrays of the target's slots."""
        self.filled = filled
        self.target_cells = cell_arrays(self.copies.target, filled)

    def stage(self, columns: CopyColumns, is_first: bool) -> list[Copy]:
        """The copies of one stage: from the source, or from what the stages before filled."""
        sources = self.target_cells
        if is_first:
            sources = cell_arrays(self.copies.source, self.held)
        combine = partial(self.kind.combine, self.copies.source.reduction or "sum")
        return columns.copies(sources, self.target_cells, combine)

    def finish(self) -> dict[int, Any]:
        """The target's arrays, once contributions are complete."""
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
    """The target's arrays of every tensor, by slot: those of `out`, or new ones.

    Args:
        tensors: what is done, and to which arrays.
        threads: how many copy at most, all tensors together; one for each processor when None.
            The result is the same for any number.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that cannot be written, or shares memory with one of any tensor.
        UsageError: fewer than one thread.
        PlanError: what `find_stages` raises.
    """
    workers = check_threads(threads)
    every = [_Memory.of(copies, arrays) for copies, arrays in tensors]
    _find_targets(every, workers)
    # The last thing that may fail is done before anything is written.
    stages = [memory.copies.find_stages() for memory in every]
    for memory in every:
        clear_pads(memory.copies.target, memory.target_cells)
    # Stage by stage of all tensors together, so that threads share all of their copies.
    for number in range(max(map(len, stages), default=0)):
        found: list[Copy] = []
        for memory, columns in zip(every, stages, strict=True):
            if number < len(columns):
                found += memory.stage(columns[number], is_first=not number)
        carry_out(found, workers)
    return [memory.finish() for memory in every]


def check(tensors: Sequence[tuple[TensorCopies, TensorArrays]]) -> None:
    """Raise what `run` raises of arrays that do not fit, and copy nothing."""
    _find_given_targets([_Memory.of(*tensor) for tensor in tensors])


def run_slot(
    copies: TensorCopies,
    slot: int,
    shards: Mapping[int, Any],
    before_copy: Callable[[], None] = lambda: None,
) -> Any:
    """The array of one target slot, by one thread, from source arrays that were checked.

    Only those are read that the slot's copies are from.

    Args:
        copies: what is done for the slot, in one stage.
        slot: one that holds something.
        shards: the arrays of the source's slots.
        before_copy: called before every copy; what it raises ends the work.
    """
    (columns,) = copies.find_stages()
    kind = kind_of(next(iter(shards.values())), "the source's array")
    senders = distinct(copies.source.cell_slot[columns.source_cell]).tolist()
    held = {sender: kind.storage(shards[sender]) for sender in senders}
    memory = _Memory(copies, TensorArrays(shards), kind, held, {}, {})
    # Zeros where it is padding.
    memory.fill({slot: np.zeros(copies.target.local_shape(slot) or (), kind.dtype.storage)})
    # In the order of the contributions, as `carry_out` does it with several threads.
    for copy in sorted(memory.stage(columns, is_first=True), key=lambda copy: copy.order):
        before_copy()
        copy.carry_out()
    return memory.finish()[slot]


def _find_targets(every: Sequence[_Memory], workers: int) -> None:
    """Find the memory that is written: what was given first, since it may not fit."""
    _find_given_targets(every)
    fresh = FreshMemory()
    for memory in every:
        if memory.arrays.out is None:
            memory.fill(new_storages(memory.copies.target, memory.kind, fresh))
    fresh.find(workers)


def _find_given_targets(every: Sequence[_Memory]) -> None:
    """Find the memory of the arrays in `out`. Raises ShardError for what does not fit."""
    given = [(memory, out) for memory in every if (out := memory.arrays.out) is not None]
    for memory, out in given:
        label = memory.arrays.label
        memory.fill(given_storages(memory.copies.target, memory.kind, out, label))
    # When all are found: an array may also lie in one of another tensor.
    if given:
        check_apart(_name_outputs([memory for memory, _ in given]), _name_sources(every))


def _name_outputs(every: Sequence[_Memory]) -> Iterator[NamedStorage]:
    for memory in every:
        for slot, storage in memory.filled.items():
            yield NamedStorage(output_name(slot, memory.arrays.label), storage)


def _name_sources(every: Sequence[_Memory]) -> Iterator[NamedStorage]:
    for memory in every:
        name = memory.arrays.name
        of = "the source of rank" if name is None else f"the source of {name!r} on rank"
        for slot, storage in memory.held.items():
            yield NamedStorage(f"{of} {slot}", storage)
