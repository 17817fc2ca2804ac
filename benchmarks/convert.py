"""How long does a conversion take, against what people do today and against the disk's limit?

Four ways to come to a checkpoint on disk take turns in one run, each turn in a process of its
own, so that a change in the machine's mood falls on all of them; medians are compared:

    reshard   `reshard.checkpoint.convert`, digests and journal included
    cp        `cp -r` of the same bytes, then `sync`: what is called "just copying"
    naive     what one writes with the `safetensors` package: load every file, concatenate,
              slice, save every file, then `sync`
    direct    the limit: a plain copy of the same bytes by direct I/O, four regions of 4 MiB in
              flight, then a sync of the files; nothing is rearranged and nothing is digested

The checkpoint has tensors of 32 MiB, one half float32 and the other bfloat16, 2 GiB by default,
written by the `safetensors` package: its data begin anywhere in their pages. "Cold" drops the
source from the page cache before each turn, "warm" reads it before. The time of a turn begins
when its imports are done and ends when the last byte is on the disk; its memory is the peak that
the kernel counted for the process.

Expected before the first run, cold and warm: reshard takes at most 0.3 of the time of cp, at
most 1.25 of direct, and less than 320 MiB of memory where naive takes more than twice the model.

    python benchmarks/convert.py [--size-mib 2048] [--repeat 5] [--folder FOLDER]
        [--cases CASE ...] [--ways WAY ...] [--caches cold warm] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20
TENSOR_MIB = 32


@dataclass(frozen=True)
class Case:
    """A conversion: row shards of a source, and the shards or the whole it becomes."""

    name: str
    source_shards: int
    target_shards: int
    target_dimension: int


CASES = {
    case.name: case
    for case in (
        Case("rows4-columns2", 4, 2, 1),
        Case("rows4-rows8", 4, 8, 0),
        Case("whole-rows4", 1, 4, 0),
        Case("rows4-whole", 4, 1, 0),
    )
}


@dataclass(frozen=True)
class Turn:
    """What one turn took."""

    seconds_s: float
    peak_bytes: int


def by_reshard(source: Path, target: Path, case: Case) -> Callable[[], object]:
    """Our conversion."""
    from reshard.checkpoint import convert

    to = "full" if case.target_shards == 1 else f"tp={case.target_shards}"
    rules = {0: ["*=tp, -"], 1: ["*=-, tp"]}[case.target_dimension]
    return lambda: convert(source, target, to=to, rules=[] if to == "full" else rules)


def by_cp(source: Path, target: Path, case: Case) -> Callable[[], object]:
    """A copy by the page cache, until it is on the disk."""

    def run() -> None:
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        subprocess.run(["sync"], check=True)

    return run


def naively(source: Path, target: Path, case: Case) -> Callable[[], object]:
    """A script of a few lines, as it is found in many repositories."""
    import torch
    from safetensors.torch import load_file, save_file

    def run() -> None:
        shards = [load_file(path) for path in sorted(source.glob("*.safetensors"))]
        whole = {name: torch.cat([shard[name] for shard in shards], dim=0) for name in shards[0]}
        target.mkdir()
        for part in range(case.target_shards):
            pieces = {
                name: tensor.chunk(case.target_shards, case.target_dimension)[part].contiguous()
                for name, tensor in whole.items()
            }
            save_file(pieces, target / f"model-{part}.safetensors")
        subprocess.run(["sync"], check=True)

    return run


def by_direct_copy(source: Path, target: Path, case: Case) -> Callable[[], object]:
    """Every byte read and written once, with several regions in flight."""
    from reshard.checkpoint.file_io import AlignedBuffer, SourceFile, TargetFile, sync_folder

    region_bytes, threads = 4 * MIB, 4

    def run() -> None:
        target.mkdir()
        sources = [SourceFile(path) for path in sorted(source.iterdir())]
        targets = [TargetFile(target / file.path.name, file.size_bytes) for file in sources]
        regions = iter(
            (number, offset, min(region_bytes, file.size_bytes - offset))
            for number, file in enumerate(sources)
            for offset in range(0, file.size_bytes, region_bytes)
        )
        taking = threading.Lock()

        def work() -> None:
            with AlignedBuffer(AlignedBuffer.capacity_for(region_bytes)) as buffer:
                while True:
                    with taking:
                        taken = next(regions, None)
                    if taken is None:
                        return
                    number, offset, size = taken
                    region = buffer.region(offset, size)
                    sources[number].read_into(region, offset)
                    targets[number].write(region.memory, offset)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for file in targets:
            file.sync()
            file.close()
        sync_folder(target)

    return run


WAYS = {"reshard": by_reshard, "cp": by_cp, "naive": naively, "direct": by_direct_copy}


def write_source(folder: Path, shards: int, size_mib: int) -> None:
    """Row shards, written by the safetensors package in PyTorch's convention; or one file."""
    import torch
    from safetensors.torch import save_file

    count = size_mib // TENSOR_MIB
    folder.mkdir()
    random = torch.Generator().manual_seed(shards)
    for shard in range(shards):
        tensors, offsets = {}, {}
        for number in range(count):
            kind, rows = (torch.float32, 2048) if number % 2 == 0 else (torch.bfloat16, 4096)
            shape = (rows // shards, 4096)
            bits = torch.randint(0, 2**15, shape, dtype=torch.int16, generator=random)
            wide = bits if kind == torch.bfloat16 else bits.to(torch.int32) * 40503
            tensors[f"layers.{number:03}.weight"] = wide.view(kind)
            offsets[f"layers.{number:03}.weight"] = {"saved_offsets": [shard * shape[0], 0]}
        if shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            convention = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
            name = f"shard-{shard + 1:05}-model-00001-of-00001.safetensors"
            save_file(tensors, folder / name, metadata={"format": "pt", **convention})


def check(source: Path, target: Path) -> None:
    """A fast conversion that is wrong would be no feat."""
    from reshard.checkpoint import compare

    comparison = compare(source, target)
    assert comparison.is_same, comparison.differences[:3]


def in_a_process(*arguments: object) -> Turn:
    """Run this file again with a hidden command, and see what it took."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--turn", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{arguments} ended with {process.returncode}")
    return Turn(float(answer or 0), usage.ru_maxrss * 1024)


def turn(command: str, *arguments: str) -> None:
    """The hidden command, in a process of its own."""
    if command == "write":
        write_source(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
    elif command == "check":
        check(Path(arguments[0]), Path(arguments[1]))
    else:
        run = WAYS[command](Path(arguments[0]), Path(arguments[1]), CASES[arguments[2]])
        start_s = time.perf_counter()
        run()
        print(time.perf_counter() - start_s)


def prepare(source: Path, cache: str) -> None:
    """Nothing is left to be written, and the source is in the page cache or it is not."""
    os.sync()
    for path in source.iterdir():
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and file.read(16 * MIB):
                pass


def measure(
    source: Path, folder: Path, case: Case, cache: str, ways: list[str], repeat: int
) -> dict[str, list[Turn]]:
    """All turns of a case."""
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    target = folder / "target"
    for number, way in itertools.product(range(repeat), ways):
        prepare(source, cache)
        turns[way].append(in_a_process(way, source, target, case.name))
        if number == 0 and way == "reshard":
            in_a_process("check", source, target)
        shutil.rmtree(target)
    return turns


def row(case: str, cache: str, turns: dict[str, list[Turn]], size_mib: int) -> str:
    """A line of the table for each way."""
    medians = {way: statistics.median(t.seconds_s for t in taken) for way, taken in turns.items()}
    lines = []
    for way, taken in turns.items():
        spread = f"{min(t.seconds_s for t in taken):.2f}-{max(t.seconds_s for t in taken):.2f}"
        ratio = f"{medians['reshard'] / medians[way]:5.2f}" if "reshard" in medians else "    -"
        peak_mib = max(t.peak_bytes for t in taken) / MIB
        lines.append(
            f"{case:15} {cache:5} {way:8} {medians[way]:7.2f} s  {spread:>12}  "
            f"{size_mib / 1024 / medians[way]:5.2f} GiB/s  {ratio}  {peak_mib:7.0f} MiB"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=2048, help="of the checkpoint")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--caches", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--json", type=Path, default=None, help="write all turns to this file")
    options = parser.parse_args()
    print(
        "case            cache way       median     min-max   rate         reshard/it  peak memory"
    )
    answers = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for case in (CASES[name] for name in options.cases):
            source = folder / f"source-{case.source_shards}"
            if not source.exists():
                in_a_process("write", source, case.source_shards, options.size_mib)
            for cache in options.caches:
                turns = measure(source, folder, case, cache, options.ways, options.repeat)
                print(row(case.name, cache, turns, options.size_mib), flush=True)
                answers.append(
                    {
                        "case": asdict(case),
                        "cache": cache,
                        "size_bytes": options.size_mib * MIB,
                        "turns": {way: [asdict(t) for t in taken] for way, taken in turns.items()},
                    }
                )
    if options.json is not None:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        turn(*sys.argv[2:])
    else:
        main()
