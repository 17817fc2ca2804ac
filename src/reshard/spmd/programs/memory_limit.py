"""The memory limit of a program: placements that satisfy it, or an error.

1. the strategy that was asked for
2. the other strategies; of those that keep the limit, the one that moves the least bytes
3. values that are computed again: with the strategy that was asked for, then with the others, the
   one that holds the least first
4. a PlanError, with the operation at the peak and a limit that can be kept
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.errors import PlanError, UsageError
from reshard.spmd.programs.recomputation import recomputed
from reshard.spmd.tracing.trace import STRATEGIES, Trace


def check_limit(live_bytes: Any) -> None:
    """Raises UsageError for what is no limit."""
    is_count = isinstance(live_bytes, int) and not isinstance(live_bytes, bool)
    if live_bytes is not None and not (is_count and live_bytes > 0):
        raise UsageError(
            f"live_bytes={live_bytes!r}; give the most bytes that each rank may hold, a whole "
            "number above 0, such as live_bytes=8 << 30, or None for no limit"
        )


def trace_within(
    trace_by: Callable[[str], Trace],
    finish: Callable[[Trace], Trace],
    name: str,
    strategy: str,
    limit: int,
    library: str,
) -> Trace:
    """The trace of a function in a placement that keeps a limit on every rank.

    Args:
        trace_by: gives the function's trace by a strategy.
        finish: counts what the program holds beyond that, beside what it computes.
        name: of the function, for errors.
        strategy: that was asked for.
        limit: the most bytes of `Trace.peak_bytes` on any rank.
        library: whose collectives take the time.

    Raises PlanError where nothing that is found keeps it.
    """
    first = trace_by(strategy)
    asked = finish(first)
    if _peak(asked) <= limit:
        return asked
    # Without shardings all strategies are equal, and without priorities "prioritized" is "basic".
    names = [one for one in STRATEGIES if one not in (strategy, "prioritized") and first.mesh]
    others = [trace_by(one) for one in names]
    placed = [finish(one) for one in others]
    fitting = [one for one in placed if _peak(one) <= limit]
    if fitting:
        return min(fitting, key=lambda one: one.moved_bytes)
    for one in (first, *sorted(others, key=_peak)):
        again = recomputed(one, limit, library)
        if again is not None and _peak(finished := finish(again)) <= limit:
            return finished
    raise PlanError(_describe(name, asked, placed, limit))


def _peak(traced: Trace) -> int:
    return max(traced.peak_bytes.values())


def _describe(name: str, asked: Trace, others: list[Trace], limit: int) -> str:
    peak = _peak(asked)
    rank = next(rank for rank, size in asked.peak_bytes.items() if size == peak)
    place = asked.ranks.index(rank)
    at = next((one for one in asked.operations if one.live_bytes[place] == peak), None)
    where = (
        "with its arguments alone"
        if at is None
        else f"at %{at.operation.results[0]} = {at.operation}"
    )
    tried = "; ".join(f"{one.strategy!r} holds {_peak(one):,}" for one in others)
    least = min(map(_peak, (asked, *others)))
    return (
        f"{name} with strategy {asked.strategy!r} holds {peak:,} bytes on rank {rank} {where}, "
        f"more than live_bytes={limit:,}"
        + (f" ({tried})" if tried else "")
        + ", and no values that could be computed again were found that would keep it. Give "
        f"live_bytes={least:,}, cut arguments over more axes, take a smaller batch or overlap, or "
        "put layers that are differentiated under @sp.rematerialized"
    )
