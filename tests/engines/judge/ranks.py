"""Ranks in lock step: one thread each, which meet at every exchange.

An exchange takes a tensor of every rank, and each sees those of its group. All ranks must come to
the same exchanges in the same order; one that comes to another ends them all with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .shards import Coordinate, JudgeError

PATIENCE_S = 120.0


class Meeting:
    """The place where ranks exchange tensors.

    Args:
        coordinates: of the ranks, along `axes`.
        axes: their names.
    """

    def __init__(self, coordinates: Sequence[Coordinate], axes: Sequence[str]) -> None:
        self.coordinates, self.axes = list(coordinates), tuple(axes)
        self.barrier = threading.Barrier(len(self.coordinates))
        self.brought: list[tuple[str, Any]] = [("", None)] * len(self.coordinates)

    def exchange(self, rank: int, label: str, value: Any, axes: Sequence[str]) -> list[Any]:
        """The values of the ranks that differ from `rank` in `axes` only, in their order."""
        self.brought[rank] = (label, value)
        self.barrier.wait(PATIENCE_S)
        here = self.coordinates[rank]
        group = [
            other
            for other, there in enumerate(self.coordinates)
            if all(
                a == b or axis in axes for a, b, axis in zip(here, there, self.axes, strict=True)
            )
        ]
        labels = {self.brought[other][0] for other in range(len(self.coordinates))}
        found = [self.brought[other][1] for other in group]
        self.barrier.wait(PATIENCE_S)
        if len(labels) > 1:
            raise JudgeError(f"ranks are not in step: they exchange {sorted(labels)}")
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` answers on each rank. The first error of a rank is raised here."""
        answers: list[Any] = [None] * len(self.coordinates)
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                with torch.no_grad():
                    answers[rank] = work(rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [
            threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(self.coordinates))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self.barrier.broken:
            raise JudgeError("ranks are not in step: some exchange, others have ended")
        return answers
