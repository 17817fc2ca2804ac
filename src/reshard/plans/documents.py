"""Columns of whole numbers in a short form, for JSON.

The columns of layouts are regular: ranks count up, parts come round again. A column is a list of
entries, each a number or a grid of numbers, innermost steps first::

    7                    7
    [0, 1, 4]            0 1 2 3                      from 0, step 1, 4 times
    [0, 0, 2, 1, 3]      0 0 1 1 2 2                  from 0, step 0, 2 times; all step 1, 3 times
    [5, 1, 2, 0, 3]      5 6 5 6 5 6

1. Stretches of equal steps are gathered.
2. Stretches alike that follow at equal distances are gathered in the same way, as often as that
   makes any fewer.
3. A column that does not get shorter is written number by number.

JSON documents: what those of layouts, plans and jobs have in common.

A document names what it is and the version of its form. What several layouts share is written
once and meant by its number::

    {"reshard": "plan", "version": 1,
     "tables":  [run tables],
     "layouts": [layouts, their tables by number],
     "plan":    [source, target]  or  [source, target, dtype]}

1. Numbers of rows and cells are columns, written shortly (see `number_columns`).
2. Everything is checked when it is read: what no layout can be is one of our errors.
3. Layouts and plans are interned: what is read back is the very object that was written.
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

# More than any layout has, and small enough that three of them can be added in 64 bits.
LARGEST_NUMBER = 1 << 61
MOST_ENTRIES = 1 << 22
# A grid of so many numbers is quicker to write out one by one.
_FEW = 64

_Grid = tuple[int, tuple[int, ...]]


def packed(column: Iterable[int]) -> list[int | list[int]]:
    """A column as entries. `unpacked` gives it back.

    >>> packed([0, 1, 2, 3, 0, 1, 2, 3, 9]), packed([4, 8, 1])
    ([[0, 1, 4, 0, 2], 9], [4, 8, 1])
    """
    numbers = [int(number) for number in column]
    grids: list[_Grid] = [(number, ()) for number in numbers]
    # Each pass gathers one level of steps: numbers to stretches, then alike stretches to grids.
    while True:
        gathered = _gather(grids)
        if len(gathered) == len(grids):
            break
        grids = gathered
    entries: list[int | list[int]] = []
    for start, steps in grids:
        if len(steps) == 2 and steps[1] == 2:
            # A pair is shorter as it is.
            entries += [start, start + steps[0]]
        else:
            entries.append([start, *steps] if steps else start)
    if sum(1 if isinstance(entry, int) else len(entry) for entry in entries) < len(numbers):
        return entries
    return list(numbers)


def _gather(grids: list[_Grid]) -> list[_Grid]:
    """The grids, with stretches of alike ones at equal distances as one grid each."""
    found: list[_Grid] = []
    first = 0
    while first < len(grids):
        start, steps = grids[first]
        last = first
        if last + 1 < len(grids) and grids[last + 1][1] == steps:
            step = grids[last + 1][0] - start
            while (
                last + 1 < len(grids)
                and grids[last + 1][1] == steps
                and grids[last + 1][0] - grids[last][0] == step
            ):
                last += 1
        if last == first:
            found.append((start, steps))
        else:
            found.append((start, (*steps, step, last - first + 1)))
        first = last + 1
    return found


def unpacked(entries: object, where: str) -> IntArray:
    """The column that entries stand for.

    Raises NotationError for anything else than numbers and grids of numbers, or too many.

    >>> unpacked([7, [0, 0, 2, 1, 3]], "cells").tolist()
    [7, 0, 0, 1, 1, 2, 2]
    """
    if not isinstance(entries, list):
        raise NotationError(f"{where}: {entries!r} is not a list of whole numbers and grids")
    if set(map(type, entries)) == {int} and -LARGEST_NUMBER <= min(entries) <= max(entries) <= (
        LARGEST_NUMBER
    ):
        # Numbers alone, as of a column that does not get shorter.
        return np.array(entries, dtype=np.int64)
    total = 0
    pieces: list[IntArray] = []
    plain: list[int] = []
    for entry in entries:
        if not isinstance(entry, list):
            plain.append(whole_number(entry, where))
            total += 1
            continue
        grid = [whole_number(number, where) for number in entry]
        steps, counts = grid[1::2], grid[2::2]
        if len(grid) < 3 or len(steps) != len(counts) or min(counts) < 1:
            raise NotationError(
                f"{where}: {entry!r} is not a start and pairs of a step and a count of 1 or more"
            )
        size = math.prod(counts)
        total += size
        # Checked before the numbers are made: a short entry may stand for more than memory holds.
        reach = sum(abs(step) * count for step, count in zip(steps, counts, strict=True))
        if total > MOST_ENTRIES or reach >= LARGEST_NUMBER:
            raise NotationError(
                f"{where}: {entry!r} stands for too many or too large numbers; at most "
                f"{MOST_ENTRIES} numbers below {LARGEST_NUMBER}"
            )
        if size <= _FEW:
            few = [grid[0]]
            for step, count in zip(steps, counts, strict=True):
                few = [ahead * step + number for ahead in range(count) for number in few]
            plain += few
            continue
        pieces.append(np.array(plain, dtype=np.int64))
        plain = []
        numbers = np.array([grid[0]], dtype=np.int64)
        for step, count in zip(steps, counts, strict=True):
            # Innermost steps first: each further pair repeats all numbers so far.
            numbers = (np.arange(count)[:, None] * step + numbers).reshape(-1)
        pieces.append(numbers)
    pieces.append(np.array(plain, dtype=np.int64))
    return np.concatenate(pieces)


def whole_number(value: object, where: str, least: int = -LARGEST_NUMBER) -> int:
    """`value`, checked. Raises NotationError unless it is a whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotationError(f"{where}: {value!r} is not a whole number")
    if not least <= value <= LARGEST_NUMBER:
        raise NotationError(f"{where}: {value} is not between {least} and {LARGEST_NUMBER}")
    return value


VERSION = 1

Value = TypeVar("Value")

# Part, start, length, local start, repeat, global step, local step, role: a column each; the
# last ones are left out where all rows have these.
_ROW_DEFAULTS = (None, None, None, 0, 1, 0, 0, 0)


class DocumentWriter:
    """Collects the tables and layouts of a document, each once."""

    def __init__(self) -> None:
        self._tables: dict[RunTable, int] = {}
        self._layouts: dict[Layout, int] = {}

    def layout(self, layout: Layout) -> int:
        """The number of a layout in the document."""
        for table in layout.tables:
            self._tables.setdefault(table, len(self._tables))
        return self._layouts.setdefault(layout, len(self._layouts))

    @staticmethod
    def mesh(mesh: DeviceMesh) -> dict[str, Any]:
        """A mesh: its name, its axes with their sizes, and its devices."""
        axes = [list(pair) for pair in zip(mesh.axis_names, mesh.shape, strict=True)]
        return {"name": mesh.name, "axes": axes, "devices": packed(mesh.devices)}

    def change(self, change: LayoutChange, dtype: DType | None) -> list[Any]:
        """A change and the dtype of its elements, its layouts by number."""
        sides: list[Any] = [self.layout(change.source), self.layout(change.target)]
        return sides if dtype is None else [*sides, dtype.name]

    def document(self, kind: str, content: dict[str, Any]) -> str:
        """All that was collected, and the content that refers to it."""
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
            "cells": packed(layout.cell_slot.tolist()),
            "parts": [packed(column) for column in layout.cell_part.T.tolist()],
        }
        if layout.reduction is not None:
            written["reduction"] = layout.reduction
            written["contributions"] = layout.contributions
            written["carried"] = packed(layout.cell_contribution.tolist())
        return written


def _write_table(table: RunTable) -> list[Any]:
    columns = table.rows.T.tolist()
    # Trailing columns of defaults go; `_read_table` puts them back.
    while len(columns) > 3 and set(columns[-1]) <= {_ROW_DEFAULTS[len(columns) - 1]}:
        columns.pop()
    return [table.dimension_length, table.parts, *(packed(column) for column in columns)]


class DocumentReader:
    """A document's tables and layouts, checked. Raises NotationError for what is no document."""

    def __init__(self, text: str, kinds: Collection[str]) -> None:
        if not isinstance(text, str):
            raise NotationError(f"{type(text).__name__} {text!r}: expected a JSON document as text")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NotationError(f"{_shorten(text)!r} is not JSON: {error}") from error
        kind = document.get("reshard") if isinstance(document, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            *others, last = kinds
            named = f"{', '.join(others)} or {last}" if others else last
            raise NotationError(
                f"{_shorten(text)!r} is no {named}; such a document begins "
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
        """A field of the document, or of an object in it, of the JSON type that it must have."""
        value = (self._document if of is None else of).get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise NotationError(f"{name}: {value!r} is not a JSON {_JSON_NAMES[kind]}")
        return value

    def all_of(self, name: str, read: Callable[[Any, str], Value]) -> list[Value]:
        """The list of that name, every entry read."""
        entries = enumerate(self.field(name, list))
        return [read(value, f"{name}[{number}]") for number, value in entries]

    def chosen(self, values: list[Value], number: object, where: str) -> Value:
        """The value that a number stands for."""
        at = whole_number(number, where, 0)
        if at >= len(values):
            raise NotationError(f"{where}: number {at} of {len(values)}")
        return values[at]

    def change(self, value: Any, where: str) -> tuple[LayoutChange, DType | None]:
        """A change and the dtype of its elements, its layouts by number."""
        if not isinstance(value, list) or len(value) not in (2, 3):
            raise NotationError(f"{where}: {value!r} is not a source, a target and maybe a dtype")
        source, target = (self.chosen(self.layouts, number, where) for number in value[:2])
        dtype = read_dtype(value[2], where) if len(value) == 3 else None
        return LayoutChange(source, target), dtype

    def mesh(self, value: Any, where: str) -> DeviceMesh:
        """A mesh. Raises MeshError for one that cannot be."""
        if not isinstance(value, dict):
            raise NotationError(f"{where}: {value!r} is not a JSON object")
        axes = self.field("axes", list, of=value)
        if not all(isinstance(axis, list) and len(axis) == 2 for axis in axes):
            raise NotationError(f"{where}: {axes!r} is not a list of axes and sizes")
        devices = unpacked(value.get("devices"), f"{where}.devices").tolist()
        name = self.field("name", str, of=value)
        return DeviceMesh(name, [size for _, size in axes], [axis for axis, _ in axes], devices)

    def _read_layout(self, value: Any, where: str) -> Layout:
        if not isinstance(value, dict):
            raise NotationError(f"{where}: {value!r} is not a JSON object")
        shape = [
            whole_number(size, f"{where}.shape", 0) for size in self.field("shape", list, of=value)
        ]
        tables = [
            self.chosen(self.tables, number, f"{where}.tables")
            for number in self.field("tables", list, of=value)
        ]
        slots = _check_count(value.get("slots"), f"{where}.slots", 0)
        cells = unpacked(value.get("cells"), f"{where}.cells")
        parts = [
            unpacked(column, f"{where}.parts") for column in self.field("parts", list, of=value)
        ]
        carried = np.zeros(len(cells), dtype=np.int64)
        contributions, reduction = 1, value.get("reduction")
        if reduction is not None:
            self.field("reduction", str, of=value)
            contributions = _check_count(value.get("contributions"), f"{where}.contributions", 2)
            carried = unpacked(value.get("carried"), f"{where}.carried")
        if len(parts) != len(shape) or any(len(one) != len(cells) for one in (*parts, carried)):
            raise NotationError(
                f"{where}: columns of {[len(one) for one in parts]} parts for {len(cells)} cells "
                f"of {len(shape)} dimensions"
            )
        part = np.array(parts, dtype=np.int64).reshape(len(shape), len(cells)).T
        return Layout(shape, tables, slots, cells, part, carried, contributions, reduction)


def read_numbers(value: object, where: str, least: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers, none below `least`. Raises NotationError for anything else."""
    if not isinstance(value, list):
        raise NotationError(f"{where}: {value!r} is not a list of whole numbers")
    if least is None:
        return tuple(whole_number(number, where) for number in value)
    return tuple(whole_number(number, where, least) for number in value)


def read_texts(value: object, where: str) -> list[str]:
    """A list of texts. Raises NotationError for anything else."""
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise NotationError(f"{where}: {value!r} is not a list of texts")
    return value


_JSON_NAMES = {list: "array", dict: "object", str: "string", int: "number"}


def read_dtype(value: object, where: str) -> DType:
    """A dtype by its name. Raises NotationError for what is no text, UsageError for no dtype."""
    if not isinstance(value, str):
        raise NotationError(f"{where}: {value!r} is not the name of a dtype")
    return dtype(value)


def _read_table(value: Any, where: str) -> RunTable:
    if not isinstance(value, list) or not 5 <= len(value) <= 2 + len(_ROW_DEFAULTS):
        raise NotationError(f"{where}: {value!r} is not a length, parts and 3 to 8 columns")
    length = whole_number(value[0], where, 0)
    parts = _check_count(value[1], where, 1)
    columns = [unpacked(column, where) for column in value[2:]]
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
    reach = [
        many * max(abs(far), abs(near), 1)
        for many, far, near in zip(
            repeat.tolist(), global_step.tolist(), local_step.tolist(), strict=True
        )
    ]
    if sum(repeat.tolist()) > MOST_ENTRIES or max(reach, default=0) > LARGEST_NUMBER:
        raise NotationError(f"{where}: too many runs, or runs too far apart")
    return RunTable(length, parts, np.stack(columns, axis=-1))


def _check_count(value: object, where: str, least: int) -> int:
    count = whole_number(value, where, least)
    if count > MOST_ENTRIES:
        raise NotationError(f"{where}: {count} is more than the {MOST_ENTRIES} there can be")
    return count


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
