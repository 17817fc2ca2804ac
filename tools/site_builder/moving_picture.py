"""A moving picture of a plan: each box goes from the rank that has it to the rank that lacks it.

An SVG with a style sheet and no script; it stands still for readers who asked for less motion.

    PYTHONPATH=src:tools python -m site_builder.moving_picture > docs/moving.svg
"""

from __future__ import annotations

import math
import sys

import numpy as np

import reshard
from reshard.plans.plan import Plan
from reshard.show.svg import rank_colours

# Pixels: the side of a tensor, the margin around it, the way between the two.
_SIDE, _TOP, _LEFT, _BETWEEN = 240, 40, 20, 160
_SECONDS, _STAGGER_S = 8.0, 0.12


def moving_picture(plan: Plan, before: str, after: str) -> str:
    """The picture of a plan of two dimensions, with a title over each side."""
    scale = np.array([_SIDE / plan.source.shape[0], _SIDE / plan.source.shape[1]])
    transfers = plan.transfers
    holders, wanting = plan.source.holders, plan.target.holders
    colours = rank_colours({*holders, *wanting})
    width, height = 2 * (_LEFT + _SIDE) + _BETWEEN, _TOP + _SIDE + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Boxes of a tensor go from {before} to {after}">',
        f"<style>{_style()}</style>",
        f'<text x="{_LEFT}" y="24">{before}</text>',
        f'<text x="{_LEFT + _SIDE + _BETWEEN}" y="24">{after}</text>',
    ]
    for number in np.lexsort((transfers.start[:, 0], transfers.target_slot)).tolist():
        row, column = transfers.start[number] * scale
        tall, wide = transfers.shape[number] * scale
        rank = int(transfers.source_slot[number])
        wait_s = _STAGGER_S * int(transfers.target_slot[number])
        lines.append(
            f'<rect class="box" x="{_LEFT + column:.1f}" y="{_TOP + row:.1f}" width="{wide:.1f}" '
            f'height="{tall:.1f}" fill="{colours[rank]}" style="animation-delay:{wait_s:.2f}s"/>'
        )
    # Above the boxes, on both sides: parts keep their outlines and numbers while boxes pass below.
    lines += _outlines(plan.source, scale, _LEFT)
    lines += _outlines(plan.target, scale, _LEFT + _SIDE + _BETWEEN)
    said = f"{plan.moved_elements:,} of {math.prod(plan.source.shape):,} elements move, each once"
    lines += [f'<text class="said" x="{_LEFT}" y="{height - 8}">{said}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


def _outlines(layout: reshard.Layout, scale: np.ndarray, left: int) -> list[str]:
    found = []
    for rank in layout.holders:
        for box in layout.boxes(rank):
            row, column = np.array(box.start) * scale
            tall, wide = (np.array(box.stop) - np.array(box.start)) * scale
            found.append(
                f'<rect class="part" x="{left + column:.1f}" y="{_TOP + row:.1f}" '
                f'width="{wide:.1f}" height="{tall:.1f}"/>'
                f'<text class="rank" x="{left + column + 6:.1f}" y="{_TOP + row + 16:.1f}">'
                f"{rank}</text>"
            )
    return found


def _style() -> str:
    return (
        "text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#6a7079}"
        ".rank{fill:#1c1e21;stroke:#fff;stroke-width:4px;paint-order:stroke}"
        ".part{fill:none;stroke:#8b929b}"
        ".box{stroke:#fff;stroke-width:1;fill-opacity:.85;"
        f"animation:move {_SECONDS:g}s ease-in-out infinite}}"
        "@keyframes move{0%,15%{transform:none;opacity:1}"
        f"50%,88%{{transform:translateX({_SIDE + _BETWEEN}px);opacity:1}}"
        f"94%{{transform:translateX({_SIDE + _BETWEEN}px);opacity:0}}"
        "95%{transform:none;opacity:0}100%{transform:none;opacity:1}}"
        "@media(prefers-reduced-motion:reduce){.box{animation:none}}"
    )


def picture_of_the_readme() -> str:
    """Rows on four ranks become columns on three."""
    source = reshard.spec(reshard.DeviceMesh.of(tp=4), "tp, -").layout((24, 24))
    target = reshard.spec(reshard.DeviceMesh.of(tp=3), "-, tp").layout((24, 24))
    return moving_picture(reshard.plan(source, target), "tp, -  over tp=4", "-, tp  over tp=3")


if __name__ == "__main__":
    sys.stdout.write(picture_of_the_readme())
