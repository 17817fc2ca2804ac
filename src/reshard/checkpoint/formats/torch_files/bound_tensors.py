"""Tensors of files of `torch.save` as parts of a checkpoint: addresses, views, checksums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from reshard.binding import FileRange, View
from reshard.checkpoint.blocks.spans import is_dense
from reshard.checkpoint.contents import StoredChecksum
from reshard.checkpoint.formats.safetensors.header import check_shape, is_text
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.checkpoint.storage.filesystem import read_range
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError

# Many tensors of a model have one shape.
_is_dense = lru_cache(maxsize=4096)(is_dense)


def check_tensor(path: Path, name: str, dtype: DType, shape: tuple[int, ...]) -> None:
    """Raise FormatError for a shape or a name in a file that no checkpoint can have."""
    try:
        check_shape(name, dtype, shape)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    if not is_text(name):
        raise FormatError(f"{path}: the name {name!r} is no text that UTF-8 can say")


def read_storage(path: Path, tensor: ArchivedTensor, start_bytes: int = 0) -> bytes:
    """The storage of a small tensor, of what lies in a file from `start_bytes` on.

    Raises CheckpointError for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            start_bytes += tensor.start_bytes
            return read_range(file, start_bytes, tensor.storage_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def find_address(file: str, tensor: ArchivedTensor) -> tuple[FileRange, View | None]:
    """Where a tensor of a file begins, and its view where it is not dense."""
    if not _is_dense(tensor.view, tensor.shape):
        return FileRange(file, tensor.start_bytes), tensor.view
    # The offset of a dense tensor becomes part of the address.
    offset_bytes = tensor.view.offset * tensor.dtype.itemsize_bytes
    return FileRange(file, tensor.start_bytes + offset_bytes), None


def list_checksums(
    tensors: Iterable[tuple[str, str, str, ArchivedTensor]],
) -> tuple[StoredChecksum, ...]:
    """The checksums of the storages of `(name, part, file, tensor)`, each storage once.

    A storage is read once with its tensor where that is all of it, and no other has any of it.
    """
    storages: dict[tuple[str, int], list[tuple[str, str, ArchivedTensor]]] = {}
    for name, part, file, tensor in tensors:
        if tensor.crc32 is not None and tensor.storage_bytes:
            storages.setdefault((file, tensor.start_bytes), []).append((name, part, tensor))
    checksums = []
    for (file, start_bytes), users in storages.items():
        name, part, tensor = users[0]
        size_bytes, crc32 = tensor.storage_bytes, tensor.crc32 or 0
        is_all = math.prod(tensor.shape) * tensor.dtype.itemsize_bytes == size_bytes
        once = len(users) == 1 and is_all and _is_dense(tensor.view, tensor.shape)
        place = FileRange(file, start_bytes)
        checksums.append(StoredChecksum(name, part, place, size_bytes, crc32, once))
    return tuple(checksums)
