"""Exchanges between real processes, and how messages share the memory they are packed in."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from live_processes import expect_all_end_well, run_ranks
from reshard.torch.exchange.exchange import ExchangeStep, MessageSlots, StagedMessage
from reshard.torch.exchange.packing.messages import MessagePieces, Piece, RankMessage

ROW, ROWS = 4, 6


def allocate_bytes(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


@given(st.lists(st.integers(0, ROWS - 2), max_size=12), st.integers(1, 4), st.booleans())
def test_a_slot_is_packed_anew_once_all_that_it_held_is_sent(
    rows: list[int], most: int, are_shared: bool
) -> None:
    whole = torch.arange(2 * ROW * ROWS, dtype=torch.int32).view(ROWS, 2 * ROW)
    # Two rows of half the columns each: not dense, and different ones share elements.
    pieces = [Piece.of(whole[row : row + 2, :ROW], torch.int32) for row in rows]
    messages = [
        RankMessage((0, number), 0, 1, True, MessagePieces.of([piece]))
        for number, piece in enumerate(pieces)
    ]
    slots = MessageSlots(messages, are_shared, most, 1 << 10, allocate_bytes)
    assert slots.size_bytes == min(most, len(rows)) * 8 * ROW
    steps = []
    before: list[set[int]] = []
    packs = 0
    for number, message in enumerate(messages):
        prepared = StagedMessage(message, torch.empty(0), [])
        step = ExchangeStep(message.key, 0, [prepared])
        slots.give(prepared, step)
        followed = {steps.index(one) for one in step.follows}
        before.append(followed.union(*(before[one] for one in followed)))
        packs += len(prepared.copies)
        for pack in prepared.copies:
            pack()
        # Steps are posted one behind the other, so nobody packs between these and the assertion.
        assert prepared.buffer.view(torch.int32).tolist() == (
            whole[rows[number] : rows[number] + 2, :ROW].flatten().tolist()
        )
        if prepared.copies:
            address = prepared.buffer.data_ptr()
            same = {
                other
                for other, one in enumerate(steps)
                if one.messages[0].buffer.data_ptr() == address
            }
            assert same <= before[number]
        steps.append(step)
    if not are_shared:
        assert packs == len(rows)
    elif len(set(rows)) <= most:
        assert packs == len(set(rows))


def test_what_lies_in_the_same_memory_already_is_not_prepared_again() -> None:
    whole = torch.arange(24.0).view(4, 6)
    piece = Piece.of(whole[:, :4], torch.float32)
    message = RankMessage((0, 0), 0, 1, True, MessagePieces.of([piece]))
    prepared = StagedMessage(message, torch.empty(0), [])
    first = MessageSlots([message], True, 1, 1 << 10, allocate_bytes)
    first.give(prepared, ExchangeStep(message.key, 0, [prepared]))
    packs = prepared.copies
    for memory, is_kept in ((first.memory, True), (allocate_bytes(first.size_bytes), False)):
        slots = MessageSlots([message], True, 1, 1 << 10, lambda _, given=memory: given)
        slots.give(prepared, ExchangeStep(message.key, 0, [prepared]))
        assert (prepared.copies is packs) == is_kept
        assert prepared.buffer.data_ptr() == memory.data_ptr()


def test_what_several_ranks_are_sent_is_packed_once() -> None:
    expect_all_end_well(run_ranks("exchange_process.py", 4))


def test_redistributions_run_in_the_background() -> None:
    expect_all_end_well(run_ranks("background_process.py", 3))
