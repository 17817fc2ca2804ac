"""The store of a link, served by the trainer's first rank to processes that know the secret.

PyTorch's `TCPStore` listens at all addresses of a host, answers anybody, and waits a tenth of a
second or more for each connection that says nothing. This one binds to the address of the link
alone, and has nothing for whoever does not prove the secret first::

    server                                      any process
    what it is, salt, its code, nonce    --->
                                         <---   code of the nonce
    whether it is right                  --->
                                         <---   operation, key, value
    answer                               --->

One thread serves all connections, and waits for none of them. Those that have not proved the
secret are closed after `_GREETING_S`, and the oldest of them once there are `_MAX_UNKNOWN`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hmac
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from reshard.errors import LinkError
from reshard.torch.links.sealed_store import SALT_BYTES, code_of, derive_key

_MAGIC = b"reshard1"
_NONCE_BYTES, _CODE_BYTES = 16, 32
_HELLO_BYTES = len(_MAGIC) + SALT_BYTES + _CODE_BYTES + _NONCE_BYTES
_GREETING_S, _MAX_UNKNOWN = 10.0, 1024
_REQUEST, _ANSWER = struct.Struct("<cII"), struct.Struct("<BI")
_MAX_BYTES = 1 << 26
_SET, _GET, _ADD, _CHECK, _DELETE = b"S", b"G", b"A", b"C", b"D"


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection: since when, its nonce until the secret is proved, and bytes both ways."""

    since_s: float
    nonce: bytes
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class StoreServer:
    """Serves a store until it is closed, or nobody has it any more.

    Args:
        addresses: where to listen: host and port of each.
        secret: what clients prove.

    Raises OSError where an address cannot be listened at.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: str) -> None:
        listeners: list[socket.socket] = []
        try:
            for host, port in addresses:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listeners.append(socket.create_server((host, port), family=family, backlog=1024))
        except OSError:
            for one in listeners:
                one.close()
            raise
        salt = os.urandom(SALT_BYTES)
        #: The addresses that it listens at, as the system names them.
        self.addresses = [one.getsockname()[:2] for one in listeners]
        waker, woken = socket.socketpair()
        service = _Service(listeners, woken, salt, derive_key(secret, salt))
        threading.Thread(target=service.serve, name="reshard store", daemon=True).start()
        # The thread has the service alone, so that this object can go.
        self._end = weakref.finalize(self, waker.close)

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        self._end()


class _Service:
    """What the thread of a server has."""

    def __init__(
        self, listeners: Sequence[socket.socket], woken: socket.socket, salt: bytes, key: bytes
    ) -> None:
        self._listeners, self._woken, self._key = frozenset(listeners), woken, key
        self._greeting = _MAGIC + salt + code_of(key, salt)
        self._values: dict[bytes, bytes] = {}
        # In the order of their coming.
        self._unknown: dict[socket.socket, _Peer] = {}
        self._known: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        for one in (*listeners, woken):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until the other end of `woken` is closed."""
        try:
            while True:
                for key, events in self._selector.select(1.0 if self._unknown else None):
                    found = key.fileobj
                    if found is self._woken:
                        return
                    if found in self._listeners:
                        self._accept(found)
                    elif found in self._unknown or found in self._known:
                        self._attend(found, events)
                late_s = time.monotonic() - _GREETING_S
                for one in [one for one, peer in self._unknown.items() if peer.since_s < late_s]:
                    self._drop(one)
        finally:
            for one in [*self._unknown, *self._known, *self._listeners, self._woken]:
                one.close()
            self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            found, _ = listener.accept()
        except OSError:
            # It went again, or this process has too many files open.
            time.sleep(0.01)
            return
        if len(self._unknown) >= _MAX_UNKNOWN:
            self._drop(next(iter(self._unknown)))
        peer = _Peer(time.monotonic(), os.urandom(_NONCE_BYTES))
        found.setblocking(False)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(found, selectors.EVENT_READ)
        self._unknown[found] = peer
        self._send(found, peer, self._greeting + peer.nonce)

    def _attend(self, connected: socket.socket, events: int) -> None:
        peer = self._known.get(connected) or self._unknown[connected]
        if events & selectors.EVENT_WRITE:
            self._send(connected, peer, b"")
        if not events & selectors.EVENT_READ:
            return
        try:
            received = connected.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._drop(connected)
            return
        peer.received += received
        if connected in self._unknown and not self._admit(connected, peer):
            return
        while (request := self._next_request(connected, peer)) is not None:
            self._send(connected, peer, self._answer(*request))

    def _admit(self, connected: socket.socket, peer: _Peer) -> bool:
        """Whether a peer has proved the secret by now; one that is wrong is closed."""
        if len(peer.received) < _CODE_BYTES:
            return False
        code = bytes(peer.received[:_CODE_BYTES])
        if not hmac.compare_digest(code, code_of(self._key, b"store", peer.nonce)):
            self._drop(connected)
            return False
        del self._unknown[connected], peer.received[:_CODE_BYTES]
        self._known[connected] = peer
        self._send(connected, peer, _ANSWER.pack(1, 0))
        return True

    def _next_request(
        self, connected: socket.socket, peer: _Peer
    ) -> tuple[bytes, bytes, bytes] | None:
        data = peer.received
        if connected not in self._known or len(data) < _REQUEST.size:
            return None
        operation, key_bytes, value_bytes = _REQUEST.unpack_from(data)
        end = _REQUEST.size + key_bytes + value_bytes
        if end > _MAX_BYTES:
            self._drop(connected)
            return None
        if len(data) < end:
            return None
        at = _REQUEST.size + key_bytes
        request = operation, bytes(data[_REQUEST.size : at]), bytes(data[at:end])
        del data[:end]
        return request

    def _answer(self, operation: bytes, key: bytes, value: bytes) -> bytes:
        values, found, payload = self._values, True, b""
        if operation == _SET:
            values[key] = value
        elif operation == _GET:
            found, payload = key in values, values.get(key, b"")
        elif operation == _ADD:
            payload = values[key] = str(int(values.get(key, b"0")) + int(value)).encode()
        elif operation == _CHECK:
            found = all(one in values for one in key.split(b"\n"))
        else:
            found = values.pop(key, None) is not None
        return _ANSWER.pack(found, len(payload)) + payload

    def _send(self, connected: socket.socket, peer: _Peer, data: bytes) -> None:
        """Send what can be sent at once; the rest once the peer takes more."""
        peer.unsent += data
        try:
            while peer.unsent:
                del peer.unsent[: connected.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connected)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(connected).events != wanted:
            self._selector.modify(connected, wanted)

    def _drop(self, connected: socket.socket) -> None:
        if self._unknown.pop(connected, None) or self._known.pop(connected, None):
            self._selector.unregister(connected)
            connected.close()


class StoreLine:
    """A process's connection to a store. Its methods are those of torch's stores that links need.

    Args:
        host, port: where the server is.
        secret: that of the link.
        timeout_s: how long to wait for an answer.

    Raises:
        LinkError: the server has another secret, or is no link's.
        OSError: it does not answer.
    """

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        # Whoever no longer has a store gives its connection back.
        self._end = weakref.finalize(self, self._socket.close)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = self._receive(_HELLO_BYTES)
            salt, code = greeting[len(_MAGIC) :][:SALT_BYTES], greeting[-48:-_NONCE_BYTES]
            if not greeting.startswith(_MAGIC):
                raise LinkError(f"what listens at {host}:{port} is no link's store")
            self.key = derive_key(secret, salt)
            if not hmac.compare_digest(code, code_of(self.key, salt)):
                raise LinkError(
                    "the link has another secret; give all processes of both sides the same "
                    "`secret=` (or environment variable RESHARD_LINK_SECRET)"
                )
            self._socket.sendall(code_of(self.key, b"store", greeting[-_NONCE_BYTES:]))
            self._receive(_ANSWER.size)
        except BaseException:
            self._socket.close()
            raise

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long `get` and `wait` of a sealed store wait."""
        self.timeout = timeout

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._ask(_SET, key, value)

    def get(self, key: str) -> bytes:
        """Read a value, which must be there."""
        return self._ask(_GET, key)[1]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return what it is then."""
        return int(self._ask(_ADD, key, str(value).encode())[1])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return not keys or self._ask(_CHECK, "\n".join(keys))[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key, and return whether it was there."""
        return self._ask(_DELETE, key)[0]

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._end()

    def _ask(self, operation: bytes, key: str, value: bytes = b"") -> tuple[bool, bytes]:
        """Return what the server answers. Raises RuntimeError, as torch's stores do, if it does
        not."""
        name = key.encode()
        request = _REQUEST.pack(operation, len(name), len(value)) + name + value
        try:
            with self._lock:
                self._socket.sendall(request)
                found, size = _ANSWER.unpack(self._receive(_ANSWER.size))
                return bool(found), self._receive(size)
        except OSError as error:
            # After half an answer the next one would be taken for its rest.
            self._socket.close()
            raise RuntimeError(f"the link's store does not answer: {error}") from error

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            more = self._socket.recv(size - len(received))
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            received += more
        return bytes(received)
