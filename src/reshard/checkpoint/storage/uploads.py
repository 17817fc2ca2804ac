"""Uploads of a checkpoint's files to a store, in parts, resumable from any machine.

A conversion to a URL writes its files into a sparse local staging folder. Files are divided into
equal parts, and the disk space of each part is released once the store has it. Released ranges are
recorded durably before, so that a later run whose store has lost such a part writes it again.

`Upload` is a process's view of an upload:

1. `find_target` returns the state of the target: free, an unfinished upload, another checkpoint.
2. `begin` begins every file in the store, or finds the parts that an earlier run sent.
3. `send` sends a part from the staging folder, and releases its space there.
4. `commit` creates the objects from their parts, puts the small files, and the manifest last.
   Before, readers see the old checkpoint, if any; afterwards, they see the new checkpoint; in
   between, the marker (`upload_marker`) keeps them from reading.

Every step can be repeated, from the same machine or another, by the same conversion.

Uploads of conversions that never ended are orphaned: `find_orphaned_uploads` lists those named by a
conversion's marker, and `remove_orphaned_uploads` aborts them and deletes the marker. Uploads of
other programs are not touched, nor is a half-replaced checkpoint, whose files would look complete
without the marker.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.storage.filesystem import (
    Closing,
    close_descriptor,
    open_own,
    read_own,
    translate_os_errors,
    write_all,
)
from reshard.checkpoint.storage.object_stores import (
    FileStream,
    ObjectState,
    ObjectTarget,
    PendingUpload,
    translate_store_errors,
)
from reshard.checkpoint.storage.remote_paths import RemotePath, forget_store
from reshard.checkpoint.storage.upload_marker import (
    COMMIT_NAME,
    MARKER_FOLDER,
    UPLOAD_NAME,
    UploadMarker,
    conversion_of,
    marker_key,
)
from reshard.errors import RunError, UsageError
from reshard.log import LOGGER
from reshard.runs import IntArray
from reshard.system import sync_data

#: Stores require at least 5 MiB, and a request costs as much as transferring some MiB.
MIN_PART_BYTES = 8 << 20
#: S3's limit, the lowest of all stores: Azure has 50,000 blocks.
MAX_PARTS = 10_000
_STEP_BYTES = 1 << 20


def choose_part_bytes(size_bytes: int) -> int:
    """Return the size of the parts of a file.

    >>> choose_part_bytes(1 << 30) >> 20, choose_part_bytes(10**12) >> 20
    (8, 96)
    """
    minimum = -(-size_bytes // MAX_PARTS)
    if minimum <= MIN_PART_BYTES:
        return MIN_PART_BYTES
    return -(-minimum // _STEP_BYTES) * _STEP_BYTES


class PartGrid:
    """The parts of files: equal ranges of each file, except the last of a file.

    Parts are numbered through all files in order: the parts of file `n` begin at `first[n]`. Their
    size depends on the size of the file only, so it is the same in every run of a conversion.

    Args:
        sizes: the sizes of the files in bytes.
        part_bytes: the size of the parts of each file.

    >>> grid = PartGrid([10, 0, 25], [10, 10, 10])
    >>> grid.count, grid.range_of(3), grid.parts_of(2)
    (4, (2, 20, 25), range(1, 4))
    >>> grid.touched(np.array([2]), np.array([5]), np.array([21]))
    (array([0, 0, 0]), array([1, 2, 3]))
    """

    def __init__(self, sizes: Sequence[int], part_bytes: Sequence[int]) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self.part_bytes = np.array(part_bytes, dtype=np.int64)
        counts = -(-self.sizes // self.part_bytes)
        self.first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def count(self) -> int:
        """The number of parts."""
        return int(self.first[-1])

    def parts_of(self, file: int) -> range:
        """Return the parts of a file."""
        return range(int(self.first[file]), int(self.first[file + 1]))

    def range_of(self, part: int) -> tuple[int, int, int]:
        """Return the file of a part, its first byte, and its end."""
        file = int(np.searchsorted(self.first, part, "right")) - 1
        start = (part - int(self.first[file])) * int(self.part_bytes[file])
        return file, start, min(start + int(self.part_bytes[file]), int(self.sizes[file]))

    def touched(self, file: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
        """Return the overlapping pairs of a range and a part, as numbers of ranges and of parts.

        Empty ranges overlap none.
        """
        filled = np.flatnonzero(stop > start)
        filled_files, low, high = file[filled], start[filled], stop[filled]
        first = self.first[filled_files] + low // self.part_bytes[filled_files]
        counts = self.first[filled_files] + (high - 1) // self.part_bytes[filled_files] - first + 1
        ranges = np.repeat(filled, counts)
        begins = np.cumsum(counts) - counts
        parts = np.arange(len(ranges)) - np.repeat(begins - first, counts)
        return ranges, parts


class PartSender(Closing):
    """A pool of threads that send parts, while other threads read and write.

    `put` waits while all threads are sending, so only a few written parts wait to be sent. An
    exception of `send` is raised by the next call.

    Args:
        send: sends a part by its number.
        count: the number of threads.

    >>> sent = []
    >>> with PartSender(sent.append, 2) as sender:
    ...     sender.put(3)
    ...     sender.finish()
    >>> sent
    [3]
    """

    def __init__(self, send: Callable[[int], None], count: int) -> None:
        self._send, self._count = send, count
        self._threads = ThreadPoolExecutor(count, "reshard-send")
        self._free = threading.Semaphore(count)
        self._error: BaseException | None = None

    def put(self, part: int) -> None:
        """Send a part as soon as a thread is free. Raises the error of an earlier part."""
        self.check()
        self._free.acquire()
        self._threads.submit(self._send, part).add_done_callback(self._end)

    def _end(self, future: Future[None]) -> None:
        # `exception()` of a cancelled part would raise here, and the thread would not become free.
        if not future.cancelled():
            self._error = self._error or future.exception()
        self._free.release()

    def check(self) -> None:
        """Raise the error of an earlier part, if any."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until all parts are sent. Raises the error of a part, if any."""
        # All slots are free only when no part is in flight.
        for _ in range(self._count):
            self._free.acquire()
        self._free.release(self._count)
        self.check()

    def close(self) -> None:
        """Wait for the parts being sent; no more can be put."""
        self._threads.shutdown(cancel_futures=True)


_FOLDER = ".reshard"
_RECORD = struct.Struct("<QQQ")


def local_target(target: RemotePath, folder: str | os.PathLike[str] | None, host: int = 0) -> Path:
    """Return the local target in which a conversion to a URL stages its files.

    Its folder is created if missing; by default it is `reshard` in the user's cache folder
    (`XDG_CACHE_HOME`). Hosts of a run have numbers, since they may share the folder. Raises
    RunError.

    >>> local_target(RemotePath("s3://bucket/model"), "/tmp").name
    'model-70498e845ae8'
    """
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "reshard"
    # Targets in different folders or buckets may have the same name, so add a digest of the URL.
    digest = hashlib.blake2b(str(target).encode(), digest_size=6).hexdigest()
    with translate_os_errors("create the folder for staged files", Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"{target.name[:60]}-{digest}{f'-host{host}' if host else ''}"


def list_local_targets(target: RemotePath, folder: str | os.PathLike[str] | None) -> list[Path]:
    """Return the local targets of a URL, of any host of a run. Raises RunError."""
    first = local_target(target, folder)
    with translate_os_errors("look for staged files", first.parent):
        # A staging folder is hidden, and its name contains that of its target.
        folders = {path.name for path in first.parent.glob(f".{glob.escape(first.name)}-host*")}
    names = [name.removeprefix(".").rpartition(".")[0] for name in sorted(folders)]
    return [first, *(first.with_name(name) for name in names)]


def rank_save_folder(target: Path) -> Path:
    """Return the folder in which a save by ranks creates the files of `target`.

    >>> rank_save_folder(Path("models/step-1000")).as_posix()
    'models/.step-1000.reshard-saving'
    """
    return target.with_name(f".{target.name}.reshard-saving")


class SentRecords(Closing):
    """The records of a process in the staging folder: parts that were sent, ranges released.

    A later run compares the recorded checksums with the store's. The checksums are durable before
    the space of a part is released, since released ranges are synced after them.
    """

    def __init__(self, content: Path, rank: int) -> None:
        self._folder = content / _FOLDER
        self._sent = self._released = -1
        with translate_os_errors("record what was sent", self._folder):
            self._folder.mkdir(exist_ok=True)
            # The name in staging folders on disk, which other versions may continue.
            self._released = open_own(self._folder / f"given_back.{rank}", os.O_WRONLY | os.O_CREAT)
            # The last record of a killed run may be incomplete: overwrite it.
            size = os.fstat(self._released).st_size
            self._end = size - size % _RECORD.size
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            # Lines are appended: an incomplete line of a killed run is skipped by readers.
            self._sent = open_own(self._folder / f"sent.{rank}", flags)

    def add_released(self, file: int, start_bytes: int, stop_bytes: int) -> None:
        """Record a released range of a file by its number, durably. Raises RunError."""
        with translate_os_errors("record what was sent", self._folder):
            record = _RECORD.pack(file, start_bytes, stop_bytes)
            write_all(self._released, record, self._end)
            sync_data(self._released)
            self._end += len(record)

    def add_sent(self, name: str, part: int, checksum: str) -> None:
        """Record the store's checksum of a file's part, durably. Raises RunError."""
        with translate_os_errors("record what was sent", self._folder):
            os.write(self._sent, json.dumps([name, part, checksum]).encode() + b"\n")
            sync_data(self._sent)

    def close(self) -> None:
        """Close the files."""
        self._sent = close_descriptor(self._sent)
        self._released = close_descriptor(self._released)


def read_part_checksums(content: Path) -> dict[tuple[str, int], str]:
    """Return the checksums that earlier runs recorded, by file and part. Raises RunError."""
    checksums = {}
    with translate_os_errors("read what an earlier run sent", content):
        for path in sorted((content / _FOLDER).glob("sent.*")):
            for line in read_own(path).splitlines():
                # The last line of a killed run may be incomplete.
                with contextlib.suppress(ValueError):
                    name, part, checksum = json.loads(line)
                    checksums[name, part] = checksum
    return checksums


def read_released_ranges(content: Path) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges that earlier runs released: file, first byte and end. Raises RunError."""
    with translate_os_errors("read what an earlier run sent", content):
        for path in sorted((content / _FOLDER).glob("given_back.*")):
            records = read_own(path)
            for at in range(0, len(records) - len(records) % _RECORD.size, _RECORD.size):
                yield _RECORD.unpack_from(records, at)


def list_other_staged(content: Path, names: set[str]) -> list[str]:
    """Return the staged files that are not in `names`, sorted. Raises RunError."""
    with translate_os_errors("list the staged files", content):
        staged = [
            (Path(parent) / name).relative_to(content).as_posix()
            for parent, folders, files in os.walk(content)
            for name in files
        ]
    return sorted(
        name for name in staged if name not in names and not name.startswith(f"{_FOLDER}/")
    )


_STORES = ("s3", "az", "gs")


def expect_writable(target: RemotePath) -> None:
    """Raise UsageError for a URL that cannot be a target.

    >>> expect_writable(RemotePath("s3://bucket/model"))
    """
    _check_store_scheme(target)
    if not target.key:
        raise UsageError(
            f"the target {target} is a whole bucket; name a folder in it: {target}/model"
        )


def _check_store_scheme(target: RemotePath) -> None:
    scheme = target.root_parts[0]
    if scheme not in _STORES:
        schemes = ", ".join(f"{name}://" for name in _STORES)
        raise UsageError(
            f"the target {target}: {scheme}:// can only be read; write to {schemes}, or to a local "
            "folder"
        )


def open_store(target: RemotePath) -> ObjectTarget:
    """Open the store of a URL for writing.

    Raises:
        UsageError: a URL that cannot be written.
        MissingExtraError: the package that writes there is not installed.
        OSError: invalid settings in the environment.
    """
    _check_store_scheme(target)
    scheme, name, *_ = target.root_parts
    # Each store's module is imported when it is used.
    if scheme == "s3":
        from reshard.checkpoint.storage.s3 import open_s3

        return open_s3(name)
    if scheme == "az":
        from reshard.checkpoint.storage.azure import open_az

        return open_az(name)
    from reshard.checkpoint.storage.gcs import open_gs

    return open_gs(name)


_REQUESTS = 16
_REPLACES = b"replaces"
Release = Callable[[str, int, int], None]
Key = TypeVar("Key")


class SentFile(NamedTuple):
    """A file that is sent in parts.

    `late` has the ranges `(start, stop)` whose content is known only when all elements are written.
    If `is_read_back`, the staged content is read again at that time.
    """

    name: str
    size_bytes: int
    late: tuple[tuple[int, int], ...] = ()
    is_read_back: bool = False


class Upload(Closing):
    """The upload of a conversion's files to a folder of a store, as seen by a process.

    Args:
        target: the folder.
        conversion_id: the fingerprint of everything that decides the bytes of the files.
        files: the files that are sent in parts.
        manifest_name: the file that is put last.
        is_replaced: whether an existing object, by its name in the folder, is deleted with the old
            checkpoint; all objects are if None.

    Raises:
        UsageError: a URL that cannot be written.
        MissingExtraError: the package that writes there is not installed.
        RunError: invalid settings of the store.
    """

    def __init__(
        self,
        target: RemotePath,
        conversion_id: str,
        files: Sequence[SentFile],
        manifest_name: str,
        is_replaced: Callable[[str], bool] | None = None,
    ) -> None:
        self._is_replaced = is_replaced or (lambda _: True)
        self.target, self.files = target, tuple(files)
        self._conversion_id, self._manifest_name = conversion_id, manifest_name
        self._folder = target.key
        with translate_store_errors(f"write to {target}"):
            self._store: ObjectTarget = open_store(target)
        self._is_committing = self._replaces = False
        self._lock = threading.Lock()
        self._records: SentRecords | None = None
        # The checksums of parts that this host sent, by file and number.
        self._checksums: dict[tuple[str, int], str] = {}
        # The keys below the target as listed by `find_target`, until files are begun.
        self._listed: frozenset[str] | None = None
        self.sent_bytes = 0
        self._set_up({}, [choose_part_bytes(file.size_bytes) for file in files])

    def _set_up(self, uploads: dict[str, str], part_bytes: Sequence[int]) -> None:
        self._uploads = uploads
        self.grid = PartGrid([file.size_bytes for file in self.files], part_bytes)
        self.sent: NDArray[np.bool_] = np.zeros(self.grid.count, dtype=bool)

    # The target.

    def find_target(self, *, overwrite: bool, restart: bool, is_resumed: bool) -> bool:
        """Check the target, and return whether an earlier run of this conversion completed it.

        Args:
            overwrite: replace an existing checkpoint.
            restart: abort the uploads of earlier runs.
            is_resumed: whether this machine has staged files of an earlier run.

        Raises:
            UsageError: a target that exists.
            RunError: another conversion's upload; a store that does not answer.
        """
        with translate_store_errors("inspect the target"):
            # A store may have an object and others below it; a file system could not hold both.
            if self._store.head(self._folder) is not None:
                raise UsageError(
                    f"the target is an object: {self.target}\nexpected a folder, or a free name"
                )
            objects = self._store.list_objects(f"{self._folder}/")
            self._listed = frozenset(objects)
            # The conversions with a marker here: their uploads are unfinished.
            conversions = {conversion_of(self._folder, key) for key in objects} - {None}
            others = conversions - {self._conversion_id}
            if others and not restart:
                raise RunError(
                    f"another conversion has begun to write to {self.target}\n"
                    "expected no other upload there: wait for it to end, remove orphaned uploads "
                    "with `reshard clean`, or abort it with --restart"
                )
            commits = {marker_key(self._folder, str(id_), COMMIT_NAME) for id_ in conversions}
            is_half = restart and not commits.isdisjoint(objects)
            if is_half:
                # The checkpoint is half old and half new: it must stay hidden from readers.
                self._store.put(self._key_of_marker(COMMIT_NAME), _REPLACES)
            if restart:
                for id_ in conversions:
                    self._abort(str(id_), objects, keep=self._key_of_marker(COMMIT_NAME))
                conversions.clear()
            self._is_committing = is_half or (
                self._key_of_marker(COMMIT_NAME) in objects and not restart
            )
            # A run that began to replace the checkpoint continues, whatever its arguments.
            self._replaces = overwrite or (
                self._is_committing
                and self._store.get(self._key_of_marker(COMMIT_NAME)) == _REPLACES
            )
            if self._is_committing or not self._list_old(objects):
                return False
            if is_resumed and not conversions and self._is_ours():
                return True
        if not overwrite:
            raise UsageError(
                f"the target exists: {self.target}\n"
                "expected a free name: choose another, or replace it with --overwrite"
            )
        return False

    def _is_ours(self) -> bool:
        """Return whether this conversion wrote the existing manifest."""
        manifest = self._store.get(f"{self._folder}/{self._manifest_name}")
        try:
            document: Any = json.loads(manifest or b"{}")
        except ValueError:
            return False
        return isinstance(document, dict) and document.get("conversion_id") == self._conversion_id

    def _list_old(self, objects: Iterable[str]) -> list[str]:
        return [key for key in objects if conversion_of(self._folder, key) is None]

    def _abort(self, conversion_id: str, objects: Iterable[str], keep: str) -> None:
        """Abort the uploads of a conversion and delete its marker except the key `keep`."""
        key = marker_key(self._folder, conversion_id, UPLOAD_NAME)
        content = self._store.get(key)
        if content is not None:
            marker = UploadMarker.from_bytes(content, f"{self.target}")
            self._run_all(
                lambda name: self._store.abort(self._key(name), marker.uploads[name]),
                marker.uploads,
            )
        own = [key for key in objects if conversion_of(self._folder, key) == conversion_id]
        self._store.delete([key for key in own if key != keep])

    # The parts.

    def begin(self) -> None:
        """Begin every file, or find its existing parts. Raises RunError."""
        with translate_store_errors("begin the upload"):
            address = self._key_of_marker(UPLOAD_NAME)
            content = None if self._is_free(address) else self._store.get(address)
            if content is None:
                marker = self._new_marker({})
                # Put the marker before beginning any file, so that later runs find every upload.
                self._store.put(address, marker.to_bytes())
                pending: dict[str, str] = {}
            else:
                marker = UploadMarker.from_bytes(content, f"{self.target}/{UPLOAD_NAME}")
                pending = self._find_pending(marker)
            self._set_up(
                dict(marker.uploads),
                [
                    marker.part_bytes.get(file.name) or choose_part_bytes(file.size_bytes)
                    for file in self.files
                ],
            )
            before = dict(self._uploads)
            self._uploads.update(pending)
            self._run_all(self._begin_file, range(len(self.files)))
            if self._uploads != before:
                self._store.put(address, self._new_marker(self._uploads).to_bytes())
        # A further `begin`, which finds parts sent by other processes, must list the keys again.
        self._listed = None

    def _is_free(self, key: str) -> bool:
        """Return whether the listing shows that the object is missing."""
        return self._listed is not None and key not in self._listed

    def _new_marker(self, uploads: dict[str, str]) -> UploadMarker:
        sizes = self.grid.part_bytes.tolist()
        names = [file.name for file in self.files]
        return UploadMarker(uploads, dict(zip(names, sizes, strict=True)))

    def _find_pending(self, marker: UploadMarker) -> dict[str, str]:
        """Return uploads without parts that a killed run began and did not add to the marker."""
        names = {self._key(file.name): file.name for file in self.files}
        if all(name in marker.uploads for name in names.values()):
            return {}
        return {
            names[pending.key]: pending.upload
            for pending in self._store.list_uploads(f"{self._folder}/")
            if pending.key in names
            and names[pending.key] not in marker.uploads
            and not pending.size_bytes
        }

    def _begin_file(self, number: int) -> None:
        file, parts = self.files[number], self.grid.parts_of(number)
        if not parts:
            return
        key = self._key(file.name)
        upload = self._uploads.get(file.name, "")
        stored_parts = self._store.list_parts(key, upload)
        if stored_parts is None:
            stored_object = None if self._is_free(key) else self._store.head(key)
            if self._is_complete(stored_object, file):
                self.sent[parts.start : parts.stop] = True
                return
            # Other threads write to the dictionary at the same time.
            parts_key = f"{self._key_of_marker('parts')}/{file.name}"
            upload = self._store.begin(key, self._conversion_id, parts_key)
            with self._lock:
                self._uploads[file.name] = upload
            return
        for part, stored in stored_parts.items():
            if part < len(parts):
                _, start, stop = self.grid.range_of(parts[part])
                # Parts that other hosts sent are not recorded here: trust the store's checksum.
                recorded = self._checksums.get((file.name, part), stored.tag)
                is_same = recorded == stored.tag
                self.sent[parts[part]] = is_same and stored.size_bytes == stop - start
                if not is_same:
                    LOGGER.warning(
                        "%s/%s: part %d in the store differs from the one that was sent; it is "
                        "sent again",
                        self.target,
                        file.name,
                        part,
                    )

    def _is_complete(self, stored: ObjectState | None, file: SentFile) -> bool:
        return (
            stored is not None
            and stored.conversion_id == self._conversion_id
            and stored.size_bytes == file.size_bytes
        )

    def state(self) -> tuple[dict[str, str], list[int], bytes]:
        """Return the state of the upload, for `join` in other processes."""
        return self._uploads, self.grid.part_bytes.tolist(), np.packbits(self.sent).tobytes()

    def join(self, state: tuple[dict[str, str], list[int], bytes]) -> None:
        """Join the upload that process 0 began."""
        uploads, part_bytes, sent = state
        self._set_up(dict(uploads), part_bytes)
        self.merge(sent)

    def merge(self, sent: bytes) -> None:
        """Add the parts that another process sent; none if `sent` is empty."""
        if sent:
            packed = np.frombuffer(sent, np.uint8)
            self.sent |= np.unpackbits(packed, count=len(self.sent)).astype(bool)

    def lost_parts(self, content: Path) -> NDArray[np.bool_]:
        """Return the parts missing both in the store and in the staging folder. Raises RunError."""
        released = np.array(list(read_released_ranges(content)), dtype=np.int64).reshape(-1, 3)
        released = released[released[:, 0] < len(self.files)]
        _, parts = self.grid.touched(*released.T)
        lost = np.zeros(self.grid.count, dtype=bool)
        lost[parts] = True
        return lost & ~self.sent

    @property
    def late_parts(self) -> NDArray[np.bool_]:
        """The parts with bytes that are known only at the end."""
        return self.parts_with([file.late for file in self.files])

    def parts_with(self, ranges: Iterable[Iterable[tuple[int, int]]]) -> NDArray[np.bool_]:
        """Return the parts that overlap these ranges `(first byte, end)` of each file."""
        rows = [(number, *span) for number, spans in enumerate(ranges) for span in spans]
        _, parts = self.grid.touched(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)
        is_touched = np.zeros(self.grid.count, dtype=bool)
        is_touched[parts] = True
        return is_touched

    # Sending.

    def open_records(self, content: Path, rank: int) -> None:
        """Read the records of earlier runs, and begin those of this process. Raises RunError."""
        self._checksums = read_part_checksums(content)
        self._records = SentRecords(content, rank)

    def send(self, part: int, content: Path, release: Release | None) -> None:
        """Send a complete part, unless the store has it, and release its local space.

        Raises RunError.
        """
        number, start, stop = self.grid.range_of(part)
        file = self.files[number]
        if not self.sent[part]:
            with (
                translate_store_errors(f"send bytes {start}:{stop}"),
                FileStream(content / file.name, start, stop) as body,
            ):
                number_in_file = part - self.grid.parts_of(number).start
                checksum = self._store.put_part(
                    self._key(file.name), self._uploads[file.name], number_in_file, body
                )
            with self._lock:
                if self._records is not None and checksum:
                    self._records.add_sent(file.name, number_in_file, checksum)
                self.sent[part] = True
                self.sent_bytes += stop - start
        if release is not None and self._records is not None and not file.is_read_back:
            # Record the range before its space is released: a later run must know that it is gone.
            with self._lock:
                self._records.add_released(number, start, stop)
            release(file.name, start, stop)

    def send_rest(self, content: Path, parts: NDArray[np.bool_]) -> None:
        """Send all of these parts that the store does not have. Raises RunError."""
        rest = np.flatnonzero(parts & ~self.sent).tolist()
        self._run_all(lambda part: self.send(part, content, None), rest)

    # Committing.

    def commit(self, content: Path) -> None:
        """Make the sent files visible, and put the other staged files. Raises RunError."""
        names = [file.name for file in self.files]
        others = list_other_staged(content, set(names))
        with translate_store_errors("commit the new checkpoint"):
            old = self._list_old(self._store.list_objects(f"{self._folder}/"))
            if old and not (self._replaces or self._is_committing):
                raise RunError(
                    f"the target was created during the run: {self.target}\n"
                    "expected its name to be free: move it away, or run this again with "
                    "--overwrite to replace it"
                )
            # 1. From here on the checkpoint is hidden from readers.
            self._store.put(self._key_of_marker(COMMIT_NAME), _REPLACES if self._replaces else b"")
            # The old manifest does not describe the new files.
            manifest = self._key(self._manifest_name)
            self._store.delete([key for key in old if key == manifest])
            # 2. Files sent in parts, the other files, and the manifest last.
            self._run_all(self._complete_file, range(len(self.files)))
            small = [name for name in others if name != self._manifest_name]
            self._run_all(lambda name: self._put_staged(content, name), small)
            self._put_staged(content, self._manifest_name)
            # 3. Remove objects that only the old checkpoint had.
            new_keys = {self._key(name) for name in (*names, *others)}
            if self._replaces:
                begin = len(self._key(""))
                self._store.delete(
                    [key for key in old if key not in new_keys and self._is_replaced(key[begin:])]
                )
            self._abort_repeated()
            # The commit marker, which hides the checkpoint from readers, is deleted last.
            commit = self._key_of_marker(COMMIT_NAME)
            rest = self._store.list_objects(self._key_of_marker(""))
            self._store.delete([key for key in rest if key != commit])
            self._store.delete([commit])
        forget_store(self.target.root_parts)

    def _abort_repeated(self) -> None:
        """Abort uploads of these files that were begun twice because a response was lost."""
        keys = {self._key(file.name) for file in self.files}
        for pending in self._store.list_uploads(f"{self._folder}/"):
            if pending.key in keys and not pending.size_bytes:
                self._store.abort(pending.key, pending.upload)

    def _complete_file(self, number: int) -> None:
        file, parts = self.files[number], len(self.grid.parts_of(number))
        key = self._key(file.name)
        # An empty file does not have parts to complete it from.
        if not parts:
            self._store.put(key, b"", self._conversion_id)
            return
        upload = self._uploads.get(file.name, "")
        self._store.complete(key, upload, parts, self._conversion_id)

    def _put_staged(self, content: Path, name: str) -> None:
        path = content / name
        with FileStream(path, 0, path.stat().st_size) as body:
            self._store.put(self._key(name), body, self._conversion_id)

    def close(self) -> None:
        """Close connections and files; the parts in the store stay."""
        self._store.close()
        if self._records is not None:
            self._records.close()

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _key_of_marker(self, name: str) -> str:
        return marker_key(self._folder, self._conversion_id, name)

    def _run_all(self, action: Callable[[Key], object], keys: Iterable[Key]) -> None:
        """Run an action for each key, several at a time, and stop at the first error."""
        with ThreadPoolExecutor(_REQUESTS) as threads:
            futures = [threads.submit(action, key) for key in keys]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise


class OrphanedUpload(NamedTuple):
    """The objects and parts of an unfinished conversion in a store.

    `began_s` is its begin in seconds since 1970. If `is_half_visible`, some of its files are
    already committed.
    """

    target: RemotePath
    conversion_id: str
    began_s: float
    uploads: tuple[PendingUpload, ...]
    marker_keys: tuple[str, ...]
    is_half_visible: bool

    @property
    def size_bytes(self) -> int:
        """The bytes of its parts."""
        return sum(pending.size_bytes for pending in self.uploads)


def find_orphaned_uploads(folder: RemotePath) -> list[OrphanedUpload]:
    """Return the unfinished conversions whose target is `folder` or is in it.

    Running conversions are included: stores do not know which are still running.

    Raises:
        UsageError: a URL that cannot be written.
        MissingExtraError: the package that writes there is not installed.
        RunError: the store does not answer.
    """
    with translate_store_errors(f"list uploads in {folder}"):
        store = open_store(folder)
        try:
            prefix = f"{folder.key}/" if folder.key else ""
            objects = store.list_objects(prefix)
            markers = _group_markers(objects)
            pending = store.list_uploads(prefix) if markers else []
            root = RemotePath(f"{folder.root_parts[0]}://{folder.root_parts[1]}")
            return [
                _describe(store, root / target, conversion_id, keys, objects, pending)
                for (target, conversion_id), keys in sorted(markers.items())
            ]
        finally:
            store.close()


def remove_orphaned_uploads(uploads: Iterable[OrphanedUpload]) -> None:
    """Abort the uploads of conversions and delete their markers, unless they are half-visible.

    Raises:
        RunError: the store does not answer.
    """
    for orphan in uploads:
        if orphan.is_half_visible:
            continue
        with translate_store_errors(f"remove the upload to {orphan.target}"):
            store = open_store(orphan.target)
            try:
                for pending in orphan.uploads:
                    store.abort(pending.key, pending.upload)
                # Delete the marker last, since uploads are found by it.
                last = marker_key(orphan.target.key, orphan.conversion_id, UPLOAD_NAME)
                store.delete([key for key in orphan.marker_keys if key != last])
                store.delete([last])
            finally:
                store.close()


def _group_markers(keys: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return the keys of each marker, by the key of its target and the conversion.

    >>> _group_markers(["a/b/.reshard/c0/upload.json", "a/b/x", "a/.reshard"])
    {('a/b', 'c0'): ['a/b/.reshard/c0/upload.json']}
    """
    markers: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        target, marker, rest = key.partition(f"/{MARKER_FOLDER}/")
        conversion_id, slash, _ = rest.partition("/")
        if marker and slash:
            markers.setdefault((target, conversion_id), []).append(key)
    return markers


def _describe(
    store: ObjectTarget,
    target: RemotePath,
    conversion_id: str,
    keys: list[str],
    objects: Mapping[str, ObjectState],
    pending: Iterable[PendingUpload],
) -> OrphanedUpload:
    at = marker_key(target.key, conversion_id, UPLOAD_NAME)
    content = store.get(at)
    marker = UploadMarker() if content is None else UploadMarker.from_bytes(content, str(target))
    names = {f"{target.key}/{name}": name for name in marker.part_bytes}
    # Uploads that were begun after the marker was last written are not in it, and do not have
    # parts.
    uploads = tuple(
        upload
        for upload in pending
        if upload.key in names
        and marker.uploads.get(names[upload.key], upload.upload) == upload.upload
        and (names[upload.key] in marker.uploads or not upload.size_bytes)
    )
    began_s = min(objects[key].modified_s for key in keys)
    is_half = marker_key(target.key, conversion_id, COMMIT_NAME) in keys
    return OrphanedUpload(target, conversion_id, began_s, uploads, tuple(keys), is_half)
