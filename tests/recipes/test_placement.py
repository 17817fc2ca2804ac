"""Tensors that live at some coordinates only: by numbers, ends, roles of axes, and by hand."""

from __future__ import annotations

import pytest

from reshard.errors import RecipeError
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.recipe import Recipe, parse_options
from reshard.recipes.rules import Rule
from reshard.sharding import spec

NUMBERS = {"layer": Numbering("pp", "layers", "balanced"), "expert": Numbering("ep", "experts")}
CONFIG = {"layers": 4, "experts": 6, "tied": True}
RULES = (
    Rule("l.{layer}.e.{expert}.w", "etp / fsdp, -"),
    Rule("l.{layer}.*", "tp / fsdp, ..."),
    Rule("in", "tp, -", at=(("layer", ("first", "last")),), when="tied", note="tied with out"),
    Rule("in", "tp, -", at=(("layer", ("first",)),)),
    Rule("out", "tp, -", at=(("layer", ("last",)),)),
)
RECIPE = Recipe(
    "mine",
    "",
    (),
    ("tp", "etp", "fsdp", "ep", "pp"),
    RULES,
    numbers=NUMBERS,
    stand_ins={"etp": "tp"},
)
SHAPES = {"in": (8, 2), "out": (8, 2)}
SHAPES |= {f"l.{layer}.w": (8, 8) for layer in range(4)}
SHAPES |= {f"l.{layer}.e.{expert}.w": (8, 2) for layer in range(4) for expert in range(6)}


def assigned(text: str, rules: tuple[Rule, ...] = (), **options: str) -> Assignment:
    recipe = RECIPE.with_options(options)
    return assign(SHAPES, DeviceMesh.parse(text), rules, recipe, CONFIG)


def cuts(found: Assignment, *names: str) -> list[str]:
    return [str(found.specs[name]) for name in names]


def test_numbers_and_ends_say_where() -> None:
    found = assigned("pp=2,ep=3,tp=2")
    assert cuts(found, "in", "out", "l.1.w", "l.2.w", "l.1.e.3.w") == [
        "tp, -",
        "tp, - | only(pp=1)",
        "tp, - | only(pp=0)",
        "tp, - | only(pp=1)",
        "tp, - | only(pp=0 ep=1)",
    ]
    assert (found.unknown, found.unused, found.unused_axes) == ((), (RULES[3],), ())
    assert found.notes == ("in: tied with out",)
    assert found.layouts["l.3.e.5.w"].holders == (10, 11)


def test_tied_ends_of_more_than_two_stages() -> None:
    assert cuts(assigned("pp=4"), "in", "out", "l.2.w") == [
        "-, - | only(pp=0,3)",
        "-, - | only(pp=3)",
        "-, - | only(pp=2)",
    ]


def test_names_counted_by_themselves_live_with_the_last() -> None:
    numbers = NUMBERS | {"layer": Numbering("pp", "layers", "bytes", behind=("next.*",))}
    recipe = RECIPE.replace(rules=(Rule("*l.{layer}.*", "-, -"),), numbers=numbers)
    shapes = {f"l.{layer}.w": (8, 8) for layer in range(4)} | {"next.l.0.w": (16, 8)}
    found = assign(shapes, DeviceMesh.of(pp=2), (), recipe, CONFIG)
    # And its bytes are of the last stage.
    assert [*found.specs.values()] == [
        spec(DeviceMesh.of(pp=2), f"-, - | only(pp={at})") for at in (0, 0, 0, 1, 1)
    ]


def test_without_a_true_value_in_the_config_a_rule_does_not_count() -> None:
    for config in (CONFIG | {"tied": False}, {"layers": 4, "experts": 6}):
        found = assign(SHAPES, DeviceMesh.of(pp=2), (), RECIPE, config)
        assert str(found.specs["in"]) == "-, - | only(pp=0)"
        assert (found.notes, found.unused) == ((), ())
    assert assigned("pp=2").unused == (RULES[3],)


@pytest.mark.parametrize("text", ["tp=2", "pp=1,tp=2", "ep=1,tp=2"])
def test_an_unused_numbering_needs_no_config(text: str) -> None:
    found = assign(SHAPES, DeviceMesh.parse(text), (), RECIPE, {"tied": 1})
    assert cuts(found, "in", "l.0.w", "l.0.e.5.w") == ["tp, -"] * 3
    assert found.notes == ()


def test_a_stand_in_plays_where_the_mesh_lacks_an_axis() -> None:
    assert cuts(assigned("tp=2"), "l.0.e.0.w") == ["tp, -"]
    assert cuts(assigned("tp=2,etp=1"), "l.0.e.0.w") == ["etp, -"]
    assert cuts(assigned("fsdp=2,tp=2"), "l.0.e.0.w") == ["tp / fsdp, -"]
    assert cuts(assigned("dp=2"), "l.0.e.0.w") == ["-, -"]


def test_roles_are_given_to_axes_of_the_mesh() -> None:
    found = assigned("a=2,b=3", ep="a b", etp="")
    assert cuts(found, "l.0.e.0.w", "l.0.e.5.w", "l.0.w") == [
        "-, - | only(a=0 b=0)",
        "-, - | only(a=1 b=2)",
        "-, -",
    ]
    assert cuts(assigned("a=2,b=3", tp="b a"), "l.0.w", "in", "l.0.e.0.w") == ["b a, -"] * 3
    # A role counts more than a name.
    assert cuts(assigned("tp=2,x=2", tp="x"), "in") == ["x, -"]
    assert cuts(assigned("x=4", tp="x:(1)2", fsdp="x:(2)2"), "l.0.w") == ["x:(1)2 / x:(2)2, -"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("tp=2", {"ep": "dp"}, "axis 'ep' cannot be mapped to 'dp': unknown axis 'dp'"),
        ("tp=2", {"ep": "t-p"}, "axis 'ep' cannot be mapped to 't-p': cannot read the axis"),
        ("tp=6", {"ep": "tp"}, "axis tp is used in dimension 0 and the restricted axes"),
        (
            "x=6",
            {"ep": "x:(1)2"},
            r"distributed over axis 'ep', mapped to x:\(1\)2; map it to whole axes",
        ),
        (
            "a=2,b=3",
            {"pp": "a b"},
            r"coordinates \[0, 5\] of axis 'pp', mapped to a b, are not a product",
        ),
        ("pp=2", {"layer": "sizes[1,2]"}, "'mine', layer: sizes .* add up to 3, but the length"),
    ],
)
def test_roles_that_cannot_be(text: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        assigned(text, **options)


def test_layers_by_bytes() -> None:
    shapes = {"in": (40, 2), "l.0.w": (10,), "l.1.w": (10,), "l.2.w": (10,), "l.3.w": (10,)}
    mesh = DeviceMesh.of(pp=2)
    recipe = RECIPE.with_options({"layer": "bytes"})
    untied = CONFIG | {"tied": False}

    def second_stage(sizes: dict[str, int] | None) -> list[str]:
        found = assign(shapes, mesh, (), recipe, untied, sizes)
        return [name for name, layout in found.layouts.items() if layout.holders == (1,)]

    assert second_stage(None) == ["l.0.w", "l.1.w", "l.2.w", "l.3.w"]
    wide = dict.fromkeys(shapes, 8) | {"in": 2}
    assert second_stage(wide) == ["l.1.w", "l.2.w", "l.3.w"]


def test_bytes_are_those_of_ranks() -> None:
    """Copies count, and what is cut does not count twice."""
    shapes = {f"l.{layer}.w": (8,) for layer in range(5)}
    shapes |= {"l.0.e.0.w": (8,), "l.0.e.1.w": (8,), "l.0.e.2.w": (8,), "l.0.e.3.w": (8,)}
    rules = (Rule("l.{layer}.e.{expert}.w", "-"), Rule("l.{layer}.w", "-"))
    recipe = Recipe("r", "", (), ("ep", "pp"), rules, numbers=NUMBERS)
    recipe = recipe.with_options({"layer": "bytes"})
    config = {"layers": 5, "experts": 4}
    # Four experts weigh as much as four layers alone, and as one where each has a rank.
    for ep, first in ((1, 1), (4, 2)):
        found = assign(shapes, DeviceMesh.of(pp=2, ep=ep), (), recipe, config)
        stages = [found.layouts[f"l.{layer}.w"].holders[0] // ep for layer in range(5)]
        assert stages == [0] * first + [1] * (5 - first)


def test_rules_by_hand_follow_the_placement_of_the_recipe() -> None:
    rules = (Rule("l.{layer}.w", "-, tp"), Rule("l.2.*", "-, - | only(ep=0)"))
    found = assigned("pp=2,ep=2,tp=2", rules)
    assert cuts(found, "l.3.w", "l.2.w", "l.2.e.0.w") == [
        "-, tp | only(pp=1)",
        "-, tp | only(pp=1)",
        "-, - | only(ep=0)",
    ]


def test_a_number_that_nothing_explains() -> None:
    with pytest.raises(
        RecipeError, match=r"no recipe defines the number \{layer\} of a rule's pattern"
    ):
        assign({"l.0": (2,)}, DeviceMesh.of(tp=2), [Rule("l.{layer}", "tp")])
    with pytest.raises(RecipeError, match=r"the number 'layer' is undefined; add a table \[num"):
        Recipe("r", "", (), ("tp",), (Rule("l.{layer}", "tp"),))
    with pytest.raises(RecipeError, match="the number 'layer' is undefined"):
        Recipe("r", "", (), ("tp",), (Rule("in", "tp", at=(("layer", ("first",)),)),))


@pytest.mark.parametrize(
    ("rules", "config", "message"),
    [
        ((), {"experts": 6}, "recipe 'mine', layer: `layers` is not in the model's config"),
        ((), None, "`layers` of the model's config is needed and there is none"),
        (
            (),
            {"layers": 3, "experts": 6},
            r"tensor 'l\.3\.w' of .*number 3 of a name, but .* is 3",
        ),
        ((Rule("l.0.w", "-, - | only(pp=2)"),), CONFIG, r"only coordinates \[2\] of axis pp"),
        (
            (Rule("l.{layer}.w", "-, - | only(pp=0)"),),
            CONFIG,
            "axis pp is restricted twice",
        ),
    ],
)
def test_places_that_cannot_be(
    rules: tuple[Rule, ...], config: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        assign(SHAPES, DeviceMesh.of(pp=2, ep=2), rules, RECIPE, config)


def test_two_numbers_cannot_share_an_axis() -> None:
    numbers = {"layer": NUMBERS["layer"], "expert": Numbering("pp", "experts")}
    rules = (Rule("l.{layer}.e.{expert}.w", "-"),)
    recipe = Recipe("r", "", (), ("pp",), rules, numbers=numbers)
    with pytest.raises(RecipeError, match="two numbers of a name are distributed over axis 'pp'"):
        assign({"l.0.e.0.w": (2,)}, DeviceMesh.of(pp=2), (), recipe, CONFIG)


def test_options_are_names_of_the_recipe() -> None:
    with pytest.raises(RecipeError, match="'mine' has no option 'x'; its options are layer, exper"):
        RECIPE.with_options({"x": "1"})
    with pytest.raises(RecipeError, match="the cut 'even' is not a cut rule"):
        RECIPE.with_options({"layer": "even"})
    assert RECIPE.with_options({}) == RECIPE
    assert parse_options({"a": "b"}) == {"a": "b"}
    assert parse_options(["a = b=c ", "d="]) == {"a": "b=c", "d": ""}
    for texts in (["a"], ["=b"], ["a=1", "a=2"]):
        with pytest.raises(RecipeError, match="write name=value"):
            parse_options(texts)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cuts": {"rows": "even"}}, "the cut 'even' is not a cut rule such as ceil"),
        ({"cuts": {"tp": "ceil"}}, "has two things named 'tp'; rename one"),
        ({"cuts": {"layer": "ceil"}, "numbers": NUMBERS}, "has two things named 'layer'"),
        (
            {"numbers": {"n": Numbering("zp", "n")}},
            "number 'n' refers to axis 'zp'; its axes are tp",
        ),
        ({"stand_ins": {"zp": "tp"}}, "a stand-in refers to axis 'zp'"),
        ({"stand_ins": {"tp": "zp"}}, "a stand-in refers to axis 'zp'"),
        ({"mesh_axes": {"zp": "tp"}}, "a mapping refers to axis 'zp'"),
    ],
)
def test_recipes_that_cannot_be(more: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe("mine", "", (), ("tp", "ep", "pp"), (Rule("*", "..."),), **more)  # type: ignore[arg-type]


def test_stand_ins_in_a_circle_end() -> None:
    stand_ins = {"tp": "etp", "etp": "tp"}
    recipe = Recipe("r", "", (), ("tp", "etp"), (Rule("*", "tp, ..."),), stand_ins=stand_ins)
    assert recipe.map_axes(DeviceMesh.of(x=2)) == {"tp": (), "etp": ()}
    assert str(assign({"a": (2,)}, DeviceMesh.of(etp=2), (), recipe).specs["a"]) == "etp"


def test_bytes_of_ranks_include_padding() -> None:
    shapes = {"a": (5, 2), "b": (3,), "c": ()}
    rules = [Rule("a", "tp@pad4, -"), Rule("b", "- | only(tp=1)"), Rule("c", "...")]
    found = assign(shapes, DeviceMesh.of(tp=2), rules)
    assert found.rank_bytes({"a": 2, "b": 4, "c": 8}) == {0: 16 + 8, 1: 16 + 12 + 8}
