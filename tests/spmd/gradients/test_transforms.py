"""What users of `grad`, `value_and_grad` and `vjp` rely on, and what is refused."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import SpecError, UsageError
from spmd import transformer_block as block

MESH = DeviceMesh.of(dp=2, tp=2)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def cubes(x: Any) -> Any:
    return sp.sum(x**3)


def crossing(traced: sp.Trace, shape: tuple[int, ...] | None = None) -> list[str]:
    """The collectives that move something, of arrays of a shape."""
    return [
        str(step)
        for operation in traced.operations
        for one in operation.reshards
        if one.moved_bytes and shape in (None, one.source.shape)
        for step in one.program.steps
        if not str(step).startswith("slice")
    ]


def test_argnums_trees_and_aux() -> None:
    class Layer(NamedTuple):
        weight: Any
        bias: Any

    def loss(layers: Any, x: Any, scale: Any, power: int = 1) -> Any:
        for layer in layers["all"]:
            x = sp.tanh(x @ layer.weight)
            x = x if layer.bias is None else x + layer.bias
        return sp.sum(x) * scale**power, {"last": x, "name": "tanh"}

    layers = {
        "all": [
            Layer(sp.array(array(3, 3)), sp.array(array(3))),
            Layer(sp.array(array(3, 3)), None),
        ]
    }
    x = sp.array(array(4, 3, seed=1))
    (value, aux), (of_layers, of_scale) = sp.value_and_grad(loss, (0, -1), has_aux=True)(
        layers, x, sp.array(2.0)
    )
    assert aux["name"] == "tanh"
    assert isinstance(of_layers["all"][0], Layer)
    assert of_layers["all"][1].bias is None
    assert of_layers["all"][0].weight.shape == (3, 3)
    assert float(of_scale) == pytest.approx(float(value) / 2)
    found, again = sp.grad(loss, 1, has_aux=True)(layers, x, 2.0, power=2)
    assert found.shape == (4, 3)
    np.testing.assert_allclose(again["last"].to_dense(), aux["last"].to_dense())


def test_vjp_of_several_values() -> None:
    x, w = sp.array(array(4, 3), spec(MESH, "dp, -")), sp.array(array(3, 2), spec(MESH, "-, tp"))
    value, pullback = sp.vjp(lambda x, w: {"y": x @ w, "n": [sp.sum(x), sp.argmax(x)]}, x, w)
    one, other = pullback({"y": np.ones((4, 2)), "n": [None, None]})
    np.testing.assert_allclose(one.to_dense(), np.ones((4, 2)) @ array(3, 2).T)
    np.testing.assert_allclose(other.to_dense(), array(4, 3).T @ np.ones((4, 2)))
    both, _ = pullback({"y": value["y"] * 0.0, "n": [sp.array(2.0), None]})
    np.testing.assert_allclose(both.to_dense(), np.full((4, 3), 2.0))


def test_gradients_end_as_their_parameters_lie() -> None:
    x = sp.array(array(8, 4), spec(MESH, "dp, -"))
    for text in ("-, -", "dp, -", "-, tp", "tp, dp", "dp tp, -"):
        w = sp.array(array(4, 4, seed=1), spec(MESH, text))
        found = sp.grad(lambda w: cubes(x @ w))(w)
        assert found.spec is w.spec
    given = sp.grad(lambda w: cubes(x @ w), specs=spec(MESH, "dp, -"))(sp.array(array(4, 4)))
    assert str(given.spec) == "dp, -"
    whole = sp.grad(lambda w: cubes(sp.array(array(8, 4)) @ w))(sp.array(array(4, 4)))
    assert whole.spec is None


def test_what_crosses_in_backward_of_data_parallel_ranks_is_a_reduce_scatter() -> None:
    """Under fsdp weights are gathered before they are used, and gradients reduce-scattered."""
    x = sp.abstract((64, 32), "float32", spec(MESH, "dp, -"))
    w = sp.abstract((32, 32), "float32", spec(MESH, "dp, -"))
    traced = sp.trace(sp.grad(lambda w, x: cubes(x @ w)), w, x)
    assert crossing(traced) == ["all-gather(dp)", "reduce-scatter(dp)"]
    # Over replicas the same gradient is all-reduced, and nothing else crosses.
    copies = sp.abstract((32, 32), "float32", spec(MESH, "-, -"))
    traced = sp.trace(sp.grad(lambda w, x: cubes(x @ w)), copies, x)
    assert crossing(traced) == ["all-reduce(dp)"]


def test_contributions_to_a_value_are_combined_once() -> None:
    """As Megatron's f and g: one all-reduce forward and one backward for two matrices."""
    x = sp.abstract((64, 32), "float32", spec(MESH, "dp, -"))
    up = sp.abstract((32, 64), "float32", spec(MESH, "-, tp"))
    down = sp.abstract((64, 32), "float32", spec(MESH, "tp, -"))

    def loss(x: Any, up: Any, down: Any) -> Any:
        normed = sp.tanh(x)
        return cubes(sp.tanh(normed @ up) @ down + x)

    traced = sp.trace(sp.grad(loss, (0, 1, 2)), x, up, down)
    # Of the gradient of `down`, which has the same shape, contributions of the batch come last.
    crossed = ["all-reduce(tp)", "all-reduce(tp)", "all-reduce(dp)"]
    assert crossing(traced, (64, 32)) == crossed


def test_gradients_of_gradients() -> None:
    x = sp.array(array(6), spec(MESH, "dp"))
    hessian_times_one = sp.grad(lambda x: sp.sum(sp.grad(cubes)(x)))(x)
    np.testing.assert_allclose(hessian_times_one.to_dense(), 6 * array(6))
    # The inner variable is another one, though it is the same array.
    crossed = sp.grad(lambda x: sp.sum(sp.grad(lambda y: sp.sum(x * y * y))(x)))(x)
    np.testing.assert_allclose(crossed.to_dense(), 4 * array(6))


def test_an_array_given_twice_is_two_parameters() -> None:
    x = sp.array(array(3))
    one, other = sp.grad(lambda a, b: sp.sum(a * b * b), (0, 1))(x, x)
    np.testing.assert_allclose(one.to_dense(), array(3) ** 2)
    np.testing.assert_allclose(other.to_dense(), 2 * array(3) ** 2)


def test_what_does_not_depend_has_zeros() -> None:
    x = sp.array(array(4), spec(MESH, "dp"))
    found = sp.grad(lambda x: sp.sum(sp.stop_gradient(x) * 2.0) + sp.sum(sp.floor(x)))(x)
    assert found.spec is x.spec
    assert not found.to_dense().any()


def test_element_types_are_those_of_the_parameters() -> None:
    w = sp.array(array(4, 4).astype(np.float32))
    x = sp.array(array(4, 4))
    found = sp.grad(lambda w: cubes(x @ w))(w)
    assert found.dtype is sp.float32


def test_every_strategy_places_gradients() -> None:
    x = sp.array(array(8, 4), spec(MESH, "dp, -"))
    w = sp.array(array(4, 4, seed=1), spec(MESH, "-, tp"))
    step = sp.value_and_grad(lambda w, x: cubes(sp.tanh(x @ w)))
    value, found = step(w, x)
    for strategy in ("eager", "basic", "aggressive", "widest", "cost"):
        traced = sp.trace(step, w, x, strategy=strategy)
        assert traced.outputs[1].spec is w.spec
        again, other = traced.run(w, x)
        np.testing.assert_allclose(float(again), float(value), rtol=1e-12)
        np.testing.assert_allclose(other.to_dense(), found.to_dense(), rtol=1e-12)


def test_gradients_end_so_by_a_strategy_where_they_lie_so_by_themselves() -> None:
    """What is whole without being asked for is whole, though parts of it would be less to move."""
    sizes = block.Sizes(4, 128, 256, 8, 4, 512, 8, 2048)
    for mesh in (DeviceMesh.of(dp=4), DeviceMesh.of(tp=4)):
        given = block.shardings(mesh)
        shapes = sizes.shapes()
        p = {name: sp.abstract(shape, "float32", given[name]) for name, shape in shapes.items()}
        batch = sp.abstract((4, 128), "int64", block.batch_sharding(mesh))
        step = sp.value_and_grad(lambda p, x, y: block.loss(p, x, y, sizes))
        traced = sp.trace(step, p, batch, batch, strategy="cost")
        assert [one.spec for one in traced.outputs[1:]] == [given[name] for name in p]


X = sp.array(np.ones(3))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda: sp.grad(cubes)(sp.array([1, 2])), "by an array of int64"),
        (lambda: sp.grad(cubes)(sp.array([1j, 2])), "by an array of complex128"),
        (lambda: sp.grad(cubes)("x"), "by 'x', a str"),
        (lambda: sp.grad(cubes)(3), "by 3, a int"),
        (lambda: sp.grad(lambda x: x)(X), r"returned float64\[3\]; one real number"),
        (lambda: sp.grad(lambda x: 3.0)(X), "returned a float"),
        (lambda: sp.grad(lambda x: sp.argmax(x))(X), r"returned int64\[\]"),
        (lambda: sp.grad(cubes, 1)(X), "argnums=1 of a function that was called with 1"),
        (lambda: sp.grad(cubes, (0, 0))(X), r"argnums=\(0, 0\)"),
        (lambda: sp.grad(cubes, None)(X), "argnums=None of a function"),
        (lambda: sp.grad(cubes, has_aux=True)(X), "has_aux=True, but the function returned"),
        (lambda: sp.grad(3), "sp.grad of 3, a int"),
        (lambda: sp.grad(lambda x: sp.sum(sp.array(x.to_dense())))(X), "were asked for within"),
        (lambda: sp.grad(lambda x: sp.sum(x[x > 0]))(X), "were asked for within"),
        (lambda: sp.grad(lambda x: x[0] * float(x[1]))(X), "were asked for within"),
        (lambda: sp.grad(lambda x: sp.sum(sp.asarray([x[0], x[1]])))(X), "were asked for within"),
        (lambda: sp.grad(lambda x: x.shards[0])(X), "were asked for within"),
        (lambda: sp.grad(lambda x: cubes(sp.real(sp.fft.fft(x))))(X), "the gradient of fft"),
        (
            lambda: sp.grad(lambda x: sp.real(sp.sum(x * 1j)))(X),
            "complex numbers have no gradients",
        ),
        (lambda: sp.vjp(cubes, X)[1](np.ones(3)), r"a cotangent of float64\[3\] for the value"),
        (lambda: sp.vjp(cubes, X)[1]([X, X]), "cotangents at 2 places, where 1 were"),
        (lambda: sp.vjp(lambda x: 3.0, X)[1](1.0), "a cotangent for 3.0"),
    ],
)
def test_errors(run: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run()


def test_specs_that_are_none() -> None:
    with pytest.raises(SpecError, match="specs of gradients with 'x', which is not a sharding"):
        sp.grad(cubes, specs="x")(X)


def test_an_operator_of_the_user_s_own() -> None:
    from reshard.spmd.core import operator as registry
    from reshard.spmd.gradients import tape as table

    try:
        row = registry.operators["exp"]
        sp.register(
            sp.Operator(
                "plus_three",
                "users' own",
                row.infer,
                local=lambda work: lambda x: x * x + 3,
                doc="Its square and three.",
            )
        )
        with pytest.raises(UsageError, match="of plus_three: its derivative is not known"):
            sp.grad(lambda x: sp.sum(sp.plus_three(x)))(X)

        @sp.gradient("plus_three")
        def back(cotangent: Any, x: Any, result: Any) -> Any:
            return (2 * x * cotangent,)

        x = sp.array(array(5), spec(MESH, "tp"))
        found = sp.grad(lambda x: sp.sum(sp.plus_three(x)))(x)
        np.testing.assert_allclose(found.to_dense(), 2 * array(5))
    finally:
        registry._table.pop("plus_three", None)
        table._pullbacks.pop("plus_three", None)
    with pytest.raises(UsageError, match="operator exp has a derivative of the package's"):
        sp.gradient("exp")


def test_values_that_jax_traces_are_refused_by_name() -> None:
    traced = type("JitTracer", (type("Tracer", (), {"__module__": "jax._src.core"}),), {})()
    for run in (lambda: sp.array(traced), lambda: X * traced, lambda: sp.exp(traced)):
        with pytest.raises(UsageError, match=r"jax\.grad and jax\.jit do not go through them"):
            run()


def test_an_array_of_another_library_is_refused_not_forgotten() -> None:
    torch = pytest.importorskip("torch")
    other = sp.array(torch.ones(3, dtype=torch.float64))
    with pytest.raises(UsageError, match="were asked for within"):
        sp.grad(lambda x: sp.sum(other * x).to_dense())(X)
    found = sp.grad(lambda x: sp.sum(x * sp.array(np.ones(3))))(other)
    assert found.to_dense().tolist() == [1.0, 1.0, 1.0]


def test_two_threads_differentiate_at_once() -> None:
    data = array(8, 6)
    shared = sp.array(data, spec(MESH, "dp, tp"))
    # The first is within its function when the second begins, and has its gradient before the
    # second goes on: what one has begun or ended must not be the other's.
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))

    def squares(x: Any) -> Any:
        y = x * x
        first_began.set()
        assert second_began.wait(timeout=60)
        return sp.sum(y * sp.sum(x, axis=0))

    def exponentials(x: Any) -> Any:
        y = sp.exp(x)
        second_began.set()
        assert first_ended.wait(timeout=60)
        return sp.sum(y @ sp.permute_dims(x, (1, 0)))

    found: dict[str, Any] = {}

    def run_first() -> None:
        found["squares"] = sp.grad(squares)(shared)
        first_ended.set()

    def run_second() -> None:
        assert first_began.wait(timeout=60)
        found["exponentials"] = sp.grad(exponentials)(shared)

    threads = [threading.Thread(target=one) for one in (run_first, run_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    exp = np.exp(data)
    expected = {
        "squares": 2 * data * data.sum(0) + np.square(data).sum(0),
        "exponentials": exp * data.sum(0) + exp.sum(0),
    }
    assert set(found) == set(expected)
    for name, slope in found.items():
        assert str(slope.spec) == "dp, tp"
        assert np.allclose(slope.to_dense(), expected[name])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_slopes_where_a_derivative_has_two_sides(library: str) -> None:
    """Those of PyTorch, and of the pages: also where there is no number."""
    data = torch.tensor([-1.0, -0.0, 0.0, 2.0, float("nan"), float("inf")], dtype=torch.float64)
    mesh = DeviceMesh.of(x=2)
    for function, by_torch in (
        (sp.relu, torch.nn.functional.relu),
        (sp.abs, torch.abs),
        (lambda x: sp.maximum(x, 0), lambda x: torch.maximum(x, torch.zeros_like(x))),
    ):
        given = data.clone().requires_grad_()
        by_torch(given).sum().backward()
        with sp.running(sp.in_process(library)):
            x = sp.array(data, spec(mesh, "x"))
            slopes = sp.grad(lambda x, function=function: sp.sum(function(x)))(x)
            found = np.asarray(slopes.to_dense())
        finite = ~np.isnan(data.numpy()) if function is not sp.relu else slice(None)
        np.testing.assert_array_equal(found[finite], given.grad.numpy()[finite])


def test_a_remainder_has_the_slope_of_the_quotient_that_it_was_taken_by() -> None:
    """1.0 is a little less than ten times 0.1 in float64, and their quotient rounds to 10."""
    slope = sp.grad(lambda y: sp.remainder(1.0, y))(sp.array(0.1))
    assert float(slope) == -(1.0 // 0.1) == -9.0


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "count"), [("float16", 70_000), ("bfloat16", 257)])
def test_equal_extremes_are_counted_beyond_narrow_numbers(
    dtype: str, count: int, library: str
) -> None:
    with sp.running(sp.in_process(library)):
        x = sp.ones((count,), dtype=dtype)
        slope = sp.grad(lambda x: sp.astype(sp.max(x), "float32") * 1000.0)(x)
        assert slope.dtype.name == dtype
        # Each share is rounded once.
        found = sp.astype(slope, "float32").to_dense()
        np.testing.assert_allclose(np.asarray(found) * count, 1000.0, 4e-3)
