"""PyTorch's own save writes every format through `StorageWriter`, whole or not at all."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from reshard import checkpoint
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.errors import RunError, UsageError

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402

from reshard.torch import StorageReader, StorageWriter  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FORMATS = ["torch-dcp", "sharded-safetensors", "safetensors"]


def made(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(3000, 700, generator=generator)
    return {
        "w": torch.randn(100, 70, generator=generator).bfloat16(),
        "big": big,
        "t": torch.randn(50, 20, generator=generator).t(),
        "v": big[5:9, 3:40],
        "q": torch.randn(8, 8, generator=generator).to(torch.float8_e4m3fn),
        "s": torch.tensor(3.0),
        "e": torch.zeros(0, 4),
        "i": torch.arange(7),
        "p": torch.nn.Parameter(torch.ones(3)),
    }


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


def save(state: dict[str, Any], writer: Any, **how: Any) -> Any:
    return dcp.save(state, storage_writer=writer, no_dist=True, **how)


def check(folder: Path, state: dict[str, Any], reader: Any = None) -> None:
    found = zeros(state)
    dcp.load(found, storage_reader=reader or StorageReader(folder), no_dist=True)
    for name, value in state.items():
        assert bits(found[name]) == bits(value), name


def bits(value: Any) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_format(tmp_path: Path, format: str, threads: int) -> None:
    state = made()
    writer = StorageWriter(tmp_path / "a", format=format, thread_count=threads)
    metadata = save(state, writer)
    assert metadata.storage_meta.save_id == writer.save_id
    assert {index.fqn for index in metadata.storage_data} == {*state}
    check(tmp_path / "a", state)
    found = checkpoint.open(tmp_path / "a")
    assert found.format == format
    report = checkpoint.check_digests(found)
    assert not report.damaged and not report.without_digest
    assert os.listdir(tmp_path) == ["a"]


def test_pytorch_reads_what_is_written(tmp_path: Path) -> None:
    state = {**made(), "lr": 0.5}
    save({"model": state, "list": [1, {"a": torch.ones(2)}]}, StorageWriter(tmp_path / "a"))
    found = {"model": zeros(state), "list": [0, {"a": torch.zeros(2)}]}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "a"), no_dist=True)
    assert found["model"].pop("lr") == 0.5 and found["list"][0] == 1
    assert torch.equal(found["list"][1]["a"], torch.ones(2))
    assert all(bits(found["model"][name]) == bits(value) for name, value in made().items())
    plain = {name: value for name, value in made().items() if name != "p"}
    save(plain, StorageWriter(tmp_path / "b", format="sharded-safetensors"))
    check(tmp_path / "b", plain, dcp.HuggingFaceStorageReader(str(tmp_path / "b")))


def test_other_packages_read_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = made()
    writer = StorageWriter(tmp_path / "a", format="safetensors", metadata={"made": "here"})
    save(state, writer)
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert all(bits(found[name]) == bits(value) for name, value in state.items())
    assert checkpoint.open(tmp_path / "a").metadata["made"] == "here"


@pytest.mark.parametrize("format", FORMATS)
def test_an_existing_checkpoint_is_replaced_or_refused(tmp_path: Path, format: str) -> None:
    save({"old": torch.ones(3)}, StorageWriter(tmp_path / "a", format=format))
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "a" / "other").mkdir()
    with pytest.raises(CheckpointException, match=r"there is a checkpoint at .*overwrite=True"):
        save(made(), StorageWriter(tmp_path / "a", format=format, overwrite=False))
    check(tmp_path / "a", {"old": torch.ones(3)})
    save(made(), StorageWriter(tmp_path / "a", format=format))
    check(tmp_path / "a", made())
    assert "old" not in checkpoint.open(tmp_path / "a").tensors
    # What is no part of the checkpoint stays.
    assert (tmp_path / "a" / "config.json").exists() and (tmp_path / "a" / "other").is_dir()
    assert os.listdir(tmp_path) == ["a"]


def test_other_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("kept")
    save(made(), StorageWriter(tmp_path / "a", overwrite=False))
    check(tmp_path / "a", made())
    assert (tmp_path / "a" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_failed_save_leaves_the_folder_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    if is_there:
        save({"old": torch.ones(3)}, StorageWriter(tmp_path / "a"))
    kept = TargetFile.write

    def fail(self: TargetFile, region: memoryview, offset_bytes: int) -> None:
        if region.nbytes > 1 << 20:
            raise RunError("the disk is full")
        kept(self, region, offset_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(TargetFile, "write", fail)
        with pytest.raises(CheckpointException, match="the disk is full"):
            save(made(), StorageWriter(tmp_path / "a"))
    assert (tmp_path / "a").exists() == is_there
    if is_there:
        check(tmp_path / "a", {"old": torch.ones(3)})
    # The next save starts over.
    save(made(), StorageWriter(tmp_path / "a"))
    check(tmp_path / "a", made())
    assert os.listdir(tmp_path) == ["a"]


def test_async_save(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    try:
        state = made()
        future = dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "a"))
        future.result()
    finally:
        torch.distributed.destroy_process_group()
    check(tmp_path / "a", state)


def test_it_can_go_to_another_process(tmp_path: Path) -> None:
    again = pickle.loads(pickle.dumps(StorageWriter(tmp_path / "a", format="safetensors")))
    save(made(), again)
    check(tmp_path / "a", made())
    reader = pickle.loads(pickle.dumps(StorageReader(tmp_path / "a")))
    check(tmp_path / "a", made(), reader)


def test_another_place_by_its_id(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "a")
    first = writer.save_id
    save(made(), writer)
    save(made(1), writer, checkpoint_id=tmp_path / "b")
    check(tmp_path / "a", made())
    check(tmp_path / "b", made(1))
    assert writer.checkpoint_id == tmp_path / "b" and writer.save_id != first


def test_values_that_a_format_cannot_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointException, match="'lr', 'step' are no tensors, and safetensors has no"
    ):
        save({**made(), "lr": 1, "step": 2}, StorageWriter(tmp_path / "a", format="safetensors"))
    assert os.listdir(tmp_path) == []


def test_cached_plans_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(state, StorageWriter(tmp_path / "a"), planner=planner)
    with pytest.raises(CheckpointException, match="save without enable_plan_caching"):
        save(state, StorageWriter(tmp_path / "b"), planner=planner)


def test_saves_without_collectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use_collectives=False"):
        StorageWriter(tmp_path / "a").set_up_storage_writer(True, rank=0, use_collectives=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"path": 7}, "a checkpoint at 7: expected a path"),
        ({"path": "https://host/b"}, "https:// can only be read"),
        ({"path": "a", "format": "x"}, "unknown format 'x'"),
        ({"path": "a", "thread_count": 0}, "thread_count 0"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        StorageWriter(**arguments)


def test_ids(tmp_path: Path) -> None:
    assert StorageWriter.validate_checkpoint_id(tmp_path / "a" / "b")
    assert StorageWriter.validate_checkpoint_id("gs://bucket/a")
    assert not StorageWriter.validate_checkpoint_id("gs://bucket")
