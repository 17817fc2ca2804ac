"""Processes of one host load from an address: what several need is asked of the store once."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reshard
from object_server import ObjectServer, object_server
from reshard import checkpoint
from reshard.errors import RunError, UsageError

pytest.importorskip("obstore")

from reshard.checkpoint.blocks.block_io import open_sources
from reshard.checkpoint.storage import object_stores, shared_read_cache
from reshard.checkpoint.storage.byte_ranges import ByteRange
from reshard.checkpoint.storage.shared_read_cache import SharedReadCache

READERS = 4
RULES = ["columns.*=-, tp", "rows.*=tp, -", "whole.*=-, -"]
# What a server's answers are beside the shards: headers, read by each.
HEADERS_BYTES = READERS * 2 * 256 * 1024


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_stores, "_FIRST_WAIT_S", 0.001)
    with object_server() as found:
        yield found


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the readers meet."""
    found = tmp_path / "memory"
    found.mkdir()
    monkeypatch.setattr(shared_read_cache, "find_host_memory", lambda _: found)
    monkeypatch.setattr(shared_read_cache, "PIECE_BYTES", 1 << 20)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two files, which no test changes."""
    rng = np.random.default_rng(3)
    arrays = {f"columns.{i}": rng.integers(0, 99, (750, 1031)).astype(np.int32) for i in range(3)}
    arrays |= {f"rows.{i}": rng.integers(0, 99, (451, 500)).astype(np.float32) for i in range(2)}
    arrays |= {f"whole.{i}": rng.integers(0, 99, (550, 500)).astype(np.int16) for i in range(4)}
    held = checkpoint.describe_ranks({0: arrays}, reshard.DeviceMesh.of(tp=1), rules=["*=-, -"])
    folder = tmp_path_factory.mktemp("made") / "model"
    checkpoint.convert(held, folder, to="full", most_file_bytes=8 << 20)
    return folder


@pytest.fixture
def size_bytes(server: ObjectServer, model: Path) -> int:
    """The bytes of the model's tensors; its files are at the server's `/m`."""
    for path in model.iterdir():
        server.objects[f"/m/{path.name}"] = path.read_bytes()
    return checkpoint.open_checkpoint(model).size_bytes


@functools.cache
def load_from_folder(model: Path, rank: int) -> dict[str, Any]:
    return checkpoint.load(model, to="tp=4", rules=RULES, rank=rank)


def load_all(url: str, readers: int = READERS, **arguments: Any) -> list[dict[str, Any]]:
    """What the ranks of tp=4 load at the same time."""

    def load(rank: int) -> dict[str, Any]:
        return checkpoint.load(
            url, to="tp=4", rules=RULES, rank=rank, readers_on_host=readers, **arguments
        )

    with ThreadPoolExecutor(READERS) as threads:
        return list(threads.map(load, range(READERS)))


def expect_loaded(found: list[dict[str, Any]], model: Path) -> None:
    """The same as from the folder."""
    for rank, own in enumerate(found):
        expected = load_from_folder(model, rank)
        assert own.keys() == expected.keys()
        assert all(np.array_equal(own[name], expected[name]) for name in expected)


def test_ranges_of_several_ranks_are_read_once(
    server: ObjectServer, model: Path, size_bytes: int, folder: Path
) -> None:
    expect_loaded(load_all(f"{server.url}/m"), model)
    assert size_bytes <= server.sent_bytes <= size_bytes * 1.05 + HEADERS_BYTES
    assert not list(folder.iterdir())
    # Alone, each reads what it needs of columns with all that lies between.
    server.sent_bytes = 0
    expect_loaded(load_all(f"{server.url}/m", readers=1), model)
    assert server.sent_bytes > 2.5 * size_bytes


def test_a_second_load_shares_reads_again(
    server: ObjectServer,
    model: Path,
    size_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> None:
    # The last meeting's pieces, and room for little more.
    monkeypatch.setattr(shared_read_cache, "WINDOW_BYTES", 3 << 20)
    # So long, if one of them waited for room that another can only give after it.
    monkeypatch.setattr(shared_read_cache, "_PATIENCE_S", 120.0)
    began_s = time.monotonic()

    def load(rank: int) -> None:
        for names in (["columns.*", "rows.*"], ["whole.*"], ["columns.*"]):
            found = checkpoint.load(
                f"{server.url}/m",
                to="tp=4",
                rules=RULES,
                include=names,
                rank=rank,
                readers_on_host=READERS,
                threads=1 + rank,
            )
            expected = checkpoint.load(model, to="tp=4", rules=RULES, include=names, rank=rank)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)

    with ThreadPoolExecutor(READERS) as threads:
        list(threads.map(load, range(READERS)))
    assert time.monotonic() - began_s < 60
    columns_bytes = 3 * 750 * 1031 * 4
    needed_bytes = size_bytes + columns_bytes
    assert needed_bytes <= server.sent_bytes <= needed_bytes * 1.05 + 3 * HEADERS_BYTES
    assert not list(folder.iterdir())


def test_a_small_window_is_enough(
    server: ObjectServer, model: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_read_cache, "WINDOW_BYTES", 3 << 20)
    expect_loaded(load_all(f"{server.url}/m", threads=1), model)
    assert server.sent_bytes <= size_bytes * 1.05 + HEADERS_BYTES


def test_an_absent_reader_is_not_waited_for_twice(
    server: ObjectServer, model: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_read_cache, "_PATIENCE_S", 0.2)
    expect_loaded(load_all(f"{server.url}/m", readers=READERS + 1), model)
    assert server.sent_bytes <= size_bytes * 1.05 + HEADERS_BYTES


def load_and_die(url: str, folder: Path) -> None:
    """A reader that is killed in the middle of its work."""
    shared_read_cache.find_host_memory = lambda _: folder  # type: ignore[assignment]
    shared_read_cache.PIECE_BYTES = 1 << 20
    read = SharedReadCache.read
    count = 0

    def die(self: SharedReadCache, *arguments: Any) -> None:
        nonlocal count
        count += 1
        read(self, *arguments)
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    SharedReadCache.read = die  # type: ignore[method-assign]
    checkpoint.load(url, to="tp=4", rules=RULES, rank=3, readers_on_host=READERS, threads=1)


def test_a_killed_reader_does_not_block_others(
    server: ObjectServer,
    model: Path,
    size_bytes: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"{server.url}/m"
    victim = multiprocessing.get_context("spawn").Process(target=load_and_die, args=(url, folder))
    victim.start()
    # Others wait for 10 s; a process may take longer to start where many others run.
    while victim.is_alive() and not list(folder.glob("*/member-0")):
        time.sleep(0.01)

    def load(rank: int) -> dict[str, Any]:
        return checkpoint.load(url, to="tp=4", rules=RULES, rank=rank, readers_on_host=READERS)

    dead, close = threading.Event(), SharedReadCache.close

    def close_after_the_victim(self: SharedReadCache) -> None:
        # Else all might have left before it is killed, and nobody would remove the folder.
        dead.wait(60)
        close(self)

    monkeypatch.setattr(SharedReadCache, "close", close_after_the_victim)
    with ThreadPoolExecutor(READERS) as threads:
        readers = [threads.submit(load, rank) for rank in range(READERS - 1)]
        victim.join()
        dead.set()
    found = [reader.result() for reader in readers]
    assert victim.exitcode == -signal.SIGKILL
    expect_loaded(found, model)
    assert not list(folder.iterdir())


def test_pieces_of_killed_readers_are_used_and_removed(
    server: ObjectServer,
    model: Path,
    size_bytes: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[Path] = []

    def keep(path: Path) -> None:
        left.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(shared_read_cache.shutil, "rmtree", keep)
        load_all(f"{server.url}/m")
    (place,) = {*left}
    # One that was being filled.
    pieces = sorted(place.glob("piece-*"))
    with pieces[0].open("r+b") as half:
        half.truncate(1000)
    server.sent_bytes = 0
    expect_loaded(load_all(f"{server.url}/m"), model)
    assert server.sent_bytes < size_bytes / 2 + HEADERS_BYTES
    assert not list(folder.iterdir())


def test_pieces_of_a_replaced_object_are_not_mixed(
    server: ObjectServer,
    model: Path,
    size_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shared_read_cache.shutil, "rmtree", lambda path: None)
        load_all(f"{server.url}/m")
    # Another step of the same shapes, under the same names.
    (name,) = [name for name in server.objects if name.endswith("-00001-of-00002.safetensors")]
    other = bytearray(server.objects[name])
    other[-4:] = b"\7\0\0\0"
    server.objects[name] = bytes(other)
    changed = shutil.copytree(model, tmp_path / "model")
    (changed / name.rpartition("/")[2]).write_bytes(other)
    expect_loaded(load_all(f"{server.url}/m"), changed)


def test_readers_report_changed_objects(server: ObjectServer, size_bytes: int) -> None:
    opened = checkpoint.open_checkpoint(f"{server.url}/m")
    server.objects = {
        name: content if name.endswith(".json") else content[:-4] + b"\7\0\0\0"
        for name, content in server.objects.items()
    }

    def load(rank: int) -> str:
        with pytest.raises(RunError, match="changed since it was opened") as caught:
            checkpoint.load(opened, to="tp=4", rules=RULES, rank=rank, readers_on_host=READERS)
        return str(caught.value)

    with ThreadPoolExecutor(READERS) as threads:
        assert len(list(threads.map(load, range(READERS)))) == READERS


def test_a_slow_reader_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full window waits for the last reader, and no longer than it makes progress."""
    monkeypatch.setattr(shared_read_cache, "WINDOW_BYTES", shared_read_cache.PIECE_BYTES + 1)
    monkeypatch.setattr(shared_read_cache, "_PATIENCE_S", 1.0)
    sizes = {"a": 3 * shared_read_cache.PIECE_BYTES}
    tasks = [
        [(ByteRange("a", at, at + shared_read_cache.PIECE_BYTES), shared_read_cache.PIECE_BYTES)]
        for at in range(0, sizes["a"], shared_read_cache.PIECE_BYTES)
    ]
    with ThreadPoolExecutor(2) as threads:
        fast, slow = threads.map(lambda _: SharedReadCache("m", 2, sizes, tasks), range(2))
    fast.finish(0)
    content = folder / fast.folder.name / f"piece-0-0-0-{shared_read_cache.PIECE_BYTES}-tag"
    content.write_bytes(bytes(shared_read_cache.PIECE_BYTES + 1))
    threading.Timer(0.2, slow.finish, (0,)).start()
    began_s = time.monotonic()
    fast._make_room(2, shared_read_cache.PIECE_BYTES)
    assert 0.1 < time.monotonic() - began_s < 1.0
    assert not content.exists()
    # It hangs.
    content = content.with_name(f"piece-0-1-0-{shared_read_cache.PIECE_BYTES}-tag")
    content.write_bytes(bytes(shared_read_cache.PIECE_BYTES + 1))
    began_s = time.monotonic()
    fast._make_room(2, shared_read_cache.PIECE_BYTES)
    assert time.monotonic() - began_s > 0.9
    assert not content.exists()
    slow.close()
    fast.close()
    assert not list(folder.iterdir())


def test_a_sleeping_reader_still_shares_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left = threading.Event()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: has_left.wait(30))
    monkeypatch.setattr(shared_read_cache, "time", clock)
    sizes = {"a": shared_read_cache.PIECE_BYTES}
    tasks = [[(ByteRange("a", 0, sizes["a"]), sizes["a"])]]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(SharedReadCache, "m", 2, sizes, tasks)
        while not list(folder.glob("*/member-0")):
            time.sleep(0.01)
        with SharedReadCache("m", 2, sizes, tasks) as last:
            last.finish(0)
        has_left.set()
        with first.result() as reads:
            assert list(reads.split("a", 0, sizes["a"])) == [(0, sizes["a"], 0)]
    assert not list(folder.iterdir())


def test_what_is_refused(server: ObjectServer, model: Path, size_bytes: int, folder: Path) -> None:
    url = f"{server.url}/m"
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(UsageError, match=r"readers_on_host .* must be"):
            checkpoint.load(url, readers_on_host=wrong)  # type: ignore[arg-type]
    opened = checkpoint.open_checkpoint(url)
    with pytest.raises(UsageError, match="leave one of them out"):
        checkpoint.load(opened, files=open_sources(opened), readers_on_host=2)
    # Files of this machine share the page cache.
    checkpoint.load(model, readers_on_host=2)
    assert not list(folder.iterdir())


def test_another_users_folder_is_refused(
    server: ObjectServer, size_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_read_cache.os, "getuid", lambda: 12345)
    with pytest.raises(RunError, match="belongs to another user; load without `readers_on_host`"):
        checkpoint.load(f"{server.url}/m", readers_on_host=2)
