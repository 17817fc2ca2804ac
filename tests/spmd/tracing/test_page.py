"""Pages of traces are well-formed, need nothing from elsewhere, and say what the trace says."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.show.charts import memory_chart
from reshard.spmd.tracing.page import MAX_DRAWN
from reshard.text import bytes_text
from show.page_parts import local_name, outside, overlapping, parsed, svgs
from spmd.traced_functions import FUNCTIONS, MESH, Traced

EVIL = "</title><script>alert(1)</script>&\"'\x00"


def check_page(page: str) -> None:
    parser = parsed(page)
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.tags}
    identifiers = re.findall(r'\bid="([^"]*)"', page)
    assert len(set(identifiers)) == len(identifiers)
    for svg in svgs(page):
        assert svg.get("role") == "img"
        assert local_name(svg[0]) == "title" and svg[0].text
        assert overlapping(svg) == []
        assert outside(svg) == []


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_a_page_is_well_formed_and_says_what_the_trace_says(case: Traced) -> None:
    traced = sp.trace(case.function, *case.types())
    page = traced.html()
    check_page(page)
    said = "".join(parsed(page).texts)
    assert f"moves{bytes_text(traced.moved_bytes)}" in said
    assert f"peak memory{bytes_text(max(traced.peak_bytes.values()))}" in said
    for one in traced.operations:
        assert one.operation.operator in said
        for reshard in one.reshards:
            assert str(reshard.target) in said


def test_many_kinds_of_reshards_are_drawn_in_part() -> None:
    def function(x: sp.ShardedArray) -> sp.ShardedArray:
        for text in [f"{a}, {b}, {c}" for a in "x-" for b in "y-" for c in ("-", "x", "y", "x y")]:
            names = [name for word in text.split(", ") for name in word.split() if name != "-"]
            if len(set(names)) == len(names):
                x = x.shard(spec(MESH, text)).shard(spec(MESH, "-, -, -"))
        return x

    traced = sp.trace(
        function,
        sp.abstract((4, 6, 6), "float32", spec(MESH, "x, -, -")),
        topology=load_preset("h100-8").topology(),
    )
    found = [(r.source, r.target) for one in traced.operations for r in one.reshards]
    kinds = list(dict.fromkeys(found))
    page = traced.html()
    check_page(page)
    assert len(kinds) > MAX_DRAWN
    assert f"and {len(kinds) - MAX_DRAWN} other kind" in page
    # The one that moves most, however often, comes first.
    total: Counter[int] = Counter()
    for one in traced.operations:
        for reshard in one.reshards:
            total[kinds.index((reshard.source, reshard.target))] += reshard.moved_bytes
    source, target = kinds[max(total, key=lambda kind: (total[kind], -kind))]
    drawn = page[page.index("<h3>") :]
    assert f"<code>{target}</code>" in drawn[: drawn.index("</section>")]
    assert f"<code>{source.spec}</code>" in drawn[: drawn.index("</section>")]


def test_names_cannot_break_a_page() -> None:
    traced = sp.trace(
        lambda weights: weights[EVIL] + 1,
        {EVIL: sp.abstract((2, 2), "float32", spec(DeviceMesh.of(x=2), "x, -"))},
    )
    page = traced.html(EVIL)
    check_page(page)
    assert "alert(1)" in page


@pytest.mark.parametrize("count", [0, 1, 32, 400])
def test_a_chart_of_any_number_of_moments(count: int) -> None:
    moments = [(f"step {n}", n, 2 * n) for n in range(count)]
    (svg,) = svgs(memory_chart(moments, bytes_text))
    assert overlapping(svg) == [] and outside(svg) == []
    bars = [node for node in svg.iter() if local_name(node) == "rect"]
    assert len(bars) == 2 * count
    highest = max((float(bar.get("height", "0")) for bar in bars), default=0.0)
    assert highest == pytest.approx(150.0 if count > 1 else 0.0, abs=0.1)
