"""The contents of a checkpoint: its tensors, files and other values, whatever its format.

A checkpoint is a set of named global tensors. Each has a layout whose slots are ranks, and a
binding, which has the file and the offset of each rank's shard. Ranks that hold the same cells may
share a stored copy; then only one of these ranks has its address.

This module does not access files. `reshard.checkpoint.open` builds these values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard._records import Record
from reshard.binding import Binding, FileRange, FileRanges, View
from reshard.checkpoint.storage.local_files import FileIdentity, SourceFile
from reshard.checkpoint.storage.remote_paths import join_path
from reshard.dtypes import DType
from reshard.errors import (
    CheckpointError,
    CoverageError,
    PlanError,
    UnreadableTensorError,
    UsageError,
)
from reshard.geometry.boxes import cover_grid, find_edges
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh

if TYPE_CHECKING:
    from reshard.checkpoint.storage.derived_files import DerivedFile

CHECK_COPIES = ("sample", "all", "none")
"""How parts that several ranks hold are compared: by checksums and samples, whole, or not."""


class TensorDigest(Record):
    """A tensor's digest, and the digests of its blocks in order (16 bytes each)."""

    tensor: bytes
    blocks: tuple[bytes, ...]


class StoredTensor(Record):
    """A named tensor: its type and layout, and the byte ranges of files that store it.

    `spec` is its sharding in the native notation, or None if it has none.

    Raises:
        CheckpointError: an address that is not a file range.
    """

    name: str
    dtype: DType
    binding: Binding
    spec: str | None = None
    digest: TensorDigest | None = None

    def __post_init__(self) -> None:
        # It only makes file ranges; to list them would take time for every rank.
        if isinstance(self.binding.addresses, FileRanges):
            return
        for slot, address in self.binding.addresses.items():
            for item in address if isinstance(address, tuple) else (address,):
                if not isinstance(item, FileRange):
                    raise CheckpointError(
                        f"rank {slot} of {self.name!r} is bound to {item}, no file"
                    )

    @property
    def layout(self) -> Layout:
        """The layout of the tensor: the part that each rank holds."""
        return self.binding.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.layout.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor, held once."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize_bytes

    def file_range(self, slot: int, cell: int = 0, offset: int = 0) -> FileRange:
        """Return the address of a cell of a stored shard.

        This is cell number `cell` of `slot`, which begins after `offset` elements if the slot's
        cells are consecutive. Raises CheckpointError if the slot does not store the cell.
        """
        address = self.binding.addresses.get(slot)
        # The address of a cell itself, from which no offset is counted.
        if isinstance(address, tuple):
            address, offset = address[cell], 0
        if not isinstance(address, FileRange):
            raise CheckpointError(f"rank {slot} stores no shard of {self.name!r}")
        return FileRange(address.path, address.start_bytes + offset * self.dtype.itemsize_bytes)

    def view(self, slot: int, cell: int) -> View | None:
        """Return the strides of a cell at its address, or None if it is dense and row major."""
        view = self.binding.views.get(slot)
        return view[cell] if isinstance(view, tuple) else view

    def shard_size_bytes(self, slot: int) -> int:
        """Return the number of bytes of a slot's shard, padding and halos included."""
        shape = self.layout.local_shape(slot)
        if shape is None:
            return 0
        return int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize_bytes

    @cached_property
    def stored_slots(self) -> tuple[int, ...]:
        """The slots whose shards are in files, in order."""
        return tuple(sorted(self.binding.addresses))

    @cached_property
    def stored_layout(self) -> Layout:
        """The layout, reduced to the slots whose shards are in files."""
        layout = self.layout
        if len(self.binding.addresses) == len(layout.holders):
            return layout
        is_stored = np.isin(layout.cell_slot, self.stored_slots)
        return layout.replace(
            cell_slot=layout.cell_slot[is_stored],
            cell_part=layout.cell_part[is_stored],
            cell_contribution=layout.cell_contribution[is_stored],
        )

    @cached_property
    def assembly(self) -> LayoutChange:
        """The layout change that assembles the whole tensor, on a slot that holds no part of it.

        Raises:
            CoverageError: the shards do not cover the tensor; the first missing box is named.
        """
        stored = self.stored_layout
        change = LayoutChange(stored, _make_whole(self.shape, stored.slots))
        try:
            # Raises PlanError if no shard holds some of the elements.
            _ = change.routes
        except PlanError:
            hole = missing_box(stored)
            raise CoverageError(
                f"tensor {self.name!r} of shape {list(self.shape)}: no shard holds "
                f"{hole if hole is not None else 'a part of it'}; a shard file is missing, or the "
                f"checkpoint was not written completely (found shards of ranks "
                f"{_list_numbers(self.stored_slots)})"
            ) from None
        return change


# Cached, since many tensors of a model have the same shape.
@lru_cache(maxsize=1024)
def _make_whole(shape: tuple[int, ...], slot: int) -> Layout:
    """Return the layout of the whole tensor on `slot`, the first after the slots that store it."""
    return Layout.whole(shape, [slot], slot + 1)


class StoredFile(Record):
    """A tensor file of a checkpoint. `rank` is the rank whose shards it contains."""

    name: str
    size_bytes: int
    rank: int


class StoredItem(Record):
    """Named bytes that are not a tensor, such as a step or a learning rate in pickled form.

    They are `size_bytes` of a file at `place`, of the rank `rank`, and are never decoded.
    `transforms` names the transformations of the bytes, such as a compression, innermost first.
    `digest` is computed from their pieces (see `item_pieces`), or None if it was not recorded.
    """

    name: str
    place: FileRange
    size_bytes: int
    rank: int = 0
    transforms: tuple[str, ...] = ()
    digest: bytes | None = None


class StoredChecksum(Record):
    """A CRC-32 that a file contains for `size_bytes` of its own: the box `part` of a tensor.

    `is_read_once` is whether reading the tensor reads each of these bytes once, except `padding`:
    ranges `(start, size)` in bytes of the file that are not elements.
    """

    tensor: str
    part: str
    place: FileRange
    size_bytes: int
    crc32: int
    is_read_once: bool
    padding: tuple[tuple[int, int], ...] = ()


def read_again(
    checksums: Iterable[StoredChecksum], names: Collection[str]
) -> tuple[StoredChecksum, ...]:
    """Return the checksums, with `is_read_once` False for the tensors `names`."""
    return tuple(
        checksum.replace(is_read_once=checksum.is_read_once and checksum.tensor not in names)
        for checksum in checksums
    )


class Checkpoint(Record):
    """The description of a checkpoint on disk: `checkpoint["lm_head.weight"].shape`.

    Attributes:
        folder: where its files are.
        format: the name of its format, such as `"safetensors"`.
        tensors: every tensor by name, in the order of the files.
        files: the tensor files.
        mesh: the devices over which it is sharded, if known.
        metadata: the text metadata of its files.
        carried: other files that belong to it (config, tokenizer), relative to the folder.
        left_out: other files that are not copied, with the reason.
        identities: the identity of each tensor file when its header was read.
        items: bytes under names that are not tensors.
        checksums: checksums in the files, of tensors without a digest.
        paths: the path of each name in the nested state dict that was saved, if known.
        derived: files that are made when they are read, by the name in the addresses of tensors;
            no file of the folder can have such a name.
        held: functions that open files whose bytes are in memory, such as those of arrays, by name.
        attributes: plain values of its metadata that are not tensors or items.
        values: plain values that were saved with the tensors, by name: numbers, text, None, and
            lists, tuples and dicts of such.
        unread: values that no target can have, with the reason.
        unreadable: tensors that cannot be read, by name, with their type or another reason.
        notes: notes for the user on how it is read.
        given_sharding: the shardings of its tensors that the user specified.
        check_copies: how parts that several ranks hold are compared when tensors are read, one of
            `CHECK_COPIES` (see `reshard.checkpoint.copy_checks`).
        allowed: the errors that the user accepts, such as `differing-copies`.
    """

    folder: Path
    format: str
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    mesh: DeviceMesh | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    identities: Mapping[str, FileIdentity] = field(default_factory=dict)
    items: Mapping[str, StoredItem] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    checksums: tuple[StoredChecksum, ...] = ()
    derived: Mapping[str, DerivedFile] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    given_sharding: str | None = None
    held: Mapping[str, Callable[[], SourceFile]] = field(default_factory=dict)
    check_copies: str = CHECK_COPIES[0]
    allowed: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.check_copies not in CHECK_COPIES:
            expected = ", ".join(CHECK_COPIES)
            raise UsageError(f"check_copies {self.check_copies!r}; expected one of {expected}")

    def __getitem__(self, name: str) -> StoredTensor:
        try:
            return self.tensors[name]
        except KeyError:
            if name in self.unreadable:
                raise UnreadableTensorError(
                    f"{name!r} in {self.folder} cannot be read: it is {self.unreadable[name]}"
                ) from None
            raise CheckpointError(
                f"no tensor {name!r} in {self.folder}; it has {len(self.tensors)}, see "
                "`reshard inspect`"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, each held once."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def ranks(self) -> int:
        """The number of ranks over which it is sharded."""
        if self.mesh is not None:
            return max(self.mesh.devices) + 1
        return max((tensor.layout.slots for tensor in self.tensors.values()), default=1)

    def expect_readable(self) -> None:
        """Raise UnreadableTensorError for tensors that cannot be read, if there are any."""
        if not self.unreadable:
            return
        name, why = next(iter(self.unreadable.items()))
        count = len(self.unreadable)
        which = "a tensor" if count == 1 else f"{count} tensors"
        end = "" if why.endswith((".", "?")) else "."
        raise UnreadableTensorError(
            f"{self.folder} has {which} that cannot be read, {name!r} first: it is {why}{end} "
            f"Leave it out with --exclude {name!r}, or all of its kind with a glob; `reshard "
            "inspect` lists them"
        )

    def path(self, name: str) -> Path:
        """Return the full path of a file of the checkpoint."""
        return join_path(self.folder, name)


def missing_box(layout: Layout) -> Box | None:
    """Return the first box, in row-major order, that no cell of a layout owns.

    >>> missing_box(Layout.from_boxes((4, 4), [(0, Box((0, 0), (4, 2))), (1, Box((2, 2), (4, 4)))]))
    Box(start=(0, 2), stop=(2, 4))
    """
    boxes = [box for slot in layout.holders for box in layout.boxes(slot)]
    if not layout.shape:
        return None if boxes else Box((), ())
    products = [[[pair] for pair in zip(*box, strict=True)] for box in boxes]
    edges = find_edges([[[(0, size)] for size in layout.shape], *products])
    covered = cover_grid(products, edges)
    if covered.all():
        return None
    # The first False in row-major order.
    at = np.unravel_index(int(np.argmin(covered)), covered.shape)
    start = tuple(int(edge[i]) for edge, i in zip(edges, at, strict=True))
    return Box(start, tuple(int(edge[i + 1]) for edge, i in zip(edges, at, strict=True)))


def _list_numbers(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return shown + (f", ... {len(numbers) - 16} more" if len(numbers) > 16 else "")
