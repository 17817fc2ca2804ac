"""A small GPT trained in arrays in shards, stopped, and resumed on another mesh.

In one process, over simulated devices:  python examples/train.py --tiny --mesh dp=2,tp=2
Over processes:  torchrun --nproc-per-node=4 examples/train.py --mesh dp=2,tp=2 --folder run
The text is the pages of this repository's docs. With --folder, a run saves as it goes, and goes on
from the last save that is there, whatever mesh wrote it.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import reshard
import reshard.checkpoint
import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Sizes:
    """Of the network and its batch. Letters are bytes: the vocabulary has 256."""

    layers: int = 8
    model: int = 320
    heads: int = 8
    length: int = 128
    batch: int = 8
    vocabulary: int = 256

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by name."""
        d = self.model
        found = {"letters": (self.vocabulary, d), "places": (self.length, d)}
        for layer in range(self.layers):
            own = {"norm1": (d,), "norm2": (d,), "wo": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
            own |= dict.fromkeys(("wq", "wk", "wv"), (d, d))
            found |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
        return found | {"norm": (d,), "unembed": (d, self.vocabulary)}


TINY = Sizes(layers=2, model=32, heads=4, length=16, batch=8)

# Tensor parallel as Megatron has it: one sum over `tp` after attention, and one after the layers.
CUTS = {"letters": "tp, -", "unembed": "-, tp", "wo": "tp, -", "down": "tp, -"}
CUTS |= dict.fromkeys(("wq", "wk", "wv", "up"), "-, tp")


def cuts(sizes: Sizes, mesh: DeviceMesh) -> dict[str, ShardingSpec]:
    """How layers use parameters: over `tp`, copies over `dp`."""
    return {
        name: spec(mesh, CUTS.get(name.rpartition(".")[2], ", ".join("-" * len(shape))))
        for name, shape in sizes.shapes().items()
    }


def make_parameters(sizes: Sizes, mesh: DeviceMesh, dtype: str) -> dict[str, Any]:
    """The first parameters: the same numbers on every mesh."""
    specs, key = cuts(sizes, mesh), sp.random.key(0)
    found = {}
    for number, (name, shape) in enumerate(sizes.shapes().items()):
        if len(shape) == 1:
            found[name] = sp.ones(shape, dtype=dtype, spec=specs[name])
            continue
        own = sp.random.fold_in(key, number)
        drawn = sp.random.normal(own, shape, dtype=dtype, spec=specs[name])
        found[name] = drawn * (0.02 if name in ("letters", "places") else shape[0] ** -0.5)
    return found


def network(p: dict[str, Any], tokens: Any, sizes: Sizes, specs: dict[str, ShardingSpec]) -> Any:
    """Logits of the next letters, written as if there were one device but for one word.

    Parameters that are stored in smaller parts (ZeRO 3) are gathered where they are used.
    """
    b, t, d = *tokens.shape, sizes.model

    def use(name: str) -> Any:
        return p[name] if p[name].spec is specs[name] else p[name].shard(specs[name])

    def heads(x: Any) -> Any:
        x = sp.reshape(x, (b, t, sizes.heads, d // sizes.heads))
        return sp.permute_dims(x, (0, 2, 1, 3))

    x = sp.embedding(tokens, use("letters")) + use("places")
    for layer in range(sizes.layers):
        at = f"layers.{layer}."
        n = sp.rms_norm(x, use(at + "norm1"))
        q, k, v = (heads(n @ use(at + name)) for name in ("wq", "wk", "wv"))
        seen = sp.permute_dims(sp.attention(q, k, v, is_causal=True), (0, 2, 1, 3))
        x = x + sp.reshape(seen, (b, t, d)) @ use(at + "wo")
        n = sp.rms_norm(x, use(at + "norm2"))
        x = x + sp.silu(n @ use(at + "up")) @ use(at + "down")
    return sp.rms_norm(x, use("norm")) @ use("unembed")


def make_step(sizes: Sizes, mesh: DeviceMesh, adam: sp.AdamW, gradient_specs: Any) -> Any:
    """A program: the loss of a batch, and the parameters and the state after it."""
    specs = cuts(sizes, mesh)

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        return sp.mean(sp.cross_entropy(network(p, tokens, sizes, specs), targets))

    def step(p: Any, state: Any, tokens: Any, targets: Any) -> Any:
        value, slopes = sp.value_and_grad(loss, specs=gradient_specs)(p, tokens, targets)
        return value, *adam.update(p, slopes, state)

    return sp.jit(step)


def read_text() -> np.ndarray:
    """The pages of the docs, one behind the other, as bytes."""
    pages = sorted(DOCS.glob("*.md"))
    return np.frombuffer(b"".join(page.read_bytes() for page in pages), np.uint8)


def make_batch(text: np.ndarray, sizes: Sizes, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The letters of a step, and those that follow them: the same whoever asks."""
    random = np.random.default_rng((1, number))
    starts = random.integers(0, len(text) - sizes.length - 1, size=sizes.batch)
    found = text[starts[:, None] + np.arange(sizes.length + 1)].astype(np.int64)
    return found[:, :-1], found[:, 1:]


class Training:
    """A run: parameters, states and the losses so far.

    ZeRO is where things are stored: `zero` 1 cuts states over `dp`, 2 gradients as well, and 3
    parameters too.
    """

    def __init__(
        self, sizes: Sizes, mesh: DeviceMesh, dtype: str = "float32", zero: int = 1
    ) -> None:
        self.sizes, self.mesh, self.text = sizes, mesh, read_text()
        self.losses: list[float] = []
        self.parameters = make_parameters(sizes, mesh, dtype)
        over = sp.specs_over(self.parameters, mesh, "dp")
        if zero == 3:
            self.parameters = {name: one.shard(over[name]) for name, one in self.parameters.items()}
        adam = sp.AdamW(1e-3)
        self.state = adam.init(self.parameters, over if zero else None) | {"step": sp.array(0)}
        self.step = make_step(sizes, mesh, adam, over if zero >= 2 else None)

    def run(self, steps: int) -> None:
        """Take steps until so many were taken."""
        rows = spec(self.mesh, "dp, -")
        while len(self.losses) < steps:
            batch = make_batch(self.text, self.sizes, len(self.losses))
            tokens, targets = (sp.array(one, rows) for one in batch)
            value, self.parameters, self.state = self.step(
                self.parameters, self.state, tokens, targets
            )
            self.losses.append(float(value))

    def arrays(self) -> dict[str, Any]:
        """All that a checkpoint has, by name."""
        found = {f"parameters.{name}": one for name, one in self.parameters.items()}
        for slot in ("exp_avg", "exp_avg_sq"):
            found |= {f"{slot}.{name}": one for name, one in self.state[slot].items()}
        losses = np.array(self.losses, np.float64)
        return found | {"losses": sp.array(losses, spec(self.mesh, "-"))}

    def save(self, folder: Path) -> Path:
        """Write a checkpoint, which appears whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"step-{len(self.losses):06}"
        if not target.exists():
            save_arrays(self.arrays(), self.mesh, target)
        return target

    def load(self, source: Path) -> None:
        """Go on from a checkpoint, whatever mesh and ZeRO wrote it."""
        checkpoint = reshard.checkpoint.open(source)
        steps = checkpoint["losses"].shape[0]
        self.losses = [0.0] * steps
        found = load_arrays(checkpoint, self.arrays())
        self.losses = [float(one) for one in found["losses"].to_dense()]
        self.parameters = {name: found[f"parameters.{name}"] for name in self.parameters}
        for slot in ("exp_avg", "exp_avg_sq"):
            self.state[slot] = {name: found[f"{slot}.{name}"] for name in self.parameters}
        self.state["step"] = sp.array(steps)


def save_arrays(arrays: dict[str, Any], mesh: DeviceMesh, target: Path) -> None:
    """Write arrays in shards as a checkpoint: in one process, or by all of them, each its part."""
    if len(next(iter(arrays.values())).shards) < mesh.size:
        from torch.distributed import checkpoint as dcp

        from reshard.torch import StorageWriter

        writer = StorageWriter(target, format="sharded-safetensors")
        state = {name: as_distributed_tensor(one) for name, one in arrays.items()}
        dcp.save(state, storage_writer=writer)
        return
    held: dict[int, dict[str, Any]] = {rank: {} for rank in sorted(mesh.devices)}
    for name, one in arrays.items():
        for rank, shard in one.shards.items():
            held[rank][name] = np.asarray(shard)
    rules = [f"{name}={one.spec}" for name, one in arrays.items()]
    checkpoint = reshard.checkpoint.describe_ranks(held, mesh, rules=rules)
    reshard.checkpoint.convert(checkpoint, target, to=mesh.text, rules=rules)


@cache
def torch_mesh(mesh: DeviceMesh) -> Any:
    """PyTorch's name for a mesh, made once: it has groups of processes, which have threads."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    # Dimensions are cut over `tp` first: DTensor reads placements from the left.
    ranks = np.asarray(mesh.devices).reshape(mesh.shape).T.tolist()
    return TorchMesh("cpu", ranks, mesh_dim_names=("tp", "dp"))


def as_distributed_tensor(array: Any) -> Any:
    """PyTorch's name for an array in shards, which its checkpoints take."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements: list[Any] = [Replicate(), Replicate()]
    for dim, cut in enumerate(array.spec.dim_specs):
        for axis in cut.axes:
            placements[("tp", "dp").index(axis.name)] = Shard(dim)
    (shard,) = array.shards.values()
    return DTensor.from_local(
        shard,
        torch_mesh(array.mesh),
        placements,
        shape=torch.Size(array.shape),
        stride=torch.empty(array.shape, device="meta").stride(),
    )


def load_arrays(checkpoint: Any, like: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a checkpoint in the shardings of others: each rank reads its own parts."""
    layouts = {name: one.type.layout for name, one in like.items()}
    ranks = next(iter(like.values())).shards
    parts = {rank: reshard.checkpoint.load(checkpoint, layouts, rank) for rank in ranks}
    return {
        name: sp.from_shards({rank: parts[rank][name] for rank in ranks}, one.shape, one.spec)
        for name, one in like.items()
    }


def train(arguments: argparse.Namespace) -> Training:
    """A run as the command line says it; goes on from the last checkpoint of its folder."""
    given = DeviceMesh.parse(arguments.mesh)
    lengths = {"dp": 1, "tp": 1} | dict(zip(given.axis_names, given.shape, strict=True))
    mesh = DeviceMesh.of(**lengths)
    sizes = TINY if arguments.tiny else Sizes()
    run = Training(sizes, mesh, arguments.dtype, arguments.zero)
    saves = sorted(arguments.folder.glob("step-??????")) if arguments.folder else []
    if saves:
        run.load(saves[-1])
    is_first = 0 in next(iter(run.parameters.values())).shards
    while len(run.losses) < arguments.steps:
        begin_s = time.perf_counter()
        begin = len(run.losses)
        run.run(min(begin + arguments.every, arguments.steps))
        step_s = (time.perf_counter() - begin_s) / (len(run.losses) - begin)
        if arguments.folder:
            run.save(arguments.folder)
        if is_first:
            print(f"step {len(run.losses)}  loss {run.losses[-1]:.4f}  {step_s:.3f} s a step")
    return run


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a network for a test")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="such as dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=20, help="of the whole run")
    parser.add_argument("--every", type=int, default=10, help="steps from a save to the next")
    parser.add_argument("--folder", type=Path, help="where checkpoints are")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3))
    return parser.parse_args(words)


def main() -> None:
    arguments = read_arguments()
    if "WORLD_SIZE" not in os.environ:
        with sp.running(sp.in_process("torch")):
            train(arguments)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with sp.running(sp.over_processes()):
        train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
