"""How are thousands of cases run, counted, bounded in time, and any of them run again?

A campaign is a class whose objects run one case, all of which follows from a number, the seed:

1. Worker processes make one object each, and are handed seeds in rising order.
2. A case answers with counts of what it did; the campaign ends at its goal, or when its time is up.
3. A case that raises, or ends its worker, has failed; so has one that takes longer than any
   should. Its seed and the command that runs only it again are printed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

LONGEST_CASE_S = 120.0
# How often a campaign says what it has done.
TELL_S = 30.0
MOST_FAILURES = 5
MEMORY = Path("/dev/shm")
_BATCH = 4
_WATCH_S = 0.25


class Campaign(Protocol):
    """Cases of one kind. `goal` is the name of the option and of the count it bounds.

    Where `is_in_memory`, its folders are in memory if there is such a place, else on a disk.
    """

    goal: ClassVar[str]
    is_in_memory: ClassVar[bool]

    def __init__(self, folder: Path) -> None:
        """A worker's own, with an empty folder that is removed after the campaign."""

    def run(self, seed: int) -> Counter[str]:
        """Run one case; answers what was done. Raises for what is wrong."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that went wrong, and what it said."""

    seed: int
    text: str


@dataclass(slots=True)
class Outcome:
    """What a campaign did, and what went wrong."""

    goal: str
    wanted: int
    first_seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.counts[self.goal] >= self.wanted


def reproduce(goal: str, seed: int) -> str:
    """The command that runs one case again."""
    return f'make soak SOAK="--only {goal} --{goal} 1 --seed {seed}"'


class _Worker:
    """The campaign of this process, and what ends it when a case hangs."""

    def __init__(self, kind: type[Campaign], parent: str) -> None:
        self.kind = kind
        self.parent = parent
        self.campaign: Campaign | None = None
        self.running: tuple[int, float] | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_S)
            running = self.running
            if running is not None and time.monotonic() - running[1] > LONGEST_CASE_S:
                sys.stderr.write(
                    f"\nseed {running[0]} hangs: it runs for more than {LONGEST_CASE_S:g} s\n"
                    f"{reproduce(self.kind.goal, running[0])}\n"
                )
                faulthandler.dump_traceback(sys.stderr)
                os._exit(1)

    def run(self, seed: int) -> Counter[str] | Failure:
        if self.campaign is None:
            self.campaign = self.kind(Path(tempfile.mkdtemp(dir=self.parent)))
        self.running = (seed, time.monotonic())
        try:
            return self.campaign.run(seed)
        except Exception:
            return Failure(seed, traceback.format_exc())
        finally:
            self.running = None


_worker: _Worker | None = None


def _begin(kind: type[Campaign], parent: str) -> None:
    global _worker
    _worker = _Worker(kind, parent)


def _run_batch(seeds: range) -> list[Counter[str] | Failure]:
    if _worker is None:
        raise RuntimeError("a worker runs cases after it has begun")
    return [_worker.run(seed) for seed in seeds]


def run_campaign(
    kind: type[Campaign],
    wanted: int,
    first_seed: int,
    seconds_s: float,
    workers: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run cases until `wanted` is reached, or so many seconds have passed.

    `tell` is given what was done so far, every `TELL_S` seconds and after each failure.
    """
    outcome = Outcome(kind.goal, wanted, first_seed)
    began_s = told_s = time.monotonic()
    place = MEMORY if kind.is_in_memory and MEMORY.is_dir() else None
    parent = tempfile.mkdtemp(dir=place, prefix="reshard-soak-")
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (kind, parent)
    )
    running: dict[Future[list[Counter[str] | Failure]], range] = {}
    next_seed, size = first_seed, 1
    try:
        while True:
            is_over = (
                outcome.is_done
                or time.monotonic() - began_s > seconds_s
                or len(outcome.failures) >= MOST_FAILURES
            )
            # A case to be run again is run alone.
            is_over = is_over or (wanted == 1 and next_seed > first_seed)
            while not is_over and len(running) < 2 * workers:
                in_flight = sum(map(len, running.values()))
                if in_flight >= wanted - outcome.counts[outcome.goal]:
                    break
                seeds = range(next_seed, next_seed + size)
                running[pool.submit(_run_batch, seeds)] = seeds
                next_seed = seeds.stop
                size = 1 if wanted < 100 else _BATCH
                is_over = wanted == 1
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                results = future.result()
                del running[future]
                for result in results:
                    if isinstance(result, Failure):
                        outcome.failures.append(result)
                    else:
                        outcome.counts += result
            outcome.seconds_s = time.monotonic() - began_s
            has_failed = any(isinstance(result, Failure) for result in results)
            if running and (has_failed or time.monotonic() - told_s > TELL_S):
                told_s = time.monotonic()
                tell(outcome)
            if is_over and wanted > 1:
                for future in list(running):
                    if future.cancel():
                        del running[future]
    except BrokenProcessPool:
        seeds = ", ".join(f"{batch.start} to {batch.stop - 1}" for batch in running.values())
        text = f"a worker ended while it ran one of the seeds {seeds}; see above"
        outcome.failures.append(Failure(next_seed - 1, text))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(parent, ignore_errors=True)
    outcome.seconds_s = time.monotonic() - began_s
    return outcome
