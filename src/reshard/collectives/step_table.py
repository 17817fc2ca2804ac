"""A program as a table: each step, the sharding after it, what it moves, its largest shard.

>>> from reshard import DeviceMesh, spec
>>> from reshard.collectives import find_program
>>> mesh = DeviceMesh.of(x=2, y=2)
>>> print(find_program(spec(mesh, "- , x"), spec(mesh, "x y, -"), (4, 10)))
[4, 10]   step                   after    moves   live shard
       0  -                      -, x         -           20
       1  slice(y)               y, x         0           10
       2  joint all-to-all(x y)  x y, -      30           10
30 elements move, at least 20 must; the largest shard has 20.

On a topology each step has its time too, see `Program.table`.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.collectives.steps import Step
from reshard.cost.estimate import Estimate
from reshard.layout import Layout
from reshard.sharding import ShardingSpec
from reshard.text import cut_in_the_middle, duration_text


def step_table(
    shape: Sequence[int],
    source: ShardingSpec,
    steps: Sequence[Step],
    lower_bound_elements: int | None,
    estimate: Estimate | None = None,
    most_columns: int | None = None,
) -> str:
    """The lines of the table, without a last line break.

    Args:
        shape: of the tensor.
        source: the sharding before the first step.
        steps: what is done.
        lower_bound_elements: the fewest that any program can move; None to leave out what moves.
        estimate: of the steps, for a column of times.
        most_columns: of the text of a step and of a sharding; longer ones are cut in the middle.
    """
    shards = [_largest_shard(source.layout(tuple(shape)))]
    rows = [[f"[{', '.join(map(str, shape))}]", "step", "after", "moves", "live shard"]]
    rows.append(["0", "-", str(source), "-", f"{shards[0]:,}"])
    for number, step in enumerate(steps, 1):
        shard = _largest_shard(step.target_layout)
        shards.append(shard)
        rows.append(
            [str(number), str(step), str(step.target), f"{step.moved_elements:,}", f"{shard:,}"]
        )
    moved = sum(step.moved_elements for step in steps)
    if lower_bound_elements is None:
        summary = f"The largest shard has {max(shards):,} elements."
    else:
        summary = (
            f"{moved:,} elements move, at least {lower_bound_elements:,} must; the largest shard "
            f"has {max(shards):,}."
        )
    if most_columns is not None:
        rows = [[cut_in_the_middle(text, most_columns) for text in row] for row in rows]
    if estimate is not None:
        times = ["time", "-", *(duration_text(part.seconds_s) for part in estimate.parts)]
        rows = [[*row, time] for row, time in zip(rows, times, strict=True)]
        summary += f"\nAll steps take {duration_text(estimate.seconds_s)}."
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Words stand at the left of their columns, numbers at the right.
    aligned = [
        [
            text.ljust(width) if column in (1, 2) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return "\n".join([*("  ".join(row) for row in aligned), summary])


def _largest_shard(layout: Layout) -> int:
    return int(layout.cell_shape.prod(axis=1).max(initial=0))
