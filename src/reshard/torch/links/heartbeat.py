"""Detect processes of a link that have ended, also before other processes connect to them.

Every process keeps a connection to the trainer's first rank, which reports ended processes to all
others::

    trainer's first rank                     any other process
    nonce, 16 bytes              --->
                                 <---        its token, and a code of nonce and token
    kind and token of each end   --->        read whenever the process waits for another

A process that ends closes its connection, so waiting processes fail at once. It may have sent
awaited data before. Connections that do not know the link's secret are closed.

A host that loses its network closes nothing, and waiting for it would take hours. The system can
probe silent hosts and end TCP connections to those that do not respond (`set_user_timeout`). The
host's kernel responds, so a process that is busy, stopped or swapped out is not affected. An
unreachable process has nothing in flight.

Source: RFC 1122 (keep-alives), RFC 5482 (user timeout).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import socket
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator

from reshard.errors import LinkError
from reshard.system import find_silence_ms, list_descriptors, set_tcp_option
from reshard.torch.links.sealed_store import NONCE_BYTES, Peer, ProvingServer, SealedStore, code_of

# The seconds between probes.
_ASKED_S = 1
_MIN_LEFT_MS = 500
# A host that responds to probes is silent for no longer.
_SEEN_S = 1.5 * _ASKED_S
# Errors of a connection that the system ended because the host is unreachable.
SILENT_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def set_user_timeout(connected: socket.socket, silence_s: float) -> None:
    """Let a TCP connection end after its peer's host was silent for `silence_s`."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _ASKED_S,
        "TCP_KEEPINTVL": _ASKED_S,
        "TCP_KEEPCNT": max(1, round(silence_s / _ASKED_S)),
        # Unacknowledged data; by default the system retries for a quarter of an hour.
        "TCP_USER_TIMEOUT": max(1, round(1000 * silence_s)),
    }
    for name, value in options.items():
        set_tcp_option(connected, name, value)


def resume_user_timeout(connected: socket.socket, silence_s: float) -> None:
    """Count a silence that has begun towards the timeout when more data is sent.

    The system restarts its count with the first unacknowledged data.
    """
    silent_ms = find_silence_ms(connected)
    if silent_ms is not None:
        left_ms = max(_MIN_LEFT_MS, round(1000 * silence_s) - silent_ms)
        set_tcp_option(connected, "TCP_USER_TIMEOUT", left_ms)


def is_unresponsive(connected: socket.socket, silence_s: float) -> bool:
    """Return whether the peer's host did not respond to the last probe; False if unknown.

    The system does not end all connections to a host at once. After the first ends, this identifies
    the others up to a second earlier.
    """
    least_s = max(_SEEN_S, silence_s - _SEEN_S)
    try:
        silent_ms = find_silence_ms(connected)
    except OSError:
        return False
    return silent_ms is not None and silent_ms >= 1000 * least_s


@contextlib.contextmanager
def user_timeout_for_new_connections(silence_s: float) -> Iterator[None]:
    """Set the user timeout of connections to other hosts opened in the with block.

    Connections opened by other threads are included.
    """
    # By inode, since descriptors are used again.
    before = {key for key, _ in _list_sockets()}
    yield
    for key, number in _list_sockets():
        if key in before:
            continue
        # The descriptor may be reused by now, which is harmless.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:
            # A host does not become unreachable to itself.
            if opened.type == socket.SOCK_STREAM and not _is_of_this_host(opened):
                set_user_timeout(opened, silence_s)


def _list_sockets() -> Iterator[tuple[int, int]]:
    """Yield inode and descriptor of this process's sockets."""
    for number in list_descriptors():
        with contextlib.suppress(OSError):
            opened = os.fstat(number)
            if stat.S_ISSOCK(opened.st_mode):
                yield opened.st_ino, number


def _is_of_this_host(connected: socket.socket) -> bool:
    """Return whether both ends are on the same host; raise OSError if it is not connected."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    other = connected.getpeername()[0]
    return other == connected.getsockname()[0] or ipaddress.ip_address(other).is_loopback


_KEY = "presence"
_TOKEN_BYTES, _CODE_BYTES = 16, 32
_HELLO_BYTES = _TOKEN_BYTES + _CODE_BYTES
# How a process ended; precedes its token.
_CLOSED, _SILENT = b"c", b"s"
_END_BYTES = 1 + _TOKEN_BYTES
# The maximum seconds that a process takes to connect.
_GREETING_S = 10.0


class Heartbeat:
    """The state of the link's other processes, as this process knows it.

    `token` identifies this process to the others.
    """

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        # Tokens of ended processes, and how they ended.
        self._gone: dict[str, bytes] = {}

    def find_departed(self, tokens: Iterable[str], *, is_silent: bool = False) -> str:
        """Return the first token whose process ended or closed the link, or an empty text.

        Args:
            tokens: of the processes.
            is_silent: whether to consider only processes of unreachable hosts.
        """
        ways = (_SILENT,) if is_silent else (_CLOSED, _SILENT)
        return next((each for each in tokens if self._gone.get(each) in ways), "")

    @property
    def is_disconnected(self) -> bool:
        """Whether the host of the trainer's first rank is unreachable."""
        return False

    @property
    def seems_disconnected(self) -> bool:
        """Whether that host is unreachable, or does not respond and may be within a second."""
        return False

    def check(self) -> None:
        """Raise LinkError if the trainer's first rank, and with it the link, has ended."""

    def close(self) -> None:
        """Leave the link; other processes see the end of this process."""


class HeartbeatClient(Heartbeat):
    """The connection of a process to the trainer's first rank. Raises LinkError."""

    def __init__(self, store: SealedStore, timeout_s: float, silence_s: float) -> None:
        super().__init__()
        host, _, port = store.get(_KEY).decode().rpartition(" ")
        self._lock, self._silence_s = threading.Lock(), silence_s
        self._is_over = self._is_silent = False
        self._told = b""
        limit_s = min(timeout_s, _GREETING_S)
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=limit_s)
            set_user_timeout(self._socket, silence_s)
            nonce = _receive(self._socket, NONCE_BYTES)
            own = bytes.fromhex(self.token)
            self._socket.sendall(own + code_of(store.key, b"presence", nonce, own))
            # It is read whenever the process waits, and must not wait itself.
            self._socket.setblocking(False)
        except (OSError, ValueError) as error:
            raise LinkError(
                f"the trainer's first rank does not answer at {host}:{port}: {error}; it has "
                "ended, or a firewall is between"
            ) from error

    def find_departed(self, tokens: Iterable[str], *, is_silent: bool = False) -> str:
        """See `Heartbeat.find_departed`."""
        self._read()
        return super().find_departed(tokens, is_silent=is_silent)

    @property
    def is_disconnected(self) -> bool:
        """See `Heartbeat.is_disconnected`."""
        self._read()
        return self._is_silent

    @property
    def seems_disconnected(self) -> bool:
        """See `Heartbeat.seems_disconnected`."""
        return self.is_disconnected or (
            not self._is_over and is_unresponsive(self._socket, self._silence_s)
        )

    def check(self) -> None:
        """See `Heartbeat.check`."""
        self._read()
        if self._is_over:
            raise LinkError("the trainer's first rank has closed the link, or has ended")

    def close(self) -> None:
        """See `Heartbeat.close`."""
        self._socket.close()

    def _read(self) -> None:
        with self._lock:
            # Several threads may wait for others of the link, and each reads here.
            while not self._is_over:
                try:
                    accepted = self._socket.recv(4096)
                except BlockingIOError:
                    return
                except OSError as error:
                    accepted = b""
                    self._is_silent = error.errno in SILENT_ERRORS
                self._is_over = not accepted
                self._told += accepted
                # A read may end within a message.
                whole = len(self._told) // _END_BYTES * _END_BYTES
                for at in range(0, whole, _END_BYTES):
                    self._gone[self._told[at + 1 : at + _END_BYTES].hex()] = self._told[at : at + 1]
                self._told = self._told[whole:]


class HeartbeatServer(ProvingServer, Heartbeat):
    """The trainer's first rank, to which all others connect.

    Args:
        store: for the server's address.
        address: of this process.
        silence_s: see `set_user_timeout`.
    """

    def __init__(self, store: SealedStore, address: str, silence_s: float) -> None:
        Heartbeat.__init__(self)
        self._silence_s = silence_s
        # The tokens of connected processes.
        self._tokens: dict[socket.socket, str] = {}
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Any free port: clients read it at the store.
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        ProvingServer.__init__(self, [listener], store.key, _HELLO_BYTES)
        self._thread = threading.Thread(target=self.serve, name="reshard presence", daemon=True)
        self._thread.start()
        store.set(_KEY, f"{address} {port}")

    def close(self) -> None:
        """See `Heartbeat.close`."""
        self.end()
        self._thread.join()

    def _configure(self, connected: socket.socket) -> None:
        set_user_timeout(connected, self._silence_s)

    def _is_right(self, nonce: bytes, proof: bytes) -> bool:
        token, code = proof[:_TOKEN_BYTES], proof[_TOKEN_BYTES:]
        return hmac.compare_digest(code, code_of(self._key, b"presence", nonce, token))

    def _welcome(self, connected: socket.socket, peer: Peer, proof: bytes) -> None:
        self._tokens[connected] = proof[:_TOKEN_BYTES].hex()
        # A late process learns of those that ended before.
        for each, way in list(self._gone.items()):
            self._tell(connected, each, way)

    def _answer_all(self, connected: socket.socket, peer: Peer) -> None:
        # Processes of a link send nothing else.
        self._drop(connected)

    def _drop(self, connected: socket.socket, error: OSError | None = None) -> None:
        super()._drop(connected)
        token = self._tokens.pop(connected, "")
        if token:
            is_silent = error is not None and error.errno in SILENT_ERRORS
            way = self._gone[token] = _SILENT if is_silent else _CLOSED
            for other in self._tokens:
                self._tell(other, token, way)

    def _tell(self, connected: socket.socket, token: str, way: bytes) -> None:
        # Processes that ended or do not read are handled elsewhere.
        with contextlib.suppress(OSError):
            resume_user_timeout(connected, self._silence_s)
            connected.send(way + bytes.fromhex(token))


def _receive(connected: socket.socket, size_bytes: int) -> bytes:
    accepted = b""
    while len(accepted) < size_bytes:
        more = connected.recv(size_bytes - len(accepted))
        if not more:
            raise OSError("it closed the connection")
        accepted += more
    return accepted
