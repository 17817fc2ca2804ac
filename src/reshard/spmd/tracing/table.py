"""Trace tables: a line for each operation of a traced function, and a summary.

>>> from reshard import DeviceMesh, spec
>>> from reshard.spmd import abstract, trace
>>> mesh = DeviceMesh.of(x=4)
>>> x, w = abstract((8, 8), "float32", spec(mesh, "-, x")), abstract((8, 8))
>>> print(trace(lambda x, w: (x @ w).reduced(), x, w))
value  operation          array          sharding       inserted                 moves     live
-----  -----------------  -------------  -------------  ---------------------  -------  -------
%0     x                  float32[8, 8]  -, x
%1     w                  float32[8, 8]
%2     matmul(%0, %1)     float32[8, 8]  -, - | sum(x)  %1 slice(x) to `x, -`        -    640 B
%3     with_sharding(%2)  float32[8, 8]  -, -           then all-reduce(x)     1.54 kB  1.60 kB
returns %3
2 operations on 4 ranks (x=4), eager; inserted: 1 all-reduce, 1 slice
1.54 kB move between ranks; each rank holds at most 1.60 kB

A line of reasons gives for each reshard the operator that needs it, and why it needs another
sharding:

    %2 all-gather(tp) to `-, -`: sort needs all of [i]
    %5 all-reduce(tp) to `dp, -`: contributions to %5 alone do not go through exp

An operator's rule defines which factors of its dimensions may be sharded (`reshard.spmd.rules`); an
axis shards a single factor at a time, and a factor is sharded alike in all operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reshard.mesh import Axis, DeviceMesh
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import WITH_SHARDING, Operation
from reshard.spmd.tracing.estimates import InsertedReshard, TracedOperation, TraceRecord
from reshard.text import bytes_text, count_text, duration_text, ranks_text, table

HEADERS = ("value", "operation", "array", "sharding", "inserted", "moves", "live")


def trace_table(trace: TraceRecord) -> str:
    """Return the lines of the table and its summary, without a last line break."""
    headers = [*HEADERS, *time_headers(trace)]
    rows = [row for _, *row in table_rows(trace)]
    alignment = "lllll" + "r" * (len(headers) - 5)
    return "\n".join([table(rows, headers, alignment), returned_text(trace), *summary(trace)])


def table_rows(trace: TraceRecord) -> list[list[str]]:
    """Return a row for each input and result, with the number of its operation before the columns.

    The first result of an operation has the columns that describe the operation.
    """
    numbers, headers = number_texts(trace), time_headers(trace)
    blank = [""] * (len(HEADERS) - 4 + len(headers))
    rows = [
        ["", f"%{number}", name, str(kind), sharding_text(kind), *blank]
        for number, name, kind in zip(trace.graph.inputs, trace.names, trace.inputs, strict=True)
        # Numbers stand in the operations that read them.
        if kind is not None
    ]
    for place, traced in enumerate(trace.operations, 1):
        words = str(place), call_text(traced.operation, numbers)
        moves = bytes_text(traced.moved_bytes) if traced.moved_bytes else "-"
        live = bytes_text(max(traced.live_bytes))
        times = {
            "compute": traced.busiest_s,
            "collectives": traced.inserted_s,
            "time": traced.seconds_s,
        }
        rest = [inserted_text(traced), moves, live]
        rest += [duration_text(times[name]) if times[name] else "-" for name in headers]
        for number, kind in zip(traced.operation.results, traced.results, strict=True):
            rows.append([words[0], f"%{number}", words[1], str(kind), sharding_text(kind), *rest])
            # Only the first result shows the operation's columns, so that sums over a column count
            # it once.
            words, rest = ("", ""), blank
    return rows


def returned_text(trace: TraceRecord) -> str:
    """Return the values that the function returns, as a sentence."""
    returned = ", ".join(f"%{number}" for number in trace.graph.outputs)
    return f"returns {returned or 'nothing'}"


def time_headers(trace: TraceRecord) -> tuple[str, ...]:
    """Return the columns of times; empty without a topology."""
    if trace.topology is None:
        return ()
    return ("compute", "collectives", "time") if trace.counts_compute else ("collectives",)


def number_texts(trace: TraceRecord) -> dict[int, str]:
    """Return the numbers that a function brings along, by their values."""
    inputs = zip(trace.graph.inputs, trace.names, trace.inputs, strict=True)
    return {number: name for number, name, kind in inputs if kind is None}


def sharding_text(kind: ArrayType | None) -> str:
    """Return the sharding of an array as text; empty if it is not sharded."""
    return "" if kind is None or kind.spec is None else str(kind.spec)


def call_text(operation: Operation, numbers: Mapping[int, str]) -> str:
    """Return an operator, its operands and its attributes. Numbers stand for themselves.

    >>> from reshard.spmd.graph import Graph
    >>> text = '''%0: float32[4]
    ... %1: float32[] = sum(%0; axis=0) ([i]) -> ([]) {i=4} reduction={i}
    ... return %1'''
    >>> call_text(Graph.parse(text).operations[0], {})
    'sum(%0, axis=0)'
    """
    words = [numbers.get(number, f"%{number}") for number in operation.operands]
    words += [
        f"{name}={value if isinstance(value, str) else repr(value)}"
        for name, value in operation.text_attributes.items()
        # False is the default of flags; the column of shardings has the target of `with_sharding`.
        if value is not False and operation.operator != WITH_SHARDING
    ]
    return f"{operation.operator}({', '.join(words)})"


def inserted_text(traced: TracedOperation) -> str:
    """Return the collectives around an operation, and which values they reshard."""
    words = [str(reshard) for reshard in traced.before]
    words += [f"then {' '.join(map(str, reshard.program.steps))}" for reshard in traced.after]
    return "; ".join(words) or "-"


def collectives(trace: TraceRecord) -> Counter[str]:
    """Return the number of steps inserted, by kind."""
    return Counter(
        step.name
        for traced in trace.operations
        for reshard in traced.reshards
        for step in reshard.program.steps
    )


def mesh_text(mesh: DeviceMesh) -> str:
    """Return the axes of a mesh and their sizes.

    >>> from reshard import DeviceMesh
    >>> mesh_text(DeviceMesh.of(dp=2, tp=4))
    'dp=2, tp=4'
    """
    return ", ".join(f"{a}={size}" for a, size in zip(mesh.axis_names, mesh.shape, strict=True))


def meshes_text(meshes: Sequence[DeviceMesh]) -> str:
    """Return the axes of meshes, and where there are several their ranks.

    >>> from reshard import DeviceMesh
    >>> meshes_text([DeviceMesh.of(x=2), DeviceMesh.of(y=3, devices=(2, 3, 4))])
    'x=2 over ranks 0,1; y=3 over ranks 2-4'
    """
    if len(meshes) == 1:
        return mesh_text(meshes[0])
    return "; ".join(
        f"{mesh_text(mesh)} over {ranks_text(sorted(mesh.devices))}" for mesh in meshes
    )


def summary(trace: TraceRecord) -> list[str]:
    """Return the summary of a trace, a sentence a line."""
    counted = collectives(trace)
    names = ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))
    operations = count_text(len(trace.operations), "operation")
    ranks = count_text(len(trace.ranks), "rank")
    if trace.meshes:
        ranks += f" ({meshes_text(trace.meshes)})"
    moved = bytes_text(trace.moved_bytes)
    peak = max(trace.peak_bytes.values())
    fullest = [rank for rank, size in trace.peak_bytes.items() if size == peak]
    # Ranks are named only where some hold less.
    who = f"{ranks_text(sorted(fullest), 24)} hold{'s' if len(fullest) == 1 else ''}"
    if len(fullest) == len(trace.ranks):
        who = "each rank holds"
    lines = [
        f"{operations} on {ranks}, {trace.strategy}; inserted: {names or 'nothing'}",
        f"{moved} move between ranks; {who} at most {bytes_text(peak)}",
    ]
    return lines + time_summary(trace)


def time_summary(trace: TraceRecord) -> list[str]:
    """Return how long it takes, a sentence; none without a topology."""
    if trace.seconds_s is None or trace.inserted_s is None:
        return []
    inserted = duration_text(trace.inserted_s)
    if trace.compute_s is None:
        return [f"collectives take {inserted}; the topology does not say how fast devices compute"]
    least, most = min(trace.compute_s.values()), max(trace.compute_s.values())
    each = duration_text(most)
    if duration_text(least) != each:
        each = f"{duration_text(least)} to {each}"
    return [
        f"estimated time {duration_text(trace.seconds_s)}: each rank computes {each}, "
        f"collectives take {inserted}"
    ]


def reason_of(traced: TracedOperation, reshard: InsertedReshard) -> str:
    """Explain why a value is resharded before or after an operation, as half a sentence.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, flip, trace
    >>> rows = abstract((4, 8), "float32", spec(DeviceMesh.of(x=2), "x, -"))
    >>> (only,) = trace(lambda x: flip(x, axis=0), rows).operations
    >>> [reason_of(only, reshard) for reshard in only.reshards]
    ['flip needs all of [i]']
    """
    operation = traced.operation
    if any(reshard is after for after in traced.after):
        if operation.operator == WITH_SHARDING:
            return "the function asks for it"
        asking = _explain_result(traced, reshard)
        return asking or f"the placement wants what {operation.operator} makes so"
    place = _find_place(traced, reshard)
    # The operator runs with another sharding of the value: a placement asked for this reshard.
    if place is None:
        return f"the placement has {operation.operator} read it so"
    explained = [*_explain_contributions(traced, place), *_explain_cuts(traced, place)]
    reasons = dict.fromkeys(explained or _explain_gains(traced, place))
    return (
        "; ".join(reasons) or f"ranks need other elements for {operation.operator} than they have"
    )


def _explain_result(traced: TracedOperation, reshard: InsertedReshard) -> str:
    """Return the operand that a result is resharded like, as text, or an empty string."""
    rule = traced.operation.rule
    before = reshard.source.spec
    for dim, factors in enumerate(rule.results[traced.operation.results.index(reshard.value)]):
        had = () if before is None else before.dim_specs[dim].axes
        gained = set(reshard.target.dim_specs[dim].axes).difference(had)
        for number, kind, mapping in zip(
            traced.operation.operands, traced.operands, rule.operands, strict=True
        ):
            if kind is None or kind.spec is None or factors not in mapping:
                continue
            if gained.intersection(kind.spec.dim_specs[mapping.index(factors)].axes):
                return f"{_write_factors(traced, factors)} is cut as in %{number}"
    return ""


def _find_place(traced: TracedOperation, reshard: InsertedReshard) -> int | None:
    """Return the place of the operand that the operator itself needs resharded so."""
    for place, (number, spec) in enumerate(
        zip(traced.operation.operands, traced.runs_with, strict=True)
    ):
        if number == reshard.value and spec is reshard.target:
            return place
    return None


def _explain_contributions(traced: TracedOperation, place: int) -> Iterator[str]:
    kind, spec = traced.operands[place], traced.runs_with[place]
    if kind is None or kind.spec is None or spec is None:
        return
    if any(axis not in spec.partial_axes for axis in kind.spec.partial_axes):
        number, name = traced.operation.operands[place], traced.operation.operator
        yield f"contributions to %{number} alone do not go through {name}"


def _explain_cuts(traced: TracedOperation, place: int) -> Iterator[str]:
    """Explain why axes that shard an operand do not shard it while the operator runs."""
    kind, spec, operation = traced.operands[place], traced.runs_with[place], traced.operation
    if kind is None or kind.spec is None or spec is None:
        return
    rule = operation.rule
    special = {*rule.need_replication, *rule.permutation, *rule.blocked}
    for dim, factors in enumerate(rule.operands[place]):
        gets = spec.dim_specs[dim].axes
        lost = [axis for axis in kind.spec.dim_specs[dim].axes if axis not in gets]
        said = _write_factors(traced, factors)
        if lost and special.intersection(factors):
            yield f"{operation.operator} needs all of {said}"
        elif lost:
            yield _explain_lost(traced, place, factors, lost, said)


def _explain_gains(traced: TracedOperation, place: int) -> Iterator[str]:
    """Explain a sharding that an operand gains: it is that of another operand."""
    kind, spec = traced.operands[place], traced.runs_with[place]
    for dim, factors in enumerate(traced.operation.rule.operands[place]):
        had = () if kind is None or kind.spec is None else kind.spec.dim_specs[dim].axes
        other = _find_operand(traced, place, factors)
        if spec is not None and set(spec.dim_specs[dim].axes) - set(had) and other is not None:
            number = traced.operation.operands[other]
            yield f"{_write_factors(traced, factors)} is cut as in %{number}"


def _write_factors(traced: TracedOperation, factors: Sequence[int]) -> str:
    return f"[{''.join(traced.operation.rule.names[factor] for factor in factors)}]"


def _explain_lost(
    traced: TracedOperation,
    place: int,
    factors: Sequence[int],
    lost: Sequence[Axis],
    said: str,
) -> str:
    operation = traced.operation
    axes = " ".join(map(str, lost))
    # 1. The factor is cut otherwise, as another operand has it.
    other = _find_operand(traced, place, factors)
    if other is not None:
        return f"{said} is cut as in %{operation.operands[other]}, not by {axes}"
    # 2. The axis cuts another factor.
    taken = _find_taken(traced, lost)
    if taken is not None:
        number, dim = taken
        letters = _write_factors(traced, operation.rule.operands[number][dim])
        return f"{axes} cuts {letters} of %{operation.operands[number]}"
    # 3. Parts of it alone do not make parts of the results.
    if len(factors) > 1:
        return f"parts of {said} by {axes} are no parts of what {operation.operator} makes"
    return f"{operation.operator} does not find its places in parts of {said}"


def _find_operand(traced: TracedOperation, place: int, factors: Sequence[int]) -> int | None:
    """Return another operand whose sharding of the factors the operator uses."""
    for number, mapping in enumerate(traced.operation.rule.operands):
        kind, spec = traced.operands[number], traced.runs_with[number]
        if number == place or kind is None or kind.spec is None or spec is None:
            continue
        for dim, dim_factors in enumerate(mapping):
            cut = spec.dim_specs[dim]
            if set(dim_factors) & set(factors) and cut.axes and kind.spec.dim_specs[dim] is cut:
                return number
    return None


def _find_taken(traced: TracedOperation, axes: Sequence[Axis]) -> tuple[int, int] | None:
    """Return an operand and its dimension that any of the axes shards."""
    for number, spec in enumerate(traced.runs_with):
        if spec is None:
            continue
        for dim, cut in enumerate(spec.dim_specs):
            if any(axis in cut.axes for axis in axes):
                return number, dim
    return None


def reason_lines(operations: Sequence[TracedOperation]) -> list[str]:
    """Return a line for each reshard that moves something: the operation, what moves, and why.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, trace
    >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
    >>> reason_lines(trace(lambda x: x @ x, x).operations)
    ['%1 = matmul: %0 all-gather(x) to `-, -`: x cuts [j] of %0']
    """
    return [
        f"%{traced.operation.results[0]} = {traced.operation.operator}: {reshard}: "
        f"{reason_of(traced, reshard)}"
        for traced in operations
        for reshard in traced.reshards
        if reshard.moved_elements
    ]
