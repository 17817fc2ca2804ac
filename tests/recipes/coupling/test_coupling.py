"""Couplings: their members, and how many there are of each."""

from __future__ import annotations

import pytest

from reshard.errors import RecipeError
from reshard.recipes.coupling.coupling import Coupling

HEADS = Coupling((("query", "heads"), ("key_value", "groups|heads"), ("rows", "heads * 4")))


def test_counts_by_the_config() -> None:
    assert HEADS.counts({"heads": 8, "groups": 2}) == {"query": 8, "key_value": 2, "rows": 32}
    assert HEADS.counts({"heads": 8}) == {"query": 8, "key_value": 8, "rows": 32}


def test_counts_by_the_layer() -> None:
    one = Coupling((("query", "heads[layer]"),))
    assert one.counts({"heads": [2, 4]}, {"layer": 1}) == {"query": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"heads": 8, "groups": 3}, r"3 of key_value \(`groups\|heads`\) for 8 of query"),
        ({"heads": 0}, r"0 of query \(`heads`\) for 0 of query"),
        ({"groups": 3}, "`heads` is not in the model's config"),
        (None, "there is none; put the model's config.json"),
    ],
)
def test_counts_that_cannot_be(config: dict[str, object] | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        HEADS.counts(config)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), "a coupling without members; name what is counted"),
        ((("", "a"),), "the member '' of a coupling; give each a name"),
        ((("a.b", "a"),), "the member 'a.b' of a coupling"),
        ((("a", "a"), ("a", "b")), "the member 'a' of a coupling"),
        ((("a", "a b"),), "cannot read the expression 'a b'"),
    ],
)
def test_members_that_cannot_be(members: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Coupling(members)
