"""A training step that is traced once and runs as a program.

Run it anywhere: python examples/programs.py
Devices are simulated in one process; over processes, `sp.running(sp.over_processes())` around it.
"""

from typing import Any

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec

RANDOM = np.random.default_rng(0)


def heads(x: Any, weights: list[Any]) -> list[Any]:
    """Queries, keys and values of a sequence that is cut over `tp`."""
    return [x @ w for w in weights]


def gathered_once() -> None:
    mesh = DeviceMesh.of(tp=4)
    x = sp.array(RANDOM.normal(size=(64, 32)), spec(mesh, "tp, -"))
    weights = [sp.array(RANDOM.normal(size=(32, 256)), spec(mesh, "-, tp")) for _ in range(3)]
    program = sp.jit(heads)
    q, k, v = program(x, weights)
    q, k, v = program(x, weights)
    assert program.traced_count == 1
    print(q.type, k.type, v.type)

    traced = program.trace(x, weights)
    assert sum(operation.moved_bytes > 0 for operation in traced.operations) == 1
    limited = sp.jit(heads, live_bytes=max(traced.peak_bytes.values()))
    assert limited.trace(x, weights).peak_bytes == traced.peak_bytes
    ahead = sp.jit(heads, overlap=1)
    assert ahead.trace(x, weights).moved_bytes == traced.moved_bytes
    print(traced.peak_bytes)


def normalized(x: Any) -> Any:
    """Halved until no element is above 1, then squared three times."""
    x = sp.while_loop(lambda x: sp.max(x) > 1, lambda x: x / 2, x)
    return sp.scan(lambda x, _: (x * x, sp.sum(x)), x, length=3)


def loops() -> None:
    x = sp.array(np.array([1.0, 3.0]), spec(DeviceMesh.of(x=2), "x"))
    last, sums = sp.jit(normalized)(x)
    assert np.allclose(last.to_dense(), [0.25**8, 0.75**8])
    print(sums.to_dense())


def distances_here(x: Any, y: Any) -> Any:
    """Between rows of both: of the parts that one rank has, NumPy's or PyTorch's."""
    return abs(x[:, None] - y).sum(-1)


def distances_back(cotangent: Any, x: Any, y: Any, result: Any) -> tuple[Any, Any]:
    """The cotangents of both operands, with functions of `sp`."""
    slopes = sp.expand_dims(cotangent, axis=-1) * sp.sign(sp.expand_dims(x, axis=1) - y)
    return sp.sum(slopes, axis=1), -sp.sum(slopes, axis=0)


distances = sp.operator(
    "([i, k], [j, k]) -> ([i, j]) reduction={k}",
    distances_here,
    name="distances",
    gradient=distances_back,
    operations=lambda x, y: 3 * x[0] * x[1] * y[0],
)


def own_operator() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    x = sp.array(RANDOM.normal(size=(6, 8)), spec(mesh, "dp, tp"))
    y = sp.array(RANDOM.normal(size=(5, 8)), spec(mesh, "-, tp"))
    found = distances(x, y)
    assert str(found.spec) == "dp, - | sum(tp)"
    assert np.allclose(found.to_dense(), distances_here(x.to_dense(), y.to_dense()))

    slope = sp.grad(lambda x: sp.sum(sp.square(distances(x, y))))(x)
    assert str(slope.spec) == "dp, tp"


def loss(w: Any, x: Any, y: Any) -> Any:
    """Of one layer."""
    return sp.mean(sp.square(sp.silu(x @ w) - y))


ADAM = sp.AdamW(learning_rate=1e-2)


@sp.jit
def step(w: Any, state: Any, x: Any, y: Any) -> Any:
    """A step of training: the loss, the new weights and the optimizer's new state."""
    value, slope = sp.value_and_grad(loss)(w, x, y)
    return value, *ADAM.update(w, slope, state)


def training() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    w = sp.array(RANDOM.normal(size=(16, 8)) / 4, spec(mesh, "-, tp"))
    x = sp.array(RANDOM.normal(size=(32, 16)), spec(mesh, "dp, -"))
    y = sp.array(RANDOM.normal(size=(32, 8)), spec(mesh, "dp, -"))

    state = ADAM.init(w) | {"step": sp.array(0)}
    losses = []
    for _ in range(20):
        value, w, state = step(w, state, x, y)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    print(losses[0], losses[-1], step.traced_count)

    giving_up = sp.jit(step, donate=(0, 1))
    peaks = [max(one.trace(w, state, x, y).peak_bytes.values()) for one in (step, giving_up)]
    value, w, state = giving_up(w, state, x, y)
    assert float(value) < losses[0] and peaks[1] <= peaks[0]


def chosen_shardings() -> None:
    mesh = DeviceMesh.of(tp=8)
    w, x, y = sp.abstract((1024, 4096)), sp.abstract((8192, 1024)), sp.abstract((8192, 4096))
    value_and_slope = sp.value_and_grad(loss)
    found = sp.auto(value_and_slope, mesh, w, x, y)
    whole = max(found.trace.peak_bytes.values())
    limited = sp.auto(value_and_slope, mesh, w, x, y, live_bytes=whole * 3 // 4)
    print(*found.specs, sep="; ")
    print(*limited.specs, sep="; ")
    assert limited.trace.seconds_s >= found.trace.seconds_s
    assert max(limited.trace.peak_bytes.values()) <= whole * 3 // 4


def second_stage() -> None:
    first = DeviceMesh.of(tp=2)
    second = DeviceMesh.of(dp=2, tp=2, devices=range(2, 6))

    def stages(x: Any, w: Any, v: Any) -> Any:
        hidden = sp.relu(x @ w).shard(spec(second, "dp, -"))
        return sp.sum(sp.square(hidden @ v)).shard(spec(first, ""))

    x = sp.array(RANDOM.normal(size=(32, 16)), spec(first, "-, -"))
    w = sp.array(RANDOM.normal(size=(16, 8)), spec(first, "-, tp"))
    v = sp.array(RANDOM.normal(size=(8, 8)), spec(second, "-, tp"))
    slopes = sp.jit(sp.grad(stages, argnums=(0, 1, 2)))
    traced = slopes.trace(x, w, v)
    assert traced.ranks == (0, 1, 2, 3, 4, 5)
    assert [slope.mesh for slope in slopes(x, w, v)] == [first, first, second]
    print(traced)


def main() -> None:
    gathered_once()
    loops()
    own_operator()
    training()
    chosen_shardings()
    second_stage()


if __name__ == "__main__":
    main()
