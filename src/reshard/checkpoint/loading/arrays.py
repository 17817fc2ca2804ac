"""Loading tensors into memory: whole, or the part of a rank.

A rank's arrays of any layout are assembled from any checkpoint:

1. Plan the change from the stored layout to the rank's layout, on a slot that holds no data yet.
2. Each route of the plan is a product of ranges of a single shard: read each of its boxes, and few
   other bytes, directly into its destination.

Small tensors share reads. If several tensors are sharded alike, the rank needs the same box of each
of their shards, at different offsets of the files. In a file such a box is a short range, called a
*piece*::

    file      | a          | norm | b          |
    pieces       [==]        [==]    [==]            read at once, with the bytes between them
    arrays       a           norm    b

1. `SharedReads.add` records the pieces of all tensors of one kind: a few numbers for each.
2. Adjacent pieces are merged into a range, and ranges that fit into a buffer form a task.
3. Pieces of the same kind at equal distances in the buffer are cast as a single array; then each
   piece is copied to its destination.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.binding import View
from reshard.checkpoint.blocks.block_io import BlockReader, OpenFiles, open_sources, share_reads
from reshard.checkpoint.blocks.shard_reads import (
    BUFFER_BYTES,
    MAX_WASTE,
    extent_at_once,
    read_region,
    remote_span,
    split_region,
)
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.options import LoadOptions, check_mapping
from reshard.checkpoint.storage.byte_ranges import (
    ByteRange,
    CoalescedRange,
    coalesce,
    pack_rounds,
    split_equal_steps,
    strided_arrays,
)
from reshard.checkpoint.storage.local_files import PAGE_BYTES, AlignedBuffer, SourceFile
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.shared_read_cache import (
    MAX_THREADS,
    PIECE_BYTES,
    ReadSpan,
    SharedReadCache,
)
from reshard.checkpoint.storage.threads import Progress, StoppedError, check_stop, run_in_threads
from reshard.dtypes import DType
from reshard.elements import cast_elements, is_castable
from reshard.errors import InterruptedRunError, ShardError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.regions import Region, multiply_runs
from reshard.layout import Layout
from reshard.log import LOGGER
from reshard.runs import IntArray


def read_tensor(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """Return the named tensor, put together from its shards, as a NumPy array.

    Types that NumPy does not have (bfloat16, float8) come from ml_dtypes.

    Raises:
        CheckpointError: an unknown tensor, or a tensor whose copies on several ranks differ.
        MissingExtraError: ml_dtypes is needed and not installed.
        DigestError: bytes that differ from the digest in the manifest.
        RunError: a file that cannot be read.
    """
    tensor = checkpoint[name]
    expect_equal_copies(checkpoint, names=[name])
    array = np.empty(math.prod(tensor.shape), dtype=tensor.dtype.storage)
    files = open_sources(checkpoint)
    reader = BlockReader(tensor, files)
    workspace = reader.workspace_size().new_workspace()
    try:
        at = 0
        for block in range(reader.grid(0).count):
            # Without a recorded digest there is no check, and the hash library is not needed.
            if tensor.digest is not None:
                memory, _ = reader.read_checked(block, workspace)
            else:
                memory = reader.read_block(block, workspace)
            elements = np.frombuffer(memory, dtype=tensor.dtype.storage)
            array[at : at + len(elements)] = elements
            at += len(elements)
            # Views of the workspace keep its memory mapped, so none may outlive the loop.
            del memory, elements
    finally:
        workspace.close()
        files.close()
    return array.view(tensor.dtype.numpy).reshape(tensor.shape)


class _Read(Record, eq=False):
    """A region of a shard, in elements from `start_bytes` of a file, and the array to fill."""

    name: str
    path: str
    start_bytes: int
    region: Region
    target: NDArray[Any]
    dtype: DType
    cast: DType | None = None

    @property
    def place(self) -> tuple[str, int]:
        """The file, and the offset of the shard in it."""
        return self.path, self.start_bytes

    @property
    def spans(self) -> list[ReadSpan]:
        """The spans to read from an object."""
        itemsize = self.dtype.itemsize_bytes
        return [remote_span(self.path, self.start_bytes, self.region, itemsize)]

    def split(self, max_bytes: int, *, is_hull: bool = False) -> list[_Read]:
        """Return reads of parts of the region, of limited size (`split_region`)."""
        first, itemsize = self.region.start, self.dtype.itemsize_bytes
        reads = []
        for region in split_region(self.region, itemsize, max_bytes, is_hull=is_hull):
            ends = zip(region.start, region.stop, first, strict=True)
            inside: Any = tuple(slice(start - at, stop - at) for start, stop, at in ends)
            reads.append(self.replace(region=region, target=self.target[(*inside, ...)]))
        return reads


class _Group(Record, eq=False):
    """Tensors of one kind that are loaded in one layout: their rows, and the rank's arrays.

    `shape` is the shape of each array, None if the rank holds no part of the tensors; `loaded` is
    the type of the arrays.
    """

    layout: Layout
    shape: tuple[int, ...] | None
    loaded: DType
    rows: list[int] = field(default_factory=list)
    arrays: list[NDArray[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, first: StoredTensor, layout: Layout, rank: int, cast_dtype: DType | None) -> _Group:
        """Return the group of a tensor, whose type becomes `cast_dtype` if it is cast."""
        is_cast = cast_dtype is not None and is_castable(first.dtype)
        loaded = cast_dtype if cast_dtype is not None and is_cast else first.dtype
        return cls(layout, _find_local_shape(first, layout, rank), loaded)

    def read(self, columns: TensorColumns, rank: int, shared: SharedReads) -> Iterator[_Read]:
        """Yield the reads that fill the arrays; small pieces are added to the shared reads."""
        if not self.rows:
            return
        kind = columns.kinds[int(columns.kind[self.rows[0]])]
        cast = None if self.loaded is kind.dtype else self.loaded
        first = columns.first[np.array(self.rows)]
        stored = columns.tensor(self.rows[0]).stored_layout
        names = [columns.names[row] for row in self.rows]
        for cell, part, runs in _find_routes(stored, self.layout, rank):
            slot, shape = int(stored.cell_slot[cell]), tuple(stored.cell_shape[cell].tolist())
            number = cell - stored.cells_of(slot).start
            view = kind.view(slot, number) or View.row_major(shape)
            place, offset_bytes = kind.find_place(slot, number, int(stored.cell_offset[cell]))
            path, starts = kind.files[place], columns.starts[first + place] + offset_bytes
            arrays = self.arrays
            if part is not None:
                begin, shape = part
                end = begin + math.prod(shape)
                arrays = [array[begin:end].reshape(shape) for array in arrays]
            for region in multiply_runs(runs, None, view.offset, view.strides):
                # The ellipsis makes it a view for a scalar too.
                inside: Any = (*map(slice, region.start, region.stop), ...)
                is_whole = region.shape == arrays[0].shape
                targets = arrays if is_whole else [array[inside] for array in arrays]
                piece = PieceKind.of(kind.dtype, cast, region)
                if piece is not None:
                    shared.add(piece, path, starts, names, targets)
                    continue
                for name, start, target in zip(names, starts.tolist(), targets, strict=True):
                    read = _Read(name, path, start, region, target, kind.dtype, cast)
                    yield from read.split(4 * BUFFER_BYTES)


def load_layouts(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    layouts: Mapping[str, Layout],
    rank: int = 0,
    options: LoadOptions | None = None,
) -> dict[str, NDArray[Any]]:
    """Load one rank's arrays of given layouts, from a checkpoint of any format and sharding.

    This is `reshard.checkpoint.loading.request.load` for known layouts, with the same arguments,
    result and errors.

    >>> import numpy as np, reshard
    >>> arrays = {0: {"w": np.arange(16).reshape(4, 4)}}
    >>> stored = reshard.checkpoint.describe_ranks(arrays, "tp=1", rules=["w=-, -"])
    >>> columns = reshard.spec(reshard.DeviceMesh.of(tp=2), "-, tp").layout((4, 4))
    >>> load_layouts(stored, {"w": columns}, rank=1)["w"].tolist()
    [[2, 3], [6, 7], [10, 11], [14, 15]]
    """
    options = options or LoadOptions()
    out, files, progress, stop = options.out, options.files, options.progress, options.stop
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
        raise UsageError(f"rank={rank!r}; expected a whole number from 0")
    check_mapping("layouts", layouts)
    cast_dtype = options.cast
    arrays: dict[str, NDArray[Any]] = {}
    groups: dict[tuple[int, int], _Group] = {}
    columns = _take_columns(checkpoint, layouts)
    expect_equal_copies(checkpoint, names=layouts)
    rows = columns.rows(layouts)
    for name, row, number in zip(layouts, rows.tolist(), columns.kind[rows].tolist(), strict=True):
        layout = layouts[name]
        # Many tensors of a model share a layout object. The group keeps a reference to it, so that
        # its `id` is not used again for another layout.
        group = groups.get((number, id(layout)))
        if group is None:
            group = _Group.of(columns.tensor(row), layout, rank, cast_dtype)
            groups[number, id(layout)] = group
        if group.shape is None:
            continue
        arrays[name] = (
            # Zeros, since padding is in no file.
            np.zeros(group.shape, dtype=group.loaded.storage)
            if out is None
            else _check_given(name, group.loaded, out, group.shape)
        )
        group.rows.append(row)
        group.arrays.append(arrays[name])
    shared = SharedReads()
    reads: list[_Read] = []
    for group in groups.values():
        # Padding is cleared only now, since an array that does not fit raises an error above.
        for array in group.arrays if out is not None and group.layout.is_padded else ():
            array[...] = np.zeros((), dtype=array.dtype)
        reads += group.read(columns, rank, shared)
    total_bytes = sum(array.nbytes for array in arrays.values())
    LOGGER.info("%s: %d bytes loaded as rank %d", checkpoint.folder, total_bytes, rank)

    # Sorted by file and offset, so that a disk reads sequentially.
    tasks: list[_Read | SharedTask] = [*reads, *shared.tasks()]
    tasks.sort(key=lambda task: task.place)
    together: SharedReadCache | None = None
    workers = choose_threads(options.threads, checkpoint.folder)
    # Local files are shared by the page cache, so only reads from a store need a shared cache.
    if options.readers_on_host > 1 and isinstance(checkpoint.folder, RemotePath):
        workers = min(workers, MAX_THREADS)
        # Long reads are split, so that other processes do not wait for the end of a long range.
        tasks = [
            part
            for task in tasks
            for part in (
                [task]
                if isinstance(task, SharedTask)
                else task.split(2 * PIECE_BYTES, is_hull=True)
            )
        ]
        tasks.sort(key=lambda task: task.spans[0][0][:2])
        spans = (task.spans for task in tasks)
        together = share_reads(checkpoint, options.readers_on_host, spans)
    opened = open_sources(checkpoint, shared=together) if files is None else files

    def work(numbered: tuple[int, _Read | SharedTask], buffer: AlignedBuffer) -> _Read | IntArray:
        number, task = numbered
        done = (
            shared.read(task, opened, buffer)
            if isinstance(task, SharedTask)
            else fill(task, buffer)
        )
        if together is not None:
            together.finish(number)
        return done

    def fill(task: _Read, buffer: AlignedBuffer) -> _Read:
        target, kind = task.target, task.dtype
        if task.cast is not None:
            target = np.empty(target.shape, dtype=kind.storage)
        read_region(opened[task.path], task.start_bytes, task.region, target, buffer)
        if task.cast is not None:
            rounded = np.empty(target.size, dtype=task.cast.storage)
            cast_elements(target.reshape(-1), kind, rounded, task.cast)
            task.target[...] = rounded.reshape(target.shape)
        return task

    done_bytes = 0
    try:
        check_stop(stop)
        for done in run_in_threads(
            enumerate(tasks), work, lambda: AlignedBuffer.of(BUFFER_BYTES), workers
        ):
            if isinstance(done, _Read):
                filled: Iterable[tuple[str, int]] = ((done.name, done.target.nbytes),)
            elif progress is None:
                # Listing the names of very many tensors would take a tenth of the time.
                filled = (("", shared.size_bytes(done)),)
            else:
                filled = shared.describe(done)
            for name, size_bytes in filled:
                done_bytes += size_bytes
                if progress is not None:
                    progress(Progress(done_bytes, total_bytes, 0, name))
            check_stop(stop)
    except StoppedError:
        raise InterruptedRunError(
            f"stopped when {done_bytes} of {total_bytes} bytes were read of {checkpoint.folder}"
            + ("; the arrays in `out` are filled in part" if out is not None else "")
        ) from None
    finally:
        if files is None:
            if options.count_read is not None:
                options.count_read(sum(file.read_bytes for file in opened))
            opened.close()
        if together is not None:
            together.close()
    LOGGER.info("%s: loaded, %d bytes", checkpoint.folder, done_bytes)
    if out is not None:
        return {name: out[name] for name in arrays}
    for group in groups.values():
        kind = group.loaded.numpy
        for row, array in zip(group.rows, group.arrays, strict=True):
            arrays[columns.names[row]] = array.view(kind)
    return arrays


def _take_columns(checkpoint: Checkpoint, names: Iterable[str]) -> TensorColumns:
    """Return columns that contain at least the named tensors. Raises CheckpointError."""
    if isinstance(checkpoint.tensors, TensorColumns):
        for name in names:
            if name not in checkpoint.tensors:
                _ = checkpoint[name]
        return checkpoint.tensors
    return TensorColumns.of({name: checkpoint[name] for name in names})


def _find_local_shape(tensor: StoredTensor, layout: Layout, rank: int) -> tuple[int, ...] | None:
    if not isinstance(layout, Layout):
        raise UsageError(
            f"the layout of {tensor.name!r} is {layout!r}; a sharding becomes one with the shape: "
            f"spec.layout({tensor.shape})"
        )
    if layout.shape != tensor.shape:
        raise UsageError(
            f"the layout of {tensor.name!r} is for shape {list(layout.shape)}, the checkpoint has "
            f"{list(tensor.shape)}"
        )
    if layout.contributions > 1:
        raise UsageError(
            f"the layout of {tensor.name!r} is partial; a checkpoint holds values, load it whole "
            "and make it partial with a plan"
        )
    return layout.local_shape(rank) if 0 <= rank < layout.slots else None


def _check_given(
    name: str, kind: DType, out: Mapping[str, NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[Any]:
    array = out.get(name)
    if array is None:
        raise ShardError(f"`out` has no array for {name!r}")
    if not isinstance(array, np.ndarray):
        raise ShardError(f"`out` has {array!r} for {name!r}; expected a NumPy array")
    if not array.flags.writeable:
        raise ShardError(f"the array for {name!r} cannot be written; give a writable array")
    if tuple(array.shape) != shape or array.dtype.itemsize != kind.itemsize_bytes:
        raise ShardError(
            f"the array for {name!r} is {array.dtype} {list(array.shape)}; the rank's part "
            f"is {kind.name} {list(shape)}"
        )
    # `kind.numpy` is compared last, since it needs ml_dtypes for some types.
    if array.dtype != kind.storage and array.dtype != kind.numpy:
        raise ShardError(
            f"the array for {name!r} is {array.dtype}, the tensor {kind.name}; "
            "nothing is cast but by `dtype`"
        )
    return array.view(kind.storage)


_Route = tuple[int, tuple[int, tuple[int, ...]] | None, list[list[tuple[int, int, int]]]]


@lru_cache(maxsize=256)
def _find_routes(stored: Layout, layout: Layout, rank: int) -> tuple[_Route, ...]:
    """Return the cells of `stored` to read to fill a rank's array, with the runs of each.

    The runs of each dimension are `(start, stop, local)`: indices of the rank's array, and the
    index in the cell. If the rank has several cells, there is also the offset of the filled cell in
    the rank's flat array, and its shape. If the file of that rank has a copy, that copy is read, so
    that the ranks of an equal job read their own files.
    """
    cells = layout.cells_of(rank)
    # The rank's cells on the slot of its file, or on a slot after all slots of the source.
    slot = min(rank, stored.slots)
    mine = Layout(
        layout.shape,
        layout.tables,
        stored.slots + 1,
        [slot] * len(cells),
        layout.cell_part[cells.start : cells.stop],
    )
    change = LayoutChange(stored, mine)
    routes = change.routes
    shapes = [tuple(shape) for shape in mine.cell_shape.tolist()]
    found = []
    for route in range(len(routes.source_cell)):
        target_cell = int(routes.target_cell[route])
        # Several cells of a rank are consecutive in its flat array.
        part = None
        if len(shapes) > 1:
            part = (int(mine.cell_offset[target_cell]), shapes[target_cell])
        runs = []
        for column in change.pieces:
            rows = column.rows(route)
            start, local = column.target_local[rows], column.source_local[rows]
            parts = (start, start + column.length[rows], local)
            runs.append([*zip(*(values.tolist() for values in parts), strict=True)])
        found.append((int(routes.source_cell[route]), part, runs))
    return tuple(found)


# Longer pieces are read by themselves.
_MAX_PIECE_BYTES = 256 * 1024


class PieceKind(Record):
    """A box of a shard with a short extent in a file, common to all pieces of a kind.

    `region` is in elements of the shard; `extent` is the number of elements from its first to its
    last.
    """

    dtype: DType
    cast: DType | None
    region: Region
    extent: int

    @classmethod
    def of(cls, dtype: DType, cast: DType | None, region: Region) -> PieceKind | None:
        """Return the kind of a region, or None if it is not a short range.

        Args:
            dtype: the dtype of its elements in the file.
            cast: the dtype to which they are cast, if any.
            region: the region, in elements of the shard.
        """
        extent = extent_at_once(region, dtype.itemsize_bytes)
        if (
            extent is None
            or not region.elements
            or extent * dtype.itemsize_bytes > _MAX_PIECE_BYTES
        ):
            return None
        return cls(dtype, cast, region, extent)

    @property
    def target_bytes(self) -> int:
        """Bytes of the part of an array that a piece fills."""
        return self.region.elements * (self.cast or self.dtype).itemsize_bytes

    def arrays(self, memory: memoryview, at: IntArray) -> NDArray[Any]:
        """Return the elements of pieces at equal distances in memory, cast to the arrays' type."""
        elements = strided_arrays(
            memory, self.dtype.storage, self.region.shape, at, self.region.strides
        )
        if self.cast is None:
            return elements
        rounded = np.empty(elements.size, dtype=self.cast.storage)
        cast_elements(elements.reshape(-1), self.dtype, rounded, self.cast)
        return rounded.reshape(elements.shape)


class SharedTask(Record, eq=False):
    """Ranges of files that are read by the same task."""

    path: str
    ranges: list[CoalescedRange]

    @property
    def place(self) -> tuple[str, int]:
        """The file, and the offset of the first range in it."""
        return self.path, self.ranges[0].start_bytes

    @property
    def spans(self) -> list[ReadSpan]:
        """The spans to read from an object."""
        return [
            (
                ByteRange(self.path, span.start_bytes, span.start_bytes + span.size_bytes),
                span.size_bytes,
            )
            for span in self.ranges
        ]


class SharedReads:
    """The pieces of small tensors, as columns: the kind, the file and the offset of each piece."""

    def __init__(self) -> None:
        self._kinds: list[PieceKind] = []
        self._kind: list[IntArray] = []
        self._file: list[IntArray] = []
        self._start: list[IntArray] = []
        self._paths: dict[str, int] = {}
        self._targets: list[NDArray[Any]] = []
        self._names: list[str] = []

    def add(
        self,
        kind: PieceKind,
        path: str,
        starts: IntArray,
        names: Sequence[str],
        targets: Sequence[NDArray[Any]],
    ) -> None:
        """Add the same box of several tensors.

        Args:
            kind: the kind of the pieces.
            path: the file of the shards.
            starts: the offset of each shard in the file, in bytes: shape `(tensors,)`.
            names: the names of the tensors.
            targets: the part of an array that each piece fills.
        """
        count = len(starts)
        # Columns, joined once in `tasks`: there may be 100,000 pieces.
        self._kind.append(np.full(count, len(self._kinds)))
        self._kinds.append(kind)
        self._file.append(np.full(count, self._paths.setdefault(path, len(self._paths))))
        self._start.append(starts + kind.region.offset * kind.dtype.itemsize_bytes)
        self._names += names
        self._targets += targets

    def tasks(self) -> Iterator[SharedTask]:
        """Yield tasks that cover all pieces, each with as many ranges as fit into a buffer."""
        if not self._kinds:
            return
        self._kind, self._file, self._start = (
            [np.concatenate(column)] for column in (self._kind, self._file, self._start)
        )
        (kind,), (file,), (start,) = self._kind, self._file, self._start
        extents = [kind.extent * kind.dtype.itemsize_bytes for kind in self._kinds]
        size = np.array(extents, dtype=np.int64)[kind]
        # Reading a short piece loads its whole page in any case, so gaps up to a page cost little.
        gaps = np.where(size <= PAGE_BYTES, PAGE_BYTES, (size * MAX_WASTE).astype(np.int64))
        paths = list(self._paths)
        room = AlignedBuffer.capacity_for(BUFFER_BYTES)
        together: list[CoalescedRange] = []
        filled = 0
        for span in coalesce(file, start, size, gaps, BUFFER_BYTES):
            needed = AlignedBuffer.capacity_for(span.size_bytes)
            if together and (filled + needed > room or span.file != together[0].file):
                yield SharedTask(paths[together[0].file], together)
                together, filled = [], 0
            together.append(span)
            filled += needed
        if together:
            yield SharedTask(paths[together[0].file], together)

    def read(
        self, task: SharedTask, files: OpenFiles[SourceFile], buffer: AlignedBuffer
    ) -> IntArray:
        """Read the ranges of a task into the arrays, and return the numbers of their pieces.

        Raises:
            RunError: a file that cannot be read.
        """
        file = files[task.path]
        done = []
        for together in pack_rounds(iter(task.ranges), buffer):
            at = []
            for read, region in together:
                file.read_into(region, read.start_bytes)
                at.append(self._start[0][read.pieces] + (region.start - read.start_bytes))
            pieces = np.concatenate([read.pieces for read, _ in together])
            self._spread(pieces, np.concatenate(at), buffer.memory)
            done.append(pieces)
        return np.concatenate(done)

    def _spread(self, pieces: IntArray, at: IntArray, memory: memoryview) -> None:
        """Copy pieces from the offsets `at` of the memory into the arrays."""
        order = np.lexsort((at, self._kind[0][pieces]))
        pieces, at = pieces[order], at[order]
        kinds = self._kind[0][pieces]
        ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(pieces)]
        low = 0
        for high in ends:
            kind = self._kinds[int(kinds[low])]
            for a, b in split_equal_steps(at[low:high]):
                arrays = kind.arrays(memory, at[low + a : low + b])
                for piece, array in zip(pieces[low + a : low + b].tolist(), arrays, strict=True):
                    self._targets[piece][...] = array
            low = high

    def size_bytes(self, pieces: IntArray) -> int:
        """Return the bytes of arrays that these pieces fill."""
        counts = np.bincount(self._kind[0][pieces], minlength=len(self._kinds)).tolist()
        return sum(
            kind.target_bytes * count for kind, count in zip(self._kinds, counts, strict=True)
        )

    def describe(self, pieces: IntArray) -> Iterator[tuple[str, int]]:
        """Yield the name of each piece's tensor, and the bytes of an array that it fills."""
        kinds = self._kind[0][pieces].tolist()
        for piece, kind in zip(pieces.tolist(), kinds, strict=True):
            yield self._names[piece], self._kinds[kind].target_bytes
