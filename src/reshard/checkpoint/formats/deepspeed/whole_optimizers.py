"""Optimizers without partitions, which DeepSpeed saves beside the weights (stage 0).

Their state has numbers for parameters, in the order of groups::

    float32            state: {0: {exp_avg, ...}, ...}      param_groups: [{params: [0, 1, ...]}]
    16 bits            the same in `optimizer_state_dict`, and float32 weights in `fp32_groups`
    16 bits, fused     one flat buffer a group, and `fp32_groups_flat`

Numbers become names where shapes and order tell which weight each is: every group is a subsequence
of the weights. Where there is more than one way, numbers stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.checkpoint.formats.deepspeed.parallel.experts import is_expert
from reshard.checkpoint.formats.deepspeed.saved_states import ModelState, SavedPart, Shape
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor

_OWN = frozenset(
    {"state", "param_groups", "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"}
)


@dataclass(frozen=True)
class WholeOptimizer:
    """An optimizer without partitions.

    Attributes:
        states: what is kept of each parameter, by its number.
        masters: the float32 weights of parameters, by number.
        flat: of each group, its flat float32 weights; numbers are those of groups then.
        hyper: the groups, with the numbers of their parameters.
        rest: what else is saved with it.
    """

    states: Mapping[int, Mapping[Any, Any]]
    masters: Mapping[int, ArchivedTensor]
    flat: tuple[ArchivedTensor, ...]
    hyper: tuple[Mapping[str, Any], ...]
    rest: Mapping[str, Any]

    def shape(self, number: int) -> Shape | None:
        """The shape of a parameter: that of its weights, or of what most is kept of it."""
        if number in self.masters:
            return self.masters[number].shape
        kept = [v.shape for v in self.states.get(number, {}).values() if _is_tensor(v)]
        return max(kept, key=lambda shape: (len(shape), math.prod(shape)), default=None)


def read_whole_optimizer(optimizer: Any, label: str) -> WholeOptimizer | None:
    """The optimizer that a file has; None where it has none.

    Raises:
        FormatError: one that is not what DeepSpeed writes.
    """
    if not isinstance(optimizer, dict):
        return None
    part = SavedPart(optimizer, f"{label} optimizer")
    inner = part if part.get("state") is not None else part.within("optimizer_state_dict")
    groups = inner.take_list("param_groups")
    numbers = []
    for group in groups:
        own = SavedPart(group, inner.label).take_list("params")
        if not all(type(number) is int for number in own):
            raise inner.wrong("params", own, "numbers of parameters")
        numbers.append(own)
    states = inner.take_dict("state")
    masters: dict[int, ArchivedTensor] = {}
    weights = part.take_list("fp32_groups", optional=True)
    for own, ones in zip(numbers, weights, strict=False):
        if isinstance(ones, list | tuple) and len(ones) == len(own):
            pairs = zip(own, ones, strict=True)
            masters.update((number, one) for number, one in pairs if _is_tensor(one))
    flat = tuple(v for v in part.take_list("fp32_groups_flat", optional=True) if _is_tensor(v))
    return WholeOptimizer(
        {n: state for n, state in states.items() if type(n) is int and isinstance(state, dict)},
        masters,
        flat,
        tuple(dict(group) for group in groups),
        {key: value for key, value in part.value.items() if key not in _OWN},
    )


def name_parameters(
    optimizer: WholeOptimizer, weights: Sequence[tuple[str, Shape]]
) -> dict[int, str] | None:
    """The name of each number among the model's weights; None where shapes and order do not tell.

    Of flat buffers, whose parameters are all of the model's, one group is told.
    """
    found: dict[int, str] = {}
    groups = [*optimizer.hyper]
    while groups:
        # What one group has no other has: each that is told leaves fewer ways for the others.
        for group in groups:
            shapes = [optimizer.shape(number) for number in group["params"]]
            # Groups say so where they are of experts, and where they are not.
            own = [
                one for one in weights if group.get("moe", is_expert(one[0])) == is_expert(one[0])
            ]
            names = match_in_order(shapes, own)
            if names is not None:
                break
        else:
            return None
        groups.remove(group)
        found.update(zip(group["params"], names, strict=True))
        weights = [(name, shape) for name, shape in weights if name not in names]
    return found


def name_flat(
    optimizer: WholeOptimizer, weights: list[tuple[str, Shape]]
) -> list[tuple[str, Shape]] | None:
    """The parameters of one flat group, where they are all of the model's weights in order."""
    total = sum(math.prod(shape) for _, shape in weights)
    if len(optimizer.flat) == 1 and optimizer.flat[0].shape == (total,):
        return weights
    return None


def list_weights(model: ModelState) -> list[tuple[str, Shape]]:
    """Weights in the order of the model, buffers and second names of tied ones left out."""
    found, seen = [], set()
    for name, archived in (model.module or {}).items():
        place = (archived.start_bytes, archived.view.offset, archived.shape)
        if name not in model.buffers and not (place in seen and archived.storage_bytes):
            found.append((name, archived.shape))
        seen.add(place)
    return found


def match_in_order(
    wanted: Sequence[Shape | None], weights: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """The weights that a sequence of shapes stands for; None where there is not just one way.

    A shape that is not known fits any weight.

    >>> match_in_order([(2,), (4,)], [("a", (2,)), ("b", (3,)), ("c", (4,))])
    ['a', 'c']
    >>> match_in_order([(2,)], [("a", (2,)), ("b", (2,))]) is None
    True
    """
    forward = _match_greedily(wanted, weights)
    backward = _match_greedily(wanted[::-1], weights[::-1])
    # The first and the last way to find a subsequence agree where there is one way.
    return forward if backward is not None and forward == backward[::-1] else None


def _match_greedily(
    wanted: Sequence[Shape | None], weights: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    found = []
    rest = iter(weights)
    for shape in wanted:
        name = next((name for name, own in rest if shape is None or own == shape), None)
        if name is None:
            return None
        found.append(name)
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, ArchivedTensor)
