"""Strategies: tensors of N ranks become tensors of M ranks, where a policy says what goes where.

A `ReshardingStrategy` makes a plan and carries it out, in memory::

    strategy = create_strategy("simple")
    plan = strategy.create_plan(metadata, target_world_size=4)
    result = strategy.execute(plan, source_shards)         # or await execute_async(...)

1. The policy (`reshard.recipes.strategies`) gives every tensor a layout over the target ranks.
2. A `Job` says which boxes go from which rank to which; the plan is a view of it.
3. The processes agree on the job, and each takes a share of the target ranks.
4. Arrays are checked, then each target rank's are put together (`run`).

`simple` treats one target rank after the other, in this process. `parallel` treats them at the
same time: the processes of a coordinator share them out, and threads do in each process, which
reads of the source what its own ranks get and nothing else.

Source: `IReshardingStrategy` of the checkpoint resharding specification.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from reshard._validation import check_int
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, ReshardError, RunError, UsageError
from reshard.layout import Layout
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.recipes.resharding.redistributions import ReshardingPlan, ReshardingResult
from reshard.recipes.resharding.run import Cancellation, ReshardingRun, SourceShards
from reshard.recipes.resharding.turns import Turn
from reshard.recipes.strategies import Config, Strategy, strategy


class TensorMetadata(NamedTuple):
    """A tensor as strategies need it: its dtype, and its layout over source ranks."""

    dtype: Any
    layout: Layout


class HasLayout(Protocol):
    """A `TensorMetadata`, or a tensor of an opened checkpoint."""

    @property
    def dtype(self) -> Any:
        """Of its elements, by name or as an object."""

    @property
    def layout(self) -> Layout:
        """Which source rank holds what."""


class Coordinator(Protocol):
    """Processes that share the work, seen from one of them.

    `reshard.checkpoint.running_processes` gives one for a job of torchrun, or for one process.
    """

    rank: int
    size: int

    def collect(self, value: Any) -> list[Any]:
        """The values of all processes, on every process."""


class _ThisProcess:
    """The coordinator of a strategy that shares its work with nobody."""

    rank = 0
    size = 1

    def collect(self, value: Any) -> list[Any]:
        return [value]


class ReshardingStrategy:
    """Makes plans from N ranks to M ranks, and carries them out on arrays.

    Attributes:
        policy: says which layout each tensor gets.
        coordinator: the processes that share the target ranks; this one alone, for most.
        threads: how many target ranks a process treats at the same time.
    """

    policy: Strategy
    coordinator: Coordinator
    threads: int

    def create_plan(
        self,
        metadata: Mapping[str, HasLayout],
        target_world_size: int,
        config: Config | None = None,
    ) -> ReshardingPlan:
        """The plan from the layouts that tensors have to those that the policy gives them.

        Args:
            metadata: of each tensor by name; the `tensors` of an opened checkpoint will do.
            target_world_size: the number of ranks to reshard to.
            config: the model's config.json, for policies that look into it.

        Raises:
            UsageError: no whole number of ranks from 1 on; metadata that has no dtype and layout.
            RecipeError: a policy that cannot lay out these tensors.
            PlanError: a source that leaves out an element.
        """
        _check_metadata(metadata)
        ranks = check_int(target_world_size, "target world size", minimum=1)
        dtypes = {name: as_dtype(one.dtype) for name, one in metadata.items()}
        tensors = {name: (dtypes[name], one.layout.shape) for name, one in metadata.items()}
        layouts = self.policy(tensors, ranks, config)
        job = Job(
            JobItem.between_ranks(name, dtypes[name], one.layout, layouts[name])
            for name, one in metadata.items()
        )
        sources = max((one.layout.slots for one in metadata.values()), default=0)
        return ReshardingPlan.of_job(job, sources, ranks)

    def execute(
        self,
        plan: ReshardingPlan,
        source_shards: SourceShards,
        cancellation: Cancellation | None = None,
    ) -> ReshardingResult:
        """The target's shards, from the source's.

        Runs of one coordinator take turns, in the order in which they were begun.

        Args:
            plan: that `create_plan` made.
            source_shards: for each source rank, its arrays by name. They are only read.
            cancellation: looked at before each box; once it is set, the rest is left undone.

        Raises:
            ShardError: an array that is missing, or has another shape or dtype; nothing was
                copied.
            PlanError: a plan that was written by hand, or is not that of the other processes.
            RunError: another process that failed.
        """
        return self._execute_in_turn(self._begin(), plan, source_shards, cancellation)

    async def execute_async(
        self,
        plan: ReshardingPlan,
        source_shards: SourceShards,
        cancellation: Cancellation | None = None,
    ) -> ReshardingResult:
        """`execute` in a thread, so that the event loop goes on meanwhile.

        Where the task is cancelled, the work ends before its next box, and the CancelledError
        says what was done. The source is as it was.
        """
        stop = _Stop(cancellation)
        turn = self._begin()
        # A thread of its own: runs that wait for their turn must not use up the loop's threads.
        pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-strategy")
        running = asyncio.get_running_loop().run_in_executor(
            pool, self._execute_in_turn, turn, plan, source_shards, stop
        )
        pool.shutdown(wait=False)
        try:
            # Shielded: cancelling the task asks the run to stop, which then says how far it came.
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # The other processes wait for this one in this run, so it comes to its end as theirs.
            stop.set()
            try:
                result = await running
            except ReshardError as error:
                raise asyncio.CancelledError(str(error)) from error
            message = "cancelled when all was done" if result.success else result.warnings[-1]
            raise asyncio.CancelledError(message) from None

    def _begin(self) -> Turn | None:
        """The place of a run that begins now; runs of a single process need none."""
        return Turn(self.coordinator) if self.coordinator.size > 1 else None

    def _execute_in_turn(
        self,
        turn: Turn | None,
        plan: ReshardingPlan,
        shards: SourceShards,
        cancellation: Cancellation | None,
    ) -> ReshardingResult:
        if turn is None:
            return self._execute(plan, shards, cancellation)
        try:
            turn.wait()
            return self._execute(plan, shards, cancellation)
        finally:
            turn.leave()

    def _execute(
        self, plan: ReshardingPlan, shards: SourceShards, cancellation: Cancellation | None
    ) -> ReshardingResult:
        run, problem, digest = None, None, None
        # Whatever goes wrong here, the other processes must not wait for this one.
        try:
            run = ReshardingRun(plan, shards, cancellation)
            run.check()
            digest = run.job.digest
        except Exception as error:
            problem = error
        # Nobody copies before everybody can, and means the same.
        digests = self._exchange(problem, "nothing was copied", digest)
        if run is None or len(set(digests)) > 1:
            raise PlanError(
                "the processes have different plans; nothing was copied. Give every process the "
                "same metadata, number of ranks and policy, and begin their runs in one order"
            )
        place = self.coordinator.rank
        # Consecutive target ranks, as equal in number as can be; the same split in every process.
        shares = np.array_split(np.arange(plan.target_world_size), self.coordinator.size)
        ranks = shares[place].tolist()
        try:
            run.fill_all(ranks, self.threads)
        except Exception as error:
            problem = error
        otherwise = "the target ranks of other processes are not complete"
        cancelled = self._exchange(problem, otherwise, run.was_cancelled)
        notes = [
            f"process {process} was cancelled; its target ranks are not complete"
            for process, is_so in enumerate(cancelled)
            if is_so and process != place
        ]
        return run.result(ranks, notes)

    def _exchange(self, problem: Exception | None, otherwise: str, value: Any) -> list[Any]:
        """The values of all processes. Raises this one's problem, or RunError for another's."""
        received = self.coordinator.collect((None if problem is None else repr(problem), value))
        if problem is not None:
            raise problem
        for process, (other, _) in enumerate(received):
            if other is not None:
                raise RunError(f"{otherwise}: process {process} failed: {other}")
        return [value for _, value in received]


@dataclass(frozen=True)
class SimpleReshardingStrategy(ReshardingStrategy):
    """One target rank after the other, in this process."""

    policy: Strategy = field(default_factory=lambda: strategy("simple"))
    coordinator: Coordinator = field(default=_ThisProcess(), init=False, repr=False)
    threads: int = field(default=1, init=False, repr=False)


@dataclass(frozen=True)
class ParallelReshardingStrategy(ReshardingStrategy):
    """Target ranks at the same time: in the processes of a coordinator, and in threads of each.

    Every process calls `create_plan` and `execute` with the same arguments, and gets the shards
    of its own target ranks: a run of them, as many as others have, or one more. Give source
    shards that are mapped from files; then a process needs memory for its own ranks only.

    Raises:
        UsageError: no whole number of threads from 1 on.
    """

    coordinator: Coordinator
    policy: Strategy = field(default_factory=lambda: strategy("parallel"))
    threads: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", check_int(self.threads, "threads", minimum=1))


def _check_metadata(metadata: Mapping[str, HasLayout]) -> None:
    """Raise UsageError for what does not give every tensor a dtype and a layout."""
    if not isinstance(metadata, Mapping):
        raise UsageError(
            f"metadata of type {type(metadata).__name__}; give a mapping of names to "
            "TensorMetadata, or the tensors of an opened checkpoint"
        )
    for name, one in metadata.items():
        if not isinstance(getattr(one, "layout", None), Layout) or not hasattr(one, "dtype"):
            raise UsageError(
                f"the metadata {one!r} of tensor {name!r}; give TensorMetadata(dtype, layout), "
                "such as TensorMetadata('float32', spec.layout(shape))"
            )


def create_strategy(name: str, coordinator: Coordinator | None = None) -> ReshardingStrategy:
    """The strategy of a name; case does not matter.

    `parallel` shares the work among a coordinator's processes. All others, those that
    `reshard.recipes.strategies.register_strategy` added included, need none.

    Raises:
        UsageError: `parallel` without a coordinator.
        RecipeError: an unknown name; the known ones are listed.

    >>> create_strategy("Simple").policy.name
    'simple'
    >>> create_strategy("parallel")
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: the strategy 'parallel' needs a coordinator, whose processes share
    the work: create_strategy('parallel', coordinator); reshard.checkpoint.OneProcess() is one of a
    single process
    """
    policy = strategy(name)
    if policy.name != "parallel":
        return SimpleReshardingStrategy(policy)
    if coordinator is None:
        raise UsageError(
            f"the strategy {name!r} needs a coordinator, whose processes share the work: "
            f"create_strategy({name!r}, coordinator); "
            "reshard.checkpoint.OneProcess() is one of a single process"
        )
    return ParallelReshardingStrategy(coordinator, policy)


class _Stop:
    """Set by itself, or by what the caller gave."""

    def __init__(self, given: Cancellation | None) -> None:
        self._given = given
        self._own = threading.Event()

    def set(self) -> None:
        self._own.set()

    def is_set(self) -> bool:
        return self._own.is_set() or (self._given is not None and self._given.is_set())
