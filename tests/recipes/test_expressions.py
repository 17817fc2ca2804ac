"""Arithmetic over the numbers of a model's config.

Conditions on a model's config.

Numbers of a model's config in the text of a rule.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RecipeError
from reshard.recipes.expressions import (
    Key,
    expand,
    fill_in,
    find_expressions,
    parse_condition,
    parse_expression,
)

CONFIG: dict[str, object] = {
    "heads": 12,
    "groups": 4,
    "hidden": 96,
    "zero": 0,
    "absent": None,
    "sizes": [8, 16, 32],
    "layers": {"2": {"heads": 3, "inner": {"width": 4}}, "3": {"heads": 5}},
    "text_config": {"heads": 6, "inner": {"groups": 2}, "sizes": [1, 2]},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("heads", 12),
        (" heads ", 12),
        ("7", 7),
        ("text_config.heads", 6),
        ("text_config.inner.groups", 2),
        ("heads + 2 * groups", 20),
        ("(heads + 2) * groups", 56),
        ("heads - groups - 1", 7),
        ("hidden // heads // 3", 2),
        ("hidden - 7 // 2 * 2", 90),
        ("2*(heads+(groups*3))", 48),
        ("nowhere|heads", 12),
        ("absent|heads", 12),
        ("zero|heads", 0),
        ("nowhere.heads|text_config.heads|heads", 6),
        ("heads.inner|3", 3),
        ("head_dim | hidden // heads", 8),
        ("heads * nowhere | groups", 4),
        ("(nowhere | groups) * 2", 8),
        ("nowhere|5", 5),
        ("sizes[1]", 16),
        ("sizes[layer]", 32),
        ("text_config.sizes[layer]|9", 9),
        ("sizes[] * 2", 6),
        ("layers[layer].heads", 3),
        ("layers[layer].inner.width * layers[3].heads", 20),
        ("layers[1].heads | layers[layer].nowhere | 7", 7),
        ("heads[layer].inner|7", 7),
        ("heads[]|7", 7),
        ("heads[layer]", 12),
    ],
)
def test_expressions_have_the_values_of_the_config(text: str, expected: int) -> None:
    assert parse_expression(text).value(CONFIG, {"layer": 2}) == expected


@given(
    st.recursive(
        st.integers(0, 9).map(str),
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
            lambda one: f"({' '.join(one)})"
        ),
    )
)
def test_arithmetic_is_that_of_python(text: str) -> None:
    expected = eval(text)
    if expected < 0:
        with pytest.raises(RecipeError, match="a whole number of at least 0"):
            parse_expression(text).value({})
    else:
        assert parse_expression(text).value({}) == expected


@pytest.mark.parametrize(
    "text",
    ["", "|", "a|", "a b", "a +", "+ a", "a ** b", "a / b", "(a", "a)", "a.", ".a", "1.5", "a[[]",
     "a[-1]", "a[0][1]", "-1", "a @ b", "a.b[c", "2a"],
)  # fmt: skip
def test_text_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the expression .*; write keys"):
        parse_expression(text)


def test_missing_config_keys_are_named() -> None:
    with pytest.raises(RecipeError, match=r"`nowhere` or `text_config\.no \* 2` is not in the mod"):
        parse_expression("nowhere | text_config.no * 2").value(CONFIG)
    with pytest.raises(RecipeError, match=r"`heads` or `8` of the model's config is needed and"):
        parse_expression("heads|8").value(None)
    assert parse_expression("8").value(None) == 8


@pytest.mark.parametrize("value", ["8", 8.0, True, -1, {"a": 1}])
def test_values_that_are_not_integers_are_refused(value: object) -> None:
    with pytest.raises(RecipeError, match=r"`a` of the model's config is .*, a whole number"):
        parse_expression("a|b").value({"a": value, "b": 4})


def test_results_that_cannot_be() -> None:
    with pytest.raises(RecipeError, match="divides 12 by 0 in the model's config; correct"):
        parse_expression("heads // zero").value(CONFIG)
    with pytest.raises(RecipeError, match="`groups - heads` of the model's config is -8"):
        parse_expression("groups - heads").value(CONFIG)


def test_entries_of_lists() -> None:
    one = parse_expression("sizes[layer] * heads | sizes[expert]")
    assert one.index_names == {"layer", "expert"}
    with pytest.raises(RecipeError, match=r"`sizes\[layer\]` is the entry for \{layer\}, and"):
        parse_expression("sizes[layer]").value(CONFIG)
    with pytest.raises(RecipeError, match=r"`sizes\[layer\]` is not in the model's config"):
        parse_expression("sizes[layer]").value(CONFIG, {"layer": 3})
    # One letter a layer.
    assert Key.parse("pattern[layer]") is not None
    assert Key(("pattern",), "layer").find({"pattern": "M*"}, {"layer": 1}) == "*"


LAYER_CONFIG: dict[str, object] = {
    "tied": True,
    "bias": False,
    "none": None,
    "experts": 8,
    "shared": 0,
    "kind": "dense",
    "types": ["full", "linear", "full"],
    "letters": "M*-",
    "moe_layers": [1, 3],
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
        ("[layer] >= experts // 8", True),
        ("[layer] > 1", False),
        ("[layer] <= nowhere", False),
        ("[layer] < experts & [layer] % 2 == 1", True),
        ("([layer] + 1) % 2 <> 0", False),
        ("experts == nowhere|8", True),
        ("nowhere <> experts", True),
        ("[layer] in moe_layers", True),
        ("[layer] + 1 not in moe_layers", True),
        ("[layer] in nowhere|moe_layers", True),
        ("[layer] not in nowhere", True),
    ],
)
def test_conditions_hold_as_the_config_of_the_layer_has_it(text: str, expected: bool) -> None:
    assert parse_condition(text).holds(LAYER_CONFIG, {"layer": 1}) is expected


def test_conditions_after_the_last_entry_do_not_hold() -> None:
    assert not parse_condition("types[layer]=full").holds(LAYER_CONFIG, {"layer": 3})
    assert parse_condition("types[layer]!=full").holds(LAYER_CONFIG, {"layer": 3})


def test_conditions_without_a_config_do_not_hold() -> None:
    assert not parse_condition("tied").holds(None)
    assert parse_condition("!tied").holds(None)


def test_the_numbers_that_are_asked_for() -> None:
    assert parse_condition("types[layer]=full & tied & other[expert]").index_names == {
        "layer",
        "expert",
    }


@pytest.mark.parametrize(
    "text", ["", " & ", "a b", "a=", "=a", "!a=b", "!!a", "a==", "a<>=b", "a in 3", "a|", "a&"]
)
def test_unreadable_conditions_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the condition .*; write `key` of the mod"):
        parse_condition(text)


def test_text_without_braces_is_left_alone() -> None:
    assert fill_in("tp@blocks[16,8], -", None) == "tp@blocks[16,8], -"
    assert find_expressions("tp, -") == ()


def test_every_variable_gets_its_own_number() -> None:
    config = {"a": 3, "b": 5, "c": 0}
    assert fill_in("tp@sizes[{a},{b},{a},{c}], x@heads{ b }", config) == (
        "tp@sizes[3,5,3,0], x@heads5"
    )


def test_the_first_alternative_that_is_there_counts() -> None:
    text = "tp@heads{new|old|oldest}"
    assert [str(key) for key in find_expressions(text)[0].keys] == ["new", "old", "oldest"]
    assert fill_in(text, {"new": 8, "old": 32}) == "tp@heads8"
    assert fill_in(text, {"old": 32, "oldest": 64}) == "tp@heads32"
    assert fill_in(text, {"new": None, "oldest": 64}) == "tp@heads64"


@pytest.mark.parametrize("text", ["{}", "{a|}", "{a b}", "{8.5}", "{a", "a}", "{{a}}", "{a}{"])
def test_braces_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read .* in the spec .*; write a key"):
        find_expressions(text)


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
def test_a_variable_that_is_not_an_integer_is_refused(value: object) -> None:
    with pytest.raises(RecipeError, match=r"`a` of the model's config is .*, a whole number"):
        fill_in("tp@heads{a|b}", {"a": value, "b": 4})
