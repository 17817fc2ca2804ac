"""Reports of movements as HTML pages: each a file without scripts that needs no network.

A page follows the light or dark mode of the reader's system. Every picture has a text alternative:
the same picture in text is folded below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from reshard._records import Record
from reshard.geometry.transfers import Transfers
from reshard.plans.plan import Plan
from reshard.plans.traffic import Traffic, find_top_ranks
from reshard.show.charts import across_hosts, heat_map, host_flows, host_traffic
from reshard.show.labels import notes
from reshard.show.regions import drawn_dimensions, origins
from reshard.show.svg import element, escaped, rank_colours
from reshard.show.svg_picture import svg_picture
from reshard.show.text_picture import change_picture, movement_text
from reshard.text import count_text, ranks_text, short_rank_text

STYLE = """
:root {
  --page: #fbfbfa; --panel: #ffffff; --ink: #1c1e21; --soft: #5d636b; --line: #d9dce0;
  --heat: #0b4f8a; --on-heat: #ffffff; --heat-back: #f1f3f5; --border: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15171a; --panel: #1d2024; --ink: #e8eaed; --soft: #a2a8b0; --line: #353a41;
    --heat: #7cc0ff; --on-heat: #0c1a28; --heat-back: #24282d; --border: #15171a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 18px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 26px 0 8px; overflow-wrap: anywhere; }
p { margin: 8px 0; max-width: 80ch; }
.note { color: var(--soft); font-size: 13px; margin: 3px 0; overflow-wrap: anywhere; }
code, pre, svg text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
pre { font-size: 12px; line-height: 1.25; overflow-x: auto; padding: 12px; margin: 8px 0;
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr));
  gap: 10px; margin: 0 0 12px; }
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 9px 13px; }
dt { color: var(--soft); font-size: 12.5px; }
dd { margin: 0; font-size: 17px; overflow-wrap: anywhere; }
dd.detail { color: var(--soft); font-size: 13px; }
.legend { display: flex; gap: 12px; align-items: baseline; }
.legend p { color: var(--soft); font-size: 13px; margin: 0; }
.legend ul { display: flex; flex-wrap: wrap; gap: 4px 14px; list-style: none; margin: 0;
  padding: 0; font-size: 13px; }
.legend span { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 5px; vertical-align: -1px; }
section { border-top: 1px solid var(--line); margin-top: 14px; padding-top: 4px; }
.change { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 6px 18px; }
.change figure { flex: 1 1 340px; max-width: 480px; }
.arrow { align-self: center; font-size: 26px; color: var(--soft); }
.beside { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 20px 36px; }
figure { margin: 8px 0; min-width: 0; }
figcaption { margin-bottom: 6px; overflow-wrap: anywhere; }
figcaption b { color: var(--soft); font-weight: 500; margin-right: 6px; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); }
.picture .border { fill: none; stroke: var(--border); stroke-width: 1.5; }
.picture .box { shape-rendering: crispEdges; }
.picture .empty { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
.picture .left-out { fill: var(--heat-back); stroke: var(--soft); stroke-dasharray: 2 4; }
.picture .plate { fill: var(--panel); fill-opacity: .88; }
.label { font-size: 12px; text-anchor: middle; }
svg text.small { font-size: 10px; }
.index { font-size: 10.5px; }
svg text.index { fill: var(--soft); }
.across { text-anchor: middle; }
.down { text-anchor: end; }
.heat { fill: var(--heat); }
.heat-back { fill: var(--heat-back); }
.heat-grid { fill: none; stroke: var(--page); stroke-width: .75; }
.heat-diagonal { fill: none; stroke: var(--line); stroke-width: 1; stroke-dasharray: 3 4; }
.amount { font-size: 9.5px; text-anchor: middle; }
svg text.strong { fill: var(--on-heat); }
.band { fill-opacity: .55; }
.band.inside { fill-opacity: .22; }
.host { font-size: 12px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--line); }
th:first-child, td.rest { text-align: left; }
thead th { color: var(--soft); font-weight: 500; }
tbody th { font-weight: 500; }
details { margin: 6px 0 12px; }
summary { cursor: pointer; color: var(--soft); font-size: 13px; }
@media (max-width: 780px) { .arrow { flex-basis: 100%; text-align: center; line-height: 1; }
  .arrow span { display: inline-block; transform: rotate(90deg); } }
@media print { details { display: none; } }
"""


_MAX_SEPARATE = 16


def rank_legend(colours: Mapping[int, str]) -> str:
    """Return a patch of colour for each rank, or for some if there are very many.

    >>> rank_legend({3: "#0072b2"}).count("<li>")
    1
    """
    ranks = sorted(colours)
    if len(ranks) > _MAX_SEPARATE:
        # Evenly spaced ranks show the range of colours.
        last, steps = len(ranks) - 1, _MAX_SEPARATE - 1
        ranks = [ranks[last * step // steps] for step in range(_MAX_SEPARATE)]
    items = [
        element("li", element("span", "", style=f"background:{colours[rank]}"), f"{rank}")
        for rank in ranks
    ]
    return element("div", element("p", "rank"), element("ul", *items), class_="legend")


MAX_RANKS_LISTED = 32
# Between two pictures; hidden from screen readers, and pointing down on a narrow page.
_ARROW = element("div", element("span", "→"), class_="arrow", aria_hidden="true")


class Figure(NamedTuple):
    """A number with its name and an optional detail."""

    name: str
    value: str
    detail: str = ""


class DrawnChange(Record):
    """A change of layout to draw: its heading, the texts of both shardings, and its transfers."""

    heading: str
    before: str
    after: str
    plan: Plan
    transfers: Transfers


class Report(Record):
    """The contents of a page.

    Attributes:
        title: in a line.
        figures: in the order of the page.
        changes: the layouts to draw.
        traffic: between ranks.
        amount_text: formats an amount of the traffic, with its unit.
        short_text: formats an amount in few letters.
        ranks_per_host: for the flows between hosts; None to omit them.
        remarks: further sentences.
        tables: headings and tables of text, for the end of the page.
    """

    title: str
    figures: Sequence[Figure]
    changes: Sequence[DrawnChange]
    traffic: Traffic
    amount_text: Callable[[int], str]
    short_text: Callable[[int], str]
    ranks_per_host: int | None = None
    remarks: Sequence[str] = field(default=())
    tables: Sequence[tuple[str, str]] = field(default=())

    def html(self) -> str:
        """Return the page.

        Raises:
            UsageError: an invalid number of ranks per host.
        """
        ranks = {
            rank
            for change in self.changes
            for layout in (change.plan.source, change.plan.target)
            for rank in layout.holders
        }
        colours = rank_colours(ranks)
        body = [
            element("h1", escaped(self.title)),
            figures_html(self.figures),
            *(element("p", escaped(remark), class_="note") for remark in self.remarks),
        ]
        layouts = self._layouts(colours)
        traffic = [*self._traffic(), *self._hosts()]
        # A single change is the subject of the page; otherwise the total traffic comes first.
        body += [*layouts, *traffic] if len(self.changes) == 1 else [*traffic, *layouts]
        for heading, table in self.tables:
            body += [element("h2", escaped(heading)), text_html(table)]
        return page_html(self.title, body)

    def _layouts(self, colours: Mapping[int, str]) -> list[str]:
        if not self.changes:
            return []
        drawn = [change_html(change, i, colours) for i, change in enumerate(self.changes, start=1)]
        return [element("h2", "Before and after"), rank_legend(colours), *drawn]

    def _traffic(self) -> list[str]:
        if not self.traffic.total:
            return [
                element("h2", "Between ranks"),
                element("p", "Nothing moves: every rank holds already what it needs."),
            ]
        return [
            element("h2", "Between ranks"),
            element(
                "div",
                element(
                    "figure",
                    heat_map(self.traffic, self.amount_text, short_text=self.short_text),
                ),
                _busiest_ranks(self.traffic, self.amount_text),
                class_="beside",
            ),
        ]

    def _hosts(self) -> list[str]:
        if self.ranks_per_host is None or not self.traffic.total:
            return []
        hosts = host_traffic(self.traffic, self.ranks_per_host)
        outside = across_hosts(hosts)
        summary = (
            f"{count_text(hosts.ranks, 'host')} of {count_text(self.ranks_per_host, 'rank')}: "
            f"{self.amount_text(outside)} cross from host to host, "
            f"{self.amount_text(hosts.total - outside)} stay inside one."
        )
        return [
            element("h2", "Between hosts"),
            element("p", escaped(summary)),
            element("figure", host_flows(hosts, self.amount_text)),
        ]


def page_html(title: str, body: Sequence[str], style: str = "") -> str:
    """Return a whole page with an escaped `body`, in the common style and `style`."""
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", escaped(title)),
        element("style", STYLE + style),
    ]
    page = element(
        "html", element("head", *head), element("body", element("main", *body)), lang="en"
    )
    return f"<!DOCTYPE html>\n{page}\n"


def text_html(text: str) -> str:
    """Return preformatted text, which a keyboard can scroll if it is wider than the page."""
    return element("pre", escaped(text), tabindex=0)


def movement_figures(
    traffic: Traffic, lower_bound: int, transfers: int, amount_text: Callable[[int], str]
) -> list[Figure]:
    """Return the figures of a movement, for a `Report`.

    Args:
        traffic: between ranks.
        lower_bound: the least traffic of any movement.
        transfers: number of boxes that move.
        amount_text: formats an amount.

    >>> import numpy as np
    >>> traffic = Traffic.gathered(2, np.array([0]), np.array([1]), np.array([7]))
    >>> movement_figures(traffic, 7, 1, "{} B".format)[-1]
    Figure(name='busiest receiver', value='7 B', detail='rank 1')
    """
    figures = [
        Figure("moves", amount_text(traffic.total)),
        Figure("least possible", amount_text(lower_bound)),
        Figure("transfers", count_text(transfers)),
    ]
    for word, amounts in (("sender", traffic.sent), ("receiver", traffic.received)):
        largest, ranks = find_top_ranks(amounts)
        detail = ranks_text(ranks, 24) if ranks else ""
        figures.append(Figure(f"busiest {word}", amount_text(largest), detail))
    return figures


def figures_html(figures: Sequence[Figure]) -> str:
    """Return numbers with their names, side by side."""
    items = []
    for figure in figures:
        values = [element("dd", escaped(figure.value))]
        if figure.detail:
            values.append(element("dd", escaped(figure.detail), class_="detail"))
        items.append(element("div", element("dt", escaped(figure.name)), *values))
    return element("dl", *items, class_="figures")


def change_html(change: DrawnChange, number: int, colours: Mapping[int, str]) -> str:
    """Return a change of layout, drawn before and after, and as text.

    Args:
        change: the change to draw.
        number: distinct for each change of a page.
        colours: of the ranks.
    """
    plan = change.plan
    # The same for both, so that the two pictures can be compared.
    dimensions = drawn_dimensions(plan.source, plan.target)
    sides = []
    for word, cut, layout in (
        ("before", change.before, plan.source),
        ("after", change.after, plan.target),
    ):
        svg, grid, has_stripes = svg_picture(
            layout,
            colours,
            # Ids of gradients must differ within a page.
            f"{word}-{number}",
            dimensions=dimensions,
            origins=origins(change.transfers) if word == "after" else None,
        )
        # No wrapping: the page wraps lines itself.
        remarks = notes(layout, grid, 10**6)
        if has_stripes:
            remarks.insert(0, "Stripes: several ranks hold the box, those that its label names.")
        sides.append(
            element(
                "figure",
                element("figcaption", element("b", word), " ", element("code", escaped(cut))),
                svg,
                *(element("p", escaped(line), class_="note") for line in remarks),
            )
        )
    text = change_picture(
        plan.source,
        plan.target,
        100,
        titles=(change.before, change.after),
        plan=plan,
        transfers=change.transfers,
        height=25,
    )
    return element(
        "section",
        element("h3", escaped(change.heading)) if change.heading else "",
        element("div", sides[0], _ARROW, sides[1], class_="change"),
        element("p", escaped(movement_text(plan))),
        element("details", element("summary", "The same as text"), text_html(text)),
    )


def rank_table_html(heads: Sequence[str], rows: Sequence[tuple[Sequence[int], list[str]]]) -> str:
    """Return a table with a row of texts for ranks that are alike, the busiest first."""
    shown = [
        element(
            "tr",
            element("th", escaped(short_rank_text(ranks, 24)), scope="row"),
            *(element("td", escaped(text)) for text in texts),
        )
        for ranks, texts in rows[:MAX_RANKS_LISTED]
    ]
    left_out = sum(len(ranks) for ranks, _ in rows[MAX_RANKS_LISTED:])
    if left_out:
        rest = f"and {count_text(left_out, 'rank')} that move less"
        shown.append(element("tr", element("td", rest, colspan=len(heads), class_="rest")))
    return element(
        "table",
        element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
        element("tbody", *shown),
    )


def _busiest_ranks(traffic: Traffic, amount_text: Callable[[int], str]) -> str:
    """Return a table of traffic, busiest ranks first; ranks with equal traffic share a row."""
    kinds = sorted(traffic.kinds(), key=lambda kind: (-kind.load, kind.ranks))
    heads = ("ranks", "each sends", "to ranks", "each receives", "from ranks")
    return rank_table_html(
        heads,
        [
            (
                kind.ranks,
                [
                    amount_text(kind.sends),
                    f"{kind.receivers:,}",
                    amount_text(kind.receives),
                    f"{kind.senders:,}",
                ],
            )
            for kind in kinds
        ],
    )
