"""The state of optimizers without partitions (stage 0).

It is in the file of weights; a model with experts has a file of each of the experts' ranks, with
the state of all that this rank has. Each stage of a pipeline and each tensor-parallel rank has a
file of weights, and so state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.formats.deepspeed import SavedFiles
from reshard.checkpoint.formats.deepspeed.flat_buffers import (
    flat_pieces,
    match_expert,
)
from reshard.checkpoint.formats.deepspeed.saved_states import (
    ModelState,
    SavedPart,
    SavedValues,
    Shape,
    read_file,
    read_tensors,
)
from reshard.checkpoint.formats.deepspeed.stored_tensors import StoredPiece
from reshard.checkpoint.formats.torch_files.optimizer_states import MASTER, state_name
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor

# Add whole state of a parameter: parameter, key, `mp_rank`, file, tensor.
AddWhole = Callable[[str, str, int, str, ArchivedTensor], None]
# Add state of a parameter in pieces of flat buffers: parameter, key, `mp_rank`, shape, pieces.
AddPieces = Callable[[str, str, int, Shape, list[StoredPiece]], None]


class _SavedOptimizer(NamedTuple):
    """An optimizer's state in a file, and the weights of the rank that saved it, in their order."""

    file: str
    mp: int
    optimizer: Any
    weights: list[tuple[str, Shape]]


class WholeStates:
    """The state of all optimizers without partitions in a save; `notes` are for the user.

    `groups` are the hyper-parameters, with the names of parameters, `rest` are the other values of
    the first optimizer.
    """

    def __init__(
        self,
        saved: SavedFiles,
        models: Mapping[tuple[int, int], ModelState],
        add_whole: AddWhole,
        add_pieces: AddPieces,
        values: SavedValues,
    ) -> None:
        self._folder: Path = saved.folder
        self._add_whole, self._add_pieces, self._values = add_whole, add_pieces, values
        self.groups: list[dict[str, Any]] = []
        self.rest: Mapping[str, Any] = {}
        self.notes: list[str] = []
        sources = [*_list_sources(saved, models)]
        self._has_one = len(sources) == 1
        for source in sources:
            self._add(source)

    def _add(self, source: _SavedOptimizer) -> None:
        label = str(self._folder / source.file)
        found = read_whole_optimizer(source.optimizer, label)
        if found is None:
            return
        self.rest = self.rest or found.rest
        if found.flat:
            self._add_fused(source, found)
            return
        names = name_parameters(found, source.weights)
        if names is None and not self._has_one:
            # Numbers of several ranks are those of different parameters.
            why = "its parameters have numbers, and their shapes are ambiguous"
            self._values.unread.append((f"optimizer in {source.file}", why))
            return
        if names is None:
            self.notes.append(
                "optimizer state has the numbers of parameters: the shapes of the weights, in "
                "their order, do not identify them"
            )
            names = {}
        for number in dict.fromkeys([*found.masters, *found.states]):
            kept: dict[Any, Any] = dict(found.states.get(number, {}))
            if number in found.masters:
                kept = {MASTER: found.masters[number], **kept}
            for key, value in kept.items():
                self._add_kept(names.get(number, str(number)), str(key), value, source)
        called = [[names.get(n, n) for n in group["params"]] for group in found.hyper]
        self._add_groups(found, called)

    def _add_fused(self, source: _SavedOptimizer, found: WholeOptimizer) -> None:
        """Add state of a flat buffer for each group."""
        named = name_flat(found, source.weights)
        if named is None:
            why = "its flat buffers are ambiguous: they are of several groups"
            name = "optimizer" if self._has_one else f"optimizer in {source.file}"
            self._values.unread.append((name, why))
            return
        sizes = [math.prod(shape) for _, shape in named]
        pieces = flat_pieces(sizes, [0] * len(sizes), sum(sizes))
        kept = {MASTER: found.flat[0], **next(iter(found.states.values()), {})}
        for (name, shape), own in zip(named, pieces, strict=True):
            for key, value in kept.items():
                if not isinstance(value, ArchivedTensor) or value.shape != found.flat[0].shape:
                    self._add_kept(name, str(key), value, source)
                    continue
                stored = [
                    StoredPiece(0, p.start, p.stop, source.file, value, p.offset) for p in own
                ]
                self._add_pieces(name, str(key), source.mp, shape, stored)
        names = [name for name, _ in named]
        self._add_groups(found, [names] * len(found.hyper))

    def _add_kept(self, parameter: str, key: str, value: Any, source: _SavedOptimizer) -> None:
        """One thing that is kept of a parameter, whole."""
        if isinstance(value, ArchivedTensor):
            self._add_whole(parameter, key, source.mp, source.file, value)
        else:
            path = ("optimizer", "state", parameter, key)
            self._values.add(state_name(parameter, key), value, path, source.file)

    def _add_groups(self, found: WholeOptimizer, names: list[list[Any]]) -> None:
        pairs = zip(found.hyper, names, strict=True)
        merge_groups(self.groups, [{**group, "params": own} for group, own in pairs])


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


def _list_sources(
    saved: SavedFiles, models: Mapping[tuple[int, int], ModelState]
) -> Iterator[_SavedOptimizer]:
    """Yield the optimizers of a save, with the weights of the ranks that they are of."""
    for (mp, rank), model in models.items():
        # Where experts' ranks have files, that of the weights has what the first of them has.
        of_experts = any(own == mp for _, own in saved.expert_optimizers)
        if not rank and not of_experts and isinstance(model.optimizer, dict):
            yield _SavedOptimizer(model.file, mp, model.optimizer, list_weights(model))
    for (rank, mp), name in sorted(saved.expert_optimizers.items()):
        optimizer = read_file(saved.folder, name).get("optimizer")
        if isinstance(optimizer, dict):
            dense = list_weights(models[mp, 0])
            yield _SavedOptimizer(name, mp, optimizer, list_local_weights(saved, dense, rank, mp))


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
        """Return the shape of a parameter: that of its weights, or of what most is kept of it."""
        if number in self.masters:
            return self.masters[number].shape
        kept = [v.shape for v in self.states.get(number, {}).values() if _is_tensor(v)]
        return max(kept, key=lambda shape: (len(shape), math.prod(shape)), default=None)


def read_whole_optimizer(optimizer: Any, label: str) -> WholeOptimizer | None:
    """Return the optimizer in a file, or None if absent.

    Raises:
        FormatError: an optimizer that is not of DeepSpeed.
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
    """Return the name of each number among the model's weights, or None if shapes are ambiguous."""
    found: dict[int, str] = {}
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


def name_flat(
    optimizer: WholeOptimizer, weights: list[tuple[str, Shape]]
) -> list[tuple[str, Shape]] | None:
    """Return the parameters of a single flat group of all of the model's weights, or None."""
    total = sum(math.prod(shape) for _, shape in weights)
    if len(optimizer.flat) == 1 and optimizer.flat[0].shape == (total,):
        return weights
    return None


def list_weights(model: ModelState) -> list[tuple[str, Shape]]:
    """Return weights in the order of the model, without buffers and repeated tied weights."""
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
    """Return the weights that match a sequence of shapes, or None unless the match is unique.

    An unknown shape matches any weight.

    >>> match_in_order([(2,), (4,)], [("a", (2,)), ("b", (3,)), ("c", (4,))])
    ['a', 'c']
    >>> match_in_order([(2,)], [("a", (2,)), ("b", (2,))]) is None
    True
    """
    forward = _match_greedily(wanted, weights)
    backward = _match_greedily(wanted[::-1], weights[::-1])
    # The first and the last match agree if there is only one.
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
