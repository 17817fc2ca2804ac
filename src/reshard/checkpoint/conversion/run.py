"""Runs of planned conversions.

1. Open the staging folder: a new folder, or the folder of an earlier run of the same conversion.
2. Create every target file, at its full size, with its header.
3. In threads: read a batch of blocks, digest each block, write them. Blocks that an earlier run
   finished are skipped.
4. Whenever enough has been written, sync the files and record the blocks in the journal, so that
   all blocks in the journal are on disk.
5. Sync all files, check that the source did not change, write the other files, the manifest last,
   and commit.

An error or ctrl-C leaves the staging folder, and the same command continues from it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from reshard._validation import check_used
from reshard.checkpoint.blocks.block_io import (
    BlockReader,
    BlockWriter,
    OpenFiles,
    Workspace,
    open_sources,
)
from reshard.checkpoint.blocks.grid import block_digest
from reshard.checkpoint.changes.computed_tensors import ChangedReader
from reshard.checkpoint.changes.source_digests import SourceDigests
from reshard.checkpoint.conversion.checksums import ChecksumTracker
from reshard.checkpoint.conversion.conversion import (
    HIDDEN,
    Conversion,
    ConversionReport,
    describe_counts,
    find_hidden,
)
from reshard.checkpoint.conversion.journal import FinishedBlocks
from reshard.checkpoint.conversion.staging import Staging, expect_nothing_lost, open_shared
from reshard.checkpoint.conversion.work_items import Batch, BlockDigests, HostBlocks
from reshard.checkpoint.manifest import MANIFEST_NAME, manifest_of
from reshard.checkpoint.options import RunOptions
from reshard.checkpoint.processes import HostProcesses, OneProcess, OtherProcessError, Processes
from reshard.checkpoint.storage.filesystem import (
    describe_two_renames,
    open_new,
    read_json_file,
    sync_folders_under,
    translate_os_errors,
    write_files,
)
from reshard.checkpoint.storage.local_files import SourceFile, TargetFile
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.threads import Progress, StoppedError, check_stop, run_in_threads
from reshard.elements import CastCounts
from reshard.errors import (
    DigestError,
    FormatError,
    InterruptedRunError,
    ReshardError,
    RunError,
    UsageError,
)
from reshard.log import LOGGER
from reshard.runs import IntArray
from reshard.system import release_freed_memory, sync

if TYPE_CHECKING:
    from reshard.checkpoint.conversion.uploads import ConversionUpload
    from reshard.checkpoint.keywords import RunArguments


# A written batch, the concatenated digests of its blocks, and the files that contain them.
_Written = tuple[Batch, bytes, set[str]]


class _ConversionRun:
    """A run of a conversion, inside its staging folder."""

    def __init__(
        self,
        conversion: Conversion,
        staging: Staging,
        sources: OpenFiles[SourceFile],
        conversion_id: str,
        processes: Processes,
        threads: int,
        options: RunOptions,
        upload: ConversionUpload | None,
    ) -> None:
        self.conversion = conversion
        self.upload = upload
        self.staging = staging
        self.processes = processes
        self.here: Processes = processes if upload is None else upload.here
        self.sources = sources
        self.conversion_id = conversion_id
        self.options = options
        self.size = conversion.workspace_size(options.extra_bytes)
        write_plan = conversion.write_plan
        self.work_items = work_items = conversion.work_items
        sizes = {file.stored.name: file.stored.size_bytes for file in write_plan.files}
        self.targets = OpenFiles(
            lambda name: TargetFile(
                staging.content / name, sizes[name], is_sparse=upload is not None
            )
        )
        self.source_digests = SourceDigests(sources, conversion.apart)
        self.checksums = ChecksumTracker(conversion.source, write_plan, staging.content)
        self.reader, self.writer = self._open(self.checksums)
        self.finished = np.zeros(work_items.count, dtype=bool)
        self.blocks: HostBlocks
        self.digests = BlockDigests(work_items)
        self.size_bytes = int(work_items.target.tensor_bytes.sum())
        if staging.resumed:
            self._note_journal(staging.finished)
        self.resumed_bytes = self.finished_bytes
        self.threads = threads
        self.by_process: tuple[tuple[int, int], ...] = ((0, 0),)
        self.buffers_by_process: tuple[int, ...] = (0,)
        self.counts = CastCounts()
        self.notes: tuple[str, ...] = ()
        self._lock = threading.Lock()

    @cached_property
    def unseen(self) -> tuple[ChangedReader, BlockWriter]:
        """The reader and the writer of blocks that count for checksums on another host."""
        return self._open(None)

    def _open(self, checksums: ChecksumTracker | None) -> tuple[ChangedReader, BlockWriter]:
        """Return the reader and the writer of blocks, which also update checksums."""
        source, target = self.work_items.source, self.work_items.target
        reader = ChangedReader(
            source,
            target,
            self.conversion.computed,
            self.sources,
            self.source_digests.watching(checksums.watch_source if checksums else None),
            self._count,
            self.source_digests,
        )
        watch = checksums.watch_target if checksums else None
        return reader, BlockWriter(target, self.targets, watch)

    def _count(self, counts: CastCounts) -> None:
        with self._lock:
            self.counts += counts

    def _note(self, numbers: IntArray, digests: bytes) -> None:
        self.finished[numbers] = True
        self.digests.note(numbers, digests)

    def _note_journal(self, finished: FinishedBlocks) -> None:
        tensors, blocks, digests = finished
        self._note(self.work_items.first_block[tensors] + blocks, digests)

    @property
    def finished_bytes(self) -> int:
        """The bytes of the blocks that are on disk."""
        return self.work_items.size_bytes(np.flatnonzero(self.finished))

    def begin(self) -> None:
        """Create the files, and send the other processes the set of blocks that are done."""
        if self.staging.is_owner:
            self._make_files()
            if self.finished.any() and not self.staging.is_untouched:
                self._compare_staged()
        if self.upload is not None:
            self.upload.begin(
                self.staging, self.work_items, self.writer, self.targets, self.finished
            )
        # A bit for each block keeps the message to the other processes small.
        packed = self.here.share(np.packbits(self.finished))
        self.finished[:] = np.unpackbits(packed, count=len(self.finished)).astype(bool)
        if self.upload is None:
            self.blocks = HostBlocks.alone(self.finished)
        else:
            self.blocks = self.upload.divide(self.finished)
            self.upload.expect(self.blocks.numbers, self._share(self.blocks.numbers))
        # Counted again: changed blocks and lost parts of uploads are unfinished now, and other
        # hosts have finished blocks too.
        self.resumed_bytes = self.work_items.size_bytes(np.flatnonzero(self.blocks.is_known))

    def _make_files(self) -> None:
        """Create every target file at its full size, with its header."""
        if self.staging.is_owner:
            files = [file.stored.name for file in self.conversion.write_plan.files]
            self.staging.expect_names_apart([*files, *self.conversion.companions])
        for file in self.conversion.write_plan.files:
            path = self.staging.content / file.stored.name
            with translate_os_errors("look at what an earlier run left", path):
                is_whole = path.exists() and path.stat().st_size == file.stored.size_bytes
            if self.resumed_bytes and not is_whole:
                raise RunError(
                    f"{path} is not what an earlier run left, though its journal lists finished "
                    "blocks; --restart starts over"
                )
            with translate_os_errors("make the folder of a file", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            # The lookup opens the file, which creates it, even if it does not have known bytes.
            target = self.targets[file.stored.name]
            for offset, content in file.known_bytes():
                target.write(memoryview(bytearray(content)), offset)
        if not self.resumed_bytes:
            # Their sizes and names must be durable before the journal lists blocks in them.
            for target in self.targets:
                target.sync()
            with translate_os_errors("sync the staging folder", self.staging.content):
                sync_folders_under(self.staging.content)

    def _compare_staged(self) -> None:
        """Mark as unfinished the staged blocks whose bytes differ from the journal's digests."""
        numbers = np.flatnonzero(self.finished)

        def find_changed(batch: Batch, workspace: Workspace) -> IntArray:
            sections = reader.read(batch.written, workspace)
            digests = [block_digest(block) for blocks in sections for block in blocks]
            # Only one of several copies is read; the others may differ, so they are written again.
            has_copies = [
                self.writer.has_copies(section.kind, section.block)
                for section in batch.written
                for _ in section.rows
            ]
            expected = map(bytes, self.digests.found[batch.numbers])
            same = [a == b for a, b in zip(digests, expected, strict=True)]
            changed: IntArray = batch.numbers[~np.array(same) | np.array(has_copies)]
            return changed

        with contextlib.closing(self.checksums.staged()) as staged:
            reader = BlockReader(self.work_items.target, staged)
            batches = self.work_items.batches(numbers, self.size.batch_bytes)
            memory = self.size.new_workspace
            changed = [*run_in_threads(batches, find_changed, memory, self.threads)]
        again = np.concatenate(changed)
        self.finished[again] = False
        self.notes += (
            f"others could have changed what an earlier run staged: {len(numbers)} blocks were "
            f"compared with their digests, {len(again)} of them were done again",
        )

    def _share(self, numbers: IntArray) -> IntArray:
        """Return this process's share of blocks, in the order of the source's tensors.

        Every process of a host lists the same blocks, and takes a stretch of equal length.
        """
        rank, size = self.here.rank, self.here.size
        return numbers[len(numbers) * rank // size : len(numbers) * (rank + 1) // size]

    def batches(self) -> Iterator[Batch]:
        """Yield this process's blocks in batches; in a batch, all count for checksums or none."""
        own = self._share(self.blocks.numbers)
        counts = self.blocks.counts[own]
        for numbers in (own[counts], own[~counts]):
            yield from self.work_items.batches(numbers, self.size.batch_bytes)

    def work(self, batch: Batch, workspace: Workspace) -> _Written:
        """Read, digest and write the blocks of a batch."""
        counts = self.blocks.counts[batch.numbers[0]]
        reader, writer = (self.reader, self.writer) if counts else self.unseen
        blocks, digests = reader.read(batch.read, batch.written, workspace)
        files = writer.write(batch.written, blocks, workspace)
        if self.upload is not None:
            self.upload.wrote(batch.numbers)
        return batch, b"".join(itertools.chain.from_iterable(digests)), files

    def move_blocks(self) -> None:
        """Move all remaining blocks, and record them in the journal once they are on disk."""
        progress, stop = self.options.progress, self.options.stop
        check_stop(stop)
        done_bytes = self.resumed_bytes
        waiting: list[_Written] = []
        waiting_bytes = 0
        memory = self.size.new_workspace
        results = run_in_threads(self.batches(), self.work, memory, self.threads)
        try:
            for done in results:
                # A process whose partner has failed would otherwise work until the end for nothing.
                self.processes.check()
                batch = done[0]
                waiting.append(done)
                done_bytes += batch.size_bytes
                waiting_bytes += batch.size_bytes
                check_stop(stop)
                if progress is not None:
                    name = self.work_items.last_name(batch)
                    progress(Progress(done_bytes, self.size_bytes, self.resumed_bytes, name))
                if waiting_bytes >= self.options.sync_bytes:
                    # Taken off the list first: after a failed sync, the next sync of the file
                    # succeeds although the data are lost, so these blocks must not be recorded by
                    # the second try below.
                    these, waiting, waiting_bytes = waiting, [], 0
                    self._record(these)
        except BaseException:
            # The threads end first: they write to the files that are synced below.
            results.close()
            # Record finished blocks, if the disk still accepts writes.
            with contextlib.suppress(RunError):
                self._record(waiting)
            raise
        self._record(waiting)

    def _record(self, done: list[_Written]) -> None:
        if not done:
            return
        # The data are synced before the journal lists the blocks.
        for name in sorted(set().union(*(files for _, _, files in done))):
            self.targets[name].sync()
        numbers = np.concatenate([batch.numbers for batch, _, _ in done])
        digests = b"".join(digests for _, digests, _ in done)
        tensors, blocks = self.work_items.places(numbers)
        self.staging.journal.append_blocks(tensors, blocks, digests)
        self._note(numbers, digests)

    def _add_earlier(self) -> None:
        """Add the blocks that earlier runs wrote to the checksums of files."""
        if self.checksums.watch_target is not None:
            earlier = self._share(np.flatnonzero(self.blocks.earlier))
            with contextlib.closing(self.checksums.staged()) as staged:
                for batch in self.work_items.batches(earlier, self.size.batch_bytes):
                    self.writer.show_written(batch.written, staged)

    def meet(self) -> None:
        """Wait for all processes, and collect on process 0 the results of each."""
        # If the source changed during the run, the target would mix old and new elements.
        for source in self.sources:
            source.check_unchanged()
        # Before the checksums are collected, which need every block of a file.
        self._add_earlier()
        read = sum(source.read_bytes for source in self.sources)
        written = sum(target.written_bytes for target in self.targets)
        buffers = self.threads * self.size.size_bytes
        sent = self.upload.state() if self.upload is not None else b""
        done = self.processes.collect(
            (read, written, buffers, self.counts, sent, self.checksums.state())
        )
        self.by_process = tuple((read, written) for read, written, *_ in done)
        self.buffers_by_process = tuple(buffers for _, _, buffers, *_ in done)
        self.counts = sum((counts for _, _, _, counts, *_ in done), CastCounts())
        if self.staging.is_owner and self.here.size > 1:
            for record in self.staging.other_records():
                self._note_journal(record.finished)
        if self.staging.is_owner:
            for rank, (*_, state) in enumerate(done):
                if rank != self.processes.rank:
                    self.checksums.merge(state)
        if self.upload is not None:
            if self.staging.is_owner and self.upload.here.host:
                self.checksums.close_targets(self.targets, self.upload.spread)
            own = np.flatnonzero(self.finished)
            digests = self.digests.found[own].tobytes()
            for result in self.upload.meet([sent for *_, sent, _ in done], own, digests):
                self._note(*result)
        if self.processes.rank:
            return
        missing = int(np.count_nonzero(~self.finished))
        if missing:
            raise RunError(
                f"{missing} blocks are recorded in no journal of {self.staging.content.parent}; "
                "its file system does not show one process what another wrote. Run the same "
                "command again, it continues"
            )

    def finish(self) -> None:
        """Write the files without tensors, the manifest last, and commit; only on process 0."""
        if self.processes.rank or not self.staging.is_owner:
            self.processes.share(None)
            if self.staging.is_owner:
                # The folder of another host: all of its parts are in the store.
                self.staging.discard()
            return
        self._write_rest()
        # The other processes wait here, so that the target is complete when a run returns on any
        # process.
        if self.upload is not None:
            self.upload.commit(self.staging)
        elif not self.staging.commit(self.conversion.open_bits):
            self.notes += (describe_two_renames(self.conversion.target),)
        self.processes.share(True)

    def _write_rest(self) -> None:
        # 1. Compare the checksums of the source's files, and write the target's; then sync all
        # files, and check that the source did not change.
        self.checksums.check_sources(self.sources)
        spread = self.upload.spread if self.upload is not None else ()
        items = self.checksums.complete_targets(self.sources, self.targets, spread)
        for target in self.targets:
            target.sync()
        for source in self.sources:
            source.check_unchanged()
        # 2. Files that are copied, and those that the format adds, such as an index.
        content, write_plan = self.staging.content, self.conversion.write_plan
        added = dict(self.conversion.format.final_files(write_plan))
        copied = dict(self.conversion.companions)
        for name in find_hidden(copied, added):
            del copied[name]
            self.notes += (f"another file that is not copied: {name} ({HIDDEN})",)
        with translate_os_errors("write the other files", content):
            write_files(content, {**copied, **added})
        self.notes += tuple(_describe_damaged_configs(content, copied))
        with translate_os_errors("write the manifest", content):
            # 3. The manifest is last, as it contains the digests of everything written before.
            manifest = manifest_of(
                write_plan.format,
                self.conversion_id,
                write_plan.mesh,
                tuple(file.stored for file in write_plan.files),
                self.work_items.target,
                self.digests.columns(),
                tuple(copied),
                items,
            )
            with os.fdopen(open_new(content / MANIFEST_NAME), "wb") as file:
                file.writelines(piece.encode() for piece in manifest.json_pieces())
                file.flush()
                sync(file.fileno())


def _describe_damaged_configs(folder: Path, copied: Collection[str]) -> Iterator[str]:
    """Yield a note on each copied config of a model that is damaged.

    A conversion that needs the config has raised this as an error.
    """
    for name in ("config.json", "adapter_config.json"):
        try:
            if name in copied:
                read_json_file(folder / name)
        except FormatError as error:
            problem = str(error).removeprefix(f"{folder / name} ")
            yield f"{name} {problem}; it was copied as it is, and programs cannot load it"


def run_conversion(
    conversion: Conversion, options: RunOptions | None = None, **arguments: Unpack[RunArguments]
) -> ConversionReport:
    """Run a planned conversion.

    Args:
        conversion: from `plan_conversion`.
        options: how to run it; or its fields as keywords (see `RunOptions`).

    Raises:
        UsageError: a target that exists, or that contains files that are not part of a checkpoint;
            too small a memory limit.
        MissingExtraError: xxhash (or, for PyTorch's archives, zlib-ng) is not installed.
        RunError: a full disk, a read-only target, an interruption, a source that changed.
        DigestError: a source whose bytes differ from the digests in its manifest.
    """
    import hashlib
    import socket

    options = RunOptions.of(options, arguments)
    began_s = time.monotonic()
    processes = options.processes or OneProcess()
    expect_staging_read(conversion.target, options.staging)
    LOGGER.info("%s: conversion of %s begins", conversion.target, conversion.source.folder)
    # 1. Errors of the request are raised before anything is written.
    threads = conversion.expect_runnable(options.extra_bytes, options.threads)
    # 2. Open the sources, and determine the fingerprint of the conversion and its threads.
    # Derived files are created on the target's disk: a folder for temporary files may be in memory.
    target, here = conversion.target, processes
    # Hosts are distinguished by their names, which all processes exchange once.
    machine = socket.gethostname()
    machines = processes.collect(machine)
    if options.threads is None:
        # The processes of one machine share its cores: the default is for all of them together.
        usual = choose_threads(None, conversion.source.folder, conversion.target)
        threads = min(threads, -(-usual // machines.count(machine)))
    address = target if isinstance(target, RemotePath) else None
    if address is not None:
        # A target folder is staged once, for all hosts; for an address each host has its own
        # staging folder.
        here = hosts = HostProcesses(processes, machines)
        from reshard.checkpoint.conversion.uploads import ConversionUpload
        from reshard.checkpoint.storage.uploads import local_target

        target = local_target(address, options.staging, hosts.host)
    sources = open_sources(conversion.source, target.parent)
    run: _ConversionRun | None = None
    upload: ConversionUpload | None = None
    try:
        description = conversion.description(sources)
        # Equal fingerprints mean equal results: only the same conversion resumes a staging folder.
        text = json.dumps(description, sort_keys=True).encode()
        conversion_id = hashlib.blake2b(text, digest_size=16).hexdigest()
        if address is not None:
            upload = ConversionUpload(conversion, address, conversion_id, processes, hosts, threads)
        # 3. Work in the staging folder, unless an earlier run has finished the conversion.
        staging = Staging(target, options, conversion.written_names, conversion.single_file)
        with open_shared(here, staging, conversion_id, description) as staged:
            if staged.already_complete or (
                upload is not None and upload.is_complete(staged, options)
            ):
                LOGGER.info("%s: an earlier run did all of it", conversion.target)
                return _report(conversion, began_s, None)
            try:
                run = _ConversionRun(
                    conversion,
                    staged,
                    sources,
                    conversion_id,
                    processes,
                    threads,
                    options,
                    upload,
                )
                LOGGER.info("%s: %d bytes were done before", conversion.target, run.resumed_bytes)
                run.begin()
                # The memory that planning freed is returned to the system before the buffers grow.
                release_freed_memory(len(conversion.write_plan.tensors))
                run.move_blocks()
                run.source_digests.verify_rest(threads, options.stop)
                run.meet()
                run.finish()
            except ReshardError as error:
                # Parts of uploads are listed in the folder, for `reshard clean`.
                if _is_final(error) and upload is None and staged.is_owner and not staged.resumed:
                    with contextlib.suppress(RunError):
                        staged.discard()
                raise
            finally:
                # Parts in flight release space of the target files, which must still be open.
                if upload is not None:
                    upload.stop()
                if run is not None:
                    run.targets.close()
            LOGGER.info("%s: all of it is done", conversion.target)
            return _report(conversion, began_s, run)
    except BaseException as error:
        # The other processes would wait for this one until their timeout.
        processes.fail(str(error) or type(error).__name__, is_final=_is_final(error))
        LOGGER.warning("%s: not converted: %s", conversion.target, error or type(error).__name__)
        if isinstance(error, DigestError) and conversion.digest_hint:
            raise DigestError(f"{error}. {conversion.digest_hint}") from error
        if not isinstance(error, KeyboardInterrupt | StoppedError):
            raise
        done = (
            f" when {run.finished_bytes} of {run.size_bytes} bytes were on the disk" if run else ""
        )
        raise InterruptedRunError(
            f"interrupted{done}; the same command continues, with --restart it starts over"
        ) from None
    finally:
        sources.close()
        if upload is not None:
            upload.close()


def find_begun_run(conversion: Conversion, options: RunOptions) -> Path | None:
    """Return the staging folder that an earlier run of a conversion left, or None.

    Raises UsageError and RunError if the conversion would be refused for its target.
    """
    target, overwrite = conversion.target, options.overwrite
    expect_staging_read(target, options.staging)
    if not isinstance(target, RemotePath):
        written, file = conversion.written_names, conversion.single_file
        return Staging(target, options, written, file).check()
    from reshard.checkpoint.storage.uploads import expect_writable, local_target

    expect_writable(target)
    begun = Staging(local_target(target, options.staging), options).check()
    if overwrite and not options.discard_others:
        expect_nothing_lost(target, conversion.written_names)
    if begun is None and not overwrite and target.exists():
        raise UsageError(
            f"the target exists: {target}\n"
            "expected a name that is free: choose another, or replace it with --overwrite"
        )
    return begun


def expect_staging_read(target: Path, staging: str | os.PathLike[str] | None) -> None:
    """Refuse a staging folder for a target that has its own. Raises `UsageError`."""
    check_used(
        f"staging {staging!r}",
        staging is None or isinstance(target, RemotePath),
        "files for a target that is an address wait there, and those of a folder wait in a folder "
        "beside it",
    )


def _is_final(error: BaseException) -> bool:
    """Return whether an error is due to wrong use or bad input, so that a second try fails too."""
    if isinstance(error, OtherProcessError):
        return error.is_final
    return isinstance(error, ReshardError) and not isinstance(error, RunError)


def _report(conversion: Conversion, began_s: float, run: _ConversionRun | None) -> ConversionReport:
    """Return the report of a run, which is None if an earlier run had completed the target."""
    size_bytes = int(conversion.work_items.target.tensor_bytes.sum())
    return ConversionReport(
        conversion.target,
        len(conversion.write_plan.tensors),
        len(conversion.write_plan.files),
        size_bytes,
        sum(read for read, _ in run.by_process) if run else 0,
        sum(written for _, written in run.by_process) if run else 0,
        run.resumed_bytes if run else size_bytes,
        time.monotonic() - began_s,
        run is None,
        (*conversion.notes, *((*run.notes, *describe_counts(run.counts)) if run else ())),
        run.by_process if run else ((0, 0),),
        run.buffers_by_process if run else (0,),
        conversion.write_plan.copy_bytes,
    )
