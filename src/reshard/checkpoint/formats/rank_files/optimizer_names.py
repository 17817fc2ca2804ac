"""Names of optimizer state whose parameters have numbers, as in `optimizer.state_dict()`.

Parameters are numbered in the order of the model, where an optimizer has one group of them::

    optimizer.state.2.exp_avg     third parameter: layers.1.weight
    -> optimizer.state.layers.1.weight.exp_avg

1. The parameters are the tensors of the model that have a part on each rank; plain ones beside them
   are buffers. Of tied tensors the first counts.
2. There must be as many as the group has numbers, and state of more than one element must have the
   shape of its parameter. Otherwise numbers stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoint.formats.torch_files.optimizer_states import split_state_name, state_name

Shape = tuple[int, ...]


def find_state_names(
    parameters: Sequence[tuple[str, Shape]], state: Mapping[str, Shape], groups: Any
) -> tuple[dict[str, str], str | None]:
    """The new name of each tensor of optimizer state, and why numbers stay, where they do.

    Args:
        parameters: of the model in their order, with shapes.
        state: the tensors of the optimizer.
        groups: the value `optimizer.param_groups`.

    >>> find_state_names([("a", (2,)), ("b", (3,))], {"optimizer.state.1.exp_avg": (3,)},
    ...     [{"params": [0, 1]}])
    ({'optimizer.state.1.exp_avg': 'optimizer.state.b.exp_avg'}, None)
    """
    split = {name: found for name in state if (found := split_state_name(name)) is not None}
    numbered = {name: found for name, found in split.items() if found[0].isdecimal()}
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
                f"that place in the model, {list(shape)}"
            )
        names[name] = state_name(parameter, key)
    return names, None


def name_groups(groups: Any, parameters: Sequence[tuple[str, Shape]]) -> Any:
    """The groups with names in the place of numbers."""
    return [
        {**group, "params": [parameters[number][0] for number in group["params"]]}
        for group in groups
    ]
