"""Saves without collectives, of which every rank keeps metadata of its own, read as one."""

from __future__ import annotations

import functools
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import tensor
from reshard import checkpoint
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.errors import CheckpointError, CoverageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

from checkpoint import torch_checkpoints  # noqa: E402
from checkpoint.formats.torch_dcp.test_reader import as_torch, bits_of  # noqa: E402

WHOLES = {
    "w": tensor("float32", (6, 4), 1),
    "r": tensor("bfloat16", (3, 2), 2),
    "b": tensor("int64", (5,), 3),
}


def state_of(rank: int, ranks: int) -> dict[str, Any]:
    mesh = torch_checkpoints.mesh_of(ranks)
    return {
        "w": torch_checkpoints.cut(as_torch(WHOLES["w"]), mesh, [Shard(0)]),
        "r": torch_checkpoints.cut(as_torch(WHOLES["r"]), mesh, [Replicate()]),
        "b": as_torch(WHOLES["b"]),
        "step": 3,
        "random": {"seed": rank},
    }


def save_apart(folder: Path, ranks: int, **writer: Any) -> None:
    """What every rank of a job saves that does not talk to the others."""
    for rank in range(ranks):
        with torch_checkpoints.standing_for(rank, ranks):
            dcp.save(
                state_of(rank, ranks),
                storage_writer=dcp.FileSystemWriter(folder, **writer),
                use_collectives=False,
            )


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    save_apart(tmp_path / "apart", 3)
    return tmp_path / "apart"


def edit(path: Path, change: Any) -> None:
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("files", [1, 2])
def test_a_save_without_collectives_reads_as_one_with_them(
    tmp_path: Path, ranks: int, files: int
) -> None:
    save_apart(tmp_path / "apart", ranks, thread_count=files)
    torch_checkpoints.save(tmp_path / "together", ranks, lambda rank: state_of(rank, ranks))
    assert not (tmp_path / "apart" / ".metadata").exists()
    assert bits_of(tmp_path / "apart") == WHOLES
    apart, together = open_checkpoint(tmp_path / "apart"), open_checkpoint(tmp_path / "together")
    assert {*apart.items} == {*together.items} == {"step", "random.seed"}
    assert apart.paths == together.paths
    assert apart["w"].layout is together["w"].layout
    assert apart.notes[0].startswith(f"merged from the metadata of {ranks} ranks, saved without")
    assert checkpoint.open(tmp_path / "apart" / "__0.metadata").tensors.keys() == WHOLES.keys()


def test_other_bytes_of_other_ranks_are_said(apart: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(apart)
    # The step is the same on all ranks, the seed is not.
    assert [name for name, _ in opened.unread] == ["random.seed of rank 1", "random.seed of rank 2"]
    assert opened.notes[0].endswith(
        "; 4 shards are copies of those of a lower rank, which are read"
    )
    conversion = checkpoint.plan_conversion(apart, tmp_path / "target", to=2, format="torch-dcp")
    assert conversion.losses == tuple(
        f"not in the target: random.seed of rank {rank} (its bytes differ from those of rank "
        "0, which are used)"
        for rank in (1, 2)
    )
    checkpoint.run_conversion(conversion)
    target = open_checkpoint(tmp_path / "target")
    assert bits_of(tmp_path / "target") == WHOLES and target.unread == ()
    assert not list((tmp_path / "target").glob("__*.metadata"))


def test_a_rank_that_is_missing(apart: Path) -> None:
    (apart / "__2.metadata").rename(apart / "gone")
    with pytest.raises(CoverageError, match=r"'w' of shape \[6, 4\]: no shard holds \[4:6, 0:4\]"):
        open_checkpoint(apart)
    (apart / "gone").rename(apart / "__2.metadata")
    (apart / "__1.metadata").unlink()
    with pytest.raises(CheckpointError, match=r"__1\.metadata is missing, .* __2\.metadata"):
        open_checkpoint(apart)
    shutil.copy(apart / "__2.metadata", apart / "__1.metadata")
    (apart / "__0.metadata").unlink()
    with pytest.raises(CheckpointError, match=r"__0\.metadata is missing"):
        open_checkpoint(apart)


def test_ranks_that_disagree_are_an_error(apart: Path) -> None:
    kept = (apart / "__1.metadata").read_bytes()

    def resize(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([7, 4])

    def retype(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].properties.dtype = torch.int32

    def swap(metadata: Any) -> None:
        metadata.state_dict_metadata["b"] = metadata.state_dict_metadata["step"]
        for index in list(metadata.storage_data):
            if index.fqn == "step":
                new = dcp.metadata.MetadataIndex("b")
                metadata.storage_data[new] = metadata.storage_data[index]

    edit(apart / "__1.metadata", resize)
    expected = r"'w' is float32 \[6, 4\] by __0\.metadata, but float32 \[7, 4\] by __1\.metadata"
    with pytest.raises(CoverageError, match=expected):
        open_checkpoint(apart)
    (apart / "__1.metadata").write_bytes(kept)
    edit(apart / "__1.metadata", retype)
    with pytest.raises(CoverageError, match=r"but int32 \[6, 4\] by __1\.metadata"):
        open_checkpoint(apart)
    (apart / "__1.metadata").write_bytes(kept)
    edit(apart / "__1.metadata", swap)
    with pytest.raises(CoverageError, match=r"'b' is a tensor by __0\.metadata or __1"):
        open_checkpoint(apart)


def test_shards_that_overlap(apart: Path) -> None:
    def move(metadata: Any) -> None:
        (chunk,) = metadata.state_dict_metadata["w"].chunks
        for index in list(metadata.storage_data):
            if index.fqn == "w":
                info = metadata.storage_data.pop(index)
                moved = dcp.metadata.MetadataIndex("w", torch.Size([1, 0]))
                metadata.storage_data[moved] = info
        chunk.offsets = torch.Size([1, 0])

    edit(apart / "__1.metadata", move)
    with pytest.raises(CoverageError, match="two shards of 'w' overlap"):
        open_checkpoint(apart)


def test_attributes_of_all_ranks_are_merged(apart: Path) -> None:
    for rank in range(3):
        values = {"mcore_data": {f"w{rank}": {"shape": (rank, 4)}}, "same": [1], "other": rank}
        values["either"] = {"x": 1} if rank == 1 else [5]
        for name, value in values.items():
            edit(
                apart / f"__{rank}.metadata",
                functools.partial(lambda n, v, metadata: setattr(metadata, n, v), name, value),
            )
    opened = open_checkpoint(apart)
    joined = {f"w{rank}": {"shape": (rank, 4)} for rank in range(3)}
    assert opened.attributes == {"mcore_data": joined, "same": [1]}
    assert {".metadata: other", ".metadata: either"} <= dict(opened.unread).keys()


def test_metadata_of_all_ranks_are_preferred(apart: Path, tmp_path: Path) -> None:
    torch_checkpoints.save(apart, 1, lambda rank: {"w": as_torch(WHOLES["w"])})
    opened = open_checkpoint(apart)
    assert list(opened) == ["w"] and opened.notes == ()
    left_out = dict(opened.left_out)
    assert left_out["__1.metadata"] == "not a file of this checkpoint"
    checkpoint.convert(apart, tmp_path / "target", to="full")
    assert not list((tmp_path / "target").glob("*.metadata"))
