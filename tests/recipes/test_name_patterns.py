"""Names by tables of patterns, forwards and backwards."""

from __future__ import annotations

import pytest

from reshard.errors import UsageError
from reshard.recipes.fusion import Fusion
from reshard.recipes.library import load_recipe, shipped_recipes
from reshard.recipes.name_patterns import find_by_pattern, find_foreign_name

CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
}


@pytest.mark.parametrize(
    ("recipe", "convention"),
    [(name, convention) for name in shipped_recipes() for convention in load_recipe(name).names],
)
def test_shipped_tables_are_read_back(recipe: str, convention: str) -> None:
    """What a name is called is that name again; a fused one is of the same members."""
    table = load_recipe(recipe).naming(convention, CONFIG)
    told = set()
    for theirs, own in table.items():
        members = own.members if isinstance(own, Fusion) else (own,)
        for member in members:
            name = member.replace("*", "3").replace("{}", "2")
            found = find_foreign_name(name, table)
            assert found is not None
            meaning = (
                find_by_pattern(found.name, table) if found.name not in table else table[found.name]
            )
            assert meaning == (name if found.fusion is None else found.fusion)
            assert name in (found.fusion.tensors if found.fusion else [name])
            told.add(found.name)
        assert theirs
    assert told


def test_the_first_entry_counts() -> None:
    table = {"a.*": "x.*", "b.*": "x.*", "c": "y"}
    assert find_foreign_name("x.7", table) == ("a.7", None)
    assert find_foreign_name("y", table) == ("c", None)
    assert find_foreign_name("z", table) is None
    assert find_foreign_name("xy.7", table) is None


def test_numbers_of_layers_and_experts_keep_their_places() -> None:
    table = {"d.*.fc1.weight*": Fusion(("m.*.e.*.gate", "m.*.e.*.up"))}
    found = find_foreign_name("m.3.e.12.up", table)
    assert found is not None and found.fusion is not None
    assert (found.name, found.fusion.members) == (
        "d.3.fc1.weight12",
        ("m.3.e.12.gate", "m.3.e.12.up"),
    )
    assert find_by_pattern("d.3.fc1.weight12", table) == found.fusion


def test_a_name_that_cannot_be_filled_in() -> None:
    with pytest.raises(UsageError, match="more `\\*` than the pattern"):
        find_foreign_name("x", {"a.*": "x"})
