"""Gradients that PyTorch takes of functions of arrays in shards, against differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from spmd.eager_cases import ONE_OPERAND, TWO_OPERANDS, Case
from spmd.network_cases import CASES as NETWORKS

SHAPE = (7, 5)
# Every kind of sharding that a movement treats in a way of its own, over x=2, y=2 and more.
PLAIN = (
    *("-, -", "x, -", "-, y", "x, y", "x y, -", "-, y x", "x / y, -", "y, - | sum(x)"),
    *("-, - | sum(x)", "-, - | sum(x y)", "-, - | mean(x)", "-, x | mean(y)", "x@cyclic1, -"),
    *("-, y@balanced", "x@stride2, y", "-, y@sizes[2,3] | sum(x)"),
)
EXTREME = ("-, - | max(x)", "-, y | min(x)", "x, - | max(y)")
COMMON = ("x@halo[1,1], -", "x@halo[1,1,padded], -", "x@halo[2,1], y", "-, - | product(x)")

Function = Callable[..., Any]


def total(found: Any, weights: Sequence[Any]) -> Any:
    """The results, dense, weighed and added up."""
    results = found if isinstance(found, tuple | list) else (found,)
    dense = [one.to_dense() if isinstance(one, sp.ShardedArray) else one for one in results]
    return sum((one * weight).sum() for one, weight in zip(dense, weights, strict=True))


def weights_of(found: Any) -> list[np.ndarray]:
    """A number for each element of the results: 0 for those that are no floats."""
    random = np.random.default_rng(3)
    results = found if isinstance(found, tuple | list) else (found,)
    made = []
    for one in map(np.asarray, results):
        is_float = one.dtype.kind == "f"
        made.append(random.normal(size=one.shape) if is_float else np.zeros(one.shape))
    return made


def check_gradient(
    what: str,
    function: Function,
    dense: Function,
    arrays: Sequence[np.ndarray],
    given: Sequence[ShardingSpec | None],
) -> bool:
    """Fails where the gradient along a direction is not what the numbers change by.

    False where there is none, the result being no function of floats.
    """
    with np.errstate(all="ignore"):
        weights = weights_of(dense(*arrays))
    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    operands = [sp.array(one, at) for one, at in zip(leaves, given, strict=True)]
    found = function(*operands)
    for one in found if isinstance(found, tuple | list) else (found,):
        # Where one rank records and another does not, transposed movements would not meet.
        assert len({shard.requires_grad for shard in one._shards}) <= 1, what
    loss = total(found, [torch.from_numpy(one) for one in weights])
    if not any(one.any() for one in weights):
        return False
    assert loss.requires_grad, f"{what}: the graph was cut"
    loss.backward()
    random = np.random.default_rng(5)
    step = 1e-6
    for place, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        direction = random.normal(size=array.shape)
        with np.errstate(all="ignore"):
            ends = [
                total(
                    dense(*arrays[:place], array + sign * step * direction, *arrays[place + 1 :]),
                    weights,
                )
                for sign in (1, -1)
            ]
        expected = (ends[0] - ends[1]) / (2 * step)
        gradient = np.zeros(array.shape) if leaf.grad is None else leaf.grad.numpy()
        found = float((gradient * direction).sum())
        assert abs(found - expected) <= 1e-5 * (1 + abs(expected)), (
            f"{what}, operand {place}: {found} is not {expected}"
        )
    return True


def check_movement(mesh: DeviceMesh, source: str, target: str) -> None:
    """Fails where a gradient through one movement, in the middle of a function, is wrong."""
    data = np.random.default_rng(1).normal(size=SHAPE)
    factor = np.random.default_rng(2).normal(size=SHAPE)

    def function(x: Any, w: Any) -> Any:
        # Different on each rank before, and used twice after.
        before = sp.array(x * w, spec(mesh, source))
        moved = before.shard(spec(mesh, target))
        return moved * moved + sp.sin(moved), before

    def dense(x: Any, w: Any) -> Any:
        return (x * w) ** 2 + np.sin(x * w), x * w

    what = f"{source} -> {target}"
    given = [spec(mesh, "x, y"), None]
    assert check_gradient(what, function, dense, [data, factor], given), what


def operator_cases() -> Iterator[tuple[str, Function, Function, list[np.ndarray]]]:
    """Every operator on real floating arrays, with what NumPy computes of them."""
    case: Case
    for case in (*ONE_OPERAND, *TWO_OPERANDS):
        arrays = case.arrays()
        if case.name in NO_GRADIENT or any(one.dtype.kind != "f" for one in arrays):
            continue
        function, xp = case.function, sp
        yield (
            case.name,
            lambda *a, f=function, xp=xp: f(xp, *a),
            lambda *a, f=function: f(np, *a),
            arrays,
        )
    for network in NETWORKS:
        if network.name in NO_GRADIENT or any(one.dtype.kind != "f" for one in network.arrays):
            continue
        whole = network.function

        def by_whole(*arrays: np.ndarray, f: Function = whole) -> Any:
            # Without shards and gradients, the function is what other tests compare with PyTorch.
            found = f(*(sp.array(torch.from_numpy(one)) for one in arrays))
            results = found if isinstance(found, tuple) else (found,)
            return tuple(one.to_dense().numpy() for one in results)

        yield network.name, whole, by_whole, list(network.arrays)


NO_GRADIENT = {
    "imag": "of real numbers, it is the constant 0",
    "astype": "differences in float32 say little",
    "zeros_like": "a constant",
    "ones_like": "a constant",
    "full_like": "a constant",
    "floor_divide": "PyTorch has no derivative of it, and says so",
}
"""Cases that have no gradient to compare, each with its reason."""


def few(every: Sequence[Any], most: int, seed: int) -> list[Any]:
    """So many of them, the same ones for a seed."""
    if len(every) <= most:
        return list(every)
    picked = np.random.default_rng(seed).choice(len(every), most, replace=False)
    return [every[number] for number in sorted(picked)]


def shardings(mesh: DeviceMesh, arrays: Sequence[np.ndarray], most: int, seed: int) -> list[Any]:
    """Shardings of all arrays together, some with contributions."""
    from spmd.eager_cases import specs

    return few(
        list(itertools.product(*(list(specs(mesh, one.ndim, True)) for one in arrays))), most, seed
    )
