"""Silence of other hosts: connections that end where the other end's host cannot be reached.

A process that ends closes its connections, which the other end sees at once. A host that loses its
link closes nothing: whoever waits for it would wait for hours. The system can ask hosts that are
silent for a sign of life, and end connections to those that give none. The host's kernel answers,
so a process that is busy, stopped or swapped out does not count as silent.

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

# How often a silent host is asked.
_ASKED_S = 1
_LEAST_LEFT_MS = 500
# A host that answers when it is asked is not silent for longer.
_SEEN_S = 1.5 * _ASKED_S
# What the system says of a connection that it ended since the other end's host was silent.
SILENT_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def end_when_silent(connected: socket.socket, silence_s: float) -> None:
    """Let a TCP connection end after its other end's host was silent for so long."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _ASKED_S,
        "TCP_KEEPINTVL": _ASKED_S,
        "TCP_KEEPCNT": max(1, round(silence_s / _ASKED_S)),
        # What was sent and is not acknowledged; without it the system tries for a quarter of an
        # hour.
        "TCP_USER_TIMEOUT": max(1, round(1000 * silence_s)),
    }
    for name, value in options.items():
        set_tcp_option(connected, name, value)


def go_on_with_silence(connected: socket.socket, silence_s: float) -> None:
    """Let a silence that has begun end a TCP connection in its time, also once more is sent on it.

    From the first thing that is sent and not acknowledged the system counts anew.
    """
    silent_ms = find_silence_ms(connected)
    if silent_ms is not None:
        left_ms = max(_LEAST_LEFT_MS, round(1000 * silence_s) - silent_ms)
        set_tcp_option(connected, "TCP_USER_TIMEOUT", left_ms)


def seems_silent(connected: socket.socket, silence_s: float) -> bool:
    """Whether the other end's host has not answered when it was asked last; False if unknown.

    Of several connections to one host the system does not end all at once: where one has ended,
    this tells of the others, up to a second before they do.
    """
    least_s = max(_SEEN_S, silence_s - _SEEN_S)
    try:
        silent_ms = find_silence_ms(connected)
    except OSError:
        return False
    return silent_ms is not None and silent_ms >= 1000 * least_s


@contextlib.contextmanager
def ending_when_silent(silence_s: float) -> Iterator[None]:
    """Connections between hosts that libraries open meanwhile end when silent.

    What other threads open meanwhile is taken, too.
    """
    before = {key for key, _ in _list_sockets()}
    yield
    for key, number in _list_sockets():
        if key in before:
            continue
        # The number may be another's by now, which does no harm either.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            if found.type == socket.SOCK_STREAM and not _is_of_this_host(found):
                end_when_silent(found, silence_s)


def _list_sockets() -> Iterator[tuple[int, int]]:
    """Sockets of this process: inode and number."""
    for number in list_descriptors():
        with contextlib.suppress(OSError):
            found = os.fstat(number)
            if stat.S_ISSOCK(found.st_mode):
                yield found.st_ino, number


def _is_of_this_host(connected: socket.socket) -> bool:
    """Whether both ends are on one host. Raises OSError for what is not connected."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    other = connected.getpeername()[0]
    return other == connected.getsockname()[0] or ipaddress.ip_address(other).is_loopback
