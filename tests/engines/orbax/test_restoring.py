"""What is written for Orbax is restored by it, on other devices, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "orbax":
    pytest.skip("needs Orbax", allow_module_level=True)

from engines.orbax.saving import (  # isort: skip
    expect_same,
    make_mesh,
    make_state,
    make_training,
    nest,
    put_on,
    save,
)

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from checkpoint.formats.orbax.orbax_states import VARIANTS, arrays, as_read
from reshard import checkpoint

# Cuts of the written checkpoint, and the devices that it is saved for.
TARGETS: dict[str, tuple[str, list[str]]] = {
    "full": ("full", []),
    "2 by 2": ("a=2,b=2", ["*.w=a, b", "*.b=a b", "*=..."]),
    "8": ("a=8", ["*.w=a, -", "*.fp8=-, a", "*=..."]),
    "uneven": ("a=3,b=2", ["*.w=b, a", "*.host=b, a", "*=..."]),
    "strided": ("a=2", ["*.w=a@stride2, -", "*=..."]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["ocdbt", "zarr3"])
def test_a_tree_of_all_kinds(tmp_path: Path, variant: str, target: str) -> None:
    state = make_state(make_mesh((4, 2), ("x", "y")))
    save(tmp_path / "source", state, **VARIANTS[variant])
    to, rules = TARGETS[target]
    checkpoint.convert(tmp_path / "source", tmp_path / "target", to=to, rules=rules, format="orbax")
    saver = ocp.PyTreeCheckpointer()
    expected = saver.restore(tmp_path / "source")
    expect_same(expected, saver.restore(tmp_path / "target"))
    # Without its text, which `StandardCheckpointer` does not take, over all devices.
    kept = {name: a for name, a in arrays().items() if name != "params.host"}
    whole = nest(kept)
    mesh = make_mesh((2, 4), ("p", "q"))
    wanted = jax.tree.map(lambda one: put_on(mesh, jax.numpy.asarray(one)), whole)
    arguments = ocp.args.PyTreeRestore(
        wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as other:
        found = other.restore(tmp_path / "target", args=arguments)
    expect_same(whole, found)
    assert found["params"]["layers"][0]["w"].sharding.mesh.shape == {"p": 2, "q": 4}


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_numbers_of_devices(tmp_path: Path, devices: int) -> None:
    array = np.arange(devices * 12, dtype=np.float32).reshape(devices * 3, 4)
    sharding = NamedSharding(make_mesh((devices,), ("z",)), PartitionSpec("z"))
    save(tmp_path / "source", {"w": jax.device_put(array, sharding)})
    found = checkpoint.open(tmp_path / "source")
    assert found.ranks == devices
    assert np.array_equal(checkpoint.read_tensor(found, "w"), array)


@pytest.mark.parametrize("to", ["full", "z=2", "z=8"])
def test_standard_checkpointer_restores_training(tmp_path: Path, to: str) -> None:
    state = make_training(make_mesh((8,), ("x",)))
    source, target = tmp_path / "source", tmp_path / "target"
    with ocp.StandardCheckpointer() as saver:
        saver.save(source, state)
    rules = [] if to == "full" else ["*kernel=z, -", "*bias=z", "*=..."]
    checkpoint.convert(source, target, to=to, rules=rules, format="orbax")
    mesh = make_mesh((2, 4), ("p", "q"))
    with ocp.StandardCheckpointer() as saver:
        found = saver.restore(target, jax.tree.map(lambda one: put_on(mesh, one), state))
    expect_same(state, found)
    assert found["params"]["dense"]["kernel"].sharding.mesh.shape == {"p": 2, "q": 4}


def test_a_manager_restores_a_step(tmp_path: Path) -> None:
    state = make_training(make_mesh((8,), ("x",)))
    with ocp.CheckpointManager(tmp_path / "source") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    (tmp_path / "target" / "3").mkdir(parents=True)
    checkpoint.convert(
        tmp_path / "source",
        tmp_path / "target" / "3" / "default",
        to="z=4",
        rules=["*kernel=-, z", "*=..."],
        format="orbax",
    )
    with ocp.CheckpointManager(tmp_path / "target") as manager:
        assert manager.latest_step() == 3
        found = manager.restore(3, args=ocp.args.StandardRestore(state))
    expect_same(state, found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_records_are_what_orbax_saves(tmp_path: Path, variant: str) -> None:
    save(tmp_path / "source", make_state(make_mesh((4, 2), ("x", "y"))), **VARIANTS[variant])
    found = checkpoint.open(tmp_path / "source")
    for name, array in arrays().items():
        read = checkpoint.read_tensor(found, name)
        assert read.tobytes() == as_read(array).tobytes(), name
