"""The folders of Megatron's ranks, against the same state as `torch_dist`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint.checkpoint_files import change_last_copy
from checkpoint.formats.megatron.recordings import expect_same, state_of, unpack
from reshard import checkpoint
from reshard.checkpoint.copy_checks import compare_copies
from reshard.errors import CheckpointError, CoverageError, FormatError

NAMES = [
    *("tensor", "stages", "experts", "undistributed", "virtual", "grouped", "grouped_parts"),
]


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_ranks_have_the_state_of_torch_dist(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    legacy = checkpoint.open(folder / "legacy")
    whole = checkpoint.open(folder / "fully_reshardable")
    expect_same(state_of(legacy), state_of(whole))
    assert legacy.values["optimizer.param_groups"] == whole.values["optimizer.param_groups"]
    assert [name for name, _ in legacy.unread] == ["rng_state"]


def test_state_in_several_buckets_is_read(tmp_path: Path) -> None:
    found = state_of(unpack("buckets", tmp_path) / "legacy")
    masters = [key for key in found if key.endswith(".master")]
    assert len(masters) == len(found) // 4 == 27
    for key in masters:
        weight = found[key.removeprefix("optimizer.state.").removesuffix(".master")]
        assert np.array_equal(found[key].astype(weight.dtype), weight), key


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    folder = unpack("stages", tmp_path) / "legacy" / "iter_0000002"
    shutil.move(folder / "mp_rank_00_001", tmp_path / "away")
    with pytest.raises(
        CheckpointError,
        match=r"mp_rank_00_001 is missing, of tensor-parallel rank 0, stage 1, expert-parallel "
        r"rank 0; the arguments have tp 1, pp 2, ep 1",
    ):
        checkpoint.open(folder)
    shutil.move(tmp_path / "away", folder / "mp_rank_00_001")
    (folder / "mp_rank_00_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=r"001/model_optim_rng\.pt is missing"):
        checkpoint.open(folder)


def test_ranks_of_different_saves_are_an_error(tmp_path: Path) -> None:
    folder = unpack("tensor", tmp_path) / "legacy" / "iter_0000002"
    other = unpack("stages", tmp_path) / "legacy" / "iter_0000002" / "mp_rank_00_000"
    shutil.copy(other / "model_optim_rng.pt", folder / "mp_rank_01" / "model_optim_rng.pt")
    with pytest.raises(FormatError, match="they are of different saves"):
        checkpoint.open(folder)


def test_an_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    folder = unpack("tensor", tmp_path) / "legacy" / "iter_0000002"
    other = unpack("buckets", tmp_path) / "legacy" / "iter_0000002" / "mp_rank_00"
    shutil.copy(other / "distrib_optim.pt", folder / "mp_rank_00" / "distrib_optim.pt")
    with pytest.raises(CoverageError):
        checkpoint.open(folder)
    shutil.copy(other / "distrib_optim.pt", folder / "mp_rank_01" / "distrib_optim.pt")
    found = checkpoint.open(folder)
    assert not [name for name in found if name.startswith("optimizer.")]
    assert "the parts of parameters are ambiguous" in found.unread[-1][1]


def test_groups_may_lack_float32_weights(tmp_path: Path) -> None:
    """Of an optimizer without any, and of one that has those of its first group alone."""
    folder = unpack("undistributed", tmp_path) / "legacy"
    whole = checkpoint.open(folder)
    files = [*folder.rglob("model_optim_rng.pt")]
    states = [torch.load(path, weights_only=False) for path in files]
    for path, state in zip(files, states, strict=True):
        assert len(state["optimizer"]["fp32_from_fp16_params"]) == 2
        state["optimizer"]["fp32_from_fp16_params"].pop()
        torch.save(state, path)
    first = checkpoint.open(folder)
    decayed = whole.values["optimizer.param_groups"][0]["params"]
    masters = {f"optimizer.state.{name}.master" for name in decayed}
    assert {name for name in first if name.endswith(".master")} == masters
    for path, state in zip(files, states, strict=True):
        del state["optimizer"]["fp32_from_fp16_params"]
        torch.save(state, path)
    assert {*checkpoint.open(folder)} == {name for name in whole if not name.endswith(".master")}


class OddTensor(torch.Tensor):
    """A subclass that nothing knows."""


def test_a_weight_of_an_unknown_class_is_unreadable(tmp_path: Path) -> None:
    folder = unpack("undistributed", tmp_path) / "legacy"
    whole = checkpoint.open(folder)
    path = next(folder.glob("iter_*/mp_rank_00*/model_optim_rng.pt"))
    state = torch.load(path, weights_only=False)
    name = next(name for name, one in state["model"].items() if isinstance(one, torch.Tensor))
    state["model"][name] = state["model"][name].as_subclass(OddTensor)
    torch.save(state, path)
    found = checkpoint.open(folder)
    assert name in whole and name not in found
    assert "OddTensor" in found.unreadable[name]


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_truncated_files_are_errors(file: str, tmp_path: Path) -> None:
    folder = unpack("tensor", tmp_path) / "legacy" / "iter_0000002"
    path = folder / "mp_rank_01" / file
    content = path.read_bytes()
    for length in range(0, len(content), len(content) // 16):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError, match=file):
            checkpoint.open(folder)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (None, r"weight1', all experts of a layer in one weight \(GroupedMLP\), and no "),
        (6, r"weight1' is \[8, 16\], expected the weights of 3 experts concatenated"),
    ],
)
def test_stacked_experts_of_an_unknown_number_are_refused(
    experts: int | None, says: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    folder = unpack("grouped", tmp_path) / "legacy" / "iter_0000002"
    for path in folder.rglob("model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        state["args"].num_experts = experts
        torch.save(state, path)
    with pytest.raises((CheckpointError, FormatError), match=says):
        checkpoint.open(folder)


@pytest.mark.parametrize("name", ["tensor", "experts"])
def test_copies_of_ranks_are_compared(name: str, tmp_path: Path) -> None:
    """Tensors that tensor parallelism does not cut, and those that are not of experts."""
    folder = unpack(name, tmp_path) / "legacy"
    found = checkpoint.open(folder, check_copies="all")
    report = compare_copies(found)
    assert report.parts
    assert not report.differing
    change_last_copy(found)
    found = checkpoint.open(folder, check_copies="all")
    with pytest.raises(CoverageError, match=r"ranks hold copies"):
        checkpoint.load(found)
