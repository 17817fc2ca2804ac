"""Boxes that continue one another are one transfer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import reshard
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers, coalesce
from reshard.layout import Box, Layout
from strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]


def continues(one: Transfers, a: int, b: int) -> bool:
    """Whether row `b` begins where row `a` ends, in one dimension, at all places alike."""
    if any(
        getattr(one, name)[a] != getattr(one, name)[b]
        for name in ("source_cell", "target_cell", "order")
    ):
        return False
    ends = [one.start, one.source_start, one.target_start]
    apart = [
        d
        for d in range(one.shape.shape[1])
        if one.shape[a, d] != one.shape[b, d] or any(end[a, d] != end[b, d] for end in ends)
    ]
    return len(apart) == 1 and all(
        end[a, apart[0]] + one.shape[a, apart[0]] == end[b, apart[0]] for end in ends
    )


@given(movements())
def test_no_transfer_continues_another(movement: Movement) -> None:
    (source, _), (target, _) = movement
    transfers = LayoutChange(source, target).transfers
    rows = range(min(len(transfers), 60))
    assert not [(a, b) for a in rows for b in rows if a != b and continues(transfers, a, b)]


@given(movements())
def test_boxes_that_were_split_are_joined_again(movement: Movement) -> None:
    (source, _), (target, _) = movement
    plan = LayoutChange(source, target)
    transfers = plan.transfers
    if not transfers.shape.size:
        return
    dimension = int(transfers.shape.max(axis=0).argmax())
    wide = transfers.shape[:, dimension] > 1
    first, second = transfers.shape.copy(), transfers.shape.copy()
    first[wide, dimension] //= 2
    second[:, dimension] -= first[:, dimension]
    behind = np.zeros_like(first)
    behind[:, dimension] = first[:, dimension]
    parts = [
        replace(transfers, shape=first),
        replace(
            transfers,
            shape=second,
            start=transfers.start + behind,
            source_start=transfers.source_start + behind,
            target_start=transfers.target_start + behind,
        ).take(wide),
    ]
    names = Transfers.__dataclass_fields__
    apart = Transfers(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})
    joined = coalesce(apart)
    assert len(joined) <= len(transfers)
    plan.verify(joined)


def even(parts: int, length: int, rule: str = "") -> Layout:
    mesh = reshard.DeviceMesh.of(tp=parts)
    return reshard.spec(mesh, f"tp{rule}").layout((length,))


def test_two_parts_to_three_are_four_transfers() -> None:
    transfers = LayoutChange(even(2, 12), even(3, 12)).transfers
    assert str(transfers).splitlines() == [
        "0 keeps [0:4]",
        "0 -> 1 [4:6]",
        "1 keeps [6:8]",
        "1 -> 2 [8:12]",
    ]


def test_an_unchanged_strided_layout_takes_none() -> None:
    glu = even(2, 16, "@stride2")
    assert len(LayoutChange(glu, glu).transfers.moving) == 0


@pytest.mark.parametrize("parts", [1, 4])
def test_a_strided_layout_to_other_counts(parts: int) -> None:
    """Two strides of two parts, in another number of parts: nothing is cut more than it must."""
    transfers = LayoutChange(even(2, 16, "@stride2"), even(parts, 16, "@stride2")).transfers
    expected = {
        1: ["0 keeps [0:4]", "0 keeps [8:12]", "1 -> 0 [4:8]", "1 -> 0 [12:16]"],
        4: [
            *("0 keeps [0:2]", "0 keeps [8:10]", "0 -> 1 [2:4]", "0 -> 1 [10:12]"),
            *("1 -> 2 [4:6]", "1 -> 2 [12:14]", "1 -> 3 [6:8]", "1 -> 3 [14:16]"),
        ],
    }[parts]
    assert sorted(str(transfers).splitlines()) == sorted(expected)


def test_boxes_that_overlap_are_not_cut_where_their_neighbours_begin() -> None:
    corners = [(0, 0), (0, 3), (3, 0), (3, 3)]
    boxes = [(slot, Box((a, b), (a + 5, b + 5))) for slot, (a, b) in enumerate(corners)]
    source = Layout.from_boxes((8, 8), boxes)
    transfers = LayoutChange(source, source).transfers
    assert [str(transfers.box(row)) for row in range(len(transfers))] == [
        str(box) for _, box in boxes
    ]
    assert transfers.stays.all()
