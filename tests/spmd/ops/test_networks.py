"""What the functions of networks move and keep, and what they refuse."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, DimSpec, ShardingSpec, spec
from reshard.errors import ArrayIndexError, UsageError

MESH = DeviceMesh.of(dp=2, tp=3)
OPTIONS: list[dict[str, Any]] = [{}, {"ignore_index": 0}, {"label_smoothing": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cut", ["dp, tp", "-, tp", "-, dp tp"])
def test_cross_entropy_exchanges_numbers_of_tokens_and_no_logits(
    cut: str, options: dict[str, Any]
) -> None:
    tokens = 48
    labels = sp.array(np.arange(tokens) % 300, spec(MESH, f"{cut.split(',')[0]}"))

    def loss(logits: Any) -> Any:
        return sp.sum(sp.cross_entropy(logits, labels, **options))

    moved = []
    for classes in (300, 600):
        logits = sp.array(np.zeros((tokens, classes)), spec(MESH, cut))
        trace = sp.trace(sp.value_and_grad(loss), logits)
        moved.append(trace.moved_bytes)
        # An all-reduce among n ranks moves 2 (n - 1) / n of its bytes from each: three of them, or
        # four where all classes share a part of the weight, and one of the loss.
        numbers = 3 + bool(options.get("label_smoothing"))
        assert trace.moved_bytes <= 2 * numbers * 8 * tokens * 5 + 200
    assert moved[0] == moved[1]


def test_the_gradient_of_a_softmax_asks_nobody_who_had_the_greatest() -> None:
    x = sp.array(np.random.default_rng(0).normal(size=(8, 30)), spec(MESH, "dp, tp"))
    names = []

    class Names:
        def record(self, call: Any, operands: Any, results: Any) -> None:
            names.append(call.name)

        def record_reshard(self, operand: Any, result: Any) -> None:
            pass

    with sp.recording(Names()):
        found = sp.grad(lambda x: sp.sum(sp.square(sp.softmax(x))))(x)
    assert names.count("max") == 1
    assert names.count("stop_gradient") == 1
    assert str(found.spec) == "dp, tp"


def test_labels_that_are_no_classes_are_refused() -> None:
    logits = sp.array(np.zeros((4, 6)), spec(MESH, "dp, tp"))
    with pytest.raises(ArrayIndexError, match="index 6 of a dimension of size 6"):
        sp.cross_entropy(logits, sp.array(np.array([0, 1, 6, 2])))
    with pytest.raises(ArrayIndexError, match="index -100"):
        sp.cross_entropy(logits, np.array([0, 1, -100, 2]))
    assert sp.cross_entropy(logits, np.array([0, 1, -100, 2]), ignore_index=-100).to_dense()[2] == 0
    with pytest.raises(UsageError, match=r"label_smoothing=1\.5; a number from 0 to 1"):
        sp.cross_entropy(logits, np.zeros(4, int), label_smoothing=1.5)


@pytest.mark.parametrize("window", [None, 64])
def test_memory_of_attention_grows_with_the_sequence_not_its_square(window: int | None) -> None:
    def weigh(q: Any) -> Any:
        return sp.sum(sp.square(sp.attention(q, q, q, is_causal=True, window=window)))

    peaks = []
    for length in (1024, 4096):
        q = sp.array(np.random.default_rng(0).normal(size=(1, 2, length, 4)))
        sp.grad(weigh)(q)  # What is compiled once is not counted.
        tracemalloc.start()
        sp.grad(weigh)(q)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Scores alone would be 16 times as many.
    assert peaks[1] < 4 * peaks[0]
    assert peaks[1] < 2 * 4096 * 4096 * 8 / 16


def test_attention_of_blocks_that_are_no_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("reshard.spmd.ops.attention._BLOCK", 3)
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=(2, 4, 10, 5)) for _ in range(3)]
    before = np.subtract.outer(np.arange(10), np.arange(10))
    weights = draw.normal(size=(2, 4, 10, 5))
    for is_causal, window in ((False, None), (True, None), (True, 2), (False, 4), (True, 5)):
        seen = np.abs(before) < (window or 10)
        seen &= (before >= 0) | (not is_causal)
        leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
        mask = torch.from_numpy(seen)
        expected = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
        (expected * torch.from_numpy(weights)).sum().backward()

        def weigh(*heads: Any, options: Any = (is_causal, window)) -> Any:
            found = sp.attention(*heads, is_causal=options[0], window=options[1])
            return sp.sum(found * sp.array(weights)), found

        for cut in ("-, -, -, -", "dp, -, tp, -", "-, dp, tp, -", "-, -, dp tp, -"):
            heads = [sp.array(one, spec(MESH, cut)) for one in arrays]
            found, result = sp.grad(weigh, (0, 1, 2), has_aux=True)(*heads)
            np.testing.assert_allclose(result.to_dense(), expected.detach(), 1e-10, 1e-12)
            for one, leaf in zip(found, leaves, strict=True):
                np.testing.assert_allclose(one.to_dense(), leaf.grad, 1e-10, 1e-12)


def test_keys_that_are_cut_alone_stay_where_they_are() -> None:
    # One query of each sequence, as in decoding.
    q = sp.array(np.ones((2, 6, 1, 8)), spec(MESH, "dp, -, -, -"))
    k = sp.array(np.ones((2, 3, 300, 8)), spec(MESH, "dp, -, tp, -"))
    trace = sp.trace(lambda q, k: sp.attention(q, k, k), q, k)
    assert trace.moved_bytes < 4 * 2 * 6 * 8 * 8 * 3


@pytest.mark.parametrize(
    "cut", ["tp@cyclic1", "tp@zigzag", "tp dp@cyclic1", "tp@sizes[1,4,3]", "tp"]
)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": 3}])
def test_whole_queries_have_gradients_of_results_that_are_cut(
    options: dict[str, Any], cut: str
) -> None:
    """Queries know their places, also where cotangents lie in parts of several stretches."""
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=(2, 8, 4)) for _ in range(3)]
    weights = sp.array(draw.normal(size=(2, 8, 4)))

    def weigh(weights: Any, *heads: Any) -> Any:
        return sp.sum(weights * sp.attention(*heads, **options))

    every = (1, 2, 3)
    expected = sp.grad(weigh, every)(weights, *map(sp.array, arrays))
    weights = weights.shard(spec(MESH, f"-, {cut}, -"))
    whole = [sp.array(one, spec(MESH, "-, -, -")) for one in arrays]
    for find in (sp.grad(weigh, every), sp.jit(sp.grad(weigh, every))):
        for one, other in zip(find(weights, *whole), expected, strict=True):
            np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-12)


def test_attention_s_second_derivative_is_that_with_a_mask() -> None:
    q = sp.array(np.random.default_rng(0).normal(size=(2, 3, 4)))

    def slope(q: Any, mask: Any = None) -> Any:
        inner = sp.grad(lambda q: sp.sum(sp.square(sp.attention(q, q, q, mask))))
        return sp.sum(inner(q))

    masked = sp.grad(lambda q: slope(q, np.zeros((3, 3))))(q)
    np.testing.assert_allclose(sp.grad(slope)(q).to_dense(), masked.to_dense(), 1e-10, 1e-12)


@pytest.mark.parametrize("cut", ["-, -, -, -", "-, -, tp, -"])
@pytest.mark.parametrize("way", ["window", "truth", "numbers"])
def test_queries_that_see_no_key_have_zeros(way: str, cut: str) -> None:
    draw = np.random.default_rng(0)
    q = sp.array(draw.normal(size=(1, 2, 6, 4)))
    k = sp.array(draw.normal(size=(1, 2, 3, 4)), spec(MESH, cut))
    seen = np.abs(np.subtract.outer(np.arange(6), np.arange(3))) < 2
    masks = {"truth": seen, "numbers": np.where(seen, 0.0, -np.inf)}
    seeing = [sp.array(masks[way])] if way in masks else []
    options = {} if seeing else {"window": 2}

    def weigh(q: Any, k: Any) -> Any:
        return sp.attention(q, k, k, *seeing, **options)

    weighed = weigh(q, k).to_dense()
    plain = sp.attention(q[:, :, :4], k, k, sp.array(seen[:4]))
    np.testing.assert_allclose(weighed[:, :, :4], plain.to_dense(), 1e-12)
    assert not weighed[:, :, 4:].any()
    slopes = sp.grad(lambda q, k: sp.sum(sp.square(weigh(q, k))), (0, 1))(q, k)
    assert all(np.isfinite(one.to_dense()).all() for one in slopes)
    assert not slopes[0].to_dense()[:, :, 4:].any() and slopes[0].to_dense().any()


def test_a_window_of_nothing_is_refused() -> None:
    q = sp.ones((2, 3, 4))
    with pytest.raises(UsageError, match="window of attention 0 must be at least 1"):
        sp.attention(q, q, q, window=0)


@pytest.mark.parametrize(
    "subscripts",
    ["ii", "ii->i", "iij->j", "iji", "i...i->...i", "...ii", "iii->i", "ii j->ji", "iij,jk->ik"],
)
def test_einsum_of_a_letter_twice_is_of_the_diagonal(subscripts: str) -> None:
    draw = np.random.default_rng(0)
    shapes = {"ii": (6, 6), "ii->i": (6, 6), "iii->i": (4, 4, 4), "...ii": (2, 3, 4, 4)}
    first = {"iji": (4, 6, 4), "i...i->...i": (4, 2, 3, 4)}.get(subscripts, (4, 4, 6))
    data = [draw.normal(size=shapes.get(subscripts, first))]
    if "," in subscripts:
        data.append(draw.normal(size=(6, 2)))
    expected = np.einsum(subscripts, *data)
    cuts = [None, *(spec(DeviceMesh.of(x=2, y=2), text) for text in ("x", "y x", "x@cyclic1"))]
    for cut in cuts:
        given = [sp.array(one) for one in data]
        if cut is not None:
            dims = [cut.dim_specs[0], *[DimSpec([])] * (data[0].ndim - 1)]
            given[0] = given[0].shard(ShardingSpec(cut.mesh, dims))
        found = sp.einsum(subscripts, *given)
        np.testing.assert_allclose(found.to_dense(), expected, 1e-12, 1e-12)

        def value(x: Any, *others: Any) -> Any:
            return sp.sum(sp.sin(sp.einsum(subscripts, x, *others)))

        slope = sp.grad(value)(*given)
        # Of an element off the diagonal nothing depends.
        step = 1e-6 * draw.normal(size=data[0].shape)
        ends = (
            np.sin(np.einsum(subscripts, data[0] + way * step, *data[1:])).sum() for way in (1, -1)
        )
        change = next(ends) - next(ends)
        np.testing.assert_allclose((slope.to_dense() * step).sum() * 2, change, 1e-5, 1e-12)
