"""One rank of a job that computes on shards, one a process, with each operator or every other."""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import report_each, reported
from reshard import DeviceMesh, spec
from selection import choose
from spmd.eager_cases import ONE_OPERAND, TWO_OPERANDS, Case, specs

MESH = DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])


def dense(value: object) -> list[np.ndarray]:
    if isinstance(value, tuple | list):
        return [array for one in value for array in dense(one)]
    return [np.asarray(value)]


def check(case: Case, number: int) -> None:
    """The case on a few shardings, other ones for each case; every rank has the same."""
    arrays = case.arrays()
    with np.errstate(all="ignore"):
        expected = dense(case.function(np, *arrays))
    choices = list(itertools.product(*(list(specs(MESH, one.ndim)) for one in arrays)))
    for turn in range(choose(1, 2)):
        given = choices[(7 * number + 5 * turn + 1) % len(choices)]
        operands = [sp.array(one, at) for one, at in zip(arrays, given, strict=True)]
        found = dense(case.function(sp, *operands))
        for one, other in zip(found, expected, strict=True):
            what = f"{case.name} of {' and '.join(map(str, given))}"
            assert one.shape == other.shape, what
            np.testing.assert_allclose(one, other, 1e-9, 1e-9, err_msg=what)


def partial_sums_are_added() -> None:
    rank = dist.get_rank()
    x = sp.array(np.arange(15.0).reshape(3, 5), spec(MESH, "x, -"))
    # A fifth process has no place in the mesh, and joins what all do.
    assert list(x.shards) == ([rank] if rank in MESH.devices else [])
    partial = sp.sum(x, axis=0)
    assert partial.spec is not None and partial.spec.partial_axes
    assert float(sp.sum(partial + partial)) == 210.0


def products_are_reduce_scattered() -> None:
    # One axis shards the batch and the weights.
    batch, weights = np.arange(512.0).reshape(8, 64), np.arange(512.0).reshape(64, 8)
    product = sp.array(batch, spec(MESH, "x, -")) @ sp.array(weights, spec(MESH, "x, -"))
    assert str(product.spec) == "x, -"
    np.testing.assert_array_equal(np.asarray(product), batch @ weights)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with sp.running(sp.over_processes()):
        report_each([partial_sums_are_added, products_are_reduce_scattered])
        # By default every third operator: one process computes all of them.
        for number, case in list(enumerate((*ONE_OPERAND, *TWO_OPERANDS)))[:: choose(3, 1)]:
            with reported(case.name):
                check(case, number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
