"""Programs: the steps, in sequence, that lead from a sharding to another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from reshard._records import Record
from reshard.collectives.estimates import estimate_steps
from reshard.collectives.steps import Step, complete_shards, count_largest_shard
from reshard.cost.estimate import Estimate
from reshard.errors import PlanError
from reshard.execution.copies import check_threads
from reshard.execution.engine import TensorRun, check
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.run import run_change
from reshard.sharding import ShardingSpec
from reshard.text import cut_in_the_middle, duration_text
from reshard.topology import Topology


def format_steps(
    shape: Sequence[int],
    source: ShardingSpec,
    steps: Sequence[Step],
    lower_bound_elements: int | None,
    estimate: Estimate | None = None,
    max_width: int | None = None,
) -> str:
    """Return a table of steps: the sharding after each, moved elements and the largest shard.

    Args:
        shape: of the tensor.
        source: the sharding before the first step.
        steps: of the program.
        lower_bound_elements: the minimum that any program moves; None to omit the moved elements.
        estimate: of the steps, for a column of times.
        max_width: of the text of a step and of a sharding; longer ones are shortened in the middle.

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
    shards = [count_largest_shard(source.layout(tuple(shape)))]
    rows = [[f"[{', '.join(map(str, shape))}]", "step", "after", "moves", "live shard"]]
    rows.append(["0", "-", str(source), "-", f"{shards[0]:,}"])
    for number, step in enumerate(steps, 1):
        shard = count_largest_shard(step.target_layout)
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
    if max_width is not None:
        rows = [[cut_in_the_middle(text, max_width) for text in row] for row in rows]
    if estimate is not None:
        times = ["time", "-", *(duration_text(part.seconds_s) for part in estimate.parts)]
        rows = [[*row, time] for row, time in zip(rows, times, strict=True)]
        summary += f"\nAll steps take {duration_text(estimate.seconds_s)}."
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Text is aligned left, numbers are aligned right.
    aligned = [
        [
            text.ljust(width) if column in (1, 2) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return "\n".join([*("  ".join(row) for row in aligned), summary])


class Program(Record):
    """The steps from `source` to `target` for a tensor of `shape`, found by `find_program`.

    Raises:
        PlanError: a step that does not begin where the previous step ends.
    """

    shape: tuple[int, ...]
    source: ShardingSpec
    target: ShardingSpec
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        # Layouts are interned, so equal layouts are the same object.
        layouts = [self.source.layout(self.shape)]
        for number, step in enumerate(self.steps):
            if step.source_layout is not layouts[-1]:
                raise PlanError(
                    f"step {number} begins at `{step.source}`, but the program is at "
                    f"`{self._before(number)}` before it; each step must begin where "
                    "the previous one ends"
                )
            layouts.append(step.target_layout)
        if layouts[-1] is not self.target.layout(self.shape):
            raise PlanError(
                f"the steps end at `{self._before(len(self.steps))}`, not at `{self.target}`"
            )

    def _before(self, number: int) -> ShardingSpec:
        return self.steps[number - 1].target if number else self.source

    @property
    def _direct(self) -> LayoutChange:
        """The layout change from the source to the target."""
        return LayoutChange(self.source.layout(self.shape), self.target.layout(self.shape))

    @property
    def moved_elements(self) -> int:
        """Elements that ranks receive from others in all steps, summed over ranks."""
        return sum(step.moved_elements for step in self.steps)

    @cached_property
    def live_shard(self) -> int:
        """Elements of the largest shard before, between and after the steps."""
        layouts = [self.source.layout(self.shape), *(step.target_layout for step in self.steps)]
        return max(map(count_largest_shard, layouts))

    @cached_property
    def lower_bound_elements(self) -> int:
        """The minimum number of elements that any program moves.

        Without reductions, these are the elements that ranks lack. If `q` contributions are
        combined, each element takes `q - 1` arrivals until the first rank has it, and another for
        each further rank that needs it.
        """
        direct = self._direct
        before, after = direct.source.contributions, direct.target.contributions
        combined = -(-before // after)
        if combined == 1:
            return direct.lower_bound_elements
        held = int(direct.target.cell_elements.sum())
        return held + (combined - 2) * math.prod(self.shape) * after

    def extra_bytes(self, itemsize_bytes: int) -> int:
        """Return the maximum bytes of a rank besides its source and target, including buffers."""
        maximum = 0
        for number, step in enumerate(self.steps):
            # Both shards of a step are in memory at once; the first and the last are the caller's.
            intermediate = sum(
                count_largest_shard(layout)
                for layout, is_callers in (
                    (step.source_layout, number == 0),
                    (step.target_layout, number == len(self.steps) - 1),
                )
                if not is_callers
            )
            maximum = max(maximum, (intermediate + step.extra_elements) * itemsize_bytes)
        return maximum

    def verify(self) -> None:
        """Check every step, element by element. Raises PlanError for a step that is not legal."""
        for step in self.steps:
            step.verify()

    def estimate(self, dtype: object, topology: Topology, library: str = "nccl") -> Estimate:
        """Estimate the seconds that the steps take, see `reshard.collectives.estimates`.

        Args:
            dtype: of the elements: a name, or a NumPy or torch dtype.
            topology: the hosts of the ranks, and the links.
            library: a key of `reshard.cost.LIBRARIES`.

        Raises:
            UsageError: an unknown library.
            LayoutError: a rank outside the topology, or a link of unknown speed.
        """
        return estimate_steps(self.steps, dtype, topology, library)

    def table(self, topology: Topology, dtype: object, library: str = "nccl") -> str:
        """Return the text of the program with the time of each step. See `estimate`.

        >>> from reshard import DeviceMesh, spec
        >>> from reshard.collectives import find_program
        >>> from reshard.cost import load_preset
        >>> mesh = DeviceMesh.of(x=2, y=4)
        >>> program = find_program(spec(mesh, "x y, -"), spec(mesh, "x, -"), (4096, 4096))
        >>> print(program.table(load_preset("h100-8").topology(), "bfloat16"))
        [4096, 4096]  step           after        moves  live shard     time
                   0  -              x y, -           -   2,097,152        -
                   1  all-gather(y)  x, -    50,331,648   8,388,608  38.2 µs
        50,331,648 elements move, at least 50,331,648 must; the largest shard has 8,388,608.
        All steps take 38.2 µs.
        """
        estimate = self.estimate(dtype, topology, library)
        return format_steps(
            self.shape, self.source, self.steps, self.lower_bound_elements, estimate
        )

    def run(
        self,
        shards: Mapping[int, Any],
        out: Mapping[int, Any] | None = None,
        threads: int | None = None,
        stepwise: bool = False,
    ) -> dict[int, Any]:
        """Run the program on arrays in this process: `{rank: array}` to `{rank: array}`.

        Ranks without elements need no array. Writes to the arrays in `out` if given, with at most
        `threads` threads, by default as many as processors. Without reductions this is a single
        direct copy, unless `stepwise` is set.

        Raises:
            ShardError: an array that is missing, has another shape or dtype, or is on a device;
                an array of `out` that is read-only or shares memory with another.
            PlanError: if `stepwise`, a group that lacks elements that its ranks need.
            UsageError: a number of threads below 1.

        >>> import numpy as np
        >>> from reshard import DeviceMesh, spec
        >>> from reshard.collectives import find_program
        >>> mesh = DeviceMesh.of(x=2)
        >>> program = find_program(spec(mesh, "x, -"), spec(mesh, "-, x"), (2, 4))
        >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
        >>> program.run(shards)[1].tolist()
        [[2, 3], [6, 7]]
        """
        check_threads(threads)
        direct = self._direct
        shards = complete_shards(self.source, direct.source, shards)
        # Nothing is sent between the arrays of a process, so all steps are a single copy, unless
        # contributions are combined, in an order that the steps determine.
        layouts = [direct.source, *(step.target_layout for step in self.steps)]
        if not self.steps or not (stepwise or any(layout.reduction for layout in layouts)):
            return run_change(direct, shards, out, threads)
        # The last step reads results of earlier steps, so errors must be found before the first.
        check([TensorRun(direct, shards, out)])
        arrays: Mapping[int, Any] = shards
        for step in self.steps:
            arrays = step.run(arrays, out if step is self.steps[-1] else None, threads)
        return dict(arrays)

    def __str__(self) -> str:
        return format_steps(self.shape, self.source, self.steps, self.lower_bound_elements)

    def __repr__(self) -> str:
        names = ", ".join(step.name for step in self.steps)
        return f"<Program of {list(self.shape)}: {names or 'nothing to do'}>"
