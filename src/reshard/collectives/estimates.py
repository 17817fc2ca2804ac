"""How long does a program take on a topology?

Its steps run one behind the other. The groups of a step run at the same time, and the one that
takes longest counts. Sizes are those of the busiest rank: where shards are of different sizes, a
gather or reduce-scatter takes as long as if all were as large as the largest, to which libraries
pad them.

=====================================  =========================================================
gathers, reduce-scatters, all-reduces  the formulas, on the slowest link of the group
all-to-alls, permutes, exchanges       messages, each on the link between its two ranks
slices                                 no time
=====================================  =========================================================
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from reshard.collectives.program import Program
from reshard.collectives.steps import AllGather, AllReduce, Permute, ReduceScatter, Slice, Step
from reshard.cost.collective import collective_cost
from reshard.cost.estimate import Estimate, Part
from reshard.cost.formulas import FORMULAS, check_library
from reshard.cost.messages import message_cost
from reshard.dtypes import dtype as as_dtype
from reshard.planning.estimates import exchange_part
from reshard.topology import Topology

_FORMULAS_OF = (AllGather, ReduceScatter, AllReduce)


def program_estimate(
    program: Program, dtype: object, topology: Topology, library: str = "nccl"
) -> Estimate:
    """The seconds of a program, step by step, see `Program.estimate`.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> from reshard.cost import load_preset
    >>> mesh = DeviceMesh.of(x=2, y=4)
    >>> program = find_program(spec(mesh, "x y, -"), spec(mesh, "x, -"), (4096, 4096))
    >>> print(program_estimate(program, "bfloat16", load_preset("h100-8").topology()))
    part           algorithm  messages    bytes  latency  transfer     time
    -------------  ---------  --------  -------  -------  --------  -------
    all-gather(y)  ring              3  12.6 MB  10.2 µs   28.0 µs  38.2 µs
    """
    check_library(library)
    itemsize_bytes = as_dtype(dtype).itemsize_bytes
    return Estimate(
        tuple(step_part(step, itemsize_bytes, topology, library) for step in program.steps)
    )


def step_part(step: Step, itemsize_bytes: int, topology: Topology, library: str) -> Part:
    """The seconds of one step for elements of so many bytes.

    Raises LayoutError for a rank that the topology has not, or a link that it does not know.
    """
    if isinstance(step, Slice):
        return Part.nothing(str(step))
    if isinstance(step, Permute):
        sent = step.received_elements * itemsize_bytes
        sender, receiver = np.array(step.pairs, dtype=np.int64).reshape(-1, 2).T
        return message_cost(sender, receiver, sent[receiver], topology, str(step))
    if not isinstance(step, _FORMULAS_OF):
        # A group for itself is as quick as beside the others: they share no rank.
        parts = [exchange_part(plan, itemsize_bytes, topology, str(step)) for plan in step.plans]
    else:
        parts = [
            _collective_part(step, group, itemsize_bytes, topology, library)
            for group in step.groups
        ]
    return max(parts, key=lambda part: part.seconds_s, default=Part.nothing(str(step)))


def _collective_part(
    step: Step, group: tuple[int, ...], itemsize_bytes: int, topology: Topology, library: str
) -> Part:
    busiest = max(
        int(counted[list(group)].max()) for counted in (step.sent_elements, step.received_elements)
    )
    if not busiest:
        return Part.nothing(str(step))
    # The whole of which a ring of this group sends as much: exact, so that equal bytes tie.
    parts = Fraction(FORMULAS[step.name]["ring"].parts(len(group)))
    size_bytes = busiest * itemsize_bytes * len(group) / parts
    return collective_cost(step.name, group, size_bytes, topology, library, str(step))
