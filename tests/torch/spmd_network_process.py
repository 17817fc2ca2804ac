"""One rank of a job that computes what networks are made of, on shards one a process."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import report_each, reported
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError
from spmd.network_cases import CASES

MESHES = {
    2: DeviceMesh.of(x=2),
    # One of three processes has no place in it.
    3: DeviceMesh.of(x=2, devices=[2, 0]),
    4: DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1]),
}


def ring_attention_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    """Ring attention of a sequence that is cut in uneven parts, and its gradients."""
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=(2, heads, 7, 4)) for heads in (4, 2, 2)]

    def weigh(*heads: Any) -> Any:
        return sp.sum(sp.square(sp.attention(*heads, is_causal=True)))

    with sp.running(sp.in_process("numpy")):
        expected = sp.grad(weigh, (0, 1, 2))(*map(sp.array, arrays))
    for rule in ("", "@zigzag"):
        cut = spec(mesh, f"-, -, {' '.join(mesh.axis_names)}{rule}, -")
        found = sp.grad(weigh, (0, 1, 2))(*[sp.array(one, cut) for one in arrays])
        leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
        weigh(*[sp.array(one, cut) for one in leaves]).to_dense().backward()
        for one, leaf, right in zip(found, leaves, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one), right.to_dense(), 1e-10, 1e-12)
            np.testing.assert_allclose(leaf.grad, right.to_dense(), 1e-10, 1e-12)


def convolutions_and_pooling_are_those_of_the_whole(mesh: DeviceMesh) -> None:
    """Convolution and pooling over space that is cut, and their gradients."""
    draw = np.random.default_rng(1)
    arrays = [draw.normal(size=shape) for shape in ((2, 3, 9, 5), (4, 3, 3, 3))]
    cut = spec(mesh, f"-, -, {' '.join(mesh.axis_names)}, -")

    def weigh(x: Any, kernel: Any) -> Any:
        found = sp.convolution(x, kernel, padding=1, strides=(2, 1))
        return sp.sum(sp.square(sp.avg_pool(sp.max_pool(found, (2, 2), strides=1), (2, 1))))

    with sp.running(sp.in_process("numpy")):
        expected = sp.grad(weigh, (0, 1))(*map(sp.array, arrays))
    found = sp.grad(weigh, (0, 1))(sp.array(arrays[0], cut), sp.array(arrays[1]))
    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    weigh(sp.array(leaves[0], cut), sp.array(leaves[1])).to_dense().backward()
    for one, leaf, right in zip(found, leaves, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), right.to_dense(), 1e-10, 1e-12)
        np.testing.assert_allclose(leaf.grad, right.to_dense(), 1e-10, 1e-12)


def experts_and_their_gradients_are_those_of_the_whole(mesh: DeviceMesh) -> None:
    """Tokens at their experts, which are cut over the last axis, and the gradients of all."""
    draw = np.random.default_rng(2)
    which = draw.integers(0, 5, (11, 2))
    arrays = [draw.normal(size=shape) for shape in ((11, 3), (5, 3, 4), (11, 2))]
    axis = mesh.axis_names[-1]
    cuts = [spec(mesh, text) for text in ("x, -", f"{axis}, -, -", "x, -")]

    def weigh(chosen: Any, axes: Any) -> Any:
        def function(x: Any, matrices: Any, weights: Any) -> Any:
            routing = sp.expert_routing(chosen, 5, axes=axes, capacity=6)
            made = sp.tanh(routing.multiply(routing.send(x), matrices))
            return sp.sum(sp.square(routing.back(made, weights)))

        return function

    every = (0, 1, 2)
    with sp.running(sp.in_process("numpy")):
        expected = sp.grad(weigh(sp.array(which), ()), every)(*map(sp.array, arrays))
    of_shards = weigh(sp.array(which, cuts[0]), axis)
    found = sp.grad(of_shards, every)(*map(sp.array, arrays, cuts))
    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    of_shards(*map(sp.array, leaves, cuts)).to_dense().backward()
    for one, leaf, right in zip(found, leaves, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), right.to_dense(), 1e-10, 1e-12)
        np.testing.assert_allclose(leaf.grad, right.to_dense(), 1e-10, 1e-12)

    # In a program, of other numbers each time: a wrong one on one rank is an error on all.
    @sp.eagerly
    def experts(chosen: Any, *given: Any) -> Any:
        return weigh(chosen, axis)(*given)

    program = sp.jit(sp.value_and_grad(experts, (1, 2, 3)))
    for _ in range(3):
        chosen = sp.array(which, cuts[0])
        value, slopes = program(chosen, *map(sp.array, arrays, cuts))
        plain = sp.value_and_grad(weigh(chosen, axis), every)(*map(sp.array, arrays, cuts))
        np.testing.assert_allclose(np.asarray(value), np.asarray(plain[0]), 1e-11)
        for one, right in zip(slopes, plain[1], strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(right), 1e-10, 1e-12)
        which = (which + 1) % 5
    which[-1] = 5
    for run in (lambda one: sp.expert_routing(one, 5, axes=axis), program):
        given = [] if run is not program else list(map(sp.array, arrays, cuts))
        with pytest.raises(ArrayIndexError, match="expert 5 of 5"):
            run(sp.array(which, cuts[0]), *given)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = MESHES[dist.get_world_size()]
    with sp.running(sp.over_processes()):
        if mesh.size == dist.get_world_size():
            report_each(
                [
                    ring_attention_is_that_of_the_whole,
                    convolutions_and_pooling_are_those_of_the_whole,
                    experts_and_their_gradients_are_those_of_the_whole,
                ],
                mesh,
            )
        for case in CASES:
            for given in case.shardings(mesh, 2):
                with reported(f"{case.name} of {' and '.join(map(str, given))}"):
                    case.check(given, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
