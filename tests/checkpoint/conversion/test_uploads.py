"""Conversions to a bucket: what is put there, when it is seen, and what is left of a killed run."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket_server import BUCKET, BucketServer, Request, bucket_server
from checkpoint.any_conversion import plan_any
from checkpoint.campaigns.small_checkpoints import CONVERSIONS, SmallConversion
from checkpoint.checkpoint_files import tensor, write_file
from checkpoint.faulty_process import FaultyProcesses, Outcome
from checkpoint.model_files import COLUMNS, ROWS, write_model
from checkpoint.process_runs import run
from checkpoint.thread_processes import ThreadProcess, in_processes
from reshard.checkpoint import compare, convert, open_checkpoint, plan_conversion, run_conversion
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.storage import uploads
from reshard.errors import CheckpointError, RunError, UsageError
from selection import keep_covering, keep_where

pytest.importorskip("obstore")
pytest.importorskip("boto3")
pytest.importorskip("moto")


ADDRESS = f"s3://{BUCKET}/some/model"
# Formats of files that have checksums of their own.
CHECKED = ("torch-dcp", "rank-files", "deepspeed-zero3", "torch-dist", "megatron-legacy")
SMALL = {"block_bytes": 1 << 16, "part_bytes": 1 << 18, "sync_bytes": 1 << 18, "threads": 1}


@pytest.fixture(scope="module")
def running() -> Iterator[BucketServer]:
    with pytest.MonkeyPatch.context() as patch, bucket_server(patch.setenv) as server:
        # Manifests of other blocks are not read.
        patch.setattr(blocks, "BLOCK_BYTES", SMALL["block_bytes"])
        yield server


@pytest.fixture(scope="module")
def processes(running: BucketServer) -> Iterator[FaultyProcesses]:
    """Those that know of the server, which has its settings in the environment."""
    processes = FaultyProcesses()
    yield processes
    processes.close()


@pytest.fixture
def server(running: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """An empty bucket, and parts of 256 KiB."""
    monkeypatch.setattr(uploads, "MIN_PART_BYTES", SMALL["part_bytes"])
    running.empty()
    yield running
    running.empty()


@pytest.fixture(scope="module")
def rows(running: BucketServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source: shards of rows."""
    folder = tmp_path_factory.mktemp("rows")
    convert(write_model(folder / "whole"), folder / "rows", **ROWS)
    return folder / "rows"


def put(source: Path, staging: Path, **options: Any) -> None:
    convert(source, ADDRESS, staging=staging, **{**COLUMNS, **options})


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        f"some/model/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def expected(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects that there are at the end."""
    folder = tmp_path_factory.mktemp("expected") / "model"
    convert(rows, folder, **COLUMNS)
    return files_of(folder)


@pytest.mark.parametrize(
    "options",
    keep_where(
        lambda options: "tp" in options["to"],
        [
            {"to": "full", "most_file_bytes": 3_000_000},
            {"to": "tp=3", "rules": ["*.weight=-, tp", "*=..."], "replicas": "every"},
            {"to": "tp=2", "rules": ["*.weight=tp, -", "*=..."], "format": "torch-dcp"},
            {"to": "full", "format": "torch-pickle"},
        ],
        "the same parts of files, one rank",
    ),
    ids=lambda one: one.get("format", one["to"]),
)
def test_objects_are_the_files_of_a_folder(
    server: BucketServer, rows: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    convert(rows, tmp_path / "model", **options)
    convert(rows, ADDRESS, staging=tmp_path / "staging", **options)
    assert server.objects == files_of(tmp_path / "model")
    assert compare(ADDRESS, rows).is_same
    assert server.pending == [] and list((tmp_path / "staging").iterdir()) == []
    assert len(server.stored_parts) == len(set(server.stored_parts)) > 10


def test_parts_are_sent_meanwhile_and_their_space_is_given_back(
    server: BucketServer, rows: Path, tmp_path: Path
) -> None:
    used: list[int] = []

    def look(number: int, request: Request) -> None:
        if request.part is not None:
            files = [one for one in tmp_path.rglob("*.safetensors") if one.is_file()]
            used.append(sum(one.stat().st_blocks * 512 for one in files))

    server.fault = look
    conversion = plan_conversion(rows, ADDRESS, to="full")
    report = run_conversion(conversion, staging=tmp_path, threads=1)
    # The blocks of 4 MiB have many parts; without holes all of it would stand here at the end.
    assert report.size_bytes > 5_000_000
    assert len(used) > 15 and used[-1] < report.size_bytes // 2


KILLS = 6


@pytest.fixture(scope="module")
def calls(
    running: BucketServer,
    processes: FaultyProcesses,
    rows: Path,
    expected: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """The calls of an undisturbed run."""
    running.empty()
    staging = str(tmp_path_factory.mktemp("undisturbed"))
    outcome = processes.convert(rows, ADDRESS, staging=staging, **COLUMNS, **SMALL)
    assert running.objects == expected and outcome.error is None
    return outcome.calls


@pytest.mark.parametrize(
    ("is_elsewhere", "kill"),
    keep_covering(
        1,
        itertools.product((False, True), range(KILLS)),
        "every kill, here and elsewhere; each is in a default case",
    ),
)
def test_killed_and_run_again(
    server: BucketServer,
    processes: FaultyProcesses,
    rows: Path,
    expected: dict[str, bytes],
    calls: list[str],
    tmp_path: Path,
    kill: int,
    is_elsewhere: bool,
) -> None:
    """By the same command, here or on a machine that has nothing of the first run."""

    def run(folder: str, **options: Any) -> Outcome:
        staging = str(tmp_path / folder)
        return processes.convert(rows, ADDRESS, staging=staging, **COLUMNS, **SMALL, **options)

    kill_at = kill * (len(calls) - 1) // (KILLS - 1)
    assert run("here", kill_at=kill_at).was_killed
    server.settle()
    seen = {key for key in server.objects if "/.reshard/" not in key}
    if "some/model/.reshard" not in "".join(server.objects):
        assert seen in (set(), set(expected))
    elif seen:
        with pytest.raises(CheckpointError, match="half old and half new"):
            open_checkpoint(ADDRESS)
    again = run("elsewhere" if is_elsewhere else "here")
    if again.error is not None:
        # Nothing was left to do but to forget what was staged here.
        assert "the target exists" in again.error and seen == set(expected)
    assert server.objects == expected and server.pending == []
    assert len(server.stored_parts) == len(set(server.stored_parts))
    if not is_elsewhere:
        assert list((tmp_path / "here").iterdir()) == []


def test_parts_that_the_store_lost_are_done_again(
    server: BucketServer,
    processes: FaultyProcesses,
    rows: Path,
    expected: dict[str, bytes],
    calls: list[str],
    tmp_path: Path,
) -> None:
    def run(**options: Any) -> Outcome:
        return processes.convert(
            rows, ADDRESS, staging=str(tmp_path / "here"), **COLUMNS, **SMALL, **options
        )

    last = max(at for at, name in enumerate(calls) if name == "put_part")
    assert run(kill_at=last).was_killed
    for key, upload in server.pending:
        server.client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload)
    assert run().error is None
    assert server.objects == expected


def test_parts_that_others_replaced_in_the_store_are_sent_again(
    server: BucketServer,
    processes: FaultyProcesses,
    rows: Path,
    expected: dict[str, bytes],
    calls: list[str],
    tmp_path: Path,
) -> None:
    """Of the same size: by the checksum that the store lists, also where no bytes are left here."""

    def run(**options: Any) -> Outcome:
        return processes.convert(
            rows, ADDRESS, staging=str(tmp_path / "here"), **COLUMNS, **SMALL, **options
        )

    # Threads send parts in another order each time: at the last, all uploads may be complete.
    sent = [at for at, name in enumerate(calls) if name == "put_part"]
    assert run(kill_at=sent[len(sent) * 3 // 4]).was_killed
    # A part that was stored before the kill, but not recorded, is trusted: another host may have
    # sent it.
    (records,) = {path.parent for path in tmp_path.rglob("sent.*")}
    recorded = uploads.read_part_checksums(records.parent)
    replaced = 0
    for key, upload in server.pending:
        where = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
        for part in server.client.list_parts(**where).get("Parts", ()):
            if (key.rpartition("/")[2], part["PartNumber"] - 1) not in recorded:
                continue
            other = bytes(part["Size"])
            server.client.upload_part(**where, PartNumber=part["PartNumber"], Body=other)
            replaced += 1
    assert replaced > 1 and run().error is None
    assert server.objects == expected


def test_files_that_are_visible_are_not_sent_again(
    server: BucketServer,
    processes: FaultyProcesses,
    rows: Path,
    expected: dict[str, bytes],
    calls: list[str],
    tmp_path: Path,
) -> None:
    """Killed when all uploads are complete, before the manifest is there."""
    staging = str(tmp_path / "here")
    last = max(at for at, name in enumerate(calls) if name == "complete done")
    killed = processes.convert(rows, ADDRESS, staging=staging, kill_at=last, **COLUMNS, **SMALL)
    server.settle()
    assert killed.was_killed and server.pending == []
    again = processes.convert(rows, ADDRESS, staging=staging, **COLUMNS, **SMALL)
    assert again.error is None and server.objects == expected
    assert len(server.stored_parts) == len(set(server.stored_parts))


def test_failed_requests_are_repeated(
    server: BucketServer, rows: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    faults = {3: 500, 5: 503, 7: 429, 9: "slam", 12: "lost", 15: 429, 18: 0.2}
    completed: list[str] = []

    def fault(number: int, request: Request) -> int | str | float | None:
        if request.method == "POST" and "uploadId" in request.query:
            completed.append(request.key)
            return "lost" if len(completed) == 1 else None
        return faults.get(number)

    server.fault = fault
    put(rows, tmp_path, threads=4)
    assert server.objects == expected
    assert len(completed) > len(set(completed))


def test_an_upload_that_was_begun_twice_leaves_nothing(
    server: BucketServer, rows: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The answer is lost, so the store's package asks again; of the first nobody knows the id."""
    begun: list[str] = []

    def lose_the_first(number: int, request: Request) -> str | None:
        if request.method == "POST" and "uploads" in request.query:
            begun.append(request.key)
            return "lost" if len(begun) == 1 else None
        return None

    server.fault = lose_the_first
    put(rows, tmp_path)
    assert begun.count(begun[0]) == 2
    assert server.objects == expected and server.pending == []


def test_a_store_that_refuses(server: BucketServer, rows: Path, tmp_path: Path) -> None:
    server.fault = lambda number, request: 403 if request.part is not None else None
    with pytest.raises(RunError, match=r"cannot send bytes 0:262144: s3://weights/some/model/.*"):
        put(rows, tmp_path, threads=1)
    server.fault = lambda number, request: None
    put(rows, tmp_path)
    assert compare(ADDRESS, rows).is_same
    with pytest.raises(RunError, match="The specified bucket does not exist"):
        convert(rows, "s3://nobody/model", staging=tmp_path, **COLUMNS)


def test_a_target_that_exists(
    server: BucketServer, rows: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    server.put("some/model/weights.old", b"old")
    server.put("some/model/reshard.manifest.json", b"{}")
    server.put("some/model-2/weights", b"another")
    with pytest.raises(UsageError, match="the target exists: s3://weights/some/model"):
        put(rows, tmp_path)
    assert list(tmp_path.iterdir()) == [] and server.pending == []
    with pytest.raises(UsageError, match=r"no part of the checkpoint there:\n  weights.old\n"):
        put(rows, tmp_path, overwrite=True)
    assert server.objects["some/model/weights.old"] == b"old" and server.pending == []
    put(rows, tmp_path, overwrite=True, discard_others=True)
    assert server.objects == {**expected, "some/model-2/weights": b"another"}
    with pytest.raises(UsageError, match="can only be read; write to s3://"):
        convert(rows, "https://host/model", **COLUMNS)
    with pytest.raises(UsageError, match="a whole bucket; name a folder"):
        convert(rows, "s3://weights", **COLUMNS)
    with pytest.raises(UsageError, match="is an object"):
        convert(rows, f"{ADDRESS}/config.json", staging=tmp_path, **COLUMNS)


def test_another_conversion_has_begun(
    server: BucketServer, processes: FaultyProcesses, rows: Path, tmp_path: Path
) -> None:
    outcome = processes.convert(
        rows, ADDRESS, staging=str(tmp_path / "a"), kill_at=60, **COLUMNS, **SMALL
    )
    assert outcome.was_killed and server.pending
    with pytest.raises(CheckpointError, match="a conversion is writing one"):
        open_checkpoint(ADDRESS)
    with pytest.raises(RunError, match="another conversion has begun"):
        put(rows, tmp_path / "b", to="full", rules=[])
    put(rows, tmp_path / "b", to="full", rules=[], restart=True)
    assert server.pending == []
    assert {key.rpartition("/")[2] for key in server.objects} >= {"model.safetensors"}
    assert compare(ADDRESS, rows).is_same


def test_a_reader_sees_the_old_or_the_new(server: BucketServer, rows: Path, tmp_path: Path) -> None:
    """At every request of an overwriting run but those for parts."""
    put(rows, tmp_path, to="full", rules=[])
    old = json.loads(server.read("some/model/reshard.manifest.json"))["conversion_id"]
    seen: list[str] = []

    def look(number: int, request: Request) -> None:
        if request.part is not None:
            return
        server.fault = lambda number, request: None
        try:
            opened = open_checkpoint(ADDRESS)
            found = json.loads((opened.folder / "reshard.manifest.json").read_bytes())
            seen.append("old" if found["conversion_id"] == old else "new")
        except CheckpointError as error:
            seen.append("none" if "half old and half new" in str(error) else str(error))
        server.fault = look

    server.fault = look
    put(rows, tmp_path, overwrite=True, threads=1)
    order = [one for at, one in enumerate(seen) if at == 0 or seen[at - 1] != one]
    assert order in (["old", "none"], ["old", "none", "new"])
    assert compare(ADDRESS, rows).is_same


def test_processes_share_the_work(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, form = tmp_path / "model", "sharded-safetensors"
    model.mkdir()
    whole = {"w": tensor("float32", (300, 200), 1), "v": tensor("bfloat16", (101, 500), 2)}
    write_file(model / "model.safetensors", {**whole, "s": tensor("int64", (), 3)})
    assert run(1, model, tmp_path / "target", form)[0][0] == 0
    expected = files_of(tmp_path / "target")
    outcome = run(2, model, ADDRESS, form)
    assert [code for code, _ in outcome] == [0, 0], outcome
    assert server.objects == expected and server.pending == []
    assert len(server.stored_parts) == len(set(server.stored_parts)) > 20
    # One of them ends; another number of processes goes on with what both have done.
    server.empty()
    outcome = run(2, model, ADDRESS, form, 1, 1)
    assert outcome[1][0] == -9 and outcome[0][0] == 3, outcome
    assert [code for code, _ in run(3, model, ADDRESS, form)] == [0, 0, 0]
    assert server.objects == expected and server.pending == []
    assert list((tmp_path / "cache" / "reshard").iterdir()) == []


def make_model(folder: Path) -> Path:
    folder.mkdir()
    whole = {"w": tensor("float32", (300, 200), 1), "v": tensor("bfloat16", (101, 500), 2)}
    write_file(folder / "model.safetensors", {**whole, "s": tensor("int64", (), 3)})
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files wait for an address."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reshard"


@pytest.mark.parametrize(
    "form",
    keep_where(
        lambda form: form == "torch-dcp",
        ("sharded-safetensors", "torch-dcp", "torch-pickle"),
        "hosts that are threads write every format by default",
    ),
)
def test_hosts_share_the_work(
    server: BucketServer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    model = make_model(tmp_path / "model")
    assert run(1, model, tmp_path / "target", form)[0][0] == 0
    expected = files_of(tmp_path / "target")
    monkeypatch.setenv("HOSTS", "2")
    outcome = run(4, model, ADDRESS, form)
    assert [code for code, _ in outcome] == [0] * 4, outcome
    assert server.objects == expected and server.pending == []
    assert len(server.stored_parts) == len(set(server.stored_parts)) > 20
    assert list(cache.iterdir()) == []
    report = json.loads(outcome[0][1].splitlines()[-1])
    read = [read for read, _ in report["by_process"]]
    size_bytes = open_checkpoint(model).size_bytes
    # Blocks at the border of the hosts' parts are read by both: a few of 4096 bytes.
    assert max(sum(read[:2]), sum(read[2:])) < 0.6 * size_bytes
    assert sum(read) < 1.2 * size_bytes


ROWS_OF_HOSTS = [row for row in CONVERSIONS if row.format in CHECKED and "dtype" not in row.name]
FIRST_OF_FORMAT = {row.format: row for row in reversed(ROWS_OF_HOSTS)}


@pytest.mark.parametrize(
    "row",
    keep_where(
        lambda row: (
            row.format in ("torch-dcp", "torch-dist") and FIRST_OF_FORMAT[row.format] is row
        ),
        ROWS_OF_HOSTS,
        "another format: what hosts share does not depend on it",
    ),
    ids=lambda row: row.name,
)
def test_several_hosts_write_the_same_as_a_single_host(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: SmallConversion
) -> None:
    """Files with checksums, items and padding; begun by another number of hosts."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    monkeypatch.setattr(uploads, "MIN_PART_BYTES", 1024)
    (tmp_path / "made").mkdir()
    source, options = row.make(tmp_path / "made")
    run_conversion(plan_any(source, tmp_path / "here", **options))
    names = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: getattr(names, "host", "one"))

    def convert_on(hosts: int, most_sent: int | None = None) -> None:
        def work(process: ThreadProcess) -> None:
            names.host = f"host{process.rank % hosts}"
            conversion = plan_any(source, ADDRESS, **options)
            run_conversion(
                conversion, processes=process, staging=tmp_path, threads=1, sync_bytes=1024
            )

        if most_sent is not None:
            server.fault = lambda number, request: (
                403 if len(server.stored_parts) > most_sent else None
            )
        in_processes(hosts + 1, work)

    # Some have no more parts.
    with contextlib.suppress(RunError):
        convert_on(3, most_sent=3)
    server.fault = lambda number, request: None
    convert_on(2)
    assert server.objects == files_of(tmp_path / "here")
    assert server.pending == [] and len(server.stored_parts) == len(set(server.stored_parts))


@pytest.mark.parametrize(
    ("killed", "hosts", "form"),
    keep_where(
        lambda case: case == (0, 2, "sharded-safetensors"),
        [
            (*case, form)
            for case in ((0, 2), (3, 2), (1, 1), (2, 3))
            for form in ("sharded-safetensors", "torch-dcp")
        ],
        "another process dies, and another number of hosts goes on",
    ),
)
def test_killed_hosts_continue_whatever_number_of_hosts_goes_on(
    server: BucketServer,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: int,
    hosts: int,
    form: str,
) -> None:
    """Any number of hosts continues, each with what is on it."""
    model = make_model(tmp_path / "model")
    assert run(1, model, tmp_path / "target", form)[0][0] == 0
    expected = files_of(tmp_path / "target")
    monkeypatch.setenv("HOSTS", "2")
    outcome = run(4, model, ADDRESS, form, killed, 1)
    assert outcome[killed][0] == -9, outcome
    assert [code for rank, (code, _) in enumerate(outcome) if rank != killed] == [3] * 3, outcome
    sent = len(server.stored_parts)
    monkeypatch.setenv("HOSTS", str(hosts))
    outcome = run(3, model, ADDRESS, form)
    assert [code for code, _ in outcome] == [0] * 3, outcome
    assert server.objects == expected and server.pending == []
    # What the store has is not sent again.
    assert len(server.stored_parts) == len(set(server.stored_parts)) >= sent
    read = sum(one for one, _ in json.loads(outcome[0][1].splitlines()[-1])["by_process"])
    assert read < 1.1 * open_checkpoint(model).size_bytes
