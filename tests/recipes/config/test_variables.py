"""Numbers of a model's config in the text of a rule."""

from __future__ import annotations

import pytest

from reshard.errors import RecipeError
from reshard.recipes.config.variables import expand, fill_in, variables


def test_text_without_braces_is_left_alone() -> None:
    assert fill_in("tp@blocks[16,8], -", None) == "tp@blocks[16,8], -"
    assert variables("tp, -") == ()


def test_every_variable_gets_its_own_number() -> None:
    config = {"a": 3, "b": 5, "c": 0}
    assert fill_in("tp@sizes[{a},{b},{a},{c}], x@heads{ b }", config) == (
        "tp@sizes[3,5,3,0], x@heads5"
    )


def test_the_first_alternative_that_is_there_counts() -> None:
    text = "tp@heads{new|old|oldest}"
    assert [str(key) for key in variables(text)[0].keys] == ["new", "old", "oldest"]
    assert fill_in(text, {"new": 8, "old": 32}) == "tp@heads8"
    assert fill_in(text, {"old": 32, "oldest": 64}) == "tp@heads32"
    assert fill_in(text, {"new": None, "oldest": 64}) == "tp@heads64"


@pytest.mark.parametrize("text", ["{}", "{a|}", "{a b}", "{8.5}", "{a", "a}", "{{a}}", "{a}{"])
def test_braces_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read .* in the spec .*; write a key"):
        variables(text)


def test_arithmetic_and_entries() -> None:
    config = {"q": 4, "k": 2, "dim": 16, "sizes": [3, 5]}
    text = "tp@blocks[{q * dim},{(k + k) * dim},{ sizes[layer] }]"
    assert fill_in(text, config, numbers={"layer": 1}) == "tp@blocks[64,64,5]"


def test_words_stand_for_names_alone() -> None:
    words = {"vocabulary": "pad8", "heads.query": "heads{q}"}
    text = "tp@{vocabulary}, x@{ heads.query }, {vocabulary+1}"
    assert expand(text, words) == "tp@pad8, x@heads{q}, {vocabulary+1}"
    assert fill_in(expand(text, words), {"q": 3, "vocabulary": 4}) == "tp@pad8, x@heads3, 5"


def test_no_config() -> None:
    with pytest.raises(RecipeError, match=r"`a` or `b` of the model's config is needed and there"):
        fill_in("tp@heads{a|b}", None)


@pytest.mark.parametrize("config", [{}, {"a": None}, {"A": 4}])
def test_a_variable_that_is_missing(config: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"`a` is not in the model's config; put the model's"):
        fill_in("tp@heads{a}", config)


@pytest.mark.parametrize("value", ["8", 8.0, True, -1, [8]])
def test_a_variable_that_is_no_whole_number(value: object) -> None:
    with pytest.raises(RecipeError, match=r"`a` of the model's config is .*, a whole number"):
        fill_in("tp@heads{a|b}", {"a": value, "b": 4})
