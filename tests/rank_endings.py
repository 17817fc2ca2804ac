"""The order in which a job's ranks end where one of them fails.

Why a rank does not answer is told at the store of the job, which is in the process of rank 0. A
rank that has raised early must not take the store with it before the others have asked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist


def end_last(ranks: Iterable[int]) -> None:
    """Rank 0 waits until these have come here; call it on all ranks that live on."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank():
        store.set(f"ended/{dist.get_rank()}", "")
    else:
        store.wait([f"ended/{rank}" for rank in ranks])
