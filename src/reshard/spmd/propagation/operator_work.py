"""Arithmetic work and minimum time of an operation on one device.

Two things are counted:

operations   additions and multiplications, as the operator's row says
bytes        of operands read and results written, each once; of an operand of which the operator
             reads a part alone (a slice, rows of a table) as many as it writes

A device takes the longer of operations over its rate and bytes over its memory's speed: the
roofline (Williams, Waterman, Patterson, 2009). Nominal speeds give a lower bound: starting
a kernel takes time, and few kernels reach a peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from reshard.dtypes import DType
from reshard.spmd.core.operator import find_operator
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.topology import Device


def operations_of(
    name: str,
    rule: OpShardingRule,
    sizes: Sequence[int] | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Additions and multiplications of an operator on one device; 0 for one that reads and writes.

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
    """What an operator reads and writes, from the bytes of its operands and results on a device.

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
    """The least time in which a device does so many operations and moves so many bytes.

    Args:
        device: that does it.
        operations: additions and multiplications.
        size_bytes: that are read and written.
        dtypes: of the operands; the slowest counts.

    >>> device = Device(1e12, (("float32", 1e13),))
    >>> least_s(device, 1e9, 1e6, ["float32"]), least_s(device, 1e6, 1e9, ["float32"])
    (0.0001, 0.001)
    """
    names = {one.name if isinstance(one, DType) else one for one in dtypes}
    # Sorted, so that equal sets of types ask in one order on every machine.
    rates = [device.operations_for(name) for name in sorted(names)]
    slowest = min((rate for rate in rates if rate is not None), default=math.inf)
    return max(operations / slowest, size_bytes / device.memory_bytes_per_s)
