"""Tensors of partitions, such as the tokens of experts, with sizes known only to each rank.

A dimension consists of partitions, and every rank of a mesh axis has a piece of each. The tokens of
a mixture of experts are sorted by expert on every rank (*unaligned*: the rank's own pieces of all
partitions). They are sent to the ranks with the experts (*aligned*: all pieces of the partitions
that the rank owns), and back. Only the sender knows how many are sent where::

    rank 0   |P00 P01 P02 P03|    -- to_aligned() -->    |P00 P10|P01 P11|
    rank 1   |P10 P11 P12 P13|    <- to_unaligned() -    |P02 P12|P03 P13|

1. All ranks compare their calls. Partitions are assigned by ceil of their number
   (`owned_partitions`).
2. `exchange_splits`, a first all-to-all: each rank sends each other rank the sizes of the pieces
   for that rank. A rank then knows its row of the splits (its own pieces, unaligned) and the
   columns of the partitions it owns (the others' pieces of them), which suffices. It is omitted if
   the sizes are known: to all ranks as a matrix, or from an earlier conversion.
3. `convert_pieces`, the second: an exchange of messages as for any plan, in little memory. Both
   ends list the pieces between them by partition, so nothing but elements is sent.

To convert the whole tensor (`redistribute`) every rank needs all splits, which are gathered first
if some rank does not know them. The order of a mesh may differ from the ranks of its process group.

Source: the proposal of a `PartitionedShard` placement for DTensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from reshard.cut_rules import ceil_sizes
from reshard.errors import ReshardError, RunError, ShardError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.notation.partitioned import PartitionedShard
from reshard.plans.schedule import limit_message_bytes
from reshard.runs import IntArray
from reshard.torch.endpoint import Description, local_of
from reshard.torch.exchange.agreement import CallSignature, agree
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES, MessageExchange
from reshard.torch.exchange.groups import rank_group
from reshard.torch.exchange.packing.copies import empty_result
from reshard.torch.exchange.packing.messages import RankTransfers
from reshard.torch.exchange.transfer import Transfer
from reshard.torch.graph_breaks import break_graph
from reshard.torch.redistribution import RedistributionOptions, apply_with_gradient, redistribute


def owned_partitions(partitions: int, ranks: int, rank: int) -> range:
    """Return the partitions that a rank owns: whole ones, by ceil of their number.

    >>> [list(owned_partitions(5, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    most = -(-partitions // ranks)
    return range(min(rank * most, partitions), min((rank + 1) * most, partitions))


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """The sizes of pieces that a rank knows.

    Attributes:
        rank: the rank that knows these sizes, counted along the mesh axis.
        row: the sizes of its own pieces of every partition: shape `(partitions,)`.
        columns: the sizes of every rank's pieces of its own partitions: shape `(owned, ranks)`.
    """

    rank: int
    row: IntArray
    columns: IntArray

    @classmethod
    def of_matrix(cls, rank: int, matrix: Sequence[Sequence[int]]) -> Splits:
        """Return the part that a rank needs of a matrix with a row for each rank.

        >>> splits = Splits.of_matrix(1, [(4, 6, 4, 2), (2, 4, 8, 2)])
        >>> splits.row.tolist(), splits.columns.tolist()
        ([2, 4, 8, 2], [[4, 8], [2, 2]])
        """
        table = np.array(matrix, dtype=np.int64).reshape(len(matrix), -1)
        ranks, partitions = table.shape
        owned = owned_partitions(partitions, ranks, rank)
        return cls(rank, table[rank], table.T[owned.start : owned.stop])

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
        partitions, ranks = len(self.row), self.columns.shape[1]
        owned = np.array(owned_partitions(partitions, ranks, self.rank), dtype=np.int64)
        # Unaligned: a piece of each partition. Aligned: for each owned partition, a piece per rank.
        numbers = np.arange(partitions)
        apart = numbers, numbers // max(-(-partitions // ranks), 1), self.row
        together = (
            np.repeat(owned, ranks),
            np.tile(np.arange(ranks), len(owned)),
            self.columns.ravel(),
        )
        before, after = (apart, together) if is_aligning else (together, apart)
        (_, to, sizes_before), (_, origin, sizes_after) = before, after
        begin_before, begin_after = (
            np.cumsum(sizes) - sizes for sizes in (sizes_before, sizes_after)
        )
        # The pieces that stay are in both lists, in the same order.
        source_begin = np.zeros(len(origin), dtype=np.int64)
        source_begin[origin == self.rank] = begin_before[to == self.rank]
        slot_of = np.array(slots, dtype=np.int64)
        here = np.full(len(origin), slot_of[self.rank])
        received = _make_transfers(
            after, dim, shape, slot_of[origin], here, source_begin, begin_after
        )
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


def exchange_splits(axis: AxisRanks, partitions: int, sizes: IntArray, is_aligning: bool) -> Splits:
    """Return this rank's splits of both sides, from the sizes of its own pieces.

    Args:
        axis: the ranks; all of them call this.
        partitions: their number.
        sizes: of this rank's pieces: its row before aligning, its columns after it.
        is_aligning: whether the pieces will be converted from unaligned to aligned.

    Raises:
        RunError: a rank that does not answer.
    """
    owned_by = [owned_partitions(partitions, len(axis), rank) for rank in range(len(axis))]
    own = len(owned_by[axis.position])
    if is_aligning:
        outgoing = [sizes[owned.start : owned.stop] for owned in owned_by]
        expected = [own] * len(axis)
    else:
        # Aligned pieces are ordered by partition, and within a partition by rank.
        columns = sizes.reshape(own, len(axis))
        outgoing = list(columns.T)
        expected = list(map(len, owned_by))
    others = [place for place in range(len(axis)) if place != axis.position]
    # Do not use the process group's own collectives, in which others would wait for a failed rank.
    with rank_group(axis.group).errors("nothing was moved"):
        received = rank_group(axis.group).swap_bytes(
            {axis.members[n]: outgoing[n].tobytes() for n in others if len(outgoing[n])},
            {axis.members[n]: 8 * expected[n] for n in others if expected[n]},
        )
    parts = [np.frombuffer(received.get(member, b""), dtype=np.int64) for member in axis.members]
    parts[axis.position] = outgoing[axis.position]
    if is_aligning:
        return Splits(axis.position, sizes, np.stack(parts, axis=1))
    return Splits(axis.position, np.concatenate(parts), columns)


def gather_splits(axis: AxisRanks, sizes: Sequence[int], most: int) -> IntArray:
    """Return the sizes of all ranks: shape `(ranks, most)`, padded with zeros.

    Raises:
        RunError: a rank that does not answer.
    """
    own = torch.zeros(most, dtype=torch.int64)
    own[: len(sizes)] = torch.tensor(sizes, dtype=torch.int64)
    with rank_group(axis.group).errors("nothing was moved"):
        rows = rank_group(axis.group).all_gather(own)
    gathered = np.empty((len(axis), most), dtype=np.int64)
    for place, row in zip(axis.in_group_order, rows, strict=True):
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
    device = source.device
    transfer = Transfer.prepare(lambda: MessageExchange(tensors, group, device, extra_bytes), group)
    transfer.run()
    return target, transfer.received_bytes


def _describe_local(bounds: Sequence[int], shape: Sequence[int], rank: int) -> Layout:
    return Layout.from_boxes(bounds, [(rank, Box.of(shape))])


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
        result, received_bytes = exchange_pieces(
            axis, splits, tensor, dim, is_aligning, extra_bytes
        )
        return result

    def back(gradient: Any) -> torch.Tensor:
        return exchange_pieces(axis, splits, gradient, dim, not is_aligning, extra_bytes)[0]

    if torch.is_grad_enabled() and tensor.requires_grad:
        return apply_with_gradient(tensor, forth, back), received_bytes
    return forth(), received_bytes


Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class PartitionedTensor:
    """This rank's part of a tensor with a dimension that consists of partitions.

    Create it with `of_splits`, `of_placement` or `distribute`. All ranks of the mesh call its
    conversions.

    Attributes:
        local: this rank's tensor.
        mesh: a torch `DeviceMesh` of a single axis; `mesh["ep"]` of a larger mesh.
        dim: the dimension that consists of partitions.
        num_partitions: the number of partitions, of all ranks together.
        splits: the sizes of the consecutive pieces of `local`: unaligned, a size per partition;
            aligned, for each partition that the rank owns, a size per rank.
        aligned: whether the rank has complete partitions.
        matrix: unaligned, the size of every rank's piece of every partition: shape
            `(ranks, num_partitions)`; None if ranks do not know each other's splits.
        received_bytes: the bytes received from other ranks when a conversion created this tensor.

    Raises:
        ShardError: splits that do not fit the tensor or the mesh.
        UsageError: a mesh of several axes, or a mesh without this rank.
    """

    local: torch.Tensor
    mesh: DeviceMesh
    dim: int
    num_partitions: int
    splits: tuple[int, ...]
    aligned: bool = False
    matrix: Matrix | None = None
    received_bytes: int = 0
    # The splits of both sides of a conversion, once they were exchanged.
    _known: Splits | None = field(default=None, repr=False)

    @break_graph
    def __post_init__(self) -> None:
        local = self.local
        if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
            raise ShardError(
                f"a {type(local).__name__}; give this rank's local tensor, or a DTensor to "
                "PartitionedTensor.distribute"
            )
        if not -local.ndim <= self.dim < local.ndim:
            raise ShardError(
                f"partitions along dimension {self.dim} of a tensor that has {local.ndim}; give "
                "one of its dimensions"
            )
        object.__setattr__(self, "dim", self.dim % local.ndim)
        ranks = len(self._axis)
        expected, each = self.num_partitions, "one for each partition"
        if self.aligned:
            owned = len(self._owned)
            expected = owned * ranks
            each = f"for each of the {owned} partitions that this rank owns, one for each rank"
        if len(self.splits) != expected or min(self.splits, default=0) < 0:
            raise ShardError(
                f"the splits {list(self.splits)} of {self.num_partitions} partitions over "
                f"{ranks} ranks; give {expected} sizes of 0 or more, {each}"
            )
        if sum(self.splits) != local.shape[self.dim]:
            raise ShardError(
                f"the splits {list(self.splits)} add up to {sum(self.splits)}, but the local "
                f"tensor has length {local.shape[self.dim]} along dimension {self.dim}"
            )

    @classmethod
    @break_graph
    def of_splits(
        cls,
        local: torch.Tensor,
        splits: Sequence[int] | torch.Tensor,
        mesh: DeviceMesh,
        *,
        dim: int = 0,
        aligned: bool = False,
        num_partitions: int | None = None,
    ) -> PartitionedTensor:
        """Create a tensor of which each rank knows its own splits, as a sequence or a tensor.

        Raises the errors of the class, and UsageError for an aligned tensor without
        `num_partitions`, which does not follow from its splits.
        """
        values = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        sizes = tuple(int(size) for size in values)
        if num_partitions is None:
            if aligned:
                raise UsageError(
                    "an aligned tensor needs num_partitions=, how many all ranks have together"
                )
            num_partitions = len(sizes)
        return cls(local, mesh, dim, num_partitions, sizes, aligned)

    @classmethod
    @break_graph
    def of_placement(
        cls, local: torch.Tensor, placement: PartitionedShard, mesh: DeviceMesh
    ) -> PartitionedTensor:
        """Create a tensor whose splits all ranks know: those of a `PartitionedShard`.

        If it has a single size for each partition, ranks' pieces of the partition are by ceil.
        Raises the errors of the class.
        """
        axis = AxisRanks(mesh)
        matrix = placement.by_rank
        if matrix is None:
            cut = [ceil_sizes(size, len(axis)).tolist() for size in placement.partition_sizes]
            matrix = tuple(zip(*cut, strict=True)) if cut else ((),) * len(axis)
        if len(matrix) != len(axis):
            raise ShardError(
                f"{placement} gives sizes for {len(matrix)} ranks, but the mesh has {len(axis)}; "
                "give one row for each"
            )
        count = placement.num_partitions
        all_splits = Splits.of_matrix(axis.position, matrix)
        splits = all_splits.of_side(placement.aligned)
        return cls(
            local, mesh, placement.dim, count, splits, placement.aligned, matrix, 0, all_splits
        )

    @classmethod
    @break_graph
    def distribute(cls, tensor: DTensor, placement: PartitionedShard) -> PartitionedTensor:
        """Convert a DTensor over a mesh of a single axis to partitions. Differentiable.

        Raises the errors of `redistribute`, and UsageError for a mesh of several axes.
        """
        mesh = tensor.device_mesh
        group = AxisRanks(mesh).group
        begun = redistribute(tensor, (mesh, [placement]), group=group)
        return cls.of_placement(begun, placement, mesh)

    @property
    def partitions(self) -> dict[int, torch.Tensor]:
        """The partitions of this rank by number, whole or as its pieces; views of `local`."""
        numbers, sizes = range(self.num_partitions), np.array(self.splits, dtype=np.int64)
        if self.aligned:
            numbers = self._owned
            sizes = sizes.reshape(len(numbers), len(self._axis)).sum(axis=1)
        return dict(zip(numbers, self.local.split(sizes.tolist(), self.dim), strict=True))

    @property
    def placement(self) -> PartitionedShard | None:
        """The equivalent placement, or None if not all ranks know all splits."""
        if self.matrix is None:
            return None
        sizes = tuple(map(sum, zip(*self.matrix, strict=True)))
        splits = sizes if self.aligned else self.matrix
        return PartitionedShard(self.dim, self.num_partitions, splits, self.aligned)

    @property
    def whole_shape(self) -> tuple[int, ...] | None:
        """The shape of the whole tensor, or None if not all ranks know all splits."""
        if self.matrix is None:
            return None
        shape = list(self.local.shape)
        shape[self.dim] = sum(map(sum, self.matrix))
        return tuple(shape)

    @break_graph
    def with_local(self, local: torch.Tensor) -> PartitionedTensor:
        """Return a tensor with the same pieces of other data, such as experts' outputs.

        Its dtype and its other dimensions may differ. Raises ShardError for another length.
        """
        return replace(self, local=local, received_bytes=0)

    @break_graph
    def to_aligned(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> PartitionedTensor:
        """Convert to complete partitions, distributed over the ranks. Differentiable.

        Raises:
            RunError: on every rank, a rank that fails or does not answer.
            PlanError: on every rank, ranks whose calls differ.
        """
        return self._convert(True, extra_bytes)

    @break_graph
    def to_unaligned(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> PartitionedTensor:
        """Return every piece to its rank, sorted by partition. As `to_aligned`."""
        return self._convert(False, extra_bytes)

    def to_replicated(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> DTensor:
        """Gather the full tensor on every rank, in the order of partitions. As `to_aligned`."""
        result: DTensor = self.redistribute((self.mesh, [Replicate()]), extra_bytes=extra_bytes)
        return result

    def to_shard(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> DTensor:
        """Shard the full tensor along `dim` by ceil. As `to_aligned`."""
        target = (self.mesh, [Shard(self.dim)])
        result: DTensor = self.redistribute(target, extra_bytes=extra_bytes)
        return result

    @break_graph
    def redistribute(self, target: Description, **options: Unpack[RedistributionOptions]) -> Any:
        """Convert the full tensor to another layout, by `reshard.torch.redistribute`.

        `options` are those of `redistribute`; its `group` is the mesh's by default.
        """
        complete = self.gather_splits()
        options.setdefault("group", complete._axis.group)
        source = (complete.mesh, [complete.placement])
        return redistribute(
            complete.local, target, source=source, shape=complete.whole_shape, **options
        )

    @break_graph
    def gather_splits(self) -> PartitionedTensor:
        """Return the tensor with all splits known to all ranks. Raises as `to_aligned` does."""
        # Ranks that know all splits agree as well: the other ranks would wait for them.
        agree(self._intent("gather splits", DEFAULT_EXTRA_BYTES), self._axis.group)
        if self.matrix is not None:
            return self
        ranks, partitions = len(self._axis), self.num_partitions
        # The first rank owns the most.
        most = len(owned_partitions(partitions, ranks, 0)) * ranks
        rows = gather_splits(self._axis, self.splits, most if self.aligned else partitions)
        if self.aligned:
            # A rank sends a column of the matrix for each partition that it owns.
            rows = rows.reshape(-1, ranks)[:partitions].T
        matrix = tuple(tuple(row) for row in rows.tolist())
        all_splits = Splits.of_matrix(self._axis.position, matrix)
        return replace(self, matrix=matrix, _known=all_splits)

    def _convert(self, is_aligning: bool, extra_bytes: int) -> PartitionedTensor:
        axis, orders = self._axis, ("unaligned", "aligned")
        what = f"{orders[self.aligned]} to {orders[is_aligning]}"
        agree(self._intent(what, extra_bytes), axis.group)
        # After the agreement, so that ranks in different orders raise and do not wait.
        if self.aligned == is_aligning:
            return self
        all_splits = self._known
        # The splits are exchanged once: the way back uses the same splits.
        if all_splits is None:
            sizes = np.array(self.splits, dtype=np.int64)
            all_splits = exchange_splits(axis, self.num_partitions, sizes, is_aligning)
        local, received_bytes = convert_pieces(
            axis, all_splits, self.local, self.dim, is_aligning, extra_bytes
        )
        return replace(
            self,
            local=local,
            splits=all_splits.of_side(is_aligning),
            aligned=is_aligning,
            received_bytes=received_bytes,
            _known=all_splits,
        )

    def _intent(self, what: str, extra_bytes: int) -> CallSignature:
        """Return the signature of this rank's call."""
        others = [size for d, size in enumerate(self.local.shape) if d != self.dim]
        splits_text = "each rank's own" if self._known is None else "both ends"
        meant = {
            "conversion": what,
            "shape": f"{others} beside dimension {self.dim}",
            "dtype": str(self.local.dtype),
            "partitions": str(self.num_partitions),
            "splits": splits_text if self.matrix is None else str(self.matrix),
            "requires_grad": str(torch.is_grad_enabled() and self.local.requires_grad),
            "extra_bytes": str(extra_bytes),
        }
        problem = None
        try:
            limit_message_bytes(extra_bytes)
        except ReshardError as error:
            problem = f"{type(error).__name__}: {error}"
        digests = {
            name: hashlib.blake2b(text.encode(), digest_size=16).digest()
            for name, text in meant.items()
        }
        return CallSignature(digests, problem)

    @property
    def _owned(self) -> range:
        """The numbers of the partitions that this rank owns."""
        return owned_partitions(self.num_partitions, len(self._axis), self._axis.position)

    @cached_property
    def _axis(self) -> AxisRanks:
        return AxisRanks(self.mesh)
