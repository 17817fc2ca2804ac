"""How long does it take to make weights of a training checkpoint, against what people run today?

A model of FSDP2 with AdamW is saved by PyTorch on four ranks in two ways: by its distributed
checkpoint, and as one file a rank (`torch.save` of DTensors, as verl, SkyRL and others do). In each
case two ways to make one file, or one folder, of it take turns, each in a process of its own:

    dcp-to-torch    reshard `convert --to full --format torch-pickle`; `dcp_to_torch_save`
    ranks-to-hf     reshard `convert --to full --include 'layers.*'`, which takes the weights; a
                    script that loads every rank's file, concatenates the local tensors and saves
                    them by safetensors, which is what mergers do

`read` is the bytes that read calls returned, over the bytes that the target needs: of the ranks'
files these are the weights alone, and the files have both moments too. Memory is the peak that the
kernel counted for the process, with its imports.

    python benchmarks/training_checkpoints.py [--size-mib 2048] [--repeat 5] [--folder FOLDER]
        [--cases CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import turns
from turns import MIB, Turn

RANKS = 4
# A layer of it has 12 * WIDTH * WIDTH parameters, as a transformer's has.
WIDTH = 1024


def layers_for(size_bytes: int) -> int:
    """How many layers have so many bytes of float32 weights and two moments."""
    return max(1, round(size_bytes / (12 * 12 * WIDTH * WIDTH)))


def write(folder: Path, layers: int) -> None:
    """On one of the ranks: a model after one step, saved in both ways."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    rank = turns.join_job()
    torch.manual_seed(0)
    shapes = {"attention": (WIDTH, 4 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [
        torch.nn.Sequential(
            OrderedDict((name, torch.nn.Linear(*of, bias=False)) for name, of in shapes.items())
        )
        for _ in range(layers)
    ]
    model = torch.nn.Sequential(OrderedDict(layers=torch.nn.Sequential(*blocks)))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=folder / "dcp")
    of_ranks = folder / "ranks"
    of_ranks.mkdir(exist_ok=True)
    names = {"model": "model", "optim": "optim"}
    for kind, name in names.items():
        torch.save(states[kind], of_ranks / f"{name}_world_size_{RANKS}_rank_{rank}.pt")
    if rank == 0:
        config = {"model_type": "benchmark", "torch_dtype": "float32"}
        (of_ranks / "config.json").write_text(json.dumps(config))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def by_reshard_to_torch(source: Path, target: Path) -> Turn:
    """Our conversion into one file of torch.save."""
    from reshard.checkpoint import convert

    return turns.timed(lambda: convert(source, target, to="full", format="torch-pickle"))


def by_dcp_to_torch_save(source: Path, target: Path) -> Turn:
    """PyTorch's own."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def run() -> None:
        target.mkdir()
        dcp_to_torch_save(source, target / "model.pt")
        os.sync()

    return turns.timed(run)


def by_reshard_to_hf(source: Path, target: Path) -> Turn:
    """Our conversion into a folder of weights."""
    from reshard.checkpoint import convert

    return turns.timed(lambda: convert(source, target, to="full", include=["layers.*"]))


def by_merger(source: Path, target: Path) -> Turn:
    """A script of a few lines: every rank's file is loaded, and local tensors are concatenated."""
    import torch
    from safetensors.torch import save_file

    def run() -> None:
        files = [source / f"model_world_size_{RANKS}_rank_{rank}.pt" for rank in range(RANKS)]
        states = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
        whole = {}
        for name in [*states[0]]:
            parts = [state.pop(name) for state in states]
            dim = parts[0].placements[0].dim
            whole[name] = torch.cat([part._local_tensor for part in parts], dim=dim).contiguous()
        target.mkdir()
        save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
        os.sync()

    return turns.timed(run)


Way = Callable[[Path, Path], Turn]
CASES: Mapping[str, tuple[str, int, Mapping[str, Way]]] = {
    "dcp-to-torch": (
        "dcp",
        3,
        {"reshard": by_reshard_to_torch, "dcp_to_torch_save": by_dcp_to_torch_save},
    ),
    "ranks-to-hf": ("ranks", 1, {"reshard": by_reshard_to_hf, "merger": by_merger}),
}


def hidden(command: str, *arguments: str) -> None:
    """The hidden command, in a process of its own."""
    if command == "write":
        write(Path(arguments[0]), int(arguments[1]))
        return
    case, source, target = arguments
    turns.show(CASES[case][2][command](Path(source), Path(target)))


def measure(case: str, folder: Path, weights_bytes: int, repeat: int) -> None:
    """Print a line for each way of a case."""
    source_name, kinds, ways = CASES[case]
    source, target = folder / source_name, folder / "target"
    taken: dict[str, list[Turn]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way in ways:
            turns.prepare(source, "warm")
            taken[way].append(turns.in_a_process(__file__, way, case, source, target))
            shutil.rmtree(target)
    medians = {way: statistics.median(turn.seconds_s for turn in taken[way]) for way in ways}
    for way in ways:
        peak_mib = max(turn.peak_bytes for turn in taken[way]) / MIB
        read = statistics.median(turn.read_bytes for turn in taken[way]) / (kinds * weights_bytes)
        print(
            f"{case:14} {way:18} {medians[way]:7.2f} s  {medians['reshard'] / medians[way]:10.2f}  "
            f"{peak_mib:7.0f} MiB  {read:6.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=2048, help="weights and both moments")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", default=None, help="where to measure (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    layers = layers_for(options.size_mib * MIB)
    print(f"{'case':14} {'way':18} {'median':>9}  reshard/it   peak memory    read")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        turns.in_ranks(__file__, RANKS, "write", folder, layers)
        for case in options.cases:
            measure(case, folder, layers * 12 * WIDTH * WIDTH * 4, options.repeat)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        hidden(*sys.argv[2:])
    else:
        main()
