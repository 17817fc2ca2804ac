"""Objects on a web server that goes wrong, and in a bucket."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from object_server import ObjectServer, object_server

pytest.importorskip("obstore")

from reshard import checkpoint
from reshard.checkpoint.storage import object_stores
from reshard.checkpoint.storage.object_stores import BucketSource, ObjectTarget, open_bucket
from reshard.errors import CheckpointError

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_stores, "_FIRST_WAIT_S", 0.001)
    with object_server() as found:
        found.objects["/model/a.bin"] = CONTENT
        yield found


def source_of(server: ObjectServer) -> BucketSource:
    return open_bucket("http", server.url.removeprefix("http://"))


def test_ranges_are_read_with_the_state_of_their_object(server: ObjectServer) -> None:
    source = source_of(server)
    state = source.head("model/a.bin")
    assert state is not None
    assert (state.size_bytes, state.modified_s) == (len(CONTENT), 1_700_000_000)
    memory = bytearray(70_000)
    assert source.read_into("model/a.bin", 12_345, memoryview(memory)) == state
    assert memory == CONTENT[12_345:82_345]
    assert source.head("model/b.bin") is None
    with pytest.raises(FileNotFoundError):
        source.read_into("model/b.bin", 0, memoryview(memory))


@pytest.mark.parametrize("fault", [500, 503, 429, "cut", "slam"])
def test_transient_failures_are_retried(server: ObjectServer, fault: int | str) -> None:
    server.faults = [fault] * 2
    memory = bytearray(len(CONTENT))
    source_of(server).read_into("model/a.bin", 0, memoryview(memory))
    assert memory == CONTENT
    assert server.requests["GET /model/a.bin"] == 3
    if fault == "cut":
        # Only what is missing is sent again.
        assert server.sent_bytes <= len(CONTENT)


@pytest.mark.parametrize(("status", "error"), [(403, PermissionError), (401, PermissionError)])
def test_refusals_are_not_retried(server: ObjectServer, status: int, error: type[OSError]) -> None:
    server.faults = [status] * 9
    with pytest.raises(error, match="denies access to this user"):
        source_of(server).read_into("model/a.bin", 0, memoryview(bytearray(8)))
    assert server.requests["GET /model/a.bin"] == 1


def test_persistent_failures_are_errors(server: ObjectServer) -> None:
    server.faults = ["cut"] * 99
    with pytest.raises(OSError, match=r"body|ended early|decod"):
        source_of(server).read_into("model/a.bin", 0, memoryview(bytearray(1 << 20)))


def test_a_web_server_is_asked_for_usual_names(server: ObjectServer) -> None:
    server.objects["/model/config.json"] = b"{}"
    server.objects["/model/odd name.txt"] = b"text"
    found = source_of(server).list_folder("model")
    assert set(found.objects) == {"config.json"}
    assert not found.is_complete
    assert source_of(server).head("model/odd name.txt") is not None


@pytest.mark.parametrize(
    ("address", "name", "value"),
    [
        ("s3://bucket/model", "AWS_ENDPOINT_URL", "nonsense"),
        ("s3://bucket/model", "AWS_ENDPOINT_URL", "http://a host"),
        ("s3://bucket/model", "AWS_PROFILE", "nobody's"),
        ("az://container/model", "AZURE_STORAGE_ENDPOINT", "nonsense"),
        ("az://container/model", "AWS_PROFILE", ""),
        ("gs://bucket/model", "STORAGE_EMULATOR_HOST", "a host"),
        ("https://host:port/model", "AWS_PROFILE", ""),
    ],
)
def test_wrong_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, address: str, name: str, value: str
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="set that right, or give another path"):
        checkpoint.open(address)


class Shelf(ObjectTarget):
    """A bucket whose client raises LookupErrors."""

    scheme, _name = "s3", "bucket"

    def _list_errors(self) -> tuple[type[Exception], ...]:
        return (LookupError,)

    def _explain(self, error: LookupError) -> tuple[int, str]:
        return (errno.ENOENT if isinstance(error, KeyError) else errno.EIO), str(error)


def test_a_missing_object_is_none_and_other_refusals_are_errors() -> None:
    def refuse(error: Exception) -> None:
        raise error

    shelf = Shelf()
    assert shelf._if_exists("a", lambda: 3) == 3
    assert shelf._if_exists("a", lambda: refuse(KeyError("no such key"))) is None
    with pytest.raises(OSError, match="busy") as caught:
        shelf._if_exists("a", lambda: refuse(IndexError("busy, at http://host/?secret=1")))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "s3://bucket/a")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="of ours"):
        shelf._if_exists("a", lambda: refuse(ValueError("of ours")))
