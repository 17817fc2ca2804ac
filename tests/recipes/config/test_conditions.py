"""Conditions on a model's config."""

from __future__ import annotations

import pytest

from reshard.errors import RecipeError
from reshard.recipes.config.conditions import parse_condition

CONFIG: dict[str, object] = {
    "tied": True,
    "bias": False,
    "none": None,
    "experts": 8,
    "shared": 0,
    "kind": "dense",
    "types": ["full", "linear", "full"],
    "letters": "M*-",
    "text_config": {"tied": False, "kind": "moe"},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tied", True),
        ("bias", False),
        ("none", False),
        ("nowhere", False),
        ("experts", True),
        ("shared", False),
        ("!tied", False),
        ("!bias", True),
        ("!nowhere", True),
        ("text_config.tied", False),
        ("text_config.tied|tied", False),
        ("nowhere.tied|tied", True),
        ("kind=dense", True),
        ("kind = moe", False),
        ("kind!=moe", True),
        ("nowhere=moe", False),
        ("nowhere!=moe", True),
        ("text_config.kind=moe", True),
        ("experts=8", True),
        ("experts!=8", False),
        ("tied=true", True),
        ("bias=false", True),
        ("types[0]=full", True),
        ("types[layer]=full", False),
        ("types[layer]!=full", True),
        ("letters[layer]=*", True),
        ("tied & kind=dense & !bias", True),
        ("tied & kind=moe", False),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    assert parse_condition(text).holds(CONFIG, {"layer": 1}) is expected


def test_behind_the_last_entry_nothing_is_so() -> None:
    assert not parse_condition("types[layer]=full").holds(CONFIG, {"layer": 3})
    assert parse_condition("types[layer]!=full").holds(CONFIG, {"layer": 3})


def test_without_a_config_nothing_is_so() -> None:
    assert not parse_condition("tied").holds(None)
    assert parse_condition("!tied").holds(None)


def test_the_numbers_that_are_asked_for() -> None:
    assert parse_condition("types[layer]=full & tied & other[expert]").index_names == {
        "layer",
        "expert",
    }


@pytest.mark.parametrize("text", ["", " & ", "a b", "a=", "=a", "!a=b", "!!a", "a==b", "a|", "a&"])
def test_text_that_is_no_condition(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the condition .*; write `key` of the mod"):
        parse_condition(text)
