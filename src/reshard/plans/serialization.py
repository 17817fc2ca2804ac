"""Layouts, plans and jobs as JSON text, and back: `reshard.to_json` and `reshard.from_json`.

A document names its kind, so a single function reads all kinds. Packages above this one write and
read their documents in modules of their own, which are loaded on first use.

The document of a job has, besides the tables and layouts of every document (`documents`)::

    "plans": [plans, their layouts by number]
    "paths": [paths of files]
    "items": [[name, plan] or [name, plan, {...}]]
    "sources": how senders are selected; absent if balanced

The object of an item has its deviations from the default: its `dtype`, if not that of the plan, and
the bindings of its `source` and `target`, if slots are not the memories of the ranks with the same
numbers. The addresses of a binding are columns in the order of its slots::

    {"slots": [...]                          the slots that have addresses
     "cells": [...]                          the number of addresses; 0 for one shared by all cells
     "kinds": [...]                          0 a rank, 1 a file, 2 a name; absent if all are equal
     "ranks": [...]  "paths": [...]  "starts": [...]  "names": [...]
     "views": {"slots", "cells", "offsets", "strides"}}
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from reshard.binding import Address, Binding, FileRange, RankMemory, TensorName, View
from reshard.dtypes import DType
from reshard.errors import NotationError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.plans.documents import (
    DocumentReader,
    DocumentWriter,
    pack_column,
    read_dtype,
    read_int,
    read_json,
    unpack_column,
)
from reshard.plans.job import Job, JobItem
from reshard.plans.plan import Plan

_RANK, _FILE, _NAME = 0, 1, 2
Value = TypeVar("Value")


def write_job(job: Job) -> str:
    """Write a job as a JSON document, equal for equal jobs."""
    writer = DocumentWriter()
    plans: dict[tuple[LayoutChange, DType], int] = {}
    paths: dict[str, int] = {}
    items: list[list[Any]] = []
    for item in job.items:
        special: dict[str, Any] = {}
        for side, binding in (("source", item.source), ("target", item.target)):
            # The default binding is left out.
            if binding != Binding.to_ranks(binding.layout):
                special[side] = _write_binding(binding, paths)
        number = plans.setdefault((item.change, item.dtype), len(plans))
        items.append([item.name, number, special] if special else [item.name, number])
    content: dict[str, Any] = {
        "plans": [writer.change(*plan) for plan in plans],
        "paths": list(paths),
        "items": items,
    }
    if job.sources != "balanced":
        content["sources"] = job.sources
    return writer.document("job", content)


def read_job(reader: DocumentReader) -> Job:
    """Read the job of a document.

    Raises:
        ReshardError: NotationError for an invalid document, or the errors of an invalid job.
    """
    plans = reader.all_of("plans", reader.change)
    paths = reader.all_of("paths", lambda path, where: read_json(path, str, where))

    def read(value: Any, where: str) -> JobItem:
        if not isinstance(value, list) or len(value) not in (2, 3):
            raise NotationError(f"{where}: {value!r} is not a name, a plan and maybe an object")
        name = read_json(value[0], str, where)
        plan, dtype = reader.chosen(plans, value[1], where)
        special = read_json(value[2] if len(value) == 3 else {}, dict, where)
        # Tensors of several types may share a plan, which then has no dtype.
        width = read_dtype(special["dtype"], where) if "dtype" in special else dtype
        if width is None:
            raise NotationError(f"{where}: neither tensor {name!r} nor its plan has a dtype")
        source, target = (
            _BindingReader(reader, special[side], f"{where}.{side}", layout, paths).binding()
            if side in special
            else Binding.to_ranks(layout)
            for side, layout in (("source", plan.source), ("target", plan.target))
        )
        return JobItem(name, width, plan, source, target)

    items = reader.all_of("items", read)
    sources = reader.field("sources", str, "balanced")
    return Job(items, sources)


def _write_binding(binding: Binding, paths: dict[str, int]) -> dict[str, Any]:
    slots = sorted(binding.addresses)
    addresses: list[Address]
    written, addresses = _write_slots(slots, [binding.addresses[slot] for slot in slots])
    kinds = [_kind(address) for address in addresses]
    if len(set(kinds)) > 1:
        written["kinds"] = pack_column(kinds)
    files = [address for address in addresses if isinstance(address, FileRange)]
    columns: dict[str, list[Any]] = {
        "ranks": pack_column(memory.rank for memory in addresses if isinstance(memory, RankMemory)),
        "paths": pack_column(paths.setdefault(file.path, len(paths)) for file in files),
        "starts": pack_column(file.start_bytes for file in files),
        "names": [tensor.name for tensor in addresses if isinstance(tensor, TensorName)],
    }
    # Empty columns are left out: most bindings have addresses of a single kind.
    written |= {name: column for name, column in columns.items() if column}
    if binding.views:
        slots = sorted(binding.views)
        of_views, views = _write_slots(slots, [binding.views[slot] for slot in slots])
        of_views["offsets"] = pack_column(view.offset for view in views)
        of_views["strides"] = pack_column(stride for view in views for stride in view.strides)
        written["views"] = of_views
    return written


def _kind(address: Address) -> int:
    if isinstance(address, RankMemory):
        return _RANK
    return _FILE if isinstance(address, FileRange) else _NAME


def _write_slots(
    slots: list[int], values: Sequence[Value | tuple[Value, ...]]
) -> tuple[dict[str, Any], list[Value]]:
    """Return the slots with the number of values of each, and all values in a list."""
    written: dict[str, Any] = {"slots": pack_column(slots)}
    counts = [len(value) if isinstance(value, tuple) else 0 for value in values]
    if any(counts):
        written["cells"] = pack_column(counts)
    flat: list[Value] = []
    for value in values:
        flat += value if isinstance(value, tuple) else (value,)
    return written, flat


class _BindingReader:
    """A reader of a binding."""

    def __init__(
        self, reader: DocumentReader, value: Any, where: str, layout: Layout, paths: list[str]
    ) -> None:
        self._reader, self._where = reader, where
        self._value = read_json(value, dict, where)
        self._layout, self._paths = layout, paths

    def binding(self) -> Binding:
        """Return the binding. Raises NotationError, or LayoutError if it is not of the layout."""
        addresses = self._by_slot(self._value, self._addresses(), "addresses")
        views: dict[int, Any] = {}
        if "views" in self._value:
            of_views = self._reader.field("views", dict, of=self._value)
            views = self._by_slot(of_views, self._views(of_views), "views")
        return Binding(self._layout, addresses, views)

    def _column(self, document: dict[str, Any], name: str) -> list[int]:
        numbers: list[int] = unpack_column(document.get(name, []), f"{self._where}.{name}").tolist()
        return numbers

    def _addresses(self) -> list[Address]:
        ranks = [
            RankMemory(read_int(rank, f"{self._where}.ranks", 0))
            for rank in self._column(self._value, "ranks")
        ]
        paths = [
            self._reader.chosen(self._paths, number, f"{self._where}.paths")
            for number in self._column(self._value, "paths")
        ]
        starts = self._column(self._value, "starts")
        if len(starts) != len(paths):
            raise NotationError(f"{self._where}: {len(starts)} starts for {len(paths)} paths")
        files = [
            FileRange(path, read_int(start, f"{self._where}.starts", 0))
            for path, start in zip(paths, starts, strict=True)
        ]
        names = self._reader.field("names", list, [], self._value)
        named = [TensorName(read_json(name, str, f"{self._where}.names")) for name in names]
        # Each kind of address has its own columns; `kinds` is the kind of each address in order.
        of_kind: dict[int, Iterator[Address]] = {
            _RANK: iter(ranks),
            _FILE: iter(files),
            _NAME: iter(named),
        }
        total = len(ranks) + len(files) + len(named)
        if "kinds" in self._value:
            kinds: Iterable[int] = self._column(self._value, "kinds")
        else:
            kinds = [_RANK] * len(ranks) + [_FILE] * len(files) + [_NAME] * len(named)
        addresses = [
            address
            for kind in kinds
            if (address := next(of_kind.get(kind, iter(())), None)) is not None
        ]
        if len(addresses) != total or len(addresses) != len(list(kinds)):
            raise NotationError(f"{self._where}: the kinds are not those of its {total} addresses")
        return addresses

    def _views(self, of_views: dict[str, Any]) -> list[View]:
        offsets, strides = (self._column(of_views, name) for name in ("offsets", "strides"))
        each = self._layout.ndim
        if len(strides) != each * len(offsets):
            raise NotationError(
                f"{self._where}: {len(strides)} strides for {len(offsets)} views of {each} "
                "dimensions"
            )
        return [
            View(offset, tuple(strides[each * i : each * (i + 1)]))
            for i, offset in enumerate(offsets)
        ]

    def _by_slot(
        self, document: dict[str, Any], values: list[Value], what: str
    ) -> dict[int, Value | tuple[Value, ...]]:
        slots = self._column(document, "slots")
        counts = self._column(document, "cells") if "cells" in document else [0] * len(slots)
        # A count of 0 is a single value for the whole slot, not an empty tuple.
        rising = all(a < b for a, b in itertools.pairwise(slots))
        if not rising or len(counts) != len(slots) or min(counts, default=0) < 0:
            raise NotationError(f"{self._where}: the {what} need rising slots and a count for each")
        if sum(max(count, 1) for count in counts) != len(values):
            raise NotationError(f"{self._where}: {len(values)} {what} for {len(slots)} slots")
        rest = iter(values)
        return {
            slot: tuple(next(rest) for _ in range(count)) if count else next(rest)
            for slot, count in zip(slots, counts, strict=True)
        }


def to_json(value: Layout | Plan | Job | Any) -> str:
    """Write a layout, a plan, a job or an engine's layout as a compact JSON document.

    Equal values have equal documents. Raises UsageError for other values.

    >>> text = to_json(Layout.replicated((4,), 2))
    >>> text[:72]
    '{"reshard":"layout","version":1,"tables":[[4,1,[0],[0],[4]]],"layouts":['
    >>> from_json(text) is Layout.replicated((4,), 2)
    True
    """
    if isinstance(value, Job):
        return write_job(value)
    writer = DocumentWriter()
    if isinstance(value, Plan):
        return writer.document("plan", {"plan": writer.change(value.change, value.dtype)})
    if isinstance(value, Layout):
        writer.layout(value)
        return writer.document("layout", {})
    kind = getattr(type(value), "document_kind", None)
    if kind in _MODULES:
        text: str = import_module(_MODULES[kind]).write_document(value)
        return text
    raise UsageError(
        f"{value!r} has no JSON document; expected a Layout, a Plan, a Job or an EngineLayout"
    )


def from_json(text: str) -> Any:
    """Read a layout, a plan, a job or an engine's layout from a JSON document.

    Layouts and plans are the objects that were written, other values are equal.

    Raises:
        ReshardError: NotationError for an invalid document, or the errors of an invalid value.
    """
    reader = DocumentReader(text, [*_READERS, *_MODULES])
    if reader.kind in _MODULES:
        return import_module(_MODULES[reader.kind]).read_document(reader)
    return _READERS[reader.kind](reader)


def _read_layout(reader: DocumentReader) -> Layout:
    if len(reader.layouts) != 1:
        raise NotationError(f"a layout's document has {len(reader.layouts)} layouts; expected one")
    return reader.layouts[0]


def _read_plan(reader: DocumentReader) -> Plan:
    change, dtype = reader.change(reader.field("plan", list), "plan")
    return Plan(change.source, change.target, dtype)


_READERS: dict[str, Callable[[DocumentReader], Layout | Plan | Job]] = {
    "layout": _read_layout,
    "plan": _read_plan,
    "job": read_job,
}

# Kinds of documents with their own modules, which have `write_document` and `read_document`.
_MODULES = {"engine-layout": "reshard.recipes.engine_layouts.document"}
