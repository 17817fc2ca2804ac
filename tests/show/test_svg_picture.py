"""Whoever looks up a point of a picture in colour finds the ranks that hold it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given

import reshard
from plans.test_traffic import gathered
from reshard.layout import Layout
from reshard.plans.traffic import Traffic
from reshard.show.charts import across_hosts, heat_map, host_flows, host_traffic
from reshard.show.regions import drawn_dimensions, origins
from reshard.show.svg import rank_colours
from reshard.show.svg_picture import svg_picture
from show.page_parts import local_name
from strategies import specs_with_shapes

NUMBER = r"-?\d+(?:\.\d+)?"
PIECE = re.compile(rf"M({NUMBER}) ({NUMBER})h({NUMBER})v({NUMBER})h{NUMBER}z")


class Picture:
    """A picture read back from its `svg`: boxes with their titles and colours."""

    def __init__(self, layout: Layout, plan: reshard.Plan | None = None) -> None:
        self.layout = layout
        self.colours = rank_colours(layout.holders)
        dimensions = drawn_dimensions(layout)
        svg, self.grid, _ = svg_picture(
            layout,
            self.colours,
            "one",
            dimensions=dimensions,
            origins=origins(plan.transfers) if plan else None,
        )
        self.svg = ElementTree.fromstring(svg)
        self.boxes = [
            (node, [tuple(map(float, found)) for found in PIECE.findall(node.get("d", ""))])
            for node in self.svg.iter()
            if local_name(node) == "path" and node.get("class") in ("box", "empty")
        ]
        pieces = [piece for _, found in self.boxes for piece in found]
        self.left, self.top = min(p[0] for p in pieces), min(p[1] for p in pieces)
        self.right = max(p[0] + p[2] for p in pieces)
        self.bottom = max(p[1] + p[3] for p in pieces)

    def stripes(self, node: ElementTree.Element) -> set[str | None]:
        """The colours of a box."""
        fill = node.get("fill")
        if fill is None or not fill.startswith("url"):
            return {fill}
        (gradient,) = (g for g in self.svg.iter() if g.get("id") == fill[5:-1])
        return {stop.get("stop-color") for stop in gradient}

    def at(self, x: float, y: float) -> ElementTree.Element:
        found = [
            node
            for node, pieces in self.boxes
            if any(px < x < px + w and py < y < py + h for px, py, w, h in pieces)
        ]
        assert len(found) == 1
        return found[0]

    def middles(self) -> dict[tuple[int, int], tuple[float, float]]:
        """A point inside each place of the grid, from the edges of all pieces."""
        pieces = [piece for _, found in self.boxes for piece in found]
        xs = distinct(x for px, _, w, _ in pieces for x in (px, px + w))
        ys = distinct(y for _, py, _, h in pieces for y in (py, py + h))
        return {
            (r, c): ((x + x1) / 2, (y + y1) / 2)
            for r, (y, y1) in enumerate(itertools.pairwise(ys))
            for c, (x, x1) in enumerate(itertools.pairwise(xs))
        }


def distinct(lengths: Iterable[float]) -> list[float]:
    """The lengths in order, those that differ by rounding only once."""
    kept: list[float] = []
    for length in sorted(lengths):
        if not kept or length - kept[-1] > 0.5:
            kept.append(length)
    return kept


@given(specs_with_shapes())
def test_every_place_has_the_colours_of_its_holders(
    case: tuple[reshard.ShardingSpec, tuple[int, ...]],
) -> None:
    spec, shape = case
    picture = Picture(spec.layout(shape))
    middles, grid = picture.middles(), picture.grid
    assert len(middles) == len(grid.rows) * len(grid.columns)
    for (r, c), (x, y) in middles.items():
        node, held = picture.at(x, y), grid.holdings[r][c]
        title = node[0].text or ""
        if not held:
            assert node.get("class") == "empty" and title.startswith("nobody holds")
            continue
        owners = {h.slot for h in held if not h.is_halo} or {h.slot for h in held}
        assert picture.stripes(node) == {picture.colours[rank] for rank in owners}
        assert title.startswith("rank")


def test_copies_of_neighbours_have_no_colour_of_their_own() -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    picture = Picture(reshard.spec(mesh, "tp@halo[1,1]").layout((8,)))
    titles = [node[0].text for node, _ in picture.boxes]
    assert titles[1:3] == ["ranks 0 (1) hold [3:4]", "ranks 1 (0) hold [4:5]"]
    first, second = (picture.colours[rank] for rank in (0, 1))
    colours = [picture.stripes(node) for node, _ in picture.boxes]
    assert colours == [{first}, {first}, {second}, {second}]


def test_sizes_are_to_scale() -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    picture = Picture(reshard.spec(mesh, "tp@sizes[10,30], -").layout((40, 40)))
    (_, first), (_, second) = picture.boxes
    assert second[0][3] / first[0][3] == pytest.approx(3, rel=0.05)
    # A tensor twice as high as wide looks so, within what a page has room for.
    flat = Picture(reshard.spec(mesh, "tp, -").layout((20, 40)))
    assert (flat.bottom - flat.top) / (flat.right - flat.left) == pytest.approx(0.5, rel=0.01)
    high = Picture(reshard.spec(mesh, "tp, -").layout((40_000, 4)))
    assert high.bottom - high.top <= 400.1


def test_thin_parts_can_still_be_seen() -> None:
    mesh = reshard.DeviceMesh.of(tp=3)
    picture = Picture(reshard.spec(mesh, "tp@sizes[1,9998,1]").layout((10_000,)))
    assert min(pieces[0][2] for _, pieces in picture.boxes) >= 4


def test_labels_say_who_holds_and_from_where() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=3)
    source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    picture = Picture(target, reshard.plan(source, target))
    texts = [n.text for n in picture.svg.iter() if (n.get("class") or "").startswith("label")]
    first, rest = ["0", "← 1", "3", "← 1,2", "1", "← 0,3,4"], ["4", "← 1,2,5", "2", "← 3,4"]
    assert texts == [*first, *rest, "5", "← 4"]
    titles = [node[0].text for node, _ in picture.boxes]
    assert titles[0] == "rank 0 holds [0:2, 0:3], ← 1"


def test_many_ranks_of_a_line_are_labelled_together() -> None:
    mesh = reshard.DeviceMesh.of(tp=512)
    for text, shape in (("tp", (4096,)), ("tp, -", (4096, 64)), ("-, tp", (64, 4096))):
        picture = Picture(reshard.spec(mesh, text).layout(shape))
        assert len(picture.boxes) == 512
        labels = [n.text for n in picture.svg.iter() if n.get("class") == "label"]
        assert len(labels) == 6 and labels[0] == "0-84" and labels[-1] == "427-511"


def test_boxes_too_narrow_for_labels_are_labelled_together() -> None:
    mesh = reshard.DeviceMesh.of(x=8, y=8)
    for text, shape in (("x y, -", (100, 70)), ("-, x y", (70, 100))):
        picture = Picture(reshard.spec(mesh, text).layout(shape))
        labels = [n.text for n in picture.svg.iter() if n.get("class") == "label"]
        assert len(labels) == 6 and labels[0] == "0-7" and labels[-1] == "42-49"


def test_labels_of_many_ranks_name_the_first_and_the_last() -> None:
    mesh = reshard.DeviceMesh.of(ep=8, tp=8)
    svg, _, has_stripes = svg_picture(
        reshard.spec(mesh, "ep, -, tp").layout((64, 1024, 256)),
        rank_colours(range(64)),
        "shared",
        dimensions=(1, 2),
    )
    labels = re.findall(r'class="label">([^<]*)<', svg)
    assert labels[0] == "0/…/56" and labels[-1] == "7/…/63" and has_stripes


def test_stripes_of_shared_boxes_slant_and_fit_into_the_smallest() -> None:
    mesh = reshard.DeviceMesh.of(dp=4, tp=2)
    picture = Picture(reshard.spec(mesh, "-, tp@sizes[1,39]").layout((40, 40)))
    gradients = [node for node in picture.svg.iter() if local_name(node) == "linearGradient"]
    assert len(gradients) == 2 and all(g.get("spreadMethod") == "repeat" for g in gradients)
    for gradient, (_, (piece,)) in zip(gradients, picture.boxes, strict=True):
        across, down = float(gradient.get("x2", 0)), float(gradient.get("y2", 0))
        assert 0 < across == down <= (piece[2] + piece[3]) / 2 + 0.1


def test_neighbours_leave_no_gap() -> None:
    mesh = reshard.DeviceMesh.of(dp=128)
    for text, side in (("-, dp", 0), ("dp, -", 1)):
        picture = Picture(reshard.spec(mesh, text).layout((512, 512)))
        ends = [(p[side], p[side] + p[side + 2]) for _, pieces in picture.boxes for p in pieces]
        for (_, end), (start, _) in itertools.pairwise(sorted(ends)):
            assert end == pytest.approx(start, abs=1e-6)


def test_omitted_intervals_of_a_line_are_a_gap_with_their_number() -> None:
    mesh = reshard.DeviceMesh.of(tp=1024)
    for text, shape, side in (("tp, -", (4096, 64), 3), ("-, tp", (64, 4096), 2)):
        picture = Picture(reshard.spec(mesh, text).layout(shape))
        (gap,) = (n for n in picture.svg.iter() if n.get("class") == "left-out")
        (piece,) = PIECE.findall(gap.get("d", ""))
        labels = [n.text for n in picture.svg.iter() if n.get("class") == "label"]
        assert labels[0] == "… 512 more" and float(piece[side]) > 20
        assert labels[1].startswith("0-") and labels[-1].endswith("-1023")


def test_more_parts_than_can_be_drawn_are_counted() -> None:
    mesh = reshard.DeviceMesh.of(dp=128, tp=128)
    picture = Picture(reshard.spec(mesh, "dp, tp").layout((1280, 1280)))
    gaps = [n for n in picture.svg.iter() if n.get("class") == "left-out"]
    assert gaps and all("more" in (gap[0].text or "") for gap in gaps)
    assert len(picture.boxes) <= 4096


def heat_squares(svg: str) -> list[tuple[str, float]]:
    root = ElementTree.fromstring(svg)
    return [
        (node[0].text or "", float(node.get("opacity", "nan")))
        for node in root.iter()
        if local_name(node) == "rect" and len(node) == 1
    ]


def test_a_heat_map_has_a_square_for_each_pair() -> None:
    squares = heat_squares(heat_map(gathered([(0, 1, 5), (6, 2, 10), (0, 1, 5)]), "{} B".format))
    assert squares == [("rank 0 to rank 1: 10 B", 1.0), ("rank 6 to rank 2: 10 B", 1.0)]
    faint = heat_squares(heat_map(gathered([(0, 1, 1), (1, 0, 1000)]), "{} B".format))
    assert 0.1 < faint[0][1] < 0.2


def test_a_heat_map_of_many_ranks_takes_them_together() -> None:
    rows = reshard.DeviceMesh.of(tp=200)
    before, after = (reshard.spec(rows, text).layout((200, 200)) for text in ("tp, -", "-, tp"))
    traffic = Traffic.of_transfers(reshard.plan(before, after).transfers, 200)
    squares = heat_squares(heat_map(traffic, str))
    assert len(squares) == 50 * 50
    # 16 pairs of four and four ranks, but for those of a rank with itself.
    assert ("ranks 0-3 to ranks 4-7: 16") in dict(squares)
    assert ("ranks 0-3 to ranks 0-3: 12") in dict(squares)


def test_hosts_send_the_sum_of_their_ranks() -> None:
    traffic = gathered([(0, 1, 5), (1, 2, 7), (3, 0, 2), (5, 6, 1)])
    hosts = host_traffic(traffic, 2)
    assert across_hosts(hosts) == 7 + 2 + 1
    titles = re.findall(r"<title>([^<]*)</title>", host_flows(hosts, "{} B".format))[1:]
    assert titles == [
        "inside host 0: 5 B",
        "host 0 to host 1: 7 B",
        "host 1 to host 0: 2 B",
        "host 2 to host 3: 1 B",
    ]


def test_bands_are_as_wide_as_their_traffic() -> None:
    hosts = gathered([(0, 1, 10), (1, 0, 30)])
    svg = host_flows(hosts, "{} B".format)
    widths = [float(w) for w in re.findall(rf"v({NUMBER})C", svg)]
    assert widths[1] / widths[0] == pytest.approx(3, rel=0.02)


def test_many_hosts_are_a_heat_map() -> None:
    thirteen = [np.array(column) for column in ([0], [12], [5])]
    svg = host_flows(Traffic.gathered(13, *thirteen), "{} B".format)
    assert "host 0 to host 12: 5 B" in svg and 'class="heat-map"' in svg
