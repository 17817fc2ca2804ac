"""Pretended ranks: what programs see, and that nothing of it is left."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from reshard.errors import UsageError
from reshard.torch.loaders.fake_ranks import fake_rank


def test_every_rank_sees_itself_in_groups_of_any_backend() -> None:
    for rank in range(4):
        with fake_rank(rank, 4):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
            assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "4"
            pair = [rank // 2 * 2, rank // 2 * 2 + 1]
            group = dist.new_group(pair, backend="nccl")
            assert dist.get_process_group_ranks(group) == pair
            named = dist.new_group(ranks=pair)
            assert dist.get_rank(named) == rank % 2
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            assert tuple(mesh.get_coordinate() or ()) == (rank // 2, rank % 2)
            # A collective moves nothing, and comes back at once.
            dist.all_reduce(torch.ones(3), group=group)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    new_group = dist.new_group
    with pytest.raises(KeyError), fake_rank(1, 2):
        raise KeyError
    assert dist.new_group is new_group and not dist.is_initialized()
    assert os.environ["RANK"] == "7" and "WORLD_SIZE" not in os.environ


def test_an_engine_may_destroy_its_groups_itself() -> None:
    with fake_rank(0, 2):
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0), (0.5, 2), ("0", 2)])
def test_ranks_out_of_range_are_refused(rank: int, ranks: int) -> None:
    with pytest.raises(UsageError, match="rank"), fake_rank(rank, ranks):
        pass


def test_a_process_of_a_running_job_cannot_act_as_another_rank() -> None:
    with (
        fake_rank(0, 2),
        pytest.raises(UsageError, match="running job already"),
        fake_rank(0, 2),
    ):
        pass
