"""Files whose parts are created when they are first read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.checkpoint.storage.byte_streams import ReadRange
from reshard.checkpoint.storage.derived_files import DerivedFile, DerivedFiles, DerivedPart
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.errors import DigestError, FormatError

CREATED: list[str] = []


class Reversed(DerivedPart):
    """The bytes of a range of the source in reverse order, in pieces of five bytes."""

    def create(self, read: ReadRange) -> Iterator[bytes]:
        CREATED.append(self.label)
        content = read(self.source_start_bytes, self.source_bytes)[::-1]
        for at in range(0, len(content), 5):
            yield content[at : at + 5]
        if b"!" in content:
            raise DigestError(f"{self.label} is damaged")


class Zeros(DerivedPart):
    def create(self, read: ReadRange) -> Iterator[bytes]:
        return iter(())


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SourceFile]:
    CREATED.clear()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "packed").write_bytes(b"0123456789abcdef!")
    with SourceFile(tmp_path / "d" / "packed") as file:
        yield file


def derive(source: SourceFile, folder: Path) -> tuple[DerivedFile, SourceFile]:
    collected = DerivedFiles()
    for part in (
        Reversed("first", 0, 10, 10),
        Zeros("zeros", 0, 0, 5000),
        Reversed("last", 10, 6, 6),
        Reversed("damaged", 12, 5, 5),
    ):
        collected.add("d/packed", part)
    derived = collected.files["d/packed/unpacked"]
    return derived, derived.open(source.path / "unpacked", source, folder)


def read(file: SourceFile, offset: int, size: int) -> bytes:
    content = bytearray(b"x" * size)
    file.read_into(memoryview(content), offset)
    return bytes(content)


def test_parts_begin_at_pages_and_are_created_once(source: SourceFile, tmp_path: Path) -> None:
    derived, file = derive(source, tmp_path)
    assert derived.starts == (0, 4096, 12288, 16384, 20480)
    with file:
        assert read(file, 2, 3) == b"765" and read(file, 0, 9) == b"987654321"
        assert CREATED == ["first"]
        assert read(file, 4090, 16) == bytes(16)
        ranges = bytearray(4)
        file.read_ranges(memoryview(ranges), [12288, 12292], 2)
        assert bytes(ranges) == b"feba" and CREATED == ["first", "last"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_whole_part_is_stored_when_it_is_read_again(source: SourceFile, tmp_path: Path) -> None:
    _, file = derive(source, tmp_path)
    with file:
        assert read(file, 0, 10) == b"9876543210"
        assert read(file, 4096, 5000) == bytes(5000)
        for _ in range(3):
            assert read(file, 0, 10) == b"9876543210"
        # The first read does not store it, and the third reads what the second stored.
        assert CREATED == ["first", "first"]
        with pytest.raises(DigestError, match="damaged is damaged"):
            read(file, 16384, 5)


def test_damage_names_the_bytes_of_the_source(source: SourceFile, tmp_path: Path) -> None:
    _, file = derive(source, tmp_path)
    with file:
        assert file.find_damage(0) is None
        assert file.find_damage(16384) == ("d/packed", 12, 5, "damaged is damaged")


def test_parts_larger_than_any_disk_are_refused() -> None:
    with pytest.raises(FormatError, match="more than any disk has"):
        DerivedFiles().add("packed", Zeros("w", 0, 0, 2**62 + 1))
