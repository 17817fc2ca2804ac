"""What DeepSpeed's ranks held is what is read of the files they saved, bit for bit."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard
from checkpoint.checkpoint_files import change_last_copy
from deepspeed_records import read_digests, recorded, unpack
from reshard.checkpoint.copy_checks import compare_copies
from reshard.errors import CheckpointError, CoverageError, FormatError

NAMES = recorded()
ZERO = [name for name in NAMES if not name.endswith("universal")]
PARALLEL = [name for name in NAMES if "over" in name]


class OddTensor(torch.Tensor):
    """A subclass that nothing knows."""


OWN_KEYS = ("master", "exp_avg", "exp_avg_sq", "momentum_buffer")


def digest(checkpoint: reshard.checkpoint.Checkpoint, name: str) -> list[object]:
    value = reshard.checkpoint.read_tensor(checkpoint, name)
    dtype = f"torch.{checkpoint[name].dtype.name}"
    return [dtype, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()[:32]]


def test_there_are_records() -> None:
    """Without records the tests below would pass by testing nothing."""
    assert len(ZERO) >= 15
    assert len(NAMES) - len(ZERO) >= 8


Record = Callable[[str], tuple[Path, reshard.checkpoint.Checkpoint]]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Open a record, whose files no test changes, once for all tests."""
    folder = tmp_path_factory.mktemp("records")

    @functools.cache
    def open_record(name: str) -> tuple[Path, reshard.checkpoint.Checkpoint]:
        path = unpack(name, folder)
        return path, reshard.checkpoint.open(path)

    return open_record


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_is_what_ranks_held(name: str, record: Record) -> None:
    """Float32 weights and moments of every parameter, and no others."""
    folder, checkpoint = record(name)
    held = read_digests(folder, "held.json")
    expected = {
        f"optimizer.state.{parameter}.{key}": value
        for parameter, states in held.items()
        for key, value in states.items()
    }
    found = {one for one in checkpoint if one.startswith("optimizer.") and one.endswith(OWN_KEYS)}
    assert found == {*expected}
    for one, value in expected.items():
        assert digest(checkpoint, one) == value, one
    assert not reshard.checkpoint.check_digests(checkpoint).damaged


@pytest.mark.parametrize("name", ZERO)
def test_merged_weights_are_those_of_zero_to_fp32(name: str, record: Record) -> None:
    """DeepSpeed's own script makes the same float32 weights; frozen ones and buffers too."""
    folder, checkpoint = record(name)
    shared = checkpoint.values.get("shared_params", {})
    for parameter, value in read_digests(folder, "fp32.json").items():
        own = shared.get(parameter, parameter)
        master = f"optimizer.state.{own}.master"
        if master in checkpoint.tensors:
            assert digest(checkpoint, master) == value, parameter
        else:
            found = digest(checkpoint, parameter)
            # The script makes buffers float32.
            is_cast = found[0] != value[0]
            assert found[1:2] == value[1:2]
            assert is_cast or found == value, parameter


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_is_kept(name: str, record: Record) -> None:
    """Counters, schedulers, a user's state, and groups with the names of parameters."""
    folder, checkpoint = record(name)
    values = checkpoint.values
    assert (values["global_steps"], values["epoch"], values["note"]) == (2, 3, "of a user")
    assert values["history"] == [0.5, {"loss": 0.25, "grid": (2, 3)}]
    assert values["lr_scheduler.last_batch_iteration"] == 1
    assert reshard.checkpoint.read_tensor(checkpoint, "rng").tolist() == list(range(16))
    groups = values["optimizer.param_groups"]
    names = [one for group in groups for one in group["params"]]
    held = read_digests(folder, "held.json")
    assert sorted(names) == sorted(held)
    # An elastic checkpoint has no hyper-parameters.
    if "groups" in name and "elastic" not in name:
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]


@pytest.mark.parametrize("name", [one for one in NAMES if "sgd" not in one])
def test_steps_are_those_of_the_run(name: str, record: Record) -> None:
    """Two of each parameter, wherever its optimizer keeps them."""
    # Without ZeRO the optimizers for 16 bits take a step of zeros first, to make the state.
    taken = 3 if name.startswith(("zero0-bf16", "zero0-fp16")) else 2
    folder, checkpoint = record(name)
    for parameter in read_digests(folder, "held.json"):
        own = f"optimizer.state.{parameter}.step"
        if own in checkpoint:
            assert reshard.checkpoint.read_tensor(checkpoint, own).item() == taken
        else:
            assert checkpoint.values[own] == taken


def test_groups_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    """Whatever order gradients are dealt out in."""
    dealt, plain = (
        unpack("zero1-fp16-2-tied-round", tmp_path),
        unpack("zero3-bf16-4-tied", tmp_path),
    )
    orders = [
        reshard.checkpoint.open(folder).values["optimizer.param_groups"][0]["params"]
        for folder in (dealt, plain)
    ]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["zero1-bf16-2-plain", "zero3-fp16-3-frozen-sub"])
def test_the_folder_of_a_tag_is_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    """A path may be that of `latest` or that of the tag."""
    folder = unpack(name, tmp_path)
    inner = reshard.checkpoint.open(folder / "global_step2")
    outer = reshard.checkpoint.open(folder)
    assert inner.format == outer.format
    assert [*inner] == [*outer]
    assert all(digest(inner, one) == digest(outer, one) for one in inner)
    assert {file.name for file in outer.files} == {f"global_step2/{f.name}" for f in inner.files}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zero1-bf16-2-plain", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero1-bf16-2-plain", "mp_rank_00_model_states.pt"),
        ("zero3-fp16-3-frozen-sub", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("zero3-fp16-3-frozen-sub", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_named(name: str, file: str, tmp_path: Path) -> None:
    """The error says which of how many ranks' files is not there."""
    folder = unpack(name, tmp_path)
    (folder / "global_step2" / file).unlink()
    with pytest.raises(CheckpointError, match=rf"is incomplete: .* {file} is missing"):
        reshard.checkpoint.open(folder)


def test_a_missing_parameter_of_a_universal_checkpoint_is_named(tmp_path: Path) -> None:
    name = next(name for name in NAMES if name.endswith("universal"))
    folder = unpack(name, tmp_path)
    missing = sorted(path.parent for path in folder.rglob("exp_avg.pt"))[0]
    shutil.rmtree(missing)
    with pytest.raises(CheckpointError, match=rf"{missing.name} is missing, and 1 of "):
        reshard.checkpoint.open(folder)


def test_a_missing_tag_is_named(tmp_path: Path) -> None:
    """`latest` names a folder that is not there: the error says which there is."""
    folder = unpack("zero1-bf16-2-plain", tmp_path)
    (folder / "latest").write_text("global_step7\n")
    with pytest.raises(CheckpointError, match=r"names 'global_step7'.*not there; global_step2 has"):
        reshard.checkpoint.open(folder)


def test_optimizer_state_may_be_deleted(tmp_path: Path) -> None:
    """Weights of stages 1 and 2 are read alone; stage 3 has none without its partitions."""
    folder = unpack("zero1-bf16-2-plain", tmp_path)
    for path in (folder / "global_step2").glob("*optim_states.pt"):
        path.unlink()
    checkpoint = reshard.checkpoint.open(folder)
    assert checkpoint["embed.weight"].dtype.name == "bfloat16"
    assert any("no file of optimizer state" in note for note in checkpoint.notes)
    folder = unpack("zero3-bf16-2-plain", tmp_path)
    for path in (folder / "global_step2").glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="stage 3 of ZeRO has its weights there"):
        reshard.checkpoint.open(folder)


def test_a_weight_of_an_unknown_class_is_unreadable(tmp_path: Path) -> None:
    folder = unpack("zero1-bf16-2-plain", tmp_path)
    path = folder / "global_step2" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    whole = reshard.checkpoint.open(folder)
    state["module"]["embed.weight"] = state["module"]["embed.weight"].as_subclass(OddTensor)
    torch.save(state, path)
    found = reshard.checkpoint.open(folder)
    assert {*whole} - {*found} == {"embed.weight"}
    assert "OddTensor" in found.unreadable["embed.weight"]


def test_a_moment_of_an_unknown_class_is_unreadable(tmp_path: Path) -> None:
    name = next(name for name in NAMES if name.endswith("universal"))
    folder = unpack(name, tmp_path)
    whole = reshard.checkpoint.open(folder)
    path = next(iter(sorted(folder.rglob("exp_avg.pt"))))
    found = torch.load(path, weights_only=False)
    odd = (found["param"] if isinstance(found, dict) else found).as_subclass(OddTensor)
    torch.save({**found, "param": odd} if isinstance(found, dict) else odd, path)
    opened = reshard.checkpoint.open(folder)
    (lost,) = {*whole} - {*opened}
    assert lost.endswith(".exp_avg") and "OddTensor" in opened.unreadable[lost]


def test_files_of_two_saves_are_an_error(tmp_path: Path) -> None:
    """A partition of a run over other ranks, or of another model."""
    folder = unpack("zero1-bf16-2-plain", tmp_path)
    other = unpack("zero2-bf16-4-frozen", tmp_path)
    file = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / "global_step2" / file, folder / "global_step2" / file)
    with pytest.raises((CheckpointError, FormatError), match=r"different saves|incomplete"):
        reshard.checkpoint.open(folder)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    """The archive's own checksum covers padding and all parameters of a buffer."""
    folder = unpack("zero1-bf16-2-plain", tmp_path)
    checkpoint = reshard.checkpoint.open(folder)
    place = checkpoint["optimizer.state.head.weight.exp_avg"].file_range(1)
    path = folder / place.path
    content = bytearray(path.read_bytes())
    content[place.start_bytes + 5] ^= 64
    path.write_bytes(content)
    damaged = reshard.checkpoint.check_digests(reshard.checkpoint.open(folder)).damaged
    assert len(damaged) == 1


def test_a_save_is_converted_without_deepspeed(tmp_path: Path) -> None:
    """Partitions become whole tensors of safetensors, and DCP's chunks over other ranks."""
    folder = unpack("zero3-fp16-3-frozen-sub", tmp_path)
    report = reshard.checkpoint.convert(folder, tmp_path / "whole", to="full")
    assert report.files
    whole = reshard.checkpoint.open(tmp_path / "whole")
    source = reshard.checkpoint.open(folder)
    assert {*whole} == {*source}
    assert all(digest(whole, name) == digest(source, name) for name in source)
    reshard.checkpoint.convert(folder, tmp_path / "dcp", to="4", format="torch-dcp")
    dcp = reshard.checkpoint.open(tmp_path / "dcp")
    assert all(digest(dcp, name) == digest(source, name) for name in source)


@pytest.mark.parametrize("name", PARALLEL)
def test_experts_and_layers_have_the_names_of_the_model(name: str, tmp_path: Path) -> None:
    """Weights in files of their own, under the names that the optimizer's state has."""
    folder = unpack(name, tmp_path)
    checkpoint = reshard.checkpoint.open(folder)
    held = read_digests(folder, "held.json")
    # Under stage 3 weights are the float32 ones alone.
    has_weights = checkpoint.format != "deepspeed-zero3"
    assert ({*held} <= {*checkpoint}) == has_weights
    for parameter in held if has_weights else ():
        weight = reshard.checkpoint.read_tensor(checkpoint, parameter)
        assert list(weight.shape) == held[parameter]["exp_avg"][1]
    experts = [one for one in held if "deepspeed_experts" in one]
    assert len(experts) == (16 if "experts" in name else 0)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zero1-bf16-4-experts-over2", "layer_1_expert_2_mp_rank_00_model_states.pt"),
        ("zero1-bf16-4-pipeline-over2", "layer_03-model_states.pt"),
    ],
)
def test_a_missing_layer_or_expert_is_named(name: str, file: str, tmp_path: Path) -> None:
    """The error names a parameter that has no weights."""
    folder = unpack(name, tmp_path)
    (folder / "global_step2" / file).unlink()
    with pytest.raises(CheckpointError, match=r"no weights of .* is missing, fetch it"):
        reshard.checkpoint.open(folder)


def test_copies_whose_mean_counts_are_compared(tmp_path: Path) -> None:
    folder = unpack("zero1-bf16-4-autotp-over2", tmp_path)
    for path in folder.rglob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        info = state["universal_checkpoint_info"]
        info["parameter_to_average_patterns"] = [r"^norm\.weight$"]
        info["tp_replicated_parameter_patterns"].remove(r"^norm\.weight$")
        del info["affine_map"]
        torch.save(state, path)
    found = reshard.checkpoint.open(folder)
    change_last_copy(found)
    with pytest.raises(FormatError, match=r"'norm.weight' differs .* and counts by its mean"):
        reshard.checkpoint.open(folder)


@pytest.mark.parametrize("name", ["zero1-bf16-4-autotp-over2", "zero1-fp32-2-pipelinetied-over2"])
def test_copies_of_ranks_are_compared(name: str, tmp_path: Path) -> None:
    """Replicated parameters of tensor-parallel ranks, and tied ones of stages."""
    folder = unpack(name, tmp_path)
    found = reshard.checkpoint.open(folder, check_copies="all")
    report = compare_copies(found)
    assert report.parts
    assert not report.differing
    change_last_copy(found)
    found = reshard.checkpoint.open(folder, check_copies="all")
    with pytest.raises(CoverageError, match=r"ranks hold copies"):
        reshard.checkpoint.load(found)
