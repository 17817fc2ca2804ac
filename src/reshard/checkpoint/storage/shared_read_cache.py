"""Reads that the processes of one host share: what several of them need is asked of a store once.

Processes that load a checkpoint at the same time meet in a folder in memory::

    /dev/shm/reshard-reads-.../   lock                    how many meetings are complete
                                  member-0 ... member-3   locked while the process lives
                                  shared-0                what a complete meeting shares
                                  piece-0-17-...          4 MiB of an object, of a meeting

1. `SharedReadCache` takes a member's place, writes down what this process is going to read, and
   waits until the others have done so. Who comes again while others still read waits for the next
   meeting.
2. A piece of 4 MiB is shared where to read it once is less than what all of them read in it. Who
   comes last writes that down, since others may be asleep until some have read all and left.
3. Who needs a shared piece and finds none locks it, asks the store, and leaves it in the folder;
   whoever needs it meanwhile waits for the lock.
4. Everybody reads in the order of the objects and says how far it is. The pieces behind the last of
   them make room for new ones, so that the folder holds at most `WINDOW_BYTES`, and what somebody's
   first unfinished work needs, for which nobody waits for room.

Nobody depends on another: a process that ends, or that hangs for `_PATIENCE_S`, costs the others
requests of their own, no more. What ends last removes the folder; what processes left that were
killed is used and removed by the next.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.checkpoint.storage.filesystem import Closing, close_descriptor, reason, write_all
from reshard.checkpoint.storage.host_memory import find_host_memory
from reshard.checkpoint.storage.local_files import FileIdentity
from reshard.checkpoint.storage.remote_files import RemoteFile
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import RunError, UsageError
from reshard.log import LOGGER
from reshard.runs import IntArray
from reshard.system import read_at

PIECE_BYTES = 4 << 20
#: What pieces in the folder take at most, for all processes together.
WINDOW_BYTES = 256 << 20
#: Of a process: what they have begun takes three quarters of the window, if others are as far.
MAX_THREADS = WINDOW_BYTES // (4 * PIECE_BYTES)
_PATIENCE_S = 10.0
_WAIT_S = 0.005
_ATTEMPTS = 100
# A member's file: the piece where its first unfinished work begins, how many rows it has, its
# meeting, the piece where that work ends; then rows of piece, bytes, first and end.
_HEADER_BYTES = 32
_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Bytes `start` to `stop` of the object `name`, of which `read_bytes` are read."""

    name: str
    start: int
    stop: int
    read_bytes: int


class SharedReadCache(Closing):
    """One process's part in the reads that those of its host share.

    Args:
        place: of the checkpoint: processes that give the same meet.
        count: how many processes there are on this host.
        sizes: of the objects, by name: the same in all processes.
        tasks: what each piece of this process's work reads. Work is begun in the order of what it
            reads first, and told by `finish`.

    Raises:
        RunError: the folder cannot be made, or is another user's.
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
            min((self._first[one.name] + one.start // PIECE_BYTES for one in spans), default=0)
            for spans in tasks
        ]
        self._order = np.argsort(np.array(starts, dtype=np.int64), kind="stable")
        self._starts = np.array(starts, dtype=np.int64)[self._order]
        stops = [
            max((self._first[one.name] + -(-one.stop // PIECE_BYTES) for one in spans), default=0)
            for spans in tasks
        ]
        self._stops = np.array(stops, dtype=np.int64)[self._order]
        self._number = np.empty(len(starts), dtype=np.int64)
        self._number[self._order] = np.arange(len(starts))
        self._finished = np.zeros(len(starts) + 1, dtype=bool)
        self._low = 0
        digest = hashlib.blake2b(
            repr((place, count, sorted(sizes.items()))).encode(), digest_size=8
        ).hexdigest()
        self.folder = find_host_memory(2 * WINDOW_BYTES) / f"reshard-reads-{os.getuid()}-{digest}"
        self._member = self._meeting = -1
        self._own = -1
        try:
            self._take_place(self._rows([span for spans in tasks for span in spans]))
            self._shared = self._wait_for_others()
        except OSError as error:
            self.close()
            raise RunError(
                f"{self.folder}: processes cannot share what they read: {reason(error)}; load "
                "without `readers_on_host`"
            ) from error

    # Who is there.

    def _take_place(self, rows: IntArray) -> None:
        """Lock the first free member's file, and write down what this process reads."""
        began_s = time.monotonic()
        while self._own < 0:
            with self._lock_folder() as lock:
                if self._is_alone():
                    # What killed processes left of the first meeting is used again.
                    os.ftruncate(lock, 0)
                complete = int.from_bytes(os.pread(lock, 8, 0), "little")
                for member in range(self._count):
                    path = self._path("member", member)
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                    if _try_lock(descriptor):
                        self._own, self._member, self._meeting = descriptor, member, complete
                        os.ftruncate(descriptor, 0)
                        write_all(descriptor, rows.tobytes(), _HEADER_BYTES)
                        # Last, since it says that the rows are there.
                        self._row_count = len(rows)
                        self._write_header()
                        if len(met := self._list_met()) == self._count:
                            shared = _choose_shared(met).tobytes()
                            self._path("shared", complete).write_bytes(shared)
                            write_all(lock, (complete + 1).to_bytes(8, "little"), 0)
                        return
                    os.close(descriptor)
            if time.monotonic() - began_s > _PATIENCE_S:
                raise OSError(
                    errno.EBUSY, f"more than {self._count} processes load this checkpoint"
                )
            time.sleep(_WAIT_S)

    def _list_met(self) -> list[IntArray]:
        """The rows of those that are in this process's meeting."""
        found = map(self._rows_of, range(self._count))
        return [rows for meeting, rows in found if meeting == self._meeting]

    def _wait_for_others(self) -> IntArray:
        """The shared pieces, as soon as all members are there."""
        began_s, lock = time.monotonic(), os.open(self.folder / "lock", os.O_RDONLY)
        try:
            while int.from_bytes(os.pread(lock, 8, 0), "little") <= self._meeting:
                if time.monotonic() - began_s > _PATIENCE_S:
                    found = self._list_met()
                    LOGGER.warning(
                        "%s: %d of %d processes of this host came to share what they read",
                        self.folder,
                        len(found),
                        self._count,
                    )
                    return _choose_shared(found)
                time.sleep(_WAIT_S)
        finally:
            os.close(lock)
        content = self._path("shared", self._meeting).read_bytes()
        return np.frombuffer(content, dtype=np.int64).reshape(-1, _COLUMNS)

    def _rows_of(self, member: int) -> tuple[int, IntArray]:
        """The meeting that a member is in, and what it reads there; -1 where nobody is."""
        nobody = -1, np.empty((0, _COLUMNS), dtype=np.int64)
        if member == self._member:
            descriptor = os.dup(self._own)
        elif (opened := self._open_member(member)) is None:
            return nobody
        else:
            descriptor = opened
        try:
            header = _read_header(descriptor)
            if not header.any():
                return nobody
            size_bytes = int(header[1]) * _COLUMNS * 8
            rows = np.frombuffer(os.pread(descriptor, size_bytes, _HEADER_BYTES), dtype=np.int64)
            return int(header[2]), rows.reshape(-1, _COLUMNS)
        finally:
            os.close(descriptor)

    def _open_member(self, member: int) -> int | None:
        """The file of another member that lives; None where nobody is."""
        try:
            descriptor = os.open(self._path("member", member), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return descriptor
        os.close(descriptor)
        return None

    def _is_alone(self) -> bool:
        """Whether no process has a member's place."""
        others = [self._open_member(member) for member in range(self._count)]
        for descriptor in others:
            if descriptor is not None:
                os.close(descriptor)
        return all(descriptor is None for descriptor in others)

    def _list_work(self) -> list[tuple[int, int, int]]:
        """Meeting, first piece and end of the first unfinished work of each member that lives."""
        found = [(self._meeting, *self._first_work())]
        for member in range(self._count):
            if member != self._member and (descriptor := self._open_member(member)) is not None:
                start, count, meeting, stop = _read_header(descriptor).tolist()
                os.close(descriptor)
                if count:
                    found.append((meeting, start, stop))
        return found

    # How far this process is.

    def _first_work(self) -> tuple[int, int]:
        """The pieces of the first unfinished work."""
        if self._low == len(self._starts):
            return self._end, self._end
        return int(self._starts[self._low]), int(self._stops[self._low])

    def _write_header(self) -> None:
        start, stop = self._first_work()
        header = np.array([start, self._row_count, self._meeting, stop], dtype=np.int64)
        write_all(self._own, header.tobytes(), 0)

    def finish(self, task: int) -> None:
        """Say that a piece of work is done."""
        with self._lock:
            self._finished[self._number[task]] = True
            before = self._low
            # The entry behind the last is never finished.
            self._low += int(np.argmin(self._finished[self._low :]))
            if self._low != before:
                self._write_header()

    def _rows(self, spans: Sequence[ReadSpan]) -> IntArray:
        """What is read, by pieces: shape `(pieces, 4)`; one empty row where nothing is."""
        first = np.array([self._first[one.name] for one in spans], dtype=np.int64)
        table = np.array([(one.start, one.stop, one.read_bytes) for one in spans], dtype=np.int64)
        start, stop, size = table.reshape(-1, 3).T
        low = start // PIECE_BYTES
        counts = np.where(stop > start, (stop - 1) // PIECE_BYTES - low + 1, 0)
        span = np.repeat(np.arange(len(spans)), counts)
        step = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = (low[span] + step) * PIECE_BYTES
        inside = np.maximum(start[span], begin), np.minimum(stop[span], begin + PIECE_BYTES)
        share = size[span] * (inside[1] - inside[0]) // (stop - start)[span]
        rows = np.stack([first[span] + low[span] + step, share, *inside], axis=1)
        return _sum_rows(rows) if len(rows) else np.array([[-1, 0, 0, 0]], dtype=np.int64)

    # Pieces.

    def split(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """A range of an object in parts: first byte, end, and the row of the shared piece or -1."""
        first, at = self._first[name], start
        while at < stop:
            piece = first + at // PIECE_BYTES
            end = min(stop, (at // PIECE_BYTES + 1) * PIECE_BYTES)
            row = int(np.searchsorted(self._shared[:, 0], piece))
            if row == len(self._shared) or self._shared[row, 0] != piece:
                # Parts that are not shared are read together, up to the next that is.
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
        """Fill memory from a shared piece, which is asked of the store where it is not there."""
        piece, _, low, high = self._shared[row].tolist()
        path = self.folder / f"piece-{self._meeting}-{piece}-{low}-{high}-{file.tag}"
        descriptor, is_there = self._lock_piece(path, high - low)
        try:
            if is_there:
                with memoryview(view) as target:
                    found = read_at(descriptor, target, start - low)
                if found == len(view):
                    return
            content = memoryview(bytearray(high - low))
            file.fetch(content, low)
            view[:] = content[start - low : start - low + len(view)]
            self._make_room(int(piece), len(content))
            try:
                write_all(descriptor, content, 0)
                # The byte behind says that all of it is there.
                write_all(descriptor, b"\1", len(content))
            except OSError as error:
                # No room in memory: everybody asks the store.
                LOGGER.warning("%s: a piece is not shared: %s", path, reason(error))
                with contextlib.suppress(OSError):
                    os.unlink(path)
        finally:
            os.close(descriptor)

    def _lock_piece(self, path: Path, size_bytes: int) -> tuple[int, bool]:
        """A piece that is there, or that this thread alone may fill, by its locked file."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
                fcntl.flock(descriptor, how)
                state = os.fstat(descriptor)
                if state.st_size == size_bytes + 1:
                    return descriptor, True
            if state.st_nlink:
                return descriptor, False
            # Removed since it was opened.
            os.close(descriptor)

    def _make_room(self, piece: int, size_bytes: int) -> None:
        """Remove pieces that nobody needs any more, and wait until there is room for another."""
        waited_s, seen = time.monotonic(), [(-1, -1, -1)]
        while True:
            held = self._list_pieces()
            excess = sum(size for _, size, _ in held) + size_bytes - WINDOW_BYTES
            if excess <= 0:
                return
            work = self._list_work()
            late = time.monotonic() - waited_s > _PATIENCE_S
            for (meeting, number), size, path in held:
                # Where nobody is any more, all of a meeting's pieces may go.
                is_needed = any(at == meeting and number >= start for at, start, _ in work)
                if excess > 0 and (late or not is_needed):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    excess -= size
            # Who waits for this piece gives up none of those that take the room.
            is_first = any(
                at == self._meeting and start <= piece < stop for at, start, stop in work
            )
            if excess <= 0 or is_first:
                return
            if work != seen:
                waited_s, seen = time.monotonic(), work
            time.sleep(_WAIT_S)

    def _list_pieces(self) -> list[tuple[tuple[int, int], int, str]]:
        """The pieces that are there: meeting and number, bytes and path, in their order."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("piece-"):
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat().st_size
                        # One that is being filled is small yet, and must stay.
                        if size:
                            meeting, piece = map(int, entry.name.split("-")[1:3])
                            found.append(((meeting, piece), size, entry.path))
        return sorted(found)

    # The folder.

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[int]:
        """Alone in the folder, which is made where there is none; the lock's file."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            state = self.folder.stat(follow_symlinks=False)
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it is another user's")
            try:
                descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Removed by the last of the processes before.
                if os.fstat(descriptor).st_nlink:
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
        raise OSError(errno.EBUSY, "it is removed as often as it is made")

    def close(self) -> None:
        """Leave, and remove the folder as the last."""
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
    """An object of which shared pieces are read by one process of the host.

    `read_bytes` counts what this process asked the store for.
    """

    def __init__(
        self, path: RemotePath, expected: FileIdentity | None, reads: SharedReadCache, name: str
    ) -> None:
        super().__init__(path, expected)
        self._reads, self._name = reads, name
        identity = repr(self.identity).encode()
        #: What tells pieces of this object from those of one that replaced it.
        self.tag = hashlib.blake2b(identity, digest_size=6).hexdigest()

    def fetch(self, view: memoryview, start_bytes: int) -> None:
        """Ask the store. Raises as `read_into`."""
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
    """How many processes share what they read. Raises UsageError."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"readers_on_host={count!r}; give the number of processes of this host that load the "
            "checkpoint at the same time, 1 or more"
        )
    return count


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_header(descriptor: int) -> IntArray:
    """A member's header; zeros where none is written."""
    content = os.pread(descriptor, _HEADER_BYTES, 0)
    return np.frombuffer(content.ljust(_HEADER_BYTES, b"\0"), dtype=np.int64)


def _sum_rows(rows: IntArray) -> IntArray:
    """Rows of piece, bytes, first and end: one for each piece, in their order."""
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
    """The pieces that are read once for all: those of which members read more than all of it.

    >>> one, other = np.array([[0, 60, 0, 90], [1, 9, 0, 9]]), np.array([[0, 50, 10, 100]])
    >>> _choose_shared([one, other]).tolist()
    [[0, 110, 0, 100]]
    """
    rows = np.concatenate(members)
    pieces, counts = np.unique(rows[:, 0], return_counts=True)
    rows = _sum_rows(rows[rows[:, 0] >= 0]) if len(rows[rows[:, 0] >= 0]) else rows[:0]
    several = np.isin(rows[:, 0], pieces[counts > 1])
    return rows[several & (rows[:, 1] > rows[:, 3] - rows[:, 2])]
