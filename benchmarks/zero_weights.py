"""How long does it take to merge the weights of a ZeRO checkpoint, against DeepSpeed's script?

A checkpoint of four ranks with AdamW's moments, in DeepSpeed's own layout, is merged into one file
of safetensors in two ways that take turns, each in a process of its own:

    reshard        `convert --to full --include '*.master'`
    zero_to_fp32   DeepSpeed's `get_fp32_state_dict_from_zero_checkpoint`, saved by safetensors

The last column is the bytes that read calls returned, over those of the float32 weights; what is
mapped, as partitions are by DeepSpeed's script, is not counted. Memory is the peak that the kernel
counted, with imports. DeepSpeed is needed:

    .engines/deepspeed/bin/python benchmarks/zero_weights.py [--weights-mib 2048] [--stage 3]
        [--repeat 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import turns
from turns import MIB, Turn

RANKS = 4
WIDTH = 1024


def write(folder: Path, layers: int, stage: int) -> None:
    """A checkpoint with random elements, as DeepSpeed lays it out."""
    import numpy as np

    from reshard.checkpoint import convert, describe_ranks

    state: dict[str, object] = {}
    rng = np.random.default_rng(0)
    shapes = {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH), "norm": (WIDTH,)}
    # Layers have the same elements, so that no more than one of them is in memory.
    elements = {name: rng.random(shape, dtype=np.float32) for name, shape in shapes.items()}
    for layer in range(layers):
        for name, value in elements.items():
            own = f"layers.{layer}.{name}.weight"
            for key in ("master", "exp_avg", "exp_avg_sq"):
                state[f"optimizer.state.{own}.{key}"] = value
            state[f"optimizer.state.{own}.step"] = np.array(2, np.float32)
    source = describe_ranks({0: state}, "dp=1", rules=["*=..."])
    convert(source, folder / "zero", to=f"dp={RANKS}", format=f"deepspeed-zero{stage}")


def by_reshard(source: Path, target: Path) -> Turn:
    """Our conversion."""
    from reshard.checkpoint import convert

    return turns.timed(lambda: convert(source, target, to="full", include=["*.master"]))


def by_zero_to_fp32(source: Path, target: Path) -> Turn:
    """DeepSpeed's, whose tensors are views of one that safetensors saves when they are copied."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    def run() -> None:
        state = get_fp32_state_dict_from_zero_checkpoint(str(source))
        target.mkdir()
        whole = {name: value.clone().contiguous() for name, value in state.items()}
        save_file(whole, target / "model.safetensors")
        os.sync()

    # What the script prints is not a turn.
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        return turns.timed(run)
    finally:
        sys.stdout = kept


WAYS = {"reshard": by_reshard, "zero_to_fp32": by_zero_to_fp32}


def main() -> None:
    """Write the checkpoint, let the ways take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turn", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--weights-mib", type=int, default=2048)
    parser.add_argument("--stage", type=int, choices=(1, 3), default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.turn:
        way, *paths = given.turn
        if way == "write":
            write(Path(paths[0]), int(paths[1]), int(paths[2]))
        else:
            turns.show(WAYS[way](Path(paths[0]), Path(paths[1])))
        return
    layers = max(1, round(given.weights_mib * MIB / (8 * WIDTH * WIDTH * 4)))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        turns.in_a_process(__file__, "write", folder, layers, given.stage)
        needed = layers * (8 * WIDTH * WIDTH + WIDTH) * 4
        results: dict[str, list[Turn]] = {way: [] for way in WAYS}
        for _ in range(given.repeat):
            for way in WAYS:
                source = folder / "zero"
                turns.prepare(source / "global_step0", "warm")
                results[way].append(turns.in_a_process(__file__, way, source, folder / "target"))
                shutil.rmtree(folder / "target")
    print(f"stage {given.stage}, {RANKS} ranks, {needed / MIB:.0f} MiB of float32 weights")
    for way, found in results.items():
        seconds = statistics.median(one.seconds_s for one in found)
        peak = max(one.peak_bytes for one in found) / MIB
        read = max(one.read_bytes for one in found) / needed
        processor_s = statistics.median(one.processor_s for one in found)
        print(
            f"{way:14}{seconds:8.2f} s{processor_s:8.2f} s of processors{peak:8.0f} MiB{read:8.2f}"
        )


if __name__ == "__main__":
    main()
