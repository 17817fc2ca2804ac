"""One unreadable object in a checkpoint: the rest is inspected, filtered and converted."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.command_runs import run_here
from reshard import checkpoint
from reshard.errors import CheckpointError, UnreadableTensorError, UsageError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


class OddTensor(torch.Tensor):  # type: ignore[misc, name-defined]
    """A subclass that nothing knows."""


class Harm:
    """An object that would write a file if anything made it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def state(folder: Path) -> dict[str, Any]:
    """A weight, optimizer state of an unknown class, and an object."""
    odd = torch.ones(4, 2).as_subclass(OddTensor)
    optimizer = {"state": {"w": {"exp_avg": odd, "step": torch.tensor(1.0)}}}
    return {
        "model": {"w": torch.from_numpy(WEIGHT.copy())},
        "optim": optimizer,
        "object": Harm(folder / "ran"),
    }


def save_pickle(folder: Path) -> None:
    torch.save(state(folder), folder / "last.pt")


def save_distributed(folder: Path) -> None:
    dcp.save(state(folder), checkpoint_id=folder, no_dist=True)


ODD = "optim.state.w.exp_avg"


@pytest.mark.parametrize("save", [save_pickle, save_distributed])
def test_the_rest_is_there(save: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save(source)
    shown = run_here("inspect", source)
    assert f"unreadable: {ODD} (a tensor of " in shown.output and "OddTensor)" in shown.output
    found = json.loads(run_here("inspect", source, "--json").output)
    assert [one["name"] for one in found["unreadable"]] == [ODD]
    opened = checkpoint.open(source)
    assert (checkpoint.read_tensor(opened, "model.w") == WEIGHT).all()
    target = tmp_path / "target"
    run = run_here("convert", source, target, "--to", "tp=2", "--rule", "*.w=tp, -",
                   "--exclude", "optim*", "--exclude", "object")  # fmt: skip
    assert run.code == 0, run.errors
    assert (checkpoint.load(target)["model.w"] == WEIGHT).all()
    assert not (source / "ran").exists()


@pytest.mark.parametrize("save", [save_pickle, save_distributed])
def test_who_asks_for_it_is_told(save: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save(source)
    says = r"'optim.state.w.exp_avg'.* a tensor of .*OddTensor"
    opened = checkpoint.open(source)
    for ask in (
        lambda: opened[ODD],
        lambda: checkpoint.read_tensor(opened, ODD),
        lambda: checkpoint.load(opened),
        lambda: checkpoint.select(opened, include=[ODD]),
        lambda: checkpoint.plan_conversion(opened, tmp_path / "t", to="full"),
        lambda: checkpoint.diff(opened, opened, tmp_path / "delta"),
    ):
        with pytest.raises(UnreadableTensorError, match=says):
            ask()
    run = run_here("inspect", source, "--tensor", ODD)
    assert (run.code, "OddTensor" in run.errors) == (2, True)
    compared = checkpoint.compare(opened, opened)
    assert [(one.name, "cannot be read" in one.problem) for one in compared.differences] == [
        (ODD, True), (ODD, True),
    ]  # fmt: skip
    kept = checkpoint.select(opened, exclude=["optim.*"])
    assert not kept.unreadable and checkpoint.compare(kept, kept).is_same
    with pytest.raises(UsageError, match="matches none"):
        checkpoint.select(opened, exclude=["optim.nothing"])


def test_a_model_folder_needs_its_weights_alone(tmp_path: Path) -> None:
    config = {"model_type": "unheard-of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = tmp_path / "source"
    source.mkdir()
    torch.save(state(source), source / "last.pt")
    plan = checkpoint.plan_for_pretrained(source, tmp_path / "hf", config=tmp_path)
    assert any(ODD in note or "optimizer state" in note for note in plan.source.notes)
    torch.save({"model": {"w": torch.ones(2).as_subclass(OddTensor)}}, source / "last.pt")
    with pytest.raises(CheckpointError, match=r"'model\.w'.*OddTensor"):
        checkpoint.plan_for_pretrained(source, tmp_path / "hf", config=tmp_path)


def test_ranks_files(tmp_path: Path) -> None:
    for rank in range(2):
        odd = torch.ones(4, 2).as_subclass(OddTensor)
        torch.save({"w": torch.ones(4, 2), "odd": odd}, tmp_path / f"rank_{rank}.pt")
    opened = checkpoint.open(tmp_path, mesh="tp=2", rules=["w=tp, -"])
    assert [*opened] == ["w"] and "OddTensor" in opened.unreadable["odd"]


def test_an_unknown_type_of_safetensors(tmp_path: Path) -> None:
    entries = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "four": {"dtype": "F4", "shape": [4], "data_offsets": [8, 10]},
        "later": {"dtype": "X9", "shape": [2, 1], "data_offsets": [10, 12]},
        "z": {"dtype": "I8", "shape": [1], "data_offsets": [12, 13]},
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12) + b"\7")
    opened = checkpoint.open(path)
    assert [*opened] == ["a", "z"] and checkpoint.read_tensor(opened, "z").tolist() == [7]
    assert "'F4'" in opened.unreadable["four"] and "'X9'" in opened.unreadable["later"]
    with pytest.raises(UnreadableTensorError, match="'four'"):
        checkpoint.convert(path.parent, tmp_path / "t", to="full")
    checkpoint.convert(path.parent, tmp_path / "t", to="full", exclude=["four", "later"])
    # The bytes around it are still proven to be tensors.
    entries["four"]["data_offsets"] = [8, 9]
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(13))
    with pytest.raises(CheckpointError):
        checkpoint.open(path)


def test_an_unknown_type_of_distributed_metadata(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "bits": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    metadata.state_dict_metadata["bits"].properties.dtype = torch.bits8

    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    opened = checkpoint.open(tmp_path)
    assert [*opened] == ["w"] and "bits8" in opened.unreadable["bits"]
