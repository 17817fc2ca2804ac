"""Pieces of partitions: which rank sends which piece to which rank, along a mesh axis.

A dimension consists of partitions, and every rank of a mesh axis has a piece of each. The pieces
are stored on a rank in either of two orders: *unaligned*, the rank's own pieces of all partitions;
or *aligned*, all pieces of the partitions that the rank owns::

    splits of rank 0: 4 6 4 2, of rank 1: 2 4 8 2

                unaligned                    aligned
    rank 0      P00 P01 P02 P03              P00 P10 P01 P11        4+2, 6+4
    rank 1      P10 P11 P12 P13              P02 P12 P03 P13        4+8, 2+2

1. Partitions are assigned by ceil of their number: `b // ceil(partitions / ranks)` owns `b`.
2. `exchange_splits`, the first all-to-all: each rank sends each other rank the sizes of the pieces
   for that rank. A rank then knows its row of the splits (its own pieces, unaligned) and the
   columns of the partitions it owns (the others' pieces of them), which suffices.
3. `exchange_pieces`, the second: an exchange of messages as for any plan, in little memory. Both
   ends list the pieces between them by partition, so nothing but elements is sent.
4. `gather_splits`: all ranks receive all sizes, if the whole tensor is wanted.

The order of a mesh may differ from the ranks of its process group.

Source: the proposal of a `PartitionedShard` placement for DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from reshard.errors import RunError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.runs import IntArray
from reshard.torch.endpoint import local_of
from reshard.torch.exchange.agreement import run_errors
from reshard.torch.exchange.groups import rank_group
from reshard.torch.exchange.packing.copies import empty_result
from reshard.torch.exchange.packing.messages import RankTransfers
from reshard.torch.exchange.transfer import Transfer
from reshard.torch.gradients import apply_with_gradient


@dataclass(frozen=True, slots=True)
class PartitionOwners:
    """`partitions` assigned whole to `ranks`, by ceil of their number.

    >>> [list(PartitionOwners(5, 3).owned(rank)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """

    partitions: int
    ranks: int

    @property
    def most(self) -> int:
        """The maximum number of partitions of a rank."""
        return -(-self.partitions // self.ranks)

    def owned(self, rank: int) -> range:
        """Return the partitions that a rank owns."""
        begin, stop = rank * self.most, (rank + 1) * self.most
        return range(min(begin, self.partitions), min(stop, self.partitions))

    def owners(self) -> IntArray:
        """Return the rank that owns each partition: shape `(partitions,)`."""
        return np.arange(self.partitions, dtype=np.int64) // max(self.most, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """The sizes of pieces that a rank knows.

    Attributes:
        owners: of the partitions.
        rank: the rank that knows these sizes, counted along the mesh axis.
        row: the sizes of its own pieces of every partition: shape `(partitions,)`.
        columns: the sizes of every rank's pieces of its own partitions: shape `(owned, ranks)`.
    """

    owners: PartitionOwners
    rank: int
    row: IntArray
    columns: IntArray

    @classmethod
    def of_matrix(
        cls, owners: PartitionOwners, rank: int, matrix: Sequence[Sequence[int]]
    ) -> Splits:
        """Return the part that a rank needs of a matrix with a row for each rank.

        >>> splits = Splits.of_matrix(PartitionOwners(4, 2), 1, [(4, 6, 4, 2), (2, 4, 8, 2)])
        >>> splits.row.tolist(), splits.columns.tolist()
        ([2, 4, 8, 2], [[4, 8], [2, 2]])
        """
        table = np.array(matrix, dtype=np.int64).reshape(owners.ranks, owners.partitions)
        owned = owners.owned(rank)
        return cls(owners, rank, table[rank], table.T[owned.start : owned.stop])

    def of_side(self, aligned: bool) -> tuple[int, ...]:
        """Return the sizes of the pieces in the order of a side's local tensor."""
        return tuple((self.columns if aligned else self.row).ravel().tolist())

    def transfers(
        self, dim: int, shape: Sequence[int], slots: Sequence[int], is_aligning: bool
    ) -> tuple[Transfers, Transfers]:
        """Return the transfers into the rank (including local ones), and out of it.

        Args:
            dim: the dimension of the partitions.
            shape: of a local tensor; its length along `dim` is not used.
            slots: of the ranks along the axis.
            is_aligning: from unaligned to aligned, otherwise from aligned to unaligned.
        """
        owned = np.array(self.owners.owned(self.rank), dtype=np.int64)
        # Unaligned: a piece of each partition. Aligned: for each owned partition, a piece per rank.
        ranks = self.owners.ranks
        apart = np.arange(self.owners.partitions), self.owners.owners(), self.row
        together = (
            np.repeat(owned, ranks),
            np.tile(np.arange(ranks), len(owned)),
            self.columns.ravel(),
        )
        before, after = (apart, together) if is_aligning else (together, apart)
        (_, to, sizes_before), (_, of, sizes_after) = before, after
        begin_before, begin_after = (
            np.cumsum(sizes) - sizes for sizes in (sizes_before, sizes_after)
        )
        # The pieces that stay are in both lists, in the same order.
        source_begin = np.zeros(len(of), dtype=np.int64)
        source_begin[of == self.rank] = begin_before[to == self.rank]
        slot_of = np.array(slots, dtype=np.int64)
        here = np.full(len(of), slot_of[self.rank])
        received = _make_transfers(after, dim, shape, slot_of[of], here, source_begin, begin_after)
        here, nowhere = np.full(len(to), slot_of[self.rank]), np.zeros_like(begin_before)
        sent = _make_transfers(before, dim, shape, here, slot_of[to], begin_before, nowhere)
        return received, sent.moving


def _make_transfers(
    pieces: tuple[IntArray, IntArray, IntArray],
    dim: int,
    shape: Sequence[int],
    source_slot: IntArray,
    target_slot: IntArray,
    source_begin: IntArray,
    target_begin: IntArray,
) -> Transfers:
    """Make the transfers of consecutive pieces, given their partitions, peers and sizes."""
    partitions, _, sizes = pieces
    count = len(sizes)
    nothing = np.zeros(count, dtype=np.int64)

    def along(value: IntArray) -> IntArray:
        column = np.zeros((count, len(shape)), dtype=np.int64)
        column[:, dim] = value
        return column

    extent = np.tile(np.array(shape, dtype=np.int64), (count, 1))
    extent[:, dim] = sizes
    rows = Transfers(
        source_slot,
        target_slot,
        nothing,
        nothing,
        nothing,
        source_slot == target_slot,
        # The offset of a piece in the whole tensor is unknown; its partition gives the same order.
        along(partitions),
        extent,
        along(source_begin),
        along(target_begin),
    )
    return rows.take(rows.elements > 0)


class AxisRanks:
    """The ranks along a mesh of a single axis, in its order, seen from this process.

    Attributes:
        mesh: the torch mesh.
        members: global ranks.
        position: this process's position among them.
        group: the mesh's process group.

    Raises:
        UsageError: a mesh of several axes, or a mesh without this process.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise UsageError(
                f"a mesh of {mesh.ndim} axes; partitions are dealt along one: give that axis, such "
                "as mesh['ep']"
            )
        self.mesh = mesh
        self.members: list[int] = mesh.mesh.reshape(-1).tolist()
        if dist.get_rank() not in self.members:
            raise UsageError(f"rank {dist.get_rank()} is not in the mesh of ranks {self.members}")
        self.position = self.members.index(dist.get_rank())
        self.group: dist.ProcessGroup = mesh.get_group()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def in_group_order(self) -> list[int]:
        """The position in the mesh of each of the group's ranks."""
        return [self.members.index(rank) for rank in dist.get_process_group_ranks(self.group)]


def exchange_splits(
    axis: AxisRanks, owners: PartitionOwners, sizes: IntArray, is_aligning: bool
) -> Splits:
    """Return this rank's splits of both sides, from the sizes of its own pieces.

    Args:
        axis: the ranks; all of them call this.
        owners: of the partitions.
        sizes: of this rank's pieces: its row before aligning, its columns after it.
        is_aligning: whether the pieces will be converted from unaligned to aligned.

    Raises:
        RunError: a rank that does not answer.
    """
    own = len(owners.owned(axis.position))
    if is_aligning:
        outgoing = [
            sizes[owned.start : owned.stop] for owned in map(owners.owned, range(len(axis)))
        ]
        expected = [own] * len(axis)
    else:
        # Aligned pieces are ordered by partition, and within a partition by rank.
        columns = sizes.reshape(own, len(axis))
        outgoing = list(columns.T)
        expected = [len(owners.owned(rank)) for rank in range(len(axis))]
    others = [place for place in range(len(axis)) if place != axis.position]
    # Do not use the process group's own collectives, in which others would wait for a failed rank.
    with run_errors("nothing was moved", axis.group):
        received = rank_group(axis.group).swap_bytes(
            {axis.members[n]: outgoing[n].tobytes() for n in others if len(outgoing[n])},
            {axis.members[n]: 8 * expected[n] for n in others if expected[n]},
        )
    parts = [np.frombuffer(received.get(member, b""), dtype=np.int64) for member in axis.members]
    parts[axis.position] = outgoing[axis.position]
    if is_aligning:
        return Splits(owners, axis.position, sizes, np.stack(parts, axis=1))
    return Splits(owners, axis.position, np.concatenate(parts), columns)


def gather_splits(axis: AxisRanks, sizes: Sequence[int], most: int) -> IntArray:
    """Return the sizes of all ranks: shape `(ranks, most)`, padded with zeros.

    Raises:
        RunError: a rank that does not answer.
    """
    own = torch.zeros(most, dtype=torch.int64)
    own[: len(sizes)] = torch.tensor(sizes, dtype=torch.int64)
    with run_errors("nothing was moved", axis.group):
        found = rank_group(axis.group).all_gather(own)
    gathered = np.empty((len(axis), most), dtype=np.int64)
    for place, row in zip(axis.in_group_order, found, strict=True):
        gathered[place] = row.numpy()
    return gathered


def exchange_pieces(
    axis: AxisRanks,
    splits: Splits,
    tensor: torch.Tensor,
    dim: int,
    is_aligning: bool,
    extra_bytes: int,
) -> tuple[torch.Tensor, int]:
    """Return the pieces in their other order, and the bytes received from other ranks.

    Raises:
        RunError: on every rank, a rank that fails or does not answer.
    """
    source = local_of(tensor)
    if source is None:
        raise RunError("a rank without a tensor; give one of length 0")
    shape = list(source.shape)
    shape[dim] = int((splits.columns if is_aligning else splits.row).sum())
    target = empty_result(shape, source.dtype, source.device)
    rank = axis.members[axis.position]
    bounds = tuple(max(pair) for pair in zip(source.shape, shape, strict=True))
    # The whole tensor is unknown. An exchange uses layouts for the strides of this rank's tensors
    # only, so each has a single box of their size.
    change = LayoutChange(
        _describe_local(bounds, source.shape, rank), _describe_local(bounds, shape, rank)
    )
    received, sent = splits.transfers(dim, shape, axis.members, is_aligning)
    group = rank_group(axis.group)
    tensors = [RankTransfers(change, received, sent, [source], [target])]
    transfer = Transfer.prepare(tensors, group, source.device, extra_bytes)
    transfer.run()
    return target, transfer.received_bytes


def _describe_local(bounds: Sequence[int], shape: Sequence[int], rank: int) -> Layout:
    box = Box((0,) * len(bounds), tuple(shape))
    return Layout.from_boxes(bounds, [(rank, box)])


def convert_pieces(
    axis: AxisRanks,
    splits: Splits,
    tensor: torch.Tensor,
    dim: int,
    is_aligning: bool,
    extra_bytes: int,
) -> tuple[torch.Tensor, int]:
    """Exchange pieces as `exchange_pieces` does, with gradients by the reverse exchange."""
    received_bytes = 0

    def forth() -> torch.Tensor:
        nonlocal received_bytes
        found, received_bytes = exchange_pieces(axis, splits, tensor, dim, is_aligning, extra_bytes)
        return found

    def back(gradient: Any) -> torch.Tensor:
        return exchange_pieces(axis, splits, gradient, dim, not is_aligning, extra_bytes)[0]

    if torch.is_grad_enabled() and tensor.requires_grad:
        return apply_with_gradient(tensor, forth, back), received_bytes
    return forth(), received_bytes
