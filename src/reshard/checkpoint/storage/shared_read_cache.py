"""A read cache shared by the processes of a host, so that shared bytes are requested once.

Processes that load a checkpoint at the same time coordinate through a folder in shared memory::

    /dev/shm/reshard-reads-.../   lock                    the number of complete generations
                                  member-0 ... member-3   locked while the process lives
                                  shared-0                the pieces shared in a complete generation
                                  piece-0-17-...          4 MiB of an object, of a generation

1. `SharedReadCache` registers as a member, writes down the bytes that this process will read, and
   waits until all other processes have done so. A process that loads again while others still read
   joins the next generation.
2. A piece of 4 MiB is shared if reading it once is less than the sum of the members' reads of it.
   The last member to register writes the list of shared pieces: other members might not run again
   before some have finished reading and left.
3. A process that needs a missing shared piece locks it, requests it from the store, and stores it
   in the folder; other processes that need it meanwhile wait for the lock.
4. Every process reads in the order of the objects and publishes its position. Pieces before all
   positions are removed to make room, so the folder holds at most `WINDOW_BYTES`, plus the pieces
   of a member's first unfinished task, which never wait for room.

No process depends on another: if a process ends, or hangs for `_PATIENCE_S`, the others only send
additional requests. The last process removes the folder. If processes were killed, the next
processes use and remove the content that was left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard._validation import check_int
from reshard.checkpoint.storage.byte_ranges import ByteRange
from reshard.checkpoint.storage.filesystem import Closing, close_descriptor, reason, write_all
from reshard.checkpoint.storage.local_files import FileIdentity
from reshard.checkpoint.storage.remote_files import RemoteFile
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import RunError
from reshard.log import LOGGER
from reshard.runs import IntArray, find_distinct
from reshard.system import find_host_memory, read_at

PIECE_BYTES = 4 << 20
#: The maximum total size of the pieces in the folder.
WINDOW_BYTES = 256 << 20
#: The maximum number of threads of a process. Their pieces, with the pieces of other processes at
#: the same position, take three quarters of the window.
MAX_THREADS = WINDOW_BYTES // (4 * PIECE_BYTES)
_PATIENCE_S = 10.0
_WAIT_S = 0.005
_ATTEMPTS = 100
# The layout of a member's file: the first piece of its first unfinished task, the number of its
# rows, its generation, and the end of that task's pieces; then rows of piece, bytes, first byte and
# end.
_HEADER_BYTES = 32
_COLUMNS = 4


# A range of an object, and the number of its bytes that are read.
ReadSpan = tuple[ByteRange, int]


class SharedReadCache(Closing):
    """The reads that the processes of a host share, as seen by a process.

    Args:
        place: the location of the checkpoint: processes with the same value share their reads.
        count: the number of processes on this host.
        sizes: the sizes of the objects by name, the same in all processes.
        tasks: the ranges that each task of this process reads, and the number of bytes read of
            each. Tasks are started in the order of their first bytes, and reported by `finish`.

    Raises:
        RunError: the folder cannot be created, or belongs to another user.
    """

    def __init__(
        self, place: str, count: int, sizes: Mapping[str, int], tasks: Sequence[Sequence[ReadSpan]]
    ) -> None:
        self._count = count
        names = sorted(sizes)
        self._sizes = np.array([sizes[name] for name in names], dtype=np.int64)
        pieces = np.concatenate([np.zeros(1, np.int64), np.cumsum(-(-self._sizes // PIECE_BYTES))])
        self._first = {name: int(pieces[number]) for number, name in enumerate(names)}
        self._end = int(pieces[-1])
        self._lock = threading.Lock()
        starts = [
            min((self._first[s.name] + s.start // PIECE_BYTES for s, _ in spans), default=0)
            for spans in tasks
        ]
        self._order = np.argsort(np.array(starts, dtype=np.int64), kind="stable")
        self._starts = np.array(starts, dtype=np.int64)[self._order]
        stops = [
            max((self._first[s.name] + -(-s.stop // PIECE_BYTES) for s, _ in spans), default=0)
            for spans in tasks
        ]
        self._stops = np.array(stops, dtype=np.int64)[self._order]
        self._number = np.empty(len(starts), dtype=np.int64)
        self._number[self._order] = np.arange(len(starts))
        self._finished = np.zeros(len(starts) + 1, dtype=bool)
        self._low = 0
        # Processes that load the same objects must find the same folder without communicating.
        digest = hashlib.blake2b(
            repr((place, count, sorted(sizes.items()))).encode(), digest_size=8
        ).hexdigest()
        self.folder = find_host_memory(2 * WINDOW_BYTES) / f"reshard-reads-{os.getuid()}-{digest}"
        self._member = self._generation = -1
        self._own = -1
        try:
            self._register(self._rows([span for spans in tasks for span in spans]))
            self._shared = self._wait_for_generation()
        except OSError as error:
            self.close()
            raise RunError(
                f"{self.folder}: processes cannot share their reads: {reason(error)}; load without "
                "`readers_on_host`"
            ) from error

    # Members and generations.

    def _register(self, rows: IntArray) -> None:
        """Lock the first free member's file, and write down what this process reads."""
        began_s = time.monotonic()
        while self._own < 0:
            with self._lock_folder() as lock:
                if self._is_alone():
                    # Start again with the first generation: if killed processes left content of it
                    # in the folder, it is used again.
                    os.ftruncate(lock, 0)
                complete = int.from_bytes(os.pread(lock, 8, 0), "little")
                for member in range(self._count):
                    path = self._path("member", member)
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                    if _try_lock(descriptor):
                        self._own, self._member, self._generation = descriptor, member, complete
                        os.ftruncate(descriptor, 0)
                        write_all(descriptor, rows.tobytes(), _HEADER_BYTES)
                        # Write the header last, since it marks the rows as complete.
                        self._row_count = len(rows)
                        self._write_header()
                        if len(members := self._list_members()) == self._count:
                            shared = _choose_shared(members).tobytes()
                            self._path("shared", complete).write_bytes(shared)
                            write_all(lock, (complete + 1).to_bytes(8, "little"), 0)
                        return
                    os.close(descriptor)
            if time.monotonic() - began_s > _PATIENCE_S:
                raise OSError(
                    errno.EBUSY, f"more than {self._count} processes load this checkpoint"
                )
            time.sleep(_WAIT_S)

    def _list_members(self) -> list[IntArray]:
        """Return the rows of the members of this process's generation."""
        members = map(self._rows_of, range(self._count))
        return [rows for generation, rows in members if generation == self._generation]

    def _wait_for_generation(self) -> IntArray:
        """Return the shared pieces as soon as all members are registered."""
        began_s, lock = time.monotonic(), os.open(self.folder / "lock", os.O_RDONLY)
        try:
            while int.from_bytes(os.pread(lock, 8, 0), "little") <= self._generation:
                if time.monotonic() - began_s > _PATIENCE_S:
                    members = self._list_members()
                    LOGGER.warning(
                        "%s: %d of %d processes of this host came to share their reads",
                        self.folder,
                        len(members),
                        self._count,
                    )
                    # Other processes may have failed: share reads with those that came.
                    return _choose_shared(members)
                time.sleep(_WAIT_S)
        finally:
            os.close(lock)
        content = self._path("shared", self._generation).read_bytes()
        return np.frombuffer(content, dtype=np.int64).reshape(-1, _COLUMNS)

    def _rows_of(self, member: int) -> tuple[int, IntArray]:
        """Return the generation of a member and the rows of its reads, or -1 if absent."""
        absent = -1, np.empty((0, _COLUMNS), dtype=np.int64)
        if member == self._member:
            descriptor = os.dup(self._own)
        elif (opened := self._open_member(member)) is None:
            return absent
        else:
            descriptor = opened
        try:
            header = _read_header(descriptor)
            if not header.any():
                return absent
            size_bytes = int(header[1]) * _COLUMNS * 8
            rows = np.frombuffer(os.pread(descriptor, size_bytes, _HEADER_BYTES), dtype=np.int64)
            return int(header[2]), rows.reshape(-1, _COLUMNS)
        finally:
            os.close(descriptor)

    def _open_member(self, member: int) -> int | None:
        """Return the open file of another live member, or None if there is none."""
        try:
            descriptor = os.open(self._path("member", member), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            # The system releases the lock of a process that ends, even if it is killed.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # The member holds its lock, so its process is alive.
            return descriptor
        os.close(descriptor)
        return None

    def _is_alone(self) -> bool:
        """Return whether no other process is registered."""
        others = [self._open_member(member) for member in range(self._count)]
        for descriptor in others:
            if descriptor is not None:
                os.close(descriptor)
        return all(descriptor is None for descriptor in others)

    def _list_first_tasks(self) -> list[tuple[int, int, int]]:
        """Return generation, first piece and end of each live member's first unfinished task."""
        tasks = [(self._generation, *self._first_task())]
        for member in range(self._count):
            if member != self._member and (descriptor := self._open_member(member)) is not None:
                start, count, generation, stop = _read_header(descriptor).tolist()
                os.close(descriptor)
                if count:
                    tasks.append((generation, start, stop))
        return tasks

    # The position of this process.

    def _first_task(self) -> tuple[int, int]:
        """Return the first piece and the end of the first unfinished task."""
        if self._low == len(self._starts):
            return self._end, self._end
        return int(self._starts[self._low]), int(self._stops[self._low])

    def _write_header(self) -> None:
        start, stop = self._first_task()
        header = np.array([start, self._row_count, self._generation, stop], dtype=np.int64)
        write_all(self._own, header.tobytes(), 0)

    def finish(self, task: int) -> None:
        """Report a task as done."""
        with self._lock:
            self._finished[self._number[task]] = True
            before = self._low
            # The entry after the last task is never finished.
            self._low += int(np.argmin(self._finished[self._low :]))
            if self._low != before:
                self._write_header()

    def _rows(self, spans: Sequence[ReadSpan]) -> IntArray:
        """Return the reads by piece: shape `(pieces, 4)`, with an empty row if there are none."""
        first = np.array([self._first[s.name] for s, _ in spans], dtype=np.int64)
        table = np.array([(s.start, s.stop, size) for s, size in spans], dtype=np.int64)
        start, stop, size = table.reshape(-1, 3).T
        low = start // PIECE_BYTES
        counts = np.where(stop > start, (stop - 1) // PIECE_BYTES - low + 1, 0)
        span = np.repeat(np.arange(len(spans)), counts)
        step = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = (low[span] + step) * PIECE_BYTES
        inside = np.maximum(start[span], begin), np.minimum(stop[span], begin + PIECE_BYTES)
        share = size[span] * (inside[1] - inside[0]) // (stop - start)[span]
        rows = np.stack([first[span] + low[span] + step, share, *inside], axis=1)
        # The sum over no rows would be all zeros, the header of an absent member.
        return _sum_rows(rows) if len(rows) else np.array([[-1, 0, 0, 0]], dtype=np.int64)

    # Pieces.

    def split(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a range: first byte, end, and the row of the shared piece or -1."""
        first, at = self._first[name], start
        while at < stop:
            piece = first + at // PIECE_BYTES
            end = min(stop, (at // PIECE_BYTES + 1) * PIECE_BYTES)
            row = int(np.searchsorted(self._shared[:, 0], piece))
            if row == len(self._shared) or self._shared[row, 0] != piece:
                # Read bytes that are not shared together, up to the next shared piece.
                following = self._shared[row, 0] - first if row < len(self._shared) else None
                end = stop if following is None else min(stop, int(following) * PIECE_BYTES)
                yield at, end, -1
                at = end
                continue
            low, high = self._shared[row, 2:].tolist()
            for part, until, shared in ((at, low, -1), (max(at, low), high, row), (high, end, -1)):
                begin, close = max(at, part), min(end, until)
                if begin < close:
                    yield begin, close, shared
            at = end

    def read(self, row: int, file: CachedRemoteFile, view: memoryview, start: int) -> None:
        """Fill memory from a shared piece, which is requested from the store if it is missing."""
        piece, _, low, high = self._shared[row].tolist()
        path = self.folder / f"piece-{self._generation}-{piece}-{low}-{high}-{file.tag}"
        descriptor, is_there = self._lock_piece(path, high - low)
        try:
            if is_there:
                with memoryview(view) as target:
                    count = read_at(descriptor, target, start - low)
                if count == len(view):
                    return
            content = memoryview(bytearray(high - low))
            file.fetch(content, low)
            view[:] = content[start - low : start - low + len(view)]
            self._make_room(int(piece), len(content))
            try:
                write_all(descriptor, content, 0)
                # The last byte marks the piece as complete.
                write_all(descriptor, b"\1", len(content))
            except OSError as error:
                # The memory is full, so every process requests this piece from the store.
                LOGGER.warning("%s: a piece is not shared: %s", path, reason(error))
                with contextlib.suppress(OSError):
                    os.unlink(path)
        finally:
            os.close(descriptor)

    def _lock_piece(self, path: Path, size_bytes: int) -> tuple[int, bool]:
        """Return the locked file of a piece, and whether it is filled; if not, this thread fills
        it.
        """
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # Readers of a complete piece share the lock. Only the process that fills it needs the
            # exclusive lock, and must check again: another may have filled it meanwhile.
            for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
                fcntl.flock(descriptor, how)
                state = os.fstat(descriptor)
                if state.st_size == size_bytes + 1:
                    return descriptor, True
            if state.st_nlink:
                return descriptor, False
            # The file was removed after it was opened: open it again.
            os.close(descriptor)

    def _make_room(self, piece: int, size_bytes: int) -> None:
        """Remove pieces that are no longer needed, and wait for room for another."""
        waited_s, seen = time.monotonic(), [(-1, -1, -1)]
        while True:
            held = self._list_pieces()
            excess = sum(size for _, size, _ in held) + size_bytes - WINDOW_BYTES
            if excess <= 0:
                return
            tasks = self._list_first_tasks()
            late = time.monotonic() - waited_s > _PATIENCE_S
            for (generation, number), size, path in held:
                # All pieces of a generation without members may be removed.
                is_needed = any(at == generation and number >= start for at, start, _ in tasks)
                if excess > 0 and (late or not is_needed):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    excess -= size
            # This piece belongs to a member's first unfinished task. It must not wait, since the
            # pieces that fill the window are removed only after that task.
            is_first = any(
                at == self._generation and start <= piece < stop for at, start, stop in tasks
            )
            if excess <= 0 or is_first:
                return
            # Progress of any member restarts the patience.
            if tasks != seen:
                waited_s, seen = time.monotonic(), tasks
            time.sleep(_WAIT_S)

    def _list_pieces(self) -> list[tuple[tuple[int, int], int, str]]:
        """Return the existing pieces in order: generation and number, bytes and path."""
        pieces = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("piece-"):
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat().st_size
                        # A piece that is being filled is still empty, and must not be removed.
                        if size:
                            generation, piece = map(int, entry.name.split("-")[1:3])
                            pieces.append(((generation, piece), size, entry.path))
        return sorted(pieces)

    # The folder.

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[int]:
        """Hold the folder's lock, creating the folder if missing; yield the lock's descriptor."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            state = self.folder.stat(follow_symlinks=False)
            # Shared memory is writable for all users, who can guess the name.
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            try:
                descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # The last process of an earlier run may have removed the file: then try again.
                if os.fstat(descriptor).st_nlink:
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
        raise OSError(errno.EBUSY, "it is removed as often as it is created")

    def close(self) -> None:
        """Unregister, and remove the folder if this was the last member."""
        if self._own < 0:
            return
        with contextlib.suppress(OSError), self._lock_folder():
            self._own = close_descriptor(self._own)
            if self._is_alone():
                shutil.rmtree(self.folder)
        self._own = close_descriptor(self._own)

    def _path(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number}"


class CachedRemoteFile(RemoteFile):
    """An object whose shared pieces are read by a single process of the host.

    `read_bytes` counts the bytes that this process requested from the store.
    """

    def __init__(
        self, path: RemotePath, expected: FileIdentity | None, reads: SharedReadCache, name: str
    ) -> None:
        super().__init__(path, expected)
        self._reads, self._name = reads, name
        identity = repr(self.identity).encode()
        #: Distinguishes pieces of this object from pieces of an object that replaced it.
        self.tag = hashlib.blake2b(identity, digest_size=6).hexdigest()

    def fetch(self, view: memoryview, start_bytes: int) -> None:
        """Request bytes from the store. Raises as `read_into`."""
        super()._read(view, start_bytes)

    def _read(self, view: memoryview, offset: int) -> None:
        self._expect_inside(view, offset)
        for start, stop, row in self._reads.split(self._name, offset, offset + len(view)):
            part = view[start - offset : stop - offset]
            if row < 0:
                super()._read(part, start)
            else:
                self._reads.read(row, self, part, start)


def check_readers(count: object) -> int:
    """Return the number of processes that share their reads. Raises UsageError."""
    return check_int(count, "readers_on_host", minimum=1)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_header(descriptor: int) -> IntArray:
    """Return a member's header, or zeros if it is not written yet."""
    content = os.pread(descriptor, _HEADER_BYTES, 0)
    return np.frombuffer(content.ljust(_HEADER_BYTES, b"\0"), dtype=np.int64)


def _sum_rows(rows: IntArray) -> IntArray:
    """Return a row of piece, bytes, first byte and end for each piece, in order."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    begins = np.flatnonzero(np.append(True, rows[1:, 0] != rows[:-1, 0]))
    columns = [
        rows[begins, 0],
        np.add.reduceat(rows[:, 1], begins),
        np.minimum.reduceat(rows[:, 2], begins),
        np.maximum.reduceat(rows[:, 3], begins),
    ]
    return np.stack(columns, axis=1)


def _choose_shared(members: Sequence[IntArray]) -> IntArray:
    """Return the pieces that several members read, if reading each once takes fewer bytes.

    >>> a, b = np.array([[0, 60, 0, 90], [1, 9, 0, 9]]), np.array([[0, 50, 10, 100]])
    >>> _choose_shared([a, b]).tolist()
    [[0, 110, 0, 100]]
    """
    rows = np.concatenate(members)
    pieces, _, number = find_distinct(rows[:, 0])
    rows = _sum_rows(rows[rows[:, 0] >= 0]) if len(rows[rows[:, 0] >= 0]) else rows[:0]
    several = np.isin(rows[:, 0], pieces[np.bincount(number) > 1])
    return rows[several & (rows[:, 1] > rows[:, 3] - rows[:, 2])]
