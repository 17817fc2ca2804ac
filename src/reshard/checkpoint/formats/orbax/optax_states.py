"""Names of Optax's optimizer states.

Optax stores states as nested tuples, which contain trees like the tree of the parameters::

    params.dense.kernel
    opt_state.1.0.mu.dense.kernel       optimizer.state.dense.kernel.exp_avg
    opt_state.1.0.nu.dense.kernel       optimizer.state.dense.kernel.exp_avg_sq
    opt_state.1.0.count                 optimizer.state.dense.kernel.step, of each parameter
    opt_state.2.acc_grads.dense.kernel  optimizer.state.dense.kernel.acc_grads

1. A node below `opt_state`, or a similar name, whose leaves correspond to parameters is the state
   of these. In a tree without weights, `mu` and `nu` with equal leaves are recognised.
2. Nodes with the meaning of a key of PyTorch's optimizers get that key; others keep their names. If
   two states have the same key of a parameter, the second's keys end in `_2`.
3. A tensor's path in the tree is kept, so that a checkpoint of Orbax is restored as it was.
4. Training state of other programs gets paths of `optax.adamw`, `lion`, `sgd`, `rmsprop`,
   `adagrad` or `adadelta`, by its keys. State that a reader would give another name there, such
   as the state of only some parameters, keeps its name as its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from reshard.checkpoint.formats.optimizer_states import (
    STEP,
    split_state_name,
    state_name,
)
from reshard.checkpoint.formats.orbax.tree import TreePath

_MU, _NU = "mu", "nu"
_COUNT, _VALUE = "count", "value"
_OPTIMIZER, _PARAMS = "opt_state", "params"
_WORD = re.compile(r"opts?|opt(im(izer)?)?s?_?states?|optim(izer)?s?")
# A state of Muon in addition to its momentum.
_COEFFICIENTS = "ns_coeffs"
# PyTorch's keys by the names of nodes. `max_exp_avg_sq` is not among them, since AMSGrad's `nu_max`
# is of corrected moments.
_ADAM = {_MU: "exp_avg", _NU: "exp_avg_sq"}
_CENTERED = {_MU: "grad_avg", _NU: "square_avg"}
_ALONE = {
    _MU: "exp_avg",
    _NU: "square_avg",
    "trace": "momentum_buffer",
    "sum_of_squares": "sum",
    "e_g": "square_avg",
    "e_x": "acc_delta",
}
# Optimizers by their keys: the node of each key, the number of the state in the chain, and the
# numbers of empty states in the chain.
_PLACES: tuple[tuple[Mapping[str, str], int, tuple[int, ...]], ...] = (
    ({"exp_avg": _MU, "exp_avg_sq": _NU}, 0, (1, 2)),
    ({"square_avg": "e_g", "acc_delta": "e_x"}, 1, (0, 2)),
    ({"grad_avg": _MU, "square_avg": _NU}, 0, (1, 2)),
    ({"exp_avg": _MU}, 0, (1, 2)),
    ({"square_avg": _NU}, 0, (1, 2)),
    ({"momentum_buffer": "trace"}, 0, (1,)),
    ({"sum": "sum_of_squares"}, 0, (1,)),
)


# A state of a chain: the parameters' leaves below each of its nodes.
_ChainState = dict[str, dict[TreePath, None]]


def _find_keys(state: _ChainState, *, has_count: bool, has_coefficients: bool) -> dict[str, str]:
    """Return the key of each node of a state."""
    mu, nu = state.get(_MU), state.get(_NU)
    keys = _ALONE
    if mu and nu and mu.keys() == nu.keys():
        keys = _ADAM if has_count else _CENTERED
    elif mu and has_coefficients:
        keys = {_MU: "momentum_buffer"}
    return {node: keys.get(node, node) for node in state}


def _name(path: TreePath) -> str:
    return ".".join(map(str, path))


def name_states(paths: Iterable[TreePath]) -> dict[TreePath, tuple[str, ...]]:
    """Return the names of tensors by path; a step count has a name for each parameter.

    >>> name_states([("params", "w"), ("o", 0, "mu", "w"), ("o", 0, "nu", "w"), ("o", 0, "count")])
    {('params', 'w'): ('params.w',), ('o', 0, 'mu', 'w'): ('optimizer.state.w.exp_avg',),
     ('o', 0, 'nu', 'w'): ('optimizer.state.w.exp_avg_sq',),
     ('o', 0, 'count'): ('optimizer.state.w.step',)}
    """
    result: dict[TreePath, tuple[str, ...]] = {path: (_name(path),) for path in paths}
    named: set[str] = set()
    for place, state in _find_states(result).items():
        count = next(
            (path for path in ((*place, _COUNT), (*place, _COUNT, _VALUE)) if path in result), None
        )
        has_coefficients = any(path[: len(place) + 1] == (*place, _COEFFICIENTS) for path in result)
        keys = _find_keys(state, has_count=count is not None, has_coefficients=has_coefficients)
        leaves = dict.fromkeys(leaf for node in state.values() for leaf in node)
        for node, own in state.items():
            names = {leaf: _free_name(leaf, keys[node], named) for leaf in own}
            result |= {(*place, node, *leaf): (name,) for leaf, name in names.items()}
            named |= {*names.values()}
        steps = tuple(state_name(_name(leaf), STEP) for leaf in leaves)
        if count is not None and not named.intersection(steps):
            result[count] = steps
            named |= {*steps}
    return result


def _free_name(leaf: TreePath, key: str, named: set[str]) -> str:
    """Return an unused name for the state of a parameter."""
    name, number = state_name(_name(leaf), key), 1
    while name in named:
        number += 1
        name = state_name(_name(leaf), f"{key}_{number}")
    return name


def _find_states(paths: Iterable[TreePath]) -> dict[TreePath, _ChainState]:
    """Return the states by path, in the order of the tree."""
    inside: dict[TreePath, int] = {}
    leaves: set[TreePath] = set()
    for path in paths:
        first = _find_optimizer(path)
        if first is None:
            rest = path[path.index(_PARAMS) + 1 :] if _PARAMS in path else ()
            leaves |= {path, path[1:], rest}
        else:
            inside[path] = first
    leaves -= {(), (STEP,), (_COUNT,)}
    states: dict[TreePath, _ChainState] = {}
    # Nodes whose leaves do not correspond to parameters, or in a tree without weights.
    foreign: dict[TreePath, _ChainState] = {}
    for path, first in inside.items():
        depths = (
            at
            for at in range(first, len(path) - 1)
            if isinstance(path[at], str) and path[at + 1 :] in leaves
        )
        at, target = next(depths, None), states
        if at is None:
            moments = (n for n in range(first, len(path) - 1) if path[n] in (_MU, _NU))
            at, target = next(moments, None), foreign
        if at is not None:
            state = target.setdefault(path[:at], {})
            state.setdefault(str(path[at]), {})[path[at + 1 :]] = None
    for place, state in foreign.items():
        mu, nu = state.get(_MU), state.get(_NU)
        if place not in states and mu and nu and mu.keys() == nu.keys():
            states[place] = state
    return states


def _find_optimizer(path: TreePath) -> int | None:
    """Return the position in a path at which optimizer states begin, or None if there are none."""
    for at, key in enumerate(path[:-1]):
        if isinstance(key, str) and _WORD.fullmatch(key):
            return at + 1
        if key == _PARAMS:
            return None
    return next((at for at, key in enumerate(path[:-1]) if key in (_MU, _NU, "trace")), None)


def is_count(path: TreePath) -> bool:
    """Return whether a path is of a step count, which several names may share."""
    return bool(path) and path[-1 - (path[-1] == _VALUE) :][:1] == (_COUNT,)


def place_states(
    tensors: Iterable[str], values: Iterable[str], paths: Mapping[str, TreePath]
) -> tuple[dict[str, TreePath], list[TreePath]]:
    """Return the path of each tensor and value in a new tree, and the paths of empty states.

    State that would be read under another name, such as `exp_avg_sq` of a parameter without
    `exp_avg`, gets the path of its own name.

    Args:
        tensors, values: their names.
        paths: the paths that some of them had in the source; the others get those of Optax.

    >>> place_states(["w", "optimizer.state.w.exp_avg", "optimizer.state.w.step"], [], {})[0]
    {'w': ('params', 'w'), 'optimizer.state.w.exp_avg': ('opt_state', 0, 'mu', 'w'),
     'optimizer.state.w.step': ('opt_state', 0, 'count')}
    """
    tensors = [*tensors]
    names = dict.fromkeys((*tensors, *values))
    states = {name: split for name in tensors if (split := split_state_name(name)) is not None}
    plain: dict[str, TreePath] = {}
    while True:
        placed, empty = _place_all(names, {**paths, **plain})
        placed |= plain
        result = {name: placed.get(name) or paths.get(name, (name,)) for name in names}
        # A step count is read under a name for each parameter.
        read = {
            (path, name)
            for path, own in name_states(result[name] for name in tensors).items()
            for name in own
        }
        misread = {
            name: ("optimizer", "state", *parameter.split("."), key)
            for name, (parameter, key) in states.items()
            if name not in plain and (result[name], name) not in read
        }
        if not misread:
            return result, empty
        plain |= misread


def _place_all(
    names: Iterable[str], paths: Mapping[str, TreePath]
) -> tuple[dict[str, TreePath], list[TreePath]]:
    """Return the paths of training state without a path, and those of empty states."""
    there = dict.fromkeys(names)
    names_by_key: dict[str, dict[str, str]] = {}
    for name in there:
        split = split_state_name(name)
        # State that was read from Orbax has a path.
        if split is not None and paths.get(name, (name,)) == (name,):
            parameter, key = split
            names_by_key.setdefault(parameter, {})[key] = name
    result: dict[str, TreePath] = {}
    used: dict[int, set[int]] = {}
    for parameter, keys in names_by_key.items():
        candidates = (place for place in _PLACES if place[0].keys() <= keys.keys())
        nodes, number, empty = next(candidates, ({}, 0, ()))
        leaf: TreePath = tuple(parameter.split("."))
        weight = paths.get(f"{_PARAMS}.{parameter}", paths.get(parameter, ()))
        if weight[:1] == (_PARAMS,):
            leaf = weight[1:]
        elif parameter in there:
            result[parameter] = (_PARAMS, *leaf)
        if nodes:
            used.setdefault(number, set()).update(empty)
        for key, name in keys.items():
            if key in nodes:
                result[name] = (_OPTIMIZER, number, nodes[key], *leaf)
            elif key == STEP:
                result[name] = (_OPTIMIZER, number, _COUNT)
            else:
                # Optax does not have such state.
                result[name] = ("optimizer", "state", *leaf, key)
    empty_places = sorted({n for numbers in used.values() for n in numbers} - used.keys())
    return result, [(_OPTIMIZER, n) for n in empty_places]
