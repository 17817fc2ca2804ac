"""Fitting of links and overheads to measurements.

A measurement has the numbers of messages, bytes, runs and so on, and their total seconds::

    seconds = call + messages * latency + bytes / bandwidth      a link
                   + runs * latency + copied bytes / bandwidth   copies
                   + combined bytes * combining / bandwidth      contributions

1. The cost of a call is the median time of movements of almost no data. The cost of a step is
   the additional time of a program of a single step.
2. The other costs are unknowns of a linear model, none of them negative, fitted by least squares
   of the relative errors, so that all sizes count equally. Outliers get less
   weight (iteratively reweighted least squares with Huber's weights: Huber 1964; Holland and
   Welsch 1977).
3. There are at most five unknowns, so non-negative solutions are found by enumeration: the model
   is solved for every subset of the costs, and the non-negative solution with the smallest error is
   taken.

Nothing here reads a clock: the same measurements give the same links.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
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
# The subjects of measurements, in addition to the kinds of collectives in `FORMULAS`.
SUBJECTS = (CALL, STEP, COPIES, WITHIN_HOST, BETWEEN_HOSTS, SHARED)

# Relative errors beyond this have decreasing weight.
_USUAL_ERROR = 0.1
_REWEIGHTINGS = 30
# The maximum share of a measurement that is attributed to bytes if no measurement shows any.
_UNSEEN_SHARE = 0.01


class Measurement(Record):
    """The duration of an operation, and its counts.

    Args:
        subject: one of `SUBJECTS`, or a kind of collective.
        name: for display.
        seconds_s: the median of several times.
        messages, size_bytes: sent or received by the busiest rank; by all ranks of a host
            together if the subject is shared.
        runs, copied_bytes: of the copies of the rank, or of the host.
        combined_bytes: bytes combined with elements in place, which are not counted as copied.

    Raises UsageError for an unknown subject, seconds not above 0, or a count below 0.
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
            subjects = ", ".join([*SUBJECTS, *FORMULAS])
            raise UsageError(f"unknown subject {self.subject!r}; it is one of {subjects}")
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


class Fitted(Record):
    """Links and overheads that explain measurements, as returned by `fit`.

    Args:
        within_host, between_hosts: links, None if not measured.
        overhead: additional time.
        ratios: for each measurement, the estimate over the measured seconds.
    """

    within_host: Link | None
    between_hosts: Link | None
    overhead: Overhead
    ratios: tuple[float, ...]

    @property
    def typical_error(self) -> float:
        """The median relative error."""
        return median([abs(ratio - 1) for ratio in self.ratios] or [0.0])


def fit(measurements: Iterable[Measurement]) -> Fitted:
    """Return the links and overheads that explain measurements best.

    Links without measurements are None. If the time does not grow with the size, the bandwidth is
    so large that bytes take at most a hundredth of any measurement.

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
    measured = tuple(measurements)
    by_subject = {
        subject: [item for item in measured if item.subject == subject] for subject in SUBJECTS
    }
    call_s = median([item.seconds_s for item in by_subject[CALL]] or [0.0])
    # A measured step includes a call.
    step_s = max(median([item.seconds_s for item in by_subject[STEP]] or [0.0]) - call_s, 0.0)
    kinds = [kind for kind in FORMULAS if any(item.subject == kind for item in measured)]
    costs = {
        subject: _fit_costs([item for item in measured if item.subject == subject], call_s)
        for subject in [*SUBJECTS[2:], *kinds]
    }
    within_host, between_hosts, shared_messages, *collectives = (
        _make_link(*costs[subject][:2]) for subject in (WITHIN_HOST, BETWEEN_HOSTS, SHARED, *kinds)
    )
    copies, shared_copies = (_make_link(*costs[subject][2:4]) for subject in (COPIES, SHARED))
    combined_s = costs[SHARED][4]
    overhead = Overhead(
        call_s,
        step_s,
        copies,
        # Never less than copying: the elements in place are read as well.
        max(combined_s * shared_copies.bandwidth_bytes_per_s, 1.0) if shared_copies else 1.0,
        shared_messages,
        shared_copies,
        tuple((kind, link) for kind, link in zip(kinds, collectives, strict=True) if link),
    )
    # Seconds of a movement that do not depend on its counts.
    fixed_s = dict.fromkeys([*SUBJECTS, *kinds], call_s) | {STEP: call_s + step_s}
    ratios = tuple(
        (fixed_s[item.subject] + sum(map(operator.mul, item.counts, costs.get(item.subject, ()))))
        / item.seconds_s
        for item in measured
    )
    return Fitted(within_host, between_hosts, overhead, ratios)


def _fit_costs(measurements: Sequence[Measurement], call_s: float) -> list[float]:
    """Return the seconds of each of `Measurement.counts`, excluding the cost of a call.

    The seconds of messages and their bytes are 0 if no message was measured. The same applies to
    runs and copied bytes.
    """
    if not measurements:
        return [0.0] * 5
    counts = np.array([item.counts for item in measurements], dtype=np.float64)
    seconds_s = np.array([item.seconds_s for item in measurements])
    # Both sides are divided by the measured seconds, so that errors are relative.
    costs: list[float] = _solve_robustly(
        counts / seconds_s[:, None], 1 - call_s / seconds_s
    ).tolist()
    # Columns of `counts`: messages and their bytes, runs and copied bytes.
    for latency, size in ((0, 1), (2, 3)):
        size_bytes = counts[:, size]
        # If time does not grow with bytes, they take next to nothing of any measurement.
        min_s = _UNSEEN_SHARE * float((seconds_s / np.maximum(size_bytes, 1)).min())
        if size_bytes.any():
            costs[size] = costs[size] or min_s
        else:
            costs[latency] = costs[size] = 0.0
    return costs


def _make_link(latency_s: float, byte_s: float) -> Link | None:
    # Bytes cost nothing only if no messages or copies of this kind were measured.
    return Link(1 / byte_s, latency_s) if byte_s else None


def _solve_robustly(rows: FloatArray, expected: FloatArray) -> FloatArray:
    """Return non-negative costs with `rows @ costs` close to `expected`, robust to outliers."""
    # Bytes cost far less than messages: scaled columns are better conditioned.
    size = np.abs(rows).max(axis=0, initial=0)
    scale = np.where(size > 0, size, 1)
    weights = np.ones(len(expected))
    costs = np.zeros(rows.shape[1])
    # Each solution is weighted by the errors of the previous solution.
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        costs = _solve_without_negatives(rows / scale * root[:, None], expected * root)
        # Huber's weights: large errors count linearly, so that outliers have less influence.
        errors = np.abs(rows / scale @ costs - expected)
        weights = _USUAL_ERROR / np.maximum(errors, _USUAL_ERROR)
    solution: FloatArray = costs / scale
    return solution


def _solve_without_negatives(rows: FloatArray, expected: FloatArray) -> FloatArray:
    """Return the non-negative least squares solution: the best of all subsets of the unknowns."""
    # The cost of a column of zeros is undetermined, and stays 0.
    things = [int(column) for column in np.flatnonzero(rows.any(axis=0))]
    best, least = np.zeros(rows.shape[1]), float(expected @ expected)
    for count in range(1, len(things) + 1):
        for chosen in combinations(things, count):
            columns = list(chosen)
            solved = np.linalg.lstsq(rows[:, columns], expected, rcond=None)[0]
            # Costs are never negative; the subsets without this unknown are tried too.
            if (solved < 0).any():
                continue
            left = rows[:, columns] @ solved - expected
            error = float(left @ left)
            # More unknowns must reduce the error.
            if error < least * (1 - 1e-9):
                least, best = error, np.zeros(rows.shape[1])
                best[columns] = solved
    return best
