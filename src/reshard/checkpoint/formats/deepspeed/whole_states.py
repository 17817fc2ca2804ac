"""The state of optimizers without partitions (stage 0), by the names of parameters.

It is in the file of weights; a model with experts has a file of each of the experts' ranks, with
the state of all that this rank has. Each stage of a pipeline and each tensor-parallel rank has a
file of weights, and so state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from reshard.checkpoint.formats.deepspeed.files import SavedFiles
from reshard.checkpoint.formats.deepspeed.parallel.experts import list_local_weights
from reshard.checkpoint.formats.deepspeed.partitions import flat_pieces
from reshard.checkpoint.formats.deepspeed.saved_states import ModelState, Shape, read_file
from reshard.checkpoint.formats.deepspeed.stored_tensors import StoredPiece
from reshard.checkpoint.formats.deepspeed.values import SavedValues
from reshard.checkpoint.formats.deepspeed.whole_optimizers import (
    WholeOptimizer,
    list_weights,
    name_flat,
    name_parameters,
    read_whole_optimizer,
)
from reshard.checkpoint.formats.torch_files.optimizer_states import MASTER, state_name
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor


class AddState(Protocol):
    """What adds tensors: whole ones, and those that lie in pieces of flat buffers."""

    def add_whole_state(
        self, parameter: str, key: str, mp: int, file: str, archived: ArchivedTensor
    ) -> None:
        """Add what is kept of a parameter."""

    def add_flat_state(
        self, parameter: str, key: str, mp: int, shape: Shape, pieces: list[StoredPiece]
    ) -> None:
        """The same, in pieces."""


class _SavedOptimizer(NamedTuple):
    """An optimizer's state in a file, and the weights of the rank that saved it, in their order."""

    file: str
    mp: int
    optimizer: Any
    weights: list[tuple[str, Shape]]


class WholeStates:
    """The state of all optimizers without partitions in a save; `notes` are for the user.

    `groups` are the hyper-parameters, with the names of parameters, `rest` is what else is saved
    with the first one.
    """

    def __init__(
        self,
        saved: SavedFiles,
        models: Mapping[tuple[int, int], ModelState],
        target: AddState,
        values: SavedValues,
    ) -> None:
        self._folder: Path = saved.folder
        self._target, self._values = target, values
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
            why = "its parameters have numbers, and shapes do not tell which one each is"
            self._values.unread.append((f"optimizer in {source.file}", why))
            return
        if names is None:
            self.notes.append(
                "optimizer state has the numbers of parameters: the shapes of the weights, in "
                "their order, do not tell which one each is"
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
        """State in one flat buffer a group."""
        named = name_flat(found, source.weights)
        if named is None:
            why = "its flat buffers are not told apart: they are of several groups"
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
                self._target.add_flat_state(name, str(key), source.mp, shape, stored)
        names = [name for name, _ in named]
        self._add_groups(found, [names] * len(found.hyper))

    def _add_kept(self, parameter: str, key: str, value: Any, source: _SavedOptimizer) -> None:
        """One thing that is kept of a parameter, whole."""
        if isinstance(value, ArchivedTensor):
            self._target.add_whole_state(parameter, key, source.mp, source.file, value)
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
    """The optimizers of a save, with the weights of the ranks that they are of."""
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
