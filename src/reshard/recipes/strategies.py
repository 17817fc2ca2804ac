"""Strategies: named policies that give each tensor of a model a layout.

A strategy is a policy under a name. It is a function of the tensors (element type and shape by
name), the number of ranks, and the model's config.json, if any, and returns a
layout for each tensor::

    tensors a 5x1, b 1x1, c 2x1, d 4x1 over 2 ranks

    round_robin   whole, in turn                          rank 0: a c      rank 1: b d
    balanced      whole, largest first to the emptiest    rank 0: a b      rank 1: d c
    sharded       rows of each tensor by ceil             rank 0: 3 1 1 2  rank 1: 2 0 1 2 rows
    recipe        by the recipe that fits config.json, with tp over the ranks

Users add their own with `register_strategy`. Names are case-insensitive.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping

from reshard._records import Record
from reshard._validation import check_int
from reshard.dtypes import DType
from reshard.errors import RecipeError
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.library import choose_recipe, describe_unknown_model
from reshard.recipes.recipe import Recipe
from reshard.text import near_text

Tensors = Mapping[str, tuple[DType, tuple[int, ...]]]
Config = Mapping[str, object]
StrategyFunction = Callable[[Tensors, int, Config | None], dict[str, Layout]]


class Strategy(Record):
    """A layout policy under a name. Call it with the tensors and the number of ranks.

    A third argument is the model's config.json, for strategies that use it.

    Raises, when called:
        UsageError: a number of ranks that is not an integer of at least 1.
        RecipeError: the function omits a tensor, adds a tensor, or gives a layout of another
            shape or number of slots; `recipe` without a config that a recipe fits.

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

    def __call__(
        self, tensors: Tensors, world_size: int, config: Config | None = None
    ) -> dict[str, Layout]:
        world_size = check_int(world_size, "world size", minimum=1)
        layouts = self.function(tensors, world_size, config)
        for name in [*tensors, *layouts]:
            if name not in layouts or name not in tensors:
                wrong = "gives no layout for" if name in tensors else "gives a layout for unknown"
                raise RecipeError(
                    f"strategy {self.name!r} {wrong} tensor {name!r}; it must give a layout for "
                    "each tensor, and no other"
                )
            shape, layout = tensors[name][1], layouts[name]
            if layout.shape != tuple(shape) or layout.slots != world_size:
                raise RecipeError(
                    f"strategy {self.name!r} lays out tensor {name!r} with shape "
                    f"{list(layout.shape)} over {layout.slots} ranks; shape {list(shape)} over "
                    f"{world_size}, one a rank, was expected"
                )
        return layouts


_strategies: dict[str, Strategy] = {}


def register_strategy(name: str, function: StrategyFunction) -> None:
    """Add a strategy under a name, which `strategy` then finds.

    Raises:
        RecipeError: an empty name, or a name of another function.
    """
    added = Strategy(name, function)
    registered = _strategies.setdefault(name.casefold(), added)
    if registered.function is not function:
        raise RecipeError(
            f"the strategy name {name!r} is taken by {registered.function!r}; choose another name"
        )


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, in the order they were added."""
    return tuple(entry.name for entry in _strategies.values())


def strategy(name: str) -> Strategy:
    """Return the strategy of a name; case does not matter.

    Raises:
        RecipeError: an unknown name; the known names are listed.

    >>> strategy("Round_Robin").name
    'round_robin'
    """
    if not isinstance(name, str):
        raise RecipeError(f"a strategy named {name!r}; expected a text")
    result = _strategies.get(name.casefold())
    if result is None:
        raise RecipeError(
            f"unknown strategy {name!r}; {near_text(name, strategy_names())}The known strategies "
            f"are {', '.join(strategy_names())}; add your own with register_strategy"
        )
    return result


def round_robin(
    tensors: Tensors, world_size: int, config: Config | None = None
) -> dict[str, Layout]:
    """Assign whole tensors to ranks 0 to `world_size - 1` in turn, in the order given.

    >>> from reshard.dtypes import dtype
    >>> names = {name: (dtype("int8"), (2,)) for name in "abcd"}
    >>> [layout.holders for layout in round_robin(names, 3).values()]
    [(0,), (1,), (2,), (0,)]
    """
    return {
        name: Layout.whole(shape, [number % world_size], world_size)
        for number, (name, (_, shape)) in enumerate(tensors.items())
    }


def balanced(tensors: Tensors, world_size: int, config: Config | None = None) -> dict[str, Layout]:
    """Assign whole tensors, the largest first, each to the rank with the fewest bytes so far.

    Among equals, the tensor given first and the lowest rank come first. No rank ends up with
    more than 4/3 of the minimum (Graham 1969).

    >>> from reshard.dtypes import dtype
    >>> rows = {"a": 5, "b": 1, "c": 2, "d": 4}
    >>> tensors = {name: (dtype("int8"), (count, 1)) for name, count in rows.items()}
    >>> [layout.holders for layout in balanced(tensors, 2).values()]
    [(0,), (0,), (1,), (1,)]
    """
    sizes = {
        name: math.prod(shape) * dtype.itemsize_bytes for name, (dtype, shape) in tensors.items()
    }
    # A heap of loads and ranks, already in order: its head is the emptiest rank, lowest first.
    loads = [(0, rank) for rank in range(world_size)]
    placed: dict[str, int] = {}
    # The sort is stable, so equal tensors stay in the given order.
    for name in sorted(tensors, key=lambda name: -sizes[name]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], rank))
        placed[name] = rank
    return {
        name: Layout.whole(shape, [placed[name]], world_size)
        for name, (_, shape) in tensors.items()
    }


def sharded(tensors: Tensors, world_size: int, config: Config | None = None) -> dict[str, Layout]:
    """Shard every tensor's first dimension by ceil over all ranks.

    Scalars, and tensors without elements, are on rank 0.

    >>> from reshard.dtypes import dtype
    >>> layout = sharded({"a": (dtype("int8"), (5, 2))}, 4)["a"]
    >>> [layout.local_shape(rank) for rank in range(4)]
    [(2, 2), (2, 2), (1, 2), None]
    """
    return {name: _cut_rows(shape, world_size) for name, (_, shape) in tensors.items()}


def _cut_rows(shape: tuple[int, ...], world_size: int) -> Layout:
    if not shape or 0 in shape:
        return Layout.whole(shape, [0], world_size)
    # As with the cut rule ceil, the last ranks may have fewer rows, or none.
    chunk = -(-shape[0] // world_size)
    rest = shape[1:]
    boxes = [
        (rank, Box((start, *(0 for _ in rest)), (min(start + chunk, shape[0]), *rest)))
        for rank, start in enumerate(range(0, shape[0], chunk))
    ]
    return Layout.from_boxes(shape, boxes, world_size)


def by_recipe(tensors: Tensors, world_size: int, config: Config | None = None) -> dict[str, Layout]:
    """Return the recipe that fits the model's config.json, with `tp` over all ranks."""
    recipe = fitting_recipe(config, tensors)
    shapes = {name: shape for name, (_, shape) in tensors.items()}
    return assign(shapes, DeviceMesh.of(tp=world_size), (), recipe, config).layouts


def fitting_recipe(config: Config | None, names: Iterable[str] = ()) -> Recipe:
    """Return the shipped recipe for a model.

    Raises RecipeError for an unknown model, with the recipe that its tensors' names resemble.

    >>> fitting_recipe({"model_type": "qwen2"}).name
    'qwen2'
    """
    if config is None:
        raise RecipeError(
            "a recipe is chosen by the model's config.json, and there is none next to the "
            "checkpoint; name a recipe"
        )
    result = choose_recipe(config)
    if result is None:
        raise RecipeError(describe_unknown_model(config, names))
    return result


for _name, _function in {
    "round_robin": round_robin,
    # `simple` and `parallel` are the names that strategies of whole checkpoints have.
    "simple": round_robin,
    "balanced": balanced,
    "sharded": sharded,
    "parallel": sharded,
    "recipe": by_recipe,
}.items():
    register_strategy(_name, _function)
