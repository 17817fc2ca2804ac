"""The address of a link's store, and who may use it.

An address is `tcp://host:port`. One process serves the store there, and all others must reach it. A
process's own address, by which others reach it, is that of the network that leads to the store: if
that is the loopback interface, nothing of a link is reachable from outside.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from reshard.errors import LinkError, UsageError
from reshard.log import WaitNotice
from reshard.torch.links.sealed_store import SealedStore, StoreClient, StoreServer

_SECRET_VARIABLE = "RESHARD_LINK_SECRET"
_POLL_S = 0.1
_PRIVATE = [
    ipaddress.ip_network(one)
    for one in (
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
        return all(ipaddress.ip_address(one).is_loopback for one in self._resolve())

    def own_address(self) -> str:
        """Return the address by which others of the link reach this process."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_DGRAM
            )[0]
            # A connected datagram socket knows its route, and sends nothing.
            with socket.socket(family, kind, protocol) as found:
                found.connect(address)
                return str(found.getsockname()[0])
        except OSError as error:
            raise LinkError(f"there is no way to {self}: {error}") from error

    def find_secret(self, secret: str | None) -> str:
        """Return the given secret, or the environment's; empty if none is needed.

        Raises UsageError if there is none, and the address is not a loopback address.
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

    def check_privacy(self) -> None:
        """Raise UsageError if weights would leave private networks.

        They are not encrypted. Raises LinkError for an unknown host.
        """
        public = [one for one in self._resolve() if not _is_private(one)]
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
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LinkError(f"the host of {self} cannot be found: {error}") from error
        return list(dict.fromkeys(str(one[4][0]) for one in found))

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
            time.sleep(_POLL_S)

    def _seal(self, line: StoreClient, server: StoreServer | None = None) -> SealedStore:
        return SealedStore(line, line.key, server)

    def _serve(self, secret: str) -> StoreServer:
        """Return the server, listening at those addresses of the host that this machine has.

        If it has none, as for a service that forwards to this machine, the server listens at this
        process's own address. Raises LinkError.
        """
        try:
            here = [one for one in self._resolve() if _is_of_this_host(one)]
            return StoreServer([(one, self.port) for one in here or [self.own_address()]], secret)
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                problem += "; another trainer or program has it: give each trainer its own"
            raise LinkError(f"the store at {self} cannot be served: {problem}") from error


def _is_of_this_host(address: str) -> bool:
    """Return whether this machine can listen at an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as found:
            found.bind((address, 0))
    except OSError:
        return False
    return True


def _is_private(address: str) -> bool:
    """Return whether an address is of this host or a private network.

    >>> [_is_private(one) for one in ("10.1.2.3", "100.64.0.1", "fe80::1%lo", "8.8.8.8", "0.0.0.0")]
    [True, True, True, False, False]
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found.version == one.version and found in one for one in _PRIVATE)
