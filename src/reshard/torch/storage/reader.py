"""Loads of `torch.distributed.checkpoint` from checkpoints of any format and sharding.

1. PyTorch's planner requests boxes of tensors, by metadata that are created here from the headers.
2. Each box is located in the shards that contain it, and read in the order of the files, a few
   megabytes at a time: directly into the tensor if both are dense, otherwise through a buffer.
3. Values that are not tensors are returned as the bytes that PyTorch saves for them.

PyTorch plans a load by *chunks*, which are stored boxes of a tensor. Here the chunks are the boxes
that supply the tensor, with each element once: replicas are omitted, and an interleaved shard has
several chunks. A rank requests a box of the tensor, independent of its chunks; the boxes of shards
that make up this box are found when it is read::

    stored on two ranks      chunks                a rank needs    it reads

    0 0 0 1 1 1              [0:2, 0:3]            . # # # . .     columns 1:3 of rank 0,
    0 0 0 1 1 1              [0:2, 3:6]            . # # # . .     column 0 of rank 1
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from reshard.checkpoint.blocks.block_io import OpenFiles, open_sources, share_reads
from reshard.checkpoint.blocks.shard_reads import (
    BUFFER_BYTES,
    read_region,
    remote_span,
    split_region,
)
from reshard.checkpoint.blocks.spans import source_tiles
from reshard.checkpoint.contents import Checkpoint, StoredItem, StoredTensor
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.torch_dcp.packed_archives import unpacked
from reshard.checkpoint.storage import shared_read_cache
from reshard.checkpoint.storage.byte_streams import RangeStream
from reshard.checkpoint.storage.local_files import AlignedBuffer, SourceFile
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.remote_paths import RemotePath, as_path
from reshard.checkpoint.storage.threads import run_in_threads
from reshard.dtypes import DType
from reshard.errors import CheckpointError, ReshardError, ShardError, UsageError
from reshard.execution.arrays import TorchTensors
from reshard.geometry.regions import Region
from reshard.layout import Box

# A tensor with more boxes than this has a single chunk in PyTorch's planner.
MAX_CHUNKS = 4096


def list_parts(tensor: StoredTensor, box: Box) -> Iterator[Region]:
    """Yield the regions of shards that make up a box of a tensor, with each element once.

    Indices count from the start of the box. The container is the file range of a shard, and offset
    and strides are in its elements.
    """
    if not box.elements:
        return
    to_start = tuple(-a for a in box.start)
    for tile in source_tiles(tensor.assembly).intersecting(box):
        place = tensor.file_range(tile.slot, tile.number, tile.offset)
        for region in tile.regions(tensor.view(tile.slot, tile.number), place, box):
            yield region.translate(to_start)


def _list_boxes(tensor: StoredTensor) -> list[Box]:
    """Return the boxes that supply a tensor, or the whole tensor if there are too many."""
    whole = Box.of(tensor.shape)
    if not whole.elements:
        return [whole]
    tiles = source_tiles(tensor.assembly).tiles
    if sum(math.prod(map(len, tile.start)) for tile in tiles) > MAX_CHUNKS:
        return [whole]
    return sorted(region.box for tile in tiles for region in tile.regions())


def torch_type(dtype: DType, name: str) -> torch.dtype:
    """Return PyTorch's dtype of a tensor's elements.

    Raises:
        UsageError: PyTorch has no such dtype.
    """
    torch_dtype = getattr(torch, dtype.name, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise UsageError(
            f"tensor {name!r} is {dtype.name}, a type that PyTorch does not have; leave it out of "
            "the state dict, or convert the checkpoint to another type"
        )
    return torch_dtype


def _describe_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        for box in _list_boxes(tensor)
    ]
    properties = TensorProperties(dtype=torch_type(tensor.dtype, tensor.name))
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


Value = TypeVar("Value")


class LazyDict(dict[str, Value], Generic[Value]):
    """A dict whose values are computed on first access, by `make(key)`.

    >>> lengths = LazyDict(["a", "bb"], len)
    >>> "bb" in lengths, lengths["bb"], [*lengths.items()]
    (True, 2, [('a', 1), ('bb', 2)])
    """

    def __init__(self, keys: Any, make: Callable[[str], Value]) -> None:
        super().__init__(dict.fromkeys(keys))
        self._make = make
        self._made: set[str] = set()

    def __getitem__(self, key: str) -> Value:
        if key not in self._made:
            if key not in self:
                raise KeyError(key)
            super().__setitem__(key, self._make(key))
            self._made.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Value) -> None:
        self._made.add(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`."""
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        """Return all values."""
        return [self[key] for key in self]

    def items(self) -> Any:
        """Return all keys with their values."""
        return [(key, self[key]) for key in self]

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle as a plain dict, since `make` may need files.
        return dict, (dict(self.items()),)


def describe_contents(checkpoint: Checkpoint) -> LazyDict[Any]:
    """Return PyTorch's metadata of each name of a checkpoint."""

    def describe(name: str) -> Any:
        tensor = checkpoint.tensors.get(name)
        return BytesStorageMetadata() if tensor is None else _describe_tensor(tensor)

    return LazyDict([*checkpoint.tensors, *checkpoint.items, *checkpoint.values], describe)


# The bytes that a thread reads at a time, and that are copied to another device at a time.
_PIECE_BYTES = 4 * BUFFER_BYTES
# Values that are not tensors are held in memory as a whole.
_MAX_ITEM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _TensorRead:
    """A box of a tensor that a planner requests: its number in the plan, and its parts."""

    number: int
    item: ReadItem
    tensor: StoredTensor
    parts: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class _PartRead:
    """A region of a shard to read into a part of a tensor; nothing is read if `region` is None.

    `count` such parts fill the tensor `whole`.
    """

    read: _TensorRead
    region: Region | None
    target: torch.Tensor
    whole: torch.Tensor
    count: int

    @property
    def spans(self) -> list[shared_read_cache.ReadSpan]:
        """The byte ranges to read, with the number of bytes read of each."""
        if self.region is None:
            return []
        itemsize, place = self.read.tensor.dtype.itemsize_bytes, self.region.container
        return [remote_span(place.path, place.start_bytes, self.region, itemsize)]


class StorageReader(storage.StorageReader):  # type: ignore[misc]
    """Reads a checkpoint of any format, for `torch.distributed.checkpoint.load`.

    ::

        state = {"model": get_model_state_dict(model)}
        torch.distributed.checkpoint.load(state, storage_reader=StorageReader("step-1000"))

    Each rank reads the bytes that it needs. As with PyTorch's readers, a tensor whose dtype differs
    from the stored dtype is filled with cast values.

    Args:
        path: a checkpoint or its location; the `checkpoint_id` of a load replaces it.
        thread_count: the number of reading threads on this rank; 4 when None, 16 from an address.
        readers_on_host: the number of ranks of this host that take part in each load: from an
            address, data that several of them need is requested once, as by
            `reshard.checkpoint.load`.

    Raises:
        UsageError: an invalid path, or an invalid number of threads or readers.

    >>> import tempfile, warnings, numpy as np, torch, torch.distributed.checkpoint as dcp
    >>> from safetensors.numpy import save_file
    >>> state = {"w": torch.zeros(2, 2)}
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
    ...     save_file({"w": np.ones((2, 2), np.float32)}, f"{folder}/model.safetensors")
    ...     dcp.load(state, storage_reader=StorageReader(folder), no_dist=True)
    >>> state["w"].sum()
    tensor(4.)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        *,
        thread_count: int | None = None,
        readers_on_host: int = 1,
    ) -> None:
        super().__init__()
        self.thread_count = thread_count
        # Called for its check: the number itself depends on the location, which may change.
        choose_threads(thread_count, argument="thread_count")
        self.readers_on_host = shared_read_cache.check_readers(readers_on_host)
        self._checkpoint = path if isinstance(path, Checkpoint) else None
        self.path = as_path(path.folder if isinstance(path, Checkpoint) else path)
        self.load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> Path:
        """The location of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the location is an existing path or an address."""
        try:
            place = as_path(checkpoint_id)
        except ReshardError:
            return False
        return isinstance(place, RemotePath) or place.exists()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from another checkpoint if `checkpoint_id` is given."""
        if checkpoint_id:
            self.path = as_path(checkpoint_id)
        # The folder may contain another checkpoint by now.
        self._checkpoint = None
        self.load_id = str(uuid.uuid4())

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, opened on first access."""
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self.path)
        return self._checkpoint

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata in PyTorch's terms. Only headers are read.

        The metadata of a tensor are created on first access.

        Raises:
            CheckpointError: no checkpoint at the location.
            FormatError: a damaged file.
        """
        checkpoint = self.checkpoint
        contents = describe_contents(checkpoint)
        return Metadata(
            contents,
            # PyTorch's planner rebuilds nested state dicts by these paths.
            planner_data={name: checkpoint.paths.get(name, (name,)) for name in contents},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.path, load_id=self.load_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take part in a load. All ranks do the same."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged: boxes are located in files when they are read."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: ranks read independently."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        """Read the items of a plan into the tensors that the planner provides.

        Raises:
            CheckpointError: a name missing from the checkpoint; replicas that differ.
            RunError: a file that cannot be read.
        """
        numbered = list(enumerate(plan.items))
        values = [item for _, item in numbered if item.type == LoadItemType.BYTE_IO]
        with contextlib.closing(open_sources(self.checkpoint)) as files:
            for item in values:
                content = self._read_value(item.storage_index.fqn, files)
                planner.load_bytes(item, io.BytesIO(content))
        reads = [
            self._find_parts(number, item)
            for number, item in numbered
            if item.type != LoadItemType.BYTE_IO
        ]
        expect_equal_copies(self.checkpoint, names={read.tensor.name for read in reads})
        if self.readers_on_host > 1 and isinstance(self.checkpoint.folder, RemotePath):
            self._read_together(reads, planner)
        else:
            with contextlib.closing(open_sources(self.checkpoint)) as files:
                self._read_tensors(reads, planner, files)
        future: Future = Future()
        future.set_result(None)
        return future

    def _find_parts(self, number: int, item: ReadItem) -> _TensorRead:
        index = item.storage_index
        tensor = self.checkpoint[index.fqn]
        offset = index.offset if index.offset is not None else (0,) * len(tensor.shape)
        start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True))
        box = Box.of(item.lengths, start)
        if any(stop > size for stop, size in zip(box.stop, tensor.shape, strict=True)):
            raise CheckpointError(
                f"{box} of tensor {tensor.name!r} is asked for, which has shape "
                f"{list(tensor.shape)} in {self.path}; the plan is for another checkpoint"
            )
        return _TensorRead(number, item, tensor, tuple(list_parts(tensor, box)))

    def _read_value(self, name: str, files: OpenFiles[SourceFile]) -> bytes:
        checkpoint = self.checkpoint
        if name in checkpoint.values:
            content = io.BytesIO()
            torch.save(checkpoint.values[name], content)
            return content.getvalue()
        if name not in checkpoint.items:
            raise CheckpointError(f"{self.path} has no {name!r} that is no tensor")
        return read_item(checkpoint.items[name], files)

    def _read_tensors(
        self, reads: list[_TensorRead], planner: LoadPlanner, files: OpenFiles[SourceFile]
    ) -> None:
        # Read in the order of the files, so that a disk reads sequentially.
        reads.sort(key=_find_place)

        def list_tasks() -> Iterator[_PartRead]:
            # The planner may allocate a tensor on request, so it is asked as late as possible, by a
            # single thread at a time, which `run_in_threads` guarantees.
            for read in reads:
                yield from _list_part_reads(read, _resolve(read, planner), _PIECE_BYTES)

        threads = choose_threads(self.thread_count, self.checkpoint.folder)
        _run(list_tasks(), planner, partial(_fill, files=files), threads)

    def _read_together(self, reads: list[_TensorRead], planner: LoadPlanner) -> None:
        """Read together with the other ranks of this host, in the order of the files."""
        tasks = [
            task
            for read in reads
            for task in _list_part_reads(
                read, _resolve(read, planner), 2 * shared_read_cache.PIECE_BYTES, is_hull=True
            )
        ]
        # All ranks of a host read in the same order, so that each finds what another has just read.
        tasks.sort(key=lambda task: [(span.name, span.start) for span, _ in task.spans])
        checkpoint = self.checkpoint
        threads = min(
            choose_threads(self.thread_count, checkpoint.folder), shared_read_cache.MAX_THREADS
        )
        with (
            share_reads(
                checkpoint, self.readers_on_host, (task.spans for task in tasks)
            ) as together,
            contextlib.closing(open_sources(checkpoint, shared=together)) as files,
        ):
            numbers = {id(task): number for number, task in enumerate(tasks)}

            def fill(task: _PartRead, buffer: AlignedBuffer) -> _PartRead:
                done = _fill(task, buffer, files=files)
                together.finish(numbers[id(task)])
                return done

            _run(tasks, planner, fill, threads)


def _resolve(read: _TensorRead, planner: LoadPlanner) -> torch.Tensor:
    """Return the tensor to fill, as the planner provides it. Raises ShardError."""
    # Detached, since autograd refuses writes into a parameter that needs a gradient.
    target: torch.Tensor = planner.resolve_tensor(read.item).detach()
    if tuple(target.shape) != tuple(read.item.lengths):
        raise ShardError(
            f"{read.tensor.name!r}: the tensor to fill has shape {list(target.shape)}, the plan "
            f"says {list(read.item.lengths)}"
        )
    return target


def _list_part_reads(
    read: _TensorRead, whole: torch.Tensor, max_bytes: int, *, is_hull: bool = False
) -> list[_PartRead]:
    """Return the reads of a tensor, in pieces of limited size; in the file if `is_hull`."""
    itemsize = read.tensor.dtype.itemsize_bytes
    regions = [
        region
        for part in read.parts
        for region in split_region(part, itemsize, max_bytes, is_hull=is_hull)
    ]
    if not regions:
        return [_PartRead(read, None, whole, whole, 1)]
    return [
        _PartRead(
            read,
            region,
            whole[(*map(slice, region.start, region.stop), ...)],
            whole,
            len(regions),
        )
        for region in regions
    ]


def _run(
    tasks: Iterable[_PartRead],
    planner: LoadPlanner,
    work: Callable[[_PartRead, AlignedBuffer], _PartRead],
    threads: int,
) -> None:
    """Run all tasks, and commit each tensor after its last task."""
    done: Counter[int] = Counter()
    results = run_in_threads(tasks, work, lambda: AlignedBuffer.of(BUFFER_BYTES), threads)
    try:
        for task in results:
            done[task.read.number] += 1
            if done[task.read.number] == task.count:
                planner.commit_tensor(task.read.item, task.whole)
    finally:
        # Ends the threads, too, if a planner raises.
        results.close()


def read_item(item: StoredItem, files: OpenFiles[SourceFile]) -> bytes:
    """Return the bytes of an item that is not a tensor, with its transforms reversed.

    Raises:
        CheckpointError: an item of more than 1 GiB; an unknown transform.
        FormatError: bytes that the transforms cannot have written.
    """
    label = f"{item.name!r} in {item.place.path}"
    if item.size_bytes > _MAX_ITEM_BYTES:
        raise CheckpointError(f"{label} has {item.size_bytes} bytes; 1 GiB is the most")

    def read(offset: int, size: int) -> bytes:
        content = bytearray(size)
        files[item.place.path].read_into(memoryview(content), offset)
        return bytes(content)

    if not item.transforms:
        return read(item.place.start_bytes, item.size_bytes)
    packed = RangeStream(read, item.place.start_bytes, item.size_bytes)
    stream = unpacked(packed, item.transforms, _MAX_ITEM_BYTES, label)
    content = bytearray()
    while piece := stream.read(1 << 20):
        content += piece
    return bytes(content)


def _find_place(read: _TensorRead) -> tuple[str, int]:
    if not read.parts:
        return "", 0
    place = read.parts[0].container
    return place.path, place.start_bytes


def _fill(task: _PartRead, buffer: AlignedBuffer, *, files: OpenFiles[SourceFile]) -> _PartRead:
    """Read the region of a task into its tensor."""
    region, target = task.region, task.target
    if region is None:
        return task
    tensor, place = task.read.tensor, region.container
    file = files[place.path]
    stored = getattr(torch, tensor.dtype.name)
    is_in_place = target.device.type == "cpu" and target.dtype == stored
    memory = target if is_in_place else torch.empty(target.shape, dtype=stored)
    array = TorchTensors(memory).writable(memory, tensor.name)
    if region.is_dense() and array.flags.c_contiguous:
        start_bytes = place.start_bytes + region.offset * array.dtype.itemsize
        file.read_into(array.reshape(-1).view(np.uint8).data, start_bytes)
    else:
        read_region(file, place.start_bytes, region, array, buffer)
    if not is_in_place:
        target.copy_(memory)
    elif not target.is_inference():
        # Reading a file writes the tensor without autograd noticing, so mark it as changed.
        torch.autograd.graph.increment_version(target)
    return task
