"""A web server on the loopback that answers ranges of objects, and goes wrong as it is told."""

from __future__ import annotations

import email.utils
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class ObjectServer:
    """Objects by path, such as `/model/config.json`.

    Attributes:
        objects: the bytes of each.
        faults: of the next requests for bytes, one each: a status, `"cut"` for an answer that ends
            in its middle, `"slam"` for a connection that is closed unanswered.
        latency_s: before every answer.
        requests: how many there were, by method and path.
        sent_bytes: of bodies.
        most_at_once: how many requests for bytes were waiting together.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.pages: dict[str, object] = {}
        self.redirects: dict[str, str] = {}
        self.faults: list[int | str] = []
        self.latency_s = 0.0
        self.requests: Counter[str] = Counter()
        self.headers: list[tuple[str, dict[str, str]]] = []
        self.sent_bytes = 0
        self.most_at_once = self._waiting = 0
        self._digests: dict[str, tuple[bytes, str]] = {}
        self.modified_s = 1_700_000_000
        self.lock = threading.Lock()
        self.url = ""

    def find_digest(self, path: str, content: bytes) -> str:
        """Return the digest of an object, which is computed once for each content."""
        known, digest = self._digests.get(path, (None, ""))
        if known is not content:
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            self._digests[path] = content, digest
        return digest

    @contextmanager
    def waits(self, counts: bool) -> Iterator[None]:
        """A request waits, and counts where it is for bytes."""
        with self.lock:
            self._waiting += counts
            self.most_at_once = max(self.most_at_once, self._waiting)
        yield
        with self.lock:
            self._waiting -= counts


def _handler(server: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Small answers are not held back for more.
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, *, has_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            with server.lock:
                server.requests[f"{self.command} {path}"] += 1
                sent = {name.lower(): value for name, value in self.headers.items()}
                server.headers.append((path, sent))
                is_object = path in server.objects
                fault = server.faults.pop(0) if server.faults and is_object and has_body else None
            with server.waits(has_body):
                time.sleep(server.latency_s)
            if path in server.redirects:
                self.send_response(302)
                self.send_header("Location", server.redirects[path])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if path in server.pages:
                self.send(200, json.dumps(server.pages[path]).encode(), {}, has_body=has_body)
                return
            if fault == "slam":
                self.close_connection = True
                return
            if isinstance(fault, int) or not is_object:
                status = fault if isinstance(fault, int) else 404
                self.send(status, b"no", {"Retry-After": "0"}, has_body=has_body)
                return
            whole = server.objects[path]
            status, body, headers = 200, whole, {}
            asked = self.headers.get("Range")
            if asked and has_body:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                stop = int(last) + 1 if last else len(whole)
                body = whole[int(first) : stop]
                status = 206
                end = int(first) + len(body) - 1
                headers["Content-Range"] = f"bytes {first}-{end}/{len(whole)}"
            headers["ETag"] = f'"{server.find_digest(path, whole)}"'
            headers["Last-Modified"] = email.utils.formatdate(server.modified_s, usegmt=True)
            self.send(status, body, headers, has_body=has_body, is_cut=fault == "cut")

        def send(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str],
            *,
            has_body: bool,
            is_cut: bool = False,
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not has_body:
                return
            sent = body[: len(body) // 2] if is_cut else body
            with server.lock:
                server.sent_bytes += len(sent)
            self.wfile.write(sent)
            if is_cut:
                self.close_connection = True

    return Handler


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server while the context lasts."""
    server = ObjectServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(server)) as httpd:
        httpd.daemon_threads = True
        server.url = f"http://127.0.0.1:{httpd.server_port}"
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            httpd.shutdown()
            thread.join()
