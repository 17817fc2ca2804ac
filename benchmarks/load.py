"""What does it cost the ranks of a job to load their part of a checkpoint cut another way?

Four ranks, each a process, load the columns of every tensor from a PyTorch distributed checkpoint
of four row shards, into buffers that exist already:

    reshard   `reshard.checkpoint.load(..., out=...)` on each rank
    dcp       `torch.distributed.checkpoint.load` of DTensors
    storage   the same with `reshard.torch.StorageReader`

They take turns in one run; medians. Both ways begin and end at a barrier of the same gloo job.
Counted are the bytes that read calls returned to all four ranks, against the bytes they need.

Expected before the first run: reshard reads at most 1.05 times what is needed, dcp 4 times.

    python benchmarks/load.py [--size-mib 2048] [--repeat 5] [--folder FOLDER]
        [--caches cold warm]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import sources
import turns
from turns import Turn

RANKS = 4


def by_reshard(source: Path) -> Turn:
    """One rank's arrays."""
    import numpy as np

    import reshard
    from reshard.checkpoint import load
    from reshard.checkpoint import open as open_checkpoint

    rank = turns.join_job()
    mesh = reshard.DeviceMesh.of(tp=RANKS)
    columns = reshard.spec(mesh, "-, tp")
    layouts, out = {}, {}
    for name, tensor in open_checkpoint(source).tensors.items():
        layouts[name] = columns.layout(tensor.shape)
        out[name] = np.empty(layouts[name].local_shape(rank), tensor.dtype.storage)
        out[name].fill(0)
    return turns.timed_together(lambda: load(source, layouts, rank, out=out))


def by_dcp(source: Path) -> Turn:
    """One rank's DTensors."""
    import torch.distributed.checkpoint as dcp

    turns.join_job()
    state = sources.empty_columns(source, RANKS)
    return turns.timed_together(lambda: dcp.load(state, checkpoint_id=source))


def by_storage(source: Path) -> Turn:
    """One rank's DTensors, read by reshard."""
    import torch.distributed.checkpoint as dcp

    from reshard.torch import StorageReader

    turns.join_job()
    state = sources.empty_columns(source, RANKS)
    return turns.timed_together(lambda: dcp.load(state, storage_reader=StorageReader(source)))


WAYS = {"reshard": by_reshard, "dcp": by_dcp, "storage": by_storage}


def hidden(command: str, *arguments: str) -> None:
    """The hidden command, on one rank."""
    if command == "write":
        sources.WRITERS[arguments[0]](Path(arguments[1]), int(arguments[2]))
    else:
        turns.show(WAYS[command](Path(arguments[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=2048, help="of the checkpoint")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--caches", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    options = parser.parse_args()
    print("cache way       median    min-max      reshard/it  read/needed  resident MiB")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source = sources.write(__file__, "dcp-rows4", Path(name), options.size_mib)
        for cache in options.caches:
            taken: dict[str, list[Turn]] = {way: [] for way in WAYS}
            for way in list(WAYS) * options.repeat:
                turns.prepare(source, cache)
                taken[way].append(turns.in_ranks(__file__, RANKS, way, source))
            medians = {
                way: statistics.median(turn.seconds_s for turn in taken[way]) for way in taken
            }
            for way, of_way in taken.items():
                seconds_s = [turn.seconds_s for turn in of_way]
                read = max(turn.read_bytes for turn in of_way) / (options.size_mib * turns.MIB)
                print(
                    f"{cache:5} {way:8} {medians[way]:7.2f} s  "
                    f"{min(seconds_s):6.2f}-{max(seconds_s):5.2f}  "
                    f"{medians['reshard'] / medians[way]:10.2f}  {read:11.3f}  "
                    f"{max(turn.peak_bytes for turn in of_way) / turns.MIB:12.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        hidden(*sys.argv[2:])
    else:
        main()
