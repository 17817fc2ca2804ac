"""Windows over space that is cut: right in every cut, and only the edges of parts move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.core.local_work import parts_of
from reshard.topology import Link, Topology
from selection import choose

MESH = DeviceMesh.of(x=2, y=3)
IMAGES = (
    "-, -, x, y",
    "-, -, y, x",
    "x, -, y, -",
    "-, -, x y, -",
    "-, x, -, y",
    "-, -, y@cyclic1, -",
)
KERNELS = ("-, -, -, -", "x, -, -, -", "-, y, -, -", "-, -, y, -")
NUMBER = np.float64


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Windows over two dimensions, that have elements also where they reach into padding alone."""
    sizes = [draw(st.integers(1, 13)) for _ in range(2)]
    wide = [draw(st.integers(1, 4)) for _ in range(2)]
    gaps = [draw(st.integers(1, 3)) for _ in range(2)]
    pads = [(draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(2)]
    strides = [draw(st.integers(1, 4)) for _ in range(2)]
    return {"sizes": sizes, "wide": wide, "gaps": gaps, "pads": pads, "strides": strides}


def check(function: Any, arrays: list[np.ndarray], cuts: list[str]) -> None:
    """The results, their gradients and those of these are what whole arrays have."""

    def weigh(*given: Any) -> Any:
        found = function(*given)
        return sp.sum(sp.square(found) * 0.5 + found), found

    def slope(*given: Any) -> Any:
        return sum(
            sp.sum(sp.square(one)) for one in sp.grad(lambda *x: weigh(*x)[0], places)(*given)
        )

    places = tuple(range(len(arrays)))
    for library in ("numpy", "torch"):
        with sp.running(sp.in_process(library)):
            whole = [sp.array(one) for one in arrays]
            cut = [sp.array(one, spec(MESH, text)) for one, text in zip(arrays, cuts, strict=True)]
            expected, right = sp.grad(weigh, places, has_aux=True)(*whole)
            found, result = sp.grad(weigh, places, has_aux=True)(*cut)
            second = zip(sp.grad(slope, places)(*cut), sp.grad(slope, places)(*whole), strict=True)
            for one, other in [(result, right), *zip(found, expected, strict=True), *second]:
                assert one.shape == other.shape
                np.testing.assert_allclose(np.asarray(one), np.asarray(other), 1e-9, 1e-9)


@settings(deadline=None, max_examples=choose(10, 25))
@given(windows(), st.sampled_from(IMAGES), st.sampled_from(KERNELS), st.sampled_from([1, 2, 6]))
def test_convolutions_are_those_of_whole_arrays(
    options: dict[str, Any], cut: str, kernel_cut: str, groups: int
) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 6, *options["sizes"]))
    kernel = draw.normal(size=(6, 6 // groups, *options["wide"]))

    def convolve(x: Any, kernel: Any) -> Any:
        return sp.convolution(
            x,
            kernel,
            strides=options["strides"],
            padding=options["pads"],
            dilation=options["gaps"],
            groups=groups,
        )

    check(convolve, [x, kernel], [cut, kernel_cut])


@settings(deadline=None, max_examples=choose(10, 25))
@given(windows(), st.sampled_from(IMAGES), st.sampled_from(["max_pool", "avg_pool"]))
@example(
    {"sizes": [1, 2], "wide": [1, 3], "pads": [(0, 0)] * 2, "strides": [1, 1]},
    IMAGES[0],
    "max_pool",
)
def test_pools_are_those_of_whole_arrays(options: dict[str, Any], cut: str, name: str) -> None:
    # Equal elements too, of which one has the gradient.
    x = np.random.default_rng(0).integers(-4, 4, (2, 6, *options["sizes"])).astype(NUMBER)

    def pool(x: Any) -> Any:
        found = getattr(sp, name)(
            x, options["wide"], strides=options["strides"], padding=options["pads"]
        )
        # Windows of padding alone have nothing that is the greatest.
        return sp.where(sp.isfinite(found), found, 0.0)

    check(pool, [x], [cut])


@settings(deadline=None, max_examples=choose(30, 60))
@given(windows(), st.sampled_from(["-, -, x, -", "-, -, y, -", "-, -, y x, -"]))
def test_what_moves_is_what_windows_see_of_other_parts(options: dict[str, Any], cut: str) -> None:
    size, wide, gap, step = (options[name][0] for name in ("sizes", "wide", "gaps", "strides"))
    before, after = options["pads"][0]
    x, kernel = sp.array(np.zeros((1, 1, size, 1)), spec(MESH, cut)), np.zeros((1, 1, wide, 1))
    found = sp.trace(
        lambda x: sp.convolution(
            x, kernel, strides=(step, 1), padding=((before, after), (0, 0)), dilation=(gap, 1)
        ),
        x,
    )
    count = found.outputs[0].shape[2]
    if not count:
        return
    most = 0
    for made, own in zip(
        parts_of(found.outputs[0].spec, 2, count), parts_of(x.spec, 2, size), strict=True
    ):
        seen = {
            window * step - before + at
            for window in range(*made)
            for at in range(gap * (wide - 1) + 1)
        } & set(range(size))
        own_elements = set(range(*own))
        span = seen | own_elements if seen else own_elements
        # A stretch: between what it sees and what it has there may be others.
        if span:
            most += len(set(range(min(span), max(span) + 1)) - own_elements)
    copies = 6 // len(parts_of(x.spec, 2, size))
    assert found.moved_bytes == most * copies * 8
    assert found.moved_bytes <= (6 - copies) * size * 8


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        # Between three parts, one row each way for each of three windows' two neighbours.
        (1, {"padding": 1}),
        (2, {"padding": 2, "dilation": 2}),
        # A part of four rows has the windows at 0 and 2 of it: one row from before.
        (0.5, {"padding": 1, "strides": 2}),
        (0, {"strides": (4, 1)}),
    ],
)
def test_neighbours_exchange_rows_and_no_more(rows: float, options: dict[str, Any]) -> None:
    cut = spec(MESH, "-, -, y, -")
    x, kernel = sp.array(np.ones((2, 3, 12, 5)), cut), sp.array(np.ones((4, 3, 3, 3)), None)
    trace = sp.trace(lambda x, k: sp.convolution(x, k, **options), x, kernel)
    assert str(trace.outputs[0].spec) == "-, -, y, -"
    # Of 2 images and 3 channels; x copies all of it.
    assert trace.moved_bytes == 2 * (2 * 2) * rows * (2 * 3 * 5) * 8


def test_convolutions_of_single_elements_move_nothing() -> None:
    x = sp.array(np.ones((2, 3, 12, 5)), spec(MESH, "-, -, y, -"))
    trace = sp.trace(lambda x: sp.convolution(x, np.ones((4, 3, 1, 1))), x)
    assert (trace.moved_bytes, str(trace.outputs[0].spec)) == (0, "-, -, y, -")


def test_gradients_exchange_edges_too() -> None:
    cut = spec(MESH, "-, -, y, -")
    x, kernel = sp.array(np.ones((2, 3, 12, 5)), cut), np.ones((3, 3, 3, 3))
    slope = sp.grad(lambda x: sp.sum(sp.square(sp.convolution(x, kernel, padding=1))))
    trace = sp.trace(slope, x)
    assert str(trace.outputs[0].spec) == "-, -, y, -"
    edges_bytes = 2 * (2 * 2) * (2 * 3 * 5) * 8
    assert trace.moved_bytes == 2 * edges_bytes
    pooled = sp.trace(
        sp.grad(
            lambda x: sp.sum(sp.square(sp.max_pool(x, (3, 1), strides=1, padding=((1, 1), (0, 0)))))
        ),
        x,
    )
    # Two rows each way of what was pooled, one of the greatest and one of their cotangents.
    assert pooled.moved_bytes == (1 + 2 + 1 + 1) * edges_bytes


@pytest.mark.parametrize("strategy", ["basic", "aggressive", "widest"])
def test_strategies_leave_space_cut(strategy: str) -> None:
    """Edges move forward, and for the gradient those of cotangents; what is placed runs."""
    draw = np.random.default_rng(4)
    arrays = draw.normal(size=(2, 3, 12, 5)), draw.normal(size=(3, 3, 3, 3))
    slope = sp.grad(lambda x, k: sp.sum(sp.square(sp.convolution(x, k, padding=1))), (0, 1))
    given = sp.array(arrays[0], spec(MESH, "-, -, y, -")), sp.array(arrays[1])
    trace = sp.trace(slope, *given, strategy=strategy)
    # The kernel's cotangent is summed over three parts: an all-reduce, of two copies.
    edges_bytes, summed_bytes = 2 * (2 * 2) * (2 * 3 * 5) * 8, 2 * 2 * 2 * 3 * 3 * 9 * 8
    assert trace.moved_bytes <= 2 * edges_bytes + summed_bytes
    for one, other in zip(trace.run(*given), slope(*map(sp.array, arrays)), strict=True):
        np.testing.assert_allclose(np.asarray(one), other.to_dense(), 1e-10, 1e-12)


def slow_links() -> Topology:
    """Links on which bytes are the time."""
    return Topology.of(hosts=1, ranks_per_host=6, within_host=Link(1e6, 1e-9))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "convolution": lambda x, k: sp.convolution(x, k, padding=1),
    "gradients": sp.grad(lambda x, k: sp.sum(sp.square(sp.convolution(x, k, padding=1))), (0, 1)),
    "max_pool": lambda x, k: sp.max_pool(x, (3, 3), strides=1, padding=1),
    "avg_pool": sp.grad(
        lambda x, k: sp.sum(sp.square(sp.avg_pool(x, (3, 3), strides=1, padding=1)))
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cut", ["-, -, y, -", "-, -, x, y", "-, -, x y, -"])
def test_by_cost_edges_move_where_bytes_are_the_time(name: str, cut: str) -> None:
    draw = np.random.default_rng(4)
    arrays = draw.normal(size=(2, 3, 24, 18)), draw.normal(size=(3, 3, 3, 3))
    given = sp.array(arrays[0], spec(MESH, cut)), sp.array(arrays[1], spec(MESH, "-, -, -, -"))
    function = FUNCTIONS[name]
    trace, basic = (
        sp.trace(function, *given, strategy=strategy, topology=slow_links())
        for strategy in ("cost", "basic")
    )
    assert 0 < trace.inserted_s <= basic.inserted_s * (1 + 1e-9)
    # The slowest rank is the time, so that others may get more.
    assert trace.moved_bytes <= 1.3 * basic.moved_bytes
    found, right = trace.run(*given), function(*map(sp.array, arrays))
    both = [one if isinstance(one, tuple) else (one,) for one in (found, right)]
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(np.asarray(one), other.to_dense(), 1e-10, 1e-12)


def test_an_axis_that_cuts_a_larger_kernel_leaves_space_whole() -> None:
    x = sp.array(np.ones((1, 2, 6, 1)), spec(MESH, "-, -, y, -"))
    kernel = sp.array(np.ones((30, 2, 3, 1)), spec(MESH, "y, -, -, -"))
    trace = sp.trace(lambda x, k: sp.convolution(x, k), x, kernel)
    assert str(trace.outputs[0].spec) == "-, y, -, -"


def test_torch_differentiates_them() -> None:
    draw = np.random.default_rng(1)
    x, kernel = draw.normal(size=(2, 3, 7, 5)), draw.normal(size=(4, 3, 3, 3))
    leaves = [torch.tensor(one, requires_grad=True) for one in (x, kernel)]
    torch.nn.functional.conv2d(*leaves, padding=1, stride=2).square().sum().backward()
    own = [torch.tensor(one, requires_grad=True) for one in (x, kernel)]
    arrays = sp.array(own[0], spec(MESH, "-, -, x, y")), sp.array(own[1], spec(MESH, "x, -, -, -"))
    sp.sum(sp.square(sp.convolution(*arrays, padding=1, strides=2))).to_dense().backward()
    for one, leaf in zip(own, leaves, strict=True):
        np.testing.assert_allclose(one.grad, leaf.grad, 1e-10, 1e-12)


def test_without_space_and_with_single_elements_any_cut_passes() -> None:
    draw = np.random.default_rng(2)
    check(
        lambda x, k: sp.convolution(x, k),
        [draw.normal(size=(4, 3)), draw.normal(size=(6, 3))],
        ["x, y", "-, y"],
    )
    image = draw.normal(size=(2, 7, 5))
    for cut in ("-, x@cyclic1, -", "-, y@cyclic2, x", "x, y@stride2, -"):
        for name in ("max_pool", "avg_pool"):
            check(lambda x, name=name: getattr(sp, name)(x, (1, 2), strides=1), [image], [cut])
        found = sp.max_pool(sp.array(image, spec(MESH, cut)), (1, 2), strides=1)
        assert str(found.spec) == cut
