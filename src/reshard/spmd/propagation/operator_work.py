"""How much does one device compute of an operation, and how long does that take at least?

Two things are counted:

operations   additions and multiplications of products of matrices and what is made of them:
             two for each index of all factors together (einsum, convolution), for attention
             those of its two products, for factorisations the leading term of what LAPACK does
bytes        of operands read and results written, each once; of an operand of which the operator
             reads a part alone (a slice, rows of a table) as many as it writes

A device takes the longer of operations over its rate and bytes over its memory's speed: the
roofline (Williams, Waterman, Patterson, 2009). Nominal speeds give a lower bound: kernels do not
start for nothing, and few reach a peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from reshard.dtypes import DType
from reshard.spmd.operators.table import operators
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.topology import Device

Sizes = Sequence[int]

# Leading terms of additions and multiplications for matrices [m, n], and for right sides [n, k]
# (Golub and Van Loan, "Matrix Computations", 4th edition, chapters 3, 4, 5, 7 and 8).
_OF_MATRIX: dict[str, Callable[[int, int], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "det": lambda m, n: 2 * n**3 / 3,
    "slogdet": lambda m, n: 2 * n**3 / 3,
    "inv": lambda m, n: 2 * n**3,
    "matrix_power": lambda m, n: 2 * n**3,
    "qr": lambda m, n: 4 * (m * n * min(m, n) - min(m, n) ** 3 / 3),
    "svdvals": lambda m, n: 4 * (max(m, n) - min(m, n) / 3) * min(m, n) ** 2,
    "matrix_rank": lambda m, n: 4 * (max(m, n) - min(m, n) / 3) * min(m, n) ** 2,
    "svd": lambda m, n: 4 * m * n * max(m, n) + 8 * max(m, n) * min(m, n) ** 2 + 9 * min(m, n) ** 3,
    "pinv": lambda m, n: 14 * max(m, n) * min(m, n) ** 2 + 8 * min(m, n) ** 3,
    "eigvalsh": lambda m, n: 4 * n**3 / 3,
    "eigh": lambda m, n: 9 * n**3,
    "eigvals": lambda m, n: 10 * n**3,
    "eig": lambda m, n: 25 * n**3,
}
_OF_SYSTEM: dict[str, Callable[[int, int], float]] = {
    "solve": lambda n, k: 2 * n**3 / 3 + 2 * n**2 * k,
    "triangular_solve": lambda n, k: n**2 * k,
}
READ_IN_PART = frozenset(
    {
        "diagonal",
        "dynamic_slice",
        "embedding",
        "slice",
        "split",
        "take",
        "take_along_axis",
        "trace",
        "unstack",
    }
)
"""Operators that read no more of their first operand than they write."""


def operations_of(name: str, rule: OpShardingRule, sizes: Sizes | None = None) -> float:
    """Additions and multiplications of an operator on one device; 0 for one that reads and writes.

    Args:
        name: of the operator.
        rule: for the shapes of the whole operands.
        sizes: of the rule's factors on the device; all of them when None.

    >>> from reshard.spmd.operators.table import rule_of
    >>> rule = rule_of("matmul", [(4, 8), (8, 16)])
    >>> operations_of("matmul", rule), operations_of("matmul", rule, (4, 4, 8))
    (1024.0, 256.0)
    >>> operations_of("exp", rule_of("exp", [(4, 8)]))
    0.0
    """
    here = rule.sizes if sizes is None else sizes
    if name == "attention":
        return _of_attention(rule, here)
    if name in _OF_MATRIX:
        *lead, rows, columns = _dims(rule.operands[0], here)
        return math.prod(lead) * float(_OF_MATRIX[name](rows, columns))
    if name in _OF_SYSTEM:
        return _of_system(name, rule, here)
    known = operators.get(name)
    family = "users' own" if known is None else known.family
    is_product = name == "convolution" or family == "products"
    arrays = sum(bool(mapping) for mapping in rule.operands)
    if not is_product and not (family == "users' own" and rule.reduction and arrays > 1):
        return 0.0
    # Two for each: what is multiplied is added up.
    return float(math.prod(here) * 2)


def _dims(mapping: Iterable[Iterable[int]], sizes: Sizes) -> list[int]:
    return [math.prod(sizes[factor] for factor in dim) for dim in mapping]


def _of_attention(rule: OpShardingRule, sizes: Sizes) -> float:
    """Scores, for each of the queries' channels, and what they weigh, for each of the values'."""
    (of_queries,), (of_values,) = rule.operands[0][-1], rule.operands[2][-1]
    others = math.prod(
        size for factor, size in enumerate(sizes) if factor not in (of_queries, of_values)
    )
    return float(2 * others * (sizes[of_queries] + sizes[of_values]))


def _of_system(name: str, rule: OpShardingRule, sizes: Sizes) -> float:
    left, right = rule.operands[0], rule.operands[1]
    own = {factor for dim in left for factor in dim}
    columns = math.prod(sizes[factor] for dim in right for factor in dim if factor not in own)
    *_, size = _dims(left, sizes)
    batch = {factor for mapping in (left[:-2], right) for dim in mapping for factor in dim} & own
    batch -= {factor for dim in left[-2:] for factor in dim}
    repeated = math.prod(sizes[factor] for factor in batch)
    return repeated * float(_OF_SYSTEM[name](size, columns))


def moved_bytes(name: str, operands: Sequence[int], results: Sequence[int]) -> int:
    """What an operator reads and writes, from the bytes of its operands and results on a device.

    >>> moved_bytes("take", [8000, 16], [64]), moved_bytes("add", [64, 64], [64])
    (144, 192)
    """
    written = sum(results)
    read = list(operands)
    if name in READ_IN_PART and read:
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
    rates = [device.operations_for(name) for name in sorted(names)]
    slowest = min((rate for rate in rates if rate is not None), default=math.inf)
    return max(operations / slowest, size_bytes / device.memory_bytes_per_s)
