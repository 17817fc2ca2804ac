"""End TCP connections to hosts that become unreachable.

A process that ends closes its connections, which the other end sees at once. A host that loses its
network closes nothing, and waiting for it would take hours. The system can probe silent hosts and
end connections to those that do not respond. The host's kernel responds, so a process that is busy,
stopped or swapped out is not affected.

Source: RFC 1122 (keep-alives), RFC 5482 (user timeout).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator

from reshard.system import find_silence_ms, list_descriptors, set_tcp_option

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
    before = {key for key, _ in _list_sockets()}
    yield
    for key, number in _list_sockets():
        if key in before:
            continue
        # The descriptor may be reused by now, which is harmless.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:
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
    """Return whether both ends are on one host; raise OSError if it is not connected."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    other = connected.getpeername()[0]
    return other == connected.getsockname()[0] or ipaddress.ip_address(other).is_loopback
