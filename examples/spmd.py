"""Arrays that live in shards: from a product on two devices to a network on eight.

Run it anywhere: python examples/spmd.py
All devices are simulated in this process; with `sp.running(sp.over_processes())` and torchrun the
same functions run with one shard in each process.
"""

import numpy as np

import reshard.spmd as sp
from reshard.spmd import DeviceMesh, DimSpec, ShardedArray, Tensor


def product_on_two_devices() -> ShardedArray:
    """A matrix cut by rows, times a whole one."""
    mesh = DeviceMesh("test", (2,), ("x",))
    a = Tensor.ones((4, 8)).trace()
    w = sp.ones((8, 3), dtype="float32")

    a_sharded = a.shard(mesh, [DimSpec(["x"]), DimSpec([])])
    b = a_sharded @ w
    assert str(b.spec) == "x, -"
    assert {rank: shard.shape for rank, shard in b.shards.items()} == {0: (2, 3), 1: (2, 3)}

    c = b.with_sharding(mesh, [DimSpec([]), DimSpec([])])
    assert c.shards[1].shape == (4, 3)
    assert np.array_equal(c.to_dense(), np.full((4, 3), 8.0))
    return c


def sums_that_wait(a: np.ndarray, w: np.ndarray) -> ShardedArray:
    """The inner dimension cut: each device has a contribution to the product."""
    mesh = DeviceMesh.of(x=2)
    columns = sp.array(a).shard(mesh, [[], ["x"]])
    b = columns @ sp.array(w)
    assert str(b.spec) == "-, - | sum(x)"

    twice = b + b
    assert str(twice.spec) == "-, - | sum(x)"

    raised = sp.exp(twice)
    assert str(raised.spec) == "-, -"
    assert np.allclose(raised.to_dense(), np.exp(2 * a @ w))

    traced = sp.trace(lambda a, w: sp.rms_norm(a @ w), columns, w)
    assert sum(operation.moved_bytes > 0 for operation in traced.operations) == 1
    return raised


def conflicts(a: np.ndarray) -> ShardedArray:
    """Operands that are cut differently: one of them moves."""
    mesh = DeviceMesh.of(x=2, y=3)
    rows, columns = sp.array(a).shard(mesh, [["x"], []]), sp.array(a).shard(mesh, [["y"], []])
    found = rows + columns
    assert str(found.spec) == "x, -"
    assert np.array_equal(found.to_dense(), a + a)

    fsdp = DeviceMesh.of(dp=2)
    tokens = sp.array(np.zeros((4, 3), np.int64)).shard(fsdp, [["dp"], []])
    table, weight = (sp.array(one).shard(fsdp, [["dp"], []]) for one in (a, a.T))
    embedded = sp.embedding(tokens, table)
    assert str(embedded.spec) == "dp, -, -"
    assert str((embedded @ weight).spec) == "dp, -, -"

    normal = sp.softmax(sp.array(a).shard(mesh, [["x"], ["y"]]), axis=1)
    assert str(normal.spec) == "x, y"
    assert np.allclose(np.sum(normal, axis=1), 1)
    return normal


def mlp(x: ShardedArray, w_in: ShardedArray, w_out: ShardedArray) -> ShardedArray:
    """A network's layer, written as if there were one device."""
    hidden = sp.relu(x @ w_in)
    return x + hidden @ w_out


def tensor_parallel_mlp(batch: np.ndarray, up: np.ndarray, down: np.ndarray) -> ShardedArray:
    """The batch over `dp`, the hidden dimension over `tp`."""
    mesh = DeviceMesh.of(dp=2, tp=4)
    x = sp.array(batch).shard(mesh, [["dp"], []])
    w_in = sp.array(up).shard(mesh, [[], ["tp"]])
    w_out = sp.array(down).shard(mesh, [["tp"], []])

    hidden = x @ w_in
    assert str(hidden.spec) == "dp, tp"
    product = sp.relu(hidden) @ w_out
    assert str(product.spec) == "dp, - | sum(tp)"

    y = mlp(x, w_in, w_out)
    assert str(y.spec) == "dp, -"
    return y


def gradient_of_data_parallelism(hidden: ShardedArray, error: ShardedArray) -> ShardedArray:
    """What the batch says of `w_out`: each `dp` rank has the part of its own rows."""
    gradient = hidden.T @ error
    assert str(gradient.spec) == "tp, - | sum(dp)"

    shared = gradient.with_sharding(gradient.mesh, [["tp"], []])
    zero = gradient.with_sharding(gradient.mesh, [["tp"], ["dp"]])
    assert shared.shards[0].shape == (16, 16) and zero.shards[0].shape == (16, 8)
    return shared


class Ledger:
    """Writes down what is done."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def record(self, call, operands, results) -> None:
        self.lines.append(f"{call.name} -> {results[0].spec}")

    def record_reshard(self, operand, result) -> None:
        self.lines.append(f"reshard {operand.spec} -> {result.spec}")


def what_was_done(x: ShardedArray, w_in: ShardedArray, w_out: ShardedArray) -> list[str]:
    """The operations of the layer, in order."""
    ledger = Ledger()
    with sp.recording(ledger):
        mlp(x, w_in, w_out)
    return ledger.lines


def main() -> None:
    random = np.random.default_rng(0)
    product_on_two_devices()
    sums_that_wait(random.normal(size=(5, 7)), random.normal(size=(7, 3)))
    conflicts(random.normal(size=(7, 5)))

    batch, up, down = (random.normal(size=s) for s in ((6, 16), (16, 64), (64, 16)))
    y = tensor_parallel_mlp(batch, up, down)
    assert np.allclose(y.to_dense(), batch + np.maximum(batch @ up, 0) @ down)

    mesh = DeviceMesh.of(dp=2, tp=4)
    x = sp.array(batch).shard(mesh, [["dp"], []])
    w_in, w_out = sp.array(up).shard(mesh, [[], ["tp"]]), sp.array(down).shard(mesh, [["tp"], []])
    hidden = sp.relu(x @ w_in)
    gradient = gradient_of_data_parallelism(hidden, y)
    assert np.allclose(gradient.to_dense(), np.asarray(hidden).T @ np.asarray(y))
    for line in what_was_done(x, w_in, w_out):
        print(line)


if __name__ == "__main__":
    main()
