"""Optimizer state by name, as all formats of DeepSpeed are read and written.

optimizer.state.NAME.KEY         what is kept of a parameter; float32 weights are `master`
optimizer.param_groups           groups, with the names of parameters in order
"""

from __future__ import annotations

from collections.abc import Iterable

MASTER, STEP = "master", "step"
GROUPS = "optimizer.param_groups"
_PREFIX = "optimizer.state."


def state_name(parameter: str, key: str) -> str:
    """The name of what an optimizer keeps of a parameter.

    >>> state_name("lm_head.weight", "exp_avg")
    'optimizer.state.lm_head.weight.exp_avg'
    """
    return f"{_PREFIX}{parameter}.{key}"


def split_state_name(name: str) -> tuple[str, str] | None:
    """The parameter and the key of optimizer state; None for other names.

    >>> split_state_name("optimizer.state.lm_head.weight.exp_avg")
    ('lm_head.weight', 'exp_avg')
    """
    if not name.startswith(_PREFIX):
        return None
    parameter, _, key = name.removeprefix(_PREFIX).rpartition(".")
    return parameter, key


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
