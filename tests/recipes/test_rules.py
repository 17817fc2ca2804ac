"""Rules: patterns over tensor names, and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RecipeError
from reshard.recipes.rules import Rule

PRINTED = st.text(st.sampled_from("ab*?.-_[]|, @"), min_size=1).filter(
    lambda text: text == text.strip() and text != ""
)


@given(PRINTED.map(lambda text: text + "=x"), PRINTED)
def test_text_is_read_back(pattern: str, spec: str) -> None:
    rule = Rule(pattern, spec)
    assert Rule.parse(str(rule)) == rule


def test_the_last_equals_sign_divides() -> None:
    assert Rule.parse("a=b=tp, -") == Rule("a=b", "tp, -")
    assert Rule.parse("  *.bias  =  -  ") == Rule("*.bias", "-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*.weight", r"cannot read the rule '\*\.weight'; write pattern=spec"),
        ("", "cannot read the rule ''"),
        ("=tp, -", "the rule '=tp, -' has an empty pattern"),
        ("  = tp", "empty pattern"),
        ("*.weight=", r"the rule '\*\.weight=' has an empty spec; write one item a dimension"),
        ("*.weight= ", "empty spec"),
        ("*=tp@heads{}", "cannot read '{}'"),
    ],
)
def test_text_that_is_no_rule(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*.weight", "model.layers.0.mlp.weight", True),
        ("model.*.weight", "model.layers.0.mlp.weight", True),
        ("*.weight", "weight", False),
        ("*weight", "weight", True),
        ("layers.0", "model.layers.0.mlp", False),
        ("layers.?.a", "layers.3.a", True),
        ("layers.?.a", "layers.13.a", False),
        ("layers.[0-2].a", "layers.2.a", True),
        ("layers.[!0-2].a", "layers.2.a", False),
        ("*norm.weight", "model.Norm.weight", False),
        ("a.b", "axb", False),
        ("a[[]0]", "a[0]", True),
    ],
)
def test_patterns_match_whole_names(pattern: str, name: str, expected: bool) -> None:
    assert Rule(pattern, "-").matches(name) is expected
