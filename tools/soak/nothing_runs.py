"""While something is read, nothing that it could name may be run: Python itself tells.

An audit hook cannot be taken away again, so one hook looks at what is allowed now.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import reshard.checkpoint

FORBIDDEN = frozenset(
    [
        *("import", "exec", "compile", "marshal.loads", "pickle.find_class", "code.__new__"),
        *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.kill"),
        *("subprocess.Popen", "ctypes.dlopen", "ctypes.dlsym", "socket.__new__", "socket.connect"),
        *("os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree", "urllib.Request"),
    ]
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_folder: Path | None = None
_seen: list[str] = []
_is_installed = False


class SomethingRan(Exception):
    """Reading did more than read."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _folder is None:
        return
    if event in FORBIDDEN:
        _seen.append(f"{event} {reprlib.repr(arguments[:1])}")
    elif event == "open" and isinstance(arguments[0], str):
        path, _, flags = arguments
        is_inside = Path(os.path.abspath(path)).is_relative_to(_folder)
        if flags & _WRITING or not is_inside:
            _seen.append(f"open {path!r}")


@contextmanager
def nothing_runs(folder: Path) -> Iterator[None]:
    """Raises SomethingRan when anything but files of `folder` is read, or anything is run."""
    global _folder, _is_installed
    if not _is_installed:
        # Modules that errors import when they are first raised are imported here instead.
        for module in pkgutil.walk_packages(reshard.checkpoint.__path__, "reshard.checkpoint."):
            importlib.import_module(module.name)
        sys.addaudithook(_hook)
        _is_installed = True
    _seen.clear()
    _folder = folder.resolve()
    try:
        yield
    finally:
        _folder = None
        if _seen:
            raise SomethingRan(", ".join(_seen[:10]))
