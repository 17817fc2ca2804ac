"""Versioned JSON documents: the form that those of layouts, plans, jobs and others share.

A document names its kind and the version of its form. Values shared by several layouts are written
once and referred to by number::

    {"reshard": "plan", "version": 1,
     "tables":  [run tables],
     "layouts": [layouts, their tables by number],
     "plan":    [source, target]  or  [source, target, dtype]}

1. Everything is checked when it is read: a value that no layout can have raises `NotationError`.
2. Layouts and plans are interned: reading returns the same object that was written.
3. Numbers of rows and cells are columns in a compact form (`pack_column`). The columns of layouts
   are regular: ranks count up, parts repeat. An entry is a number, or a grid of numbers as a start
   and pairs of a step and a count, innermost first::

       7                 7
       [0, 1, 4]         0 1 2 3                      from 0, step 1, 4 times
       [0, 0, 2, 1, 3]   0 0 1 1 2 2                  from 0, step 0, 2 times; all step 1, 3 times
       [5, 1, 2, 0, 3]   5 6 5 6 5 6
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import numpy as np

from reshard.dtypes import DType, dtype
from reshard.errors import NotationError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import PAD, IntArray, RunTable

# Larger than any number of a layout, and small enough that the sum of three fits in 64 bits.
MAX_NUMBER = 1 << 61
MAX_ENTRIES = 1 << 22
# Grids of at most this many numbers are expanded in Python, which is faster.
_SMALL_GRID = 64

_Grid = tuple[int, tuple[int, ...]]


def pack_column(column: Iterable[int]) -> list[int | list[int]]:
    """Return a column of integers in a compact form, which `unpack_column` reads.

    Runs of equal steps become grids, then equal grids at equal distances, as long as that makes
    them fewer. A column that does not get shorter is written number by number.

    >>> pack_column([0, 1, 2, 3, 0, 1, 2, 3, 9]), pack_column([4, 8, 1])
    ([[0, 1, 4, 0, 2], 9], [4, 8, 1])
    """
    numbers = [int(number) for number in column]
    grids: list[_Grid] = [(number, ()) for number in numbers]
    # Each pass adds a level of steps to the grids.
    while True:
        gathered = _gather(grids)
        if len(gathered) == len(grids):
            break
        grids = gathered
    entries: list[int | list[int]] = []
    for start, steps in grids:
        if len(steps) == 2 and steps[1] == 2:
            # Two numbers are shorter than their grid.
            entries += [start, start + steps[0]]
        else:
            entries.append([start, *steps] if steps else start)
    if sum(1 if isinstance(entry, int) else len(entry) for entry in entries) < len(numbers):
        return entries
    return list(numbers)


def _gather(grids: list[_Grid]) -> list[_Grid]:
    """Merge runs of equal grids at equal distances into a grid each."""
    merged: list[_Grid] = []
    first = 0
    while first < len(grids):
        start, steps = grids[first]
        last = first
        # The distance to the next grid is the step; the run ends at another distance.
        if last + 1 < len(grids) and grids[last + 1][1] == steps:
            step = grids[last + 1][0] - start
            while (
                last + 1 < len(grids)
                and grids[last + 1][1] == steps
                and grids[last + 1][0] - grids[last][0] == step
            ):
                last += 1
        if last == first:
            merged.append((start, steps))
        else:
            merged.append((start, (*steps, step, last - first + 1)))
        first = last + 1
    return merged


def unpack_column(entries: object, where: str) -> IntArray:
    """Return the column of integers that `pack_column` wrote.

    Raises NotationError for anything but numbers and grids of numbers, or too many of them.

    >>> unpack_column([7, [0, 0, 2, 1, 3]], "cells").tolist()
    [7, 0, 0, 1, 1, 2, 2]
    """
    if not isinstance(entries, list):
        raise NotationError(f"{where}: {entries!r} is not a list of whole numbers and grids")
    # A column without grids.
    if set(map(type, entries)) == {int} and -MAX_NUMBER <= min(entries) <= max(entries) <= (
        MAX_NUMBER
    ):
        return np.array(entries, dtype=np.int64)
    total = 0
    pieces: list[IntArray] = []
    plain: list[int] = []
    for entry in entries:
        if not isinstance(entry, list):
            plain.append(read_int(entry, where))
            total += 1
            continue
        grid = [read_int(number, where) for number in entry]
        steps, counts = grid[1::2], grid[2::2]
        if len(grid) < 3 or len(steps) != len(counts) or min(counts) < 1:
            raise NotationError(
                f"{where}: {entry!r} is not a start and pairs of a step and a count of 1 or more"
            )
        size = math.prod(counts)
        total += size
        # Checked before expansion: a short entry may expand to more than fits in memory.
        reach = sum(abs(step) * count for step, count in zip(steps, counts, strict=True))
        if total > MAX_ENTRIES or reach >= MAX_NUMBER:
            raise NotationError(
                f"{where}: {entry!r} stands for too many or too large numbers; at most "
                f"{MAX_ENTRIES} numbers below {MAX_NUMBER}"
            )
        if size <= _SMALL_GRID:
            expanded = [grid[0]]
            for step, count in zip(steps, counts, strict=True):
                expanded = [i * step + number for i in range(count) for number in expanded]
            plain += expanded
            continue
        pieces.append(np.array(plain, dtype=np.int64))
        plain = []
        numbers = np.array([grid[0]], dtype=np.int64)
        for step, count in zip(steps, counts, strict=True):
            # Innermost steps come first: each further pair repeats all numbers so far.
            numbers = (np.arange(count)[:, None] * step + numbers).reshape(-1)
        pieces.append(numbers)
    pieces.append(np.array(plain, dtype=np.int64))
    return np.concatenate(pieces)


def read_int(value: object, where: str, minimum: int = -MAX_NUMBER) -> int:
    """Return `value`. Raises NotationError unless it is an integer in range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotationError(f"{where}: {value!r} is not a whole number")
    if not minimum <= value <= MAX_NUMBER:
        raise NotationError(f"{where}: {value} is not between {minimum} and {MAX_NUMBER}")
    return value


VERSION = 1

Value = TypeVar("Value")

# The defaults of the columns part, start, length, local start, repeat, global step, local step and
# role. Trailing columns are left out if all rows have the default.
_ROW_DEFAULTS = (None, None, None, 0, 1, 0, 0, 0)


class DocumentWriter:
    """A writer of a document that collects its tables and layouts, without duplicates."""

    def __init__(self) -> None:
        self._tables: dict[RunTable, int] = {}
        self._layouts: dict[Layout, int] = {}

    def layout(self, layout: Layout) -> int:
        """Add a layout, and return its number in the document."""
        for table in layout.tables:
            self._tables.setdefault(table, len(self._tables))
        return self._layouts.setdefault(layout, len(self._layouts))

    @staticmethod
    def mesh(mesh: DeviceMesh) -> dict[str, Any]:
        """Return a mesh as its name, its axes with their sizes, and its devices."""
        axes = [list(pair) for pair in zip(mesh.axis_names, mesh.shape, strict=True)]
        return {"name": mesh.name, "axes": axes, "devices": pack_column(mesh.devices)}

    def change(self, change: LayoutChange, dtype: DType | None) -> list[Any]:
        """Return a change as the numbers of its layouts, with the dtype of its elements."""
        sides: list[Any] = [self.layout(change.source), self.layout(change.target)]
        return sides if dtype is None else [*sides, dtype.name]

    def document(self, kind: str, content: dict[str, Any]) -> str:
        """Return the text of the document: the collected layouts, and content that uses them."""
        document = {
            "reshard": kind,
            "version": VERSION,
            "tables": [_write_table(table) for table in self._tables],
            "layouts": [self._write_layout(layout) for layout in self._layouts],
            **content,
        }
        return json.dumps(document, separators=(",", ":"))

    def _write_layout(self, layout: Layout) -> dict[str, Any]:
        written: dict[str, Any] = {
            "shape": list(layout.shape),
            "tables": [self._tables[table] for table in layout.tables],
            "slots": layout.slots,
            "cells": pack_column(layout.cell_slot.tolist()),
            "parts": [pack_column(column) for column in layout.cell_part.T.tolist()],
        }
        if layout.reduction is not None:
            written["reduction"] = layout.reduction
            written["contributions"] = layout.contributions
            written["carried"] = pack_column(layout.cell_contribution.tolist())
        return written


def _write_table(table: RunTable) -> list[Any]:
    columns = table.rows.T.tolist()
    # Trailing columns of defaults are left out; `_read_table` restores them.
    while len(columns) > 3 and set(columns[-1]) <= {_ROW_DEFAULTS[len(columns) - 1]}:
        columns.pop()
    return [table.dimension_length, table.parts, *(pack_column(column) for column in columns)]


class DocumentReader:
    """A reader of a document and its layouts. Raises NotationError for invalid documents."""

    def __init__(self, text: str, kinds: Collection[str]) -> None:
        if not isinstance(text, str):
            raise NotationError(f"{type(text).__name__} {text!r}: expected a JSON document as text")
        try:
            document = json.loads(text)
        # JSON nested too deeply is a RecursionError.
        except (ValueError, RecursionError) as error:
            raise NotationError(f"{_shorten(text)!r} is not JSON: {error}") from error
        kind = document.get("reshard") if isinstance(document, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            *others, last = kinds
            named = f"{', '.join(others)} or {last}" if others else last
            raise NotationError(
                f"{_shorten(text)!r} is not a {named}; such a document begins "
                f'with {{"reshard":"{last}"'
            )
        if document.get("version") != VERSION:
            raise NotationError(
                f"version {document.get('version')!r} of a {kind}'s document; this release reads "
                f"version {VERSION}"
            )
        self.kind = kind
        self._document: dict[str, Any] = document
        self.tables = self.all_of("tables", _read_table)
        self.layouts = self.all_of("layouts", self._read_layout)

    def field(
        self, name: str, kind: type, default: object = None, of: dict[str, Any] | None = None
    ) -> Any:
        """Return a field of the document, or of an object in it, checked for its JSON type."""
        value = (self._document if of is None else of).get(name, default)
        return read_json(value, kind, name)

    def all_of(self, name: str, read: Callable[[Any, str], Value]) -> list[Value]:
        """Return the list in a field, with every entry read."""
        entries = enumerate(self.field(name, list))
        return [read(value, f"{name}[{number}]") for number, value in entries]

    def chosen(self, values: list[Value], number: object, where: str) -> Value:
        """Return the value with a number."""
        at = read_int(number, where, 0)
        if at >= len(values):
            raise NotationError(f"{where}: number {at} of {len(values)}")
        return values[at]

    def change(self, value: Any, where: str) -> tuple[LayoutChange, DType | None]:
        """Read a change, and the dtype of its elements if given."""
        if not isinstance(value, list) or len(value) not in (2, 3):
            raise NotationError(f"{where}: {value!r} is not a source, a target and maybe a dtype")
        source, target = (self.chosen(self.layouts, number, where) for number in value[:2])
        dtype = read_dtype(value[2], where) if len(value) == 3 else None
        return LayoutChange(source, target), dtype

    def mesh(self, value: Any, where: str) -> DeviceMesh:
        """Read a mesh. Raises MeshError for an invalid mesh."""
        axes = self.field("axes", list, of=read_json(value, dict, where))
        if not all(isinstance(axis, list) and len(axis) == 2 for axis in axes):
            raise NotationError(f"{where}: {axes!r} is not a list of axes and sizes")
        devices = unpack_column(value.get("devices"), f"{where}.devices").tolist()
        name = self.field("name", str, of=value)
        return DeviceMesh(name, [size for _, size in axes], [axis for axis, _ in axes], devices)

    def _read_layout(self, value: Any, where: str) -> Layout:
        read_json(value, dict, where)
        shape = read_ints(value.get("shape"), f"{where}.shape", 0)
        tables = [
            self.chosen(self.tables, number, f"{where}.tables")
            for number in self.field("tables", list, of=value)
        ]
        slots = _check_count(value.get("slots"), f"{where}.slots", 0)
        cells = unpack_column(value.get("cells"), f"{where}.cells")
        parts = [
            unpack_column(column, f"{where}.parts")
            for column in self.field("parts", list, of=value)
        ]
        # Without a reduction, every cell carries contribution 0.
        carried = np.zeros(len(cells), dtype=np.int64)
        contributions, reduction = 1, value.get("reduction")
        if reduction is not None:
            self.field("reduction", str, of=value)
            contributions = _check_count(value.get("contributions"), f"{where}.contributions", 2)
            carried = unpack_column(value.get("carried"), f"{where}.carried")
        lengths = [len(column) for column in parts]
        if len(parts) != len(shape) or {*lengths, len(carried)} != {len(cells)}:
            raise NotationError(
                f"{where}: columns of {lengths} parts for {len(cells)} cells of {len(shape)} "
                "dimensions"
            )
        part = np.array(parts, dtype=np.int64).reshape(len(shape), len(cells)).T
        return Layout(shape, tables, slots, cells, part, carried, contributions, reduction)


_JSON_NAMES: dict[type, str] = {list: "array", dict: "object", str: "string", int: "number"}


def read_json(value: object, kind: type[Value], where: str) -> Value:
    """Return `value`. Raises NotationError unless it is a JSON array, object, string or number.

    >>> read_json({}, dict, "mesh")
    {}
    """
    # True is an integer in Python.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise NotationError(f"{where}: {value!r} is not a JSON {_JSON_NAMES[kind]}")
    return value


def read_ints(value: object, where: str, minimum: int = -MAX_NUMBER) -> tuple[int, ...]:
    """Return a list of integers. Raises NotationError for other values."""
    if not isinstance(value, list):
        raise NotationError(f"{where}: {value!r} is not a list of whole numbers")
    return tuple(read_int(number, where, minimum) for number in value)


def read_strings(value: object, where: str) -> list[str]:
    """Return a list of strings. Raises NotationError for other values."""
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise NotationError(f"{where}: {value!r} is not a list of texts")
    return value


def read_dtype(value: object, where: str) -> DType:
    """Return a dtype. Raises NotationError for a value that is not a string, or UsageError."""
    if not isinstance(value, str):
        raise NotationError(f"{where}: {value!r} is not the name of a dtype")
    return dtype(value)


def _read_table(value: Any, where: str) -> RunTable:
    if not isinstance(value, list) or not 5 <= len(value) <= 2 + len(_ROW_DEFAULTS):
        raise NotationError(f"{where}: {value!r} is not a length, parts and 3 to 8 columns")
    length = read_int(value[0], where, 0)
    parts = _check_count(value[1], where, 1)
    columns = [unpack_column(column, where) for column in value[2:]]
    rows = len(columns[0])
    for default in _ROW_DEFAULTS[len(columns) :]:
        columns.append(np.full(rows, default, dtype=np.int64))
    if any(len(column) != rows for column in columns):
        raise NotationError(f"{where}: columns of {[len(column) for column in columns]} rows")
    _, _, run_length, _, repeat, global_step, local_step, role = columns
    if rows and (run_length.min() < 1 or repeat.min() < 1 or role.min() < 0 or role.max() > PAD):
        raise NotationError(
            f"{where}: runs have a length and a repeat of 1 or more, and a role from 0 to {PAD}"
        )
    # Steps are multiplied by repeats, which must not overflow 64 bits unnoticed.
    reach = [
        count * max(abs(far), abs(near), 1)
        for count, far, near in zip(
            repeat.tolist(), global_step.tolist(), local_step.tolist(), strict=True
        )
    ]
    if sum(repeat.tolist()) > MAX_ENTRIES or max(reach, default=0) > MAX_NUMBER:
        raise NotationError(f"{where}: too many runs, or runs too far apart")
    return RunTable.from_matrix(length, parts, np.stack(columns, axis=-1))


def _check_count(value: object, where: str, minimum: int) -> int:
    count = read_int(value, where, minimum)
    if count > MAX_ENTRIES:
        raise NotationError(f"{where}: {count} is more than the maximum of {MAX_ENTRIES}")
    return count


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
