"""Fused parameters are cut so that every rank has its part of each member."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import DeviceMesh, ShardingSpec, spec
from reshard.errors import RecipeError
from reshard.mesh import Axis
from reshard.recipes.fusion import Fusion
from reshard.recipes.shardings.fused_sharding import fused_spec

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
    fused = fused_spec("f", fusion, dict.fromkeys(names, cut), shapes)
    for rank in range(parts):
        expected, begin = [], 0
        for length in lengths.values():
            expected += [begin + index for index in indices(cut, length, rank)]
            begin += length
        assert indices(fused, begin, rank) == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 6))
def test_groups_are_dealt_out_whole(a: int, b: int, groups: int) -> None:
    lengths = {"a": a * groups, "b": b * groups}
    shapes = {name: (length,) for name, length in lengths.items()}
    fusion = Fusion(("a", "b"), (a, b), groups)
    for parts in range(1, groups + 1):
        cut = spec(DeviceMesh.of(x=parts), "x")
        fused = fused_spec("f", fusion, dict.fromkeys("ab", cut), shapes)
        total = sum(lengths.values())
        held = [indices(fused, total, rank) for rank in range(parts)]
        assert list(itertools.chain(*held)) == list(range(total))
        assert all(len(part) % (a + b) == 0 for part in held)
    cut = spec(DeviceMesh.of(x=groups + 1), "x")
    with pytest.raises(RecipeError, match=f"in {groups} groups, which {groups + 1} ranks"):
        fused_spec("f", fusion, dict.fromkeys("ab", cut), shapes)


CASES = [
    # Members' cuts, the fused one's. Storage is cut below, or alone, whatever is stored.
    ("tp / fsdp, -", "tp / fsdp, -", "tp@blocks[12,12] / fsdp, -"),
    ("fsdp, -", "fsdp, -", "fsdp, -"),
    ("-, tp", "-, tp", "-, tp"),
    ("-, -", "-, -", "-, -"),
    ("tp@heads4, fsdp", "tp@heads2, fsdp", "tp@blocks[12,12], fsdp"),
    ("tp@sizes[9,3], -", "tp, -", "tp@pieces[9:3,6:6], -"),
    ("tp, - | only(fsdp=1)", "tp, - | only(fsdp=1)", "tp@blocks[12,12], - | only(fsdp=1)"),
]


@pytest.mark.parametrize(("a", "b", "expected"), CASES)
def test_what_is_fused_by_hand(a: str, b: str, expected: str) -> None:
    specs = {"a": spec(MESH, a), "b": spec(MESH, b)}
    shapes = dict.fromkeys("ab", (12, 6))
    assert str(fused_spec("f", Fusion(("a", "b")), specs, shapes, [Axis("fsdp")])) == expected


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        ("tp, -", "-, tp", "cut them over the same axes"),
        ("tp, -", "tp, fsdp", "cut them over the same axes"),
        ("tp, - | only(fsdp=1)", "tp, - | only(fsdp=2)", "cut them over the same axes"),
        ("fsdp / tp, -", "fsdp / tp, -", "below another cut"),
        ("tp / fsdp@balanced, -", "tp / fsdp, -", "are cut by 2 rules"),
        ("tp@pad, -", "tp@pad, -", "or padding"),
        ("tp fsdp@heads3, -", "tp fsdp@heads3, -", "several hold the same of one"),
    ],
)
def test_what_cannot_be_fused(a: str, b: str, match: str) -> None:
    specs = {"a": spec(MESH, a), "b": spec(MESH, b)}
    shapes = dict.fromkeys("ab", (9, 6))
    with pytest.raises(RecipeError, match=match):
        fused_spec("f", Fusion(("a", "b")), specs, shapes, [Axis("fsdp")])
    assert math.prod(shapes["a"]) == 54
