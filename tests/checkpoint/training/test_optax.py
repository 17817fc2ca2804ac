"""Training goes on in PyTorch from what Optax trained and Orbax saved (`optax_training`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from checkpoint.training import optax_training as training
from live_processes import run_ranks
from reshard import checkpoint

# Of a load by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records."""
    return training.extract(tmp_path_factory.mktemp("optax"))


def expect_next(saved: Path, case: str, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
    before = checkpoint.open(saved / case / "saved")
    weights = np.load(saved / case / "next.npz")
    assert {*weights} == {*found}
    moved = set()
    for name, value in weights.items():
        np.testing.assert_allclose(
            found[name], value, rtol=0, atol=training.TOLERANCE, err_msg=name
        )
        prefix = "model." if case == "nnx" else "params."
        first = checkpoint.read_tensor(before, prefix + name)
        moved |= {name} if np.abs(first - value).max() > 100 * training.TOLERANCE else set()
    assert moved == {n for n in weights if case != "frozen" or n.endswith("kernel")}


@pytest.mark.parametrize("case", training.CASES)
def test_the_next_step_is_the_same(saved: Path, tmp_path: Path, case: str) -> None:
    report = checkpoint.convert(
        saved / case / "saved", tmp_path / "t", to="full", format="torch-dcp", training="fsdp2"
    )
    expect_next(saved, case, training.resume(case, tmp_path / "t"))
    has_defaults = any("PyTorch's defaults" in note for note in report.notes)
    assert has_defaults == (not training.CASES[case].has_groups)


def test_ranks_of_fsdp2_go_on(saved: Path, tmp_path: Path) -> None:
    rules = ["*=fsdp, ..."]
    checkpoint.convert(
        saved / "chain" / "saved",
        tmp_path / "t",
        to="fsdp=2",
        rules=rules,
        format="torch-dcp",
        training="fsdp2",
    )
    result = tmp_path / "result.npz"
    for one in run_ranks(training.__file__, 2, "chain", tmp_path / "t", result):
        assert one.code == 0, one.output
    expect_next(saved, "chain", np.load(result))


def test_hyper_parameters_that_optax_keeps_are_those_of_groups(saved: Path, tmp_path: Path) -> None:
    checkpoint.convert(
        saved / "injected" / "saved", tmp_path / "t", to="full", format="torch-dcp",
        training="fsdp2",
    )  # fmt: skip
    checkpoint.convert(tmp_path / "t", tmp_path / "plain", to="full", format="torch-pickle")
    values = checkpoint.open(tmp_path / "plain").values
    (group,) = values["optim.param_groups"]
    assert group["lr"] == np.float32(training.RATE)
    assert group["betas"] == (np.float32(0.8), np.float32(0.999))
    assert group["weight_decay"] == np.float32(training.DECAY)
    assert len(group["params"]) == 4


def test_optax_state_in_a_file_of_torch_save(saved: Path, tmp_path: Path) -> None:
    """One number of steps is that of every parameter: each has a name of its own."""
    source = saved / "injected" / "saved"
    report = checkpoint.convert(source, tmp_path / "made", to="full", format="torch-pickle")
    assert any("--training torch" in note for note in report.notes)
    assert checkpoint.compare(source, tmp_path / "made").differences == ()
    checkpoint.convert(tmp_path / "made", tmp_path / "again", to=2, format="torch-dcp")
    assert checkpoint.compare(source, tmp_path / "again").differences == ()


@pytest.mark.parametrize(
    ("case", "keys"),
    [("adafactor", "v_row, v_col, v"), ("amsgrad", "nu_max"), ("accumulated", "acc_grads")],
)
def test_state_unknown_to_pytorch_is_listed(
    saved: Path, tmp_path: Path, case: str, keys: str
) -> None:
    source = saved / case / "saved"
    report = checkpoint.convert(
        source, tmp_path / "t", to="full", format="torch-dcp", training="fsdp2"
    )
    assert any(re.search(f"PyTorch keeps {keys}:", note) for note in report.notes)
    found = checkpoint.open(tmp_path / "t")
    first = keys.split(",")[0]
    kept = checkpoint.read_tensor(found, f"optim.state.up.kernel.{first}")
    same = checkpoint.read_tensor(checkpoint.open(source), f"optimizer.state.up.kernel.{first}")
    np.testing.assert_array_equal(kept, same)


def test_rows_and_columns_are_cut_as_their_weight(saved: Path, tmp_path: Path) -> None:
    rules = ["*kernel=-, a", "*=..."]
    source = saved / "adafactor" / "saved"
    checkpoint.convert(source, tmp_path / "t", to="a=2", rules=rules, format="orbax")
    found = checkpoint.open(tmp_path / "t")
    shapes = {n: {box.shape for box in one.layout.boxes(0)} for n, one in found.tensors.items()}
    assert shapes["params.up.kernel"] == {(6, 5)}
    # One of them has the rows, the other the columns, which are cut.
    state = "optimizer.state.up.kernel"
    assert (shapes[f"{state}.v_row"], shapes[f"{state}.v_col"]) == ({(6,)}, {(5,)})
    assert checkpoint.compare(source, tmp_path / "t").is_same
