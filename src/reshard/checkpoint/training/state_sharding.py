"""Sharding optimizer state like its parameter: by rules and a recipe, or by a strategy.

A rule shards a weight. The weight's optimizer state is sharded in the same way, under any name::

    rule  *.up_proj.weight=tp, -          model.up_proj.weight                      (8, 4)   tp, -
                                          optim.state.up_proj.weight.exp_avg        (8, 4)   tp, -
                                          optim.state.up_proj.weight.exp_avg_sq_row (8,)     tp
                                          optim.state.up_proj.weight.step           ()       whole

1. Rules match a weight by its name, without the prefix that programs put before it, and without
   any further prefix that the recipe's names do not have.
2. State of the same shape is sharded in the same way. State with some of the dimensions (the rows
   and columns of Adafactor) is sharded along these; scalars are whole. Any other state, such as
   the scales of 8-bit blocks, is whole on every rank that has a part of the parameter, and a note
   reports that.
3. A user's rule that matches the name of the state takes precedence if it comes before the rules
   that match the weight.
4. Copies of weights under another prefix, such as moving averages, are sharded like the weights.
5. State that does not belong to a parameter is whole on every rank, unless a user's rule matches
   it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from reshard.checkpoint.formats.optimizer_states import STEP
from reshard.checkpoint.training.model_sets import bare_name, find_common_prefixes
from reshard.checkpoint.training.state import TrainingState
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.sharding import spec
from reshard.text import count_text

Shape = tuple[int, ...]
# For each dimension of a tensor of optimizer state, the same dimension of its parameter, or None if
# the parameter does not have it, such as the dimension of a mean.
Dims = tuple[int | None, ...]

# The number of names that are examined to find a prefix missing from a recipe's names.
_SAMPLED_NAMES = 256


class StateSharding:
    """A division of a checkpoint's tensors into those that rules shard, and those that follow them.

    `leaders` are sharded by rules. Most optimizer state follows its leader, the parameter.

    Args:
        shapes: the shapes of all tensors, by name.
        state: the training state, or None if the checkpoint does not have optimizer state.
        by_hand: the user's rules.
        recipe: the recipe whose rules come after them, if any. A prefix that its names lack is
            removed from the names that rules match (`aliases`).

    >>> from reshard.checkpoint.training.state import find_training_state
    >>> shapes = {"model.up": (8, 4), "optim.state.up.exp_avg": (8, 4), "optim.state.up.step": ()}
    >>> StateSharding(shapes, find_training_state(shapes)).leaders
    {'model.up': (8, 4)}
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        state: TrainingState | None,
        by_hand: Sequence[Rule] = (),
        recipe: Recipe | None = None,
    ) -> None:
        self.shapes = shapes
        self.leaders: dict[str, Shape] = {}
        self.aliases: dict[str, str] = {}
        # For each tensor that follows another: its leader, and its dimensions in the leader.
        self._followers: dict[str, tuple[str, Dims]] = {}
        self._whole: list[str] = []
        self._apart: list[str] = []
        self._notes: list[str] = []
        self._prefixes: list[str] = []
        if state is None:
            self.leaders |= shapes
        else:
            self._add_state(state, by_hand)
        if recipe is not None:
            self._remove_prefixes(recipe)

    def _add_state(self, state: TrainingState, by_hand: Sequence[Rule]) -> None:
        self._state, self._by_hand = state, by_hand
        for bare, name in state.weights.items():
            self.leaders[name] = self.shapes[name]
            if bare != name:
                self.aliases[name] = bare
        for parameter, tensors in state.optimizer.items():
            self._add(parameter, tensors)
        for name in (*state.others, *(name for name, _ in state.unplaced)):
            copied = self._find_copied(name)
            if any(rule.matches(name) for rule in by_hand):
                self.leaders[name] = self.shapes[name]
            elif copied is not None:
                self._followers[name] = copied, tuple(range(len(self.shapes[name])))
            else:
                self._whole.append(name)
        self._notes += _describe(self.shapes, state, self._apart)

    def _add(self, parameter: str, tensors: Mapping[str, str]) -> None:
        """Add the optimizer state of a parameter."""
        leader = self._state.weights.get(parameter)
        if leader is None:
            # The weight is not in the checkpoint: assume the shape of the state with the most
            # dimensions.
            leader = parameter
            largest = max(tensors.values(), key=lambda name: len(self.shapes[name]))
            self.leaders[leader] = self.shapes[largest]
        names = (leader, *([self.aliases[leader]] if leader in self.aliases else ()))
        shape = self.leaders[leader]
        for key, name in tensors.items():
            if self._is_decided_by_hand(name, names):
                self.leaders[name] = self.shapes[name]
                continue
            dims = find_dims(shape, self.shapes[name], key)
            if dims is None:
                self._apart.append(name)
                dims = (None,) * len(self.shapes[name])
            self._followers[name] = leader, dims

    def _find_copied(self, name: str) -> str | None:
        """Return the weight with a tensor's name and shape under another prefix (`ema.NAME`)."""
        words, shape = bare_name(name).split("."), self.shapes[name]
        ends = (".".join(words[at:]) for at in range(1, len(words)))
        weights = (self._state.weights[end] for end in ends if end in self._state.weights)
        return next((weight for weight in weights if shape and self.shapes[weight] == shape), None)

    def _is_decided_by_hand(self, name: str, of_weight: Sequence[str]) -> bool:
        """Return whether a user's rule matches the state before any rule matches the weight."""
        for rule in self._by_hand:
            if any(rule.matches(key) for key in of_weight):
                return False
            if rule.matches(name):
                return True
        return False

    def _remove_prefixes(self, recipe: Recipe) -> None:
        """Remove the prefixes that a recipe's names do not have from the names that rules match."""
        names = {name: self.aliases.get(name, name) for name in self.leaders}
        # Each of several models, such as weights and their average, has its own prefix.
        rest = [bare_name(name) for name in names.values()]
        while rest and (prefix := _find_foreign_prefix(rest, recipe.rules)):
            self._prefixes.append(prefix)
            rest = [item for item in rest if not item.startswith(prefix)]
        for name, called in names.items():
            bare = bare_name(called)
            bare = bare.removeprefix(self._find_prefix(bare))
            if bare not in ("", name):
                self.aliases[name] = bare

    def list_models(self) -> dict[str, dict[str, str]]:
        """Return the names of tensors by the names that rules match, for each prefix of a model.

        Names without any of the prefixes belong to the first model.
        """
        models: dict[str, dict[str, str]] = {prefix: {} for prefix in self._prefixes or [""]}
        first = next(iter(models))
        for name in self.leaders:
            bare = bare_name(self.aliases.get(name, name))
            own = self._find_prefix(bare_name(name)) if name in self.aliases else ""
            models[own or first][bare] = name
        return models

    def _find_prefix(self, bare: str) -> str:
        return next((prefix for prefix in self._prefixes if bare.startswith(prefix)), "")

    def spread(self, assignment: Assignment, mesh: DeviceMesh) -> Assignment:
        """Return the assignment of all tensors, given the assignment of the leaders."""
        if not self._followers and not self._whole:
            return assignment
        whole = {name: spec(mesh, "...", ndim=len(self.shapes[name])) for name in self._whole}
        layouts = {name: sharding.layout(self.shapes[name]) for name, sharding in whole.items()}
        assignment = assignment.replace(
            specs={**assignment.specs, **whole},
            layouts={**assignment.layouts, **layouts},
            notes=(*assignment.notes, *self._notes),
        )
        return assignment.follow(self.shapes, self._followers)

    def spread_layouts(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """Return the layouts of all tensors, given the layouts of the leaders."""
        all_layouts = dict(layouts)
        for name, (leader, _) in self._followers.items():
            leader_layout = layouts[leader]
            is_same = self.shapes[name] == leader_layout.shape
            holders = leader_layout.holders or (0,)
            all_layouts[name] = (
                leader_layout
                if is_same
                else _hold_whole(self.shapes[name], holders, leader_layout.slots)
            )
        for name in self._whole:
            slots = max((layout.slots for layout in layouts.values()), default=1)
            all_layouts[name] = _hold_whole(self.shapes[name], tuple(range(slots)), slots)
        return {name: all_layouts[name] for name in self.shapes}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on state that is not sharded like its parameter."""
        return tuple(self._notes)


def find_dims(parameter: Shape, state: Shape, key: str) -> Dims | None:
    """Return the dimensions of its parameter that a tensor of optimizer state has.

    None if shapes are ambiguous. For a square matrix, state whose key contains `row` has the first
    dimension, and state whose key contains `col` the last dimension, as in Adafactor.

    >>> find_dims((8, 4), (8, 4), "exp_avg"), find_dims((8, 4), (4,), "exp_avg_sq_col")
    ((0, 1), (1,))
    >>> find_dims((8, 4), (1, 4), "col_var"), find_dims((8, 4), (), "step")
    ((None, 1), ())
    """
    if state == parameter:
        return tuple(range(len(parameter)))
    if math.prod(state) <= 1 or key == STEP:
        return (None,) * len(state)
    if len(state) == len(parameter):
        pairs = [*zip(parameter, state, strict=True)]
        if all(length in (size, 1) for size, length in pairs):
            return tuple(None if length == 1 else d for d, (_, length) in enumerate(pairs))
        return None
    if len(state) != len(parameter) - 1:
        return None
    candidates = [
        tuple(d for d in range(len(parameter)) if d != left_out)
        for left_out in range(len(parameter))
    ]
    fitting = [dims for dims in candidates if tuple(parameter[d] for d in dims) == state]
    if len(fitting) > 1:
        expected = candidates[-1] if "row" in key else candidates[-2] if "col" in key else None
        fitting = [dims for dims in fitting if dims == expected]
    return fitting[0] if len(fitting) == 1 else None


@lru_cache(maxsize=1024)
def _hold_whole(shape: Shape, holders: tuple[int, ...], slots: int) -> Layout:
    return Layout.whole(shape, holders, slots)


def _find_foreign_prefix(names: Sequence[str], rules: Iterable[Rule]) -> str:
    """Return the prefix of most of a checkpoint's names before a recipe's names."""
    # Rules that begin with `*` match names with any prefix, so they do not show the prefix.
    particular = [rule for rule in rules if not rule.pattern.startswith("*")]
    sample = [bare_name(name) for name in names[:: max(1, len(names) // _SAMPLED_NAMES)]]

    def count(prefix: str) -> int:
        bare = [name.removeprefix(prefix) for name in sample if name.startswith(prefix)]
        return sum(any(rule.matches(name) for rule in particular) for name in bare)

    best, highest = "", count("")
    if highest == len(sample) or not particular:
        return ""
    for prefix in find_common_prefixes(Counter(sample), 4):
        if (matches := count(prefix)) > highest:
            best, highest = prefix, matches
    return best


def _describe(shapes: Mapping[str, Shape], state: TrainingState, apart: Sequence[str]) -> list[str]:
    """Describe the optimizer state that is not sharded like its parameters."""
    notes = []
    if apart:
        first = apart[0]
        notes.append(
            f"{count_text(len(apart), 'tensor')} of optimizer state (first: {first}, "
            f"{list(shapes[first])}) have no dimensions of their parameters: each is whole on "
            "every rank that has some of its parameter"
        )
    for why in dict.fromkeys(why for _, why in state.unplaced):
        names = [name for name, item in state.unplaced if item == why]
        notes.append(
            f"{count_text(len(names), 'tensor')} of optimizer state (first: {names[0]}) are "
            f"whole on every rank, unless a rule is for them: {why}"
        )
    return notes
