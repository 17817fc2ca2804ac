"""Scans, conditions and while loops: eager and in programs, their gradients, and errors."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import PlanError, UsageError

MESH = DeviceMesh.of(x=2, y=3)
WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda f: f,
    "jit": sp.jit,
    "basic": lambda f: sp.jit(f, strategy="basic"),
    "aggressive": lambda f: sp.jit(f, strategy="aggressive"),
}
RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(6, 6)) / 3
XS = RANDOM.normal(size=(5, 4, 6))


def sharded(data: Any, text: str) -> sp.ShardedArray:
    return sp.array(np.asarray(data, dtype="float64"), spec(MESH, text))


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Any:
    return WAYS[request.param]


def recurrence(w: Any, h: Any, xs: Any) -> Any:
    """`w` is read from outside of the body."""
    return sp.scan(lambda h, x: ((found := sp.tanh(h @ w + x)), found * 2.0), h, xs)


def by_hand(w: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    h, ys = np.zeros((4, 6)), []
    for x in xs[::-1] if reverse else xs:
        h = np.tanh(h @ w + x)
        ys.append(h * 2.0)
    return h, np.stack(ys[::-1] if reverse else ys)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("texts", [("-, y", "x, -", "-, x, y"), ("x, y", "-, -", "x, -, -")])
def test_scan(way: Any, library: str, texts: tuple[str, ...]) -> None:
    with sp.running(sp.in_process(library)):
        run = way(recurrence)
        for scale in (1.0, 0.5, 2.0):
            w, h, xs = map(sharded, (W * scale, np.zeros((4, 6)), XS), texts)
            last, ys = run(w, h, xs)
            expected = by_hand(W * scale, XS)
            np.testing.assert_allclose(last.to_dense(), expected[0], 1e-12, 1e-13)
            np.testing.assert_allclose(ys.to_dense(), expected[1], 1e-12, 1e-13)


def test_scan_backwards_of_trees_and_by_length(way: Any) -> None:
    def f(w: Any, xs: Any) -> Any:
        start = {"h": sp.zeros((4, 6)), "n": sp.array(0)}

        def body(c: Any, x: Any) -> Any:
            h = sp.tanh(c["h"] @ w + x[0])
            return {"h": h, "n": c["n"] + 1}, (h * 2.0, None)

        return sp.scan(body, start, [xs], reverse=True)

    run = way(f)
    counted = way(lambda x: sp.scan(lambda c, _: (c * 2.0, None), x, length=3))
    for _ in range(2):
        last, (ys, nothing) = run(sharded(W, "-, y"), sharded(XS, "-, x, -"))
        assert (int(last["n"]), nothing) == (5, None)
        np.testing.assert_allclose(ys.to_dense(), by_hand(W, XS, reverse=True)[1], 1e-12, 1e-13)
        assert float(counted(sp.array(1.5))[0]) == 12.0


def test_scans_of_no_places_collect_no_rows(way: Any) -> None:
    def run(c: Any, xs: Any) -> Any:
        return sp.scan(lambda c, x: (c + sp.sum(x), {"twice": x * 2, "sum": sp.sum(x)}), c, xs)

    program = way(run)
    for _ in range(2):
        last, ys = program(sp.array(3.0), sp.array(np.zeros((0, 4)), spec(MESH, "-, x")))
        assert float(last) == 3.0
        assert ys["twice"].shape == (0, 4) and str(ys["twice"].spec) == "-, x"
        assert ys["sum"].shape == (0,) and ys["sum"].dtype is sp.float64


def test_a_scan_is_one_operation_of_a_program() -> None:
    jitted = sp.jit(recurrence)
    given = (sharded(W, "-, y"), sharded(np.zeros((4, 6)), "x, -"), sharded(XS, "-, x, y"))
    traced = jitted.trace(*given)
    assert [one.operation.operator for one in traced.operations] == ["scan"]
    found = jitted(*given)
    assert tuple(one.type for one in found) == traced.outputs


def test_gradients_of_scans() -> None:
    def loss(w: Any, h: Any, xs: Any) -> Any:
        last, ys = recurrence(w, h, xs)
        return sp.sum(last * last) + sp.sum(ys)

    def plain(w: Any) -> float:
        last, ys = by_hand(w, XS)
        return float(np.sum(last * last) + np.sum(ys))

    h, xs = sharded(np.zeros((4, 6)), "x, -"), sharded(XS, "-, x, y")
    for gradient in (sp.grad(loss), sp.jit(sp.grad(loss)), sp.grad(sp.jit(loss))):
        for _ in range(2):
            slope = gradient(sharded(W, "-, y"), h, xs)
            assert str(slope.spec) == "-, y"
            for place in ((0, 0), (3, 4)):
                step = np.zeros_like(W)
                step[place] = 1e-6
                expected = (plain(W + step) - plain(W - step)) / 2e-6
                np.testing.assert_allclose(slope.to_dense()[place], expected, 1e-6)


def chosen(x: Any, w: Any) -> Any:
    """`w` is read from outside of one branch."""
    return sp.cond(sp.sum(x) > 0, lambda x: {"y": x @ w}, lambda x: {"y": -x}, x)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_cond(way: Any, library: str) -> None:
    with sp.running(sp.in_process(library)):
        run = way(chosen)
        for sign in (1.0, -1.0, 1.0, -2.0):
            data = np.ones((4, 6)) * sign
            found = run(sharded(data, "x, -"), sharded(W, "-, y"))["y"]
            expected = data @ W if sign > 0 else -data
            np.testing.assert_allclose(found.to_dense(), expected, 1e-12)


def test_one_branch_is_computed() -> None:
    # The other one would refuse its elements.
    def f(x: Any, places: Any) -> Any:
        return sp.cond(sp.max(places) < 4, lambda: sp.take(x, places), lambda: sp.zeros((1,)))

    jitted = sp.jit(f)
    x = sharded([1.0, 2.0, 3.0, 4.0], "x")
    for place, expected in ((2, 3.0), (9, 0.0), (1, 2.0), (99, 0.0)):
        assert jitted(x, sp.array([place])).to_dense().tolist() == [expected]
    assert jitted.traced_count == 1


def test_gradients_of_cond() -> None:
    def loss(x: Any, w: Any) -> Any:
        return sp.sum(sp.square(chosen(x, w)["y"]))

    jitted = [
        sp.value_and_grad(loss, argnums=(0, 1)),
        sp.jit(sp.value_and_grad(loss, argnums=(0, 1))),
        sp.value_and_grad(sp.jit(loss), argnums=(0, 1)),
    ]
    for sign in (1.0, -1.0, 2.0):
        data = RANDOM.uniform(size=(4, 6)) * sign
        for run in jitted:
            value, (dx, dw) = run(sharded(data, "x, -"), sharded(W, "-, y"))
            y = data @ W if sign > 0 else -data
            np.testing.assert_allclose(float(value), np.sum(y * y), 1e-12)
            np.testing.assert_allclose(dx.to_dense(), 2 * y @ W.T if sign > 0 else -2 * y, 1e-11)
            expected = 2 * data.T @ y if sign > 0 else np.zeros((6, 6))
            np.testing.assert_allclose(dw.to_dense(), expected, 1e-11)
            assert (str(dx.spec), str(dw.spec)) == ("x, -", "-, y")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_while_loop(way: Any, library: str) -> None:
    def f(x: Any, by: Any) -> Any:
        start = (x, sp.array(0))
        return sp.while_loop(
            lambda c: sp.max(c[0]) > by[0], lambda c: (c[0] / by[1], c[1] + 1), start
        )

    with sp.running(sp.in_process(library)):
        run = way(f)
        for most in (12.0, 0.5, 100.0):
            data = np.full((4, 6), most)
            x, count = run(sharded(data, "x, y"), [sp.array(1.0), sharded(2.0, "")])
            expected = 0
            while data.max() > 1:
                data, expected = data / 2, expected + 1
            assert int(count) == expected
            np.testing.assert_allclose(x.to_dense(), data, 1e-12)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("name", ["scan", "cond", "while_loop", "eagerly"])
def test_a_trace_counts_what_loops_hold_within(name: str, overlap: int) -> None:
    size = 1 << 15

    def deep(x: Any) -> Any:
        once = sp.sin(x)
        return once * sp.cos(sp.cos(once))

    functions: dict[str, Callable[[Any], Any]] = {
        "scan": lambda x: sp.scan(lambda c, _: (deep(c), c * 2.0), x, length=5),
        "cond": lambda x: sp.cond(sp.sum(x) > 0, deep, lambda x: x * 1.0, x),
        "while_loop": lambda x: sp.while_loop(lambda x: sp.sum(x) > 0.1, deep, x),
        "eagerly": sp.eagerly(lambda x: sp.sort(deep(deep(x)))),
    }
    program = sp.jit(functions[name], overlap=overlap)
    x = sharded(RANDOM.uniform(0.5, 1.0, size), "x y")
    for _ in range(2):
        program(x)
    tracemalloc.start()
    # What was made before has memory, too.
    x = x * 1.0
    tracemalloc.reset_peak()
    program(x)
    measured = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    traced = program.trace(x)
    said = sum(traced.peak_bytes.values())
    assert measured - size < said < 2 * measured, (measured / size / 8, said / size / 8)
    # No less than the argument and two values, which the results alone are not.
    assert said >= 4 * size * 8
    with pytest.raises(PlanError, match="more than live_bytes"):
        sp.jit(functions[name], live_bytes=max(traced.peak_bytes.values()) - 1).trace(x)


def test_what_is_carried_stays_as_it_lies(way: Any) -> None:
    # Each step's product is cut another way, or pending, and the next one begins as the first.
    def f(x: Any, w: Any) -> Any:
        return sp.scan(lambda c, _: (c @ w, c), x, length=4)

    last, ys = way(f)(sharded(np.ones((4, 6)), "-, y"), sharded(W, "y, x"))
    expected = [np.ones((4, 6))]
    for _ in range(4):
        expected.append(expected[-1] @ W)
    np.testing.assert_allclose(last.to_dense(), expected[-1], 1e-12, 1e-14)
    np.testing.assert_allclose(ys.to_dense(), np.stack(expected[:4]), 1e-12, 1e-14)


def test_loops_within_loops(way: Any) -> None:
    def f(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            c = sp.while_loop(lambda d: sp.max(d) < 100, lambda d: d * 3.0, c)
            return sp.cond(sp.min(c) > 150, lambda: c / 50.0, lambda: c / 100.0), None

        return sp.scan(body, x, length=3)[0]

    run = way(f)
    for start in (1.0, 2.0):
        x = start
        for _ in range(3):
            while x < 100:
                x *= 3
            x = x / 50 if x > 150 else x / 100
        assert run(sharded(np.full((4,), start), "x")).to_dense().tolist() == [x] * 4


def test_errors(way: Any) -> None:
    x = sharded(np.ones((4, 6)), "x, -")

    def refused(match: str, f: Any, *arguments: Any) -> None:
        with pytest.raises(UsageError, match=match):
            way(f)(*arguments)

    refused(
        r"what is carried float64\[4, 6\] at one place, and then float64\[4\];",
        lambda x: sp.scan(lambda c, _: (sp.sum(c, axis=1), None), x, length=2),
        x,
    )
    refused("a pair of what is carried", lambda x: sp.scan(lambda c, _: c, x, length=2), x)
    refused("one first dimension", lambda x: sp.scan(lambda c, y: (c, y), x, [x, x[:2]]), x)
    refused("and length=", lambda x: sp.scan(lambda c, y: (c, y), x), x)
    refused("decided by float64", lambda x: sp.cond(sp.sum(x), lambda: x, lambda: x), x)
    refused("decided by bool", lambda x: sp.while_loop(lambda c: c > 0, lambda c: c, x), x)
    refused("a function was expected", lambda x: sp.cond(sp.sum(x) > 0, x, x), x)
    refused(
        r"the gradient of sp\.while_loop: .* use sp\.scan",
        sp.grad(lambda x: sp.sum(sp.while_loop(lambda c: sp.max(c) < 9, lambda c: c * 2.0, x))),
        x,
    )


def test_dictionaries_belong_together_by_their_keys(way: Any) -> None:
    def turned(c: Any) -> Any:
        return {"b": [c["b"][0] * 2.0], "a": c["a"] + 1.0}

    def of_scan(c: Any) -> Any:
        return sp.scan(lambda c, _: (turned(c), turned(c)), c, length=3)

    def of_cond(c: Any) -> Any:
        # Either branch is taken once.
        return [
            sp.cond(sp.sum(c["a"]) > least, turned, lambda c: {"a": c["a"], "b": c["b"]}, c)
            for least in (0.0, 100.0)
        ]

    def of_while(c: Any) -> Any:
        return sp.while_loop(lambda c: sp.max(c["a"]) < 4.0, turned, c)

    def given() -> Any:
        return {"a": sharded([1.0, 1.0], "x"), "b": [sharded([1.0, 1.0, 1.0], "y")]}

    def elements(found: Any) -> Any:
        return {key: np.asarray(one).tolist() for key, one in flat(found).items()}

    def flat(found: Any) -> Any:
        return {"a": found["a"].to_dense(), "b": found["b"][0].to_dense()}

    run_scan, run_cond, run_while = map(way, (of_scan, of_cond, of_while))
    for _ in range(2):
        last, ys = run_scan(given())
        assert list(last) == ["a", "b"]
        assert elements(last) == {"a": [4.0] * 2, "b": [8.0] * 3}
        rows = {"a": [[n] * 2 for n in (2.0, 3.0, 4.0)], "b": [[n] * 3 for n in (2.0, 4.0, 8.0)]}
        assert elements(ys) == rows
        taken, other = run_cond(given())
        assert elements(taken) == {"a": [2.0] * 2, "b": [2.0] * 3}
        assert elements(other) == {"a": [1.0] * 2, "b": [1.0] * 3}
        assert elements(run_while(given())) == {"a": [4.0] * 2, "b": [8.0] * 3}


def test_gradients_match_dictionaries_of_branches_by_key() -> None:
    def loss(x: Any) -> Any:
        found = sp.cond(
            sp.sum(x) > 0, lambda x: {"p": x * 2.0, "q": x}, lambda x: {"q": x, "p": x * 3.0}, x
        )
        return sp.sum(found["p"]) + 10.0 * sp.sum(found["q"])

    gradient = sp.jit(sp.grad(loss))
    for start, slope in ((1.0, 12.0), (-1.0, 13.0), (1.0, 12.0)):
        assert gradient(sharded([start] * 4, "x")).to_dense().tolist() == [slope] * 4


def test_other_keys_are_named(way: Any) -> None:
    x = sharded(np.ones(4), "x")
    message = r"what is carried at 1 places, .* 1 \(\['a'\]\) have nothing, 1 \(\['b'\]\) are not"
    with pytest.raises(UsageError, match=message):
        way(lambda x: sp.scan(lambda c, _: ({"b": c["a"]}, None), {"a": x}, length=2))(x)
    with pytest.raises(UsageError, match=message):
        way(lambda x: sp.while_loop(lambda c: sp.sum(c["a"]) < 9, lambda c: {"b": x}, {"a": x}))(x)


def test_a_scan_collects_the_same_at_every_place() -> None:
    x, turns = sharded(np.ones(4), "x"), iter([1, 2, 3])

    def body(c: Any, _: Any) -> Any:
        return c, {"a": c if next(turns) < 3 else None}

    with pytest.raises(UsageError, match=r"what is collected float64\[4\] .* and then None"):
        sp.scan(body, x, length=3)


def test_numbers_of_branches_are_arrays(way: Any) -> None:
    run = way(lambda x: sp.cond(sp.sum(x) > 0, lambda: 1.0, lambda: 2.0))
    for start, expected in ((1.0, 1.0), (-1.0, 2.0), (1.0, 1.0)):
        assert float(run(sharded([start] * 4, "x")).to_dense()) == expected


def test_functions_of_cond_return_the_same_trees_and_kinds() -> None:
    x = sharded(np.ones((4, 6)), "x, -")
    f = sp.jit(lambda x: sp.cond(sp.sum(x) > 0, lambda: x, lambda: sp.sum(x, axis=0)))
    with pytest.raises(UsageError, match=r"its functions return float64\[4, 6\]"):
        f(x)
    f = sp.jit(lambda x: sp.cond(sp.sum(x) > 0, lambda: {"a": x}, lambda: {"b": x}))
    with pytest.raises(UsageError, match="what its second function gives at 1 places"):
        f(x)


def _turned(x: Any, w: Any) -> Any:
    return sp.tanh(x @ w)


INNER: dict[str, Callable[[Any, Any], Any]] = {
    "cond": lambda x, w: sp.cond(sp.sum(x) > -99, lambda x: _turned(x, w), lambda x: x, x),
    "scan": lambda x, w: sp.scan(lambda c, _: (_turned(c, w), None), x, length=2)[0],
    "eagerly": lambda x, w: sp.eagerly(_turned)(x, w),
    "sort": lambda x, w: sp.sort(sp.reshape(x @ w, (-1,)).shard(spec(MESH, "x y"))),
}


@pytest.mark.parametrize("name", list(INNER))
def test_gradients_of_what_stands_in_a_branch(name: str, way: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        branches = lambda x: INNER[name](x, w), lambda x: INNER[name](-x, w)
        return sp.sum(sp.sin(sp.cond(sp.sum(x) > 0, *branches, x)))

    w = sharded(W, "y, -")
    slopes = way(sp.grad(f, (0, 1)))
    for data in (XS[0], -XS[0]):
        x = sharded(data, "x, y")
        sign = 1.0 if data.sum() > 0 else -1.0
        expected = sp.grad(lambda x, w: sp.sum(sp.sin(INNER[name](sign * x, w))), (0, 1))(x, w)  # noqa: B023
        for _ in range(2):
            for one, other in zip(slopes(x, w), expected, strict=True):
                np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-12)


def test_a_loop_without_gradient_is_refused_in_a_branch_too(way: Any) -> None:
    def f(x: Any) -> Any:
        halve = lambda x: sp.while_loop(lambda c: sp.max(c) > 1, lambda c: c / 2, x)  # noqa: E731
        return sp.sum(sp.cond(sp.max(x) > 0, halve, lambda x: x, x))

    with pytest.raises(UsageError, match=r"the gradient of sp\.while_loop"):
        way(sp.grad(f))(sharded([3.0, 4.0], "x"))
