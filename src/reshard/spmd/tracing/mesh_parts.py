"""Mesh parts: a recorded function over several meshes, as one function per mesh.

An array comes to another mesh by `x.shard(spec)` alone, so that a function falls into parts, one a
mesh, each a graph that strategies place by itself:

    over x=2     %2 = matmul(%0, %1)              inputs %0, %1       returns %2
    between      %3 = with_sharding(%2)           over y=4 from here on
    over y=4     %5 = matmul(%3, %4)              inputs %3, %4       returns %5

What is over no mesh is whole everywhere: parts that read it have it as an input. A loop or a branch
may read arrays of several meshes, and stands between parts likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.propagation.graph import Graph, Operation
from reshard.spmd.tracing.graph_recording import Recording

Spec = ShardingSpec | None
Place = Callable[
    [Graph, dict[int, ShardingSpec], DeviceMesh],
    tuple[Sequence[Spec], Sequence[Sequence[Spec]]],
]
"""Shardings of a graph's values and of each operation's operands, from those of some values."""


@dataclass(frozen=True, slots=True)
class MeshPart:
    """What a function does over one mesh.

    Args:
        mesh: of its shardings.
        graph: of its operations.
        numbers: of its values in the whole graph, by their numbers in this one.
        places: of its operations among all.
        known: shardings that are asked for, by its own numbers.
    """

    mesh: DeviceMesh
    graph: Graph
    numbers: tuple[int, ...]
    places: tuple[int, ...]
    known: dict[int, ShardingSpec]


def meshes_of(recorded: Recording) -> tuple[DeviceMesh, ...]:
    """The meshes of a recorded function, in the order in which it names them."""
    given = [kind.spec for kind in recorded.types if kind is not None]
    named = [spec.mesh for spec in given if spec is not None]
    for action in recorded.recorded_calls:
        if action.target is not None:
            named.append(action.target.mesh)
        if action.run is not None:
            named += action.run.meshes
    return tuple(dict.fromkeys(named))


def ranks_of(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """The ranks of some meshes, each once, in their order; 0 alone where there is no mesh.

    >>> ranks_of([DeviceMesh.of(x=2), DeviceMesh.of(y=3)])
    (0, 1, 2)
    """
    return tuple(dict.fromkeys(rank for mesh in meshes for rank in mesh.devices)) or (0,)


def mesh_parts(recorded: Recording) -> list[MeshPart]:
    """The parts of a recorded function, one for each of its meshes."""
    over = _find_meshes(recorded)
    # What crosses to another mesh belongs to neither: it is an output of one, an input of another.
    crosses = [
        action.run is not None
        or (
            action.target is not None
            and over[operation.operands[0]] not in (None, action.target.mesh)
        )
        for operation, action in zip(
            recorded.graph.operations, recorded.recorded_calls, strict=True
        )
    ]
    parts = (_make_part(recorded, mesh, over, crosses) for mesh in meshes_of(recorded))
    # Over a mesh that only a loop or a branch names, there is nothing to place.
    return [part for part in parts if part.numbers]


def place_parts(recorded: Recording, place: Place) -> tuple[list[Spec], list[tuple[Spec, ...]]]:
    """Shardings of all values and operands, each part being placed by itself.

    What is over no mesh stays whole where there are several; each part reads it as it wants it.
    """
    graph = recorded.graph
    meshes = meshes_of(recorded)
    if len(meshes) == 1:
        found, wanted = place(graph, _find_asked(recorded), meshes[0])
        return list(found), [tuple(reads) for reads in wanted]
    values: list[Spec] = [None] * len(graph.values)
    operands: list[tuple[Spec, ...]] = [(None,) * len(one.operands) for one in graph.operations]
    for operation, action in zip(graph.operations, recorded.recorded_calls, strict=True):
        if action.target is not None:
            values[operation.results[0]] = action.target
    parts = mesh_parts(recorded)
    over = _find_meshes(recorded)
    for part in parts:
        found, wanted = place(part.graph, part.known, part.mesh)
        whole = {n for n, number in enumerate(part.numbers) if over[number] is None}
        for n, number in enumerate(part.numbers):
            if n not in whole:
                values[number] = found[n]
        for at, operation, reads in zip(part.places, part.graph.operations, wanted, strict=True):
            operands[at] = tuple(
                found[n] if spec is None and n in whole else spec
                for n, spec in zip(operation.operands, reads, strict=True)
            )
    return values, operands


def _find_meshes(recorded: Recording) -> list[DeviceMesh | None]:
    """The mesh of each value; None for what is whole on every device."""
    graph = recorded.graph
    over: list[DeviceMesh | None] = [None] * len(graph.values)
    for number, kind in zip(graph.inputs, recorded.types, strict=True):
        if kind is not None and kind.spec is not None:
            over[number] = kind.spec.mesh
    for operation, action in zip(graph.operations, recorded.recorded_calls, strict=True):
        # Two meshes in one operator are refused when it is recorded.
        mesh = next((over[n] for n in operation.operands if over[n] is not None), None)
        if action.target is not None:
            mesh = action.target.mesh
        meshes = action.meshes or (mesh,) * len(operation.results)
        for number, one in zip(operation.results, meshes, strict=True):
            over[number] = one
    return over


def _make_part(
    recorded: Recording,
    mesh: DeviceMesh,
    over: Sequence[DeviceMesh | None],
    crosses: Sequence[bool],
) -> MeshPart:
    graph = recorded.graph
    own: list[tuple[int, Operation]] = [
        (place, one)
        for place, one in enumerate(graph.operations)
        if over[one.results[0]] is mesh and not crosses[place]
    ]
    made = {number for _, one in own for number in one.results}
    read = {number for _, one in own for number in one.operands}
    inputs = sorted((read - made) | {n for n in graph.inputs if over[n] is mesh})
    left = {n for place, one in enumerate(graph.operations) if crosses[place] for n in one.operands}
    outputs = [n for n in (*graph.outputs, *sorted(left)) if n in made or n in inputs]
    numbers = tuple(sorted({*inputs, *made}))
    new = {number: place for place, number in enumerate(numbers)}

    def renumbered(some: Sequence[int]) -> tuple[int, ...]:
        return tuple(new[number] for number in some)

    known = {new[n]: spec for n, spec in _find_asked(recorded).items() if n in new}
    part = Graph(
        tuple(replace(graph.values[number], index=new[number]) for number in numbers),
        renumbered(inputs),
        tuple(
            replace(one, operands=renumbered(one.operands), results=renumbered(one.results))
            for _, one in own
        ),
        renumbered(list(dict.fromkeys(outputs))),
    )
    return MeshPart(mesh, part, numbers, tuple(place for place, _ in own), known)


def _find_asked(recorded: Recording) -> dict[int, ShardingSpec]:
    """The shardings that are given for inputs and asked for by `with_sharding`, by value."""
    graph = recorded.graph
    asked = {
        number: kind.spec
        for number, kind in zip(graph.inputs, recorded.types, strict=True)
        if kind is not None and kind.spec is not None
    }
    for operation, action in zip(graph.operations, recorded.recorded_calls, strict=True):
        if action.target is not None:
            asked[operation.results[0]] = action.target
    return asked
