"""Calibration: measure the speed of a running job's links, and its other costs.

1. The ranks exchange the names of their hosts; they must be numbered host by host.
2. All ranks list the same cases (`cases`), and run them in turn, round by round, each after a
   barrier. The first rank decides when the rounds end, since the ranks' clocks differ. The first
   round uses memory and connections for the first time, and is not counted.
3. The time of a case is that of its slowest rank. The median of all rounds is used: other load on
   the machine affects all cases alike.
4. All ranks fit links and overheads to the first rank's medians (`reshard.cost.fitting`), so all
   have the same preset.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from reshard.cost.fitting import Fitted, Measurement, fit
from reshard.cost.preset import Preset
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.sharding import ShardingSpec
from reshard.torch.calibration.cases import Case, cases_of
from reshard.torch.exchange.agreement import device_of, run_errors
from reshard.torch.redistribution import redistribute

DEFAULT_SECONDS_S = 60.0
DEFAULT_LARGEST_BYTES = 64 << 20
# On gloo, all other collectives run as messages, and have the cost of messages.
KINDS_ON_GLOO = ("all-reduce",)
KINDS_ELSEWHERE = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
_FEWEST_ROUNDS = 2

# Called on the first rank after each round, with the seconds elapsed and all rounds.
ProgressFunction = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a calibration. Create it with `calibrate`.

    Args:
        preset: the machine; `reshard.cost.preset_text` writes it as text.
        measurements: the median of each case.
        fitted: the fit, with its error for each case.
        rounds: the number of times each case was measured.
        seconds_s: the duration of the calibration.
    """

    preset: Preset
    measurements: tuple[Measurement, ...]
    fitted: Fitted
    rounds: int
    seconds_s: float


def calibrate(
    name: str = "calibrated",
    *,
    seconds_s: float = DEFAULT_SECONDS_S,
    largest_bytes: int = DEFAULT_LARGEST_BYTES,
    host_name: str | None = None,
    progress: ProgressFunction | None = None,
) -> Calibration:
    """Measure the links of all ranks of the default process group. All ranks call this.

    Args:
        name: of the preset.
        seconds_s: the approximate duration. At least two rounds are counted, which may take
            longer if the largest tensors are large.
        largest_bytes: the maximum size of a rank's part of any tensor. Twice this memory is used.
        host_name: of this rank's host; the system's host name when None.
        progress: called after each round, on the first rank.

    Returns:
        The calibration, the same on all ranks.

    Raises:
        UsageError: a single rank, hosts with different numbers of ranks, ranks that are not
            numbered host by host, or invalid numbers.
        RunError: a rank that does not answer within the group's timeout.
    """
    if not 0 < seconds_s < float("inf"):
        raise UsageError(f"seconds_s={seconds_s!r}; a number above 0 was expected")
    began_s = time.monotonic()
    ranks = dist.get_world_size()
    backend = dist.get_backend()
    with run_errors("nothing was measured"):
        names: list[str] = [""] * ranks
        dist.all_gather_object(names, host_name or socket.gethostname())
    hosts = hosts_of(names)
    per_host = ranks // hosts
    kinds = KINDS_ON_GLOO if backend == "gloo" else KINDS_ELSEWHERE
    cases = cases_of(hosts, per_host, largest_bytes, kinds)
    with run_errors("nothing was written"):
        taken_s = _Measuring(cases, largest_bytes).rounds(seconds_s, progress)
        # Each rank fits the first rank's medians, so that all have the same preset.
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            measurements = tuple(
                case.measurement(median(times_s), range(per_host))
                for case, times_s in zip(cases, taken_s, strict=True)
            )
            shared = [measurements]
        dist.broadcast_object_list(shared, 0)
    fitted = fit(shared[0])
    preset = _preset(name, backend, hosts, per_host, fitted)
    elapsed_s = time.monotonic() - began_s
    return Calibration(preset, shared[0], fitted, len(taken_s[0]), elapsed_s)


def hosts_of(names: list[str]) -> int:
    """Return the number of hosts, from the host name of each rank.

    Raises UsageError for hosts of different numbers of ranks, or ranks in another order.

    >>> hosts_of(["a", "a", "b", "b"])
    2
    """
    hosts = len(set(names))
    each = len(names) // hosts
    in_order = [name for first in names[::each] for name in [first] * each][: len(names)]
    if len(names) % hosts or in_order != names:
        raise UsageError(
            f"ranks on the hosts {', '.join(names[:16])}; as many on every host, numbered host by "
            "host, were expected, as torchrun numbers them"
        )
    return hosts


def _preset(name: str, backend: str, hosts: int, per_host: int, fitted: Fitted) -> Preset:
    # A host of one rank has no link within it; none is ever asked for.
    within_host = fitted.within_host or fitted.between_hosts
    if within_host is None:
        raise UsageError("no link was measured; run 2 or more ranks")
    noun = "ranks" if per_host > 1 else "rank"
    return Preset(
        name,
        f"{hosts} {'hosts' if hosts > 1 else 'host'} of {per_host} {noun} on {backend}, measured",
        "gloo" if backend == "gloo" else "nccl",
        per_host,
        within_host,
        fitted.between_hosts,
        overhead=fitted.overhead,
    )


class _Measuring:
    """Runs cases on this rank, in memory shared by all cases."""

    def __init__(self, cases: tuple[Case, ...], largest_bytes: int) -> None:
        self._cases = cases
        self._device = device_of(None)
        rank = dist.get_rank()
        most = max(
            (
                _elements(layout, rank)
                for case in cases
                for layout in (case.plan.source, case.plan.target)
            ),
            default=1,
        )
        # Write to it once, so that all of its pages are allocated.
        self._source = torch.ones(most, dtype=torch.float32, device=self._device)
        self._target = torch.zeros(most, dtype=torch.float32, device=self._device)
        self._actions = [self._action(case, rank) for case in cases]

    def rounds(self, seconds_s: float, progress: ProgressFunction | None) -> list[list[float]]:
        """Return the seconds of each case, on its slowest rank, in every round but the first."""
        began_s = time.monotonic()
        taken_s: list[list[float]] = []
        while True:
            taken_s.append(self._round())
            counted = len(taken_s) - 1
            elapsed_s = time.monotonic() - began_s
            is_first = dist.get_rank() == 0
            # Another round has to fit into the remaining time.
            is_over = counted >= _FEWEST_ROUNDS and (
                elapsed_s * (len(taken_s) + 1) / len(taken_s) > seconds_s
            )
            # Use the clock of the first rank, so that all ranks end with the same round.
            over = torch.tensor([is_over if is_first else 0], device=self._device)
            dist.broadcast(over, 0)
            if is_first and progress is not None:
                progress(elapsed_s, counted)
            if over.item():
                return [list(times) for times in zip(*taken_s[1:], strict=True)]

    def _round(self) -> list[float]:
        mine_s = []
        for action in self._actions:
            dist.barrier()
            self._wait()
            # Wait for the device before and after, so that only this action is measured.
            began_s = time.perf_counter()
            action()
            self._wait()
            mine_s.append(time.perf_counter() - began_s)
        slowest_s = torch.tensor(mine_s, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
        found: list[float] = slowest_s.tolist()
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _action(self, case: Case, rank: int) -> Callable[[], object]:
        plan = case.plan
        own = _part(self._source, plan.source, rank)
        out = _part(self._target, plan.target, rank)

        def run() -> object:
            return redistribute(
                own,
                case.target,
                source=case.source,
                shape=case.shape if isinstance(case.source, ShardingSpec) else None,
                dtype=torch.float32,
                out=out,
                method=case.method,
            )

        return run


def _elements(layout: Layout, rank: int) -> int:
    shape = layout.local_shape(rank) if rank < layout.slots else None
    count = 0 if shape is None else 1
    for length in shape or ():
        count *= length
    return count


def _part(memory: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor | None:
    """Return this rank's local tensor, at the beginning of the memory."""
    shape = layout.local_shape(rank) if rank < layout.slots else None
    return None if shape is None else memory[: _elements(layout, rank)].view(shape)
