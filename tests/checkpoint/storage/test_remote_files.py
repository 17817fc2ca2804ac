"""Checkpoints read from URLs: opened, loaded, converted, compared; prefetched ranges."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import reshard
from object_server import ObjectServer, object_server
from reshard import checkpoint
from reshard.errors import CheckpointError, FormatError, RunError, SourceChangedError, UsageError

pytest.importorskip("obstore")

from reshard.checkpoint.storage import object_stores
from reshard.checkpoint.storage.remote_files import (
    ByteRange,
    PrefetchedRanges,
    RemoteFile,
    choose_threads,
    coalesce_named,
)
from reshard.checkpoint.storage.remote_paths import RemotePath

MESH = reshard.DeviceMesh.of(tp=2)
SHAPE = (96, 1024)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_stores, "_FIRST_WAIT_S", 0.001)
    with object_server() as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    arrays = {f"w{i}": rng.standard_normal(SHAPE).astype(np.float32) for i in range(6)}
    held = checkpoint.describe_ranks({0: arrays}, reshard.DeviceMesh.of(tp=1), rules=["*=-, -"])
    checkpoint.convert(held, tmp_path / "model", to="full")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "other"}')
    return tmp_path / "model"


def upload(folder: Path, server: ObjectServer, at: str = "/m") -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            server.objects[f"{at}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return server.url + at


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("safetensors", {"to": "full", "most_file_bytes": 1 << 20}),
        ("torch-dcp", {"to": "tp=2", "rules": ["*=tp, -"]}),
        ("torch-pickle", {"to": "full"}),
    ],
)
def test_formats_are_read_from_an_address(
    server: ObjectServer, model: Path, tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    other = tmp_path / "other"
    checkpoint.convert(model, other, format=name, **options)
    url = upload(other, server)
    opened = checkpoint.open(url)
    assert str(opened.folder) == url and "config.json" in opened.carried
    assert checkpoint.compare(url, model).is_same
    checkpoint.convert(
        url, tmp_path / "again", to="tp=3", rules=["*=-, tp"], format="sharded-safetensors"
    )
    assert checkpoint.compare(tmp_path / "again", model).is_same
    assert (tmp_path / "again" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_a_rank_reads_its_ranges_only(server: ObjectServer, model: Path) -> None:
    url = upload(model, server)
    opened = checkpoint.open(url)
    # Headers come in windows, with what lies behind them.
    server.sent_bytes = 0
    rows = {name: reshard.spec(MESH, "tp, -").layout(SHAPE) for name in opened}
    arrays = checkpoint.load(opened, rows, rank=1)
    needed = sum(array.nbytes for array in arrays.values())
    assert needed == opened.size_bytes // 2
    assert server.sent_bytes <= 1.05 * needed
    expected = checkpoint.load(model, rows, rank=1)
    assert all(np.array_equal(arrays[name], expected[name]) for name in rows)


def test_one_file_by_its_address(server: ObjectServer, model: Path) -> None:
    url = upload(model, server)
    assert checkpoint.compare(f"{url}/model.safetensors", model).is_same


def test_ranges_that_are_near_come_together(server: ObjectServer) -> None:
    content = np.arange(1 << 18, dtype=np.uint32).tobytes()
    server.objects["/a"] = content
    file = RemoteFile(RemotePath(f"{server.url}/a"))
    memory = memoryview(bytearray(4 * 100))
    offsets = [0, 1000, 600_000, 600_100]
    file.read_ranges(memory, offsets, 100)
    assert bytes(memory) == b"".join(content[at : at + 100] for at in offsets)
    assert server.requests["GET /a"] == 2


def test_an_object_that_changes_is_noticed(server: ObjectServer, model: Path) -> None:
    url = upload(model, server)
    opened = checkpoint.open(url)
    server.objects["/m/model.safetensors"] = (
        server.objects["/m/model.safetensors"][:-4] + b"\1\2\3\4"
    )
    with pytest.raises(SourceChangedError, match="changed since it was opened"):
        checkpoint.load(opened, rank=0)
    # It is another checkpoint by then.
    assert checkpoint.load(url, rank=0).keys() == opened.tensors.keys()


def test_a_conversion_resumes_after_a_broken_connection(
    server: ObjectServer, model: Path, tmp_path: Path
) -> None:
    url = upload(model, server)
    target = tmp_path / "target"
    opened = checkpoint.open(url)
    stop = threading.Event()
    # Every request for bytes fails from the first block on.
    server.faults = ["slam"] * 10_000
    with pytest.raises(RunError, match=r"check the connection, then run the same command again"):
        checkpoint.convert(opened, target, to="full", threads=1, stop=stop)
    assert not target.exists()
    server.faults = []
    checkpoint.convert(url, target, to="full")
    assert checkpoint.compare(target, model).is_same


def test_errors_of_urls_are_explained(server: ObjectServer, model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at http.*: there is nothing of that"):
        checkpoint.open(f"{server.url}/none")
    server.objects["/broken/model.safetensors"] = b"version https://git-lfs.github.com/spec/v1\n"
    with pytest.raises(FormatError, match="a pointer of git-LFS"):
        checkpoint.open(f"{server.url}/broken")
    with pytest.raises(UsageError, match=r"http:// can only be read; write to"):
        checkpoint.convert(model, f"{server.url}/model", to="full")


def test_prefetched_ranges_are_found(server: ObjectServer) -> None:
    chosen = random.Random(0)
    contents = {name: chosen.randbytes(1_000_000) for name in ("a", "b")}
    for name, content in contents.items():
        server.objects[f"/m/{name}"] = content
    ranges = []
    for _ in range(40):
        start = chosen.randrange(999_000)
        ranges.append(ByteRange(chosen.choice("ab"), start, start + chosen.randrange(1, 1000)))
    reads = PrefetchedRanges(RemotePath(f"{server.url}/m"))
    reads.fetch(ranges)
    for name, start, stop in ranges:
        assert reads.get(name, start, stop - start) == contents[name][start:stop]
        inner = reads.get(name, start, (stop - start) // 2)
        assert inner == contents[name][start : start + (stop - start) // 2]
    assert server.requests["GET /m/a"] + server.requests["GET /m/b"] == len(
        [*coalesce_named(ranges)]
    )
    assert reads.get("c", 0, 1) is None
    assert reads.get("a", 999_999, 10) is None
    # Those of the next time replace them.
    reads.fetch([ByteRange("b", 5, 10)])
    assert reads.get("b", 5, 5) == contents["b"][5:10]
    assert reads.get("b", 0, 5) is None and reads.get("b", 6, 5) is None


def test_ranges_far_apart_and_long_ones_stay_apart() -> None:
    size = 1 << 20
    ranges = [ByteRange("a", at, at + size // 4) for at in range(0, 2 * size, size // 4)]
    joined = list(coalesce_named(ranges))
    assert [one.stop - one.start for one in joined] == [size, size]
    overlapping = [ByteRange("a", 0, 100), ByteRange("a", 50, 60), ByteRange("a", 99, 120)]
    assert list(coalesce_named(overlapping)) == [("a", 0, 120)]
    assert not list(coalesce_named([]))


def test_files_of_this_machine_are_not_read_ahead(tmp_path: Path) -> None:
    reads = PrefetchedRanges(tmp_path)
    reads.fetch([ByteRange("missing", 0, 10)])
    assert reads.get("missing", 0, 10) is None


@pytest.fixture
def url(server: ObjectServer, tmp_path: Path) -> str:
    """A distributed checkpoint of 24 tensors of 2 MiB, in two files."""
    mesh = reshard.DeviceMesh.of(tp=1)
    arrays = {f"w{i}": np.full((1024, 512), i, dtype=np.float32) for i in range(24)}
    held = checkpoint.describe_ranks({0: arrays}, mesh, rules=["*=-, -"])
    target = tmp_path / "dcp"
    checkpoint.convert(held, target, to="tp=2", rules=["*=tp, -"], format="torch-dcp")
    (target / "reshard.manifest.json").unlink()
    for path in target.iterdir():
        server.objects[f"/m/{path.name}"] = path.read_bytes()
    return f"{server.url}/m"


def test_a_distributed_checkpoint_is_opened_by_little(server: ObjectServer, url: str) -> None:
    server.sent_bytes, server.latency_s = 0, 0.05
    server.requests.clear()
    opened = checkpoint.open(url)
    assert server.most_at_once > 4
    assert len(opened.tensors) == 24
    # 48 archives, each with its first and last records; `.metadata` beside them.
    assert server.sent_bytes <= 48 * 5 * 1024 + len(server.objects["/m/.metadata"])
    assert sum(server.requests[f"GET /m/__{rank}_0.distcp"] for rank in range(2)) <= 2 * 25


def test_a_store_that_fails_is_named(server: ObjectServer, url: str) -> None:
    checkpoint.open(url)
    content = server.objects["/m/__1_0.distcp"]
    server.objects["/m/__1_0.distcp"] = content[: len(content) // 2]
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        checkpoint.open(url)


def test_a_file_of_torch_save_is_opened_by_few_requests(
    server: ObjectServer, tmp_path: Path
) -> None:
    mesh = reshard.DeviceMesh.of(tp=1)
    arrays = {f"w{i}": np.full((256, 512), i, dtype=np.float32) for i in range(24)}
    held = checkpoint.describe_ranks({0: arrays}, mesh, rules=["*=-, -"])
    target = tmp_path / "saved"
    checkpoint.convert(held, target, to="full", format="torch-pickle", most_file_bytes=4 << 20)
    (target / "reshard.manifest.json").unlink()
    names = sorted(path.name for path in target.glob("*.bin"))
    assert len(names) == 3
    for path in target.iterdir():
        server.objects[f"/m/{path.name}"] = path.read_bytes()
    server.latency_s = 0.05
    opened = checkpoint.open(f"{server.url}/m/pytorch_model.bin.index.json")
    assert len(opened.tensors) == 24
    for name in names:
        # Eight storages in each with a header; the directory and the pickle.
        assert server.requests[f"GET /m/{name}"] <= 8 + 6
    # Of all files at once, and of all storages in each.
    assert server.most_at_once > 4


def test_headers_far_from_each_other_bring_little(server: ObjectServer) -> None:
    content = random.Random(1).randbytes(4 << 20)
    server.objects["/m/a"] = content
    file = RemotePath(f"{server.url}/m/a").open("rb", buffering=0)
    with file:
        for at, most_bytes in (
            (3 << 20, 16 << 10),
            (0, 256 << 10),
            (100_000, 0),
            # What goes on brings much again.
            ((256 << 10) - 10, 256 << 10),
            (2 << 20, 16 << 10),
            ((2 << 20) + (16 << 10), 256 << 10),
        ):
            before = server.sent_bytes
            file.seek(at)
            assert file.read(100) == content[at : at + 100]
            assert server.sent_bytes - before == most_bytes, at


@pytest.mark.parametrize("threads", [0, -1, 2.0, "2", True])
def test_an_invalid_number_of_threads_is_refused(threads: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"threads .* must be"):
        choose_threads(threads, tmp_path)  # type: ignore[arg-type]
