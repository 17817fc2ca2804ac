"""What does it cost the ranks of a job to save DTensors, by PyTorch's own save?

Four ranks, each a process, save row shards of tensors of 32 MiB:

    dcp           `torch.distributed.checkpoint.save`, with PyTorch's `FileSystemWriter`
    torch-dcp     the same with `reshard.torch.StorageWriter`, and in its other formats
    sharded-safetensors
    safetensors   whole tensors, put together by the ranks

They take turns in one run; medians. A turn ends when all is on the disk.

Expected before the first run: each format in at most 1.1 times what PyTorch takes for its own.

    python benchmarks/save.py [--size-mib 1024] [--repeat 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import sources
import turns
from turns import Turn

RANKS = 4
WAYS = ("dcp", "torch-dcp", "sharded-safetensors", "safetensors")


def save(way: str, target: Path, size_mib: int) -> Turn:
    """One rank's part."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from reshard.torch import StorageWriter

    rank = turns.join_job()
    mesh = init_device_mesh("cpu", (RANKS,))
    tensors = sources.uniform(RANKS, size_mib, rank)
    state = {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in tensors.items()}
    if way == "dcp":
        writer = dcp.FileSystemWriter(target)
    else:
        writer = StorageWriter(target, format=way)

    def run() -> None:
        dcp.save(state, storage_writer=writer)
        os.sync()

    return turns.timed_together(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="of the checkpoint")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    options = parser.parse_args()
    print("way                  median    min-max       resident MiB")
    taken: dict[str, list[Turn]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for way in list(WAYS) * options.repeat:
            target = Path(name) / "target"
            os.sync()
            taken[way].append(turns.in_ranks(__file__, RANKS, way, target, options.size_mib))
            shutil.rmtree(target)
    for way, of_way in taken.items():
        seconds_s = [turn.seconds_s for turn in of_way]
        peak = max(turn.peak_bytes for turn in of_way) / turns.MIB
        print(
            f"{way:19} {statistics.median(seconds_s):7.2f} s  {min(seconds_s):6.2f}-"
            f"{max(seconds_s):5.2f}  {peak:12.0f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        turns.show(save(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
