"""Conversions to URLs: how a run uploads files while blocks are written.

The blocks are written to files in a staging folder on this machine, as for any target. As soon as
all blocks that touch a part of a file are done, separate threads (`PartSender`) send the part and
release its space on the local disk::

    blocks   |--0--|--1--|--2--|--3--|--4--|--5--|
    parts    |------A-------|------B-------|--C--|      A: when blocks 0, 1 and 2 are done

1. Each process counts the remaining blocks of each part. It sends a part if it writes all blocks
   that touch the part.
2. At the end the first process of the host sends the rest: parts that several processes wrote to,
   and parts with bytes that depend on all elements, such as checksums.
3. Parts that the store has are not sent again. The blocks of parts that neither the store nor this
   machine still has are written again.

Each host has its own staging folder. Each part is sent by a single host, which writes all blocks
that touch it (`divide_parts`). Blocks at the border of two hosts' parts are written by both hosts,
and count once for the checksums inside the files. If such a checksum covers padding, which belongs
to no block, the first host writes the whole file. It also writes the items.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks.block_io import BlockWriter, OpenFiles, find_written_ranges
from reshard.checkpoint.conversion.checksums import item_ranges, late_ranges
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.staging import Staging, expect_nothing_lost, staging_folder
from reshard.checkpoint.conversion.work_items import HostBlocks, WorkItems
from reshard.checkpoint.manifest import MANIFEST_NAME
from reshard.checkpoint.options import RunOptions
from reshard.checkpoint.processes import HostProcesses, Processes
from reshard.checkpoint.storage.filesystem import (
    Closing,
    FolderLock,
    remove_folder,
    translate_os_errors,
)
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.uploads import (
    PartSender,
    SentFile,
    Upload,
    list_local_targets,
    rank_save_folder,
)
from reshard.errors import RunError, UsageError
from reshard.runs import IntArray, distinct


class ConversionUpload(Closing):
    """The upload of a run's files, as a process of the run takes part in it.

    Args:
        conversion: the conversion that is run.
        target: the address of its target.
        conversion_id: the fingerprint of everything that determines the bytes of the files.
        processes: the processes of the run.
        here: the processes of this host, which share a staging folder.
        threads: the number of parts that are sent at a time.

    Raises the errors of `Upload`.
    """

    def __init__(
        self,
        conversion: Conversion,
        target: RemotePath,
        conversion_id: str,
        processes: Processes,
        here: HostProcesses,
        threads: int,
    ) -> None:
        self._processes, self.here = processes, here
        self.hosts = here.hosts
        self._upload = Upload(target, conversion_id, _list_files(conversion), MANIFEST_NAME)
        self._write_plan, self._written = conversion.write_plan, conversion.written_names
        self.spread: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._left: IntArray = np.zeros(0, dtype=np.int64)
        self._is_here: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._sender = PartSender(self._send, threads)

    def is_complete(self, staging: Staging, options: RunOptions) -> bool:
        """Return whether an earlier run completed the target; the same value on all processes.

        Process 0 raises the errors of `Upload.find_target`; the other processes raise RunError with
        the same message.
        """
        is_found = False
        try:
            if staging.is_owner and self._processes.rank == 0:
                is_found = self._upload.find_target(
                    overwrite=options.overwrite,
                    restart=options.restart,
                    is_resumed=staging.resumed,
                )
                if options.overwrite and not is_found and not options.discard_others:
                    expect_nothing_lost(self._upload.target, self._written)
            is_complete = bool(self._processes.share(is_found))
        except (UsageError, RunError) as error:
            # No work was begun: the refusal must not leave an empty staging folder.
            is_refusal = isinstance(error, UsageError) or self.here.host > 0
            if staging.is_owner and is_refusal and not staging.resumed:
                staging.discard()
            raise
        if is_complete and staging.is_owner:
            staging.discard()
        return is_complete

    def begin(
        self,
        staging: Staging,
        work_items: WorkItems,
        writer: BlockWriter,
        targets: OpenFiles[TargetFile],
        finished: NDArray[np.bool_],
    ) -> None:
        """Find the parts in the store, and clear `finished` for the blocks of lost parts.

        All processes call this; `finished` is only used on the first process of each host. Raises
        RunError.
        """
        self._content, self._work_items = staging.content, work_items
        self._writer, self._targets = writer, targets
        numbers = {file.name: number for number, file in enumerate(self._upload.files)}
        self._file_numbers = np.array([numbers[name] for name in writer.file_names], dtype=np.int64)
        self._upload.open_records(staging.content, self._processes.rank)
        if self._processes.rank == 0:
            self._upload.begin()
            self._processes.share(self._upload.state())
        else:
            self._upload.join(self._processes.share(None))
        if not staging.is_owner:
            return
        lost = self._upload.lost_parts(staging.content)
        done = np.flatnonzero(finished) if lost.any() else np.zeros(0, dtype=np.int64)
        for blocks, parts in self._find_touched(done):
            finished[done[blocks[lost[parts]]]] = False

    def divide(self, finished: NDArray[np.bool_]) -> HostBlocks:
        """Return the blocks that this host works on. All processes call it. Raises RunError.

        Args:
            finished: the blocks that were done on this host.
        """
        count = self._upload.grid.count
        if self.hosts == 1:
            self._is_here = np.ones(count, dtype=bool)
            return HostBlocks.alone(finished)
        packed = self._processes.collect(np.packbits(finished))
        firsts = [self.here.host_of.index(host) for host in range(self.hosts)]
        done = (
            np.array([np.unpackbits(packed[process], count=len(finished)) for process in firsts])
            > 0
        )
        touched = list(self._find_touched(np.arange(len(finished))))
        none: IntArray = np.zeros(0, dtype=np.int64)
        blocks = np.concatenate([none, *(indices for indices, _ in touched)])
        parts = np.concatenate([none, *(part_numbers for _, part_numbers in touched)])
        padded = self._find_padded()
        of_part, of_block = divide_parts(blocks, parts, done, count)
        of_part[padded | self._find_items()] = 0
        # Padding belongs to no block: all of its file is read back on the first host.
        is_needed = (~self._upload.sent | padded)[parts]
        does, is_any = done.copy(), np.zeros(len(finished), dtype=bool)
        does[of_part[parts[is_needed]], blocks[is_needed]] = True
        is_any[blocks[is_needed]] = True
        # Blocks that the store has are read only for their digests, and to add them to checksums.
        is_known: NDArray[np.bool_] = np.any(done, axis=0)
        rest = np.flatnonzero(~is_any & ~is_known)
        does[of_block[rest], rest] = True
        host = self.here.host
        self._is_here = of_part == host
        # The first of several hosts with a block counts it.
        counts = does.argmax(axis=0) == host
        own = np.flatnonzero(does[host] & ~done[host])
        return HostBlocks(own, is_known, counts, counts & done[host])

    def _find_padded(self) -> NDArray[np.bool_]:
        """Return the parts of files whose checksums cover bytes that no block writes.

        Also set `spread` to the files whose checksums cover exactly the bytes that blocks write.
        """
        written = np.zeros(len(self._upload.files), dtype=np.int64)
        rows, blocks = self._work_items.places(np.arange(self._work_items.count))
        for written_range in find_written_ranges(self._writer, rows, blocks):
            np.add.at(written, self._file_numbers[written_range.file], written_range.size)
        padded = np.zeros(self._upload.grid.count, dtype=bool)
        spread = set()
        for number, file in enumerate(self._write_plan.files):
            checked_bytes = sum(size for _, size in file.checked_ranges)
            if checked_bytes == written[number]:
                spread.add(file.stored.name)
            elif checked_bytes:
                span = self._upload.grid.parts_of(number)
                padded[span.start : span.stop] = True
        self.spread = frozenset(spread)
        return padded

    def _find_items(self) -> NDArray[np.bool_]:
        """Return the parts that contain bytes of items."""
        items = item_ranges(self._write_plan)
        return self._upload.parts_with([items.get(file.name, ()) for file in self._upload.files])

    def expect(self, left: IntArray, own: IntArray) -> None:
        """Count each part's remaining blocks: `left` on this host, `own` in this process."""
        everything = self._count(left)
        mine = everything if len(own) == len(left) else self._count(own)
        # A count of -1 marks a part that this process never sends by itself.
        is_own = (mine == everything) & ~self._upload.late_parts & self._is_here
        self._left = np.where(is_own, mine, -1)

    def _count(self, numbers: IntArray) -> IntArray:
        """Return the number of blocks that touch each part."""
        counts = np.zeros(self._upload.grid.count, dtype=np.int64)
        for _, parts in self._find_touched(numbers):
            counts += np.bincount(parts, minlength=len(counts))
        return counts

    def _find_touched(self, numbers: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield pairs, as columns: the index in `numbers` of a block, and a part it touches."""
        rows, blocks = self._work_items.places(numbers)
        for written_range in find_written_ranges(self._writer, rows, blocks):
            files = self._file_numbers[written_range.file]
            ranges, parts = self._upload.grid.touched(
                files, written_range.start, written_range.stop
            )
            yield written_range.block[ranges], parts

    def wrote(self, numbers: IntArray) -> None:
        """Send the parts that these written blocks complete.

        Raises RunError if an earlier part could not be sent.
        """
        for _, parts in self._find_touched(numbers):
            with self._lock:
                # `-=` would count a part once even if several blocks touch it.
                np.subtract.at(self._left, parts[self._left[parts] > 0], 1)
                # The parts that these blocks complete. The counts are then set to -1, so that no
                # part is sent twice.
                whole = distinct(parts[self._left[parts] == 0])
                self._left[whole] = -1
            for part in whole.tolist():
                self._sender.put(part)

    def _send(self, part: int) -> None:
        self._upload.send(part, self._content, self._release)

    def _release(self, name: str, start_bytes: int, stop_bytes: int) -> None:
        self._targets[name].release(start_bytes, stop_bytes)

    def state(self) -> bytes:
        """Return the parts that were sent, for `meet`, after waiting for parts in flight.

        Raises RunError.
        """
        self._sender.finish()
        return self._upload.state()[2]

    def meet(
        self, sent: Sequence[bytes], numbers: IntArray, digests: bytes
    ) -> Iterator[tuple[IntArray, bytes]]:
        """Send the remaining parts of other hosts, and collect all hosts' results on process 0.

        All processes call this when their blocks are done. Raises RunError.

        Args:
            sent: the parts that each process sent.
            numbers, digests: the blocks that the first process of each host knows to be done.
        """
        result = None
        if self.here.rank == 0:
            for state in sent:
                self._upload.merge(state)
            if self.here.host:
                self._send_rest()
                result = (numbers, digests, self.state())
        if self.hosts == 1:
            return
        for collected in self._processes.collect(result):
            if collected is not None and self._processes.rank == 0:
                self._upload.merge(collected[2])
                yield collected[:2]

    def _send_rest(self) -> None:
        """Send the parts of this host that no process sent, since several processes wrote to them.

        The first process of the host calls this, since it knows which parts the others sent. Raises
        RunError.
        """
        self._upload.send_rest(self._content, self._is_here)

    def commit(self, staging: Staging) -> None:
        """Send the rest and make the target visible; on process 0. Raises RunError."""
        self._send_rest()
        missing = np.flatnonzero(~self._upload.sent).tolist()
        if missing:
            number, start, stop = self._upload.grid.range_of(missing[0])
            raise RunError(
                f"bytes {start}:{stop} of {self._upload.files[number].name} were sent by no host; "
                "run the same command again, it continues"
            )
        self._upload.commit(self._content)
        if staging.is_owner:
            staging.discard()

    def stop(self) -> None:
        """Wait for the parts in flight; later blocks cause no further part to be sent."""
        self._sender.close()

    def close(self) -> None:
        """Close connections; the sent parts stay in the store."""
        self._sender.close()
        self._upload.close()


def divide_parts(
    blocks: IntArray, parts: IntArray, done: NDArray[np.bool_], count: int
) -> tuple[IntArray, IntArray]:
    """Assign a host to each part, and to each block.

    Blocks that no host has done are divided into a stretch of equal length for each host. A part is
    assigned to the host that has done most of its blocks; if no host has done any, to the host
    whose stretch contains most of them.

    Args:
        blocks, parts: the pairs of a block and a part that touch each other, shape `(pairs,)`.
        done: the blocks that each host did before, shape `(hosts, blocks)`.
        count: the number of parts.

    Returns:
        The host of each part, shape `(count,)`, and of each block.

    >>> nothing = np.zeros((2, 4), dtype=bool)
    >>> divide_parts(np.array([0, 1, 1, 2, 3]), np.array([0, 0, 1, 1, 2]), nothing, 3)
    (array([0, 0, 1]), array([0, 0, 1, 1]))
    """
    hosts = len(done)
    left = ~done.any(axis=0)
    before: IntArray = np.cumsum(left) - left
    of_block = np.minimum(before * hosts // max(int(left.sum()), 1), hosts - 1)
    have, expected = (
        np.stack([np.bincount(parts[row[blocks]], minlength=count) for row in rows])
        for rows in (done, of_block == np.arange(hosts)[:, None])
    )
    # Parts without blocks, such as a part of a header, are assigned to the first host.
    return np.where(have.any(axis=0), have.argmax(axis=0), expected.argmax(axis=0)), of_block


def _list_files(conversion: Conversion) -> list[SentFile]:
    late = late_ranges(conversion.write_plan)
    return [
        SentFile(
            file.stored.name,
            file.stored.size_bytes,
            tuple(late.get(file.stored.name, ())),
            bool(file.checked_ranges),
        )
        for file in conversion.write_plan.files
    ]


def find_staged(target: RemotePath, staging: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders of this machine in which runs and saves staged files for an address.

    Raises RunError.
    """
    targets = list_local_targets(target, staging)
    roots = [staging_folder(target) for target in targets] + [
        rank_save_folder(target) for target in targets
    ]
    with translate_os_errors("look for staged files", roots[0]):
        return [root for root in roots if root.is_dir()]


def remove_staged(target: RemotePath, staging: str | os.PathLike[str] | None = None) -> None:
    """Delete the staged files for an address.

    Raises:
        RunError: a process works in the staging folder; the file system refuses.
    """
    for root in find_staged(target, staging):
        with FolderLock.acquire(root), translate_os_errors("delete the staging folder", root):
            remove_folder(root)
