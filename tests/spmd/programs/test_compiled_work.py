"""Programs whose local work torch.compile compiles: the same results, and what it cannot take."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, UsageError
from reshard.spmd.programs.compiled_work import _CompiledWork
from spmd.compiled_runs import find_runs

MESH = DeviceMesh.of(x=2, y=2)
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def on_torch() -> Iterator[None]:
    with sp.running(sp.in_process("torch")):
        yield
    torch.compiler.reset()


def array(shape: tuple[int, ...], text: str) -> Any:
    return sp.array(torch.as_tensor(RANDOM.normal(size=shape)), spec(MESH, text))


def layers(x: Any, w: Any) -> Any:
    for _ in range(2):
        x = sp.tanh(x @ w * 0.5 + x)
        x = x / sp.max(sp.abs(x))
    low, high = sp.top_k(x, 2)
    return x, low, sp.sum(high, axis=0)


def compiled_counts(program: Any) -> list[int]:
    """Of each compiled function, how many operators it has."""
    (recorded,) = program._programs.values()
    runs = [run for run, _ in find_runs(recorded)]
    return [len(run._steps) for run in runs if isinstance(run, _CompiledWork) and run._functions]


def expect_same(found: Any, expected: Any) -> None:
    for one, right in zip(found, expected, strict=True):
        assert one.type is right.type
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("backend", "rows"), [("eager", 7), ("aot_eager", 8)])
def test_results_are_equal(backend: str, rows: int) -> None:
    x, w = array((rows, 6), "x y, -"), array((6, 6), "-, y")
    program = sp.jit(layers, compile=backend)
    for _ in range(2):
        expect_same(program(x, w), layers(x, w))
    assert max(compiled_counts(program)) >= 3


def test_true_is_its_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[str] = []

    def take_eager(function: Any, *, backend: str, **options: Any) -> Any:
        backends.append(backend)
        return compile_by(function, backend="eager", **options)

    compile_by = torch.compile
    monkeypatch.setattr(torch, "compile", take_eager)
    x, w = array((8, 6), "x, -"), array((6, 6), "-, -")
    program = sp.jit(layers, compile=True)
    for _ in range(2):
        expect_same(program(x, w), layers(x, w))
    assert set(backends) == {"inductor"}


@pytest.mark.exhaustive(reason="a C++ compiler runs for 15 s; other backends are default cases")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="its default backend needs a compiler")
def test_its_default_backend() -> None:
    x, w = array((8, 6), "x, -"), array((6, 6), "-, -")

    def function(x: Any, w: Any) -> Any:
        return [sp.sum(sp.silu(x @ w) * 2.0, axis=1)]

    program = sp.jit(function, compile=True)
    for _ in range(2):
        expect_same(program(x, w), function(x, w))
    assert compiled_counts(program) == [4]


def test_gradients_without_a_warning() -> None:
    table, up, places = array((6, 4), "x, -"), array((4, 8), "-, y"), RANDOM.integers(0, 6, (8,))
    tokens = sp.array(torch.as_tensor(places), spec(MESH, "x"))

    def loss(table: Any, up: Any) -> Any:
        hidden = sp.silu(sp.rms_norm(sp.embedding(tokens, table)) @ up)
        seen = sp.attention(*[sp.reshape(hidden, (2, 8, 4))] * 3, is_causal=True)
        return sp.sum(sp.pad(sp.softmax(seen), ((0, 0), (0, 0), (1, 1))) ** 2)

    step = sp.value_and_grad(loss, argnums=(0, 1))
    program = sp.jit(step, compile="eager")
    value, slopes = step(table, up)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            found, found_slopes = program(table, up)
            expect_same([found, *found_slopes], [value, *slopes])


def looks(x: Any) -> Any:
    """What no compiler can follow: it depends on an element."""
    return x * 2 if float(x[0, 0]) > 1e9 else x + 1


def test_what_cannot_be_compiled_is_named_and_runs() -> None:
    own = sp.operator("([i, j]) -> ([i, j])", looks, name="looking")
    x = array((8, 6), "x, -")

    def function(x: Any) -> Any:
        return [sp.sin(own(sp.cos(x * 2.0) + 1.0) * 3.0)]

    program = sp.jit(function, compile="eager")
    program(x)
    with pytest.warns(UserWarning, match=r"looking runs without being compiled: ") as told:
        expect_same(program(x), function(x))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_same(program(x), function(x))


def counted(x: Any, places: Any) -> Any:
    return [sp.exp(sp.take(x * 2.0, places, axis=1)) + 1.0]


@pytest.mark.filterwarnings("ignore:.*checked_index runs without being compiled")
def test_elements_are_refused_by_name() -> None:
    x = array((4, 6), "x, -")
    good, bad = (sp.array(torch.tensor(one), spec(MESH, "-")) for one in ([0, 5], [0, 6]))
    program = sp.jit(counted, compile="aot_eager")
    for _ in range(2):
        expect_same(program(x, good), counted(x, good))
    refusals = []
    for call in (counted, program):
        with pytest.raises(ArrayIndexError) as e:
            call(x, bad)
        refusals.append((type(e.value), str(e.value)))
    assert refusals[0] == refusals[1]
    expect_same(program(x, good), counted(x, good))


def test_gradients_of_pytorch_go_through() -> None:
    data = [RANDOM.normal(size=shape) for shape in ((8, 6), (6, 6))]
    slopes = []
    for program in (sp.jit(layers), sp.jit(layers, compile="aot_eager")):
        for _ in range(2):
            x, w = (torch.tensor(one, requires_grad=True) for one in data)
            arrays = sp.array(x, spec(MESH, "x, -")), sp.array(w, spec(MESH, "-, y"))
            sp.sum(program(*arrays)[0] ** 2).to_dense().backward()
        slopes.append((x.grad, w.grad))
    for one, right in zip(*slopes, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-12)


def test_arguments_that_are_given_up() -> None:
    program = sp.jit(layers, compile="eager", donate=0)
    w = array((6, 6), "-, y")
    data = RANDOM.normal(size=(8, 6))
    expected = layers(sp.array(torch.tensor(data), spec(MESH, "x, -")), w)
    for _ in range(2):
        x = sp.array(torch.tensor(data), spec(MESH, "x, -"))
        expect_same(program(x, w), expected)


@pytest.mark.parametrize("backend", [3, None, 1.5])
def test_what_is_no_backend_is_refused(backend: Any) -> None:
    with pytest.raises(UsageError, match="compile="):
        sp.jit(layers, compile=backend)


def test_unknown_backends_and_shards_of_numpy_are_refused() -> None:
    x, w = array((8, 6), "x, -"), array((6, 6), "-, -")
    with pytest.raises(UsageError, match="'nothing' is not a backend"):
        sp.jit(layers, compile="nothing")(x, w)
    with sp.running(sp.in_process("numpy")):
        arrays = (sp.array(np.ones((8, 6)), x.spec), sp.array(np.ones((6, 6)), w.spec))
        with pytest.raises(UsageError, match=r"torch\.compile takes PyTorch's shards"):
            sp.jit(layers, compile=True)(*arrays)
