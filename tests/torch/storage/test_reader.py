"""PyTorch's own load reads every format through `StorageReader`, and gets what its reader gets."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import checkpoint
from reshard.errors import UsageError
from reshard.layout import Box

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

from reshard.dtypes import dtype  # noqa: E402
from reshard.torch import StorageReader  # noqa: E402
from reshard.torch.storage import reader as module  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WHOLE = {
    "w": tensor("float32", (13, 6), 1),
    "h": tensor("bfloat16", (5, 4, 3), 2),
    "b": tensor("int64", (10,), 3),
    "q": tensor("float8_e4m3fn", (9, 2), 4),
    "m": tensor("bool", (6,), 5),
    "s": tensor("float64", (), 6),
    "e": tensor("float32", (0, 3), 7),
}
CUTS = [
    ("full", [], {}),
    ("full", [], {"format": "torch-dcp"}),
    ("tp=3", ["w=-, tp", "h=tp, ...", "b=tp", "*=..."], {}),
    ("tp=2", ["w=-, tp@stride3", "h=tp@pad8, ...", "b=tp", "*=..."], {"replicas": "every"}),
    ("tp=2", ["w=-, tp@stride3", "h=..., tp", "b=tp", "*=..."], {"format": "torch-dcp"}),
    ("4", [], {}),
]


def as_torch(whole: Tensor) -> Any:
    data = torch.frombuffer(bytearray(whole.bits.tobytes() or b"\0"), dtype=torch.uint8)
    size = len(whole.bits.tobytes())
    return data[:size].view(getattr(torch, whole.dtype.name)).reshape(whole.shape)


def bits(value: Any) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load(state: dict[str, Any], storage_reader: Any, **how: Any) -> None:
    dcp.load(state, storage_reader=storage_reader, no_dist=True, **how)


@pytest.mark.parametrize(("to", "rules", "how"), CUTS)
def test_ranks_load_from_every_format_and_sharding(
    tmp_path: Path, to: str, rules: list[str], how: dict[str, str]
) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "cut", to=to, rules=rules, **how)
    state = {name: torch.zeros_like(as_torch(whole)) for name, whole in WHOLE.items()}
    addresses = {name: value.data_ptr() for name, value in state.items()}
    load(state, StorageReader(tmp_path / "cut", thread_count=2))
    for name, whole in WHOLE.items():
        assert bits(state[name]) == whole.bits.tobytes(), name
        assert state[name].data_ptr() == addresses[name]


def saved(folder: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    state = {
        "model": {"w": torch.randn(70, 30, generator=generator), "n": torch.tensor(2.5)},
        "optim": {"state": [{"m": torch.randn(9, generator=generator)}, {"step": 3}]},
        "lr": 0.1,
        "name": "adam",
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def blank() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(70, 30), "n": torch.tensor(0.0)},
        "optim": {"state": [{"m": torch.zeros(9)}, {"step": 0}]},
        "lr": 0.0,
        "name": "",
    }


def test_values_are_those_that_pytorchs_reader_loads(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    states = []
    for one in (dcp.FileSystemReader(tmp_path / "a"), StorageReader(tmp_path / "a")):
        states.append(blank())
        load(states[-1], one)
    theirs, ours = states
    assert torch.equal(theirs["model"]["w"], ours["model"]["w"])
    assert torch.equal(theirs["model"]["n"], ours["model"]["n"])
    assert torch.equal(theirs["optim"]["state"][0]["m"], ours["optim"]["state"][0]["m"])
    assert ours["optim"]["state"][1]["step"] == theirs["optim"]["state"][1]["step"] == 3
    assert (ours["lr"], ours["name"]) == (0.1, "adam")


def test_metadata_equal_those_of_pytorchs_reader(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    theirs = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    reader = StorageReader(tmp_path / "a")
    ours = reader.read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_meta.load_id == reader.load_id


def test_a_state_dict_is_loaded_without_a_model(tmp_path: Path) -> None:
    state = saved(tmp_path / "a")
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=StorageReader(tmp_path / "a"),
        no_dist=True,
        planner=_EmptyStateDictLoadPlanner(),
    )
    dcp_to_torch_save(tmp_path / "a", tmp_path / "whole.pt")
    theirs = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(found["model"]["w"], theirs["model"]["w"])
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert found["optim"]["state"][1] == theirs["optim"]["state"][1] == {"step": 3}


def test_compressed_checkpoints_are_loaded(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"w": torch.arange(5000.0), "step": 7}
    writer = dcp.FileSystemWriter(tmp_path / "a", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = {"w": torch.zeros(5000), "step": 0}
    load(found, StorageReader(tmp_path / "a"))
    assert torch.equal(found["w"], state["w"]) and found["step"] == 7


def test_values_are_cast_as_by_pytorchs_reader(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"h": WHOLE["h"]})
    state = {"h": torch.zeros(5, 4, 3)}
    load(state, StorageReader(tmp_path))
    expected = as_torch(WHOLE["h"]).float()
    assert bits(state["h"].nan_to_num(7)) == bits(expected.nan_to_num(7))


def test_views_and_large_tensors_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 64)
    write_file(tmp_path / "model.safetensors", {"w": WHOLE["w"]})
    memory = torch.zeros(6, 13)
    state = {"w": memory.t()}
    version = memory._version
    load(state, StorageReader(tmp_path))
    assert bits(memory.t()) == WHOLE["w"].bits.tobytes()
    assert memory._version > version


def test_only_requested_bytes_are_read(tmp_path: Path) -> None:
    from reshard.checkpoint.storage.local_files import SourceFile

    write_file(tmp_path / "model.safetensors", {"w": WHOLE["w"], "b": WHOLE["b"]})
    read: list[int] = []
    kept = SourceFile.read_into

    def counted(self: SourceFile, region: Any, offset_bytes: int) -> None:
        read.append((region if isinstance(region, memoryview) else region.memory).nbytes)
        kept(self, region, offset_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceFile, "read_into", counted)
        load({"b": torch.zeros(10, dtype=torch.int64)}, StorageReader(tmp_path))
    assert sum(read) == 80


def test_a_reader_is_reset_to_another_checkpoint(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_file(folder / "model.safetensors", {"w": tensor("float32", (4,), number)})
    reader = StorageReader(tmp_path / "0")
    before = reader.load_id
    state = {"w": torch.zeros(4)}
    load(state, reader)
    load(state, reader, checkpoint_id=tmp_path / "1")
    assert bits(state["w"]) == tensor("float32", (4,), 1).bits.tobytes()
    assert reader.checkpoint_id == tmp_path / "1"
    assert reader.load_id != before
    # The folder may have been written again.
    write_file(tmp_path / "1" / "model.safetensors", {"w": tensor("float32", (4,), 5)})
    load(state, reader, checkpoint_id=tmp_path / "1")
    assert bits(state["w"]) == tensor("float32", (4,), 5).bits.tobytes()


def test_locations_are_validated(tmp_path: Path) -> None:
    assert StorageReader.validate_checkpoint_id(tmp_path)
    assert StorageReader.validate_checkpoint_id("s3://bucket/a")
    assert not StorageReader.validate_checkpoint_id(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"path": 7}, "a checkpoint at 7: expected a path"),
        ({"path": "a", "thread_count": 0}, "thread_count 0 must be at least 1"),
        ({"path": "a", "thread_count": True}, "thread_count True must be a whole number"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        StorageReader(**arguments)


def test_missing_names_and_boxes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"no checkpoint at .*nothing"):
        load({"w": torch.zeros(1)}, StorageReader(tmp_path / "nothing"))
    write_file(tmp_path / "model.safetensors", {"w": WHOLE["w"]})
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: x"):
        load({"x": torch.zeros(1)}, StorageReader(tmp_path))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(13, 5)}, StorageReader(tmp_path))


def test_values_of_torch_pickles_are_loaded(tmp_path: Path) -> None:
    """Plain values that reshard has read are given as PyTorch saves them."""
    torch.save(
        {"model": {"w": torch.arange(6.0)}, "step": 7, "betas": (0.9, 0.95)}, tmp_path / "x.pt"
    )
    state = {"model": {"w": torch.zeros(6)}, "step": 0, "betas": (0.0, 0.0)}
    load(state, StorageReader(tmp_path / "x.pt"))
    assert torch.equal(state["model"]["w"], torch.arange(6.0))
    assert (state["step"], state["betas"]) == (7, (0.9, 0.95))


TENSORS = {
    "w": tensor("float32", (12, 10), 1),
    "s": tensor("float64", (), 2),
    "e": tensor("int8", (0, 3), 3),
}


def stored(folder: Path, rule: str, to: str = "tp=3", **how: str) -> checkpoint.Checkpoint:
    write_file(folder / "model.safetensors", TENSORS)
    checkpoint.convert(
        folder / "model.safetensors", folder / "cut", to=to, rules=[f"w={rule}", "*=..."], **how
    )
    return checkpoint.open(folder / "cut")


@pytest.mark.parametrize(
    ("rule", "boxes"),
    [
        ("tp, -", 3),
        ("-, tp", 3),
        ("tp@stride2, -", 6),
        ("tp@windows[0:6,4:8,7:12], -", 3),
        ("tp@pad7, -", 2),
        ("...", 1),
    ],
)
@pytest.mark.parametrize("replicas", ["once", "every"])
def test_chunks_cover_a_tensor_once(tmp_path: Path, rule: str, boxes: int, replicas: str) -> None:
    found = stored(tmp_path, rule, replicas=replicas)
    described = module.describe_contents(found)["w"]
    count = np.zeros((12, 10), dtype=int)
    for chunk in described.chunks:
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        count[tuple(slice(a, a + n) for a, n in ends)] += 1
    assert (count == 1).all()
    assert len(described.chunks) == boxes
    assert described.size == torch.Size([12, 10])
    assert described.properties.dtype == torch.float32


def test_scalars_and_empty_tensors_have_one_chunk(tmp_path: Path) -> None:
    described = module.describe_contents(stored(tmp_path, "tp, -"))
    (scalar,) = described["s"].chunks
    (empty,) = described["e"].chunks
    assert scalar.offsets == scalar.sizes == torch.Size([])
    assert (empty.offsets, empty.sizes) == (torch.Size([0, 0]), torch.Size([0, 3]))


def test_a_tensor_of_too_many_boxes_has_one_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stored(tmp_path, "tp@stride2, -")
    monkeypatch.setattr(module, "MAX_CHUNKS", 5)
    (chunk,) = module.describe_contents(found)["w"].chunks
    assert chunk.sizes == torch.Size([12, 10])


@pytest.mark.parametrize("rule", ["tp, -", "tp@stride2, -", "-, tp@stride5"])
def test_parts_make_up_any_box(tmp_path: Path, rule: str) -> None:
    found = stored(tmp_path, rule, "tp=2")["w"]
    generator = np.random.default_rng(0)
    for _ in range(20):
        low = [int(generator.integers(0, n)) for n in (12, 10)]
        high = [int(generator.integers(a, n + 1)) for a, n in zip(low, (12, 10), strict=True)]
        box = Box(tuple(low), tuple(high))
        count = np.zeros(box.shape, dtype=int)
        for part in module.list_parts(found, box):
            count[tuple(map(slice, part.start, part.stop))] += 1
        assert (count == 1).all()


def test_a_lazy_dict_computes_requested_values_only() -> None:
    made: list[str] = []

    def make(key: str) -> int:
        made.append(key)
        return len(key)

    lazy = module.LazyDict(["a", "bb", "ccc"], make)
    assert "bb" in lazy and len(lazy) == 3 and [*lazy] == ["a", "bb", "ccc"]
    assert made == []
    assert lazy["bb"] == lazy["bb"] == 2
    assert made == ["bb"]
    assert lazy.get("x") is None and lazy.get("a") == 1
    lazy["d"] = 7
    assert lazy == {"a": 1, "bb": 2, "ccc": 3, "d": 7}
    with pytest.raises(KeyError):
        lazy["x"]
    assert pickle.loads(pickle.dumps(lazy)) == copy.deepcopy(lazy) == dict(lazy.items())


def test_types_that_pytorch_lacks_are_refused() -> None:
    assert module.torch_type(dtype("bfloat16"), "w") is torch.bfloat16
    with pytest.raises(UsageError, match="'w' is float8_e3m4, a type that PyTorch does not have"):
        module.torch_type(dtype("float8_e3m4"), "w")
