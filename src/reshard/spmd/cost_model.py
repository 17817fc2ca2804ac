"""How long do operators and movements between shardings take?

What the third strategy of propagation compares. Estimates, not measurements:

========================================  ====================================================
compute                                   the busiest device's share: additions and products
                                          over the device's rate, or bytes over its memory's
contributions that are no longer partial  reduce-scatter where the axes cut a dimension then,
                                          all-reduce else
axes that go to another dimension         all-to-all
axes that cut no more                     all-gather
axes that begin to cut, or to be partial  nothing: each device keeps a part of what it has
========================================  ====================================================

Each by the formulas of `reshard.cost`, on the slowest of the groups, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from reshard.cost.collective import collective_cost
from reshard.cost.preset_file import load_preset
from reshard.mesh import DeviceMesh
from reshard.spmd.axis_parts import AxisTable, Parts, Sharding, size_of
from reshard.spmd.sharding_rule import OpShardingRule
from reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """What the cost model knows of the devices.

    Args:
        topology: the links between ranks; `h100-8` hosts, as many as the mesh needs, when None.
        library: of the collectives, a key of `reshard.cost.LIBRARIES`.
        operations_per_s: additions and products that a device does in a second.
        memory_bytes_per_s: that it reads and writes in a second.
    """

    topology: Topology | None = None
    library: str = "nccl"
    operations_per_s: float = 4e14
    memory_bytes_per_s: float = 2.5e12

    def topology_for(self, mesh: DeviceMesh) -> Topology:
        """The links between the mesh's ranks."""
        if self.topology is not None:
            return self.topology
        preset = load_preset("h100-8")
        hosts = -(-(max(mesh.devices) + 1) // preset.ranks_per_host)
        return preset.topology(hosts)


@dataclass(slots=True)
class CostModel:
    """Seconds, over the axes of one mesh.

    >>> from reshard import spec
    >>> mesh = DeviceMesh.of(x=4)
    >>> model = CostModel(AxisTable.of(mesh), Machine())
    >>> cut, whole = (model.table.encoded(spec(mesh, text)) for text in ("x, -", "-, -"))
    >>> model.movement_s(cut, whole, (1024, 1024), 4) > 0.0
    True
    >>> model.movement_s(whole, cut, (1024, 1024), 4)
    0.0
    """

    table: AxisTable
    machine: Machine
    _collectives: dict[tuple[str, Parts, int], float] = field(default_factory=dict)
    _groups: dict[Parts, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def movement_s(
        self, source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bytes: int
    ) -> float:
        """The time in which a tensor of `shape` goes from one sharding to another."""
        if source.dims == target.dims and source.partial == target.partial:
            return 0.0
        held_bytes = local_elements(shape, source.dims) * itemsize_bytes
        leaving = [
            (dim, part)
            for dim, (old, new) in enumerate(zip(source.dims, target.dims, strict=True))
            for part in old[_same(old, new) :]
        ]
        coming = {
            part[:3]
            for old, new in zip(source.dims, target.dims, strict=True)
            for part in new[_same(old, new) :]
        }
        reduced = tuple(part for part in source.partial if part not in target.partial)
        scattered = tuple(part for part in reduced if part[:3] in coming)
        added = tuple(part for part in reduced if part[:3] not in coming)
        total = self._seconds("reduce-scatter", scattered, held_bytes)
        held_bytes = -(-held_bytes // size_of(scattered))
        total += self._seconds("all-reduce", added, held_bytes)
        moving = tuple(part for _, part in leaving if part[:3] in coming)
        gathered = tuple(part for _, part in leaving if part[:3] not in coming)
        kept_bytes = local_elements(shape, target.dims) * itemsize_bytes
        total += self._seconds("all-to-all", moving, min(held_bytes, kept_bytes))
        return total + self._seconds("all-gather", gathered, kept_bytes)

    def _seconds(self, kind: str, axes: Parts, size_bytes: int) -> float:
        if not axes or not size_bytes:
            return 0.0
        found = self._collectives.get((kind, axes, size_bytes))
        if found is None:
            topology = self.machine.topology_for(self.table.mesh)
            groups = self._groups.get(axes)
            if groups is None:
                groups = self.table.mesh.groups([self.table.axis(part) for part in axes])
                self._groups[axes] = groups
            found = max(
                collective_cost(kind, ranks, size_bytes, topology, self.machine.library).seconds_s
                for ranks in groups
            )
            self._collectives[kind, axes, size_bytes] = found
        return found

    def compute_s(self, rule: OpShardingRule, cuts: Sequence[Parts], itemsize_bytes: int) -> float:
        """The time that the busiest device takes for an operator cut so along its factors."""
        sizes = [-(-size // size_of(axes)) for size, axes in zip(rule.sizes, cuts, strict=True)]
        arrays = sum(bool(mapping) for mapping in rule.operands)
        operations = math.prod(sizes) * (2 if rule.reduction and arrays > 1 else 1)
        moved = sum(
            math.prod(sizes[factor] for dim in mapping for factor in dim)
            for mapping in rule.tensors
        )
        return max(
            operations / self.machine.operations_per_s,
            moved * itemsize_bytes / self.machine.memory_bytes_per_s,
        )


def _same(old: Parts, new: Parts) -> int:
    """How many axes two cuts of a dimension have in common, from the major one on."""
    count = 0
    for one, other in zip(old, new, strict=False):
        if one != other:
            break
        count += 1
    return count


def local_elements(shape: Sequence[int], dims: Sequence[Parts]) -> int:
    """Elements of the largest shard.

    >>> local_elements((5, 4), [((0, 1, 2, 0),), ()])
    12
    """
    found = 1
    for size, axes in zip(shape, dims, strict=True):
        found *= -(-size // size_of(axes))
    return found
