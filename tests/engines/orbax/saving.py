"""Checkpoints that Orbax saves: `python -m engines.orbax.saving` records those of `make test`."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoint.formats.orbax.orbax_states import CUTS, RECORDS, VALUES, VARIANTS, arrays


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of the first devices."""
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def nest(flat: dict[str, Any]) -> Any:
    """Leaves by name as dicts, lists (of `layers`) and tuples (of `pair`)."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *levels, last = name.split(".")
        level = tree
        for key in levels:
            level = level.setdefault(key, {})
        level[last] = value
    if "params" in tree:
        layers, pair = tree["params"]["layers"], tree["params"]["pair"]
        tree["params"]["layers"] = [layers[key] for key in sorted(layers)]
        tree["params"]["pair"] = tuple(pair[key] for key in sorted(pair))
    return tree


def make_state(mesh: Mesh) -> Any:
    """The state that is recorded, over devices."""
    flat: dict[str, Any] = {}
    for name, array in arrays().items():
        if name == "params.host":
            flat[name] = array
            continue
        sharding = NamedSharding(mesh, PartitionSpec(*CUTS.get(name, ())))
        flat[name] = jax.device_put(jnp.asarray(array), sharding)
    return nest({**flat, **VALUES})


def save(path: Path, state: Any, **options: Any) -> None:
    """Save a state with `PyTreeCheckpointHandler` and its options, or a size of chunks."""
    chunk = options.pop("chunk_byte_size", None)
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk), state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
        saver.save(path, args=ocp.args.PyTreeSave(state, save_args=arguments))


def make_training(mesh: Mesh) -> Any:
    """A state of optax's AdamW after a step, behind a clipping of gradients."""
    kernel = jnp.arange(128, dtype=jnp.float32).reshape(8, 16) / 128
    params = {
        "dense": {
            "kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec("x"))),
            "bias": jax.device_put(jnp.ones(16), NamedSharding(mesh, PartitionSpec())),
        }
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = optimizer.init(params)
    updates, state = optimizer.update(jax.tree.map(lambda one: 0.1 * one, params), state, params)
    return {
        "step": jnp.int32(1),
        "params": optax.apply_updates(params, updates),
        "opt_state": state,
    }


def put_on(mesh: Any, leaf: Any) -> Any:
    """A leaf as Orbax is asked for it: cut over a mesh where it can be."""
    if not hasattr(leaf, "shape") or isinstance(leaf, np.ndarray | np.generic):
        return leaf
    cut: list[Any] = [None] * leaf.ndim
    if leaf.ndim and leaf.shape[-1] % 4 == 0:
        cut[-1] = "q"
    if leaf.ndim > 1 and leaf.shape[0] % 2 == 0:
        cut[0] = "p"
    sharding = NamedSharding(mesh, PartitionSpec(*cut))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def expect_same(expected: Any, found: Any) -> None:
    """Trees with the same leaves, bit for bit."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if isinstance(one, str):
            assert one == other
            continue
        a, b = np.asarray(one), np.asarray(other)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def pack(folder: Path, target: Path) -> None:
    """Put the files of a folder into an archive."""
    with tarfile.open(target, "w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                info = tarfile.TarInfo(path.relative_to(folder).as_posix())
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))


def record() -> None:
    """Write the records."""
    mesh = make_mesh((4, 2), ("x", "y"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variant, options in VARIANTS.items():
            save(folder / variant, make_state(mesh), **options)
        settings = ocp.CheckpointManagerOptions()
        with ocp.CheckpointManager(folder / "manager", options=settings) as manager:
            for step in (9, 10):
                manager.save(step, args=ocp.args.StandardSave(make_training(mesh)))
            manager.wait_until_finished()
        settings = ocp.CheckpointManagerOptions(step_prefix="ckpt")
        with ocp.CheckpointManager(folder / "composite", options=settings) as manager:
            state = ocp.args.StandardSave({"w": jnp.ones(3), "key": jax.random.key(3)})
            manager.save(5, args=ocp.args.Composite(state=state, meta=ocp.args.JsonSave({"a": 1})))
            manager.wait_until_finished()
        pack(folder, RECORDS)


if __name__ == "__main__":
    record()
