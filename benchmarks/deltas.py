"""How large is what changed between two checkpoints, and what does it cost to find and apply it?

A model of bfloat16 in one safetensors file, and what it is after some elements moved by a few units
in the last place:

    1 %, 3 %   elements anywhere
    rows       300 rows of one tensor
    adapters   a sixteenth of the tensors, wholly

Beside `diff` and `apply`: a plain read of both files, and a copy of the first. `bytes/changed` is
the delta's size over the bytes of the elements that changed.

Expected before the first run: 1.6 for scattered elements, half of that compressed; 1.0 otherwise;
`diff` at most 1.5 times a read of both, `apply` 1.5 times a copy; resident memory within 256 MiB
and what imports take.

    python benchmarks/deltas.py [--size-mib 1024] [--repeat 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns
from turns import Turn

TENSOR_MIB = 32
CASES = ("1 %", "3 %", "rows", "adapters")


def write(folder: Path, size_mib: int, case: str = "") -> None:
    """The model, before or after a case."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    tensors: dict[str, Any] = {}
    for number in range(size_mib // TENSOR_MIB):
        random = np.random.default_rng(number)
        # Weights as they are: normal, of some hundredths.
        values = random.standard_normal((4096, 4096), dtype=np.float32) * np.float32(0.02)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        if case in ("1 %", "3 %"):
            moved = random.random(bits.shape, dtype=np.float32) < float(case[0]) / 100
            bits[moved] += random.integers(1, 4, int(moved.sum()), dtype=np.uint16)
        elif case == "rows" and number == 0:
            bits[1000:1300] += 1
        elif case == "adapters" and number % 16 == 0:
            bits ^= random.integers(0, 1 << 9, bits.shape, dtype=np.uint16)
        tensors[f"layers.{number:03}.weight"] = torch.from_numpy(bits.view(np.int16)).view(
            torch.bfloat16
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_both(before: Path, after: Path, _: Path) -> None:
    for folder in (before, after):
        with (folder / "model.safetensors").open("rb", buffering=0) as file:
            while file.read(16 * turns.MIB):
                pass


def copy(before: Path, _: Path, target: Path) -> None:
    shutil.copyfile(before / "model.safetensors", target)
    os.sync()


def diff(before: Path, after: Path, delta: Path) -> None:
    from reshard.checkpoint import diff

    diff(before, after, delta, overwrite=True)


def diff_packed(before: Path, after: Path, delta: Path) -> None:
    from reshard.checkpoint import diff

    diff(before, after, delta, overwrite=True, compression="zstd")


def apply(before: Path, delta: Path, target: Path) -> None:
    from reshard.checkpoint import apply

    apply(before, delta, target)
    os.sync()


WAYS: dict[str, Callable[[Path, Path, Path], None]] = {
    "read both": read_both,
    "diff": diff,
    "diff, zstd": diff_packed,
    "copy": copy,
    "apply": apply,
    "apply, zstd": apply,
}


def run(way: str, *paths: str) -> Turn:
    import numpy  # noqa: F401
    import xxhash  # noqa: F401

    import reshard.checkpoint  # noqa: F401

    first, second, third = map(Path, paths)
    return turns.timed(lambda: WAYS[way](first, second, third))


def measure(folder: Path, case: str, repeat: int) -> None:
    """One line for each way."""
    before, after = folder / "before", folder / case
    deltas = {"diff": folder / "plain", "diff, zstd": folder / "packed"}
    taken: dict[str, list[Turn]] = {way: [] for way in WAYS}
    for way in list(WAYS) * repeat:
        turns.prepare(before, "warm")
        turns.prepare(after, "warm")
        target = folder / "target"
        if way.startswith("apply"):
            arguments = (before, deltas[way.replace("apply", "diff")], target)
        else:
            arguments = (before, after, deltas.get(way, target))
        taken[way].append(turns.in_a_process(__file__, way, *arguments))
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
    from reshard.checkpoint import read_delta

    changed = read_delta(deltas["diff"]).changed_words * 2
    for way, of_way in taken.items():
        seconds_s = statistics.median(turn.seconds_s for turn in of_way)
        peak = max(turn.peak_bytes for turn in of_way) / turns.MIB
        size = ""
        if way in deltas:
            bytes_ = deltas[way].stat().st_size
            size = f"{bytes_ / turns.MIB:9.1f} MiB  {bytes_ / changed:6.2f}"
        print(f"{case:9} {way:12} {seconds_s:7.2f} s  {peak:8.0f} MiB  {size}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="of each checkpoint")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    print("case      way           median    resident      delta    bytes/changed")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        turns.in_a_process(__file__, "write", folder / "before", options.size_mib, "")
        for case in options.cases:
            turns.in_a_process(__file__, "write", folder / case, options.size_mib, case)
            measure(folder, case, options.repeat)
            shutil.rmtree(folder / case)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--turn"]:
        main()
    elif sys.argv[2] == "write":
        write(Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        turns.show(run(*sys.argv[2:]))
