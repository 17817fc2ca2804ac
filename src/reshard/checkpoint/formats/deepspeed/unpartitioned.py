"""The state of optimizers without partitions (stage 0).

It is in the file of weights; a model with experts has a file of each of the experts' ranks, with
the state of all that this rank has. Each stage of a pipeline and each tensor-parallel rank has a
file of weights, and so state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from reshard.checkpoint.formats.deepspeed import SavedFiles
from reshard.checkpoint.formats.deepspeed.flat_buffers import (
    match_expert,
)
from reshard.checkpoint.formats.deepspeed.saved_states import (
    ModelState,
    SavedPart,
    Shape,
    read_file,
    read_tensors,
)
from reshard.checkpoint.formats.torch_files.optimizer_states import match_in_order
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor

_OWN = frozenset(
    {"state", "param_groups", "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"}
)


class WholeOptimizer(NamedTuple):
    """An optimizer without partitions.

    Attributes:
        file: its name.
        mp: the number of the model-parallel rank that saved it.
        weights: of that rank, in the order of the model.
        states: what is kept of each parameter, by its number.
        masters: the float32 weights of parameters, by number.
        flat: of each group, its flat float32 weights; numbers are those of groups then.
        hyper: the groups, with the numbers of their parameters.
        rest: what else is saved with it.
    """

    file: str
    mp: int
    weights: list[tuple[str, Shape]]
    states: Mapping[int, Mapping[Any, Any]]
    masters: Mapping[int, ArchivedTensor]
    flat: tuple[ArchivedTensor, ...]
    hyper: tuple[Mapping[str, Any], ...]
    rest: Mapping[str, Any]

    @property
    def numbers(self) -> list[int]:
        """The numbers of parameters with state."""
        return [*dict.fromkeys([*self.masters, *self.states])]

    def shape(self, number: int) -> Shape | None:
        """Return the shape of a parameter: that of its weights, or of what most is kept of it."""
        if number in self.masters:
            return self.masters[number].shape
        kept = [v.shape for v in self.states.get(number, {}).values() if _is_tensor(v)]
        return max(kept, key=lambda shape: (len(shape), math.prod(shape)), default=None)


def list_optimizers(
    saved: SavedFiles, models: Mapping[tuple[int, int], ModelState]
) -> Iterator[WholeOptimizer]:
    """Yield the optimizers without partitions of a save.

    Raises:
        FormatError: an optimizer that is not of DeepSpeed.
    """
    for (mp, rank), model in models.items():
        # Where experts' ranks have files, that of the weights has what the first of them has.
        of_experts = any(own == mp for _, own in saved.expert_optimizers)
        if not rank and not of_experts and isinstance(model.optimizer, dict):
            label = str(saved.folder / model.file)
            yield _read_optimizer(model.optimizer, label, model.file, mp, list_weights(model))
    for (rank, mp), name in sorted(saved.expert_optimizers.items()):
        optimizer = read_file(saved.folder, name).get("optimizer")
        if isinstance(optimizer, dict):
            weights = list_local_weights(saved, list_weights(models[mp, 0]), rank, mp)
            yield _read_optimizer(optimizer, str(saved.folder / name), name, mp, weights)


def _read_optimizer(
    optimizer: dict[Any, Any], label: str, file: str, mp: int, weights: list[tuple[str, Shape]]
) -> WholeOptimizer:
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
    for own, ones in zip(numbers, part.take_list("fp32_groups", optional=True), strict=False):
        if isinstance(ones, list | tuple) and len(ones) == len(own):
            pairs = zip(own, ones, strict=True)
            masters.update((number, one) for number, one in pairs if _is_tensor(one))
    flat = tuple(v for v in part.take_list("fp32_groups_flat", optional=True) if _is_tensor(v))
    return WholeOptimizer(
        file,
        mp,
        weights,
        {n: state for n, state in states.items() if type(n) is int and isinstance(state, dict)},
        masters,
        flat,
        tuple(dict(group) for group in groups),
        {key: value for key, value in part.value.items() if key not in _OWN},
    )


def name_parameters(optimizer: WholeOptimizer) -> dict[int, str] | None:
    """Return the name of each number among the model's weights, or None if shapes are ambiguous."""
    found: dict[int, str] = {}
    weights = optimizer.weights
    groups = [*optimizer.hyper]
    while groups:
        # Groups are disjoint: each that is identified leaves fewer matches for the others.
        for group in groups:
            shapes = [optimizer.shape(number) for number in group["params"]]
            # Groups are marked as of experts or not.
            own = [
                (name, shape)
                for name, shape in weights
                if group.get("moe", is_expert := match_expert(name) is not None) == is_expert
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


def has_single_buffer(optimizer: WholeOptimizer) -> bool:
    """Return whether a single flat group has all of the model's weights."""
    total = sum(math.prod(shape) for _, shape in optimizer.weights)
    return len(optimizer.flat) == 1 and optimizer.flat[0].shape == (total,)


def list_weights(model: ModelState) -> list[tuple[str, Shape]]:
    """Return weights in the order of the model, without buffers and repeated tied weights."""
    found, seen = [], set()
    for name, archived in (model.module or {}).items():
        place = (archived.start_bytes, archived.view.offset, archived.shape)
        if name not in model.buffers and not (place in seen and archived.storage_bytes):
            found.append((name, archived.shape))
        seen.add(place)
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, ArchivedTensor)


def list_local_weights(
    saved: SavedFiles, dense: list[tuple[str, Shape]], rank: int, mp: int
) -> list[tuple[str, Shape]]:
    """Return all weights of an expert-parallel rank in the order of the model, experts after gates.

    `dense` are the weights of all ranks. The experts of a layer are divided evenly over ranks.
    """
    ranks = 1 + max((rank for rank, own in saved.expert_optimizers if own == mp), default=0)
    layers: dict[int, list[int]] = {}
    for layer, expert, own in sorted(saved.experts):
        if own == mp:
            layers.setdefault(layer, []).append(expert)
    found = [*dense]
    for layer, numbers in layers.items():
        local = len(numbers) // ranks
        for expert in numbers[rank * local : (rank + 1) * local]:
            tensors = read_tensors(saved.folder, saved.experts[layer, expert, mp])
            for name, archived in tensors.items():
                match = match_expert(name)
                before = match[1].removesuffix("experts.deepspeed_experts.") if match else ""
                places = [i for i, (one, _) in enumerate(found) if one.startswith(before)]
                at = places[-1] + 1 if places else len(found)
                found.insert(at, (name, archived.shape))
    return found


def merge_groups(known: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Add another rank's groups, whose hyper-parameters are the same: the parameters it has more.

    >>> known = [{"lr": 0.1, "params": ["a"]}]
    >>> merge_groups(known, [{"lr": 0.1, "params": ["a", "b"]}])
    >>> known
    [{'lr': 0.1, 'params': ['a', 'b']}]
    """
    for number, group in enumerate(groups):
        if number == len(known):
            known.append(group)
            continue
        names = known[number]["params"]
        seen = {*names}
        names += [name for name in group["params"] if name not in seen]
