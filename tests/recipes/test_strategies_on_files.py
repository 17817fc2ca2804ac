"""Strategies through whole conversions: N ranks to M ranks, and back to one file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard import checkpoint
from reshard.recipes.overrides import ALLOWANCES
from selection import keep_covering

SHAPES = {
    "model.embed_tokens.weight": (11, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (4, 4),
    "model.layers.0.mlp.up_proj.weight": (7, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "empty": (0, 3),
    "hollow": (5, 0, 2),
    "wide": (1, 2, 3, 2),
    "scalar": (),
}
CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "source"
    folder.mkdir()
    random = np.random.default_rng(0)
    dtypes = [np.float32, np.float16, np.int8]
    tensors = {
        name: np.asarray(random.standard_normal(shape) * 9).astype(dtypes[i % 3])
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def pairs() -> list[tuple[str, str, int, int]]:
    """Every pair of N and M in 1 to 9, with strategies that take turns."""
    names = ("simple", "balanced", "sharded", "recipe")
    found = []
    for n in range(1, 10):
        for m in range(1, 10):
            first, second = names[(n + m) % 4], names[(n + 2 * m + m // 4) % 4]
            found.append((first, second, n, m))
    return found


def test_the_pairs_have_every_strategy_with_every_other() -> None:
    assert len({(first, second) for first, second, _, _ in pairs()}) == 16
    for name in ("simple", "balanced", "sharded", "recipe"):
        assert {n for first, _, n, _ in pairs() if first == name} == set(range(1, 10))


@pytest.mark.parametrize(
    ("first", "second", "n", "m"),
    keep_covering(1, pairs(), "another pair of numbers of ranks"),
)
def test_n_ranks_to_m_ranks(
    tmp_path: Path, source: Path, first: str, second: str, n: int, m: int
) -> None:
    # Heads do not go for most numbers of ranks, and some tensors are no Llama's.
    checkpoint.convert(
        source, tmp_path / "n", to=n, strategy=first.upper(), threads=1, allow=ALLOWANCES
    )
    checkpoint.convert(
        tmp_path / "n", tmp_path / "m", to=str(m), strategy=second, threads=1, allow=ALLOWANCES
    )
    checkpoint.convert(tmp_path / "m", tmp_path / "full", to="full", threads=1)
    found = load_file(tmp_path / "full" / "model.safetensors")
    expected = load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_a_recipe_over_a_number_of_ranks_keeps_its_shardings(tmp_path: Path, source: Path) -> None:
    checkpoint.convert(
        source, tmp_path / "n", to=4, strategy="recipe", allow=["incomplete", "unknown"]
    )
    opened = checkpoint.open(tmp_path / "n")
    assert opened.mesh is not None and opened.mesh.text == "tp=4"
    assert opened["model.layers.0.self_attn.k_proj.weight"].spec == "tp@heads2, -"
    assert opened["wide"].spec == "-, -, -, -"


def test_a_recipe_over_a_mesh_is_the_recipe_by_config(tmp_path: Path, source: Path) -> None:
    to, allow = "tp=2,dp=2", ["incomplete", "unknown"]
    checkpoint.convert(source, tmp_path / "a", to=to, strategy="recipe", allow=allow)
    checkpoint.convert(source, tmp_path / "b", to=to, recipe="auto", allow=allow)
    a, b = checkpoint.open(tmp_path / "a"), checkpoint.open(tmp_path / "b")
    assert {name: t.layout for name, t in a.tensors.items()} == {
        name: t.layout for name, t in b.tensors.items()
    }
