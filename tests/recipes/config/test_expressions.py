"""Arithmetic over the numbers of a model's config."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RecipeError
from reshard.recipes.config.expressions import Key, parse_expression

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
def test_values(text: str, expected: int) -> None:
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
     "a[-1]", "a[0][1]", "-1", "a % b", "a.b[c", "2a"],
)  # fmt: skip
def test_text_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the expression .*; write keys"):
        parse_expression(text)


def test_what_a_config_has_not_is_named() -> None:
    with pytest.raises(RecipeError, match=r"`nowhere` or `text_config\.no \* 2` is not in the mod"):
        parse_expression("nowhere | text_config.no * 2").value(CONFIG)
    with pytest.raises(RecipeError, match=r"`heads` or `8` of the model's config is needed and"):
        parse_expression("heads|8").value(None)
    assert parse_expression("8").value(None) == 8


@pytest.mark.parametrize("value", ["8", 8.0, True, -1, {"a": 1}])
def test_values_that_are_no_whole_numbers(value: object) -> None:
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
    with pytest.raises(RecipeError, match=r"`sizes\[layer\]` asks for the entry of \{layer\}, and"):
        parse_expression("sizes[layer]").value(CONFIG)
    with pytest.raises(RecipeError, match=r"`sizes\[layer\]` is not in the model's config"):
        parse_expression("sizes[layer]").value(CONFIG, {"layer": 3})
    # One letter a layer.
    assert Key.parse("pattern[layer]") is not None
    assert Key(("pattern",), "layer").find({"pattern": "M*"}, {"layer": 1}) == "*"
