"""Models of a Hub that stands on the loopback: names, commits, redirects, tokens, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from object_server import ObjectServer, object_server
from reshard import checkpoint
from reshard.errors import CheckpointError

pytest.importorskip("obstore")
constants = pytest.importorskip("huggingface_hub.constants")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
MODEL = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(12))
FILES = {"model.safetensors": MODEL, "config.json": b"{}", "onnx/model.txt": b"other"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """`org/model`, whose large file is served by another path, as by a content network."""
    with object_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        info = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": []}
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": f"blob-{path}"}
            for path, content in FILES.items()
        ] + [{"type": "directory", "path": "onnx", "oid": "tree"}]
        for revision in ("main", "v1", COMMIT):
            server.pages[f"/api/models/org/model/revision/{revision}"] = info
        server.pages["/api/models/org/model"] = info
        server.pages[f"/api/models/org/model/tree/{COMMIT}"] = tree
        for path, content in FILES.items():
            server.objects[f"/org/model/resolve/{COMMIT}/{path}"] = content
        large = f"/org/model/resolve/{COMMIT}/model.safetensors"
        server.redirects[large] = f"{server.url}/network/blob"
        server.objects["/network/blob"] = server.objects.pop(large)
        yield server


@pytest.mark.parametrize("name", ["hf://org/model", "hf://org/model@v1", "org/model"])
def test_models(
    hub: ObjectServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = checkpoint.open(name)
    assert str(opened.folder) == (name if "://" in name else f"hf://{name}")
    assert opened.carried == ("config.json", "onnx/model.txt")
    assert checkpoint.load(opened)["w"].tobytes() == bytes(range(12))
    checkpoint.convert(name, "here", to="full")
    assert checkpoint.compare(name, "here").is_same
    assert (tmp_path / "here" / "onnx" / "model.txt").read_bytes() == b"other"
    sent = [headers.get("authorization") for path, headers in hub.headers if "resolve" in path]
    assert sent and set(sent) == {"Bearer hf_secret"}


def test_a_folder_of_that_name_comes_first(
    hub: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint at org/model"):
        checkpoint.open("org/model")
    assert not hub.requests


def test_a_model_that_is_not_there(hub: ObjectServer) -> None:
    with pytest.raises(CheckpointError, match="hf://org/none: the Hub") as raised:
        checkpoint.open("hf://org/none")
    assert "hf_secret" not in str(raised.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense"])
def test_an_unreachable_hub_is_an_error(
    hub: ObjectServer, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(CheckpointError, match="hf://org/model: the Hub does not answer"):
        checkpoint.open("hf://org/model")
