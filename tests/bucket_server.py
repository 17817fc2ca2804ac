"""moto's S3 server on the loopback, which counts requests and goes wrong as it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

import boto3
import moto.s3.models
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "weights"
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "tester",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Request:
    """A request, as it is told apart in tests."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self.method: str = environ["REQUEST_METHOD"]
        self.key: str = environ["PATH_INFO"].strip("/").partition("/")[2]
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        self.query = {name: values[0] for name, values in query.items()}

    @property
    def part(self) -> tuple[str, int] | None:
        """The key and the number of a part that is put."""
        number = self.query.get("partNumber")
        return None if self.method != "PUT" or number is None else (self.key, int(number))


class BucketServer:
    """A bucket.

    Attributes:
        requests: all that came, in their order.
        fault: what becomes of a request: None for nothing, a status, `"slam"` for a connection that
            is closed unanswered, `"lost"` for one that is closed when all is done, `"cut"` for an
            answer that ends in its middle, or seconds to wait as a float.
        stored_parts: the parts that were stored, in their order.
        client: of boto3.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.stored_parts: list[tuple[str, int]] = []
        self.fault: Callable[[int, Request], int | str | float | None] = lambda number, request: (
            None
        )
        self.lock = threading.Lock()
        self.client: Any = None
        self._connections = 0
        self._is_idle = threading.Condition(self.lock)

    @property
    def objects(self) -> dict[str, bytes]:
        """The bytes of every object, by its key."""
        return {key: self.read(key) for key in sorted(self._stored.keys)}

    def read(self, key: str) -> bytes:
        """The bytes of an object."""
        return bytes(self._stored.keys[key].value)

    def put(self, key: str, content: bytes) -> None:
        """Put an object."""
        moto.s3.models.s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(BUCKET, key, content)

    @property
    def pending(self) -> list[tuple[str, str]]:
        """Key and id of each upload that was begun and is not complete."""
        return [(upload.key_name, upload.id) for upload in self._stored.multiparts.values()]

    @property
    def _stored(self) -> Any:
        """The bucket as moto has it: asking by requests takes many times as long."""
        return moto.s3.models.s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]

    def settle(self) -> None:
        """Wait until all is answered that clients sent which are gone."""
        # Connections are taken in their order: earlier ones are counted when this is answered.
        self.ask()
        with self._is_idle:
            if not self._is_idle.wait_for(lambda: self._connections == 0, timeout=60):
                raise TimeoutError("a request is not answered")

    def ask(self) -> None:
        """One request."""
        self.client.list_buckets()

    def arrive(self, request: Any) -> int | str | None:
        """Count a request, and wait where its fault is to; what becomes of it else."""
        with self.lock:
            self.requests.append(request)
            number = len(self.requests)
        fault = self.fault(number, request)
        if isinstance(fault, float):
            time.sleep(fault)
            return None
        return fault

    def count_connections(self, httpd: Any) -> None:
        """Count the connections that are open, for `settle`."""
        take, close = httpd.process_request, httpd.shutdown_request

        def taken(*connection: Any) -> None:
            with self.lock:
                self._connections += 1
            take(*connection)

        def closed(connection: Any) -> None:
            close(connection)
            with self._is_idle:
                self._connections -= 1
                self._is_idle.notify_all()

        httpd.process_request, httpd.shutdown_request = taken, closed

    def empty(self) -> None:
        """Delete everything, and forget requests and faults."""
        self.fault = lambda number, request: None
        for key in list(self._stored.keys):
            self._stored.keys.pop(key)
        for _, upload in self.pending:
            del self._stored.multiparts[upload]
        self.requests.clear()
        self.stored_parts.clear()


def _app(server: BucketServer) -> Callable[..., Iterable[bytes]]:
    # Its dispatcher lists the services in its folder at each request.
    inner = create_backend_app("s3")

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        fault = server.arrive(request)
        if isinstance(fault, int):
            start_response(f"{fault} no", [("Content-Length", "0")])
            return [b""]
        if fault == "slam":
            raise ConnectionResetError("as told")

        def begin(status: str, *others: Any) -> Any:
            if request.part is not None and status.startswith("200"):
                with server.lock:
                    server.stored_parts.append(request.part)
            return start_response(status, *others)

        found = inner(environ, begin)
        if fault in ("lost", "cut"):
            body = b"".join(found)
            if fault == "lost":
                raise ConnectionResetError("as told")
            return [body[: len(body) // 2]]
        return found

    return answer


class _Quiet(WSGIRequestHandler):
    # One request a connection: what is closed on purpose breaks no other.
    protocol_version = "HTTP/1.0"

    def log(self, *_: object, **__: object) -> None:
        pass


@contextmanager
def bucket_server(setenv: Callable[[str, str], object]) -> Iterator[BucketServer]:
    """A server while the context lasts; `setenv` sets what boto3 and others look for."""
    server = BucketServer()
    # Parts of a real store are of 5 MiB at least.
    least = moto.s3.models.S3_UPLOAD_PART_MIN_SIZE
    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1
    httpd = make_server("127.0.0.1", 0, _app(server), threaded=True, request_handler=_Quiet)
    server.count_connections(httpd)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for name, value in SETTINGS.items():
        setenv(name, value)
    setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{httpd.server_port}")
    server.client = boto3.client("s3")
    server.client.create_bucket(Bucket=BUCKET)
    server.requests.clear()
    try:
        yield server
    finally:
        server.empty()
        server.client.close()
        httpd.shutdown()
        thread.join()
        httpd.server_close()
        moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = least
