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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.collectives.program import Program
    from reshard.cost.estimate import Estimate


def program_table(program: Program, estimate: Estimate | None = None) -> str:
    """The lines of the table, without a last line break.

    `estimate` is that of the program, for a column of times.
    """
    from reshard.text.quantities import duration_text

    shape = f"[{', '.join(map(str, program.shape))}]"
    first = program.source.layout(program.shape)
    largest = int(first.cell_shape.prod(axis=1).max(initial=0))
    rows = [[shape, "step", "after", "moves", "live shard"]]
    rows.append(["0", "-", str(program.source), "-", f"{largest:,}"])
    for number, step in enumerate(program.steps, 1):
        shard = int(step.target_layout.cell_shape.prod(axis=1).max(initial=0))
        rows.append(
            [str(number), str(step), str(step.target), f"{step.moved_elements:,}", f"{shard:,}"]
        )
    summary = (
        f"{program.moved_elements:,} elements move, at least {program.lower_bound_elements:,} "
        f"must; the largest shard has {program.live_shard:,}."
    )
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
