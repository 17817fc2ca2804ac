"""Tensors as columns are the same tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import Tensor, cuts, small_folder, tensors, write_ranks
from reshard import checkpoint
from reshard.binding import Binding, FileRange, FileRanges, View
from reshard.checkpoint.blocks.tensor_columns import DigestColumns, TensorColumns, TensorKind
from reshard.checkpoint.contents import StoredTensor, TensorDigest
from reshard.dtypes import dtype
from reshard.errors import CheckpointError
from reshard.layout import Box, Layout


@given(st.data(), tensors(most=4))
def test_columns_hold_the_same_tensors_for_any_sharding(
    data: st.DataObject, whole: dict[str, Tensor]
) -> None:
    mesh, specs = data.draw(cuts(whole))
    with small_folder(64) as folder:
        write_ranks(folder / "cut", whole, mesh, specs)
        found = dict(checkpoint.open(folder / "cut").tensors)
        columns = TensorColumns.of(found)
        assert dict(columns) == found
        assert list(columns) == list(found)
        assert columns.tensor_bytes.tolist() == [one.size_bytes for one in found.values()]


def test_columns_keep_cells_and_views() -> None:
    boxes = [(0, Box((0,), (2,))), (0, Box((2,), (4,))), (1, Box((4,), (6,)))]
    layout = Layout.from_boxes((6,), boxes, 2)
    addresses = {0: (FileRange("a", 8), FileRange("b", 0)), 1: FileRange("a", 64)}
    views = {0: (View(0, (1,)), View(1, (2,)))}
    apart = StoredTensor("w", dtype("int8"), Binding(layout, addresses, views))
    found = TensorColumns.of({"w": apart})["w"]
    assert found == apart
    for slot, cell in ((0, 0), (0, 1), (1, 0)):
        assert found.file_range(slot, cell) == apart.file_range(slot, cell)
        assert found.view(slot, cell) == apart.view(slot, cell)
    ranges = found.binding.addresses
    assert isinstance(ranges, FileRanges)
    assert (len(ranges), 1 in ranges, 2 in ranges) == (2, True, False)
    kind = TensorColumns.of({"w": apart}).kinds[0]
    assert [kind.find_place(0, 1, 3), kind.find_place(1, 0, 3)] == [(1, 0), (2, 3)]
    with pytest.raises(CheckpointError, match="rank 2 stores no shard"):
        kind.find_place(2, 0)


def test_ranges_of_files_are_found_by_rank() -> None:
    layout = Layout.from_boxes((6,), [(rank, Box((rank,), (rank + 1,))) for rank in range(6)], 6)
    places = ((4, 0), (4, 1), (0, None), (2, 0))
    ranges = FileRanges(layout, places, ("a", "b", "c", "d"), (8, 16, 24, 32))
    assert ranges[4] == (FileRange("a", 8), FileRange("b", 16))
    assert ranges[0] == FileRange("c", 24)
    assert ranges[2] == (FileRange("d", 32),)
    assert list(ranges) == [4, 0, 2] and ranges.get(1) is None


def test_ranges_of_files_are_found_by_several_threads() -> None:
    layout = Layout.from_boxes((2,), [(rank, Box((rank,), (rank + 1,))) for rank in range(2)], 2)
    found: list[object] = []

    class Places(tuple[tuple[int, int | None], ...]):
        def __iter__(self) -> Iterator[tuple[int, int | None]]:
            for place in super().__iter__():
                yield place
                # Another thread may read here, when only some of the places were listed.
                if not found:
                    found.append(None)
                    found.append(ranges.get(1))

    ranges = FileRanges(layout, Places(((0, None), (1, None))), ("a", "b"), (8, 16))
    assert ranges[0] == FileRange("a", 8)
    assert found == [None, FileRange("b", 16)]


def test_tensors_may_lack_digests() -> None:
    digests = [TensorDigest(b"a" * 16, (b"b" * 16, b"c" * 16)), None, TensorDigest(b"d" * 16, ())]
    columns = DigestColumns.of_each(digests)
    assert [columns.of(row) for row in range(3)] == digests
    assert columns.of_block(0, 1) == b"c" * 16
    assert columns.of_block(1, 0) is None


def test_a_repeated_name_is_refused() -> None:
    kind = TensorKind(dtype("int8"), Layout.whole((4,), [0], 1), ((0, None),), ("a",))
    with pytest.raises(CheckpointError, match="twice"):
        TensorColumns(["w", "w"], [kind], [0, 0], [0, 4])
