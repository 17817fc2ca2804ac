"""Weight syncs: a trainer's weights into those of engines, prepared once and run after every step.

Both sides call `run` once a step; what one run does::

    trainer                                engine
    which engines are there, which version
    its version                   --->     waits for it
    refit, with each engine       --->     is written in place
    report                                 has the version

An engine whose run fails is given up by the trainer, and the others go on. The engine's `version`
is the one that it has completely. It is None where a run broke after the first byte: then it has
parts of two, and `is_usable` is False.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.errors import LinkError, ReshardError, RunError, UsageError
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.refitting.refit import Refit


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a run did, as the trainer or an engine sees it.

    Attributes:
        version: of the weights.
        engines: seconds of each engine that has them, by name.
        lost: engines that were given up in this run or since the one before, and why.
        seconds: of the whole run.
        sent_bytes, received_bytes: of this rank.
    """

    version: int
    engines: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


class WeightSync:
    """A model that is prepared to be sent, or to be filled; get it by `Link.prepare`.

    `version` is that of the last run that came to its end here; None before the first, and where a
    run broke in the middle. `report` is of the last run.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.report: SyncReport | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the model has the values of one version, and none of another."""
        raise NotImplementedError

    @property
    def is_done(self) -> bool:
        """Whether the run that was begun last has ended."""
        return self._thread is None or not self._thread.is_alive()

    def run(self, version: int | None = None, *, async_op: bool = False) -> SyncReport | None:
        """Bring the engines what the trainer has now. All processes of all sides call this.

        Args:
            version: of the weights, on the trainer; one more than the last when None. An engine
                learns it.
            async_op: whether to return at once; `wait` then gives the report. Until it has, a
                trainer must not change its weights, nor an engine use its own.

        Returns:
            The report; None with `async_op`.

        Raises:
            LinkError: the other side is gone, or closed the link. An engine has its old weights
                then, unless `is_usable` says that it has not.
            RunError: a rank that fails.
            UsageError: a version that is no number from 0 up, or one before the last.
        """
        self.wait()
        version = self._check_version(version)
        if not async_op:
            self.report = self._run(version)
            return self.report
        self._error = None
        # A thread that waits for a process that never answers must not keep this one.
        self._thread = threading.Thread(
            target=self._run_beside, args=(version,), name="reshard sync", daemon=True
        )
        self._thread.start()
        return None

    def wait(self) -> SyncReport | None:
        """The report of the run that was begun last, once it has ended. Raises what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error
        return self.report

    def verify(self) -> None:
        """Compare the engines' weights with what the trainer has now, by digests.

        All processes of all sides call this.

        Raises:
            RunError: on all sides, elements that differ: which tensors, and on which ranks.
            LinkError: no engine is there.
        """
        self.wait()
        self._verify()

    def _verify(self) -> None:
        raise NotImplementedError

    def _run_beside(self, version: int) -> None:
        try:
            self.report = self._run(version)
        except BaseException as error:
            self._error = error

    def _run(self, version: int) -> SyncReport:
        raise NotImplementedError

    def _check_version(self, version: int | None) -> int:
        raise NotImplementedError


class TrainerSync(WeightSync):
    """The trainer's part.

    Args:
        prepare: what makes a refit with an engine's ranks.
        begin: what finds the engines of a run, prepares those that are new, and gives those that
            are lost with the reasons.
    """

    def __init__(
        self,
        prepare: Callable[[RankGroup], Refit],
        begin: Callable[[], Iterable[tuple[int, str, RankGroup]]],
        give_up: Callable[[int, str], None],
        take_lost: Callable[[], dict[str, str]],
    ) -> None:
        super().__init__()
        self._prepare = prepare
        self._begin, self._give_up, self._take_lost = begin, give_up, take_lost
        self.refits: dict[int, Refit] = {}

    @property
    def is_usable(self) -> bool:
        """A trainer's own weights are never written."""
        return True

    def prepare_for(self, number: int, group: RankGroup) -> None:
        """Prepare the refit of one engine. Raises what `Refit.prepare` does."""
        self.refits[number] = self._prepare(group)

    def _check_version(self, version: int | None) -> int:
        last = -1 if self.version is None else self.version
        if version is None:
            return last + 1
        if isinstance(version, bool) or not isinstance(version, int) or version < max(last, 0):
            raise UsageError(
                f"version={version!r}; give a whole number, not below the last one ({last})"
            )
        return version

    def _run(self, version: int) -> SyncReport:
        begun_s = time.perf_counter()
        seconds: dict[str, float] = {}
        sent_bytes = 0
        for number, name, group in self._begin():
            refit, from_s = self.refits[number], time.perf_counter()
            try:
                tell_version(group, version)
                refit.run()
            except ReshardError as error:
                # The other engines go on, and this one may come again.
                self._give_up(number, str(error))
                continue
            seconds[name] = time.perf_counter() - from_s
            sent_bytes += refit.sent_bytes
        lost = self._take_lost()
        if not seconds:
            told = "; ".join(f"{name}: {why}" for name, why in lost.items())
            raise LinkError(
                f"no engine has version {version}: {told or 'none is there'}; run again once one is"
            )
        self.version = version
        spent_s = time.perf_counter() - begun_s
        return SyncReport(version, seconds, lost, spent_s, sent_bytes)

    def _verify(self) -> None:
        if not self.refits:
            raise LinkError("no engine is there to be compared; run first")
        problems = []
        for refit in self.refits.values():
            # What one engine lacks does not keep the next one from being compared.
            try:
                refit.verify()
            except RunError as error:
                problems.append(str(error))
        if problems:
            raise RunError("; ".join(problems))


class EngineSync(WeightSync):
    """An engine's part: its refit, with all ranks of the trainer and its own."""

    def __init__(self, refit: Refit, group: RankGroup) -> None:
        super().__init__()
        self.refit = refit
        self._group = group

    @property
    def is_usable(self) -> bool:
        """Whether the engine's weights are of one version."""
        return self.refit.is_usable

    def _check_version(self, version: int | None) -> int:
        if version is not None:
            raise UsageError(f"version={version!r} on an engine; the trainer says it")
        return 0

    def _run(self, version: int) -> SyncReport:
        has = "no weights of the trainer's" if self.version is None else f"version {self.version}"
        try:
            version = hear_version(self._group)
        except ReshardError as error:
            raise LinkError(f"the engine still has {has}: {error}") from error
        begun_s = time.perf_counter()
        try:
            self.refit.run()
        except ReshardError as error:
            if self.is_usable:
                raise LinkError(f"the engine still has {has}: {error}") from error
            self.version = None
            raise LinkError(
                f"the engine has parts of version {version} and of what it had ({has}): {error}"
            ) from error
        self.version = version
        spent_s = time.perf_counter() - begun_s
        received_bytes = self.refit.received_bytes
        return SyncReport(version, seconds=spent_s, received_bytes=received_bytes)

    def _verify(self) -> None:
        self.refit.verify()


def tell_version(group: RankGroup, version: int) -> None:
    """The trainer's first rank tells all ranks of a group which version comes.

    All of the trainer's ranks call this. Raises RunError where a rank does not answer.
    """
    with group.errors("nothing was moved"):
        group.broadcast(torch.tensor([version]), group.ranks[0])


def hear_version(group: RankGroup) -> int:
    """The version that the trainer brings. Raises RunError where it does not come."""
    told: Any = torch.zeros(1, dtype=torch.int64)
    with group.errors("the trainer does not answer"):
        group.broadcast(told, group.ranks[0])
    return int(told.item())
