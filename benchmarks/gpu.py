"""What do exchanges between tensors of CUDA devices cost? One table; nothing without a device.

Ranks are processes; each has the device of its number, or shares what there is. A tensor of 1 GiB
of float32 goes from rows to columns. Times are between CUDA events where nothing leaves the device,
else between barriers that wait for it; medians of seven.

    copy      a dense copy on one device: the bandwidth that all else is compared with
    pack      the columns of one of four ranks into dense memory, and back: as exchanges do it
    nccl      `redistribute(out=)` with one rank a device, and `all_to_all_single` of the same bytes
    ipc       the same between two ranks of a group of gloo, on one device where there is no other:
              by memory of the device that they share
    gloo      the same with `RESHARD_SHARED_MEMORY=never`: staged in the host's memory
    host      how far the host's memory of a rank rises while messages travel by NCCL

Each result is compared with what it has to be.

Expected before the first run: pack at 0.6 of copy or better; nccl at 1.5 of raw; ipc at half the
speed of copy or better; gloo as quick as the bus to the host; host at 0. It has not been run: no
device was there.

    python benchmarks/gpu.py [--size-mib 1024] [--repeat 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import is_rank

MIB = 1 << 20
COLUMNS = 4096


def tell(name: str, seconds_s: float, moved_bytes: int, note: str) -> None:
    """One row."""
    speed = moved_bytes / seconds_s / 1e9
    print(f"{name:24} {seconds_s * 1e3:9.2f} ms  {speed:8.1f} GB/s  {note}", flush=True)


def time_on_device(action: Callable[[], Any], repeat: int) -> float:
    """The median seconds of an action that stays on the current device, after one more run."""
    import torch

    taken = []
    for _ in range(repeat + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken[1:])


def measure_one_device(options: argparse.Namespace) -> None:
    """Copies and packing on the first device."""
    import torch

    from reshard.torch.exchange.packing.copies import copier

    rows = options.size_mib * MIB // 4 // COLUMNS
    whole = torch.rand(rows, COLUMNS, device="cuda:0")
    size_bytes = whole.numel() * 4
    copied = torch.empty_like(whole)
    copy_s = time_on_device(lambda: copied.copy_(whole), options.repeat)
    tell("copy", copy_s, size_bytes, "of 1.00: bytes copied, each read and written")
    columns = whole[:, : COLUMNS // 4]
    dense = torch.empty_like(columns, memory_format=torch.contiguous_format)
    for name, target, source in (("pack", dense, columns), ("unpack", columns, dense)):
        pack_s = time_on_device(copier(target, source), options.repeat)
        share = (size_bytes / 4 / pack_s) / (size_bytes / copy_s)
        tell(name, pack_s, size_bytes // 4, f"{share:.2f} of copy (goal: 0.60)")
    assert torch.equal(dense, columns)


def host_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_as_rank(options: argparse.Namespace) -> None:
    """One exchange, and torch's own of as many bytes, on one rank."""
    import torch
    import torch.distributed as dist

    import reshard
    import reshard.torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.part == "nccl" else "gloo")
    shape = (options.size_mib * MIB // 4 // COLUMNS // ranks * ranks, COLUMNS // ranks * ranks)
    mesh = reshard.DeviceMesh.of(tp=ranks)
    before, after = (reshard.spec(mesh, text).layout(shape) for text in ("tp, -", "-, tp"))
    rows, columns = shape[0] // ranks, shape[1] // ranks
    # Every element is a whole number that float32 has, and other than those around it.
    own = torch.arange(rows * shape[1], device=device).add_(rank * rows * shape[1])
    own = own.remainder_(1 << 24).float().view(rows, shape[1])
    out = torch.zeros(shape[0], columns, device=device)
    dense, received = (
        torch.rand(own.numel(), device=device),
        torch.empty(own.numel(), device=device),
    )
    if options.part != "nccl":
        dense, received = dense.cpu(), received.cpu()

    def move() -> None:
        reshard.torch.redistribute(own, after, source=before, out=out, method="exchange")

    def move_raw() -> None:
        dist.all_to_all_single(received, dense)

    taken: dict[str, list[float]] = {"exchange": [], "raw": []}
    risen_bytes = 0
    for _ in range(options.repeat + 1):
        for name, action in (("exchange", move), ("raw", move_raw)):
            torch.cuda.synchronize()
            dist.barrier()
            begin_bytes, begin_s = host_bytes(), time.perf_counter()
            action()
            torch.cuda.synchronize()
            most = torch.tensor(time.perf_counter() - begin_s)
            if name == "exchange" and taken["exchange"]:
                risen_bytes = max(risen_bytes, host_bytes() - begin_bytes)
            # On the CPU, which both kinds of groups have.
            every = [torch.zeros(()) for _ in range(ranks)]
            dist.all_gather(every, most)
            taken[name].append(float(max(every)))
    numbers = torch.arange(shape[0], device=device).view(-1, 1) * shape[1]
    expected = numbers + torch.arange(rank * columns, (rank + 1) * columns, device=device)
    assert torch.equal(out, expected.remainder_(1 << 24).float()), "the result is not right"
    if rank == 0:
        seconds_s = {name: statistics.median(of[1:]) for name, of in taken.items()}
        moved_bytes = shape[0] * shape[1] * 4
        of_raw = seconds_s["exchange"] / seconds_s["raw"]
        where = f"{ranks} ranks, {min(ranks, torch.cuda.device_count())} devices"
        tell(options.part, seconds_s["exchange"], moved_bytes, f"{of_raw:.2f} of raw, {where}")
        note = "raw, from the host's memory" if options.part != "nccl" else "raw"
        tell(f"{options.part}, all-to-all", seconds_s["raw"], moved_bytes, note)
        if options.part == "nccl":
            print(f"{'host':24} {risen_bytes / MIB:9.1f} MiB")
    dist.barrier()
    dist.destroy_process_group()


def measure_ranks(part: str, ranks: int, options: argparse.Namespace) -> int:
    """Run this program again as ranks; how they ended."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["RESHARD_SHARED_MEMORY"] = "never" if part == "gloo" else ""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    given = ["--part", part, "--size-mib", str(options.size_mib), "--repeat", str(options.repeat)]
    return subprocess.run(
        [sys.executable, *command, __file__, *given], env=environment, timeout=600
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="of the whole tensor")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each way")
    parser.add_argument(
        "--part", choices=["nccl", "ipc", "gloo"], default="nccl", help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if is_rank():
        measure_as_rank(options)
        return
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    devices = torch.cuda.device_count()
    print(f"{torch.cuda.get_device_name(0)}, {devices} of them, torch {torch.__version__}")
    measure_one_device(options)
    given = (("nccl", devices), ("ipc", 2), ("gloo", 2))
    ended = [measure_ranks(part, ranks, options) for part, ranks in given]
    raise SystemExit(max(ended, key=abs))


if __name__ == "__main__":
    main()
