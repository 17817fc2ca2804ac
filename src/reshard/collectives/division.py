"""The division of many tensors into those moved by programs and those moved in one exchange.

All tensors without a program move in one exchange. Programs run at the same time: their first
steps together with the exchange, then the second steps of all, and so on. So ranks wait once
between two steps, for any number of tensors::

    stage 0                stage 1          stage 2
    a, b: all of them
    c: reduce-scatter      c: all-gather
    d: all-to-all          d: permute       d: all-gather

1. The bytes and copies of the tensors are added. The latency of a stage is its largest latency.
2. For each number of stages, the tensors move by their program whose program has at most that
   many stages, and whose bytes take less time in it.
3. The number with the least time is chosen; of equals the smallest. So all tensors stay in
   the exchange if programs save nothing.

Times are summed in the order of the tensors, so all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.collectives.program import Program
from reshard.cost.estimate import Part
from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.plan import plan
from reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Ways:
    """How one tensor can go: in the exchange by its part of it, or by the parts of a program."""

    exchange: Part
    program: tuple[Part, ...]

    @property
    def exchange_s(self) -> float:
        """Seconds of its bytes and copies in the exchange."""
        return self.exchange.transfer_s + self.exchange.copy_s

    @property
    def program_s(self) -> float:
        """Seconds of its bytes and copies in all steps."""
        return sum((part.transfer_s + part.copy_s for part in self.program), 0.0)

    @property
    def stages(self) -> int:
        """How many of the steps take any time."""
        return len(self.program)


@dataclass(frozen=True, slots=True)
class Division:
    """Which tensors go by their program, of shape `(tensors,)`, and the seconds both ways take.

    Args:
        by_program: for each tensor, in their order.
        ways: likewise what it takes by either way.
        seconds_s: of all tensors, as divided.
        exchange_s: of all tensors, if all went in the exchange.
    """

    by_program: tuple[bool, ...]
    ways: tuple[Ways, ...]
    seconds_s: float
    exchange_s: float


def divide(
    tensors: Sequence[tuple[LayoutChange, DType, Program]],
    topology: Topology,
    library: str = "nccl",
) -> Division:
    """The quickest division of tensors that move together.

    Args:
        tensors: each as its change of layouts, its dtype and a program from source to target.
        topology: the hosts of the ranks, and the links.
        library: a key of `reshard.cost.LIBRARIES`.

    Raises:
        UsageError: an unknown library.
        LayoutError: a rank outside the topology, or a link whose speed is not given.

    >>> import reshard
    >>> from reshard.collectives import find_program
    >>> from reshard.cost import load_preset
    >>> from reshard.dtypes import dtype
    >>> mesh = reshard.DeviceMesh.of(x=4)
    >>> tensors = []
    >>> for text in ("-, - | sum(x)", "x, -"):
    ...     ends = reshard.spec(mesh, text), reshard.spec(mesh, "-, -")
    ...     change = LayoutChange(*(end.layout((4096, 64)) for end in ends))
    ...     tensors.append((change, dtype("float32"), find_program(*ends, (4096, 64))))
    >>> divide(tensors, load_preset("gloo-host").topology(), "gloo").by_program
    (True, False)
    """
    found: dict[tuple[LayoutChange, DType, Program], Ways] = {}
    for tensor in tensors:
        # Layers of a model move alike.
        if tensor not in found:
            found[tensor] = _find_ways(*tensor, topology, library)
    ways = tuple(found[tensor] for tensor in tensors)
    most = max((one.stages for one in ways), default=0)
    choices = [
        # A program without steps moves nothing, and copies nothing either.
        tuple(0 < one.stages <= stages and one.program_s < one.exchange_s for one in ways)
        for stages in range(most + 1)
    ]
    call_s = topology.overhead.call_s
    seconds_s = [call_s + _sum_seconds(ways, choice) for choice in choices]
    best = seconds_s.index(min(seconds_s))
    return Division(choices[best], ways, seconds_s[best], seconds_s[0])


def _find_ways(
    change: LayoutChange, dtype: DType, program: Program, topology: Topology, library: str
) -> Ways:
    by_program = program.estimate(dtype, topology, library)
    (exchange,) = plan(change.source, change.target, dtype).estimate(topology).parts
    return Ways(
        exchange,
        tuple(part for part in by_program.parts if part.seconds_s),
    )


def _sum_seconds(ways: Sequence[Ways], by_program: Sequence[bool]) -> float:
    """Seconds of all stages: the longest latency of each, and the bytes of all tensors."""
    latency_s: list[float] = []
    moving_s = 0.0
    for one, is_chosen in zip(ways, by_program, strict=True):
        parts = one.program if is_chosen else (one.exchange,)
        # There are as many stages as the longest has (a negative count adds none).
        latency_s += [0.0] * (len(parts) - len(latency_s))
        for stage, part in enumerate(parts):
            latency_s[stage] = max(latency_s[stage], part.latency_s)
        moving_s += one.program_s if is_chosen else one.exchange_s
    return sum(latency_s, moving_s)
