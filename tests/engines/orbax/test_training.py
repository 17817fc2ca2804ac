"""Optax and PyTorch: what one trained goes on in the other, and the next step is the same.

The weights of both are float32, and sums are rounded in orders of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "orbax":
    pytest.skip("needs Orbax", allow_module_level=True)

from engines.orbax.saving import expect_same, make_mesh, put_on  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch

from checkpoint.training import optax_training as ours
from engines.orbax import training as theirs
from reshard import checkpoint

DEVICES = {"adamw": 8, "masked-decay": 4, "chain": 2, "injected": 5}
pytestmark = pytest.mark.filterwarnings("ignore")


def expect_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ours.TOLERANCE, err_msg=name)


@pytest.mark.parametrize("case", ours.CASES)
def test_what_optax_trained_goes_on_in_pytorch(tmp_path: Path, case: str) -> None:
    mesh = make_mesh((DEVICES.get(case, 2),), ("x",))
    then = theirs.save(case, mesh, tmp_path / "saved")
    made = tmp_path / "made"
    checkpoint.convert(tmp_path / "saved", made, to="full", format="torch-dcp", training="fsdp2")
    expect_close(ours.resume(case, made), then)


def train_pytorch(path: Path, case: str) -> dict[str, Any]:
    """Train and save by PyTorch; returns the weights after the next step."""
    model = ours.Layers(is_new=False)
    optimizer = ours.CASES[case].optimizer(model)
    norm = ours.CASES[case].norm
    for number in range(ours.STEPS + 1):
        if ours.CASES[case].is_scheduled:
            for group in optimizer.param_groups:
                group["lr"] = ours.schedule(number)
        if number == ours.STEPS:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, path)
        ours.take_step(model, optimizer, number, norm)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", ["adamw", "momentum"])
def test_what_pytorch_trained_goes_on_in_optax(tmp_path: Path, case: str) -> None:
    then = train_pytorch(tmp_path / "saved.pt", case)
    made, rules = tmp_path / "made", ["*kernel=-, x", "*=..."]
    checkpoint.convert(tmp_path / "saved.pt", made, to="x=2", rules=rules, format="orbax")
    optimizer = theirs.OPTIMIZERS[case]()
    params = jax.tree.map(jnp.asarray, ours.first_weights())
    mesh = make_mesh((2, 4), ("p", "q"))
    asked = {"params": params, "opt_state": optimizer.init(params)}
    asked = jax.tree.map(lambda one: put_on(mesh, one), asked)
    with ocp.StandardCheckpointer() as saver:
        found = saver.restore(made, asked)
    assert found["params"]["up"]["kernel"].sharding.mesh.shape == {"p": 2, "q": 4}
    if case == "adamw":
        assert found["opt_state"][0].count == ours.STEPS
    moved, _ = theirs.take_step(optimizer, found["params"], found["opt_state"], ours.STEPS)
    expect_close(theirs.flatten(moved), then)


@pytest.mark.parametrize("case", ["masked-decay", "chain", "accumulated"])
def test_states_of_any_chain_take_what_was_restored(tmp_path: Path, case: str) -> None:
    """By the names of their fields, as docs/training-state.md says."""
    then = train_pytorch(tmp_path / "saved.pt", case)
    made = tmp_path / "made"
    checkpoint.convert(tmp_path / "saved.pt", made, to="full", format="orbax")
    found = ocp.PyTreeCheckpointer().restore(made)
    adam = found["opt_state"][0]
    optimizer = theirs.OPTIMIZERS[case]()
    params = jax.tree.map(jnp.asarray, found["params"])
    state = optax.tree_utils.tree_set(
        optimizer.init(params), mu=adam["mu"], nu=adam["nu"], count=adam["count"]
    )
    moved, _ = theirs.take_step(optimizer, params, state, ours.STEPS)
    expect_close(theirs.flatten(moved), then)


@pytest.mark.parametrize("case", [*theirs.OPTIMIZERS, "linen", "nnx"])
def test_every_state_is_cut_again_and_goes_on(tmp_path: Path, case: str) -> None:
    saved, then = theirs.train(case, make_mesh((2,), ("x",)))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "saved", saved)
    made, rules = tmp_path / "made", ["*kernel=-, z", "*bias=z", "*=..."]
    report = checkpoint.convert(tmp_path / "saved", made, to="z=2", rules=rules, format="orbax")
    cut = checkpoint.open(made)
    with ocp.StandardCheckpointer() as saver:
        mesh = make_mesh((2, 4), ("p", "q"))
        restored = saver.restore(made, jax.tree.map(lambda one: put_on(mesh, one), saved))
    expect_same(saved, restored)
    layouts = {name: tensor.layout for name, tensor in cut.tensors.items()}
    # What has a parameter's shape is cut as it is.
    shape = (ours.SIZES[0], ours.SIZES[1])
    same = [n for n, one in layouts.items() if one.shape == shape]
    assert len(same) >= (1 if case == "adafactor" else 2)
    assert all(
        [b.shape for b in layouts[name].boxes(0)] == [(shape[0], shape[1] // 2)] for name in same
    )
    assert not any("unknown" in note for note in report.notes)
    if case in theirs.OPTIMIZERS:
        optimizer = theirs.OPTIMIZERS[case]()
        moved, _ = theirs.take_step(
            optimizer, restored["params"], restored["opt_state"], ours.STEPS
        )
        expect_close(theirs.flatten(moved), theirs.flatten(then))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("adafactor", "v_row, v_col, v"),
        ("amsgrad", "nu_max"),
        ("accumulated", "acc_grads"),
    ],
)
def test_what_pytorch_does_not_keep_is_listed(tmp_path: Path, case: str, keys: str) -> None:
    theirs.save(case, make_mesh((2,), ("x",)), tmp_path / "saved")
    report = checkpoint.convert(
        tmp_path / "saved", tmp_path / "made", to="full", format="torch-dcp", training="fsdp2"
    )
    assert any(f"PyTorch keeps {keys}:" in note for note in report.notes), report.notes
