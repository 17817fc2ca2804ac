"""Which prefix is a trainer's: for every recorded model type, under prefixes of trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.names.replay import read_records, recorded_model_types
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.pretrained.model_names import ModelNames, base_prefix, find_model_names
from reshard.errors import RecipeError
from reshard.recipes.library import choose_recipe

PREFIXES = ("", "model.", "module.", "state_dict.model.")


def names_in(config: dict[str, Any], *names: str, **options: Any) -> ModelNames:
    """How these names are taken."""
    held: Any = dict.fromkeys(names)
    found = Checkpoint(Path("folder"), "a format", held, ())
    return find_model_names(found, choose_recipe(config), config, **options)


def forms(record: dict[str, Any]) -> dict[str, list[str]]:
    """The names of classes with heads, of those without, and of the base model alone."""
    names, base = record["tensors"], base_prefix(record["config"])
    bare = [name for name in names if base and base + name in names]
    return {
        "with heads": [name for name in names if name not in {*bare}],
        "without": [name for name in names if base and name.startswith(base)],
        "base": bare,
    }


@pytest.mark.parametrize("model_type", recorded_model_types())
def test_every_recorded_model_type(model_type: str) -> None:
    record = read_records(model_type)[0]
    base = base_prefix(record["config"])
    for form, names in forms(record).items():
        for prefix in PREFIXES if names else ():
            found = names_in(record["config"], *(prefix + name for name in names))
            assert found.convention is None
            # A base model under `model.` has the names of a class with heads: as good.
            as_good = form == "base" and prefix.endswith(base or ".")
            right = {prefix, prefix.removesuffix(base)} if as_good else {prefix}
            assert found.prefix in right, (form, prefix, found)


LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4}


def test_a_prefix_of_two_kinds() -> None:
    layer = "model.layers.0.mlp.up_proj.weight"
    assert names_in(LLAMA, f"model.{layer}", "model.lm_head.weight").prefix == "model."
    assert names_in(LLAMA, layer, "lm_head.weight").prefix == ""
    # What is not the model's may stand beside it.
    names = (f"actor.{layer}", "actor.model.norm.weight", "actor.lm_head.weight", "v_head.weight")
    assert names_in(LLAMA, *names).prefix == "actor."


def test_nothing_is_guessed() -> None:
    names = ("a.b.layers.0.mlp.up_proj.weight", "a.b.embed_tokens.weight")
    says = r"fit the model type 'llama' without any of several prefixes: say which with --strip-"
    with pytest.raises(RecipeError, match=says):
        names_in(LLAMA, *names)
    assert names_in(LLAMA, *names, keeps_prefix=True).prefix == ""


def test_names_of_megatron() -> None:
    names = [
        f"decoder.layers.0.{one}.weight"
        for one in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    ]
    assert names_in(LLAMA, *names, "output_layer.weight") == ModelNames("", "megatron")
    held = names_in(LLAMA, *(f"model.{name}" for name in (*names, "output_layer.weight")))
    assert held == ModelNames("model.", "megatron")


def test_without_a_recipe_the_trainers_state_tells() -> None:
    unknown = {"model_type": "unheard-of"}
    assert names_in(unknown, "model.a.w", "model.b.w").prefix == ""
    found = names_in(unknown, "model.a.w", "model.b.w", containers=["model."])
    assert found.prefix == "model."
    assert "no recipe is for the model type 'unheard-of'" in found.notes[0]
    assert names_in(unknown, "model.a.w", "b.w", containers=["model."]).prefix == ""
