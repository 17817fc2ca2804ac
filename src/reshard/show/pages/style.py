"""The style sheet of pages: colours for light and dark, sizes, and what stands beside what."""

from __future__ import annotations

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
