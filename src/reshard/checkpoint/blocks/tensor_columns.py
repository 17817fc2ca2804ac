"""Tensors of a checkpoint as columns: a few numbers each, for very many tensors.

Equal tensors, such as the experts of a model, share a `TensorKind`: type, layout, sharding, and the
files of their shards. A tensor only adds its name, the number of its kind, and the begins of its
shards in these files::

    row   name         kind   starts                kinds
    0     expert.0.up   0     4096   4096           0: float32 [64, 64], "tp, -", a.st and b.st
    1     expert.1.up   0     12288  12288          1: float32 [64], whole, a.st
    2     norm          1     20480

`TensorColumns` is a mapping whose `StoredTensor`s are created on access; code that handles all
tensors at once uses the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.binding import Binding, FileRanges, View
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, BlockGrid
from reshard.checkpoint.contents import StoredTensor, TensorDigest
from reshard.dtypes import DType
from reshard.errors import CheckpointError
from reshard.layout import Layout
from reshard.runs import IntArray, find_distinct


class TensorKind(Record):
    """The common properties of equal tensors: all except names, digests and offsets in files.

    `places` are the stored shards, each `(slot, cell)`; the cell is None if the cells of the slot
    are stored contiguously. `files` has the file of each place, `views` are the views of `Binding`.
    """

    dtype: DType
    layout: Layout
    places: tuple[tuple[int, int | None], ...]
    files: tuple[str, ...]
    spec: str | None = None
    # A dict cannot be hashed; kinds that are equal hash alike without it.
    views: Mapping[int, View | tuple[View, ...]] = field(default_factory=dict, hash=False)

    @property
    def grid(self) -> BlockGrid:
        """The blocks of a tensor."""
        return BlockGrid.of(self.layout.shape, self.dtype.itemsize_bytes)

    @cached_property
    def tensor_bytes(self) -> int:
        """The bytes of a whole tensor, stored once."""
        return int(np.prod(self.layout.shape, dtype=np.int64)) * self.dtype.itemsize_bytes

    def tensor(
        self, name: str, starts: Sequence[int], digest: TensorDigest | None = None
    ) -> StoredTensor:
        """Return the tensor of that name; `starts` has the begin of its shard at each place."""
        ranges = FileRanges(self.layout, self.places, self.files, tuple(starts))
        return StoredTensor(
            name, self.dtype, Binding(self.layout, ranges, self.views), self.spec, digest
        )

    @cached_property
    def _place_numbers(self) -> Mapping[tuple[int, int | None], int]:
        return {place: number for number, place in enumerate(self.places)}

    def find_place(self, slot: int, cell: int, offset: int = 0) -> tuple[int, int]:
        """Return the index of a cell's place, and the cell's first byte relative to the place.

        The cell begins after `offset` elements if the slot's cells are consecutive.

        Raises:
            CheckpointError: a slot without a stored shard.
        """
        if (slot, None) in self._place_numbers:
            return self._place_numbers[slot, None], offset * self.dtype.itemsize_bytes
        if (slot, cell) in self._place_numbers:
            return self._place_numbers[slot, cell], 0
        raise CheckpointError(f"rank {slot} stores no shard of a tensor of {self.layout!r}")

    def view(self, slot: int, cell: int) -> View | None:
        """Return the strides of a cell at its place, or None if it is dense and row major."""
        view = self.views.get(slot)
        return view[cell] if isinstance(view, tuple) else view


class DigestColumns(Record, eq=False):
    """The digests of tensors and of their blocks, 16 bytes each.

    `tensors` has the digest of each tensor, `blocks` the digests of all blocks: those from
    `first[i]` to `first[i + 1]` are blocks of the tensor in row `i`. `known` marks the tensors with
    digests; None if all have them.
    """

    first: IntArray
    blocks: bytes
    tensors: bytes
    known: NDArray[np.bool_] | None = None

    def of(self, row: int) -> TensorDigest | None:
        """Return the digest of a tensor, or None if it is unknown."""
        if self.known is not None and not self.known[row]:
            return None
        blocks = self.of_blocks(row)
        return TensorDigest(
            self.of_tensor(row),
            tuple(blocks[at : at + DIGEST_BYTES] for at in range(0, len(blocks), DIGEST_BYTES)),
        )

    @classmethod
    def of_each(cls, digests: Iterable[TensorDigest | None]) -> DigestColumns:
        """Return the digests of all tensors, in order, as columns."""
        first, blocks, whole, known = [0], bytearray(), bytearray(), []
        for digest in digests:
            known.append(digest is not None)
            whole += bytes(DIGEST_BYTES) if digest is None else digest.tensor
            blocks += b"" if digest is None else b"".join(digest.blocks)
            first.append(len(blocks) // DIGEST_BYTES)
        is_known = None if all(known) else np.array(known, dtype=bool)
        return cls(np.array(first, dtype=np.int64), bytes(blocks), bytes(whole), is_known)

    def is_known(self, rows: IntArray) -> NDArray[np.bool_]:
        """Return whether the tensors in these rows have digests."""
        return np.ones(len(rows), dtype=bool) if self.known is None else self.known[rows]

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The digests of all blocks, shape `(blocks, 16)`."""
        return np.frombuffer(self.blocks, np.uint8).reshape(-1, DIGEST_BYTES)

    def of_blocks(self, row: int) -> bytes:
        """Return the digests of all blocks of a tensor."""
        begin, end = self.first[row : row + 2].tolist()
        return self.blocks[begin * DIGEST_BYTES : end * DIGEST_BYTES]

    def take(self, rows: IntArray) -> DigestColumns:
        """Return the digests of the tensors in these rows, in that order."""
        counts = np.diff(self.first)[rows]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        chosen = np.repeat(self.first[rows] - first[:-1], counts) + np.arange(int(first[-1]))
        blocks = self.rows[chosen]
        whole = np.frombuffer(self.tensors, np.uint8).reshape(-1, DIGEST_BYTES)[rows]
        known = None if self.known is None else self.known[rows]
        return DigestColumns(first, blocks.tobytes(), whole.tobytes(), known)

    def of_tensor(self, row: int) -> bytes:
        """Return the digest of a whole tensor."""
        return self.tensors[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]

    def of_block(self, row: int, block: int) -> bytes | None:
        """Return the digest of a block, or None if it is unknown."""
        if self.known is not None and not self.known[row]:
            return None
        at = (int(self.first[row]) + block) * DIGEST_BYTES
        return self.blocks[at : at + DIGEST_BYTES]


class TensorColumns(Mapping[str, StoredTensor]):
    """Stored tensors by name, in order, as columns.

    Args:
        names: the names of the tensors.
        kinds: all kinds of tensors.
        kind: the index in `kinds` of each tensor's kind, shape `(tensors,)`.
        starts: the begin of each place of each tensor in its file, in bytes, tensor by tensor.
        digests: the digests of the tensors, if known.

    Raises:
        CheckpointError: a name that occurs twice.

    >>> from reshard.dtypes import dtype
    >>> kind = TensorKind(dtype("int8"), Layout.whole((4,), [0], 1), ((0, None),), ("a.bin",))
    >>> tensors = TensorColumns(["v", "w"], [kind], [0, 0], [64, 68])
    >>> tensors["w"].shape, tensors["w"].file_range(0), list(tensors)
    ((4,), FileRange(path='a.bin', start_bytes=68), ['v', 'w'])
    """

    def __init__(
        self,
        names: Iterable[str],
        kinds: Sequence[TensorKind],
        kind: Sequence[int] | IntArray,
        starts: Sequence[int] | IntArray,
        digests: DigestColumns | None = None,
    ) -> None:
        self.names = tuple(names)
        self.kinds = tuple(kinds)
        self.kind: IntArray = np.asarray(kind, dtype=np.int64)
        self.starts: IntArray = np.asarray(starts, dtype=np.int64)
        self.digests = digests
        if len(set(self.names)) != len(self.names):
            raise CheckpointError("a tensor name appears twice")

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> TensorColumns:
        """Return tensors as columns."""
        if isinstance(tensors, TensorColumns):
            return tensors
        kinds: dict[Any, int] = {}
        listed: list[TensorKind] = []
        kind: list[int] = []
        starts: list[int] = []
        for tensor in tensors.values():
            binding = tensor.binding
            places: list[tuple[int, int | None]] = []
            files: list[str] = []
            for slot, address in binding.addresses.items():
                is_apart = isinstance(address, tuple)
                for cell in range(len(address) if isinstance(address, tuple) else 1):
                    shard = tensor.file_range(slot, cell)
                    places.append((slot, cell if is_apart else None))
                    files.append(shard.path)
                    starts.append(shard.start_bytes)
            views = tuple(binding.views.items())
            # The views are converted to a tuple, since a dict is not hashable.
            key = (tensor.dtype, binding.layout, tuple(places), tuple(files), tensor.spec, views)
            number = kinds.setdefault(key, len(listed))
            if number == len(listed):
                listed.append(TensorKind(*key[:5], binding.views))
            kind.append(number)
        columns = cls(tensors, listed, kind, starts)
        if any(tensor.digest is not None for tensor in tensors.values()):
            columns = columns.with_digests(
                DigestColumns.of_each(tensor.digest for tensor in tensors.values())
            )
        return columns

    def with_digests(self, digests: DigestColumns | None) -> TensorColumns:
        """Return the same tensors with these digests."""
        return TensorColumns(self.names, self.kinds, self.kind, self.starts, digests)

    def __getitem__(self, name: str) -> StoredTensor:
        return self.tensor(self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def row(self, name: str) -> int:
        """Return the row of a tensor. Raises KeyError."""
        return self._rows[name]

    def rows(self, names: Iterable[str]) -> IntArray:
        """Return the rows of tensors. Raises KeyError."""
        # Most callers pass all names, which needs no dict of the names.
        if names == self.names:
            return np.arange(len(self.names), dtype=np.int64)
        return np.fromiter(map(self._rows.__getitem__, names), np.int64)

    def tensor(self, row: int) -> StoredTensor:
        """Return the tensor of a row."""
        kind, first = self.kinds[int(self.kind[row])], int(self.first[row])
        starts = self.starts[first : first + len(kind.places)].tolist()
        digest = None if self.digests is None else self.digests.of(row)
        return kind.tensor(self.names[row], starts, digest)

    def kind_of(self, name: str) -> TensorKind:
        """Return the kind of a tensor."""
        return self.kinds[int(self.kind[self._rows[name]])]

    def sample(self, kind: int) -> StoredTensor:
        """Return the first tensor of a kind."""
        return self.tensor(int(np.argmax(self.kind == kind)))

    @cached_property
    def first(self) -> IntArray:
        """The index in `starts` of each tensor's first place, shape `(tensors,)`."""
        places = self.by_kind([len(kind.places) for kind in self.kinds])
        first: IntArray = np.cumsum(places) - places
        return first

    @cached_property
    def tensor_bytes(self) -> IntArray:
        """The bytes of each tensor, stored once: shape `(tensors,)`."""
        return self.by_kind([kind.tensor_bytes for kind in self.kinds])

    def by_kind(self, values: Sequence[int]) -> IntArray:
        """Return a number of each kind for each tensor: shape `(tensors,)`."""
        spread: IntArray = np.array(values, dtype=np.int64)[self.kind]
        return spread


def shapes_of(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by name."""
    if not isinstance(tensors, TensorColumns):
        return {name: tensor.shape for name, tensor in tensors.items()}
    shapes = [kind.layout.shape for kind in tensors.kinds]
    return dict(zip(tensors.names, map(shapes.__getitem__, tensors.kind.tolist()), strict=True))


def types_of(tensors: Mapping[str, StoredTensor]) -> dict[str, DType]:
    """Return the element type of each tensor, by name."""
    if not isinstance(tensors, TensorColumns):
        return {name: tensor.dtype for name, tensor in tensors.items()}
    types = [kind.dtype for kind in tensors.kinds]
    return dict(zip(tensors.names, map(types.__getitem__, tensors.kind.tolist()), strict=True))


def bind_shards(
    names: Sequence[str],
    kinds: Sequence[tuple[DType, Layout, str | None]],
    kind: IntArray,
    files: Iterable[tuple[int, str, IntArray, IntArray]],
    digests: DigestColumns | None = None,
) -> TensorColumns:
    """Return tensors whose shards are in files of ranks, at most one shard of a tensor in each.

    Args:
        names: the names of the tensors.
        kinds: type, layout and sharding of equal tensors.
        kind: the index in `kinds` of each tensor's kind, shape `(tensors,)`.
        files: the rank and the name of each file, ranks ascending; the rows of the tensors that
            have a shard in it, and the begin of each of these shards, in bytes.
        digests: the digests of the tensors.
    """
    # `places` has the distinct lists of places; each file extends the lists of its tensors.
    places: list[tuple[tuple[int, str], ...]] = [()]
    listed = np.zeros(len(names), dtype=np.int64)
    for rank, file, rows, _ in (files := tuple(files)):
        before, _, which = find_distinct(listed[rows])
        after = len(places) + np.arange(len(before))
        places += [(*places[old], (rank, file)) for old in before.tolist()]
        listed[rows] = after[which]
    pairs, _, kind_of = find_distinct(np.column_stack([kind, listed]))
    listed_kinds = []
    for number, where in pairs.tolist():
        element, layout, spec = kinds[number]
        slots = tuple((rank, None) for rank, _ in places[where])
        names_of_files = tuple(file for _, file in places[where])
        listed_kinds.append(TensorKind(element, layout, slots, names_of_files, spec))
    nothing = np.zeros(0, dtype=np.int64)
    # Sorted by tensor; within a tensor, in the order of the files.
    rows = np.concatenate([nothing, *(rows for _, _, rows, _ in files)])
    order = np.argsort(rows, kind="stable")
    # Each of these columns has a number for every shard: they are not in memory at once.
    del rows
    starts = np.concatenate([nothing, *(starts for _, _, _, starts in files)])
    return TensorColumns(names, listed_kinds, kind_of, starts[order], digests)
