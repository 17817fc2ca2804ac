"""Pieces are cut to parts that are dense, and know what they travel as."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.torch.exchange.packing.pieces import Piece, cut
from strategies import shapes


@given(shapes(min_rank=1), st.integers(4, 200))
def test_parts_are_small_and_together_the_whole(shape: tuple[int, ...], most_bytes: int) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    parts = list(cut(whole, most_bytes))
    assert all(part.numel() * 4 <= most_bytes for part in parts)
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), whole.reshape(-1))


@given(shapes(min_rank=0))
def test_a_piece_knows_its_bytes_and_where_its_elements_lie_packed(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    piece = Piece.of(whole, torch.float64)
    packed = whole.to(torch.float64).flatten()
    assert piece.size_bytes == packed.nbytes
    assert torch.equal(packed.as_strided(shape, piece.form.strides), whole.to(torch.float64))
