"""Compressed archives, as PyTorch writes them: read by us, equal; damaged ones refused."""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard.torch
from checkpoint.checkpoint_files import list_open_files, tensor
from checkpoint.process_runs import content, run
from checkpoint.test_memory import SLACK_BYTES, measure
from reshard import DeviceMesh, checkpoint, spec
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import open_sources
from reshard.checkpoint.comparison import check_digests
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.torch_dcp.packed_archives import PackedArchive, open_packed
from reshard.errors import (
    CheckpointError,
    DigestError,
    FormatError,
    MissingExtraError,
    ReshardError,
    RunError,
)
from selection import choose

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")
zstandard = pytest.importorskip("zstandard")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

from checkpoint import torch_checkpoints  # noqa: E402
from checkpoint.formats.torch_dcp.test_reader import as_torch, bits_of  # noqa: E402

WHOLES = {
    "w": tensor("float32", (64, 48), 1),
    "b": tensor("bfloat16", (7,), 2),
    "s": tensor("int64", (), 3),
    "e": tensor("float16", (0, 2), 4),
}


def save(folder: Path, ranks: int = 2, layers: int = 1) -> None:
    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(ranks)
        cut = torch_checkpoints.cut(as_torch(WHOLES["w"]), mesh, [Shard(0)])
        others = {name: as_torch(WHOLES[name]) for name in ("b", "s", "e")}
        return {"w": cut, **others, "t": as_torch(WHOLES["w"]).t(), "step": 3}

    extensions = [ZStandard() for _ in range(layers)]
    torch_checkpoints.save(folder, ranks, state, _extensions=extensions)


def places(folder: Path, name: str) -> list[Any]:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    return [info for index, info in metadata.storage_data.items() if index.fqn == name]


def repack(folder: Path, name: str, content: bytes) -> None:
    """Put other packed bytes behind the file of an item, and let `.metadata` point at them."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    path = folder / info.relative_path
    info.offset, info.length = path.stat().st_size, len(content)
    path.write_bytes(path.read_bytes() + content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def packed_bytes(folder: Path, name: str) -> bytes:
    (info,) = places(folder, name)
    return (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


def archive_of(folder: Path, name: str) -> bytes:
    return bytes(zstandard.ZstdDecompressor().stream_reader(packed_bytes(folder, name)).read())


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_archives_that_torch_compressed_are_read(
    tmp_path: Path, small_blocks: int, layers: int
) -> None:
    save(tmp_path / "dcp", 3, layers)
    assert places(tmp_path / "dcp", "w")[0].transform_descriptors == ["stream.zstd/1"] * layers
    found = bits_of(tmp_path / "dcp")
    turned = found.pop("t")
    assert found == WHOLES
    assert np.array_equal(turned.bits, WHOLES["w"].bits.T)
    opened = open_checkpoint(tmp_path / "dcp")
    assert opened.notes[0].startswith("7 shards are compressed (stream.zstd/1); only their")
    assert {*opened.derived} == {f"__{rank}_0.distcp/unpacked" for rank in range(3)}


def test_compressed_shards_are_converted_and_digested(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    rules = ["w=-, tp", "t=tp, -"]
    report = checkpoint.convert(
        packed, tmp_path / "dcp", to="tp=3", rules=[*rules, "*=..."], format="torch-dcp"
    )
    checkpoint.convert(packed, tmp_path / "full", to="full")
    checkpoint.convert(tmp_path / "dcp", tmp_path / "again", to="full")
    for target in ("dcp", "full", "again"):
        assert checkpoint.compare(packed, tmp_path / target).is_same
    assert bits_of(tmp_path / "dcp") == bits_of(packed)
    digests = check_digests(packed)
    assert digests.digests == check_digests(tmp_path / "dcp").digests and not digests.damaged
    # Each packed byte is read once; what is unpacked is not counted again.
    sizes = {name: sum(info.length for info in places(packed, name)) for name in "wtbs"}
    assert report.read_bytes == sum(sizes.values())
    # What is no tensor stays compressed.
    (kept,) = places(tmp_path / "dcp", "step")
    assert kept.transform_descriptors == ["stream.zstd/1"]
    state = {"b": torch.zeros(7, dtype=torch.bfloat16), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    bits = state["b"].view(torch.int16), as_torch(WHOLES["b"]).view(torch.int16)
    assert torch.equal(*bits) and state["step"] == 3


def test_several_processes_make_the_same_files(packed: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        outcome = run(count, packed, tmp_path / f"of-{count}", "torch-dcp")
        assert [code for code, _ in outcome] == [0] * count, outcome
    assert content(tmp_path / "of-1") == content(tmp_path / "of-2")
    # Its digests are those of the processes' smaller blocks.
    (tmp_path / "of-2" / "reshard.manifest.json").unlink()
    assert checkpoint.compare(packed, tmp_path / "of-2").is_same


def test_a_rank_loads_its_part_and_unpacks_no_other(packed: Path) -> None:
    mesh = DeviceMesh.of(tp=2)
    layouts = {"w": spec(mesh, "tp, -").layout((64, 48)), "t": spec(mesh, "tp, -").layout((48, 64))}
    whole = WHOLES["w"].bits
    # Of rank 1's file nothing is read: it may be gone to pieces.
    opened = open_checkpoint(packed)
    for info in places(packed, "w"):
        if info.relative_path == "__1_0.distcp":
            with (packed / info.relative_path).open("r+b") as file:
                file.seek(info.offset)
                state = os.stat(packed / info.relative_path)
                file.write(bytes(info.length))
            os.utime(packed / info.relative_path, ns=(state.st_atime_ns, state.st_mtime_ns))
    found = checkpoint.load(opened, layouts, rank=0)
    assert np.array_equal(found["w"].view(whole.dtype), whole[:32])
    assert np.array_equal(found["t"].view(whole.dtype), whole.T[:24])
    with pytest.raises(
        FormatError, match=r"__1_0\.distcp bytes \d+:\d+: \[32:64, 0:48\] of tensor"
    ):
        checkpoint.load(opened, {"w": layouts["w"]}, rank=1)


def test_live_tensors_are_filled(packed: Path) -> None:
    state = {"w": torch.zeros(64, 48), "t": torch.zeros(48, 64), "b": torch.zeros(7).bfloat16()}
    reshard.torch.load(packed, state, strict=False)
    for name, expected in {"w": as_torch(WHOLES["w"]), "b": as_torch(WHOLES["b"])}.items():
        assert torch.equal(state[name].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(state["t"].view(torch.int32), as_torch(WHOLES["w"]).view(torch.int32).t())


def test_opening_reads_little_of_a_large_archive(tmp_path: Path) -> None:
    whole = torch.randint(0, 255, (4 << 20,), dtype=torch.uint8)
    torch_checkpoints.save(tmp_path, 1, lambda rank: {"w": whole}, _extensions=[ZStandard()])
    (info,) = places(tmp_path, "w")
    content = (tmp_path / info.relative_path).read_bytes()
    read = 0

    def count(offset: int, size: int) -> bytes:
        nonlocal read
        read += size
        return content[offset : offset + size]

    found = open_packed(count, info.offset, info.length, ("stream.zstd/1",), 4 << 20, "w")
    assert (found.front.storage_bytes, found.front.shape) == (4 << 20, (4 << 20,))
    assert read <= 512 << 10


def test_memory_does_not_grow_with_a_compressed_shard(tmp_path: Path) -> None:
    whole = torch.zeros(192, 256, 1024)
    torch_checkpoints.save(
        tmp_path / "dcp", 1, lambda rank: {"w": whole}, _extensions=[ZStandard(), ZStandard()]
    )
    how = {"to": "tp=2", "rules": ["w=tp, -, -"]}
    peak_bytes = measure(tmp_path / "dcp", tmp_path / "target", how, extra_bytes=32 << 20)
    assert peak_bytes < (32 << 20) + SLACK_BYTES < whole.nbytes


def test_nothing_is_left_behind(packed: Path, tmp_path: Path) -> None:
    before = {*tmp_path.iterdir()}
    files = open_sources(open_checkpoint(packed), tmp_path)
    opened = [files["__0_0.distcp/unpacked"], files["__1_0.distcp/unpacked"]]
    for file in opened:
        file.read_into(memoryview(bytearray(64)), 0)
    assert {*tmp_path.iterdir()} == before
    files.close()
    assert list_open_files(tmp_path) == []


def test_an_archive_is_unpacked_once_by_many_threads(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[Any] = []
    unpack = PackedArchive.create

    def counted(archive: Any, read: Any) -> Any:
        unpacked.append(archive)
        return unpack(archive, read)

    monkeypatch.setattr(PackedArchive, "create", counted)
    opened = open_checkpoint(packed)
    files = open_sources(opened, tmp_path)
    (archive, *_) = opened.derived["__1_0.distcp/unpacked"].parts

    def read() -> None:
        files["__1_0.distcp/unpacked"].read_into(memoryview(bytearray(64)), 0)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files.close()
    assert unpacked == [archive]


def test_the_missing_package_is_named(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"zstandard; pip install 'reshard\[checkpoint\]'"):
        checkpoint.convert(packed, tmp_path / "t", to="full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


@pytest.mark.parametrize("descriptor", ["stream.zstd", "stream.zstd/2", "stream.zstd@here/1", "/1"])
def test_unknown_transforms_are_refused(packed: Path, tmp_path: Path, descriptor: str) -> None:
    metadata = pickle.loads((packed / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "t":
            info.transform_descriptors = ["stream.zstd/1", descriptor]
    (packed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"by {descriptor}, .*known are stream\.zstd/1"):
        checkpoint.convert(packed, tmp_path / "target", to="full")
    assert not (tmp_path / "target").exists()


def test_a_folder_without_room_to_unpack_is_named(packed: Path, tmp_path: Path) -> None:
    files = open_sources(open_checkpoint(packed), tmp_path / "none")
    with pytest.raises(RunError, match=r"cannot create .*/unpacked in .*none \(needs \d+ by"):
        _ = files["__0_0.distcp/unpacked"]
    files.close()


# Damage.


def refused(folder: Path, target: Path) -> ReshardError:
    """The error with which a conversion ends; it leaves no target, and no file of its own."""
    with pytest.raises((FormatError, DigestError)) as caught:
        checkpoint.convert(folder, target, to="full", restart=True)
    assert not target.exists()
    return caught.value


def test_a_truncated_stream_is_an_error(packed: Path, tmp_path: Path) -> None:
    whole = packed_bytes(packed, "t")
    for size in (0, 3, 20, 200, len(whole) // 2, *range(len(whole) - 24, len(whole))):
        repack(packed, "t", whole[:size])
        assert isinstance(refused(packed, tmp_path / "target"), FormatError)


def test_bytes_after_a_stream_are_an_error(packed: Path, tmp_path: Path) -> None:
    whole = packed_bytes(packed, "t")
    for behind in (b"x", bytes(64), zstandard.compress(b"x"), zstandard.compress(bytes(1 << 20))):
        repack(packed, "t", whole + behind)
        assert isinstance(refused(packed, tmp_path / "target"), FormatError)


def test_every_flipped_byte_is_noticed_or_changes_nothing(packed: Path, tmp_path: Path) -> None:
    whole, expected = packed_bytes(packed, "t"), bits_of(packed)
    for at in range(0, len(whole), choose(389, 97)):
        repack(packed, "t", whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            checkpoint.convert(packed, tmp_path / "target", to="full", overwrite=True, restart=True)
        except (FormatError, DigestError):
            continue
        assert bits_of(tmp_path / "target") == expected


def test_a_flipped_byte_of_the_storage_is_an_error(packed: Path, tmp_path: Path) -> None:
    archive = bytearray(archive_of(packed, "t"))
    archive[2000] ^= 1
    repack(packed, "t", zstandard.compress(bytes(archive)))
    error = refused(packed, tmp_path / "target")
    assert isinstance(error, DigestError) and "bytes" in str(error) and "'t'" in str(error)


def test_all_archives_that_are_damaged_are_listed(packed: Path) -> None:
    """Whatever is wrong with them: the others are read and compared to the end."""
    expected = check_digests(packed)
    for name, bits in (("t", WHOLES["w"].bits), ("b", WHOLES["b"].bits)):
        archive = bytearray(archive_of(packed, name))
        archive[archive.index(bits.tobytes()) + 5] ^= 1
        repack(packed, name, zstandard.compress(bytes(archive)))
    opened = open_checkpoint(packed)
    found = check_digests(opened)
    assert [(block.tensor, block.box) for block in found.damaged] == [
        ("b", "[0:7]"),
        ("t", "[0:48, 0:64]"),
    ]
    for block in found.damaged:
        assert "the checksum of the unpacked storage is" in block.problem
        (info,) = places(packed, block.tensor)
        ends = f"{info.offset}:{info.offset + info.length}"
        assert block.places == (f"{info.relative_path} bytes {ends}",)
    assert found.digests == {
        name: digest for name, digest in expected.digests.items() if name not in "bt"
    }
    assert {*found.without_digest} == {*opened}


def test_an_archive_that_contradicts_its_beginning_is_an_error(
    packed: Path, tmp_path: Path
) -> None:
    def description(value: Any) -> bytes:
        torch.save(value, tmp_path / "made")
        with zipfile.ZipFile(tmp_path / "made") as archive:
            return archive.read("made/data.pkl")

    turned, straight = torch.zeros(64, 48).t(), torch.zeros(48, 64)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("x/data.pkl", description(turned))
        archive.writestr("x/data/0", bytes(turned.nbytes))
        archive.writestr("x/more.pkl", description(straight))
        end = archive.fp.tell() if archive.fp else 0
    content = made.getvalue()
    # By the directory the other description is the archive's.
    directory = content[end:].replace(b"x/data.pkl", b"x/past.pkl")
    directory = directory.replace(b"x/more.pkl", b"x/data.pkl")
    for behind, is_right in ((content[end:], True), (directory, False)):
        repack(packed, "t", zstandard.compress(content[:end] + behind))
        if is_right:
            checkpoint.convert(packed, tmp_path / "right", to="full")
        else:
            assert "describe different" in str(refused(packed, tmp_path / "target"))


@pytest.mark.parametrize("much", [1 << 18, 1 << 26])
def test_streams_that_expand_beyond_the_limit_are_errors(
    packed: Path, tmp_path: Path, much: int
) -> None:
    archive = archive_of(packed, "t")
    bomb = zstandard.compress(archive + bytes(much))
    assert len(bomb) < 64 << 10
    repack(packed, "t", bomb)
    assert "expands beyond" in str(refused(packed, tmp_path / "target"))
    # The same, hidden in another stream.
    metadata = pickle.loads((packed / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "t":
            info.transform_descriptors = ["stream.zstd/1"] * 2
    (packed / ".metadata").write_bytes(pickle.dumps(metadata))
    repack(packed, "t", zstandard.compress(zstandard.compress(archive) + bytes(much)))
    assert isinstance(refused(packed, tmp_path / "target"), FormatError)


def test_a_storage_larger_than_in_the_metadata_is_an_error(packed: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    torch.save(torch.zeros(1 << 24)[: 48 * 64].view(48, 64), made)
    repack(packed, "t", zstandard.compress(made.read_bytes()))
    assert "expected 12288 by .metadata" in str(refused(packed, tmp_path / "target"))


def test_a_window_beyond_the_limit_is_an_error(packed: Path, tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = compressor.compress(archive_of(packed, "t")) + compressor.flush()
    repack(packed, "t", content)
    assert "8388608 bytes" in str(refused(packed, tmp_path / "target"))
