"""Memory of CUDA devices that processes of a host share, by the handles of CUDA's IPC.

A process packs into memory of its device, and another process copies from there to its own device
over the devices' links; no data passes through the host. The host does not wait for a device: each
process records events on its stream, and a stream waits for the other's event before it reads or
packs again::

    sender's stream      pack   event --- "lies at 4096" --->                     wait   pack again
    receiver's stream                            wait   copy   event --- "taken" --->

1. *Availability.* Processes that see the same devices, each by its UUID, whatever their numbers. A
   process reports its devices only if it has used any (`seen_devices`): listing initializes CUDA.
2. *Handles* are torch's own, of `torch.multiprocessing`, written as JSON; nothing is unpickled.
3. *Marks* are interprocess events. A single event per process suffices: a wait for it covers all
   work of the process until then.

Not run on a device yet: none was available. Tests use memory of the host instead.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import torch

NO_DEVICES = bytes(16)
# The fields of a handle that are bytes.
_BYTES = ("handle", "counter", "event")
_FINISH_S = 1.0


def seen_devices() -> bytes:
    """Return a digest of the devices seen by this process, 16 bytes; zeros if it has used none."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return NO_DEVICES
    return hashlib.blake2b("\n".join(sorted(_numbers())).encode(), digest_size=16).digest()


class DeviceMemory:
    """Memory of a device that this process shares.

    All processes that share it see the same devices.
    """

    def __init__(self) -> None:
        self._device = torch.device("cuda")
        self._event: Any = None

    def serves(self, device: torch.device) -> bool:
        """Return whether memory of a device can be shared: only of the first requested device."""
        if device.type != "cuda":
            return False
        index = torch.cuda.current_device() if device.index is None else device.index
        if self._device.index is None:
            self._device = torch.device("cuda", index)
        return bool(self._device.index == index)

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate bytes on a device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def export(self, memory: torch.Tensor) -> bytes:
        """Return a handle to the memory, for a single other process."""
        # As in `torch.multiprocessing.reductions`, which pickles it.
        # Torch counts the users of a handle, so each process has a handle of its own.
        storage: Any = memory.untyped_storage()
        number, handle, size, offset, counter, place, event, waits = storage._share_cuda_()
        (uuid,) = (uuid for uuid, at in _numbers().items() if at == number)
        handle_json = {"uuid": uuid, "size": size, "offset": offset, "place": place, "waits": waits}
        handle_json |= dict(
            zip(_BYTES, (part.hex() for part in (handle, counter, event)), strict=True)
        )
        return json.dumps(handle_json).encode()

    def open(self, data: bytes) -> torch.Tensor:
        """Open another process's memory. Raise RuntimeError for an invalid handle."""
        try:
            described = json.loads(data)
            handle, counter, event = (bytes.fromhex(described[name]) for name in _BYTES)
            number = _numbers()[described["uuid"]]
            key = number, handle, int(described["size"]), int(described["offset"])
            counted = counter, int(described["place"]), event, bool(described["waits"])
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"another rank's memory has no handle: {error!r}") from error
        kind: Any = torch.UntypedStorage
        storage = kind._new_shared_cuda(*key, *counted)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def mark(self) -> None:
        """Record an event after the current work of the device's stream."""
        with torch.cuda.device(self._device):
            if self._event is None:
                self._event = torch.cuda.Event(interprocess=True)
            self._event.record()

    def export_mark(self) -> bytes:
        """Return a handle to the event."""
        (uuid,) = (uuid for uuid, at in _numbers().items() if at == self._device.index)
        return json.dumps({"uuid": uuid, "event": self._event.ipc_handle().hex()}).encode()

    def open_mark(self, data: bytes) -> Any:
        """Open another process's event. Raise RuntimeError for an invalid handle."""
        try:
            described = json.loads(data)
            event, number = bytes.fromhex(described["event"]), _numbers()[described["uuid"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"another rank's mark has no handle: {error!r}") from error
        return torch.cuda.Event.from_ipc_handle(torch.device("cuda", number), event)

    def wait_for(self, mark: Any) -> None:
        """Let the current stream of the device wait for another process's event."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """Wait for the device, since memory that others may still read must not be freed.

        The wait is short, since the device may wait for a process that has ended.
        """
        if self._event is None:
            return
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._device))
        until_s = time.monotonic() + _FINISH_S
        while not end.query() and time.monotonic() < until_s:
            time.sleep(0.001)


def _numbers() -> dict[str, int]:
    """Return the numbers of the devices seen by this process, by UUID."""
    count = torch.cuda.device_count()
    return {str(torch.cuda.get_device_properties(n).uuid): n for n in range(count)}
