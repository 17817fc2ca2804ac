"""Weights of training states, without what trainers add to names."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.pretrained.weights import model_name, take_weights
from reshard.errors import CheckpointError, RecipeError


def saved(folder: Path, *names: str) -> Checkpoint:
    """A checkpoint of tensors of such names; those of steps are scalars."""
    tensors = {
        name: tensor("float32", () if name.endswith("step") else (2, 3), seed)
        for seed, name in enumerate(names)
    }
    write_file(folder / "model.safetensors", tensors)
    return checkpoint.open(folder / "model.safetensors")


def test_optimizer_state_and_others_are_left_out_and_said(tmp_path: Path) -> None:
    opened = saved(
        tmp_path,
        "model.a.w",
        "model.b.w",
        "optim.state.a.w.exp_avg",
        "optim.state.a.w.step",
        "optim.state.b.w.exp_avg",
        "rng_state",
    )
    found = take_weights(opened)
    assert [*found] == ["model.a.w", "model.b.w"]
    assert found.notes[-1] == (
        "left out, since a model folder has weights alone: 3 tensors of optimizer state (first: "
        "optim.state.a.w.exp_avg), 1 other tensor (first: rng_state)"
    )


def test_values_and_items_are_left_out_and_said(tmp_path: Path) -> None:
    opened = saved(tmp_path, "a.w")
    held = Checkpoint(
        opened.folder,
        opened.format,
        opened.tensors,
        opened.files,
        values={"step": 3},
        unread=(("scheduler", "an object"),),
    )
    found = take_weights(held)
    assert (found.values, found.unread) == ({}, ())
    assert "2 values (first: step)" in found.notes[-1]
    assert take_weights(opened).notes == ()


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("module.a.w", "a.w"),
        ("_orig_mod.module.a.w", "a.w"),
        ("a.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w", "a.layers.0.w"),
        ("base_model.model.model.layers.0.w", "model.layers.0.w"),
        ("model.base_model.model.lm_head.w", "model.lm_head.w"),
        ("base_model.model.q_proj.base_layer.weight", "q_proj.weight"),
        ("base_model.model.head.modules_to_save.default.w", "head.w"),
        ("model.module_list.0.w", "model.module_list.0.w"),
    ],
)
def test_wrappers_go(name: str, becomes: str) -> None:
    assert model_name(name) == becomes


def test_the_trained_copy_of_a_module_is_taken(tmp_path: Path) -> None:
    head = "base_model.model.head"
    names = (f"{head}.original_module.w", f"{head}.modules_to_save.default.w")
    opened = saved(tmp_path, *names)
    found = take_weights(opened)
    assert [*found] == ["head.w"]
    assert found["head.w"].binding == opened[names[1]].binding
    alone = take_weights(saved(tmp_path, f"{head}.original_module.w"))
    assert [*alone] == ["head.w"]


def test_extra_states_of_megatron_are_no_weights(tmp_path: Path) -> None:
    assert [*take_weights(saved(tmp_path, "a.w", "a._extra_state"))] == ["a.w"]


def test_what_cannot_be_a_model(tmp_path: Path) -> None:
    adapters = ("q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight")
    with pytest.raises(CheckpointError, match=r"2 tensors of adapters beside.*merge them"):
        take_weights(saved(tmp_path, *adapters))
    with pytest.raises(CheckpointError, match="has no weights"):
        take_weights(saved(tmp_path, "rng_state"))
    with pytest.raises(CheckpointError, match="optimizer state and no weights"):
        take_weights(saved(tmp_path, "optim.state.a.w.exp_avg", "optim.state.a.w.step"))
    with pytest.raises(RecipeError, match=r"would both be 'a\.w'"):
        take_weights(saved(tmp_path, "module.a.w", "a.w"))


def test_weights_of_flax_are_refused(tmp_path: Path) -> None:
    """Their matrices are the other way round, which other names do not mend."""
    opened = saved(tmp_path, "params.model.layers.0.mlp.up_proj.kernel", "params.model.norm.weight")
    with pytest.raises(CheckpointError, match="1 weight of Flax's modules, such as"):
        take_weights(opened)
