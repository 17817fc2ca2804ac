"""Where do whole models go, when nobody says tensor by tensor?

A strategy is a policy under a name. It is a function of the tensors (element type and shape by
name) and the number of ranks, and answers with a layout for each tensor::

    round_robin over 3 ranks      a -> 0    b -> 1    c -> 2    d -> 0    e -> 1 ...

Users add their own with `register_strategy`; the names do not care about case.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard.dtypes import DType
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout

Tensors = Mapping[str, tuple[DType, tuple[int, ...]]]
StrategyFunction = Callable[[Tensors, int], dict[str, Layout]]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A layout policy under a name. Call it with the tensors and the number of ranks.

    Raises, when called:
        UsageError: fewer than one rank.
        RecipeError: the function leaves a tensor out, adds one, or gives a layout of another
            shape or number of slots.

    >>> from reshard.dtypes import dtype
    >>> layouts = strategy("simple")({"a": (dtype("float32"), (2, 3))}, 2)
    >>> layouts["a"].holders, layouts["a"].slots
    ((0,), 2)
    """

    name: str
    function: StrategyFunction

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise RecipeError(f"the strategy name {self.name!r} is empty; give it a name")

    def __call__(self, tensors: Tensors, world_size: int) -> dict[str, Layout]:
        if world_size < 1:
            raise UsageError(f"world size {world_size} must be at least 1, the number of ranks")
        layouts = self.function(tensors, world_size)
        for name in [*tensors, *layouts]:
            if name not in layouts or name not in tensors:
                wrong = "gives no layout for" if name in tensors else "gives a layout for unknown"
                raise RecipeError(
                    f"strategy {self.name!r} {wrong} tensor {name!r}; it must give one for each "
                    "tensor it is given, and no other"
                )
            shape, layout = tensors[name][1], layouts[name]
            if layout.shape != tuple(shape) or layout.slots != world_size:
                raise RecipeError(
                    f"strategy {self.name!r} lays out tensor {name!r} with shape "
                    f"{list(layout.shape)} over {layout.slots} slots; shape {list(shape)} over "
                    f"{world_size}, one a rank, was expected"
                )
        return layouts


_strategies: dict[str, Strategy] = {}


def register_strategy(name: str, function: StrategyFunction) -> None:
    """Add a strategy under a name, which `strategy` then finds.

    Raises:
        RecipeError: an empty name, or one that another function has.
    """
    added = Strategy(name, function)
    known = _strategies.setdefault(name.casefold(), added)
    if known.function is not function:
        raise RecipeError(
            f"the strategy name {name!r} is taken by {known.function!r}; choose another name"
        )


def strategy_names() -> tuple[str, ...]:
    """The names of all strategies, in the order they were added."""
    return tuple(known.name for known in _strategies.values())


def strategy(name: str) -> Strategy:
    """The strategy of a name; case does not matter.

    Raises:
        RecipeError: an unknown name; the known ones are listed.

    >>> strategy("Round_Robin").name
    'round_robin'
    """
    found = _strategies.get(name.casefold())
    if found is None:
        near = difflib.get_close_matches(name.casefold(), _strategies)
        hint = (
            f"did you mean {' or '.join(_strategies[key].name for key in near)}? " if near else ""
        )
        raise RecipeError(
            f"unknown strategy {name!r}; {hint}The known strategies are "
            f"{', '.join(strategy_names())}; add your own with register_strategy"
        )
    return found


def round_robin(tensors: Tensors, world_size: int) -> dict[str, Layout]:
    """Whole tensors on ranks 0 to `world_size - 1` in turn, in the order given.

    >>> from reshard.dtypes import dtype
    >>> names = {name: (dtype("int8"), (2,)) for name in "abcd"}
    >>> [layout.holders for layout in round_robin(names, 3).values()]
    [(0,), (1,), (2,), (0,)]
    """
    return {
        name: Layout.whole(shape, [number % world_size], world_size)
        for number, (name, (_, shape)) in enumerate(tensors.items())
    }


register_strategy("round_robin", round_robin)
register_strategy("simple", round_robin)
