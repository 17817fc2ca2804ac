"""Optimizers against PyTorch's, with states in every place that ZeRO has for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import SpecError, UsageError

MESH = DeviceMesh.of(dp=2, tp=2)
X = np.random.default_rng(0).normal(size=(8, 4))
PARAMETERS = {
    "w": np.random.default_rng(1).normal(size=(4, 6)),
    "layers": [{"v": np.random.default_rng(2).normal(size=(6, 4)), "b": np.ones(3)}],
}
# Of parameters, of gradients, and whether states are cut over dp.
PLACES = {
    "replicas": ("-, tp", False, False),
    "zero 1": ("-, tp", False, True),
    "zero 2": ("-, tp", True, True),
    "zero 3": ("dp, tp", False, False),
}


def loss(p: Any, x: Any) -> Any:
    (layer,) = p["layers"]
    return sp.sum(sp.square(sp.tanh(x @ p["w"]) @ layer["v"])) + sp.sum(layer["b"] ** 3)


def loss_in_torch(p: Any, x: Any) -> Any:
    (layer,) = p["layers"]
    return ((x @ p["w"]).tanh() @ layer["v"]).square().sum() + (layer["b"] ** 3).sum()


def in_torch(name: str, options: dict[str, Any], steps: int) -> list[np.ndarray]:
    torch = pytest.importorskip("torch")
    p = {
        "w": torch.tensor(PARAMETERS["w"], requires_grad=True),
        "layers": [
            {key: torch.tensor(one, requires_grad=True) for key, one in layer.items()}
            for layer in PARAMETERS["layers"]
        ],
    }
    every = [p["w"], *p["layers"][0].values()]
    optimizer = getattr(torch.optim, name)(every, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_in_torch(p, torch.as_tensor(X)).backward()
        optimizer.step()
    return [one.detach().numpy() for one in every]


OPTIMIZERS = [
    (sp.SGD(0.01), "SGD", {"lr": 0.01}),
    (sp.SGD(0.01, 0.9, 0.1), "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (sp.AdamW(0.05), "AdamW", {"lr": 0.05}),
    (
        sp.AdamW(0.05, (0.8, 0.9), 1e-6, 0.0),
        "AdamW",
        {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0},
    ),
]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("optimizer", "name", "options"), OPTIMIZERS)
def test_steps_are_those_of_pytorch(
    optimizer: Any, name: str, options: dict[str, Any], places: str
) -> None:
    text, cuts_gradients, cuts_states = PLACES[places]
    cut = spec(MESH, text)
    (layer,) = PARAMETERS["layers"]
    p: Any = {
        "w": sp.array(PARAMETERS["w"], cut),
        "layers": [{"v": sp.array(layer["v"], cut), "b": sp.array(layer["b"])}],
    }
    x = sp.array(X, spec(MESH, "dp, -"))
    over = sp.specs_over(p, MESH, "dp")
    state = optimizer.init(p, over if cuts_states else None)
    step = sp.grad(loss, specs=over if cuts_gradients else None)
    for _ in range(4):
        slopes = step(p, x)
        if cuts_gradients:
            assert str(slopes["w"].spec) == "dp, tp"
        p, state = optimizer.update(p, slopes, state)
    assert p["w"].spec is cut
    assert state["step"] == 4
    for slot in {"exp_avg", "momentum_buffer"} & set(state):
        assert str(state[slot]["w"].spec) == ("dp, tp" if cuts_states else text)
    expected = in_torch(name, options, 4)
    found = [p["w"], p["layers"][0]["v"], p["layers"][0]["b"]]
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.to_dense(), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ("replicas", ["all-reduce(dp)"]),
        ("zero 1", ["all-reduce(dp)", "all-gather(dp)"]),
        ("zero 2", ["reduce-scatter(dp)", "all-gather(dp)"]),
    ],
)
def test_what_crosses(places: str, expected: list[str]) -> None:
    text, cuts_gradients, cuts_states = PLACES[places]
    w = sp.array(np.ones((64, 64), np.float32), spec(MESH, text))
    x = sp.abstract((128, 64), "float32", spec(MESH, "dp, -"))
    adam = sp.AdamW()
    over = sp.specs_over(w, MESH, "dp")
    state = adam.init(w, over if cuts_states else None)

    def step(w: Any, x: Any, mean: Any, square: Any) -> Any:
        slope = sp.grad(lambda w: sp.sum((x @ w) ** 2), specs=over if cuts_gradients else None)(w)
        moved, after = adam.update(w, slope, {"step": 0, "exp_avg": mean, "exp_avg_sq": square})
        return moved, after["exp_avg"], after["exp_avg_sq"]

    traced = sp.trace(step, w, x, state["exp_avg"], state["exp_avg_sq"])
    found = [
        str(one)
        for operation in traced.operations
        for reshard in operation.reshards
        if reshard.moved_bytes
        for one in reshard.program.steps
    ]
    assert found == expected


def test_narrow_parameters_have_wide_states() -> None:
    w = sp.array(np.ones(4, np.float16))
    adam = sp.AdamW(1e-3)
    moved, state = adam.update(w, w, adam.init(w))
    assert moved.dtype.name == "float16"
    assert state["exp_avg_sq"].dtype.name == "float32"


def test_entries_of_dictionaries_belong_together_by_their_keys() -> None:
    """Gradients, states and shardings in another order than the parameters."""
    p = {"a": sp.array(np.zeros(4)), "b": sp.array(np.zeros(4))}
    turned = {"b": sp.array(np.ones(4)), "a": sp.array(np.full(4, -1.0))}
    specs = {"b": spec(MESH, "dp"), "a": spec(MESH, "tp")}
    for optimizer in (sp.SGD(1.0), sp.SGD(1.0, momentum=0.5)):
        state = optimizer.init(p, specs)
        for _ in range(2):
            moved, state = optimizer.update(p, turned, state)
            slots = {name: one for name, one in state.items() if isinstance(one, dict)}
            state |= {name: dict(reversed(one.items())) for name, one in slots.items()}
        assert list(moved) == ["a", "b"]
        assert np.all(moved["a"].to_dense() > 0)
        assert np.all(moved["b"].to_dense() < 0)
    assert str(state["momentum_buffer"]["a"].spec) == "tp"
    found = sp.grad(lambda p: sp.sum(p["a"] * 2) + sp.sum(p["b"]), specs=specs)(p)
    assert {name: str(one.spec) for name, one in found.items()} == {"a": "tp", "b": "dp"}
    _, pullback = sp.vjp(lambda x: {"a": x * 2, "b": x * 3}, p["a"])
    assert pullback(turned)[0].to_dense().tolist() == [1.0] * 4


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", [sp.SGD, sp.AdamW])
def test_learning_rates_in_arrays_change_without_another_trace(kind: Any, library: str) -> None:
    @sp.jit
    def step(w: Any, state: Any, rate: Any) -> Any:
        return kind(rate, weight_decay=0.1).update(w, w * w, state)

    with sp.running(sp.in_process(library)):
        w = other = sp.array(PARAMETERS["w"].astype(np.float32), spec(MESH, "dp, tp"))
        state = kind(0.1).init(w) | {"step": sp.array(0)}
        other_state = kind(0.1).init(w)
        for rate in (0.1, 0.02, 0.3):
            w, state = step(w, state, sp.array(rate))
            fixed = kind(rate, weight_decay=0.1)
            other, other_state = fixed.update(other, other * other, other_state)
            np.testing.assert_allclose(np.asarray(w), np.asarray(other), 1e-5)
    assert step.traced_count == 1
    assert w.dtype.name == "float32"


W = sp.array(np.ones((4, 6)))
CUT = sp.array(np.ones((4, 6)), spec(MESH, "dp, tp"))


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (lambda: sp.SGD(-1.0), UsageError, "learning_rate=-1.0"),
        (lambda: sp.AdamW(W), UsageError, r"a learning_rate of float64\[4, 6\]"),
        (lambda: sp.AdamW("fast"), UsageError, "learning_rate='fast'"),
        (lambda: sp.AdamW(betas=(0.9, 1.0)), UsageError, r"betas=\(0.9, 1.0\)"),
        (lambda: sp.AdamW().init([3]), UsageError, r"parameters\[0\] of int"),
        (lambda: sp.AdamW().init(sp.array([1])), UsageError, r"parameters of int64\[1\]"),
        (
            lambda: sp.AdamW().init(W, ["dp", "-"]),
            SpecError,
            "specs of states at 2 places",
        ),
        (lambda: sp.AdamW().update(W, W, {"step": 0}), UsageError, "make one by init"),
        (
            lambda: sp.AdamW().update(W, [W, W], sp.AdamW().init(W)),
            UsageError,
            "gradients at 2 places",
        ),
        (
            lambda: sp.AdamW().update({"w": W}, {"v": W}, sp.AdamW().init({"w": W})),
            UsageError,
            "'v'",
        ),
        (
            lambda: sp.SGD(0.1).update(W, W[0], {"step": 0}),
            UsageError,
            r"gradients of float64\[6\] for a parameter",
        ),
        (lambda: sp.SGD(0.1).update(W, W, {"step": "a"}), UsageError, "with step='a', a str"),
        (lambda: sp.specs_over(W, MESH, "pp"), SpecError, "axis 'pp' of"),
        (
            lambda: sp.specs_over(CUT, DeviceMesh.of(x=4), "x"),
            SpecError,
            "over DeviceMesh.dp=2,tp=2",
        ),
    ],
)
def test_errors(run: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        run()
