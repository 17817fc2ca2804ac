"""Memory of the host that stands for a device's, to test how processes share that without one.

What a stream does is done at once, so marks are numbers that only say in which order things were.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class FakeDevices:
    """As `DeviceMemory`, of processes of one user. `events` has what was asked of it, in order."""

    events: list[str] = field(default_factory=list)
    _files: dict[int, int] = field(default_factory=dict)

    def serves(self, device: torch.device) -> bool:
        del device
        return True

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        del device
        file = os.memfd_create("fake device")
        os.ftruncate(file, size_bytes)
        found = torch.from_numpy(np.frombuffer(mmap.mmap(file, size_bytes), np.uint8))
        self._files[found.data_ptr()] = file
        self.events.append("allocate")
        return found

    def export(self, memory: torch.Tensor) -> bytes:
        self.events.append("export")
        return json.dumps([os.getpid(), self._files[memory.data_ptr()]]).encode()

    def open(self, told: bytes) -> torch.Tensor:
        self.events.append("open")
        process, file = json.loads(told)
        with open(f"/proc/{process}/fd/{file}", "r+b") as opened:
            return torch.from_numpy(np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint8))

    def mark(self) -> None:
        self.events.append("mark")

    def export_mark(self) -> bytes:
        return b"a mark"

    def open_mark(self, told: bytes) -> str:
        return told.decode()

    def wait_for(self, mark: str) -> None:
        assert mark == "a mark", mark
        self.events.append("wait")

    def finish(self) -> None:
        self.events.append("finish")
