"""Run this process as a rank of a larger job.

Engines ask `torch.distributed` for their rank when they build a model. In `fake_rank` it returns
the given rank, groups are created at once, and collectives return without moving data. The models
of all ranks can therefore be built here in turn on the `meta` device, with their real shapes and
shardings.
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
def fake_rank(rank: int, ranks: int) -> Iterator[None]:
    """Act as rank `rank` of `ranks` in a with block.

    `RANK`, `WORLD_SIZE` and their like are set as a launcher would. Groups of any backend that
    are faked too.

    Raises:
        UsageError: a rank out of range, or a process that is a rank of a running job.

    >>> with fake_rank(3, 8):
    ...     print(dist.get_rank(), dist.get_world_size())
    3 8
    """
    ranks = check_int(ranks, "number of ranks", UsageError, minimum=1)
    rank = check_int(rank, "rank", UsageError)
    if rank >= ranks:
        raise UsageError(f"rank {rank} of {ranks}; ranks count from 0 to {ranks - 1}")
    if dist.is_initialized():
        raise UsageError(
            "this process is a rank of a running job already; fake ranks in a separate process, or "
            "before `init_process_group`"
        )
    new_group = dist.new_group

    def new_fake_group(*args: Any, **options: Any) -> Any:
        # The first argument is the members; the others are a timeout and a backend.
        return new_group(*args[:1], **{**options, "backend": "fake"})

    launched = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        # Programs check whether they are set; nothing connects to this address.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    before = {name: os.environ.get(name) for name in launched}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        os.environ.update(launched)
        dist.new_group = new_fake_group
        yield
    finally:
        dist.new_group = new_group
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # DTensor caches name the groups of meshes, which the next rank may not have.
        debug._clear_sharding_prop_cache()
        # The engine may have destroyed its groups itself.
        if dist.is_initialized():
            dist.destroy_process_group()
