"""A step of examples/train.py beside PyTorch: DTensor with FSDP2, or pipeline stages.

The same GPT with the same first numbers and batches, AdamW, over the same mesh of four gloo
processes, each system in a job of its own, one after the other. A line for each: seconds of the
clock and of processors a step, the bytes that all ranks receive in a step, in how many movements,
and the most resident memory of a rank beyond what it had before the model was made. Losses are
said, which are to be alike.

Bytes of reshard are those of the program's trace, which are those that it moves. PyTorch's are
counted where collectives reach its dispatcher: of n ranks, each receives (n-1)/n of what is
gathered or reduce-scattered, and twice that of what is all-reduced. Numbers that ranks exchange to
agree on a movement are not counted.

With `--mesh pp=4` the network is in four stages, by `sp.Pipeline` and by
`torch.distributed.pipelining`, both by GPipe and 1F1B, in four microbatches. Bytes of reshard are
then those that its exchanges between stages receive.

With `--saves`, instead, how long a save holds up the example: steps without one, after one that is
waited for, and beside one, in turns.

    python benchmarks/train.py [--tiny] [--mesh dp=2,tp=2] [--steps 5] [--turns 1] [--saves]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.torch.exchange.transfer import Transfer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# By its path: this file has its name.
_spec = importlib.util.spec_from_file_location("training_example", ROOT / "examples" / "train.py")
assert _spec is not None and _spec.loader is not None
example: Any = importlib.util.module_from_spec(_spec)
sys.modules["training_example"] = example
_spec.loader.exec_module(example)

functional = torch.nn.functional
SYSTEMS = ("reshard, ZeRO 1", "reshard, ZeRO 3", "PyTorch, ZeRO 3")
STAGED = ("reshard, gpipe", "PyTorch, gpipe", "reshard, 1f1b", "PyTorch, 1f1b")
MICROBATCHES = 4


class Block(nn.Module):
    """A layer; heads are as many as a rank has."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        d = sizes.model
        self.head = d // sizes.heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(d, d, bias=False))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        n = self.norm1(x)
        q, k, v = (
            one(n).view(b, t, -1, self.head).transpose(1, 2) for one in (self.wq, self.wk, self.wv)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(seen.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(functional.silu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The example's network."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.letters = nn.Embedding(sizes.vocabulary, sizes.model)
        self.places = nn.Parameter(torch.empty(sizes.length, sizes.model))
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.model, eps=1e-5)
        self.unembed = nn.Linear(sizes.model, sizes.vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.letters(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x))


class Counted(TorchDispatchMode):
    """Bytes that this rank receives by collectives, and how many those are."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.received_bytes = 0, 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        space, _, name = function.name().partition("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            self._add(name, args, found)
        return found

    def _add(self, name: str, args: Any, found: Any) -> None:
        if name == "_wrap_tensor_autograd":
            return
        # FSDP's collectives have the group itself, DTensor's its name.
        boxed = [one for one in args if isinstance(one, torch.ScriptObject)]
        groups = [dist.ProcessGroup.unbox(one) for one in boxed if "Group" in str(one._type())]
        names = [one for one in args if isinstance(one, str)]
        group = groups[0] if groups else dist.distributed_c10d._resolve_process_group(names[-1])
        ranks = group.size()
        sizes = sorted(one.nbytes for one in tensors_of(args) + tensors_of(found))
        share = (ranks - 1) / ranks
        self.count += 1
        if "allreduce" in name or "all_reduce" in name:
            self.received_bytes += 2 * share * sizes[-1]
        elif "recv" in name:
            self.received_bytes += sizes[-1]
        elif "send" not in name:
            self.received_bytes += share * sizes[-1]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return (
        [one for part in tree for one in tensors_of(part)] if isinstance(tree, list | tuple) else []
    )


def make_own(sizes: Any, mesh: DeviceMesh, zero: int) -> tuple[Callable[[], float], float, int]:
    """A step, the bytes that it moves on all ranks, and how many of its operations move."""
    run = example.Training(sizes, mesh, "float32", zero)
    batch = example.make_batch(run.text, sizes, 0)
    tokens, targets = (sp.array(one, spec(mesh, "dp, -")) for one in batch)
    traced = run.step.trace(run.parameters, run.state, tokens, targets)
    moving = [one for one in traced.operations if one.moved_bytes]

    def step() -> float:
        run.run(len(run.losses) + 1)
        return float(run.losses[-1])

    return step, traced.moved_bytes, len(moving)


def make_own_stages(sizes: Any, mesh: DeviceMesh, order: str) -> Callable[[], float]:
    """A step in stages."""
    run = example.PipelinedTraining(sizes, mesh, "float32", 0, order, MICROBATCHES)

    def step() -> float:
        run.run(len(run.losses) + 1)
        return float(run.losses[-1])

    return step


def received_by_stages(step: Callable[[], float]) -> tuple[float, float]:
    """The loss of a step, and the bytes that this rank received of other stages."""
    received, start = [0], Transfer.start

    def counted(self: Transfer) -> None:
        received[0] += self.received_bytes
        start(self)

    Transfer.start = counted  # type: ignore[method-assign]
    try:
        return step(), received[0]
    finally:
        Transfer.start = start  # type: ignore[method-assign]


def fill(model: nn.Module, sizes: Any) -> None:
    """Give a model, or a part of it, the example's first numbers."""
    with sp.running(sp.in_process("numpy")):
        first = example.make_parameters(
            sizes, example.cuts(sizes, DeviceMesh.of(dp=1, tp=1)), "float32"
        )
    with torch.no_grad():
        for name, one in model.named_parameters():
            value = torch.as_tensor(first[name.removesuffix(".weight")].to_dense())
            one.copy_(
                value.T if ("layers" in name and value.ndim == 2) or "unembed" in name else value
            )


class Part(nn.Module):
    """What one stage has of the network, under the same names."""

    def __init__(self, whole: GPT, sizes: Any, stage: int, count: int) -> None:
        super().__init__()
        own = [str(n) for n in range(sizes.layers) if n * count // sizes.layers == stage]
        self.layers = nn.ModuleDict({name: whole.layers[int(name)] for name in own})
        self.is_first, self.is_last = stage == 0, stage == count - 1
        if self.is_first:
            self.letters, self.places = whole.letters, whole.places
        if self.is_last:
            self.norm, self.unembed = whole.norm, whole.unembed

    def forward(self, x: Any) -> Any:
        x = self.letters(x) + self.places if self.is_first else x
        for layer in self.layers.values():
            x = layer(x)
        return self.unembed(self.norm(x)) if self.is_last else x


def make_pytorch_stages(sizes: Any, mesh: DeviceMesh, order: str) -> Callable[[], float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    count, rank = mesh.size, dist.get_rank()
    part = Part(GPT(sizes), sizes, rank, count)
    fill(part, sizes)
    gc.collect()
    stage = PipelineStage(part, rank, count, torch.device("cpu"))
    losses: list[torch.Tensor] = []

    def loss_of(found: Any, targets: Any) -> Any:
        return functional.cross_entropy(found.flatten(0, 1), targets.flatten())

    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[order]
    schedule = kind(stage, MICROBATCHES, loss_fn=loss_of)
    adam = torch.optim.AdamW(part.parameters(), 1e-3, foreach=False)
    text, step_count = example.read_text(), 0

    def step() -> float:
        nonlocal step_count
        tokens, targets = map(torch.as_tensor, example.make_batch(text, sizes, step_count))
        adam.zero_grad()
        losses.clear()
        if rank == 0:
            schedule.step(tokens)
        elif rank == count - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        adam.step()
        step_count += 1
        told = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(told, count - 1)
        return float(told)

    return step


def make_pytorch(sizes: Any, mesh: DeviceMesh) -> Callable[[], float]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model = GPT(sizes)
    fill(model, sizes)
    torch_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {
        "letters": RowwiseParallel(input_layouts=Replicate()),
        "unembed": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in ("wq", "wk", "wv", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("wo", "down")}
    parallelize_module(model, torch_mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=torch_mesh["dp"])
    fully_shard(model, mesh=torch_mesh["dp"])
    adam = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    text, count = example.read_text(), 0
    own = torch_mesh["dp"].get_local_rank()

    def step() -> float:
        nonlocal count
        batch = example.make_batch(text, sizes, count)
        tokens, targets = (
            torch.as_tensor(one).chunk(mesh.shape[0])[own].contiguous() for one in batch
        )
        adam.zero_grad()
        with loss_parallel():
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        adam.step()
        count += 1
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        value = value.detach().clone()
        dist.all_reduce(value, group=torch_mesh["dp"].get_group())
        return float(value) / mesh.shape[0]

    return step


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes(row: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(row):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {row} in /proc/self/status; this is measured on Linux")


def measure(arguments: argparse.Namespace) -> None:
    """One rank, of one system."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = DeviceMesh.parse(arguments.mesh)
    sizes = example.TINY if arguments.tiny else example.Sizes()
    before = resident_bytes("VmRSS")
    is_own, is_staged = arguments.system.startswith("reshard"), "pp" in mesh.axis_names
    moved_bytes, moves = 0.0, 0
    if is_staged:
        mesh = DeviceMesh.of(pp=mesh.size, dp=1, tp=1)
    with sp.running(example.runner_over(mesh) if is_staged else sp.over_processes()):
        if is_staged:
            make = make_own_stages if is_own else make_pytorch_stages
            step = make(sizes, mesh, arguments.system.split()[-1])
        elif is_own:
            step, moved_bytes, moves = make_own(sizes, mesh, int(arguments.system[-1]))
        else:
            step = make_pytorch(sizes, mesh)
        losses = [step(), step()]
        gc.collect()
        # What the first numbers took, and tracing, is no part of a step.
        Path("/proc/self/clear_refs").write_text("5")
        dist.barrier()
        began, used = time.perf_counter(), processor_s()
        losses += [step() for _ in range(arguments.steps)]
        clock_s, work_s = time.perf_counter() - began, processor_s() - used
        peak = resident_bytes("VmHWM") - before
        if is_staged and is_own:
            loss, received_bytes = received_by_stages(step)
            moves = 2 * MICROBATCHES
        else:
            with Counted() as counted:
                loss = step()
            received_bytes = counted.received_bytes
        losses.append(loss)
    totals = torch.tensor([work_s, received_bytes], dtype=torch.float64)
    most = torch.tensor(peak)
    dist.all_reduce(totals)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if is_staged or not is_own:
        moved_bytes = totals[1].item()
    if not is_own:
        moves = counted.count
    if dist.get_rank() == 0:
        print(
            f"{arguments.system}, {arguments.mesh}: {clock_s / arguments.steps:.2f} s a step, "
            f"{totals[0].item() / arguments.steps:.2f} s of processors, {moved_bytes / 1e6:.1f} MB "
            f"in {moves} movements, {most.item() / 2**20:.0f} MiB at most a rank; "
            f"losses {losses[0]:.5f} to {losses[-1]:.5f}"
        )
    dist.destroy_process_group()


def measure_saves(arguments: argparse.Namespace) -> None:
    """One rank, that saves in three ways."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = example.TINY if arguments.tiny else example.Sizes()
    clock_s: dict[str, list[float]] = {"no save": [], "waited for": [], "beside": []}
    with (
        sp.running(sp.over_processes()),
        tempfile.TemporaryDirectory(dir=".") as own,
    ):
        folders = [own]
        dist.broadcast_object_list(folders)
        run = example.Training(sizes, DeviceMesh.parse(arguments.mesh))
        run.run(2)
        for way in list(clock_s) * arguments.turns:
            dist.barrier()
            began, saving = time.perf_counter(), None
            if way != "no save":
                saving = run.save(Path(folders[0]))
            if saving and way == "waited for":
                saving.result()
            run.run(len(run.losses) + arguments.steps)
            if saving:
                saving.result()
            dist.barrier()
            clock_s[way].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        for way, taken_s in clock_s.items():
            print(
                f"{arguments.steps} steps, {way}: {statistics.median(taken_s):.2f} s, least "
                f"{min(taken_s):.2f}; load {os.getloadavg()[0]:.0f}"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="four ranks, over dp and tp, or pp")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1, help="of all systems, one after another")
    parser.add_argument("--saves", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--system", choices=SYSTEMS + STAGED, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        measure(arguments)
        return
    if arguments.rank:
        measure_saves(arguments)
        return
    from live_processes import run_rank_programs

    if arguments.saves:
        command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
        print(run_rank_programs(command, 4, timeout_s=500)[0].strip(), flush=True)
        return
    systems = STAGED if "pp" in DeviceMesh.parse(arguments.mesh).axis_names else SYSTEMS
    for system in systems * arguments.turns:
        command = [sys.executable, __file__, *sys.argv[1:], "--system", system]
        print(run_rank_programs(command, 4, timeout_s=500)[0].strip(), flush=True)
        print(f"  load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
