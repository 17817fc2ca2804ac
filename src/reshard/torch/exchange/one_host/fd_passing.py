"""Unix sockets between ranks of a host, which pass file descriptors of shared memory.

Every rank listens at a Unix socket with a random abstract name, which ends with its process. Each
tries to connect to the others, and authenticates with a secret received over the group's own
connections. All ranks of a network namespace reach each other, and no others do. Then the ranks
exchange results; if a connection of any rank failed, none of them shares memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence

import torch

from reshard.errors import RunError
from reshard.system import can_seal_memory
from reshard.torch.exchange.one_host.shared_memory import Segment, limit_waits, map_segment

# "never" and "always" override the automatic choice, for comparisons and tests.
_VARIABLE = "RESHARD_SHARED_MEMORY"
_WORD_BYTES = 16
_GREETING_S = 10.0


def connect_shared_memory(
    position: int,
    count: int,
    timeout_s: float,
    gather: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> tuple[dict[int, socket.socket], bool]:
    """Return sockets to the ranks that can share memory with this rank, and whether all pairs can.

    All ranks call this. No sockets are returned if a connection of any rank failed.

    Args:
        position: of this rank.
        timeout_s: how long a rank waits for another.
        gather: returns the tensors of all ranks, of equal shapes, in their order.

    Raises:
        RunError: `RESHARD_SHARED_MEMORY` is "always", but a rank cannot share memory.
    """
    mode = os.environ.get(_VARIABLE, "")
    listener = None if mode == "never" else _open_listener(count)
    name = secrets.token_bytes(_WORD_BYTES) if listener is None else listener.name
    own = bytes([listener is not None]) + name + (listener.word if listener is not None else name)
    gathered = [
        bytes(name_of.numpy())
        for name_of in gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    ]
    sockets: dict[int, socket.socket] = {}
    if listener is not None:
        # The lower rank of each pair connects, so that a pair has a single socket.
        for other in range(position + 1, count):
            is_open, name, word = gathered[other][0], gathered[other][1:17], gathered[other][17:]
            if is_open and (reached := _reach(name, word, position, timeout_s)):
                sockets[other] = reached
    row = torch.zeros(count, dtype=torch.uint8)
    row[list(sockets)] = 1
    rows = gather(row)
    is_well = True
    if listener is not None:
        expected = {other for other in range(position) if rows[other][position]}
        sockets |= listener.admit(expected)
        is_well = expected <= set(sockets)
        listener.close()
    is_well_for_all = all(map(bool, gather(torch.tensor([is_well]))))
    if not is_well_for_all:
        for connected in sockets.values():
            connected.close()
        sockets = {}
    pairs = [rows[lower][other] for other in range(count) for lower in range(other)]
    is_complete = is_well_for_all and all(map(bool, pairs))
    if mode == "always" and len(sockets) < count - 1:
        raise RunError(
            f"{_VARIABLE}=always, but {count - 1 - len(sockets)} of {count - 1} ranks share no "
            "memory with this one; unset it"
        )
    return sockets, is_complete


class _Listener:
    """A socket that accepts processes of this host that know a secret word."""

    def __init__(self, listener: socket.socket, name: bytes) -> None:
        self._listener = listener
        self.name = name
        self.word = secrets.token_bytes(_WORD_BYTES)

    def admit(self, expected: set[int]) -> dict[int, socket.socket]:
        """Return the accepted sockets by position. All peers have connected before."""
        sockets: dict[int, socket.socket] = {}
        self._listener.settimeout(_GREETING_S)
        with contextlib.suppress(OSError):
            while set(sockets) != expected:
                connected, _ = self._listener.accept()
                limit_waits(connected, _GREETING_S)
                # Other processes may find the name, but not the word. Peers have sent it before,
                # so that no wait is needed.
                with contextlib.suppress(OSError):
                    greeting = connected.recv(_WORD_BYTES + 8, socket.MSG_DONTWAIT)
                    other = int.from_bytes(greeting[_WORD_BYTES:])
                    is_known = secrets.compare_digest(greeting[:_WORD_BYTES], self.word)
                    if is_known and other in expected - set(sockets):
                        sockets[other] = connected
                        continue
                connected.close()
        return sockets

    def close(self) -> None:
        self._listener.close()


def _open_listener(count: int) -> _Listener | None:
    """Return a listener, or None if this process cannot share memory in this way."""
    if not can_seal_memory():
        return None
    listener = None
    try:
        # Check that this process can map a segment of its own.
        map_segment(os.dup((tried := Segment.on_host(0, 1)).descriptor), tried.size_bytes)
        # Packets keep their boundaries: a note arrives whole, with its descriptor.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = secrets.token_bytes(_WORD_BYTES)
        listener.bind(_address_of(name))
        # A longer queue than ranks: other processes of this host may connect too, and send nothing.
        listener.listen(max(count, socket.SOMAXCONN))
    except (OSError, RuntimeError, ValueError):
        if listener is not None:
            listener.close()
        return None
    return _Listener(listener, name)


def _address_of(name: bytes) -> bytes:
    # Names that begin with a zero byte are abstract, without a file. The number is the
    # version of the format of notes: ranks with another version do not connect.
    return b"\0reshard-2-" + name.hex().encode()


def _reach(name: bytes, word: bytes, position: int, timeout_s: float) -> socket.socket | None:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        limit_waits(connected, min(timeout_s, _GREETING_S))
        connected.connect(_address_of(name))
        connected.send(word + position.to_bytes(8))
    except OSError:
        connected.close()
        return None
    return connected
