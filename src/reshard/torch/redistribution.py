"""How does one tensor get another layout, between the ranks of a running job?

1. The target becomes a `Layout` over global ranks, whoever describes it.
2. Every rank checks its own arguments; all agree that they mean the same (`agreement`).
3. The plan's part of this rank is exchanged, in batches that stay within a limit of memory.

Ranks that hold nothing of the source pass None, ranks that hold nothing of the target get None.
Gradients flow: the way back of a redistribution is one from the target to the source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, RunError, ShardError, UsageError
from reshard.execution.arrays import check_reduction
from reshard.layout import Layout
from reshard.notation.dtensor import mesh_of, sharding_of_placements
from reshard.planning.plan import Plan
from reshard.sharding import ShardingSpec
from reshard.torch.agreement import Intent, agree
from reshard.torch.distributed_tensor import sharding_of
from reshard.torch.exchange import Exchange, Movement, complete_contributions

DEFAULT_EXTRA_BYTES = 64 << 20

Target = tuple[Any, Sequence[Any]] | ShardingSpec | Layout


@dataclass(frozen=True, slots=True)
class _Side:
    """A layout, and how its local tensors are to be handed out: as DTensors of a mesh, or bare."""

    layout: Layout
    mesh: Any = None
    placements: tuple[Any, ...] = ()


class Redistribution:
    """A redistribution that has begun. `wait()` gives its result.

    `received_bytes`, `sent_bytes` and `extra_bytes` are this rank's.
    """

    def __init__(
        self, exchange: Exchange, plan: Plan, side: _Side, local: torch.Tensor | None
    ) -> None:
        self._exchange = exchange
        self.plan = plan
        self._side = side
        self._local = local
        self._is_done = False
        self.received_bytes = exchange.received_bytes
        self.sent_bytes = exchange.sent_bytes
        self.extra_bytes = exchange.extra_bytes

    def wait(self) -> Any:
        """The result, once it is there. Raises RunError where a message does not come."""
        if not self._is_done:
            self._exchange.finish()
            complete_contributions(self.plan, dist.get_rank(), self._local)
            self._is_done = True
        return _handed_out(self._side, self._local)


def redistribute(
    tensor: torch.Tensor | None,
    target: Target,
    *,
    source: ShardingSpec | Layout | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """A tensor in another layout, on every rank of `group`, all of which call this.

    Args:
        tensor: a DTensor, or this rank's local tensor of `source`; None where it has none.
        target: `(torch DeviceMesh, placements)`, a `ShardingSpec` or a `Layout`, over the global
            ranks.
        source: the layout of a local tensor; a DTensor knows its own.
        shape: of the whole tensor, where `source` and `target` are specs.
        dtype: needed where `tensor` is None.
        out: the target's local tensor (or DTensor) to write into, instead of a new one.
        group: of all ranks of source and target; all ranks when None.
        async_op: whether to return a `Redistribution` at once, whose `wait()` gives the result.

    Returns:
        A DTensor where the target is a torch mesh with placements, else this rank's local
        tensor, None where it holds nothing.

    Raises:
        RunError: a rank whose arguments cannot be used, on every rank; a message that does not
            come.
        PlanError: ranks that mean different things; a source that leaves out an element.
    """
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        if async_op or out is not None:
            raise UsageError(
                f"{'async_op=True' if async_op else 'out='} with a tensor that requires gradients; "
                "give tensor.detach(), or leave it out"
            )
        return _WithGradient.apply(tensor, target, source, shape, group)
    begun = _begin(tensor, target, source, shape, dtype, out, group)
    return begun if async_op else begun.wait()


class _WithGradient(torch.autograd.Function):  # type: ignore[misc]
    """The way back is a redistribution too. A contribution's gradient is that of the whole, as
    DTensor has it: where a side is partial, its gradient is replicated there."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        target: Target,
        source: ShardingSpec | Layout | None,
        shape: Sequence[int] | None,
        group: dist.ProcessGroup | None,
    ) -> Any:
        begun = _begin(tensor, target, source, shape, None, None, group)
        plan = begun.plan
        for reduction in {plan.source.reduction, plan.target.reduction} - {None, "sum", "mean"}:
            raise ShardError(f"a {reduction} of contributions has no gradient here; detach it")
        ctx.group = group
        ctx.before = _without_contributions(plan.source)
        ctx.after = _without_contributions(plan.target)
        ctx.torch_target = None
        if isinstance(tensor, DTensor):
            placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
            ctx.torch_target = (tensor.device_mesh, placements)
        return begun.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        source = None if isinstance(gradient, DTensor) else ctx.after
        target = ctx.torch_target or ctx.before
        back = redistribute(gradient, target, source=source, group=ctx.group)
        return back, None, None, None, None


def _without_contributions(layout: Layout) -> Layout:
    """The same with every contribution taken for a copy of the whole."""
    return Layout(layout.shape, layout.tables, layout.slots, layout.cell_slot, layout.cell_part)


def _begin(
    tensor: torch.Tensor | None,
    target: Target,
    source: ShardingSpec | Layout | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Redistribution:
    rank = dist.get_rank()
    plan: Plan | None = None
    side: _Side | None = None
    own: torch.Tensor | None = None
    problem = None
    try:
        plan, side = _planned(tensor, target, source, shape, dtype, out)
        own = _local_of(tensor)
        check_local(own, plan, plan.source, rank, "tensor")
        check_local(_local_of(out), plan, plan.target, rank, "out", is_optional=True)
        transfers = plan.expand(plan.routes_into(rank)), plan.expand(plan.routes_out_of(rank))
    except ReshardError as error:
        problem = f"{type(error).__name__}: {error}"
    parts = {}
    if plan is not None and plan.dtype is not None:
        parts = {
            "dtype": plan.dtype.name.encode(),
            "source": plan.source.fingerprint,
            "target": plan.target.fingerprint,
        }
    agree(Intent(parts, problem), group)
    if plan is None or side is None:
        raise RunError("unreachable: a problem was agreed upon")
    received, sent = transfers
    device = _device(own, group)
    local = _target_local(plan, rank, out, own, dtype, device)
    exchange = Exchange([[Movement(plan, received, sent, own, local)]], rank, group, device)
    exchange.start()
    return Redistribution(exchange, plan, side, local)


def _planned(
    tensor: torch.Tensor | None,
    target: Target,
    source: ShardingSpec | Layout | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> tuple[Plan, _Side]:
    if isinstance(tensor, DTensor):
        if source is not None:
            raise UsageError("a DTensor knows its layout; leave out source=")
        before = sharding_of(tensor).layout(tuple(tensor.shape))
        shape = tuple(tensor.shape)
    elif source is None:
        raise UsageError(
            "a local tensor needs source=, the layout it is a part of: a ShardingSpec or a Layout"
        )
    else:
        shape = shape if shape is not None else _shape_of(source, target)
        before = source if isinstance(source, Layout) else source.layout(shape)
    side = _side(target, shape)
    found = tensor.dtype if tensor is not None else dtype
    if found is None:
        raise UsageError("a rank without a tensor needs dtype=, that of the others")
    plan = Plan(before, side.layout, as_dtype(found))
    for reduction in {before.reduction, side.layout.reduction} - {None}:
        check_reduction(str(reduction), as_dtype(found))
    return plan, side


def _shape_of(*layouts: Any) -> tuple[int, ...]:
    for one in layouts:
        if isinstance(one, Layout):
            return one.shape
    raise UsageError("two sharding specs have no shape; give shape=, that of the whole tensor")


def _side(target: Target, shape: Sequence[int]) -> _Side:
    if isinstance(target, Layout):
        return _Side(target)
    if isinstance(target, ShardingSpec):
        return _Side(target.layout(shape))
    if isinstance(target, tuple) and len(target) == 2:
        mesh, placements = target
        spec = sharding_of_placements(mesh_of(mesh), placements, len(shape))
        return _Side(spec.layout(shape), mesh, tuple(placements))
    raise UsageError(
        f"a target of type {type(target).__name__}; give (torch DeviceMesh, placements), a "
        "ShardingSpec or a Layout"
    )


def check_local(
    local: torch.Tensor | None,
    plan: Plan,
    layout: Layout,
    rank: int,
    what: str,
    *,
    is_optional: bool = False,
) -> None:
    """Raise ShardError for a local tensor that is not the layout's part of a rank."""
    expected = layout.local_shape(rank) if rank < layout.slots else None
    if expected is None:
        return
    if local is None:
        if is_optional:
            return
        raise ShardError(f"{what} is None, but this rank holds a part of shape {list(expected)}")
    if tuple(local.shape) != expected:
        raise ShardError(
            f"{what} has local shape {list(local.shape)}, the layout says {list(expected)}"
        )
    if plan.dtype is not as_dtype(local.dtype):
        raise ShardError(f"{what} is {local.dtype}, expected {plan.dtype}; nothing is cast")


def _local_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return None if tensor is None else tensor.detach()


def _device(own: torch.Tensor | None, group: dist.ProcessGroup | None) -> torch.device:
    if own is not None:
        return own.device
    return (
        torch.device("cuda", torch.cuda.current_device())
        if (dist.get_backend(group) == "nccl")
        else torch.device("cpu")
    )


def _target_local(
    plan: Plan,
    rank: int,
    out: torch.Tensor | None,
    own: torch.Tensor | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> torch.Tensor | None:
    shape = plan.target.local_shape(rank) if rank < plan.target.slots else None
    if shape is None:
        return None
    local = _local_of(out)
    if local is None:
        found = own.dtype if own is not None else dtype
        local = torch.empty(shape, dtype=found, device=device)
    if plan.target.is_padded:
        local.zero_()
    return local


def _handed_out(side: _Side, local: torch.Tensor | None) -> Any:
    if side.mesh is None:
        return local
    shape = side.layout.shape
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if local is None:
        local = torch.empty(0)
    return DTensor.from_local(
        local,
        side.mesh,
        side.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )
