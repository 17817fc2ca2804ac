"""Addresses where the processes of a link meet: whose the store there is, and who may use it.

An address is `tcp://host:port`. One process serves the store there, all others reach it. Its own
address, by which the others reach a process, is the one of the network that leads to the store:
where that is the loopback, nothing of a link can be reached from outside.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

import torch.distributed as dist

from reshard.errors import LinkError, UsageError
from reshard.torch.links.sealed_store import SealedStore, seal

_SECRET_VARIABLE = "RESHARD_LINK_SECRET"
_SALT_BYTES = 16
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """The address of a link's store.

    Raises UsageError for what is no address, or no port of one.

    >>> LinkAddress.of("tcp://127.0.0.1:29400")
    LinkAddress(host='127.0.0.1', port=29400)
    >>> str(LinkAddress.of("tcp://[::1]:29400"))
    'tcp://[::1]:29400'
    """

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> LinkAddress:
        """The address that a URL is."""
        expected = "give an address such as 'tcp://10.0.0.1:29400'"
        if not isinstance(url, str):
            raise UsageError(f"url={url!r}; {expected}")
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"url={url!r}: {error}; {expected}") from error
        if parts.scheme != "tcp" or not parts.hostname or port is None:
            raise UsageError(f"url={url!r}; {expected}")
        if parts.path.strip("/") or parts.query or parts.username:
            raise UsageError(f"url={url!r} has more than a host and a port; {expected}")
        return cls(parts.hostname, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host reach it. Raises LinkError for an unknown host."""
        try:
            found = socket.getaddrinfo(self.host, None)
        except OSError as error:
            raise LinkError(f"the host of {self} cannot be found: {error}") from error
        return all(ipaddress.ip_address(one[4][0]).is_loopback for one in found)

    def own_address(self) -> str:
        """The address by which others of the link reach this process."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_DGRAM
            )[0]
            # Nothing is sent: a datagram socket that is connected knows the way it would take.
            with socket.socket(family, kind, protocol) as found:
                found.connect(address)
                return str(found.getsockname()[0])
        except OSError as error:
            raise LinkError(f"there is no way to {self}: {error}") from error

    def find_secret(self, secret: str | None) -> str:
        """The secret that is given, or the environment's; empty where none is needed.

        Raises UsageError where there is none, and the address is not this host's alone.
        """
        if secret is not None and not (isinstance(secret, str) and secret):
            raise UsageError("secret is empty, or no text; give some text that only the link knows")
        found = secret or os.environ.get(_SECRET_VARIABLE, "")
        if not found and not self.is_loopback:
            raise UsageError(
                f"a link at {self} can be reached from other hosts, and has no secret; give all "
                f"its processes secret= or the environment variable {_SECRET_VARIABLE}"
            )
        return found

    def open_store(self, is_server: bool, secret: str, timeout_s: float) -> SealedStore:
        """The sealed store; `is_server` for the process that serves it.

        Others wait until it is there. Raises LinkError where it cannot be served or reached, or
        has another secret.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        salt = os.urandom(_SALT_BYTES) if is_server else None
        try:
            if not is_server:
                self._wait_for_server(timeout_s)
            address = (self.host, self.port, None, is_server, timeout)
            make = partial(dist.TCPStore, *address, wait_for_workers=False)
            store = make() if is_server else self._reach(make, timeout_s)
            return seal(store, secret, salt)
        except (RuntimeError, ValueError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            what = "served" if is_server else "reached"
            raise LinkError(f"the store at {self} cannot be {what}: {line}") from error

    def _reach(self, make: Callable[[], dist.TCPStore], timeout_s: float) -> dist.TCPStore:
        """The store of a server. Raises LinkError where what listens there is none."""
        made: SimpleQueue[dist.TCPStore | Exception] = SimpleQueue()

        def work() -> None:
            try:
                made.put(make())
            except Exception as error:
                made.put(error)

        # Torch waits for the server's first answer without end: a program of another kind gives
        # none, and the thread stays.
        threading.Thread(target=work, name="reshard-store", daemon=True).start()
        try:
            found = made.get(timeout=timeout_s)
        except Empty:
            raise LinkError(
                f"what listens at {self} does not answer as a store in {timeout_s:g} s; another "
                "program has the port: choose one that is free"
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    def _wait_for_server(self, timeout_s: float) -> None:
        """Return once somebody listens there; torch would log every try."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                socket.create_connection((self.host, self.port), timeout=timeout_s).close()
                return
            time.sleep(_LOOK_S)
        raise LinkError(
            f"nobody serves {self} after {timeout_s:g} s; start the trainer's first rank, which "
            "does, or look at the address"
        )
