"""Links and overheads fitted to measurements.

A measurement has the number of messages, bytes, runs and so on, and the seconds that they took in
all::

    seconds = call + messages * latency + bytes / bandwidth      a link
                   + runs * latency + copied bytes / bandwidth   copies
                   + combined bytes * combining / bandwidth      contributions

1. The cost of a call is the median time of movements of almost no data. The cost of a step is
   what a program of one step adds to that.
2. The other costs are unknowns of a linear model, none of them negative, fitted by least squares
   of the relative errors, so that small sizes count as much as large ones. Outliers get less
   weight (iteratively reweighted least squares with Huber's weights: Huber 1964; Holland and
   Welsch 1977).
3. There are at most five unknowns, so non-negative solutions are found by enumeration: the model
   is solved for every subset of the costs, and of the solutions without a negative cost the one
   with the least error is taken.

Nothing here reads a clock: the same measurements give the same links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from reshard.cost.formulas import FORMULAS
from reshard.errors import UsageError
from reshard.topology import Link, Overhead

FloatArray = NDArray[np.float64]

CALL = "call"
STEP = "step"
COPIES = "copies"
WITHIN_HOST = "within_host"
BETWEEN_HOSTS = "between_hosts"
SHARED = "shared"
# What can be measured; kinds of collectives are keys of `FORMULAS`.
SUBJECTS = (CALL, STEP, COPIES, WITHIN_HOST, BETWEEN_HOSTS, SHARED)

# Relative errors beyond this one count less and less.
_USUAL_ERROR = 0.1
_REWEIGHTINGS = 30
# The share of a measurement that bytes take at most, where no measurement shows any.
_UNSEEN_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long something took, and what it was.

    Args:
        subject: what it measures: one of `SUBJECTS`, or a kind of collective.
        name: for people.
        seconds_s: the median of several times.
        messages, size_bytes: what the busiest rank sends or receives; of all ranks of a host
            together where the subject is what they share.
        runs, copied_bytes: its copies, likewise.
        combined_bytes: what it combines with what is there, likewise, and not copies.

    Raises UsageError for an unknown subject, seconds that are not above 0, or a count below 0.
    """

    subject: str
    name: str
    seconds_s: float
    messages: int = 0
    size_bytes: float = 0
    runs: int = 0
    copied_bytes: int = 0
    combined_bytes: int = 0

    def __post_init__(self) -> None:
        if self.subject not in SUBJECTS and self.subject not in FORMULAS:
            known = ", ".join([*SUBJECTS, *FORMULAS])
            raise UsageError(f"unknown subject {self.subject!r}; it is one of {known}")
        if not 0 < self.seconds_s < float("inf"):
            raise UsageError(f"{self.name!r} took {self.seconds_s!r} seconds; more than 0 expected")
        if min(self.counts) < 0:
            raise UsageError(f"{self.name!r} has a count below 0: {self.counts}")

    @property
    def counts(self) -> tuple[float, ...]:
        """Messages, their bytes, runs, copied and combined bytes."""
        return (
            self.messages,
            self.size_bytes,
            self.runs,
            self.copied_bytes,
            self.combined_bytes,
        )


@dataclass(frozen=True, slots=True)
class Fitted:
    """Links and overheads that explain measurements. Make one with `fit`.

    Args:
        within_host, between_hosts: links, None where nothing was measured.
        overhead: what takes time besides.
        ratios: by measurement, the estimate over the measured seconds.
    """

    within_host: Link | None
    between_hosts: Link | None
    overhead: Overhead
    ratios: tuple[float, ...]

    @property
    def typical_error(self) -> float:
        """Half of all measurements are explained at least as well: a share of the seconds."""
        return median([abs(ratio - 1) for ratio in self.ratios] or [0.0])


def fit(measurements: Iterable[Measurement]) -> Fitted:
    """The links and overheads that explain measurements best.

    What no measurement is about stays None. Where all sizes took as long, the bandwidth is
    so large that bytes take a hundredth of any measurement at most.

    >>> link = Link(1e9, 1e-4)
    >>> found = fit(
    ...     Measurement("within_host", "pair", 1e-4 + n / 1e9, messages=1, size_bytes=n)
    ...     for n in (1_000, 100_000, 10_000_000)
    ... )
    >>> round(found.within_host.bandwidth_bytes_per_s / 1e9, 6)
    1.0
    >>> round(found.within_host.latency_s * 1e4, 6)
    1.0
    """
    every = tuple(measurements)
    of = {subject: [one for one in every if one.subject == subject] for subject in SUBJECTS}
    call_s = median([one.seconds_s for one in of[CALL]] or [0.0])
    # A measured step has a call in it.
    step_s = max(median([one.seconds_s for one in of[STEP]] or [0.0]) - call_s, 0.0)
    kinds = [kind for kind in FORMULAS if any(one.subject == kind for one in every)]
    costs = {
        subject: _fit_costs([one for one in every if one.subject == subject], call_s)
        for subject in [*SUBJECTS[2:], *kinds]
    }
    within_host, between_hosts, shared_messages, *collectives = (
        _make_link(costs[subject].messages)
        for subject in (WITHIN_HOST, BETWEEN_HOSTS, SHARED, *kinds)
    )
    copies, shared_copies = (_make_link(costs[subject].copies) for subject in (COPIES, SHARED))
    combined_s = costs[SHARED].combined_s
    overhead = Overhead(
        call_s,
        step_s,
        copies,
        # Never less than copying: what is there is read as well.
        max(combined_s * shared_copies.bandwidth_bytes_per_s, 1.0) if shared_copies else 1.0,
        shared_messages,
        shared_copies,
        tuple((kind, link) for kind, link in zip(kinds, collectives, strict=True) if link),
    )
    # Seconds of a movement beside what its counts cost.
    fixed_s = dict.fromkeys([*SUBJECTS, *kinds], call_s) | {STEP: call_s + step_s}
    ratios = tuple(
        (fixed_s[one.subject] + (costs[one.subject].of(one) if one.subject in costs else 0.0))
        / one.seconds_s
        for one in every
    )
    return Fitted(within_host, between_hosts, overhead, ratios)


@dataclass(frozen=True, slots=True)
class _Costs:
    """What each thing of one subject costs: pairs of a latency, and seconds a byte.

    A pair is None where nothing of it was measured.
    """

    messages: tuple[float, float] | None
    copies: tuple[float, float] | None
    combined_s: float

    def of(self, one: Measurement) -> float:
        """Seconds of a measurement, without the call."""
        message_s, byte_s = self.messages or (0.0, 0.0)
        run_s, copied_s = self.copies or (0.0, 0.0)
        return (
            one.messages * message_s
            + one.size_bytes * byte_s
            + one.runs * run_s
            + one.copied_bytes * copied_s
            + one.combined_bytes * self.combined_s
        )


def _fit_costs(measurements: Sequence[Measurement], call_s: float) -> _Costs:
    if not measurements:
        return _Costs(None, None, 0.0)
    counts = np.array([one.counts for one in measurements], dtype=np.float64)
    seconds_s = np.array([one.seconds_s for one in measurements])
    # Divided by the measured seconds on both sides, so that errors are relative.
    found = _solve_robustly(counts / seconds_s[:, None], 1 - call_s / seconds_s).tolist()
    pairs: list[tuple[float, float] | None] = []
    # Columns of `counts`: messages and their bytes, runs and copied bytes.
    for latency, size in ((0, 1), (2, 3)):
        size_bytes = counts[:, size]
        # Where time does not grow with bytes, they take next to nothing of any measurement.
        min_s = _UNSEEN_SHARE * float((seconds_s / np.maximum(size_bytes, 1)).min())
        pairs.append((found[latency], found[size] or min_s) if size_bytes.any() else None)
    return _Costs(pairs[0], pairs[1], found[4])


def _make_link(costs: tuple[float, float] | None) -> Link | None:
    return None if costs is None else Link(1 / costs[1], costs[0])


def _solve_robustly(rows: FloatArray, wanted: FloatArray) -> FloatArray:
    """Costs of 0 or more with `rows @ costs` near `wanted`, errors measured as they are."""
    # Bytes cost far less than messages: columns of one size are solved for more exactly.
    size = np.abs(rows).max(axis=0, initial=0)
    scale = np.where(size > 0, size, 1)
    weights = np.ones(len(wanted))
    costs = np.zeros(rows.shape[1])
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        costs = _solve_without_negatives(rows / scale * root[:, None], wanted * root)
        # Errors over the usual one count by their size, not its square: outliers pull less.
        errors = np.abs(rows / scale @ costs - wanted)
        weights = _USUAL_ERROR / np.maximum(errors, _USUAL_ERROR)
    found: FloatArray = costs / scale
    return found


def _solve_without_negatives(rows: FloatArray, wanted: FloatArray) -> FloatArray:
    """Least squares with no unknown below 0: of all subsets the best, and the first of equals."""
    # A column of zeros shows nothing of its cost, which stays 0.
    things = [int(column) for column in np.flatnonzero(rows.any(axis=0))]
    best, least = np.zeros(rows.shape[1]), float(wanted @ wanted)
    for count in range(1, len(things) + 1):
        for chosen in combinations(things, count):
            columns = list(chosen)
            solved = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
            if (solved < 0).any():
                continue
            left = rows[:, columns] @ solved - wanted
            error = float(left @ left)
            # More unknowns have to explain more.
            if error < least * (1 - 1e-9):
                least, best = error, np.zeros(rows.shape[1])
                best[columns] = solved
    return best
