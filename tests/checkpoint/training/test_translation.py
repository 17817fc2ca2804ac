"""Training state in the names and kinds of other programs: weights, masters, steps, groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, write_file
from checkpoint.checkpoint_files import tensor as random_tensor
from reshard import checkpoint
from reshard.checkpoint.changes.planning import ChangedElements
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.training.state import training_style
from reshard.checkpoint.training.translation import translate
from reshard.errors import RecipeError, UsageError

torch = pytest.importorskip("torch")

dcp = pytest.importorskip("torch.distributed.checkpoint")
state_dicts = pytest.importorskip("torch.distributed.checkpoint.state_dict")

# Of a save by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def opened(
    folder: Path, types: Mapping[str, tuple[str, tuple[int, ...]]], **more: Any
) -> Checkpoint:
    """A checkpoint of random tensors and seven steps, with what its format has no place for."""

    folder.mkdir()
    tensors = {name: random_tensor(kind, shape, 3) for name, (kind, shape) in types.items()}
    for name in [name for name in types if name.endswith(".step")]:
        seven = np.array(7, dtype=np.float32).view(np.uint32)
        tensors[name] = Tensor(tensors[name].dtype, seven)
    write_file(folder / "model.safetensors", tensors)
    return dataclasses.replace(checkpoint.open(folder), **more)


def mixed(weight: str, *, masters: bool, steps: bool = True) -> dict[str, Any]:
    """Canonical names of one parameter and a buffer."""
    found: dict[str, Any] = {"up.weight": (weight, (4, 2)), "buffer": (weight, (3,))}
    for key in ("exp_avg", "exp_avg_sq", *(["master"] if masters else [])):
        found[f"optimizer.state.up.weight.{key}"] = ("float32", (4, 2))
    if steps:
        found["optimizer.state.up.weight.step"] = ("float32", ())
    return found


GROUPS = [{"params": ["up.weight"], "lr": 0.25, "betas": [0.9, 0.99], "step": 7}]


def to(style: str, source: Checkpoint, *, has_items: bool = True) -> ChangedElements:
    found = training_style(style)
    return translate(source, found, has_items=has_items, keeps_items=has_items)


def test_masters_become_the_weights_if_there_are_no_others(tmp_path: Path) -> None:
    source = opened(tmp_path / "a", mixed("bfloat16", masters=True))
    found = to("fsdp2", source)
    tensors = found.checkpoint.tensors
    assert {*tensors} == {
        "model.up.weight",
        "model.buffer",
        *(f"optim.state.up.weight.{key}" for key in ("exp_avg", "exp_avg_sq", "step")),
    }
    assert tensors["model.up.weight"].dtype.name == "float32"
    master = source["optimizer.state.up.weight.master"]
    assert tensors["model.up.weight"].binding == master.binding
    assert tensors["model.buffer"].dtype.name == "bfloat16"
    assert any("32-bit weights of 1 parameter" in note for note in found.checkpoint.notes)


def test_missing_masters_are_made_from_the_weights(tmp_path: Path) -> None:
    wide = to("reshard", opened(tmp_path / "wide", mixed("float32", masters=False)))
    name = "optimizer.state.up.weight.master"
    assert wide.checkpoint[name].binding == wide.checkpoint["up.weight"].binding
    assert not wide.computed
    narrow = to("reshard", opened(tmp_path / "narrow", mixed("bfloat16", masters=False)))
    assert narrow.checkpoint["up.weight"].dtype.name == "bfloat16"
    assert narrow.computed[name].dtype.name == "float32"
    assert any("made of narrower ones" in note for note in narrow.checkpoint.notes)
    # A buffer is not trained.
    assert "optimizer.state.buffer.master" not in narrow.checkpoint.tensors


def test_steps_of_groups_become_tensors(tmp_path: Path) -> None:
    source = opened(
        tmp_path / "a",
        mixed("float32", masters=True, steps=False),
        values={"optimizer.param_groups": GROUPS},
    )
    found = to("fsdp2", source)
    assert found.computed["optim.state.up.weight.step"].number == 7  # type: ignore[attr-defined]
    assert found.checkpoint["optim.state.up.weight.step"].dtype.name == "float32"
    made = to("optax", source)
    assert made.checkpoint["optimizer.state.up.weight.step"].dtype.name == "int32"
    assert any("optax has no groups" in note and "lr" in note for note in made.checkpoint.notes)


def test_missing_state_is_reported(tmp_path: Path) -> None:
    found = to("fsdp2", opened(tmp_path / "a", mixed("float32", masters=True, steps=False)))
    assert any("no number of steps for 1 parameter" in note for note in found.checkpoint.notes)
    assert any("no groups of hyper-parameters" in note for note in found.checkpoint.notes)
    # RMSProp, Adagrad and Adadelta of Optax count no steps; PyTorch's ask for a number.
    for keys, is_said in ((["sum"], True), (["square_avg"], True), (["momentum_buffer"], False)):
        names = ["up.weight", *(f"optimizer.state.up.weight.{key}" for key in keys)]
        source = opened(tmp_path / keys[0], dict.fromkeys(names, ("float32", (4, 2))))
        notes = to("fsdp2", source).checkpoint.notes
        assert any("no number of steps for 1 parameter" in note for note in notes) == is_said
    plain = opened(tmp_path / "b", {"up.weight": ("float32", (4, 2))})
    with pytest.raises(UsageError, match="no optimizer state"):
        to("fsdp2", plain)


def test_groups_have_all_that_pytorch_asks_for(tmp_path: Path) -> None:
    source = opened(
        tmp_path / "a",
        mixed("float32", masters=True),
        values={"optimizer.param_groups": GROUPS, "iteration": 4},
    )
    found = to("fsdp2", source).checkpoint
    values = found.values
    model = torch.nn.Linear(1, 1)
    (asked,) = torch.optim.AdamW(model.parameters()).param_groups
    assert {f"optim.param_groups.0.{key}" for key in asked} <= {*values}
    assert values["optim.param_groups.0.lr"] == 0.25
    assert values["optim.param_groups.0.betas"] == (0.9, 0.99)
    # AdamW sets it when it loads; an Adam would become AdamW by it.
    assert values["optim.param_groups.0.decoupled_weight_decay"] is False
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        optimizer = kind(model.parameters())
        (expected,) = optimizer.param_groups
        is_decoupled = expected["decoupled_weight_decay"]
        group = {**asked, "decoupled_weight_decay": False, "params": [0, 1]}
        optimizer.load_state_dict({"state": {}, "param_groups": [group]})
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is is_decoupled
    assert found.paths["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")
    assert values["iteration"] == 4


@pytest.mark.parametrize("is_flat", [False, True])
def test_items_of_pytorch_become_groups(tmp_path: Path, is_flat: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[1].weight], "weight_decay": 0.5},
            {"params": [model[0].bias, model[1].bias], "lr": 0.125},
        ]
    )
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    options = state_dicts.StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, state = state_dicts.get_state_dict(model, optimizer, options=options)
    saved = {"model": weights, "optim": state, "epoch": 5, "name": "a run"}
    dcp.save(saved, checkpoint_id=tmp_path / "a", no_dist=True)
    found = to("reshard", checkpoint.open(tmp_path / "a"), has_items=False).checkpoint
    groups = found.values["optimizer.param_groups"]
    assert sorted(sorted(group["params"]) for group in groups) == [
        ["0.bias", "1.bias"],
        ["0.weight", "1.weight"],
    ]
    assert {group["lr"] for group in groups} == {0.125, 0.001}
    assert {group["weight_decay"] for group in groups} == {0.5, 0.01}
    assert (found.values["epoch"], found.values["name"]) == (5, "a run")
    assert not found.items


def test_objects_in_items_are_not_read(tmp_path: Path) -> None:
    model = {"model": {"up": torch.ones(2)}, "optim": {"state": {"up": {"exp_avg": torch.ones(2)}}}}
    dcp.save({**model, "path": Path("x")}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = to("reshard", checkpoint.open(tmp_path / "a"), has_items=False)
    assert not found.checkpoint.values
    assert any("not in the target: path" in note for note in found.checkpoint.notes)


def test_casts_are_of_weights_alone(tmp_path: Path) -> None:
    source = opened(tmp_path / "a", mixed("float32", masters=False))
    (tmp_path / "a/config.json").write_text('{"torch_dtype": "bfloat16", "model_type": "x"}')
    made = tmp_path / "made"
    checkpoint.convert(source, made, to="full", dtype="bf16", training="reshard")
    found = checkpoint.open(made)
    types = {name: tensor.dtype.name for name, tensor in found.tensors.items()}
    assert types.pop("up.weight") == types.pop("buffer") == "bfloat16"
    assert {*types.values()} == {"float32"}
    master = checkpoint.read_tensor(found, "optimizer.state.up.weight.master")
    np.testing.assert_array_equal(master, checkpoint.read_tensor(source, "up.weight"))


def test_made_state_is_not_renamed_at_once(tmp_path: Path) -> None:
    source = opened(
        tmp_path / "a",
        mixed("bfloat16", masters=False),
    )
    with pytest.raises(UsageError, match="convert in two steps"):
        checkpoint.convert(
            source,
            tmp_path / "made",
            to="full",
            training="reshard",
            target_names={"theirs": "up.weight"},
        )


def test_state_of_two_models_is_not_guessed(tmp_path: Path) -> None:
    shape, names = ("float32", (4, 2)), ("up.weight", "down.weight")
    two = {f"{prefix}.{name}": shape for prefix in ("net", "net_ema") for name in names}
    state = {f"optim.state.{name}.exp_avg": shape for name in names}
    both = opened(tmp_path / "both", {**two, **state})
    says = r"2 models .*net \(2 tensors\), net_ema \(2 tensors\).*--exclude 'net_ema\.\*'"
    with pytest.raises(RecipeError, match=says):
        to("fsdp2", both)
    kept = to("fsdp2", checkpoint.select(both, exclude=["net_ema.*"])).checkpoint
    assert kept.tensors.keys() == {*(f"model.{name}" for name in names), *state}
    # An optimizer of both has the names of both.
    state = {f"optim.state.{name}.exp_avg": shape for name in two}
    assert len(to("fsdp2", opened(tmp_path / "one", {**two, **state})).checkpoint) == 8


def test_an_unknown_style_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'fsdp9' keeps it; known are fsdp2"):
        checkpoint.ConversionRequest(to="full", training="fsdp9")


def test_masters_alone_are_the_weights(tmp_path: Path) -> None:
    types = mixed("bfloat16", masters=True)
    del types["up.weight"]
    source = opened(tmp_path / "a", types)
    master = source["optimizer.state.up.weight.master"].binding
    assert to("fsdp2", source).checkpoint["model.up.weight"].binding == master
    found = to("reshard", source).checkpoint
    assert found["up.weight"].binding == found["optimizer.state.up.weight.master"].binding == master


def test_groups_of_megatron_differ_by_weight_decay(tmp_path: Path) -> None:
    source = opened(tmp_path / "a", mixed("float32", masters=True))
    both = [
        {"params": ["up.weight"], "lr": 0.1, "weight_decay": 0.5},
        {"params": [], "lr": 0.1, "weight_decay": 0.0},
    ]
    for groups, expected in ((both, [1.0, 0.0]), (both[:1], [None])):
        given = dataclasses.replace(source, values={"optimizer.param_groups": groups})
        found = to("megatron", given).checkpoint.values["optimizer.param_groups"]
        assert [group.get("wd_mult") for group in found] == expected
        assert "step" in found[0]


def two_parameters() -> dict[str, Any]:
    """Two parameters with moments, and one that no optimizer has."""
    found: dict[str, Any] = {"frozen": ("float32", (3,))}
    for name in ("up", "down"):
        found[name] = ("float32", (4, 2))
        found |= {
            f"optimizer.state.{name}.{key}": ("float32", (4, 2))
            for key in ("exp_avg", "exp_avg_sq")
        }
        found[f"optimizer.state.{name}.step"] = ("float32", ())
    return found


@pytest.mark.parametrize("style", ["fsdp2", "torch", "megatron", "reshard"])
def test_a_parameter_without_a_group_gets_a_group(tmp_path: Path, style: str) -> None:
    groups = [{"params": ["up"], "lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}]
    groups[0]["wd_mult"] = 1.0
    source = opened(tmp_path / "a", two_parameters(), values={"optimizer.param_groups": groups})
    found = to(style, source)
    assert any("(first: down) are in no group" in note for note in found.checkpoint.notes)
    assert not any("PyTorch's defaults" in note for note in found.checkpoint.notes)
    values = found.checkpoint.values
    if style == "fsdp2":
        assert values["optim.param_groups.1.params"] == ["down"]
        assert values["optim.param_groups.1.lr"] == 0.5
    else:
        first, second = values["optimizer.param_groups"]
        assert second["params"] == ([1] if style == "torch" else ["down"])
        if style == "megatron":
            # Its mark of decay is of the first group alone; both kinds are written for the second.
            assert first.pop("wd_mult") == 1
        assert {**first, "params": 0} == {**second, "params": 0}


@pytest.mark.parametrize("style", ["fsdp2", "torch"])
def test_hyper_parameters_that_are_made_up_are_noted(tmp_path: Path, style: str) -> None:
    groups = [{"params": ["up", "down"], "lr": 0.5}]
    source = opened(tmp_path / "a", two_parameters(), values={"optimizer.param_groups": groups})
    (note,) = [note for note in to(style, source).checkpoint.notes if "PyTorch's defaults" in note]
    assert "no betas, eps, weight_decay:" in note
    assert "eps 1e-08" in note


def test_megatron_gets_missing_groups(tmp_path: Path) -> None:
    # Its optimizer looks its groups up, and does not load without them.
    found = to("megatron", opened(tmp_path / "a", two_parameters()))
    (group,) = found.checkpoint.values["optimizer.param_groups"]
    assert group["params"] == ["up", "down"] or group["params"] == ["down", "up"]
    assert group["step"] == 7
    assert any("no groups of hyper-parameters" in note for note in found.checkpoint.notes)


@pytest.mark.parametrize("style", ["fsdp2", "torch", "megatron", "reshard", "optax"])
def test_a_parameter_of_a_group_without_state_is_noted(tmp_path: Path, style: str) -> None:
    groups = [{**GROUPS[0], "params": ["up", "down", "frozen"]}]
    source = opened(tmp_path / "a", two_parameters(), values={"optimizer.param_groups": groups})
    assert any(
        "(first: frozen) are in a group" in note for note in to(style, source).checkpoint.notes
    )


def test_unknown_numbers_stay(tmp_path: Path) -> None:
    # Three weights of one shape and two numbers: the group and the state keep them.
    types = dict.fromkeys(("model.a", "model.b", "model.c"), ("float32", (2,)))
    types |= {f"optimizer.state.{n}.exp_avg": ("float32", (2,)) for n in range(2)}
    groups = [{"params": [0, 1], "lr": 0.5}]
    source = opened(tmp_path / "a", types, values={"optimizer.param_groups": groups})
    found = to("torch", source).checkpoint
    assert found.values["optimizer.param_groups"][0]["params"] == [0, 1]
    assert "optimizer.state.1.exp_avg" in found.tensors
