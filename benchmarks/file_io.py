"""How long does copying a file take through `SourceFile` and `TargetFile`, against `cp` and `sync`?

Both sides end with the bytes on the disk. They take turns in one run, so that a change in the
machine's mood falls on both; the medians of five turns are compared. "Cold" drops the source
from the page cache before each turn, "warm" leaves it there.

Expected before the first run: 0.3 of the time of `cp` + `sync FILE`, cold and warm, since the
page cache's copy of every written byte is what `cp` waits for.

    python benchmarks/file_io.py [--folder FOLDER] [--threads 4] [--region-mib 4] [--mib 512]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from reshard.checkpoint.storage.filesystem import sync_folder
from reshard.checkpoint.storage.local_files import AlignedBuffer, SourceFile, TargetFile

MIB = 1024 * 1024


def copy(source_path: Path, target_path: Path, threads: int, region_bytes: int) -> None:
    """Copy a file, in regions taken in turn by the threads, until it is on the disk."""
    with SourceFile(source_path) as source, TargetFile(target_path, source.size_bytes) as target:
        offsets = iter(range(0, source.size_bytes, region_bytes))
        taking = threading.Lock()

        def work() -> None:
            with AlignedBuffer(AlignedBuffer.capacity_for(region_bytes)) as buffer:
                while True:
                    with taking:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    size = min(region_bytes, source.size_bytes - offset)
                    region = buffer.region(offset, size)
                    source.read_into(region, offset)
                    target.write(region.memory, offset)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        target.sync()
        assert target.written_bytes == source.read_bytes == source.size_bytes
    sync_folder(target_path.parent)


def copy_by_cp(source_path: Path, target_path: Path) -> None:
    """What people do today."""
    subprocess.run(["cp", source_path, target_path], check=True)
    subprocess.run(["sync", target_path], check=True)


def drop_from_cache(path: Path) -> None:
    """Make the next reader of `path` go to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[Path, Path], None], source: Path, target: Path, cold: bool) -> float:
    """Seconds of one turn, onto a target that does not exist yet."""
    target.unlink(missing_ok=True)
    os.sync()
    if cold:
        drop_from_cache(source)
    else:
        source.read_bytes()
    start_s = time.perf_counter()
    action(source, target)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--threads", type=int, nargs="+", default=[4])
    parser.add_argument("--region-mib", type=int, nargs="+", default=[4])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, target = Path(name, "source"), Path(name, "target")
        chunk = os.urandom(MIB)
        with source.open("wb") as file:
            for _ in range(options.mib):
                file.write(chunk)
        for threads, region_mib in itertools.product(options.threads, options.region_mib):

            def ours(
                source: Path,
                target: Path,
                threads: int = threads,
                region_bytes: int = region_mib * MIB,
            ) -> None:
                copy(source, target, threads, region_bytes)

            for cold in (True, False):
                ours_s, cp_s = [], []
                for _ in range(options.turns):
                    ours_s.append(timed(ours, source, target, cold))
                    assert subprocess.run(["cmp", source, target], check=False).returncode == 0
                    cp_s.append(timed(copy_by_cp, source, target, cold))
                ours_median_s, cp_median_s = statistics.median(ours_s), statistics.median(cp_s)
                print(
                    f"{'cold' if cold else 'warm'}  {threads} threads of {region_mib} MiB:  "
                    f"{ours_median_s:.2f} s ({options.mib / 1024 / ours_median_s:.2f} GiB/s)  "
                    f"cp + sync {cp_median_s:.2f} s ({options.mib / 1024 / cp_median_s:.2f} GiB/s)"
                    f"  ratio {ours_median_s / cp_median_s:.2f}"
                )


if __name__ == "__main__":
    main()
