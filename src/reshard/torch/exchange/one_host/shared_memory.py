"""Shared memory of ranks of a host: the sender packs a message, the receiver unpacks it from there.

Over network connections a message is also copied into the kernel and out of it. Shared memory saves
these two copies::

    sender      pack -> | segment of the sender |        "message 7 lies at 4096"  ->
    receiver            | the same, mapped      | -> unpack      <-  "message 7 is taken"

Segments of the host are anonymous memory files, sealed so that they cannot shrink. Their
descriptors are sent over sockets. Nothing remains however a process ends, and `/dev/shm` may be
small. Segments of a device are shared by handles (`device_memory`).

Notes over sockets (`fd_passing`) name the segment and offset of each message, and acknowledge it; a
rank that waits for a note sleeps. A process that ends closes its sockets, which its peers see at
once. Notes of several exchanges may share a socket, and any waiting thread reads for all of them.

A message of a few bytes is sent in its note, and not acknowledged. If two ranks that send to each
other filled their socket, neither would read; so only a few such messages are in flight, and every
note also carries how many its sender has read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from reshard import system
from reshard.errors import RunError
from reshard.runs import IntArray
from reshard.torch.exchange.one_host.device_memory import DeviceMemory
from reshard.torch.exchange.one_host.direct_reads import can_be_read, pays, read_spans

# Sizes are multiples of this, so that a free segment fits more of the later requests.
_GRANULE_BYTES = 1 << 20


@dataclass(slots=True, eq=False, weakref_slot=True)
class Segment:
    """Memory of this rank that others may map: a file in its host's memory, or memory of a device.

    `descriptor` is that of the file, or negative on a device. `lent` counts messages that are not
    yet read.
    """

    number: int
    size_bytes: int
    address: int
    memory: Any
    descriptor: int = -1
    known_by: set[int] = field(default_factory=set)
    lent: int = 0

    @classmethod
    def on_host(cls, number: int, size_bytes: int) -> Segment:
        """Create a segment of at least this size. Raise OSError if that fails."""
        size_bytes = _round_up(size_bytes)
        descriptor = system.make_sealed_memory(size_bytes)
        try:
            mapped = _map(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        segment = cls(number, size_bytes, address, mapped, descriptor)
        weakref.finalize(segment, os.close, descriptor)
        return segment

    @classmethod
    def on_device(
        cls, number: int, size_bytes: int, device: torch.device, devices: DeviceMemory
    ) -> Segment:
        """Create a segment. Raise as torch does if the device lacks memory."""
        size_bytes = _round_up(size_bytes)
        memory = devices.allocate(size_bytes, device)
        return cls(number, size_bytes, memory.data_ptr(), memory)

    @property
    def is_on_device(self) -> bool:
        """Whether it is memory of a device."""
        return self.descriptor < 0

    def lend(self, size_bytes: int, give_back: Callable[[Segment], None]) -> torch.Tensor:
        """Return its first bytes, and call `give_back` when no tensor uses them any more."""
        if not self.is_on_device:
            array = np.frombuffer(self.memory, np.uint8, size_bytes)
            # At the end of the process, the sockets may be closed before.
            weakref.finalize(array, give_back, self).atexit = False
            return torch.from_numpy(array)
        part = self.memory[:size_bytes]
        weakref.finalize(part, give_back, self).atexit = False
        # A tensor with a different storage, all of whose views keep `part` alive.
        return torch.from_dlpack(part)


def _round_up(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // _GRANULE_BYTES) * _GRANULE_BYTES


def map_segment(descriptor: int, size_bytes: int) -> torch.Tensor:
    """Map another rank's segment. Raise RuntimeError if it could shrink during a read."""
    try:
        if not system.is_sealed_memory(descriptor) or os.fstat(descriptor).st_size != size_bytes:
            raise RuntimeError("another rank's memory is not sealed")
        return torch.from_numpy(np.frombuffer(_map(descriptor, size_bytes), np.uint8))
    finally:
        os.close(descriptor)


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, size_bytes)
    system.advise_pages(mapped, 0, size_bytes, large=True)
    return mapped


_CPU = torch.device("cpu")
# The memory that is cached for the next exchange.
_KEPT_BYTES = 64 << 20
# The type of a note, how many short messages its sender has read, and five numbers: `tag, number,
# segment, offset, bytes`; a handle, bytes of `swap` or a short message follow.
_NOTE, MAX_NOTE_BYTES = struct.Struct("<7q"), 1 << 12
_LENT, _TAKEN, _SEGMENT, _GONE, _DEVICE_SEGMENT, _MARK, _DATA, _READABLE, _SHORT = range(9)
# Short messages: their maximum size, and how many from a rank to another are in flight; together
# less than a socket holds by default. The receiver keeps them as if they were in a segment.
MAX_SHORT_BYTES, _MOST_SHORT, _SHORT_SEGMENT = 1 << 14, 4, -1
_CLOSED = "Connection closed by peer"
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class LentMessage:
    """A message in this rank's segment, until its receiver has read it."""

    peer: NearRank
    # None if the receiver reads `spans` directly, which must be kept until then.
    segment: Segment | None
    spans: IntArray | None = None
    is_taken: bool = False

    def wait(self) -> None:
        """Return when the message is read. Raises RuntimeError if the receiver has ended."""
        self.peer.wait_until(lambda: self.is_taken)
        if self.segment is not None and self.segment.is_on_device:
            self.peer.wait_for_mark()


@dataclass(slots=True, eq=False)
class NearMessage:
    """A message of another rank, to be read in its sender's memory, and then given back."""

    peer: NearRank
    size_bytes: int
    number: int = -1
    place: tuple[int, int] = (-1, -1)
    is_readable: bool = False

    def wait(self) -> None:
        """Return when the message has arrived. Raises RuntimeError if the sender has ended."""
        self.peer.wait_until(lambda: self.number >= 0)
        if not self.is_readable and self.place[0] in self.peer.on_devices:
            self.peer.wait_for_mark()

    @property
    def bytes_there(self) -> torch.Tensor:
        """Return its bytes, in the sender's memory."""
        segment, begin = self.place
        # The segments of a closed rank are no longer mapped.
        return self.peer.mapped.get(segment, _NOTHING)[begin : begin + self.size_bytes]

    def read(self, into: IntArray) -> None:
        """Copy its bytes directly, if it `is_readable`, into a table of spans of this process.

        Raises RuntimeError if the sender has ended.
        """
        self.peer.read(*self.place, into)

    def give_back(self) -> None:
        """Let the sender use its memory again."""
        if self.place[0] == _SHORT_SEGMENT:
            self.peer.free_short(self.place[1])
            return
        if not self.is_readable and self.place[0] in self.peer.on_devices:
            self.peer.send_mark()
        self.peer.send_note(_TAKEN, 0, self.number)


class SharedMemory:
    """This rank's segments, and the ranks that it shares memory with, by their numbers.

    Args:
        sockets: connected, by rank.
        timeout_s: how long to wait for any note.
        is_complete: whether all ranks of the group share memory with all others.
        devices: memory of devices; None unless all ranks see the same devices.
        ratios: of direct reads (`connect_direct_reads`); None if any rank cannot read another.
    """

    lends = True

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        timeout_s: float,
        is_complete: bool,
        devices: DeviceMemory | None = None,
        ratios: Sequence[float] | None = None,
    ) -> None:
        self.ratios, self.takes_spans = ratios, ratios is not None
        self._devices = devices if is_complete else None
        self._segments: dict[int, Segment] = {}
        self._free: list[Segment] = []
        self._count, self._is_closed = 0, False
        self._lock = threading.Lock()
        self.ranks = {
            rank: NearRank(rank, connected, timeout_s, self._devices)
            for rank, connected in sockets.items()
        }
        # A poll reports hang-ups, whichever events are requested.
        self._ends = select.poll()
        for connected in sockets.values():
            self._ends.register(connected, 0)

    def serves(self, device: torch.device) -> bool:
        """Return whether data between tensors of a device stays on devices."""
        return self._devices is not None and self._devices.serves(device)

    def staging_memory(self, size_bytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Return bytes in a separate segment, which is reused when no tensor uses them any more.

        They are on the device if it is served, otherwise on the host.
        """
        with self._lock:
            segment = self._take_free(size_bytes, device) or self._add_segment(size_bytes, device)
        return segment.lend(size_bytes, self._give_back)

    def has(self, memory: torch.Tensor) -> bool:
        """Return whether a tensor's memory is in a segment of this rank."""
        return self._find(memory) is not None

    def send(self, data: torch.Tensor | IntArray, receiver: int, tag: int) -> LentMessage:
        """Lend a message until its receiver has taken it.

        Args:
            data: in a segment of this rank, or spans that the receiver reads directly.

        Raises RuntimeError if the receiver has ended.
        """
        if not isinstance(data, torch.Tensor):
            return self.ranks[receiver].lend_spans(data, tag)
        segment = self._find(data)
        if segment is None:
            raise RunError("what is sent lies in no memory that ranks share")
        begin = data.data_ptr() - segment.address
        return self.ranks[receiver].lend(segment, begin, data.numel(), tag)

    def takes_memory(self, address: int, row_bytes: int, receivers: int) -> bool:
        """Return whether receivers read memory of this rank directly."""
        # A driver's memory, as pinned memory may be, is not readable by other processes.
        return (
            self.ratios is not None
            and pays(self.ratios, row_bytes, receivers)
            and can_be_read(address)
        )

    def receive(self, size_bytes: Any, sender: int, tag: int) -> NearMessage:
        """Expect the next message of a tag from a rank."""
        return self.ranks[sender].expect(size_bytes, tag)

    def check_ends(self) -> None:
        """Raise RuntimeError if a rank has ended."""
        if self._ends.poll(0):
            raise RuntimeError(_CLOSED)

    def swap(
        self,
        note: bytes,
        receivers: Iterable[int],
        senders: Iterable[int],
        patience_s: float | None = None,
    ) -> list[bytes]:
        """Send up to `MAX_NOTE_BYTES` to some ranks, and return what others sent in this way.

        Args:
            patience_s: how long to wait for a rank after another has ended; None to wait until the
                awaited rank itself ends.

        Raises RuntimeError if a rank has ended.
        """
        for rank in receivers:
            self.ranks[rank].send_note(_DATA, 0, 0, handle=note)
        notes = []
        for rank in senders:
            peer = self.ranks[rank]
            before = None
            if patience_s is not None:
                before = partial(peer.await_note, self.ranks.values(), patience_s)
            peer.wait_until(lambda peer=peer: bool(peer.received_notes), before)  # type: ignore[misc]
            notes.append(peer.received_notes.popleft())
        return notes

    def close(self) -> None:
        """Close all connections, which ends threads that wait, and free unused memory."""
        self._is_closed = True
        if self._devices is not None:
            self._devices.finish()
        for peer in self.ranks.values():
            peer.close()
        while self._free:
            self._segments.pop(self._free.pop().number, None)

    def _find(self, memory: torch.Tensor) -> Segment | None:
        address = memory.data_ptr()
        for segment in list(self._segments.values()):
            if segment.address <= address < segment.address + segment.size_bytes:
                return segment
        return None

    def _take_free(self, size_bytes: int, device: torch.device) -> Segment | None:
        on_device = self.serves(device)
        fits = [
            free
            for free in self._free
            if free.is_on_device == on_device and free.size_bytes >= size_bytes
        ]
        # The smallest that fits, so that larger ones are left for larger requests.
        segment = min(fits, key=lambda free: free.size_bytes, default=None)
        if segment is not None:
            self._free.remove(segment)
        return segment

    def _add_segment(self, size_bytes: int, device: torch.device) -> Segment:
        # Free segments that are too small are dropped.
        while sum(free.size_bytes for free in self._free) > _KEPT_BYTES:
            self._drop(self._free.pop(0))
        if self._devices is not None and self.serves(device):
            segment = Segment.on_device(self._count, size_bytes, device, self._devices)
        else:
            segment = Segment.on_host(self._count, size_bytes)
        self._segments[segment.number] = segment
        self._count += 1
        return segment

    def _give_back(self, segment: Segment) -> None:
        # Called when the last tensor is freed, in any thread, so without the lock: single
        # operations.
        if segment.lent or self._is_closed:
            # A failed run lent it, so others may still read it.
            self._drop(segment)
        else:
            self._free.append(segment)

    def _drop(self, segment: Segment) -> None:
        self._segments.pop(segment.number, None)
        for rank in segment.known_by:
            with contextlib.suppress(RuntimeError):
                self.ranks[rank].send_note(_GONE, 0, 0, segment.number)


class NearRank:
    """A peer that shares memory with this rank: messages to and from it, in order, by tag."""

    def __init__(
        self,
        rank: int,
        connected: socket.socket,
        timeout_s: float,
        devices: DeviceMemory | None = None,
    ) -> None:
        self._rank, self._socket, self._devices = rank, connected, devices
        self._process = system.find_peer_process(connected)
        # The peer's event, and whether the peer has this rank's.
        self._mark: Any = None
        self._is_mark_sent = False
        weakref.finalize(self, connected.close)
        self._timeout_s = timeout_s
        self._late = f"Timed out waiting {timeout_s:g} s for a message"
        limit_waits(connected, timeout_s)
        # Entered directly, since a condition's own `with` is Python, several times for each note.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_read = False
        self._error, self._count = "", 0
        self._lent: dict[int, LentMessage] = {}
        # Messages that are waited for, and notes that arrived before.
        self._expected: dict[int, deque[NearMessage]] = {}
        self._early: dict[int, deque[tuple[int, ...]]] = {}
        # The peer's segments by number, and which of them are memory of devices.
        self.mapped: dict[int, torch.Tensor] = {}
        self.on_devices: set[int] = set()
        self.received_notes: deque[bytes] = deque()
        # Short messages: sent, those of them that the peer has read, and read from the peer.
        self._short_sent = self._short_taken = self._short_read = 0
        self._free_short: list[int] = []

    def lend(self, segment: Segment, begin: int, size_bytes: int, tag: int) -> LentMessage:
        """Notify the peer of a message in a segment of this rank."""
        if size_bytes <= MAX_SHORT_BYTES and not segment.is_on_device:
            with self._lock:
                has_room = self._short_sent - self._short_taken < _MOST_SHORT
                self._short_sent += has_room
            if has_room:
                data = bytes(memoryview(segment.memory)[begin : begin + size_bytes])
                self.send_note(_SHORT, tag, 0, size_bytes=size_bytes, handle=data)
                return LentMessage(self, None, is_taken=True)
        with self._lock:
            message = LentMessage(self, segment)
            number = self._count
            self._count += 1
            self._lent[number] = message
            segment.lent += 1
            is_new = self._rank not in segment.known_by
            segment.known_by.add(self._rank)
        number_of, size = segment.number, segment.size_bytes
        # Notes arrive in order, so the peer has mapped the segment when it reads of the message.
        if self._devices is not None and segment.is_on_device:
            if is_new:
                handle = self._devices.export(segment.memory)
                self.send_note(_DEVICE_SEGMENT, 0, 0, number_of, 0, size, handle=handle)
            self.send_mark()
        elif is_new:
            self.send_note(_SEGMENT, 0, 0, number_of, 0, size, segment.descriptor)
        self.send_note(_LENT, tag, number, number_of, begin, size_bytes)
        return message

    def lend_spans(self, spans: IntArray, tag: int) -> LentMessage:
        """Notify the peer of a message in tensors of this rank."""
        with self._lock:
            message = LentMessage(self, None, spans)
            number = self._count
            self._count += 1
            self._lent[number] = message
        # The receiver also reads the table itself, which may be longer than a note.
        self.send_note(_READABLE, tag, number, len(spans), spans.ctypes.data)
        return message

    def read(self, count: int, table: int, into: IntArray) -> None:
        """Copy the spans of a table in the peer's memory."""
        spans = np.empty((count, 2), dtype=np.int64)
        read_spans(
            self._process,
            np.array([[table, spans.nbytes]]),
            np.array([[spans.ctypes.data, spans.nbytes]]),
        )
        read_spans(self._process, spans, into)

    def expect(self, size_bytes: int, tag: int) -> NearMessage:
        """Return the next message of a tag, once its note has arrived."""
        message = NearMessage(self, size_bytes)
        with self._lock:
            early = self._early.get(tag)
            if early:
                self._fill(message, early.popleft())
                if not early:
                    del self._early[tag]
            else:
                self._expected.setdefault(tag, deque()).append(message)
        return message

    def await_note(self, watched: Iterable[NearRank], patience_s: float) -> None:
        """Wait for a note to read, and only `patience_s` once a watched rank has ended.

        Raises RuntimeError without a note by then.
        """
        own, polled = self._socket.fileno(), select.poll()
        for peer in watched:
            # A poll reports hang-ups, whichever events are requested.
            polled.register(peer._socket, 0)
        polled.register(own, select.POLLIN)
        events = dict(polled.poll(self._timeout_s * 1000))
        if not events:
            raise RuntimeError(self._late)
        if own not in events:
            for gone in events:
                polled.unregister(gone)
            if not polled.poll(patience_s * 1000):
                raise RuntimeError(_CLOSED)

    def wait_until(
        self, is_so: Callable[[], bool], before: Callable[[], None] | None = None
    ) -> None:
        """Read notes until a condition holds, calling `before` ahead of each.

        Raises RuntimeError if no more notes arrive.
        """
        while not is_so():
            with self._lock:
                # Another thread may have read the note before the lock was taken.
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
                if before is not None:
                    before()
                self._read()
            except (OSError, RuntimeError, ValueError) as error:
                self._error = self._error or str(error)
            finally:
                with self._lock:
                    self._is_read = False
                    self._changed.notify_all()

    def send_note(
        self,
        kind: int,
        tag: int,
        number: int,
        segment: int = 0,
        begin: int = 0,
        size_bytes: int = 0,
        descriptor: int | None = None,
        handle: bytes = b"",
    ) -> None:
        """Send a note. Raise RuntimeError if the peer has ended."""
        data = _NOTE.pack(kind, self._short_read, tag, number, segment, begin, size_bytes) + handle
        try:
            if descriptor is None:
                self._socket.send(data)
            else:
                socket.send_fds(self._socket, [data], [descriptor])
        except OSError as error:
            raise RuntimeError(self._error or f"{_CLOSED} ({error})") from error

    def send_mark(self) -> None:
        """Record an event for this rank's device, before a note about its work."""
        if self._devices is not None:
            self._devices.mark()
            if not self._is_mark_sent:
                self._is_mark_sent = True
                self.send_note(_MARK, 0, 0, handle=self._devices.export_mark())

    def wait_for_mark(self) -> None:
        """Let this rank's device wait for the recorded work of the peer's."""
        if self._devices is not None:
            self._devices.wait_for(self._mark)

    def free_short(self, begin: int) -> None:
        """Use the memory of a short message that was read for another."""
        with self._lock:
            # The lowest is used first: a run unpacks from the same places as the run before.
            insort(self._free_short, begin)
            self._short_read += 1

    def close(self) -> None:
        """Close the connection, which ends threads that wait."""
        self._error = self._error or "the connection is closed"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.mapped.clear()

    def _read(self) -> None:
        """Receive and process a note."""
        try:
            data, files, _, _ = socket.recv_fds(
                self._socket, _NOTE.size + MAX_SHORT_BYTES, 1, system.find_closing_flag()
            )
        except ConnectionResetError:
            # Raised once if the other end closed without reading all; its last notes follow.
            return
        except BlockingIOError as error:
            raise RuntimeError(self._late) from error
        if len(data) < _NOTE.size:
            raise RuntimeError(_CLOSED)
        kind, short_taken, tag, number, segment, begin, size_bytes = _NOTE.unpack_from(data)
        handle = data[_NOTE.size :]
        with self._lock:
            # Threads may send notes in another order than they packed them.
            self._short_taken = max(self._short_taken, short_taken)
            if kind == _TAKEN:
                lent = self._lent.pop(number)
                if lent.segment is not None:
                    lent.segment.lent -= 1
                lent.is_taken = True
            elif kind in (_LENT, _READABLE, _SHORT):
                if kind == _SHORT:
                    segment, begin = _SHORT_SEGMENT, self._keep_short(handle)
                expected = self._expected.get(tag)
                note = (number, segment, begin, size_bytes, kind == _READABLE)
                if expected:
                    self._fill(expected.popleft(), note)
                    if not expected:
                        del self._expected[tag]
                else:
                    self._early.setdefault(tag, deque()).append(note)
            elif kind == _SEGMENT:
                self.mapped[segment] = map_segment(files[0], size_bytes)
            elif kind == _GONE:
                self.mapped.pop(segment, None)
                self.on_devices.discard(segment)
            elif kind == _DATA:
                self.received_notes.append(handle)
            elif self._devices is None:
                raise RuntimeError("another rank has memory of a device that is not seen here")
            elif kind == _MARK:
                self._mark = self._devices.open_mark(handle)
            else:
                self.mapped[segment] = self._devices.open(handle)
                self.on_devices.add(segment)

    def _keep_short(self, data: bytes) -> int:
        """Keep the data of a short message; return where it begins in the memory for these."""
        if _SHORT_SEGMENT not in self.mapped:
            memory = torch.empty(_MOST_SHORT * MAX_SHORT_BYTES, dtype=torch.uint8)
            self.mapped[_SHORT_SEGMENT] = memory
            self._free_short = list(range(0, len(memory), MAX_SHORT_BYTES))
        if not self._free_short:
            raise RuntimeError("another rank has sent more short messages than are expected")
        begin = self._free_short.pop(0)
        kept = self.mapped[_SHORT_SEGMENT].numpy()
        kept[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        return begin

    def _fill(self, message: NearMessage, note: tuple[int, ...]) -> None:
        number, segment, begin, size_bytes, is_readable = note
        # The sizes of spans are compared when they are read.
        if not is_readable and size_bytes != message.size_bytes:
            raise RuntimeError(
                f"a message of {size_bytes} bytes came where {message.size_bytes} were expected"
            )
        message.place = (segment, begin)
        message.is_readable = bool(is_readable)
        message.number = number


def limit_waits(connected: socket.socket, timeout_s: float) -> None:
    """Limit sends and receives in time; unlike with `settimeout`, each is a single system call."""
    whole_s = int(timeout_s)
    limit = struct.pack("@ll", whole_s, int((timeout_s - whole_s) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
