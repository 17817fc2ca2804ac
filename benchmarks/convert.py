"""How long does a conversion take, against what people do today and against the disk's limit?

Five ways to come to a checkpoint on disk take turns in one run, each turn in a process of its
own, so that a change in the machine's mood falls on all of them; medians are compared:

    reshard   `reshard.checkpoint.convert`, digests and journal included
    cp        `cp -r` of the same bytes, then `sync`: what is called "just copying"
    dcp       PyTorch's distributed checkpoint: two ranks (gloo on this machine) load their part
              of the new cut and save it; starting the job and allocating do not count
    naive     what one writes with the `safetensors` package: load every file, concatenate,
              slice, save every file, then `sync`
    direct    the limit: a plain copy of the same bytes by direct I/O, four regions of 4 MiB in
              flight, then a sync of the files; nothing is rearranged and nothing is digested

The checkpoints have tensors of 32 MiB, one half float32 and the other bfloat16, 2 GiB by default;
or are a Llama-3-8B of two layers (bfloat16, 2.8 GiB). They are written by the `safetensors`
package, whose data begin anywhere in their pages, or by PyTorch. "Cold" drops the source from the
page cache before each turn, "warm" reads it before. The time of a turn begins when its imports
are done and ends when the last byte is on the disk; its memory is the peak that the kernel
counted for the process, or for both ranks of dcp together.

Expected before the first run, cold and warm: reshard takes at most 0.3 of the time of cp, 0.12
of dcp, 1.25 of direct, and less than 320 MiB of memory where naive takes more than twice the
model.

    python benchmarks/convert.py [--size-mib 2048] [--repeat 5] [--folder FOLDER]
        [--cases CASE ...] [--ways WAY ...] [--caches cold warm] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sources
import turns
from turns import MIB, Turn

# Which dimension is cut, by the tensor's name; None where it is not.
Cut = Callable[[str], int | None]


def rows(name: str) -> int | None:
    return 0


def columns(name: str) -> int | None:
    return 1


@dataclass(frozen=True)
class Case:
    """A conversion of one of the sources: what reshard is asked for, and what naive cuts."""

    name: str
    source: str
    target_shards: int
    source_cut: Cut
    target_cut: Cut
    asked: Mapping[str, Any]


ROWS, COLUMNS, LLAMA = {"rules": ["*=tp, -"]}, {"rules": ["*=-, tp"]}, {"recipe": "llama"}
DCP = {"format": "torch-dcp", **COLUMNS}
llama = sources.llama_dimension
CASES = {
    case.name: case
    for case in (
        Case("rows4-columns2", "rows4", 2, rows, columns, {"to": "tp=2", **COLUMNS}),
        Case("rows4-rows8", "rows4", 8, rows, rows, {"to": "tp=8", **ROWS}),
        Case("rows4-whole", "rows4", 1, rows, rows, {"to": "full"}),
        Case("whole-rows4", "whole", 4, rows, rows, {"to": "tp=4", **ROWS}),
        Case("dcp-rows4-columns2", "dcp-rows4", 2, rows, columns, {"to": "tp=2", **DCP}),
        Case("llama-tp4", "llama", 4, llama, llama, {"to": "tp=4", **LLAMA}),
        Case("tp4-llama", "llama-tp4", 1, llama, llama, {"to": "full"}),
    )
}


def by_reshard(source: Path, target: Path, case: Case) -> Turn:
    """Our conversion."""
    from reshard.checkpoint import convert

    return turns.timed(lambda: convert(source, target, **case.asked))


def by_cp(source: Path, target: Path, case: Case) -> Turn:
    """A copy by the page cache, until it is on the disk."""

    def run() -> None:
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        subprocess.run(["sync"], check=True)

    return turns.timed(run)


def by_dcp(source: Path, target: Path, case: Case) -> Turn:
    """What one rank of two does with the functions that PyTorch's guide names."""
    import torch.distributed.checkpoint as dcp

    turns.join_job()
    state = sources.empty_columns(source, 2)

    def run() -> None:
        dcp.load(state, checkpoint_id=source)
        dcp.save(state, checkpoint_id=target)

    return turns.timed_together(run)


def naively(source: Path, target: Path, case: Case) -> Turn:
    """A script of a few lines, as it is found in many repositories."""
    import torch
    from safetensors.torch import load_file, save_file

    def run() -> None:
        shards = [load_file(path) for path in sorted(source.glob("*.safetensors"))]
        whole = {}
        for name, tensor in shards[0].items():
            dimension = case.source_cut(name)
            whole[name] = tensor
            if dimension is not None and len(shards) > 1:
                whole[name] = torch.cat([shard[name] for shard in shards], dim=dimension)
        target.mkdir()
        for part in range(case.target_shards):
            pieces = {}
            for name, tensor in whole.items():
                dimension = case.target_cut(name)
                if dimension is not None:
                    tensor = tensor.chunk(case.target_shards, dimension)[part]
                pieces[name] = tensor.contiguous()
            save_file(pieces, target / f"model-{part}.safetensors")
        subprocess.run(["sync"], check=True)

    return turns.timed(run)


def by_direct_copy(source: Path, target: Path, case: Case) -> Turn:
    """Every byte read and written once, with several regions in flight."""
    from reshard.checkpoint.storage.filesystem import sync_folder
    from reshard.checkpoint.storage.local_files import AlignedBuffer, SourceFile, TargetFile

    region_bytes, threads = 4 * MIB, 4

    def run() -> None:
        target.mkdir()
        files = [SourceFile(path) for path in sorted(source.iterdir()) if path.is_file()]
        copies = [TargetFile(target / file.path.name, file.size_bytes) for file in files]
        regions = iter(
            (number, offset, min(region_bytes, file.size_bytes - offset))
            for number, file in enumerate(files)
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
                    files[number].read_into(region, offset)
                    copies[number].write(region.memory, offset)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for file in copies:
            file.sync()
            file.close()
        sync_folder(target)

    return turns.timed(run)


WAYS = {
    "reshard": by_reshard,
    "cp": by_cp,
    "dcp": by_dcp,
    "naive": naively,
    "direct": by_direct_copy,
}


def ways_of(case: Case, asked: list[str]) -> list[str]:
    """PyTorch's way is for its own checkpoints, and those are not of safetensors."""
    left_out = "naive" if case.source.startswith("dcp") else "dcp"
    return [way for way in asked if way != left_out]


def take_turn(way: str, source: Path, target: Path, case: Case) -> Turn:
    """One turn, in a process of its own or, PyTorch's, in two."""
    start = (
        partial(turns.in_ranks, __file__, 2)
        if way == "dcp"
        else partial(turns.in_a_process, __file__)
    )
    return start(way, source, target, case.name)


def check(source: Path, target: Path) -> None:
    """A fast conversion that is wrong would be no feat."""
    from reshard.checkpoint import compare

    comparison = compare(source, target)
    assert comparison.is_same, comparison.differences[:3]


def hidden(command: str, *arguments: str) -> None:
    """The hidden command, in a process of its own."""
    if command == "write":
        sources.WRITERS[arguments[0]](Path(arguments[1]), int(arguments[2]))
    elif command == "check":
        check(Path(arguments[0]), Path(arguments[1]))
    else:
        source, target, case = arguments
        turns.show(WAYS[command](Path(source), Path(target), CASES[case]))


def measure(
    source: Path, folder: Path, case: Case, cache: str, ways: list[str], repeat: int
) -> dict[str, list[Turn]]:
    """All turns of a case."""
    taken: dict[str, list[Turn]] = {way: [] for way in ways}
    target = folder / "target"
    for number, way in itertools.product(range(repeat), ways):
        turns.prepare(source, cache)
        taken[way].append(take_turn(way, source, target, case))
        if number == 0 and way in ("reshard", "dcp"):
            turns.in_a_process(__file__, "check", source, target)
        shutil.rmtree(target)
    return taken


def table(case: str, cache: str, taken: dict[str, list[Turn]], size_bytes: int) -> str:
    """A line of the table for each way."""
    medians = {way: statistics.median(turn.seconds_s for turn in taken[way]) for way in taken}
    lines = []
    for way, of_way in taken.items():
        seconds_s = [turn.seconds_s for turn in of_way]
        ratio = f"{medians['reshard'] / medians[way]:.2f}" if "reshard" in medians else "-"
        peak_mib = max(turn.peak_bytes for turn in of_way) / MIB
        lines.append(
            f"{case:18} {cache:5} {way:8} {medians[way]:7.2f} s  "
            f"{min(seconds_s):6.2f}-{max(seconds_s):5.2f}  "
            f"{size_bytes / 1024**3 / medians[way]:5.2f} GiB/s  {ratio:>10}  {peak_mib:7.0f} MiB"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=2048, help="of all but the Llama")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--caches", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--json", type=Path, default=None, help="write all turns to this file")
    options = parser.parse_args()
    print(
        f"{'case':18} cache way       median    min-max      rate         reshard/it  peak memory"
    )
    answers = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for case in (CASES[name] for name in options.cases):
            source = sources.write(__file__, case.source, folder, options.size_mib)
            for cache in options.caches:
                ways = ways_of(case, options.ways)
                taken = measure(source, folder, case, cache, ways, options.repeat)
                size_bytes = sources.size_bytes(source)
                print(table(case.name, cache, taken, size_bytes), flush=True)
                answers.append(
                    {
                        "case": case.name,
                        "cache": cache,
                        "size_bytes": size_bytes,
                        "turns": {way: [asdict(turn) for turn in taken[way]] for way in taken},
                    }
                )
    if options.json is not None:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        hidden(*sys.argv[2:])
    else:
        main()
