"""Estimates of the seconds of a program of collectives on a topology.

Steps run in sequence. The groups of a step run at the same time, and the slowest group
counts. Sizes are those of the rank with the most bytes: with shards of different sizes, a gather or
reduce-scatter takes as long as if all were as large as the largest, to which libraries pad them.

=====================================  =========================================================
gathers, reduce-scatters, all-reduces  the formulas, on the slowest link of the group
all-to-alls, permutes, exchanges       messages, each on the link between its two ranks
slices                                 no time
=====================================  =========================================================

If the topology's `Overhead` has the time of copies, they are counted with messages, and with a
slice at the end. If it has a measured link for a kind of collective within a host, that link is
used, for all-to-alls too. With the library "gloo", gathers and reduce-scatters are messages,
because `reshard.torch` runs them as messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from reshard.collectives.steps import (
    AllGather,
    AllReduce,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from reshard.cost.estimate import Estimate, LocalCopies, Part, collective_cost, message_cost
from reshard.cost.formulas import FORMULAS, check_library
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.plans.estimates import count_run_elements, estimate_exchanges
from reshard.plans.plan import plan
from reshard.runs import IntArray
from reshard.topology import Topology

_FORMULAS_OF = (AllGather, ReduceScatter, AllReduce)


def estimate_steps(
    steps: Sequence[Step], dtype: object, topology: Topology, library: str = "nccl"
) -> Estimate:
    """Estimate the seconds of the steps of a program, see `Program.estimate`.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> from reshard.cost import load_preset
    >>> mesh = DeviceMesh.of(x=2, y=4)
    >>> program = find_program(spec(mesh, "x y, -"), spec(mesh, "x, -"), (4096, 4096))
    >>> print(estimate_steps(program.steps, "bfloat16", load_preset("h100-8").topology()))
    part           algorithm  messages    bytes  latency  transfer     time
    -------------  ---------  --------  -------  -------  --------  -------
    all-gather(y)  ring              3  12.6 MB  10.2 µs   28.0 µs  38.2 µs
    """
    check_library(library)
    kind = as_dtype(dtype)
    parts: list[Part] = []
    inside: Layout | None = None
    for number, step in enumerate(steps):
        is_first, is_last = not number, number == len(steps) - 1
        parts.append(_estimate_step(step, kind, topology, library, is_first, is_last, inside))
        # A slice between two steps is a view of the array before it.
        inside = (inside or step.source_layout) if isinstance(step, Slice) else None
    return Estimate(tuple(parts), topology.overhead.call_s)


def _estimate_step(
    step: Step,
    dtype: DType,
    topology: Topology,
    library: str,
    is_first: bool,
    is_last: bool,
    inside: Layout | None,
) -> Part:
    """Estimate the seconds of a step of a program.

    Args:
        step: of the program.
        dtype: of the elements.
        topology, library: as for `estimate_steps`.
        is_first, is_last: whether it is the first or the last step.
        inside: the layout of the arrays of which its shards are views, if any.

    Raises LayoutError for a rank outside the topology, or a link of unknown speed.
    """
    name = str(step)
    # A joint all-to-all counts as an all-to-all if those were measured.
    kind = step.name if isinstance(step, _FORMULAS_OF) else "all-to-all"
    by_formula = isinstance(step, _FORMULAS_OF) or topology.overhead.collective(kind) is not None
    # With gloo these run as messages.
    if isinstance(step, AllGather | ReduceScatter) and library == "gloo":
        by_formula = False
    if by_formula and not isinstance(step, Exchange | Permute | Slice):
        parts = [
            _estimate_collective(step, kind, group, dtype.itemsize_bytes, topology, library)
            for group in step.groups
        ]
        return max(parts, key=lambda part: part.seconds_s, default=Part.nothing(name))
    part = _estimate_messages(step, dtype, topology, is_first, is_last, inside)
    if part.algorithm == "-" or not topology.overhead.step_s:
        return part
    return replace(part, latency_s=part.latency_s + topology.overhead.step_s)


def _estimate_messages(
    step: Step,
    dtype: DType,
    topology: Topology,
    is_first: bool,
    is_last: bool,
    inside: Layout | None,
) -> Part:
    name, itemsize_bytes = str(step), dtype.itemsize_bytes
    if isinstance(step, Slice):
        # A slice between two steps is a view; the last slice is copied into the target.
        if not is_last or not topology.overhead.counts_copies:
            return Part.nothing(name)
        whole = LayoutChange(step.source_layout, step.target_layout)
        return estimate_exchanges([whole], itemsize_bytes, topology, name, inside=inside)
    if isinstance(step, Permute):
        # A rank receives a whole shard, as large as what its sender sends.
        sent = step.received_elements * itemsize_bytes
        sender, receiver = np.array(step.pairs, dtype=np.int64).reshape(-1, 2).T
        copies = _find_permuted_copies(
            step, sender, receiver, itemsize_bytes, inside or step.source_layout
        )
        return message_cost(sender, receiver, sent[receiver], topology, name, copies)
    # The estimate of a plan selects senders and counts copies as the run does.
    if isinstance(step, Exchange) and inside is None:
        (part,) = plan(step.source_layout, step.target_layout, dtype).estimate(topology).parts
        return replace(part, name=name)
    # Groups have no common ranks, but may share a host. After another step, the own part of a
    # gather is in place already.
    keeps = is_first or inside is not None or not isinstance(step, AllGather)
    return estimate_exchanges(
        step.changes, itemsize_bytes, topology, name, keeps=keeps, inside=inside
    )


def _find_permuted_copies(
    step: Permute, sender: IntArray, receiver: IntArray, itemsize_bytes: int, around: Layout
) -> LocalCopies:
    """Return the copies of shards that stay, or are packed because they are not contiguous."""
    own = step.source_layout
    shape, arrays = (
        layout.cell_shape[np.searchsorted(layout.cell_slot, sender)] for layout in (own, around)
    )
    # The elements of each shard, and of its longest contiguous runs in its array.
    elements, run = shape.prod(axis=1), count_run_elements(shape, arrays)
    is_copied = (elements > 0) & ((sender == receiver) | (run < elements))
    return LocalCopies(
        sender[is_copied],
        elements[is_copied] * itemsize_bytes,
        elements[is_copied] // run[is_copied],
    )


def _estimate_collective(
    step: Step,
    kind: str,
    group: tuple[int, ...],
    itemsize_bytes: int,
    topology: Topology,
    library: str,
) -> Part:
    elements = max(
        int(counts[list(group)].max()) for counts in (step.sent_elements, step.received_elements)
    )
    if not elements:
        return Part.nothing(str(step))
    # The size for which the algorithm with the fewest bytes sends as many elements. It is exact,
    # so that equal times compare equal.
    fewest = next(iter(FORMULAS[kind].values()))
    parts = Fraction(fewest.parts(len(group)))
    size_bytes = elements * itemsize_bytes * len(group) / parts
    return collective_cost(kind, group, size_bytes, topology, library, str(step))
