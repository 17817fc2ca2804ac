"""What a network does on many devices, before any of it runs.

Run it anywhere: python examples/tracing.py [page.html]
No device is needed, and no memory: arrays are described by their shapes.
"""

import sys
from pathlib import Path

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.spmd import ShardedArray, Trace


def mlp(x: ShardedArray, up: ShardedArray, down: ShardedArray) -> ShardedArray:
    """A network's layer, written as if there were one device."""
    return x + sp.relu(x @ up) @ down


def block(x: ShardedArray, w: dict[str, ShardedArray]) -> ShardedArray:
    """A transformer's block, for `x` of shape `(batch, tokens, width)` and matrices by head."""
    normal = sp.rms_norm(x, w["norm"])
    q, k, v = (sp.einsum("btd,dhc->bhtc", normal, w[name]) for name in ("q", "k", "v"))
    mixed = sp.attention(q, k, v)
    x = x + sp.einsum("bhtc,hcd->btd", mixed, w["out"])
    return mlp(x, w["up"], w["down"])


def layer_in_eager_steps() -> Trace:
    """Tensor and data parallelism, each operation by itself."""
    mesh = DeviceMesh.of(dp=2, tp=4)
    x = sp.abstract((4096, 1024), "bfloat16", spec(mesh, "dp, -"))
    up = sp.abstract((1024, 4096), "bfloat16", spec(mesh, "-, tp"))
    down = sp.abstract((4096, 1024), "bfloat16", spec(mesh, "tp, -"))

    traced = sp.trace(mlp, x, up, down, topology=load_preset("h100-8").topology())
    print(traced)
    print(traced.reasons())
    assert traced.moved_bytes == 2 * 4 * (2 * 3 * 2048 * 1024 // 4) * 2
    return traced


def layer_with_propagated_shardings() -> Trace:
    """Only two arguments are annotated; the rest follows."""
    mesh = DeviceMesh.of(dp=2, tp=4)
    x = sp.abstract((64, 32), "float64", spec(mesh, "dp, -"))
    up = sp.abstract((32, 128), "float64", spec(mesh, "-, tp"))
    down = sp.abstract((128, 32), "float64")

    traced = sp.trace(mlp, x, up, down, strategy="aggressive")
    assert str(traced.inputs[2].spec) == "tp, -"
    print(traced)

    random = np.random.default_rng(0)
    a, b, c = (random.normal(size=one.shape) for one in (x, up, down))
    y = traced.run(a, b, c)
    assert str(y.spec) == "dp, -"
    assert np.allclose(y.to_dense(), a + np.maximum(a @ b, 0) @ c)
    return traced


def transformer_block() -> Trace:
    """Heads over `tp`, the batch over `dp`."""
    mesh = DeviceMesh.of(dp=2, tp=4)
    heads = spec(mesh, "-, tp, -")
    weights = {
        "norm": sp.abstract((1024,), "bfloat16"),
        "q": sp.abstract((1024, 16, 64), "bfloat16", heads),
        "k": sp.abstract((1024, 16, 64), "bfloat16", heads),
        "v": sp.abstract((1024, 16, 64), "bfloat16", heads),
        "out": sp.abstract((16, 64, 1024), "bfloat16", spec(mesh, "tp, -, -")),
        "up": sp.abstract((1024, 4096), "bfloat16", spec(mesh, "-, tp")),
        "down": sp.abstract((4096, 1024), "bfloat16", spec(mesh, "tp, -")),
    }
    x = sp.abstract((8, 512, 1024), "bfloat16", spec(mesh, "dp, -, -"))

    traced = sp.trace(block, x, weights, topology=load_preset("h100-8").topology())
    reshards = [str(one) for operation in traced.operations for one in operation.reshards]
    assert sum("all-reduce(tp)" in line for line in reshards) == 2
    return traced


def main() -> None:
    layer_in_eager_steps()
    layer_with_propagated_shardings()
    traced = transformer_block()
    print(traced)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(traced.html("a transformer's block"), encoding="utf-8")


if __name__ == "__main__":
    main()
