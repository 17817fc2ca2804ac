"""Blocks read from shards and written to them, within the memory that is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    Tensor,
    cuts,
    small_folder,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from reshard import checkpoint
from reshard.checkpoint.blocks.block_io import BlockReader, OpenFiles, Workspace, open_sources
from reshard.checkpoint.files.source_file import SourceFile
from reshard.errors import DigestError, RunError


@given(st.data(), tensors(most=2), st.sampled_from([16, 64, 1000]))
def test_a_workspace_of_the_size_asked_for_is_enough(
    data: st.DataObject, whole: dict[str, Tensor], block_bytes: int
) -> None:
    mesh, specs = data.draw(cuts(whole))
    with small_folder(block_bytes) as folder:
        write_ranks(folder / "cut", whole, mesh, specs)
        found = checkpoint.open(folder / "cut")
        files = open_sources(found)
        for name, expected in whole.items():
            reader = BlockReader(found[name], files)
            workspace = Workspace(reader.grid.largest_bytes, reader.span_bytes)
            for index in range(reader.grid.count):
                for _, span in reader.spans(reader.grid.box(index)):
                    assert span.size_bytes <= reader.span_bytes
                memory = reader.read(index, workspace)
                box = reader.grid.box(index)
                window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                assert bytes(memory) == expected.bits[window or (...,)].tobytes()
                del memory
            workspace.close()
        files.close()


def test_a_block_that_is_contiguous_in_its_file_is_read_in_place(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (64, 64), 1)})
    found = checkpoint.open(tmp_path)
    files = open_sources(found)
    reader = BlockReader(found["w"], files)
    workspace = Workspace(reader.grid.largest_bytes, 0)
    memory = reader.read(0, workspace)
    assert np.frombuffer(memory, np.uint32).size == 64 * 64
    del memory
    assert [file.read_bytes for file in files] == [64 * 64 * 4]
    workspace.close()
    files.close()


def test_a_checked_block(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (64, 64), 1)})
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "made", to="full")
    path = tmp_path / "made" / "model.safetensors"
    found = checkpoint.open(tmp_path / "made")
    files = open_sources(found)
    reader = BlockReader(found["w"], files)
    workspace = Workspace(reader.grid.largest_bytes, reader.span_bytes)
    memory, digest = reader.read_checked(0, workspace)
    assert found["w"].digest is not None
    assert found["w"].digest.blocks == (digest,)
    del memory
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x77")
    with pytest.raises(DigestError, match=f"{path} bytes 4096:20480") as caught:
        reader.read_checked(0, workspace)
    assert digest.hex() in str(caught.value)
    workspace.close()
    files.close()


def test_files_are_opened_once_and_when_needed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    opened: list[str] = []

    def open_file(name: str) -> SourceFile:
        opened.append(name)
        return SourceFile(tmp_path / name)

    files = OpenFiles(open_file)
    assert opened == []
    assert files["a"] is files["a"]
    with pytest.raises(RunError, match="cannot open"):
        files["missing"]
    assert opened == ["a", "missing"]
    assert [file.path.name for file in files] == ["a"]
    files.close()
