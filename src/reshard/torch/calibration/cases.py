"""Movements to measure, which show the speed of a job's links and copies.

Every case is an ordinary redistribution, which measures its subject::

    subject        which ranks move data
    -------------  ----------------------------------------------------------------------------
    call           none, except for a slice of one element: the cost of agreeing and preparing
    step           the same, as a program of one step
    copies         rank 0 alone copies data, in one run and in runs of different lengths
    within_host    rank 0 sends to rank 1, alone
    between_hosts  every rank sends to the same rank of the next host: a host's ranks share its
                   network
    shared         all ranks of all hosts, each within its host: shifts, columns from rows and
                   rows from columns, gathers, slices, sums
    a collective   the same, as a program of one step

Sizes decrease from the largest by factors of four. Pure: all ranks list the same cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.cost.fitting import BETWEEN_HOSTS, CALL, COPIES, SHARED, STEP, WITHIN_HOST, Measurement
from reshard.cost.formulas import FORMULAS
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.plans.estimates import find_copies
from reshard.sharding import ShardingSpec, spec

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
        kind: of collective, if it runs as a program of one; None if it is exchanged.
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
        return "exchange" if self.kind is None and self.subject != STEP else "program"

    @property
    def plan(self) -> LayoutChange:
        """The plan of the exchange."""
        return LayoutChange(self._layout(self.source), self._layout(self.target))

    def _layout(self, side: ShardingSpec | Layout) -> Layout:
        return side if isinstance(side, Layout) else side.layout(self.shape)

    def measurement(self, seconds_s: float, ranks: Sequence[int]) -> Measurement:
        """Return a measurement of this duration.

        `ranks` are the ranks of a host; shared transfers are summed over all of them.
        """
        if self.kind is not None:
            # Count bytes by the algorithm with the fewest, which is the first of the formulas.
            formula = next(iter(FORMULAS[self.kind].values()))
            whole = self.plan.source if self.kind != "all-gather" else self.plan.target
            size_bytes = whole.cell_elements.max(initial=0) * _ITEM_BYTES
            return Measurement(
                self.subject,
                self.name,
                seconds_s,
                formula.rounds(self.group),
                formula.busiest_bytes(self.group, int(size_bytes)),
            )
        if self.subject in (CALL, STEP):
            return Measurement(self.subject, self.name, seconds_s)
        plan = self.plan
        # Sum shared transfers over a host's ranks; for other cases a single rank represents all.
        counted = set(ranks if self.subject == SHARED else ranks[:1])
        moves = plan.transfers.moving
        mine = [row for row, sender in enumerate(moves.source_slot.tolist()) if sender in counted]
        sent = moves.take(mine)
        pairs = set(zip(sent.source_slot.tolist(), sent.target_slot.tolist(), strict=True))
        copies = find_copies(plan.transfers, plan.source, plan.target, _ITEM_BYTES)
        ranks_in_all = max(plan.source.slots, plan.target.slots, max(ranks) + 1)
        copied, runs, combined = (
            int(sum(of_rank[rank] for rank in counted)) for of_rank in copies.by_rank(ranks_in_all)
        )
        return Measurement(
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
    found: list[Case] = []
    size_bytes = largest_bytes
    while size_bytes >= SMALLEST_BYTES:
        elements = size_bytes // _ITEM_BYTES
        # List it once per size, since it is used in the evaluation of each size.
        found += _call(hosts, ranks_per_host)
        found += _copies(elements)
        if ranks_per_host > 1:
            found += _pair(elements)
            found += _list_shared(hosts, ranks_per_host, elements)
            found += _collectives(hosts, ranks_per_host, elements, kinds)
        if hosts > 1:
            found += _across(hosts, ranks_per_host, elements)
        size_bytes //= _FACTOR
    return tuple(found)


def _call(hosts: int, ranks: int) -> Iterator[Case]:
    mesh, shape = _mesh(hosts, ranks), (hosts * ranks,)
    whole, part = spec(mesh, "-"), spec(mesh, "host rank")
    yield Case(CALL, "call", shape, whole, part)
    yield Case(STEP, "step", shape, whole, part)


def _alone(shape: tuple[int, ...], part: tuple[int, ...], rank: int = 0) -> Layout:
    """Return a layout of the first part of a tensor, on a single rank."""
    return Layout.from_boxes(shape, [(rank, Box((0,) * len(shape), part))])


def _copies(elements: int) -> Iterator[Case]:
    whole = _alone((elements,), (elements,))
    yield Case(COPIES, "one run", (elements,), whole, whole)
    for name, run in (("long runs", _long(elements)), ("short runs", _SHORT)):
        # Half of every row is copied, and the other half is skipped.
        shape = (elements // (2 * run), 2 * run)
        part = (shape[0], run)
        yield Case(COPIES, name, shape, _alone(shape, shape), _alone(shape, part))


def _long(elements: int) -> int:
    """Return a power of two near the square root."""
    return int(1 << max((elements.bit_length() - 1) // 2, 0))


def _pair(elements: int) -> Iterator[Case]:
    shape = (elements,)
    yield Case(WITHIN_HOST, "pair", shape, _alone(shape, shape), _alone(shape, shape, 1))


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
    yield Case(SHARED, "shift", large, rows, spec(shifted, "host, rank, -"))
    yield Case(SHARED, "rows to columns", large, rows, columns)
    yield Case(SHARED, "columns to rows", large, columns, rows)
    small = _matrix(hosts, ranks, elements)
    yield Case(SHARED, "gather of rows", small, rows, whole)
    yield Case(SHARED, "gather of columns", small, columns, whole)
    yield Case(SHARED, "slice of rows", small, whole, rows)
    yield Case(SHARED, "slice of columns", small, whole, columns)
    narrow = (hosts, max(elements // (ranks * _SHORT), 1), ranks * _SHORT)
    yield Case(SHARED, "slice in short runs", narrow, whole, columns)
    contributions = spec(mesh, "host, -, - | sum(rank)")
    yield Case(SHARED, "sum into rows", small, contributions, rows)
    yield Case(SHARED, "sum everywhere", small, contributions, whole)


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
    yield Case(BETWEEN_HOSTS, "to the next host", shape, before, after)
