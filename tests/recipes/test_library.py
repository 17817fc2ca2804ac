"""Shipped recipes for models of types that they do not know, by the names of their tensors."""

from __future__ import annotations

import pytest

from recipes.published_models import DEEPSEEK_V3, GPT2, LLAMA_3_8B, MINI_LM
from reshard.recipes.library import describe_unknown_model, rank_resembling, suggest_rules


@pytest.mark.parametrize(
    ("model", "expected"), [(LLAMA_3_8B, "llama"), (GPT2, "gpt2"), (MINI_LM, "bert")]
)
def test_a_model_resembles_its_own_recipe(model: object, expected: str) -> None:
    config = {**model.config, "model_type": "unheard-of"}  # type: ignore[attr-defined]
    names = list(model.shapes)  # type: ignore[attr-defined]
    recipe, matched, missing = rank_resembling(names, config)[0]
    assert (recipe.name, matched, missing) == (expected, len(names), ())


def test_deepseek_does_not_resemble_llama() -> None:
    recipe, _, _ = rank_resembling(DEEPSEEK_V3.shapes, DEEPSEEK_V3.config)[0]
    assert recipe.name.startswith("deepseek")


def test_unknown_models_are_described() -> None:
    names = [*LLAMA_3_8B.shapes, "model.layers.0.mixer.weight"]
    text = describe_unknown_model({**LLAMA_3_8B.config, "model_type": "mine"}, names)
    assert text.startswith(
        "no shipped recipe for the model type 'mine'; by the names of its tensors it resembles "
        "llama, whose rules match 291 of 292, then "
    )
    assert "(291); config.json has all of its counts. See `reshard recipe show llama`" in text
    assert "take it with --recipe llama; or give rules" in text
    text = describe_unknown_model({"model_type": "mine", "num_hidden_layers": 32}, names)
    assert "of its counts config.json lacks `num_attention_heads`, `num_key_value_heads|" in text
    text = describe_unknown_model({"model_type": "mine"}, ["a", "b", "model.norm.weight"])
    assert text.startswith("no shipped recipe for the model type 'mine'; the nearest are ")
    text = describe_unknown_model({"model_type": "qwen4"}, ["a"])
    assert "the nearest are qwen" in text
    text = describe_unknown_model(None, names)
    assert text.startswith("there is no config.json to choose a recipe by; by the names of its ")


def test_suggested_rules_are_of_the_largest_kinds_of_tensors() -> None:
    rules = suggest_rules(LLAMA_3_8B.shapes, "tp")
    assert len(rules) == 4 and rules[3] == "*=..."
    assert all(rule.startswith("model.layers.*.") and rule.endswith("=tp, -") for rule in rules[:3])
    found = suggest_rules({"x[0]": (9, 9), "a": (1, 4, 2), "b": (3,), "s": ()}, "ep")
    assert found == ["a=-, ep, -", "b=ep", "*=..."]
