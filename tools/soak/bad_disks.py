"""Conversions on a disk that gives less than was asked for, fails, or is full.

1. A seed chooses a conversion between formats, the kind of trouble, and where it begins.
2. Calls that read or write in part are ordinary: the result must be right.
3. What the system refuses ends the run with an error of reshard's own, or has another way
   round. Either way the target is the old one or the new one, whole, and the same command, on
   a good disk, makes it the new one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from checkpoint.killed_conversion import write_old
from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from reshard.checkpoint import ConversionReport, convert, plan_conversion, run_conversion
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.conversion.staging import staging_folder
from reshard.errors import ReshardError
from soak.wrong import Wrong

BLOCK_BYTES = 64 * 1024
PAGE_BYTES = 4096
READING = ("preadv", "pread", "read")
WRITING = ("pwritev", "pwrite", "posix_fallocate")
CHANGING = (*WRITING, "sendfile", "fdatasync", "fsync", "rename", "mkdir", "ftruncate", "unlink")
OPENING = ("open", "stat", "listdir", "scandir")

# The calls that are hit, the error (None: done in part), and how often it comes.
TROUBLES: dict[str, tuple[tuple[str, ...], int | None, str]] = {
    "reads in part": (("preadv", "pread"), None, "often"),
    "writes in part": (("pwritev", "pwrite"), None, "often"),
    "EIO when reading, from then on": (READING, errno.EIO, "from then on"),
    "EIO when reading, once": (READING, errno.EIO, "once"),
    "ENOSPC when writing, from then on": (WRITING, errno.ENOSPC, "from then on"),
    "ENOSPC when writing, once": ((*WRITING, "sendfile"), errno.ENOSPC, "once"),
    "EIO when changing anything, once": (CHANGING, errno.EIO, "once"),
    "EDQUOT when changing anything, from then on": (CHANGING, errno.EDQUOT, "from then on"),
    "EMFILE when opening, once": (OPENING, errno.EMFILE, "once"),
}


class _Trouble:
    """Makes some functions of `os` count their calls, and fail at those it is told."""

    def __init__(self, kind: str, choose: random.Random, begin: int | None) -> None:
        self.names, self.error, self.how = TROUBLES[kind]
        self.begin = begin
        self.calls = 0
        self.hits = 0
        self._choose = choose
        self._lock = threading.Lock()

    def patches(self) -> ExitStack:
        """The changes to `os`, undone on exit."""
        stack = ExitStack()
        for name in self.names:
            stack.enter_context(mock.patch.object(os, name, self._troubled(getattr(os, name))))
        return stack

    def _is_hit(self) -> bool:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            if self.begin is None:
                return False
            hit = {
                "once": number == self.begin,
                "from then on": number >= self.begin,
                "often": self._choose.random() < 0.4,
            }[self.how]
            self.hits += hit
            return hit

    def _troubled(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self._is_hit():
                return real(*arguments, **keywords)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            descriptor, what, *rest = arguments
            if isinstance(what, int):
                return real(descriptor, self._part(what), *rest)
            view = memoryview(what[0] if isinstance(what, list) else what).cast("B")
            part = view[: self._part(len(view))]
            return real(descriptor, [part] if isinstance(what, list) else part, *rest)

        return call

    def _part(self, size: int) -> int:
        with self._lock:
            part = self._choose.randint(1, size) if size else 0
            whole_pages = self._choose.random() < 0.5 and part > PAGE_BYTES
        return part - part % PAGE_BYTES if whole_pages else part


class BadDisks:
    """The campaign."""

    goal = "troubles"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        blocks.BLOCK_BYTES = BLOCK_BYTES
        self._folder = folder
        whole = write_model(folder / "whole", layers=3)
        convert(whole, folder / "rows", **ROWS)
        convert(whole, folder / "torch", format="torch-dcp", **ROWS)
        self._conversions: dict[str, tuple[Path, dict[str, Any]]] = {
            "shards to shards": (folder / "rows", COLUMNS),
            "shards to torch-dcp": (folder / "rows", {"format": "torch-dcp", **COLUMNS}),
            "torch-dcp to files": (folder / "torch", {"to": "full", "most_file_bytes": 2_000_000}),
        }
        self._expected: dict[str, dict[str, str] | None] = {}
        for name, (source, options) in self._conversions.items():
            convert(source, folder / name, **options)
            self._expected[name] = contents(folder / name)
            shutil.rmtree(folder / name)
        self._counted: dict[tuple[str, str, int], int] = {}

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        name = choose.choice(sorted(self._conversions))
        kind = choose.choice(sorted(TROUBLES))
        threads = choose.choice([1, 4])
        # Most trouble begins anywhere, some of it at the end, where all is put in place.
        key = (name, kind, threads)
        if key not in self._counted:
            counting = _Trouble(kind, choose, None)
            with counting.patches():
                self._convert(name, self._folder / "counted", threads)
            shutil.rmtree(self._folder / "counted")
            self._counted[key] = counting.calls
        calls = self._counted[key]
        begin = choose.randrange(calls) if choose.random() < 0.7 else max(0, calls - 25)
        begin += choose.randrange(25) if begin == calls - 25 else 0
        place = self._folder / "place"
        place.mkdir()
        try:
            hits = self._try(name, _Trouble(kind, choose, begin), place / "target", threads)
        finally:
            shutil.rmtree(place)
        return Counter({"troubles": 1, name: 1, kind: 1, "calls that were hit": hits})

    def _convert(self, name: str, target: Path, threads: int) -> ConversionReport:
        source, options = self._conversions[name]
        conversion = plan_conversion(source, target, **options)
        return run_conversion(
            conversion, overwrite=True, threads=threads, sync_bytes=4 * BLOCK_BYTES
        )

    def _try(self, name: str, trouble: _Trouble, target: Path, threads: int) -> int:
        write_old(target)
        old, expected = contents(target), self._expected[name]
        try:
            with trouble.patches():
                self._convert(name, target, threads)
        except ReshardError as error:
            if trouble.error is None:
                raise Wrong("calls done in part are no errors") from error
            # What was put in place stays; only the tidying up went wrong.
            if contents(target) not in (old, expected):
                raise Wrong("the target is neither the old nor the new one") from error
        else:
            if contents(target) != expected:
                raise Wrong("the run succeeded, and the target is not what it should be")
        if contents(target) == old or staging_folder(target).exists():
            self._convert(name, target, threads)
        if contents(target) != expected:
            raise Wrong("the run that went on gave something else")
        if os.listdir(target.parent) != [target.name]:
            raise Wrong(f"{os.listdir(target.parent)} is left")
        return trouble.hits
