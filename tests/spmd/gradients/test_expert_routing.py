"""Rows of tokens go to their experts and back: right for every cut, count and library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, MeshError, SpecError, UsageError
from reshard.spmd.core.backend import library
from reshard.spmd.gradients.expert_routing import grouped_outer, grouped_product
from reshard.spmd.shards.runner import InProcess
from selection import choose

MESH = DeviceMesh.of(x=2, y=3)
WIDTH, INNER = 3, 4
# The cut of tokens, and the axes of experts.
CUTS = [
    ("x, -", "x"),
    ("x y, -", ("x", "y")),
    ("y x, -", ("x", "y")),
    ("x, -", "y"),
    ("-, -", "y"),
    ("x y, -", "y"),
    ("x y, -", "x"),
    ("x, -", ()),
    ("-, -", ()),
    ("y@cyclic1, -", "x"),
]


def expected_of(
    x: np.ndarray, which: np.ndarray, up: np.ndarray, down: np.ndarray, capacity: int | None
) -> np.ndarray:
    """What each chosen expert makes of each token, one by one: `[tokens, k, d]`."""
    taken = np.zeros(len(up), int)
    found = np.zeros((*which.shape, down.shape[-1]))
    for place in np.ndindex(which.shape):
        expert = which[place]
        if capacity is None or taken[expert] < capacity:
            found[place] = np.tanh(x[place[0]] @ up[expert]) @ down[expert]
        taken[expert] += 1
    return found


def through_experts(
    x: Any, which: Any, up: Any, down: Any, axes: Any, capacity: int | None
) -> tuple[Any, sp.ExpertRouting]:
    routing = sp.expert_routing(which, up.shape[0], axes=axes, capacity=capacity)
    rows = routing.send(x)
    made = routing.multiply(sp.tanh(routing.multiply(rows, up)), down)
    return routing.back(made), routing


def draw_arrays(tokens: int, count: int, chosen: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [
        draw.normal(size=(tokens, WIDTH)),
        # Some experts have many rows, some none.
        draw.integers(0, count, (tokens, chosen)) // draw.integers(1, 3, (tokens, chosen)),
        draw.normal(size=(count, WIDTH, INNER)),
        draw.normal(size=(count, INNER, WIDTH)),
    ]


@settings(deadline=None, max_examples=choose(25, 60))
@given(
    tokens=st.integers(1, 13),
    count=st.integers(1, 7),
    chosen=st.integers(1, 3),
    cut=st.sampled_from(CUTS),
    capacity=st.none() | st.integers(0, 5),
    library=st.sampled_from(["numpy", "torch"]),
    seed=st.integers(0, 99),
)
def test_as_one_by_one_in_every_cut(
    tokens: int,
    count: int,
    chosen: int,
    cut: tuple[str, Any],
    capacity: int | None,
    library: str,
    seed: int,
) -> None:
    x, which, up, down = draw_arrays(tokens, count, chosen, seed)
    expected = expected_of(x, which, up, down, capacity)
    text, axes = cut
    with sp.running(sp.in_process(library)):
        of_experts = f"{axes if isinstance(axes, str) else ' '.join(axes) or '-'}, -, -"
        whole = [sp.array(one) for one in (x, up, down)]
        cuts = [sp.array(x, spec(MESH, text))]
        cuts += [sp.array(one, spec(MESH, of_experts)) for one in (up, down)]
        chosen_by = sp.array(which), sp.array(which, spec(MESH, text))
        found, routing = through_experts(
            cuts[0], chosen_by[1], *cuts[1:], axes=axes, capacity=capacity
        )
        np.testing.assert_allclose(np.asarray(found), expected, 1e-10, 1e-12)
        kept = np.bincount(which.ravel(), minlength=count)
        np.testing.assert_array_equal(
            routing.counts, kept if capacity is None else np.minimum(kept, capacity)
        )

        def weigh(experts: Any, own_axes: Any) -> Any:
            def function(x: Any, up: Any, down: Any) -> Any:
                found, _ = through_experts(x, experts, up, down, own_axes, capacity)
                return sp.sum(sp.square(found) + found)

            return function

        every = (0, 1, 2)
        right = sp.grad(weigh(chosen_by[0], ()), every)(*whole)
        left = sp.grad(weigh(chosen_by[1], axes), every)(*cuts)
        for one, other, given_ in zip(left, right, cuts, strict=True):
            assert one.spec is given_.spec
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), 1e-10, 1e-12)


def test_gradients_are_those_of_pytorch_and_have_gradients() -> None:
    x, which, up, down = draw_arrays(8, 5, 2)
    leaves = [torch.tensor(one, requires_grad=True) for one in (x, up, down)]

    def dense(x: Any, up: Any, down: Any) -> Any:
        chosen = torch.as_tensor(which)
        made = torch.tanh(torch.einsum("td,tkde->tke", x, up[chosen]))
        return torch.einsum("tke,tked->tkd", made, down[chosen])

    def slope(loss: Any) -> Any:
        found = torch.autograd.grad(loss, leaves, create_graph=True)
        sum((one**2).sum() for one in found).backward()
        return [found, [one.grad for one in leaves]]

    first, second = slope((dense(*leaves) ** 2).sum())
    arrays = [
        sp.array(x, spec(MESH, "x y, -")),
        *[sp.array(one, spec(MESH, "y, -, -")) for one in (up, down)],
    ]
    experts = sp.array(which, spec(MESH, "x y, -"))

    def weigh(x: Any, up: Any, down: Any) -> Any:
        return sp.sum(sp.square(through_experts(x, experts, up, down, "y", None)[0]))

    def steep(*given: Any) -> Any:
        return sum(sp.sum(sp.square(one)) for one in sp.grad(weigh, (0, 1, 2))(*given))

    for found, expected in (
        (sp.grad(weigh, (0, 1, 2))(*arrays), first),
        (sp.grad(steep, (0, 1, 2))(*arrays), second),
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.to_dense(), other.detach(), 1e-9, 1e-11)
    # PyTorch's own gradient, through shards.
    own = [torch.tensor(one, requires_grad=True) for one in (x, up, down)]
    shards = [
        sp.array(one, spec(MESH, text))
        for one, text in zip(own, ("x, -", "y, -, -", "y, -, -"), strict=True)
    ]
    experts = sp.array(torch.as_tensor(which), spec(MESH, "x, -"))
    found, _ = through_experts(shards[0], experts, *shards[1:], axes="y", capacity=None)
    sp.sum(sp.square(found)).to_dense().backward()
    for one, expected_gradient in zip(own, first, strict=True):
        np.testing.assert_allclose(one.grad, expected_gradient.detach(), 1e-9, 1e-11)


class Counting(InProcess):
    """Counts the bytes that ranks receive of others."""

    def __init__(self) -> None:
        super().__init__(sp.in_process().library)
        self.moved_bytes: list[int] = []

    def _make_movement(self, source: Any, spec: Any, plan: Any) -> Any:
        move = super()._make_movement(source, spec, plan)
        size_bytes = plan.moved_elements * source.dtype.itemsize_bytes

        def moved(shards: Any) -> Any:
            self.moved_bytes.append(size_bytes)
            return move(shards)

        return moved


def test_what_moves_is_the_counts_and_the_rows_that_go_elsewhere() -> None:
    x, which, _, _ = draw_arrays(24, 6, 2)
    for text, axes, parts, copies in (
        ("x y, -", ("x", "y"), 6, 1),
        ("x, -", "x", 2, 3),
        ("x y, -", "y", 6, 1),
    ):
        counting = Counting()
        with sp.running(counting):
            tokens, chosen = (sp.array(one, spec(MESH, text)) for one in (x, which))
            counting.moved_bytes.clear()
            routing = sp.expert_routing(chosen, 6, axes=axes)
            # A number for each expert, and whether there are wrong ones, of all other parts.
            assert counting.moved_bytes == [6 * (parts - 1) * (6 + 2) * 8]
            counting.moved_bytes.clear()
            rows = routing.send(tokens)
            routing.back(rows)
        where = np.arange(24) * parts // 24
        owner = {"x": which // 3 * 1, "y": which // 2, ("x", "y"): which}[axes]
        here = where % 3 if axes == "y" else where
        elsewhere = int((owner != here[:, None]).sum())
        assert routing.moved_rows == elsewhere
        row_bytes = copies * WIDTH * 8
        assert counting.moved_bytes == [elsewhere * row_bytes] * 2


def test_weights_and_single_experts() -> None:
    x, which, up, down = draw_arrays(9, 4, 2)
    weights = np.random.default_rng(3).normal(size=which.shape)
    cut = spec(MESH, "x, -")
    routing = sp.expert_routing(sp.array(which, cut), 4, axes="y")
    rows = routing.multiply(routing.send(x), up)
    found = routing.back(routing.multiply(sp.tanh(rows), down), weights)
    expected = (expected_of(x, which, up, down, None) * weights[..., None]).sum(1)
    np.testing.assert_allclose(found.to_dense(), expected, 1e-12)
    # One expert a token needs no k.
    one = sp.expert_routing(sp.array(which[:, 0], spec(MESH, "x")), 4, axes="y")
    found = one.back(one.send(x))
    np.testing.assert_array_equal(found.to_dense(), x)
    found = one.back(one.send(x), weights[:, 0])
    np.testing.assert_allclose(found.to_dense(), x * weights[:, :1], 1e-12)


def test_narrow_floats_stay_so() -> None:
    x, which, up, _ = draw_arrays(6, 2, 1)
    cut = spec(MESH, "x, -")
    routing = sp.expert_routing(sp.array(which, cut), 2, axes="x")
    tokens = sp.astype(sp.array(x, cut), "bfloat16")
    made = routing.multiply(routing.send(tokens), sp.astype(sp.array(up), "bfloat16"))
    assert routing.back(made).dtype.name == "bfloat16"


def test_the_first_tokens_are_taken() -> None:
    which = np.zeros(7, int)
    routing = sp.expert_routing(sp.array(which, spec(MESH, "y")), 2, axes="y", capacity=3)
    x = np.arange(1.0, 8)[:, None]
    assert routing.counts.tolist() == [3, 0]
    assert routing.back(routing.send(x)).to_dense()[:, 0].tolist() == [1, 2, 3, 0, 0, 0, 0]


def test_what_is_refused() -> None:
    cut = spec(MESH, "x, -")
    which = sp.array(np.zeros((4, 2), int), cut)
    for bad, name in (([5], "5 of 3"), ([-1], "-1 of 3")):
        with pytest.raises(ArrayIndexError, match=f"expert {name}"):
            sp.expert_routing(sp.array([0, 0, *bad], spec(MESH, "y")), 3)
    with pytest.raises(SpecError, match=r"\[tokens\] or \[tokens, k\]"):
        sp.expert_routing(sp.zeros((2, 2, 2), dtype="int64"), 3)
    with pytest.raises(UsageError, match="whole numbers"):
        sp.expert_routing(sp.zeros(3), 3)
    with pytest.raises(MeshError, match="experts over z"):
        sp.expert_routing(which, 3, axes="z")
    with pytest.raises(UsageError, match="experts over axes=3; give names"):
        sp.expert_routing(which, 3, axes=3)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="a mesh of none"):
        sp.expert_routing(sp.array([0]), 3, axes="x")
    with pytest.raises(UsageError, match=r"under @sp\.eagerly"):
        sp.trace(lambda w: sp.expert_routing(w, 3), which)
    routing = sp.expert_routing(which, 3, axes="x")
    with pytest.raises(SpecError, match="for 4 tokens"):
        routing.send(sp.zeros((5, 2)))
    rows = routing.send(sp.zeros((4, 2)))
    with pytest.raises(SpecError, match=r"\[3, 2, e\] were expected"):
        routing.multiply(rows, sp.zeros((3, 3, 2)))
    with pytest.raises(SpecError, match=r"of routing\.send"):
        routing.back(sp.zeros((4, 2)))
    with pytest.raises(SpecError, match="weights of shape"):
        routing.back(rows, sp.zeros((4, 1)))
    other = DeviceMesh.of(z=2)
    with pytest.raises(MeshError, match="an array over the mesh"):
        routing.send(sp.zeros((4, 2), spec=spec(other, "z, -")))


ENDS = ([0, 2, 2, 7], [3, 3, 3, 3], [1, 2, 3, 4], [0, 0, 0, 0])
# Sizes that PyTorch's kernel takes, and others.
SIZES = ((8, 16), (3, 5))


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_as_each_row_by_its_matrix(
    ends: list[int], sizes: tuple[int, int], dtype: str, name: str
) -> None:
    draw = np.random.default_rng(ends[-1])
    # Whole numbers, whose products no type rounds.
    rows, others = (draw.integers(-3, 4, (ends[-1], size)) for size in sizes)
    matrices = draw.integers(-3, 4, (4, *sizes))
    experts = np.searchsorted(ends, np.arange(ends[-1]), side="right")

    def made(array: Any) -> Any:
        if name == "torch":
            return torch.tensor(array, dtype=getattr(torch, dtype))
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def same(found: Any, expected: Any) -> None:
        assert found.shape == expected.shape
        found = found.to(torch.float64) if name == "torch" else found.astype(np.float64)
        np.testing.assert_array_equal(np.asarray(found), expected)

    space, stops = library(name), np.array(ends)
    product = np.einsum("nd,nde->ne", rows, matrices[experts])
    turned = np.swapaxes(made(np.swapaxes(matrices, 1, 2).copy()), 1, 2)
    for stack in (made(matrices), turned):
        same(grouped_product(space, made(rows), stack, stops), product)
    outer = np.zeros((4, *sizes))
    np.add.at(outer, experts, rows[:, :, None] * others[:, None, :])
    same(grouped_outer(space, made(rows), made(others), stops), outer)


@pytest.mark.parametrize("sizes", SIZES)
def test_no_experts_and_gradients(sizes: tuple[int, int]) -> None:
    space = library("torch")
    none, rows = np.zeros(0, np.int64), torch.zeros((0, sizes[0]))
    found = grouped_product(space, rows, torch.zeros((0, *sizes)), none)
    assert found.shape == (0, sizes[1])
    assert grouped_outer(space, rows, found, none).shape == (0, *sizes)
    for count in (0, 5):
        rows = torch.ones((count, sizes[0]), requires_grad=True)
        matrices = torch.ones((2, *sizes), requires_grad=True)
        grouped_product(space, rows, matrices, np.array([0, count])).sum().backward()
        assert rows.grad is not None and matrices.grad is not None
        assert (rows.grad == sizes[1]).all() and (matrices.grad[1] == count).all()
