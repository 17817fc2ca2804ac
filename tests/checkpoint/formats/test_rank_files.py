"""Names of ranks' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.checkpoint.formats.rank_files import (
    RankFile,
    find_rank_files,
    group_by_kind,
    read_file_name,
)
from reshard.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "kind", "rank", "ranks"),
    [
        ("model_world_size_8_rank_3.pt", "model", 3, 8),
        ("optim_world_size_16_rank_11.pt", "optimizer", 11, 16),
        ("extra_state_world_size_8_rank_0.pt", "extra state", 0, 8),
        ("pytorch_model_fsdp_rank0.bin", "model", 0, None),
        ("optimizer_fsdp_rank7.bin", "optimizer", 7, None),
        ("mp_rank_00.pt", "model", 0, None),
        ("rank3.safetensors", "model", 3, None),
        ("rank_12.pth", "model", 12, None),
        ("consolidated.01.pth", "model", 1, None),
        ("rank_1_of_4.pt", "model", 1, 4),
        ("model-rank-00001-of-00004.safetensors", "model", 1, 4),
    ],
)
def test_names_of_programs(name: str, kind: str, rank: int, ranks: int | None) -> None:
    found = read_file_name(name)
    assert found is not None
    assert (found.kind, found.rank, found.ranks) == (kind, rank, ranks)


@pytest.mark.parametrize(
    "name",
    [
        *("model.pt", "rng_state_rank0.pth", "frank3.pt", "rank.pt", "rank3.json"),
        *("rank3.pt.tmp", "consolidated.pth", "ranking3.pt"),
    ],
)
def test_other_names(name: str) -> None:
    assert read_file_name(name) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["rank0.pt", "rank2.pt"], "none of rank 1"),
        (["model_world_size_3_rank_0.pt", "model_world_size_3_rank_1.pt"], "none of rank 2"),
        (["model_world_size_1_rank_0.pt", "model_world_size_2_rank_0.pt"], "another save"),
        (["model_world_size_1_rank_1.pt"], "and files of 1 ranks"),
        (["rank_0_of_2.pt"], "none of rank 1"),
        (["tp_rank_0_pp_rank_0.pt"], r"several axes \(tp, pp\), and their order is not known"),
        (["a_rank0.pt", "b_rank0.pt"], "under several names, 'a' and 'b'"),
        (["rank0.pt", "rank_0.pt"], "two model files of one rank"),
        (["rank0.pt", "rank1.pt", "optim_rank0.pt"], "1 optimizer files.*none of rank 1"),
    ],
)
def test_what_does_not_belong_together(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        group_by_kind(tmp_path, find_rank_files(tmp_path))


def test_files_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / f"rank{rank}.pt").write_bytes(b"")
    found = find_rank_files(tmp_path)
    assert [file.rank for file in found] == [0, 2, 10]
    assert found[0] == RankFile("rank0.pt", "model", "", 0)
