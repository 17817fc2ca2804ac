"""What does it cost the ranks of a job to save and load DTensors, by PyTorch's own calls?

Four ranks, each a process, save row shards of tensors of 32 MiB:

    dcp           `torch.distributed.checkpoint.save`, with PyTorch's `FileSystemWriter`
    torch-dcp     the same with `reshard.torch.StorageWriter`, and in its other formats
    sharded-safetensors
    safetensors   whole tensors, put together by the ranks
    sp.save       the same of arrays in shards, by `reshard.spmd.save`

and load into columns what PyTorch's writer saved:

    load dcp        `torch.distributed.checkpoint.load`, with PyTorch's `FileSystemReader`
    load torch-dcp  the same with `reshard.torch.StorageReader`
    sp.load         the same as arrays in shards, by `reshard.spmd.load`

The ranks start once, since that takes longer than many saves, and take all turns in it, one after
the other. All writers sync their files. Medians; of processor time, all ranks' together.

Expected before the first run: each format in at most 1.1 times what PyTorch takes for its own.

    python benchmarks/save.py [--size-mib 1024] [--repeat 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sources
import turns

RANKS = 4
SAVES = ("dcp", "torch-dcp", "sharded-safetensors", "safetensors")
WAYS = (*SAVES, "sp.save", "load dcp", "load torch-dcp", "sp.load")


def take_turns(folder: Path, size_mib: int, repeat: int) -> None:
    """One rank's part; what all ranks took is written by the first."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import reshard.spmd as sp
    from reshard import DeviceMesh, spec
    from reshard.torch import StorageReader, StorageWriter

    rank = turns.join_job()
    mesh = init_device_mesh("cpu", (RANKS,))
    tensors = sources.uniform(RANKS, size_mib, rank)
    rows = {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in tensors.items()}
    columns = {
        name: DTensor.from_local(
            torch.zeros(one.shape[0], one.shape[1] // RANKS, dtype=one.dtype), mesh, [Shard(1)]
        )
        for name, one in rows.items()
    }
    own, runner = DeviceMesh.of(x=RANKS), sp.over_processes()
    arrays = {
        name: sp.from_shards({rank: tensors[name]}, one.shape, spec(own, "x, -"), runner=runner)
        for name, one in rows.items()
    }
    like = {
        name: sp.abstract(tuple(one.shape), str(one.dtype).split(".")[1], spec(own, "-, x"))
        for name, one in rows.items()
    }

    def load_arrays() -> None:
        with sp.running(runner):
            sp.load(written, like)

    target, written = folder / "target", folder / "written"
    dcp.save(rows, storage_writer=dcp.FileSystemWriter(written))
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for way in list(WAYS) * repeat:
        if way == "dcp":
            act = partial(dcp.save, rows, storage_writer=dcp.FileSystemWriter(target))
        elif way in SAVES:
            act = partial(dcp.save, rows, storage_writer=StorageWriter(target, format=way))
        elif way == "sp.save":
            act = partial(sp.save, target, arrays)
        elif way == "sp.load":
            act = load_arrays
        else:
            kind = dcp.FileSystemReader if way == "load dcp" else StorageReader
            act = partial(dcp.load, columns, storage_reader=kind(written))
        taken = time_together(act)
        every: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(every, taken)
        found[way].append((max(one for one, _ in every), sum(one for _, one in every)))
        if rank == 0:
            shutil.rmtree(target, ignore_errors=True)
        torch.distributed.barrier()
    if rank == 0:
        (folder / "turns.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def time_together(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of an action of all ranks, from barrier to barrier, and processor seconds of this."""
    import torch

    torch.distributed.barrier()
    start_s, before_s = time.perf_counter(), processor_s()
    action()
    used_s = processor_s() - before_s
    torch.distributed.barrier()
    return time.perf_counter() - start_s, used_s


def processor_s() -> float:
    """What this process has had of processors."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="of the checkpoint")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        turns.in_ranks(__file__, RANKS, name, options.size_mib, options.repeat)
        found = json.loads((Path(name) / "turns.json").read_text())
    print("way                    median    min-max     processors")
    for way, of_way in found.items():
        seconds_s, used_s = zip(*of_way, strict=True)
        print(
            f"{way:19} {statistics.median(seconds_s):7.2f} s  {min(seconds_s):6.2f}-"
            f"{max(seconds_s):5.2f}  {statistics.median(used_s):8.2f} s"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        take_turns(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
