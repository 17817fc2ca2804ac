"""Paths in places: text, parts, and what is refused."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from reshard.checkpoint.storage import remote_paths
from reshard.checkpoint.storage.object_stores import FolderListing, ObjectState
from reshard.checkpoint.storage.remote_paths import (
    CachedStore,
    RemotePath,
    as_path,
    join_path,
    map_paths,
    walk_folder,
)
from reshard.errors import UsageError


class Shelf:
    """Objects in memory, as a source; it counts what it is asked."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.asked: list[str] = []

    def head(self, key: str) -> ObjectState | None:
        self.asked.append(f"look {key}")
        return ObjectState(len(self.objects[key])) if key in self.objects else None

    def list_folder(self, key: str) -> FolderListing:
        self.asked.append(f"list {key}")
        inside = f"{key}/" if key else ""
        rest = [one[len(inside) :] for one in self.objects if one.startswith(inside)]
        return FolderListing(
            {one: ObjectState(len(self.objects[inside + one])) for one in rest if "/" not in one},
            frozenset(one.split("/")[0] for one in rest if "/" in one),
        )

    def read_into(self, key: str, start_bytes: int, memory: memoryview) -> ObjectState:
        memory[:] = self.objects[key][start_bytes : start_bytes + len(memory)]
        return ObjectState(len(self.objects[key]))


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    found = Shelf({"m/a.txt": b"words\nlines\n", "m/in/b.bin": bytes(300_000), "m/in/c/d": b""})
    place = CachedStore(found)
    monkeypatch.setattr(remote_paths, "find_store", lambda root: place)
    return found


FOLDER = RemotePath("s3://bucket/m")


def test_text_and_parts() -> None:
    path = FOLDER / "in" / "b.bin"
    assert str(path) == f"{path}" == "s3://bucket/m/in/b.bin" == path.as_posix()
    assert (path.name, path.suffix, path.stem) == ("b.bin", ".bin", "b")
    assert path.parent.parent == FOLDER and hash(path.parent.parent) == hash(FOLDER)
    assert path.relative_to(FOLDER).as_posix() == "in/b.bin"
    assert path.with_name("x") == FOLDER / "in" / "x"
    assert pickle.loads(pickle.dumps(path)) == path and path.resolve() is path
    hub = RemotePath("hf://org/model@main/config.json")
    assert (hub.root_parts, hub.key) == (("hf", "org", "model@main"), "config.json")


def test_reading_methods_of_paths(shelf: Shelf) -> None:
    assert FOLDER.is_dir() and not FOLDER.is_file() and FOLDER.exists()
    assert [path.name for path in FOLDER.iterdir()] == ["a.txt", "in"]
    assert [path.name for path in FOLDER.glob("*.txt")] == ["a.txt"]
    file = FOLDER / "a.txt"
    assert file.read_text() == "words\nlines\n" and file.stat().st_size == 12
    with (FOLDER / "in" / "b.bin").open("rb") as opened:
        assert opened.seek(0, 2) == 300_000
        assert opened.seek(-5, 1) == 299_995 and opened.read() == bytes(5)
        opened.seek(0)
        assert len(opened.read(299_999)) == 299_999 and opened.read(9) == b"\0"
    walked = [
        (str(at.relative_to(FOLDER)), folders, names) for at, folders, names in walk_folder(FOLDER)
    ]
    assert walked == [(".", ["in"], ["a.txt"]), ("in", ["c"], ["b.bin"]), ("in/c", [], ["d"])]


def test_a_folder_is_listed_once(shelf: Shelf) -> None:
    assert FOLDER.is_dir()
    for name in ("a.txt", "config.json", "index.json", "in", "no/such"):
        (FOLDER / name).exists()
    assert shelf.asked.count("list m") == 1
    assert not any(one.startswith("look m/") and "no" not in one for one in shelf.asked)


def test_missing_objects_are_file_not_found(shelf: Shelf) -> None:
    gone = FOLDER / "gone"
    assert not gone.exists()
    for action in (gone.stat, gone.read_bytes, lambda: [*gone.iterdir()]):
        with pytest.raises(FileNotFoundError) as raised:
            action()
        assert raised.value.filename == str(gone)
    with pytest.raises(IsADirectoryError):
        FOLDER.read_bytes()
    with pytest.raises(NotADirectoryError):
        (FOLDER / "a.txt").iterdir()


def test_nothing_is_written(shelf: Shelf) -> None:
    for action in (FOLDER.mkdir, FOLDER.unlink, FOLDER.touch, lambda: FOLDER.write_bytes(b"x")):
        with pytest.raises(PermissionError, match="can only be read"):
            action()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3a://bucket/model/", "s3://bucket/model"),
        ("S3://bucket//model", "s3://bucket/model"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("azure://container/a", "az://container/a"),
        ("https://host:8443/a/model.safetensors", "https://host:8443/a/model.safetensors"),
        ("hf://org/model@v1", "hf://org/model@v1"),
        ("file:///data/my%20model", "/data/my model"),
        ("model", "model"),
        ("ftp://host/a", "ftp:/host/a"),
    ],
)
def test_addresses(given: str, expected: str) -> None:
    assert str(as_path(given)) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("s3://", "too short; give s3://name/folder"),
        ("hf://model", "too short; give hf://organisation/model"),
        ("https://me:secret@host/model", "has a user name"),
        ("https://host/model?token=secret", "has a query"),
        ("s3://bucket/../model", "without them"),
        ("s3://my bucket/model", "names consist of letters, digits"),
        ("hf://an org/model", "names consist of letters, digits"),
        ("https://a host/model", "a space in its host"),
        ("file://host/data", "names the host 'host'"),
        (b"model", "expected a path as a string"),
    ],
)
def test_addresses_that_are_refused(given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        as_path(given)
    assert "secret" not in str(raised.value)


def test_files_that_are_elsewhere() -> None:
    assert join_path(Path("model"), "s3://b/x") == RemotePath("s3://b/x")
    assert join_path(FOLDER, "/data/x") == Path("/data/x")
    assert join_path(FOLDER, "in/b") == FOLDER / "in" / "b"


def test_of_places_several_are_read_at_a_time() -> None:
    barrier = threading.Barrier(4)

    def read(path: Path) -> str:
        # Nobody passes alone.
        barrier.wait(timeout=30)
        return path.name

    names = [f"{number}" for number in range(4)]
    assert list(map_paths(read, (FOLDER / name for name in names))) == names
    taken: list[str] = []
    found = map_paths(lambda path: taken.append(path.name), map(Path, names))
    next(found)
    # Of this machine one after the other, so that not all of what is read is in memory.
    assert taken == ["0"]
