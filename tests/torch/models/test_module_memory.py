"""What a rank gives as its model: names of tensors in modules that hold another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard.torch.models.module_memory import tensors_of


@pytest.fixture
def job() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("job")
def test_modules_around_a_module_do_not_rename_it() -> None:
    own = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    names = [name for name, _ in tensors_of(own)]
    assert names[:2] == ["0.weight", "0.bias"]
    parallel = DistributedDataParallel(own)
    compiled = torch.compile(parallel, backend="eager")
    inside = DistributedDataParallel(torch.compile(own, backend="eager"))
    for one in (parallel, compiled, inside):
        found = dict(tensors_of(one))
        assert list(found) == names
        assert found["0.weight"] is own[0].weight
