"""Operators of the user's own: kernels with a rule, a gradient and a cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import NotationError, ShardError, SpecError, UsageError
from reshard.spmd.core import operator as table
from reshard.spmd.core.operator import find_operator, shipped_operators
from reshard.spmd.gradients import tape as derivatives
from reshard.spmd.programs.custom_ops import OwnOperator

MESH = DeviceMesh.of(a=2, b=3)
RULE = "([i, k], [j, k]) -> ([i, j]) reduction={k}"
RANDOM = np.random.default_rng(5)
X, Y = RANDOM.normal(size=(5, 7)), RANDOM.normal(size=(4, 7))
CUTS = ("a, b", "b, a", "a b, -", "-, b", "-, -")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    yield
    for name in set(table._table) - shipped_operators():
        del table._table[name]
        derivatives.remove_gradient(name)


def apart(x: Any, y: Any) -> Any:
    """Distances between rows."""
    return abs(x[:, None] - y).sum(-1)


def apart_back(cotangent: Any, x: Any, y: Any, result: Any) -> tuple[Any, Any]:
    slopes = sp.expand_dims(cotangent, axis=-1) * sp.sign(sp.expand_dims(x, axis=1) - y)
    return sp.sum(slopes, axis=1), -sp.sum(slopes, axis=0)


def make(**options: Any) -> OwnOperator:
    return sp.operator(RULE, apart, gradient=apart_back, **options)


@pytest.mark.parametrize("second", CUTS)
@pytest.mark.parametrize("first", CUTS)
def test_it_computes_what_whole_arrays_give(first: str, second: str) -> None:
    distances = make()
    for wrap in (np.asarray, torch.tensor):
        x, y = sp.array(wrap(X), spec(MESH, first)), sp.array(wrap(Y), spec(MESH, second))
        assert np.allclose(distances(x, y).to_dense(), apart(X, Y))


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive", "widest", "cost"])
def test_it_stands_in_programs_and_traces(strategy: str) -> None:
    distances = make()
    x, y = sp.array(X, spec(MESH, "a, b")), sp.array(Y, spec(MESH, "b, a"))
    program = sp.jit(lambda x, y: sp.exp(-distances(x, y)), strategy=strategy)
    for _ in range(2):
        assert np.allclose(program(x, y).to_dense(), np.exp(-apart(X, Y)))
    assert program.traced_count == 1
    traced = program.trace(x, y)
    assert [one.operation.operator for one in traced.operations].count("apart") == 1
    assert str(sp.trace(distances, x, y, strategy=strategy)).count("apart(%0, %1)") == 1


@pytest.mark.parametrize("first", CUTS)
def test_its_gradient_is_pytorchs(first: str) -> None:
    distances = make()
    tensors = [torch.tensor(one, requires_grad=True) for one in (X, Y)]
    (apart(*tensors) ** 2).sum().backward()

    def loss(x: Any, y: Any) -> Any:
        return sp.sum(sp.square(distances(x, y)))

    for wrap in (np.asarray, torch.tensor):
        x, y = sp.array(wrap(X), spec(MESH, first)), sp.array(wrap(Y), spec(MESH, "b, a"))
        for differentiated in (sp.grad(loss, (0, 1)), sp.jit(sp.grad(loss, (0, 1)))):
            for found, tensor in zip(differentiated(x, y), tensors, strict=True):
                assert np.allclose(found.to_dense(), tensor.grad)


def test_pytorchs_own_gradient_goes_through_it() -> None:
    leaf = torch.tensor(X, requires_grad=True)
    sp.sum(make()(sp.array(leaf, spec(MESH, "a, b")), torch.tensor(Y))).to_dense().backward()
    whole = torch.tensor(X, requires_grad=True)
    apart(whole, torch.tensor(Y)).sum().backward()
    assert torch.allclose(leaf.grad, whole.grad)


def test_without_a_gradient_it_is_refused_by_name() -> None:
    make()
    distances = sp.operator(RULE, apart)
    x = sp.array(X, spec(MESH, "a, b"))
    with pytest.raises(UsageError, match=r"the gradient of apart: .* gradient= of sp.operator"):
        sp.grad(lambda x: sp.sum(distances(x, Y)))(x)


def test_its_cost_is_that_of_a_ranks_parts() -> None:
    distances = make(operations=lambda x, y: 3 * x[0] * x[1] * y[0])
    rule = find_operator("apart").rule([(4, 6), (8, 6)])
    assert find_operator("apart").work(rule, [2, 8, 3], {}) == 3 * 2 * 3 * 8
    assert find_operator("apart").work(rule, rule.sizes, {}) == 3 * 4 * 6 * 8
    make(operations=lambda x, y: -1)
    with pytest.raises(UsageError, match=r"the operations of operator apart .* are -1; a number"):
        find_operator("apart").work(rule, rule.sizes, {})
    del distances


def test_several_results_attributes_and_types() -> None:
    def enlarged(x: Any, scale: float) -> tuple[Any, Any]:
        return x * scale, x > 0

    operator = sp.operator(
        "([i, j]) -> ([i, j], [i, j])", enlarged, result_dtype=("float64", "bool")
    )
    x = sp.array(X, spec(MESH, "a, b"))
    for function in (operator, sp.jit(operator)):
        large, positive = function(x, scale=2.0)
        assert np.array_equal(large.to_dense(), X * 2)
        assert np.array_equal(positive.to_dense(), X > 0) and positive.dtype.name == "bool"
    assert np.array_equal(operator(x, scale=3.0)[0].to_dense(), X * 3)


def test_a_rule_for_any_number_of_dimensions() -> None:
    def rule(shapes: Any, axis: int) -> str:
        (shape,) = shapes
        names = "ijkl"[: len(shape)]
        left = [name for place, name in enumerate(names) if place != axis]
        return f"([{', '.join(names)}]) -> ([{', '.join(left)}]) reduction={{{names[axis]}:max}}"

    def greatest(x: Any, axis: int) -> Any:
        return np.max(x, axis=axis, initial=-np.inf)

    operator = sp.operator(rule, greatest)
    x = sp.array(X, spec(MESH, "a, b"))
    assert np.array_equal(operator(x, axis=1).to_dense(), X.max(1))
    assert str(operator(x, axis=0).spec) == "b | max(a)"
    assert operator(sp.array(X[0]), axis=0).to_dense() == X[0].max()


def test_any_number_of_operands_and_a_size_of_its_own() -> None:
    total = sp.operator("([i], ...) -> ([i])", lambda *parts: sum(parts), name="total")
    x = sp.array(X[0], spec(MESH, "b"))
    assert np.allclose(total(x, x, x).to_dense(), 3 * X[0])

    powers = sp.operator(
        "([i]) -> ([i, j]) {j=3}", lambda x: np.stack([x, x * x, x * x * x], 1), name="powers"
    )
    assert np.allclose(powers(x).to_dense()[:, 2], X[0] ** 3)


def test_sums_wait_where_it_is_linear() -> None:
    twice = sp.operator("([i, j]) -> ([i, j])", lambda x: x * 2, name="twice", linear="each")
    product = sp.array(X, spec(MESH, "-, b")) @ sp.array(Y.T, spec(MESH, "b, -"))
    assert str(product.spec) == "-, - | sum(b)"
    assert str(twice(product).spec) == "-, - | sum(b)"
    assert np.allclose(twice(product).to_dense(), 2 * X @ Y.T)


def test_registered_again_the_new_function_computes() -> None:
    x = sp.array(X, spec(MESH, "a, b"))
    first = sp.operator("([i, j]) -> ([i, j])", lambda x: x + 1, name="moved")
    assert np.allclose(first(x).to_dense(), X + 1)
    second = sp.operator("([i, j]) -> ([i, j])", lambda x: x + 2, name="moved")
    assert np.allclose(second(x).to_dense(), X + 2)
    with pytest.raises(UsageError, match="operator moved was registered again"):
        first(x)


RULES = [
    ("nonsense", NotationError, "'nonsense' is not a sharding rule"),
    (3, SpecError, "the rule of operator one is 3; give its text"),
    ("([i, k]) -> ([i])", SpecError, "has a factor in operands alone; say reduction"),
    ("([i]) -> ([i, j])", SpecError, "determines the size of factor j"),
    ("([i], [i]) -> ([i])", SpecError, r"has 2 operands, but its local function is one\(x\)"),
    ("([i]) -> ()", SpecError, "has no result; give it one"),
    ("([i, i]) -> ([i])", SpecError, "factor i is twice in"),
    ("([i], [j], ...) -> ([i])", NotationError, "... follows a single operand"),
]


@pytest.mark.parametrize(("rule", "kind", "said"), RULES)
def test_bad_rules(rule: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        sp.operator(rule, lambda x: x, name="one")
    assert "one" not in table._table


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"name": "exp"}, "operator exp is one of the package's"),
    ({}, "the function's name is '<lambda>': an operator needs a plain one"),
    ({"name": "one", "gradient": 3}, "gradient=3 of operator one; give a function"),
    ({"name": "one", "operations": 3}, "operations=3 of operator one; give a function"),
    ({"name": "one", "fails": "often"}, "fails='often' of operator one; it is never"),
    ({"name": "one", "linear": "all"}, "linear='all' of operator one; it is each"),
    ({"name": "one", "result_dtype": "float"}, "float"),
    ({"name": "one", "result_dtype": ()}, "give a type for each result"),
]


@pytest.mark.parametrize(("options", "said"), ARGUMENTS)
def test_bad_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sp.operator("([i]) -> ([i])", lambda x: x, **options)
    with pytest.raises(UsageError, match="the local function 3 is none"):
        sp.operator("([i]) -> ([i])", 3, name="one")


LOCAL: list[tuple[Any, type[Exception], str]] = [
    (
        lambda x: x[:1],
        ShardError,
        r"on rank 0 of shape \[1, 3\], but .* has \[3, 3\]",
    ),
    (
        lambda x: x.astype("float32"),
        ShardError,
        'float32, but float64 .* result_dtype="float32"',
    ),
    (lambda x: None, ShardError, "returned a NoneType|as a NoneType; an array of numpy's"),
    (lambda x: (x, x), ShardError, "returned a tuple 2 of them; its rule has 1 results"),
    (
        lambda x: x @ x[:1, :2],
        UsageError,
        r"failed on rank 0, on parts of shapes \[3, 3\]: V",
    ),
]


@pytest.mark.parametrize(("function", "kind", "said"), LOCAL)
def test_what_the_local_function_makes_is_checked(
    function: Any, kind: type[Exception], said: str
) -> None:
    operator = sp.operator("([i, j]) -> ([i, j])", function, name="one")
    with pytest.raises((kind, UsageError), match=said):
        operator(sp.array(X, spec(MESH, "a, b")))
    with pytest.raises((ShardError, UsageError), match="operator one"):
        operator(sp.array(X))


def test_it_is_checked_again_when_it_runs_again() -> None:
    answers = iter([X[:3, :3]] * 6 + [X[:2, :3]] * 6)
    operator = sp.operator("([i, j]) -> ([i, j])", lambda x: next(answers), name="one")
    x = sp.array(X[:, :6], spec(DeviceMesh.of(a=1, b=2), "a, b"))
    square = sp.array(X[:3, :6], spec(DeviceMesh.of(a=1, b=2), "a, b"))
    del x
    for _ in range(3):
        operator(square)
    with pytest.raises(ShardError, match=r"of shape \[2, 3\], but by its rule it has \[3, 3\]"):
        operator(square)


def test_what_it_is_called_with_is_checked() -> None:
    distances = make()
    x = sp.array(X, spec(MESH, "a, b"))
    with pytest.raises(SpecError, match="apart: 1 shapes for"):
        distances(x)
    with pytest.raises(SpecError, match="apart: operand 1 of shape"):
        distances(x, Y[:, :3])
    with pytest.raises(UsageError, match=r"(?s)apart of .*; at least one sp.array"):
        distances(X, Y)
    with pytest.raises(UsageError, match=r"(?s)attribute scale=.* arrays are given as operands"):
        distances(x, Y, scale=X)


def test_a_gradient_of_another_number_is_refused() -> None:
    distances = sp.operator(RULE, apart, gradient=lambda g, x, y, result: (g,))
    with pytest.raises(UsageError, match="the gradient of apart returned tuple; a tuple of 2 was"):
        sp.grad(lambda x: sp.sum(distances(x, Y)))(sp.array(X, spec(MESH, "a, b")))
