"""Cost model: estimated seconds of operators and of movements between shardings.

The strategy "cost" compares these estimates:

compute     the busiest device's share, as traces count it
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

Two things are counted of the computation of an operator:

operations   additions and multiplications, as the operator's row defines
bytes        operands read and results written, each once; of an operand of which the operator
             reads only a part (a slice, rows of a table) as many as it writes

A device takes the longer of operations over its rate and bytes over its memory's speed: the
roofline (Williams, Waterman, Patterson, 2009). Nominal speeds give a lower bound: starting
a kernel takes time, and few kernels reach a peak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from reshard._validation import check_type
from reshard.cost.estimate import collective_cost
from reshard.cost.formulas import check_library
from reshard.cost.preset import load_preset
from reshard.dtypes import DType
from reshard.errors import LayoutError, UsageError
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import find_operator
from reshard.spmd.propagation.axes import (
    MAX_CACHED,
    AxisTable,
    Part,
    Parts,
    Sharding,
    are_alike,
    size_of,
)
from reshard.spmd.propagation.by_cost.factor_graph import FloatArray
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.topology import Device, Topology


def operations_of(
    name: str,
    rule: OpShardingRule,
    sizes: Sequence[int] | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Return the additions and multiplications of an operator on a device.

    Args:
        name: of the operator.
        rule: for the shapes of the whole operands.
        sizes: of the rule's factors on the device; all of them when None.
        attributes: of the operation, where the work depends on them.

    >>> from reshard.spmd.core.operator import rule_of
    >>> rule = rule_of("matmul", [(4, 8), (8, 16)])
    >>> operations_of("matmul", rule), operations_of("matmul", rule, (4, 4, 8))
    (1024.0, 256.0)
    >>> operations_of("exp", rule_of("exp", [(4, 8)]))
    0.0
    """
    return find_operator(name).work(rule, rule.sizes if sizes is None else sizes, attributes)


def moved_bytes(name: str, operands: Sequence[int], results: Sequence[int]) -> int:
    """Return the bytes that an operator reads and writes on a device.

    >>> moved_bytes("take", [8000, 16], [64]), moved_bytes("add", [64, 64], [64])
    (144, 192)
    """
    written = sum(results)
    read = list(operands)
    if find_operator(name).reads_part and read:
        # Such an operator (a slice, rows of a table) reads as much of its first operand as it
        # writes.
        read[0] = min(read[0], written)
    return sum(read) + written


def least_s(
    device: Device, operations: float, size_bytes: float, dtypes: Iterable[DType | str]
) -> float:
    """Return the least time in which a device does so many operations and moves so many bytes.

    Args:
        device: that does it.
        operations: additions and multiplications.
        size_bytes: that are read and written.
        dtypes: of the operands; the slowest counts.

    >>> device = Device(1e12, (("float32", 1e13),))
    >>> least_s(device, 1e9, 1e6, ["float32"]), least_s(device, 1e6, 1e9, ["float32"])
    (0.0001, 0.001)
    """
    names = {dtype.name if isinstance(dtype, DType) else dtype for dtype in dtypes}
    # Sorted, so that the order is the same on every machine.
    rates = [device.operations_for(name) for name in sorted(names)]
    slowest = min((rate for rate in rates if rate is not None), default=math.inf)
    return max(operations / slowest, size_bytes / device.memory_bytes_per_s)


BitArray = np.ndarray[tuple[int, ...], np.dtype[Any]]
"""Sets of parts of axes, see `PartBits`."""


class PartBits:
    """Sets of parts of axes as the bits of integers, for arrays of such sets.

    Parts are identified by their axis and range, not by their level.

    >>> whole = Sharding((((0, 1, 2, 0),), ((1, 1, 4, 0),)), (True, True))
    >>> bits = PartBits([whole])
    >>> both = bits.of(((0, 1, 2, 0), (1, 1, 4, 0)))
    >>> bits.parts(both), bits.sizes(np.array([0, both])).tolist()
    (((0, 1, 2, 0), (1, 1, 4, 0)), [1, 8])
    """

    def __init__(self, shardings: Iterable[Sharding]) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._parts: list[Part] = []
        for sharding in shardings:
            for part in itertools.chain(*sharding.dims, sharding.partial):
                if self._numbers.setdefault(part[:3], len(self._parts)) == len(self._parts):
                    self._parts.append(part)
        # Python's integers, which are slower, where there are more parts than bits.
        self.dtype: type = np.int64 if len(self._parts) < 63 else object

    def of(self, parts: Parts) -> int:
        """Return the bits of some parts."""
        return sum(1 << self._numbers[part[:3]] for part in parts)

    def of_partial(self, shardings: Iterable[Sharding]) -> BitArray:
        """Return the bits of the axes along which each sharding is partial."""
        return np.array([self.of(sharding.partial) for sharding in shardings], dtype=self.dtype)

    def parts(self, mask: int) -> Parts:
        """Return the parts whose bits are set, in the order of the mesh."""
        return tuple(sorted(p for n, p in enumerate(self._parts) if mask >> n & 1))

    def sizes(self, masks: BitArray) -> IntArray:
        """Return the number of shards that each set of parts makes."""
        different, place = np.unique(masks, return_inverse=True)
        sizes = [size_of(self.parts(mask)) for mask in different.tolist()]
        return np.array(sizes, dtype=np.int64)[place].reshape(masks.shape)


BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Contributed = tuple[Parts, str | None]
"""The axes along which a sharding is partial, and how its contributions combine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices and links that the cost model assumes.

    Args:
        topology: the links between ranks; `h100-8` hosts, as many as the mesh needs, when None.
        library: whose collectives are assumed, a key of `reshard.cost.LIBRARIES`.
        operations_per_s: additions and multiplications of a device per second, for any type; as in
            the topology when None, or as of an H100 if the topology does not specify it.
        memory_bytes_per_s: memory bandwidth of a device; also of the topology or an H100 if None.

    Raises UsageError for an invalid topology, library or speed.

    >>> Machine(operations_per_s=1e12).device.operations_for("bfloat16")
    1000000000000.0
    """

    topology: Topology | None = None
    library: str = "nccl"
    operations_per_s: float | None = None
    memory_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.topology is not None:
            hint = 'give reshard.cost.load_preset("h100-8").topology()'
            check_type(self.topology, Topology, "topology", hint)
        check_library(self.library)
        for name in ("operations_per_s", "memory_bytes_per_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value!r}; a finite number, more than 0, was expected")

    @property
    def device(self) -> Device:
        """How fast each rank computes."""
        described = None if self.topology is None else self.topology.device
        device = described or load_preset("h100-8").device
        if device is None:
            raise LayoutError("preset h100-8 says nothing of devices; give a topology that does")
        if self.operations_per_s is self.memory_bytes_per_s is None:
            return device
        rates = device.operations_per_s
        if self.operations_per_s is not None:
            rates = (("any", self.operations_per_s),)
        return Device(self.memory_bytes_per_s or device.memory_bytes_per_s, rates)

    def topology_for(self, mesh: DeviceMesh) -> Topology:
        """Return the links between the mesh's ranks."""
        if self.topology is not None:
            return self.topology
        preset = load_preset("h100-8")
        # As many hosts as the highest rank needs.
        hosts = -(-(max(mesh.devices) + 1) // preset.ranks_per_host)
        return preset.topology(hosts)


@dataclass
class CostModel:
    """Estimates of seconds, over the axes of a mesh.

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
    _computing: dict[object, FloatArray] = field(default_factory=dict)
    _collectives: dict[tuple[str, Parts, int], float] = field(default_factory=dict)
    _groups: dict[Parts, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _programs: dict[object, float] = field(default_factory=dict)
    _of_devices: dict[tuple[Parts, int], tuple[IntArray, IntArray]] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=16)
    def of(table: AxisTable, machine: Machine) -> CostModel:
        """Return the model of a mesh's axes and a machine, cached between propagations."""
        return CostModel(table, machine)

    def movement_s(
        self, source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bytes: int
    ) -> float:
        """Estimate the time to move a tensor of `shape` to another sharding, by formulas."""
        return float(self.movements_s([source], [target], shape, itemsize_bytes)[0, 0])

    def movements_s(
        self,
        sources: Sequence[Sharding],
        targets: Sequence[Sharding],
        shape: Sequence[int],
        itemsize_bytes: int,
    ) -> FloatArray:
        """Return the times by formulas from each sharding, a row, to each of others, a column."""
        bits = PartBits((*sources, *targets))
        # 1. Axes that stop cutting a dimension, and those that begin to, wherever dimensions
        # differ.
        leaving: BitArray = np.zeros((len(sources), len(targets)), dtype=bits.dtype)
        coming = leaving.copy()
        for dim in range(len(shape)):
            olds, rows = _number_cuts(sources, dim)
            news, columns = _number_cuts(targets, dim)
            both: BitArray = np.zeros((2, len(olds), len(news)), dtype=bits.dtype)
            went, came = both
            for row, old in enumerate(olds):
                for column, new in enumerate(news):
                    same = _count_same(old, new)
                    went[row, column] = bits.of(old[same:])
                    came[row, column] = bits.of(new[same:])
            leaving |= went[rows][:, columns]
            coming |= came[rows][:, columns]
        # 2. Contributions that remain, and those that are combined.
        partial, remaining = bits.of_partial(sources), bits.of_partial(targets)
        is_same = _compare(
            [sharding.reduction for sharding in sources],
            [sharding.reduction for sharding in targets],
        )
        reduced = partial[:, None] & ~np.where(is_same, remaining, 0)
        # Axes that nothing else uses cut at once, and all that follows is of what is left.
        held_bytes = _local_bytes(shape, sources, itemsize_bytes)[:, None]
        held_bytes = -(-held_bytes // bits.sizes(coming & ~(reduced | leaving)))
        # 3. Reduce-scatter, all-reduce, all-to-all, all-gather, each on the result of the previous.
        scattered = reduced & coming
        total = self._collectives_s("reduce-scatter", bits, scattered, held_bytes)
        held_bytes = -(-held_bytes // bits.sizes(scattered))
        total += self._collectives_s("all-reduce", bits, reduced & ~coming, held_bytes)
        kept_bytes = np.broadcast_to(_local_bytes(shape, targets, itemsize_bytes), total.shape)
        moving_bytes = np.minimum(held_bytes, kept_bytes)
        total += self._collectives_s("all-to-all", bits, leaving & coming, moving_bytes)
        total += self._collectives_s("all-gather", bits, leaving & ~coming, kept_bytes)
        total[_find_alike(sources, targets)] = 0.0
        return total

    def bound_s(
        self, source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bytes: int
    ) -> float:
        """Return a lower bound for all programs: a rank receives missing data in a message.

        Where contributions are combined, a rank lacks others' for all of its part.
        """
        return float(self.bounds_s([source], [target], shape, itemsize_bytes)[0, 0])

    def bounds_s(
        self,
        sources: Sequence[Sharding],
        targets: Sequence[Sharding],
        shape: Sequence[int],
        itemsize_bytes: int,
    ) -> FloatArray:
        """Return the bounds from each of some shardings, a row, to each of others, a column."""
        # An entry a device: the elements of its target part, and those of it that it has already.
        count = self.table.mesh.size
        target_sizes = np.ones((len(targets), count), dtype=np.int64)
        there = np.ones((len(sources), len(targets), count), dtype=np.int64)
        for dim, size in enumerate(shape):
            olds, rows = _number_cuts(sources, dim)
            news, columns = _number_cuts(targets, dim)
            low, high = self._stack_ranges(olds, size)
            first, last = self._stack_ranges(news, size)
            target_sizes *= (last - first)[columns]
            common = np.minimum(high[:, None], last) - np.maximum(low[:, None], first)
            there *= np.maximum(common, 0)[rows][:, columns]
        source_kinds, rows = _number_kinds(sources)
        target_kinds, columns = _number_kinds(targets)
        needs = np.array(
            [
                [self._find_needs(source, target) for target in target_kinds]
                for source in source_kinds
            ]
        )
        is_needed, is_own = np.moveaxis(needs, 2, 0)[:, rows][:, :, columns]
        most = (target_sizes * is_needed - there * is_own).max(axis=2)
        latency_s, bandwidth_bytes_per_s = self._fastest_link
        bounds = np.where(most > 0, latency_s + most * itemsize_bytes / bandwidth_bytes_per_s, 0.0)
        # Levels with a rule of their own lie elsewhere than these ranges.
        bounds[[_has_levels(sharding) for sharding in sources]] = 0.0
        bounds[:, [_has_levels(sharding) for sharding in targets]] = 0.0
        bounds[_find_alike(sources, targets)] = 0.0
        return bounds

    def _find_needs(self, source: Contributed, target: Contributed) -> tuple[BoolArray, BoolArray]:
        """Return whether each device needs any contribution, and whether only its own."""
        (axes, reduction), (target_axes, target_reduction) = source, target
        # As `contribution_sources` has it: which contributions become which.
        source_parts, _ = self._find_ranges(axes, size_of(axes))
        target_parts, _ = self._find_ranges(target_axes, size_of(target_axes))
        goes_to = np.zeros(size_of(axes), dtype=np.int64)
        if not axes or reduction == target_reduction:
            votes = np.zeros((size_of(axes), size_of(target_axes)), dtype=np.int64)
            np.add.at(votes, (source_parts, target_parts), 1)
            goes_to = votes.argmax(axis=1)
        count = np.bincount(goes_to, minlength=size_of(target_axes))[target_parts]
        if target_reduction == "mean" and reduction != "mean":
            return np.ones_like(count, dtype=bool), np.full_like(count, not axes, dtype=bool)
        return count > 0, (count == 1) & (goes_to[source_parts] == target_parts)

    def _stack_ranges(self, cuts: Sequence[Parts], size: int) -> tuple[IntArray, IntArray]:
        ranges = [self._find_ranges(axes, size) for axes in cuts]
        return np.stack([low for low, _ in ranges]), np.stack([high for _, high in ranges])

    def _find_ranges(self, axes: Parts, size: int) -> tuple[IntArray, IntArray]:
        """Return where each device's part of a dimension begins and ends."""
        ranges = self._of_devices.get((axes, size))
        if ranges is None:
            mesh = self.table.mesh
            # The number of each device's part, in digits of mixed radix: its coordinates along the
            # axes.
            place = np.zeros(mesh.size, dtype=np.int64)
            for axis, pre, count, _ in axes:
                coordinates = np.indices(mesh.shape)[axis].reshape(-1)
                place = place * count + coordinates // (mesh.shape[axis] // (pre * count)) % count
            each = -(-size // size_of(axes))
            low = np.minimum(place * each, size)
            if len(self._of_devices) >= MAX_CACHED:
                self._of_devices.clear()
            ranges = self._of_devices[axes, size] = (low, np.minimum(low + each, size))
        return ranges

    @cached_property
    def _topology(self) -> Topology:
        return self.machine.topology_for(self.table.mesh)

    @cached_property
    def _device(self) -> Device:
        return self.machine.device

    @cached_property
    def _fastest_link(self) -> tuple[float, float]:
        """The least latency and the most bytes a second of all links."""
        topology = self._topology
        links = [topology.within_host, topology.between_hosts, topology.between_racks]
        # A backend's collectives may be faster than its messages.
        links += [link for _, link in topology.overhead.collectives]
        existing = [link for link in links if link is not None]
        return (
            min((link.latency_s for link in existing), default=0.0),
            max((link.bandwidth_bytes_per_s for link in existing), default=math.inf),
        )

    def program_s(
        self, source: Sharding, target: Sharding, shape: tuple[int, ...], element: DType
    ) -> float:
        """Return the time of the movement by the program that is run for it."""
        if are_alike(source, target):
            return 0.0
        ends = tuple(self.table.decoded(sharding.plain) for sharding in (source, target))
        seconds_s = self._programs.get((ends, shape, element))
        if seconds_s is None:
            program = chosen_program(ArrayType(shape, element, ends[0]), ends[1])
            seconds_s = program.estimate(element, self._topology, self.machine.library).seconds_s
            if len(self._programs) >= MAX_CACHED:
                self._programs.clear()
            self._programs[ends, shape, element] = seconds_s
        return seconds_s

    def _collectives_s(
        self, kind: str, bits: PartBits, axes: BitArray, sizes_bytes: IntArray
    ) -> FloatArray:
        """Return the seconds of collectives along axes, in bits, of a number of bytes each."""
        total = np.zeros(axes.shape)
        used = np.nonzero(axes)
        if not len(used[0]):
            return total
        # Few are different: those are asked for once.
        masks, mask_at = np.unique(axes[used], return_inverse=True)
        sizes, size_at = np.unique(sizes_bytes[used], return_inverse=True)
        pairs, pair_at = np.unique(mask_at * len(sizes) + size_at, return_inverse=True)
        seconds_s = [
            self._collective_s(kind, bits.parts(int(masks[mask])), int(sizes[size]))
            for mask, size in (divmod(pair, len(sizes)) for pair in pairs.tolist())
        ]
        total[used] = np.array(seconds_s)[pair_at]
        return total

    def _collective_s(self, kind: str, axes: Parts, size_bytes: int) -> float:
        if not axes or not size_bytes:
            return 0.0
        seconds_s = self._collectives.get((kind, axes, size_bytes))
        if seconds_s is None:
            topology = self._topology
            groups = self._groups.get(axes)
            if groups is None:
                groups = self.table.mesh.groups([self.table.axis(part) for part in axes])
                self._groups[axes] = groups
            # All groups work at the same time, so the slowest decides.
            seconds_s = max(
                collective_cost(kind, ranks, size_bytes, topology, self.machine.library).seconds_s
                for ranks in groups
            )
            if len(self._collectives) >= MAX_CACHED:
                self._collectives.clear()
            self._collectives[kind, axes, size_bytes] = seconds_s
        return seconds_s

    def computing_s(
        self,
        name: str,
        rule: OpShardingRule,
        ways: Sequence[Sequence[Parts]],
        tensors: Sequence[tuple[tuple[int, ...], DType]],
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> FloatArray:
        """Return the times as of `compute_s` for each of several ways to cut an operator."""
        # As text, since lists cannot be keys, and 1, 1.0 and True would be equal.
        key = (name, rule, tuple(ways), tuple(tensors), str(attributes))
        times_s = self._computing.get(key)
        if times_s is None:
            # Ways that differ in contributions alone compute the same.
            seconds_s = {
                cuts: self.compute_s(name, rule, cuts, tensors, attributes)
                for cuts in dict.fromkeys(map(tuple, ways))
            }
            if len(self._computing) >= MAX_CACHED:
                self._computing.clear()
            times_s = np.array([seconds_s[tuple(cuts)] for cuts in ways])
            self._computing[key] = times_s
        return times_s

    def compute_s(
        self,
        name: str,
        rule: OpShardingRule,
        cuts: Sequence[Parts],
        tensors: Sequence[tuple[tuple[int, ...], DType]],
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> float:
        """Return the time that the busiest device takes for an operator cut so along its factors.

        Args:
            name, rule: of the operator.
            cuts: axes of each factor.
            tensors: shapes of the whole operands and results, and their element types.
            attributes: of the operation.
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
        # Zero-dimensional arrays do not decide in which type a device computes.
        array_dtypes = [element for shape, element in tensors[:count] if shape]
        dtypes = array_dtypes or [element for _, element in tensors]
        operations = operations_of(name, rule, sizes, attributes)
        return least_s(self._device, operations, moved, dtypes)


def _count_same(old: Parts, new: Parts) -> int:
    """Return the length of the common prefix of two shardings of a dimension."""
    count = 0
    for old_part, new_part in zip(old, new, strict=False):
        if old_part != new_part:
            break
        count += 1
    return count


def _number_cuts(shardings: Sequence[Sharding], dim: int) -> tuple[list[Parts], IntArray]:
    """Return the different cuts that shardings have of a dimension, and which each has."""
    numbers: dict[Parts, int] = {}
    indices = [numbers.setdefault(sharding.dims[dim], len(numbers)) for sharding in shardings]
    return list(numbers), np.array(indices, dtype=np.int64)


def _number_kinds(shardings: Sequence[Sharding]) -> tuple[list[Contributed], IntArray]:
    """Return the different contributions that shardings have, and which each has."""
    numbers: dict[Contributed, int] = {}
    kinds = [
        (sharding.partial, sharding.reduction if sharding.partial else None)
        for sharding in shardings
    ]
    indices = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    return list(numbers), np.array(indices, dtype=np.int64)


def _compare(left: Sequence[object], right: Sequence[object]) -> BoolArray:
    """Compare each of some objects, a row, with each of others, a column."""
    numbers: dict[object, int] = {}
    rows, columns = (
        np.array([numbers.setdefault(each, len(numbers)) for each in things], dtype=np.int64)
        for things in (left, right)
    )
    return np.equal(rows[:, None], columns)


def _find_alike(sources: Sequence[Sharding], targets: Sequence[Sharding]) -> BoolArray:
    """Return where `are_alike` holds: by what that function compares."""
    keys = (
        [(s.dims, s.partial, s.reduction if s.partial else None) for s in shardings]
        for shardings in (sources, targets)
    )
    return _compare(*keys)


def _has_levels(sharding: Sharding) -> bool:
    return any(part[3] for axes in sharding.dims for part in axes)


def _local_bytes(
    shape: Sequence[int], shardings: Sequence[Sharding], itemsize_bytes: int
) -> IntArray:
    """Return the bytes of the largest shard for each of some shardings."""
    sizes_bytes = np.full(len(shardings), itemsize_bytes, dtype=np.int64)
    for dim, size in enumerate(shape):
        cuts, numbers = _number_cuts(shardings, dim)
        sizes_bytes *= np.array([-(-size // size_of(axes)) for axes in cuts], dtype=np.int64)[
            numbers
        ]
    return sizes_bytes
