"""Trace pages: a traced function as an HTML page: figures, memory, operations, reshards, ranks.

The page needs no network and no script, as that of `reshard.show.html_report`, whose parts it
has.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from reshard.plans.plan import Plan
from reshard.sharding import ShardingSpec
from reshard.show.charts import memory_chart
from reshard.show.html_report import (
    DrawnChange,
    Figure,
    change_html,
    figures_html,
    page_html,
    rank_legend,
    rank_table_html,
)
from reshard.show.svg import element, escaped, rank_colours
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.tracing.estimates import InsertedReshard, TracedOperation, TraceRecord
from reshard.spmd.tracing.table import (
    HEADERS,
    call_text,
    collectives,
    meshes_text,
    number_texts,
    returned_text,
    summary,
    table_rows,
    time_headers,
)
from reshard.text import bytes_text, count_text, duration_text, ranks_text

# Words stand at the left of their columns, numbers at the right.
STYLE = """main { max-width: 1400px; }
.wide { overflow-x: auto; }
thead .left, .operations td { text-align: left; white-space: nowrap; }
.operations td, .operations th { padding: 4px 8px; }
.operations td.amount { text-align: right; font-size: inherit; }
.operations th:first-child { color: var(--soft); text-align: right; }
"""
# Reshards that are drawn: the page of a large model stays short.
MAX_DRAWN = 12


def trace_page(trace: TraceRecord, title: str = "") -> str:
    """Return a trace as an HTML page.

    Args:
        trace: of a function.
        title: in one line; what the trace is of when empty.
    """
    heading = title or summary(trace)[0]
    return page_html(
        heading,
        [
            element("h1", escaped(heading)),
            figures_html(_draw_figures(trace)),
            element("h2", "Memory"),
            *_draw_memory(trace),
            element("h2", "Operations"),
            _draw_operations(trace),
            *_draw_ranks(trace),
            *_draw_reshards(trace),
            element("h2", "Graph"),
            element(
                "details",
                element("summary", "Its values and rules as text"),
                element("pre", escaped(str(trace.graph))),
            ),
        ],
        STYLE,
    )


def _draw_figures(trace: TraceRecord) -> list[Figure]:
    counted = collectives(trace)
    names = ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))
    peak = max(trace.peak_bytes.values())
    fullest = [rank for rank, size in trace.peak_bytes.items() if size == peak]
    mesh = meshes_text(trace.meshes) if trace.meshes else ""
    figures = [
        Figure("operations", count_text(len(trace.operations))),
        Figure("ranks", count_text(len(trace.ranks)), mesh),
        Figure("shardings", trace.strategy),
        Figure("steps inserted", count_text(counted.total()), names),
        Figure("moves", bytes_text(trace.moved_bytes)),
        Figure("peak memory", bytes_text(peak), ranks_text(fullest, 24)),
    ]
    if trace.seconds_s is not None and trace.inserted_s is not None:
        inserted = duration_text(trace.inserted_s)
        if trace.counts_compute:
            said = f"{inserted} of it collectives"
            figures.append(Figure("estimated time", duration_text(trace.seconds_s), said))
        else:
            said = "collectives only: no device is known"
            figures.append(Figure("estimated time", inserted, said))
    return figures


def _draw_memory(trace: TraceRecord) -> list[str]:
    peaks = list(trace.peak_bytes.values())
    place = int(np.argmax(peaks))
    numbers = number_texts(trace)
    moments = [
        (
            f"{number}. {call_text(traced.operation, numbers)}",
            traced.held_bytes[place],
            traced.live_bytes[place],
        )
        for number, traced in enumerate(trace.operations, 1)
    ]
    said = (
        f"What rank {trace.ranks[place]} holds, which holds most, at each operation: dark what "
        "there is before it, light what it and its reshards add."
    )
    return [
        element("p", escaped(said)),
        element("figure", memory_chart(moments, bytes_text)),
    ]


def _draw_operations(trace: TraceRecord) -> str:
    heads = ["", *HEADERS, *time_headers(trace)]
    # The columns of words are aligned to the left.
    words = range(1, 1 + HEADERS.index("moves"))
    columns = [
        element("th", head, scope="col", class_="left" if place in words else None)
        for place, head in enumerate(heads)
    ]
    listed = element(
        "table",
        element("thead", element("tr", *columns)),
        element("tbody", *map(_draw_row, table_rows(trace))),
        class_="operations",
    )
    return element("div", listed, class_="wide") + element("p", escaped(returned_text(trace)))


def _draw_row(row: list[str]) -> str:
    place, *texts = row
    cells = [
        element("td", escaped(text), class_="amount")
        if column >= HEADERS.index("moves")
        else element("td", element("code", escaped(text)) if text else "")
        for column, text in enumerate(texts)
    ]
    return element("tr", element("th", place, scope="row"), *cells)


def _draw_ranks(trace: TraceRecord) -> list[str]:
    """Draw the data movement and memory of each rank; equal ranks share a row."""
    # Ranks need not begin at 0, nor be contiguous.
    span = max(trace.ranks) + 1
    sent, received = np.zeros(span, dtype=np.int64), np.zeros(span, dtype=np.int64)
    for traced in trace.operations:
        for reshard in traced.reshards:
            width = reshard.source.dtype.itemsize_bytes
            for step in reshard.program.steps:
                # A step's columns end at the highest rank that takes part in it.
                sent[: len(step.sent_elements)] += step.sent_elements * width
                received[: len(step.received_elements)] += step.received_elements * width
    kinds: dict[tuple[float, ...], list[int]] = {}
    for rank in trace.ranks:
        amounts: tuple[float, ...] = (int(sent[rank]), int(received[rank]), trace.peak_bytes[rank])
        if trace.compute_s is not None:
            amounts += (trace.compute_s[rank],)
        kinds.setdefault(amounts, []).append(rank)
    # Busiest first, then by memory.
    ordered = sorted(kinds.items(), key=lambda kind: (-max(kind[0][:2]), -kind[0][2], kind[1]))
    rows = [
        (
            sorted(ranks),
            [*(bytes_text(int(n)) for n in amounts[:3]), *map(duration_text, amounts[3:])],
        )
        for amounts, ranks in ordered
    ]
    heads = ["ranks", "each sends", "each receives", "each holds at most"]
    heads += ["each computes"] * trace.counts_compute
    return [element("h2", "Ranks"), rank_table_html(heads, rows)]


def _draw_reshards(trace: TraceRecord) -> list[str]:
    """Return the reshards that move most, drawn; equal ones once."""
    count: Counter[tuple[ArrayType, ShardingSpec]] = Counter()
    examples: dict[tuple[ArrayType, ShardingSpec], tuple[TracedOperation, InsertedReshard]] = {}
    for traced in trace.operations:
        for reshard in traced.reshards:
            key = (reshard.source, reshard.target)
            count[key] += 1
            examples.setdefault(key, (traced, reshard))
    if not examples:
        return [element("h2", "Inserted"), element("p", "Nothing is resharded.")]
    # By the bytes that equal reshards move together.
    ordered = sorted(examples, key=lambda key: -examples[key][1].moved_bytes * count[key])
    drawn = ordered[:MAX_DRAWN]
    colours = rank_colours(set(trace.ranks))
    sections = []
    for number, key in enumerate(drawn, 1):
        traced, reshard = examples[key]
        program = reshard.program
        # Drawn as a single change of layouts, whatever steps it takes.
        plan = Plan(program.source.layout(program.shape), program.target.layout(program.shape))
        steps = " ".join(map(str, program.steps)) or "nothing"
        times = count_text(count[key], "time")
        heading = (
            f"%{reshard.value} at {traced.operation.operator}: {steps}, {times}, "
            f"{bytes_text(reshard.moved_bytes)} each"
        )
        change = DrawnChange(
            heading, str(program.source), str(program.target), plan, plan.transfers
        )
        sections.append(change_html(change, number, colours))
    rest = len(ordered) - len(drawn)
    if rest:
        sections.append(element("p", f"and {count_text(rest, 'other kind')} that move less"))
    return [element("h2", "Inserted"), rank_legend(colours), *sections]
