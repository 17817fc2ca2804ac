"""Checkpoints that are read from addresses, whole: opened, loaded, converted, compared."""

from __future__ import annotations

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

from reshard.checkpoint.files.places import object_source
from reshard.checkpoint.files.places.place_file import PlaceFile
from reshard.checkpoint.files.places.place_path import PlacePath

MESH = reshard.DeviceMesh.of(tp=2)
SHAPE = (96, 1024)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_source, "_FIRST_WAIT_S", 0.001)
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


def test_a_rank_reads_what_it_needs(server: ObjectServer, model: Path) -> None:
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
    file = PlaceFile(PlacePath(f"{server.url}/a"))
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


def test_a_conversion_goes_on_after_the_connection_broke(
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


def test_what_is_wrong_with_an_address_is_said(server: ObjectServer, model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at http.*: there is nothing of that"):
        checkpoint.open(f"{server.url}/none")
    server.objects["/broken/model.safetensors"] = b"version https://git-lfs.github.com/spec/v1\n"
    with pytest.raises(FormatError, match="a pointer of git-LFS"):
        checkpoint.open(f"{server.url}/broken")
    with pytest.raises(UsageError, match=r"is an address of http://, which is only read; write to"):
        checkpoint.convert(model, f"{server.url}/model", to="full")
