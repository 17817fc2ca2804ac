"""One rank of a job whose messages travel by memory of a device, which the host's stands for."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

import reshard
import reshard.torch
from fake_devices import FakeDevices
from rank_cases import report_each
from refit_models import part
from reshard.torch import Refit
from reshard.torch.exchange import groups
from reshard.torch.exchange.groups import rank_group

SHAPE = (48, 70)
RANKS = 3
MESH = reshard.DeviceMesh.of(tp=RANKS)
SIDES = {
    name: reshard.spec(MESH, text).layout(SHAPE)
    for name, text in (
        ("rows", "tp, -"),
        ("columns", "-, tp"),
        ("copies", "-, -"),
        ("contributions", "-, - | sum(tp)"),
    )
}
MOVES = [("rows", "columns"), ("rows", "copies"), ("contributions", "rows")]


def local(side: str, turn: int = 0) -> torch.Tensor:
    values = torch.arange(SHAPE[0] * SHAPE[1]).remainder(29 + turn).view(SHAPE).float()
    found = part(values, SIDES[side], dist.get_rank())
    assert found is not None
    return found


def tensors_move_by_device_memory() -> None:
    shared = rank_group(None).shared_memory
    assert shared is not None and shared.serves(torch.device("cpu"))
    for extra_bytes in (64 << 20, 256):
        for before, after in MOVES:
            expected = local(after) * (RANKS if before == "contributions" else 1)
            options: dict[str, Any] = {"source": SIDES[before], "extra_bytes": extra_bytes}
            found = reshard.torch.redistribute(
                local(before), SIDES[after], method="exchange", **options
            )
            assert torch.equal(found, expected), (before, after)


def refits_move_by_device_memory_again() -> None:
    own, into = local("rows"), torch.zeros_like(local("columns"))
    refit = Refit.prepare({"w": (own, SIDES["rows"])}, {"w": (into, SIDES["columns"])}, buckets=999)
    for turn in range(3):
        own.copy_(local("rows", turn))
        refit.run()
        assert torch.equal(into, local("columns", turn)), turn


def main() -> None:
    devices: list[FakeDevices] = []

    def make() -> FakeDevices:
        devices.append(FakeDevices())
        return devices[-1]

    def every_operation_of_the_devices_was_called() -> None:
        (calls,) = (device.events for device in devices)
        assert {"allocate", "export", "open", "mark", "wait"} == set(calls), set(calls)

    groups.seen_devices = lambda: b"the same devices"  # type: ignore[assignment]
    groups.DeviceMemory = make  # type: ignore[assignment, misc]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    report_each(
        [
            tensors_move_by_device_memory,
            refits_move_by_device_memory_again,
            every_operation_of_the_devices_was_called,
        ]
    )
    dist.barrier()


if __name__ == "__main__":
    main()
