"""Strided regions as products of indices, against all elements counted one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.recipes.engine_layouts.source_layouts import Product, find_products, unite

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def elements(shape: tuple[int, ...], products: tuple[Product, ...]) -> list[int]:
    """The row-major numbers of all elements of products, sorted."""
    found: list[int] = []
    for product in products:
        along = [[i for a, b in stretches for i in range(a, b)] for stretches in product]
        found += [
            int(np.ravel_multi_index(index, shape)) if shape else 0
            for index in itertools.product(*along)
        ]
    return sorted(found)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
    """A shape, and sizes, an offset and strides that stay inside."""
    shape = draw(SHAPES)
    total = math.prod(shape)
    offset = draw(st.integers(0, total - 1))
    low = high = offset
    sizes, strides = [], []
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.integers(-total, total))
        most = 6
        if stride > 0:
            most = min(most, (total - 1 - high) // stride + 1)
        elif stride < 0:
            most = min(most, low // -stride + 1)
        size = draw(st.integers(1, most))
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
        sizes.append(size)
        strides.append(stride)
    return shape, tuple(sizes), offset, tuple(strides)


@given(regions())
def test_products_have_the_elements_of_the_region(
    region: tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]],
) -> None:
    shape, sizes, offset, strides = region
    positions = np.full(sizes, offset)
    for d, stride in enumerate(strides):
        steps = np.arange(sizes[d]) * stride
        positions = positions + steps.reshape((-1,) + (1,) * (len(sizes) - d - 1))
    found = find_products(shape, sizes, offset, strides)
    assert {*elements(shape, found)} == {*positions.reshape(-1).tolist()}
    united = unite(found)
    assert elements(shape, united) == sorted({*positions.reshape(-1).tolist()})


def test_regions_of_whole_dimensions_are_one_product() -> None:
    assert find_products((8, 4), (2, 4, 4), 0, (16, 4, 1)) == ((((0, 8),), ((0, 4),)),)
    # Every other row, as gate and up are interleaved.
    assert find_products((6, 4), (3, 4), 4, (8, 1)) == ((((1, 2), (3, 4), (5, 6)), ((0, 4),)),)
    # Transposed.
    assert find_products((6, 4), (4, 2), 8, (1, 4)) == ((((2, 4),), ((0, 4),)),)


def test_a_large_region_is_quick() -> None:
    """Rows of a vocabulary, by number of products and not of elements."""
    found = find_products((256_000, 8192), (16_000, 8192), 16_000 * 8192, (8192, 1))
    assert found == ((((16_000, 32_000),), ((0, 8192),)),)


def test_empty_regions_and_scalars() -> None:
    assert find_products((4, 0), (4, 0), 0, (0, 1)) == ()
    assert find_products((), (), 0, ()) == ((),)
    assert find_products((4,), (3,), 2, (0,)) == ((((2, 3),),),)
    assert unite([]) == ()


def test_products_that_differ_along_two_dimensions_are_cut_apart() -> None:
    corner = (((0, 2),), ((0, 2),))
    other = (((1, 3),), ((1, 3),))
    united = unite([corner, other])
    assert elements((3, 3), united) == [0, 1, 3, 4, 5, 7, 8]
