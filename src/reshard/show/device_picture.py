"""Pictures of a mesh: the contents of each device, drawn as the devices are in the mesh.

The last axis runs to the right and the second last down; every further axis runs down too, in
blocks of the inner axes. Arrows label the axes::

    y ─────────▶
    ┌────┬────┬────┐ x │
    │ 11 │ 12 │ 13 │   │
    ├────┼────┼────┤   │
    │ 21 │ 22 │ 23 │   │
    └────┴────┴────┘   ▼

The form of the pictures in MLIR's notes on resharding (`ReshardingSpmdizationDoc`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from reshard._validation import check_type
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import PAD
from reshard.show.sketch import Canvas
from reshard.text import display_width, padded

MAX_DEVICES = 4096


def mesh_picture(
    mesh: DeviceMesh, contents: Mapping[int, Sequence[str]], *, ascii: bool = False
) -> str:
    """Return a picture of a mesh with lines of text in each device.

    Args:
        mesh: the devices.
        contents: the lines of each rank; a rank without lines is empty.
        ascii: draw with plain ASCII instead of box-drawing characters.

    Raises:
        UsageError: a mesh too large to be drawn.

    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> cells = {rank: [f"{rank // 3 + 1}{rank % 3 + 1}"] for rank in range(6)}
    >>> print(mesh_picture(mesh, cells, ascii=True))
    y ------------->
    +----+----+----+ x |
    | 11 | 12 | 13 |   |
    +----+----+----+   |
    | 21 | 22 | 23 |   |
    +----+----+----+   v
    """
    check_type(mesh, DeviceMesh, "mesh", "make one: reshard.DeviceMesh.of(dp=2, tp=4)")
    check_type(contents, Mapping, "contents", "give {rank: [line, ...]}, see element_texts")
    if mesh.size > MAX_DEVICES:
        raise UsageError(f"a mesh of {mesh.size} devices; at most {MAX_DEVICES} can be drawn")
    columns = mesh.shape[-1] if mesh.shape else 1
    rows = mesh.shape[-2] if len(mesh.shape) > 1 else 1
    texts = [list(contents.get(rank, ())) for rank in mesh.devices]
    width = max((display_width(line) for lines in texts for line in lines), default=1)
    height = max((len(lines) for lines in texts), default=1) or 1
    per_block = rows * columns
    lines: list[str] = []
    for first in range(0, mesh.size, per_block):
        lines += _block(texts[first : first + per_block], columns, height, width, ascii)
    head = "" if not mesh.shape else _arrow_across(mesh.axis_names[-1], len(lines[0]), ascii)
    # From the inside out: an axis has an arrow for each combination of the axes before it.
    outer = list(zip(mesh.axis_names[:-1], mesh.shape[:-1], strict=True))
    for place in range(len(outer) - 1, -1, -1):
        blocks = math.prod(size for _, size in outer[:place])
        _add_arrows_down(lines, outer[place][0], blocks, ascii)
    return "\n".join([*([head] if head else []), *(line.rstrip() for line in lines)])


def element_texts(layout: Layout) -> dict[int, list[str]]:
    """Return the elements of a small tensor on each rank, named by their indices from 1 on.

    Indices below ten are concatenated, as in `23` for row 2, column 3; larger indices are separated
    by commas. The dimensions before the last two begin new lines, too. Padding is `-`.

    >>> from reshard.sharding import spec
    >>> layout = spec(DeviceMesh.of(x=2), "-, x").layout((2, 4))
    >>> element_texts(layout)
    {0: ['11 12', '21 22'], 1: ['13 14', '23 24']}
    """
    check_type(layout, Layout, "layout", "give a spec a shape: spec.layout((6, 4))")
    joint = "," if any(size > 9 for size in layout.shape) else ""
    names = np.empty(layout.shape, dtype=object)
    for index in np.ndindex(layout.shape):
        names[index] = joint.join(str(number + 1) for number in index) or "1"
    width = max((len(name) for name in names.flat), default=1)
    return {rank: _lines(layout, names, rank, width) for rank in layout.holders}


def _lines(layout: Layout, names: NDArray[np.object_], rank: int, width: int) -> list[str]:
    lines: list[str] = []
    for cell in layout.cells_of(rank):
        shape = layout.cell_shape[cell].tolist()
        held = np.full(shape, "-", dtype=object)
        indices = []
        for runs, length in zip(layout.cell_runs(cell), shape, strict=True):
            # The global index at each local position of the dimension, -1 for padding.
            index = np.full(length, -1, dtype=np.int64)
            for start, stop, local, role in runs:
                if role != PAD:
                    index[local : local + stop - start] = np.arange(start, stop)
            indices.append(index)
        inside = np.ix_(*(np.flatnonzero(index >= 0) for index in indices))
        held[inside] = names[np.ix_(*(index[index >= 0] for index in indices))]
        if not held.size:
            continue
        rows = held.reshape(-1, shape[-1] if shape else 1)
        lines += [" ".join(padded(name, width) for name in row).rstrip() for row in rows]
    return lines


def _block(
    texts: Sequence[Sequence[str]], columns: int, height: int, width: int, ascii: bool
) -> list[str]:
    """Draw rows of devices as a grid of boxes, each `height` lines high and `width`
    columns wide.
    """
    y = [row * (height + 1) for row in range(len(texts) // columns + 1)]
    x = [column * (width + 3) for column in range(columns + 1)]
    canvas = Canvas(x[-1] + 1, y[-1] + 1)
    for top in y:
        canvas.horizontal(top, 0, x[-1])
    for left in x:
        canvas.vertical(left, 0, y[-1])
    for place, lines in enumerate(texts):
        row, column = divmod(place, columns)
        for line, text in enumerate(lines):
            canvas.write(y[row] + 1 + line, x[column] + 2, text)
    return canvas.lines(ascii)


def _arrow_across(axis: str, width: int, ascii: bool) -> str:
    line, head = ("-", ">") if ascii else ("─", "▶")
    return f"{axis} {line * max(1, width - len(axis) - 2)}{head}"


def _add_arrows_down(lines: list[str], axis: str, blocks: int, ascii: bool) -> None:
    """Add an arrow to each of `blocks` equal blocks of lines, from its first line to its last."""
    bar, head = ("|", "v") if ascii else ("│", "▼")
    width = max(map(display_width, lines))
    each = len(lines) // blocks
    for number, line in enumerate(lines):
        place = number % each
        name = axis if place == 0 else ""
        mark = head if place == each - 1 else bar
        lines[number] = f"{padded(line, width)} {padded(name, len(axis))} {mark}"
