"""Names to layouts: which rule decides a tensor, and what every mistake is answered with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RecipeError
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.coupling import Coupling
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.sharding import spec

MESH = DeviceMesh.of(dp=2, tp=4)
SHAPES = {"a.weight": (8, 6), "a.bias": (8,), "b.weight": (6, 8), "step": ()}


def _recipe(*rules: tuple[str, str], axes: tuple[str, ...] = ("tp", "fsdp")) -> Recipe:
    return Recipe("mine", "", (), axes, tuple(Rule(*rule) for rule in rules))


def test_the_first_rule_that_matches_decides() -> None:
    rules = [Rule("a.*", "tp, ..."), Rule("*.weight", "-, dp tp")]
    found = assign(SHAPES, MESH, rules, allow=["unknown"])
    assert list(found.specs) == list(found.layouts) == list(SHAPES)
    assert found.specs == {
        "a.weight": spec(MESH, "tp, -"),
        "a.bias": spec(MESH, "tp"),
        "b.weight": spec(MESH, "-, dp tp"),
        "step": spec(MESH, ""),
    }
    for name, shape in SHAPES.items():
        assert found.layouts[name] is found.specs[name].layout(shape)
    assert found.matched == {"a.weight": rules[0], "a.bias": rules[0], "b.weight": rules[1]}
    assert found.unknown == ("step",)
    assert found.unused == ()
    assert found.unused_axes == ()


def test_without_rules_everything_is_replicated_and_listed() -> None:
    found = assign(SHAPES, MESH)
    assert found.unknown == tuple(SHAPES)
    assert found.matched == {}
    assert found.unused_axes == ("dp", "tp")
    for name, shape in SHAPES.items():
        assert [found.layouts[name].local_shape(rank) for rank in range(8)] == [shape] * 8


def test_rules_given_by_hand_come_before_the_recipe() -> None:
    recipe = _recipe(("a.weight", "tp, -"), ("*.weight", "-, tp"), ("*", "..."))
    by_hand = Rule("a.weight", "dp, -")
    found = assign(SHAPES, MESH, [by_hand], recipe)
    assert found.specs["a.weight"] is spec(MESH, "dp, -")
    assert found.specs["b.weight"] is spec(MESH, "-, tp")
    assert found.matched["a.weight"] is by_hand
    assert found.matched["step"] is recipe.rules[2]
    assert found.unknown == ()


def test_unused_rules_are_kept_apart() -> None:
    same = ("a.weight", "dp, -")
    recipe = _recipe(same, ("none*", "-"), ("*", "..."), axes=("dp",))
    absent = Rule("absent", "tp, -")
    found = assign(SHAPES, MESH, [Rule(*same), absent], recipe)
    assert found.unused_rules == (absent,)
    assert found.unused_recipe_rules == (Rule(*same), recipe.rules[1])
    assert found.unused == (absent, Rule(*same), recipe.rules[1])
    assert found.unused_axes == ("tp",)


@pytest.mark.parametrize(
    ("text", "on_tp", "on_both", "on_neither"),
    [
        ("tp@heads4 / fsdp, -", "tp@heads4, -", "tp@heads4 / fsdp, -", "-, -"),
        ("fsdp tp@balanced, -", "tp@balanced, -", "fsdp tp@balanced, -", "-, -"),
        ("-, fsdp@stride2 / tp ?!2", "-, tp ?!2", "-, fsdp@stride2 / tp ?!2", "-, ?!2"),
        ("fsdp@sizes[6,2], tp", "-, tp", "fsdp@sizes[6,2], tp", "-, -"),
        ("tp, ... | replicated(fsdp)", "tp, -", "tp, - | replicated(fsdp)", "-, -"),
        ("-, - | max(tp fsdp)", "-, - | max(tp)", "-, - | max(tp fsdp)", "-, -"),
    ],
)
def test_an_axis_of_the_recipe_that_the_mesh_lacks_falls_out(
    text: str, on_tp: str, on_both: str, on_neither: str
) -> None:
    shapes = {"a.weight": (8, 6)}
    for mesh, expected in (
        (DeviceMesh.of(dp=2, tp=4), on_tp),
        (DeviceMesh.of(tp=4, fsdp=2), on_both),
        (DeviceMesh.of(dp=2, devices=[1, 0]), on_neither),
    ):
        found = assign(shapes, mesh, (), _recipe(("*", text)))
        assert found.specs == {"a.weight": spec(mesh, expected)}
        assert found.layouts == {"a.weight": spec(mesh, expected).layout((8, 6))}


def test_an_axis_along_which_contributions_lie_is_used() -> None:
    found = assign({"a": (8,)}, MESH, [Rule("a", "- | sum(dp)")])
    assert found.unused_axes == ("tp",)


@given(st.dictionaries(st.sampled_from(["tp", "fsdp", "ep"]), st.integers(1, 3)))
def test_a_missing_axis_equals_an_axis_of_size_one(sizes: dict[str, int]) -> None:
    recipe = _recipe(
        ("a.weight", "tp fsdp@balanced, ep"), ("b.*", "fsdp / tp, ep"), axes=("tp", "fsdp", "ep")
    )
    shapes = {"a.weight": (7, 5), "b.weight": (5, 7)}
    full = dict.fromkeys([axis for axis in recipe.axes if axis not in sizes], 1)
    fewer = assign(shapes, DeviceMesh.of(**sizes), (), recipe)
    padded = assign(shapes, DeviceMesh.of(**sizes, **full), (), recipe)
    for name in shapes:
        for rank in range(fewer.layouts[name].slots):
            assert fewer.layouts[name].boxes(rank) == padded.layouts[name].boxes(rank)


def test_rules_given_by_hand_may_use_the_config() -> None:
    rules = [Rule("a.*", "tp@heads{n}, ..."), Rule("*", "...")]
    found = assign(SHAPES, MESH, rules, None, {"n": 2})
    assert found.layouts["a.bias"].boxes(3) == found.layouts["a.bias"].boxes(2)
    assert str(found.specs["a.weight"]) == "tp@heads2, -"


@pytest.mark.parametrize("pattern", ["a.weight", "absent"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp, -", "unknown axis 'pp'; the mesh 'mesh' has dp, tp"),
        ("tp, tp", "axis tp is used in dimension 0 and dimension 1"),
        ("tp@quarter, -", "unknown cut rule 'quarter'"),
        ("..., ...", "can be used once"),
        ("tp@heads{n}, -", "`n` of the model's config is needed and there is none"),
    ],
)
def test_a_wrong_rule_given_by_hand_is_refused_used_or_not(
    pattern: str, text: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        assign(SHAPES, MESH, [Rule(pattern, text)])
    assert str(caught.value).startswith(f"rule `{pattern}={text}`: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp, -", "unknown axis 'dp'; the mesh 'recipe mine' has tp, fsdp"),
        ("tp@quarter, -", "unknown cut rule 'quarter'"),
        ("tp@heads{n}, -", "`n` is not in the model's config; put the model's config.json"),
        ("tp@heads{zero}, -", "heads 0 must be at least 1"),
        ("tp@heads3, -", "length 8 is not made of 3 equal heads"),
        ("tp", r"`tp` is for tensors of 1 dimensions, not for shape \[8, 6\]"),
        ("tp, -, ...,  -", r"is for tensors of 3 dimensions, not for shape \[8, 6\]"),
    ],
)
def test_a_recipe_rule_that_does_not_fit_names_tensor_rule_and_recipe(
    text: str, message: str
) -> None:
    recipe = _recipe(("a.weight", text))
    with pytest.raises(RecipeError, match=message) as caught:
        assign(SHAPES, MESH, (), recipe, {"zero": 0})
    where = f"tensor 'a.weight' of shape [8, 6], recipe 'mine', rule `a.weight={text}`: "
    assert str(caught.value).startswith(where)
    # Where it matches nothing, a recipe's rule need not fit.
    assign({"other": (2,)}, MESH, (), recipe, {"zero": 0}, allow=["unknown"])


def test_a_missing_config_is_reported() -> None:
    recipe = _recipe(("*.weight", "tp@heads{n|m}, -"))
    with pytest.raises(RecipeError, match=r"recipe 'mine', rule .*`n` or `m` .* there is none; p"):
        assign(SHAPES, MESH, (), recipe)


def test_a_rule_by_hand_of_the_wrong_rank_or_length_names_tensor_and_shape() -> None:
    with pytest.raises(RecipeError, match=r"tensor 'a\.bias' of shape \[8\], rule `a\.\*=tp, -`: "):
        assign(SHAPES, MESH, [Rule("a.*", "tp, -")])
    with pytest.raises(RecipeError, match=r"'b\.weight' of shape \[6, 8\], rule .* add up to 8, b"):
        assign(SHAPES, MESH, [Rule("*.weight", "tp@sizes[2,2,2,2], -")])


def test_layers_of_different_kinds_by_lists_of_the_config() -> None:
    """Of two kinds of layers each has its rule and its number of heads."""
    config = {"types": ["full", "linear", "full"], "heads": [2, 4, 8], "layers": 3}
    rules = (
        Rule("l.{layer}.w", "tp@heads{heads[layer]}, -", when="types[layer]=full"),
        Rule("l.{layer}.w", "-, tp"),
    )
    recipe = Recipe(
        "kinds", "", (), ("tp", "pp"), rules, numbers={"layer": Numbering("pp", "layers")}
    )
    shapes = {f"l.{layer}.w": (16, 4) for layer in range(3)}
    found = assign(shapes, DeviceMesh.of(tp=2), (), recipe, config)
    assert [str(spec) for spec in found.specs.values()] == ["tp@heads2, -", "-, tp", "tp@heads8, -"]
    assert [rule.when for rule in found.matched.values()] == [rules[0].when, None, rules[0].when]


def test_a_rule_by_hand_asks_a_list_by_the_layer() -> None:
    rule = Rule("l.{layer}.w", "tp@heads{heads[layer]}, -")
    recipe = Recipe(
        "r", "", (), ("pp",), (Rule("*", "..."),), numbers={"layer": Numbering("pp", "layers")}
    )
    found = assign(
        {"l.1.w": (16, 4)}, DeviceMesh.of(tp=2), [rule], recipe, {"heads": [2, 4], "layers": 2}
    )
    assert str(found.specs["l.1.w"]) == "tp@heads4, -"


def test_coupled_cuts_and_cuts_of_numbers_by_name() -> None:
    """Experts of one tensor are dealt out as those of their own names are, by one option."""
    rules = (Rule("q", "tp@{heads.query} / fsdp, -"), Rule("experts.w", "ep@{expert}, -"))
    recipe = Recipe(
        *("r", "", (), ("tp", "fsdp", "ep"), rules),
        numbers={"expert": Numbering("ep", "experts")},
        coupled={"heads": Coupling((("query", "heads"),))},
    )
    config = {"heads": 4, "experts": 5}
    mesh = DeviceMesh.of(tp=2, ep=3)
    shapes = {"q": (8, 6), "experts.w": (5, 4)}
    found = assign(shapes, mesh, (), recipe, config)
    assert [str(one) for one in found.specs.values()] == ["tp@heads4, -", "ep, -"]
    balanced = assign(shapes, mesh, (), recipe.with_options({"expert": "balanced"}), config)
    assert str(balanced.specs["experts.w"]) == "ep@balanced, -"
    with pytest.raises(RecipeError, match="unknown cut rule 'bytes'"):
        assign(shapes, mesh, (), recipe.with_options({"expert": "bytes"}), config)
