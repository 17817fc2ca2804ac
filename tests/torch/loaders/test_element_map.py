"""Boxes found in arrays of numbers."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from reshard.torch.loaders.element_map import find_boxes

SHAPES = npst.array_shapes(min_dims=0, max_dims=3, max_side=5)


@given(
    SHAPES.flatmap(lambda s: st.tuples(*[npst.arrays(np.int64, s, elements=st.integers(0, 3))] * 2))
)
def test_boxes_have_the_numbers_of_the_arrays(arrays: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    stepping, fixed = arrays
    covered = np.zeros(stepping.shape, dtype=int)
    for start, stop, constants, first, steps in find_boxes([stepping], [fixed]):
        inside = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        covered[inside] += 1
        assert (fixed[inside] == constants[0]).all()
        expected = np.full(stepping[inside].shape, first[0])
        for d, (step,) in enumerate(steps):
            along = np.arange(expected.shape[d]) * step
            expected = expected + along.reshape((-1,) + (1,) * (expected.ndim - d - 1))
        assert (stepping[inside] == expected).all()
    assert (covered == 1).all()


def test_few_boxes_are_found() -> None:
    rows = np.arange(40).reshape(10, 4)
    assert len([*find_boxes([rows])]) == 1
    assert len([*find_boxes([rows[:, ::2].T])]) == 1
    fused = np.concatenate([rows[:4], rows[8:] + 1000, rows[5:7, ::-1]])
    assert len([*find_boxes([fused])]) == 3
    heads = np.concatenate([rows[i : i + 2] for i in (0, 4, 2, 6)])
    assert len([*find_boxes([heads])]) <= 4
    side_by_side = np.concatenate([rows, rows[::-1] + 500], axis=1)
    assert len([*find_boxes([side_by_side])]) == 2
    assert math.prod(rows.shape) == 40
