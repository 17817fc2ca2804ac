"""Propagation over a graph by any strategy: by rules (`merging`), or by cost."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.sharding import ShardingSpec
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.by_cost.cost_propagation import propagate_by_cost
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate_by_rules


def propagate_graph(
    graph: Graph,
    annotations: Mapping[int, ShardingSpec],
    *,
    outputs: Mapping[int, ShardingSpec] | None = None,
    strategy: str = "aggressive",
    operator_priorities: bool = True,
    user_priorities: bool = True,
) -> PropagatedGraph:
    """Infer the shardings of all values of a graph.

    Args:
        graph: the function.
        annotations: shardings of some values, by their numbers.
        outputs: requested shardings of outputs, by their position.
        strategy: "basic", "prioritized", "aggressive", "widest", or "cost": the shardings with the
            least estimated time on the default machine, see
            `reshard.spmd.propagation.by_cost.cost_propagation`.
        operator_priorities: whether some operators propagate before others.
        user_priorities: whether to use the priorities of dimensions; otherwise all propagate at
            once.

    Raises:
        SpecError: shardings of several meshes, for a value that does not exist or has another
            number of dimensions; an unknown strategy.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(a=2, b=2)
    >>> graph = Graph.parse('''%0: float32[8, 8], %1: float32[8, 8]
    ... %2: float32[8, 8] = add(%0, %1) ([i, j], [i, j]) -> ([i, j]) {i=8, j=8}
    ... return %2''')
    >>> print(propagate_graph(graph, {0: spec(mesh, "a, b")}))
    %0: float32[8, 8]  a, b
    %1: float32[8, 8]  a ?, b ?
    %2: float32[8, 8]  a ?, b ?
    return  a ?, b ?
    """
    if strategy == "cost":
        return propagate_by_cost(graph, annotations, outputs=outputs).propagated
    return propagate_by_rules(
        graph,
        annotations,
        outputs=outputs,
        strategy=strategy,
        operator_priorities=operator_priorities,
        user_priorities=user_priorities,
    )
