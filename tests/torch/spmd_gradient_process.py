"""One rank of a job that takes gradients through shards, one a process, and their borders."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import report_each, reported
from reshard import DeviceMesh, spec
from reshard.errors import UsageError
from selection import choose
from spmd import gradient_cases

MESH = DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])
MOVEMENTS = choose(12, 24)
# Those that need the shards of others, and one of every other kind.
OPERATORS = choose(8, 16)


def gradients_pass_through_shards_at_the_borders(rank: int) -> None:
    """What a program gives and takes as shards has the gradient of the whole on each process."""
    data = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    for text in ("x, -", "-, -", "x y, -", "-, - | sum(x)", "y, - | mean(x)"):
        cut = spec(MESH, text)
        whole = data.clone().requires_grad_()
        own = sp.array(data, cut).shards[rank].clone().requires_grad_()
        made = sp.from_shards({rank: own}, (4, 3), cut)
        # Dense, and by shards: a number that is the same on each process.
        sp.sum(made * made * sp.array(whole)).to_dense().backward()
        expected = sp.array(2 * data * data, spec(MESH, text.split(" |")[0])).shards[rank]
        if "mean" in text:
            expected = expected / 2
        torch.testing.assert_close(own.grad, expected)
        torch.testing.assert_close(whole.grad, data * data)
    for text in ("x, -", "-, -", "x, -", "- , x y"):
        leaf = data.clone().requires_grad_()
        taken = sp.sin(sp.array(leaf, spec(MESH, text)))
        (taken.shards[rank] * taken.shards[rank].detach()).sum().backward()
        torch.testing.assert_close(leaf.grad, data.sin() * data.cos())
    # A loss that is one number, taken from its shard, of operands that are cut.
    leaf = data.clone().requires_grad_()
    loss = sp.mean(sp.square(sp.array(leaf, spec(MESH, "x, y")))).reduced()
    loss.shards[rank].backward()
    torch.testing.assert_close(leaf.grad, data / 6)
    # Products that are reduce-scattered.
    batch, weights = (data.repeat(*one).clone().requires_grad_() for one in ((2, 21), (16, 2)))
    rows = spec(MESH, "x, -")
    product = sp.array(batch[:, :-1], rows) @ sp.array(weights[:-2], rows)
    assert product.spec is rows
    sp.sum(sp.square(product)).to_dense().backward()
    cotangent = 2 * (batch[:, :-1] @ weights[:-2]).detach()
    torch.testing.assert_close(batch.grad[:, :-1], cotangent @ weights[:-2].detach().T)
    torch.testing.assert_close(weights.grad[:-2], batch[:, :-1].detach().T @ cotangent)
    # A gradient of a gradient.
    leaf = data.clone().requires_grad_()
    cube = sp.array(leaf, spec(MESH, "x, -")).shard(spec(MESH, "-, y")) ** 3
    (first,) = torch.autograd.grad(sp.sum(cube).to_dense(), leaf, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(leaf.grad, 6 * data)


def programs_that_cannot_be_transposed_are_refused() -> None:
    """What cannot be transposed is refused on every rank, before anything is sent."""
    leaf = torch.ones(8, 5, dtype=torch.float64, requires_grad=True)
    x = sp.array(leaf, spec(MESH, "x, -"))
    for text in ("x@halo[1,1], -", "x, - | product(y)", "-, - | max(x)"):
        with pytest.raises(UsageError, match="a gradient through a movement"):
            x.shard(spec(MESH, text)).to_dense()
        with torch.no_grad():
            np.testing.assert_array_equal(x.shard(spec(MESH, text)).to_dense(), np.ones((8, 5)))
    with pytest.raises(UsageError, match="the gradient would end there"):
        np.asarray(x)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with sp.running(sp.over_processes()):
        report_each([gradients_pass_through_shards_at_the_borders], dist.get_rank())
        report_each([programs_that_cannot_be_transposed_are_refused])
        sides = gradient_cases.PLAIN
        pairs = [(a, b) for a in sides for b in sides]
        for source, target in gradient_cases.few(pairs, MOVEMENTS, 1):
            with reported(f"the gradient of {source} to {target}"):
                gradient_cases.check_movement(MESH, source, target)
        cases = list(gradient_cases.operator_cases())
        for number, (name, function, dense, arrays) in enumerate(
            gradient_cases.few(cases, OPERATORS, 2)
        ):
            (given,) = gradient_cases.shardings(MESH, arrays, 1, number)
            what = f"{name} of {' and '.join(map(str, given))}"
            with reported(f"the gradient of {what}"):
                try:
                    gradient_cases.check_gradient(what, function, dense, arrays, given)
                except UsageError as error:
                    # Products of contributions are refused, on every rank.
                    if "by product" not in str(error):
                        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
