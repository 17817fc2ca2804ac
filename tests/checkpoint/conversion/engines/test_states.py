"""From what vLLM's ranks hold back to the model: by recorded layouts, element by element."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.engines.test_conversion import recorded, write_checkpoint
from cli.command_runs import run_here
from reshard import checkpoint
from reshard.checkpoint.conversion.engines.states import LAYOUT_NAME, as_model
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.engines.conversion import plan_for_vllm
from reshard.errors import RecipeError
from reshard.plans.serialization import to_json

# Families whose parameters are copies of the model's tensors.
COPIED = [("llama-8", "tp=2"), ("qwen3-moe", "tp=2"), ("gpt-oss", "tp=2")]


def write_state(tmp_path: Path, family: str, text: str) -> tuple[Path, dict[str, Any]]:
    """What vLLM's ranks hold of a model of random values, and these."""
    layout = recorded(family, text)
    arrays = write_checkpoint(tmp_path / "model", layout)
    run_conversion(plan_for_vllm(tmp_path / "model", tmp_path / "state", layout))
    return tmp_path / "state", arrays


def expect_same(folder: Path, arrays: dict[str, Any]) -> None:
    found = checkpoint.open(folder)
    assert {*found} <= {*arrays}
    for name in found:
        assert np.array_equal(checkpoint.read_tensor(found, name), arrays[name]), name


@pytest.mark.parametrize(("family", "text"), COPIED)
def test_back_to_whole_tensors(tmp_path: Path, family: str, text: str) -> None:
    state, arrays = write_state(tmp_path, family, text)
    report = checkpoint.convert(state, tmp_path / "whole", to="full")
    expect_same(tmp_path / "whole", arrays)
    absent = {*arrays} - {*checkpoint.open(tmp_path / "whole")}
    assert bool(absent) == any("are on no rank" in note for note in report.notes)
    assert absent <= {*recorded(family, text).unread}
    assert not (tmp_path / "whole" / LAYOUT_NAME).exists()


@pytest.mark.parametrize(("family", "text"), COPIED)
def test_to_another_cut(tmp_path: Path, family: str, text: str) -> None:
    state, arrays = write_state(tmp_path, family, text)
    checkpoint.convert(state, tmp_path / "tp", to="tp=3", rules=["*=tp, ..."])
    expect_same(tmp_path / "tp", arrays)


def test_load_takes_the_model_as_a_conversion_does(tmp_path: Path) -> None:
    state, arrays = write_state(tmp_path, "llama-8", "tp=2")
    checkpoint.convert(state, tmp_path / "tp", to="tp=3", rules=["*=tp, ..."])
    cut = checkpoint.open(tmp_path / "tp")
    for rank in range(3):
        found = checkpoint.load(state, to="tp=3", rules=["*=tp, ..."], rank=rank)
        assert {*found} == {*cut} <= {*arrays}
        for name, array in found.items():
            box = cut[name].layout.boxes(rank)[0]
            inside = tuple(map(slice, box.start, box.stop))
            assert np.array_equal(array, arrays[name][inside]), name


def test_by_a_layout_that_is_given(tmp_path: Path) -> None:
    state, arrays = write_state(tmp_path, "llama-8", "tp=2")
    (state / LAYOUT_NAME).rename(tmp_path / "layout.json")
    (state / "reshard.manifest.json").unlink()
    # Without a layout the tensors are those of the ranks.
    checkpoint.convert(state, tmp_path / "ranks", to="full")
    assert all(name.startswith("rank-") for name in checkpoint.open(tmp_path / "ranks"))
    given = tmp_path / "layout.json"
    checkpoint.convert(state, tmp_path / "whole", to="full", source_layout=given)
    expect_same(tmp_path / "whole", arrays)


def test_back_to_a_model_folder(tmp_path: Path) -> None:
    """`--for hf` takes the ranks' state apart too, by the layout beside it or a given one."""
    state, arrays = write_state(tmp_path, "llama-8", "tp=2")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "other", "tie_word_embeddings": False}))
    run_conversion(checkpoint.plan_for_pretrained(state, tmp_path / "hf", config=config))
    expect_same(tmp_path / "hf", arrays)
    assert (tmp_path / "hf" / "config.json").exists()
    assert checkpoint.compare_pretrained(state, tmp_path / "hf", config=config).is_same
    (state / LAYOUT_NAME).rename(tmp_path / "layout.json")
    (state / "reshard.manifest.json").unlink()
    given = ("--source-layout", tmp_path / "layout.json")
    whole = tmp_path / "hf"
    assert run_here("verify", state, whole, "--for", "hf", "--config", config, *given).code == 0
    assert run_here("verify", state, whole, *given).code == 0
    assert run_here("verify", state, whole).code == 1


def test_the_same_format_keeps_the_ranks(tmp_path: Path) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    checkpoint.convert(state, tmp_path / "again", to="full", format="vllm-sharded-state")
    assert {*checkpoint.open(tmp_path / "again")} == {*checkpoint.open(state)}


@pytest.mark.parametrize("family", ["mamba2", "granite-hybrid"])
def test_what_was_computed_is_refused(tmp_path: Path, family: str) -> None:
    state, _ = write_state(tmp_path, family, "tp=2")
    with pytest.raises(RecipeError, match=r"is made of it by to float32, exp, neg"):
        checkpoint.convert(state, tmp_path / "whole", to="full")
    assert not (tmp_path / "whole").exists()


def test_another_layout(tmp_path: Path) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    other = tmp_path / "other.json"
    other.write_text(to_json(recorded("qwen3-moe", "tp=2")))
    with pytest.raises(RecipeError, match="or the layout is of another model"):
        checkpoint.convert(state, tmp_path / "t", to="full", source_layout=other)
    layout = recorded("llama-8", "tp=2")
    found = checkpoint.open(state)
    ranks = {n: tensor for n, tensor in found.tensors.items() if n.startswith("rank-0")}
    with pytest.raises(RecipeError, match="has the files of rank-0"):
        as_model(dataclasses.replace(found, tensors=ranks), layout)
    with pytest.raises(RecipeError, match="format safetensors"):
        as_model(checkpoint.open(tmp_path / "model"), layout)


def test_weights_that_were_repacked(tmp_path: Path) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    layout = recorded("llama-8", "tp=2")
    found = checkpoint.open(state)
    name = next(one for one in found if "qkv_proj.weight" in one)
    other = next(one for one in found.tensors.values() if one.shape != found[name].shape)
    changed = {**found.tensors, name: dataclasses.replace(other, name=name)}
    with pytest.raises(RecipeError, match="changed after loading"):
        as_model(dataclasses.replace(found, tensors=changed), layout)


@pytest.mark.parametrize("content", ["", "{}", "[", "null"])
def test_a_layout_that_is_damaged(tmp_path: Path, content: str) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    damaged = shutil.copytree(state, tmp_path / "damaged")
    (damaged / LAYOUT_NAME).write_text(content)
    with pytest.raises(RecipeError):
        checkpoint.convert(damaged, tmp_path / "t", to="full")
