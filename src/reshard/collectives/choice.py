"""The choice between a program of collectives and the direct exchange of one tensor.

The exchange moves the fewest bytes. A program may move more, in fewer messages: the time of small
tensors is mostly latency, that of large ones mostly bandwidth. Both are estimated on a topology,
and the faster one is chosen. If they are equal, the program is chosen, because libraries tune
collectives; with gloo the exchange, because `reshard.torch` runs collectives as messages there.

An exchange is sent in rounds of limited size, so it fits into any memory; a program may not.
The estimate sums integers, then multiplies and adds in a fixed order, and each of these steps is
rounded in the same way on every machine. So all ranks make the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard._validation import check_type
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.cost.estimate import Estimate
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.plan import plan
from reshard.sharding import ShardingSpec
from reshard.text import bytes_text, duration_text, table
from reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and both estimates. Make one with `choose`.

    Args:
        method: "program" or "exchange".
        reason: why, in a few words.
        program: the program that moves the fewest elements.
        change: of the layouts, as the exchange makes it.
        dtype: of the elements.
        program_estimate, exchange_estimate: how long each takes.
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
        """How long what was chosen takes."""
        return self.program_estimate if self.method == "program" else self.exchange_estimate

    def __str__(self) -> str:
        width = self.dtype.itemsize_bytes
        steps = " ".join(map(str, self.program.steps)) or "nothing to do"
        rows = [
            (
                ("* " if name == self.method else "  ") + name,
                what,
                bytes_text(elements * width),
                *map(duration_text, (estimate.latency_s, estimate.transfer_s, estimate.seconds_s)),
            )
            for name, what, elements, estimate in (
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
    """The quicker of the program of collectives and the direct exchange.

    Args:
        source, target: shardings of one tensor.
        shape: of the tensor.
        dtype: of its elements: a name, or a NumPy or torch dtype.
        topology: the hosts of the ranks, and the links.
        extra_bytes: the most memory beyond source and target, on each rank; no limit when None.
        library: a key of `reshard.cost.LIBRARIES`, whose collectives the program uses.

    Raises:
        UsageError: a limit below 0, or an unknown library.
        LayoutError: a rank outside the topology, or a link whose speed is not given.
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
    # Memory can only rule out the program: an exchange is sent in rounds of any size.
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
    method, less, more = "program", by_program, by_exchange
    if by_exchange.seconds_s < by_program.seconds_s:
        method, less, more = "exchange", by_exchange, by_program
    saved_s, saved_latency_s = more.seconds_s - less.seconds_s, more.latency_s - less.latency_s
    # At least half of the time that is saved is latency.
    saves_latency = 2 * saved_latency_s >= saved_s
    saved = "messages cost less" if saves_latency else "bytes take less time"
    return method, f"the {method} is quicker: its {saved}"
