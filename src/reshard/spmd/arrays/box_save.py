"""Saves over processes: each rank writes the boxes of its shards that no other rank writes.

`torch.distributed.checkpoint` lets ranks agree on who writes what, and `StorageWriter` puts the
boxes into the files of a format. DTensors are not needed: a box is a box of any sharding, uneven,
strided or with halos.

    x@cyclic1 over 2 ranks, 6 rows      rank 0: [0:1], [2:3], [4:5]     rank 1: [1:2], [3:4], [5:6]
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from reshard.errors import ReshardError, RunError
from reshard.layout import Box, Layout
from reshard.runs import OWNED
from reshard.spmd.core.array_type import ArrayType
from reshard.torch.exchange.agreement import CallSignature, agree
from reshard.torch.storage.reader import torch_type
from reshard.torch.storage.writer import StorageWriter

Slices = tuple[slice, ...]
Saved = Mapping[str, tuple[ArrayType, dict[int, Any]]]
"""The type of each array, and its shards here by rank, by name."""


@contextmanager
def agreed_save(
    target: str | os.PathLike[str], format: str, overwrite: bool, group: Any
) -> Iterator[None]:
    """Keep all ranks of a group from the save if a rank raises inside.

    That rank raises its error, the others RunError with its rank and reason.

    Raises PlanError if ranks save to different targets, or in different ways.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    problem = None if failure is None else f"{type(failure).__name__}: {failure}"
    options = {"the target": target, "the format": format, "overwrite=": overwrite}
    try:
        agree(
            CallSignature({name: str(value).encode() for name, value in options.items()}, problem),
            group,
        )
    except RunError as error:
        raise failure or RunError(f"the save to {target} was not begun: {error}") from error


def prepare_box_save(
    writer: StorageWriter, saved: Saved, group: Any, is_background: bool
) -> Callable[..., None]:
    """Return a function that writes this rank's part, with all ranks of a group or of the job."""
    planner = _BoxPlanner(saved)
    # Messages of a save must not be mixed up with messages of the next steps.
    talking = saving_group(group or dist.group.WORLD) if is_background else group

    def write(**_: Any) -> None:
        try:
            # The planner has the arrays: PyTorch's own planning knows tensors and DTensors only.
            dcp.save({}, storage_writer=writer, planner=planner, process_group=talking)
        except dcp.api.CheckpointException as error:
            # The lowest rank's, so that all ranks raise the same error.
            rank, (cause, _) = next(iter(sorted(error.failures.items())))
            failed = f"the save to {writer.path} failed on rank {rank}"
            # The kind of an error is kept, since callers catch it by kind.
            if isinstance(cause, ReshardError):
                raise type(cause)(f"{failed}: {cause}") from error
            raise RunError(
                f"{failed}: {type(cause).__name__}: {cause}; what was there is as it was"
            ) from error

    return write


@lru_cache(maxsize=8)
def saving_group(group: Any) -> Any:
    """Return a group of the same processes that is used for saves only."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def list_boxes(layout: Layout, rank: int) -> Iterator[tuple[Box, Slices]]:
    """Yield the boxes of a tensor on a rank, and the location of each in the rank's shard.

    >>> from reshard import DeviceMesh, spec
    >>> layout = spec(DeviceMesh.of(x=2), "x@cyclic1").layout((3,))
    >>> [(str(box), where) for box, where in list_boxes(layout, 0)]
    [('[0:1]', (slice(0, 1, None),)), ('[2:3]', (slice(1, 2, None),))]
    """
    for cell in layout.cells_of(rank):
        dims = [
            [(start, stop, own) for start, stop, own, role in runs if role == OWNED]
            for runs in layout.cell_runs(cell)
        ]
        for product in itertools.product(*dims):
            box = Box(tuple(a for a, _, _ in product), tuple(b for _, b, _ in product))
            if box.elements:
                yield box, tuple(slice(own, own + b - a) for a, b, own in product)


class _BoxPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """A planner that saves sharded arrays, instead of the state that PyTorch passes."""

    def __init__(self, saved: Saved) -> None:
        # The state that PyTorch passes is empty, so there is nothing to flatten.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._saved = saved
        self._places: dict[MetadataIndex, Slices] = {}

    def create_local_plan(self) -> SavePlan:
        """Plan all boxes that are here; the global plan keeps each duplicate on a single rank."""
        items = [self._describe(name, box, where) for name, box, where in self._list_boxes()]
        self.plan = SavePlan(items)
        return self.plan

    def _list_boxes(self) -> Iterator[tuple[str, Box, Slices]]:
        for name, (kind, shards) in self._saved.items():
            # An array without elements lacks boxes, but the checkpoint needs its name and shape.
            if 0 in kind.shape:
                whole = Box.of(kind.shape)
                yield name, whole, tuple(slice(0, 0) for _ in kind.shape)
                continue
            for rank in shards:
                for box, where in list_boxes(kind.layout, rank):
                    yield name, box, where

    def _describe(self, name: str, box: Box, where: Slices) -> WriteItem:
        kind = self._saved[name][0]
        offsets, sizes = torch.Size(box.start), torch.Size(box.shape)
        index = MetadataIndex(name, offsets)
        self._places[index] = where
        return WriteItem(
            index,
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties(dtype=torch_type(kind.dtype, name)),
                size=torch.Size(kind.shape),
            ),
        )

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the elements of a box."""
        name = write_item.index.fqn
        kind, shards = self._saved[name]
        if 0 in kind.shape:
            return torch.empty(kind.shape, dtype=torch_type(kind.dtype, name))
        (shard,) = shards.values()
        return shard[self._places[write_item.index]]
