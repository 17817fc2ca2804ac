"""Optimizer state in its canonical form: the names that every training format is read under.

    optimizer.state.NAME.KEY     state of a parameter; float32 weights have the key `master`
    optimizer.param_groups       groups of hyper-parameters, with the names of parameters in order

Groups are completed by the defaults of PyTorch's optimizers. Numbers of parameters, as
`optimizer.state_dict()` has them, become names by the order of the model: of all its parameters
(`find_state_names`), or of the weights whose shapes fit (`match_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OPTIMIZER_PREFIX = "optimizer."
GROUPS = OPTIMIZER_PREFIX + "param_groups"
MASTER, STEP = "master", "step"
_STATE = OPTIMIZER_PREFIX + "state."
# AdamW sets this itself when it loads a state, and Adam would become AdamW by it.
DECOUPLED = "decoupled_weight_decay"
# Defaults of groups of PyTorch's optimizers, in the order in which these save them.
_EVERY_GROUP: dict[str, Any] = {"maximize": False, "foreach": None}
_USUAL_GROUP: dict[str, Any] = {**_EVERY_GROUP, "differentiable": False}
_CAPTURABLE: dict[str, Any] = {"capturable": False, **_USUAL_GROUP}
_DECAYED: dict[str, Any] = {"weight_decay": 0, **_CAPTURABLE}
_BETAS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
ADAM_GROUP: dict[str, Any] = {
    "lr": 0.001,
    **_BETAS,
    "weight_decay": 0.01,
    "amsgrad": False,
    "capturable": False,
    "fused": None,
    DECOUPLED: False,
    **_USUAL_GROUP,
}
_NADAM_GROUP = {
    "lr": 0.002,
    **_BETAS,
    "weight_decay": 0,
    "momentum_decay": 0.004,
    DECOUPLED: False,
    **_CAPTURABLE,
}
_ADAMAX_GROUP = {"lr": 0.002, **_BETAS, **_DECAYED}
_ADADELTA_GROUP = {"lr": 1.0, "rho": 0.9, "eps": 1e-6, **_DECAYED}
_RMSPROP_GROUP = {
    "lr": 0.01,
    "momentum": 0,
    "alpha": 0.99,
    "eps": 1e-8,
    "centered": False,
    **_DECAYED,
}
_RPROP_GROUP = {"lr": 0.01, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50), **_CAPTURABLE}
_ASGD_GROUP = {"lr": 0.01, "lambd": 0.0001, "alpha": 0.75, "t0": 1000000.0, **_DECAYED}
_MUON_GROUP = {
    "lr": 0.001,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
_SGD_GROUP = {
    "lr": 0.001,
    "momentum": 0,
    "dampening": 0,
    "weight_decay": 0,
    "nesterov": False,
    "fused": None,
    **_USUAL_GROUP,
}
_ADAGRAD_GROUP = {
    "lr": 0.01,
    "lr_decay": 0,
    "eps": 1e-10,
    "weight_decay": 0,
    "initial_accumulator_value": 0,
    "fused": None,
    **_USUAL_GROUP,
}
_ADAFACTOR_GROUP = {
    "lr": 0.01,
    "beta2_decay": -0.8,
    "eps": (None, 0.001),
    "d": 1.0,
    "weight_decay": 0.0,
    **_EVERY_GROUP,
}


class _TorchOptimizer(NamedTuple):
    """An optimizer of PyTorch.

    Attributes:
        keys: its state of a parameter, without steps, whatever the hyper-parameters.
        group: the defaults of its groups.
        switched: keys that it has only if a hyper-parameter is true.
        signs: hyper-parameters that distinguish it from others with the same keys.
    """

    keys: frozenset[str]
    group: Mapping[str, Any]
    switched: tuple[tuple[str, str], ...] = ()
    signs: frozenset[str] = frozenset()


# Optimizers with more keys come first, since their keys include the keys of others.
_OPTIMIZERS = (
    _TorchOptimizer(frozenset({"exp_avg", "exp_avg_sq", "mu_product"}), _NADAM_GROUP),
    _TorchOptimizer(
        frozenset({"exp_avg", "exp_avg_sq"}), ADAM_GROUP, (("max_exp_avg_sq", "amsgrad"),)
    ),
    _TorchOptimizer(frozenset({"exp_avg", "exp_inf"}), _ADAMAX_GROUP),
    _TorchOptimizer(frozenset({"square_avg", "acc_delta"}), _ADADELTA_GROUP),
    _TorchOptimizer(frozenset({"square_avg"}), _RMSPROP_GROUP, (("grad_avg", "centered"),)),
    _TorchOptimizer(frozenset({"prev", "step_size"}), _RPROP_GROUP),
    _TorchOptimizer(frozenset({"ax", "eta", "mu"}), _ASGD_GROUP),
    _TorchOptimizer(
        frozenset({"momentum_buffer"}),
        _MUON_GROUP,
        signs=frozenset({"ns_coefficients", "ns_steps"}),
    ),
    _TorchOptimizer(frozenset({"momentum_buffer"}), _SGD_GROUP),
    _TorchOptimizer(frozenset({"sum"}), _ADAGRAD_GROUP),
    # Vectors have a variance; matrices have a variance of rows and another of columns.
    _TorchOptimizer(frozenset({"row_var", "col_var"}), _ADAFACTOR_GROUP),
    _TorchOptimizer(frozenset({"variance"}), _ADAFACTOR_GROUP),
)
#: The keys of PyTorch's optimizers.
OPTIMIZER_KEYS = frozenset(
    {
        "step",
        *(key for optimizer in _OPTIMIZERS for key in optimizer.keys),
        *(key for optimizer in _OPTIMIZERS for key, _ in optimizer.switched),
    }
)


def state_name(parameter: str, key: str) -> str:
    """Return the name of optimizer state of a parameter.

    >>> state_name("lm_head.weight", "exp_avg")
    'optimizer.state.lm_head.weight.exp_avg'
    """
    return f"{_STATE}{parameter}.{key}"


def split_state_name(name: str) -> tuple[str, str] | None:
    """Return the parameter, or its number, and the key of optimizer state; None for other names.

    >>> split_state_name("optimizer.state.lm_head.weight.exp_avg")
    ('lm_head.weight', 'exp_avg')
    """
    parameter, dot, key = name.removeprefix(_STATE).rpartition(".")
    return (parameter, key) if name.startswith(_STATE) and dot else None


def find_keys(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the keys of the optimizer state of each parameter.

    >>> find_keys(["w", "optimizer.state.w.master", "optimizer.state.w.exp_avg"])
    {'w': ('master', 'exp_avg')}
    """
    keys: dict[str, tuple[str, ...]] = {}
    for name in names:
        if (split := split_state_name(name)) is not None:
            parameter, key = split
            keys[parameter] = (*keys.get(parameter, ()), key)
    return keys


def complete_group(group: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a group completed by the defaults of PyTorch's optimizer of such state, in its types.

    >>> complete_group({"lr": 0.1, "betas": [0.9, 0.95]}, ["exp_avg", "exp_avg_sq"])["betas"]
    (0.9, 0.95)
    """
    own = {*keys}
    optimizer = next(
        (
            candidate
            for candidate in _OPTIMIZERS
            if candidate.keys <= own and (not candidate.signs or candidate.signs & group.keys())
        ),
        None,
    )
    if optimizer is None:
        return dict(group)
    switches = {switch: key in own for key, switch in optimizer.switched}
    completed = {**optimizer.group, **switches, **group}
    for key, value in optimizer.group.items():
        if isinstance(value, tuple) and isinstance(completed[key], list):
            completed[key] = tuple(completed[key])
    return completed


Shape = tuple[int, ...]


def match_groups(
    groups: Sequence[Sequence[int]],
    shape_of: Callable[[int], Shape | None],
    weights: Sequence[tuple[str, Shape]],
    may_have: Callable[[int, str], bool] = lambda group, name: True,
) -> dict[int, str] | None:
    """Return the weight of each number, or None if shapes and order are ambiguous.

    Args:
        groups: the numbers of the parameters of each group, in the order of the model.
        shape_of: returns the shape of a parameter. An unknown shape, of a parameter that was never
            trained, matches any weight.
        weights: of the model, in order.
        may_have: returns whether a group, given by its index, may have a weight.

    >>> shapes = {0: (2,), 1: (3,), 2: (4,)}
    >>> match_groups([[0], [1, 2]], shapes.get, [("a", (2,)), ("b", (3,)), ("c", (4,))])
    {0: 'a', 1: 'b', 2: 'c'}
    >>> match_groups([[0]], shapes.get, [("a", (2,)), ("b", (2,))]) is None
    True
    """
    names: dict[int, str] = {}
    unmatched = dict(enumerate(groups))
    rest = [*weights]
    while unmatched:
        # Groups are disjoint: each that is identified leaves fewer matches for the others.
        for index, group in unmatched.items():
            own = [(name, shape) for name, shape in rest if may_have(index, name)]
            matched = _match_in_order([*map(shape_of, group)], own)
            if matched is not None:
                break
        else:
            return None
        del unmatched[index]
        names.update(zip(group, matched, strict=True))
        taken = {*matched}
        rest = [(name, shape) for name, shape in rest if name not in taken]
    return names


def _match_in_order(
    shapes: Sequence[Shape | None], weights: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """Return the weights that match a sequence of shapes, or None unless the match is unique."""
    forward = _match_greedily(shapes, weights)
    backward = _match_greedily(shapes[::-1], weights[::-1])
    # The first and the last match agree if there is a single match.
    return forward if backward is not None and forward == backward[::-1] else None


def _match_greedily(
    shapes: Sequence[Shape | None], weights: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """Assign to each shape the first weight of that shape after the previous weight."""
    matched, rest = [], iter(weights)
    for shape in shapes:
        name = next((name for name, own in rest if shape is None or own == shape), None)
        if name is None:
            return None
        matched.append(name)
    return matched


def find_state_names(
    parameters: Sequence[tuple[str, Shape]], state: Mapping[str, Shape], groups: Any
) -> tuple[dict[str, str], str | None]:
    """Return the name of each tensor of optimizer state whose parameter has a number.

    Parameters are numbered in the order of the model, if an optimizer has a single group of all of
    them. State of several elements must have the shape of its parameter. Otherwise numbers
    stay, and the second value is the reason.

    Args:
        parameters: of the model in their order, with shapes.
        state: the tensors of the optimizer.
        groups: the value `optimizer.param_groups`.

    >>> find_state_names([("a", (2,)), ("b", (3,))], {"optimizer.state.1.exp_avg": (3,)},
    ...     [{"params": [0, 1]}])
    ({'optimizer.state.1.exp_avg': 'optimizer.state.b.exp_avg'}, None)
    """
    split = {name: parts for name in state if (parts := split_state_name(name)) is not None}
    numbered = {name: parts for name, parts in split.items() if parts[0].isdecimal()}
    if not numbered:
        return {}, None
    params = groups[0].get("params") if isinstance(groups, list) and len(groups) == 1 else None
    if params != [*range(len(params or ()))] or not params:
        return {}, "its parameters have numbers in several groups, whose order is not known"
    if len(params) != len(parameters):
        return {}, (
            f"its {len(params)} parameters have numbers, and the model's files have "
            f"{len(parameters)}"
        )
    names = {}
    for name, (number, key) in numbered.items():
        if int(number) >= len(parameters):
            return {}, f"it has state of parameter {number}, and there are {len(parameters)}"
        parameter, shape = parameters[int(number)]
        if math.prod(state[name]) > 1 and state[name] != shape and len(state[name]) == len(shape):
            return {}, (
                f"{key} of parameter {number} is {list(state[name])}, and {parameter!r}, which has "
                f"that number in the model, {list(shape)}"
            )
        names[name] = state_name(parameter, key)
    return names, None
