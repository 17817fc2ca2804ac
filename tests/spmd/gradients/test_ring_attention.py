"""Ring attention: sequences that are cut alike stay so, right for every mask, cut and library."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.core.local_work import stretches_of
from reshard.spmd.ops.attention import Attention
from selection import choose, keep_covering

MESH = DeviceMesh.of(x=2, y=3)
MASKS = [(False, None), (True, None), (True, 3), (False, 2)]
EVERY_MASK = "every combination; each mask, length and number of groups is in a default case"
CUTS = (
    *("-, -, y, -", "x, -, y, -", "-, y, x, -", "-, -, x y, -", "-, -, y x, -", "-, x, y, -"),
    *("-, -, y@zigzag, -", "-, x, y@zigzag, -", "-, -, y x@zigzag, -"),
)


def seen_by(length: int, is_causal: bool, window: int | None) -> np.ndarray:
    before = np.subtract.outer(np.arange(length), np.arange(length))
    return (np.abs(before) < (window or length)) & ((before >= 0) | (not is_causal))


@pytest.mark.parametrize(
    ("mask", "length", "groups"),
    keep_covering(1, itertools.product(MASKS, (12, 7, 5), (6, 3)), EVERY_MASK),
)
def test_as_pytorch_in_every_cut(mask: tuple[bool, int | None], length: int, groups: int) -> None:
    """Of even and uneven parts, and of 6 parts of 5 places: one is empty."""
    is_causal, window = mask
    draw = np.random.default_rng(length)
    arrays = [draw.normal(size=(2, heads, length, 4)) for heads in (6, groups, groups)]
    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves,
        attn_mask=torch.from_numpy(seen_by(length, is_causal, window)),
        enable_gqa=True,
    )
    weights = draw.normal(size=expected.shape)
    (expected * torch.from_numpy(weights)).sum().backward()

    def weigh(*heads: Any) -> Any:
        found = sp.attention(*heads, is_causal=is_causal, window=window)
        return sp.sum(found * sp.array(weights)), found

    for cut in CUTS:
        for library in ("numpy", "torch") if cut == CUTS[0] else ("numpy",):
            with sp.running(sp.in_process(library)):
                heads = [sp.array(one, spec(MESH, cut)) for one in arrays]
                found, result = sp.grad(weigh, (0, 1, 2), has_aux=True)(*heads)
                # Three groups over x=2 are no parts of their own: their keys are gathered.
                assert str(result.spec) == cut or (groups == 3 and " x, " in cut)
                np.testing.assert_allclose(np.asarray(result), expected.detach(), 1e-10, 1e-12)
                for one, leaf in zip(found, leaves, strict=True):
                    assert str(one.spec) == cut
                    np.testing.assert_allclose(np.asarray(one), leaf.grad, 1e-10, 1e-12)
        own = [torch.tensor(one, requires_grad=True) for one in arrays]
        weigh(*[sp.array(one, spec(MESH, cut)) for one in own])[0].to_dense().backward()
        for one, leaf in zip(own, leaves, strict=True):
            np.testing.assert_allclose(one.grad, leaf.grad, 1e-10, 1e-12)


HEADS = (1, 2, 60, 4)
PART_BYTES = 2 * 10 * 4 * 8
"""The keys of a sixth of the sequence."""


def trace_attention(both_ways: bool, **options: Any) -> sp.Trace:
    heads = [sp.array(np.zeros(HEADS), spec(MESH, "-, -, x y, -")) for _ in range(3)]
    if not both_ways:
        return sp.trace(lambda q, k, v: sp.attention(q, k, v, **options), *heads)
    return sp.trace(
        sp.grad(lambda q, k, v: sp.sum(sp.attention(q, k, v, **options)), (0, 1, 2)), *heads
    )


def test_keys_go_round_once_and_no_rank_has_them_all() -> None:
    trace = trace_attention(False)
    # Each of six ranks gets the keys and values of the five others.
    assert trace.moved_bytes == 6 * 5 * 2 * PART_BYTES
    assert max(trace.peak_bytes.values()) < 6 * 2 * PART_BYTES
    # Their cotangents go home. A traced program moves a value once, and keeps it for the way back.
    assert trace_attention(True).moved_bytes == 6 * 5 * 4 * PART_BYTES


@pytest.mark.parametrize(
    ("pairs", "options"),
    [
        # Of 6 parts of 10 places, those before a rank's own: 0 + 1 + 2 + 3 + 4 + 5.
        (15, {"is_causal": True}),
        (5, {"is_causal": True, "window": 11}),
        (9, {"is_causal": True, "window": 12}),
        (0, {"is_causal": True, "window": 1}),
        (10, {"window": 2}),
        (30, {"window": 60}),
    ],
)
def test_only_keys_that_are_seen_move(pairs: int, options: dict[str, Any]) -> None:
    assert trace_attention(False, **options).moved_bytes == pairs * 2 * PART_BYTES
    assert trace_attention(True, **options).moved_bytes == pairs * 4 * PART_BYTES


@settings(deadline=None, max_examples=choose(12, 25))
@given(
    length=st.integers(1, 14),
    cut=st.sampled_from(CUTS),
    is_causal=st.booleans(),
    window=st.none() | st.integers(1, 15),
)
def test_as_whole_arrays_have_it(
    length: int, cut: str, is_causal: bool, window: int | None
) -> None:
    draw = np.random.default_rng(length)
    arrays = [draw.normal(size=(2, 6, length, 3)) for _ in range(3)]

    def weigh(*heads: Any) -> Any:
        found = sp.attention(*heads, is_causal=is_causal, window=window)
        return sp.sum(found * found)

    expected = sp.value_and_grad(weigh, (0, 1, 2))(*map(sp.array, arrays))
    found = sp.value_and_grad(weigh, (0, 1, 2))(*[sp.array(x, spec(MESH, cut)) for x in arrays])
    np.testing.assert_allclose(found[0].to_dense(), expected[0].to_dense(), 1e-10)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-12)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_in_zigzag_all_ranks_have_equal_work(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks with blocks that they see, counted where they meet; in order they have not."""
    mesh, blocks = DeviceMesh.of(x=parts), 2 * parts
    met: dict[int, int] = {}
    plain = Attention.forward

    def counting(self: Attention, q: Any, k: Any, v: Any) -> Any:
        rank = owner[self.seen.query_start]
        pairs = q.shape[-2] * k.shape[-2]
        # Of a block with itself, half.
        is_own = self.seen.query_start == self.seen.key_start and q.shape[-2] == k.shape[-2]
        met[rank] = met.get(rank, 0) + (pairs // 2 if is_own else pairs)
        return plain(self, q, k, v)

    monkeypatch.setattr(Attention, "forward", counting)
    data = np.random.default_rng(0).normal(size=(1, 1, 4 * blocks, 2))
    for cut, is_equal in (("x@zigzag", True), ("x", False)):
        own = spec(mesh, f"-, -, {cut}, -")
        x = sp.array(data, own)
        dealt = stretches_of(own, 2, 4 * blocks)
        owner = {start: rank for rank, one in enumerate(dealt) for start, _ in one}
        met.clear()
        sp.attention(x, x, x, is_causal=True)
        # The middle's two blocks are one stretch, of which the mask sees three quarters.
        spread = max(met.values()) - min(met.values())
        assert (spread <= 16) == is_equal, met


def test_keys_that_went_round_are_not_kept() -> None:
    q, k, v = (
        sp.array(np.random.default_rng(n).normal(size=(1, 2, 12, 4)), spec(MESH, "-, -, y, -"))
        for n in range(3)
    )
    q, k, v = q + 0, k + 0, v + 0
    sp.attention(q, k, v)
    assert not k.cached_reshards()
    assert not v.cached_reshards()


def test_heads_that_are_cut_apart_from_their_groups_go_another_way() -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=(2, heads, 6, 4)) for heads in (4, 2, 2)]
    expected = sp.attention(*map(sp.array, arrays), is_causal=True).to_dense()
    found = sp.attention(
        *[sp.array(one, spec(MESH, "-, y, x, -")) for one in arrays], is_causal=True
    )
    np.testing.assert_allclose(found.to_dense(), expected, 1e-12)


@pytest.mark.parametrize(
    ("mask", "groups"), keep_covering(1, itertools.product(MASKS, (6, 3)), EVERY_MASK)
)
def test_gradients_through_recorded_functions(mask: tuple[bool, int | None], groups: int) -> None:
    """Turns that a program or a branch has recorded are differentiated one by one."""
    is_causal, window = mask
    draw = np.random.default_rng(groups)
    arrays = [draw.normal(size=(2, heads, 7, 4)) for heads in (6, groups, groups)]

    def weigh(*heads: Any) -> Any:
        return sp.sum(sp.square(sp.attention(*heads, is_causal=is_causal, window=window)))

    def weigh_in_branch(*heads: Any) -> Any:
        return sp.cond(sp.array(True), lambda: weigh(*heads), lambda: sp.sum(heads[0]))

    every = (0, 1, 2)
    expected = sp.grad(weigh, every)(*map(sp.array, arrays))
    ways = (sp.grad(sp.jit(weigh), every), sp.jit(sp.grad(weigh_in_branch, every)))
    for cut, find in itertools.product(CUTS, ways):
        found = find(*[sp.array(one, spec(MESH, cut)) for one in arrays])
        for one, other in zip(found, expected, strict=True):
            assert str(one.spec) == cut
            np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-12)


@pytest.mark.parametrize(
    ("mask", "groups"), keep_covering(1, itertools.product(MASKS, (3, 6)), EVERY_MASK)
)
def test_second_derivatives(mask: tuple[bool, int | None], groups: int) -> None:
    """Of parts that are cut alike, of heads and of whole arrays, as PyTorch has them of scores."""
    is_causal, window = mask
    draw = np.random.default_rng(groups)
    arrays = [draw.normal(size=(2, heads, 7, 4)) for heads in (6, groups, groups)]
    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    keys, values = (one.repeat_interleave(6 // groups, 1) for one in leaves[1:])
    scores = torch.where(
        torch.from_numpy(seen_by(7, is_causal, window)), leaves[0] @ keys.mT / 2, -torch.inf
    )
    loss = (torch.softmax(scores, -1) @ values).square().sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    expected = torch.autograd.grad(sum(one.square().sum() for one in first), leaves)

    def weigh(*heads: Any) -> Any:
        return sp.sum(sp.square(sp.attention(*heads, is_causal=is_causal, window=window)))

    def slope(*heads: Any) -> Any:
        return sum(sp.sum(sp.square(one)) for one in sp.grad(weigh, (0, 1, 2))(*heads))

    def slope_of_program(*heads: Any) -> Any:
        inner = sp.jit(sp.grad(weigh, (0, 1, 2)))
        return sum(sp.sum(sp.square(one)) for one in inner(*heads))

    for cut in ("-, -, -, -", "-, -, y, -", "-, x, y, -", "x, y, -, -"):
        heads = [sp.array(one, spec(MESH, cut)) for one in arrays]
        for function in (slope, slope_of_program):
            found = sp.grad(function, (0, 1, 2))(*heads)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.to_dense(), other, 1e-8, 1e-10)


def test_first_derivatives_have_no_scores() -> None:
    x = sp.array(np.ones((2, 6, 4)), spec(MESH, "-, x, -"))

    def weigh(x: Any) -> Any:
        return sp.sum(sp.attention(x + 0, x, x))

    for function in (sp.grad(weigh), sp.grad(sp.rematerialized(weigh))):
        names = [one.operation.operator for one in sp.trace(function, x).operations]
        assert any(name.endswith("_gradient") for name in names)
        assert not {"softmax", "matmul"} & {*names}


@pytest.mark.parametrize("cut", ["-, -, -", "-, x, -"])
def test_second_derivatives_of_queries_without_keys(cut: str) -> None:
    """Of six queries the last two see none of three keys: torch's, of the others, and zeros."""
    draw = np.random.default_rng(0)
    arrays = draw.normal(size=(1, 6, 4)), draw.normal(size=(1, 3, 4)), draw.normal(size=(1, 3, 4))

    def slope(q: Any, k: Any, v: Any) -> Any:
        inner = sp.grad(lambda q, k: sp.sum(sp.sin(sp.attention(q, k, v, window=2))), (0, 1))
        return sum(sp.sum(sp.square(one)) for one in inner(q, k))

    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    apart = torch.arange(4)[:, None] - torch.arange(3)
    weighed = torch.nn.functional.scaled_dot_product_attention(
        leaves[0][:, :4], *leaves[1:], attn_mask=apart.abs() < 2
    )
    first = torch.autograd.grad(weighed.sin().sum(), leaves[:2], create_graph=True)
    torch.stack([one.square().sum() for one in first]).sum().backward()

    found = sp.grad(slope, (0, 1, 2))(*(sp.array(one, spec(MESH, cut)) for one in arrays))
    for one, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(one.to_dense(), leaf.grad, 1e-9, 1e-12)
    assert not found[0].to_dense()[:, 4:].any()


def test_rematerialized_and_traced_programs() -> None:
    arrays = [np.random.default_rng(n).normal(size=(2, 12, 4)) for n in range(3)]
    heads = [sp.array(one, spec(MESH, "-, y, -")) for one in arrays]

    def weigh(*heads: Any) -> Any:
        return sp.sum(sp.square(sp.attention(*heads, is_causal=True)))

    expected = sp.grad(weigh, (0, 1, 2))(*heads)
    again = sp.grad(sp.rematerialized(weigh), (0, 1, 2))(*heads)
    compiled = sp.jit(sp.grad(weigh, (0, 1, 2)))(*heads)
    for one, two, three in zip(expected, again, compiled, strict=True):
        np.testing.assert_allclose(two.to_dense(), one.to_dense(), 1e-12)
        np.testing.assert_allclose(three.to_dense(), one.to_dense(), 1e-12)


@pytest.mark.parametrize(
    ("mask", "strategy"),
    keep_covering(
        1, itertools.product(MASKS, ("basic", "aggressive", "widest", "cost")), EVERY_MASK
    ),
)
def test_turns_of_whole_sequences(mask: tuple[bool, int | None], strategy: str) -> None:
    """Where a strategy gathers the queries, what they weigh is in the order of the sequence."""
    is_causal, window = mask
    q, k = (np.random.default_rng(n).normal(size=(1, 7, 3)) for n in range(2))

    def weigh(q: Any, k: Any) -> Any:
        return sp.attention(q * k, k, k, is_causal=is_causal, window=window)

    expected = weigh(sp.array(q), sp.array(k)).to_dense()
    for mesh in (DeviceMesh.of(x=2), DeviceMesh.of(x=3)):
        heads = [sp.array(one, spec(mesh, "-, x@zigzag, -")) for one in (q, k)]
        found = sp.jit(weigh, strategy=strategy)(*heads).to_dense()
        np.testing.assert_allclose(found, expected, 1e-10, 1e-12)


@pytest.mark.parametrize("cut", ["-, y, -", "x, y, -"])
def test_gradients_of_programs_with_queries_without_keys(cut: str) -> None:
    """Their slopes are zero, and nothing warns of numbers that are none."""
    sizes = 12, 6, 6
    heads = [
        sp.array(np.random.default_rng(n).normal(size=(2, size, 3)), spec(MESH, cut))
        for n, size in enumerate(sizes)
    ]

    def weigh(*heads: Any) -> Any:
        return sp.sum(sp.sin(sp.attention(*heads, window=2)))

    expected = sp.grad(weigh, (0, 1, 2))(*heads)
    for one, other in zip(sp.grad(sp.jit(weigh), (0, 1, 2))(*heads), expected, strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-12)
