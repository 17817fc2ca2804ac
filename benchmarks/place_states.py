"""What do saves and loads of a job's tensors cost, to and from a bucket, by PyTorch's own calls?

Four ranks, each a process, save row shards of tensors of 32 MiB, and load columns of them::

    save         `torch.distributed.checkpoint.save` with `reshard.torch.StorageWriter`
    fsspec save  the same with PyTorch's `FsspecWriter`
    load         `load` with `StorageReader(..., readers_on_host=4)`, of what FsspecWriter saved
    alone load   the same, each rank for itself
    fsspec load  the same with PyTorch's `FsspecReader`

The server is SeaweedFS's (`make engines ENGINES=stores`), behind a link with `--rate-mib` in each
direction and `--latency-ms` each way, which counts bytes. Ranks start once, and take turns from
barrier to barrier. Peaks are of resident memory above that before the turn, all ranks' together.

fsspec finds buckets by s3fs, which needs another botocore than boto3: `pip install --target FOLDER
s3fs`, and `--s3fs FOLDER`. Without it only the ways without fsspec are measured.

    python benchmarks/place_states.py [--size-mib 256] [--repeat 5] [--rate-mib 50]
                                      [--latency-ms 10] [--s3fs FOLDER] [--ways save load]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import places
import sources
import turns
from slow_link import passed_bytes, slow_link
from turns import MIB

RANKS = 4
FSSPEC = ("fsspec save", "fsspec load")
WAYS = ("save", "fsspec save", "load", "alone load", "fsspec load")
WRITTEN = f"s3://{places.BUCKET}/written"


def take_turns(folder: Path, size_mib: int, repeat: int, ways: list[str]) -> None:
    """One rank's part; what all ranks took is written by the first."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

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

    def act_of(way: str, target: str) -> Callable[[], Any]:
        if way == "save":
            return partial(dcp.save, rows, storage_writer=StorageWriter(target))
        if way == "load":
            return partial(
                dcp.load, columns, storage_reader=StorageReader(WRITTEN, readers_on_host=RANKS)
            )
        if way == "alone load":
            return partial(dcp.load, columns, storage_reader=StorageReader(WRITTEN))
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        if way == "fsspec save":
            return partial(dcp.save, rows, storage_writer=FsspecWriter(target))
        return partial(dcp.load, columns, storage_reader=FsspecReader(WRITTEN))

    act_of("fsspec save" if set(FSSPEC) & set(ways) else "save", WRITTEN)()
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    if rank == 0:
        ask(folder, "counts")
    torch.distributed.barrier()
    for number, way in enumerate(ways * repeat):
        for one in columns.values():
            one.to_local().zero_()
        act = act_of(way, f"s3://{places.BUCKET}/turn-{number}")
        taken_s, peak_mib = time_together(act)
        every: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(every, (taken_s, peak_mib))
        # The parent reads the link's counts at every turn's end.
        if rank == 0:
            passed = json.loads(ask(folder, "counts"))
            longest_s = max(one for one, _ in every)
            found[way].append([longest_s, sum(one for _, one in every), *passed])
        torch.distributed.barrier()
        if way.endswith("load"):
            for name, one in columns.items():
                own = one.full_tensor().chunk(RANKS)[rank]
                # As bits: some are not numbers.
                if not torch.equal(own.view(torch.int16), tensors[name].view(torch.int16)):
                    raise SystemExit(f"{way}: {name} is wrong")
    if rank == 0:
        (folder / "turns.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def ask(folder: Path, what: str) -> str:
    """What the parent answers, which watches the folder."""
    (folder / f"{what}.question").touch()
    answer = folder / f"{what}.answer"
    while not answer.exists():
        time.sleep(0.01)
    text = answer.read_text()
    answer.unlink()
    return text


def time_together(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of an action of all ranks, from barrier to barrier, and MiB more at its peak."""
    import torch

    gc.collect()
    # From here on the peak counts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mib("VmRSS")
    torch.distributed.barrier()
    start_s = time.perf_counter()
    action()
    torch.distributed.barrier()
    return time.perf_counter() - start_s, memory_mib("VmHWM") - before


def memory_mib(name: str) -> float:
    """Of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) / 1024


@contextlib.contextmanager
def answer_counts(folder: Path, passed: Any) -> Iterator[None]:
    """Tell who asks what has passed the link since the last time."""
    stop = threading.Event()

    def watch() -> None:
        before = [0, 0]
        while not stop.wait(0.01):
            question = folder / "counts.question"
            if question.exists():
                question.unlink()
                now = list(passed)
                told = [a - b for a, b in zip(now, before, strict=True)]
                before = now
                (folder / "counts.new").write_text(json.dumps(told))
                (folder / "counts.new").rename(folder / "counts.answer")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> None:
    """All turns, one after the other, and their medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rate-mib", type=float, default=50)
    parser.add_argument("--latency-ms", type=float, default=10)
    parser.add_argument("--s3fs", default="")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    arguments = parser.parse_args()
    ways = [way for way in arguments.ways if arguments.s3fs or way not in FSSPEC]
    os.environ |= places.ENVIRONMENT
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "store").mkdir()
        port = stack.enter_context(places.serve(folder / "store"))
        places.use(port)
        places.begin_bucket()
        passed = passed_bytes()
        latency_s, rate = arguments.latency_ms / 1e3, arguments.rate_mib * MIB
        places.use(stack.enter_context(slow_link(port, latency_s, rate, passed)))
        stack.enter_context(answer_counts(folder, passed))
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        if arguments.s3fs:
            os.environ["S3FS_FOLDER"] = arguments.s3fs
        turns.in_ranks(__file__, RANKS, folder, arguments.size_mib, arguments.repeat, *ways)
        found = json.loads((folder / "turns.json").read_text())
    print("way           median   min to max     MiB sent  received  peak of all")
    for way, of_way in found.items():
        seconds_s, peaks, sent, received = zip(*of_way, strict=True)
        print(
            f"{way:12} {statistics.median(seconds_s):6.2f} s  {min(seconds_s):5.2f} to "
            f"{max(seconds_s):5.2f}  {statistics.median(sent) / MIB:7.0f}  "
            f"{statistics.median(received) / MIB:8.0f}  {statistics.median(peaks):8.0f} MiB"
        )


if __name__ == "__main__":
    if "--turn" in sys.argv:
        if os.environ.get("S3FS_FOLDER"):
            # Behind everything, but for the packages that only it has.
            sys.path.append(os.environ["S3FS_FOLDER"])
        folder, size, repeat, *ways = sys.argv[sys.argv.index("--turn") + 1 :]
        take_turns(Path(folder), int(size), int(repeat), ways)
    else:
        main()
