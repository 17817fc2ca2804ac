"""Where members lie in a fused dimension, against an index by index reading of groups.

Names by tables of patterns, forwards and backwards.

Fused parameters are cut so that every rank has its part of each member.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import DeviceMesh, ShardingSpec, spec
from reshard.errors import RecipeError, UsageError
from reshard.mesh import Axis
from reshard.recipes.assignment import assign
from reshard.recipes.library import load_recipe, shipped_recipes
from reshard.recipes.naming import Fusion, find_by_pattern, find_foreign_name, make_fused_spec


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_every_index_belongs_to_a_member(shares: list[int], groups: int, times: int) -> None:
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
    with pytest.raises(RecipeError, match="groups is 0"):
        Fusion(("a", "b"), groups=0)


def test_invalid_fusions_are_refused() -> None:
    with pytest.raises(RecipeError, match="members is 'ab'"):
        Fusion("ab")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"shares is 1\.5"):
        Fusion(("a", "b"), (1.5, 1.5))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="dimension is '0'"):
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


def test_local_names_count_from_zero() -> None:
    mesh = DeviceMesh.of(pp=2, ep=2)
    found = assign(SHAPES, mesh, (), load_recipe("qwen3_moe"), CONFIG, allow=["unknown"])
    # Five layers on two stages are 3 and 2. Rank 3 is on stage 1, and has experts 2 and 3.
    names = found.local_names(3)
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
    whole = found.local_names(0)
    assert all(name == local for name, local in whole.items())
    assert len(whole) == 2 + 3 + 3 * 2
    assert found.local_names(4) == {}


FOREIGN_CONFIG = {
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
    table = load_recipe(recipe).naming(convention, FOREIGN_CONFIG)
    told = set()
    for theirs, own in table.items():
        members = own.members if isinstance(own, Fusion) else (own,)
        for member in members:
            name = member.replace("*", "3").replace("{}", "2")
            found = find_foreign_name(name, table)
            assert found is not None
            meaning = find_by_pattern(found[0], table) if found[0] not in table else table[found[0]]
            assert meaning == (name if found[1] is None else found[1])
            assert name in (found[1].tensors if found[1] else [name])
            told.add(found[0])
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
    assert found is not None and found[1] is not None
    assert (found[0], found[1].members) == (
        "d.3.fc1.weight12",
        ("m.3.e.12.gate", "m.3.e.12.up"),
    )
    assert find_by_pattern("d.3.fc1.weight12", table) == found[1]


def test_a_name_that_cannot_be_filled_in() -> None:
    with pytest.raises(UsageError, match="more `\\*` than the pattern"):
        find_foreign_name("x", {"a.*": "x"})


MESH = DeviceMesh.of(tp=2, fsdp=3)


def indices(sharding: ShardingSpec, length: int, rank: int) -> list[int]:
    """What a rank has of a dimension, in its memory's order."""
    table = sharding.layout((length,)).tables[0]
    part = int(sharding.layout((length,)).cell_part[rank, 0])
    return list(itertools.chain(*(range(a, b) for a, b, _, _ in table.runs_of(part))))


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(2, 5),
    st.sampled_from(["x", "x@balanced", "x@unit2", "x@heads6"]),
)
def test_a_rank_has_its_part_of_each_member(
    shares: list[int], scale: int, parts: int, text: str
) -> None:
    mesh = DeviceMesh.of(x=parts)
    names = [f"m{number}" for number in range(len(shares))]
    lengths = {name: 6 * scale * share for name, share in zip(names, shares, strict=True)}
    cut = spec(mesh, text)
    shapes = {name: (length,) for name, length in lengths.items()}
    fusion = Fusion(tuple(names), tuple(shares))
    fused = make_fused_spec("f", fusion, dict.fromkeys(names, cut), shapes)
    for rank in range(parts):
        expected, begin = [], 0
        for length in lengths.values():
            expected += [begin + index for index in indices(cut, length, rank)]
            begin += length
        assert indices(fused, begin, rank) == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 6))
def test_groups_are_sharded_whole(a: int, b: int, groups: int) -> None:
    lengths = {"a": a * groups, "b": b * groups}
    shapes = {name: (length,) for name, length in lengths.items()}
    fusion = Fusion(("a", "b"), (a, b), groups)
    for parts in range(1, groups + 1):
        cut = spec(DeviceMesh.of(x=parts), "x")
        fused = make_fused_spec("f", fusion, dict.fromkeys("ab", cut), shapes)
        total = sum(lengths.values())
        held = [indices(fused, total, rank) for rank in range(parts)]
        assert list(itertools.chain(*held)) == list(range(total))
        assert all(len(part) % (a + b) == 0 for part in held)
    cut = spec(DeviceMesh.of(x=groups + 1), "x")
    with pytest.raises(RecipeError, match=f"in {groups} groups, which {groups + 1} ranks"):
        make_fused_spec("f", fusion, dict.fromkeys("ab", cut), shapes)


CASES = [
    # Members' cuts, the fused one's. Storage is cut below, or alone, whatever is stored.
    ("tp / fsdp, -", "tp / fsdp, -", "tp@blocks[12,12] / fsdp, -"),
    ("fsdp, -", "fsdp, -", "fsdp, -"),
    ("-, tp", "-, tp", "-, tp"),
    ("-, -", "-, -", "-, -"),
    ("tp@heads4, fsdp", "tp@heads2, fsdp", "tp@blocks[12,12], fsdp"),
    ("tp@sizes[9,3], -", "tp, -", "tp@pieces[9:3,6:6], -"),
    ("tp, - | only(fsdp=1)", "tp, - | only(fsdp=1)", "tp@blocks[12,12], - | only(fsdp=1)"),
    # Several ranks hold the same, or padding: every member keeps its rule.
    ("tp@pad8, -", "tp@pad8, -", "tp@pad8@blocks[12,12], -"),
    ("tp fsdp@heads12, -", "tp fsdp@heads3, -", "tp fsdp@joined[12@heads12,12@heads3], -"),
]


@pytest.mark.parametrize(("a", "b", "expected"), CASES)
def test_fusing_by_hand(a: str, b: str, expected: str) -> None:
    specs = {"a": spec(MESH, a), "b": spec(MESH, b)}
    shapes = dict.fromkeys("ab", (12, 6))
    assert str(make_fused_spec("f", Fusion(("a", "b")), specs, shapes, [Axis("fsdp")])) == expected


STACKS = [
    # How a member is cut where expert {} lives, the fusion, and how the stack is cut.
    ("tp / fsdp, -", {}, "-, tp@blocks[12,12] / fsdp, -"),
    ("tp, - | only(ep={})", {}, "ep, tp@blocks[12,12], -"),
    ("tp, - | only(ep={} pp=1)", {}, "ep, tp@blocks[12,12], - | only(pp=1)"),
    ("tp, - | only(ep={})", {"transposed": True}, "ep, -, tp@blocks[12,12]"),
    ("-, tp", {"transposed": True}, "-, tp, -"),
    ("tp, fsdp", {"groups": 12, "transposed": True}, "-, fsdp, tp@groups2"),
    ("tp@sizes[8,4], -", {"groups": 12}, "-, tp@sizes[8,4]@groups2, -"),
]


@pytest.mark.parametrize(("cut", "how", "expected"), STACKS)
def test_stacked_members_keep_the_sharding_of_each(
    cut: str, how: dict[str, Any], expected: str
) -> None:
    """Five experts over three coordinates: two, two and one."""
    mesh = DeviceMesh.of(pp=2, ep=3, tp=2, fsdp=3)
    fusion = Fusion(("{}.gate", "{}.up"), stacked=5, **how)
    specs = {name: spec(mesh, cut.format(int(name[0]) // 2)) for name in fusion.tensors}
    shapes = dict.fromkeys(specs, (12, 6))
    found = make_fused_spec("f", fusion, specs, shapes, [Axis("fsdp")])
    assert str(found) == expected
    assert found.layout(fusion.shape_with((24, 6))).shape[0] == 5


def test_stacks_over_several_axes_and_uneven_ones() -> None:
    mesh, fusion = DeviceMesh.of(dp=2, tp=2), Fusion(("{}.down",), stacked=4)
    shapes = dict.fromkeys(fusion.tensors, (4, 6))
    for places, expected in (
        ([(0, 0), (0, 1), (1, 0), (1, 1)], "dp tp, -, -"),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], "tp dp, -, -"),
        ([(0, 0), (0, 0), (0, 0), (1, 0)], "dp@sizes[3,1], -, - | only(tp=0)"),
    ):
        specs = {
            name: spec(mesh, f"-, - | only(dp={dp} tp={tp})")
            for name, (dp, tp) in zip(fusion.tensors, places, strict=True)
        }
        assert str(make_fused_spec("f", fusion, specs, shapes)) == expected
    specs["1.down"] = spec(mesh, "-, - | only(dp=1 tp=0)")
    with pytest.raises(RecipeError, match="are not divided consecutively along dp"):
        make_fused_spec("f", fusion, specs, shapes)
    specs["1.down"] = spec(mesh, "-, - | only(tp=0)")
    with pytest.raises(RecipeError, match="are not divided consecutively along dp"):
        make_fused_spec("f", fusion, specs, shapes)
    specs["1.down"] = spec(mesh, "tp, -")
    with pytest.raises(RecipeError, match=r"is a stack of '0\.down', sharded as"):
        make_fused_spec("f", fusion, specs, shapes)


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        ("tp, -", "-, tp", "shard them over the same axes"),
        ("tp, -", "tp, fsdp", "shard them over the same axes"),
        ("tp, - | only(fsdp=1)", "tp, - | only(fsdp=2)", "shard them over the same axes"),
        ("fsdp / tp, -", "fsdp / tp, -", "shards again over"),
        ("tp / fsdp@balanced, -", "tp / fsdp, -", "are sharded by 2 rules"),
    ],
)
def test_members_that_cannot_be_fused_are_refused(a: str, b: str, match: str) -> None:
    specs = {"a": spec(MESH, a), "b": spec(MESH, b)}
    shapes = dict.fromkeys("ab", (9, 6))
    with pytest.raises(RecipeError, match=match):
        make_fused_spec("f", Fusion(("a", "b")), specs, shapes, [Axis("fsdp")])
    assert math.prod(shapes["a"]) == 54
