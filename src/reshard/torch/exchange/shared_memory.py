"""Memory that ranks of one host share: what one packs there, another unpacks from where it lies.

By connections of the network a message is copied into the system and out of it again, beside what
packs and unpacks it. Ranks that can share memory need only these two::

    sender      pack -> | segment of the sender |        "message 7 lies at 4096"  ->
    receiver            | the same, mapped      | -> unpack      <-  "message 7 is taken"

1. *Who can.* Every rank opens a door: a Unix socket with a random name, which ends with its
   process. Each tries the doors of the others, and shows the secret word that it got from them by
   the group's own connections. The ranks of one network namespace reach each other; no others do.
   Then all tell all, and where anything went wrong for anyone nobody shares memory.
2. *Segments* are files of memory without a name, sealed so that they cannot shrink. Their
   descriptors travel by the sockets. Nothing is left behind, however a process ends, and
   `/dev/shm` may be small.
3. *Notes* by the sockets say what lies where, and what is taken; who waits for one sleeps. A
   process that ends closes its sockets, which others see at once.

Notes of several exchanges may come by one socket. Whoever waits reads for all.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reshard.errors import RunError

# "never" and "always" instead of where it can be, to compare and to test.
_VARIABLE = "RESHARD_SHARED_MEMORY"
_WORD_BYTES = 16
_GREETING_S = 10.0
# What is kept for the next exchange, once the last one that used it is gone.
_KEPT_BYTES = 64 << 20
_GRANULE_BYTES = 1 << 20
# A kind of note, and five numbers: `tag, number, segment, offset, bytes`.
_NOTE = struct.Struct("<6q")
_LENT, _TAKEN, _SEGMENT, _GONE = range(4)
_NOTHING = torch.empty(0, dtype=torch.uint8)
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Segment:
    """Memory of this rank that others may map. `lent` counts what they have not taken yet."""

    number: int
    descriptor: int
    size_bytes: int
    mapped: mmap.mmap
    address: int
    known_by: set[int] = field(default_factory=set)
    lent: int = 0

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(slots=True, eq=False)
class LentMessage:
    """A message that lies in this rank's segment until its receiver has taken it."""

    peer: NearRank
    segment: _Segment
    is_taken: bool = False

    def wait(self) -> None:
        """Return once it is taken. Raises RuntimeError where the receiver is gone."""
        self.peer.wait_until(lambda: self.is_taken)


@dataclass(slots=True, eq=False)
class NearMessage:
    """A message of another rank, to be read where it lies, and then given back."""

    peer: NearRank
    size_bytes: int
    number: int = -1
    place: tuple[int, int] = (-1, -1)

    def wait(self) -> None:
        """Return once it is there. Raises RuntimeError where the sender is gone."""
        self.peer.wait_until(lambda: self.number >= 0)

    @property
    def bytes_there(self) -> torch.Tensor:
        """Its bytes, in the sender's memory."""
        segment, begin = self.place
        # Of a rank that is closed there is nothing.
        return self.peer.mapped.get(segment, _NOTHING)[begin : begin + self.size_bytes]

    def give_back(self) -> None:
        """Let the sender use its memory again."""
        self.peer.tell(_TAKEN, 0, self.number)


class SharedMemory:
    """This rank's segments, and the ranks that it shares memory with, by their numbers.

    Args:
        sockets: connected, one for each.
        timeout_s: how long to wait for any note.
        is_complete: whether all ranks of the group share memory with all others.
    """

    def __init__(
        self, sockets: dict[int, socket.socket], timeout_s: float, is_complete: bool
    ) -> None:
        self.is_complete = is_complete
        self._segments: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._count, self._is_closed = 0, False
        self._lock = threading.Lock()
        self.ranks = {rank: NearRank(rank, one, timeout_s) for rank, one in sockets.items()}

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Bytes in a segment of their own, which comes back once no tensor has any of them."""
        with self._lock:
            segment = self._take_free(size_bytes) or self._add_segment(size_bytes)
        array = np.frombuffer(segment.mapped, np.uint8, size_bytes)
        weakref.finalize(array, self._give_back, segment).atexit = False
        return torch.from_numpy(array)

    def has(self, memory: torch.Tensor) -> bool:
        """Whether a tensor's memory is of a segment of this rank."""
        return self._find(memory) is not None

    def send(self, memory: torch.Tensor, receiver: int, tag: int) -> LentMessage:
        """Lend a message, which lies in a segment of this rank, until its receiver took it.

        Raises RuntimeError where the receiver is gone.
        """
        segment = self._find(memory)
        if segment is None:
            raise RunError("what is sent lies in no memory that ranks share")
        begin = memory.data_ptr() - segment.address
        return self.ranks[receiver].lend(segment, begin, memory.numel(), tag)

    def receive(self, size_bytes: int, sender: int, tag: int) -> NearMessage:
        """Expect the next message of a tag from a rank."""
        return self.ranks[sender].expect(size_bytes, tag)

    def close(self) -> None:
        """Let others know, who wait or will, and let go of memory that nobody has."""
        self._is_closed = True
        for peer in self.ranks.values():
            peer.close()
        while self._free:
            self._segments.pop(self._free.pop().number, None)

    def _find(self, memory: torch.Tensor) -> _Segment | None:
        address = memory.data_ptr()
        for one in list(self._segments.values()):
            if one.address <= address < one.address + one.size_bytes:
                return one
        return None

    def _take_free(self, size_bytes: int) -> _Segment | None:
        fits = [one for one in self._free if one.size_bytes >= size_bytes]
        found = min(fits, key=lambda one: one.size_bytes, default=None)
        if found is not None:
            self._free.remove(found)
        return found

    def _add_segment(self, size_bytes: int) -> _Segment:
        # What lies free and was too small goes.
        while sum(one.size_bytes for one in self._free) > _KEPT_BYTES:
            self._drop(self._free.pop(0))
        found = _make_segment(self._count, size_bytes)
        self._segments[found.number] = found
        self._count += 1
        return found

    def _give_back(self, segment: _Segment) -> None:
        # Called wherever the last tensor goes, so without the lock: these are single steps.
        if segment.lent or self._is_closed:
            # A run that broke off: others may still read it.
            self._drop(segment)
        else:
            self._free.append(segment)

    def _drop(self, segment: _Segment) -> None:
        self._segments.pop(segment.number, None)
        for rank in segment.known_by:
            with contextlib.suppress(RuntimeError):
                self.ranks[rank].tell(_GONE, 0, 0, segment.number)


class NearRank:
    """A rank that this one shares memory with: messages to and from it, in order, by tag."""

    def __init__(self, rank: int, connected: socket.socket, timeout_s: float) -> None:
        self._rank, self._socket = rank, connected
        weakref.finalize(self, connected.close)
        self._timeout_s = timeout_s
        _limit_waits(connected, timeout_s)
        self._changed = threading.Condition()
        self._is_read = False
        self._error, self._count = "", 0
        self._lent: dict[int, LentMessage] = {}
        # What is waited for, and what came before anybody did.
        self._expected: dict[int, deque[NearMessage]] = {}
        self._early: dict[int, deque[tuple[int, ...]]] = {}
        # Segments of that rank, by number.
        self.mapped: dict[int, torch.Tensor] = {}

    def lend(self, segment: _Segment, begin: int, size_bytes: int, tag: int) -> LentMessage:
        """Say that a message lies in a segment of the own rank."""
        with self._changed:
            found = LentMessage(self, segment)
            number = self._count
            self._count += 1
            self._lent[number] = found
            segment.lent += 1
            is_new = self._rank not in segment.known_by
            segment.known_by.add(self._rank)
        if is_new:
            self.tell(_SEGMENT, 0, 0, segment.number, 0, segment.size_bytes, segment.descriptor)
        self.tell(_LENT, tag, number, segment.number, begin, size_bytes)
        return found

    def expect(self, size_bytes: int, tag: int) -> NearMessage:
        """The next message of a tag, once it is there."""
        found = NearMessage(self, size_bytes)
        with self._changed:
            early = self._early.get(tag)
            if early:
                self._fill(found, early.popleft())
                if not early:
                    del self._early[tag]
            else:
                self._expected.setdefault(tag, deque()).append(found)
        return found

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Read notes until something is so. Raises RuntimeError where no more come."""
        while not is_so():
            with self._changed:
                if is_so():
                    return
                if self._error:
                    raise RuntimeError(self._error)
                if self._is_read:
                    # Another thread reads for both.
                    self._changed.wait()
                    continue
                self._is_read = True
            try:
                self._read()
            except (OSError, RuntimeError, ValueError) as error:
                self._error = self._error or str(error)
            finally:
                with self._changed:
                    self._is_read = False
                    self._changed.notify_all()

    def tell(
        self,
        kind: int,
        tag: int,
        number: int,
        segment: int = 0,
        begin: int = 0,
        size_bytes: int = 0,
        descriptor: int | None = None,
    ) -> None:
        """Send a note. Raises RuntimeError where nobody reads it."""
        data = _NOTE.pack(kind, tag, number, segment, begin, size_bytes)
        try:
            if descriptor is None:
                self._socket.send(data)
            else:
                socket.send_fds(self._socket, [data], [descriptor])
        except OSError as error:
            raise RuntimeError(self._error or f"Connection closed by peer ({error})") from error

    def close(self) -> None:
        """End the connection, for threads that wait as well."""
        self._error = self._error or "the connection is closed"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.mapped.clear()

    def _read(self) -> None:
        """Wait for one note, and see to it."""
        try:
            data, files, _, _ = socket.recv_fds(
                self._socket, _NOTE.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # Said once where the other end closed without reading all; what it sent comes behind.
            return
        except BlockingIOError as error:
            raise RuntimeError(f"Timed out waiting {self._timeout_s:g} s for a message") from error
        if len(data) != _NOTE.size:
            raise RuntimeError("Connection closed by peer")
        kind, tag, number, segment, begin, size_bytes = _NOTE.unpack(data)
        with self._changed:
            if kind == _TAKEN:
                lent = self._lent.pop(number)
                lent.segment.lent -= 1
                lent.is_taken = True
            elif kind == _LENT:
                expected = self._expected.get(tag)
                note = (number, segment, begin, size_bytes)
                if expected:
                    self._fill(expected.popleft(), note)
                    if not expected:
                        del self._expected[tag]
                else:
                    self._early.setdefault(tag, deque()).append(note)
            elif kind == _SEGMENT:
                self.mapped[segment] = _map_segment(files[0], size_bytes)
            else:
                self.mapped.pop(segment, None)

    def _fill(self, message: NearMessage, note: tuple[int, ...]) -> None:
        number, segment, begin, size_bytes = note
        if size_bytes != message.size_bytes:
            raise RuntimeError(
                f"a message of {size_bytes} bytes came where {message.size_bytes} were expected"
            )
        message.place = (segment, begin)
        message.number = number


def connect_shared_memory(
    position: int,
    count: int,
    timeout_s: float,
    gather: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> tuple[dict[int, socket.socket], bool]:
    """Sockets to those of `count` ranks that memory can be shared with, and whether all can.

    All ranks call this. No sockets where any rank could not keep to what it had told.

    Args:
        position: this rank's.
        timeout_s: how long one waits for another.
        gather: gives all ranks' tensors, of one shape, in their order.

    Raises:
        RunError: a rank that cannot, where `RESHARD_SHARED_MEMORY` says "always".
    """
    mode = os.environ.get(_VARIABLE, "")
    door = None if mode == "never" else _open_door(count)
    name = secrets.token_bytes(_WORD_BYTES) if door is None else door.name
    own = bytes([door is not None]) + name + (door.word if door is not None else name)
    told = [
        bytes(one.numpy()) for one in gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    ]
    found: dict[int, socket.socket] = {}
    if door is not None:
        for other in range(position + 1, count):
            is_open, name, word = told[other][0], told[other][1:17], told[other][17:]
            if is_open and (reached := _reach(name, word, position, timeout_s)):
                found[other] = reached
    row = torch.zeros(count, dtype=torch.uint8)
    row[list(found)] = 1
    rows = gather(row)
    is_well = True
    if door is not None:
        expected = {other for other in range(position) if rows[other][position]}
        found |= door.admit(expected)
        is_well = expected <= set(found)
        door.close()
    is_well_for_all = all(bool(one) for one in gather(torch.tensor([is_well])))
    if not is_well_for_all:
        for one in found.values():
            one.close()
        found = {}
    pairs = [rows[one][other] for other in range(count) for one in range(other)]
    is_complete = is_well_for_all and all(map(bool, pairs))
    if mode == "always" and len(found) < count - 1:
        raise RunError(
            f"{_VARIABLE}=always, but {count - 1 - len(found)} of {count - 1} ranks share no "
            "memory with this one; unset it"
        )
    return found, is_complete


class _Door:
    """Where other processes of this host come in, who know the word."""

    def __init__(self, listener: socket.socket, name: bytes) -> None:
        self._listener = listener
        self.name = name
        self.word = secrets.token_bytes(_WORD_BYTES)

    def admit(self, expected: set[int]) -> dict[int, socket.socket]:
        """Those that have come, by position; they all knocked before this is called."""
        found: dict[int, socket.socket] = {}
        self._listener.settimeout(_GREETING_S)
        with contextlib.suppress(OSError):
            while set(found) != expected:
                one, _ = self._listener.accept()
                _limit_waits(one, _GREETING_S)
                # Others of this host may find the name, but not the word.
                with contextlib.suppress(OSError):
                    greeting = one.recv(_WORD_BYTES + 8)
                    other = int.from_bytes(greeting[_WORD_BYTES:])
                    is_known = secrets.compare_digest(greeting[:_WORD_BYTES], self.word)
                    if is_known and other in expected - set(found):
                        found[other] = one
                        continue
                one.close()
        return found

    def close(self) -> None:
        self._listener.close()


def _open_door(count: int) -> _Door | None:
    """None where this process cannot share memory in this way."""
    if not all(hasattr(fcntl, name) for name in _SEALS) or not hasattr(os, "memfd_create"):
        return None
    listener = None
    try:
        # What takes part must be able to map what it sends.
        _map_segment(os.dup((tried := _make_segment(0, 1)).descriptor), tried.size_bytes)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = secrets.token_bytes(_WORD_BYTES)
        listener.bind(_address_of(name))
        listener.listen(count)
    except (OSError, RuntimeError, ValueError):
        if listener is not None:
            listener.close()
        return None
    return _Door(listener, name)


def _address_of(name: bytes) -> bytes:
    # A name that begins with a zero is no file.
    return b"\0reshard-" + name.hex().encode()


def _reach(name: bytes, word: bytes, position: int, timeout_s: float) -> socket.socket | None:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _limit_waits(connected, min(timeout_s, _GREETING_S))
        connected.connect(_address_of(name))
        connected.send(word + position.to_bytes(8))
    except OSError:
        connected.close()
        return None
    return connected


def _limit_waits(connected: socket.socket, timeout_s: float) -> None:
    """Let sends and receives fail after a time; unlike by `settimeout` each is one system call."""
    whole = int(timeout_s)
    limit = struct.pack("@ll", whole, int((timeout_s - whole) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _make_segment(number: int, size_bytes: int) -> _Segment:
    size_bytes = -(-max(size_bytes, 1) // _GRANULE_BYTES) * _GRANULE_BYTES
    descriptor = os.memfd_create("reshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        seals = sum(getattr(fcntl, name) for name in _SEALS)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        mapped = _map(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    return _Segment(number, descriptor, size_bytes, mapped, address)


def _map_segment(descriptor: int, size_bytes: int) -> torch.Tensor:
    """Another rank's segment. Raises RuntimeError for one that could shrink under a reader."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != size_bytes:
            raise RuntimeError("another rank's memory is not sealed")
        return torch.from_numpy(np.frombuffer(_map(descriptor, size_bytes), np.uint8))
    finally:
        os.close(descriptor)


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    found = mmap.mmap(descriptor, size_bytes)
    with contextlib.suppress(OSError, AttributeError):
        found.madvise(mmap.MADV_HUGEPAGE)
    return found
