"""Optimizer state cut as its parameter is: by rules and a recipe, or by a strategy.

A rule shards a weight. Its optimizer state is sharded likewise, under any name::

    rule  *.up_proj.weight=tp, -          model.up_proj.weight                      (8, 4)   tp, -
                                          optim.state.up_proj.weight.exp_avg        (8, 4)   tp, -
                                          optim.state.up_proj.weight.exp_avg_sq_row (8,)     tp
                                          optim.state.up_proj.weight.step           ()       whole

1. Rules match a weight by its name, without the prefix that programs put before it, and without
   what of it a recipe's names do not have.
2. State of the same shape is cut the same way. State that has some of the dimensions (the rows and
   columns of Adafactor) is cut in those; scalars are whole. Of anything else, such as scales of
   8-bit blocks, every rank that has some of the parameter has all, which a note reports.
3. A rule by hand that matches the name of the state, and comes before those that match the weight,
   decides.
4. Copies of weights under another prefix, such as moving averages, are cut as these.
5. What belongs to no parameter is whole on every rank, unless a rule by hand is for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from reshard.checkpoint.blocks.tensor_columns import shapes_of
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.torch_files.optimizer_states import STEP
from reshard.checkpoint.training.model_sets import bare_name, find_common_prefixes
from reshard.checkpoint.training.state import TrainingState, find_training_state
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.sharding import spec
from reshard.text import count_text

Shape = tuple[int, ...]
# The dimensions of its parameter that the dimensions of a tensor are; None if it is not part of
# one, as that of a mean.
Dims = tuple[int | None, ...]

# The number of names that decide the prefix that a recipe's names lack.
_SAMPLED_NAMES = 256


class StateSharding:
    """The optimizer state of a checkpoint, apart from what rules are asked of.

    Args:
        shapes: of all tensors, by name.
        state: what they are, where the checkpoint has optimizer state.
        by_hand: rules by hand.

    >>> shapes = {"model.up": (8, 4), "optim.state.up.exp_avg": (8, 4), "optim.state.up.step": ()}
    >>> StateSharding(shapes, find_training_state(shapes)).leaders
    {'model.up': (8, 4)}
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        state: TrainingState | None,
        by_hand: Sequence[Rule] = (),
    ) -> None:
        self.shapes = shapes
        self.leaders: dict[str, Shape] = {}
        self.aliases: dict[str, str] = {}
        # The tensor that each tensor is sharded like, and its dimensions among those of that one.
        self._followers: dict[str, tuple[str, Dims]] = {}
        self._whole: list[str] = []
        self._apart: list[str] = []
        self._notes: list[str] = []
        self._prefixes: list[str] = []
        if state is None:
            self.leaders |= shapes
            return
        self._state, self._by_hand = state, by_hand
        for bare, name in state.weights.items():
            self.leaders[name] = shapes[name]
            if bare != name:
                self.aliases[name] = bare
        for parameter, tensors in state.optimizer.items():
            self._add(parameter, tensors)
        for name in (*state.others, *(name for name, _ in state.unplaced)):
            copied = self._find_copied(name)
            if any(rule.matches(name) for rule in by_hand):
                self.leaders[name] = shapes[name]
            elif copied is not None:
                self._followers[name] = copied, tuple(range(len(shapes[name])))
            else:
                self._whole.append(name)
        self._notes += _describe(shapes, state, self._apart)

    def _add(self, parameter: str, tensors: Mapping[str, str]) -> None:
        """Add the optimizer state of a parameter."""
        leader = self._state.weights.get(parameter)
        if leader is None:
            # An optimizer alone: the parameter has the shape that most of its state has.
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
        """Return whether a rule by hand is for the state before one is for the weight."""
        for rule in self._by_hand:
            if any(rule.matches(key) for key in of_weight):
                return False
            if rule.matches(name):
                return True
        return False

    def with_recipe(self, recipe: Recipe | None) -> None:
        """Take the prefix that a recipe's names do not have out of the names that rules match."""
        if recipe is None:
            return
        names = {name: self.aliases.get(name, name) for name in self.leaders}
        # Several models, such as weights and their average, have a prefix each.
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
        """Return the names of tensors by those that rules match, for each prefix of a model.

        Names without any of the prefixes are of the first model.
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

    def spread(self, found: Assignment, mesh: DeviceMesh) -> Assignment:
        """Return the assignment of all tensors, from that of the leaders."""
        if not self._followers and not self._whole:
            return found
        whole = {name: spec(mesh, "...", ndim=len(self.shapes[name])) for name in self._whole}
        layouts = {name: sharding.layout(self.shapes[name]) for name, sharding in whole.items()}
        found = found.replace(
            specs={**found.specs, **whole},
            layouts={**found.layouts, **layouts},
            notes=(*found.notes, *self._notes),
        )
        return found.follow(self.shapes, self._followers)

    def spread_layouts(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """Return the layouts of all tensors, from those of the leaders."""
        found = dict(layouts)
        for name, (leader, _) in self._followers.items():
            own = layouts[leader]
            is_same = self.shapes[name] == own.shape
            holders = own.holders or (0,)
            found[name] = own if is_same else _hold_whole(self.shapes[name], holders, own.slots)
        for name in self._whole:
            slots = max((layout.slots for layout in layouts.values()), default=1)
            found[name] = _hold_whole(self.shapes[name], tuple(range(slots)), slots)
        return {name: found[name] for name in self.shapes}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on state that is not sharded like its parameter."""
        return tuple(self._notes)


def assign_with_state(
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    recipe: Recipe | None,
    mesh: DeviceMesh,
    assign_leaders: Callable[[Mapping[str, Shape], Mapping[str, str]], Assignment],
) -> Assignment:
    """Return the assignment of a checkpoint's tensors; optimizer state follows its parameters.

    Args:
        checkpoint: with or without optimizer state.
        rules: by hand.
        recipe: of the model, if any.
        mesh: the devices.
        assign_leaders: how rules cut tensors of these shapes, with these other names.
    """
    shapes = shapes_of(checkpoint.tensors)
    followers = StateSharding(shapes, find_training_state(checkpoint), rules)
    followers.with_recipe(recipe)
    return followers.spread(assign_leaders(followers.leaders, followers.aliases), mesh)


def find_dims(parameter: Shape, state: Shape, key: str) -> Dims | None:
    """Return the dimensions of its parameter that a tensor of optimizer state has.

    None if shapes do not tell. Of a square matrix, keys that have `row` in them have the first
    dimension, those with `col` the last, as Adafactor's.

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
        if all(own in (size, 1) for size, own in pairs):
            return tuple(None if own == 1 else d for d, (_, own) in enumerate(pairs))
        return None
    if len(state) != len(parameter) - 1:
        return None
    kept = [
        tuple(d for d in range(len(parameter)) if d != left_out)
        for left_out in range(len(parameter))
    ]
    fitting = [dims for dims in kept if tuple(parameter[d] for d in dims) == state]
    if len(fitting) > 1:
        wanted = kept[-1] if "row" in key else kept[-2] if "col" in key else None
        fitting = [dims for dims in fitting if dims == wanted]
    return fitting[0] if len(fitting) == 1 else None


@lru_cache(maxsize=1024)
def _hold_whole(shape: Shape, holders: tuple[int, ...], slots: int) -> Layout:
    return Layout.whole(shape, holders, slots)


def _find_foreign_prefix(names: Sequence[str], rules: Iterable[Rule]) -> str:
    """Return the prefix of a recipe's names in most of a checkpoint's, without wrappers."""
    # Names with numbers are those that a recipe is particular about; a `*` matches any.
    particular = [rule for rule in rules if not rule.pattern.startswith("*")]
    sample = [bare_name(name) for name in names[:: max(1, len(names) // _SAMPLED_NAMES)]]

    def count(prefix: str) -> int:
        bare = [name.removeprefix(prefix) for name in sample if name.startswith(prefix)]
        return sum(any(rule.matches(name) for rule in particular) for name in bare)

    best, most = "", count("")
    if most == len(sample) or not particular:
        return ""
    for prefix in find_common_prefixes(Counter(sample), 4):
        if (found := count(prefix)) > most:
            best, most = prefix, found
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
