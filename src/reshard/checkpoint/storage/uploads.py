"""Parts of files: equal ranges of each, but for the last one, in which a store takes them.

Parts are numbered through all files, in their order: file `n` has those from `first[n]` on. How
long they are follows from the size of the file alone, so every run of a conversion has the same.

Parts that are sent in threads of their own, while others go on to read and write.

Both directions of a link are busy then. As many parts are under way as there are threads; who has
another one waits, so that what is written and not sent stays little.

The spool: where parts of files wait on this machine until a store has them.

A conversion to an address writes its files into a folder here, sparse ones, and gives the space of
each part back when the store has it. What was given back is noted first, durably: a later run whose
store has lost such a part does its blocks again.

The stores that are written to, by the scheme of an address.

Files of a checkpoint on their way to a store, seen from one process.

1. `find_target` says what is at the address: nothing, an upload to go on with, another checkpoint.
2. `begin` begins every file in the store, or finds which parts an earlier run sent.
3. `send` sends a part from the spool, and gives its space here back.
4. `commit` makes the objects of their parts, puts the small files, and the manifest last. Readers
   see the old checkpoint or nothing before, and the new one after; meanwhile the marker says that
   there is nothing to read.

Every step can be done again, from the same machine or another, by the same conversion.

Uploads that a store still holds of conversions that did not end.

Only what a marker of a conversion names is found, and removed: its uploads with their parts, and
the marker. An upload of another program that is under way is left alone, and so is a checkpoint
that is half in its place, whose files would look like a whole one without the marker.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.storage.azure import open_az
from reshard.checkpoint.storage.filesystem import (
    Closing,
    close_descriptor,
    open_own,
    read_own,
    translate_os_errors,
    write_all,
)
from reshard.checkpoint.storage.gcs import open_gs
from reshard.checkpoint.storage.object_stores import (
    FileStream,
    ObjectTarget,
    PendingUpload,
    StoredObject,
    translate_store_errors,
)
from reshard.checkpoint.storage.remote_paths import RemotePath, forget_store
from reshard.checkpoint.storage.s3 import open_s3
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

#: Stores take no shorter ones (5 MiB), and a request costs as much as some mebibytes.
MIN_PART_BYTES = 8 << 20
#: Of one file, in all stores.
MAX_PARTS = 10_000
_STEP_BYTES = 1 << 20


def choose_part_bytes(size_bytes: int) -> int:
    """How long the parts of a file are.

    >>> choose_part_bytes(1 << 30) >> 20, choose_part_bytes(10**12) >> 20
    (8, 96)
    """
    least = -(-size_bytes // MAX_PARTS)
    if least <= MIN_PART_BYTES:
        return MIN_PART_BYTES
    return -(-least // _STEP_BYTES) * _STEP_BYTES


class PartGrid:
    """The parts of files.

    Args:
        sizes: of the files, in bytes.
        part_bytes: how long the parts of each are.

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
        """How many parts there are."""
        return int(self.first[-1])

    def parts_of(self, file: int) -> range:
        """The parts of a file."""
        return range(int(self.first[file]), int(self.first[file + 1]))

    def range_of(self, part: int) -> tuple[int, int, int]:
        """The file of a part, its first byte there, and its end."""
        file = int(np.searchsorted(self.first, part, "right")) - 1
        start = (part - int(self.first[file])) * int(self.part_bytes[file])
        return file, start, min(start + int(self.part_bytes[file]), int(self.sizes[file]))

    def touched(self, file: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
        """The parts in which ranges of files have bytes: the number of the range, and the part.

        A part is there once for each range. Empty ranges have none.
        """
        there = np.flatnonzero(stop > start)
        of, low, high = file[there], start[there], stop[there]
        first = self.first[of] + low // self.part_bytes[of]
        counts = self.first[of] + (high - 1) // self.part_bytes[of] - first + 1
        ranges = np.repeat(there, counts)
        begins = np.cumsum(counts) - counts
        parts = np.arange(len(ranges)) - np.repeat(begins - first, counts)
        return ranges, parts


class PartSender(Closing):
    """Sends parts by their numbers, with `send`. What that raises is raised by the next call.

    Args:
        send: sends a part.
        count: of the threads.

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
        """Send a part, as soon as one of the threads is free. Raises what an earlier one raised."""
        self.check()
        self._free.acquire()
        self._threads.submit(self._send, part).add_done_callback(self._end)

    def _end(self, future: Future[None]) -> None:
        if not future.cancelled():
            self._error = self._error or future.exception()
        self._free.release()

    def check(self) -> None:
        """Raise what a part that was put raised."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until all parts that were put are sent. Raises what one of them raised."""
        for _ in range(self._count):
            self._free.acquire()
        self._free.release(self._count)
        self.check()

    def close(self) -> None:
        """Wait for the parts that are under way; no other can be put."""
        self._threads.shutdown(cancel_futures=True)


_FOLDER = ".reshard"
_RECORD = struct.Struct("<QQQ")


def local_target(target: RemotePath, folder: str | os.PathLike[str] | None, host: int = 0) -> Path:
    """What stands for an address on this machine, in a folder that is made where it is missing.

    By default the folder is `reshard` in the user's cache folder (`XDG_CACHE_HOME`). Hosts of a run
    have numbers, since they may share such a folder. Raises RunError.

    >>> local_target(RemotePath("s3://bucket/model"), "/tmp").name
    'model-70498e845ae8'
    """
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "reshard"
    digest = hashlib.blake2b(str(target).encode(), digest_size=6).hexdigest()
    with translate_os_errors("make the folder for staged files", Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"{target.name[:60]}-{digest}{f'-host{host}' if host else ''}"


def list_local_targets(target: RemotePath, folder: str | os.PathLike[str] | None) -> list[Path]:
    """What may stand for an address on this machine, of any host of a run. Raises RunError."""
    first = local_target(target, folder)
    with translate_os_errors("look for staged files", first.parent):
        # A staging folder is hidden, and has the name of its target in its own.
        found = {one.name for one in first.parent.glob(f".{glob.escape(first.name)}-host*")}
    names = [name.removeprefix(".").rpartition(".")[0] for name in sorted(found)]
    return [first, *(first.with_name(name) for name in names)]


def rank_save_folder(target: Path) -> Path:
    """Where a save by ranks makes the files of the checkpoint `target`.

    >>> rank_save_folder(Path("models/step-1000")).as_posix()
    'models/.step-1000.reshard-saving'
    """
    return target.with_name(f".{target.name}.reshard-saving")


class ReleasedRanges(Closing):
    """The ranges of files whose space one process gave back, as they are noted."""

    def __init__(self, content: Path, rank: int) -> None:
        self._path = content / _FOLDER / f"given_back.{rank}"
        self._descriptor = -1
        with translate_os_errors("note what was sent", self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT)
            size = os.fstat(self._descriptor).st_size
            self._end = size - size % _RECORD.size

    def note(self, file: int, start_bytes: int, stop_bytes: int) -> None:
        """Note a range of a file by its number, durably. Raises RunError."""
        with translate_os_errors("note what was sent", self._path):
            record = _RECORD.pack(file, start_bytes, stop_bytes)
            write_all(self._descriptor, record, self._end)
            sync_data(self._descriptor)
            self._end += len(record)

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)


class PartChecksums(Closing):
    """The checksums that a store gave for the parts that one process sent, as they are noted.

    By them a later run finds out whether the store still has those bytes. They are durable before
    the space of a part is given back, since `ReleasedRanges` is synced after them.
    """

    def __init__(self, content: Path, rank: int) -> None:
        self._path = content / _FOLDER / f"sent.{rank}"
        self._descriptor = -1
        with translate_os_errors("note what was sent", self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, name: str, part: int, checksum: str) -> None:
        """Note the checksum of a file's part. Raises RunError."""
        with translate_os_errors("note what was sent", self._path):
            os.write(self._descriptor, json.dumps([name, part, checksum]).encode() + b"\n")
            sync_data(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)


def read_part_checksums(content: Path) -> dict[tuple[str, int], str]:
    """Return the checksums that earlier runs noted, by file and part. Raises RunError."""
    found = {}
    with translate_os_errors("read what an earlier run sent", content):
        for path in sorted((content / _FOLDER).glob("sent.*")):
            for line in read_own(path).splitlines():
                # The last line may be torn.
                with contextlib.suppress(ValueError):
                    name, part, checksum = json.loads(line)
                    found[name, part] = checksum
    return found


def read_released_ranges(content: Path) -> Iterator[tuple[int, int, int]]:
    """The ranges of files that earlier runs noted: file, first byte and end. Raises RunError."""
    with translate_os_errors("read what an earlier run sent", content):
        for path in sorted((content / _FOLDER).glob("given_back.*")):
            noted = read_own(path)
            for at in range(0, len(noted) - len(noted) % _RECORD.size, _RECORD.size):
                yield _RECORD.unpack_from(noted, at)


def list_other_staged(content: Path, names: set[str]) -> list[str]:
    """The staged files that are none of `names`, in the order of their names. Raises RunError."""
    with translate_os_errors("list the staged files", content):
        found = [
            (Path(parent) / name).relative_to(content).as_posix()
            for parent, folders, files in os.walk(content)
            for name in files
        ]
    return sorted(
        name for name in found if name not in names and not name.startswith(f"{_FOLDER}/")
    )


_STORES: Mapping[str, Callable[[str], ObjectTarget]] = {
    "s3": open_s3,
    "az": open_az,
    "gs": open_gs,
}


def expect_writable(target: RemotePath) -> None:
    """Raise UsageError for an address that cannot be a target.

    >>> expect_writable(RemotePath("s3://bucket/model"))
    """
    _expect_store(target)
    if not target.key:
        raise UsageError(
            f"the target {target} is a whole bucket; name a folder in it: {target}/model"
        )


def _expect_store(target: RemotePath) -> None:
    scheme = target.root_parts[0]
    if scheme not in _STORES:
        written = ", ".join(f"{one}://" for one in _STORES)
        raise UsageError(
            f"the target {target} is an address of {scheme}://, which is only read; write to "
            f"{written}, or to a folder of this machine"
        )


def open_store(target: RemotePath) -> ObjectTarget:
    """The store of an address.

    Raises:
        UsageError: an address where nothing is written.
        MissingExtraError: the package that writes there is not installed.
        OSError: settings in the environment that it refuses.
    """
    _expect_store(target)
    scheme, name, *_ = target.root_parts
    return _STORES[scheme](name)


_REQUESTS = 16
_REPLACES = b"replaces"
GiveBack = Callable[[str, int, int], None]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file that is sent in parts.

    `late` are the ranges `(start, stop)` that are only known when all elements are written.
    `is_read_back` says that what is staged of it is read once more then.
    """

    name: str
    size_bytes: int
    late: tuple[tuple[int, int], ...] = ()
    is_read_back: bool = False


class Upload(Closing):
    """The upload of one conversion's files to a folder of a store.

    Args:
        target: the folder.
        conversion_id: the fingerprint of everything that decides the bytes of the files.
        files: those that are sent in parts.
        manifest_name: the file that is put last.
        is_replaced: whether an object that is there goes with the old checkpoint, by its name in
            the folder; all of them when None.

    Raises:
        UsageError: an address where nothing is written.
        MissingExtraError: the package that writes there is not installed.
        RunError: settings that the store refuses.
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
        self._given_back: ReleasedRanges | None = None
        self._checksums: PartChecksums | None = None
        # The checksums of parts that were sent from here, by file and number.
        self._noted: dict[tuple[str, int], str] = {}
        # What was below the target when it was looked at, until files are begun.
        self._listed: frozenset[str] | None = None
        self.sent_bytes = 0
        self._set_up({}, [choose_part_bytes(one.size_bytes) for one in files])

    def _set_up(self, uploads: dict[str, str], part_bytes: Sequence[int]) -> None:
        self._uploads = uploads
        self.grid = PartGrid([one.size_bytes for one in self.files], part_bytes)
        self.sent: NDArray[np.bool_] = np.zeros(self.grid.count, dtype=bool)

    # What is there.

    def find_target(self, *, overwrite: bool, restart: bool, is_resumed: bool) -> bool:
        """Look at the target; whether an earlier run of this conversion put all of it there.

        Args:
            overwrite: replace a checkpoint that is there.
            restart: give up what earlier runs sent.
            is_resumed: whether this machine has work of an earlier run.

        Raises:
            UsageError: a target that exists.
            RunError: another conversion's upload; a store that does not answer.
        """
        with translate_store_errors("look at the target"):
            if self._store.head(self._folder) is not None:
                raise UsageError(
                    f"the target is an object: {self.target}\n"
                    "expected a folder, or a name that is free"
                )
            there = self._store.list_objects(f"{self._folder}/")
            self._listed = frozenset(there)
            found = {conversion_of(self._folder, key) for key in there} - {None}
            others = found - {self._conversion_id}
            if others and not restart:
                raise RunError(
                    f"another conversion has begun to write to {self.target}\n"
                    "expected no other upload there: let it end, remove what is abandoned with "
                    "`reshard clean`, or give it up with --restart"
                )
            hides = {marker_key(self._folder, str(one), COMMIT_NAME) for one in found}
            is_half = restart and not hides.isdisjoint(there)
            if is_half:
                # What is there is half of one checkpoint and half of another: it stays hidden.
                self._store.put(self._key_of_marker(COMMIT_NAME), _REPLACES)
            if restart:
                for one in found:
                    self._give_up(str(one), there, keep=self._key_of_marker(COMMIT_NAME))
                found.clear()
            self._is_committing = is_half or (
                self._key_of_marker(COMMIT_NAME) in there and not restart
            )
            # A run that began to replace goes on with it, however it is called.
            self._replaces = overwrite or (
                self._is_committing
                and self._store.get(self._key_of_marker(COMMIT_NAME)) == _REPLACES
            )
            if self._is_committing or not self._list_old(there):
                return False
            if is_resumed and not found and self._is_ours():
                return True
        if not overwrite:
            raise UsageError(
                f"the target exists: {self.target}\n"
                "expected a name that is free: choose another, or replace it with --overwrite"
            )
        return False

    def _is_ours(self) -> bool:
        """Whether the manifest that is there is of this conversion."""
        manifest = self._store.get(f"{self._folder}/{self._manifest_name}")
        try:
            found: Any = json.loads(manifest or b"{}")
        except ValueError:
            return False
        return isinstance(found, dict) and found.get("conversion_id") == self._conversion_id

    def _list_old(self, there: Iterable[str]) -> list[str]:
        return [key for key in there if conversion_of(self._folder, key) is None]

    def _give_up(self, conversion_id: str, there: Iterable[str], keep: str) -> None:
        """Abort the uploads of a conversion and delete its marker, but for the key `keep`."""
        key = marker_key(self._folder, conversion_id, UPLOAD_NAME)
        content = self._store.get(key)
        if content is not None:
            marker = UploadMarker.from_bytes(content, f"{self.target}")
            self._at_once(
                lambda name: self._store.abort(self._key(name), marker.uploads[name]),
                marker.uploads,
            )
        own = [one for one in there if conversion_of(self._folder, one) == conversion_id]
        self._store.delete([one for one in own if one != keep])

    # What was sent.

    def begin(self) -> None:
        """Begin every file, or find the parts that are there. Raises RunError."""
        with translate_store_errors("begin the upload"):
            address = self._key_of_marker(UPLOAD_NAME)
            content = None if self._is_free(address) else self._store.get(address)
            if content is None:
                marker = self._new_marker({})
                # First, so that whatever is begun can be found.
                self._store.put(address, marker.to_bytes())
                pending: dict[str, str] = {}
            else:
                marker = UploadMarker.from_bytes(content, f"{self.target}/{UPLOAD_NAME}")
                pending = self._find_pending(marker)
            self._set_up(
                dict(marker.uploads),
                [
                    marker.part_bytes.get(one.name) or choose_part_bytes(one.size_bytes)
                    for one in self.files
                ],
            )
            before = dict(self._uploads)
            self._uploads.update(pending)
            self._at_once(self._begin_file, range(len(self.files)))
            if self._uploads != before:
                self._store.put(address, self._new_marker(self._uploads).to_bytes())
        # Who begins again, to see what others sent, asks the store.
        self._listed = None

    def _is_free(self, key: str) -> bool:
        """Whether it is known, without asking, that there is no such object."""
        return self._listed is not None and key not in self._listed

    def _new_marker(self, uploads: dict[str, str]) -> UploadMarker:
        sizes = self.grid.part_bytes.tolist()
        names = [one.name for one in self.files]
        return UploadMarker(uploads, dict(zip(names, sizes, strict=True)))

    def _find_pending(self, marker: UploadMarker) -> dict[str, str]:
        """Uploads that a run began, killed before the marker had them; they have no parts."""
        names = {self._key(one.name): one.name for one in self.files}
        if all(name in marker.uploads for name in names.values()):
            return {}
        return {
            names[one.key]: one.upload
            for one in self._store.list_uploads(f"{self._folder}/")
            if one.key in names and names[one.key] not in marker.uploads and not one.size_bytes
        }

    def _begin_file(self, number: int) -> None:
        file, parts = self.files[number], self.grid.parts_of(number)
        if not parts:
            return
        key = self._key(file.name)
        upload = self._uploads.get(file.name, "")
        there = self._store.list_parts(key, upload)
        if there is None:
            found = None if self._is_free(key) else self._store.head(key)
            if self._is_this(found, file):
                self.sent[parts.start : parts.stop] = True
                return
            # The lock guards the dictionary, which other threads add to.
            parts_key = f"{self._key_of_marker('parts')}/{file.name}"
            upload = self._store.begin(key, self._conversion_id, parts_key)
            with self._lock:
                self._uploads[file.name] = upload
            return
        for part, stored in there.items():
            if part < len(parts):
                _, start, stop = self.grid.range_of(parts[part])
                # Parts that other hosts sent are not noted here.
                noted = self._noted.get((file.name, part), stored.checksum)
                is_same = noted == stored.checksum
                self.sent[parts[part]] = is_same and stored.size_bytes == stop - start
                if not is_same:
                    LOGGER.warning(
                        "%s/%s: the store has other bytes in part %d than were sent; it is sent "
                        "again",
                        self.target,
                        file.name,
                        part,
                    )

    def _is_this(self, found: StoredObject | None, file: SentFile) -> bool:
        return (
            found is not None
            and found.conversion_id == self._conversion_id
            and found.size_bytes == file.size_bytes
        )

    def state(self) -> tuple[dict[str, str], list[int], bytes]:
        """What other processes need to know of it, for `join`."""
        return self._uploads, self.grid.part_bytes.tolist(), np.packbits(self.sent).tobytes()

    def join(self, state: tuple[dict[str, str], list[int], bytes]) -> None:
        """Take part in the upload that process 0 began."""
        uploads, part_bytes, sent = state
        self._set_up(dict(uploads), part_bytes)
        self.merge(sent)

    def merge(self, sent: bytes) -> None:
        """Add the parts that another process sent; none where `sent` is empty."""
        if sent:
            packed = np.frombuffer(sent, np.uint8)
            self.sent |= np.unpackbits(packed, count=len(self.sent)).astype(bool)

    def lost_parts(self, content: Path) -> NDArray[np.bool_]:
        """The parts that neither the store nor the spool has any more. Raises RunError."""
        given = np.array(list(read_released_ranges(content)), dtype=np.int64).reshape(-1, 3)
        given = given[given[:, 0] < len(self.files)]
        _, parts = self.grid.touched(*given.T)
        lost = np.zeros(self.grid.count, dtype=bool)
        lost[parts] = True
        return lost & ~self.sent

    @property
    def late_parts(self) -> NDArray[np.bool_]:
        """The parts that have bytes which are only known at the end."""
        return self.parts_with([file.late for file in self.files])

    def parts_with(self, ranges: Iterable[Iterable[tuple[int, int]]]) -> NDArray[np.bool_]:
        """The parts that have bytes of these ranges of each file, of first byte and end."""
        rows = [(number, *one) for number, found in enumerate(ranges) for one in found]
        _, parts = self.grid.touched(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)
        is_touched = np.zeros(self.grid.count, dtype=bool)
        is_touched[parts] = True
        return is_touched

    # Sending.

    def open_records(self, content: Path, rank: int) -> None:
        """Begin to note which space this process gives back. Raises RunError."""
        self._given_back = ReleasedRanges(content, rank)
        self._noted = read_part_checksums(content)
        self._checksums = PartChecksums(content, rank)

    def send(self, part: int, content: Path, give_back: GiveBack | None) -> None:
        """Send a part that is whole, unless the store has it, and give its space back.

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
                if self._checksums is not None and checksum:
                    self._checksums.note(file.name, number_in_file, checksum)
                self.sent[part] = True
                self.sent_bytes += stop - start
        if give_back is not None and self._given_back is not None and not file.is_read_back:
            with self._lock:
                self._given_back.note(number, start, stop)
            give_back(file.name, start, stop)

    def send_rest(self, content: Path, parts: NDArray[np.bool_]) -> None:
        """Send every one of these parts that the store does not have. Raises RunError."""
        rest = np.flatnonzero(parts & ~self.sent).tolist()
        self._at_once(lambda part: self.send(part, content, None), rest)

    # The end.

    def commit(self, content: Path) -> None:
        """Make what was sent visible, and put what else is staged. Raises RunError."""
        names = [one.name for one in self.files]
        beside = list_other_staged(content, set(names))
        with translate_store_errors("put the new checkpoint in its place"):
            old = self._list_old(self._store.list_objects(f"{self._folder}/"))
            if old and not (self._replaces or self._is_committing):
                raise RunError(
                    f"the target appeared during the run: {self.target}\n"
                    "expected its name to be free: move it away, or run this again with "
                    "--overwrite to replace it"
                )
            # 1. From here on there is nothing to read, until the manifest is there.
            self._store.put(self._key_of_marker(COMMIT_NAME), _REPLACES if self._replaces else b"")
            manifest = self._key(self._manifest_name)
            self._store.delete([key for key in old if key == manifest])
            # 2. The large files, and those beside them.
            self._at_once(self._complete_file, range(len(self.files)))
            small = [name for name in beside if name != self._manifest_name]
            self._at_once(lambda name: self._put_staged(content, name), small)
            self._put_staged(content, self._manifest_name)
            # 3. What only the old checkpoint had.
            kept = {self._key(name) for name in (*names, *beside)}
            if self._replaces:
                begin = len(self._key(""))
                self._store.delete(
                    [key for key in old if key not in kept and self._is_replaced(key[begin:])]
                )
            self._abort_repeated()
            # What hides the rest from readers goes last.
            hides = self._key_of_marker(COMMIT_NAME)
            left = self._store.list_objects(self._key_of_marker(""))
            self._store.delete([key for key in left if key != hides])
            self._store.delete([hides])
        forget_store(self.target.root_parts)

    def _abort_repeated(self) -> None:
        """Abort the uploads of these files that were begun twice, since the answer was lost."""
        keys = {self._key(one.name) for one in self.files}
        for one in self._store.list_uploads(f"{self._folder}/"):
            if one.key in keys and not one.size_bytes:
                self._store.abort(one.key, one.upload)

    def _complete_file(self, number: int) -> None:
        file, parts = self.files[number], len(self.grid.parts_of(number))
        key = self._key(file.name)
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
        """Close connections and files; what was sent stays."""
        self._store.close()
        for one in (self._given_back, self._checksums):
            if one is not None:
                one.close()

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _key_of_marker(self, name: str) -> str:
        return marker_key(self._folder, self._conversion_id, name)

    def _at_once(self, action: Callable[[Key], object], keys: Iterable[Key]) -> None:
        """Do something for each of many, some at a time."""
        with ThreadPoolExecutor(_REQUESTS) as threads:
            futures = [threads.submit(action, key) for key in keys]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise


@dataclass(frozen=True, slots=True)
class OrphanedUpload:
    """What a store holds of one conversion.

    `began_s` is when it began, in seconds since 1970; `size_bytes` what its parts have.
    `is_half_visible`: some of its files are in their place.
    """

    target: RemotePath
    conversion_id: str
    began_s: float
    uploads: tuple[PendingUpload, ...]
    marker_keys: tuple[str, ...]
    is_half_visible: bool

    @property
    def size_bytes(self) -> int:
        """What its parts have."""
        return sum(one.size_bytes for one in self.uploads)


def find_orphaned_uploads(folder: RemotePath) -> list[OrphanedUpload]:
    """The conversions that did not end whose target is a folder, or lies in it.

    One that runs is among them: stores do not know who still works.

    Raises:
        UsageError: an address where nothing is written.
        MissingExtraError: the package that writes there is not installed.
        RunError: the store does not answer.
    """
    with translate_store_errors(f"look for uploads in {folder}"):
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


def remove_orphaned_uploads(found: Iterable[OrphanedUpload]) -> None:
    """Abort the uploads of conversions and delete their markers; half visible ones are left.

    Raises:
        RunError: the store does not answer.
    """
    for one in found:
        if one.is_half_visible:
            continue
        with translate_store_errors(f"remove the upload to {one.target}"):
            store = open_store(one.target)
            try:
                for upload in one.uploads:
                    store.abort(upload.key, upload.upload)
                # The marker last: what it names can be found as long as it is there.
                last = marker_key(one.target.key, one.conversion_id, UPLOAD_NAME)
                store.delete([key for key in one.marker_keys if key != last])
                store.delete([last])
            finally:
                store.close()


def _group_markers(keys: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """The keys of each marker by the key of its target and the conversion.

    >>> _group_markers(["a/b/.reshard/c0/upload.json", "a/b/x", "a/.reshard"])
    {('a/b', 'c0'): ['a/b/.reshard/c0/upload.json']}
    """
    found: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        target, within, rest = key.partition(f"/{MARKER_FOLDER}/")
        conversion_id, slash, _ = rest.partition("/")
        if within and slash:
            found.setdefault((target, conversion_id), []).append(key)
    return found


def _describe(
    store: ObjectTarget,
    target: RemotePath,
    conversion_id: str,
    keys: list[str],
    objects: Mapping[str, StoredObject],
    pending: Iterable[PendingUpload],
) -> OrphanedUpload:
    at = marker_key(target.key, conversion_id, UPLOAD_NAME)
    content = store.get(at)
    marker = UploadMarker() if content is None else UploadMarker.from_bytes(content, str(target))
    names = {f"{target.key}/{name}": name for name in marker.part_bytes}
    # One that was begun when the marker was written last has no upload there, and no parts.
    uploads = tuple(
        one
        for one in pending
        if one.key in names
        and (marker.uploads.get(names[one.key], one.upload) == one.upload)
        and (names[one.key] in marker.uploads or not one.size_bytes)
    )
    began_s = min(objects[key].modified_s for key in keys)
    is_half = marker_key(target.key, conversion_id, COMMIT_NAME) in keys
    return OrphanedUpload(target, conversion_id, began_s, uploads, tuple(keys), is_half)
