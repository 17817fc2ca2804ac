"""Where members lie in a fused dimension, against an index by index reading of groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RecipeError
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.fusion import Fusion
from reshard.recipes.library import load_recipe
from reshard.recipes.local_names import local_names


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_every_index_is_one_of_a_member(shares: list[int], groups: int, times: int) -> None:
    members = tuple("abcd"[: len(shares)])
    fusion = Fusion(members, tuple(shares), groups)
    # Index by index: a group has `times` indices for each share.
    expected = [
        member
        for _ in range(groups)
        for member, share in zip(members, shares, strict=True)
        for _ in range(share * times)
    ]
    found: list[str] = []
    counts = dict.fromkeys(members, 0)
    for stretch in fusion.member_slices(len(expected)):
        assert stretch.start == len(found)
        assert stretch.member_start == counts[stretch.member]
        size = stretch.stop - stretch.start
        counts[stretch.member] += size
        found += [stretch.member] * size
    assert found == expected
    assert fusion.sizes(len(expected)) == tuple(expected.count(member) for member in members)


def test_lengths_that_do_not_divide() -> None:
    for length, fusion in ((5, Fusion(("a", "b"))), (6, Fusion(("a", "b"), (1, 1), 2))):
        with pytest.raises(RecipeError, match=f"length {length} cannot be cut"):
            fusion.member_slices(length)
    with pytest.raises(RecipeError, match=r"needs numbers of a config\.json"):
        Fusion(("a", "b"), groups="heads").member_slices(4)
    with pytest.raises(RecipeError, match="groups of 0"):
        Fusion(("a", "b"), groups=0)


def test_what_is_no_fusion() -> None:
    with pytest.raises(RecipeError, match="members or shares 'ab'"):
        Fusion("ab")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"a share of 1\.5"):
        Fusion(("a", "b"), (1.5, 1.5))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="dimension of '0'"):
        Fusion(("a", "b"), dimension="0")  # type: ignore[arg-type]


CONFIG = {"num_hidden_layers": 5, "num_experts": 4, "num_attention_heads": 4}
SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "mine": (3,),
    **{f"model.layers.{i}.input_layernorm.weight": (4,) for i in range(5)},
    **{
        f"model.layers.{i}.mlp.experts.{j}.up_proj.weight": (4, 4)
        for i in range(5)
        for j in range(4)
    },
}


def test_what_a_rank_has_is_counted_from_zero() -> None:
    mesh = DeviceMesh.of(pp=2, ep=2)
    found = assign(SHAPES, mesh, (), load_recipe("qwen3_moe"), CONFIG, allow=["unknown"])
    # Five layers on two stages are 3 and 2. Rank 3 is on stage 1, and has experts 2 and 3.
    names = local_names(found, 3)
    layer, expert = "model.layers.{}.input_layernorm.weight", "model.layers.{}.mlp.experts.{}"
    assert names == {
        "mine": "mine",
        **{layer.format(i): layer.format(i - 3) for i in (3, 4)},
        **{
            f"{expert.format(i, j)}.up_proj.weight": f"{expert.format(i - 3, j - 2)}.up_proj.weight"
            for i in (3, 4)
            for j in (2, 3)
        },
    }
    whole = local_names(found, 0)
    assert all(name == local for name, local in whole.items())
    assert len(whole) == 2 + 3 + 3 * 2
    assert local_names(found, 4) == {}
