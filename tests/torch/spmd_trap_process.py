"""One rank of a job that runs the tests of eager arrays on shards that lie one a process.

The tests are those of `spmd/test_eager_traps.py`, as they are: where they would have all shards in
this process, they get the runner over processes.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import reported
from spmd import test_eager_traps

# Tests that are not for six processes, each with its reason.
NOT_HERE = {
    "test_a_pending_sum_and_a_sharded_array_meet_by_a_reduce_scatter": "a mesh of 2",
    "test_whole_numbers_wrap_as_they_do_in_the_whole_array": "a mesh of 2",
    "test_truth_values_and_maxima_of_numbers": "a mesh of 2",
    "test_a_reshape_whose_parts_divide_stays_in_shards": "a mesh of 4",
    "test_sub_axes_that_do_not_fit_are_not_used_together": "a mesh of 12",
    "test_running_totals_exchange_one_element_a_part": "is of a trace, which runs nothing",
    "test_the_seeds_questions": "looks at the shards of all ranks",
    "test_truth_values_that_wait_are_no_numbers": "PyTorch multiplies no matrices of truth values",
}
# Of one test with many arguments: ranks that share few cores are slow.
MOST = 1


def parametrized(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments that pytest would call a test with, those of one library only."""
    choices: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names, values = mark.args
        if names == "library":
            choices.append([{names: "torch"}])
        elif isinstance(names, str):
            choices.append([{names: value} for value in values])
        else:
            choices.append([dict(zip(names, value, strict=True)) for value in values])
    for together in itertools.product(*choices):
        yield {name: value for one in together for name, value in one.items()}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    runner = sp.over_processes()
    sp.in_process = lambda name="torch": runner
    count = 0
    with sp.running(runner):
        for name, test in inspect.getmembers(test_eager_traps, inspect.isfunction):
            if not name.startswith("test_") or name in NOT_HERE:
                continue
            for arguments in itertools.islice(parametrized(test), MOST):
                with reported(name):
                    test(**arguments)
                count += 1
    assert count >= 25, count
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
