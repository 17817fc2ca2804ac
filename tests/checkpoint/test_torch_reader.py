"""PyTorch reads what we write in its convention, and we read what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import Tensor, check_shards, read_file, tensor, write_file
from live_processes import expect_all_end_well, run_ranks
from reshard import DeviceMesh, checkpoint, spec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

# Types that both PyTorch's reader and safetensors know; random bits with NaNs among them.
WHOLE = {
    "w": tensor("float32", (7, 6), 1),
    "h": tensor("bfloat16", (5, 4, 3), 2),
    "b": tensor("float16", (10,), 3),
    "q": tensor("float8_e4m3fn", (9, 2), 4),
    "i": tensor("int64", (3, 3), 5),
    "m": tensor("bool", (6,), 6),
    "s": tensor("float64", (), 7),
}


def as_torch(whole: Tensor) -> Any:
    data = torch.tensor(list(whole.bits.tobytes()), dtype=torch.uint8)
    return data.view(getattr(torch, whole.dtype.name)).reshape(whole.shape)


def as_bytes(value: Any) -> bytes:
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def read_by_torch(folder: Path, tensors: dict[str, Tensor]) -> dict[str, bytes]:
    state = {name: torch.zeros_like(as_torch(t)) for name, t in tensors.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name: as_bytes(value) for name, value in state.items()}


@pytest.mark.parametrize(
    ("to", "rules"),
    [
        ("tp=1", ["s=...", "*=tp, ..."]),
        ("tp=2", ["s=...", "*=tp, ..."]),
        ("tp=3", ["s=...", "*=tp, ..."]),
        ("tp=4", ["s=...", "*=tp, ..."]),
        ("tp=4", ["[whqi]=..., tp", "b=tp@balanced"]),
        ("tp=2,dp=2", ["w=tp, dp", "h=tp / dp, -, -", "b=dp tp", "i=-, dp"]),
        ("tp=8", ["h=..., tp", "[bm]=tp"]),
        ("tp=4", ["w=-, tp@heads2", "b=tp@sizes[0,7,0,3]", "i=tp@whole[1,2], -"]),
        ("tp=3", ["w=tp@windows[0:3,2:5,5:7], -"]),
        ("3", []),
    ],
)
@pytest.mark.parametrize("replicas", ["once", "every"])
def test_torch_reads_what_we_write(
    tmp_path: Path, to: str, rules: list[str], replicas: str
) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    report = checkpoint.convert(
        tmp_path / "model.safetensors",
        tmp_path / "made",
        to=to,
        rules=[*rules, "*=..."] if rules else [],
        replicas=replicas,
    )
    assert not any("PyTorch" in note for note in report.notes)
    assert read_by_torch(tmp_path / "made", WHOLE) == {
        name: t.bits.tobytes() for name, t in WHOLE.items()
    }


@pytest.mark.parametrize("replicas", ["once", "every"])
@pytest.mark.parametrize("rule", ["tp, -, -", "-, -, tp", "-, tp, -", "dp, -, tp"])
def test_torch_sees_the_shape_of_empty_tensors(tmp_path: Path, rule: str, replicas: str) -> None:
    empty = {"e": tensor("float32", (3, 0, 2), 1), "f": tensor("float32", (0, 5), 2)}
    write_file(tmp_path / "model.safetensors", empty)
    report = checkpoint.convert(
        tmp_path / "model.safetensors",
        tmp_path / "made",
        to="tp=2,dp=2",
        rules=[f"e={rule}", "f=-, tp"],
        replicas=replicas,
    )
    assert not any("PyTorch" in note for note in report.notes)
    found = dcp.HuggingFaceStorageReader(str(tmp_path / "made")).read_metadata()
    shapes = {name: tuple(one.size) for name, one in found.state_dict_metadata.items()}
    assert shapes == {name: one.shape for name, one in empty.items()}
    assert read_by_torch(tmp_path / "made", empty) == {"e": b"", "f": b""}
    # Our own reader knows no more without the manifest.
    (tmp_path / "made" / "reshard.manifest.json").unlink()
    assert checkpoint.compare(tmp_path / "model.safetensors", tmp_path / "made").is_same


@pytest.mark.parametrize(
    "rule",
    [
        "w=tp@stride2, -",
        "w=tp@pad8, -",
        "w=tp@halo[1,1], -",
        # Two shards that begin at one place: PyTorch would know only one of them.
        "w=tp@windows[0:3,0:7], -",
    ],
)
def test_shards_that_the_convention_cannot_say_do_not_pretend(tmp_path: Path, rule: str) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    report = checkpoint.convert(
        tmp_path / "model.safetensors", tmp_path / "made", to="tp=2", rules=[rule, "*=..."]
    )
    assert any("PyTorch" in note and "w" in note for note in report.notes)
    for path in (tmp_path / "made").glob("*.safetensors"):
        assert b"DCP_SHARDING_INFO" not in path.read_bytes()
    assert checkpoint.compare(tmp_path / "model.safetensors", tmp_path / "made").is_same


def test_whole_files_are_read_by_torch(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    checkpoint.convert(
        tmp_path / "model.safetensors", tmp_path / "made", to="full", most_file_bytes=100
    )
    assert read_by_torch(tmp_path / "made", WHOLE) == {
        name: t.bits.tobytes() for name, t in WHOLE.items()
    }


def test_safetensors_both_ways(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    state = {name: as_torch(t) for name, t in WHOLE.items()}
    package.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint.convert(
        tmp_path / "model.safetensors", tmp_path / "cut", to="tp=3", rules=["w=tp, -", "*=..."]
    )
    checkpoint.convert(tmp_path / "cut", tmp_path / "full", to="full")
    found = package.load_file(tmp_path / "full" / "model.safetensors")
    assert {name: (v.dtype, v.shape, as_bytes(v)) for name, v in found.items()} == {
        name: (v.dtype, v.shape, as_bytes(v)) for name, v in state.items()
    }


def test_what_one_process_of_torch_writes(tmp_path: Path) -> None:
    state = {name: as_torch(t) for name, t in WHOLE.items()}
    mapping = {name: 1 + number % 2 for number, name in enumerate(WHOLE)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "made"), fqn_to_index_mapping=mapping)
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = checkpoint.open(tmp_path / "made")
    assert {name: checkpoint.read_tensor(found, name).tobytes() for name in found} == {
        name: t.bits.tobytes() for name, t in WHOLE.items()
    }


def test_what_two_processes_of_torch_write(tmp_path: Path) -> None:
    # Random bits through gloo: no NaN payload is touched, for nothing is computed.
    whole = {name: WHOLE[name] for name in ("w", "h", "b", "i", "s")}
    write_file(tmp_path / "model.safetensors", whole)
    targets = {"one file a rank": 2, "two files a rank": 4}
    script = Path(__file__).with_name("saving_process.py")
    folders = [tmp_path / name for name in ("model.safetensors", *targets)]
    expect_all_end_well(run_ranks(str(script), 2, *folders))
    mesh = DeviceMesh.of(tp=3)
    specs = {name: spec(mesh, "...", ndim=len(t.shape)) for name, t in whole.items()}
    specs["w"] = spec(mesh, "-, tp")
    for target, files in targets.items():
        made = tmp_path / target
        assert len(list(made.glob("shard-*.safetensors"))) == files
        found = checkpoint.open(made)
        assert found.format == "sharded-safetensors"
        assert [str(box) for box in found["w"].layout.boxes(1)] == ["[4:7, 0:6]"]
        assert checkpoint.compare(tmp_path / "model.safetensors", found).is_same
        cut, full = made.with_suffix(".cut"), made.with_suffix(".full")
        checkpoint.convert(made, cut, to=mesh, rules=["w=-, tp", "*=..."])
        check_shards(cut, whole, specs)
        checkpoint.convert(cut, full, to="full")
        assert read_file(full / "model.safetensors") == whole
