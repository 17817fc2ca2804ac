"""Azurite on the loopback, behind a proxy that counts blocks and goes wrong as it is told."""

from __future__ import annotations

import base64
import http.client
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from bucket_server import BUCKET, BucketServer
from live_processes import free_port

if TYPE_CHECKING:
    from azure.storage.blob import BlobBlock

# The account of Azurite, which its manual names.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_READY_S = 60.0


class AzureRequest:
    """A request, as it is told apart in tests."""

    def __init__(self, method: str, target: str) -> None:
        parts = urlsplit(target)
        self.method = method
        self.key = unquote(parts.path).removeprefix(f"/{ACCOUNT}/{BUCKET}").strip("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        self.query = {name: values[0] for name, values in query.items()}

    @property
    def part(self) -> tuple[str, int] | None:
        """The key and the number of a block that is put: the digits at the end of its name.

        The package encodes names once more than they are given.
        """
        if self.method != "PUT" or self.query.get("comp") != "block":
            return None
        name = base64.b64decode(base64.b64decode(self.query["blockid"]))
        return self.key, int(name[-6:])


class AzureServer(BucketServer):
    """A container; see `BucketServer`. `client` is its client, past the proxy."""

    @property
    def objects(self) -> dict[str, bytes]:
        """The bytes of every blob, by its key."""
        return {one.name: self.read(one.name) for one in self.client.list_blobs()}

    def read(self, key: str) -> bytes:
        """The bytes of a blob."""
        return bytes(self.client.download_blob(key).readall())

    def put(self, key: str, content: bytes) -> None:
        """Put a blob."""
        self.client.upload_blob(key, content, overwrite=True)

    @property
    def pending(self) -> list[tuple[str, str]]:
        """Key of each blob that has blocks and is not there, and its first block."""
        there = {one.name for one in self.client.list_blobs()}
        every = self.client.list_blobs(include=["uncommittedblobs"])
        return [(one.name, "") for one in every if one.name not in there]

    def empty(self) -> None:
        """Delete everything, and forget requests and faults."""
        self.fault = lambda number, request: None
        for key, _ in self.pending:
            none: list[BlobBlock] = []
            self.client.get_blob_client(key).commit_block_list(none)
        for one in self.client.list_blobs():
            self.client.delete_blob(one.name)
        self.requests.clear()
        self.stored_parts.clear()

    def ask(self) -> None:
        """One request through the proxy."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", f"/{ACCOUNT}?comp=list")
        connection.getresponse().read()
        connection.close()

    port = 0


def _proxy(server: AzureServer, port: int) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            if len(body) < size:
                # Who sent it was killed.
                return
            request: Any = AzureRequest(self.command, self.path)
            fault = server.arrive(request)
            if isinstance(fault, int):
                self.send_response(fault)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "slam":
                return
            status, headers, answer = self._ask(body)
            if request.part is not None and status == 201:
                with server.lock:
                    server.stored_parts.append(request.part)
            if fault == "lost":
                return
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("connection", "transfer-encoding", "keep-alive"):
                    self.send_header(name, value)
            if self.command != "HEAD" and "content-length" not in {n.lower() for n, _ in headers}:
                self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            found = connection.getresponse()
            answer = found.read()
            connection.close()
            return found.status, found.getheaders(), answer

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815

    return Proxy


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Who is killed takes no answer."""


@contextmanager
def azure_server(program: str, setenv: Callable[[str, str], object]) -> Iterator[AzureServer]:
    """A server while the context lasts; `setenv` sets what reshard looks for.

    Args:
        program: the path of `azurite-blob`.
        setenv: sets a variable.
    """
    from azure.storage.blob import ContainerClient

    port = free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"]
    behind = subprocess.Popen(
        command, cwd=Path(program).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    server = AzureServer()
    httpd = _Quiet(("127.0.0.1", 0), _proxy(server, port))
    server.count_connections(httpd)
    server.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        _wait_for(port)
        credential = {"account_name": ACCOUNT, "account_key": KEY}
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        with ContainerClient(url, BUCKET, credential=credential) as server.client:
            server.client.create_container()
            setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
            setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
            setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.port}/{ACCOUNT}")
            yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        behind.terminate()
        behind.wait(20)


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + _READY_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)
        else:
            return
        finally:
            connection.close()
