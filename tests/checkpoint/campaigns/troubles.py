"""Disks that give less than was asked for, fail, or are full: calls of `os` that do so.

1. A `Trouble` makes calls of one kind fail, or do a part, from a number on, once or often.
2. Calls that read or write in part are ordinary: the result must be right.
3. What the system refuses ends the run with an error of reshard's own, or has another way round.
   Either way the target is the old one or the new one, whole, and the same command, on a good
   disk, makes it the new one (`try_in_trouble`).
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from checkpoint.killed_conversion import write_old
from checkpoint.model_files import contents
from reshard.checkpoint.conversion.staging import staging_folder
from reshard.errors import ReshardError

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


class Trouble:
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


def count_calls(kind: str, run: Callable[[Path], object], target: Path) -> int:
    """How many calls of a kind of trouble a run makes."""
    counting = Trouble(kind, random.Random(0), None)
    with counting.patches():
        run(target)
    return counting.calls


def try_in_trouble(
    trouble: Trouble,
    run: Callable[[Path], object],
    target: Path,
    expected: dict[str, str] | None,
) -> int:
    """Run into trouble, and again without; answers how many calls were hit.

    `run` converts to a target, and may replace an old one; `expected` is what it gives undisturbed.
    """
    write_old(target)
    old = contents(target)
    try:
        with trouble.patches():
            run(target)
    except ReshardError as error:
        if trouble.error is None:
            raise AssertionError("calls done in part are no errors") from error
        # What was put in place stays; only the tidying up went wrong.
        assert contents(target) in (old, expected), "the target is neither the old nor the new one"
    else:
        assert contents(target) == expected, "the run succeeded, and the target is another"
    if contents(target) == old or staging_folder(target).exists():
        run(target)
    assert contents(target) == expected, "the run that went on gave something else"
    assert os.listdir(target.parent) == [target.name], "something is left beside the target"
    return trouble.hits
