"""Gradients of a redistribution.

A gradient is redistributed from the target's layout to the source's. The gradient of a partial
tensor's contribution is that of the whole, as in DTensor: if a side is partial, its gradient is
replicated. Replicas of an element are assumed to have equal gradients.

Every rank takes part in the backward pass, so autograd must reach it from every rank's result: a
rank without a part of the source attaches its result to an empty tensor that requires a gradient,
and a rank without a part of the target gets an empty result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from reshard.errors import PlanError, ShardError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.sharding import ShardingSpec
from reshard.torch.endpoint import TensorEndpoint


def apply_with_gradient(
    tensor: torch.Tensor | None, forth: Callable[[], Any], back: Callable[[Any], Any]
) -> Any:
    """Return the result of `forth()`; `back` maps its gradient to the tensor's gradient."""
    # The result also requires a gradient on a rank without a part of the source.
    anchor = torch.empty(0, requires_grad=True)
    return _Flow.apply(anchor, tensor, forth, back)


class _Flow(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tensor: torch.Tensor | None,
        forth: Callable[[], Any],
        back: Callable[[Any], Any],
    ) -> Any:
        ctx.back = back
        ctx.has_source = tensor is not None
        result = forth()
        return anchor.new_empty(0) if result is None else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.back(gradients[0])
        return None, found if ctx.has_source else None, None, None


def backward_endpoints(
    change: LayoutChange, source: TensorEndpoint
) -> tuple[Layout, TensorEndpoint]:
    """Return the layout of the result's gradient, and the side of the tensor's gradient.

    Raises:
        ShardError: a redistribution without gradients: contributions that are not added, or a
            target that omits elements.
    """
    for reduction in {change.source.reduction, change.target.reduction} - {None, "sum", "mean"}:
        raise ShardError(f"a {reduction} of contributions has no gradient here; detach the tensor")
    before, after = (_replicate_contributions(layout) for layout in (change.source, change.target))
    try:
        _ = LayoutChange(after, before).routes
    except PlanError as error:
        raise ShardError(
            f"the target leaves out elements, so gradients cannot flow back ({error}); "
            "detach the tensor"
        ) from error
    spec = replicated_spec(source.spec)
    if source.mesh is None:
        return after, TensorEndpoint(before, spec=spec)
    placements = [Replicate() if one.is_partial() else one for one in source.placements]
    return after, TensorEndpoint(before, source.mesh, tuple(placements), spec)


def replicated_spec(spec: ShardingSpec | None) -> ShardingSpec | None:
    """Return the sharding with contributions as copies of the whole, or None if unknown."""
    if spec is None or spec.only:
        return None
    return ShardingSpec(spec.mesh, spec.dim_specs)


def _replicate_contributions(layout: Layout) -> Layout:
    """Return the layout with contributions as copies of the whole."""
    return Layout(layout.shape, layout.tables, layout.slots, layout.cell_slot, layout.cell_part)
