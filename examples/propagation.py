"""A few shardings of a small network, and those of everything else that follow from them.

Run it: python examples/propagation.py
"""

from reshard import DeviceMesh, spec
from reshard.spmd import Graph, explicit_reshards, propagate_by_cost, propagate_graph, rule_of


def two_layers() -> Graph:
    """x @ w1, relu, @ w2: values 0 to 2 are x, w1 and w2."""
    return Graph.of(
        [(32, 64), (64, 256), (256, 64)],
        [
            ("matmul", [0, 1], rule_of("matmul", [(32, 64), (64, 256)])),
            ("relu", [3], rule_of("relu", [(32, 256)])),
            ("matmul", [4, 2], rule_of("matmul", [(32, 256), (256, 64)])),
        ],
        [5],
    )


def main() -> None:
    mesh = DeviceMesh.of(dp=2, tp=4)
    graph = two_layers()
    given = {0: spec(mesh, "dp, -"), 1: spec(mesh, "-, tp"), 2: spec(mesh, "tp, -")}
    found = propagate_graph(graph, given)
    print(found)
    print(explicit_reshards(found))

    costed = propagate_by_cost(graph, given)
    exactly = "the least" if costed.is_exact else "near the least"
    print(f"{costed.seconds_s * 1e6:.1f} microseconds, {exactly}")


if __name__ == "__main__":
    main()
