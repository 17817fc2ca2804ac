"""Files of `torch.save` as checkpoints: read, converted, loaded by ranks, written."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoint.faulty_process import FaultyProcesses
from checkpoint.killed_conversion import Case, run_again
from checkpoint.model_files import contents, write_model
from reshard.checkpoint import (
    compare,
    convert,
    open_checkpoint,
    plan_conversion,
    read_tensor,
)
from reshard.errors import CheckpointError, FormatError, ReshardError, UsageError
from selection import choose, keep_spread

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")

FORMS = [True, False]
INDEX = "pytorch_model.bin.index.json"


def training_state() -> dict[str, Any]:
    """What a training program saves: buffers of 0 dimensions, ties, views, an optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    table = torch.randn(10, 6)
    return {
        "epoch": 3,
        "state_dict": {
            **model.state_dict(),
            "embed.weight": table,
            "head.weight": table,
            "rows": table[2:5],
            "columns": table.t(),
            "bf16": table.bfloat16()[:, 1::2],
        },
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"hidden": 8, "name": None},
        "rng": (torch.get_rng_state(), "cpu"),
        "none": torch.empty(0, 4),
    }


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor with its name."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from flat(item, f"{path}.{number}")


def bits(tensor: Any) -> bytes:
    dense = tensor.detach().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def holds(folder: Path, state: Any) -> bool:
    """Whether a checkpoint has the tensors of a state, bit for bit."""
    opened = open_checkpoint(folder)
    expected = dict(flat(state))
    assert list(opened.tensors) == list(expected)
    return all(
        opened[name].shape == tuple(tensor.shape)
        and read_tensor(opened, name).tobytes() == bits(tensor)
        for name, tensor in expected.items()
    )


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        assert set(one) == set(other)
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("is_zip", FORMS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "last.ckpt", "model.pt", "model.pth"])
def test_a_training_state_is_read(tmp_path: Path, name: str, is_zip: bool) -> None:
    state = training_state()
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    opened = open_checkpoint(tmp_path)
    assert opened.format == "torch-pickle"
    assert holds(tmp_path, state)
    assert holds(tmp_path / name, state)
    assert opened.values["epoch"] == 3
    assert opened.values["hyper_parameters.hidden"] == 8
    assert opened.values["optimizer_states.0.param_groups"][0]["lr"] == 0.25
    assert opened["state_dict.1.num_batches_tracked"].shape == ()
    assert any("state_dict.embed.weight = state_dict.head.weight" in note for note in opened.notes)


@pytest.mark.parametrize("is_zip", FORMS)
def test_a_training_state_comes_back_as_it_was(tmp_path: Path, is_zip: bool) -> None:
    state = training_state()
    (tmp_path / "source").mkdir()
    torch.save(state, tmp_path / "source" / "a.ckpt", _use_new_zipfile_serialization=is_zip)
    convert(tmp_path / "source", tmp_path / "target", to="full", format="torch-pickle")
    found = torch.load(tmp_path / "target" / "pytorch_model.bin", weights_only=True)
    # A tuple with tensors in it is walked, and comes back as a list.
    assert same(found, {**state, "rng": list(state["rng"])})
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    groups = found["optimizer_states"][0]["param_groups"]
    groups[0]["params"] = [0, 1]
    optimizer.load_state_dict({**found["optimizer_states"][0], "param_groups": groups})


@pytest.mark.parametrize("is_zip", FORMS)
def test_it_is_cut_for_ranks_and_joined_again(tmp_path: Path, is_zip: bool) -> None:
    state = {"a": torch.randn(7, 6), "b": torch.randn(6, 9).t(), "c": torch.tensor(3)}
    source = tmp_path / "source"
    source.mkdir()
    torch.save(state, source / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    rules = ["[ab]=tp, -", "c=..."]
    convert(source, tmp_path / "cut", to="tp=4", rules=rules)
    convert(tmp_path / "cut", tmp_path / "whole", to="full", format="torch-pickle")
    assert same(torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True), state)
    assert compare(source, tmp_path / "whole").is_same


def test_files_with_an_index_are_read(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.randn(8, 8) for number in range(6)}
    source = tmp_path / "source"
    source.mkdir()
    weight_map = {}
    for number in range(3):
        name = f"pytorch_model-{number + 1:05d}-of-00003.bin"
        part = {f"layers.{i}.weight": state[f"layers.{i}.weight"] for i in (number, number + 3)}
        torch.save(part, source / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 6 * 256}, "weight_map": weight_map}
    (source / INDEX).write_text(json.dumps(index))
    torch.save({"args": 1}, source / "training_args.bin")
    for path in (source, source / INDEX):
        opened = open_checkpoint(path)
        assert set(opened.tensors) == set(state)
    target = tmp_path / "target"
    convert(source, target, to="full", format="torch-pickle", most_file_bytes=600)
    written = json.loads((target / INDEX).read_text())
    assert written["metadata"] == {"total_size": 6 * 256}
    assert len(set(written["weight_map"].values())) == 3
    found = {}
    for name in set(written["weight_map"].values()):
        found |= torch.load(target / name, weights_only=True)
    assert same(found, state)
    assert compare(source, target).is_same
    # What the index says and what the files hold.
    (source / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CheckpointError, match=r"names the file 'pytorch_model-00002-of-00003.bin'"):
        open_checkpoint(source)
    shutil.copy(
        source / "pytorch_model-00001-of-00003.bin", source / "pytorch_model-00002-of-00003.bin"
    )
    with pytest.raises(FormatError, match="do not belong together"):
        open_checkpoint(source)


def test_beside_safetensors_it_is_left_out(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole")
    torch.save({"w": torch.ones(2)}, whole / "pytorch_model.bin")
    opened = open_checkpoint(whole)
    assert opened.format == "safetensors"
    assert ("pytorch_model.bin", "weights in another format") in opened.left_out


def test_what_programs_put_beside_a_model_is_no_model(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"):
        torch.save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        open_checkpoint(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    assert list(open_checkpoint(tmp_path)) == ["w"]
    torch.save({"w": torch.ones(2)}, tmp_path / "model2.pt")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        open_checkpoint(tmp_path)


def test_a_module_is_no_state(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(FormatError, match=r"torch.nn.modules.linear.Linear.*state_dict\(\)"):
        open_checkpoint(tmp_path)


def test_what_is_no_data_is_listed(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "model": torch.nn.Linear(2, 2), "s": torch.eye(2).to_sparse()}
    torch.save(state, tmp_path / "model.pt")
    opened = open_checkpoint(tmp_path)
    assert "torch.nn.modules.linear.Linear" in dict(opened.unread)["model"]
    assert "to_dense" in opened.unreadable["s"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "both named 'a.b'"),
        ({"\ud800": torch.ones(1)}, "UTF-8"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, state: Any, message: str) -> None:
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_damage_is_found(tmp_path: Path) -> None:
    state = {"w": torch.arange(4096.0)}
    torch.save(state, tmp_path / "model.pt")
    place = open_checkpoint(tmp_path)["w"].file_range(0)
    content = bytearray((tmp_path / "model.pt").read_bytes())
    content[place.start_bytes + 77] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ReshardError, match="checksum"):
        convert(tmp_path, tmp_path.parent / "target", to="full")


@cache
def small_file(is_zip: bool) -> bytes:
    """Names of storages in old files are addresses: saved once, the bytes are the same."""
    state = {"a": {"w": torch.arange(60.0).reshape(6, 10)}, "n": 3, "b": torch.ones(3)}
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=is_zip)
    return stream.getvalue()


@settings(
    max_examples=choose(45, 150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data(), st.booleans())
def test_changed_bytes_are_an_error_or_a_checkpoint(
    tmp_path: Path, data: st.DataObject, is_zip: bool
) -> None:
    folder = tmp_path / "source"
    folder.mkdir(exist_ok=True)
    content = bytearray(small_file(is_zip))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    size = data.draw(st.sampled_from([len(content), len(content) - 1, len(content) // 2]))
    (folder / "model.pt").write_bytes(content[:size])
    try:
        opened = open_checkpoint(folder)
        if opened.size_bytes < 10_000:
            convert(folder, tmp_path / "target", to="full", overwrite=True)
    except ReshardError:
        return


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, processes: FaultyProcesses) -> Case:
    folder = tmp_path_factory.mktemp("case")
    source = write_model(folder / "whole")
    return Case(folder, processes, source, to="full", format="torch-pickle")


@pytest.mark.parametrize("kill", keep_spread(4, range(8), "every kill of a file of torch.save"))
def test_a_killed_run_goes_on(tmp_path: Path, case: Case, kill: int) -> None:
    target = tmp_path / "place" / "target"
    target.parent.mkdir()
    old = contents(target)
    calls = len(case.calls(False, 2))
    case.run(target, False, kill_at=kill * (calls - 1) // 7)
    run_again(case, target, False, old)
    loaded = torch.load(target / "pytorch_model.bin", weights_only=True)
    opened = open_checkpoint(case.source)
    assert set(loaded) == set(opened.tensors)
    for name, tensor in loaded.items():
        assert bits(tensor) == np.ascontiguousarray(read_tensor(opened, name)).tobytes()


def test_many_small_tensors_are_written(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((3,), float(number)) for number in range(2000)}
    torch.save(state, tmp_path / "model.pt")
    convert(tmp_path, tmp_path.parent / "many", to="full", format="torch-pickle")
    found = torch.load(tmp_path.parent / "many" / "pytorch_model.bin", weights_only=True)
    assert same(found, state)


@pytest.mark.parametrize("name", ["new.pt", "new.pth", "new.ckpt", "new.bin", "new.safetensors"])
def test_a_target_with_the_name_of_a_file_is_that_file(tmp_path: Path, name: str) -> None:
    model = tmp_path / "m"
    model.mkdir()
    arrays = {"up": np.ones((4, 6), np.float32), "b": np.zeros(3, np.float32)}
    save_file(arrays, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    form = "safetensors" if name == "new.safetensors" else "torch-pickle"
    target = tmp_path / name
    report = convert(model, target, to="full", format=form)
    assert any("config.json" in note for note in report.notes)
    assert target.is_file()
    assert compare(model, target).is_same
    if form == "torch-pickle":
        assert {*torch.load(target, weights_only=True)} == {"up", "b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", name]
    with pytest.raises(UsageError, match="the target exists"):
        convert(model, target, to="full", format=form)
    target.chmod(0o640)
    convert(model, target, to="full", format=form, dtype="fp16", overwrite=True)
    assert open_checkpoint(target)["up"].dtype.name == "float16"
    assert target.stat().st_mode & 0o777 == 0o640 & (model / "model.safetensors").stat().st_mode
    for problem, source, more in (
        ("a file of the source", target, {}),
        ("2 files would be", model, {"most_file_bytes": 12}),
    ):
        with pytest.raises(UsageError, match=f"has the name of a file, but .*{problem}"):
            convert(source, target, to="full", format=form, overwrite=True, **more)


def test_a_file_of_shards_or_at_an_address_is_a_folder_or_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.safetensors"
    save_file({"up": np.ones((4, 6), np.float32)}, model)
    with pytest.raises(UsageError, match="conversions write folders to addresses"):
        plan_conversion(model, "s3://bucket/new.pt", to="full", format="torch-pickle")
    convert(model, tmp_path / "new.pt", to="full", format="torch-dcp")
    assert (tmp_path / "new.pt" / ".metadata").exists()
