"""Conversions in processes of their own that are killed at a chosen system call.

One warm process has everything imported and forks a child for each conversion, so a kill costs
some hundredths of a second. In the child every call that changes something on the disk is
counted; just before the n-th, or in the middle of it when it writes, the child kills itself.

Run as a program, this file is the warm process: it takes one order a line, as JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.any_conversion import plan_any
from live_job import load_s3_client

WRITING_CALLS = ("pwritev", "pwrite")
SYNCING_CALLS = ("fdatasync", "fsync")
OTHER_CALLS = ("rename", "mkdir", "unlink", "rmdir", "ftruncate", "posix_fallocate")

STORE_CALLS = ("begin", "put_part", "complete", "put", "delete")


@dataclass(frozen=True)
class Outcome:
    """How a child ended: killed, or with a report or the text of an error."""

    was_killed: bool
    calls: list[str] = field(default_factory=list)
    error: str | None = None
    written_bytes: int = 0
    resumed_bytes: int = 0
    was_complete: bool = False


class FaultyProcesses:
    """The warm process, from outside."""

    def __init__(self) -> None:
        self._warm = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def convert(
        self,
        source: Path,
        target: Path | str,
        *,
        kill_at: int | None = None,
        synced: Path | None = None,
        **options: Any,
    ) -> Outcome:
        """Run `run_conversion(plan_any(source, target, ...))` in a child.

        `options` are those of both, and `block_bytes` and `part_bytes`. `kill_at` is the number of
        the call to be killed at, from 0.
        Where `synced` is a folder, every sync puts a copy there of what it made durable, for
        `lose_what_was_not_synced`.
        """
        order = {
            "source": str(source),
            "target": str(target),
            "kill_at": kill_at,
            "synced": str(synced) if synced else None,
            "options": options,
        }
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(order) + "\n")
        self._warm.stdin.flush()
        answer = self._warm.stdout.readline()
        assert answer, "the warm process ended"
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait(timeout=60)
        self._warm.stdout.close()


def lose_what_was_not_synced(folder: Path, synced: Path, durable_before: set[int]) -> None:
    """Make of `folder` what a power failure leaves of it at worst.

    A file goes back to what it was when it was last synced, or to nothing; a name that its
    folder was not synced with is gone. What has an inode of `durable_before` stays.
    """
    for parent, folders, files in os.walk(folder):
        names = synced / str(os.stat(parent).st_ino)
        durable_names = json.loads(names.read_text()) if names.exists() else []
        is_new = os.stat(parent).st_ino not in durable_before
        for name in list(folders):
            if is_new and name not in durable_names:
                shutil.rmtree(Path(parent, name))
                folders.remove(name)
        for name in files:
            path = Path(parent, name)
            inode = path.stat().st_ino
            if inode in durable_before:
                continue
            if is_new and name not in durable_names:
                path.unlink()
            elif (synced / str(inode)).exists():
                shutil.copyfile(synced / str(inode), path)
            else:
                os.truncate(path, 0)


class _Countdown:
    """Counts the calls that change something, and ends the process at the one it is told."""

    def __init__(self, kill_at: int | None, synced: Path | None, folder: Path) -> None:
        from reshard.checkpoint.conversion import staging
        from reshard.checkpoint.storage.azure import AzureTarget
        from reshard.checkpoint.storage.s3 import S3Target

        self.kill_at = kill_at
        self.synced = synced
        self.folder = folder
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._rename = os.rename
        # Not every system has all of them.
        for name in filter(os.__dict__.get, WRITING_CALLS):
            setattr(os, name, self._writing(name, getattr(os, name)))
        for name in filter(os.__dict__.get, SYNCING_CALLS):
            setattr(os, name, self._syncing(name))
        for name in filter(os.__dict__.get, OTHER_CALLS):
            setattr(os, name, self._counted(name, getattr(os, name)))
        staging.exchange_names = self._counted("exchange", staging.exchange_names)
        for store in (S3Target, AzureTarget):
            for name in STORE_CALLS:
                setattr(store, name, self._asking(name, getattr(store, name)))

    def _is_the_last(self, name: str) -> bool:
        with self._lock:
            self.calls.append(name)
            return len(self.calls) - 1 == self.kill_at

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._is_the_last(name):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return call

    def _asking(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A request, before and after which the process may end."""

        def call(*arguments: Any) -> Any:
            if self._is_the_last(name):
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*arguments)
            if self._is_the_last(f"{name} done"):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    def _writing(self, name: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, data: Any, offset: int) -> int:
            if self._is_the_last(name):
                # Through the page cache, which takes a half of whatever it is given.
                whole = memoryview(data[0] if name == "pwritev" else data)
                buffered = os.open(self._find_path(descriptor), os.O_WRONLY)
                real_pwrite(buffered, whole[: len(whole) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(descriptor, data, offset)

        real_pwrite = os.pwrite
        return call

    def _syncing(self, name: str) -> Callable[[int], None]:
        """A kill leaves the page cache as it is, so a sync need not be made to be counted."""

        def call(descriptor: int) -> None:
            if self._is_the_last(name):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.synced is not None:
                self._keep(descriptor, self.synced)

        return call

    def _find_path(self, descriptor: int) -> Path:
        """Return a path of an open file; by its inode where there is no /proc."""
        link = Path(f"/proc/self/fd/{descriptor}")
        if link.exists():
            return link
        state = os.fstat(descriptor)
        paths = self.folder.rglob("*")
        return next(path for path in paths if os.path.samestat(path.lstat(), state))

    def _keep(self, descriptor: int, synced: Path) -> None:
        state = os.fstat(descriptor)
        copy = synced / f"{state.st_ino}.{threading.get_ident()}"
        if stat.S_ISDIR(state.st_mode):
            copy.write_text(json.dumps(os.listdir(descriptor)))
        else:
            shutil.copyfile(self._find_path(descriptor), copy)
        self._rename(copy, synced / str(state.st_ino))


def _run(order: dict[str, Any]) -> dict[str, Any]:
    import reshard.checkpoint.blocks.grid as blocks
    import reshard.checkpoint.storage.uploads as parts
    from reshard.checkpoint import run_conversion
    from reshard.errors import ReshardError

    options = order["options"]
    running = {
        name: options.pop(name)
        for name in ("overwrite", "restart", "sync_bytes", "extra_bytes", "threads", "staging")
        if name in options
    }
    synced = Path(order["synced"]) if order["synced"] else None
    countdown = _Countdown(order["kill_at"], synced, Path(order["target"]).parent)
    answer: dict[str, Any] = {"was_killed": False, "calls": countdown.calls}
    try:
        blocks.BLOCK_BYTES = options.pop("block_bytes", blocks.BLOCK_BYTES)
        parts.MIN_PART_BYTES = options.pop("part_bytes", parts.MIN_PART_BYTES)
        conversion = plan_any(order["source"], order["target"], **options)
        report = run_conversion(conversion, **running)
    except ReshardError as error:
        return {**answer, "error": f"{type(error).__name__}: {error}"}
    return {
        **answer,
        "written_bytes": report.written_bytes,
        "resumed_bytes": report.resumed_bytes,
        "was_complete": report.was_complete,
    }


def _serve() -> None:
    import reshard.checkpoint.blocks.grid as blocks
    from reshard.checkpoint.formats.registry import all_formats

    # A child would load and compute these again, and its collections would pass over them.
    all_formats()
    blocks.block_digest(b"")
    gc.freeze()
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            loaded = set(sys.modules)
            with os.fdopen(writing, "w") as pipe:
                answer = _run(json.loads(line))
                json.dump({"answer": answer, "modules": [*set(sys.modules) - loaded]}, pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            answer = {"was_killed": True}
        else:
            ended = json.loads(text)
            answer = ended["answer"]
            _load(ended["modules"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _load(modules: Sequence[str]) -> None:
    """Import the modules that a child imported, so that later children have them."""
    for name in modules:
        # A process of multiprocessing has its program by this name too.
        if name != "__mp_main__":
            importlib.import_module(name)
    if "boto3" in modules:
        load_s3_client()
    gc.freeze()


if __name__ == "__main__":
    _serve()
