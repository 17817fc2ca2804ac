"""`reshard clean`: what conversions to a bucket left, listed and removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore")
pytest.importorskip("boto3")
pytest.importorskip("moto")

from bucket_server import BUCKET, BucketServer, bucket_server
from cli.command_runs import run_here, write_model
from reshard.checkpoint.storage import uploads

CONVERT = ("convert", "own", f"s3://{BUCKET}/models/a", "--to", "full", "--staging", "staging")


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    monkeypatch.setattr(uploads, "MIN_PART_BYTES", 1 << 16)
    write_model(folder / "own", w=np.arange(100_000, dtype=np.float32), b=np.ones(7, np.int16))
    with bucket_server(monkeypatch.setenv) as server:
        yield server


def abandon(server: BucketServer) -> None:
    """Leave a conversion of which three parts are there."""
    server.fault = lambda number, request: 403 if request.part and request.part[1] > 3 else None
    run = run_here(*CONVERT, "--threads", "1")
    assert run.code == 3 and "check that these credentials may" in run.errors
    server.fault = lambda number, request: None


def test_leftovers_are_listed_and_removed(server: BucketServer, folder: Path) -> None:
    other = server.client.create_multipart_upload(Bucket=BUCKET, Key="models/a/by-another")
    server.put("models/b/model.safetensors", b"a checkpoint")
    assert run_here("clean", f"s3://{BUCKET}").output.startswith("nothing is left of conversions")
    abandon(server)
    before = server.objects
    listed = run_here("clean", f"s3://{BUCKET}/models", "--staging", "staging")
    assert listed.code == 0 and server.objects == before
    row = listed.output.splitlines()[2].split()
    assert row[:4] == [f"s3://{BUCKET}/models/a", "197", "kB", "1"] and "staging/" in row[-1]
    assert "nothing was removed; --yes removes what is listed" in listed.output
    json = run_here("clean", f"s3://{BUCKET}", "--staging", "staging", "--json").json
    assert not json["removed"] and json["uploads"][0]["size_bytes"] == 3 << 16
    assert json["uploads"][0]["staged"] and not json["uploads"][0]["half_visible"]
    removed = run_here("clean", f"s3://{BUCKET}/models/a", "--staging", "staging", "--yes")
    assert removed.code == 0 and removed.output.endswith("removed\n")
    assert server.objects == {"models/b/model.safetensors": b"a checkpoint"}
    assert server.pending == [("models/a/by-another", other["UploadId"])]
    assert list((folder / "staging").iterdir()) == []


def test_the_same_command_continues_from_leftovers(server: BucketServer) -> None:
    abandon(server)
    assert run_here(*CONVERT, "--dry-run").output.count("an earlier run left work in") == 1
    done = run_here(*CONVERT)
    assert done.code == 0 and done.output.startswith(f"own to s3://{BUCKET}/models/a, for ")
    finished = [one for one in server.stored_parts if one[1] <= 3]
    assert len(finished) == len(set(finished)) == 3
    assert run_here("verify", "own", f"s3://{BUCKET}/models/a").code == 0
    again = run_here(*CONVERT)
    assert again.code == 2 and "the target exists: s3://" in again.errors
    assert "the target exists" in run_here(*CONVERT, "--dry-run").errors


def test_a_partly_visible_target_is_kept(server: BucketServer) -> None:
    # The request that makes the object is refused: from then on it is for readers to see.
    server.fault = lambda number, request: (
        403 if request.method == "POST" and "uploadId" in request.query else None
    )
    assert run_here(*CONVERT).code == 3
    server.fault = lambda number, request: None
    before = server.objects
    kept = run_here("clean", f"s3://{BUCKET}", "--yes")
    assert "partly visible" in kept.output and server.objects == before and server.pending
    refused = run_here("inspect", f"s3://{BUCKET}/models/a")
    assert refused.code == 2 and "reshard" not in refused.output
    assert run_here(*CONVERT).code == 0
    assert run_here("clean", f"s3://{BUCKET}").output.startswith("nothing is left")


def test_a_folder_of_this_machine(folder: Path) -> None:
    run = run_here("clean", "model")
    assert run.code == 2 and "is a path of this machine" in run.errors
    assert "can only be read" in run_here("clean", "https://host/model").errors
