"""`print(layout)`: its cuts, and who holds what, in a few lines however many ranks there are."""

from __future__ import annotations

import textwrap

import pytest

import reshard
from reshard.layout import Layout

MESH = reshard.DeviceMesh.of(dp=2, tp=4)


def text_of(spec: str, *shape: int) -> str:
    return str(reshard.spec(MESH, spec).layout(shape))


def block(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_each_dimension_shows_its_parts_and_their_ranks() -> None:
    assert text_of("dp, tp", 6, 4096) == block(
        """
        6 x 4096 on ranks 0-7
        dimension 0 in 2 parts
          0:3  ranks 0-3
          3:6  ranks 4-7
        dimension 1 in 4 parts
          0:1024     ranks 0,4
          1024:2048  ranks 1,5
          2048:3072  ranks 2,6
          3072:4096  ranks 3,7
        """
    )


def test_what_is_not_cut_is_whole() -> None:
    assert text_of("-, -", 4, 4) == "4 x 4 on ranks 0-7\ndimension 0 whole\ndimension 1 whole"
    assert str(Layout.replicated((), 3)) == "scalar on ranks 0-2"
    assert str(Layout.replicated((0,), 1)) == "0 on rank 0\ndimension 0 whole"
    assert str(Layout.whole((2,), [], 4)) == "2 on no ranks\ndimension 0 in 1 parts"


def test_uneven_interleaved_and_padded_parts() -> None:
    assert text_of("tp", 7) == block(
        """
        7 on ranks 0-7
        dimension 0 in 4 parts
          0:2  ranks 0,4
          2:4  ranks 1,5
          4:6  ranks 2,6
          6:7  ranks 3,7
        """
    )
    assert text_of("tp@cyclic1 | only(dp=0)", 64).splitlines()[2] == (
        "  0:1 and 15 more every 4  rank 0"
    )
    assert "  1:3, 5:7  " in text_of("dp@pieces[1:2,2:2]", 7)
    assert "  768:1000, 24 of padding  ranks 3,7" in text_of("tp@pad128", 1000)
    assert "  4:5 (halo), 5:9  ranks 4-7" in text_of("dp@halo[1,1]", 9)
    assert "  nothing  ranks 3,7" in text_of("tp", 3)


def test_a_partial_layout_says_who_carries_what() -> None:
    assert text_of("tp | sum(dp)", 4).splitlines()[-3:] == [
        "sum of 2 contributions",
        "  0  ranks 0-3",
        "  1  ranks 4-7",
    ]


def test_ranks_with_several_boxes_are_listed() -> None:
    assert str(Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})) == block(
        """
        4 x 4 on ranks 0,1
          rank 0  [0:1, 0:4] [1:2, 0:2]
          rank 1  [1:2, 2:4] [2:4, 0:4]
        """
    )


@pytest.mark.parametrize("text", ["dp, tp", "dp tp, -", "tp@cyclic1, dp"])
def test_a_thousand_ranks_take_a_screen(text: str) -> None:
    mesh = reshard.DeviceMesh.of(dp=32, tp=32)
    shown = str(reshard.spec(mesh, text).layout((50257, 4096))).splitlines()
    assert len(shown) < 24 and max(map(len, shown)) < 100
    assert any("parts more" in line for line in shown)
    assert repr(reshard.spec(mesh, text).layout((50257, 4096))) == (
        "<Layout of [50257, 4096] on 1024 of 1024 ranks>"
    )


def test_a_thousand_flat_ranges_take_a_screen() -> None:
    ranges = {rank: (rank * 41, rank * 41 + 41) for rank in range(1024)}
    shown = str(Layout.flat_ranges((1024, 41), ranges)).splitlines()
    assert shown[0] == "1024 x 41 on ranks 0-1023" and len(shown) < 24
    ranges = {rank: (rank * 41, rank * 41 + 41) for rank in range(1000)}
    shown = str(Layout.flat_ranges((1000, 41), ranges, slots=1001)).splitlines()
    assert len(shown) < 24
