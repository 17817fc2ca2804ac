"""PyTorch's distributed checkpoints, as PyTorch and Megatron write them, read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.checkpoint_files import Tensor, read_file, tensor
from reshard import checkpoint
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.torch_dcp import reader
from reshard.errors import CheckpointError, CoverageError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")

from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from checkpoint import torch_checkpoints  # noqa: E402
from selection import choose  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[4].parent / "shared" / "fixtures"
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *(name for name in ["complex32"] if hasattr(ml_dtypes, name)),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def as_torch(whole: Tensor) -> Any:
    data = torch.frombuffer(bytearray(whole.bits.tobytes()) or bytearray(1), dtype=torch.uint8)
    data = data[: whole.size_bytes]
    return data.view(getattr(torch, whole.dtype.name)).reshape(whole.shape)


def bits_of(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint as reshard reads it."""
    opened = open_checkpoint(path)
    found = {}
    for name in opened:
        array = checkpoint.read_tensor(opened, name)
        bits = np.ascontiguousarray(array).reshape(array.shape).view(opened[name].dtype.storage)
        found[name] = Tensor(opened[name].dtype, bits)
    return found


def save_one(folder: Path, state: dict[str, Any]) -> None:
    torch_checkpoints.save(folder, 1, lambda rank: state)


def test_metadata_is_read_with_the_memory_that_the_file_has(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": torch.ones(4)})
    open_checkpoint(tmp_path)
    tracemalloc.start()
    try:
        open_checkpoint(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 24


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_sharded_tensors_of_any_number_of_ranks_are_read(tmp_path: Path, ranks: int) -> None:
    wholes = {
        "rows": tensor("float32", (13, 6), 1),
        "columns": tensor("bfloat16", (5, 11), 2),
        "short": tensor("int64", (3, 2), 3),
        "copied": tensor("float8_e4m3fn", (4, 4), 4),
        "scalar": tensor("float64", (), 5),
        "nothing": tensor("float32", (0, 4), 6),
    }

    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(ranks)
        cuts = {"rows": Shard(0), "columns": Shard(1), "short": Shard(0), "copied": Replicate()}
        found = {
            name: torch_checkpoints.cut(as_torch(wholes[name]), mesh, [placement])
            for name, placement in cuts.items()
        }
        return found | {name: as_torch(wholes[name]) for name in ("scalar", "nothing")}

    torch_checkpoints.save(tmp_path / "dcp", ranks, state)
    assert bits_of(tmp_path / "dcp") == wholes
    opened = open_checkpoint(tmp_path / "dcp")
    assert opened.format == "torch-dcp"
    assert opened.ranks <= ranks
    assert [box.shape for box in opened["rows"].layout.boxes(0)] == [(-(-13 // ranks), 6)]


def test_nested_strided_and_partly_replicated_shards_are_read(tmp_path: Path) -> None:
    whole = tensor("float32", (13, 6))

    def state(rank: int) -> dict[str, Any]:
        dp, tp = divmod(rank, 4)
        mesh = torch_checkpoints.mesh_of(2, 4, names=("dp", "tp"))
        data = as_torch(whole)
        rows = data.tensor_split([4, 8, 12])[tp]
        # What FSDP over tensor parallel makes of a tensor: tp cuts first, and dp what it gave.
        half = -(-len(rows) // 2)
        mine = rows[:half] if dp == 0 else rows[half:]
        strided = torch_checkpoints.DTensor.from_local(
            mine.contiguous(),
            mesh,
            [_StridedShard(0, split_factor=4), Shard(0)],
            run_check=False,
            shape=data.shape,
            stride=data.stride(),
        )
        return {
            "nested": torch_checkpoints.cut(data, mesh, [Shard(0), Shard(0)]),
            "grid": torch_checkpoints.cut(data, mesh, [Shard(0), Shard(1)]),
            "copies": torch_checkpoints.cut(data, mesh, [Replicate(), Shard(0)]),
            "strided": strided,
        }

    torch_checkpoints.save(tmp_path / "dcp", 8, state)
    found = bits_of(tmp_path / "dcp")
    assert found == dict.fromkeys(["nested", "grid", "copies", "strided"], whole)
    boxes = {
        rank: [str(box) for box in open_checkpoint(tmp_path / "dcp")["strided"].layout.boxes(rank)]
        for rank in (0, 4)
    }
    assert boxes == {0: ["[0:2, 0:6]"], 4: ["[2:4, 0:6]"]}


def test_tensors_of_equal_shapes_that_are_stored_in_other_ways(tmp_path: Path) -> None:
    wholes = {name: tensor("float32", (4, 4), seed) for seed, name in enumerate("abcde")}
    state = {name: as_torch(whole) for name, whole in wholes.items()}
    # Its archive has the same size, and differs from those before and after it in the strides.
    state["c"] = state["c"].t().contiguous().t()
    save_one(tmp_path / "dcp", state)
    assert bits_of(tmp_path / "dcp") == wholes
    opened = open_checkpoint(tmp_path / "dcp")
    assert [name for name in opened if opened[name].view(0, 0) is not None] == ["c"]
    assert len({checksum.crc32 for checksum in opened.checksums}) == 5


def test_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more ranks than can be open, whose chunks tensors have in turn."""

    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(6)
        wholes = (tensor("float32", (6, 2), seed) for seed in range(5))
        return {
            str(number): torch_checkpoints.cut(as_torch(whole), mesh, [Shard(0)])
            for number, whole in enumerate(wholes)
        }

    torch_checkpoints.save(tmp_path / "dcp", 6, state)
    monkeypatch.setattr(reader, "_MAX_OPEN_FILES", 2)
    made, make = list[Path](), reader.WindowReader.__init__

    def note(self: Any, path: Path, prefetched: Any) -> None:
        made.append(path)
        make(self, path, prefetched)

    monkeypatch.setattr(reader.WindowReader, "__init__", note)
    open_checkpoint(tmp_path / "dcp")
    assert [path.name for path in made] == [f"__{rank}_0.distcp" for rank in range(6)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_of_torch_is_read(tmp_path: Path, dtype: str) -> None:
    whole = tensor(dtype, (5, 3))
    save_one(tmp_path / "dcp", {"w": as_torch(whole)})
    assert bits_of(tmp_path / "dcp") == {"w": whole}


def test_tensors_that_are_not_row_major(tmp_path: Path, small_blocks: int) -> None:
    whole = tensor("float32", (6, 5, 4))
    data = as_torch(whole)
    images = tensor("float16", (2, 3, 4, 5))
    save_one(
        tmp_path / "dcp",
        {
            "backwards": data.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            "middle": data.transpose(0, 1).contiguous().transpose(0, 1),
            "channels": as_torch(images).to(memory_format=torch.channels_last),
        },
    )
    found = bits_of(tmp_path / "dcp")
    assert found == {"backwards": whole, "middle": whole, "channels": images}
    assert open_checkpoint(tmp_path / "dcp")["backwards"].binding.views


def test_a_checkpoint_of_megatron_is_read() -> None:
    folder = FIXTURES / "megatron_torch_dist"
    if not folder.exists():
        pytest.skip("the fixtures beside the repository are not there")
    opened = open_checkpoint(folder)
    found = checkpoint.read_tensor(opened, "w")
    halves = [np.arange(32, dtype=np.float32).reshape(4, 8) + 100 * rank for rank in (0, 1)]
    assert (found == np.concatenate(halves)).all()
    assert opened.ranks == 2
    assert (opened.format, opened.values, opened.carried) == ("torch-dist", {"cfg.a": 1}, ())


def test_items_that_are_not_tensors(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"lr": 0.5, "groups": [1, "a"]}}
    save_one(tmp_path / "dcp", state)
    opened = open_checkpoint(tmp_path / "dcp")
    assert list(opened) == ["model.w"]
    assert sorted(opened.items) == ["optimizer.groups", "optimizer.lr"]
    assert opened.paths["optimizer.lr"] == ("optimizer", "lr")


def test_many_files_of_a_rank_are_read(tmp_path: Path) -> None:
    wholes = {f"w{i}": tensor("float32", (4 + i, 3), i) for i in range(5)}
    state = {name: as_torch(whole) for name, whole in wholes.items()}
    torch_checkpoints.save(tmp_path / "dcp", 1, lambda rank: state, thread_count=3)
    assert len(open_checkpoint(tmp_path / "dcp").files) == 3
    assert bits_of(tmp_path / "dcp") == wholes


def test_converts_to_safetensors_without_torch(tmp_path: Path) -> None:
    wholes = {"w": tensor("float32", (9, 4), 1), "b": tensor("bfloat16", (7,), 2)}

    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(3)
        return {
            name: torch_checkpoints.cut(as_torch(whole), mesh, [Shard(0)])
            for name, whole in wholes.items()
        }

    torch_checkpoints.save(tmp_path / "dcp", 3, state)
    program = (
        "import sys; from reshard import checkpoint; "
        f"checkpoint.convert({str(tmp_path / 'dcp')!r}, {str(tmp_path / 'full')!r}, to='full'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert read_file(tmp_path / "full" / "model.safetensors") == wholes


# What PyTorch gets wrong in its own checkpoints.


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A checkpoint of two ranks: `w` is cut, `step` is int64 and `scale` has no dimension."""

    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(2)
        return {
            "w": torch_checkpoints.cut(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)]),
            "step": torch.tensor([7, 8]),
            "scale": torch.tensor(3.5),
        }

    torch_checkpoints.save(tmp_path / "dcp", 2, state)
    return tmp_path / "dcp"


def edit(folder: Path, change: Any) -> None:
    """Change the metadata of a checkpoint as PyTorch sees it."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_missing_file_is_an_error(halves: Path) -> None:
    (halves / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing.*'w'"):
        open_checkpoint(halves)


def test_a_chunk_that_is_not_listed_is_a_hole(halves: Path) -> None:
    edit(halves, lambda metadata: metadata.state_dict_metadata["w"].chunks.pop())
    with pytest.raises(CoverageError, match=r"'w'.*no shard holds \[4:8, 0:4\]"):
        open_checkpoint(halves)


def test_a_chunk_that_is_not_stored_is_named(halves: Path) -> None:
    def drop(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == "w" and i.offset[0] == 4)
        del metadata.storage_data[index]

    edit(halves, drop)
    with pytest.raises(CoverageError, match=r"'w'.*\[4:8, 0:4\] is listed, but not where"):
        open_checkpoint(halves)


def test_scalars_and_integers_are_themselves(halves: Path) -> None:
    opened = open_checkpoint(halves)
    assert checkpoint.read_tensor(opened, "scale") == np.float32(3.5)
    step = checkpoint.read_tensor(opened, "step")
    assert step.dtype == np.int64 and step.tolist() == [7, 8]


def test_files_of_an_earlier_save_are_left_out(halves: Path) -> None:
    torch_checkpoints.save(halves, 1, lambda rank: {"w": torch.zeros(8, 4)})
    opened = open_checkpoint(halves)
    assert [file.name for file in opened.files] == ["__0_0.distcp"]
    assert opened.left_out == (("__1_0.distcp", "not a file of this checkpoint"),)
    assert not checkpoint.read_tensor(opened, "w").any()


def test_a_type_that_contradicts_the_file_is_an_error(halves: Path) -> None:
    def lie(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].properties.dtype = torch.int8

    edit(halves, lie)
    with pytest.raises(FormatError, match=r"float32 \[4, 4\] in the file, expected int8"):
        open_checkpoint(halves)


def test_files_that_were_cut_off_are_errors(halves: Path) -> None:
    path = halves / "__1_0.distcp"
    content = path.read_bytes()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
            open_checkpoint(halves)


@pytest.mark.parametrize(
    "size", [(2**40, 2**40), (0, 2**61, 4), (1,) * 65, (2**61,)], ids=lambda size: str(len(size))
)
def test_sizes_that_cannot_be_are_errors(halves: Path, size: tuple[int, ...]) -> None:
    def grow(metadata: Any) -> None:
        described = metadata.state_dict_metadata["w"]
        chunk = described.chunks[0]
        chunk.offsets, chunk.sizes = torch.Size([0] * len(size)), torch.Size([0] * len(size))
        described.size, described.chunks = torch.Size(size), [chunk]
        for index in [index for index in metadata.storage_data if index.fqn == "w"]:
            info = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)("w", chunk.offsets)] = info

    edit(halves, grow)
    with pytest.raises(FormatError, match=r"tensor 'w'.*(too large|at most)"):
        open_checkpoint(halves)


def test_chunks_that_overlap_are_an_error(halves: Path) -> None:
    def grow(metadata: Any) -> None:
        described = metadata.state_dict_metadata["w"]
        described.chunks[1].offsets = torch.Size([3, 0])
        for index in list(metadata.storage_data):
            if index.fqn == "w" and index.offset[0] == 4:
                info = metadata.storage_data.pop(index)
                metadata.storage_data[type(index)("w", [3, 0])] = info

    edit(halves, grow)
    with pytest.raises(CoverageError, match=r"two shards of 'w' overlap"):
        open_checkpoint(halves)


@pytest.mark.parametrize("path", ["../w.distcp", "/etc/passwd", "sub/w.distcp"])
def test_files_outside_of_the_folder_are_not_read(halves: Path, path: str) -> None:
    def lead_out(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    edit(halves, lead_out)
    with pytest.raises(FormatError, match="leads outside the checkpoint"):
        open_checkpoint(halves)


def test_transformed_tensors_are_refused_by_name(halves: Path) -> None:
    def compress(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "w":
                info.transform_descriptors = ["stream.secret/1"]

    edit(halves, compress)
    opened = open_checkpoint(halves)
    assert [*opened.tensors] == ["step", "scale"]
    says = r"'w' was transformed by stream.secret/1.*known are stream.zstd/1"
    with pytest.raises(CheckpointError, match=says):
        _ = opened["w"]


def test_invalid_metadata_is_an_error(halves: Path) -> None:
    for content in (b"", b"{}", pickle.dumps({"w": 1}), pickle.dumps([halves])):
        (halves / ".metadata").write_bytes(content)
        with pytest.raises(FormatError, match=r"\.metadata"):
            open_checkpoint(halves)


def test_metadata_is_not_executed(halves: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    def harm(metadata: Any) -> None:
        metadata.planner_data = Harm()
        metadata.state_dict_metadata["w"] = Harm()

    edit(halves, harm)
    opened = open_checkpoint(halves)
    assert [*opened.tensors] == ["step", "scale"]
    assert "an object of" in opened.unreadable["w"]
    assert not (tmp_path / "ran").exists()


MCORE_DATA = {"w": {"nd_reformulated_orig_global_shape": (8, 4)}, "b": {}}


def test_attributes_of_plain_values_are_kept(halves: Path, tmp_path: Path) -> None:
    size = torch.Size([8, 4])
    for name, value in {"mcore_data": MCORE_DATA, "name": "x", "sizes": [size, None]}.items():
        edit(halves, functools.partial(lambda n, v, metadata: setattr(metadata, n, v), name, value))
    opened = open_checkpoint(halves)
    assert opened.attributes["mcore_data"] == MCORE_DATA
    assert (opened.left_out, opened.unread) == ((), ())
    conversion = checkpoint.plan_conversion(halves, tmp_path / "t", to=3, format="torch-dcp")
    assert conversion.losses == ()
    checkpoint.run_conversion(conversion)
    kept = torch.distributed.checkpoint.FileSystemReader(tmp_path / "t").read_metadata()
    assert (kept.mcore_data, kept.name, kept.sizes) == (MCORE_DATA, "x", [size, None])
    (loss,) = checkpoint.plan_conversion(halves, tmp_path / "s", to="full").losses
    assert "mcore_data, name, sizes; --format orbax or torch-dcp" in loss


def test_attributes_that_are_no_plain_values_are_losses(halves: Path, tmp_path: Path) -> None:
    inside: list[Any] = []
    inside.append(inside)
    odd = {"owner": torch.distributed.checkpoint.metadata.BytesStorageMetadata(), "loop": inside}
    for name, value in odd.items():
        edit(halves, functools.partial(lambda n, v, metadata: setattr(metadata, n, v), name, value))
    opened = open_checkpoint(halves)
    assert [name for name, _ in opened.unread] == [".metadata: owner", ".metadata: loop"]
    losses = checkpoint.plan_conversion(halves, tmp_path / "t", to=3, format="torch-dcp").losses
    assert losses[0].startswith("not in the target: .metadata: owner (")
    assert len(losses) == 2


@settings(
    max_examples=choose(120, 400), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_changed_metadata_is_an_error_or_equivalent(halves: Path, data: st.DataObject) -> None:
    path = halves / ".metadata"
    content = path.read_bytes()
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        with contextlib.suppress(CheckpointError):
            opened = open_checkpoint(halves)
            for name in {"w", "step", "scale"} & {*opened}:
                # Whole and proven, wherever its bytes are said to be; PyTorch would fill zeros.
                checkpoint.read_tensor(opened, name)
    finally:
        path.write_bytes(content)


def test_values_that_are_conjugated_when_read_are_refused(tmp_path: Path) -> None:
    save_one(tmp_path / "dcp", {"w": torch.ones(2, dtype=torch.complex64).conj()})
    with pytest.raises(FormatError, match=r"'w'.*resolve_conj"):
        _ = open_checkpoint(tmp_path / "dcp")["w"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("chunk", r"offset is \(-1, 0\), expected sizes of 0 or more"),
        ("offset", "offset is -5, expected a number of bytes of 0 or more"),
        ("length", "length is -5, expected a number of bytes of 0 or more"),
    ],
)
def test_negative_numbers_are_shown(tmp_path: Path, name: str, match: str) -> None:
    torch.distributed.checkpoint.save(
        {"w": torch.zeros(2, 2)}, checkpoint_id=tmp_path, no_dist=True
    )
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    ((index, stored),) = metadata.storage_data.items()
    if name == "chunk":
        index = dataclasses.replace(index, offset=torch.Size([-1, 0]))
    else:
        setattr(stored, name, -5)
    metadata.storage_data = {index: stored}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match=match):
        checkpoint.open(tmp_path)
