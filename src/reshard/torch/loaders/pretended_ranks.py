"""Pretended ranks: a program that expects to be one rank of many, run in this process alone.

Engines build a rank's model by asking `torch.distributed` which rank it is. Under `pretend_rank`
it answers as asked, groups are made at once, and collectives return without moving anything. So
the models of all ranks can be built here one after the other, on the `meta` device: shapes and
cuts are right, values are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard._validation import check_int
from reshard.errors import UsageError


@contextmanager
def pretend_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be rank `rank` of `ranks` while the context lasts.

    `RANK`, `WORLD_SIZE` and their like are set as a launcher would. Groups of any backend that
    are asked for are pretended too.

    Raises:
        UsageError: a rank that is not there, or a process that is a rank of a running job.

    >>> with pretend_rank(3, 8):
    ...     print(dist.get_rank(), dist.get_world_size())
    3 8
    """
    ranks = check_int(ranks, "number of ranks", UsageError, minimum=1)
    rank = check_int(rank, "rank", UsageError)
    if rank >= ranks:
        raise UsageError(f"rank {rank} of {ranks}; ranks count from 0 to {ranks - 1}")
    if dist.is_initialized():
        raise UsageError(
            "this process is a rank of a running job already; pretend ranks in a process of its "
            "own, or before `init_process_group`"
        )
    new_group = dist.new_group

    def new_pretended_group(*given: Any, **options: Any) -> Any:
        # The members come first; behind them are a time limit and a backend.
        return new_group(*given[:1], **{**options, "backend": "fake"})

    launched = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        # Never connected to; programs look whether they are set.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    before = {name: os.environ.get(name) for name in launched}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        os.environ.update(launched)
        dist.new_group = new_pretended_group
        yield
    finally:
        dist.new_group = new_group
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # What DTensors remember of meshes names groups that the next rank may not have.
        debug._clear_sharding_prop_cache()
        # An engine may have taken its groups down itself.
        if dist.is_initialized():
            dist.destroy_process_group()
