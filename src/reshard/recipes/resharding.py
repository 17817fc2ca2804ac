"""Resharding of arrays by a strategy: tensors of N ranks become tensors of M ranks.

A policy (`reshard.recipes.strategies`) determines the layout of each tensor over target ranks::

    tensor a, 5 x 1 over 2 ranks, to 4        TensorRedistribution("a", source_rank=0, ...)
                                                TensorSlice(0, (0, 0), (2, 1), (2, 1))
    |0|0|0|1|1|  ->  |0|0|1|1|2|                TensorSlice(1, (2, 0), (3, 1), (1, 1))
                                              TensorRedistribution("a", source_rank=1, ...)
                                                TensorSlice(1, (0, 0), (1, 1), (1, 1))
                                                TensorSlice(2, (1, 0), (2, 1), (1, 1))

1. The policy gives each tensor a layout over the target ranks.
2. A `Job` moves boxes between ranks; the plan is a view of it by tensor and source rank.
3. With a coordinator, each of its processes takes a share of the target ranks. Processes exchange
   results several times, and exchanges are matched by their order alone. Runs that are begun at the
   same time therefore take turns::

       begun in each process    a        b        c
       process 0                aaaaaa   bbbbb    ccc
       process 1                aaa...   bbbb.    ccc       . waits for the others

   A process that begins its runs in another order has another plan, which is found before anything
   is copied.
4. All arrays of the source are checked before any is copied. Then target ranks are filled, tensor
   by tensor, perhaps by several threads. Cancellation is checked before each copy; completed
   tensors remain, and are reported.

`simple` fills the target ranks in turn, in this process. `parallel` fills them at the same time:
the processes of a coordinator share them, and threads do in each process, which reads only what its
own ranks need of the source.

Source: `IReshardingStrategy` of the checkpoint resharding specification.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from reshard._records import Record
from reshard._validation import check_int
from reshard.dtypes import dtype as as_dtype
from reshard.errors import (
    InterruptedRunError,
    PlanError,
    ReshardError,
    RunError,
    ShardError,
    UsageError,
)
from reshard.execution.memory import check_shards
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.job import Job, JobItem
from reshard.plans.run import run_rank
from reshard.recipes.strategies import Config, Strategy, strategy
from reshard.text import first_text

Shape = tuple[int, ...]


class TensorSlice(Record):
    """Indices `start` to `stop` of a source rank's array, that go to a target rank.

    `shape` is `stop - start`. All have a number per dimension of the tensor.
    """

    target_rank: int
    start: Shape
    stop: Shape
    shape: Shape


class TensorRedistribution(Record):
    """The slices of a tensor that a source rank sends.

    Attributes:
        tensor_name: of the whole tensor.
        source_rank: the rank that sends.
        source_shape: of its array, which the slices cut. A rank whose array is flat, several
            consecutive boxes, has a redistribution for each box, of the box's shape.
        target_ranks: the ranks that receive elements, in order.
        slices: the parts that they receive.
    """

    tensor_name: str
    source_rank: int
    source_shape: Shape
    target_ranks: tuple[int, ...]
    slices: tuple[TensorSlice, ...]


@dataclass(frozen=True)
class ReshardingPlan:
    """A plan of tensors from `source_world_size` ranks to `target_world_size` ranks.

    Attributes:
        source_world_size, target_world_size: the numbers of ranks.
        tensor_redistributions: in the order of the tensors, then of the source ranks.
        job: the work; None in a plan written by hand, which cannot be run.
    """

    source_world_size: int
    target_world_size: int
    tensor_redistributions: tuple[TensorRedistribution, ...]
    job: Job | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_job(cls, job: Job, source_world_size: int, target_world_size: int) -> ReshardingPlan:
        """Return the view of a job between two numbers of ranks."""
        redistributions = [
            redistribution
            for item in job.items
            for redistribution in _list_redistributions(job, item)
        ]
        return cls(source_world_size, target_world_size, tuple(redistributions), job)

    @cached_property
    def _by_name(self) -> Mapping[str, list[TensorRedistribution]]:
        result: dict[str, list[TensorRedistribution]] = {}
        for redistribution in self.tensor_redistributions:
            result.setdefault(redistribution.tensor_name, []).append(redistribution)
        return result

    def redistributions(self, tensor_name: str) -> list[TensorRedistribution]:
        """Return the redistributions of a tensor, by source rank; an empty list for an
        absent name.
        """
        return list(self._by_name.get(tensor_name, ()))

    def source_rank(self, tensor_name: str) -> int | None:
        """Return the first source rank that sends elements of a tensor; None for an absent name."""
        return next(iter(self.source_ranks(tensor_name)), None)

    def source_ranks(self, tensor_name: str) -> list[int]:
        """Return all source ranks that send elements of a tensor; empty for an absent name."""
        return sorted(
            {redistribution.source_rank for redistribution in self._by_name.get(tensor_name, ())}
        )

    def target_ranks(self, tensor_name: str) -> list[int]:
        """Return the target ranks that receive elements of a tensor; empty for an absent name."""
        ranks = {
            rank
            for redistribution in self._by_name.get(tensor_name, ())
            for rank in redistribution.target_ranks
        }
        return sorted(ranks)


class ReshardingResult(Record):
    """The result of an execution.

    Attributes:
        target_shards: the arrays of each target rank, `{rank: {name: array}}`; where several
            processes share the work, of this process's ranks. A rank that holds nothing has an
            empty mapping.
        success: whether everything was done; False for an execution that was cancelled, whose
            shards then are those tensors that were complete.
        warnings: notes for the user, in full sentences.
        duration_s: how long it took.
        copied_bytes: the size of all elements that this process copied.
    """

    target_shards: dict[int, dict[str, Any]]
    success: bool
    warnings: list[str]
    duration_s: float
    copied_bytes: int = 0


def _list_redistributions(job: Job, item: JobItem) -> Iterator[TensorRedistribution]:
    """Yield a redistribution for each source cell that sends elements."""
    source = item.change.source
    rows = job.transfers.get(item.name, Transfers.none(source.ndim))
    if not len(rows):
        yield from _list_without_elements(item)
        return
    # By source cell, then receiver, then place in the tensor: a redistribution is a stretch.
    rows = rows.take(np.lexsort((*rows.start.T[::-1], rows.target_slot, rows.source_cell)))
    starts, stops = rows.source_start.tolist(), (rows.source_start + rows.shape).tolist()
    columns = zip(rows.target_slot.tolist(), starts, stops, rows.shape.tolist(), strict=True)
    slices = [TensorSlice(rank, tuple(a), tuple(b), tuple(n)) for rank, a, b, n in columns]
    # -1 differs from every cell, so both ends are bounds.
    bounds = np.flatnonzero(np.diff(rows.source_cell, prepend=-1, append=-1)).tolist()
    for low, high in itertools.pairwise(bounds):
        cell = int(rows.source_cell[low])
        shape = tuple(source.cell_shape[cell].tolist())
        yield _make_redistribution(item.name, int(source.cell_slot[cell]), shape, slices[low:high])


def _list_without_elements(item: JobItem) -> Iterator[TensorRedistribution]:
    """Yield the redistribution of a tensor without elements, from its first holder to all."""
    source, target = item.change.source, item.change.target
    if source.holders and target.holders:
        sender, zeros = source.holders[0], (0,) * source.ndim
        shape = source.local_shape(sender) or ()
        slices = [TensorSlice(rank, zeros, shape, shape) for rank in target.holders]
        yield _make_redistribution(item.name, sender, shape, slices)


def _make_redistribution(
    name: str, sender: int, shape: Shape, slices: list[TensorSlice]
) -> TensorRedistribution:
    receivers = tuple(dict.fromkeys(part.target_rank for part in slices))
    return TensorRedistribution(name, sender, shape, receivers, tuple(slices))


SourceShards = Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]]
_SHOWN = 5


class _Run:
    """An execution of a plan in a process.

    Attributes:
        job: the work.
        was_cancelled: whether some of it was not done.

    Raises:
        PlanError: a plan that was written by hand.
    """

    def __init__(
        self, plan: ReshardingPlan, shards: SourceShards, is_cancelled: Callable[[], bool]
    ) -> None:
        if plan.job is None:
            raise PlanError(
                "a plan that was written by hand has no job, and cannot be run; make it with "
                "create_plan"
            )
        self._begun_s = time.perf_counter()
        self._plan = plan
        self.job = plan.job
        self._shards = shards
        self._is_cancelled = is_cancelled
        self._arrays: dict[str, dict[int, Any]] = {}
        self._found: dict[int, dict[str, Any]] = {}
        self._copied_bytes: dict[int, int] = {}
        self.was_cancelled = False

    def check(self) -> None:
        """Check every array of the source; nothing is copied.

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
                f"no array of tensor {name!r} on source rank {rank}; the plan's metadata has "
                "that it has a part of it"
            ) from None

    def fill_all(self, ranks: Sequence[int], threads: int) -> None:
        """Fill the arrays of target ranks with at most `threads` threads."""
        threads = min(threads, len(ranks))
        if threads < 2:
            for rank in ranks:
                self._fill(rank)
            return
        with ThreadPoolExecutor(threads) as pool:
            # Errors of threads are raised when their results are taken.
            list(pool.map(self._fill, ranks))

    def _fill(self, rank: int) -> None:
        """Fill a target rank's arrays. Each is added once it is complete."""
        arrays = self._found.setdefault(rank, {})
        try:
            for item in self._find_items(rank):
                self._stop_where_cancelled()
                array, copied = run_rank(
                    item.change, rank, self._arrays[item.name], self._stop_where_cancelled
                )
                arrays[item.name] = array
                size_bytes = copied * item.dtype.itemsize_bytes
                self._copied_bytes[rank] = self._copied_bytes.get(rank, 0) + size_bytes
        except InterruptedRunError:
            self.was_cancelled = True

    def _find_items(self, rank: int) -> list[JobItem]:
        return [item for item in self.job.items if item.change.target.local_shape(rank) is not None]

    def _stop_where_cancelled(self) -> None:
        if self._is_cancelled():
            raise InterruptedRunError("cancelled")

    def result(self, ranks: Iterable[int], notes: Sequence[str] = ()) -> ReshardingResult:
        """Return the arrays of the target `ranks` so far; `notes` are the reasons for which
        other processes stopped.
        """
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
        """Return a warning about arrays that the plan does not name, if any."""
        # Shards are a list by rank, or a mapping of ranks.
        named = self._shards.values() if isinstance(self._shards, Mapping) else self._shards
        planned = {item.name for item in self.job.items}
        extra = dict.fromkeys(name for shard in named for name in shard if name not in planned)
        if not extra:
            return []
        return [f"left out, since the plan's metadata does not name them: {_join(extra)}"]

    def _list_empty(self, ranks: Sequence[int]) -> list[str]:
        """Return a warning about ranks to which the policy assigns no tensor, if any."""
        empty = [rank for rank in ranks if not self._find_items(rank)]
        return [f"target ranks that hold nothing: {_join(empty)}"] if empty else []

    def _describe_progress(self, ranks: Sequence[int]) -> str:
        expected = {rank: [item.name for item in self._find_items(rank)] for rank in ranks}
        count = sum(len(self._found.get(rank, {})) for rank in ranks)
        parts = [f"cancelled with {count} of {sum(map(len, expected.values()))} arrays complete"]
        # Ranks that are complete are named as such, the others by their tensors.
        whole = [rank for rank in ranks if len(self._found.get(rank, {})) == len(expected[rank])]
        if whole:
            parts.append(f"all of target ranks {_join(whole)}")
        for rank in ranks:
            if rank not in whole and self._found.get(rank):
                parts.append(f"of target rank {rank} {_join(self._found[rank])}")
        return "; ".join([*parts, "the rest was left undone, and the source is as it was"])


def _join(things: Iterable[object]) -> str:
    return first_text([*things], _SHOWN)


class _Turn:
    """A run's position in its coordinator's queue, taken when it is made.

    `wait` returns when all earlier runs have left. `leave` must be called in any case, because
    later runs wait for it.

    >>> processes = object()
    >>> first, second = _Turn(processes), _Turn(processes)
    >>> first.wait()
    >>> first.leave()
    >>> second.wait()
    >>> second.leave()
    """

    # By the identity of a coordinator, which need not be hashable. Its turns keep it alive.
    _queues: ClassVar[dict[int, deque[_Turn]]] = {}
    _has_changed: ClassVar[threading.Condition] = threading.Condition()

    def __init__(self, coordinator: object) -> None:
        self._coordinator = coordinator
        with self._has_changed:
            self._queues.setdefault(id(coordinator), deque()).append(self)

    def wait(self) -> None:
        """Wait until all runs begun earlier have left."""
        queue = self._queues[id(self._coordinator)]
        with self._has_changed:
            self._has_changed.wait_for(lambda: queue[0] is self)

    def leave(self) -> None:
        """Leave the queue, whether the run has had its turn or not."""
        queue = self._queues[id(self._coordinator)]
        with self._has_changed:
            queue.remove(self)
            if not queue:
                del self._queues[id(self._coordinator)]
            self._has_changed.notify_all()


class TensorMetadata(NamedTuple):
    """A tensor as strategies need it: its dtype, and its layout over source ranks."""

    dtype: Any
    layout: Layout


class Coordinator(Protocol):
    """The processes that share the work, as seen from this process.

    `reshard.checkpoint.running_processes` gives the processes of torchrun, or this process alone.
    """

    rank: int
    size: int

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all processes, on every process."""


class ReshardingStrategy(Record):
    """A policy with the means to plan from N ranks to M ranks, and to run plans on arrays.

    Every process of a coordinator calls `create_plan` and `execute` with the same arguments, and
    gets the shards of its own target ranks: consecutive ranks, divided evenly. Give source shards
    that are mapped from files; then a process needs memory for its own ranks only.

    Args:
        policy: gives each tensor its layout.
        coordinator: the processes that share the target ranks; this process alone if None.
        threads: how many target ranks a process fills at the same time.

    Raises:
        UsageError: threads below 1 or not an integer.
    """

    policy: Strategy
    coordinator: Coordinator | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", check_int(self.threads, "threads", minimum=1))

    def create_plan(
        self,
        metadata: Mapping[str, Any],
        target_world_size: int,
        config: Config | None = None,
    ) -> ReshardingPlan:
        """Plan the change from the layouts of tensors to those that the policy gives them.

        Args:
            metadata: `TensorMetadata` by name; the `tensors` of an opened checkpoint will do.
            target_world_size: the number of ranks to reshard to.
            config: the model's config.json, for policies that use it.

        Raises:
            UsageError: a world size below 1 or not an integer; metadata without dtype or layout.
            RecipeError: a policy that cannot lay out these tensors.
            PlanError: a source that lacks an element.
        """
        _check_metadata(metadata)
        ranks = check_int(target_world_size, "target world size", minimum=1)
        dtypes = {name: as_dtype(tensor.dtype) for name, tensor in metadata.items()}
        tensors = {name: (dtypes[name], tensor.layout.shape) for name, tensor in metadata.items()}
        layouts = self.policy(tensors, ranks, config)
        job = Job(
            JobItem.between_ranks(name, dtypes[name], tensor.layout, layouts[name])
            for name, tensor in metadata.items()
        )
        sources = max((tensor.layout.slots for tensor in metadata.values()), default=0)
        return ReshardingPlan.of_job(job, sources, ranks)

    def execute(
        self,
        plan: ReshardingPlan,
        source_shards: SourceShards,
        cancellation: threading.Event | None = None,
    ) -> ReshardingResult:
        """Return the target's shards, copied from the source's.

        Runs of a coordinator take turns, in the order in which they were begun.

        Args:
            plan: made by `create_plan`.
            source_shards: for each source rank, its arrays by name. They are only read.
            cancellation: a stop signal, such as a `threading.Event`. It is checked before each
                box; once it is set, the rest is left undone.

        Raises:
            ShardError: an array that is missing, or has another shape or dtype; nothing was
                copied.
            PlanError: a plan that was written by hand, or differs from that of another process.
            RunError: another process that failed.
        """
        stop = threading.Event() if cancellation is None else cancellation
        return self._execute_in_turn(self._begin(), plan, source_shards, stop.is_set)

    async def execute_async(
        self,
        plan: ReshardingPlan,
        source_shards: SourceShards,
        cancellation: threading.Event | None = None,
    ) -> ReshardingResult:
        """Run `execute` in a thread, so that the event loop continues meanwhile.

        If the task is cancelled, the work ends before its next box, and the CancelledError
        reports the progress. The source is unchanged.
        """
        stop = threading.Event()

        def is_cancelled() -> bool:
            return stop.is_set() or (cancellation is not None and cancellation.is_set())

        turn = self._begin()
        # A thread of its own: runs that wait for their turn must not use up the loop's threads.
        pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-strategy")
        running = asyncio.get_running_loop().run_in_executor(
            pool, self._execute_in_turn, turn, plan, source_shards, is_cancelled
        )
        # The thread ends after its run; to wait here would block the event loop.
        pool.shutdown(wait=False)
        try:
            # Shielded: cancelling the task asks the run to stop, which then reports its progress.
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # The other processes wait for this process, so its run must finish as theirs do.
            stop.set()
            try:
                result = await running
            except ReshardError as error:
                raise asyncio.CancelledError(str(error)) from error
            message = "cancelled when all was done" if result.success else result.warnings[-1]
            raise asyncio.CancelledError(message) from None

    def _begin(self) -> _Turn:
        """Queue a run that begins now."""
        coordinator = self.coordinator
        # Runs of a single process exchange nothing with others: each has a queue of its own.
        is_alone = coordinator is None or coordinator.size < 2
        return _Turn(object() if is_alone else coordinator)

    def _execute_in_turn(
        self,
        turn: _Turn,
        plan: ReshardingPlan,
        shards: SourceShards,
        is_cancelled: Callable[[], bool],
    ) -> ReshardingResult:
        # Taken before the run may fail or be cancelled, since later runs wait for the turn to end.
        try:
            turn.wait()
            return self._execute(plan, shards, is_cancelled)
        finally:
            turn.leave()

    def _execute(
        self, plan: ReshardingPlan, shards: SourceShards, is_cancelled: Callable[[], bool]
    ) -> ReshardingResult:
        run, problem, digest = None, None, None
        # On any failure here, the other processes must not wait for this process.
        try:
            run = _Run(plan, shards, is_cancelled)
            run.check()
            digest = run.job.digest
        except Exception as error:
            problem = error
        # No process copies before all of them can, with equal plans.
        digests = self._exchange(problem, "nothing was copied", digest)
        if run is None or len(set(digests)) > 1:
            raise PlanError(
                "the processes have different plans; nothing was copied. Give every process the "
                "same metadata, number of ranks and policy, and begin their runs in the same order"
            )
        process, count = 0, 1
        if self.coordinator is not None:
            process, count = self.coordinator.rank, self.coordinator.size
        # Consecutive target ranks, divided evenly; every process computes the same split.
        ranks = np.array_split(np.arange(plan.target_world_size), count)[process].tolist()
        try:
            run.fill_all(ranks, self.threads)
        except Exception as error:
            problem = error
        otherwise = "the target ranks of other processes are not complete"
        cancelled = self._exchange(problem, otherwise, run.was_cancelled)
        notes = [
            f"process {other} was cancelled; its target ranks are not complete"
            for other, was_cancelled in enumerate(cancelled)
            if was_cancelled and other != process
        ]
        return run.result(ranks, notes)

    def _exchange(self, problem: Exception | None, otherwise: str, value: Any) -> list[Any]:
        """Collect the values of all processes. Raises the problem, or RunError for another's."""
        sent = (None if problem is None else repr(problem), value)
        received = [sent] if self.coordinator is None else self.coordinator.collect(sent)
        if problem is not None:
            raise problem
        for process, (other, _) in enumerate(received):
            if other is not None:
                raise RunError(f"{otherwise}: process {process} failed: {other}")
        return [value for _, value in received]


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise UsageError for metadata without a dtype and a layout for every tensor."""
    if not isinstance(metadata, Mapping):
        raise UsageError(
            f"metadata of type {type(metadata).__name__}; give a mapping of names to "
            "TensorMetadata, or the tensors of an opened checkpoint"
        )
    for name, tensor in metadata.items():
        if not isinstance(getattr(tensor, "layout", None), Layout) or not hasattr(tensor, "dtype"):
            raise UsageError(
                f"the metadata {tensor!r} of tensor {name!r}; give TensorMetadata(dtype, layout), "
                "such as TensorMetadata('float32', spec.layout(shape))"
            )


def create_strategy(name: str, coordinator: Coordinator | None = None) -> ReshardingStrategy:
    """Return the strategy of a name; case does not matter.

    `parallel` shares the work among a coordinator's processes. All others, including those that
    `reshard.recipes.strategies.register_strategy` added, need none.

    Raises:
        UsageError: `parallel` without a coordinator.
        RecipeError: an unknown name; the known names are listed.

    >>> create_strategy("Simple").policy.name
    'simple'
    >>> create_strategy("parallel")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: the strategy 'parallel' needs a coordinator, whose processes share
    the work: create_strategy('parallel', coordinator); for a single process,
    reshard.checkpoint.OneProcess()
    """
    policy = strategy(name)
    if policy.name != "parallel":
        return ReshardingStrategy(policy)
    if coordinator is None:
        raise UsageError(
            f"the strategy {name!r} needs a coordinator, whose processes share the work: "
            f"create_strategy({name!r}, coordinator); for a single process, "
            "reshard.checkpoint.OneProcess()"
        )
    return ReshardingStrategy(policy, coordinator, threads=4)
