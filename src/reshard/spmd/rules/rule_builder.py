"""Sharding rules from patterns, which name factors as einsum does.

A pattern names the factors of each dimension of the operands and, after `->`, of the results. The
product of matrices, and attention of `g` groups of `r` heads::

    ... i k, ... k j -> ... i j
    *b gr s d, *b g t d, *b g t e -> *b gr s e

A word stands for a dimension, or for several:

    i       a dimension of a factor
    gr      a dimension of several factors, major to minor
    _       a dimension without a factor
    *b      any number of dimensions, `*_` without factors
    ...     leading dimensions, which broadcast

`from_pattern` reads the sizes of factors from the operands' shapes. `from_dims` does the same with
the factors of each dimension in lists, for operators that treat each dimension differently. Then

1. a dimension of an operand without a factor gets a factor that each device needs whole;
2. a dimension of a result without a factor gets a factor: each device computes its part of it;
3. a factor of operands alone that is not reduced is needed whole. (Shardy's rules omit this step,
   and leave it to its partitioner to undo a sharding of such a factor.)

Factors are numbered as the results name them, then as the operands do, which decides ties of
propagation; the factors of steps 1 and 2 come last.

Axes and shapes are read here as operators read them: counted from the start, and broadcast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from reshard.errors import SpecError
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.rules.templates import dimensions
from reshard.text import count_text

Shape = tuple[int, ...]
Dim = Any
"""The factor of a dimension, any value but None; its factors in a tuple; None without a factor."""


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


def from_dims(
    operands: Iterable[Iterable[Dim]],
    results: Iterable[Iterable[Dim]],
    shapes: Sequence[Shape],
    result_shapes: Sequence[Shape] | None = None,
    *,
    order: Iterable[Any] = (),
    sizes: Mapping[Any, int] | None = None,
    broadcast: Collection[Any] = (),
    reduced: Collection[Any] = (),
    whole: Collection[Any] = (),
    moved: Collection[Any] = (),
    blocked: Collection[Any] = (),
    adjusted: Collection[Any] = (),
    leading: Collection[Any] = (),
    reduction: str = "sum",
    pattern: str = "",
) -> Inferred:
    """Return the rule of an operator from the factors of each dimension of its tensors.

    Args:
        operands, results: the factors of the dimensions, by tensor.
        shapes: of the operands.
        result_shapes: of the results; the products of the sizes of their factors when not given.
        order: factors that are numbered first.
        sizes: of factors; of their first dimensions when not given.
        broadcast: factors that a dimension of size 1 does not have if others are larger.
        reduced: factors over which contributions are combined.
        whole: factors that each device needs whole.
        moved: factors whose elements move between devices.
        blocked: factors along which nothing propagates.
        adjusted, leading: see `Inferred`.
        reduction: how contributions combine.
        pattern: the text of these factors, for errors.

    Raises SpecError for a factor of several sizes, and for operands of other numbers of dimensions.

    >>> print(from_dims([[0, "k"], ["k", 1]], [[0, 1]], [(4, 8), (8, 16)], reduced=["k"]).rule)
    ([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}
    """
    tensors = [[_list_factors(dim) for dim in dims] for dims in (*operands, *results)]
    result_dims = tensors[len(shapes) :]
    # The sizes of the operands' dimensions that have a factor alone, and of the results'.
    operand_sizes: dict[Any, list[int]] = {}
    returned: dict[Any, int] = {}
    # Operands come first, so that the shorter list ends before results.
    for tensor, (dims, shape) in enumerate(zip(tensors, shapes, strict=False)):
        if len(dims) != len(shape):
            raise SpecError(
                f"shapes {', '.join(map(str, shapes))}; an operand {tensor} of "
                f"{count_text(len(dims), 'dimension')} was expected"
            )
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1:
                operand_sizes.setdefault(dim[0], []).append(size)
    for dims, shape in zip(result_dims, result_shapes or (), strict=False):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1:
                returned.setdefault(dim[0], size)
    # In the order in which they are first named: a dictionary keeps it, a set would not.
    used = dict.fromkeys(
        factor for dims in (*result_dims, *tensors) for dim in dims for factor in dim
    )
    factor_sizes: dict[Any, int] = {}
    for factor in dict.fromkeys((*(factor for factor in order if factor in used), *used)):
        seen = operand_sizes.get(factor, ())
        if sizes is not None and factor in sizes:
            factor_sizes[factor] = sizes[factor]
        elif not seen:
            # A factor of compound dimensions alone needs `sizes`; without it, it counts as 1.
            factor_sizes[factor] = returned.get(factor, 1)
        elif seen.count(seen[0]) == len(seen):
            factor_sizes[factor] = seen[0]
        elif factor in broadcast:
            size = next(size for size in seen if size != 1)
            if not {*seen} <= {1, size}:
                raise SpecError(
                    f"shapes {', '.join(map(str, shapes))} do not broadcast; sizes counted from "
                    "the end must be equal, or 1"
                )
            for tensor, shape in enumerate(shapes):
                for place, dim in enumerate(tensors[tensor]):
                    # A dimension that is expanded has a factor by itself, before the other.
                    if dim == (factor,) and shape[place] == 1:
                        tensors[tensor][place] = ((tensor, place),)
                        factor_sizes[tensor, place] = 1
            factor_sizes[factor] = size
        else:
            where = f" in `{pattern}`" if pattern else ""
            raise SpecError(
                f"shapes {', '.join(map(str, shapes))}: "
                f"{' and '.join(map(str, dict.fromkeys(seen)))} are sizes of {factor}{where}; they "
                "must be equal"
            )
    for tensor, (dims, shape) in enumerate(
        zip(tensors, (*shapes, *(result_shapes or ())), strict=False)
    ):
        for place, dim in enumerate(dims):
            if not dim:
                dims[place] = ((tensor, place),)
                factor_sizes[tensor, place] = shape[place]
    of_results = {factor for dims in result_dims for dim in dims for factor in dim}
    # Numbers decide ties of propagation, so they follow the order in which factors were found.
    numbers = {factor: number for number, factor in enumerate(factor_sizes)}

    def numbered(factors: Iterable[Any]) -> list[int]:
        return [numbers[factor] for factor in factors if factor in numbers] if factors else []

    mappings = [[[numbers[factor] for factor in dim] for dim in dims] for dims in tensors]
    kept_whole = [*whole]
    if factor_sizes.keys() - of_results:
        others = (factor for factor in factor_sizes if factor not in of_results)
        kept_whole += [factor for factor in others if factor not in reduced and factor not in moved]
    rule = OpShardingRule(
        mappings[: len(shapes)],
        mappings[len(shapes) :],
        factor_sizes.values(),
        reduction=numbered(reduced),
        need_replication=numbered(kept_whole),
        permutation=numbered(moved),
        blocked=numbered(blocked),
        reduction_operator=reduction,
    )
    if result_shapes is None:
        result_shapes = [
            tuple([math.prod([factor_sizes[factor] for factor in dim]) for dim in dims])
            for dims in result_dims
        ]
    return Inferred(
        rule,
        tuple(result_shapes),
        tuple(numbered(adjusted)),
        tuple(numbered(leading)),
    )


def _list_factors(dim: Dim) -> tuple[Any, ...]:
    return dim if isinstance(dim, tuple) else () if dim is None else (dim,)


def from_pattern(
    pattern: str,
    shapes: Sequence[Shape],
    result_shapes: Sequence[Shape] | None = None,
    *,
    lengths: Mapping[str, int] | None = None,
    order: str = "",
    sizes: Mapping[str, int] | None = None,
    **kinds: Any,
) -> Inferred:
    """Return the rule of an operator from a pattern, see the module.

    Args:
        pattern: the factors of the dimensions.
        shapes, result_shapes, sizes: as of `from_dims`.
        lengths: numbers of dimensions that `*a` stands for, where they do not follow from shapes.
        order: letters of factors that are numbered first.
        kinds: the other arguments of `from_dims`, as letters; that of `*a` means all of them.

    Raises SpecError for shapes that do not fit the pattern.

    >>> print(from_pattern("... i k, ... k j -> ... i j", [(2, 4, 8), (8, 5)], reduced="k").rule)
    ([i, j, l], [l, k]) -> ([i, j, k]) {i=2, j=4, k=5, l=8} reduction={l}
    >>> print(from_pattern("*a k *b, *i -> *a *i *b", [(9, 8), (4,)], lengths={"a": 0}).rule)
    ([k, j], [i]) -> ([i, j]) {i=4, j=8, k=9} need_replication={k}
    """
    spelt = _spell_pattern(
        pattern,
        tuple(map(len, shapes)),
        order,
        tuple((lengths or {}).items()),
        tuple(kinds.items()),
    )
    if spelt is None:
        raise SpecError(
            f"shapes {', '.join(map(str, shapes))}; shapes of the form `{pattern}` were expected"
        )
    operands, results, options = spelt
    return from_dims(
        operands, results, shapes, result_shapes, sizes=sizes, pattern=pattern, **options
    )


# Cached, since operators are called for many shapes of few numbers of dimensions.
@lru_cache(maxsize=4096)
def _spell_pattern(
    pattern: str,
    ranks: tuple[int, ...],
    order: str,
    lengths: tuple[tuple[str, int], ...],
    kinds: tuple[tuple[str, str], ...],
) -> tuple[list[Any], list[Any], dict[str, Any]] | None:
    """Return the factors of operands and results, and the options of `from_dims`.

    Returns None if operands of other numbers of dimensions were expected. Raises SpecError for
    another number of operands.
    """
    before, after = pattern.split("->")
    operands = [tensor.split() for tensor in before.split(",")] if before.strip() else []
    if len(operands) != len(ranks):
        raise SpecError(f"{len(ranks)} operands for `{pattern}`; {len(operands)} were expected")
    group_lengths = dict(lengths)
    operand_dims = [
        _spell(words, group_lengths, rank) for words, rank in zip(operands, ranks, strict=True)
    ]
    if None in operand_dims:
        return None
    # Broadcasting gives the result the leading dimensions of the operand with the most.
    group_lengths["..."] = max(
        (sum(str(dim)[0] == "." for dim in dims) for dims in operand_dims), default=0
    )
    result_dims = [_spell(tensor.split(), group_lengths) for tensor in after.split(",")]
    dims = itertools.chain.from_iterable((*result_dims, *operand_dims))
    factors = list(dict.fromkeys(factor for dim in dims for factor in _list_factors(dim)))
    # Factors are letters, or a letter or a dot, and a number.
    options: dict[str, Any] = {
        kind: value if kind == "reduction" else [factor for factor in factors if factor[0] in value]
        for kind, value in kinds
    }
    options["broadcast"] = [factor for factor in factors if factor[0] == "."] + options.get(
        "broadcast", []
    )
    options["order"] = [factor for letter in order for factor in factors if factor[0] == letter]
    return operand_dims, result_dims, options


def _spell(words: Sequence[str], lengths: dict[str, int], ndim: int | None = None) -> Any:
    """Return the dimensions that words stand for, or None if they do not fit.

    A group of dimensions whose length is not known has the rest of `ndim` dimensions, and it is
    known from then on; but `...` and `*_` may have other lengths in each operand.
    """
    names = {word: word if word == "..." else word[1:] for word in words if word[0] in ".*"}
    counts = {word: lengths.get(name) for word, name in names.items()}
    for word, name in names.items():
        if counts[word] is None and ndim is not None:
            others = [counts[other] for other in counts if other != word]
            rest = ndim - (len(words) - len(names)) - sum(length or 0 for length in others)
            counts[word] = rest
            if name not in ("...", "_"):
                lengths[name] = rest
    dims: list[Dim] = []
    for word in words:
        if word in names:
            count, name = counts[word] or 0, names[word]
            if count < 0:
                return None
            back = range(count, 0, -1) if name == "..." else range(count)
            dims += [None if name == "_" else f"{name[0]}{place}" for place in back]
        else:
            dims.append(None if word == "_" else word if len(word) == 1 else tuple(word))
    return dims if ndim is None or len(dims) == ndim else None


def replicated_rule(operands: Iterable[Shape], results: Iterable[Shape] = ()) -> OpShardingRule:
    """Return the rule of an unknown operator: every device needs and computes everything.

    >>> print(replicated_rule([(4,), (2,)], [(8,)]))
    ([i], [j]) -> ([k]) {i=4, j=2, k=8} need_replication={i, j, k}
    """
    shapes, result_shapes = list(operands), list(results)
    numbers = itertools.count()
    tensors = [[next(numbers) for _ in shape] for shape in (*shapes, *result_shapes)]
    factors = range(next(numbers))
    operand_dims, returned = tensors[: len(shapes)], tensors[len(shapes) :]
    return from_dims(
        operand_dims, returned, shapes, result_shapes, order=factors, whole=factors
    ).rule


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
    result: list[int] = []
    # From the last dimension to the first, because shapes are aligned at the end.
    for back in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back}
        if len(sizes - {1}) > 1:
            raise SpecError(
                f"shapes {', '.join(map(str, shapes))} do not broadcast; sizes counted from the "
                "end must be equal, or 1"
            )
        result.append(next(iter(sizes - {1}), 1))
    return tuple(reversed(result))


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
    dims = range(len(shape))
    results = [shape if result is None else result]
    return from_dims([dims], [dims], [shape], results, whole=whole, moved=moved, blocked=blocked)


def elementwise_rule(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Infer operands that broadcast to the result.

    >>> print(elementwise_rule([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8}
    """
    # A call without operands is an operator's own to refuse.
    return from_pattern(", ".join(["..."] * len(shapes)) + " -> ...", shapes)
