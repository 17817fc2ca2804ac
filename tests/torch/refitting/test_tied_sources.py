"""Tied tensors of a source that are two."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from reshard.layout import Box, Layout  # noqa: E402
from reshard.torch.refitting.tied_sources import (  # noqa: E402
    compute_checksum,
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


def test_tensors_of_different_ranks_are_pairs_where_their_boxes_are_equal() -> None:
    halves = Box((0, 0), (2, 2)), Box((2, 0), (4, 2))
    rows, later = (
        Layout.from_boxes((4, 2), [(first, halves[0]), (first + 1, halves[1])], 4)
        for first in (0, 2)
    )
    pairs = find_distant_pairs({"head": "embed"}, {"embed": rows, "head": later}, {"embed"})
    assert [pair[:2] for pair in pairs] == [("head", "embed")]
    for layouts, used in (
        ({"embed": rows, "head": later}, {"embed", "head"}),
        ({"embed": rows, "head": rows}, {"embed"}),
        ({"embed": rows, "head": Layout.whole((4, 2), [3], 4)}, {"embed"}),
        ({"head": later}, {"embed"}),
    ):
        assert find_distant_pairs({"head": "embed"}, layouts, used) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_checksums_are_of_all_bytes(dtype: torch.dtype) -> None:
    value = torch.arange(21).reshape(3, 7).to(dtype)
    first = compute_checksum(value)
    assert compute_checksum(value.t().contiguous().t()) == first
    assert compute_checksum(torch.cat([value[:1], value])[1:]) == first
    seen = {first}
    for at in range(21):
        other = value.clone()
        other.view(-1)[at] = 100
        seen.add(compute_checksum(other))
    assert len(seen) == 22
    assert compute_checksum(value[:0]) != first
