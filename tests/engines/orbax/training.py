"""Models that Optax trains on simulated devices, saved by Orbax.

`python -m engines.orbax.training` records what `make test` goes on with.
"""

from __future__ import annotations

from engines.orbax.saving import make_mesh, pack  # isort: skip
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from flax import linen, nnx
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoint.training.optax_training import (
    DECAY,
    NORM,
    RATE,
    RECORDS,
    SIZES,
    STEPS,
    batch,
    first_weights,
    schedule,
)

MATRICES = {name: {"kernel": True, "bias": False} for name in ("up", "down")}
LABELS = {name: {"kernel": "trained", "bias": "frozen"} for name in ("up", "down")}


def adamw(rate: Any = RATE, **more: Any) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=DECAY, **more)


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "masked-decay": lambda: adamw(mask=MATRICES),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(NORM), adamw(schedule)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=RATE, b1=0.8, weight_decay=DECAY
    ),
    "frozen": lambda: optax.multi_transform(
        {"trained": adamw(), "frozen": optax.set_to_zero()}, LABELS
    ),
    "accumulated": lambda: optax.MultiSteps(adamw(), 1),
    "averaged": lambda: optax.chain(adamw(), optax.ema(0.0)),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    # What PyTorch has no counterpart of.
    "lion": lambda: optax.lion(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(RATE),
    "amsgrad": lambda: optax.amsgrad(RATE),
}


def place(mesh: Mesh, tree: Any) -> Any:
    """A tree on devices: matrices cut by columns where the devices divide them."""

    def put(leaf: Any) -> Any:
        is_cut = leaf.ndim > 1 and leaf.shape[0] % mesh.size == 0
        cut = PartitionSpec("x") if is_cut else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, cut))

    return jax.tree.map(put, tree)


def loss(params: Any, x: Any) -> Any:
    inner = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((inner @ params["down"]["kernel"] + params["down"]["bias"]) ** 2)


def take_step(optimizer: Any, params: Any, state: Any, number: int) -> tuple[Any, Any]:
    gradients = jax.grad(loss)(params, jnp.asarray(batch(number)))
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


class LinenModel(linen.Module):
    """The model in Flax's linen."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        inner = linen.tanh(linen.Dense(SIZES[1], name="up")(x))
        return linen.Dense(SIZES[2], name="down")(inner)


class NnxModel(nnx.Module):
    """The model in Flax's nnx."""

    def __init__(self) -> None:
        self.up = nnx.Linear(*SIZES[:2], rngs=nnx.Rngs(0))
        self.down = nnx.Linear(*SIZES[1:], rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


def train_linen(mesh: Mesh) -> tuple[Any, Any]:
    model = LinenModel()
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=place(mesh, first_weights()), tx=adamw()
    )

    def step(state: Any, number: int) -> Any:
        def of(params: Any) -> Any:
            return jnp.mean(model.apply({"params": params}, jnp.asarray(batch(number))) ** 2)

        return state.apply_gradients(grads=jax.grad(of)(state.params))

    for number in range(STEPS):
        state = step(state, number)
    return state, step(state, STEPS).params


def train_nnx(mesh: Mesh) -> tuple[Any, Any]:
    model = NnxModel()
    nnx.update(model, place(mesh, first_weights()))
    optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)

    def step(number: int) -> None:
        gradients = nnx.grad(lambda m: jnp.mean(m(jnp.asarray(batch(number))) ** 2))(model)
        optimizer.update(model, gradients)

    for number in range(STEPS):
        step(number)
    made = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    saved = jax.tree.map(lambda leaf: leaf, {k: nnx.to_pure_dict(v) for k, v in made.items()})
    step(STEPS)
    return saved, nnx.to_pure_dict(nnx.state(model))


def train(case: str, mesh: Mesh) -> tuple[Any, Any]:
    """What is saved after some steps, and the weights after the next."""
    if case == "linen":
        return train_linen(mesh)
    if case == "nnx":
        return train_nnx(mesh)
    optimizer = OPTIMIZERS[case]()
    params = place(mesh, first_weights())
    state = optimizer.init(params)
    for number in range(STEPS):
        params, state = take_step(optimizer, params, state, number)
    saved = {"params": params, "opt_state": state, "step": jnp.int32(STEPS)}
    return saved, take_step(optimizer, params, state, STEPS)[0]


def flatten(params: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {f"{n}.{k}": np.asarray(a) for n, one in params.items() for k, a in one.items()}


def save(case: str, mesh: Mesh, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Train, save, and return the weights after the next step."""
    saved, then = train(case, mesh)
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder, saved)
    return flatten(then)


def record() -> None:
    """Write the records."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in (*OPTIMIZERS, "linen", "nnx"):
            then = save(case, make_mesh((2,), ("x",)), folder / case / "saved")
            np.savez(folder / case / "next.npz", **then)
        pack(folder, RECORDS)


if __name__ == "__main__":
    record()
