"""State of optimizers: its names, as every training format is read, and groups as PyTorch's.

optimizer.state.NAME.KEY         what is kept of a parameter; float32 weights are `master`
optimizer.param_groups           groups of hyper-parameters, with the names of parameters in order

Groups are completed by what PyTorch's optimizers give them by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZER_PREFIX = "optimizer."
GROUPS = OPTIMIZER_PREFIX + "param_groups"
MASTER, STEP = "master", "step"
_STATE = OPTIMIZER_PREFIX + "state."
# AdamW is an Adam that sets this itself when it loads, and Adam would become AdamW by it.
DECOUPLED = "decoupled_weight_decay"
# What groups of PyTorch's optimizers have, where nothing else is said.
_EVERY_GROUP: dict[str, Any] = {"maximize": False, "foreach": None}
_MOST_GROUPS: dict[str, Any] = {**_EVERY_GROUP, "differentiable": False}
ADAM_GROUP: dict[str, Any] = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "capturable": False,
    "fused": None,
    DECOUPLED: False,
    **_MOST_GROUPS,
}


@dataclass(frozen=True, slots=True)
class _TorchOptimizer:
    """An optimizer of PyTorch.

    Attributes:
        keys: what it keeps of a parameter, beside steps, in every case.
        group: what its groups have, as PyTorch gives it.
        switched: keys that it keeps where a hyper-parameter is true.
        signs: hyper-parameters that tell it from others with the same keys.
    """

    keys: frozenset[str]
    group: Mapping[str, Any]
    switched: tuple[tuple[str, str], ...] = ()
    signs: frozenset[str] = frozenset()


# Those that keep more come first: what they keep is more than others keep.
_OPTIMIZERS = (
    _TorchOptimizer(
        frozenset({"exp_avg", "exp_avg_sq", "mu_product"}),
        {
            "lr": 0.002,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0,
            "momentum_decay": 0.004,
            DECOUPLED: False,
            "capturable": False,
            **_MOST_GROUPS,
        },
    ),
    _TorchOptimizer(
        frozenset({"exp_avg", "exp_avg_sq"}), ADAM_GROUP, (("max_exp_avg_sq", "amsgrad"),)
    ),
    _TorchOptimizer(
        frozenset({"exp_avg", "exp_inf"}),
        {
            "lr": 0.002,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0,
            "capturable": False,
            **_MOST_GROUPS,
        },
    ),
    _TorchOptimizer(
        frozenset({"square_avg", "acc_delta"}),
        {
            "lr": 1.0,
            "rho": 0.9,
            "eps": 1e-6,
            "weight_decay": 0,
            "capturable": False,
            **_MOST_GROUPS,
        },
    ),
    _TorchOptimizer(
        frozenset({"square_avg"}),
        {
            "lr": 0.01,
            "momentum": 0,
            "alpha": 0.99,
            "eps": 1e-8,
            "centered": False,
            "weight_decay": 0,
            "capturable": False,
            **_MOST_GROUPS,
        },
        (("grad_avg", "centered"),),
    ),
    _TorchOptimizer(
        frozenset({"prev", "step_size"}),
        {
            "lr": 0.01,
            "etas": (0.5, 1.2),
            "step_sizes": (1e-6, 50),
            "capturable": False,
            **_MOST_GROUPS,
        },
    ),
    _TorchOptimizer(
        frozenset({"ax", "eta", "mu"}),
        {
            "lr": 0.01,
            "lambd": 0.0001,
            "alpha": 0.75,
            "t0": 1000000.0,
            "weight_decay": 0,
            "capturable": False,
            **_MOST_GROUPS,
        },
    ),
    _TorchOptimizer(
        frozenset({"momentum_buffer"}),
        {
            "lr": 0.001,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.775, 2.0315),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        },
        signs=frozenset({"ns_coefficients", "ns_steps"}),
    ),
    _TorchOptimizer(
        frozenset({"momentum_buffer"}),
        {
            "lr": 0.001,
            "momentum": 0,
            "dampening": 0,
            "weight_decay": 0,
            "nesterov": False,
            "fused": None,
            **_MOST_GROUPS,
        },
    ),
    _TorchOptimizer(
        frozenset({"sum"}),
        {
            "lr": 0.01,
            "lr_decay": 0,
            "eps": 1e-10,
            "weight_decay": 0,
            "initial_accumulator_value": 0,
            "fused": None,
            **_MOST_GROUPS,
        },
    ),
    # Vectors have a variance of their own, matrices one of rows and one of columns.
    *(
        _TorchOptimizer(
            frozenset(keys),
            {
                "lr": 0.01,
                "beta2_decay": -0.8,
                "eps": (None, 0.001),
                "d": 1.0,
                "weight_decay": 0.0,
                **_EVERY_GROUP,
            },
        )
        for keys in (["row_var", "col_var"], ["variance"])
    ),
)
#: What PyTorch's optimizers keep of a parameter.
OPTIMIZER_KEYS = frozenset(
    {
        "step",
        *(key for one in _OPTIMIZERS for key in one.keys),
        *(key for one in _OPTIMIZERS for key, _ in one.switched),
    }
)


def state_name(parameter: str, key: str) -> str:
    """The name of what an optimizer keeps of a parameter.

    >>> state_name("lm_head.weight", "exp_avg")
    'optimizer.state.lm_head.weight.exp_avg'
    """
    return f"{_STATE}{parameter}.{key}"


def split_state_name(name: str) -> tuple[str, str] | None:
    """The parameter, or its number, and the key of optimizer state; None for other names.

    >>> split_state_name("optimizer.state.lm_head.weight.exp_avg")
    ('lm_head.weight', 'exp_avg')
    """
    parameter, dot, key = name.removeprefix(_STATE).rpartition(".")
    return (parameter, key) if name.startswith(_STATE) and dot else None


def find_keys(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The keys of what is kept of each parameter.

    >>> find_keys(["w", "optimizer.state.w.master", "optimizer.state.w.exp_avg"])
    {'w': ('master', 'exp_avg')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if (split := split_state_name(name)) is not None:
            parameter, key = split
            found[parameter] = (*found.get(parameter, ()), key)
    return found


def complete_group(group: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A group with all that PyTorch's optimizer of such state has, in its types.

    >>> complete_group({"lr": 0.1, "betas": [0.9, 0.95]}, ["exp_avg", "exp_avg_sq"])["betas"]
    (0.9, 0.95)
    """
    kept = {*keys}
    fitting = (
        one
        for one in _OPTIMIZERS
        if one.keys <= kept and (not one.signs or one.signs & group.keys())
    )
    optimizer = next(fitting, None)
    found = dict(group)
    if optimizer is not None:
        switches = {switch: key in kept for key, switch in optimizer.switched}
        found = {**optimizer.group, **switches, **group}
        for key, value in optimizer.group.items():
            if isinstance(value, tuple) and isinstance(found[key], list):
                found[key] = tuple(found[key])
    return found
