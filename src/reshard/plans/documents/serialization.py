"""Layouts, plans and jobs as JSON text, and back: `reshard.to_json` and `reshard.from_json`.

A document says what it is, so there is one function to read them all.
"""

from __future__ import annotations

from collections.abc import Callable

from reshard.errors import NotationError, UsageError
from reshard.layout import Layout
from reshard.plans.documents.document import DocumentReader, DocumentWriter
from reshard.plans.documents.job_document import read_job, write_job
from reshard.plans.job import Job
from reshard.plans.plan import Plan


def to_json(value: Layout | Plan | Job) -> str:
    """A layout, a plan or a job as a short JSON document, the same for equal ones.

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
    raise UsageError(f"{value!r} has no JSON document; expected a Layout, a Plan or a Job")


def from_json(text: str) -> Layout | Plan | Job:
    """The layout, plan or job of a document: the very layout or plan, or an equal job.

    Raises:
        ReshardError: any other text: NotationError, or what building such a value raises.
    """
    reader = DocumentReader(text, _READERS)
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
