"""Rules: patterns over tensor names, and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RecipeError
from reshard.recipes.rules import Rule, RuleList

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
        ("*.weight=", r"the rule '\*\.weight=' has an empty spec; write an item per dimension"),
        ("*.weight= ", "empty spec"),
        ("*=tp@heads{}", "cannot read '{}'"),
    ],
)
def test_unreadable_rules_are_refused(text: str, message: str) -> None:
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


@pytest.mark.parametrize(
    ("pattern", "name", "numbers"),
    [
        ("l.{layer}.w", "l.12.w", {"layer": 12}),
        ("l.{layer}.w", "l.x.w", None),
        ("l.{layer}.w", "l..w", None),
        ("l.{layer}.w", "l.1.2.w", None),
        ("*l.{layer}.*.{expert}.w", "model.l.0.e.007.w", {"layer": 0, "expert": 7}),
        ("*{layer}", "a123", {"layer": 123}),
        ("{layer}*", "123a", {"layer": 123}),
        ("*{layer}*", "a", None),
        ("w[13].{e}", "w3.4", {"e": 4}),
        ("w[13].{e}", "w2.4", None),
        ("l.*", "l.3", {}),
        ("(a|b).{e}", "(a|b).0", {"e": 0}),
        ("(a|b).{e}", "a.0", None),
        ("a.{e}", "a.0\n", None),
    ],
)
def test_numbers_in_names(pattern: str, name: str, numbers: dict[str, int] | None) -> None:
    rule = Rule(pattern, "...")
    assert rule.numbers_in(name) == numbers
    assert rule.matches(name) == (numbers is not None)


@pytest.mark.parametrize("pattern", ["a.{}", "a.{1}", "a.{x y}", "a.{e}.{e}"])
def test_numbers_without_a_good_name(pattern: str) -> None:
    with pytest.raises(RecipeError, match="write a name for a number in braces"):
        Rule(pattern, "...")


def test_an_end_of_a_number_in_the_pattern_is_refused() -> None:
    with pytest.raises(RecipeError, match="for a number that is missing in its pattern"):
        Rule("l.{layer}", "-", at=(("layer", ("first",)),))


def test_the_equals_sign_inside_parentheses_divides_nothing() -> None:
    rule = Rule.parse("a=b=x:(1)2, - | only(pp=0,3 ep=1) sum(y)")
    assert (rule.pattern, rule.spec) == ("a=b", "x:(1)2, - | only(pp=0,3 ep=1) sum(y)")
    assert Rule.parse(str(rule)) == rule


def test_a_rule_counts_by_the_config() -> None:
    rule = Rule("a", "-", when="tied")
    assert rule.applies({"tied": True}) and rule.applies({"tied": 1})
    assert not rule.applies({"tied": False}) and not rule.applies({}) and not rule.applies(None)
    assert Rule("a", "-").applies(None)
    with pytest.warns(DeprecationWarning, match="Rule.counts is now applies"):
        assert rule.counts({"tied": 1})


def test_a_rule_counts_by_the_layer() -> None:
    rule = Rule("l.{layer}.w", "-", when="types[layer]=full & !tied")
    config = {"types": ["full", "linear"]}
    assert rule.applies(config, {"layer": 0}) and not rule.applies(config, {"layer": 1})
    assert not rule.applies({**config, "tied": True}, {"layer": 0})


@pytest.mark.parametrize(
    ("spec", "when"), [("tp@heads{heads[layer]}", None), ("-", "types[layer]=full")]
)
def test_an_entry_of_a_number_that_the_pattern_has_not(spec: str, when: str | None) -> None:
    with pytest.raises(
        RecipeError, match=r"entry \[layer\] of a list in config.json, and its pattern has"
    ):
        Rule("l.*.w", spec, when=when)


def test_a_condition_that_cannot_be_read() -> None:
    with pytest.raises(RecipeError, match=r"cannot read the condition 'a b'"):
        Rule("a", "-", when="a b")


def test_the_equals_sign_inside_braces_and_parentheses_divides_nothing() -> None:
    rule = Rule.parse("a=b=tp@blocks[{(q + (k * 2)) * d},{k}], - | only(pp=0)")
    assert rule.pattern == "a=b" and Rule.parse(str(rule)) == rule


PIECES = st.sampled_from(
    ["*", "?", "{a}", "{b}", "w1", "[kv]", "[12]", "[!0]", "0", "12", ".", ".", "w", "*.", "_1"]
)
NAMES = st.lists(st.sampled_from(["w", "w1", "k", "0", "12", "1", "007", "w12", "_1"]), max_size=5)


@given(st.lists(st.lists(PIECES, min_size=1, max_size=6), max_size=4), st.lists(NAMES, max_size=8))
def test_a_rule_list_finds_the_same_as_its_rules(
    patterns: list[list[str]], names: list[list[str]]
) -> None:
    texts = ["".join(pieces) for pieces in patterns]
    # A number is named once, and not beside another.
    texts = [
        text
        for text in texts
        if text.count("{a}") < 2 and text.count("{b}") < 2 and text.strip() and "}{" not in text
    ]
    rules = [Rule(text, "-") for text in texts]
    listed = RuleList(rules)
    for parts in names:
        name = ".".join(parts)
        for first in (0, 1):
            one_by_one = [
                (number, rule.numbers_in(name))
                for number, rule in enumerate(rules)
                if number >= first and rule.matches(name)
            ]
            assert listed.find(name, first) == (one_by_one[0] if one_by_one else None)


def test_rules_count_by_the_numbers_of_each_name() -> None:
    rules = [Rule("layers.{layer}.w", "tp", when="kinds[layer]=dense"), Rule("layers.*", "-")]
    listed = RuleList(rules, {"kinds": ["dense", "sparse", "dense"]})
    assert [listed.find(f"layers.{layer}.w") for layer in range(3)] == [
        (0, {"layer": 0}),
        (1, {}),
        (0, {"layer": 2}),
    ]
