"""Checkpoints by other names, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import run_here, write_model

SHAPES = {
    "self_attn.q_proj": (16, 8),
    "self_attn.k_proj": (8, 8),
    "self_attn.v_proj": (8, 8),
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
}
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


@pytest.fixture
def model(folder: Path) -> Path:
    random = np.random.default_rng(0)
    path = write_model(
        folder / "named",
        **{
            f"model.layers.0.{name}.weight": random.normal(size=shape).astype(np.float32)
            for name, shape in SHAPES.items()
        },
    )
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_there_and_back(model: Path) -> None:
    recipe = ("--recipe", "auto", "--allow", "incomplete", "--quiet")
    names = ("--source-names", "megatron", "--target-names", "vllm")
    ways = [
        ("convert", "named", "a", "--to", "tp=2", "--target-names", "megatron", *recipe),
        ("convert", "a", "b", "--to", "full", *names, *recipe),
        ("verify", "named", "a", "--right-names", "megatron"),
        ("verify", "b", "a", "--left-names", "vllm", "--right-names", "megatron"),
        ("verify", "b", "named", "--left-names", "vllm", "--recipe", "llama"),
    ]
    for way in ways:
        assert run_here(*way).code == 0, way
    assert run_here("verify", "named", "a").code == 1


def test_the_config_of_either_side_is_used_for_both(model: Path) -> None:
    made = ("--to", "full", "--recipe", "auto", "--target-names", "megatron")
    partial = ("--allow", "incomplete", "--quiet")
    assert run_here("convert", "named", "a", *made, *partial).code == 0
    (model / "config.json").unlink()
    assert run_here("verify", "named", "a", "--right-names", "megatron").code == 0
    (model.parent / "a" / "config.json").unlink()
    run = run_here("verify", "named", "a", "--right-names", "megatron")
    assert run.code == 2 and "has none; name a recipe" in run.errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--recipe", "auto", "--target-names", "megtron"), "no names of 'megtron'"),
        (("--recipe", "auto", "--source-names", "vllm"), "is the checkpoint in other names"),
        (("--recipe", "none", "--target-names", "vllm"), "are those of a recipe; name one as well"),
        (("--recipe", "bert", "--target-names", "vllm"), "'bert' has no names of 'vllm'"),
    ],
)
def test_mistakes_are_reported(model: Path, arguments: tuple[str, ...], says: str) -> None:
    for command in (("convert", "named", "x"), ("plan", "named")):
        run = run_here(*command, "--to", "tp=2", *arguments)
        assert run.code == 2 and says in run.errors
    assert not (model.parent / "x").exists()


def test_a_recipe_alone_compares_by_its_names(model: Path) -> None:
    run = run_here("verify", "named", "named", "--recipe", "auto")
    assert run.code == 0 and "the same" in run.output
