"""Memory of devices that processes share: who waits for whom, and what torch is asked for."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

import torch

from fake_devices import FakeDevices
from live_processes import expect_all_end_well, run_ranks
from reshard.torch.exchange.one_host import device_memory
from reshard.torch.exchange.one_host.device_memory import NO_DEVICES, DeviceMemory, seen_devices
from reshard.torch.exchange.one_host.shared_memory import SharedMemory

needs_files = pytest.mark.linux_only(reason="shared memory between ranks")
CUDA = torch.device("cuda", 0)


def make_pair() -> list[tuple[SharedMemory, FakeDevices]]:
    """Ranks 0 and 1, each with what its device was asked for."""
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found = []
    for rank, one in enumerate(sockets):
        devices: Any = FakeDevices()
        memory = SharedMemory({1 - rank: one}, 60, is_complete=True, devices=devices)
        found.append((memory, devices))
    return found


@needs_files
def test_streams_wait_for_each_others_marks() -> None:
    (zero, of_zero), (one, of_one) = make_pair()
    lent = zero.staging_memory(4, CUDA)
    lent.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    for turn in range(2):
        of_zero.events.clear(), of_one.events.clear()
        sent = zero.send(lent[1:3], 1, 0)
        # What is told of has been marked.
        assert of_zero.events == ["export", "mark"][turn:]
        found = one.receive(2, 0, 0)
        found.wait()
        assert of_one.events == ["open", "wait"][turn:]
        assert found.bytes_there.tolist() == [2, 3]
        found.give_back()
        assert of_one.events[-1] == "mark"
        sent.wait()
        assert of_zero.events[-1] == "wait"
    for end, devices in ((zero, of_zero), (one, of_one)):
        end.close()
        # Others may read it until the device has done all.
        assert devices.events[-1] == "finish"


@needs_files
def test_memory_of_devices_comes_back_once_no_view_has_it() -> None:
    (zero, devices), _ = make_pair()
    first = zero.staging_memory(100, CUDA)
    view, address = first[10:20], first.data_ptr()
    assert zero.has(view)
    del first
    gc.collect()
    other = zero.staging_memory(100, CUDA)
    assert other.data_ptr() != address
    del view
    assert zero.staging_memory(100, CUDA).data_ptr() == address
    assert devices.events.count("allocate") == 2


@needs_files
def test_memory_of_a_device_that_is_not_seen_is_refused() -> None:
    devices: Any = FakeDevices()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sees = SharedMemory({1: ends[0]}, 60, is_complete=True, devices=devices)
    blind = SharedMemory({0: ends[1]}, 60, is_complete=True)
    sees.send(sees.staging_memory(4, CUDA), 1, 0)
    with pytest.raises(RuntimeError, match="a device that is not seen here"):
        blind.receive(4, 0, 0).wait()


def test_devices_serve_where_all_ranks_share_memory() -> None:
    devices: Any = FakeDevices()
    for is_complete in (True, False):
        assert SharedMemory({}, 60, is_complete, devices).serves(CUDA) == is_complete
    assert not SharedMemory({}, 60, is_complete=True).serves(CUDA)


@needs_files
def test_exchanges_by_memory_of_devices() -> None:
    expect_all_end_well(run_ranks("device_memory_process.py", 3))


def test_handles_are_torchs_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is asked for on both sides; a device of the same UUID has another number there."""
    memory, asked = torch.arange(8, dtype=torch.uint8), []

    def opened(*given: object) -> torch.UntypedStorage:
        asked.extend(given)
        return memory.untyped_storage()

    fields = (0, b"handle", 8, 512, b"counter", 3, b"event", True)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: fields, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened, raising=False)
    monkeypatch.setattr(device_memory, "_numbers", lambda: {"GPU-a": 0, "GPU-b": 1})
    told = DeviceMemory().export(memory)
    monkeypatch.setattr(device_memory, "_numbers", lambda: {"GPU-b": 0, "GPU-a": 1})
    assert DeviceMemory().open(told).tolist() == list(range(8))
    assert asked == [1, b"handle", 8, 512, b"counter", 3, b"event", True]
    for wrong in (b"{}", b"\x80\x04", json.dumps({"uuid": "GPU-c"}).encode()):
        with pytest.raises(RuntimeError, match="has no handle"):
            DeviceMemory().open(wrong)
        with pytest.raises(RuntimeError, match="has no handle"):
            DeviceMemory().open_mark(wrong)


def test_who_has_used_no_device_tells_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert seen_devices() == NO_DEVICES
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    uuids = ["GPU-a", "GPU-b"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number])
    )
    found = seen_devices()
    uuids.reverse()
    # Numbers do not matter.
    assert len(found) == 16 and found == seen_devices() != NO_DEVICES
    uuids[0] = "GPU-c"
    assert seen_devices() != found


def test_the_first_device_that_is_asked_for_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = DeviceMemory()
    assert not devices.serves(torch.device("cpu"))
    assert devices.serves(torch.device("cuda"))
    assert devices.serves(torch.device("cuda", 1)) and not devices.serves(CUDA)


class FakeEvent:
    """A CUDA event that notes what it is asked for."""

    asked: ClassVar[list[str]] = []

    def __init__(self, interprocess: bool = False) -> None:
        self.asked.append("interprocess" if interprocess else "event")

    def record(self, stream: object = None) -> None:
        self.asked.append(f"record {stream or 'current'}")

    def ipc_handle(self) -> bytes:
        return b"event handle"

    def query(self) -> bool:
        self.asked.append("query")
        return self.asked.count("query") > 2

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> str:
        return f"{handle.decode()} on {device}"


def test_marks_are_events_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.asked.clear()
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(device_memory, "_numbers", lambda: {"GPU-a": 0, "GPU-b": 1})
    devices = DeviceMemory()
    # Who has marked nothing has nothing to wait for.
    devices.finish()
    # Also one that only receives, and has allocated nothing.
    assert devices.serves(torch.device("cuda", 1))
    devices.mark()
    devices.mark()
    assert FakeEvent.asked == ["interprocess", "record current", "record current"]
    monkeypatch.setattr(device_memory, "_numbers", lambda: {"GPU-b": 0, "GPU-a": 1})
    told = json.dumps({"uuid": "GPU-b", "event": b"event handle".hex()}).encode()
    devices.wait_for(devices.open_mark(told))
    assert waited == ["event handle on cuda:0"]
    assert json.loads(devices.export_mark())["uuid"] == "GPU-a"
    devices.finish()
    assert FakeEvent.asked[3:] == ["event", f"record {stream}", "query", "query", "query"]
