"""What do very many small tensors cost, against a script with the safetensors package?

Two ways to come to a checkpoint take turns in one run, each turn in a process of its own; medians
are compared:

    reshard   `reshard.checkpoint.convert`, digests, journal and manifest included
    script    what one writes with `safetensors.numpy`: load every file, concatenate, split, save
              every file, then `sync`; no digests

Cases are conversions of whole tensors to whole ones, to eight ranks and to another element type,
of four ranks to eight, by rules, and of PyTorch's distributed checkpoint of four ranks to whole
tensors; loading what one rank of eight holds; comparing a checkpoint with itself, bit for bit; and
what differs from one in which every tenth tensor has other elements, as a file. Processor time
is user and system of the process, from the end of its imports on. Memory is the
peak of `RssAnon`, sampled, less what the process had with
its imports done; beyond the buffers of the run it is given a tensor.

Expected before the first run: at 100,000 tensors of 4 KiB and at 30,720 of 96 KiB at most 1.5
of the script's processor time, and 1 KiB of memory a tensor beyond the buffers.

    python benchmarks/many_tensors.py [--tensors 100000] [--size-kib 4] [--repeat 5]
        [--cases CASE ...] [--ways WAY ...] [--folder FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
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
from typing import Any

KIB = 1024
RULE = "*=tp, -"
PREFIX = "model.layers"


@dataclass(frozen=True)
class Turn:
    """What a turn took: processor time, wall time, and anonymous memory beyond the imports."""

    processor_s: float
    seconds_s: float
    peak_bytes: int
    planned_bytes: int = 0


def anonymous_bytes() -> int:
    """The anonymous memory of this process that is resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * KIB
    return 0


def processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(action: Callable[[], Any]) -> Turn:
    """Do it, with its memory looked at all the while."""
    before_bytes = peak = anonymous_bytes()
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    start_s, began_s = time.perf_counter(), processor_s()
    planned_bytes = action()
    seconds_s, used_s = time.perf_counter() - start_s, processor_s() - began_s
    done.set()
    watcher.join()
    return Turn(used_s, seconds_s, max(peak, anonymous_bytes()) - before_bytes, planned_bytes or 0)


def name_of(number: int) -> str:
    layer, part = divmod(number, 256)
    return f"{PREFIX}.{layer}.mlp.experts.{part}.up_proj.weight"


def write_whole(folder: Path, tensors: int, size_kib: int) -> None:
    """One file of float32 matrices, by the safetensors package."""
    import numpy as np
    from safetensors.numpy import save_file

    columns = 32
    rows = size_kib * KIB // 4 // columns
    random = np.random.default_rng(1)
    folder.mkdir()
    noise = random.integers(0, 2**31, (tensors, rows, columns), dtype=np.int32).view(np.float32)
    named = {name_of(number): noise[number] for number in range(tensors)}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def write_ranks(folder: Path, whole: Path, ranks: int) -> None:
    """The same in shards, one file a rank, by reshard."""
    from reshard.checkpoint import convert

    convert(whole, folder, to=f"tp={ranks}", rules=[RULE])


def write_dcp(folder: Path, whole: Path, ranks: int) -> None:
    """The same as PyTorch's distributed checkpoint of so many ranks, by reshard."""
    from reshard.checkpoint import convert

    convert(whole, folder, to=f"tp={ranks}", rules=[RULE], format="torch-dcp")


def write_changed(folder: Path, whole: Path) -> None:
    """The same with one element in 32 of every tenth tensor changed, by the safetensors package."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    named = load_file(whole / "model.safetensors")
    for name in list(named)[::10]:
        named[name].view(np.uint32)[:, 0] ^= 1
    folder.mkdir()
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def full_by_reshard(source: Path, target: Path) -> int:
    return convert_by_reshard(source, target, to="full")


def ranks_by_reshard(source: Path, target: Path) -> int:
    return convert_by_reshard(source, target, to="tp=8", rules=[RULE])


def half_by_reshard(source: Path, target: Path) -> int:
    return convert_by_reshard(source, target, to="full", dtype="fp16")


def convert_by_reshard(source: Path, target: Path, **asked: Any) -> int:
    from reshard.checkpoint.conversion.plan import plan_conversion
    from reshard.checkpoint.conversion.run import run_conversion

    conversion = plan_conversion(source, target, **asked)
    report = run_conversion(conversion)
    return sum(report.buffers_by_process)


def full_by_script(source: Path, target: Path) -> None:
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    save_file(load_file(source / "model.safetensors"), target / "model.safetensors")
    subprocess.run(["sync"], check=True)


def ranks_by_script(source: Path, target: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shards = [load_file(path) for path in sorted(source.glob("*.safetensors"))]
    if len(shards) == 1:
        (whole,) = shards
    else:
        whole = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    target.mkdir()
    for rank in range(8):
        pieces = {name: np.array_split(tensor, 8)[rank] for name, tensor in whole.items()}
        save_file(pieces, target / f"rank-{rank}.safetensors")
    subprocess.run(["sync"], check=True)


def half_by_script(source: Path, target: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    whole = load_file(source / "model.safetensors")
    target.mkdir()
    halves = {name: tensor.astype(np.float16) for name, tensor in whole.items()}
    save_file(halves, target / "model.safetensors")
    subprocess.run(["sync"], check=True)


def dcp_by_script(source: Path, target: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    reader = dcp.FileSystemReader(source)
    described = reader.read_metadata().state_dict_metadata
    whole = {name: torch.empty(one.size) for name, one in described.items()}
    dcp.load(whole, storage_reader=reader, no_dist=True)
    target.mkdir()
    save_file(whole, target / "model.safetensors")
    subprocess.run(["sync"], check=True)


def diff_by_reshard(source: Path, target: Path) -> None:
    from reshard.checkpoint import diff

    diff(source, source.with_name("changed"), target)


def diff_by_script(source: Path, target: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    before = load_file(source / "model.safetensors")
    after = load_file(source.with_name("changed") / "model.safetensors")
    delta = {}
    for name, tensor in after.items():
        bits = tensor.reshape(-1).view(np.uint32)
        places = np.flatnonzero(bits != before[name].reshape(-1).view(np.uint32))
        if len(places):
            delta[f"{name}.places"] = places.astype(np.uint32)
            delta[f"{name}.values"] = bits[places]
    save_file(delta, target)
    subprocess.run(["sync"], check=True)


def load_by_reshard(source: Path, target: Path) -> None:
    import reshard
    from reshard.checkpoint import load, open_checkpoint

    checkpoint = open_checkpoint(source)
    sharding = reshard.spec(reshard.DeviceMesh.of(tp=8), RULE.removeprefix("*="))
    load(checkpoint, {name: sharding.layout(checkpoint[name].shape) for name in checkpoint}, 3)


def load_by_script(source: Path, target: Path) -> None:
    from safetensors import safe_open

    arrays = {}
    with safe_open(source / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            part = file.get_slice(name)
            rows = part.get_shape()[0] // 8
            arrays[name] = part[3 * rows : 4 * rows]


def open_by_reshard(source: Path, target: Path) -> None:
    from reshard.checkpoint import open_checkpoint

    open_checkpoint(source)


def open_by_script(source: Path, target: Path) -> None:
    from safetensors import safe_open

    with safe_open(source / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            file.get_slice(name).get_shape()


def verify_by_reshard(source: Path, target: Path) -> None:
    from reshard.checkpoint import compare

    compare(source, source)


def verify_by_script(source: Path, target: Path) -> None:
    from safetensors import safe_open

    path = source / "model.safetensors"
    with safe_open(path, "np") as left, safe_open(path, "np") as right:
        for name in left.keys():  # noqa: SIM118 (no mapping)
            a, b = left.get_tensor(name), right.get_tensor(name)
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


# The source of each case, and its ways.
CASES: dict[str, tuple[str, dict[str, Callable[[Path, Path], int | None]]]] = {
    "full-full": ("whole", {"reshard": full_by_reshard, "script": full_by_script}),
    "tp4-tp8": ("ranks", {"reshard": ranks_by_reshard, "script": ranks_by_script}),
    "full-tp8": ("whole", {"reshard": ranks_by_reshard, "script": ranks_by_script}),
    "fp16": ("whole", {"reshard": half_by_reshard, "script": half_by_script}),
    "dcp-full": ("dcp", {"reshard": full_by_reshard, "script": dcp_by_script}),
    "diff": ("whole", {"reshard": diff_by_reshard, "script": diff_by_script}),
    "load": ("whole", {"reshard": load_by_reshard, "script": load_by_script}),
    "verify": ("whole", {"reshard": verify_by_reshard, "script": verify_by_script}),
    "open": ("whole", {"reshard": open_by_reshard, "script": open_by_script}),
}


def check(case: str, source: Path, target: Path) -> None:
    """See that reshard wrote what it should. A fast conversion that is wrong would be no feat."""
    import numpy as np
    from safetensors.numpy import load_file

    from reshard.checkpoint import apply, compare

    expected: Path = source
    if case == "diff":
        expected, delta = source.with_name("changed"), target
        target = target.with_name("applied")
        apply(source, delta, target)
    if case == "fp16":
        before = load_file(source / "model.safetensors")
        after = load_file(target / "model.safetensors")
        assert before.keys() == after.keys()
        with np.errstate(over="ignore"):
            for name, one in before.items():
                assert np.array_equal(after[name], one.astype(np.float16), equal_nan=True), name
        return
    comparison = compare(expected, target)
    assert comparison.is_same, comparison.differences[:3]
    if case == "diff":
        shutil.rmtree(target)


def hidden(command: str, *arguments: str) -> None:
    """The hidden command, in a process of its own."""
    if command == "write":
        write_whole(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
    elif command == "cut":
        write_ranks(Path(arguments[0]), Path(arguments[1]), 4)
    elif command == "dcp":
        write_dcp(Path(arguments[0]), Path(arguments[1]), 4)
    elif command == "change":
        write_changed(Path(arguments[0]), Path(arguments[1]))
    elif command == "check":
        check(arguments[0], Path(arguments[1]), Path(arguments[2]))
    else:
        import safetensors.numpy

        if command == "dcp-full" and arguments[0] == "script":
            importlib.import_module("torch.distributed.checkpoint")
            importlib.import_module("safetensors.torch")

        import reshard.checkpoint.conversion.run

        assert reshard and safetensors
        way = CASES[command][1][arguments[0]]
        turn = timed(lambda: way(Path(arguments[1]), Path(arguments[2])))
        print(json.dumps(asdict(turn)))


def in_a_process(*arguments: object) -> Turn | None:
    command = [sys.executable, __file__, "--turn", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return Turn(**json.loads(answer)) if answer else None


def show(case: str, taken: dict[str, list[Turn]], tensors: int) -> None:
    """A line of the table for each way."""
    medians = {way: statistics.median(t.processor_s for t in turns) for way, turns in taken.items()}
    for way, turns in taken.items():
        used = [turn.processor_s for turn in turns]
        wall_s = statistics.median(turn.seconds_s for turn in turns)
        peak = statistics.median(turn.peak_bytes for turn in turns)
        beyond = peak - statistics.median(turn.planned_bytes for turn in turns)
        ratio = f"{medians['reshard'] / medians[way]:.2f}" if "reshard" in medians else "-"
        print(
            f"{case:10} {way:8} {medians[way]:8.2f} s  {min(used):7.2f}-{max(used):6.2f}  "
            f"{wall_s:8.2f} s  {ratio:>6}  {peak / KIB / KIB:7.0f} MiB  "
            f"{beyond / tensors / KIB:6.2f} KiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--size-kib", type=int, default=4, help="of a tensor")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=["reshard", "script"], default=None)
    parser.add_argument("--json", type=Path, default=None, help="write all turns to this file")
    options = parser.parse_args()
    print(
        "case       way       processor  min-max             wall  reshard/it    memory  a tensor"
    )
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        sources = {name: folder / name for name in ("whole", "ranks", "dcp", "changed")}
        in_a_process("write", sources["whole"], options.tensors, options.size_kib)
        made = {
            "tp4-tp8": ("cut", "ranks"),
            "dcp-full": ("dcp", "dcp"),
            "diff": ("change", "changed"),
        }
        for case in made.keys() & {*options.cases}:
            command, kind = made[case]
            in_a_process(command, sources[kind], sources["whole"])
        if all(CASES[case][0] != "whole" for case in options.cases):
            shutil.rmtree(sources["whole"])
        target = folder / "target"
        for case in options.cases:
            source, ways = CASES[case]
            taken: dict[str, list[Turn]] = {way: [] for way in options.ways or ways}
            for number in range(options.repeat):
                for way in taken:
                    turn = in_a_process(case, way, sources[source], target)
                    assert turn is not None
                    taken[way].append(turn)
                    if target.exists():
                        if number == 0 and way == "reshard":
                            in_a_process("check", case, sources[source], target)
                        target.unlink() if target.is_file() else shutil.rmtree(target)
            show(case, taken, options.tensors)
            answers[case] = {way: [asdict(turn) for turn in turns] for way, turns in taken.items()}
    if options.json is not None:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        hidden(*sys.argv[2:])
    else:
        main()
