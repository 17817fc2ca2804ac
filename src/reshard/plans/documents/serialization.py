"""Layouts, plans and jobs as JSON text, and back: `reshard.to_json` and `reshard.from_json`.

A document says what it is, so there is one function to read them all. What stands above this
package has its own module for its document, which is loaded when one is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from reshard.errors import NotationError, UsageError
from reshard.layout import Layout
from reshard.plans.documents.document import DocumentReader, DocumentWriter
from reshard.plans.documents.job_document import read_job, write_job
from reshard.plans.job import Job
from reshard.plans.plan import Plan


def to_json(value: Layout | Plan | Job | Any) -> str:
    """A layout, a plan, a job or an engine's layout as a short JSON document, the same for equal
    ones.

    Raises UsageError for anything else.

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
    """The layout, plan, job or engine's layout of a document: the very layout or plan, or an equal
    one of the others.

    Raises:
        ReshardError: any other text: NotationError, or what building such a value raises.
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

# Kinds of documents with modules of their own, which have `write_document` and `read_document`.
_MODULES = {"engine-layout": "reshard.recipes.engine_layouts.document"}
