"""A trace as a JSON document for other programs, with the numbers of every rank.

Sizes are in bytes, times in seconds, lists by rank in the order of `ranks`. Times are null without
a topology, and those of computing where it knows of no devices.
"""

from __future__ import annotations

import json
from typing import Any

from reshard.mesh import DeviceMesh
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.tracing.estimates import InsertedReshard, TracedOperation, TraceRecord
from reshard.spmd.tracing.table import reason_of


def trace_document(trace: TraceRecord) -> str:
    """Return a trace as a JSON document.

    >>> import json
    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, trace
    >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
    >>> document = json.loads(trace_document(trace(lambda x: x @ x, x)))
    >>> document["operations"][0]["before"][0]["steps"], document["moved_bytes"]
    (['all-gather(x)'], 64)
    """
    # Most programs have a single mesh.
    axes = _write_mesh(trace.mesh)["axes"] if len(trace.meshes) == 1 and trace.mesh else {}
    inputs = zip(trace.graph.inputs, trace.names, trace.inputs, strict=True)
    is_timed = trace.topology is not None
    # The names and units here are read by other programs: they are part of the format.
    document = {
        "strategy": trace.strategy,
        "mesh": axes,
        "meshes": [_write_mesh(mesh) for mesh in trace.meshes],
        "ranks": list(trace.ranks),
        "inputs": [
            {"value": number, "name": name, **_write_array(kind)} for number, name, kind in inputs
        ],
        "operations": [_write_operation(traced, is_timed) for traced in trace.operations],
        "outputs": list(trace.graph.outputs),
        "moved_bytes": trace.moved_bytes,
        "peak_bytes": list(trace.peak_bytes.values()),
        "compute_s": None if trace.compute_s is None else list(trace.compute_s.values()),
        "inserted_s": trace.inserted_s,
        "seconds_s": trace.seconds_s,
    }
    return json.dumps(document, indent=1)


def _write_mesh(mesh: DeviceMesh) -> dict[str, Any]:
    axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return {"axes": axes, "ranks": list(mesh.devices)}


def _write_array(kind: ArrayType | None) -> dict[str, Any]:
    """Return the document of an array; empty for a number."""
    if kind is None:
        return {}
    sharding = None if kind.spec is None else str(kind.spec)
    return {"dtype": kind.dtype.name, "shape": list(kind.shape), "sharding": sharding}


def _write_operation(traced: TracedOperation, is_timed: bool) -> dict[str, Any]:
    results = zip(traced.operation.results, traced.results, strict=True)
    return {
        "operator": traced.operation.operator,
        "attributes": {
            name: _as_plain(value) for name, value in traced.operation.text_attributes.items()
        },
        "operands": list(traced.operation.operands),
        "runs_with": [None if spec is None else str(spec) for spec in traced.runs_with],
        "results": [{"value": number, **_write_array(kind)} for number, kind in results],
        "before": [_write_reshard(traced, reshard) for reshard in traced.before],
        "reused": [{"value": x.value, "target": str(x.target)} for x in traced.reused],
        "after": [_write_reshard(traced, reshard) for reshard in traced.after],
        "live_bytes": list(traced.live_bytes),
        # An empty list means that no device is known, which the format writes as null.
        "compute_s": list(traced.compute_s) or None,
        "inserted_s": traced.inserted_s if is_timed else None,
        "seconds_s": traced.seconds_s if is_timed else None,
    }


def _as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _write_reshard(traced: TracedOperation, reshard: InsertedReshard) -> dict[str, Any]:
    return {
        "value": reshard.value,
        "source": str(reshard.program.source),
        "target": str(reshard.target),
        "steps": [str(step) for step in reshard.program.steps],
        "reason": reason_of(traced, reshard),
        "moved_bytes": reshard.moved_bytes,
        "seconds_s": None if reshard.estimate is None else reshard.seconds_s,
    }
