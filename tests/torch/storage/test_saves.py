"""The files of a save: replaced without a swap of names, and sent part by part while written."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats.write_plan import WritePlan
from reshard.errors import RunError

torch = pytest.importorskip("torch")

from reshard.checkpoint.contents import StoredFile  # noqa: E402
from reshard.checkpoint.formats.torch_dcp.writer import ArchiveFile  # noqa: E402
from reshard.checkpoint.formats.torch_files.building import NewArchive  # noqa: E402
from reshard.checkpoint.formats.write_plan import NewFile  # noqa: E402
from reshard.checkpoint.storage.range_checksums import crc32, shift_crc32  # noqa: E402
from reshard.checkpoint.storage.uploads import PartGrid  # noqa: E402
from reshard.dtypes import dtype  # noqa: E402
from reshard.torch.storage import saves  # noqa: E402
from reshard.torch.storage.saves import (  # noqa: E402
    FolderSave,
    RankUpload,
)


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(saves, "exchange_names", lambda *_: False)
    target = tmp_path / "step"
    write(target, "old")
    return target


def write(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    write_file(folder / "model.safetensors", {name: tensor("float32", (2,))})


def begin(target: Path) -> FolderSave:
    write_plan = cast("WritePlan", SimpleNamespace(files=()))
    save = FolderSave(target, write_plan, sync_files=False)
    save.begin()
    write(save.folder, "new")
    return save


def name_in(folder: Path) -> str:
    return next(iter(checkpoint.open(folder)))


def fail_at(patch: pytest.MonkeyPatch, rename_number: int, error: BaseException) -> None:
    real, calls = Path.rename, []

    def rename(path: Path, new: Path) -> Any:
        calls.append(new)
        if len(calls) == rename_number:
            raise error
        return real(path, new)

    patch.setattr(Path, "rename", rename)


def test_two_renames_are_a_line_of_the_log(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = begin(target)
    with caplog.at_level(logging.WARNING, "reshard"):
        save.commit()
    assert name_in(target) == "new"
    assert "step was replaced by two renames" in caplog.text
    assert [path.name for path in target.parent.iterdir()] == ["step"]


@pytest.mark.parametrize("rename_number", [1, 2])
def test_an_old_checkpoint_comes_back_after_a_kill_between_two_renames(
    target: Path, monkeypatch: pytest.MonkeyPatch, rename_number: int
) -> None:
    save = begin(target)
    with monkeypatch.context() as patch:
        fail_at(patch, rename_number, Killed())
        with pytest.raises(Killed):
            save.commit()
    assert target.exists() == (rename_number == 1)
    again = begin(target)
    assert name_in(target) == "old"
    again.commit()
    assert name_in(target) == "new"
    assert [path.name for path in target.parent.iterdir()] == ["step"]


def test_an_old_checkpoint_stays_where_the_second_rename_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = begin(target)
    with monkeypatch.context() as patch:
        fail_at(patch, 2, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(RunError, match="Input/output error"):
            save.commit()
    assert name_in(target) == "old"


def test_names_equal_on_the_file_system_are_refused(tmp_path: Path) -> None:
    """As of names that differ by case, on most disks of Macs."""
    files = [SimpleNamespace(stored=SimpleNamespace(name="w", size_bytes=0), known_bytes=list)] * 2
    with pytest.raises(RunError, match="is the file of another name already"):
        saves.make_files(tmp_path / "folder", cast("Any", files))


PART_BYTES = 1 << 12
ROWS = 5000


class RecordedUpload:
    """What an `Upload` is for a rank; a part's bytes are kept when it is sent."""

    def __init__(self, files: list[NewFile]) -> None:
        self.grid = PartGrid([one.stored.size_bytes for one in files], [PART_BYTES] * len(files))
        self.files = files
        self.parts: dict[int, bytes] = {}
        self.changed = threading.Condition()
        self.is_refusing = self.is_closed = False

    def send(self, part: int, folder: Path, give_back: None) -> None:
        if self.is_refusing:
            raise RunError("the store refuses")
        number, start, stop = self.grid.range_of(part)
        content = (folder / self.files[number].stored.name).read_bytes()[start:stop]
        with self.changed:
            assert part not in self.parts
            self.parts[part] = content
            self.changed.notify_all()

    def wait_for(self, *parts: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: {*parts} <= {*self.parts}, timeout=60)

    def close(self) -> None:
        self.is_closed = True


def archives() -> ArchiveFile:
    """A file of two tensors of 20,000 bytes."""
    first = NewArchive.at(dtype("float32"), (ROWS,), 0)
    second = NewArchive.at(dtype("float32"), (ROWS,), first.stop_bytes)
    return ArchiveFile(StoredFile("__0_0.distcp", second.stop_bytes, 0), archives=(first, second))


def expected(file: NewFile, elements: dict[int, bytes]) -> bytes:
    content = bytearray(file.stored.size_bytes)
    closing = file.closing_bytes(lambda start, size: crc32(elements[start]))
    for start, found in (*file.known_bytes(), *elements.items(), *closing):
        content[start : start + len(found)] = found
    return bytes(content)


def begin_upload(folder: Path, files: list[NewFile]) -> tuple[RecordedUpload, RankUpload]:
    sent = RecordedUpload(files)
    upload: Any = sent
    return sent, RankUpload(upload, files, folder / "rank-0")


def write_part(upload: RankUpload, file: NewFile, start: int, content: bytes, size: int) -> None:
    """Elements of a range from `start` on, in pieces of `size` bytes."""
    name = file.stored.name
    for at in range(0, len(content), size):
        piece = content[at : at + size]
        upload.targets[name].write(memoryview(bytearray(piece)), start + at)
        upload.wrote(name, start + at, start + at + len(piece))


@pytest.mark.parametrize("piece_bytes", [7, 1 << 12, 1 << 20])
def test_parts_are_uploaded_when_they_are_complete(tmp_path: Path, piece_bytes: int) -> None:
    file = archives()
    elements = {start: os.urandom(size) for start, size in file.checked_ranges}
    (first, one), (second, two) = elements.items()
    sent, upload = begin_upload(tmp_path, [file])
    with upload:
        write_part(upload, file, first, one, piece_bytes)
        # The part in which the first tail lies waits for its checksum.
        whole = (first + len(one)) // PART_BYTES
        sent.wait_for(*range(whole))
        assert whole not in sent.parts
        upload.contribute(file.stored.name, first, crc32(one), len(one))
        write_part(upload, file, second, two, piece_bytes)
        upload.contribute(file.stored.name, second, crc32(two), len(two))
        upload.finish()
    assert sorted(sent.parts) == list(range(sent.grid.count))
    assert b"".join(sent.parts[part] for part in sorted(sent.parts)) == expected(file, elements)
    assert sent.is_closed


def test_a_range_of_several_boxes(tmp_path: Path) -> None:
    file = archives()
    elements = {start: os.urandom(size) for start, size in file.checked_ranges}
    sent, upload = begin_upload(tmp_path, [file])
    with upload:
        for start, content in elements.items():
            write_part(upload, file, start, content, 1000)
            front, back = content[:8000], content[8000:]
            upload.contribute(file.stored.name, start, crc32(back), len(back))
            checksum = shift_crc32(crc32(front), len(back))
            upload.contribute(file.stored.name, start, checksum, len(front))
            # As by a second thread, which finds the range whole too.
            upload.contribute(file.stored.name, start, 0, 0)
        upload.finish()
    assert b"".join(sent.parts[part] for part in sorted(sent.parts)) == expected(file, elements)


def test_space_of_uploaded_parts_is_released(tmp_path: Path) -> None:
    file = NewFile(StoredFile("a", 64 * PART_BYTES, 0))
    path = tmp_path / "rank-0" / "a"
    sent, upload = begin_upload(tmp_path, [file])
    with upload:
        write_part(upload, file, 0, os.urandom(64 * PART_BYTES), PART_BYTES)
        upload.finish()
        if not path.stat().st_blocks * 512 < 64 * PART_BYTES:
            pytest.skip("the file system has no holes")
        assert path.stat().st_blocks * 512 <= PART_BYTES
    assert len(sent.parts) == 64


def test_unwritten_parts_are_uploaded_at_the_end(tmp_path: Path) -> None:
    file = NewFile(StoredFile("a", 3 * PART_BYTES, 0), b"head")
    empty = NewFile(StoredFile("b", 0, 0))
    sent, upload = begin_upload(tmp_path, [file, empty])
    with upload:
        write_part(upload, file, PART_BYTES, b"x" * PART_BYTES, PART_BYTES)
        sent.wait_for(1)
        assert set(sent.parts) == {1}
        upload.finish()
    assert sent.parts[0] == b"head".ljust(PART_BYTES, b"\0")
    assert sent.parts[2] == bytes(PART_BYTES)


def test_errors_of_the_store_end_the_save(tmp_path: Path) -> None:
    file = NewFile(StoredFile("a", 3 * PART_BYTES, 0))
    sent, upload = begin_upload(tmp_path, [file])
    sent.is_refusing = True
    with upload:
        write_part(upload, file, 0, bytes(PART_BYTES), PART_BYTES)
        with pytest.raises(RunError, match="the store refuses"):
            upload.finish()
        with pytest.raises(RunError, match="the store refuses"):
            upload.wrote("a", PART_BYTES, 2 * PART_BYTES)
    assert sent.is_closed


def test_a_range_written_twice_is_an_error(tmp_path: Path) -> None:
    file = NewFile(StoredFile("a", 3 * PART_BYTES, 0))
    _, upload = begin_upload(tmp_path, [file])
    with upload:
        write_part(upload, file, 0, bytes(PART_BYTES), PART_BYTES)
        with pytest.raises(RunError, match=r"bytes 0:4096 of a were written twice"):
            write_part(upload, file, 0, bytes(PART_BYTES), PART_BYTES)


def test_a_range_not_written_is_an_error(tmp_path: Path) -> None:
    file = archives()
    sent, upload = begin_upload(tmp_path, [file])
    with upload:
        first, size = file.checked_ranges[0]
        upload.contribute(file.stored.name, first, 0, size - 4)
        with pytest.raises(RunError, match=f"did not write __0_0.distcp from byte {first}"):
            upload.finish()
    # One that ends for another reason leaves no thread that waits.
    sent, upload = begin_upload(tmp_path, [archives()])
    upload.close()
    assert sent.is_closed
    assert not [one for one in threading.enumerate() if one.name.startswith("reshard-close")]
