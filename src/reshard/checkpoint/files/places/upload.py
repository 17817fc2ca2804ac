"""Files of a checkpoint on their way to a store, seen from one process.

1. `find_target` says what is at the address: nothing, an upload to go on with, another checkpoint.
2. `begin` begins every file in the store, or finds which parts an earlier run sent.
3. `send` sends a part from the spool, and gives its space here back.
4. `commit` makes the objects of their parts, puts the small files, and the manifest last. Readers
   see the old checkpoint or nothing before, and the new one after; meanwhile the marker says that
   there is nothing to read.

Every step can be done again, from the same machine or another, by the same conversion.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.files.descriptors import Closing
from reshard.checkpoint.files.places.part_grid import PartGrid, part_bytes_of
from reshard.checkpoint.files.places.place import forget_place
from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.checkpoint.files.places.spool import (
    GivenBack,
    SentChecksums,
    read_given_back,
    read_sent_checksums,
    staged_beside,
)
from reshard.checkpoint.files.places.stores.object_target import (
    FileStream,
    ObjectTarget,
    StoredObject,
    store_refusals,
)
from reshard.checkpoint.files.places.stores.target_stores import open_store
from reshard.checkpoint.files.places.upload_marker import (
    COMMIT_NAME,
    UPLOAD_NAME,
    UploadMarker,
    conversion_of,
    marker_key,
)
from reshard.errors import RunError, UsageError
from reshard.log import LOGGER

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
        target: PlacePath,
        conversion_id: str,
        files: Sequence[SentFile],
        manifest_name: str,
        is_replaced: Callable[[str], bool] | None = None,
    ) -> None:
        self._is_replaced = is_replaced or (lambda _: True)
        self.target, self.files = target, tuple(files)
        self._conversion_id, self._manifest_name = conversion_id, manifest_name
        self._folder = target.key
        with store_refusals(f"write to {target}"):
            self._store: ObjectTarget = open_store(target)
        self._is_committing = self._replaces = False
        self._lock = threading.Lock()
        self._given_back: GivenBack | None = None
        self._checksums: SentChecksums | None = None
        # The checksums of parts that were sent from here, by file and number.
        self._noted: dict[tuple[str, int], str] = {}
        # What was below the target when it was looked at, until files are begun.
        self._listed: frozenset[str] | None = None
        self.sent_bytes = 0
        self._set_up({}, [part_bytes_of(one.size_bytes) for one in files])

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
        with store_refusals("look at the target"):
            if self._store.look_at(self._folder) is not None:
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
        with store_refusals("begin the upload"):
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
                    marker.part_bytes.get(one.name) or part_bytes_of(one.size_bytes)
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
            found = None if self._is_free(key) else self._store.look_at(key)
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
        given = np.array(list(read_given_back(content)), dtype=np.int64).reshape(-1, 3)
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

    def open_spool(self, content: Path, rank: int) -> None:
        """Begin to note which space this process gives back. Raises RunError."""
        self._given_back = GivenBack(content, rank)
        self._noted = read_sent_checksums(content)
        self._checksums = SentChecksums(content, rank)

    def send(self, part: int, content: Path, give_back: GiveBack | None) -> None:
        """Send a part that is whole, unless the store has it, and give its space back.

        Raises RunError.
        """
        number, start, stop = self.grid.range_of(part)
        file = self.files[number]
        if not self.sent[part]:
            action = f"send bytes {start}:{stop}"
            with store_refusals(action), FileStream(content / file.name, start, stop) as body:
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
        beside = staged_beside(content, set(names))
        with store_refusals("put the new checkpoint in its place"):
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
        forget_place(self.target.root_parts)

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
