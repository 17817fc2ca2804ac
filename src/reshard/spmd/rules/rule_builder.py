"""Rule builder: constructs a rule factor by factor.

A factor is added by naming its dimension in each operand and each result, or None if it has none.
A dimension with several factors has the product of their sizes, major to minor. A dimension
without factors gets a new factor when the rule is built:

1. A dimension of an operand without a factor: the operator needs it whole.
2. A dimension of a result without a factor: each device computes its part of it.
3. A factor of operands alone that is not reduced: the operator needs it whole.

Factors are numbered in the order in which they are added, which decides ties of propagation;
the factors of steps 1 and 2 come last. (Shardy's rules omit step 3, and leave it to its partitioner
to undo a sharding of such a factor.)

Axes and shapes are read here as operators read them: counted from the start, and broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from reshard.errors import SpecError
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.rules.templates import dimensions

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
    """Factors along which a part has to know its offset: for instance, rows of a table that a part
    does not have give zero, and the diagonal of a part is shifted. If the local function does not
    account for the offset, these factors stay whole, like those of `need_replication`."""
    leading: tuple[int, ...] = ()
    """Factors whose shardings take precedence over those of larger operands: indices of lookups."""


class RuleBuilder:
    """A builder that collects the factors of an operator with tensors of these shapes.

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
        """Add a factor.

        Args:
            operands: its dimension in each operand, or None if it has none; may end early.
            results: its dimension in each result.
            size: the size of the factor; of the first named dimension when not given.
            kind: the cost of sharding it.
            blocked: whether nothing propagates along it.
            adjusted: whether a part has to know its offset along it.
            leading: whether its sharding takes precedence over those of larger operands.
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
        """Return the rule, and the shapes of the results."""
        # Steps 1 and 2 of the module: dimensions without a factor get a new factor.
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
    """Return the rule of an unknown operator: every device needs and computes everything.

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


Axes = int | Sequence[int] | None


def axis_of(rank: int, axis: int) -> int:
    """Return an axis counted from the start.

    >>> axis_of(3, -1)
    2
    """
    return dimensions(rank, [axis])[0]


def axes_of(rank: int, axis: Axes) -> tuple[int, ...]:
    """Return axes counted from the start, in ascending order; None means all.

    >>> axes_of(3, None), axes_of(3, (-1, 0)), axes_of(3, 1)
    ((0, 1, 2), (0, 2), (1,))
    """
    if axis is None:
        return tuple(range(rank))
    return dimensions(rank, axis if isinstance(axis, Sequence) else [axis])


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape that NumPy gives operands of these shapes.

    >>> broadcast_shape([(8, 1), (4,), ()])
    (8, 4)
    """
    found: list[int] = []
    # From the last dimension to the first, because shapes are aligned at the end.
    for back in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back}
        if len(sizes - {1}) > 1:
            raise SpecError(
                f"shapes {', '.join(map(str, shapes))} do not broadcast; sizes counted from the "
                "end must be equal, or 1"
            )
        found.append(next(iter(sizes - {1}), 1))
    return tuple(reversed(found))


def one_operand(name: str, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the only operand."""
    counted(name, shapes, 1)
    return shapes[0]


def counted(name: str, shapes: Sequence[Shape], count: int) -> None:
    """Raise SpecError for another number of operands."""
    if len(shapes) != count:
        raise SpecError(f"{len(shapes)} operands for {name}; {count} were expected")


def kept(
    shape: Shape,
    result: Shape | None = None,
    *,
    whole: Sequence[int] = (),
    moved: Sequence[int] = (),
    blocked: Sequence[int] = (),
) -> Inferred:
    """Return the rule of an operand whose dimensions are the result's.

    Args:
        shape: of the operand.
        result: the result's, where sizes differ.
        whole: dimensions that each device needs whole.
        moved: dimensions whose elements move between devices.
        blocked: dimensions along which nothing propagates.

    >>> print(kept((4, 8), whole=[1]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    builder = RuleBuilder([shape], [shape if result is None else result])
    for dim in range(len(shape)):
        builder.factor(
            [dim],
            [dim],
            kind="need_replication"
            if dim in whole
            else "permutation"
            if dim in moved
            else "pass_through",
            blocked=dim in blocked,
        )
    return builder.build()


def broadcast_factors(
    builder: RuleBuilder, result: Shape, *, operands: Sequence[int], skip: int = 0
) -> None:
    """Add the factors of operands that broadcast to the result's leading dimensions.

    The last `skip` dimensions of each operand are ignored. An operand's dimension of size 1 that is
    expanded gets a separate factor, before the result's factor.
    """
    for dim, size in enumerate(result):
        back = len(result) - dim + skip
        # The tensors that have the result's factor; tensors of size 1 there get a separate factor.
        found: list[int | None] = [None] * len(builder.operands)
        for tensor in operands:
            shape = builder.operands[tensor]
            if len(shape) < back:
                continue
            if shape[-back] == size:
                found[tensor] = len(shape) - back
            else:
                builder.factor([None] * tensor + [len(shape) - back], size=1)
        builder.factor(found, [dim] * len(builder.results), size=size)


def elementwise_rule(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Infer operands that broadcast to the result.

    >>> print(elementwise_rule([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8}
    """
    result = broadcast_shape(shapes)
    builder = RuleBuilder(shapes, [result])
    broadcast_factors(builder, result, operands=range(len(shapes)))
    return builder.build()
