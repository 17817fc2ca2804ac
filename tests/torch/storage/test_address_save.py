"""PyTorch's own save writes to an object store: each rank its files, whole or not at all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("boto3")
pytest.importorskip("moto")
torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from bucket_server import BUCKET, BucketServer, Request, bucket_server  # noqa: E402
from reshard import checkpoint  # noqa: E402
from reshard.checkpoint.storage import s3, uploads  # noqa: E402
from reshard.checkpoint.storage.remote_paths import RemotePath  # noqa: E402
from reshard.checkpoint.storage.uploads import local_target, rank_save_folder  # noqa: E402
from reshard.errors import CheckpointError, UsageError  # noqa: E402
from reshard.torch import StorageReader, StorageWriter  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ADDRESS = f"s3://{BUCKET}/run/step-1"


@pytest.fixture(scope="module")
def running() -> Iterator[BucketServer]:
    with pytest.MonkeyPatch.context() as patch, bucket_server(patch.setenv) as server:
        yield server


@pytest.fixture
def server(
    running: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[BucketServer]:
    """An empty bucket, parts of 256 KiB, and a cache folder of the test's own."""
    monkeypatch.setattr(uploads, "MIN_PART_BYTES", 1 << 18)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    running.empty()
    yield running
    running.empty()


def make_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(700, 600, generator=generator),
        "half": torch.randn(100, 70, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0 + seed),
    }


def save(state: dict[str, Any], **how: Any) -> None:
    dcp.save(state, storage_writer=StorageWriter(ADDRESS, **how), no_dist=True)


def expect_loaded(state: dict[str, Any]) -> None:
    found = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }
    dcp.load(found, storage_reader=StorageReader(ADDRESS), no_dist=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value


def staged(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("format", ["torch-dcp", "sharded-safetensors", "safetensors"])
def test_a_save_in_every_format_is_loaded_from_its_address(
    server: BucketServer, tmp_path: Path, format: str
) -> None:
    state = make_state()
    if format == "torch-dcp":
        state["steps"] = "a word"
    save(state, format=format)
    expect_loaded(state)
    found = checkpoint.open(ADDRESS)
    assert found.format == format
    assert not checkpoint.check_digests(found).damaged
    # The same files as in a folder.
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "a", format=format), no_dist=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {key.rpartition("/")[2] for key in server.objects} == set(files)
    for name, content in files.items():
        if name not in ("reshard.manifest.json", ".metadata"):
            assert server.objects[f"run/step-1/{name}"] == content, name
    assert not staged(tmp_path / "cache")
    assert not server.pending


def test_parts_are_sent_while_others_are_written(server: BucketServer) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = {"a": make_state()["big"], "b": make_state(1)["big"]}
    seen = []

    class Waits(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            # 700 rows of 2,400 bytes are six parts of 256 KiB, and some of the next.
            end_s = time.monotonic() + 60
            while item.index.fqn == "b" and len(server.stored_parts) < 6:
                assert time.monotonic() < end_s, "no part of `a` is sent before `b` is written"
                time.sleep(0.01)
            seen.append(item.index.fqn)
            return super().resolve_data(item)

    dcp.save(state, storage_writer=StorageWriter(ADDRESS), planner=Waits(), no_dist=True)
    assert seen == ["a", "b"]
    expect_loaded(state)


def test_a_failed_save_leaves_the_old_checkpoint(server: BucketServer, tmp_path: Path) -> None:
    save(make_state())
    before = server.objects

    def refuse(number: int, request: Request) -> int | None:
        return 403 if request.part is not None and request.part[1] == 3 else None

    server.fault = refuse
    with pytest.raises(CheckpointException, match="403"):
        save(make_state(1))
    server.fault = lambda number, request: None
    seen = {key: content for key, content in server.objects.items() if "/.reshard/" not in key}
    assert seen == before
    expect_loaded(make_state())
    assert server.pending
    # The next one gives up what was begun.
    save(make_state(2))
    expect_loaded(make_state(2))
    assert not server.pending
    assert not any("/.reshard/" in key for key in server.objects)
    assert not staged(tmp_path / "cache")


def test_a_save_that_fails_at_the_commit_is_not_read(server: BucketServer, tmp_path: Path) -> None:
    save(make_state())

    def refuse(number: int, request: Request) -> int | None:
        is_end = request.method == "POST" and "uploadId" in request.query
        return 403 if is_end and request.key.endswith(".distcp") else None

    server.fault = refuse
    with pytest.raises(CheckpointException, match="403"):
        save(make_state(1))
    server.fault = lambda number, request: None
    # What is there now is half old and half new.
    with pytest.raises(CheckpointError, match="half old and half new"):
        checkpoint.open(ADDRESS)
    # Nor while another is sent, which may not end either.
    server.fault = lambda number, request: 403 if request.part is not None else None
    with pytest.raises(CheckpointException, match="403"):
        save(make_state(1))
    server.fault = lambda number, request: None
    with pytest.raises(CheckpointError, match="half old and half new"):
        checkpoint.open(ADDRESS)
    save(make_state(2), overwrite=False)
    expect_loaded(make_state(2))
    assert not server.pending
    assert not staged(tmp_path / "cache")


def test_clean_removes_what_a_save_left(server: BucketServer, tmp_path: Path) -> None:
    from cli.command_runs import run_here

    server.fault = lambda number, request: 403 if request.part is not None else None
    writer = StorageWriter(ADDRESS, format="safetensors")
    with pytest.raises(CheckpointException, match="403"):
        dcp.save(make_state(), storage_writer=writer, no_dist=True)
    server.fault = lambda number, request: None
    assert server.pending
    # What a rank that is killed leaves.
    left = rank_save_folder(local_target(RemotePath(ADDRESS), None)) / "rank-3"
    left.mkdir(parents=True)
    (left / "__3_0.distcp").touch()
    told = run_here("clean", f"s3://{BUCKET}/run", "--yes")
    assert told.code == 0, told.errors
    assert "step-1" in told.output
    assert not server.pending
    assert not server.objects
    assert not staged(tmp_path / "cache")


def test_a_lost_part_is_an_error(server: BucketServer) -> None:
    put_part = s3.S3Target.put_part

    def lose(self: Any, key: str, upload: str, part: int, body: Any) -> None:
        if part != 2:
            put_part(self, key, upload, part, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3.S3Target, "put_part", lose)
        with pytest.raises(CheckpointException, match="the store does not have bytes"):
            save(make_state())
    assert not any("/.reshard/" not in key for key in server.objects)


def test_files_outside_the_old_checkpoint_stay(server: BucketServer) -> None:
    save(make_state(1))
    server.client.put_object(Bucket=BUCKET, Key="run/step-1/notes/data.csv", Body=b"precious")
    server.client.put_object(Bucket=BUCKET, Key="run/step-1/old.distcp", Body=b"of a checkpoint")
    save(make_state(2))
    assert server.objects["run/step-1/notes/data.csv"] == b"precious"
    assert "run/step-1/old.distcp" not in server.objects


def test_an_existing_checkpoint_is_not_replaced(server: BucketServer) -> None:
    save(make_state())
    with pytest.raises(CheckpointException, match="the target exists"):
        save(make_state(1), overwrite=False)
    expect_loaded(make_state())


def test_ranks_of_several_hosts_write_no_common_file(server: BucketServer, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    plans = []
    for rank in range(2):
        planner = DefaultSavePlanner()
        planner.set_up_planner({f"w{rank}": torch.ones(4)}, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    for format, is_refused in (("safetensors", True), ("sharded-safetensors", False)):
        writer = StorageWriter(ADDRESS, format=format)
        writer.set_up_storage_writer(is_coordinator=True)
        told = [writer.prepare_local_plan(plan) for plan in plans]
        told[1] = dataclasses.replace(told[1], storage_data="another host")
        if is_refused:
            with pytest.raises(UsageError, match=r"ranks \[0, 1\], of which 1 is on another host"):
                writer.prepare_global_plan(told)
        else:
            own = [plan.storage_data.own_files.own for plan in writer.prepare_global_plan(told)]
            assert [len(files) for files in own] == [1, 1]
        writer.reset()


@pytest.mark.parametrize(
    ("address", "told"),
    [("hf://org/model", "can only be read"), (f"s3://{BUCKET}", "a whole bucket")],
)
def test_invalid_addresses_are_refused(address: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        StorageWriter(address)
    assert not StorageWriter.validate_checkpoint_id(address)
