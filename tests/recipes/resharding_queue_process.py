"""One process of a job that begins several asynchronous runs at once.

Every process begins them in the same order, and each run has other shapes, so that runs that
met in another order would disagree. Argument: the number of rounds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

import reshard
from reshard.checkpoint import running_processes
from reshard.recipes import ReshardingPlan, ReshardingStrategy, TensorMetadata, create_strategy

SOURCES, TARGETS = 2, 4


def metadata_of(length: int) -> dict[str, TensorMetadata]:
    mesh = reshard.DeviceMesh.of(x=SOURCES)
    layout = reshard.spec(mesh, "x, -").layout((length, 3))
    return {name: TensorMetadata("int64", layout) for name in ("a", "b")}


def shards_of(length: int) -> list[dict[str, Any]]:
    whole = np.arange(length * 3).reshape(length, 3)
    return [{"a": part, "b": -part} for part in np.split(whole, SOURCES)]


def expect_parts(found: Mapping[int, Mapping[str, Any]], length: int) -> None:
    parts = np.array_split(np.arange(length * 3).reshape(length, 3), TARGETS)
    for rank, named in found.items():
        np.testing.assert_array_equal(named["a"], parts[rank])
        np.testing.assert_array_equal(named["b"], -parts[rank])


async def run_all(strategy: ReshardingStrategy, plans: Mapping[int, ReshardingPlan]) -> None:
    runs = [strategy.execute_async(plan, shards_of(length)) for length, plan in plans.items()]
    results = await asyncio.gather(*runs)
    for length, result in zip(plans, results, strict=True):
        assert result.success
        expect_parts(result.target_shards, length)


async def cancel_the_second(
    strategy: ReshardingStrategy, plans: Mapping[int, ReshardingPlan], is_first: bool
) -> None:
    """A run that is cancelled while it waits for its turn lets the others come to theirs."""
    stop = threading.Event()
    tasks = [
        asyncio.create_task(
            strategy.execute_async(plan, shards_of(length), stop if number == 1 else None)
        )
        for number, (length, plan) in enumerate(plans.items())
    ]
    if is_first:
        stop.set()
    results = await asyncio.gather(*tasks)
    assert [result.success for result in results] == [True, False, True, True]
    told = "cancelled with 0 of" if is_first else "process 0 was cancelled"
    assert told in results[1].warnings[-1], results[1].warnings


def main(rounds: int) -> None:
    with running_processes() as coordinator:
        strategy = create_strategy("parallel", coordinator)
        lengths = (400, 80, 4000, 8)
        plans = {n: strategy.create_plan(metadata_of(n), TARGETS) for n in lengths}
        for _ in range(rounds):
            asyncio.run(run_all(strategy, plans))
        asyncio.run(cancel_the_second(strategy, plans, coordinator.rank == 0))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
