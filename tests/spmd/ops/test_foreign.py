"""Rules of composed operators, compared with the compositions that `sp` executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.core.operator import operators
from reshard.spmd.ops.foreign import COMPOSED
from reshard.spmd.shards.operation_call import infer_specs

MESH = DeviceMesh.of(x=2)
# Operands' shapes, attributes of the rule, and the composition.
CASES: dict[str, tuple[list[tuple[int, ...]], dict[str, Any], Callable[..., Any]]] = {
    "broadcast_arrays": ([(4, 1), (8,)], {}, sp.broadcast_arrays),
    "count_nonzero": ([(4, 8)], {"axis": 1}, lambda x: sp.count_nonzero(x, axis=1)),
    "cross": ([(4, 3), (4, 3)], {}, sp.linalg.cross),
    "cross_entropy": ([(4, 10), (4,)], {}, lambda x, i: sp.cross_entropy(x, sp.astype(i, "int64"))),
    "diff": ([(4, 8)], {}, sp.diff),
    "embedding": ([(8, 4), (2, 4)], {}, lambda x, i: sp.embedding(sp.astype(i, "int64"), x)),
    "fftshift": ([(4, 8)], {"axes": 1}, lambda x: sp.fft.fftshift(x, axes=1)),
    "flatten": ([(4, 8)], {}, lambda x: sp.reshape(x, (-1,))),
    "gelu": ([(4, 8)], {}, sp.gelu),
    "ifftshift": ([(4, 8)], {"axes": 1}, lambda x: sp.fft.ifftshift(x, axes=1)),
    "isin": ([(4, 8), (4,)], {}, sp.isin),
    "log_softmax": ([(4, 8)], {"axis": 1}, lambda x: sp.log_softmax(x, axis=1)),
    "logsumexp": ([(4, 8)], {"axis": 1}, lambda x: sp.logsumexp(x, axis=1)),
    "matrix_norm": ([(2, 4, 8)], {}, sp.linalg.matrix_norm),
    "matrix_power": ([(2, 4, 4)], {"n": 2}, lambda x: sp.linalg.matrix_power(x, 2)),
    "matrix_rank": ([(2, 4, 8)], {}, sp.linalg.matrix_rank),
    "matrix_transpose": ([(2, 4, 8)], {}, sp.matrix_transpose),
    "mean": ([(4, 8)], {"axis": 1}, lambda x: sp.mean(x, axis=1)),
    "meshgrid": ([(4,), (8,)], {"indexing": "ij"}, lambda *x: sp.meshgrid(*x, indexing="ij")),
    "moveaxis": ([(2, 4, 8)], {"source": 0, "destination": 2}, lambda x: sp.moveaxis(x, 0, 2)),
    "one_hot": ([(4,)], {"num_classes": 10}, lambda i: sp.one_hot(sp.astype(i, "int64"), 10)),
    "outer": ([(4,), (8,)], {}, sp.linalg.outer),
    "pinv": ([(2, 4, 8)], {}, sp.linalg.pinv),
    "repeat": ([(4, 8)], {"repeats": 3, "axis": 0}, lambda x: sp.repeat(x, 3, axis=0)),
    "softmax": ([(4, 8)], {"axis": 1}, lambda x: sp.softmax(x, axis=1)),
    "split": ([(4, 8)], {"indices_or_sections": 2, "axis": 1}, lambda x: sp.split(x, 2, axis=1)),
    "stack": ([(4,), (4,)], {"axis": 1}, lambda *x: sp.stack(x, axis=1)),
    "std": ([(4, 8)], {"axis": 1}, lambda x: sp.std(x, axis=1)),
    "tile": ([(4, 8)], {"repetitions": (3, 1)}, lambda x: sp.tile(x, (3, 1))),
    "trace": ([(2, 4, 8)], {}, sp.linalg.trace),
    "triangular_solve": ([(2, 4, 4), (2, 4, 3)], {}, sp.linalg.triangular_solve),
    "tril": ([(2, 4, 8)], {}, sp.tril),
    "triu": ([(2, 4, 8)], {}, sp.triu),
    "unstack": ([(4, 2)], {"axis": 1}, lambda x: sp.unstack(x, axis=1)),
    "var": ([(4, 8)], {"axis": 1}, lambda x: sp.var(x, axis=1)),
    "vector_norm": ([(4, 8)], {"axis": 1}, lambda x: sp.linalg.vector_norm(x, axis=1)),
    "zeros_like": ([(4, 8)], {}, sp.zeros_like),
}


# A rule relates all operands and results, where a composition works on each array by itself.
RULE_KEEPS_MORE = {"broadcast_arrays", "meshgrid"}
# The composition exchanges a few numbers along an axis that the rule has replicated.
COMPOSITION_KEEPS_MORE = {
    "embedding",
    "isin",
    "log_softmax",
    "matrix_power",
    "softmax",
    "tril",
    "triu",
}


def list_shardings(shape: tuple[int, ...]) -> list[str]:
    whole = ["-"] * len(shape)
    sharded = [[*whole[:dim], "x", *whole[dim + 1 :]] for dim, size in enumerate(shape) if size > 1]
    return [", ".join(dims) for dims in [whole, *sharded]]


def make_array(name: str, number: int, shape: tuple[int, ...]) -> Any:
    if name == "triangular_solve" and number == 0:
        return np.broadcast_to(np.eye(shape[-1]), shape).copy()
    return 1.0 + np.arange(np.prod(shape)).reshape(shape) % 2


def test_every_composed_operator_is_tried() -> None:
    composed = {name for name, one in operators.items() if one.no_pullback == COMPOSED}
    assert composed <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_rule_gives_the_shardings_of_the_composition(name: str) -> None:
    shapes, attributes, function = CASES[name]
    arrays = [make_array(name, number, shape) for number, shape in enumerate(shapes)]
    different = []
    for number, shape in enumerate(shapes):
        for text in list_shardings(shape):
            texts = [", ".join("-" * len(one)) for one in shapes]
            texts[number] = text
            operands = [
                sp.array(array, spec(MESH, own)) for array, own in zip(arrays, texts, strict=True)
            ]
            ruled = infer_specs(operators[name], [one.type for one in operands], attributes, MESH)
            results = function(*operands)
            results = results if isinstance(results, list | tuple) else [results]
            assert [one.shape for one in results] == list(ruled.inferred.result_shapes)
            for result, expected in zip(results, ruled.result_specs, strict=True):
                if str(result.spec) != str(expected):
                    different.append((str(result.spec), str(expected)))
    if name in RULE_KEEPS_MORE:
        assert different
        assert all("x" not in composed and "x" in expected for composed, expected in different)
    elif name in COMPOSITION_KEEPS_MORE:
        assert different
        assert all("x" in composed and "x" not in expected for composed, expected in different)
    else:
        assert not different
