"""The store of a link: its address and who may use it, its server, and sealed keys and values.

An address is `tcp://host:port` (`LinkAddress`). One process serves the store there, and all others
must reach it. A process's own address, by which others reach it, is that of the network that leads
to the store: if that is the loopback interface, nothing of a link is reachable from outside.

PyTorch's `TCPStore` listens at all addresses of a host, accepts any client, and waits a tenth of a
second or more for each silent connection. `StoreServer` binds to the address of the link only, and
serves only clients that prove the secret::

    server                                      any process
    magic, salt, its code, nonce         --->
                                         <---   code of the nonce
    whether it is right                  --->
                                         <---   operation, key, value
    answer                               --->

A single thread serves all connections without blocking on any. Unauthenticated connections are
closed after `_GREETING_S`, and the oldest of them above `_MAX_UNKNOWN`.

A process on the network path could change messages. Each key and value therefore carries a code of
the secret (HMAC with SHA-256)::

    key    "0/card/2"       ->   code of the key
    value  "..."            ->   code of key and value, value

A value with another secret's code, or moved to another key, is refused. Values are not encrypted. A
guess at the secret costs 16 MiB and some 50 ms (scrypt).

Source: RFC 2104 (HMAC), RFC 7914 (scrypt).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import hmac
import ipaddress
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from reshard.errors import LinkError, UsageError
from reshard.log import WaitNotice

_MAGIC = b"reshard1"
NONCE_BYTES, _CODE_BYTES = 16, 32
SALT_BYTES = 16
_HELLO_BYTES = len(_MAGIC) + SALT_BYTES + _CODE_BYTES + NONCE_BYTES
_GREETING_S, _MAX_UNKNOWN = 10.0, 1024
_REQUEST, _ANSWER = struct.Struct("<cII"), struct.Struct("<BI")
# A client announces the size of its request, and must not exhaust the server's memory.
_MAX_BYTES = 1 << 26
_SET, _GET, _ADD, _CHECK, _DELETE = b"S", b"G", b"A", b"C", b"D"


@dataclass(slots=True, eq=False)
class Peer:
    """A connection: start time, nonce until the secret is proved, and buffers."""

    since_s: float
    nonce: bytes
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class ProvingServer:
    """The state of a thread that serves processes which have proved a secret.

    Args:
        listeners: listening sockets.
        key: derived from the secret.
        proof_bytes: the length of what a process sends first.
    """

    def __init__(self, listeners: Sequence[socket.socket], key: bytes, proof_bytes: int) -> None:
        self._listeners, self._key, self._proof_bytes = frozenset(listeners), key, proof_bytes
        # In order of arrival.
        self._unknown: dict[socket.socket, Peer] = {}
        self._known: dict[socket.socket, Peer] = {}
        self.waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (*listeners, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    def end(self) -> None:
        """Let `serve` return; a second call does nothing."""
        # Forked processes have copies of the waker: that it is closed here would wake nobody.
        with contextlib.suppress(OSError):
            self.waker.send(b"\0")
        self.waker.close()

    def serve(self) -> None:
        """Answer until `end` is called, or `waker` and its copies are closed."""
        try:
            while True:
                # Without an event, connections that prove nothing are closed a second late at most.
                for key, events in self._selector.select(1.0 if self._unknown else None):
                    ready = key.fileobj
                    if ready is self._woken:
                        return
                    if ready in self._listeners:
                        self._accept(ready)
                    # An event of a connection that was dropped meanwhile is ignored.
                    elif ready in self._unknown or ready in self._known:
                        self._attend(ready, events)
                late_s = time.monotonic() - _GREETING_S
                for sock in [sock for sock, peer in self._unknown.items() if peer.since_s < late_s]:
                    self._drop(sock)
        finally:
            for sock in [*self._unknown, *self._known, *self._listeners, self._woken]:
                sock.close()
            self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except OSError:
            # The connection was closed again, or this process has too many open files.
            # The listener stays readable: without a pause the loop would spin.
            time.sleep(0.01)
            return
        if len(self._unknown) >= _MAX_UNKNOWN:
            self._drop(next(iter(self._unknown)))
        peer = self._unknown[connected] = Peer(time.monotonic(), os.urandom(NONCE_BYTES))
        connected.setblocking(False)
        self._selector.register(connected, selectors.EVENT_READ)
        try:
            self._configure(connected)
        except OSError:
            self._drop(connected)
            return
        self._send(connected, peer, self._greet(peer.nonce))

    def _attend(self, connected: socket.socket, events: int) -> None:
        peer = self._known.get(connected) or self._unknown[connected]
        if events & selectors.EVENT_WRITE:
            self._send(connected, peer, b"")
        if not events & selectors.EVENT_READ:
            return
        error: OSError | None = None
        try:
            received = connected.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as raised:
            received, error = b"", raised
        if not received:
            self._drop(connected, error)
            return
        peer.received += received
        if connected in self._unknown:
            if len(peer.received) < self._proof_bytes:
                return
            proof = bytes(peer.received[: self._proof_bytes])
            if not self._is_right(peer.nonce, proof):
                self._drop(connected)
                return
            del self._unknown[connected], peer.received[: self._proof_bytes]
            self._known[connected] = peer
            self._welcome(connected, peer, proof)
        # `_welcome` drops a connection to which it cannot send.
        if connected in self._known and peer.received:
            self._answer_all(connected, peer)

    def _send(self, connected: socket.socket, peer: Peer, data: bytes) -> None:
        """Send what is possible now, and the rest when the peer is writable."""
        peer.unsent += data
        try:
            while peer.unsent:
                del peer.unsent[: connected.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connected)
            return
        # A connection can nearly always be written to: asking for that all the time would spin.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(connected).events != events:
            self._selector.modify(connected, events)

    def _drop(self, connected: socket.socket, error: OSError | None = None) -> None:
        """Close a connection, which the error has ended if there is any."""
        if self._unknown.pop(connected, None) or self._known.pop(connected, None):
            self._selector.unregister(connected)
            connected.close()

    def _configure(self, connected: socket.socket) -> None:
        """Set the options of a new connection; an OSError closes it."""

    def _greet(self, nonce: bytes) -> bytes:
        """Return what is sent first."""
        return nonce

    def _is_right(self, nonce: bytes, proof: bytes) -> bool:
        """Return whether a peer that sends this knows the secret."""
        raise NotImplementedError

    def _welcome(self, connected: socket.socket, peer: Peer, proof: bytes) -> None:
        """Begin to serve a peer that has proved the secret."""

    def _answer_all(self, connected: socket.socket, peer: Peer) -> None:
        """Answer what such a peer has sent."""


class StoreServer:
    """A server that runs until it is closed or unreferenced.

    Args:
        addresses: the hosts and ports to listen at.
        secret: the secret that clients must prove.

    Raises OSError if it cannot listen at an address.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: str) -> None:
        listeners: list[socket.socket] = []
        try:
            for host, port in addresses:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listeners.append(socket.create_server((host, port), family=family, backlog=1024))
        except OSError:
            for listener in listeners:
                listener.close()
            raise
        salt = os.urandom(SALT_BYTES)
        #: The addresses that it listens at.
        self.addresses = [listener.getsockname()[:2] for listener in listeners]
        self._service = _StoreService(listeners, salt, derive_key(secret, salt))
        serve = self._service.serve
        self._thread = threading.Thread(target=serve, name="reshard store", daemon=True)
        self._thread.start()
        # The thread does not reference this object, so that it can be collected. A finalizer also
        # runs when a forked process exits, and must not end the service of the other.
        weakref.finalize(self, self._service.waker.close)

    def close(self) -> None:
        """Close all connections, and return when they are closed; a second call does nothing."""
        self._service.end()
        # A request that came first could be answered until the thread has ended.
        self._thread.join()


class _StoreService(ProvingServer):
    """The state of a store's thread."""

    def __init__(self, listeners: Sequence[socket.socket], salt: bytes, key: bytes) -> None:
        super().__init__(listeners, key, _CODE_BYTES)
        self._greeting = _MAGIC + salt + code_of(key, salt)
        self._values: dict[bytes, bytes] = {}

    def _configure(self, connected: socket.socket) -> None:
        # A host that is lost sends nothing, and would leave its connection open.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _greet(self, nonce: bytes) -> bytes:
        return self._greeting + nonce

    def _is_right(self, nonce: bytes, proof: bytes) -> bool:
        return hmac.compare_digest(proof, code_of(self._key, b"store", nonce))

    def _welcome(self, connected: socket.socket, peer: Peer, proof: bytes) -> None:
        self._send(connected, peer, _ANSWER.pack(1, 0))

    def _answer_all(self, connected: socket.socket, peer: Peer) -> None:
        while (request := self._next_request(connected, peer)) is not None:
            self._send(connected, peer, self._answer(*request))

    def _next_request(
        self, connected: socket.socket, peer: Peer
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
        values, is_found, payload = self._values, True, b""
        if operation == _SET:
            values[key] = value
        elif operation == _GET:
            is_found, payload = key in values, values.get(key, b"")
        elif operation == _ADD:
            payload = values[key] = str(int(values.get(key, b"0")) + int(value)).encode()
        elif operation == _CHECK:
            # Keys are codes in hexadecimal, which contain no line break.
            is_found = all(name in values for name in key.split(b"\n"))
        else:
            is_found = values.pop(key, None) is not None
        return _ANSWER.pack(is_found, len(payload)) + payload


class StoreClient:
    """A process's connection to a store, with the methods of torch's stores that links need.

    Args:
        host, port: the address of the server.
        secret: of the link.
        timeout_s: how long to wait for an answer.

    Raises:
        LinkError: the server has another secret, or does not belong to a link.
        OSError: the server does not answer.
    """

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        # Close the connection with the last reference.
        self._end = weakref.finalize(self, self._socket.close)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = self._receive(_HELLO_BYTES)
            salt = greeting[len(_MAGIC) : len(_MAGIC) + SALT_BYTES]
            code = greeting[-NONCE_BYTES - _CODE_BYTES : -NONCE_BYTES]
            if not greeting.startswith(_MAGIC):
                raise LinkError(f"what listens at {host}:{port} is no link's store")
            self.key = derive_key(secret, salt)
            if not hmac.compare_digest(code, code_of(self.key, salt)):
                raise LinkError(
                    "the link has another secret; give all processes of both sides the same "
                    "`secret=` (or environment variable RESHARD_LINK_SECRET)"
                )
            self._socket.sendall(code_of(self.key, b"store", greeting[-NONCE_BYTES:]))
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
        """Read a value, which must exist."""
        return self._ask(_GET, key)[1]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its value."""
        return int(self._ask(_ADD, key, str(value).encode())[1])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return not keys or self._ask(_CHECK, "\n".join(keys))[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key, and return whether it existed."""
        return self._ask(_DELETE, key)[0]

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._end()

    def _ask(self, operation: bytes, key: str, value: bytes = b"") -> tuple[bool, bytes]:
        """Return the server's answer; raise RuntimeError if there is none, as torch's stores do."""
        name = key.encode()
        request = _REQUEST.pack(operation, len(name), len(value)) + name + value
        try:
            with self._lock:
                self._socket.sendall(request)
                is_found, size = _ANSWER.unpack(self._receive(_ANSWER.size))
                return bool(is_found), self._receive(size)
        except OSError as error:
            # The rest of a partial answer would be taken for the next.
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


# A public salt and code, by which a wrong secret is detected at once.
_SCRYPT_COST, _SCRYPT_BLOCK = 1 << 14, 8
_POLL_S = 0.02


# The trainer needs the key of its store twice, and scrypt takes 50 ms.
@lru_cache(maxsize=1)
def derive_key(secret: str, salt: bytes) -> bytes:
    """Return the 32-byte key of a secret and a salt.

    >>> derive_key("s", b"0" * 16) == derive_key("s", b"1" * 16)
    False
    """
    return hashlib.scrypt(
        secret.encode(), salt=salt, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=1, dklen=_CODE_BYTES
    )


def code_of(key: bytes, *parts: bytes) -> bytes:
    """Return the authentication code of parts in order; `shape (32,)` in bytes."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        # With lengths, since parts that are divided differently must have different codes.
        code.update(len(part).to_bytes(8) + part)
    return code.digest()


class SealedStore(dist.Store):  # type: ignore[misc]
    """A store whose keys and values are sealed by `key`; counters of `add` have sealed keys only.

    Raises LinkError for a value that is not sealed by it. A wait for a value polls, so that other
    threads can use the store meanwhile, and calls `check_others`, which raises if the process that
    should write the value has ended.
    """

    def __init__(self, store: Any, key: bytes, server: object = None) -> None:
        super().__init__()
        self._store: Any = store
        # The object that serves the store, kept alive as long as this end.
        self._server = server
        self.key = key
        self.check_others: Callable[[], None] | None = None

    def close(self) -> None:
        """Close the connection, also if groups of torch keep the store."""
        self._store = None

    def _reach(self) -> Any:
        store = self._store
        if store is None:
            raise LinkError("this end of the link is closed; connect again")
        return store

    def _seal_key(self, key: str) -> str:
        return code_of(self.key, b"key", key.encode()).hex()

    def _seal_value(self, key: str, value: bytes) -> bytes:
        return code_of(self.key, b"value", key.encode(), value) + value

    def _open_value(self, key: str, sealed: bytes) -> bytes:
        code, value = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, code_of(self.key, b"value", key.encode(), value)):
            raise LinkError(f"what stands at {key!r} of the link's store was not written by it")
        return value

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._reach().set(self._seal_key(key), self._seal_value(key, data))

    def get(self, key: str) -> bytes:
        """Wait for a value and read it."""
        self.wait([key])
        return self._open_value(key, bytes(self._reach().get(self._seal_key(key))))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its value."""
        return int(self._reach().add(self._seal_key(key), value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._reach().check([self._seal_key(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys exist; raise LinkError if they do not in time."""
        begun_s = time.monotonic()
        limit_s = (timeout or self._reach().timeout).total_seconds()
        while not self.check(keys):
            if self.check_others is not None:
                self.check_others()
            waited_s = time.monotonic() - begun_s
            if waited_s > limit_s:
                raise LinkError(f"{', '.join(keys)} did not come to the store in {limit_s:g} s")
            # The first polls come fast: no wait grows by more than an eighth.
            time.sleep(min(waited_s / 8, _POLL_S))

    def delete_key(self, key: str) -> bool:
        """Remove a key, and return whether it existed."""
        return bool(self._reach().delete_key(self._seal_key(key)))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._reach().set_timeout(timeout)

    @property
    def timeout(self) -> Any:
        """The timeout of `get` and `wait`."""
        return self._reach().timeout


_SECRET_VARIABLE = "RESHARD_LINK_SECRET"
_RETRY_S = 0.1
# `ipaddress.is_private` has 0.0.0.0 and documentation networks as well, but not 100.64.0.0/10.
_PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
    )
]


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """The address of a link's store.

    Raises UsageError for an invalid address or port.

    >>> LinkAddress.of("tcp://127.0.0.1:29400")
    LinkAddress(host='127.0.0.1', port=29400)
    >>> str(LinkAddress.of("tcp://[::1]:29400"))
    'tcp://[::1]:29400'
    """

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> LinkAddress:
        """Return the address of a URL."""
        expected = "give an address such as 'tcp://10.0.0.1:29400'"
        if not isinstance(url, str):
            raise UsageError(f"url={url!r}; {expected}")
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"url={url!r}: {error}; {expected}") from error
        if parts.scheme != "tcp" or not parts.hostname or not port:
            raise UsageError(f"url={url!r}; {expected}")
        if parts.path.strip("/") or parts.query or parts.username:
            raise UsageError(f"url={url!r} has more than a host and a port; {expected}")
        return cls(parts.hostname, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host reach it; raises LinkError for an unknown host."""
        return all(ipaddress.ip_address(address).is_loopback for address in self._resolve())

    def own_address(self) -> str:
        """Return the address by which others of the link reach this process."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_DGRAM
            )[0]
            # A connected datagram socket knows its route, and sends nothing.
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
        except OSError as error:
            raise LinkError(f"there is no way to {self}: {error}") from error

    def find_secret(self, secret: str | None) -> str:
        """Return the given secret, or the environment's; empty if none is needed.

        Raises UsageError if there is none, and the address is not a loopback address.
        """
        if secret is not None and not (isinstance(secret, str) and secret):
            raise UsageError("secret is empty, or no text; give some text that only the link knows")
        chosen = secret or os.environ.get(_SECRET_VARIABLE, "")
        if not chosen and not self.is_loopback:
            raise UsageError(
                f"a link at {self} can be reached from other hosts, and has no secret; give all "
                f"its processes secret= or the environment variable {_SECRET_VARIABLE}"
            )
        return chosen

    def check_privacy(self) -> None:
        """Raise UsageError if weights would leave private networks.

        They are not encrypted. Raises LinkError for an unknown host.
        """
        public = [address for address in self._resolve() if not _is_private(address)]
        if public:
            raise UsageError(
                f"a link at {self} leads to {public[0]}, which is not private, and weights are "
                "not encrypted; give an address of a private network (10.0.0.0/8, "
                "172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, fc00::/7, or one of this host or "
                "link alone), use a tunnel, or give insecure=True"
            )

    def _resolve(self) -> list[str]:
        """Return the addresses of the host; raise LinkError if it is unknown."""
        try:
            infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LinkError(f"the host of {self} cannot be found: {error}") from error
        return list(dict.fromkeys(str(info[4][0]) for info in infos))

    def open_store(self, is_server: bool, secret: str, timeout_s: float) -> SealedStore:
        """Return the sealed store; `is_server` for the process that serves it.

        Others wait until it is served. Raises LinkError if it cannot be served or reached, or has
        another secret.
        """
        deadline_s = time.monotonic() + timeout_s
        if is_server:
            server = self._serve(secret)
            host, port = server.addresses[0]
            return self._seal(StoreClient(host, port, secret, timeout_s), server)
        notice = WaitNotice(lambda: f"the trainer's first rank, which does not listen at {self}")
        while True:
            try:
                return self._seal(StoreClient(self.host, self.port, secret, timeout_s))
            except TimeoutError:
                raise LinkError(
                    f"what listens at {self} does not answer as a store in {timeout_s:g} s; "
                    "another program has the port: choose one that is free"
                ) from None
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise LinkError(
                        f"nobody serves {self} after {timeout_s:g} s ({error.strerror or error}); "
                        "start the trainer's first rank, which does, or look at the address"
                    ) from error
            notice.check()
            time.sleep(_RETRY_S)

    def _seal(self, line: StoreClient, server: StoreServer | None = None) -> SealedStore:
        return SealedStore(line, line.key, server)

    def _serve(self, secret: str) -> StoreServer:
        """Return the server, listening at those addresses of the host that this machine has.

        If it has none, as for a service that forwards to this machine, the server listens at this
        process's own address. Raises LinkError.
        """
        try:
            here = [address for address in self._resolve() if _is_of_this_host(address)]
            return StoreServer(
                [(address, self.port) for address in here or [self.own_address()]], secret
            )
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                problem += "; another trainer or program has it: give each trainer its own"
            raise LinkError(f"the store at {self} cannot be served: {problem}") from error


def _is_of_this_host(address: str) -> bool:
    """Return whether this machine can listen at an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def _is_private(address: str) -> bool:
    """Return whether an address is of this host or a private network.

    >>> [_is_private(ip) for ip in ("10.1.2.3", "100.64.0.1", "fe80::1%lo", "8.8.8.8", "0.0.0.0")]
    [True, True, True, False, False]
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip.version == network.version and ip in network for network in _PRIVATE)
