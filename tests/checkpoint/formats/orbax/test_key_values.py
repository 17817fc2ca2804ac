"""Where values lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.binding import FileRange
from reshard.checkpoint.formats.orbax.key_values import StoredValue, open_key_values
from reshard.checkpoint.formats.orbax.ocdbt import DataPlace, encode_database
from reshard.errors import CheckpointError, FormatError


def write(folder: Path, *values: tuple[bytes, bytes | DataPlace]) -> None:
    (folder / "d").mkdir()
    for name, content in encode_database(values, "d/n", bytes(16)):
        (folder / name).write_bytes(content)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "0.0").write_bytes(b"abc")
    values = open_key_values(tmp_path)
    assert values.find("w/0.0") == StoredValue(3, FileRange("w/0.0", 0))
    assert values.find("w/0.1") is None
    assert values.sizes == {"w/0.0": 3}


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "w/../../x", "w//x"])
def test_keys_that_lead_outside(tmp_path: Path, key: str) -> None:
    with pytest.raises(FormatError, match="outside"):
        open_key_values(tmp_path).find(key)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "d/../../x", ""])
def test_places_outside(tmp_path: Path, path: str) -> None:
    write(tmp_path, (b"a", DataPlace("", path, 0, 1)))
    with pytest.raises(FormatError, match="outside"):
        open_key_values(tmp_path)


def test_places_that_no_file_has(tmp_path: Path) -> None:
    write(tmp_path, (b"a", DataPlace("", "d/x", 0, 9)), (b"b", DataPlace("", "d/n", 0, 1 << 40)))
    values = open_key_values(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        values.find("a")
    with pytest.raises(FormatError, match="cut off"):
        values.find("b")


def test_a_database_without_its_nodes(tmp_path: Path) -> None:
    write(tmp_path, (b"a", b"1"))
    (tmp_path / "d" / "n").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_key_values(tmp_path)
