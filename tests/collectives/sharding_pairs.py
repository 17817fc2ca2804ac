"""Strategies of pairs of shardings over the same devices."""

from __future__ import annotations

import math

from hypothesis import strategies as st

import reshard
from reshard.mesh import Axis
from reshard.sharding import DimSpec, Level, ShardingSpec
from strategies import axis_parts

NAMES = "xyzw"
Pair = tuple[ShardingSpec, ShardingSpec, tuple[int, ...]]


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 24) -> reshard.DeviceMesh:
    """Meshes of up to 4 axes of sizes 1 to 12, their devices in any order."""
    sizes: list[int] = []
    for _ in range(draw(st.sampled_from([2, 3, 1, 4]))):
        room = max_devices // math.prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in (2, 3, 4, 1, 6, 5, 8, 12) if n <= room])))
    return mesh_of(sizes, draw(orders(math.prod(sizes))))


def mesh_of(sizes: list[int], devices: list[int] | None) -> reshard.DeviceMesh:
    return reshard.DeviceMesh("mesh", sizes, list(NAMES[: len(sizes)]), devices)


def orders(size: int) -> st.SearchStrategy[list[int] | None]:
    return st.one_of(st.none(), st.none(), st.permutations(range(size)))


@st.composite
def shardings(
    draw: st.DrawFn,
    mesh: reshard.DeviceMesh,
    dims: int,
    partial: frozenset[Axis] = frozenset(),
    reduction: str = "sum",
) -> ShardingSpec:
    """A sharding with sub-axes, and levels cut by ceil, partial along some whole axes."""
    uses: dict[int, list[Axis]] = {}
    whole = {axis.name for axis in partial}
    for axis in draw(axis_parts(mesh)):
        if axis.name in whole:
            continue
        place = draw(st.integers(-1, dims - 1))
        if place >= 0:
            uses.setdefault(place, []).append(axis)
    found = []
    for dim in range(dims):
        levels: list[Level] = []
        rest = uses.get(dim, [])
        while rest:
            count = len(rest) if draw(st.sampled_from([True, True, False])) else 1
            levels.append(Level(rest[:count]))
            rest = rest[count:]
        found.append(DimSpec(levels))
    return ShardingSpec(mesh, found, (), sorted(partial), reduction)


@st.composite
def pairs(draw: st.DrawFn, max_devices: int = 24, partials: bool = True) -> Pair:
    """Two shardings over one mesh, or over the same devices in another order or shape."""
    mesh = draw(meshes(max_devices))
    other = mesh
    way = draw(st.sampled_from(["same", "same", "same", "order", "shape"]))
    if way == "order":
        devices = draw(st.permutations(sorted(mesh.devices)))
        other = mesh_of(list(mesh.shape), list(devices))
    if way == "shape":
        other = mesh_of([mesh.size], list(mesh.devices))
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    largest = {1: 40, 2: 14, 3: 8}[dims]
    shape = tuple(draw(st.integers(1, largest)) for _ in range(dims))
    before: frozenset[Axis] = frozenset()
    after: frozenset[Axis] = frozenset()
    reduction = draw(st.sampled_from(["sum", "max", "min", "product"]))
    if partials and draw(st.booleans()):
        before = frozenset(draw(st.sets(st.sampled_from([Axis(n) for n in mesh.axis_names]))))
        if way == "same":
            after = frozenset(axis for axis in before if draw(st.booleans()))
    source = draw(shardings(mesh, dims, before, reduction))
    return source, draw(shardings(other, dims, after, reduction)), shape
