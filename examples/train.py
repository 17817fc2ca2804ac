"""A small GPT trained in arrays in shards, stopped, and resumed on another mesh.

In one process, over simulated devices:  python examples/train.py --tiny --mesh pp=2,dp=2,tp=2
Over processes:  torchrun --nproc-per-node=4 examples/train.py --mesh dp=2,tp=2 --folder run
The text is the pages of this repository's docs. With --folder, a run saves beside its steps, and
goes on from the last save that is there, whatever mesh wrote it.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import reshard
import reshard.checkpoint
import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from reshard.checkpoint import BackgroundWork

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


# Orders in which ranks have several stages; in others they have one.
STAGES_PER_RANK = {"interleaved": 2, "zb-v": 2}


def cuts(sizes: Sizes, mesh: DeviceMesh) -> dict[str, ShardingSpec]:
    """How layers use parameters: over `tp`, copies over `dp`."""
    return {
        name: spec(mesh, CUTS.get(name.rpartition(".")[2], ", ".join("-" * len(shape))))
        for name, shape in sizes.shapes().items()
    }


def make_parameters(sizes: Sizes, specs: dict[str, ShardingSpec], dtype: str) -> dict[str, Any]:
    """The first parameters, those that have a sharding: the same numbers on every mesh."""
    key = sp.random.key(0)
    found = {}
    for number, (name, shape) in enumerate(sizes.shapes().items()):
        if name not in specs:
            continue
        if len(shape) == 1:
            found[name] = sp.ones(shape, dtype=dtype, spec=specs[name])
            continue
        own = sp.random.fold_in(key, number)
        drawn = sp.random.normal(own, shape, dtype=dtype, spec=specs[name])
        found[name] = drawn * (0.02 if name in ("letters", "places") else shape[0] ** -0.5)
    return found


@dataclass(frozen=True)
class Network:
    """The network, written as if there were one device but for one word.

    Parameters that are stored in smaller parts (ZeRO 3) are gathered where they are used, into the
    sharding that `specs` has for them.
    """

    sizes: Sizes
    specs: dict[str, ShardingSpec]

    def use(self, p: dict[str, Any], name: str) -> Any:
        return p[name] if p[name].spec is self.specs[name] else p[name].shard(self.specs[name])

    def embed(self, p: dict[str, Any], tokens: Any) -> Any:
        return sp.embedding(tokens, self.use(p, "letters")) + self.use(p, "places")

    def layer(self, p: dict[str, Any], x: Any, number: int) -> Any:
        b, t, d = x.shape

        def use(name: str) -> Any:
            return self.use(p, f"layers.{number}.{name}")

        def heads(x: Any) -> Any:
            x = sp.reshape(x, (b, t, self.sizes.heads, d // self.sizes.heads))
            return sp.permute_dims(x, (0, 2, 1, 3))

        n = sp.rms_norm(x, use("norm1"))
        q, k, v = (heads(n @ use(name)) for name in ("wq", "wk", "wv"))
        seen = sp.permute_dims(sp.attention(q, k, v, is_causal=True), (0, 2, 1, 3))
        x = x + sp.reshape(seen, (b, t, d)) @ use("wo")
        n = sp.rms_norm(x, use("norm2"))
        return x + sp.silu(n @ use("up")) @ use("down")

    def loss(self, p: dict[str, Any], x: Any, targets: Any) -> Any:
        logits = sp.rms_norm(x, self.use(p, "norm")) @ self.use(p, "unembed")
        return sp.mean(sp.cross_entropy(logits, targets))

    def whole(self, p: dict[str, Any], tokens: Any, targets: Any) -> Any:
        """The loss, by all layers."""
        x = self.embed(p, tokens)
        for number in range(self.sizes.layers):
            x = self.layer(p, x, number)
        return self.loss(p, x, targets)

    def stage(self, number: int, count: int) -> Any:
        """The function of one of `count` stages: the first embeds, the last one has the loss."""

        def run(p: dict[str, Any], x: Any, *targets: Any) -> Any:
            x = x if number else self.embed(p, x)
            for layer in range(self.sizes.layers):
                if stage_of(f"layers.{layer}.", self.sizes, count) == number:
                    x = self.layer(p, x, layer)
            return self.loss(p, x, *targets) if targets else x

        return run


def stage_of(name: str, sizes: Sizes, count: int) -> int:
    """The stage of a parameter, of `count`: layers are dealt evenly, in their order."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) * count // sizes.layers
    return 0 if name in ("letters", "places") else count - 1


def make_step(sizes: Sizes, mesh: DeviceMesh, adam: sp.AdamW, gradient_specs: Any) -> Any:
    """A program: the loss of a batch, and the parameters and the state after it."""
    loss = Network(sizes, cuts(sizes, mesh)).whole

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
        self.parameters = make_parameters(sizes, cuts(sizes, mesh), dtype)
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
        """All that a checkpoint has."""
        found = {slot: self.state[slot] for slot in ("exp_avg", "exp_avg_sq")}
        found["parameters"] = self.parameters
        if "norm" in self.parameters:
            found["losses"] = sp.array(np.array(self.losses, np.float64))
        return found

    def save(self, folder: Path) -> BackgroundWork[None]:
        """Write a checkpoint of this step, which appears whole or not at all, as steps go on."""
        return sp.save_async(folder / f"step-{len(self.losses):06}", self.arrays())

    def load(self, source: Path) -> None:
        """Go on from a checkpoint, whatever mesh and ZeRO wrote it."""
        checkpoint = reshard.checkpoint.open(source)
        self.losses = reshard.checkpoint.read_tensor(checkpoint, "losses").tolist()
        found = sp.load(checkpoint, self.arrays())
        self.parameters = found["parameters"]
        self.state = {slot: found[slot] for slot in ("exp_avg", "exp_avg_sq")}
        self.state["step"] = sp.array(len(self.losses))


class PipelinedTraining(Training):
    """A run whose layers are in stages, dealt out to the meshes along `pp`.

    A step is a pipeline of microbatches, then AdamW of each stage. A process has the parameters and
    states of its own stages; in one process, of all.
    """

    def __init__(
        self,
        sizes: Sizes,
        mesh: DeviceMesh,
        dtype: str = "float32",
        zero: int = 1,
        order: str = "1f1b",
        microbatches: int = 4,
    ) -> None:
        self.sizes, self.mesh, self.text = sizes, mesh, read_text()
        self.losses: list[float] = []
        self.microbatches = microbatches
        ranks = stage_meshes(mesh)
        schedule = sp.pipeline_schedule(
            order, len(ranks), microbatches, stages_per_rank=STAGES_PER_RANK.get(order, 1)
        )
        self.count = schedule.n_stages
        self.meshes = meshes = [ranks[schedule.rank_of[stage]] for stage in range(self.count)]
        rank = own_rank()
        self.here = [n for n, own in enumerate(meshes) if rank is None or rank in own.devices]
        stage = {name: stage_of(name, sizes, self.count) for name in sizes.shapes()}
        self.stage = {name: number for name, number in stage.items() if number in self.here}
        specs = {name: cuts(sizes, meshes[number])[name] for name, number in self.stage.items()}
        self.parameters = make_parameters(sizes, specs, dtype)
        over: dict[str, Any] = {}
        for number in self.here:
            over |= sp.specs_over(self.of_stage(self.parameters, number), meshes[number], "dp")
        if zero == 3:
            self.parameters = {name: one.shard(over[name]) for name, one in self.parameters.items()}
        adam = sp.AdamW(1e-3)
        self.state = adam.init(self.parameters, over if zero else None)
        network = Network(sizes, specs)
        self.pipeline = sp.Pipeline(
            [network.stage(number, self.count) for number in range(self.count)],
            schedule,
            [spec(own, "dp, -, -") for own in meshes],
            [self.of_stage(over, n) or None for n in range(self.count)] if zero >= 2 else None,
        )
        self.update = sp.jit(adam.update, donate=(0, 1, 2))

    def of_stage(self, found: dict[str, Any], stage: int) -> dict[str, Any]:
        """The entries of one stage's parameters."""
        return {name: one for name, one in found.items() if self.stage[name] == stage}

    def run(self, steps: int) -> None:
        """Take steps until so many were taken."""
        begin = len(self.losses)
        slots = ("exp_avg", "exp_avg_sq")
        while len(self.losses) < steps:
            value, slopes = self.pipeline(
                [self.of_stage(self.parameters, stage) for stage in range(self.count)],
                self.make_microbatches(len(self.losses)),
            )
            state: dict[str, Any] = {slot: {} for slot in slots}
            for stage in self.here:
                before = {slot: self.of_stage(self.state[slot], stage) for slot in slots}
                # Given up with what else the step is given.
                before["step"] = sp.array(len(self.losses))
                parameters = self.of_stage(self.parameters, stage)
                made, after = self.update(parameters, slopes[stage], before)
                self.parameters |= made
                for slot in slots:
                    state[slot] |= after[slot]
            self.state = state
            self.losses.append(0.0 if value is None else float(value))
        self.losses[begin:] = told_by(self.meshes[-1].devices[0], self.losses[begin:])

    def make_microbatches(self, number: int) -> list[tuple[Any, Any]]:
        """Those of a step: letters for the first stage, what follows them for the last."""
        ends = []
        for stage, whole in zip(
            (0, self.count - 1), make_batch(self.text, self.sizes, number), strict=True
        ):
            rows, is_here = spec(self.meshes[stage], "dp, -"), stage in self.here
            parts = np.split(whole, self.microbatches)
            ends.append([sp.array(one, rows) if is_here else None for one in parts])
        return list(zip(*ends, strict=True))


def own_rank() -> int | None:
    """Of this process; None where it has the shards of all ranks."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def stage_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The meshes along `pp`."""
    stages, dp, tp = mesh.shape
    return [
        DeviceMesh.of(dp=dp, tp=tp, devices=mesh.devices[stage * dp * tp : (stage + 1) * dp * tp])
        for stage in range(stages)
    ]


def told_by(rank: int, losses: list[float]) -> list[float]:
    """The losses, which over processes the ranks of the last stage have, one of which is given."""
    if own_rank() is None:
        return losses
    import torch
    import torch.distributed as dist

    told = torch.tensor(losses, dtype=torch.float64)
    dist.broadcast(told, rank)
    return list(told.tolist())


def train(arguments: argparse.Namespace) -> Training:
    """A run as the command line says it; goes on from the last checkpoint of its folder."""
    given = DeviceMesh.parse(arguments.mesh)
    lengths = {"pp": 1, "dp": 1, "tp": 1} | dict(zip(given.axis_names, given.shape, strict=True))
    with sp.running(runner_over(DeviceMesh.of(**lengths))):
        run = begin(arguments, lengths)
        saves = sorted(arguments.folder.glob("step-??????")) if arguments.folder else []
        if saves:
            run.load(saves[-1])
        take_steps(run, arguments)
    return run


def take_steps(run: Training, arguments: argparse.Namespace) -> None:
    """All steps that are left, saved every few of them, one save at a time."""
    saving = None
    while len(run.losses) < arguments.steps:
        begin_s, before = time.perf_counter(), len(run.losses)
        run.run(min(before + arguments.every, arguments.steps))
        step_s = (time.perf_counter() - begin_s) / (len(run.losses) - before)
        if not own_rank():
            print(f"step {len(run.losses)}  loss {run.losses[-1]:.4f}  {step_s:.3f} s a step")
        if saving:
            saving.result()
        if arguments.folder:
            saving = run.save(arguments.folder)
    if saving:
        saving.result()


def runner_over(mesh: DeviceMesh) -> Any:
    """What this process has: shards of its stage's ranks, or those of all ranks."""
    import torch.distributed as dist

    rank = own_rank()
    if rank is None:
        return sp.in_process("torch")
    stages = [list(one.devices) for one in stage_meshes(mesh)]
    groups = [dist.new_group(ranks) for ranks in stages] if len(stages) > 1 else [None]
    return sp.over_processes(groups[next(n for n, ranks in enumerate(stages) if rank in ranks)])


def begin(arguments: argparse.Namespace, lengths: dict[str, int]) -> Training:
    """A run at its first step."""
    common = (arguments.dtype, arguments.zero)
    sizes = TINY if arguments.tiny else Sizes()
    if lengths["pp"] == 1:
        return Training(sizes, DeviceMesh.of(dp=lengths["dp"], tp=lengths["tp"]), *common)
    return PipelinedTraining(sizes, DeviceMesh.of(**lengths), *common, arguments.order)


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a network for a test")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="such as dp=2,tp=2 or pp=2,dp=2")
    parser.add_argument("--steps", type=int, default=20, help="of the whole run")
    parser.add_argument("--every", type=int, default=10, help="steps from a save to the next")
    parser.add_argument("--folder", type=Path, help="where checkpoints are")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3))
    parser.add_argument("--order", default="1f1b", help="of the stages, such as zb-v, with pp")
    return parser.parse_args(words)


def main() -> None:
    arguments = read_arguments()
    if "WORLD_SIZE" not in os.environ:
        train(arguments)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
