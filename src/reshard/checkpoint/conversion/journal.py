"""The journal of a conversion: which blocks are already on disk.

The journal is a file that only grows. A kill or a crash at any moment leaves a prefix of the
appended frames and perhaps an incomplete frame after it, which is detected and removed.

1. The file begins with eight fixed bytes; frames follow. A frame is its payload's length, its
   kind, a checksum, and the payload::

       magic | length kind checksum header | length kind checksum blocks | ...

2. A checksum covers its frame *and continues the previous checksum*, so a frame is valid only
   after the same frames as when it was written. The first invalid frame ends the journal.
3. The first frame identifies the conversion: its fingerprint, and a description for people. The
   file is written under another name and renamed, so every journal has a complete head; an invalid
   head is due to damage, not to a kill.
4. The finished blocks follow, 24 bytes each, and at the end the commit.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard._records import Record
from reshard.checkpoint.blocks.grid import DIGEST_BYTES
from reshard.checkpoint.storage.filesystem import (
    Closing,
    open_new,
    open_own,
    read_own,
    sync_folder,
    translate_os_errors,
    write_all,
)
from reshard.errors import RunError
from reshard.runs import IntArray
from reshard.system import sync, sync_data

_MAGIC = b"reshardJ"
_FORMAT_VERSION = 1
# A frame begins with the payload's length, its kind and the checksum; a commit is an inode number
# and whether it replaces a target.
_FRAME = struct.Struct("<IBI")
_FRAME_START = struct.Struct("<IB")
_COMMIT = struct.Struct("<QB")
_HEADER_KIND, _BLOCKS_KIND, _COMMIT_KIND = 1, 2, 3
_BLOCK = np.dtype([("tensor", "<u4"), ("block", "<u4"), ("digest", f"V{DIGEST_BYTES}")])
_START_OVER = "expected a journal of this conversion: --restart starts over"
_SHOWN_DIFFERENCES = 12
# Frames of at most 24 MiB: the length of a frame is stored in 32 bits.
_RECORDS_A_FRAME = 1 << 20


class FinishedBlocks(NamedTuple):
    """Finished blocks as columns: their tensors and numbers, and the concatenated digests."""

    tensors: IntArray
    blocks: IntArray
    digests: bytes

    @classmethod
    def read(cls, records: bytes) -> FinishedBlocks:
        """Return the blocks of records on disk. The last record of a block is the valid one.

        >>> FinishedBlocks.read(np.array([(3, 7, b"a digest: 16 byt")], _BLOCK).tobytes())
        FinishedBlocks(tensors=array([3]), blocks=array([7]), digests=b'a digest: 16 byt')
        """
        rows = np.frombuffer(records, dtype=_BLOCK)
        # A key per record, with the tensor in the upper half. The stable sort keeps the records of
        # a block in the order they were written; only the last is used.
        keys = (rows["tensor"].astype(np.int64) << 32) | rows["block"].astype(np.int64)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
        keys, digests = keys[is_last], rows["digest"][order[is_last]]
        return cls(keys >> 32, keys & 0xFFFFFFFF, digests.tobytes())


class Commit(Record):
    """The commit record: which folder is finished, and whether it may replace a target.

    `inode` is the folder's inode number; `replaces` is whether the folder may replace an existing
    target.
    """

    inode: int
    replaces: bool


class JournalRecord(Record):
    """The contents of a journal on disk, up to its first invalid frame.

    `folder_inode` is the inode number of the folder that the journal was begun in, None if it was
    not recorded. `valid_bytes` is the end of the valid frames, `checksum` the checksum of the last
    valid frame.
    """

    conversion_id: str
    description: Any
    finished: FinishedBlocks
    commit: Commit | None
    folder_inode: int | None
    valid_bytes: int
    checksum: int


class Journal(Closing):
    """An open journal, with the blocks of earlier runs, to which this run appends its own.

    Any number of threads of one process may append.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "journal"
    ...     with Journal.open(path, "c0ffee", {"to": "tp=2"}) as journal:
    ...         journal.append_blocks(np.array([0, 0]), np.array([0, 1]), bytes(32))
    ...     with Journal.open(path, "c0ffee", {"to": "tp=2"}) as journal:
    ...         journal.resumed, journal.finished.blocks.tolist()
    (True, [0, 1])
    """

    __slots__ = (
        "_checksum",
        "_descriptor",
        "_end",
        "_lock",
        "finished",
        "folder_inode",
        "path",
        "resumed",
    )

    def __init__(self, path: Path, record: JournalRecord, resumed: bool) -> None:
        self.path = path
        self.finished = record.finished
        self.resumed = resumed
        self.folder_inode = record.folder_inode
        self._end = record.valid_bytes
        self._checksum = record.checksum
        # Re-entrant: an append that fails closes the journal while it has the lock.
        self._lock = threading.RLock()
        self._descriptor: int | None = open_own(path, os.O_RDWR)

    @classmethod
    def open(cls, path: Path, conversion_id: str, description: Any) -> Journal:
        """Continue the journal at `path`, or create it if it does not exist.

        `conversion_id` is the fingerprint of everything that determines the bytes of the result;
        `description` is the same for people, as JSON values. An incomplete frame at the end is
        removed.

        Raises `RunError` for the journal of another conversion (naming the differences), for a
        damaged journal, and if the file system refuses an operation.
        """
        with translate_os_errors("open the journal", path):
            record = read_journal(path)
            resumed = record is not None
            if record is None:
                record = _create(path, conversion_id, description)
            if record.conversion_id != conversion_id:
                raise RunError(_explain_other_conversion(path, record, conversion_id, description))
            journal = cls(path, record, resumed)
            try:
                journal._cut_torn_tail()
            except BaseException:
                journal.close()
                raise
            return journal

    def append_blocks(self, tensors: IntArray, blocks: IntArray, digests: bytes) -> None:
        """Record finished blocks durably: their numbers as columns, and the concatenated digests.

        The blocks' data must have been synced before. On return the record survives a crash.
        Raises `RunError` if the journal cannot be written; it accepts no more records then.
        """
        records = np.empty(len(tensors), dtype=_BLOCK)
        records["tensor"], records["block"] = tensors, blocks
        records["digest"] = np.frombuffer(digests, dtype=f"V{DIGEST_BYTES}")
        # In frames of limited size. Each frame has its own checksum.
        for at in range(0, len(records), _RECORDS_A_FRAME):
            self._append(_BLOCKS_KIND, records[at : at + _RECORDS_A_FRAME].tobytes())

    def append_commit(self, commit: Commit) -> None:
        """Record durably that the content is complete and may be renamed. Raises `RunError`."""
        self._append(_COMMIT_KIND, _COMMIT.pack(commit.inode, commit.replaces))

    def close(self) -> None:
        """Close the file; the appended records stay. A second call does nothing."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _append(self, kind: int, payload: bytes) -> None:
        with self._lock, translate_os_errors("write the journal", self.path):
            if self._descriptor is None:
                raise RunError(
                    f"the journal {self.path} is closed\n"
                    "expected no record after it was closed or could not be written"
                )
            frame, checksum = _make_frame(kind, payload, self._checksum)
            try:
                write_all(self._descriptor, frame, self._end)
                sync_data(self._descriptor)
            except OSError:
                # After a failed sync the state of the disk is unknown until the file is read again.
                self.close()
                raise
            self._end += len(frame)
            self._checksum = checksum

    def _cut_torn_tail(self) -> None:
        descriptor = self._descriptor
        if descriptor is not None and os.fstat(descriptor).st_size > self._end:
            os.ftruncate(descriptor, self._end)
            sync(descriptor)


def read_journal(path: Path) -> JournalRecord | None:
    """Read the journal at `path`, or return None if it does not exist. Changes nothing.

    Raises `RunError` if the head is damaged or was written by another version, or if the file
    cannot be read.
    """
    with translate_os_errors("read the journal", path):
        try:
            data = read_own(path)
        except FileNotFoundError:
            return None
    # 1. The head: a journal with an invalid head is damaged, not incomplete.
    frames = _read_good_frames(data)
    try:
        kind, payload, end, checksum = next(frames)
        header = json.loads(payload) if kind == _HEADER_KIND else None
    except (StopIteration, ValueError):
        header = None
    if not isinstance(header, dict):
        raise RunError(f"the journal {path} is damaged at its head\n{_START_OVER}")
    if header.get("format_version") != _FORMAT_VERSION:
        raise RunError(
            f"the journal {path} has format version {header.get('format_version')!r}, "
            f"expected {_FORMAT_VERSION}\n"
            "another version of reshard began this conversion: finish it with that version, "
            "or start over with --restart"
        )
    # 2. The records, up to the first invalid frame.
    blocks: list[bytes] = []
    commit: Commit | None = None
    for kind, payload, frame_end, frame_checksum in frames:
        if kind == _BLOCKS_KIND:
            blocks.append(payload)
        elif kind == _COMMIT_KIND:
            inode, replaces = _COMMIT.unpack(payload)
            commit = Commit(inode, bool(replaces))
        end, checksum = frame_end, frame_checksum
    return JournalRecord(
        conversion_id=str(header.get("conversion_id")),
        description=header.get("description"),
        finished=FinishedBlocks.read(b"".join(blocks)),
        commit=commit,
        folder_inode=header.get("folder_inode"),
        valid_bytes=end,
        checksum=checksum,
    )


def _create(path: Path, conversion_id: str, description: Any) -> JournalRecord:
    folder_inode = os.lstat(path.parent).st_ino
    header = {
        "format_version": _FORMAT_VERSION,
        "folder_inode": folder_inode,
        "conversion_id": conversion_id,
        "description": description,
    }
    frame, checksum = _make_frame(_HEADER_KIND, json.dumps(header).encode(), zlib.crc32(_MAGIC))
    unfinished = path.with_name(path.name + ".new")
    descriptor = open_new(unfinished, 0o600)
    try:
        write_all(descriptor, _MAGIC + frame, 0)
        sync(descriptor)
    finally:
        os.close(descriptor)
    # Synced before it is renamed, so that every journal has a complete head.
    os.rename(unfinished, path)
    sync_folder(path.parent)
    return JournalRecord(
        conversion_id=conversion_id,
        description=description,
        finished=FinishedBlocks.read(b""),
        commit=None,
        folder_inode=folder_inode,
        valid_bytes=len(_MAGIC) + len(frame),
        checksum=checksum,
    )


def _make_frame(kind: int, payload: bytes, previous_checksum: int) -> tuple[bytes, int]:
    checksum = _checksum(kind, payload, previous_checksum)
    return _FRAME.pack(len(payload), kind, checksum) + payload, checksum


def _checksum(kind: int, payload: bytes, previous_checksum: int) -> int:
    start = _FRAME_START.pack(len(payload), kind)
    return zlib.crc32(payload, zlib.crc32(start, previous_checksum))


def _read_good_frames(data: bytes) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield every `(kind, payload, end, checksum)` up to the first invalid frame."""
    if not data.startswith(_MAGIC):
        return
    position, previous = len(_MAGIC), zlib.crc32(_MAGIC)
    while position + _FRAME.size <= len(data):
        length, kind, checksum = _FRAME.unpack_from(data, position)
        end = position + _FRAME.size + length
        payload = data[position + _FRAME.size : end]
        if end > len(data) or _checksum(kind, payload, previous) != checksum:
            return
        yield kind, payload, end, checksum
        position, previous = end, checksum


def _explain_other_conversion(
    path: Path, record: JournalRecord, conversion_id: str, description: Any
) -> str:
    # The earlier description was read from JSON; a round trip gives this description equal types.
    now = json.loads(json.dumps(description))
    differences = list(_list_differences("", record.description, now))
    if not differences:
        differences = [
            f"the files it reads: fingerprint then {record.conversion_id}, now {conversion_id}"
        ]
    hidden = len(differences) - _SHOWN_DIFFERENCES
    shown = differences[:_SHOWN_DIFFERENCES] + ([f"and {hidden} more"] if hidden > 0 else [])
    return "\n".join(
        [
            f"the journal {path} belongs to another conversion, begun earlier and not finished",
            "what differs:",
            *(f"  {difference}" for difference in shown),
            "expected the conversion that was begun: run that one again to finish it, or "
            "start over with --restart",
        ]
    )


def _list_differences(name: str, then: Any, now: Any) -> Iterator[str]:
    """Yield a line for each value, at any depth, in which two descriptions differ.

    >>> then = {"to": "tp=2", "rules": {"a": "dp"}}
    >>> list(_list_differences("", then, {"to": "tp=4", "rules": {}}))
    ["to: then 'tp=2', now 'tp=4'", "rules.a: then 'dp', now absent"]
    """
    absent = "absent"
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            inner = f"{name}.{key}" if name else str(key)
            if key not in now:
                yield f"{inner}: then {then[key]!r}, now {absent}"
            elif key not in then:
                yield f"{inner}: then {absent}, now {now[key]!r}"
            else:
                yield from _list_differences(inner, then[key], now[key])
    elif then != now:
        yield f"{name or 'description'}: then {then!r}, now {now!r}"
