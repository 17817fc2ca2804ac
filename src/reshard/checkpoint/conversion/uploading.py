"""Conversions to addresses: what a run does for one, beside moving blocks.

The blocks are written to files in a staging folder on this machine, as for any target. A part of a
file is sent as soon as all blocks that touch it are done, by the thread that did the last of them,
and its space here is given back::

    blocks   |--0--|--1--|--2--|--3--|--4--|--5--|
    parts    |------A-------|------B-------|--C--|      A: when blocks 0, 1 and 2 are done

1. Each process counts, for each part, the blocks that are left. It sends the parts whose blocks are
   all its own.
2. At the end process 0 sends the rest: parts that several processes wrote to, and those with bytes
   that follow from all elements.
3. Parts that the store has are not sent again; what it and this machine have lost is done again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks.batches import BatchWriter
from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.blocks.touched_ranges import touched_ranges
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.file_checksums import late_ranges
from reshard.checkpoint.conversion.moves import Moves
from reshard.checkpoint.conversion.processes import Processes
from reshard.checkpoint.conversion.staging import SharedStaging, check_target, staging_folder
from reshard.checkpoint.files.descriptors import Closing
from reshard.checkpoint.files.folders import FolderLock, refusals_explained, remove_folder
from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.checkpoint.files.places.spool import spool_target
from reshard.checkpoint.files.places.stores.target_stores import expect_writable
from reshard.checkpoint.files.places.upload import SentFile, Upload
from reshard.checkpoint.files.target_file import TargetFile
from reshard.checkpoint.manifest import MANIFEST_NAME
from reshard.errors import UsageError
from reshard.runs import IntArray


class ConversionUpload(Closing):
    """The upload of a run's files, seen from one of its processes.

    Raises as `Upload`; UsageError for processes on several machines.
    """

    def __init__(
        self,
        conversion: Conversion,
        target: PlacePath,
        conversion_id: str,
        processes: Processes,
        machines: int,
    ) -> None:
        if machines > 1:
            raise UsageError(
                f"the target {target} with processes on {machines} machines; an address is written "
                "by those of one, which share a staging folder: start them on one machine"
            )
        self._processes = processes
        self._upload = Upload(target, conversion_id, _list_files(conversion), MANIFEST_NAME)
        self._lock = threading.Lock()
        self._left: IntArray = np.zeros(0, dtype=np.int64)

    def is_complete(self, staging: SharedStaging, *, overwrite: bool, restart: bool) -> bool:
        """Whether an earlier run put all of it in its place; the same on all processes.

        Raises as `Upload.find_target`; RunError with its message on the other processes.
        """
        owner = staging.owner
        if owner is None:
            return bool(self._processes.share(None))
        try:
            is_complete = self._upload.find_target(
                overwrite=overwrite, restart=restart, is_resumed=owner.resumed
            )
        except UsageError:
            # Nothing was begun: a refusal leaves no empty staging folder behind.
            if not owner.resumed:
                owner.discard()
            raise
        if is_complete:
            owner.discard()
        return bool(self._processes.share(is_complete))

    def begin(
        self,
        staging: SharedStaging,
        moves: Moves,
        writer: BatchWriter,
        targets: OpenFiles[TargetFile],
        finished: NDArray[np.bool_],
    ) -> None:
        """Find what is in the store; blocks of parts that are lost are no longer `finished`.

        Called on process 0 only, before the others `join`. Raises RunError.
        """
        self._use(staging, moves, writer, targets)
        self._upload.begin()
        lost = self._upload.lost_parts(staging.content)
        numbers = np.flatnonzero(finished) if lost.any() else np.zeros(0, dtype=np.int64)
        for blocks, parts in self._find_touched(numbers):
            finished[numbers[blocks[lost[parts]]]] = False

    def join(
        self,
        staging: SharedStaging,
        moves: Moves,
        writer: BatchWriter,
        targets: OpenFiles[TargetFile],
    ) -> None:
        """Take part in what process 0 began; called on all processes. Raises RunError."""
        state = self._processes.share(self._upload.state() if staging.owner is not None else None)
        if staging.owner is None:
            self._use(staging, moves, writer, targets)
            self._upload.join(state)

    def _use(
        self,
        staging: SharedStaging,
        moves: Moves,
        writer: BatchWriter,
        targets: OpenFiles[TargetFile],
    ) -> None:
        self._content, self._moves = staging.content, moves
        self._writer, self._targets = writer, targets
        numbers = {file.name: number for number, file in enumerate(self._upload.files)}
        self._file_numbers = np.array([numbers[name] for name in writer.file_names], dtype=np.int64)
        self._upload.open_spool(staging.content, self._processes.rank)

    def expect(self, left: IntArray, own: IntArray) -> None:
        """Count what is left: the blocks of all processes, and those of this one."""
        everything = self._count(left)
        mine = everything if len(own) == len(left) else self._count(own)
        # A part with a count of -1 is never whole here.
        is_own = (mine == everything) & ~self._upload.late_parts
        self._left = np.where(is_own, mine, -1)

    def _count(self, numbers: IntArray) -> IntArray:
        """How often blocks touch each part."""
        counts = np.zeros(self._upload.grid.count, dtype=np.int64)
        for _, parts in self._find_touched(numbers):
            counts += np.bincount(parts, minlength=len(counts))
        return counts

    def _find_touched(self, numbers: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """The places in `numbers` of blocks, and the parts that these touch."""
        rows, blocks = self._moves.places(numbers)
        for found in touched_ranges(self._writer, rows, blocks):
            files = self._file_numbers[found.file]
            ranges, parts = self._upload.grid.touched(files, found.start, found.stop)
            yield found.block[ranges], parts

    def wrote(self, numbers: IntArray) -> None:
        """These blocks are written: send the parts that are whole by that. Raises RunError."""
        for _, parts in self._find_touched(numbers):
            with self._lock:
                np.subtract.at(self._left, parts[self._left[parts] > 0], 1)
                # Whose count came to nothing by these: it is 0 for the first time.
                whole = np.unique(parts[self._left[parts] == 0])
                self._left[whole] = -1
            for part in whole.tolist():
                self._upload.send(part, self._content, self._give_back)

    def _give_back(self, name: str, start_bytes: int, stop_bytes: int) -> None:
        self._targets[name].give_back(start_bytes, stop_bytes)

    def state(self) -> bytes:
        """Which parts were sent, for `merge` on process 0."""
        return self._upload.state()[2]

    def merge(self, state: bytes) -> None:
        """Add the parts that another process sent."""
        self._upload.merge(state)

    def commit(self, staging: SharedStaging) -> None:
        """Send the rest and make all of it visible; on process 0. Raises RunError."""
        self._upload.send_rest(self._content)
        self._upload.commit(self._content)
        if staging.owner is not None:
            staging.owner.discard()

    def close(self) -> None:
        """Close connections; what was sent stays."""
        self._upload.close()


def _list_files(conversion: Conversion) -> list[SentFile]:
    late = late_ranges(conversion.arrangement)
    return [
        SentFile(
            file.stored.name,
            file.stored.size_bytes,
            tuple(late.get(file.stored.name, ())),
            bool(file.checked_ranges),
        )
        for file in conversion.arrangement.files
    ]


def begun_target(
    conversion: Conversion,
    overwrite: bool,
    restart: bool,
    staging: str | os.PathLike[str] | None = None,
) -> Path | None:
    """The staging folder that an earlier run left, of a target to which a conversion could go.

    Raises as `check_target`.
    """
    target = conversion.target
    if not isinstance(target, PlacePath):
        return check_target(target, overwrite, restart)
    expect_writable(target)
    begun = check_target(spool_target(target, staging), overwrite, restart)
    if begun is None and not overwrite and target.exists():
        raise UsageError(
            f"the target exists: {target}\n"
            "expected a name that is free: choose another, or replace it with --overwrite"
        )
    return begun


def find_staged(target: PlacePath, staging: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of this machine with what is staged for an address. Raises RunError."""
    root = staging_folder(spool_target(target, staging))
    with refusals_explained("look for staged files", root):
        return root if root.is_dir() else None


def remove_staged(target: PlacePath, staging: str | os.PathLike[str] | None = None) -> None:
    """Throw away what is staged for an address.

    Raises:
        RunError: a process works there; the file system refuses.
    """
    root = find_staged(target, staging)
    if root is not None:
        with FolderLock.acquire(root), refusals_explained("delete the staging folder", root):
            remove_folder(root)
