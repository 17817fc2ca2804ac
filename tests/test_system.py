"""Calls of the system: Linux's own, those of macOS by a stand-in, and the way without either."""

from __future__ import annotations

import ast
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from checkpoint.checkpoint_files import tensor, write_file
from checkpoint.killed_conversion import can_exchange_names
from mac_system import BLOCK_BYTES, MacSystem
from reshard import system
from reshard.checkpoint import compare, convert
from reshard.checkpoint.processes import ProcessMark
from reshard.checkpoint.storage.local_files import SourceFile, TargetFile

SOURCE = Path(reshard.__file__).parent
STAND_IN = pytest.mark.linux_only(reason="the stand-in for macOS is made of Linux's calls")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> MacSystem:
    return MacSystem().install(monkeypatch)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(data)


# Names swapped.


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    write(tmp_path / "a" / "file", b"1")
    write(tmp_path / "b" / "other", b"2")
    if system.exchange_names(tmp_path / "a", tmp_path / "b"):
        assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["other"], ["file"])
    else:
        assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["file"], ["other"])


@pytest.mark.parametrize("name", ["renameat2", "renamex_np"])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_exchange_reports_where_it_is_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, name: str
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(number or 0)
        return -1

    # A C library without the call, or over a kernel that refuses it.
    library = type("Library", (), {} if number is None else {name: staticmethod(refuse)})
    monkeypatch.setattr(system, "_load_library", lambda: library)
    assert system.exchange_names(tmp_path / "a", tmp_path / "b") is False


@pytest.mark.skipif(not can_exchange_names(), reason="names cannot be swapped here")
def test_exchange_with_a_name_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match="b"):
        system.exchange_names(tmp_path / "a", tmp_path / "b")


# Linux.


@pytest.mark.linux_only(reason="counts the calls of Linux")
def test_linux_is_asked_by_its_own_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them, nor their number, may change for other systems' sake."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str, describe: Callable[..., str | None]) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.update(filter(None, [describe(*arguments)]))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (1 << 10, 1 << 9))})
    count(os, "open", lambda _, flags=0, *__: "O_DIRECT" if flags & os.O_DIRECT else None)
    count(os, "preadv", lambda *arguments: "RWF_NOWAIT" if len(arguments) == 4 else "preadv")
    for name in ("pwritev", "posix_fallocate", "fdatasync"):
        count(os, name, lambda *_, name=name: name)
    count(fcntl, "fcntl", lambda *_: "fcntl")
    source, new = tmp_path / "model.safetensors", tmp_path / "new"
    convert(source, new, to="tp=2", rules=["*=tp, -"], threads=1)
    convert(source, new, to="full", overwrite=True, threads=1)
    # Two files, then one; each is opened a second time for direct I/O, as is the source.
    assert calls["posix_fallocate"] == 3 and calls["O_DIRECT"] == 5
    assert calls["fdatasync"] > 0 and calls["pwritev"] > 0
    assert calls["RWF_NOWAIT"] > 0
    assert calls["fcntl"] == 0


# macOS.


@STAND_IN
def test_macos_swaps_names_by_its_own_call(tmp_path: Path, mac: MacSystem) -> None:
    write(tmp_path / "a" / "file", b"1")
    write(tmp_path / "b" / "other", b"2")
    assert system.exchange_names(tmp_path / "a", tmp_path / "b")
    assert (os.listdir(tmp_path / "a"), mac.names()) == (["other"], ["renamex_np"])
    with pytest.raises(FileNotFoundError, match="missing"):
        system.exchange_names(tmp_path / "a", tmp_path / "missing")


@STAND_IN
def test_macos_opens_files_past_the_cache(tmp_path: Path, mac: MacSystem) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    descriptor = system.open_direct(path, os.O_RDONLY)
    assert descriptor >= 0 and mac.calls == [("F_NOCACHE", 1)]
    os.close(descriptor)
    mac.errors["F_NOCACHE"] = errno.ENOTSUP
    assert system.open_direct(path, os.O_RDONLY) == -1
    with pytest.raises(FileNotFoundError):
        system.open_direct(tmp_path / "missing", os.O_RDONLY)


@STAND_IN
@pytest.mark.parametrize("old_bytes", [0, 3 * BLOCK_BYTES])
def test_macos_takes_the_space_that_a_file_lacks(
    tmp_path: Path, mac: MacSystem, old_bytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1" * old_bytes)
    has_bytes = path.stat().st_blocks * 512
    TargetFile(path, 10 * BLOCK_BYTES).close()
    assert ("F_PREALLOCATE", 10 * BLOCK_BYTES - has_bytes) in mac.calls
    state = path.stat()
    assert state.st_size == 10 * BLOCK_BYTES <= state.st_blocks * 512
    TargetFile(path, 10 * BLOCK_BYTES).close()
    assert mac.names().count("F_PREALLOCATE") == 1


@STAND_IN
def test_macos_disk_that_is_full_is_an_error_and_one_without_the_call_is_not(
    tmp_path: Path, mac: MacSystem
) -> None:
    mac.errors["F_PREALLOCATE"] = errno.ENOSPC
    with pytest.raises(reshard.ReshardError, match="No space left on device"):
        TargetFile(tmp_path / "full", 100)
    mac.errors["F_PREALLOCATE"] = errno.ENOTSUP
    TargetFile(tmp_path / "file", 100).close()
    assert (tmp_path / "file").stat().st_size == 100


@STAND_IN
@pytest.mark.parametrize("call", [system.sync, system.sync_data])
def test_macos_syncs_through_the_cache_of_the_disk(
    tmp_path: Path, mac: MacSystem, monkeypatch: pytest.MonkeyPatch, call: Callable[[int], None]
) -> None:
    weak: list[int] = []
    monkeypatch.setattr(os, "fsync", weak.append)
    with (tmp_path / "file").open("wb") as file:
        call(file.fileno())
        assert (mac.names(), weak) == (["F_FULLFSYNC"], [])
        for number in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
            mac.errors["F_FULLFSYNC"] = number
            call(file.fileno())
        assert len(weak) == 3
        # An error that a second call may not report again is not passed over.
        mac.errors["F_FULLFSYNC"] = errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            call(file.fileno())
        assert len(weak) == 3


@STAND_IN
def test_macos_gives_whole_blocks_back(tmp_path: Path, mac: MacSystem) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1" * 8 * BLOCK_BYTES)
    with path.open("r+b") as file:
        assert system.punch_hole(file.fileno(), 100, 3 * BLOCK_BYTES + 5)
        assert mac.calls == [("F_PUNCHHOLE", BLOCK_BYTES, 2 * BLOCK_BYTES)]
        assert system.punch_hole(file.fileno(), 100, 200)
        assert len(mac.calls) == 1
        mac.errors["F_PUNCHHOLE"] = errno.ENOTSUP
        assert not system.punch_hole(file.fileno(), 0, BLOCK_BYTES)
        mac.errors["F_PUNCHHOLE"] = errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            system.punch_hole(file.fileno(), 0, BLOCK_BYTES)
    expected = b"1" * BLOCK_BYTES + bytes(2 * BLOCK_BYTES) + b"1" * 5 * BLOCK_BYTES
    assert path.read_bytes() == expected


@STAND_IN
def test_macos_announces_reads(tmp_path: Path, mac: MacSystem) -> None:
    with (tmp_path / "file").open("w+b") as file:
        system.announce_read(file.fileno(), 4096, 100)
        system.announce_read(file.fileno(), 1 << 40, 1 << 40)
        assert mac.calls == [
            ("F_RDADVISE", 4096, 100),
            ("F_RDADVISE", 1 << 40, system.MAX_CALL_BYTES),
        ]
        mac.errors["F_RDADVISE"] = errno.EINVAL
        system.announce_read(file.fileno(), 0, 1)


@STAND_IN
def test_macos_gives_memory_back(mac: MacSystem) -> None:
    system.trim_memory()
    assert mac.calls == [("malloc_zone_pressure_relief", 0)]


def test_macos_counts_peak_memory_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert system.peak_bytes() >= peak_kib * 1024
    monkeypatch.setattr(system, "IS_MACOS", True)
    assert peak_kib <= system.peak_bytes() < peak_kib * 1024


@pytest.mark.parametrize(
    ("limits", "largest", "expected"),
    [
        ((256, resource.RLIM_INFINITY), 10_240, 10_240),
        ((256, resource.RLIM_INFINITY), 1 << 30, 1 << 20),
        ((256, resource.RLIM_INFINITY), 100, 256),
        ((20_000, resource.RLIM_INFINITY), 10_240, 20_000),
        ((256, 4096), 1 << 30, 4096),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 0, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_the_system_lets(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], largest: int, expected: int
) -> None:
    """macOS has no hard limit, and refuses more than a setting of its own."""
    current = [limits]

    def set_limit(_: int, new: tuple[int, int]) -> None:
        if new[0] > largest:
            raise ValueError("current limit exceeds maximum limit")
        current.append(new)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    system.raise_open_file_limit()
    assert current[-1] == (expected, limits[1])


@STAND_IN
def test_a_checkpoint_is_converted_by_the_calls_of_macos(tmp_path: Path, mac: MacSystem) -> None:
    whole, new = tmp_path / "whole", tmp_path / "new"
    whole.mkdir()
    write_file(whole / "model.safetensors", {name: tensor("float32", (600, 200)) for name in "ab"})
    convert(whole, new, to="tp=2", rules=["*=tp, -"])
    convert(whole, new, to="full", overwrite=True)
    assert compare(whole, new).is_same
    assert {*mac.names()} >= {"F_PREALLOCATE", "F_FULLFSYNC", "F_NOCACHE", "renamex_np"}


# Without either.


@pytest.mark.parametrize("size_bytes", [1, 7, 8, 9, 30])
def test_a_call_moves_no_more_than_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    """macOS refuses a single read or write of 2 GiB."""
    monkeypatch.setattr(system, "MAX_CALL_BYTES", 8)
    content, path = os.urandom(size_bytes), tmp_path / "file"
    for missing in ((), ("preadv", "pwritev", "RWF_NOWAIT")):
        with monkeypatch.context() as patch:
            for name in missing:
                patch.delattr(os, name, raising=False)
            with TargetFile(path, size_bytes) as target:
                target.write(memoryview(content), 0)
            with SourceFile(path) as source:
                found = bytearray(size_bytes)
                source.read_into(memoryview(found), 0)
                assert system.read_at(source._descriptor, memoryview(found), 0) <= 8
        assert path.read_bytes() == found == content


def test_a_file_is_reopened_by_its_descriptor_without_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def hide(path: Any, *arguments: Any) -> int:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", hide)
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"content")
        file.flush()
        (tmp_path / "file").unlink()
        with SourceFile("a name", descriptor=file.fileno()) as source:
            found = bytearray(7)
            source.read_into(memoryview(found), 0)
        assert found == b"content"
        assert file.seek(0) == 0 and file.read() == b"content"


def test_processes_that_ended_are_seen_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_read_process", lambda _: None)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not system.has_ended(child.pid) and system.find_process_start(child.pid) == "?"
    child.communicate()
    assert system.has_ended(child.pid) and system.find_process_start(child.pid) == ""
    # Of another user.
    assert not system.has_ended(1)
    assert not ProcessMark.of_this_process().is_gone


def test_the_system_says_nothing_where_it_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_HOST_MEMORY", Path("/nowhere"))
    assert system.find_host_memory() == Path(tempfile.gettempdir())
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert system.count_processors() == os.cpu_count()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not system.has_large_pages() and system.find_large_page_advice() is None
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert not system.can_seal_memory()
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    assert system.find_cached_read() is None


# The house.


def test_on_windows_the_import_names_the_way_out() -> None:
    program = (
        "import sys\n"
        "sys.platform = 'win32'\n"
        "sys.modules['fcntl'] = sys.modules['resource'] = None\n"
        "import reshard\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert re.match("ImportError: reshard needs a POSIX system, .* WSL", last)


ASKING = re.compile(
    r"\b(?:hasattr|getattr)\((?:os|mmap|fcntl|socket|resource|signal|ctypes)\b"
    r"|\bsys\.platform|\bplatform\.system|\bos\.(?:name\b|uname|O_DIRECT\b|fsync|fdatasync|preadv"
    r"|pwritev|posix_f|sched_|memfd|copy_file_range|RWF_)|\bctypes\.CDLL|\bMADV_|\bF_SEAL"
    r"|\bF_(?:GET|ADD)_SEALS|\bgetrusage|\bsetrlimit|[\"']/(?:proc|dev)/"
)


def test_nothing_else_asks_what_the_system_can_do() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        # The package itself refuses Windows before any of its modules is loaded.
        if name in ("system.py", "__init__.py"):
            continue
        code = path.read_text()
        if ASKING.search(code) is None:
            continue
        # Comments and docstrings may name the calls.
        code = ast.unparse(_without_docstrings(ast.parse(code)))
        found += [f"{name}: {match.group()}" for match in ASKING.finditer(code)]
    assert found == []


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return tree
