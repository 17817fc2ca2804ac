"""Reshard plans as Megatron-core has them: transfers of a rank as ranks and slices, by parameter.

Code that plans with `megatron.core.resharding` and executes the lists itself can use the same
functions from here. `Refit` plans, and `execute_reshard_plan` runs it. A transfer is
`(source_rank, source_slices, target_slices)`: the slices are of the local tensors of both ranks,
and the ranks may be the same.

Source: Megatron-core, `megatron/core/resharding/planner.py` and `utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import UsageError
from reshard.torch.exchange.groups import rank_group
from reshard.torch.models.model_inputs import Model
from reshard.torch.refitting.options import Planning
from reshard.torch.refitting.plan import PartItem
from reshard.torch.refitting.refit import Refit

Slices = tuple[slice, ...]
Transfer = tuple[int, Slices, Slices]
"""The sending rank, the slices of its local tensor, and the slices of the receiver's."""


@dataclass(frozen=True, slots=True)
class TransferOp:
    """A send or a receive of this rank, with the names of Megatron's class.

    Attributes:
        param_name: of the parameter in this rank's module, after the number of its chunk if the
            rank has several: `1.decoder.layers.0...`.
        peer_rank: the other rank of the group, or this rank if it has both models.
        is_send: whether this rank sends.
        my_slice, peer_slice: of the local tensors of this rank and of the other rank.
    """

    param_name: str
    peer_rank: int
    is_send: bool
    my_slice: Slices
    peer_slice: Slices


@dataclass(frozen=True)
class ReshardPlan:
    """The operations of this rank between two models.

    Attributes:
        send_ops, recv_ops: in the order of the tensors. Elements that stay on a rank are in both.
        refit: the prepared refit, which `execute_reshard_plan` runs.
    """

    send_ops: list[TransferOp]
    recv_ops: list[TransferOp]
    refit: Refit = field(repr=False)

    def sources_of(self, param_name: str) -> list[Transfer]:
        """Return the transfers that fill a parameter of this rank."""
        return [
            (op.peer_rank, op.peer_slice, op.my_slice)
            for op in self.recv_ops
            if op.param_name == param_name
        ]

    def __str__(self) -> str:
        return f"ReshardPlan(sends={len(self.send_ops)}, recvs={len(self.recv_ops)})"


def build_local_reshard_plan(
    src_module: Model,
    dst_module: Model,
    num_experts: int | None = None,
    group: dist.ProcessGroup | None = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    **options: Any,
) -> ReshardPlan:
    """Plan the transfers of this rank, which each rank computes for itself.

    All ranks of `group` call this. Nothing is written before `execute_reshard_plan`.

    Args:
        src_module, dst_module: the models, such as Megatron modules with `pg_collection`; None on a
            rank without a part of it.
        num_experts: in the full model.
        group: of all ranks that have a part of either model; all ranks when None.
        src_rank_offset, dst_rank_offset: the rank in the group that is rank 0 of each model.
        options: further arguments of `Refit.prepare`.

    Raises:
        ShardError: on every rank, all names, shapes and types that do not match.
        UsageError: on every rank, tensors whose local parts are not a single box.
        PlanError, RunError: on every rank, if ranks' calls do not match or a rank fails.
    """
    offsets = (src_rank_offset, dst_rank_offset)
    return _build_plan("local", src_module, dst_module, num_experts, group, offsets, options)


def build_centralized_reshard_plan(
    src_module: Model,
    dst_module: Model,
    num_experts: int | None = None,
    group: dist.ProcessGroup | None = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    **options: Any,
) -> ReshardPlan:
    """Plan on the first rank, and return to each rank its operations.

    Arguments and errors are those of `build_local_reshard_plan`, which scales better.
    """
    offsets = (src_rank_offset, dst_rank_offset)
    return _build_plan("centralized", src_module, dst_module, num_experts, group, offsets, options)


def execute_reshard_plan(plan: ReshardPlan, *_: object, **__: object) -> None:
    """Run a plan: fill the target from the source. All ranks of the group call this.

    Megatron's further arguments (the modules, the group, a copy service) are accepted and ignored:
    the plan has them.
    """
    plan.refit.run()


def _build_plan(
    planning: Planning,
    source: Model,
    target: Model,
    num_experts: int | None,
    group: dist.ProcessGroup | None,
    offsets: tuple[int, int],
    options: dict[str, Any],
) -> ReshardPlan:
    # Programs of collectives and stages between hosts have no transfers from source to target.
    refit = Refit.prepare(
        source,
        target,
        num_experts=num_experts,
        group=group,
        # 0 is Megatron's default: a side that knows its first rank is then asked for it.
        source_offset=offsets[0] or None,
        target_offset=offsets[1] or None,
        planning=planning,
        **{"method": "exchange", **options},
    )
    names = (
        _find_own_names(source, refit.source_tensors),
        _find_own_names(target, refit.target_tensors),
    )
    sends, receives = _list_operations(refit.part_items, rank_group(group).rank, *names)
    return ReshardPlan(sends, receives, refit)


def _find_own_names(model: Model, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a rank's own names of tensors, which number its experts and layers from 0."""
    chunks = getattr(model, "chunks", model)
    modules = [chunks] if isinstance(chunks, torch.nn.Module) else chunks
    if not isinstance(modules, Sequence):
        return {}
    own = {}
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            own[tensor.data_ptr(), tensor.shape] = f"{prefix}{name}"
    return {
        name: own[tensor.data_ptr(), tensor.shape]
        for name, tensor in tensors.items()
        # Empty tensors have no memory that distinguishes them.
        if tensor.numel() and (tensor.data_ptr(), tensor.shape) in own
    }


def _list_operations(
    items: Iterable[PartItem],
    rank: int,
    source_names: Mapping[str, str],
    target_names: Mapping[str, str],
) -> tuple[list[TransferOp], list[TransferOp]]:
    sends: list[TransferOp] = []
    receives: list[TransferOp] = []
    for item in items:
        match, rows = item.match, item.transfers
        for layout in (match.source, match.target):
            if layout.cells != len(layout.holders):
                raise UsageError(
                    f"the parts of {match.target_name} are not a box on each rank: no slices are "
                    "their elements; use Refit.prepare, and refit.plan for its moves"
                )
        if match.source_range is not None or match.target_range is not None:
            raise UsageError(
                f"{match.target_name} is fused on one side only: no slices of local tensors are "
                "its pieces; use Refit.prepare, and refit.plan for its moves"
            )
        for row in range(len(rows)):
            sender, receiver = int(rows.source_slot[row]), int(rows.target_slot[row])
            sizes = rows.shape[row].tolist()
            source, target = (
                tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))
                for begin in (rows.source_start[row].tolist(), rows.target_start[row].tolist())
            )
            if sender == rank:
                name = source_names.get(match.source_name, match.source_name)
                sends.append(TransferOp(name, receiver, True, source, target))
            if receiver == rank:
                name = target_names.get(match.target_name, match.target_name)
                receives.append(TransferOp(name, sender, False, target, source))
    return sends, receives
