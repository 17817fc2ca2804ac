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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.collectives.program import Program


def program_table(program: Program) -> str:
    """The lines of the table, without a last line break."""
    shape = f"[{', '.join(map(str, program.shape))}]"
    first = program.source.layout(program.shape)
    largest = int(first.cell_shape.prod(axis=1).max(initial=0))
    rows = [(shape, "step", "after", "moves", "live shard")]
    rows.append(("0", "-", str(program.source), "-", f"{largest:,}"))
    for number, step in enumerate(program.steps, 1):
        shard = int(step.target_layout.cell_shape.prod(axis=1).max(initial=0))
        row = (str(number), str(step), str(step.target), f"{step.moved_elements:,}", f"{shard:,}")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        f"{number:>{widths[0]}}  {step:<{widths[1]}}  {after:<{widths[2]}}  "
        f"{moves:>{widths[3]}}  {shard:>{widths[4]}}"
        for number, step, after, moves, shard in rows
    ]
    lines.append(
        f"{program.moved_elements:,} elements move, at least {program.lower_bound_elements:,} "
        f"must; the largest shard has {program.live_shard:,}."
    )
    return "\n".join(lines)
