"""What must hold of a checkpoint that was tampered with: an error of reshard's, or a right answer.

1. Whatever the bytes, the readers end with a value or an error that says what is wrong; nothing
   is run, and no file is looked at but those of the checkpoint.
2. What they accept can be converted, or refused; the `safetensors` package accepts it too, and
   finds the same tensors.
"""

from __future__ import annotations

import io
import resource
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import zstandard

from checkpoint.checkpoint_files import Tensor, read_file
from reshard.checkpoint import (
    apply,
    check_digests,
    compare,
    convert,
    open_checkpoint,
    read_delta,
    read_tensor,
)
from reshard.checkpoint.formats.safetensors.header import read_header
from reshard.checkpoint.formats.torch_dcp.metadata import read_metadata
from reshard.checkpoint.formats.torch_dcp.packed_archives import open_packed
from reshard.checkpoint.formats.torch_files.reading import read_archive
from reshard.checkpoint.storage.derived_files import DerivedFile
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.errors import ReshardError
from soak.nothing_runs import nothing_runs
from soak.wrong import Wrong

MOST_MEMORY_BYTES = 4 << 30


def limit_memory() -> None:
    """Let a reader that believes a size run out of memory here, and not the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def read_damaged_checkpoint(
    folder: Path, target: Path, opening: Mapping[str, Any] | None = None
) -> str:
    """Open, and where that succeeds convert; answers how far it came."""
    try:
        with nothing_runs(folder):
            opened = open_checkpoint(folder, **opening or {})
    except ReshardError as error:
        _check_message(error)
        return "refused"
    try:
        convert(opened if opening else folder, target, to="full", threads=1)
    except ReshardError as error:
        _check_message(error)
        return "refused when converted"
    if not compare(opened, target).is_same:
        raise Wrong("what was converted is not what is read")
    if opened.format == "safetensors":
        _check_as_the_package_reads(folder)
    shutil.rmtree(target)
    return "accepted"


def read_damaged_delta(content: bytes, base: Path, after: Path, target: Path) -> str:
    """Apply a delta that was tampered with to its base; answers how far it came."""
    delta = target.with_name("damaged.delta")
    delta.write_bytes(content)
    try:
        with nothing_runs(delta.parent):
            read_delta(delta)
        apply(base, delta, target, threads=1)
    except ReshardError as error:
        _check_message(error)
        return "refused"
    finally:
        shutil.rmtree(target.with_name(f".{target.name}.reshard-staging"), ignore_errors=True)
    if check_digests(target).damaged or not compare(after, target).is_same:
        raise Wrong("a delta whose index was damaged made another checkpoint")
    shutil.rmtree(target)
    return "accepted"


def _check_as_the_package_reads(folder: Path) -> None:
    expected: dict[str, Tensor] = {}
    opened = open_checkpoint(folder)
    for file in opened.files:
        expected |= read_file(folder / file.name)
    found = {name: (opened[name].dtype, opened[name].shape) for name in opened}
    if found != {name: (one.dtype, one.shape) for name, one in expected.items()}:
        raise Wrong(f"read as {found}, the safetensors package finds {expected}")
    for name, whole in expected.items():
        if read_tensor(opened, name).tobytes() != whole.bits.tobytes():
            raise Wrong(f"{name} has other bits than the safetensors package finds")


def _check_message(error: ReshardError) -> None:
    if not str(error).strip():
        raise Wrong(f"{type(error).__name__} says nothing") from error


def read_damaged_header(content: bytes, path: Path) -> str:
    """A safetensors file: its header is refused, or the package finds the same in it."""
    path.write_bytes(content)
    try:
        with nothing_runs(path.parent):
            header = read_header(path)
    except ReshardError as error:
        _check_message(error)
        return "refused"
    try:
        found = {name: one["shape"] for name, one in safetensors.deserialize(content)}
    except safetensors.SafetensorError as error:
        raise Wrong(f"{content[:300]!r} is accepted, the safetensors package refuses it") from error
    if found != {tensor.name: list(tensor.shape) for tensor in header.tensors}:
        raise Wrong(f"{[*header.tensors]}, the safetensors package finds {found}")
    return "accepted"


def read_damaged_metadata(content: bytes, folder: Path) -> str:
    """The `.metadata` of a distributed checkpoint."""
    try:
        with nothing_runs(folder):
            read_metadata(content, ".metadata")
    except ReshardError as error:
        _check_message(error)
        return "refused"
    return "accepted"


def read_damaged_archive(content: bytes, folder: Path) -> str:
    """The archive of a tensor: its elements lie inside it, or it is refused."""
    try:
        with nothing_runs(folder):
            found = read_archive(
                lambda offset, size: content[offset : offset + size], 0, len(content), "archive"
            )
    except ReshardError as error:
        _check_message(error)
        return "refused"
    if not 0 <= found.start_bytes <= found.start_bytes + found.storage_bytes <= len(content):
        raise Wrong(f"{found} is not inside {len(content)} bytes")
    return "accepted"


def read_damaged_packed_archive(content: bytes, folder: Path) -> str:
    """An archive that is compressed: refused, or unpacked to the elements that it has."""
    label, transforms = "archive", ("stream.zstd/1",)
    packed = zstandard.compress(content, 1)
    path = folder / "packed"
    path.write_bytes(packed)
    try:
        with nothing_runs(folder):
            found = open_packed(
                lambda offset, size: packed[offset : offset + size],
                *(0, len(packed), transforms, len(content), label),
            )
        unpacked = DerivedFile(path.name, [found])
        storage = bytearray(found.front.storage_bytes)
        with SourceFile(path) as file, unpacked.open(path, file, folder) as scratch:
            # What holds nothing is never read, and so not unpacked.
            scratch.read_into(memoryview(storage), 0)
    except ReshardError as error:
        _check_message(error)
        return "refused"
    if not storage:
        return "accepted"
    whole = read_archive(lambda at, size: content[at : at + size], 0, len(content), label)
    if storage != content[whole.start_bytes : whole.start_bytes + whole.storage_bytes]:
        raise Wrong(f"{content!r} is unpacked to other elements than it has")
    return "accepted"


def archive_with(content: bytes, pickle: bytes) -> bytes:
    """An archive whose `data.pkl` is another, with checksums that fit."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("/data.pkl")
            new.writestr(entry.filename, pickle if is_pickle else old.read(entry))
    return made.getvalue()
