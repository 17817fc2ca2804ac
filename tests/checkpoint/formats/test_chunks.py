"""Tensors bound to their chunks, which are checked once for all tensors alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.binding import FileRange
from reshard.checkpoint.formats import chunks
from reshard.checkpoint.formats.chunks import ChunkBinder
from reshard.dtypes import dtype
from reshard.errors import CoverageError
from reshard.geometry.regions import Region

FLOAT = dtype("float32")


def rows(rank: int, start: int, stop: int, offset: int) -> tuple[int, Region]:
    return rank, Region((start, 0), (stop, 3), f"{rank}.st", offset, (12, 4))


def test_tensors_that_differ_in_offsets_are_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(chunks, "_check_disjoint", lambda _, name, __: checked.append(name))
    binder = ChunkBinder(Path("model"))
    binder.add("v", FLOAT, (4, 3), [rows(0, 0, 2, 64), rows(1, 2, 4, 64)], 2)
    # In any order of ranks.
    binder.add("w", FLOAT, (4, 3), [rows(1, 2, 4, 96), rows(0, 0, 2, 88)], 2)
    binder.add("x", FLOAT, (2, 3), [rows(0, 0, 2, 112)], 2)
    tensors = binder.bind()
    assert checked == ["v", "x"] and len(tensors.kinds) == 2
    assert [tensors["w"].file_range(rank) for rank in range(2)] == [
        FileRange("0.st", 88),
        FileRange("1.st", 96),
    ]


def test_equal_boxes_are_copies_only_if_the_format_has_copies() -> None:
    copies = [rows(0, 0, 4, 64), rows(1, 0, 4, 64)]
    binder = ChunkBinder(Path("model"))
    binder.add("w", FLOAT, (4, 3), copies, 2)
    with pytest.raises(CoverageError, match=r"two shards of 'w' overlap: .*0\.st and .*1\.st"):
        binder.add("w", FLOAT, (4, 3), copies, 2, has_copies=False)


def test_chunks_that_leave_elements_out_are_an_error() -> None:
    with pytest.raises(
        CoverageError, match=r"^model: tensor 'w' of shape \[4, 3\]: no shard holds"
    ):
        ChunkBinder(Path("model")).add("w", FLOAT, (4, 3), [rows(0, 0, 3, 64)], 1)
