"""The element types that rows name are those of what is computed."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard.spmd.core.operator import operators, shipped_operators
from reshard.spmd.shards.operation_call import call

ZEROS = np.zeros((4, 3), int)
# How the functions of rows are called whose arguments are not the examples'.
POOLED = {"window": (2,), "strides": (2,), "padding": ((0, 0),)}
CONVOLVED = {"strides": (1,), "padding": ((0, 0),), "dilation": (1,), "groups": 1}
CALLS: dict[str, Callable[[Any], Any]] = {
    "concat": lambda x: sp.concat([x, x]),
    "stack": lambda x: sp.stack([x, x]),
    "split": lambda x: sp.split(x, 2),
    "roll": lambda x: sp.roll(x, 1),
    "pad": lambda x: sp.pad(x, [(0, 0), (1, 2)]),
    "slice": lambda x: x[:, 1:3],
    "tile": lambda x: sp.tile(x, (3, 1)),
    "repeat": lambda x: sp.repeat(x, 3, axis=0),
    "moveaxis": lambda x: sp.moveaxis(x, 0, 1),
    "squeeze": lambda x: sp.squeeze(x[:, :1], 1),
    "matrix_transpose": sp.matrix_transpose,
    "permute_dims": lambda x: sp.permute_dims(x, (1, 0)),
    "reshape": lambda x: sp.reshape(x, (2, 16)),
    "broadcast_to": lambda x: sp.broadcast_to(x, (2, 4, 8)),
    "flatten": lambda x: sp.reshape(x, (-1,)),
    "broadcast_arrays": lambda x: sp.broadcast_arrays(x, x[0]),
    "meshgrid": lambda x: sp.meshgrid(x[0], x[1]),
    "take": lambda x: sp.take(x, ZEROS[0], axis=0),
    "take_along_axis": lambda x: sp.take_along_axis(x, ZEROS, axis=1),
    "embedding": lambda x: sp.embedding(ZEROS, x),
    "checked_index": lambda x: sp.argsort(x),
    "scatter": lambda x: sp.scatter(x, ZEROS[0, :1], x[:1]),
    "dynamic_slice": lambda x: sp.dynamic_slice(x, (0, 1), (2, 2)),
    "dynamic_update_slice": lambda x: sp.dynamic_update_slice(x, x[:2, :2], (0, 1)),
    "searchsorted": lambda x: sp.searchsorted(x[0], x[1]),
    "isin": lambda x: sp.isin(x, x[0]),
    "top_k": lambda x: sp.top_k(x, 3),
    "max_pool": lambda x: sp.max_pool(x, (2,)),
    "max_pool_gradient": lambda x: call("max_pool_gradient", (x[:, :4], x[:, :4], x), POOLED),
    "avg_pool_gradient": lambda x: call(
        "avg_pool_gradient", (x[:, :4],), {"sizes": (8,), **POOLED}
    ),
    "convolution_input_gradient": lambda x: call(
        "convolution_input_gradient", (x[None], x[:, None, :1]), {"sizes": (8,), **CONVOLVED}
    ),
    "convolution_kernel_gradient": lambda x: call(
        "convolution_kernel_gradient", (x[None, :1], x[None]), {"window": (1,), **CONVOLVED}
    ),
    "diagonal": sp.linalg.diagonal,
    "fftshift": lambda x: sp.fft.fftshift(x, axes=1),
    "ifftshift": lambda x: sp.fft.ifftshift(x, axes=1),
}
# Types that are asked for by name are no types of the operands'.
ASKED = ("astype", "random_numbers")
NAMED = sorted(
    name
    for name in shipped_operators()
    if operators[name].result_types is not None and name not in ASKED
)


DTYPES = ["int8", "uint8", "int64", "float32", "float64"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in NAMED
        for dtype in DTYPES
        # Whole numbers have no gradients.
        if "float" in dtype or not name.endswith("_gradient")
    ],
)
def test_types_that_rows_name(name: str, dtype: str) -> None:
    row = operators[name]
    shapes, attributes = row.example or ((), {})
    x = sp.array((np.arange(32).reshape(4, 8) % 5).astype(dtype))
    if name in CALLS:
        found = CALLS[name](x)
    else:
        found = getattr(sp, name)(*[x] * len(shapes), **attributes)
    results = found if isinstance(found, tuple | list) else [found]
    assert row.result_types is not None
    types = row.result_types([x.dtype] * len(shapes), {}, "numpy")
    for place, one in enumerate(results):
        assert one.dtype is types[min(place, len(types) - 1)]


class _Side(IntEnum):
    LEFT = 2


class _Rate(float):
    """A number whose text is not its value."""

    def __repr__(self) -> str:
        return "rate"


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("number", "dtype"), [(_Side.LEFT, "int8"), (_Rate(2.5), "float32")])
def test_numbers_of_other_classes_take_the_type_of_an_array(
    number: Any, dtype: str, library: str
) -> None:
    data = np.ones((2, 3), dtype)
    x = sp.array(data if library == "numpy" else pytest.importorskip("torch").from_numpy(data))

    def scale(x: Any) -> Any:
        return sp.where(x > number, number, number * x)

    for run in (scale, sp.jit(scale)):
        result = run(x)
        assert result.dtype.name == dtype
        assert np.array_equal(np.asarray(result.to_dense()), data * float(number))
    assert sp.result_type(x, number).name == dtype


def test_different_numbers_of_equal_text_are_different_constants() -> None:
    traced = sp.jit(lambda x: x * _Rate(2.5) + x * _Rate(4.0))
    assert traced(sp.ones((2,))).to_dense().tolist() == [6.5, 6.5]
