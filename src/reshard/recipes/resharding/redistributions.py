"""A job as somebody sees it who reshards rank by rank, and what a run of it gives.

Of each tensor, which slices of which source rank's array go to which target ranks.
These are views of a `Job`, which is what is carried out::

    tensor a, 5 x 1 over 2 ranks, to 4        TensorRedistribution("a", source_rank=0, ...)
                                                TensorSlice(0, (0, 0), (2, 1), (2, 1))
    |0|0|0|1|1|  ->  |0|0|1|1|2|                TensorSlice(1, (2, 0), (3, 1), (1, 1))
                                              TensorRedistribution("a", source_rank=1, ...)
                                                TensorSlice(1, (0, 0), (1, 1), (1, 1))
                                                TensorSlice(2, (1, 0), (2, 1), (1, 1))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Indices `start` to `stop` of a source rank's array, that go to a target rank.

    `shape` is `stop - start`. All have one number a dimension of the tensor.
    """

    target_rank: int
    start: Shape
    stop: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class TensorRedistribution:
    """The slices of one tensor that one source rank gives.

    Attributes:
        tensor_name: of the whole tensor.
        source_rank: the rank that gives.
        source_shape: of its array, which the slices cut. A rank whose array is flat, several
            boxes one behind another, has a redistribution for each box, of the box's shape.
        target_ranks: who receives something, in order.
        slices: what they receive.
    """

    tensor_name: str
    source_rank: int
    source_shape: Shape
    target_ranks: tuple[int, ...]
    slices: tuple[TensorSlice, ...]


@dataclass(frozen=True)
class ReshardingPlan:
    """How tensors get from `source_world_size` ranks to `target_world_size` ranks.

    Attributes:
        source_world_size, target_world_size: the numbers of ranks.
        tensor_redistributions: in the order of the tensors, then of the source ranks.
        job: what is carried out; None in a plan that was written by hand, which cannot be.
    """

    source_world_size: int
    target_world_size: int
    tensor_redistributions: tuple[TensorRedistribution, ...]
    job: Job | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_job(cls, job: Job, source_world_size: int, target_world_size: int) -> ReshardingPlan:
        """The view of a job between two numbers of ranks."""
        found = [one for item in job.items for one in _list_redistributions(job, item)]
        return cls(source_world_size, target_world_size, tuple(found), job)

    @cached_property
    def _by_name(self) -> Mapping[str, list[TensorRedistribution]]:
        found: dict[str, list[TensorRedistribution]] = {}
        for one in self.tensor_redistributions:
            found.setdefault(one.tensor_name, []).append(one)
        return found

    def redistributions(self, tensor_name: str) -> list[TensorRedistribution]:
        """The redistributions of one tensor, by source rank; an empty list for an absent name."""
        return list(self._by_name.get(tensor_name, ()))

    def source_rank(self, tensor_name: str) -> int | None:
        """The first source rank that gives something of a tensor; None for an absent name."""
        return next(iter(self.source_ranks(tensor_name)), None)

    def source_ranks(self, tensor_name: str) -> list[int]:
        """All source ranks that give something of a tensor; an empty list for an absent name."""
        return sorted({one.source_rank for one in self._by_name.get(tensor_name, ())})

    def target_ranks(self, tensor_name: str) -> list[int]:
        """The target ranks that receive something of a tensor; an empty list for an absent name."""
        ranks = {rank for one in self._by_name.get(tensor_name, ()) for rank in one.target_ranks}
        return sorted(ranks)


@dataclass(frozen=True, slots=True)
class ReshardingResult:
    """The result of an execution.

    Attributes:
        target_shards: the arrays of each target rank, `{rank: {name: array}}`; where several
            processes share the work, of this process's ranks. A rank that holds nothing has an
            empty mapping.
        success: whether everything was done; False for an execution that was cancelled, whose
            shards then are those tensors that were complete.
        warnings: what a user should know, in full sentences.
        duration_s: how long it took.
        copied_bytes: the size of all elements that this process copied.
    """

    target_shards: dict[int, dict[str, Any]]
    success: bool
    warnings: list[str]
    duration_s: float
    copied_bytes: int = 0


def _list_redistributions(job: Job, item: JobItem) -> Iterator[TensorRedistribution]:
    """One for each source cell that gives something."""
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
    bounds = np.flatnonzero(np.diff(rows.source_cell, prepend=-1, append=-1)).tolist()
    for low, high in itertools.pairwise(bounds):
        cell = int(rows.source_cell[low])
        shape = tuple(source.cell_shape[cell].tolist())
        yield _make_redistribution(item.name, int(source.cell_slot[cell]), shape, slices[low:high])


def _list_without_elements(item: JobItem) -> Iterator[TensorRedistribution]:
    """A tensor without elements goes from its first holder to all who will hold it."""
    source, target = item.change.source, item.change.target
    if source.holders and target.holders:
        sender, zeros = source.holders[0], (0,) * source.ndim
        shape = source.local_shape(sender) or ()
        slices = [TensorSlice(rank, zeros, shape, shape) for rank in target.holders]
        yield _make_redistribution(item.name, sender, shape, slices)


def _make_redistribution(
    name: str, sender: int, shape: Shape, slices: list[TensorSlice]
) -> TensorRedistribution:
    receivers = tuple(dict.fromkeys(one.target_rank for one in slices))
    return TensorRedistribution(name, sender, shape, receivers, tuple(slices))
