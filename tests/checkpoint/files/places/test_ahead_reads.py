"""Ranges of many objects that are asked for together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import reshard
from object_server import ObjectServer, object_server
from reshard import checkpoint
from reshard.errors import CheckpointError

pytest.importorskip("obstore")

from reshard.checkpoint.files.places import object_source
from reshard.checkpoint.files.places.ahead_reads import AheadReads, NamedRange, join_ranges
from reshard.checkpoint.files.places.place_path import PlacePath


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_source, "_FIRST_WAIT_S", 0.001)
    with object_server() as found:
        yield found


def test_what_was_asked_for_is_found(server: ObjectServer) -> None:
    chosen = random.Random(0)
    contents = {name: chosen.randbytes(1_000_000) for name in ("a", "b")}
    for name, content in contents.items():
        server.objects[f"/m/{name}"] = content
    ranges = []
    for _ in range(40):
        start = chosen.randrange(999_000)
        ranges.append(NamedRange(chosen.choice("ab"), start, start + chosen.randrange(1, 1000)))
    reads = AheadReads(PlacePath(f"{server.url}/m"))
    reads.ask(ranges)
    for name, start, stop in ranges:
        assert reads.find(name, start, stop - start) == contents[name][start:stop]
        inner = reads.find(name, start, (stop - start) // 2)
        assert inner == contents[name][start : start + (stop - start) // 2]
    assert server.requests["GET /m/a"] + server.requests["GET /m/b"] == len([*join_ranges(ranges)])
    assert reads.find("c", 0, 1) is None
    assert reads.find("a", 999_999, 10) is None
    # Those of the next time replace them.
    reads.ask([NamedRange("b", 5, 10)])
    assert reads.find("b", 5, 5) == contents["b"][5:10]
    assert reads.find("b", 0, 5) is None and reads.find("b", 6, 5) is None


def test_ranges_far_apart_and_long_ones_stay_apart() -> None:
    size = 1 << 20
    ranges = [NamedRange("a", at, at + size // 4) for at in range(0, 2 * size, size // 4)]
    joined = list(join_ranges(ranges))
    assert [one.stop - one.start for one in joined] == [size, size]
    overlapping = [NamedRange("a", 0, 100), NamedRange("a", 50, 60), NamedRange("a", 99, 120)]
    assert list(join_ranges(overlapping)) == [("a", 0, 120)]
    assert not list(join_ranges([]))


def test_files_of_this_machine_are_not_read_ahead(tmp_path: Path) -> None:
    reads = AheadReads(tmp_path)
    reads.ask([NamedRange("missing", 0, 10)])
    assert reads.find("missing", 0, 10) is None


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
    assert server.most_at_once > 8
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
    assert server.most_at_once > 8


def test_headers_far_from_each_other_bring_little(server: ObjectServer) -> None:
    content = random.Random(1).randbytes(4 << 20)
    server.objects["/m/a"] = content
    file = PlacePath(f"{server.url}/m/a").open("rb", buffering=0)
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
