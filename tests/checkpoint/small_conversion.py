"""A conversion of a few small files, and a machine that ends it wherever it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoint.conversion import staging
from reshard.checkpoint.conversion.journal import FinishedBlocks, Journal
from reshard.checkpoint.conversion.staging import Staging
from reshard.checkpoint.manifest import MANIFEST_NAME
from reshard.checkpoint.options import RunOptions

# Only a checkpoint is replaced, and its manifest shows one.
OLD = {"weights": b"old weights", MANIFEST_NAME: b"{}", "inner/tokenizer": b"old words"}
NEW = {"weights-0": b"new 0", MANIFEST_NAME: b"{ }", "inner/tokenizer": b"new words"}
OTHER = {MANIFEST_NAME: b"another conversion's"}
LEAVINGS = ["content", "previous", "journal"]
CHANGING_CALLS = ["mkdir", "rename", "unlink", "rmdir", "fsync", "fdatasync", "ftruncate"]


# The caller's own way to make folders, which no machine counts.
make_folder = os.mkdir


class Killed(BaseException):
    """The end of the process: no handler of errors runs."""


class Machine:
    """Runs code up to its n-th changing system call, then lets nothing more be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
        self.calls_left = 10**9
        self.calls: list[str] = []
        exchange = staging.exchange_names
        pwrite = os.pwrite

        def torn_pwrite(descriptor: int, data: bytes, offset: int) -> int:
            if self.calls_left == 0:
                pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
            self.count("pwrite")
            return pwrite(descriptor, data, offset)

        def counted_exchange(first: Path, second: Path) -> bool:
            if not can_exchange:
                return False
            self.count("exchange")
            return exchange(first, second)

        # Not every system has all of them.
        for name in filter(os.__dict__.get, CHANGING_CALLS):
            # Syncing takes long and shows nothing here: a call to count, not to make.
            real = getattr(os, name) if "sync" not in name else lambda *_: None
            monkeypatch.setattr(os, name, self.counted(name, real))
        monkeypatch.setattr(os, "pwrite", torn_pwrite)
        monkeypatch.setattr(staging, "exchange_names", counted_exchange)

    def counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.count(name)
            return real(*arguments, **keywords)

        return call

    def count(self, name: str) -> None:
        if self.calls_left == 0:
            raise Killed(name)
        self.calls_left -= 1
        self.calls.append(name)

    def run(self, code: Callable[[], object], calls: int | None = None) -> bool:
        """Whether `code` came to its end within so many calls (None: as many as it takes)."""
        self.calls = []
        self.calls_left = 10**9 if calls is None else calls
        try:
            code()
        except Killed:
            return False
        else:
            return True
        finally:
            self.calls_left = 10**9


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        for parent in reversed((folder / name).parents):
            if not parent.is_dir():
                make_folder(parent)
        (folder / name).write_bytes(data)


def files_in(folder: Path) -> dict[str, bytes] | None:
    """What a reader sees; None where there is nothing."""
    if not folder.exists():
        return None
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def digest(data: bytes) -> bytes:
    return data[:16].ljust(16, b".")


def append_blocks(journal: Journal, blocks: list[tuple[int, int, bytes]]) -> None:
    """Record blocks that are given as rows."""
    numbers = np.array([block[:2] for block in blocks], np.int64).reshape(len(blocks), 2)
    journal.append_blocks(numbers[:, 0], numbers[:, 1], b"".join(block[2] for block in blocks))


def digests_of(finished: FinishedBlocks) -> dict[tuple[int, int], bytes]:
    """The digest of each block, by the numbers of its tensor and of the block."""
    digests = np.frombuffer(finished.digests, "V16")
    columns = finished.tensors.tolist(), finished.blocks.tolist(), digests
    return {(a, b): digest.tobytes() for a, b, digest in zip(*columns, strict=True)}


def convert(
    target: Path,
    files: dict[str, bytes] = NEW,
    identity: str = "new",
    file: str | None = None,
    **options: Any,
) -> bool:
    """A conversion in which each file is one block, and recorded blocks are not written again.

    Answers whether there was anything to do.
    """
    staging = Staging(target, RunOptions(**options), file=file)
    with staging.open(identity, {"identity": identity}) as work:
        if work.already_complete:
            return False
        finished = digests_of(work.journal.finished)
        for index, (name, data) in enumerate(files.items()):
            if (index, 0) in finished:
                assert finished[index, 0] == digest(data)
                assert (work.content / name).read_bytes() == data
                continue
            write_files(work.content, {name: data})
            append_blocks(work.journal, [(index, 0, digest(data))])
        work.commit()
        return True


@contextmanager
def scenario(parent: Path, number: object, old: dict[str, bytes] | None) -> Iterator[Path]:
    """A folder of its own with the old target in it."""
    folder = parent / str(number)
    folder.mkdir()
    target = folder / "checkpoint"
    if old is not None:
        write_files(target, old)
    yield target


def error_of(code: Callable[[], object]) -> Exception | None:
    try:
        code()
    except Exception as error:
        return error
    return None


def assert_done(target: Path) -> None:
    assert files_in(target) == NEW
    assert os.listdir(target.parent) == [target.name]


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
