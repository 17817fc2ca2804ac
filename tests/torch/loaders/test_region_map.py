"""Region maps, against arrays of numbers to which the same is done."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.torch.loaders.region_map import (
    CopyOf,
    FilledWith,
    RegionMap,
    concatenate,
    find_progressions,
)


def spread(one: RegionMap) -> np.ndarray:  # type: ignore[type-arg]
    """For each element its place in source 0, minus the value it is filled with, or -1."""
    found = np.full(one.shape, -1.0)
    for start, stop, origin, offset, strides in one.regions:
        inside = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        assert (found[inside] == -1).all(), "regions overlap"
        if isinstance(origin, FilledWith):
            found[inside] = -origin.value
        elif isinstance(origin, CopyOf):
            places = np.full(found[inside].shape, offset)
            for d, stride in enumerate(strides):
                steps = np.arange(places.shape[d]) * stride
                places = places + steps.reshape((-1,) + (1,) * (places.ndim - d - 1))
            found[inside] = places
    return found


@st.composite
def maps(draw: st.DrawFn) -> tuple[RegionMap, np.ndarray]:  # type: ignore[type-arg]
    """A map that was made by a few changes, and the array with the same done to it."""
    shape = draw(st.sampled_from([(4, 6), (3, 2, 4), (7,), (2, 1, 3)]))
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    one = RegionMap.of(shape, CopyOf(0), 0, strides)
    array = np.arange(math.prod(shape), dtype=float).reshape(shape)
    for _ in range(draw(st.integers(0, 5))):
        dim = draw(st.integers(0, len(one.shape) - 1))
        size = one.shape[dim]
        change = draw(st.sampled_from(["narrow", "take", "cat", "pad", "write", "repeat"]))
        if change == "narrow" and size:
            low = draw(st.integers(0, size - 1))
            high = draw(st.integers(low + 1, size))
            one, array = one.narrow(dim, low, high), array.take(range(low, high), dim)
        elif change == "take" and size:
            indices = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
            one, array = one.take(dim, indices), array.take(indices, dim)
        elif change == "cat" and size < 20:
            one, array = concatenate([one, one], dim), np.concatenate([array, array], dim)
        elif change == "pad":
            before = [0] * len(one.shape)
            before[dim] = draw(st.integers(0, 2))
            after = [0] * len(one.shape)
            one = one.pad(before, after, 5.0)
            widths = list(zip(before, after, strict=True))
            array = np.pad(array, widths, constant_values=-5.0)
        elif change == "write":
            part = one.narrow(dim, 0, (size + 1) // 2)
            one = one.overwrite(part.map_origins(lambda _: FilledWith(3.0)).regions)
            inside = (slice(None),) * dim + (slice(0, (size + 1) // 2),)
            array = array.copy()
            array[inside] = np.where(array[inside] == -1, -1, -3.0)
        elif change == "repeat" and array.size < 100:
            repeats = [1] * len(one.shape)
            repeats[dim] = 2
            one, array = one.tile(repeats), np.tile(array, repeats)
    return one, array


@given(maps())
def test_maps_change_as_arrays_do(given_maps: tuple[RegionMap, np.ndarray]) -> None:  # type: ignore[type-arg]
    one, array = given_maps
    assert one.shape == array.shape
    assert (spread(one) == array).all()
    joined = one.coalesce()
    assert len(joined.regions) <= len(one.regions)
    assert (spread(joined) == array).all()


@given(st.lists(st.integers(-3, 9), max_size=12))
def test_progressions_have_the_numbers_in_order(numbers: list[int]) -> None:
    found = find_progressions(numbers)
    listed = [first + i * step for _, first, step, count in found for i in range(count)]
    assert listed == numbers
    assert [at for at, *_ in found] == [
        sum(count for *_, count in found[:i]) for i in range(len(found))
    ]


def test_slices_written_in_turn_are_merged() -> None:
    rows = RegionMap.of((4, 6), CopyOf(0), 0, (6, 1))
    cut = concatenate([rows.narrow(0, i, i + 1) for i in range(4)], 0)
    assert cut.coalesce() == rows
    halves = concatenate([cut.narrow(1, 0, 2), cut.narrow(1, 2, 6)], 1)
    assert halves.coalesce() == rows
