"""One rank of a job that sorts arrays along a cut axis, and compares with NumPy."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import reported
from reshard import DeviceMesh, spec


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = DeviceMesh("permuted", (4,), ("x",), (2, 0, 3, 1))
    random = np.random.default_rng(0)
    data = random.normal(size=40_003)
    data[:9_000] = 1.5
    data[[3, 5, 7]] = np.nan, np.inf, -np.inf
    with sp.running(sp.over_processes()):
        x = sp.array(torch.from_numpy(data), spec(mesh, "x"))
        with reported("a_sharded_axis_is_sorted"):
            found, order = sp.sort(x), sp.argsort(x, descending=True)
            assert found.spec is x.spec and order.spec is x.spec
            np.testing.assert_array_equal(found.to_dense().numpy(), np.sort(data))
            expected = len(data) - 1 - np.argsort(data[::-1], stable=True)[::-1]
            np.testing.assert_array_equal(order.to_dense().numpy(), expected)
        with reported("a_program_sorts_a_sharded_axis"):
            program = sp.jit(lambda x: (sp.sort(x) * 2.0, sp.argsort(x, descending=True)))
            for _ in range(3):
                twice, again = program(x)
                assert twice.spec is x.spec and again.spec is x.spec
                np.testing.assert_array_equal(twice.to_dense().numpy(), np.sort(data) * 2.0)
                np.testing.assert_array_equal(again.to_dense().numpy(), expected)
        with reported("rows_of_a_sharded_axis_are_sorted"):
            rows = random.integers(0, 99, (30, 11))
            y = sp.array(torch.from_numpy(rows), spec(mesh, "x, -"))
            ordered = sp.sort(y, axis=0)
            assert ordered.spec is y.spec
            np.testing.assert_array_equal(ordered.to_dense().numpy(), np.sort(rows, axis=0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
