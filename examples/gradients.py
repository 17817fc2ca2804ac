"""A network trained in arrays in shards: gradients, an optimizer cut over data parallel ranks.

Run it anywhere: python examples/gradients.py
Devices are simulated in one process; over processes, `sp.running(sp.over_processes())` around it.
"""

from typing import Any

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec

RANDOM = np.random.default_rng(0)


def loss(p: dict[str, Any], x: Any, y: Any) -> Any:
    """Of two layers, written as if there were one device."""
    hidden = sp.silu(x @ p["up"])
    return sp.mean(sp.square(hidden @ p["down"] - y))


def make(mesh: DeviceMesh) -> tuple[dict[str, Any], Any, Any]:
    """Parameters over tensor parallel ranks, a batch over data parallel ones."""
    p = {
        "up": sp.array(RANDOM.normal(size=(16, 64)) / 4, spec(mesh, "-, tp")),
        "down": sp.array(RANDOM.normal(size=(64, 8)) / 8, spec(mesh, "tp, -")),
    }
    x = sp.array(RANDOM.normal(size=(32, 16)), spec(mesh, "dp, -"))
    return p, x, sp.array(RANDOM.normal(size=(32, 8)), spec(mesh, "dp, -"))


def first_gradient() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    p, x, y = make(mesh)
    value, gradients = sp.value_and_grad(loss)(p, x, y)
    assert gradients["up"].spec is p["up"].spec
    print(float(value), gradients["up"].type)


def zero() -> None:
    """Parameters over tp, gradients and states over dp as well: ZeRO 2."""
    mesh = DeviceMesh.of(dp=2, tp=2)
    p, x, y = make(mesh)
    adam = sp.AdamW(learning_rate=1e-2)
    over = sp.specs_over(p, mesh, "dp")
    state = adam.init(p, over)
    step = sp.value_and_grad(loss, specs=over)
    losses = []
    for _ in range(50):
        value, gradients = step(p, x, y)
        p, state = adam.update(p, gradients, state)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2
    print(state["exp_avg"]["up"].type, losses[0], losses[-1])


def again() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    p, x, y = make(mesh)

    @sp.rematerialized
    def layer(x: Any, up: Any, down: Any) -> Any:
        return sp.silu(x @ up) @ down

    def loss_again(p: dict[str, Any], x: Any, y: Any) -> Any:
        return sp.mean(sp.square(layer(x, p["up"], p["down"]) - y))

    one, other = sp.grad(loss_again)(p, x, y), sp.grad(loss)(p, x, y)
    assert np.allclose(one["up"].to_dense(), other["up"].to_dense())


def traced() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    p = {
        "up": sp.abstract((1024, 4096), "float32", spec(mesh, "-, tp")),
        "down": sp.abstract((4096, 1024), "float32", spec(mesh, "tp, -")),
    }
    x = sp.abstract((2048, 1024), "float32", spec(mesh, "dp, -"))
    forward = sp.trace(loss, p, x, x)
    both = sp.trace(sp.value_and_grad(loss), p, x, x)
    print(forward.moved_bytes, both.moved_bytes)


def own_operator() -> None:
    @sp.gradient("cube")
    def cube_back(cotangent: Any, x: Any, result: Any) -> tuple[Any, ...]:
        return (cotangent * (3 * sp.square(x)),)

    sp.register(
        sp.Operator(
            "cube",
            "users' own",
            sp.operator_of("exp").infer,
            local=lambda work: lambda x: x * x * x,
            doc="Its third power.",
        )
    )
    assert sp.grad(lambda x: sp.sum(sp.cube(x)))(sp.array([2.0])).to_dense() == 12.0


if __name__ == "__main__":
    first_gradient()
    zero()
    again()
    traced()
    own_operator()
