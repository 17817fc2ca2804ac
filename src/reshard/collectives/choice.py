"""The choice between a program of collectives and the direct exchange, of a tensor or of many.

The exchange moves the fewest bytes. A program may move more bytes in fewer messages: the time of
small tensors is mostly latency, that of large ones mostly bandwidth. `choose` estimates both on a
topology and takes the faster method. If they are equal, it takes the program, because libraries
tune collectives, except with gloo, where `reshard.torch` runs collectives as messages. `divide`
decides for many tensors that move together.

An exchange is sent in rounds of limited size, so it fits into any memory; a program may not.
Estimates sum integers, then multiply and add in a fixed order, and each operation is rounded in the
same way on every machine. So all ranks make the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard._records import Record
from reshard._validation import check_type
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.cost.estimate import Estimate, Part
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.plan import plan
from reshard.sharding import ShardingSpec
from reshard.text import bytes_text, duration_text, table
from reshard.topology import Topology


class Choice(Record):
    """The method that was chosen, and the estimates of both. Made by `choose`.

    Args:
        method: "program" or "exchange".
        reason: in a few words.
        program: the program that moves the fewest elements.
        change: the layout change of the exchange.
        dtype: of the elements.
        program_estimate, exchange_estimate: the time of each method.
    """

    method: str
    reason: str
    program: Program
    change: LayoutChange
    dtype: DType
    program_estimate: Estimate
    exchange_estimate: Estimate

    @property
    def estimate(self) -> Estimate:
        """The estimate of the method that was chosen."""
        return self.program_estimate if self.method == "program" else self.exchange_estimate

    def __str__(self) -> str:
        width = self.dtype.itemsize_bytes
        steps = " ".join(map(str, self.program.steps)) or "nothing to do"
        rows = [
            (
                ("* " if name == self.method else "  ") + name,
                description,
                bytes_text(elements * width),
                *map(duration_text, (estimate.latency_s, estimate.transfer_s, estimate.seconds_s)),
            )
            for name, description, elements, estimate in (
                ("program", steps, self.program.moved_elements, self.program_estimate),
                ("exchange", "direct", self.change.moved_elements, self.exchange_estimate),
            )
        ]
        headers = ("method", "steps", "moves", "latency", "transfer", "time")
        return f"{table(rows, headers, 'llrrrr')}\n{self.reason}"


def choose(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: Sequence[int],
    dtype: object,
    topology: Topology,
    extra_bytes: int | None = None,
    *,
    library: str = "nccl",
) -> Choice:
    """Choose the faster of the program of collectives and the direct exchange.

    Args:
        source, target: shardings of a tensor.
        shape: of the tensor.
        dtype: of its elements: a name, or a NumPy or torch dtype.
        topology: the hosts of the ranks, and the links.
        extra_bytes: the memory limit of each rank besides source and target; no limit if None.
        library: a key of `reshard.cost.LIBRARIES`, whose collectives the program uses.

    Raises:
        UsageError: a limit below 0, or an unknown library.
        LayoutError: a rank outside the topology, or a link of unknown speed.
        SpecError: shardings for tensors of another number of dimensions.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.cost import load_preset
    >>> mesh = DeviceMesh.of(x=2, y=4)
    >>> topology = load_preset("h100-8").topology()
    >>> print(choose(spec(mesh, "x, y"), spec(mesh, "-, y"), (4096, 4096), "bfloat16", topology))
    method      steps            moves  latency  transfer     time
    ----------  -------------  -------  -------  --------  -------
    * program   all-gather(x)  33.6 MB  3.40 µs   9.32 µs  12.7 µs
      exchange  direct         33.6 MB  3.40 µs   9.32 µs  12.7 µs
    both take as long, and collectives are tuned
    """
    if extra_bytes is not None and extra_bytes < 0:
        raise UsageError(f"extra_bytes={extra_bytes}: a limit of memory; give 0 or more, or None")
    check_type(topology, Topology, "topology", "such as load_preset('h100-8').topology()")
    kind = as_dtype(dtype)
    program = find_program(source, target, shape)
    change = LayoutChange(source.layout(program.shape), target.layout(program.shape))
    by_program = program.estimate(kind, topology, library)
    by_exchange = plan(change.source, change.target, kind).estimate(topology)
    method, reason = _decide(
        program,
        by_program,
        by_exchange,
        program.extra_bytes(kind.itemsize_bytes),
        extra_bytes,
        library,
    )
    return Choice(method, reason, program, change, kind, by_program, by_exchange)


def _decide(
    program: Program,
    by_program: Estimate,
    by_exchange: Estimate,
    needed_bytes: int,
    extra_bytes: int | None,
    library: str,
) -> tuple[str, str]:
    if not program.steps:
        return "program", "every rank has what it needs"
    if any(isinstance(step, Exchange) for step in program.steps):
        return "exchange", "no program of collectives was found"
    # Only a program can exceed the memory: an exchange is sent in rounds of any size.
    if extra_bytes is not None and needed_bytes > extra_bytes:
        return (
            "exchange",
            f"the program holds {needed_bytes:,} bytes beyond source and target, over the limit of "
            f"{extra_bytes:,}",
        )
    if by_program.seconds_s == by_exchange.seconds_s:
        if library == "gloo":
            return "exchange", "both take as long, and gloo's collectives are messages too"
        return "program", "both take as long, and collectives are tuned"
    method, faster, slower = "program", by_program, by_exchange
    if by_exchange.seconds_s < by_program.seconds_s:
        method, faster, slower = "exchange", by_exchange, by_program
    saved_s = slower.seconds_s - faster.seconds_s
    saved_latency_s = slower.latency_s - faster.latency_s
    # At least half of the saved time is latency.
    saves_latency = 2 * saved_latency_s >= saved_s
    saved = "messages cost less" if saves_latency else "bytes take less time"
    return method, f"the {method} is quicker: its {saved}"


class Ways(Record):
    """The estimates of a tensor in the exchange, and by the steps of its program."""

    exchange: Part
    program: tuple[Part, ...]

    @property
    def exchange_s(self) -> float:
        """The seconds of its bytes and copies in the exchange."""
        return self.exchange.transfer_s + self.exchange.copy_s

    @property
    def program_s(self) -> float:
        """The seconds of its bytes and copies in all steps."""
        return sum((part.transfer_s + part.copy_s for part in self.program), 0.0)

    @property
    def stages(self) -> int:
        """The number of steps that take any time."""
        return len(self.program)


class Division(Record):
    """The tensors that are moved by programs, and the seconds of all tensors.

    Args:
        by_program: whether each tensor is moved by its program.
        ways: the estimates of each tensor.
        seconds_s: of all tensors, as divided.
        exchange_s: of all tensors, if all were moved in the exchange.
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
    """Divide tensors that move together into those moved by programs and by the exchange.

    All tensors without a program move in a single exchange. Programs run at the same time: their
    first steps together with the exchange, then the second steps of all, and so on. So ranks wait
    once between two steps, for any number of tensors::

        stage 0                stage 1          stage 2
        a, b: exchange
        c: reduce-scatter      c: all-gather
        d: all-to-all          d: permute       d: all-gather

    1. The times of bytes and copies are summed over tensors. The latency of a stage is its largest
       latency.
    2. For each number of stages, a tensor is moved by its program if that has at most as many
       stages and its bytes take less time.
    3. The number of stages with the least time is chosen, or the smallest of equal ones. So all
       tensors stay in the exchange if programs save nothing.

    Times are summed in the order of tensors, so all ranks compute the same division.

    Args:
        tensors: each as its layout change, its dtype and a program from source to target.
        topology: the hosts of the ranks, and the links.
        library: a key of `reshard.cost.LIBRARIES`.

    Raises:
        UsageError: an unknown library.
        LayoutError: a rank outside the topology, or a link of unknown speed.

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
    ways_of: dict[tuple[LayoutChange, DType, Program], Ways] = {}
    for tensor in tensors:
        # The layers of a model are equal, so each kind of tensor is estimated once.
        if tensor not in ways_of:
            ways_of[tensor] = _find_ways(*tensor, topology, library)
    ways = tuple(ways_of[tensor] for tensor in tensors)
    max_stages = max((way.stages for way in ways), default=0)
    choices = [
        # A program without steps neither moves nor copies anything.
        tuple(0 < way.stages <= stages and way.program_s < way.exchange_s for way in ways)
        for stages in range(max_stages + 1)
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
    """Sum the seconds of all stages: the largest latency of each, and the bytes of all tensors."""
    latency_s: list[float] = []
    moving_s = 0.0
    for way, is_chosen in zip(ways, by_program, strict=True):
        parts = way.program if is_chosen else (way.exchange,)
        # Extended to the longest program; a negative count adds no stages.
        latency_s += [0.0] * (len(parts) - len(latency_s))
        for stage, part in enumerate(parts):
            latency_s[stage] = max(latency_s[stage], part.latency_s)
        moving_s += way.program_s if is_chosen else way.exchange_s
    return sum(latency_s, moving_s)
