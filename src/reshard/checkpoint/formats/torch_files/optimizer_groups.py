"""Groups of hyper-parameters of PyTorch's optimizers, and what PyTorch gives them by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# What groups of PyTorch's optimizers have, where nothing else is said.
_EVERY_GROUP = {"maximize": False, "foreach": None, "differentiable": False}
ADAM_GROUP: dict[str, Any] = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "capturable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    **_EVERY_GROUP,
}
SGD_GROUP: dict[str, Any] = {
    "lr": 0.001,
    "momentum": 0,
    "dampening": 0,
    "weight_decay": 0,
    "nesterov": False,
    "fused": None,
    **_EVERY_GROUP,
}


def complete_group(group: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A group with all that PyTorch's optimizer of such state has, in its types.

    >>> complete_group({"lr": 0.1, "betas": [0.9, 0.95]}, ["exp_avg", "exp_avg_sq"])["betas"]
    (0.9, 0.95)
    """
    kept = {*keys}
    defaults: dict[str, Any] = {}
    if "exp_avg_sq" in kept:
        defaults = {**ADAM_GROUP, "amsgrad": "max_exp_avg_sq" in kept}
    elif "momentum_buffer" in kept:
        defaults = SGD_GROUP
    found = {**defaults, **group}
    if isinstance(found.get("betas"), list):
        found["betas"] = tuple(found["betas"])
    return found
