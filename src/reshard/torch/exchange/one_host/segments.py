"""Memory of this process that others on its host can map: host memory, or device memory.

Segments of the host are anonymous memory files, sealed so that they cannot shrink. Their
descriptors are sent over sockets. Nothing remains however a process ends, and `/dev/shm` may be
small. Segments of a device are shared by handles (`device_memory`).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from reshard.system import advise_pages, is_sealed_memory, make_sealed_memory
from reshard.torch.exchange.one_host.device_memory import DeviceMemory

_GRANULE_BYTES = 1 << 20


@dataclass(slots=True, eq=False, weakref_slot=True)
class Segment:
    """Memory of this rank that others may map. `lent` counts messages that are not yet read."""

    number: int
    size_bytes: int
    address: int
    known_by: set[int] = field(default_factory=set, kw_only=True)
    lent: int = field(default=0, kw_only=True)


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostSegment(Segment):
    """Host memory: a file, by its descriptor."""

    descriptor: int
    mapped: mmap.mmap

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    @classmethod
    def make(cls, number: int, size_bytes: int) -> HostSegment:
        """Create a segment of at least this size. Raise OSError if that fails."""
        size_bytes = -(-max(size_bytes, 1) // _GRANULE_BYTES) * _GRANULE_BYTES
        descriptor = make_sealed_memory(size_bytes)
        try:
            mapped = _map(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        return cls(number, size_bytes, address, descriptor, mapped)

    def lend(self, size_bytes: int, give_back: Callable[[HostSegment], None]) -> torch.Tensor:
        """Return its first bytes, and call `give_back` when no tensor uses them any more."""
        array = np.frombuffer(self.mapped, np.uint8, size_bytes)
        weakref.finalize(array, give_back, self).atexit = False
        return torch.from_numpy(array)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceSegment(Segment):
    """Memory of a device."""

    memory: torch.Tensor
    of: DeviceMemory

    @classmethod
    def make(
        cls, number: int, size_bytes: int, device: torch.device, of: DeviceMemory
    ) -> DeviceSegment:
        """Create a segment. Raise as torch does if the device lacks memory."""
        size_bytes = -(-max(size_bytes, 1) // _GRANULE_BYTES) * _GRANULE_BYTES
        memory = of.allocate(size_bytes, device)
        return cls(number, size_bytes, memory.data_ptr(), memory, of)

    def lend(self, size_bytes: int, give_back: Callable[[DeviceSegment], None]) -> torch.Tensor:
        """Return its first bytes, and call `give_back` when no tensor uses them any more."""
        part = self.memory[:size_bytes]
        weakref.finalize(part, give_back, self).atexit = False
        # A tensor with a different storage, all of whose views keep `part` alive.
        return torch.from_dlpack(part)


def map_segment(descriptor: int, size_bytes: int) -> torch.Tensor:
    """Map another rank's segment. Raise RuntimeError if it could shrink during a read."""
    try:
        if not is_sealed_memory(descriptor) or os.fstat(descriptor).st_size != size_bytes:
            raise RuntimeError("another rank's memory is not sealed")
        return torch.from_numpy(np.frombuffer(_map(descriptor, size_bytes), np.uint8))
    finally:
        os.close(descriptor)


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    found = mmap.mmap(descriptor, size_bytes)
    advise_pages(found, 0, size_bytes, large=True)
    return found
