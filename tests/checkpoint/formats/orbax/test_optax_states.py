"""Optimizer states of Optax, as Orbax saved them, and as they are placed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats.orbax.optax_states import name_states, place_states
from reshard.checkpoint.training.state import find_training_state
from reshard.dtypes import dtype

SEVEN = Tensor(dtype("float32"), np.array(7, dtype=np.float32).view(np.uint32))


def test_adamw_after_a_clipping_is_named(saved: Path) -> None:
    found = checkpoint.open(saved / "manager")
    parameters = ("dense.bias", "dense.kernel")
    keys = ("exp_avg", "exp_avg_sq", "step")
    state = {f"optimizer.state.{name}.{key}" for name in parameters for key in keys}
    assert {*found} == state | {"params.dense.bias", "params.dense.kernel", "step"}
    assert found.paths["optimizer.state.dense.bias.exp_avg"] == (
        *("opt_state", 1, 0, "mu", "dense", "bias"),
    )
    assert checkpoint.read_tensor(found, "optimizer.state.dense.bias.step") == 1
    training = find_training_state(found)
    assert training is not None
    assert dict(training.weights) == {name: f"params.{name}" for name in parameters}
    assert {*training.optimizer["dense.kernel"]} == {*keys}


def test_it_goes_back_to_where_it_was(saved: Path, tmp_path: Path) -> None:
    rules = ["*kernel*=a, -", "*=..."]
    checkpoint.convert(saved / "manager", tmp_path / "t", to="a=2", rules=rules, format="orbax")
    trees = [
        json.loads((folder / "_METADATA").read_text())["tree_metadata"]
        for folder in (saved / "manager" / "10" / "default", tmp_path / "t")
    ]
    assert trees[0].keys() == trees[1].keys()
    assert checkpoint.compare(saved / "manager", tmp_path / "t").is_same


def test_state_of_other_programs_is_placed_as_adamw(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    arrays = {"up.weight": tensor("float32", (4, 2), 1)}
    for key in ("exp_avg", "exp_avg_sq"):
        arrays[f"optimizer.state.up.weight.{key}"] = tensor("float32", (4, 2), 2)
    arrays["optimizer.state.up.weight.step"] = SEVEN
    write_file(tmp_path / "s" / "model.safetensors", arrays)
    checkpoint.convert(tmp_path / "s", tmp_path / "t", to="full", format="orbax")
    tree = json.loads((tmp_path / "t" / "_METADATA").read_text())["tree_metadata"]
    assert {*tree} == {
        "('params', 'up', 'weight')",
        "('opt_state', '0', 'mu', 'up', 'weight')",
        "('opt_state', '0', 'nu', 'up', 'weight')",
        "('opt_state', '0', 'count')",
        "('opt_state', '1')",
        "('opt_state', '2')",
    }
    found = checkpoint.open(tmp_path / "t")
    for key in ("exp_avg", "exp_avg_sq", "step"):
        name = f"optimizer.state.up.weight.{key}"
        source = checkpoint.open(tmp_path / "s")
        read = checkpoint.read_tensor(found, name)
        assert np.array_equal(read, checkpoint.read_tensor(source, name))


@pytest.mark.parametrize(
    "exclude",
    ["*.step", "*.a.exp_avg", "*.a.exp_avg_sq", "*.a.step", "*.exp_avg", "*[ab]", "*.[ab].[se]*"],
)
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_state_in_part_keeps_its_names(format: str, exclude: str, tmp_path: Path) -> None:
    """Also state that was read from Orbax, with a path of its own."""
    (tmp_path / "s").mkdir()
    arrays = {}
    for number, name in enumerate("ab"):
        arrays[name] = tensor("float32", (4, 2), number)
        for key in ("exp_avg", "exp_avg_sq"):
            arrays[f"optimizer.state.{name}.{key}"] = tensor("float32", (4, 2), 2 + number)
        arrays[f"optimizer.state.{name}.step"] = SEVEN
    write_file(tmp_path / "s" / "model.safetensors", arrays)
    source = tmp_path / "s"
    if format == "orbax":
        checkpoint.convert(source, tmp_path / "o", to="full", format="orbax")
        source = tmp_path / "o"
    options: dict[str, Any] = {"to": "full", "format": "orbax", "exclude": [exclude]}
    conversion = checkpoint.plan_conversion(source, tmp_path / "t", **options)
    checkpoint.run_conversion(conversion)
    # Steps of several parameters are one count, which is an integer.
    moments = [n for n in conversion.write_plan.tensors if "exp_avg" in n]
    for _ in range(2):
        found = checkpoint.open(tmp_path / "t")
        assert {name for name in found.tensors if ".exp_avg" in name} == {*moments}
        for name in moments:
            assert checkpoint.read_tensor(found, name).tobytes() == arrays[name].bits.tobytes()
        (tmp_path / "t" / "reshard.manifest.json").unlink(missing_ok=True)


def test_a_tree_directly_in_the_optimizer_is_no_state() -> None:
    """The node above such a tree names its key, as `mu` does, and `opt_state` names none."""
    paths = [("params", "w"), ("opt_state", "w")]
    assert name_states(paths) == {path: (".".join(path),) for path in paths}


def test_momentum_is_named_and_layers_of_like_names_are_not() -> None:
    weights = [("params", "a", "w"), ("params", "b", "w")]
    momentum = [("opt", 0, "trace", *path[1:]) for path in weights]
    found = name_states([*weights, *momentum])
    assert found[momentum[0]] == ("optimizer.state.a.w.momentum_buffer",)
    # A layer that is called `mu` has no `nu` beside it.
    assert name_states([("params", "mu", "w")]) == {("params", "mu", "w"): ("params.mu.w",)}
    other = ("params", "trace", "x")
    assert name_states([*weights, other])[other] == ("params.trace.x",)


def test_states_of_a_second_optimizer_get_other_keys() -> None:
    nodes = [("mu", "w"), ("nu", "w"), ("count",)]
    paths = [("params", "w"), *((opt, *node) for opt in ("one", "two") for node in nodes)]
    found = name_states(paths)
    names = [name for one in found.values() for name in one]
    assert len(names) == len(set(names)) == 7
    assert found["one", "mu", "w"] == ("optimizer.state.w.exp_avg",)
    assert found["two", "mu", "w"] == ("optimizer.state.w.exp_avg_2",)
    # A parameter has one number of steps.
    assert found["two", "count"] == ("two.count",)


def keys_of(*paths: tuple[str | int, ...]) -> dict[str, str]:
    """The key of what each node of states keeps of the weight `a.w`, by the node's path."""
    weight = ("params", "a", "w")
    found = name_states([weight, *paths])
    assert found.pop(weight) == ("params.a.w",)
    prefix = "optimizer.state.a.w."
    return {
        ".".join(map(str, path)).removesuffix(".a.w"): name.removeprefix(prefix)
        for path, (name,) in found.items()
        if name.startswith(prefix)
    }


def test_states_of_other_optimizers_get_the_keys_of_pytorch() -> None:
    leaf = ("a", "w")
    count = ("opt_state", 0, "count")

    def keys(*nodes: str, counted: bool = False) -> dict[str, str]:
        found = keys_of(*(("opt_state", 0, n, *leaf) for n in nodes), *([count] if counted else ()))
        return {name.rpartition(".")[2]: key for name, key in found.items()}

    assert keys("mu", counted=True) == {"mu": "exp_avg", "count": "step"}
    assert keys("nu") == {"nu": "square_avg"}
    assert keys("mu", "nu") == {"mu": "grad_avg", "nu": "square_avg"}
    assert keys("sum_of_squares") == {"sum_of_squares": "sum"}
    assert keys("e_g", "e_x") == {"e_g": "square_avg", "e_x": "acc_delta"}
    factored = ("v_row", "v_col", "v")
    assert keys(*factored) == {node: node for node in factored}
    # The largest of corrected moments is not what PyTorch calls `max_exp_avg_sq`.
    assert keys("mu", "nu", "nu_max", counted=True)["nu_max"] == "nu_max"


def test_muon_is_recognised_by_its_coefficients() -> None:
    state = ("opt_state", "inner_states", "muon", "inner_state", 0)
    found = keys_of((*state, "mu", "a", "w"), (*state, "ns_coeffs"))
    assert found == {"opt_state.inner_states.muon.inner_state.0.mu": "momentum_buffer"}


def test_trees_like_that_of_the_parameters_are_state() -> None:
    """Gradients that are summed up, averages: none of them is taken for the weights."""
    found = keys_of(
        ("opt_state", "acc_grads", "a", "w"),
        ("opt_state", "inner_opt_state", 0, "mu", "a", "w"),
        ("opt_state", "inner_opt_state", 0, "nu", "a", "w"),
        ("opt_state", "inner_opt_state", 0, "count"),
        ("opt_state", 1, "ema", "a", "w"),
        ("opt_state", "hyperparams", "learning_rate"),
        ("opt_state", "mini_step"),
    )
    assert [*found.values()] == ["acc_grads", "exp_avg", "exp_avg_sq", "step", "ema"]


def test_states_of_variables_of_flax_are_named() -> None:
    """Each has its value one level further down; weights stand under `model`."""
    leaf = ("up", "kernel", "value")
    state = ("optimizer", "opt_state", "0")
    paths = [("model", *leaf), *((*state, node, *leaf) for node in ("mu", "nu"))]
    found = name_states([*paths, (*state, "count", "value"), ("optimizer", "step", "value")])
    assert found[paths[1]] == ("optimizer.state.up.kernel.value.exp_avg",)
    assert found[*state, "count", "value"] == ("optimizer.state.up.kernel.value.step",)
    assert found["optimizer", "step", "value"] == ("optimizer.step.value",)


def test_other_optimizers_of_other_programs_are_placed() -> None:
    def place(*keys: str) -> tuple[dict[str, tuple[str | int, ...]], list[int]]:
        names = ["w", *(f"optimizer.state.w.{key}" for key in keys)]
        found, empty = place_states(names, [], {})
        assert found.pop("w") == ("params", "w")
        by_key = {name.rpartition(".")[2]: path for name, path in found.items()}
        return by_key, [number for _, number in empty]

    def at(number: int, node: str) -> tuple[str | int, ...]:
        return ("opt_state", number, node, "w")

    assert place("exp_avg") == ({"exp_avg": at(0, "mu")}, [1, 2])
    assert place("momentum_buffer") == ({"momentum_buffer": at(0, "trace")}, [1])
    assert place("sum") == ({"sum": at(0, "sum_of_squares")}, [1])
    assert place("square_avg") == ({"square_avg": at(0, "nu")}, [1, 2])
    both = {"square_avg": at(1, "e_g"), "acc_delta": at(1, "e_x")}
    assert place("square_avg", "acc_delta") == (both, [0, 2])
    # What Optax has not stands beside.
    found, _ = place("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert found["max_exp_avg_sq"] == ("optimizer", "state", "w", "max_exp_avg_sq")


def test_paths_of_orbax_are_kept() -> None:
    paths = {"params.w": ("params", "w"), "optimizer.state.w.exp_avg": ("opt", 3, "mu", "w")}
    assert place_states(paths, [], paths) == (paths, [])


def test_steps_of_many_parameters_are_placed_in_linear_time() -> None:
    """They share a count, which is read under all of their names."""

    class CountedName(str):
        __slots__ = ()
        compared = 0

        def __eq__(self, other: object) -> bool:
            CountedName.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    parameters = [f"layers.{number}.weight" for number in range(300)]
    steps = [CountedName(f"optimizer.state.{name}.step") for name in parameters]
    means = [f"optimizer.state.{name}.exp_avg" for name in parameters]
    found, _ = place_states([*parameters, *means, *steps], [], {})
    assert {found[step] for step in steps} == {("opt_state", 0, "count")}
    assert CountedName.compared < 20 * len(steps)
