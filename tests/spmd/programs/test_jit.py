"""Jitted functions: their results, how often they are traced, what they leave out, and errors."""

from __future__ import annotations

import runpy
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, PlanError, ShardError, SpecError, UsageError
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.shards.runner import InProcess
from spmd.traced_functions import FUNCTIONS, Traced

MESH = DeviceMesh.of(x=2, y=3)
STRATEGIES = ["eager", "basic", "aggressive", "widest", "cost"]


def rows(data: Any, text: str = "x, -") -> sp.ShardedArray:
    return sp.array(np.asarray(data, dtype="float64"), spec(MESH, text))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_a_program_gives_what_the_function_gives(case: Traced, strategy: str, library: str) -> None:
    jitted = sp.jit(case.function, strategy=strategy)
    with sp.running(sp.in_process(library)):
        for factor in (1.0, 2.0, -0.5):
            arrays = [one * factor for one in case.arrays()]
            given = [
                sp.array(one, kind.spec) for one, kind in zip(arrays, case.types(), strict=True)
            ]
            found = list(leaves(jitted(*given)))
            # The function itself, on whole arrays: shardings decide nothing about numbers.
            expected = list(leaves(case.function(*(sp.array(one) for one in arrays))))
            assert [path for path, _ in found] == [path for path, _ in expected]
            for (_, one), (_, other) in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-12, 1e-12)
    assert jitted.traced_count == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_results_lie_as_the_trace_says(case: Traced, strategy: str) -> None:
    jitted = sp.jit(case.function, strategy=strategy)
    given = [sp.array(a, k.spec) for a, k in zip(case.arrays(), case.types(), strict=True)]
    traced = jitted.trace(*case.types())
    for _ in range(2):
        assert tuple(one.type for _, one in leaves(jitted(*given))) == traced.outputs


def test_a_kind_of_arguments_is_traced_once() -> None:
    seen = []

    def f(x: Any, scale: float, *, name: str = "a") -> Any:
        seen.append((x.type, scale, name))
        return {"y": x * scale, "name": name, "none": None}

    jitted = sp.jit(f)
    x = rows(np.ones((4, 6)))
    for _ in range(3):
        assert jitted(x, 2.0)["y"].to_dense()[0, 0] == 2.0
    assert len(seen) == 1
    calls = [
        (x, 3.0),
        (x, 3),
        (x, True),
        (x.shard(spec(MESH, "y, -")), 2.0),
        (rows(np.ones((2, 6))), 2.0),
        (sp.astype(x, "float32"), 2.0),
        (np.ones((4, 6)), 2.0),
        (torch.ones((4, 6)), 2.0),
    ]
    for n, arguments in enumerate(calls):
        for _ in range(2):
            assert jitted(*arguments)["y"].to_dense()[0, 0] == float(arguments[1])
        assert (len(seen), jitted.traced_count) == (n + 2, n + 2)
    found = jitted(x, 2.0, name="b")
    assert (found["name"], found["none"], jitted.traced_count) == ("b", None, 10)
    assert jitted(x, scale=2.0)["y"].to_dense()[0, 0] == 2.0
    assert jitted.__name__ == "f"


def test_numbers_that_are_none_are_one_kind() -> None:
    jitted = sp.jit(lambda x, n: x * n)
    for _ in range(2):
        assert np.isnan(jitted(rows(np.ones((2, 2))), float("nan")).to_dense()).all()
    assert jitted.traced_count == 1
    assert str(jitted(rows(np.ones((2, 2))), 0.0).to_dense()[0, 0]) == "0.0"
    assert str(jitted(rows(np.ones((2, 2))), -0.0).to_dense()[0, 0]) == "-0.0"


def test_common_values_are_computed_once_and_dead_ones_never() -> None:
    def f(x: Any) -> Any:
        sp.sin(x) @ sp.cos(x.T)
        return sp.exp(x * 2.0) + sp.exp(x * 2.0), sp.exp(x * 2)

    traced = sp.jit(f).trace(rows(np.ones((4, 4))))
    names = [one.operation.operator for one in traced.operations]
    # 2 and 2.0 are different numbers, which could make different types.
    assert names == ["multiply", "exp", "add", "multiply", "exp"]


def test_what_is_common_moves_once() -> None:
    runner = InProcess(sp.in_process().library)
    moves = []
    make = runner._make_movement

    def counted(*given: Any) -> Any:
        move = make(*given)

        def moved(shards: Any) -> Any:
            moves.append(given[1])
            return move(shards)

        return moved

    runner._make_movement = counted  # type: ignore[method-assign]
    mesh = DeviceMesh.of(tp=4)
    with sp.running(runner):
        x = sp.array(np.ones((8, 4)), spec(mesh, "tp, -"))
        weights = [sp.array(np.full((4, 64), n), spec(mesh, "-, tp")) for n in range(3)]

        def heads(x: Any, weights: Any) -> Any:
            return [(x @ w).shard(spec(mesh, "-, tp")) for w in weights]

        for strategy in STRATEGIES:
            jitted = sp.jit(heads, strategy=strategy)
            for _ in range(3):
                moves.clear()
                found = jitted(x, weights)
            assert [str(one) for one in moves] == ["-, -"]
            assert [one.to_dense()[0, 0] for one in found] == [0.0, 4.0, 8.0]


def test_gradients_in_programs_and_programs_in_gradients() -> None:
    def loss(p: dict[str, Any], x: Any) -> Any:
        return sp.mean(sp.square(sp.silu(x @ p["up"]) @ p["down"] - x))

    random = np.random.default_rng(5)
    p = {
        "up": rows(random.normal(size=(6, 8)), "-, y"),
        "down": rows(random.normal(size=(8, 6)), "y, -"),
    }
    x = rows(random.normal(size=(4, 6)))
    value, gradients = sp.value_and_grad(loss)(p, x)
    for strategy in STRATEGIES:
        step = sp.jit(sp.value_and_grad(loss), strategy=strategy)
        for _ in range(3):
            found, slopes = step(p, x)
            np.testing.assert_allclose(float(found), float(value), 1e-12)
            for name, one in slopes.items():
                assert one.spec is p[name].spec
                np.testing.assert_allclose(one.to_dense(), gradients[name].to_dense(), 1e-12, 1e-14)
        inner = sp.jit(loss, strategy=strategy)
        for _ in range(3):
            found, slopes = sp.value_and_grad(inner)(p, x)
            np.testing.assert_allclose(float(found), float(value), 1e-12)
            for name, one in slopes.items():
                np.testing.assert_allclose(one.to_dense(), gradients[name].to_dense(), 1e-12, 1e-14)
        assert sp.jit(sp.value_and_grad(inner))(p, x)[1].keys() == p.keys()
        assert inner.traced_count == 1


def test_a_training_step_is_one_program() -> None:
    adam = sp.AdamW(learning_rate=1e-2)

    def loss(w: Any, x: Any) -> Any:
        return sp.mean(sp.square(x @ w - 1.0))

    def step(w: Any, state: Any, x: Any) -> Any:
        value, slope = sp.value_and_grad(loss)(w, x)
        return value, *adam.update(w, slope, state)

    random = np.random.default_rng(6)
    x, w = rows(random.normal(size=(8, 6))), rows(random.normal(size=(6, 2)), "y, -")
    jitted = sp.jit(step)
    plain, program = (w, adam.init(w)), (w, adam.init(w) | {"step": sp.array(0)})
    for _ in range(5):
        expected, *plain = step(*plain, x)
        found, *program = jitted(*program, x)
        np.testing.assert_allclose(float(found), float(expected), 1e-12)
    assert int(program[1]["step"]) == plain[1]["step"] == 5
    # What a step makes may lie otherwise than what the first one was given.
    assert jitted.traced_count <= 2
    np.testing.assert_allclose(program[0].to_dense(), plain[0].to_dense(), 1e-12)


def test_pytorchs_gradients_go_through_a_program() -> None:
    leaf = torch.arange(8.0, dtype=torch.float64).reshape(4, 2).requires_grad_()
    jitted = sp.jit(lambda x: sp.sum(sp.square(x.shard(spec(MESH, "-, x")))))
    for _ in range(3):
        leaf.grad = None
        jitted(sp.array(leaf, spec(MESH, "x, -"))).to_dense().backward()
        np.testing.assert_allclose(leaf.grad, 2 * leaf.detach())


def test_infinite_factors_of_contributions() -> None:
    jitted = sp.jit(lambda a, b, w: (a @ b) * w)
    a, b = rows([[3.0, -1.0]], "-, x"), rows([[1.0], [1.0]], "x, -")
    for number in (2.0, np.inf, 3.0, -np.inf):
        found = jitted(a, b, sp.array(np.full((1, 1), number)))
        assert found.to_dense()[0, 0] == 2.0 * number


def test_a_program_reads_what_tensors_are() -> None:
    data = torch.ones((4, 2), dtype=torch.float64)
    x = sp.array(data, spec(MESH, "x, -"))
    jitted = sp.jit(lambda x: (x, x.T, x.shard(spec(MESH, "-, -")) + 1.0))
    for number in (1.0, 5.0, 7.0):
        data[:] = number
        same, turned, more = jitted(x)
        assert same is x
        assert (more.to_dense() == number + 1.0).all()
        # Views of what was given keep nothing.
        assert turned.is_given
        turned.shard(spec(MESH, "-, -"))
        data[:] = 9.0
        assert (turned.shard(spec(MESH, "-, -")).to_dense() == 9.0).all()


def test_methods_and_nested_programs() -> None:
    class Model:
        weight = 3.0

        @sp.jit
        def apply(self, x: Any) -> Any:
            return x * self.weight

    model = Model()
    x = rows(np.ones((2, 2)))
    assert model.apply(x).to_dense()[0, 0] == 3.0
    outer = sp.jit(lambda x: model.apply(x) + 1.0)
    assert outer(x).to_dense()[0, 0] == 4.0
    names = [one.operation.operator for one in outer.trace(x).operations]
    assert names == ["multiply", "add"]


def test_recorders_see_the_operations() -> None:
    class Ledger:
        def __init__(self) -> None:
            self.names: list[str] = []

        def record(self, call: Any, operands: Any, results: Any) -> None:
            self.names.append(call.name)

        def record_reshard(self, operand: Any, result: Any) -> None:
            self.names.append("reshard")

        def record_movement(self, call: Any, operand: Any, spec: Any) -> None:
            self.names.append(f"{call.name} moves {operand.spec} to {spec}")

    jitted = sp.jit(lambda x: sp.exp(x) + sp.exp(x))
    turned, apart = sp.jit(lambda x: sp.exp(x) @ x), lambda x: sp.exp(x) @ x
    x = rows(np.ones((2, 2)))
    moved = ["exp", "matmul moves x, - to -, -", "matmul"]
    for _ in range(2):
        for function, names in ((jitted, ["exp", "add"]), (turned, moved), (apart, moved)):
            ledger = Ledger()
            with sp.recording(ledger):
                function(x)
            assert ledger.names == names
            function(x)


def test_memory_stays_within_the_stated_peak() -> None:
    def f(x: Any) -> Any:
        for _ in range(30):
            x = sp.sin(x) * 2.0
        return x

    x = rows(np.ones((400, 400)))
    jitted = sp.jit(f)
    stated = sum(jitted.trace(x).peak_bytes.values())
    jitted(x)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        jitted(x)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # The argument is held before; a kernel's own values are small.
    own = 6 * 200 * 400 * 8
    assert own < peak <= stated - own + 100_000 < 4 * own


def test_threads_share_programs() -> None:
    jitted = sp.jit(lambda x, n: sp.sum(x * n, axis=1))
    x = rows(np.ones((4, 6)))

    def work(number: int) -> bool:
        return all((jitted(x, n).to_dense() == 6 * n).all() for n in [number % 3, 1] * 20)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    assert jitted.traced_count == 3


def test_a_thread_s_recorder_sees_that_thread_alone() -> None:
    class Names:
        def __init__(self) -> None:
            self.found: list[str] = []

        def record(self, call: Any, operands: Any, results: Any) -> None:
            self.found.append(call.name)

        def record_reshard(self, operand: Any, result: Any) -> None:
            self.found.append("reshard")

    names, x = Names(), rows(np.ones((2, 2)))
    with ThreadPoolExecutor(1) as pool, sp.recording(names):
        pool.submit(lambda: sp.sin(x)).result()
        sp.cos(x)
        pool.submit(lambda: sp.jit(sp.tan)(x)).result()
    assert names.found == ["cos"]


def test_many_kinds_are_warned_of() -> None:
    jitted = sp.jit(lambda x, n: x * n)
    x = rows(np.ones((2, 2)))
    with pytest.warns(UserWarning, match=r"was traced 16 times by sp\.jit"):
        _ = [jitted(x, n) for n in range(16)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(x, 99)


def test_errors() -> None:
    x = rows(np.ones((2, 2)))

    def chooses(x: Any) -> Any:
        return x if x[0, 0] > 0 else -x

    with pytest.raises(UsageError, match=r"bool\(x\), float\(x\).* sp.where"):
        sp.jit(chooses)(x)
    with pytest.raises(UsageError, match="the elements of"):
        sp.jit(lambda x: x[x > 0])(x)
    with pytest.raises(UsageError, match=r"sp\.jit of 3, a int"):
        sp.jit(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown strategy 'best'"):
        sp.jit(chooses, strategy="best")
    with pytest.raises(UsageError, match="a set that cannot be compared"):
        sp.jit(lambda x, s: x)(x, {1})
    with pytest.raises(UsageError, match=r"has no elements.*f\.trace"):
        sp.jit(lambda x: x)(sp.abstract((2, 2)))
    with pytest.raises((SpecError, ShardError)):
        sp.jit(lambda x, y: x @ y)(x, rows(np.ones((3, 2))))
    # Elements that a kernel refuses are told as those of an operation by itself.
    choose = sp.jit(lambda x, n: sp.take(x, n))
    whole, beyond = sp.array([4, 6], spec(MESH, "x")), sp.array([0, 7])
    with pytest.raises(ArrayIndexError) as eager:
        sp.take(whole, beyond)
    for _ in range(2):
        assert choose(whole, sp.array([1, 0])).to_dense().tolist() == [6, 4]
        with pytest.raises(ArrayIndexError) as program:
            choose(whole, beyond)
        assert str(program.value) == str(eager.value)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "programs.py"
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " ".join(["float64[64, 256]"] * 3)


def test_gradients_of_what_a_program_computes_of_arrays_from_elsewhere() -> None:
    x, w = (rows(np.random.default_rng(n).normal(size=(4, 4)), ("x, -", "-, y")[n]) for n in (0, 1))

    def value(x: Any, w: Any, run: Any) -> Any:
        def inner(h: Any) -> Any:
            # Computed when the function is traced, and a constant of its program.
            h = h @ (w * 2.0).shard(spec(MESH, "y, x"))
            return h + sp.cond(sp.sum(h) > -99, lambda h: h @ sp.sin(w), lambda h: h, h)

        return sp.sum(sp.sin(run(inner)(x)))

    expected = sp.grad(lambda x, w: value(x, w, lambda f: f), (0, 1))(x, w)
    again = lambda f: sp.rematerialized(lambda h: sp.jit(f)(h))  # noqa: E731
    for run in (sp.jit, again):
        found = sp.grad(lambda x, w: value(x, w, run), (0, 1))(x, w)  # noqa: B023
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-11, 1e-13)

    def reads(w: Any) -> Any:
        return sp.sum(sp.jit(lambda h: h * float(sp.sum(w)))(x))

    with pytest.raises(UsageError, match="were asked for within a function"):
        sp.grad(reads)(w)


def test_a_program_in_a_program_reads_the_arrays_around_it() -> None:
    x, y = sp.array([1.0, 2.0]), sp.array([3.0, 5.0])
    outer = sp.jit(lambda x: sp.jit(lambda: x * 2)() + sp.jit(lambda y: x * y)(y))
    for _ in range(2):
        assert outer(x).to_dense().tolist() == [5.0, 14.0]


MEMORY_LIMIT_MESH = DeviceMesh.of(x=4)


def chain(x: Any, w: Any) -> Any:
    for _ in range(4):
        x = sp.tanh(x @ w)
    return sp.sum(x * x)


def arguments() -> tuple[sp.ShardedArray, sp.ShardedArray]:
    generator = np.random.default_rng(0)
    x = sp.array(generator.normal(size=(4096, 16)), spec(MEMORY_LIMIT_MESH, "x, -"))
    return x, sp.array(generator.normal(size=(16, 16)) / 4, spec(MEMORY_LIMIT_MESH, "-, -"))


def peak(program: Any, *given: Any) -> int:
    return max(program.trace(*given).peak_bytes.values())


def test_a_placement_within_the_limit_is_the_strategys_own() -> None:
    given = arguments()
    free = sp.jit(chain, strategy="basic")
    limited = sp.jit(chain, strategy="basic", live_bytes=peak(free, *given))
    assert str(limited.trace(*given)) == str(free.trace(*given))
    assert float(limited(*given)) == float(free(*given))


def test_another_strategy_keeps_the_limit() -> None:
    given = arguments()
    # Few bytes, so that times are latencies: "cost" has all of it on every rank.
    peaks = {one: peak(sp.jit(chain, strategy=one), *given) for one in ("cost", "basic")}
    assert peaks["cost"] > 2 * peaks["basic"]
    limited = sp.jit(chain, strategy="cost", live_bytes=peaks["basic"])
    traced = limited.trace(*given)
    assert traced.strategy != "cost"
    assert max(traced.peak_bytes.values()) <= peaks["basic"]
    np.testing.assert_allclose(float(limited(*given)), float(chain(*given)), rtol=1e-12)
    assert limited.traced_count == 1


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    given = arguments()
    arguments_bytes = 4096 * 16 * 8 // 4 + 16 * 16 * 8
    limited = sp.jit(chain, live_bytes=arguments_bytes)
    with pytest.raises(PlanError) as refused:
        limited(*given)
    text = str(refused.value)
    found = peak(sp.jit(chain), *given)
    assert "sp.jit of <function chain" in text and "'eager'" in text
    assert f"holds {found:,} bytes on rank 0 at %" in text and "tanh(" in text
    assert f"live_bytes={arguments_bytes:,}" in text
    # What it says is enough.
    least = int(text.split("Give live_bytes=")[1].split(". ")[0].split(", cut")[0].replace(",", ""))
    assert float(sp.jit(chain, live_bytes=least)(*given)) == float(chain(*given))
    with pytest.raises(PlanError, match="with its arguments alone"):
        sp.jit(lambda x: x, live_bytes=8).trace(given[0])
    of_one = sp.jit(lambda x: x + 1.0, live_bytes=8)
    with pytest.raises(PlanError, match="more than live_bytes=8"):
        of_one(sp.ones((4,)))


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "8GiB"])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(UsageError, match="live_bytes="):
        sp.jit(chain, live_bytes=limit)


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive"])
def test_a_program_holds_what_its_trace_says(strategy: str) -> None:
    """One rank, whose arrays are all that this process has."""
    mesh = DeviceMesh.of(x=1)

    def f(x: Any, w: Any) -> Any:
        kept = []
        for _ in range(5):
            x = sp.tanh(x @ w)
            kept.append(x)
        for one in reversed(kept):
            x = sp.cos(x * one)
        return x

    generator = np.random.default_rng(0)
    x = sp.array(generator.normal(size=(8192, 16)), spec(mesh, "x, -"))
    w = sp.array(generator.normal(size=(16, 16)), spec(mesh, "-, -"))
    program = sp.jit(f, strategy=strategy)
    stated = peak(program, x, w) - (8192 + 16) * 16 * 8
    array_bytes = 8192 * 16 * 8
    # The first call; and the program, which writes the last result into what it is made of.
    for reused_bytes in (0, array_bytes):
        tracemalloc.start()
        try:
            result = program(x, w)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        del result
        assert 0 <= held - (stated - reused_bytes) < 256 << 10
