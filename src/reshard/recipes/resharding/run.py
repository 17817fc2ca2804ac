"""One run of a resharding plan in one process, and what it has done so far.

1. Every array of the source is checked before any is copied.
2. Target ranks are filled, tensor by tensor; several threads may fill several ranks.
3. Before each copy, cancellation is looked at. What is complete then remains, and is reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from reshard.errors import PlanError, ShardError
from reshard.execution.inputs import check_shards
from reshard.plans.job_item import JobItem
from reshard.plans.run import run_rank
from reshard.recipes.resharding.redistributions import ReshardingPlan, ReshardingResult
from reshard.text.quantities import first_text

SourceShards = Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]]
_SHOWN = 5


class Cancellation(Protocol):
    """Something that says when to stop, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Whether to stop."""


class _Cancelled(Exception):
    """Ends the work on an array between two copies."""


class ReshardingRun:
    """One execution of a plan in one process.

    Attributes:
        job: what is carried out.
        was_cancelled: whether something was left undone.

    Raises:
        PlanError: a plan that was written by hand.
    """

    def __init__(
        self, plan: ReshardingPlan, shards: SourceShards, cancellation: Cancellation | None
    ) -> None:
        if plan.job is None:
            raise PlanError(
                "this plan was written by hand, so that nobody knows where its slices belong; "
                "make one with create_plan"
            )
        self._begun_s = time.perf_counter()
        self._plan = plan
        self.job = plan.job
        self._shards = shards
        self._cancellation = cancellation
        self._arrays: dict[str, dict[int, Any]] = {}
        self._found: dict[int, dict[str, Any]] = {}
        self._copied_bytes: dict[int, int] = {}
        self.was_cancelled = False

    def check(self) -> None:
        """Look at every array of the source, and copy none.

        Raises:
            ShardError: an array that is missing, or has another shape or dtype.
        """
        for item in self.job.items:
            source = item.change.source
            needed = source.element_holders or source.holders[:1]
            arrays = {rank: self._array(rank, item.name) for rank in needed}
            try:
                check_shards(
                    source,
                    arrays,
                    dtype=item.dtype,
                    target_reduction=item.change.target.reduction,
                )
            except ShardError as error:
                raise ShardError(f"tensor {item.name!r}: {error}") from error
            self._arrays[item.name] = arrays

    def _array(self, rank: int, name: str) -> Any:
        try:
            return self._shards[rank][name]
        except (KeyError, IndexError):
            raise ShardError(
                f"no array of tensor {name!r} on source rank {rank}; the plan's metadata says "
                "that it has a part of it"
            ) from None

    def fill_all(self, ranks: Sequence[int], threads: int) -> None:
        """Make the arrays of target ranks, by so many threads at most."""
        threads = min(threads, len(ranks))
        if threads < 2:
            for rank in ranks:
                self._fill(rank)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._fill, ranks))

    def _fill(self, rank: int) -> None:
        """Make a target rank's arrays. Each is there only once it is complete."""
        found = self._found.setdefault(rank, {})
        try:
            for item in self._find_items(rank):
                self._stop_where_cancelled()
                array, copied = run_rank(
                    item.change, rank, self._arrays[item.name], self._stop_where_cancelled
                )
                found[item.name] = array
                size_bytes = copied * item.dtype.itemsize_bytes
                self._copied_bytes[rank] = self._copied_bytes.get(rank, 0) + size_bytes
        except _Cancelled:
            self.was_cancelled = True

    def _find_items(self, rank: int) -> list[JobItem]:
        return [item for item in self.job.items if item.change.target.local_shape(rank) is not None]

    def _stop_where_cancelled(self) -> None:
        if self._cancellation is not None and self._cancellation.is_set():
            raise _Cancelled

    def result(self, ranks: Iterable[int], notes: Sequence[str] = ()) -> ReshardingResult:
        """The arrays of the target `ranks` so far; `notes` say why other processes stopped."""
        own = list(ranks)
        warnings = [*self._list_unplanned(), *self._list_empty(own), *notes]
        if self.was_cancelled:
            warnings.append(self._describe_progress(own))
        return ReshardingResult(
            {rank: self._found.get(rank, {}) for rank in own},
            not self.was_cancelled and not notes,
            warnings,
            time.perf_counter() - self._begun_s,
            sum(self._copied_bytes.values()),
        )

    def _list_unplanned(self) -> list[str]:
        """Arrays that nobody planned for."""
        # Shards are a list by rank, or a mapping of ranks.
        named = self._shards.values() if isinstance(self._shards, Mapping) else self._shards
        known = {item.name for item in self.job.items}
        extra = dict.fromkeys(name for shard in named for name in shard if name not in known)
        if not extra:
            return []
        return [f"left out, since the plan's metadata does not name them: {_join(extra)}"]

    def _list_empty(self, ranks: Sequence[int]) -> list[str]:
        """Ranks that the policy gives nothing."""
        empty = [rank for rank in ranks if not self._find_items(rank)]
        return [f"target ranks that hold nothing: {_join(empty)}"] if empty else []

    def _describe_progress(self, ranks: Sequence[int]) -> str:
        wanted = {rank: [item.name for item in self._find_items(rank)] for rank in ranks}
        count = sum(len(self._found.get(rank, {})) for rank in ranks)
        parts = [f"cancelled with {count} of {sum(map(len, wanted.values()))} arrays complete"]
        # Ranks that are complete are named as such, the others by their tensors.
        whole = [rank for rank in ranks if len(self._found.get(rank, {})) == len(wanted[rank])]
        if whole:
            parts.append(f"all of target ranks {_join(whole)}")
        for rank in ranks:
            if rank not in whole and self._found.get(rank):
                parts.append(f"of target rank {rank} {_join(self._found[rank])}")
        return "; ".join([*parts, "the rest was left undone, and the source is as it was"])


def _join(things: Iterable[object]) -> str:
    return first_text([*things], _SHOWN)
