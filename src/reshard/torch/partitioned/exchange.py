"""How do splits, and the pieces they size, travel along a mesh axis?

1. `exchange_splits`: the first all-to-all. Each rank tells each other one how large the pieces
   are that it will send there, so that both know both ends.
2. `exchange_pieces`: the second one. What either end has to do follows from what it knows, so it
   is an exchange like that of any plan, in little memory (`exchange`).
3. `gather_splits`: everybody tells everybody, where the whole tensor is wanted.

A mesh has an order of its own, which its process group's ranks need not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from reshard.errors import RunError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.runs import IntArray
from reshard.torch.exchange.agreement import answering, confirm, device_of
from reshard.torch.exchange.exchange import Exchange
from reshard.torch.exchange.messages import Movement
from reshard.torch.gradients import flowing
from reshard.torch.partitioned.partitions import Dealing, Splits
from reshard.torch.sides import local_of


class Line:
    """The ranks along a mesh of one axis, in its order, seen from this process.

    Attributes:
        mesh: the torch mesh.
        members: global ranks.
        position: this process's place among them.
        group: the mesh's process group.

    Raises:
        UsageError: a mesh of several axes, or one that this process is not in.
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
        """The place in the mesh of each of the group's ranks."""
        return [self.members.index(rank) for rank in dist.get_process_group_ranks(self.group)]


def exchange_splits(line: Line, dealing: Dealing, sizes: IntArray, is_aligning: bool) -> Splits:
    """What this rank needs to know of both ends, from what it knows of its own.

    Args:
        line: the ranks; all of them call this.
        dealing: of the partitions.
        sizes: of the pieces that the rank has: its row before aligning, its columns after.
        is_aligning: whether the pieces will go from unaligned to aligned.

    Raises:
        RunError: a rank that does not answer.
    """
    order = line.in_group_order
    owned = [len(dealing.owned(rank)) for rank in range(len(line))]
    own = owned[line.position]
    if is_aligning:
        begins = [dealing.owned(rank).start for rank in range(len(line))]
        told = [sizes[begins[rank] : begins[rank] + owned[rank]] for rank in order]
        expected = [own] * len(line)
    else:
        columns = sizes.reshape(own, len(line))
        told = [columns[:, rank] for rank in order]
        expected = [owned[rank] for rank in order]
    where = device_of(line.group)
    sent = torch.from_numpy(np.concatenate(told)).to(where)
    received = torch.empty(sum(expected), dtype=torch.int64, device=where)
    with answering("nothing was moved"):
        dist.all_to_all_single(received, sent, expected, [len(one) for one in told], line.group)
        heard = dict(zip(order, received.cpu().split(expected), strict=True))
    parts = [heard[rank].numpy() for rank in range(len(line))]
    if is_aligning:
        return Splits(dealing, line.position, sizes, np.stack(parts, axis=1))
    return Splits(dealing, line.position, np.concatenate(parts), columns)


def gather_splits(line: Line, sizes: Sequence[int], most: int) -> IntArray:
    """The sizes of all ranks: shape `(ranks, most)`, a rank that has fewer followed by zeros.

    Raises:
        RunError: a rank that does not answer.
    """
    where = device_of(line.group)
    own = torch.zeros(most, dtype=torch.int64)
    own[: len(sizes)] = torch.tensor(sizes, dtype=torch.int64)
    own = own.to(where)
    rows = [torch.empty_like(own) for _ in line.members]
    with answering("nothing was moved"):
        dist.all_gather(rows, own, line.group)
        found = [row.cpu().numpy() for row in rows]
    gathered = np.empty((len(line), most), dtype=np.int64)
    for place, row in zip(line.in_group_order, found, strict=True):
        gathered[place] = row
    return gathered


def exchange_pieces(
    line: Line,
    splits: Splits,
    tensor: torch.Tensor,
    dim: int,
    is_aligning: bool,
    extra_bytes: int,
) -> tuple[torch.Tensor, int]:
    """The pieces in their other order, and how many bytes of them came from other ranks.

    Raises:
        RunError: on every rank, a rank that fails or does not answer.
    """
    source = local_of(tensor)
    if source is None:
        raise RunError("a rank without a tensor; give one of length 0")
    shape = list(source.shape)
    shape[dim] = int((splits.columns if is_aligning else splits.row).sum())
    target = torch.empty(shape, dtype=source.dtype, device=source.device)
    rank = line.members[line.position]
    bounds = tuple(max(pair) for pair in zip(source.shape, shape, strict=True))
    # Nobody knows the whole tensor. All that an exchange asks of layouts is how this rank's own
    # tensors lie, so each has one box of their size.
    plan = LayoutChange(
        _of_this_rank(bounds, source.shape, rank), _of_this_rank(bounds, shape, rank)
    )
    received, sent = splits.transfers(dim, shape, line.members, is_aligning)
    exchange = Exchange(
        [Movement(plan, received, sent, source, target)],
        rank,
        line.group,
        source.device,
        extra_bytes,
    )
    exchange.run()
    confirm(line.group)
    return target, exchange.received_bytes


def _of_this_rank(bounds: Sequence[int], shape: Sequence[int], rank: int) -> Layout:
    box = Box((0,) * len(bounds), tuple(shape))
    return Layout.from_boxes(bounds, [(rank, box)])


def converted(
    line: Line,
    splits: Splits,
    tensor: torch.Tensor,
    dim: int,
    is_aligning: bool,
    extra_bytes: int,
) -> tuple[torch.Tensor, int]:
    """As `exchange_pieces`; gradients flow, by the same exchange the other way round."""
    received_bytes = 0

    def forth() -> torch.Tensor:
        nonlocal received_bytes
        found, received_bytes = exchange_pieces(line, splits, tensor, dim, is_aligning, extra_bytes)
        return found

    def back(gradient: Any) -> torch.Tensor:
        return exchange_pieces(line, splits, gradient, dim, not is_aligning, extra_bytes)[0]

    if torch.is_grad_enabled() and tensor.requires_grad:
        return flowing(tensor, forth, back), received_bytes
    return forth(), received_bytes
