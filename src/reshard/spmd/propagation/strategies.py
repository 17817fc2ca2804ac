"""Propagation over a graph by any strategy, and over graphs of several meshes.

Only `x.shard(spec)` brings an array to another mesh, so a function splits into a part for each
mesh, to which a strategy assigns shardings separately:

    over x=2     %2 = matmul(%0, %1)              inputs %0, %1       returns %2
    between      %3 = with_sharding(%2)           over y=4 from here on
    over y=4     %5 = matmul(%3, %4)              inputs %3, %4       returns %5

An array without a mesh is replicated everywhere: it is an input of each part that reads it. A loop
or a branch may read arrays of several meshes, so it is between parts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import plain_spec, replicated
from reshard.spmd.graph import Graph, Shardings, Spec
from reshard.spmd.propagation.axes import AxisTable
from reshard.spmd.propagation.by_cost.cost_model import Machine
from reshard.spmd.propagation.by_cost.cost_propagation import propagate_by_cost
from reshard.spmd.propagation.partial_sums import keep_partial
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate_by_rules
from reshard.topology import Topology


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
        return propagate_by_cost(graph, annotations, outputs=outputs)
    return propagate_by_rules(
        graph,
        annotations,
        outputs=outputs,
        strategy=strategy,
        operator_priorities=operator_priorities,
        user_priorities=user_priorities,
    )


Place = Callable[[Graph, DeviceMesh], Shardings]
"""Chooses the shardings of a graph over one mesh."""


class MeshPart(NamedTuple):
    """The operations of a graph over a mesh.

    Args:
        mesh: the mesh.
        graph: a graph of these operations; its inputs have the requested shardings.
        numbers: the number in the whole graph of each of its values.
        places: the place in the whole graph of each of its operations.
    """

    mesh: DeviceMesh
    graph: Graph
    numbers: tuple[int, ...]
    places: tuple[int, ...]


def ranks_of(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """Return the ranks of meshes in their order, without duplicates; only 0 if there is no mesh.

    >>> ranks_of([DeviceMesh.of(x=2), DeviceMesh.of(y=3)])
    (0, 1, 2)
    """
    return tuple(dict.fromkeys(rank for mesh in meshes for rank in mesh.devices)) or (0,)


def place_parts(graph: Graph, place: Place) -> Graph:
    """Assign shardings to all values and operands, for each mesh separately.

    Over several meshes, a value without a mesh stays replicated, and each part reads it as it
    chooses.
    """
    if len(graph.meshes) == 1:
        return graph.with_shardings(*place(graph, graph.meshes[0]))
    values: list[Spec] = [None] * len(graph.values)
    reads: list[tuple[Spec, ...]] = [
        (None,) * len(operation.operands) for operation in graph.operations
    ]
    for operation in graph.operations:
        if operation.target is not None:
            values[operation.results[0]] = operation.target
    mesh_of = _find_meshes(graph)
    for part in mesh_parts(graph):
        part_values, part_reads = place(part.graph, part.mesh)
        without_mesh = {n for n, number in enumerate(part.numbers) if mesh_of[number] is None}
        for n, number in enumerate(part.numbers):
            if n not in without_mesh:
                values[number] = part_values[n]
        for at, operation, specs in zip(
            part.places, part.graph.operations, part_reads, strict=True
        ):
            reads[at] = tuple(
                part_values[n] if spec is None and n in without_mesh else spec
                for n, spec in zip(operation.operands, specs, strict=True)
            )
    return graph.with_shardings(values, reads)


def mesh_parts(graph: Graph) -> list[MeshPart]:
    """Split a graph into a part for each of its meshes."""
    mesh_of = _find_meshes(graph)
    # An operation that crosses to another mesh belongs to neither: its operand is an output of one
    # part, its result an input of another.
    crosses = [
        operation.body is not None
        or (
            operation.target is not None
            and mesh_of[operation.operands[0]] not in (None, operation.target.mesh)
        )
        for operation in graph.operations
    ]
    parts = (_make_part(graph, mesh, mesh_of, crosses) for mesh in graph.meshes)
    # A mesh that only the body of a loop or branch uses has nothing to place.
    return [part for part in parts if part.numbers]


def _find_meshes(graph: Graph) -> list[DeviceMesh | None]:
    """Return the mesh of each value, or None if it is replicated on every device."""
    mesh_of: list[DeviceMesh | None] = [None] * len(graph.values)
    for number in graph.inputs:
        spec = graph.values[number].sharding
        mesh_of[number] = None if spec is None else spec.mesh
    for operation in graph.operations:
        # Two meshes in an operator are refused when it is recorded.
        mesh = next((mesh_of[n] for n in operation.operands if mesh_of[n] is not None), None)
        if operation.target is not None:
            mesh = operation.target.mesh
        meshes = (
            (mesh,) * len(operation.results)
            if operation.body is None
            else operation.body.result_meshes
        )
        for number, value_mesh in zip(operation.results, meshes, strict=True):
            mesh_of[number] = value_mesh
    return mesh_of


def _make_part(
    graph: Graph,
    mesh: DeviceMesh,
    mesh_of: Sequence[DeviceMesh | None],
    crosses: Sequence[bool],
) -> MeshPart:
    part_operations = [
        (place, operation)
        for place, operation in enumerate(graph.operations)
        if mesh_of[operation.results[0]] is mesh and not crosses[place]
    ]
    computed = {number for _, operation in part_operations for number in operation.results}
    read = {number for _, operation in part_operations for number in operation.operands}
    inputs = sorted((read - computed) | {n for n in graph.inputs if mesh_of[n] is mesh})
    crossing = {
        n
        for place, operation in enumerate(graph.operations)
        if crosses[place]
        for n in operation.operands
    }
    outputs = [n for n in (*graph.outputs, *sorted(crossing)) if n in computed or n in inputs]
    numbers = tuple(sorted({*inputs, *computed}))
    requested = graph.requested
    part = graph.selected(
        inputs, [operation for _, operation in part_operations], list(dict.fromkeys(outputs))
    )
    part = part.with_shardings([requested.get(number) for number in numbers])
    return MeshPart(mesh, part, numbers, tuple(place for place, _ in part_operations))


def assign_shardings(
    graph: Graph, strategy: str, topology: Topology | None = None, library: str = "nccl"
) -> Graph:
    """Assign the shardings that a strategy chooses to all values of a recorded graph.

    With "eager", inputs keep their shardings, and operations decide about all other values.
    """
    if strategy == "eager" or not graph.meshes:
        shardings: list[Spec] = [None] * len(graph.values)
        for number in graph.inputs:
            spec = graph.values[number].sharding
            shardings[number] = None if spec is None else plain_spec(spec)
        return graph.with_shardings(shardings)
    machine = Machine(topology, library)

    def place(part: Graph, mesh: DeviceMesh) -> Shardings:
        if strategy == "cost":
            propagated = propagate_by_cost(part, part.requested, machine=machine)
        else:
            propagated = keep_partial(propagate_graph(part, part.requested, strategy=strategy))
        return shardings_from(propagated, mesh)

    return place_parts(graph, place)


def shardings_from(propagated: PropagatedGraph, mesh: DeviceMesh) -> Shardings:
    """Return the shardings of a propagated graph; values that were not reached are replicated."""
    values = tuple(
        replicated(mesh, len(value.shape)) if spec is None else plain_spec(spec)
        for value, spec in zip(propagated.graph.values, propagated.values, strict=True)
    )
    if propagated.runs is None:
        # Without any sharding nothing was propagated, and operations decide.
        return values, ((),) * len(propagated.graph.operations)
    close = AxisTable.of(mesh).closed
    return values, tuple([tuple(map(close, reads)) for reads, _ in propagated.runs])
