"""Presence: which processes of a link have ended, also those that nobody has connections to yet.

Every process keeps a connection to the trainer's first rank, which tells all others whose ended::

    trainer's first rank                     any other process
    nonce, 16 bytes              --->
                                 <---        its token, and a code of nonce and token
    how and whose, of each end   --->        reads them whenever it has to wait for somebody

A process that ends, however it does, closes its connection; one whose host is silent loses it
(`reshard.torch.links.silence`). So whoever waits for a process that will not come knows it at
once. A process that closed its connection may have sent before what somebody waits for; one that is
silent has nothing on its way. What is no such connection, or does not know the link's secret, is
closed.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Iterable

from reshard.errors import LinkError
from reshard.torch.links.sealed_store import SealedStore, code_of
from reshard.torch.links.silence import (
    SILENT_ERRORS,
    end_when_silent,
    go_on_with_silence,
    seems_silent,
)

_KEY = "presence"
_TOKEN_BYTES, _NONCE_BYTES, _CODE_BYTES = 16, 16, 32
_HELLO_BYTES = _TOKEN_BYTES + _CODE_BYTES
# How a process ended, before its token.
_CLOSED, _SILENT = b"c", b"s"
_END_BYTES = 1 + _TOKEN_BYTES
# How long somebody may take to say who it is, and how many may do so at once.
_GREETING_S, _MOST_UNKNOWN = 10.0, 128


class Presence:
    """Whether other processes of a link are there, as this one knows it.

    `token` is this process's own, which others ask for.
    """

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        # Tokens, and how their processes ended.
        self._gone: dict[str, bytes] = {}

    def find_gone(self, tokens: Iterable[str], *, is_silent: bool = False) -> str:
        """The first of the tokens whose process has ended, or closed the link; empty if none.

        Args:
            tokens: of the processes.
            is_silent: whether only those count whose host gave no sign of life.
        """
        ways = (_SILENT,) if is_silent else (_CLOSED, _SILENT)
        return next((one for one in tokens if self._gone.get(one) in ways), "")

    @property
    def is_cut_off(self) -> bool:
        """Whether the host of the trainer's first rank gave no sign of life."""
        return False

    @property
    def seems_cut_off(self) -> bool:
        """Whether that host is cut off, or does not answer and may be found so within a second."""
        return False

    def check(self) -> None:
        """Raise LinkError where the trainer's first rank is gone, and with it the link."""

    def close(self) -> None:
        """Leave: others see that this process is gone."""


class PresenceLine(Presence):
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
            end_when_silent(self._socket, silence_s)
            nonce = _receive(self._socket, _NONCE_BYTES)
            own = bytes.fromhex(self.token)
            self._socket.sendall(own + code_of(store.key, b"presence", nonce, own))
            self._socket.setblocking(False)
        except (OSError, ValueError) as error:
            raise LinkError(
                f"the trainer's first rank does not answer at {host}:{port}: {error}; it has "
                "ended, or a firewall is between"
            ) from error

    def find_gone(self, tokens: Iterable[str], *, is_silent: bool = False) -> str:
        """See `Presence.find_gone`."""
        self._read()
        return super().find_gone(tokens, is_silent=is_silent)

    @property
    def is_cut_off(self) -> bool:
        """See `Presence.is_cut_off`."""
        self._read()
        return self._is_silent

    @property
    def seems_cut_off(self) -> bool:
        """See `Presence.seems_cut_off`."""
        return self.is_cut_off or (
            not self._is_over and seems_silent(self._socket, self._silence_s)
        )

    def check(self) -> None:
        """See `Presence.check`."""
        self._read()
        if self._is_over:
            raise LinkError("the trainer's first rank has closed the link, or has ended")

    def close(self) -> None:
        """See `Presence.close`."""
        self._socket.close()

    def _read(self) -> None:
        with self._lock:
            while not self._is_over:
                try:
                    found = self._socket.recv(4096)
                except BlockingIOError:
                    return
                except OSError as error:
                    found = b""
                    self._is_silent = error.errno in SILENT_ERRORS
                self._is_over = not found
                self._told += found
                whole = len(self._told) // _END_BYTES * _END_BYTES
                for at in range(0, whole, _END_BYTES):
                    self._gone[self._told[at + 1 : at + _END_BYTES].hex()] = self._told[at : at + 1]
                self._told = self._told[whole:]


class PresenceDesk(Presence):
    """The trainer's first rank, to which all others are connected.

    Args:
        store: where it tells its address.
        address: of this process.
        silence_s: see `end_when_silent`.
    """

    def __init__(self, store: SealedStore, address: str, silence_s: float) -> None:
        super().__init__()
        self._key, self._silence_s = store.key, silence_s
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.setblocking(False)
        # Those that have not said who they are: since when, their nonce, and what they said.
        self._unknown: dict[socket.socket, tuple[float, bytes, bytes]] = {}
        self._known: dict[socket.socket, str] = {}
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for one in (self._listener, self._woken):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="reshard presence", daemon=True)
        self._thread.start()
        store.set(_KEY, f"{address} {self._listener.getsockname()[1]}")

    def close(self) -> None:
        """See `Presence.close`."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join()
        self._waker.close()

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(1.0 if self._unknown else None):
                    found = key.fileobj
                    if found is self._woken:
                        return
                    if found is self._listener:
                        self._admit()
                    elif found in self._unknown or found in self._known:
                        self._hear(found)
                late_s = time.monotonic() - _GREETING_S
                for one, (since_s, _, _) in list(self._unknown.items()):
                    if since_s < late_s:
                        self._drop(one)
        finally:
            for one in [*self._unknown, *self._known, self._listener, self._woken]:
                one.close()
            self._selector.close()

    def _admit(self) -> None:
        try:
            found, _ = self._listener.accept()
        except OSError:
            # It went again, or this process has too many files open.
            time.sleep(0.01)
            return
        if len(self._unknown) >= _MOST_UNKNOWN:
            self._drop(next(iter(self._unknown)))
        nonce = os.urandom(_NONCE_BYTES)
        found.setblocking(False)
        self._selector.register(found, selectors.EVENT_READ)
        self._unknown[found] = time.monotonic(), nonce, b""
        try:
            end_when_silent(found, self._silence_s)
            found.send(nonce)
        except OSError:
            self._drop(found)

    def _hear(self, connected: socket.socket) -> None:
        way = _CLOSED
        try:
            said = connected.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            said, way = b"", _SILENT if error.errno in SILENT_ERRORS else _CLOSED
        if connected in self._known or not said:
            # Nobody says anything twice.
            self._drop(connected, way)
            return
        since_s, nonce, before = self._unknown[connected]
        said = before + said
        self._unknown[connected] = since_s, nonce, said
        if len(said) < _HELLO_BYTES:
            return
        token, code = said[:_TOKEN_BYTES], said[_TOKEN_BYTES:]
        if not hmac.compare_digest(code, code_of(self._key, b"presence", nonce, token)):
            self._drop(connected)
            return
        del self._unknown[connected]
        self._known[connected] = token.hex()
        # Who comes late learns of those that went before.
        for one, way in list(self._gone.items()):
            self._tell(connected, one, way)

    def _drop(self, connected: socket.socket, way: bytes = _CLOSED) -> None:
        self._unknown.pop(connected, None)
        token = self._known.pop(connected, "")
        self._selector.unregister(connected)
        connected.close()
        if token:
            self._gone[token] = way
            for other in self._known:
                self._tell(other, token, way)

    def _tell(self, connected: socket.socket, token: str, way: bytes) -> None:
        # One that is gone itself, or reads nothing, is seen to elsewhere.
        with contextlib.suppress(OSError):
            go_on_with_silence(connected, self._silence_s)
            connected.send(way + bytes.fromhex(token))


def _receive(connected: socket.socket, size_bytes: int) -> bytes:
    found = b""
    while len(found) < size_bytes:
        more = connected.recv(size_bytes - len(found))
        if not more:
            raise OSError("it closed the connection")
        found += more
    return found
