"""Checkpoints of every kind, read from a bucket as from a folder."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("obstore")
pytest.importorskip("boto3")
pytest.importorskip("moto")

from bucket_server import BUCKET, BucketServer, bucket_server
from checkpoint.any_conversion import plan_any
from checkpoint.campaigns.small_checkpoints import CONVERSIONS, SOURCES, SmallConversion, Source
from reshard.checkpoint import compare, open_checkpoint, run_conversion
from reshard.checkpoint.formats.torch_files.reading import WindowReader
from reshard.errors import CheckpointError
from selection import keep_first_of, keep_where

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with pytest.MonkeyPatch.context() as patch, bucket_server(patch.setenv) as server:
        yield server


Upload = Callable[[Path], str]


@pytest.fixture
def upload(server: BucketServer) -> Iterator[Upload]:
    """Puts a folder or a file into the bucket, and gives its address."""

    def put(path: Path) -> str:
        files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
        for file in files:
            key = f"some/{path.name}/{file.relative_to(path)}".removesuffix("/.")
            server.put(key, file.read_bytes())
        return f"s3://{BUCKET}/some/{path.name}"

    yield put
    server.empty()


@pytest.mark.parametrize(
    "source",
    keep_first_of(
        lambda source: source.format,
        SOURCES,
        "another checkpoint of a format that a default case reads",
    ),
    ids=lambda source: source.name,
)
def test_every_kind_of_checkpoint(source: Source, upload: Upload, tmp_path: Path) -> None:
    path = source.make(tmp_path)
    here, there = source.open(path), open_checkpoint(upload(path), **source.opening)
    assert there.format == source.format
    assert [*there.tensors] == [*here.tensors] and there.values == here.values
    assert (there.carried, there.left_out) == (here.carried, here.left_out)
    assert compare(here, there).is_same


OF_MANY_FILES = {"FSDP2", "ZeRO 2", "ZeRO experts", "DeepSpeed universal", "Megatron ranks"}


@pytest.mark.parametrize(
    "source",
    [one for one in SOURCES if one.name in OF_MANY_FILES],
    ids=lambda source: source.name,
)
def test_files_of_ranks_are_opened_together(
    source: Source, upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, lock, reading = WindowReader.read, threading.Lock(), Counter[str]()
    most = 0

    def read_slowly(self: WindowReader, offset: int, size: int) -> bytes:
        nonlocal most
        with lock:
            reading[str(self._path)] += 1
            most = max(most, len(+reading))
        time.sleep(0.01)
        try:
            return read(self, offset, size)
        finally:
            with lock:
                reading[str(self._path)] -= 1

    path = source.make(tmp_path)
    monkeypatch.setattr(WindowReader, "read", read_slowly)
    open_checkpoint(path, **source.opening)
    # Files of this machine one after the other.
    assert most == 1
    open_checkpoint(upload(path), **source.opening)
    assert most > 1


FIRST_OF_FORMAT = {one.format: one.name for one in reversed(CONVERSIONS)}


@pytest.mark.parametrize(
    "conversion",
    keep_where(
        lambda one: one.name == FIRST_OF_FORMAT[one.format] or "with" in one.name,
        CONVERSIONS,
        "another conversion to a format that a default case writes",
    ),
    ids=lambda one: one.name,
)
def test_every_kind_of_conversion(
    conversion: SmallConversion, upload: Upload, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    path, options = conversion.make(tmp_path / "made")
    run_conversion(plan_any(path, tmp_path / "here", **options))
    if "adapters" in options:
        options["adapters"] = [upload(Path(one)) for one in options["adapters"]]
    run_conversion(plan_any(upload(path), tmp_path / "there", **options))
    assert compare(tmp_path / "here", tmp_path / "there").is_same


def test_a_bucket_that_is_not_there(server: BucketServer) -> None:
    """Neither request is repeated: an error response is final, whatever its names contain."""
    address = "s3://nobody-has-this/model"
    says = f"cannot read {address}: 404 Not Found The specified bucket does not exist"
    server.requests.clear()
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(address)
    assert len(server.requests) == 2
