"""Microseconds of a processor that propagation over a transformer takes for an operator.

    .venv/bin/python benchmarks/propagation.py --layers 30

The model: per layer 68 operators (projections, heads split by reshapes, rotary positions, attention
with softmax by its parts, residuals, two norms by their parts, a gated MLP), batch cut over `dp`,
weights over `tp` as in Megatron. 30 layers are about 2,000 operators.

Strategy "cost" as well on small graphs over three axes, gated MLPs with residuals, 7
operators a layer: the first time, with all that is found for a mesh and shapes, and again.
"""

from __future__ import annotations

import argparse
import statistics
import time

from reshard import DeviceMesh, spec
from reshard.sharding import ShardingSpec
from reshard.spmd.core.operator import operator_of
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.propagation.by_cost.cost_propagation import propagate_by_cost
from reshard.spmd.propagation.partial_sums import keep_partial
from reshard.spmd.propagation.reshards import explicit_reshards
from reshard.spmd.propagation.strategies import propagate_graph

BATCH, LENGTH, HEADS, WIDTH = 8, 1024, 16, 64
MODEL, HIDDEN = HEADS * WIDTH, 4 * HEADS * WIDTH


class Model:
    """Builds the graph."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.inputs: list[int] = []
        self.operations: list[Operation] = []
        self.annotations: dict[int, str] = {}

    def argument(self, shape: tuple[int, ...], sharding: str | None = None) -> int:
        number = len(self.values)
        self.values.append(Value(number, shape))
        self.inputs.append(number)
        if sharding is not None:
            self.annotations[number] = sharding
        return number

    def do(self, name: str, *operands: int, **attributes: object) -> int:
        shapes = [self.values[operand].shape for operand in operands]
        found = operator_of(name).inferred(shapes, **attributes)
        results = []
        for shape in found.result_shapes:
            results.append(len(self.values))
            self.values.append(Value(len(self.values), tuple(shape)))
        self.operations.append(
            Operation(name, operands, tuple(results), found.rule, dict(attributes))
        )
        return results[0]

    def norm(self, x: int) -> int:
        shape = self.values[x].shape
        mean = self.do("mean", self.do("square", x), axis=2, keepdims=True)
        shifted = self.do("add", mean, self.argument((1, 1, 1)))
        scale = self.do("broadcast_to", self.do("rsqrt", shifted), shape=shape)
        weight = self.do("broadcast_to", self.argument((1, 1, MODEL)), shape=shape)
        return self.do("multiply", self.do("multiply", x, scale), weight)

    def heads(self, x: int) -> int:
        weight = self.argument((MODEL, MODEL), "-, tp")
        bias = self.do("broadcast_to", self.argument((MODEL,)), shape=(BATCH, LENGTH, MODEL))
        y = self.do("add", self.do("matmul", x, weight), bias)
        y = self.do("reshape", y, shape=(BATCH, LENGTH, HEADS, WIDTH))
        return self.do("permute_dims", y, axes=(0, 2, 1, 3))

    def rotated(self, x: int) -> int:
        shape = self.values[x].shape
        tables = [self.argument((1, 1, LENGTH, WIDTH)) for _ in range(2)]
        cos, sin = (self.do("broadcast_to", one, shape=shape) for one in tables)
        turned = self.do("multiply", self.do("negative", x), sin)
        return self.do("add", self.do("multiply", x, cos), turned)

    def softmax(self, x: int) -> int:
        shape = self.values[x].shape
        high = self.do("broadcast_to", self.do("max", x, axis=3, keepdims=True), shape=shape)
        grown = self.do("exp", self.do("subtract", x, high))
        total = self.do("broadcast_to", self.do("sum", grown, axis=3, keepdims=True), shape=shape)
        return self.do("divide", grown, total)

    def layer(self, x: int) -> int:
        normed = self.norm(x)
        q, k, v = (self.heads(normed) for _ in range(3))
        q, k = self.rotated(q), self.rotated(k)
        scores = self.do("matmul", q, self.do("permute_dims", k, axes=(0, 1, 3, 2)))
        shape = self.values[scores].shape
        scale = self.do("broadcast_to", self.argument((1, 1, 1, 1)), shape=shape)
        mask = self.do("broadcast_to", self.argument((1, 1, LENGTH, LENGTH)), shape=shape)
        weights = self.softmax(self.do("add", self.do("multiply", scores, scale), mask))
        out = self.do("permute_dims", self.do("matmul", weights, v), axes=(0, 2, 1, 3))
        out = self.do("reshape", out, shape=(BATCH, LENGTH, MODEL))
        x = self.do("add", x, self.do("matmul", out, self.argument((MODEL, MODEL), "tp, -")))
        normed = self.norm(x)
        gate = self.do("matmul", normed, self.argument((MODEL, HIDDEN), "-, tp"))
        up = self.do("matmul", normed, self.argument((MODEL, HIDDEN), "-, tp"))
        wide = self.do("multiply", self.do("multiply", gate, self.do("sigmoid", gate)), up)
        down = self.do("matmul", wide, self.argument((HIDDEN, MODEL), "tp, -"))
        return self.do("add", x, down)


def transformer(layers: int) -> tuple[Graph, dict[int, ShardingSpec]]:
    """A transformer's graph, and the shardings of its batch and weights."""
    mesh = DeviceMesh.of(dp=2, tp=4)
    model = Model()
    x = model.argument((BATCH, LENGTH, MODEL), "dp, -, -")
    for _ in range(layers):
        x = model.layer(x)
    graph = Graph(tuple(model.values), tuple(model.inputs), tuple(model.operations), (x,))
    return graph, {number: spec(mesh, text) for number, text in model.annotations.items()}


def gated(layers: int) -> tuple[Graph, dict[int, ShardingSpec]]:
    """Gated MLPs over a mesh of three axes."""
    mesh = DeviceMesh.of(a=2, b=2, c=2)
    model = Model()
    x = model.argument((64, 256), "a, -")
    for _ in range(layers):
        gate, up = (model.do("matmul", x, model.argument((256, 1024), "-, b")) for _ in range(2))
        wide = model.do("multiply", model.do("multiply", gate, model.do("sigmoid", gate)), up)
        down = model.do("matmul", wide, model.argument((1024, 256), "b, c"))
        x = model.do("add", x, down)
    graph = Graph(tuple(model.values), tuple(model.inputs), tuple(model.operations), (x,))
    return graph, {number: spec(mesh, text) for number, text in model.annotations.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    graph, annotations = transformer(chosen.layers)
    count = len(graph.operations)
    print(f"{chosen.layers} layers, {count} operators")
    for strategy in ("basic", "aggressive"):
        taken = []
        for _ in range(chosen.repeats):
            start = time.process_time()
            found = propagate_graph(graph, annotations, strategy=strategy)
            taken.append(time.process_time() - start)
        each_us = statistics.median(taken) / count * 1e6
        print(f"{strategy:12} {each_us:6.1f} us an operator (first {taken[0] / count * 1e6:.1f})")
    start = time.process_time()
    placed = explicit_reshards(found)
    each_us = (time.process_time() - start) / count * 1e6
    print(f"{'reshards':12} {each_us:6.1f} us an operator; {len(placed.moved)} movements")
    start = time.process_time()
    waiting = explicit_reshards(keep_partial(found))
    each_us = (time.process_time() - start) / count * 1e6
    print(f"{'sums wait':12} {each_us:6.1f} us an operator; {len(waiting.moved)} movements")
    for exact in (None, False):
        start = time.process_time()
        costed = propagate_by_cost(graph, annotations, exact=exact)
        each_us = (time.process_time() - start) / count * 1e6
        name = "cost" if exact is None else "cost, descent"
        others = ", ".join(f"{one} {other_s:.4f} s" for one, other_s in costed.others_s.items())
        print(f"{name:12} {each_us:6.1f} us an operator; {costed.seconds_s:.4f} s ({others})")
    for layers in (1, 2, 3):
        graph, annotations = gated(layers)
        taken = []
        for _ in range(chosen.repeats):
            start = time.process_time()
            costed = propagate_by_cost(graph, annotations)
            taken.append(time.process_time() - start)
        exact = "exact" if costed.is_exact else "by formulas and prices"
        each_s = f"{statistics.median(taken):.3f} s (first {taken[0]:.3f})"
        found_us = costed.seconds_s * 1e6
        print(
            f"cost, 3 axes {len(graph.operations)} operators {each_s}, {exact}; {found_us:.2f} us"
        )


if __name__ == "__main__":
    main()
