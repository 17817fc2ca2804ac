"""Tensors of partitions, such as the tokens of experts, with sizes known only to each rank.

The tokens of a mixture of experts are sorted by expert on every rank (*unaligned*). They are sent
to the ranks with the experts (*aligned*), and back. Only the sender knows how many are sent where::

    rank 0   |P00 P01 P02 P03|    -- to_aligned() -->    |P00 P10|P01 P11|
    rank 1   |P10 P11 P12 P13|    <- to_unaligned() -    |P02 P12|P03 P13|

1. All ranks compare their calls.
2. A first all-to-all sends splits: the sizes of the pieces that each rank will receive. It is
   omitted if they are known: to all ranks as a matrix, or from an earlier conversion.
3. The pieces are sent to their ranks.

To convert the whole tensor (`redistribute`) every rank needs all splits, which are gathered first
if some rank does not know them.

Source: the proposal of a `PartitionedShard` placement for DTensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar, Unpack, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from reshard.cut_rules import ceil_sizes
from reshard.errors import ReshardError, ShardError, UsageError
from reshard.notation.partitioned import PartitionedShard
from reshard.plans.schedule import limit_message_bytes
from reshard.torch.endpoint import Description
from reshard.torch.exchange.agreement import CallSignature, agree
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES
from reshard.torch.partitioned.partitions import (
    AxisRanks,
    PartitionOwners,
    Splits,
    convert_pieces,
    exchange_splits,
    gather_splits,
)
from reshard.torch.redistribution import RedistributionOptions, redistribute

Matrix = tuple[tuple[int, ...], ...]
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _disable_compilation(method: _Method) -> _Method:
    """Return a method that `torch.compile` does not trace, with sizes that are numbers."""

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*arguments, **options)
        return method(*arguments, **options)

    return cast(_Method, call)


@dataclass(frozen=True, eq=False)
class PartitionedTensor:
    """This rank's part of a tensor with a dimension that consists of partitions.

    Create one with `of_splits`, `of_placement` or `distribute`. All ranks of the mesh call its
    conversions.

    Attributes:
        local: this rank's tensor.
        mesh: a torch `DeviceMesh` of one axis; `mesh["ep"]` of a larger mesh.
        dim: the dimension that consists of partitions.
        num_partitions: the number of partitions, of all ranks together.
        splits: the sizes of the consecutive pieces of `local`: unaligned, one per partition;
            aligned, for each partition that the rank owns, one per rank.
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

    @_disable_compilation
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
            owned = len(self._owners.owned(self._axis.position))
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
    @_disable_compilation
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
        given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        sizes = tuple(int(size) for size in given)
        if num_partitions is None:
            if aligned:
                raise UsageError(
                    "an aligned tensor needs num_partitions=, how many all ranks have together"
                )
            num_partitions = len(sizes)
        return cls(local, mesh, dim, num_partitions, sizes, aligned)

    @classmethod
    @_disable_compilation
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
        known = Splits.of_matrix(PartitionOwners(count, len(axis)), axis.position, matrix)
        splits = known.of_side(placement.aligned)
        return cls(local, mesh, placement.dim, count, splits, placement.aligned, matrix, 0, known)

    @classmethod
    @_disable_compilation
    def distribute(cls, tensor: DTensor, placement: PartitionedShard) -> PartitionedTensor:
        """Convert a DTensor over a mesh of one axis to partitions. Differentiable.

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
            numbers = self._owners.owned(self._axis.position)
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

    @_disable_compilation
    def with_local(self, local: torch.Tensor) -> PartitionedTensor:
        """Return a tensor with the same pieces of other data, such as experts' outputs.

        Its dtype and its other dimensions may differ. Raises ShardError for another length.
        """
        return replace(self, local=local, received_bytes=0)

    @_disable_compilation
    def to_aligned(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> PartitionedTensor:
        """Convert to complete partitions, distributed over the ranks. Differentiable.

        Raises:
            RunError: on every rank, a rank that fails or does not answer.
            PlanError: on every rank, ranks whose calls differ.
        """
        return self._convert(True, extra_bytes)

    @_disable_compilation
    def to_unaligned(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> PartitionedTensor:
        """Return every piece to its rank, sorted by partition. As `to_aligned`."""
        return self._convert(False, extra_bytes)

    def to_replicated(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> DTensor:
        """Gather the full tensor on every rank, in the order of partitions. As `to_aligned`."""
        found: DTensor = self.redistribute((self.mesh, [Replicate()]), extra_bytes=extra_bytes)
        return found

    def to_shard(self, *, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> DTensor:
        """Shard the full tensor along `dim` by ceil. As `to_aligned`."""
        target = (self.mesh, [Shard(self.dim)])
        found: DTensor = self.redistribute(target, extra_bytes=extra_bytes)
        return found

    @_disable_compilation
    def redistribute(self, target: Description, **options: Unpack[RedistributionOptions]) -> Any:
        """Convert the full tensor to another layout, by `reshard.torch.redistribute`.

        `options` are those of `redistribute`; its `group` is the mesh's by default.
        """
        known = self.gather_splits()
        options.setdefault("group", known._axis.group)
        source = (known.mesh, [known.placement])
        return redistribute(known.local, target, source=source, shape=known.whole_shape, **options)

    @_disable_compilation
    def gather_splits(self) -> PartitionedTensor:
        """Return the tensor with all splits known to all ranks. Raises as `to_aligned` does."""
        # Ranks that know all splits agree as well: the other ranks would wait for them.
        agree(self._intent("gather splits", DEFAULT_EXTRA_BYTES), self._axis.group)
        if self.matrix is not None:
            return self
        owners = self._owners
        most = owners.most * owners.ranks if self.aligned else owners.partitions
        rows = gather_splits(self._axis, self.splits, most)
        if self.aligned:
            # A rank sends a column of the matrix for each partition that it owns.
            rows = rows.reshape(-1, owners.ranks)[: owners.partitions].T
        matrix = tuple(tuple(row) for row in rows.tolist())
        known = Splits.of_matrix(owners, self._axis.position, matrix)
        return replace(self, matrix=matrix, _known=known)

    def _convert(self, is_aligning: bool, extra_bytes: int) -> PartitionedTensor:
        axis, orders = self._axis, ("unaligned", "aligned")
        what = f"{orders[self.aligned]} to {orders[is_aligning]}"
        agree(self._intent(what, extra_bytes), axis.group)
        # After the agreement, so that ranks in different orders raise and do not wait.
        if self.aligned == is_aligning:
            return self
        known = self._known
        # The splits are exchanged once: the way back uses the same splits.
        if known is None:
            sizes = np.array(self.splits, dtype=np.int64)
            known = exchange_splits(axis, self._owners, sizes, is_aligning)
        local, received_bytes = convert_pieces(
            axis, known, self.local, self.dim, is_aligning, extra_bytes
        )
        return replace(
            self,
            local=local,
            splits=known.of_side(is_aligning),
            aligned=is_aligning,
            received_bytes=received_bytes,
            _known=known,
        )

    def _intent(self, what: str, extra_bytes: int) -> CallSignature:
        """Return the signature of this rank's call."""
        others = [size for d, size in enumerate(self.local.shape) if d != self.dim]
        known = "each rank's own" if self._known is None else "both ends"
        meant = {
            "conversion": what,
            "shape": f"{others} beside dimension {self.dim}",
            "dtype": str(self.local.dtype),
            "partitions": str(self.num_partitions),
            "splits": known if self.matrix is None else str(self.matrix),
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
    def _owners(self) -> PartitionOwners:
        return PartitionOwners(self.num_partitions, len(self._axis))

    @cached_property
    def _axis(self) -> AxisRanks:
        return AxisRanks(self.mesh)
