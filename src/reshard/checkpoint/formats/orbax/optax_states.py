"""Optax's optimizer states, by the names that training state has here.

Optax keeps states as nested tuples, in each of which is a tree like that of the parameters::

    params.dense.kernel
    opt_state.1.0.mu.dense.kernel       optimizer.state.dense.kernel.exp_avg
    opt_state.1.0.nu.dense.kernel       optimizer.state.dense.kernel.exp_avg_sq
    opt_state.1.0.count                 optimizer.state.dense.kernel.step, of each parameter

1. `mu` and `nu` beside one another, with the same leaves, are of Adam; `trace` is a momentum, where
   its leaves are those of parameters.
2. A tensor's place in the tree is not changed: what comes from Orbax goes back to where it was.
3. Training state of other programs is placed as that of `optax.adamw`, or of `optax.sgd`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from reshard.checkpoint.formats.orbax.tree_metadata import TreePath

_KEYS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
_NODES = {key: node for node, key in _KEYS.items()}
_COUNT, _STEP = "count", "step"
_OURS = re.compile(rf"optimizer\.state\.(.+)\.({'|'.join([*_NODES, _STEP])})", re.DOTALL)
_OPTIMIZER, _PARAMS = "opt_state", "params"


def _name(path: TreePath) -> str:
    return ".".join(map(str, path))


def name_states(paths: Iterable[TreePath]) -> dict[TreePath, tuple[str, ...]]:
    """The names of tensors by their paths; a count of steps has one for each parameter.

    >>> name_states([("params", "w"), ("o", 0, "mu", "w"), ("o", 0, "nu", "w"), ("o", 0, "count")])
    {('params', 'w'): ('params.w',), ('o', 0, 'mu', 'w'): ('optimizer.state.w.exp_avg',),
     ('o', 0, 'nu', 'w'): ('optimizer.state.w.exp_avg_sq',),
     ('o', 0, 'count'): ('optimizer.state.w.step',)}
    """
    found: dict[TreePath, tuple[str, ...]] = {path: (_name(path),) for path in paths}
    # The leaves of the trees below each node of a state, in the order of the states.
    below: dict[TreePath, dict[str, dict[TreePath, None]]] = {}
    for path in found:
        for at, key in enumerate(path[:-1]):
            if key in _KEYS:
                below.setdefault(path[:at], {}).setdefault(str(key), {})[path[at + 1 :]] = None
                break
    weights = _list_endings(path for path in found if not any(key in _KEYS for key in path))
    named: set[str] = set()
    for state, trees in below.items():
        mu, nu, trace = (trees.get(node, {}) for node in ("mu", "nu", "trace"))
        if mu and mu.keys() == nu.keys():
            kept: tuple[str, ...] = ("mu", "nu")
        elif trace and not mu and not nu and all(leaf in weights for leaf in trace):
            kept = ("trace",)
        else:
            continue
        leaves = list(trees[kept[0]])
        made = {
            (*state, node, *leaf): f"optimizer.state.{_name(leaf)}.{_KEYS[node]}"
            for node in kept
            for leaf in leaves
        }
        # Of two states of one parameter, the second keeps its own names.
        if named & {*made.values()}:
            continue
        named |= {*made.values()}
        found |= {path: (name,) for path, name in made.items()}
        if (*state, _COUNT) in found:
            steps = tuple(f"optimizer.state.{_name(leaf)}.{_STEP}" for leaf in leaves)
            found[*state, _COUNT] = steps
    return found


def _list_endings(paths: Iterable[TreePath]) -> set[TreePath]:
    return {path[at:] for path in paths for at in range(len(path))}


def is_count(path: TreePath) -> bool:
    """Whether a path is that of a count of steps, which several names may share."""
    return bool(path) and path[-1] == _COUNT


def place_states(
    names: Iterable[str], paths: Mapping[str, TreePath]
) -> tuple[dict[str, TreePath], list[TreePath]]:
    """Where training state goes that has no place in a tree of Optax, and what is empty beside it.

    >>> place_states(["w", "optimizer.state.w.exp_avg", "optimizer.state.w.step"], {})[0]
    {'w': ('params', 'w'), 'optimizer.state.w.exp_avg': ('opt_state', 0, 'mu', 'w'),
     'optimizer.state.w.step': ('opt_state', 0, 'count')}
    """
    names = list(names)
    there = set(names)
    found: dict[str, TreePath] = {}
    nodes: set[str] = set()
    for name in names:
        match = _OURS.fullmatch(name)
        if match is None or any(key in (*_KEYS, _COUNT) for key in paths.get(name, ())):
            continue
        parameter, key = match.groups()
        if key == _STEP:
            found[name] = (_OPTIMIZER, 0, _COUNT)
            continue
        node = _NODES[key]
        nodes.add(node)
        leaf: TreePath = tuple(parameter.split("."))
        weight = paths.get(f"{_PARAMS}.{parameter}", paths.get(parameter, ()))
        if weight[:1] == (_PARAMS,):
            leaf = weight[1:]
        elif parameter in there:
            found[parameter] = (_PARAMS, *leaf)
        found[name] = (_OPTIMIZER, 0, node, *leaf)
    if not nodes:
        return {}, []
    # What follows in the chain keeps nothing: decay and learning rate of adamw, the rate of sgd.
    empty: list[TreePath] = [(_OPTIMIZER, n) for n in ((1, 2) if "mu" in nodes else (1,))]
    return found, empty
