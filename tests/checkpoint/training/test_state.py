"""Training state by names: as programs write them, at size, and what cannot be told."""

from __future__ import annotations

import time

import pytest

from reshard.checkpoint.training.model_sets import bare_name
from reshard.checkpoint.training.state import find_training_state

SHAPES = {"up.weight": (4, 2), "up.bias": (4,), "down.weight": (2, 4)}
ADAM = ("exp_avg", "exp_avg_sq", "step")


def state_of(
    weights: str, container: str, parameter: str = "", keys: tuple[str, ...] = ADAM
) -> dict[str, tuple[int, ...]]:
    """Shapes of weights behind a prefix, and of the optimizer state of each."""
    found: dict[str, tuple[int, ...]] = {weights + name: shape for name, shape in SHAPES.items()}
    for name, shape in SHAPES.items():
        for key in keys:
            found[f"{container}state.{parameter}{name}.{key}"] = () if key == "step" else shape
    return found


@pytest.mark.parametrize(
    ("weights", "container", "parameter"),
    [
        ("model.", "optim.", ""),
        ("", "optimizer.", ""),
        ("", "", ""),
        ("model.", "optimizer_0.", ""),
        ("state_dict.", "optimizer_states.0.", ""),
        ("app.model.", "app.optim.", ""),
        ("model.module.", "optim.", ""),
        ("model.", "optim.", "module."),
        ("model._orig_mod.", "optim.", "_orig_mod."),
        ("module.", "optim.", "module."),
        ("net.", "anything.", ""),
    ],
)
def test_weights_and_their_state_are_found_by_names_of_programs(
    weights: str, container: str, parameter: str
) -> None:
    shapes = state_of(weights, container, parameter)
    found = find_training_state(shapes)
    assert found is not None
    assert found.weights == {name: weights + name for name in SHAPES}
    for name in SHAPES:
        expected = {key: f"{container}state.{parameter}{name}.{key}" for key in ADAM}
        assert found.optimizer[name] == expected
    assert (found.others, found.unplaced) == ((), ())
    assert {*found.tensors} == {*shapes}
    assert found.keys == ADAM


def test_bare_names_have_no_wrappers() -> None:
    assert bare_name("_orig_mod.model.module.up.weight") == "model.up.weight"
    assert bare_name("model.modules.up") == "model.modules.up"


def test_masters_have_one_key() -> None:
    shapes = state_of("", "optimizer.", keys=("fp32_param", "exp_avg"))
    found = find_training_state(shapes)
    assert found is not None
    assert found.tensors["optimizer.state.up.bias.fp32_param"] == ("up.bias", "master")


def test_keys_may_have_dots_after_a_known_weight() -> None:
    shapes = state_of("model.", "optim.") | {"optim.state.up.weight.block_0.factors.1": (2, 2)}
    found = find_training_state(shapes)
    assert found is not None
    assert found.optimizer["up.weight"]["block_0.factors.1"].endswith("factors.1")


def test_an_optimizer_alone_has_parameters_by_its_keys() -> None:
    shapes = {
        name: shape for name, shape in state_of("model.", "optim.").items() if "optim" in name
    }
    found = find_training_state(shapes)
    assert found is not None
    assert not found.weights
    assert [*found.optimizer] == [*SHAPES]


@pytest.mark.parametrize(
    "shapes",
    [
        {"model.up": (4, 2), "model.step": ()},
        {"layers.0.state.proj": (4, 2), "layers.0.norm": (4,)},
        {},
    ],
)
def test_a_model_alone_has_no_training_state(shapes: dict[str, tuple[int, ...]]) -> None:
    assert find_training_state(shapes) is None


def test_modules_named_state_are_weights() -> None:
    shapes = state_of("model.", "optim.") | {"model.mamba.state.proj": (4, 2)}
    found = find_training_state(shapes)
    assert found is not None
    assert found.weights["mamba.state.proj"] == "model.mamba.state.proj"


def test_random_states_and_other_trees_are_others() -> None:
    shapes = state_of("", "optimizer.") | {"rng_state": (5056,), "lr_scheduler.base": (1,)}
    found = find_training_state(shapes)
    assert found is not None
    assert found.others == ("rng_state", "lr_scheduler.base")


def numbered(order: list[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of a plain optimizer's state, in the order of its parameters."""
    shapes = {f"model.{name}": shape for name, shape in SHAPES.items()}
    for number, name in enumerate(order):
        shapes[f"optimizer.state.{number}.exp_avg"] = SHAPES[name]
        shapes[f"optimizer.state.{number}.step"] = ()
    return shapes


def test_numbers_are_parameters_in_order() -> None:
    found = find_training_state(numbered([*SHAPES]))
    assert found is not None
    assert found.numbers == {"optimizer": tuple(SHAPES)}
    assert found.optimizer["down.weight"]["step"] == "optimizer.state.2.step"


def test_numbers_are_given_group_by_group() -> None:
    shapes = numbered(["up.weight", "down.weight", "up.bias"])
    found = find_training_state(shapes, groups={"optimizer": [[0, 1], [2]]})
    assert found is not None
    assert found.numbers == {"optimizer": ("up.weight", "down.weight", "up.bias")}
    # In one group they are not in the weights' order.
    found = find_training_state(shapes)
    assert found is not None
    assert len(found.unplaced) == 6
    assert "the shapes of the weights" in found.unplaced[0][1]


def test_numbers_that_fit_several_weights_are_not_guessed() -> None:
    shapes = {"model.a": (4,), "model.b": (4,), "optimizer.state.0.exp_avg": (4,)}
    found = find_training_state(shapes)
    assert found is not None
    assert [name for name, _ in found.unplaced] == ["optimizer.state.0.exp_avg"]


def test_digit_names_are_distinguished_from_numbers_by_path() -> None:
    shapes = {"model.0.weight": (4,), "optim.state.0.weight.exp_avg": (4,)}
    for paths in ({}, {"optim.state.0.weight.exp_avg": ("optim", "state", "0.weight", "exp_avg")}):
        found = find_training_state(shapes, paths=paths)
        assert found is not None
        assert found.optimizer["0.weight"] == {"exp_avg": "optim.state.0.weight.exp_avg"}


def test_a_hundred_thousand_names_are_quick() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(20_000):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        shapes[f"model.{name}"] = (4, 4)
        for key in ("exp_avg", "exp_avg_sq", "step", "master"):
            shapes[f"optim.state.{name}.{key}"] = (4, 4)
    start = time.process_time()
    found = find_training_state(shapes)
    assert found is not None
    assert len(found.tensors) == 100_000
    assert time.process_time() - start < 5
