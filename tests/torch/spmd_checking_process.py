"""One rank of four: `sp.checking` finds ranks whose data, copies or operations differ."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist

import reshard
import reshard.spmd as sp
from rank_cases import report_each
from refit_models import expect, refused
from reshard.errors import PlanError, ShardError

MESH = reshard.DeviceMesh.of(dp=2, tp=2)


def equal_ranks_pass() -> None:
    with sp.checking():
        x = sp.array(np.arange(24.0).reshape(4, 6), reshard.spec(MESH, "dp, -"))
        y = sp.softmax(x @ np.ones((6, 2)) * 0.5, axis=1).shard(reshard.spec(MESH, "-, tp"))
        expect(y.shape == (4, 2), str(y.shape))
        part = {dist.get_rank(): torch.ones(2, 3) * (dist.get_rank() // 2)}
        sp.from_shards(part, (4, 3), reshard.spec(MESH, "dp, -"))
        # Contributions to a sum may differ.
        own = {dist.get_rank(): torch.ones(2, 3) * dist.get_rank()}
        sp.from_shards(own, (4, 3), reshard.spec(MESH, "dp, - | sum(tp)"))


def different_ranks_are_named() -> None:
    rank = dist.get_rank()

    def data() -> None:
        sp.array(np.arange(4.0) + (rank == 2))

    def copies() -> None:
        sp.from_shards({rank: torch.ones(2) * (rank == 3)}, (4,), reshard.spec(MESH, "dp"))

    def operations() -> None:
        x = sp.array(np.ones(4))
        if rank == 1:
            sp.exp(x)
        else:
            sp.log(x)

    def numbers() -> None:
        sp.array(np.ones(4)) * float(rank == 1)

    def counts() -> None:
        x = sp.array(np.ones(4))
        for _ in range(1 + (rank == 0)):
            x = x + 1

    for wrong, kind, text in (
        (data, PlanError, "'data of sp.array': ranks 0, 1, 3 mean `float64[4], digest"),
        (copies, ShardError, "ranks [2] and ranks [3] have copies of one part that differ"),
        (operations, PlanError, "rank 1 mean `operation 1, exp(float64[4])`"),
        (numbers, PlanError, "operation 1, multiply("),
        (counts, PlanError, "`the end of sp.checking()`"),
    ):

        def checked(wrong=wrong) -> None:  # type: ignore[no-untyped-def]
            with sp.checking():
                wrong()

        refused(checked, kind, text)
        # Outside, ranks are not compared.
        wrong()


def main() -> None:
    dist.init_process_group("gloo")
    with sp.running(sp.over_processes()):
        report_each([equal_ranks_pass, different_ranks_are_named])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
