"""Calibration: measure the speed of a running job's links, and its other costs.

1. The ranks exchange the names of their hosts; they must be numbered host by host.
2. All ranks list the same cases (`cases_of`), and run them in turn, round by round, each after a
   barrier. The first rank decides when the rounds end, since the ranks' clocks differ. The first
   round uses memory and connections for the first time, and is not counted.
3. The time of a case is that of its slowest rank. The median of all rounds is used: other load on
   the machine affects all cases alike.
4. All ranks fit links and overheads to the first rank's medians (`reshard.cost.fitting`), so all
   have the same preset.

Every case is an ordinary redistribution, which measures its subject::

    subject        which ranks move data
    -------------  ----------------------------------------------------------------------------
    call           none, except for a slice of an element: the cost of agreeing and preparing
    step           the same, as a program of a single step
    copies         rank 0 alone copies data, in one run and in runs of different lengths
    within_host    rank 0 sends to rank 1, alone
    between_hosts  every rank sends to the same rank of the next host: a host's ranks share its
                   network
    shared         all ranks of all hosts, each within its host: shifts, columns from rows and
                   rows from columns, gathers, slices, sums
    a collective   the same, as a program of a single step

Sizes decrease from the largest by factors of four.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from reshard.cost import fitting
from reshard.cost.formulas import FORMULAS
from reshard.cost.preset import Preset
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.plans.estimates import find_copies
from reshard.sharding import ShardingSpec, spec
from reshard.torch.exchange.agreement import device_of
from reshard.torch.exchange.groups import rank_group
from reshard.torch.redistribution import redistribute

SMALLEST_BYTES = 1 << 12
_FACTOR = 4
_ITEM_BYTES = 4
# The number of elements of a short run, and of the gap between rows.
_SHORT = 4


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A movement of float32 between two sides over the ranks of a job.

    Args:
        subject: the subject of the measurement, see `reshard.cost.fitting`.
        name: a readable name.
        shape: of the tensor.
        source, target: its layouts on both sides.
        kind: of collective, if it runs as a program; None if it is exchanged.
        group: the number of ranks in each of a collective's groups.
    """

    subject: str
    name: str
    shape: tuple[int, ...]
    source: ShardingSpec | Layout
    target: ShardingSpec | Layout
    kind: str | None = None
    group: int = 1

    @property
    def method(self) -> str:
        """The method of `reshard.torch.redistribute`."""
        return "exchange" if self.kind is None and self.subject != fitting.STEP else "program"

    @property
    def plan(self) -> LayoutChange:
        """The plan of the exchange."""
        return LayoutChange(self._layout(self.source), self._layout(self.target))

    def _layout(self, side: ShardingSpec | Layout) -> Layout:
        return side if isinstance(side, Layout) else side.layout(self.shape)

    def measurement(self, seconds_s: float, ranks: Sequence[int]) -> fitting.Measurement:
        """Return a measurement of this duration.

        `ranks` are the ranks of a host; shared transfers are summed over all of them.
        """
        if self.kind is not None:
            # Count bytes by the algorithm with the fewest, which is the first of the formulas.
            formula = next(iter(FORMULAS[self.kind].values()))
            whole = self.plan.source if self.kind != "all-gather" else self.plan.target
            size_bytes = whole.cell_elements.max(initial=0) * _ITEM_BYTES
            return fitting.Measurement(
                self.subject,
                self.name,
                seconds_s,
                formula.rounds(self.group),
                formula.busiest_bytes(self.group, int(size_bytes)),
            )
        if self.subject in (fitting.CALL, fitting.STEP):
            return fitting.Measurement(self.subject, self.name, seconds_s)
        plan = self.plan
        # Sum shared transfers over a host's ranks; for other cases a single rank represents all.
        counted = set(ranks if self.subject == fitting.SHARED else ranks[:1])
        moves = plan.transfers.moving
        mine = [row for row, sender in enumerate(moves.source_slot.tolist()) if sender in counted]
        sent = moves.take(mine)
        pairs = set(zip(sent.source_slot.tolist(), sent.target_slot.tolist(), strict=True))
        copies = find_copies(plan.transfers, plan.source, plan.target, _ITEM_BYTES)
        ranks_in_all = max(plan.source.slots, plan.target.slots, max(ranks) + 1)
        copied, runs, combined = (
            int(sum(of_rank[rank] for rank in counted)) for of_rank in copies.by_rank(ranks_in_all)
        )
        return fitting.Measurement(
            self.subject,
            self.name,
            seconds_s,
            len(pairs),
            int(sent.elements.sum()) * _ITEM_BYTES,
            runs,
            copied - combined,
            combined,
        )


def cases_of(
    hosts: int, ranks_per_host: int, largest_bytes: int, kinds: Sequence[str] = ()
) -> tuple[Case, ...]:
    """Return all cases, for ranks that are numbered host by host.

    Args:
        hosts, ranks_per_host: of the job.
        largest_bytes: the maximum size of a rank's part of any tensor.
        kinds: of collectives to measure: keys of `FORMULAS` except "permute".

    Raises UsageError for a single rank, or sizes below `SMALLEST_BYTES`.

    >>> sorted({case.subject for case in cases_of(1, 2, 1 << 16, ["all-reduce"])})
    ['all-reduce', 'call', 'copies', 'shared', 'step', 'within_host']
    """
    if hosts * ranks_per_host < 2:
        raise UsageError("a job of 1 rank; nothing is sent there. Run 2 or more ranks")
    if largest_bytes < SMALLEST_BYTES:
        raise UsageError(
            f"tensors of at most {largest_bytes} bytes a rank; {SMALLEST_BYTES} or more are needed"
        )
    cases: list[Case] = []
    size_bytes = largest_bytes
    while size_bytes >= SMALLEST_BYTES:
        elements = size_bytes // _ITEM_BYTES
        # List it once per size, since it is used in the evaluation of each size.
        cases += _call(hosts, ranks_per_host)
        cases += _copies(elements)
        if ranks_per_host > 1:
            flat = (elements,)
            pair = _alone(flat, flat), _alone(flat, flat, rank=1)
            cases.append(Case(fitting.WITHIN_HOST, "pair", flat, *pair))
            cases += _list_shared(hosts, ranks_per_host, elements)
            cases += _collectives(hosts, ranks_per_host, elements, kinds)
        if hosts > 1:
            cases += _across(hosts, ranks_per_host, elements)
        size_bytes //= _FACTOR
    return tuple(cases)


def _call(hosts: int, ranks: int) -> Iterator[Case]:
    mesh, shape = _mesh(hosts, ranks), (hosts * ranks,)
    whole, part = spec(mesh, "-"), spec(mesh, "host rank")
    yield Case(fitting.CALL, "call", shape, whole, part)
    yield Case(fitting.STEP, "step", shape, whole, part)


def _alone(shape: tuple[int, ...], part: tuple[int, ...], rank: int = 0) -> Layout:
    """Return a layout of the first part of a tensor, on a single rank."""
    return Layout.from_boxes(shape, [(rank, Box.of(part))])


def _copies(elements: int) -> Iterator[Case]:
    whole = _alone((elements,), (elements,))
    yield Case(fitting.COPIES, "one run", (elements,), whole, whole)
    for name, run in (("long runs", _long(elements)), ("short runs", _SHORT)):
        # Half of every row is copied, and the other half is skipped.
        shape = (elements // (2 * run), 2 * run)
        part = (shape[0], run)
        yield Case(fitting.COPIES, name, shape, _alone(shape, shape), _alone(shape, part))


def _long(elements: int) -> int:
    """Return a power of two near the square root."""
    return int(1 << max((elements.bit_length() - 1) // 2, 0))


def _matrix(hosts: int, ranks: int, elements: int) -> tuple[int, int, int]:
    """Return the shape of a matrix per host of about so many elements, divisible by `ranks`."""
    columns = ranks * max(_long(elements // ranks**2), 1)
    return hosts, max(elements // columns // ranks, 1) * ranks, columns


def _mesh(hosts: int, ranks: int, shift: tuple[int, int] = (0, 0)) -> DeviceMesh:
    """Return a mesh of hosts and ranks on them; `shift` moves it by hosts and ranks."""
    devices = [
        (host + shift[0]) % hosts * ranks + (place + shift[1]) % ranks
        for host in range(hosts)
        for place in range(ranks)
    ]
    return DeviceMesh("job", (hosts, ranks), ("host", "rank"), devices)


def _list_shared(hosts: int, ranks: int, elements: int) -> Iterator[Case]:
    mesh, shifted = _mesh(hosts, ranks), _mesh(hosts, ranks, (0, 1))
    rows, columns, whole = (
        spec(mesh, text) for text in ("host, rank, -", "host, -, rank", "host, -, -")
    )
    # A tensor sharded on both sides is larger by the number of ranks, so shards have equal sizes.
    large = _matrix(hosts, ranks, elements * ranks)
    yield Case(fitting.SHARED, "shift", large, rows, spec(shifted, "host, rank, -"))
    yield Case(fitting.SHARED, "rows to columns", large, rows, columns)
    yield Case(fitting.SHARED, "columns to rows", large, columns, rows)
    small = _matrix(hosts, ranks, elements)
    yield Case(fitting.SHARED, "gather of rows", small, rows, whole)
    yield Case(fitting.SHARED, "gather of columns", small, columns, whole)
    yield Case(fitting.SHARED, "slice of rows", small, whole, rows)
    yield Case(fitting.SHARED, "slice of columns", small, whole, columns)
    narrow = (hosts, max(elements // (ranks * _SHORT), 1), ranks * _SHORT)
    yield Case(fitting.SHARED, "slice in short runs", narrow, whole, columns)
    contributions = spec(mesh, "host, -, - | sum(rank)")
    yield Case(fitting.SHARED, "sum into rows", small, contributions, rows)
    yield Case(fitting.SHARED, "sum everywhere", small, contributions, whole)


_SIDES = {
    "all-gather": ("host, rank, -", "host, -, -"),
    "reduce-scatter": ("host, -, - | sum(rank)", "host, rank, -"),
    "all-reduce": ("host, -, - | sum(rank)", "host, -, -"),
    "all-to-all": ("host, rank, -", "host, -, rank"),
}


def _collectives(hosts: int, ranks: int, elements: int, kinds: Sequence[str]) -> Iterator[Case]:
    mesh = _mesh(hosts, ranks)
    for kind in kinds:
        before, after = (spec(mesh, text) for text in _SIDES[kind])
        whole = elements * ranks if kind == "all-to-all" else elements
        shape = _matrix(hosts, ranks, whole)
        yield Case(kind, kind, shape, before, after, kind, ranks)


def _across(hosts: int, ranks: int, elements: int) -> Iterator[Case]:
    shape = (hosts, ranks * elements)
    ahead = _mesh(hosts, ranks, (1, 0))
    before, after = (spec(mesh, "host, rank") for mesh in (_mesh(hosts, ranks), ahead))
    yield Case(fitting.BETWEEN_HOSTS, "to the next host", shape, before, after)


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
    measurements: tuple[fitting.Measurement, ...]
    fitted: fitting.Fitted
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
    with rank_group(None).errors("nothing was measured"):
        names: list[str] = [""] * ranks
        dist.all_gather_object(names, host_name or socket.gethostname())
    hosts = hosts_of(names)
    per_host = ranks // hosts
    kinds = KINDS_ON_GLOO if backend == "gloo" else KINDS_ELSEWHERE
    cases = cases_of(hosts, per_host, largest_bytes, kinds)
    with rank_group(None).errors("nothing was written"):
        taken_s = _measure_rounds(cases, seconds_s, progress)
        # Each rank fits the first rank's medians, so that all have the same preset.
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            measurements = tuple(
                case.measurement(median(times_s), range(per_host))
                for case, times_s in zip(cases, taken_s, strict=True)
            )
            shared = [measurements]
        dist.broadcast_object_list(shared, 0)
    fitted = fitting.fit(shared[0])
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


def _preset(name: str, backend: str, hosts: int, per_host: int, fitted: fitting.Fitted) -> Preset:
    # A host of a single rank lacks a link within it; it is never used.
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


def _measure_rounds(
    cases: Sequence[Case], seconds_s: float, progress: ProgressFunction | None
) -> list[list[float]]:
    """Return the seconds of each case, on its slowest rank, in every round but the first."""
    device, rank = device_of(None), dist.get_rank()
    sides = [layout for case in cases for layout in (case.plan.source, case.plan.target)]
    most = max((_elements(layout, rank) for layout in sides), default=1)
    # Memory for all cases. Write to it once, so that all of its pages are allocated.
    source = torch.ones(most, dtype=torch.float32, device=device)
    target = torch.zeros(most, dtype=torch.float32, device=device)
    actions = [_action(case, rank, source, target) for case in cases]
    began_s = time.monotonic()
    taken_s: list[list[float]] = []
    while True:
        taken_s.append(_measure_round(actions, device))
        counted = len(taken_s) - 1
        elapsed_s = time.monotonic() - began_s
        # Another round has to fit into the remaining time.
        is_over = counted >= _FEWEST_ROUNDS and (
            elapsed_s * (len(taken_s) + 1) / len(taken_s) > seconds_s
        )
        # Use the clock of the first rank, so that all ranks end with the same round.
        over = torch.tensor([is_over if rank == 0 else 0], device=device)
        dist.broadcast(over, 0)
        if rank == 0 and progress is not None:
            progress(elapsed_s, counted)
        if over.item():
            return [list(times) for times in zip(*taken_s[1:], strict=True)]


def _measure_round(actions: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    mine_s = []
    for action in actions:
        dist.barrier()
        # Wait for the device before and after, so that only this action is measured.
        _wait(device)
        began_s = time.perf_counter()
        action()
        _wait(device)
        mine_s.append(time.perf_counter() - began_s)
    slowest_s = torch.tensor(mine_s, dtype=torch.float64, device=device)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    seconds: list[float] = slowest_s.tolist()
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _action(
    case: Case, rank: int, source: torch.Tensor, target: torch.Tensor
) -> Callable[[], object]:
    """Return a function that runs a case in the given memory."""
    plan = case.plan
    own, out = _part(source, plan.source, rank), _part(target, plan.target, rank)

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
    return 0 if shape is None else math.prod(shape)


def _part(memory: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor | None:
    """Return this rank's local tensor, at the beginning of the memory."""
    shape = layout.local_shape(rank) if rank < layout.slots else None
    return None if shape is None else memory[: _elements(layout, rank)].view(shape)
