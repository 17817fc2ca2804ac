"""Saves of `torch.distributed.checkpoint` into checkpoints of any writable format.

1. The coordinator plans the files of all ranks, and creates them next to the target, with their
   full size and the bytes that are already known (`places`).
2. Every rank writes its boxes into them, a few megabytes at a time, and reports their checksums.
   Values that are not tensors are written into a separate file of the rank.
3. The coordinator completes the files, writes the manifest, and renames the folder in one step
   (`saves`). To an address, ranks upload the files that they alone write, and the coordinator
   makes the whole checkpoint visible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.futures import Future

from reshard.binding import FileRange
from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest, tensor_digest
from reshard.checkpoint.contents import StoredFile, StoredItem, TensorDigest
from reshard.checkpoint.formats.registry import written_format
from reshard.checkpoint.formats.torch_dcp import SUFFIX
from reshard.checkpoint.formats.write_plan import WritePlan
from reshard.checkpoint.manifest import MANIFEST_NAME, manifest_of
from reshard.checkpoint.storage.filesystem import open_new, remove_folder, translate_os_errors
from reshard.checkpoint.storage.local_files import AlignedBuffer, TargetFile
from reshard.checkpoint.storage.range_checksums import RangeChecksums, crc32, shift_crc32
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.remote_paths import RemotePath, as_path
from reshard.checkpoint.storage.threads import run_in_threads
from reshard.checkpoint.storage.uploads import expect_writable
from reshard.errors import RunError, UsageError
from reshard.execution.arrays import TorchTensors
from reshard.layout import Box
from reshard.system import name_host, sync
from reshard.torch.storage.places import (
    RankPlaces,
    WritePlace,
    as_paths,
    check_values,
    find_places,
    plan_save_files,
)
from reshard.torch.storage.saves import AddressSave, FolderSave, OwnFiles, RankUpload, expect_free


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """A rank's report of an item that it wrote: `size_bytes` of the range at `start_bytes`.

    `crc32` is the contribution to the checksum of that range, if the file has one (`moved` in
    `range_checksums`); `digest` is the digest of a tensor that the rank wrote completely. `content`
    is the content of a value that the coordinator writes.
    """

    file: str
    start_bytes: int
    size_bytes: int
    crc32: int | None = None
    digest: TensorDigest | None = None
    content: bytes | None = None


class StorageWriter(storage.StorageWriter):  # type: ignore[misc]
    """Writes a checkpoint of any format, for `torch.distributed.checkpoint.save`.

    ::

        state = {"model": get_model_state_dict(model)}
        writer = StorageWriter("step-1000", format="safetensors")
        torch.distributed.checkpoint.save(state, storage_writer=writer)

    All ranks write into a shared folder. The checkpoint appears whole or not at all; other files in
    the folder are kept.

    To an address of an object store, each rank uploads the files that it alone writes, each part as
    soon as it is written; staged data needs space on its host. Ranks that write a common file, as
    with `safetensors`, must be on one host. Everything below the address belongs to the checkpoint.

    Args:
        path: the folder or address; the `checkpoint_id` of a save replaces it.
        format: `torch-dcp`, `sharded-safetensors` (a file per rank), `safetensors` (whole tensors,
            assembled by the ranks), or another writable format.
        overwrite: replace an existing checkpoint, which is kept until the end.
        thread_count: the number of writing threads on each rank; 4 when None.
        sync_files: wait until all data is on the disk.
        metadata: text for the headers of safetensors files.
        staging: the folder for staged files on each host; the user's cache folder when None.

    Raises:
        UsageError: an invalid path, a read-only address, a format that cannot be written, or an
            invalid number of threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "torch-dcp",
        overwrite: bool = True,
        thread_count: int | None = None,
        sync_files: bool = True,
        metadata: Mapping[str, str] | None = None,
        staging: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.path = _as_target(path)
        self.format = written_format(format, to_whole=False)
        self.overwrite = overwrite
        self.thread_count = choose_threads(thread_count, argument="thread_count")
        self.sync_files = sync_files
        self.metadata = dict(metadata or {})
        self.save_id = str(uuid.uuid4())
        self.staging = staging
        self.is_coordinator = False
        self._write_plan: WritePlan | None = None
        self._save: FolderSave | AddressSave | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The location of the new checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the path is a location in a folder or a store that can be written to."""
        text = str(checkpoint_id)
        if "://" in text:
            try:
                _as_target(text)
            except UsageError:
                return False
            return True
        parent = next((path for path in Path(text).absolute().parents if path.exists()), None)
        return parent is not None and os.access(parent, os.W_OK)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, at another location if `checkpoint_id` is given."""
        if checkpoint_id:
            self.path = _as_target(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        self._forget()

    def storage_meta(self) -> StorageMeta:
        """Return the path and the unique id of this save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take part in a save.

        Raises:
            UsageError: a save in which ranks do not communicate.
        """
        self.is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: ranks that do not talk cannot finish one checkpoint; save "
                "with collectives, or with PyTorch's FileSystemWriter, which reshard reads"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged.

        Raises:
            UsageError: an existing checkpoint, without `overwrite`; values that the format cannot
                store.
        """
        check_values(self.format, [plan])
        if isinstance(self.path, RemotePath):
            # The coordinator asks the store whether a checkpoint exists.
            return dataclasses.replace(plan, storage_data=name_host())
        if not self.overwrite:
            expect_free(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files, and return the plans with the place of every item.

        Raises:
            UsageError: data that the format cannot represent; at an address, an existing checkpoint
                without `overwrite`, or ranks of several hosts that would write the same file.
            RunError: files that cannot be created, for example on a full disk; errors of the store.
        """
        self._forget()
        write_plan = plan_save_files(self.format, plans, self.metadata)
        if isinstance(self.path, RemotePath):
            sent = AddressSave(self.path, self.save_id, write_plan, self.staging)
            self._save = sent
            places = find_places(write_plan, plans, str(sent.folder))
            hosts = [plan.storage_data for plan in plans]
            own = sent.begin(places, hosts, overwrite=self.overwrite)
            places = [
                dataclasses.replace(of_rank, own_files=files)
                for of_rank, files in zip(places, own, strict=True)
            ]
        else:
            folder_save = FolderSave(self.path, write_plan, sync_files=self.sync_files)
            self._save = folder_save
            folder_save.begin()
            places = find_places(write_plan, plans, str(folder_save.folder))
        self._write_plan = write_plan
        return [
            dataclasses.replace(plan, storage_data=of_rank)
            for plan, of_rank in zip(plans, places, strict=True)
        ]

    def _forget(self) -> None:
        """Close the resources of an earlier save."""
        if isinstance(self._save, AddressSave):
            self._save.close()
        self._write_plan = self._save = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        """Write this rank's items.

        Raises:
            RunError: files that cannot be written; a folder that this rank cannot access.
        """
        places: RankPlaces = plan.storage_data
        own: OwnFiles | None = places.own_files
        if own is None:
            folder = Path(places.folder)
            if not folder.is_dir():
                raise RunError(
                    f"rank {places.rank} does not see {folder}, which the coordinator made; save "
                    "into a folder that all ranks share"
                )
            written = self._write_values(plan, planner, folder, places.rank)
            written += self._write_tensors(plan, planner, dict.fromkeys(_names(places), folder))
        else:
            written = self._send(plan, planner, own)
        future: Future = Future()
        future.set_result(written)
        return future

    def _send(self, plan: SavePlan, planner: SavePlanner, own: OwnFiles) -> list[Any]:
        """Write this rank's items to staged files, and upload the files that it alone writes."""
        places: RankPlaces = plan.storage_data
        folder = own.folder_of(places.rank)
        try:
            with own.begin(folder) as upload:
                folders = dict.fromkeys(_names(places) - own.names, Path(places.folder))
                written = self._write_tensors(plan, planner, folders, upload)
                # Within the `with`, so that a failure aborts the upload.
                upload.finish()
        finally:
            with translate_os_errors("delete staged files", folder):
                remove_folder(folder)
        return self._write_values(plan, planner, None, places.rank) + written

    def _write_values(
        self, plan: SavePlan, planner: SavePlanner, folder: Path | None, rank: int
    ) -> list[Any]:
        """Write values that are not tensors consecutively, or send them to the coordinator."""
        items = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if not items:
            return []
        # File 1 of the rank, in PyTorch's numbering; file 0 has its tensors.
        name = f"__{rank}_1{SUFFIX}"
        written, at = [], 0
        with contextlib.ExitStack() as stack:
            file = None
            if folder is not None:
                stack.enter_context(
                    translate_os_errors("write values that are no tensors", folder / name)
                )
                file = stack.enter_context((folder / name).open("wb"))
            for item in items:
                content = planner.resolve_data(item).getbuffer()
                written_item = WrittenItem(name, at, content.nbytes)
                if file is not None:
                    file.write(content)
                else:
                    written_item = dataclasses.replace(written_item, content=bytes(content))
                written.append(storage.WriteResult(item.index, content.nbytes, written_item))
                at += content.nbytes
            if file is not None:
                file.flush()
                if self.sync_files:
                    sync(file.fileno())
        return written

    def _write_tensors(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        folders: Mapping[str, Path],
        upload: RankUpload | None = None,
    ) -> list[Any]:
        """Write the boxes of tensors into files in their folders, or into those of `upload`."""
        places: RankPlaces = plan.storage_data
        sizes = {place.file: place.file_bytes for place in places.places if place is not None}
        targets: OpenFiles[TargetFile] = OpenFiles(
            lambda name: TargetFile(folders[name] / name, sizes[name])
        )

        def tasks() -> Iterator[_TensorWrite]:
            # A planner may allocate a tensor on request: ask it late, in a single thread.
            for item, place in zip(plan.items, places.places, strict=True):
                if item.type != WriteItemType.BYTE_IO:
                    # Files that several ranks write are in `folders`, and uploaded by the
                    # coordinator.
                    own = None if place is None or place.file in folders else upload
                    yield _TensorWrite(item, place, planner.resolve_data(item).detach(), own)

        work = partial(_write_box, targets=targets)
        buffer = partial(AlignedBuffer, 0)
        try:
            written = [*run_in_threads(tasks(), work, buffer, self.thread_count)]
            # Files that are uploaded are deleted afterwards, and need not outlast a crash.
            if self.sync_files and places.own_files is None:
                for target in targets:
                    target.sync()
        finally:
            targets.close()
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete the files, and rename the new checkpoint to its final name.

        Raises:
            RunError: a file that cannot be written or renamed.
        """
        write_plan, save = self._write_plan, self._save
        if write_plan is None or save is None:
            raise UsageError("finish() before prepare_global_plan(); a save calls both")
        folder = save.folder
        written = {result.index: result.storage_data for rank in results for result in rank}
        checksums = RangeChecksums({file.stored.name: file.checked_ranges for file in save.files})
        for item in written.values():
            if item.crc32 is not None:
                checksums.contribute(item.file, item.start_bytes, item.crc32, item.size_bytes)
        # 1. Values that are not tensors: in the ranks' files, or sent with the ranks' results.
        items, extra = {}, {}
        contents: dict[str, bytes] = {}
        for rank, rank_results in enumerate(results):
            for result in rank_results:
                value: WrittenItem = result.storage_data
                if result.index.fqn not in write_plan.tensors:
                    place = FileRange(value.file, value.start_bytes)
                    name = result.index.fqn
                    items[name] = StoredItem(name, place, value.size_bytes, rank)
                    extra[value.file] = rank
                    if value.content is not None:
                        # Results are in the order of their offsets.
                        contents[value.file] = contents.get(value.file, b"") + value.content
        write_plan = dataclasses.replace(
            write_plan, items=items, paths=as_paths(metadata.planner_data)
        )
        # 2. The ends of files, and additional files of the format.
        with translate_os_errors("finish a new checkpoint", folder):
            for name, content in contents.items():
                self._write_file(folder / name, content)
            for file in save.files:
                name = file.stored.name
                closing = file.closing_bytes(partial(_find_checksum, checksums, name))
                with TargetFile(folder / name, file.stored.size_bytes) as target:
                    for start, content in closing:
                        target.write(memoryview(bytearray(content)), start)
                    if self.sync_files:
                        target.sync()
            for name, final in self.format.final_files(write_plan):
                self._write_file(folder / name, final)
            # 3. The manifest, last.
            files = [file.stored for file in write_plan.files]
            for name, rank in extra.items():
                files.append(StoredFile(name, (folder / name).stat().st_size, rank))
            digests = {
                index.fqn: item.digest for index, item in written.items() if item.digest is not None
            }
            manifest = manifest_of(
                write_plan.format,
                self.save_id,
                None,
                tuple(files),
                write_plan.tensors,
                digests,
                (),
                {},
            )
            self._write_file(folder / MANIFEST_NAME, manifest.to_json().encode())
        save.commit()
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = written
        self._forget()

    def _write_file(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_new(path), "wb") as file:
            file.write(content)
            file.flush()
            if self.sync_files:
                sync(file.fileno())


@dataclass(frozen=True, slots=True)
class _TensorWrite:
    """A box of a tensor to write: `place` is None without elements, `upload` uploads it at once."""

    item: WriteItem
    place: WritePlace | None
    tensor: torch.Tensor
    upload: RankUpload | None


def _as_target(path: str | os.PathLike[str]) -> Path:
    """Return a folder, or an address that can be written to. Raises UsageError."""
    target = as_path(path)
    if isinstance(target, RemotePath):
        expect_writable(target)
    return target


def _names(places: RankPlaces) -> set[str]:
    """Return the files that a rank writes to."""
    return {place.file for place in places.places if place is not None}


def _find_checksum(checksums: RangeChecksums, file: str, start_bytes: int, size_bytes: int) -> int:
    checksum = checksums.of(file, start_bytes)
    if checksum is None:
        raise RunError(
            f"no rank wrote all of the {size_bytes} bytes of {file} at {start_bytes}; save again"
        )
    return checksum


def _write_box(task: _TensorWrite, memory: AlignedBuffer, *, targets: OpenFiles[TargetFile]) -> Any:
    """Write the box of a task, a block at a time."""
    place, tensor, item = task.place, task.tensor, task.item
    is_whole = tuple(item.tensor_data.size) == tuple(tensor.shape)
    if place is None:
        # An empty tensor is whole on its rank, and has the digest of zero blocks.
        digest = tensor_digest([]) if is_whole else None
        return storage.WriteResult(item.index, 0, WrittenItem("", 0, 0, digest=digest))
    itemsize = tensor.element_size()
    grid = BlockGrid.of(tuple(tensor.shape), itemsize)
    range_bytes = math.prod(place.shape) * itemsize
    checksum, digests = 0, []
    target = targets[place.file] if task.upload is None else task.upload.targets[place.file]
    for number in range(grid.count):
        box = grid.box(number)
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        piece = tensor[(*index, ...)].cpu().contiguous()
        array = TorchTensors(piece).storage(piece, item.index.fqn)
        for offset, part in _list_ranges(place, box, array):
            start, stop = place.start_bytes + offset, place.start_bytes + offset + len(part)
            target.write(part, start)
            if place.is_checked:
                # The checksum is linear: contributions of boxes combine by exclusive or, in any
                # order.
                checksum ^= shift_crc32(crc32(part), range_bytes - offset - len(part))
            if task.upload is not None:
                task.upload.wrote(place.file, start, stop)
        if is_whole:
            digests.append(block_digest(array.reshape(-1).view(np.uint8).data))
    size = tensor.numel() * itemsize
    digest = tensor_digest(digests) if is_whole else None
    written = WrittenItem(
        place.file, place.start_bytes, size, checksum if place.is_checked else None, digest
    )
    if task.upload is not None and place.is_checked:
        task.upload.contribute(place.file, place.start_bytes, checksum, size)
    return storage.WriteResult(item.index, size, written)


def _list_ranges(
    place: WritePlace, box: Box, array: NDArray[Any]
) -> Iterator[tuple[int, memoryview]]:
    """Yield the byte offsets in the file's array of a block of the rank's box, with the bytes."""
    start = tuple(a + b for a, b in zip(place.local, box.start, strict=True))
    # Merge trailing dimensions in which the block spans the file's array.
    inner = len(place.shape)
    while inner > 0 and box.shape[inner - 1] == place.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    row = int(np.prod(box.shape[inner:], dtype=np.int64)) * array.itemsize
    flat = array.reshape(-1).view(np.uint8).data
    for number, outer in enumerate(np.ndindex(*box.shape[:inner])):
        at = tuple(a + i for a, i in zip(start[:inner], outer, strict=True)) + start[inner:]
        first = int(np.ravel_multi_index(at, place.shape)) if place.shape else 0
        yield first * array.itemsize, flat[number * row : (number + 1) * row]
