"""Experts: which of them a rank has, and the sum of what all ranks' experts answer.

Routers choose among all experts, on every rank alike. A rank's module has its own experts only, so
their numbers are counted from 0 there, and tokens that another rank's experts take weigh nothing.
A rank's answer is a part of a sum over the axes that deal experts out, and over those that cut
inside of them.
"""

from __future__ import annotations

from typing import Any

import torch

from .modules import RankModule


def share_experts(rank: RankModule, experts: str, added_once: str = "") -> None:
    """Arrange the experts of a rank's module.

    Args:
        rank: whose module it is.
        experts: a glob of the modules with stacked experts, which take hidden states, and the
            numbers and weights of each token's experts.
        added_once: a parameter that the first of the ranks adds which have parts of one expert.
    """
    for name, module in rank.modules(experts):
        names = [f"{name}.{inner}" for inner, _ in module.named_parameters()]
        axes = {
            axis
            for one in names
            for dimension in range(len(rank.cut.assignment.layouts[one].shape))
            for axis in rank.axes(one, dimension)
        }
        if axes:
            held = rank.indices(names[0], 0)
            _arrange(rank, name, module, held, tuple(sorted(axes)))
        if added_once:
            inside = {
                axis
                for one in names
                for dimension in range(1, len(rank.cut.assignment.layouts[one].shape))
                for axis in rank.axes(one, dimension)
            }
            place = dict(zip(rank.cut.compute_axes, rank.coordinate, strict=True))
            if any(place[axis] for axis in inside):
                _leave_out(module, added_once)


def _leave_out(module: Any, parameter: str) -> None:
    """Compute as if a parameter were zero."""
    answer = module.forward

    def forward(*args: Any) -> torch.Tensor:
        given = getattr(module, parameter)
        given.data = torch.zeros_like(given)
        found: torch.Tensor = answer(*args)
        return found

    module.forward = forward


def _arrange(
    rank: RankModule, name: str, module: Any, held: torch.Tensor, axes: tuple[str, ...]
) -> None:
    answer = module.forward
    places = {int(expert): place for place, expert in enumerate(held)}

    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        is_here = torch.isin(chosen, held)
        local = chosen.clone().apply_(lambda expert: places.get(expert, 0))
        found = answer(x, local, torch.where(is_here, weights, torch.zeros_like(weights)))
        return rank.add_up(name, found, axes)

    module.forward = forward
