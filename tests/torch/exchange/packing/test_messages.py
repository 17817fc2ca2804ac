"""Both ends of every message list the same, whatever the layouts and the limit."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reshard
from reshard.errors import PlanError
from reshard.layout import Layout
from reshard.plans.schedule import ALIGNMENT_BYTES
from reshard.torch.exchange.packing.messages import (
    MessagePieces,
    Piece,
    RankMessage,
    RankTransfers,
    cut,
    list_messages,
    pack_messages,
)
from selection import choose
from strategies import layouts, shapes

RANKS = 16


def local(layout: Layout, rank: int, dtype: torch.dtype) -> torch.Tensor | None:
    shape = layout.local_shape(rank) if rank < layout.slots else None
    return None if shape is None else torch.zeros(shape, dtype=dtype)


@st.composite
def plans(draw: st.DrawFn) -> reshard.Plan:
    shape = draw(shapes())
    plan = reshard.plan(draw(layouts(shape)), draw(layouts(shape)), dtype="int16")
    assume(max(plan.source.slots, plan.target.slots) <= RANKS)
    try:
        _ = plan.change.routes
    except PlanError:
        assume(False)
    return plan


@settings(max_examples=choose(18, 60))
@given(plans(), st.sets(st.integers(0, RANKS - 1)), st.integers(0, RANKS - 1))
def test_transfers_of_some_ranks_and_of_others(
    plan: reshard.Plan, peers: set[int], rank: int
) -> None:
    ends = (local(plan.source, rank, torch.int16), local(plan.target, rank, torch.int16))
    whole = RankTransfers.of(plan.change, plan.for_rank(rank), rank, *ends)
    halves = whole.split(peers)
    found = [list_messages([half] if half else [], rank, RANKS, 1 << 21)[0] for half in halves]
    assert all(message.peer in peers for message in found[0])
    assert not any(message.peer in peers for message in found[1])
    sizes = sorted((message.key, message.size_bytes) for of in found for message in of)
    every = list_messages([whole], rank, RANKS, 1 << 21)[0]
    assert sizes == [(message.key, message.size_bytes) for message in every]
    rows = [len(half.received) + len(half.sent) for half in halves if half]
    assert 0 not in rows and sum(rows) == len(whole.received) + len(whole.sent)


@settings(max_examples=choose(15, 40))
@given(
    st.lists(plans(), min_size=2, max_size=2),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.integers(0, RANKS - 1),
)
def test_tensors_of_one_kind_are_listed_as_they_are_one_by_one(
    of: list[reshard.Plan], kinds: list[int], rank: int
) -> None:
    alone = []
    for plan in (of[kind] for kind in kinds):
        ends = (local(plan.source, rank, torch.int16), local(plan.target, rank, torch.int16))
        alone.append(RankTransfers.of(plan.change, plan.for_rank(rank), rank, *ends))
    together = []
    for kind in sorted(set(kinds), reverse=True):
        numbers = [number for number, one in enumerate(kinds) if one == kind]
        sources = [source for number in numbers for source in alone[number].sources]
        targets = [target for number in numbers for target in alone[number].targets]
        first = alone[numbers[0]]
        together.append(first._replace(sources=sources, targets=targets, numbers=numbers))
    one, other = (list_messages(given, rank, RANKS, 48) for given in (alone, together))
    assert [m.key for m in one[0]] == [m.key for m in other[0]]
    assert [m.contents for m in one[0]] == [m.contents for m in other[0]]
    for own, its in zip(one[1], other[1], strict=True):
        assert own.target.data_ptr() == its.target.data_ptr()
        assert own.source.data_ptr() == its.source.data_ptr()


@settings(max_examples=choose(18, 60))
@given(
    st.lists(plans(), min_size=1, max_size=3),
    st.sampled_from([16, 48, 1 << 21]),
    st.sampled_from([1, 4]),
)
def test_both_ends_of_every_message_agree(
    of: list[reshard.Plan], message_bytes: int, in_a_turn: int
) -> None:
    sent: dict[tuple[int, ...], RankMessage] = {}
    received: dict[tuple[int, ...], RankMessage] = {}
    for rank in range(RANKS):
        movements = [
            RankTransfers.of(
                plan.change,
                plan.for_rank(rank),
                rank,
                local(plan.source, rank, torch.int16),
                local(plan.target, rank, torch.int16),
            )
            for plan in of
        ]
        messages, _, _ = list_messages(movements, rank, RANKS, message_bytes, in_a_turn)
        keys = [message.key for message in messages]
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
        for message in messages:
            assert message.peer != rank
            assert message.offsets[-1] <= message_bytes
            assert all(offset % ALIGNMENT_BYTES == 0 for offset in message.offsets[:-1])
            (sent if message.is_sent else received)[message.key] = message
    assert sent.keys() == received.keys()
    for key, message in sent.items():
        step, stage, order, turn, shift, number, sender = key
        assert (step, stage) == (0, 0)
        assert turn == number // in_a_turn
        assert received[key].peer == sender
        assert message.peer == (sender + shift) % RANKS
        shapes_of = [
            [tuple(piece.view.shape) for piece in end.pieces] for end in (message, received[key])
        ]
        assert shapes_of[0] == shapes_of[1]
        # Only what is not the first contribution is combined.
        assert all((piece.reduction is not None) == (order > 0) for piece in received[key].pieces)
    assert sum(m.size_bytes for m in sent.values()) == sum(plan.moved_bytes for plan in of)


def test_large_pieces_travel_alone_and_small_ones_together() -> None:
    small, large = torch.zeros(10), torch.zeros(300, 1024)
    pieces = MessagePieces.of(Piece.of(one, torch.float32) for one in (small, large, small))
    together, *alone = pack_messages(pieces, 1 << 20)
    assert [tuple(piece.view.shape) for piece in together] == [(10,), (10,)]
    assert [tuple(piece.view.shape) for (piece,) in alone] == [(256, 1024), (44, 1024)]


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
