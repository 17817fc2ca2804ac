"""Stretches of tensors, and the pieces two models have in common, against numbered elements."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.cut_rules import Balanced, BlockCyclic, Blocks, Ceil, CutRule, Padded, Pieces, Strided
from reshard.errors import ShardError
from reshard.layout import Box, Layout
from reshard.recipes.naming import Fusion
from reshard.runs import RunTable
from reshard.sharding import DimSpec, Level, ShardingSpec

torch = pytest.importorskip("torch")

from reshard.torch.models.model_manifest import ModelTensor  # noqa: E402
from reshard.torch.refitting.members import (  # noqa: E402  # noqa: E402
    IndexRange,
    Member,
    common_ranges,
    fused_members,
    members_of,
    table_between,
)
from reshard.torch.refitting.transforms import in_blocks  # noqa: E402

LENGTH = 12
RULES = [Ceil(), Balanced(), Strided(2), BlockCyclic(2), Blocks((8, 4)), Padded(5)]
RULES += [Pieces(((3, 0, 5), (1, 2, 1)))]


def local_of(layout: Layout, rank: int) -> Any:
    """The numbers of a rank's rows, -1 where it has padding; two columns."""
    (cell,) = layout.cells_of(rank)
    part = int(layout.cell_part[cell, 0])
    rows = torch.full((int(layout.cell_shape[cell, 0]),), -1)
    for start, stop, local, role in layout.tables[0].runs_of(part):
        if role != reshard.runs.PAD:
            rows[local : local + stop - start] = torch.arange(start, stop)
    return torch.stack([rows, rows], dim=1)


def layout_of(rule: CutRule, parts: int = 3) -> Layout:
    mesh = reshard.DeviceMesh.of(tp=parts)
    dims = [DimSpec([Level(["tp"], rule)]), DimSpec()]
    return ShardingSpec(mesh, dims).layout((LENGTH, 2))


@given(st.sampled_from(RULES), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_a_stretch_is_the_rows_between(rule: CutRule, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    whole = layout_of(rule)
    span = IndexRange(whole, 0, start, stop)
    for rank in range(3):
        local = local_of(whole, rank)
        expected = local[(local[:, 0] >= start) & (local[:, 0] < stop)]
        view = span.of(local, rank)
        assert torch.equal(view, expected)
        assert (
            view.numel() == 0
            or view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        )
        assert span.layout.local_shape(rank) == tuple(expected.shape)
        assert torch.equal(local_of(span.layout, rank), expected - start)
    assert span.of(None, 0) is None
    assert span.of(local, 3) is None


def test_rows_that_are_apart_here_have_no_view() -> None:
    # The part has rows 2, 0, 1: between 0 and 1 lies nothing, between 2 and 0 others.
    table = RunTable(3, 1, [(0, 2, 1, 0), (0, 0, 1, 1), (0, 1, 1, 2)])
    assert table_between(table, 0, 2)[1].tolist() == [1]
    mixed = RunTable(4, 1, [(0, 0, 1, 0), (0, 3, 1, 1), (0, 1, 2, 2)])
    with pytest.raises(ShardError, match="indices 0:3 do not lie one after another"):
        table_between(mixed, 0, 3)
    apart = Layout.from_boxes((4, 2), [(0, Box((0, 0), (1, 2))), (0, Box((2, 0), (4, 2)))])
    with pytest.raises(ShardError, match="several boxes"):
        _ = IndexRange(apart, 0, 0, 2).layout


def held(length: int, fusion: Fusion | None = None) -> ModelTensor:
    return ModelTensor("int8", Layout.replicated((length, 2)), fusion=fusion)


GROUPED = Fusion(("q", "k"), (2, 1), 3)
BLOCKED = Fusion(("q", "k"), (2, 1))


@pytest.mark.parametrize("source", [GROUPED, BLOCKED, None])
@pytest.mark.parametrize("target", [GROUPED, BLOCKED, None])
def test_pieces_are_the_same_rows_on_both_sides(
    source: Fusion | None, target: Fusion | None
) -> None:
    if source is None and target is None:
        return
    # Rows of a fused tensor by what they are: q0 q1 k0 q2 q3 k1 ...
    groups = ["q0 q1 q2 q3 k0 k1", "q4 q5 q6 q7 k2 k3", "q8 q9 q10 q11 k4 k5"]
    order = {
        GROUPED: " ".join(groups).split(),
        BLOCKED: [f"q{i}" for i in range(12)] + [f"k{i}" for i in range(6)],
    }

    def side(fusion: Fusion | None) -> tuple[dict[str, Member], dict[str, list[str]]]:
        if fusion is None:
            model = {"q": held(12), "k": held(6)}
            return members_of(model), {
                n: [f"{n}{i}" for i in range(h.layout.shape[0])] for n, h in model.items()
            }
        return fused_members("qk", held(18, fusion)), {"qk": order[fusion]}

    (before, rows_before), (after, rows_after) = side(source), side(target)
    for name, length in (("q", 12), ("k", 6)):
        assert before[name].shape == after[name].shape == (length, 2)
        met = []
        for piece in common_ranges(before[name], after[name]):
            expected = [f"{name}{i}" for i in range(piece.start, piece.stop)]
            for member, span, rows in (
                (before[name], piece.source, rows_before),
                (after[name], piece.target, rows_after),
            ):
                start, stop = (0, length) if span is None else (span.start, span.stop)
                assert rows[member.name][start:stop] == expected
                assert span is None or span.dimension == 0
            met += expected
        assert met == [f"{name}{i}" for i in range(length)]


def test_members_of_other_dimensions() -> None:
    columns = Fusion(("q", "k"), dimension=1)
    before = fused_members("qk", held(18, GROUPED))["q"]
    after = fused_members("qk", ModelTensor("int8", Layout.replicated((12, 4)), fusion=columns))[
        "q"
    ]
    with pytest.raises(ShardError, match="fused along dimensions 0 and 1"):
        list(common_ranges(before, after))
    with pytest.raises(ShardError, match=r"shape \[4\], but its dimension 1 is fused"):
        fused_members("qk", ModelTensor("int8", Layout.replicated((4,)), fusion=columns))


def test_a_tensor_comes_before_a_member_of_its_name() -> None:
    model = {"qk": held(18, GROUPED), "q": held(12)}
    found = members_of(model)
    assert (found["q"].name, found["k"].name, found["qk"].name) == ("q", "qk", "qk")


@given(st.sampled_from(RULES), st.sampled_from(RULES), st.integers(1, 5), st.integers(1, 4))
def test_blocks_are_whole_on_every_rank_or_refused(
    rule: CutRule, other: CutRule, rows: int, columns: int
) -> None:
    mesh = reshard.DeviceMesh.of(x=3, y=3)
    dims = [DimSpec([Level(["x"], rule)]), DimSpec([Level(["y"], other)])]
    layout = ShardingSpec(mesh, dims).layout((LENGTH, LENGTH))
    found = in_blocks(layout, (rows, columns))
    whole = True
    for rank in range(9):
        (cell,) = layout.cells_of(rank)
        for table, part, size in zip(
            layout.tables, layout.cell_part[cell], (rows, columns), strict=True
        ):
            here = []
            for start, stop, _, role in table.runs_of(int(part)):
                here += [None if role == reshard.runs.PAD else i for i in range(start, stop)]
            # Cut in blocks from its own beginning, every piece is one whole block.
            for begin in range(0, len(here), size):
                block = here[begin : begin + size]
                first = -1 if block[0] is None else block[0]
                is_block = block == list(range(first, min(first + size, LENGTH)))
                whole &= is_block and first % size == 0
    assert isinstance(found, Layout) == whole
    if isinstance(found, Layout):
        assert found.shape == (-(-LENGTH // rows), -(-LENGTH // columns))
        for rank in range(9):
            shape = layout.local_shape(rank) or ()
            assert found.local_shape(rank) == (-(-shape[0] // rows), -(-shape[1] // columns))
            blocks = {
                (i // rows, j // columns)
                for box in layout.boxes(rank)
                for i in range(box.start[0], box.stop[0])
                for j in range(box.start[1], box.stop[1])
            }
            assert blocks == {
                (i, j)
                for box in found.boxes(rank)
                for i in range(box.start[0], box.stop[0])
                for j in range(box.start[1], box.stop[1])
            }


def test_layouts_without_whole_blocks_are_refused() -> None:
    partial = reshard.spec(reshard.DeviceMesh.of(tp=2), "-, - | sum(tp)").layout((4, 4))
    assert in_blocks(partial, (2, 2)) == "the source is partial"
    assert "less than two dimensions" in str(in_blocks(Layout.replicated((4,)), (2, 2)))
