"""Tied tensors of a source that are two."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from reshard.torch.refitting.tied_sources import find_difference, find_tied_pairs  # noqa: E402

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
