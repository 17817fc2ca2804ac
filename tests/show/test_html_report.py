"""Reports are well-formed, need nothing from elsewhere, and what they draw can be read.

`RESHARD_UPDATE_GOLDEN=1 pytest tests/show` writes the golden page anew; look at it in a browser.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.plans.traffic import Traffic
from reshard.show.html_report import DrawnChange, Report, movement_figures
from reshard.text import bytes_text, count_text
from show.page_parts import local_name, outside, overlapping, parsed, svgs
from strategies import movements

GOLDEN = Path(__file__).parents[1] / "golden" / "reports" / "transposed_mesh.html"
EVIL = "</title><script>alert(1)</script>&\"'\x00\x1b[2J\u202e\udc80"


def traffic_of(plan: reshard.Plan) -> Traffic:
    return Traffic.of_transfers(plan.transfers, max(plan.source.slots, plan.target.slots))


def report_of(plan: reshard.Plan, ranks_per_host: int | None = None, title: str = "t") -> Report:
    traffic = traffic_of(plan)
    text = partial(count_text, noun="element")
    return Report(
        title=title,
        figures=movement_figures(
            traffic, plan.lower_bound_elements, len(plan.transfers.moving), text
        ),
        changes=[DrawnChange("", "before", title, plan, plan.transfers)],
        traffic=traffic,
        amount_text=text,
        short_text=count_text,
        ranks_per_host=ranks_per_host,
    )


def planned(source: str, target: str, shape: tuple[int, ...], **axes: int) -> reshard.Plan:
    mesh = reshard.DeviceMesh.of(**axes)
    before, after = (reshard.spec(mesh, text).layout(shape) for text in (source, target))
    return reshard.plan(before, after)


PLANS = {
    "two ranks, one dimension": planned("tp", "-", (7,), tp=2),
    "a transposed mesh": planned("x, y", "y, x", (6, 6), x=2, y=3),
    "eight ranks, three dimensions": planned(
        "tp@stride2, dp, -", "-, tp, dp", (12, 8, 6), tp=4, dp=2
    ),
    "64 ranks": planned("dp, tp", "tp, dp", (4096, 1024), dp=8, tp=8),
    "512 rows to columns": planned("dp tp, -", "-, dp tp", (4096, 4096), dp=32, tp=16),
    "512 in a line": planned("dp tp", "tp", (30522,), dp=32, tp=16),
    "512 in a grid": planned("dp, tp", "tp, -", (30522, 384), dp=16, tp=32),
    "halos and partial sums": planned("tp@halo[1,1], -", "-, tp | sum(dp)", (30, 8), tp=4, dp=2),
    "pads": planned("tp@pad, -", "-, tp@pad4", (10, 7), tp=4),
    "uneven": planned("tp@sizes[1,0,90,9]", "tp@balanced", (100,), tp=4),
    "nothing moves": planned("tp, -", "tp, -", (8, 4), tp=2),
    "a scalar": planned("", "", (), dp=2),
    "no elements": planned("tp, -", "-, tp", (0, 4), tp=2),
    "flat ranges": reshard.plan(
        Layout.flat_ranges((4, 5), {0: (0, 7), 1: (7, 9), 2: (9, 20)}),
        Layout.replicated((4, 5), 3),
    ),
    "far ranks": reshard.plan(
        Layout.whole((4, 4), [100_000], 100_001), Layout.whole((4, 4), [5], 6)
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_well_formed_and_readable(name: str) -> None:
    page = report_of(PLANS[name], ranks_per_host=4).html()
    assert len(page) < 1_500_000
    parser = parsed(page)
    assert page.startswith("<!DOCTYPE html>")
    # Nothing is fetched and nothing runs.
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.tags}
    assert not any(a.startswith("on") or a in ("src", "href") for _, at in parser.tags for a in at)
    pictures = svgs(page)
    assert len(pictures) >= 2
    identifiers = re.findall(r'\bid="([^"]*)"', page)
    assert len(set(identifiers)) == len(identifiers)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(identifiers)
    for svg in pictures:
        assert svg.get("role") == "img"
        assert local_name(svg[0]) == "title" and svg[0].text
        assert overlapping(svg) == []
        assert outside(svg) == []
    # The same picture in text stands in the page for those who cannot see the others.
    assert "before" in "".join(parser.texts)


def test_the_golden_page() -> None:
    page = report_of(PLANS["a transposed mesh"], ranks_per_host=3, title="x, y to y, x").html()
    if os.environ.get("RESHARD_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(page, encoding="utf-8")
    assert page == GOLDEN.read_text(encoding="utf-8")


def test_names_cannot_break_a_page() -> None:
    plan = PLANS["a transposed mesh"]
    harmless = report_of(plan)
    evil = Report(
        title=EVIL,
        figures=harmless.figures,
        changes=[DrawnChange(EVIL, EVIL, EVIL, plan, plan.transfers)],
        traffic=harmless.traffic,
        amount_text=lambda amount: f"{amount}{EVIL}",
        short_text=lambda amount: EVIL,
        ranks_per_host=3,
        remarks=[EVIL],
    ).html()
    parser = parsed(evil)
    assert "script" not in {tag for tag, _ in parser.tags}
    assert "</title><script>alert(1)</script>&\"'\\x00\\x1b[2J\\u202e\\udc80" in parser.texts
    evil.encode("utf-8")
    svgs(evil)


@given(movements(), st.integers(1, 9))
def test_any_movement_has_a_page(
    case: tuple[tuple[Layout, object], tuple[Layout, object]], ranks_per_host: int
) -> None:
    (source, _), (target, _) = case
    page = report_of(reshard.plan(source, target), ranks_per_host).html()
    parsed(page)
    for svg in svgs(page):
        assert overlapping(svg) == []
        assert outside(svg) == []


def test_figures_say_who_is_busiest() -> None:
    plan = PLANS["a transposed mesh"]
    figures = movement_figures(traffic_of(plan).times(4), 104, 12, bytes_text)
    assert [(f.name, f.value, f.detail) for f in figures] == [
        ("moves", "104 B", ""),
        ("least possible", "104 B", ""),
        ("transfers", "12", ""),
        ("busiest sender", "24 B", "ranks 2,3"),
        ("busiest receiver", "24 B", "ranks 2,3"),
    ]


def test_an_unusable_number_of_ranks_is_named() -> None:
    with pytest.raises(UsageError, match="0 ranks per host"):
        report_of(PLANS["a transposed mesh"], ranks_per_host=0).html()
