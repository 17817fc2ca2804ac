"""Rule builder: constructs a rule, one factor at a time.

A factor is added by the dimension it has in each operand and in each result, where it has one.
A dimension with several factors has the product of their sizes, major to minor. A dimension
without any gets a factor of its own when the rule is built:

1. A dimension of an operand without a factor: the operator needs it whole.
2. A dimension of a result without a factor: each device computes its part of it.
3. A factor of operands alone that is not reduced: the operator needs it whole.

Factors are numbered in the order in which they are added, which decides ties of propagation;
those of step 1 and 2 come last. (Shardy's rules leave step 3 out: a cut of such a factor then is
for its partitioner to undo.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from reshard.spmd.rules.sharding_rule import OpShardingRule

Shape = tuple[int, ...]
Kind = Literal["pass_through", "reduction", "need_replication", "permutation"]


class Inferred(NamedTuple):
    """An operator for certain shapes: its rule, and the shapes of its results.

    A rule does not determine the shapes by itself: a slice's result is shorter than the factor that
    the operand's dimension and the result's share.
    """

    rule: OpShardingRule
    result_shapes: tuple[Shape, ...]
    adjusted: tuple[int, ...] = ()
    """Factors along which a part has to know where it lies: rows of a table that a part does not
    have give zero, the diagonal of a part is elsewhere. Without a function that minds this on each
    part, they are whole as those of `need_replication` are."""
    leading: tuple[int, ...] = ()
    """Factors whose cuts come before those of larger operands: of what is looked up, where."""


class RuleBuilder:
    """Collects the factors of an operator with tensors of these shapes.

    >>> builder = RuleBuilder([(4, 8), (8, 16)], [(4, 16)])
    >>> builder.factor([0, None], [0])
    >>> builder.factor([None, 1], [1])
    >>> builder.factor([1, 0], [None], kind="reduction")
    >>> print(builder.build().rule)
    ([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}
    """

    def __init__(self, operands: Iterable[Shape], results: Iterable[Shape]) -> None:
        self.operands = tuple(operands)
        self.results = tuple(results)
        self._operand_dims: list[list[list[int]]] = [[[] for _ in s] for s in self.operands]
        self._result_dims: list[list[list[int]]] = [[[] for _ in s] for s in self.results]
        self._sizes: list[int] = []
        self._kinds: list[Kind] = []
        self._blocked: list[int] = []
        self._adjusted: list[int] = []
        self._leading: list[int] = []

    def factor(
        self,
        operands: Sequence[int | None] = (),
        results: Sequence[int | None] = (),
        *,
        size: int | None = None,
        kind: Kind = "pass_through",
        blocked: bool = False,
        adjusted: bool = False,
        leading: bool = False,
    ) -> None:
        """Adds a factor.

        Args:
            operands: its dimension in each operand, None where it has none; may end early.
            results: the same of the results.
            size: that of the first dimension named when not given.
            kind: what a cut of it costs the operator.
            blocked: whether nothing propagates along it.
            adjusted: whether a part has to know where it lies along it.
            leading: whether its cut comes before those of larger operands.
        """
        index = len(self._sizes)
        found: int | None = size
        for shapes, dims, given in (
            (self.operands, self._operand_dims, operands),
            (self.results, self._result_dims, results),
        ):
            for tensor, dim in enumerate(given):
                if dim is not None:
                    dims[tensor][dim].append(index)
                    found = shapes[tensor][dim] if found is None else found
        self._sizes.append(1 if found is None else found)
        self._kinds.append(kind)
        if blocked:
            self._blocked.append(index)
        if adjusted:
            self._adjusted.append(index)
        if leading:
            self._leading.append(index)

    def build(self, reduction_operator: str = "sum") -> Inferred:
        """The rule, and the shapes of the results."""
        # Steps 1 and 2 of the module: dimensions without a factor get one of their own.
        for tensor, operand in enumerate(self._operand_dims):
            for dim, factors in enumerate(operand):
                if not factors:
                    self.factor([None] * tensor + [dim], kind="need_replication")
        for tensor, result in enumerate(self._result_dims):
            for dim, factors in enumerate(result):
                if not factors:
                    self.factor((), [None] * tensor + [dim])
        # Step 3: a factor that no result has and that is not reduced is needed whole.
        of_results = {f for result in self._result_dims for dim in result for f in dim}
        kinds = [
            "need_replication" if kind == "pass_through" and index not in of_results else kind
            for index, kind in enumerate(self._kinds)
        ]
        of_kind = {
            wanted: [index for index, kind in enumerate(kinds) if kind == wanted]
            for wanted in ("reduction", "need_replication", "permutation")
        }
        rule = OpShardingRule(
            self._operand_dims,
            self._result_dims,
            self._sizes,
            reduction=of_kind["reduction"],
            need_replication=of_kind["need_replication"],
            permutation=of_kind["permutation"],
            blocked=self._blocked,
            reduction_operator=reduction_operator,
        )
        return Inferred(rule, self.results, tuple(self._adjusted), tuple(self._leading))


def replicated_rule(operands: Iterable[Shape], results: Iterable[Shape] = ()) -> OpShardingRule:
    """The rule of an operator about which nothing is known: every device needs and gives all.

    >>> print(replicated_rule([(4,), (2,)], [(8,)]))
    ([i], [j]) -> ([k]) {i=4, j=2, k=8} need_replication={i, j, k}
    """
    builder = RuleBuilder(operands, results)
    for tensor, shape in enumerate(builder.operands):
        for dim in range(len(shape)):
            builder.factor([None] * tensor + [dim], kind="need_replication")
    for tensor, shape in enumerate(builder.results):
        for dim in range(len(shape)):
            builder.factor((), [None] * tensor + [dim], kind="need_replication")
    return builder.build().rule
