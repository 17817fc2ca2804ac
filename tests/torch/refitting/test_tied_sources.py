"""Tied tensors of a source that are two."""

from __future__ import annotations

from typing import Any

import pytest

import reshard

torch = pytest.importorskip("torch")

from reshard.layout import Box, Layout  # noqa: E402
from reshard.torch.refitting.tied_sources import (  # noqa: E402
    compute_checksum,
    describe_uncompared,
    find_difference,
    find_distant_pairs,
    find_tied_pairs,
)

TIES = {"head": "embed", "other": "head"}


def test_only_tensors_apart_of_which_one_is_used_are_pairs() -> None:
    embed, head = torch.zeros(3, 2), torch.zeros(3, 2)
    assert find_tied_pairs(TIES, {"embed": embed, "head": head}, {"embed"}) == (("head", "embed"),)
    assert find_tied_pairs(TIES, {"embed": embed, "other": head}, {"other"}) == (
        ("embed", "other"),
    )
    assert find_tied_pairs(TIES, {"embed": embed, "head": embed}, {"embed"}) == ()
    assert find_tied_pairs(TIES, {"embed": embed, "head": head}, {"embed", "head"}) == ()
    assert find_tied_pairs(TIES, {"head": head}, {"embed"}) == ()
    assert find_tied_pairs(TIES, {"embed": embed, "head": head[:2]}, {"embed"}) == ()
    assert find_tied_pairs(TIES, {"embed": embed, "head": head}, {"embed"}, {"head"}) == ()
    assert find_tied_pairs({}, {"embed": embed, "head": head}, {"embed"}) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_differences_are_those_of_bytes(dtype: torch.dtype) -> None:
    embed = torch.ones(4, 2).to(dtype)
    head = embed.clone().t().contiguous().t()
    pairs = (("head", "embed"),)
    assert find_difference(pairs, {"embed": embed, "head": head}) == ""
    head[3, 1] = 0
    message = find_difference(pairs, {"embed": embed, "head": head})
    assert "head of the source differs from embed" in message and "tie_weights" in message


def test_a_nan_is_equal_to_itself() -> None:
    embed = torch.tensor([float("nan"), 1.0])
    assert find_difference([("head", "embed")], {"embed": embed, "head": embed.clone()}) == ""


HALVES = Box((0, 0), (2, 2)), Box((2, 0), (4, 2))


def lay_out(first: int, boxes: tuple[Box, ...] = HALVES) -> Layout:
    return Layout.from_boxes((4, 2), [(first + n, box) for n, box in enumerate(boxes)], 4)


def test_tensors_that_no_rank_can_compare_are_pairs() -> None:
    def find(head: Layout, dtype: str = "int8", used: str = "embed", **more: Any) -> Any:
        source = {"embed": (lay_out(0), "int8"), "head": (head, dtype)}
        return find_distant_pairs({"head": "embed"}, source, {*used.split()}, **more)

    for head in (lay_out(2), lay_out(1), Layout.whole((4, 2), [3], 4)):
        (pair,) = find(head)
        assert pair == ("head", "embed", head, lay_out(0), "", "")
    assert find(lay_out(2), used="embed head") == find(lay_out(0)) == ()
    assert find(lay_out(2), shared=["head"]) == ()
    assert find(lay_out(2), "int16")[0].unlike == "int16 and int8"
    assert find(Layout.whole((6, 2), [3], 4))[0].unlike == "shapes [6, 2] and [4, 2]"
    overlapping = lay_out(0, (Box((0, 0), (3, 2)), Box((1, 0), (4, 2))))
    assert "overlap" in find(overlapping)[0].uncompared
    terms = reshard.spec(reshard.DeviceMesh.of(dp=2), "-, - | sum(dp)").layout((4, 2))
    assert "terms of a sum" in find(terms)[0].uncompared
    message = describe_uncompared(find(terms))
    assert "head of the source was not compared with embed" in message
    assert describe_uncompared(find(lay_out(2))) == ""
    assert find_distant_pairs({"head": "embed"}, {"head": (lay_out(2), "int8")}, {"embed"}) == ()


MESH = reshard.DeviceMesh.of(x=2, y=2)
SHARDINGS = {
    "whole": "-, -",
    "rows": "x, -",
    "columns": "-, y",
    "both": "x, y",
    "uneven": "x y, -",
    "reversed": "y x, -",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex128]


def sum_parts(value: torch.Tensor, layout: Layout, layouts: list[Layout]) -> int:
    parts = {
        rank: torch.cat([value[tuple(map(slice, *box))].reshape(-1) for box in boxes])
        for rank in range(layout.slots)
        if (boxes := layout.boxes(rank))
    }
    sums = (
        compute_checksum(layout, rank, part.view(layout.local_shape(rank) or ()), layouts)
        for rank, part in parts.items()
    )
    return sum(sums) % (1 << 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), (5, 7), (3, 0)])
def test_checksums_do_not_depend_on_the_sharding(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    value = (torch.arange(shape[0] * shape[1]) - 9).reshape(shape).to(dtype)
    third = value.numel() // 3
    flat = Layout.flat_ranges(shape, {1: (0, third), 3: (third, value.numel())}, slots=4)
    layouts = [flat, *(reshard.spec(MESH, text).layout(shape) for text in SHARDINGS.values())]
    assert len({sum_parts(value, layout, layouts) for layout in layouts}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_are_of_all_bytes(dtype: torch.dtype) -> None:
    value = torch.arange(21).reshape(3, 7).to(dtype)
    layout = Layout.whole((3, 7), [0], 1)

    def checksum(tensor: torch.Tensor) -> int:
        return compute_checksum(layout, 0, tensor, [layout])

    first = checksum(value)
    assert checksum(value.t().contiguous().t()) == first
    assert checksum(torch.cat([value[:1], value])[1:]) == first
    seen = {first, checksum(value[[2, 1, 0]]), checksum(value[:, [1, 0, *range(2, 7)]])}
    for at in range(21):
        other = value.clone()
        other.view(-1)[at] = 100
        seen.add(checksum(other))
    assert len(seen) == 24


def test_scalars_have_checksums() -> None:
    layout = Layout.whole((), [0], 1)
    sums = {
        compute_checksum(layout, 0, torch.tensor(number), [layout]) for number in (1, 2, 1.0, 1j)
    }
    assert len(sums) == 4
