"""Recipes: their files, the shipped ones, and the choice by model type."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from reshard.errors import RecipeError
from reshard.mesh import DeviceMesh
from reshard.recipes import recipe_file
from reshard.recipes.assignment import assign
from reshard.recipes.coupling import Coupling
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.library import SHIPPED, choose_recipe, load_recipe, shipped_recipes
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule

TEXT = """
name = "mine"
description = "a recipe of my own"
model_types = ["mine", "ours"]
axes = ["tp", "fsdp"]

[[rules]]
pattern = "*.weight"
spec = "tp@heads{heads}, -"

[[rules]]
pattern = "*"
spec = "..."
"""


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    path = _written(tmp_path, TEXT)
    expected = Recipe(
        "mine",
        "a recipe of my own",
        ("mine", "ours"),
        ("tp", "fsdp"),
        (Rule("*.weight", "tp@heads{heads}, -"), Rule("*", "...")),
    )
    assert load_recipe(path) == expected
    assert load_recipe(str(path)) == expected


def test_text_with_a_toml_ending_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path, TEXT)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("mine.toml").name == "mine"
    _written(tmp_path, TEXT).rename(tmp_path / "bert")
    assert load_recipe("./bert").name == "mine"
    assert load_recipe(Path("bert")).name == "mine"
    assert load_recipe("bert").name == "bert"


def test_description_and_model_types_may_be_left_out(tmp_path: Path) -> None:
    text = 'name = "n"\naxes = []\nrules = [{pattern = "*", spec = "..."}]'
    assert load_recipe(_written(tmp_path, text)) == Recipe("n", "", (), (), (Rule("*", "..."),))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mine"', "", "the key `name` is missing"),
        ('axes = ["tp", "fsdp"]', "", "the key `axes` is missing"),
        (TEXT[TEXT.index("[[") :], "", "the key `rules` is missing"),
        ('spec = "..."', "", r"the key `rules\[2\]\.spec` is missing"),
        ('pattern = "*"', "", r"the key `rules\[2\]\.pattern` is missing"),
        ('name = "mine"', 'nmae = "mine"', "unknown key `nmae`; the keys are name, axes, rules"),
        ('spec = "..."', 'spec = "-"\ncut = "-"', r"unknown key `rules\[2\]\.cut`; .* pattern, sp"),
        ('name = "mine"', "name = 3", "`name` is 3, text in quotes was expected"),
        ('name = "mine"', 'name = " "', "the recipe name ' ' is empty"),
        ('"a recipe of my own"', "[]", r"`description` is \[\], text"),
        ('["mine", "ours"]', '"mine"', "`model_types` is 'mine', a list of texts"),
        ('["tp", "fsdp"]', '["tp", 1]', r"`axes` is \['tp', 1\], a list of texts"),
        ('["tp", "fsdp"]', '["tp", "tp"]', r"axes of recipe 'mine': .* must differ"),
        ('["tp", "fsdp"]', '["t p"]', "axes of recipe 'mine': axis name 't p'"),
        (TEXT[TEXT.index("[[") :], "rules = 4", r"`rules` is 4, tables, each beginning"),
        (TEXT[TEXT.index("[[") :], "rules = [4]", r"`rules\[1\]` is 4, a table with"),
        (TEXT[TEXT.index("[[") :], "rules = []", "recipe 'mine' has no rules"),
        ('pattern = "*"', "pattern = 1", r"`rules\[2\]\.pattern` is 1, text"),
        ('spec = "..."', "spec = true", r"`rules\[2\]\.spec` is True, text"),
        ('spec = "..."', 'spec = " "', r"rules\[2\]: the rule '\*= ' has an empty spec"),
        ("{heads}", "{heads", r"rules\[1\]: cannot read '{' in the spec"),
        ("[[rules]]", "[[rules", "is not TOML: .*line 7"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in TEXT
    path = _written(tmp_path, TEXT.replace(old, new))
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"absent\.toml: No such file .*; give a shipped n"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(RecipeError, match=r"latin\.toml is not TOML"):
        load_recipe(tmp_path / "latin.toml")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"'LLama2'; did you mean llama\b.* are .*bert, "):
        load_recipe("LLama2")
    with pytest.raises(
        RecipeError, match=r"unknown recipe 'xyz'; The shipped recipes are .*bert, "
    ):
        load_recipe("xyz")


def test_every_shipped_recipe_loads_under_its_name_and_for_its_models() -> None:
    assert set(shipped_recipes()) >= {"bert", "llama"}
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description
        assert recipe.model_types
        for model_type in recipe.model_types:
            assert choose_recipe({"model_type": model_type}) is recipe
        # A recipe that extends another may have a rule of its own for a pattern of the other.
        assert len({(r.pattern, r.when, r.spec) for r in recipe.rules}) == len(recipe.rules)


def test_a_recipe_that_extends_another(tmp_path: Path) -> None:
    _written(tmp_path, TEXT)
    path = tmp_path / "more.toml"
    path.write_text(
        'name = "more"\nextends = "./mine.toml"\n[cuts]\na = "pad4"\n'
        '[[rules]]\npattern = "a"\nspec = "tp@{a}"'
    )
    base, found = load_recipe(tmp_path / "mine.toml"), load_recipe(path)
    assert found.rules == (Rule("a", "tp@{a}"), *base.rules)
    assert (found.name, found.description, found.model_types) == ("more", "", ())
    assert (found.axes, found.cuts) == (base.axes, {"a": "pad4"})
    assert (found.storage, found.coupled) == (("fsdp", "dp"), {})
    path.write_text('name = "more"\nextends = "mine.toml"\naxes = ["x"]')
    assert (load_recipe(path).axes, load_recipe(path).rules) == (("x",), base.rules)
    for text, message in (
        ('name = "more"\nextends = "more.toml"', "extends itself"),
        ('name = "more"\nextends = "absent.toml"', r"absent\.toml: No such file"),
        ('name = "more"\nextends = "absent"', "unknown recipe 'absent'"),
        ('name = "more"\nextends = 3', "`extends` is 3, text in quotes"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_recipe(path)


def test_sizes_stand_for_their_expressions(tmp_path: Path) -> None:
    text = (
        'name = "mine"\naxes = ["tp"]\n[sizes]\ninner = "heads * width"\nstate = "n"\n'
        '[coupled.mix]\nhead = "heads"\n[[rules]]\npattern = "*"\n'
        'spec = "tp@joined[{inner}@{mix.head},{state}], -"'
    )
    base = load_recipe(_written(tmp_path, text))
    config = {"heads": 2, "width": 3, "n": 4}
    found = assign({"w": (10, 1)}, DeviceMesh.of(tp=2), (), base, config)
    assert str(found.specs["w"]) == "tp@joined[6@heads2,4], -"
    path = tmp_path / "more.toml"
    path.write_text('name = "more"\nextends = "mine.toml"\n[sizes]\ninner = "10 - n"')
    assert load_recipe(path).sizes == {"inner": "10 - n", "state": "n"}


def test_an_extending_recipe_merges_couplings(tmp_path: Path) -> None:
    """Members come over those of the same name."""
    heads, state = Coupling((("q", "heads"), ("k", "groups"))), Coupling((("head", "n"),))
    text = TEXT.replace("[[rules]]", '[coupled.heads]\nq = "heads"\nk = "groups"\n[[rules]]', 1)
    base = load_recipe(_written(tmp_path, f'storage = ["z"]\n{text}'))
    assert (base.coupled, base.storage) == ({"heads": heads}, ("z",))
    path = tmp_path / "more.toml"
    path.write_text('name = "more"\nextends = "mine.toml"\n[coupled.state]\nhead = "n"')
    found = load_recipe(path)
    assert (found.coupled, found.storage) == ({"heads": heads, "state": state}, ("z",))
    path.write_text('name = "more"\nextends = "mine.toml"\n[coupled.heads]\nk = "n"\nr = "m"')
    assert load_recipe(path).coupled == {
        "heads": Coupling((("q", "heads"), ("k", "n"), ("r", "m")))
    }
    path.write_text(
        'name = "more"\nextends = "mine.toml"\n[[rules]]\npattern = "w"\nspec = "tp@{heads.v}"'
    )
    with pytest.raises(RecipeError, match=r"'heads' has no member as in \{heads\.v\}; its members"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[cuts]\nrows = 3", r"`cuts\.rows` is 3, text"),
        ('[cuts]\nrows = "even"', "mine.toml: the cut 'even' is not a cut rule"),
        ("cuts = 1", "`cuts` is 1, a table"),
        ('[stand_ins]\netp = "tp"', "a stand-in refers to axis 'etp'"),
        ("numbers = 1", "`numbers` is 1, a table"),
        ("[numbers]\nlayer = 1", r"`numbers\.layer` is 1, a table"),
        ('[numbers.layer]\naxis = "tp"', r"the key `numbers\.layer\.count` is missing"),
        (
            '[numbers.layer]\naxis = "tp"\ncount = "n"\nbeyond_last = 1',
            r"`numbers\.layer\.beyond_last` is 1, true or false",
        ),
        (
            '[numbers.layer]\naxis = "tp"\ncount = "n"\nbehind = "mtp.*"',
            r"`numbers\.layer\.behind` is 'mtp.\*', a list",
        ),
        (
            '[numbers.layer]\naxis = "tp"\ncount = "n"\ncut = "x"',
            "mine.toml, numbers.layer: the cut 'x' is not",
        ),
        ('[numbers.layer]\naxis = "zp"\ncount = "n"', "number 'layer' refers to axis 'zp'"),
        ('[numbers.layer]\naxis = "tp"\ncount = "n +"', "cannot read the expression 'n \\+'"),
        ("sizes = 1", "`sizes` is 1, a table"),
        ("[sizes]\ninner = 8", r"`sizes\.inner` is 8, text"),
        ('[sizes]\ninner = "a b"', "cannot read the expression 'a b'"),
        ('[sizes]\ntp = "a"', "has two things named 'tp'"),
        ("coupled = 1", "`coupled` is 1, a table"),
        ("[coupled]\nheads = 1", r"`coupled\.heads` is 1, a table"),
        ("[coupled.heads]\nq = 8", r"`coupled\.heads\.q` is 8, text"),
        ("[coupled.heads]", r"coupled\.heads: a coupling without members"),
        ('[coupled.heads]\nq = "a b"', r"coupled\.heads: cannot read the expression 'a b'"),
        ('[coupled."a.b"]\nq = "a"', r"`coupled\.a\.b` is .*, a name of letters"),
        ('[coupled.tp]\nq = "a"', "has two things named 'tp'"),
        ("storage = 1", "`storage` is 1, a list of texts"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(_written(tmp_path, TEXT.replace("[[rules]]", f"{more}\n[[rules]]", 1)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("at = 1", r"`rules\[2\]\.at` is 1, a table"),
        ('at = {layer = "first"}', r"`rules\[2\]\.at\.layer` is 'first', a list of texts"),
        ('at = {layer = ["middle"]}', "is at layer middle; write `first`, `last` or both"),
        ("at = {layer = []}", "write `first`, `last` or both"),
        ('at = {layer = ["last"]}', "the number 'layer' is undefined"),
        ("when = true", r"`rules\[2\]\.when` is True, text"),
        ("note = 1", r"`rules\[2\]\.note` is 1, text"),
    ],
)
def test_a_wrong_key_of_a_rule_is_named(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(_written(tmp_path, f"{TEXT}{more}"))
    assert "mine.toml" in str(caught.value)


def documented_file() -> str:
    text = recipe_file.__doc__ or ""
    return text[text.index("    name =") : text.index("A recipe that extends")]


def test_the_documented_file_can_be_read(tmp_path: Path) -> None:
    recipe = load_recipe(_written(tmp_path, documented_file()))
    first = recipe.rules[0]
    assert (first.at, first.when) == ((("layer", ("first", "last")),), "tie_word_embeddings")
    assert recipe.rules[1:] == load_recipe("llama").rules
    assert recipe.numbers == {
        "layer": Numbering("pp", "num_hidden_layers", "balanced", True, ("mtp.*",))
    }
    assert recipe.cuts == {"vocabulary": "ceil", "feed_forward": "ceil"}
    assert (recipe.axes, recipe.stand_ins) == (("tp", "fsdp", "etp", "pp"), {"etp": "tp"})
    assert list(recipe.names) == ["megatron", "vllm", "sglang"]
    head, gated, *inherited = recipe.names["megatron"].items()
    assert head == ("output_layer.weight", "lm_head.weight")
    members = tuple(f"model.layers.*.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert gated == ("decoder.layers.*.mlp.linear_fc1.weight", Fusion(members))
    assert dict(inherited).items() <= load_recipe("llama").names["megatron"].items()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", r"`names.other.a` is 1, text"),
        ("{}", r"`names.other.a.members` is missing"),
        ('{members = ["b"]}', r"fused from \['b'\]; give two members or more"),
        ('{members = ["b", "b"]}', "each once"),
        ('{members = ["b", "c"], shares = [1]}', "1 shares for the 2 members"),
        ('{members = ["b", "c"], shares = 1}', "shares is 1, a list"),
        (
            '{members = ["b", "c"], shares = [1, 0]}',
            "shares is 0, a whole number of at least 1",
        ),
        ('{members = ["b", "c"], groups = true}', "groups is True, a whole number"),
        ('{members = ["b", "c"], dimension = "0"}', "dimension is '0', a whole"),
        (
            '{members = ["b", "c"], dimension = -1}',
            "dimension is -1, a whole number of at least 0",
        ),
        ('{members = ["b", "c"], other = 1}', "unknown key `names.other.a.other`"),
    ],
)
def test_wrong_names_are_named(tmp_path: Path, value: str, message: str) -> None:
    text = f'name = "mine"\nextends = "llama"\n[names.other]\na = {value}\n'
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(_written(tmp_path, text))
    assert "mine.toml" in str(caught.value)


def test_names_of_another_convention() -> None:
    recipe = load_recipe("qwen3_moe")
    with pytest.raises(RecipeError, match="no names of 'jax'; it has names of: megatron, vllm"):
        recipe.naming("jax")
    with pytest.raises(RecipeError, match="`num_attention_heads` is not in the model's config"):
        recipe.naming("megatron", {"num_key_value_heads": 2})


def test_the_documented_keys_are_those_of_the_shipped_files() -> None:
    documented = tomllib.loads(documented_file())
    keys: set[str] = set()
    for name in shipped_recipes():
        keys |= set(tomllib.loads((SHIPPED / f"{name}.toml").read_text()))
    # Storage axes and replicas of all shipped recipes are those that a recipe has by default.
    assert keys | {"storage", "replicas"} == documented.keys()


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "no-such"}, {"model_type": None}, {"model_type": ["bert"]}]
)
def test_no_recipe_for_other_models(config: dict[str, object]) -> None:
    assert choose_recipe(config) is None
