"""Calls of the operating system that some systems lack, each with a fallback.

Linux has all of them; macOS has some, under other names. No other module of this package depends on
the capabilities of the system.

| call | Linux | macOS | fallback |
|---|---|---|---|
| bypassing the page cache | `O_DIRECT` | `F_NOCACHE` | through it |
| contents of the page cache | `RWF_NOWAIT` | unknown | unknown |
| reads announced | `posix_fadvise` | `F_RDADVISE` | not announced |
| preallocation | `posix_fallocate` | `F_PREALLOCATE` | allocated as files are written |
| releasing space | `fallocate` | `F_PUNCHHOLE` | kept until the file is deleted |
| bytes safe on the disk | `fdatasync`, `fsync` | `F_FULLFSYNC` | `fsync` |
| two names swapped | `renameat2` | `renamex_np` | two renames by the caller |
| an open file opened again | `/proc/self/fd` | its descriptor duplicated | as macOS |
| shared memory | `memfd_create`, `/dev/shm` | none; files | as macOS |
| memory of other processes | `process_vm_readv`, `prctl` | none | none |
| large pages | `MADV_HUGEPAGE` | none | none |
| processors | `sched_getaffinity` | all | all |
| memory | `/proc/self/status`, `malloc_trim` | peak, `malloc_zone_pressure_relief` | peak |
| other processes | `/proc` | `kill` | `kill` |

Sources: man pages of Linux; of macOS, fcntl(2), renamex_np(2) and the header sys/fcntl.h.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import socket

IS_MACOS = sys.platform == "darwin"

# ENOTSUP and EOPNOTSUPP are equal on Linux, and differ on macOS.
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""The errors of a file system without such a call."""

MAX_CALL_BYTES = 0x7FFFF000
"""The limit of a single read or write: Linux truncates larger calls, and macOS refuses them."""

# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE, AT_FDCWD and RENAME_EXCHANGE of Linux.
_PUNCH = 1 | 2
_CURRENT_FOLDER = -100
_RENAME_EXCHANGE = 2

_WILL_NEED: int = getattr(os, "POSIX_FADV_WILLNEED", 3)

# Commands of fcntl on macOS, with the structures that they take.
_PREALLOCATE, _READ_ADVICE, _NO_CACHE, _FULL_SYNC, _PUNCH_HOLE = 42, 44, 48, 51, 99
_FSTORE = struct.Struct("=Iiqqq")
_READ_ADVICE_RANGE = struct.Struct("=qi4x")
_PUNCH_HOLE_RANGE = struct.Struct("=IIqq")
_ALLOCATE_ALL, _FROM_PHYSICAL_END = 4, 3
# RENAME_SWAP.
_RENAME_SWAP = 2

# F_FULLFSYNC fails with ENOTTY on file systems that do not support it.
_SYNC_REFUSALS = REFUSALS | {errno.ENOTTY}

_HOST_MEMORY = Path("/dev/shm")
_MANY_TENSORS = 10_000
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# PR_SET_PTRACER of Linux.
_SET_PTRACER = 0x59616D61
MAX_SPANS = 1024
"""The limit of a single call of `read_process_memory`: IOV_MAX of Linux."""
# A process that reads mapped memory is killed (SIGBUS) if another truncates the file.
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
# The offset of tcpi_last_ack_recv in Linux's tcp_info: milliseconds since the last ACK.
_ACKNOWLEDGED_AT = 56
# Limits of open files to request, in order: macOS refuses more than OPEN_MAX or a setting.
_OPEN_FILES = (1 << 20, 1 << 16, 10_240)


# Reads and writes.


def open_direct(path: Path, flags: int) -> int:
    """Open a file for I/O past the page cache; return -1 if its file system does not
    support that.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if not direct and not IS_MACOS:
        return -1
    try:
        descriptor = os.open(path, flags | direct)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return -1
    if not direct:
        try:
            fcntl.fcntl(descriptor, _NO_CACHE, 1)
        except OSError:
            os.close(descriptor)
            return -1
    return descriptor


def reopen(descriptor: int, flags: int) -> int:
    """Open the file of a descriptor again, even without a name."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except FileNotFoundError:
        return os.dup(descriptor)


def reopen_direct(descriptor: int, flags: int) -> int:
    """Open the file of a descriptor again as `open_direct` does; return -1 if that is impossible.

    A descriptor that is duplicated shares its settings with the first.
    """
    try:
        return open_direct(Path(f"/proc/self/fd/{descriptor}"), flags)
    except FileNotFoundError:
        return -1


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read once into a non-empty `view` from `offset` on; return the number of bytes read."""
    if len(view) > MAX_CALL_BYTES:
        view = view[:MAX_CALL_BYTES]
    try:
        read = os.preadv
    except AttributeError:
        content = os.pread(descriptor, len(view), offset)
        view[: len(content)] = content
        return len(content)
    return read(descriptor, [view], offset)


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Write a non-empty `view` once at `offset`; return the number of bytes written."""
    if len(view) > MAX_CALL_BYTES:
        view = view[:MAX_CALL_BYTES]
    try:
        write = os.pwritev
    except AttributeError:
        return os.pwrite(descriptor, view, offset)
    return write(descriptor, [view], offset)


def find_cached_read() -> tuple[Callable[[int, list[memoryview], int, int], int], int] | None:
    """Return `os.preadv` and its flag to read the page cache only, or None if there is none.

    A read raises BlockingIOError if the first byte is not cached.
    """
    flag = getattr(os, "RWF_NOWAIT", None)
    return None if flag is None else (os.preadv, flag)


def announce_read(descriptor: int, offset: int, size_bytes: int) -> None:
    """Hint that a range will be read, if the system supports such hints."""
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, size_bytes, _WILL_NEED)
        elif IS_MACOS:
            hint = _READ_ADVICE_RANGE.pack(offset, min(size_bytes, MAX_CALL_BYTES))
            fcntl.fcntl(descriptor, _READ_ADVICE, hint)
    except OSError:
        # A hint that is ignored affects only the time.
        return


# Space and durability.


def allocate(descriptor: int, size_bytes: int) -> None:
    """Preallocate a file of `size_bytes`, if the file system supports that. Raises OSError.

    The size of the file is set by the caller: only some of the calls set it.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
        elif IS_MACOS:
            # F_PREALLOCATE adds to the space that the file has. `st_blocks` counts 512 bytes on all
            # systems.
            missing_bytes = size_bytes - os.fstat(descriptor).st_blocks * 512
            if missing_bytes > 0:
                store = _FSTORE.pack(_ALLOCATE_ALL, _FROM_PHYSICAL_END, 0, missing_bytes, 0)
                fcntl.fcntl(descriptor, _PREALLOCATE, store)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise


def punch_hole(descriptor: int, start_bytes: int, stop_bytes: int) -> bool:
    """Release the space of a range; return False if the file system does not support holes.

    The range then reads as zeros; macOS keeps partial blocks at its ends. Any other failure raises
    `OSError`.
    """
    if start_bytes >= stop_bytes:
        return False
    if IS_MACOS:
        # F_PUNCHHOLE refuses ranges that are not whole blocks.
        block_bytes = os.fstatvfs(descriptor).f_frsize
        start_bytes = -(-start_bytes // block_bytes) * block_bytes
        stop_bytes = stop_bytes // block_bytes * block_bytes
        if start_bytes >= stop_bytes:
            return True
        hole = _PUNCH_HOLE_RANGE.pack(0, 0, start_bytes, stop_bytes - start_bytes)
        try:
            fcntl.fcntl(descriptor, _PUNCH_HOLE, hole)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return False
        return True
    call = _find_function("fallocate")
    if call is None:
        return False
    import ctypes

    # ctypes passes a Python int as a C int, of 32 bits.
    offset, length = ctypes.c_int64(start_bytes), ctypes.c_int64(stop_bytes - start_bytes)
    return call(descriptor, _PUNCH, offset, length) == 0 or _is_refused()


def sync(descriptor: int) -> None:
    """Wait until a file or folder is durable. Raises `OSError`."""
    if not _sync_fully(descriptor):
        os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Wait until the bytes of a file, and the metadata to find them, are durable.

    Raises `OSError`.
    """
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync(descriptor)


def _sync_fully(descriptor: int) -> bool:
    """Flush the cache of the disk on macOS; return False elsewhere, and if refused."""
    if not IS_MACOS:
        return False
    try:
        fcntl.fcntl(descriptor, _FULL_SYNC)
    except OSError as error:
        if error.errno not in _SYNC_REFUSALS:
            raise
        return False
    return True


def exchange_names(first: Path, second: Path) -> bool:
    """Swap two existing names atomically: neither is ever missing.

    Returns False, with nothing changed, if the kernel, the C library or the file system does
    not support it. Any other refusal raises `OSError`.
    """
    names = os.fsencode(first), os.fsencode(second)
    if (rename := _find_function("renameat2")) is not None:
        here = _CURRENT_FOLDER
        status = rename(here, names[0], here, names[1], _RENAME_EXCHANGE)
    elif (rename := _find_function("renamex_np")) is not None:
        status = rename(*names, _RENAME_SWAP)
    else:
        return False
    return status == 0 or _is_refused(second)


# Memory.


def find_host_memory(min_bytes: int = 0) -> Path:
    """Return the shared-memory folder if it has room, or else a folder on disk; containers often
    have 64 MiB.

    >>> find_host_memory(1 << 60) == Path(tempfile.gettempdir())
    True
    """
    if os.access(_HOST_MEMORY, os.W_OK):
        state = os.statvfs(_HOST_MEMORY)
        if state.f_bavail * state.f_frsize >= min_bytes:
            return _HOST_MEMORY
    return Path(tempfile.gettempdir())


def can_seal_memory() -> bool:
    """Return whether memory files can be sealed against shrinking."""
    return all(hasattr(fcntl, name) for name in _SEALS) and hasattr(os, "memfd_create")


def make_sealed_memory(size_bytes: int) -> int:
    """Return the descriptor of a memory file of fixed size. Raises OSError."""
    # Looked up dynamically, since not every system has these names.
    system, control = cast("Any", os), cast("Any", fcntl)
    descriptor: int = system.memfd_create("reshard", system.MFD_CLOEXEC | system.MFD_ALLOW_SEALING)
    try:
        # Before the seals, which forbid any other size.
        os.ftruncate(descriptor, size_bytes)
        seals = sum(getattr(fcntl, name) for name in _SEALS)
        fcntl.fcntl(descriptor, control.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed_memory(descriptor: int) -> bool:
    """Return whether a file is a memory file that cannot shrink. Raises OSError."""
    control = cast("Any", fcntl)
    return bool(fcntl.fcntl(descriptor, control.F_GET_SEALS) & control.F_SEAL_SHRINK)


def read_process_memory(process: int, spans: int, count: int, into: int, into_count: int) -> int:
    """Copy spans of another process's memory into spans of the caller's.

    Args:
        process: its number; the caller's own is allowed.
        spans, into: the addresses of tables of spans: in each row an address and a length, as
            unsigned 64-bit numbers.
        count, into_count: the rows of the tables, at most `MAX_SPANS`.

    Returns:
        The number of bytes copied; fewer than asked for if some memory cannot be read.

    Raises:
        OSError: the kernel does not permit it (EPERM), lacks the call (ENOSYS), or cannot read
            the first span.
    """
    import ctypes

    read = _find_process_read()
    if read is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done: int = read(process, into, into_count, spans, count, 0)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return done


@lru_cache(maxsize=1)
def _find_process_read() -> Any:
    import ctypes

    function = _find_function("process_vm_readv")
    if function is not None:
        table, count = ctypes.c_void_p, ctypes.c_ulong
        function.argtypes = [ctypes.c_int, table, count, table, count, ctypes.c_ulong]
        function.restype = ctypes.c_ssize_t
    return function


def is_tracing_restricted() -> bool:
    """Return whether Yama permits only parents, and the process named by `permit_reader`."""
    try:
        return _PTRACE_SCOPE.read_text().strip() == "1"
    except OSError:
        return False


def permit_reader(process: int) -> bool:
    """Permit a process and its descendants to read the caller's memory, if Yama restricts access.

    The kernel keeps a single permitted process, which the call replaces. Return
    whether the permission was set.
    """
    import ctypes

    control = _find_function("prctl")
    if control is None:
        return False
    # `prctl` is variadic and reads unsigned longs; Python ints would be passed as C ints.
    arguments = (ctypes.c_ulong(number) for number in (process, 0, 0, 0))
    return bool(control(ctypes.c_int(_SET_PTRACER), *arguments) == 0)


def has_large_pages() -> bool:
    """Return whether memory can be asked for in large pages."""
    return hasattr(mmap, "MADV_HUGEPAGE")


def advise_pages(mapping: mmap.mmap, begin: int, size_bytes: int, *, large: bool) -> bool:
    """Request large or small pages in a part of a mapping; return False if unsupported."""
    advice = getattr(mmap, "MADV_HUGEPAGE" if large else "MADV_NOHUGEPAGE", None)
    if advice is None:
        return False
    try:
        mapping.madvise(advice, begin, size_bytes)
    except OSError:
        return False
    return True


def find_large_page_advice() -> Callable[[int, int], int] | None:
    """Return a function that requests large pages by address and size, or None."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    call = _find_function("madvise") if advice is not None else None
    if call is None:
        return None
    import ctypes

    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, size_bytes: cast("int", call(address, size_bytes, advice))


def resident_bytes() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process.

    If the system does not report the current value, both are the peak.
    """
    # Read the value of this program only: `ru_maxrss` includes the peak of the forking process.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    except (OSError, ValueError, KeyError, IndexError):
        now = peak = peak_bytes()
    return now, peak


def peak_bytes() -> int:
    """Return the peak resident memory of this process, or of the process that forked it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if IS_MACOS else peak * 1024


def trim_memory() -> None:
    """Return freed memory to the system, if the C library supports that."""
    import ctypes

    if (trim := _find_function("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))
    elif (relieve := _find_function("malloc_zone_pressure_relief")) is not None:
        relieve(None, ctypes.c_size_t(0))


def release_freed_memory(tensors: int) -> None:
    """Return freed memory to the system, if the C library can, after work on many tensors.

    The allocator keeps the memory of freed strings and tables: several times the memory in use.
    This takes some milliseconds, so it is skipped for few tensors.
    """
    if tensors >= _MANY_TENSORS:
        trim_memory()


# Processes and hosts.


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def raise_open_file_limit() -> None:
    """Raise the limit of open files as far as allowed: large checkpoints have thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = _OPEN_FILES if hard == resource.RLIM_INFINITY else (hard,)
    for limit in limits:
        if soft == resource.RLIM_INFINITY or limit <= soft:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):
            continue
        return


def name_running_system() -> str:
    """Return an identifier of the running system, the same for all processes until it reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else os.uname().nodename


def name_host() -> tuple[str, int]:
    """Return a key shared by the processes of a host: its running system and its shared memory."""
    # Containers on a host have the same kernel, but may have a shared memory of their own.
    return name_running_system(), find_host_memory().stat().st_dev


def name_process_space() -> str:
    """Return the running system and its PID namespace; empty if unknown."""
    try:
        return f"{name_running_system()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        # macOS has a single namespace.
        return name_running_system() if IS_MACOS else ""


def find_process_start(number: int) -> str:
    """Return the start time of a process, in ticks, or "?" if unknown; empty if it has ended."""
    fields = _read_process(number)
    if fields is None:
        return "" if has_ended(number) else "?"
    # `starttime`, the 22nd field of proc(5); the state is the third. A zombie keeps its number, but
    # has ended.
    return "" if fields[0] in "ZX" else fields[19]


def has_ended(number: int) -> bool:
    """Return whether a process of this host has ended; False if that is unknown."""
    fields = _read_process(number)
    if fields is not None:
        return fields[0] in "ZX"
    try:
        os.kill(number, 0)
    # Any other refusal, such as EPERM, is about a process that exists.
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _read_process(number: int) -> list[str] | None:
    """Return the fields of /proc that follow a process's name, from its state on."""
    try:
        # The name of the program, in brackets, may contain blanks and brackets.
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def list_descriptors() -> list[int]:
    """Return the numbers of this process's open files; empty if the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return []


# Connections.


def set_tcp_option(connected: socket.socket, name: str, value: int) -> None:
    """Set an option of a TCP connection by its Linux name, if the system has it."""
    import socket

    # macOS has a different name for this option.
    names = (name, "TCP_KEEPALIVE") if name == "TCP_KEEPIDLE" else (name,)
    for each in names:
        if hasattr(socket, each):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, each), value)
            return


def find_silence_ms(connected: socket.socket) -> int | None:
    """Return the milliseconds since the peer of a TCP connection last responded, or None.

    Raises OSError.
    """
    import socket

    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    info = connected.getsockopt(socket.IPPROTO_TCP, option, _ACKNOWLEDGED_AT + 4)
    return int(struct.unpack_from("I", info, _ACKNOWLEDGED_AT)[0])


def find_peer_process(connected: socket.socket) -> int:
    """Return the process at the other end of a Unix socket, in this namespace; 0 if unknown."""
    import socket

    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return 0
    credentials = connected.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def find_closing_flag() -> int:
    """Return the flag that marks received descriptors close-on-exec."""
    import socket

    return getattr(socket, "MSG_CMSG_CLOEXEC", 0)


# The C library.


@lru_cache(maxsize=1)
def _load_library() -> Any:
    import ctypes

    # ctypes then keeps `errno` for `get_errno`, before calls of the interpreter overwrite it.
    return ctypes.CDLL(None, use_errno=True)


def _find_function(name: str) -> Any:
    """Return a function of the C library, or None."""
    try:
        return getattr(_load_library(), name, None)
    except (OSError, TypeError):
        return None


def _is_refused(path: Path | None = None) -> bool:
    """Return False if the last call is unsupported; raise its error otherwise."""
    import ctypes

    number = ctypes.get_errno()
    if number in REFUSALS:
        return False
    raise OSError(number, os.strerror(number), *([str(path)] if path is not None else []))
