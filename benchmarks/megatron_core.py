"""Changing the parallelism of a Megatron checkpoint: reshard beside Megatron-core itself.

Four ranks of Megatron-core (tp=2, pp=2) save a GPT model as `torch_dist`. Then its users' way and
ours take turns, each in processes of its own:

    megatron-core  4 ranks of tp=4 load it by `dist_checkpointing.load` into their model, and save
    reshard        `convert --to full --format torch-dist`
    reshard, tp=4  `convert --to tp=4 --format megatron-legacy`, the folders of 4 ranks

Cases are the weights alone in bfloat16 (`weights`), and with the state of the distributed optimizer
(`training`), whose 32-bit weights and moments are six sevenths of the bytes. Seconds begin behind
imports, and for Megatron-core behind the making of the model. Memory is the peak of the processes
together from then on; the line `begun` is what those of Megatron-core have before they load, with
the model, which is as large as the checkpoint, and imports.
`read` is the bytes that read calls returned, over those of the tensors.

Run it in the environment that `make engines ENGINES=megatron` makes:

    PYTHONPATH=src .engines/megatron/bin/python benchmarks/megatron_core.py [--size-mib 2048]
        [--repeat 5] [--folder FOLDER] [--cases CASE ...]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import turns
from turns import MIB, Turn

RANKS = 4
SOURCE, TARGET = {"tp": 2, "pp": 2}, {"tp": 4}
HIDDEN, FFN, VOCAB, HEADS, GROUPS = 2048, 5632, 32000, 16, 8
# Of a layer: attention and a gated MLP; and two embeddings.
LAYER = HIDDEN * HIDDEN * (2 + 2 * GROUPS // HEADS) + 3 * HIDDEN * FFN
BYTES = {"weights": 2, "training": 14}
OURS: Mapping[str, dict[str, Any]] = {
    "reshard": {"to": "full", "format": "torch-dist"},
    "reshard, tp=4": {"to": "tp=4", "format": "megatron-legacy"},
}


def find_layers(case: str, size_mib: int) -> int:
    """How many layers have so many bytes with two embeddings, an even number of them."""
    parameters = size_mib * MIB // BYTES[case] - 2 * VOCAB * HIDDEN
    return max(2, round(parameters / LAYER / 2) * 2)


def be_megatron(case: str, layers: int) -> tuple[Any, dict[str, Any]]:
    """Become a rank of Megatron-core on the CPU; its program, and a job without its parallelism."""
    folder = Path(__file__).parents[1] / "tests" / "engines" / "megatron_core"
    sys.path.insert(0, str(folder))
    warnings.simplefilter("ignore")
    import cpu_shim

    cpu_shim.install()
    cpu_shim.use_own_adam()
    import torch
    import training_process as program

    torch.set_num_threads(1)
    # Its arguments say of how many ranks the world is.
    os.environ["WORLD_SIZE"] = os.environ["BENCHMARK_RANKS"]
    turns.join_job()
    sizes = {"layers": layers, "hidden": HIDDEN, "ffn": FFN, "vocab": VOCAB}
    sizes |= {"heads": HEADS, "groups": GROUPS}
    return program, {**program.DEFAULTS, **sizes, "optimizer": case == "training"}


def write(case: str, layers: int, folder: str) -> None:
    """On one of the ranks: a model, after one step where it trains, and its save."""
    program, job = be_megatron(case, layers)
    job |= {"sizes": SOURCE, "save": folder}
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    chunks, optimizer, _ = program.build(job)
    model_parallel_cuda_manual_seed(1)
    if optimizer is not None:
        for parameter in chunks[0].parameters():
            parameter.main_grad.fill_(0.01)
        optimizer.step()
    program.save(job, chunks, optimizer, 1)


def be_loader(case: str, layers: int, source: str, target: str) -> None:
    """On one of the ranks of the other parallelism: load and save."""
    import torch

    program, job = be_megatron(case, layers)
    job |= {"sizes": TARGET, "load": source, "save": target}
    chunks, optimizer, _ = program.build(job)

    def run() -> None:
        with torch.no_grad():
            step = program.load(job, chunks, optimizer)
        program.save(job, chunks, optimizer, step)
        os.sync()

    # What making the model took at its peak does not count.
    Path("/proc/self/clear_refs").write_text("5")
    begun_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    turns.show(turns.timed_together(run))
    Path(f"{target}.begun{turns.this_rank()}").write_text(str(begun_bytes))


def be_converter(way: str, source: str, target: str) -> None:
    """Our conversion."""
    from reshard.checkpoint import convert

    turns.show(turns.timed(lambda: convert(source, target, **OURS[way])))


def check(case: str, source: Path, target: Path) -> None:
    """Stop where the checkpoint that was made is another."""
    from reshard.checkpoint import compare

    found = compare(source, target).differences
    # The arguments say another parallelism; folders of ranks have nothing of empty extra states.
    others = [one for one in found if not one.name.startswith("args.")]
    if others := [one for one in others if "._extra_state/" not in one.name]:
        raise SystemExit(f"{case}: {target.name} is not what {source.name} is: {others[:3]}")


def measure(case: str, folder: Path, layers: int, repeat: int) -> None:
    """Print a line for each way of a case."""
    source = folder / "source"
    turns.in_ranks(__file__, RANKS, "write", case, layers, source)
    needed = (layers * LAYER + 2 * VOCAB * HIDDEN) * BYTES[case]
    taken: dict[str, list[Turn]] = {way: [] for way in ("megatron-core", *OURS)}
    begun: list[int] = []
    for number in range(repeat):
        for way in taken:
            turns.prepare(source, "warm")
            target = folder / "target"
            if way in OURS:
                taken[way].append(turns.in_a_process(__file__, "convert", way, source, target))
            else:
                arguments = (case, layers, source, target)
                taken[way].append(turns.in_ranks(__file__, RANKS, "load", *arguments))
                files = [folder / f"target.begun{rank}" for rank in range(RANKS)]
                begun.append(sum(int(file.read_text()) for file in files))
            if number == 0:
                check(case, source, target)
            shutil.rmtree(target)
    medians = {way: statistics.median(turn.seconds_s for turn in taken[way]) for way in taken}
    print(f"{case}: {layers} layers, {needed / MIB:.0f} MiB", flush=True)
    print(f"  begun          {'':>55}{max(begun) / MIB:7.0f} MiB")
    for way, own in taken.items():
        peak_mib = max(turn.peak_bytes for turn in own) / MIB
        read = statistics.median(turn.read_bytes for turn in own) / needed
        ratio = medians[way] / medians["megatron-core"]
        print(
            f"  {way:14} {medians[way]:8.2f} s   {ratio:5.2f} of its   "
            f"{statistics.median(turn.processor_s for turn in own):7.2f} s of processors "
            f"{peak_mib:7.0f} MiB  "
            f"read {read:5.2f}",
            flush=True,
        )
    shutil.rmtree(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=2048, help="bytes of the tensors")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=BYTES, default=list(BYTES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for case in options.cases:
            layers = find_layers(case, options.size_mib)
            measure(case, Path(name), layers, options.repeat)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        command, *rest = sys.argv[2:]
        if command == "convert":
            be_converter(*rest)
        elif command == "write":
            write(rest[0], int(rest[1]), rest[2])
        else:
            be_loader(rest[0], int(rest[1]), *rest[2:])
    else:
        main()
