"""Where a tensor lies in what `torch.save` wrote, and archives that are written the same way."""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.binding import View
from reshard.checkpoint.formats.torch_files.archive import read_archive
from reshard.checkpoint.formats.torch_files.archive_writing import NewArchive, is_writable
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.dtypes import ALL_DTYPES, DType, dtype
from reshard.errors import FormatError, UnreadableTensorError, UsageError
from selection import choose

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")

FRONT = b"what another item has"


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def read(archive: bytes) -> ArchivedTensor:
    """What is read of an archive in the middle of a file."""
    file = FRONT + archive + b"PK\x05\x06 and more"
    return read_archive(lambda at, size: file[at : at + size], len(FRONT), len(archive), "item x")


def elements(archive: bytes) -> Any:
    """The tensor, by what is read of where it lies."""
    found = read(archive)
    storage = (FRONT + archive)[found.start_bytes : found.start_bytes + found.storage_bytes]
    assert found.crc32 == (zlib.crc32(storage) or None)
    flat = np.frombuffer(storage, dtype=found.dtype.storage)
    return flat[found.view.positions(found.shape)]


BASE = torch.arange(120.0).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    "value",
    [
        BASE,
        BASE[1, 1:, ::2],
        BASE.permute(3, 1, 0, 2),
        BASE.to(memory_format=torch.channels_last),
        BASE[1, 2, 3, 4],
        BASE[:0],
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
    ],
    ids=["whole", "slice", "permuted", "channels last", "scalar", "empty", "parameter", "grad"],
)
def test_offsets_and_strides_are_honoured(value: Any) -> None:
    found = elements(saved(value)).view(np.float32)
    assert found.shape == tuple(value.shape)
    assert (found == value.detach().numpy()).all()


def test_a_slice_has_the_offset_and_strides_of_its_base() -> None:
    found = read(saved(BASE[1, 1:, ::2]))
    assert found.view == View(80, (20, 10, 1))
    assert found.storage_bytes == 480


class Attribute:
    """Something that a pickle would make."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"w": torch.ones(2)}, "expected a tensor"),
        ([torch.ones(2)], "expected a tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (torch.ones(2).expand(1000, 2), "more than its storage"),
        (torch.ones(2, 2).to_sparse(), "a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized tens"),
        (torch.ones(2, device="meta"), "a meta tensor"),
        (Attribute(), "Attribute"),
    ],
    ids=["dict", "list", "conj", "neg", "expanded", "sparse", "quantized", "meta", "class"],
)
def test_what_is_no_dense_tensor_is_refused(value: Any, message: str) -> None:
    # Some cannot be made without a warning.
    archive = saved(value() if callable(value) else value)
    with pytest.raises(FormatError, match=message) as error:
        read(archive)
    assert "item x" in str(error.value) or isinstance(error.value, UnreadableTensorError)


def rewritten(
    archive: bytes, change: dict[str, bytes | None], method: int = zipfile.ZIP_STORED
) -> bytes:
    """An archive with other records, as `zipfile` writes it."""
    old = zipfile.ZipFile(io.BytesIO(archive))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            content = change.get(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return stream.getvalue()


def test_archives_that_others_wrote_are_read() -> None:
    archive = rewritten(saved(BASE), {})
    assert (elements(archive).view(np.float32) == BASE.numpy()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"archive/byteorder": b"big"}, "byte order is b'big'"),
        ({"archive/data/0": bytes(8)}, "its storage has 8 bytes, expected 120 elements"),
        ({"archive/data/0": None}, "no record 'data/0'"),
        ({"archive/data.pkl": None}, "no record 'data.pkl'"),
        ({"archive/data.pkl": b"\x80\x02cposix\nsystem\n."}, "expected a tensor"),
        ({"archive/data.pkl": bytes(1 << 21)}, "too many"),
    ],
)
def test_records_that_do_not_fit_are_errors(change: dict[str, bytes | None], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(rewritten(saved(BASE), change))


def test_compressed_records_are_refused() -> None:
    with pytest.raises(FormatError, match="compressed"):
        read(rewritten(saved(BASE), {}, zipfile.ZIP_DEFLATED))


def test_what_is_cut_off_is_an_error() -> None:
    archive = saved(BASE)
    for size in range(0, len(archive), 7):
        with pytest.raises(FormatError, match="item x"):
            read(archive[:size])


@settings(max_examples=choose(90, 300))
@given(st.data())
def test_a_changed_byte_is_an_error_or_does_not_matter(data: st.DataObject) -> None:
    archive = saved(BASE)
    before = read(archive)
    changed = bytearray(archive)
    # Not in the storage: its checksum is compared when it is read.
    outside = [*range(before.start_bytes - len(FRONT)), *range(len(archive) - 700, len(archive))]
    at = data.draw(st.sampled_from(outside))
    changed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        found = read(bytes(changed))
        same = (found.dtype, found.shape, found.view, found.storage_bytes) == (
            before.dtype,
            before.shape,
            before.view,
            before.storage_bytes,
        )
        # A place or a checksum that was changed is noticed by the checksum.
        assert same
        start = found.start_bytes - len(FRONT)
        storage = changed[start : start + found.storage_bytes]
        assert found.start_bytes == before.start_bytes or zlib.crc32(storage) != found.crc32


# Writing

SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 4), (0, 4), (100, 100), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("element", [d for d in ALL_DTYPES if is_writable(d)], ids=str)
def test_what_is_written_is_what_torch_reads(element: DType, shape: tuple[int, ...]) -> None:
    archive = NewArchive.at(element, shape, len(FRONT))
    storage = bytes(number % 251 for number in range(archive.storage_bytes))
    if element.name == "bool":
        storage = bytes(byte % 2 for byte in storage)
    content = archive.head() + storage + archive.tail(zlib.crc32(storage))
    assert len(FRONT) + len(content) == archive.stop_bytes
    assert len(FRONT) + len(archive.head()) == archive.storage_start_bytes
    assert archive.storage_start_bytes % (4096 if len(storage) >= 16_384 else 64) == 0
    value = torch.load(io.BytesIO(content), weights_only=True)
    assert (value.dtype, tuple(value.shape)) == (getattr(torch, element.name), shape)
    assert elements(content).tobytes() == storage
    if value.numel():
        assert value.reshape(-1).view(torch.uint8).numpy().tobytes() == storage
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None


def test_types_that_torch_has_not_are_refused() -> None:
    with pytest.raises(UsageError, match="PyTorch has no type float8_e3m4"):
        NewArchive.at(dtype("float8_e3m4"), (3,), 0)


def test_storages_of_more_than_4_gib(tmp_path: Path) -> None:
    """Written into a file of holes; only what describes the storage is looked at."""
    archive = NewArchive.at(dtype("uint8"), (5, 1 << 30), 0)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(archive.head())
        file.seek(archive.storage_start_bytes + archive.storage_bytes)
        file.write(archive.tail(0x12345678))
    assert path.stat().st_size == archive.stop_bytes

    with path.open("rb") as file:

        def read_range(at: int, size: int) -> bytes:
            file.seek(at)
            return file.read(size)

        found = read_archive(read_range, 0, archive.stop_bytes, "large")
    assert (found.shape, found.storage_bytes, found.crc32) == ((5, 1 << 30), 5 << 30, 0x12345678)
    assert found.start_bytes == archive.storage_start_bytes
    record = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert (record.file_size, record.CRC) == (5 << 30, 0x12345678)
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/0") == archive.storage_start_bytes
