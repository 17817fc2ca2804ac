"""Strategies: whole models placed by a policy under a name."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.dtypes import dtype
from reshard.errors import RecipeError, UnmatchedError, UsageError
from reshard.layout import Layout
from reshard.recipes import strategies
from reshard.recipes.strategies import (
    Config,
    StrategyFunction,
    Tensors,
    register_strategy,
    strategy,
    strategy_names,
)

SHIPPED = ("round_robin", "simple", "balanced", "sharded", "parallel", "recipe")
ONE: Tensors = {"a": (dtype("float32"), (2, 3))}


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_strategies", dict(strategies._strategies))


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=9), st.integers(1, 9))
def test_round_robin_deals_whole_tensors_in_the_order_given(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    # Names in falling order: the order given counts, not the alphabet.
    tensors = {f"t{100 - i}": (dtype("bfloat16"), shape) for i, shape in enumerate(shapes)}
    layouts = strategy("round_robin")(tensors, world_size)
    assert list(layouts) == list(tensors)
    for number, (name, (_, shape)) in enumerate(tensors.items()):
        layout = layouts[name]
        assert (layout.shape, layout.slots) == (shape, world_size)
        for rank in range(world_size):
            expected = shape if rank == number % world_size else None
            assert layout.local_shape(rank) == expected


@pytest.mark.parametrize("name", ["simple", "SIMPLE", "round_robin", "Round_Robin"])
def test_case_does_not_matter(name: str) -> None:
    assert strategy(name)(ONE, 3) == {"a": Layout.whole((2, 3), [0], 3)}


@st.composite
def models(draw: st.DrawFn) -> Tensors:
    """Tensors of a few sizes, so that there are equals, and of any shape."""
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    dtypes = st.sampled_from([dtype("int8"), dtype("float32")])
    tensors = draw(st.lists(st.tuples(dtypes, shape), max_size=12))
    return {f"t{100 - i}": tensor for i, tensor in enumerate(tensors)}


def _bytes(tensors: Tensors, name: str) -> int:
    return math.prod(tensors[name][1]) * tensors[name][0].itemsize_bytes


@given(models(), st.integers(1, 9))
def test_balanced_puts_the_largest_first_on_the_emptiest_rank(
    tensors: Tensors, world_size: int
) -> None:
    layouts = strategy("balanced")(tensors, world_size)
    loads = [0] * world_size
    order = list(tensors)
    for name in sorted(tensors, key=lambda name: (-_bytes(tensors, name), order.index(name))):
        layout = layouts[name]
        (rank,) = layout.holders
        assert layout.local_shape(rank) == tensors[name][1]
        assert rank == loads.index(min(loads))
        loads[rank] += _bytes(tensors, name)
    if tensors:
        largest = max(_bytes(tensors, name) for name in tensors)
        assert max(loads) <= sum(loads) / world_size + largest


@given(models(), st.integers(1, 9))
def test_sharded_cuts_rows_by_ceil_and_leaves_scalars_and_nothing_on_rank_0(
    tensors: Tensors, world_size: int
) -> None:
    layouts = strategy("parallel")(tensors, world_size)
    for name, (_, shape) in tensors.items():
        found = [layouts[name].local_shape(rank) for rank in range(world_size)]
        if not shape or 0 in shape:
            assert found == [shape] + [None] * (world_size - 1)
            continue
        chunk = -(-shape[0] // world_size)
        starts = [min(rank * chunk, shape[0]) for rank in range(world_size + 1)]
        rows = [b - a for a, b in itertools.pairwise(starts)]
        assert found == [(count, *shape[1:]) if count else None for count in rows]
        for rank in range(world_size):
            for box in layouts[name].boxes(rank):
                assert box.start[0] == starts[rank]


def test_recipe_looks_into_the_config() -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": (dtype("int8"), (9, 2)),
        "model.norm.weight": (dtype("int8"), (3,)),
    }
    layouts = strategy("Recipe")(tensors, 4, {"model_type": "qwen2"})
    up = layouts["model.layers.0.mlp.up_proj.weight"]
    assert [up.local_shape(rank) for rank in range(4)] == [(3, 2), (3, 2), (3, 2), (0, 2)]
    assert layouts["model.norm.weight"] is Layout.replicated((3,), 4)
    with pytest.raises(UnmatchedError, match="no rule of the recipe 'qwen2' matches 1 of 1 t"):
        strategy("recipe")({"x": (dtype("int8"), ())}, 4, {"model_type": "qwen2"})
    with pytest.raises(RecipeError, match=r"config\.json, and there is none next to"):
        strategy("recipe")(tensors, 4)
    with pytest.raises(
        RecipeError, match="model type 'x'; by the names of its tensors it resembles"
    ):
        strategy("recipe")(tensors, 4, {"model_type": "x"})
    with pytest.raises(RecipeError, match=r"model type 'x'; .* lists all \d+; give rules"):
        strategy("recipe")({"a": (dtype("int8"), ())}, 4, {"model_type": "x"})


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"'RoundRobin'; did you mean round_robin\? .*, simple, "):
        strategy("RoundRobin")
    with pytest.raises(
        RecipeError, match=f"'xyz'; The known strategies are {', '.join(SHIPPED)}; add"
    ):
        strategy("xyz")


def _everywhere(tensors: Tensors, world_size: int, config: Config | None) -> dict[str, Layout]:
    return {name: Layout.replicated(shape, world_size) for name, (_, shape) in tensors.items()}


def test_users_add_their_own() -> None:
    register_strategy("Everywhere", _everywhere)
    register_strategy("everywhere", _everywhere)
    assert strategy_names() == (*SHIPPED, "Everywhere")
    assert strategy("EVERYWHERE")(ONE, 2) == {"a": Layout.replicated((2, 3), 2)}


@pytest.mark.parametrize("name", ["simple", "Simple"])
def test_a_taken_name_is_refused_and_stays(name: str) -> None:
    with pytest.raises(RecipeError, match=f"the strategy name '{name}' is taken by"):
        register_strategy(name, _everywhere)
    assert strategy("simple")(ONE, 2) == {"a": Layout.whole((2, 3), [0], 2)}


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(RecipeError, match="the strategy name ' ' is empty"):
        register_strategy(" ", _everywhere)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_size_below_1_is_refused(world_size: int) -> None:
    with pytest.raises(UsageError, match=f"world size {world_size} must be at least 1"):
        strategy("simple")(ONE, world_size)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensors, size, config: {}, "'bad' gives no layout for tensor 'a'"),
        (
            lambda tensors, size, config: {name: Layout.replicated((2, 3), size) for name in "ab"},
            "'bad' gives a layout for unknown tensor 'b'",
        ),
        (
            lambda tensors, size, config: {"a": Layout.replicated((3, 2), size)},
            r"lays out tensor 'a' with shape \[3, 2\] over 2 ranks; shape \[2, 3\] over 2",
        ),
        (
            lambda tensors, size, config: {"a": Layout.replicated((2, 3), 1)},
            r"shape \[2, 3\] over 1 ranks; shape \[2, 3\] over 2, one a rank",
        ),
    ],
)
def test_the_layouts_of_a_strategy_are_checked(function: StrategyFunction, message: str) -> None:
    register_strategy("bad", function)
    with pytest.raises(RecipeError, match=message):
        strategy("bad")(ONE, 2)
