"""Cost model: estimated seconds of operators and of movements between shardings.

What the third strategy of propagation compares. Estimates, not measurements:

compute     the busiest device's share, as traces count it (`operator_work`)
movements   the program that is run between two shardings (`chosen_program`), on the topology

A program is searched for, which takes milliseconds. Where there are too many movements to compare,
formulas stand in, each on the slowest of the groups, in this order:

========================================  ====================================================
axes that begin to cut, or to be partial  nothing: each device keeps a part of what it has
contributions that are no longer partial  reduce-scatter where the axes cut a dimension then,
                                          all-reduce else
axes that go to another dimension         all-to-all
axes that cut no more                     all-gather
========================================  ====================================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from reshard.cost.collective import collective_cost
from reshard.cost.formulas import check_library
from reshard.cost.preset_file import load_preset
from reshard.dtypes import DType
from reshard.errors import LayoutError, UsageError
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray
from reshard.spmd.array_type import ArrayType
from reshard.spmd.propagation.axis_parts import AxisTable, Part, Parts, Sharding, are_alike, size_of
from reshard.spmd.propagation.operator_work import least_s, moved_bytes, operations_of
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.topology import Device, Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices and links that the cost model assumes.

    Args:
        topology: the links between ranks; `h100-8` hosts, as many as the mesh needs, when None.
        library: of the collectives, a key of `reshard.cost.LIBRARIES`.
        operations_per_s: additions and products that a device does in a second, of any type; as
            the topology says when None, and as an H100 does where that says nothing.
        memory_bytes_per_s: that it reads and writes in a second; likewise.

    Raises UsageError for what is no topology, an unknown library, a speed that cannot be.

    >>> Machine(operations_per_s=1e12).device.operations_for("bfloat16")
    1000000000000.0
    """

    topology: Topology | None = None
    library: str = "nccl"
    operations_per_s: float | None = None
    memory_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise UsageError(
                f"{self.topology!r} is no Topology; give one, such as "
                'reshard.cost.load_preset("h100-8").topology()'
            )
        check_library(self.library)
        for name in ("operations_per_s", "memory_bytes_per_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value!r}; a finite number, more than 0, was expected")

    @property
    def device(self) -> Device:
        """How fast each rank computes."""
        known = None if self.topology is None else self.topology.device
        found = known or load_preset("h100-8").device
        if found is None:
            raise LayoutError("preset h100-8 says nothing of devices; give a topology that does")
        if self.operations_per_s is self.memory_bytes_per_s is None:
            return found
        rates = found.operations_per_s
        if self.operations_per_s is not None:
            rates = (("any", self.operations_per_s),)
        return Device(self.memory_bytes_per_s or found.memory_bytes_per_s, rates)

    def topology_for(self, mesh: DeviceMesh) -> Topology:
        """The links between the mesh's ranks."""
        if self.topology is not None:
            return self.topology
        preset = load_preset("h100-8")
        # As many hosts as the highest rank needs.
        hosts = -(-(max(mesh.devices) + 1) // preset.ranks_per_host)
        return preset.topology(hosts)


@dataclass
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
    _of_devices: dict[tuple[Parts, int], tuple[IntArray, IntArray]] = field(default_factory=dict)

    def movement_s(
        self, source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bytes: int
    ) -> float:
        """The time in which a tensor of `shape` goes from one sharding to another, by formulas."""
        if are_alike(source, target):
            return 0.0
        # 1. Axes that stop cutting a dimension, and those that begin to, wherever dimensions
        # differ.
        leaving: list[Part] = []
        coming: set[tuple[int, int, int]] = set()
        for old, new in zip(source.dims, target.dims, strict=True):
            if old != new:
                same = _count_same(old, new)
                leaving += old[same:]
                coming.update(part[:3] for part in new[same:])
        # 2. Contributions that remain, and those that are combined.
        kept = target.partial if source.reduction == target.reduction else ()
        reduced = [part for part in source.partial if part not in kept]
        # Axes that nothing else uses cut at once, and all that follows is of what is left.
        taken = {part[:3] for part in (*reduced, *leaving)}
        held_bytes = local_elements(shape, source.dims) * itemsize_bytes
        held_bytes = -(-held_bytes // math.prod(part[2] for part in coming - taken))
        # 3. Reduce-scatter, all-reduce, all-to-all, all-gather, each on what the one before leaves.
        scattered = tuple(part for part in reduced if part[:3] in coming)
        added = tuple(part for part in reduced if part[:3] not in coming)
        total = self._collective_seconds("reduce-scatter", scattered, held_bytes)
        held_bytes = -(-held_bytes // size_of(scattered))
        total += self._collective_seconds("all-reduce", added, held_bytes)
        moving = tuple(part for part in leaving if part[:3] in coming)
        gathered = tuple(part for part in leaving if part[:3] not in coming)
        kept_bytes = local_elements(shape, target.dims) * itemsize_bytes
        total += self._collective_seconds("all-to-all", moving, min(held_bytes, kept_bytes))
        return total + self._collective_seconds("all-gather", gathered, kept_bytes)

    def bound_s(
        self, source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bytes: int
    ) -> float:
        """A lower bound for all programs: what some rank lacks comes in one message at least.

        Of contributions that are combined a rank lacks others' for all of its part. Where
        contributions remain the bound is 0: they may lie anywhere.
        """
        parts = itertools.chain.from_iterable((*source.dims, *target.dims))
        if are_alike(source, target) or target.partial or any(part[3] for part in parts):
            return 0.0
        # An entry a device: the elements of its target part, and those of it that it has already.
        lacking = there = np.ones(self.table.mesh.size, dtype=np.int64)
        for size, old, new in zip(shape, source.dims, target.dims, strict=True):
            low, high = self._find_ranges(old, size)
            first, last = self._find_ranges(new, size)
            lacking = lacking * (last - first)
            there = there * np.maximum(np.minimum(high, last) - np.maximum(low, first), 0)
        if not source.partial:
            lacking = lacking - there
        most = int(lacking.max())
        if not most:
            return 0.0
        latency_s, bandwidth_bytes_per_s = self._find_quickest
        return latency_s + most * itemsize_bytes / bandwidth_bytes_per_s

    def _find_ranges(self, axes: Parts, size: int) -> tuple[IntArray, IntArray]:
        """Where each device's part of a dimension begins and ends."""
        found = self._of_devices.get((axes, size))
        if found is None:
            mesh = self.table.mesh
            # The number of each device's part, in digits of mixed radix: its coordinates along the
            # axes.
            place = np.zeros(mesh.size, dtype=np.int64)
            for axis, pre, count, _ in axes:
                own = np.indices(mesh.shape)[axis].reshape(-1)
                place = place * count + own // (mesh.shape[axis] // (pre * count)) % count
            each = -(-size // size_of(axes))
            low = np.minimum(place * each, size)
            found = self._of_devices[axes, size] = (low, np.minimum(low + each, size))
        return found

    @cached_property
    def _find_quickest(self) -> tuple[float, float]:
        """The least latency and the most bytes a second of all links."""
        topology = self.machine.topology_for(self.table.mesh)
        links = [topology.within_host, topology.between_hosts, topology.between_racks]
        links += [link for _, link in topology.overhead.collectives]
        known = [link for link in links if link is not None]
        return (
            min((link.latency_s for link in known), default=0.0),
            max((link.bandwidth_bytes_per_s for link in known), default=math.inf),
        )

    def program_s(
        self, source: Sharding, target: Sharding, shape: tuple[int, ...], element: DType
    ) -> float:
        """The time of the movement by the program that is run for it."""
        if are_alike(source, target):
            return 0.0
        before, after = (self.table.decoded(_is_plain_part(one)) for one in (source, target))
        program = chosen_program(ArrayType(shape, element, before), after)
        topology = self.machine.topology_for(self.table.mesh)
        return program.estimate(element, topology, self.machine.library).seconds_s

    def _collective_seconds(self, kind: str, axes: Parts, size_bytes: int) -> float:
        if not axes or not size_bytes:
            return 0.0
        found = self._collectives.get((kind, axes, size_bytes))
        if found is None:
            topology = self.machine.topology_for(self.table.mesh)
            groups = self._groups.get(axes)
            if groups is None:
                groups = self.table.mesh.groups([self.table.axis(part) for part in axes])
                self._groups[axes] = groups
            # All groups work at once: the slowest one decides.
            found = max(
                collective_cost(kind, ranks, size_bytes, topology, self.machine.library).seconds_s
                for ranks in groups
            )
            self._collectives[kind, axes, size_bytes] = found
        return found

    def compute_s(
        self,
        name: str,
        rule: OpShardingRule,
        cuts: Sequence[Parts],
        tensors: Sequence[tuple[tuple[int, ...], DType]],
    ) -> float:
        """The time that the busiest device takes for an operator cut so along its factors.

        Args:
            name, rule: of the operator.
            cuts: axes of each factor.
            tensors: shapes of the whole operands and results, and their element types.
        """
        # Sizes on the busiest device, which has a part rounded up of each factor.
        counts = [size_of(axes) for axes in cuts]
        sizes = [-(-size // count) for size, count in zip(rule.sizes, counts, strict=True)]
        sizes_bytes = [
            element.itemsize_bytes
            * math.prod(
                -(-size // math.prod(counts[factor] for factor in dim))
                for dim, size in zip(mapping, shape, strict=True)
            )
            for mapping, (shape, element) in zip(rule.tensors, tensors, strict=True)
        ]
        count = len(rule.operands)
        moved = moved_bytes(name, sizes_bytes[:count], sizes_bytes[count:])
        given = [element for shape, element in tensors[:count] if shape]
        dtypes = given or [element for _, element in tensors]
        return least_s(self.machine.device, operations_of(name, rule, sizes), moved, dtypes)


def _is_plain_part(sharding: Sharding) -> Sharding:
    """A sharding as an array has it: closed, without replicated axes."""
    return sharding._replace(is_closed=(True,) * len(sharding.dims), replicated=())


def _count_same(old: Parts, new: Parts) -> int:
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
