"""Arrays in shards as checkpoints, in one process and over processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard.checkpoint
import reshard.spmd as sp
from live_processes import expect_all_end_well, run_ranks
from reshard import DeviceMesh, spec
from reshard.errors import CheckpointError, ReshardError, UsageError
from reshard.spmd.arrays import saved_arrays
from spmd.saved_trees import KINDS, MESH, TURNED, elements_of, expect_elements, make_tree


@pytest.mark.parametrize("format", ["safetensors", "torch-dcp", "torch-pickle"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_round_trips_in_one_process(library: str, format: str, tmp_path: Path) -> None:
    target = tmp_path / "run" / "step-1"
    with sp.running(sp.in_process(library)):
        tree = make_tree()
        sp.save(target, tree, format=format)
        found = sp.load(target, tree)
        expect_elements(found)
    assert found["weights"]["up"].spec is tree["weights"]["up"].spec
    assert found["layers"][1].spec is tree["layers"][1].spec
    names = {name for name, *_ in KINDS} | {"pending"}
    assert set(reshard.checkpoint.open(target).tensors) == names


def test_round_trips_over_processes(tmp_path: Path) -> None:
    expect_all_end_well(run_ranks("saved_arrays_process.py", 4, tmp_path))
    # One process loads what four saved.
    expect_elements(sp.load(tmp_path / "safetensors", make_tree()))


def test_arrays_are_loaded_in_other_shardings_and_types(tmp_path: Path) -> None:
    sp.save(tmp_path / "saved", make_tree())
    like = {
        "weights": {"up": sp.abstract((7, 5), "float64", spec(TURNED, "-, t"))},
        "half": sp.abstract((4, 4), "float32", None),
    }
    found = sp.load(tmp_path / "saved", like, cast=True)
    up = found["weights"]["up"]
    assert str(up.spec) == "-, t" and up.dtype is sp.float64
    expected = elements_of("weights.up", (7, 5)).astype("float32").astype("float64")
    np.testing.assert_array_equal(up.to_dense(), expected)
    assert found["half"].spec is None and found["half"].dtype is sp.float32
    # A pending sum is what is missing of it.
    pending = make_tree()["pending"]
    assert not sp.load(tmp_path / "saved", {"pending": pending})["pending"].spec.partial_axes


def test_a_background_save_has_the_arrays_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), saved_arrays.run_conversion

    def write_late(*what: Any, **how: Any) -> Any:
        assert go_on.wait(60)
        return write(*what, **how)

    monkeypatch.setattr(saved_arrays, "run_conversion", write_late)
    double = sp.jit(lambda x: x * 2.0, donate=0)
    x = sp.ones((6, 4), spec=spec(MESH, "x, -"))
    saving = sp.save_async(tmp_path / "saved", {"x": x})
    assert not saving.done()
    x = double(double(x))
    go_on.set()
    assert saving.result() is None
    found = sp.load(tmp_path / "saved", {"x": x})["x"]
    assert found.to_dense().tolist() == np.ones((6, 4)).tolist()
    with pytest.raises(UsageError, match="exists"):
        sp.save_async(tmp_path / "saved", {"x": x}).result()


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path: Path) -> None:
    x = sp.arange(4)
    sp.save(tmp_path / "saved", {"x": x})
    with pytest.raises(UsageError, match="the target exists"):
        sp.save(tmp_path / "saved", {"x": x + 1})
    assert sp.load(tmp_path / "saved", {"x": x})["x"].to_dense().tolist() == [0, 1, 2, 3]
    sp.save(tmp_path / "saved", {"x": x + 1}, overwrite=True)
    assert sp.load(tmp_path / "saved", {"x": x})["x"].to_dense().tolist() == [1, 2, 3, 4]


def test_an_interrupted_save_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saved_arrays.run_conversion

    def stop_early(*what: Any, **how: Any) -> Any:
        stop = threading.Event()
        return write(*what, **{**how, "stop": stop, "progress": lambda _: stop.set()})

    big = sp.ones((1 << 16, 64), dtype="float64", spec=spec(MESH, "x, y"))
    monkeypatch.setattr(saved_arrays, "run_conversion", stop_early)
    with pytest.raises(ReshardError):
        sp.save(tmp_path / "saved", {"x": big})
    assert not (tmp_path / "saved").exists()
    monkeypatch.undo()
    sp.save(tmp_path / "saved", {"x": big * 3.0})
    found = sp.load(tmp_path / "saved", {"x": big})["x"]
    assert (found.to_dense() == 3.0).all()
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


X = sp.ones((2, 3), spec=spec(DeviceMesh.of(x=2), "x, -"))


@pytest.mark.parametrize(
    ("save", "text"),
    [
        (lambda path: sp.save(path, {"a": 1}), "'a' is 1, a int; an array in shards"),
        (lambda path: sp.save(path, {}), "no arrays to save"),
        (lambda path: sp.save(path, {"a": None}), "no arrays to save"),
        (lambda path: sp.save(path, X), "without a name"),
        (lambda path: sp.save(path, {"a": {"b": X}, "a.b": X}), "two arrays are named 'a.b'"),
        (lambda path: sp.save(path, {"a": X}, format="nope"), "unknown format 'nope'"),
        (lambda path: sp.save(path, {"a": X}, group=3), "for arrays of one process"),
        (lambda path: sp.trace(lambda x: sp.save(path, {"x": x}), X), "cannot be saved"),
        (lambda path: sp.save(path, {"a": sp.abstract((2,))}), "an array in shards was expected"),
    ],
)
def test_values_that_cannot_be_saved_are_refused(
    save: Callable[[Path], Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        save(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_arrays_that_do_not_fit_are_refused_together(tmp_path: Path) -> None:
    sp.save(tmp_path / "saved", {"a": X, "b": X})
    wrong = {"a": sp.ones((3, 3)), "b": sp.astype(X, "float32"), "c": X}
    with pytest.raises(CheckpointError) as caught:
        sp.load(tmp_path / "saved", wrong)
    for text in ("'a' is float64 [2, 3], not float64 [3, 3]", "cast=True", "'c' is not there"):
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        sp.load(tmp_path / "other", {"a": X})
    with pytest.raises(UsageError, match="an array in shards was expected"):
        sp.load(tmp_path / "saved", {"a": np.ones(3)})
