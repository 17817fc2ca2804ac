"""Templates: rules of operator families, independent of shapes.

A `Template` is a rule whose factors have no sizes yet; `template.rule(*shapes)` reads them off
the operands' shapes. The names of the templates are those of nabla's sharding module.

>>> print(matmul_template(batch_dims=1).rule((2, 4, 8), (2, 8, 16)))
([i, j, l], [i, l, k]) -> ([i, j, k]) {i=2, j=4, k=16, l=8} reduction={l}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

from reshard._validation import check_int, check_ints, check_type
from reshard.errors import NotationError, SpecError
from reshard.layout import REDUCTIONS
from reshard.spmd.rules.sharding_rule import (
    FACTOR_NAME,
    Mapping,
    OpShardingRule,
    factor_names,
    write_rule,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A sharding rule for operands of any size.

    Args:
        operands: the factors of each operand's dimensions, by index, major to minor.
        results: the same per result.
        sizes: of the factors, by index; None where the operands' shapes decide.
        reduction: factors over which contributions are combined.
        need_replication: factors that each device needs whole.
        reduction_operator: how contributions combine.
        repeats: whether the single operand stands for any number of operands.
        permutation: factors whose elements move between devices.
        blocked: factors along which nothing propagates.

    >>> print(elementwise_template(2))
    ([i, j], ...) -> ([i, j])
    """

    operands: tuple[Mapping, ...]
    results: tuple[Mapping, ...]
    sizes: tuple[int | None, ...]
    reduction: tuple[int, ...] = ()
    need_replication: tuple[int, ...] = ()
    reduction_operator: str = "sum"
    repeats: bool = False
    permutation: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse the text of a rule, without sizes or with some of them.

        Factors are numbered as the results name them, then as the operands do. `...` after a single
        operand stands for any number of such operands.

        Raises:
            NotationError: a text that is not a rule.
            SpecError: an invalid rule, or a size that no operand's shape determines.

        >>> Template.parse("([i, k], [k, j]) -> ([i, j]) reduction={k}") == matmul_template(0)
        True
        >>> print(Template.parse("([i]) -> ([i, j]) {j=3}").rule((4,)))
        ([i]) -> ([i, j]) {i=4, j=3}
        """
        check_type(text, str, "text of a sharding rule", "give a str", NotationError)
        # 1. The sizes in the text; the text of a rule needs a size for every factor.
        match = re.fullmatch(
            r"\s*(?P<operands>\([^()]*\))\s*->\s*(?P<results>\([^()]*\))"
            r"\s*(?:\{(?P<sizes>[^{}]*)\})?(?P<kinds>(?:\s*\w+\s*=\s*\{[^{}]*\})*)\s*",
            text,
        )
        if match is None:
            raise NotationError(
                f"{text!r} is not a sharding rule; write it as ([i, k], [k, j]) -> ([i, j]) "
                "reduction={k}"
            )
        operands, repeated = re.subn(r"\]\s*,\s*\.\.\.\s*\)", "])", match["operands"])
        said = {item.partition("=")[0].strip() for item in (match["sizes"] or "").split(",")}
        # 2. The other factors follow in the order of the module's templates, with a dummy size.
        # Results first: factors of results have the lower numbers, which win ties of propagation.
        names = dict.fromkeys(re.findall(FACTOR_NAME, match["results"] + operands))
        others = ", ".join(f"{name}=1" for name in names if name not in said)
        sizes = ", ".join(part for part in (others, (match["sizes"] or "").strip()) if part)
        rule = OpShardingRule.parse(f"{operands} -> {match['results']} {{{sizes}}}{match['kinds']}")
        if repeated and len(rule.operands) != 1:
            raise NotationError(f"{text!r}: ... follows a single operand; write it as ([i], ...)")
        # 3. Every size is given by an operand's shape or by the text.
        determined = {dim[0] for mapping in rule.operands for dim in mapping if len(dim) == 1}
        for factor, name in enumerate(rule.names):
            if factor not in determined and name not in said:
                raise SpecError(
                    f"no dimension of {text!r} determines the size of factor {name}, since no "
                    f"operand has a dimension of {name} alone; give it, as in {{{name}=4}}"
                )
        return cls(
            rule.operands,
            rule.results,
            tuple(
                size if name in said else None
                for name, size in zip(rule.names, rule.sizes, strict=True)
            ),
            rule.reduction,
            rule.need_replication,
            rule.reduction_operator,
            bool(repeated),
            rule.permutation,
            rule.blocked,
        )

    def rule(self, *shapes: Sequence[int]) -> OpShardingRule:
        """Return the rule for operands of these shapes.

        Raises:
            SpecError: shapes that the template does not fit, such as two sizes for one factor.

        >>> print(elementwise_template(1).rule((4,), (4,), (4,)))
        ([i], [i], [i]) -> ([i]) {i=4}
        """
        # The single operand of a template that repeats stands for each of the given operands.
        operands = self.operands * len(shapes) if self.repeats else self.operands
        if len(shapes) != len(operands) or not shapes:
            raise SpecError(
                f"{len(shapes)} shapes for {self}; give one for each of its "
                f"{len(self.operands)} operands"
            )
        shapes = tuple(check_ints(shape, "shape", SpecError) for shape in shapes)
        names = factor_names(len(self.sizes))
        sizes = list(self.sizes)
        for number, (shape, mapping) in enumerate(zip(shapes, operands, strict=True)):
            if len(shape) != len(mapping):
                raise SpecError(
                    f"operand {number} has shape {tuple(shape)}, but {self} gives it "
                    f"{len(mapping)} dimensions; give a size for each"
                )
            for dim, factors in enumerate(mapping):
                # Only a dimension of a single factor determines the factor's size. Templates with
                # dimensions of several factors, such as reshapes, are created with their sizes.
                if len(factors) == 1 and sizes[factors[0]] is None:
                    sizes[factors[0]] = shape[dim]
                expected = math.prod(sizes[factor] or 0 for factor in factors)
                if expected != shape[dim]:
                    raise SpecError(
                        f"operand {number} of shape {tuple(shape)} has {shape[dim]} in dimension "
                        f"{dim}; {''.join(names[f] for f in factors) or '1'}={expected} of {self} "
                        "was expected there"
                    )
        return OpShardingRule(
            operands,
            self.results,
            [0 if size is None else size for size in sizes],
            reduction=self.reduction,
            need_replication=self.need_replication,
            permutation=self.permutation,
            blocked=self.blocked,
            reduction_operator=self.reduction_operator,
        )

    def __str__(self) -> str:
        names = factor_names(len(self.sizes))
        return write_rule(self, names, ", ..." if self.repeats else "")


def _as_plain(factors: Iterable[int]) -> Mapping:
    return tuple((factor,) for factor in factors)


def matmul_template(batch_dims: int = 0) -> Template:
    """Return matrix products `[..., i, k] @ [..., k, j] -> [..., i, j]` over batch dimensions.

    >>> print(matmul_template(0))
    ([i, k], [k, j]) -> ([i, j]) reduction={k}
    """
    check_int(batch_dims, "number of batch dimensions", SpecError)
    batch = range(batch_dims)
    # The reduced factor comes last: factors of the result win ties of propagation.
    rows, columns, inner = batch_dims, batch_dims + 1, batch_dims + 2
    return Template(
        (_as_plain((*batch, rows, inner)), _as_plain((*batch, inner, columns))),
        (_as_plain((*batch, rows, columns)),),
        (None,) * (batch_dims + 3),
        reduction=(inner,),
    )


def elementwise_template(rank: int) -> Template:
    """Return a template for any number of operands of equal shape, and a result of that shape.

    >>> print(elementwise_template(2).rule((4, 8), (4, 8)))
    ([i, j], [i, j]) -> ([i, j]) {i=4, j=8}
    """
    check_int(rank, "rank", SpecError)
    mapping = _as_plain(range(rank))
    return Template((mapping,), (mapping,), (None,) * rank, repeats=True)


def reduce_template(
    rank: int,
    reduce_dims: Iterable[int],
    *,
    keepdims: bool = False,
    reduction_operator: str = "sum",
) -> Template:
    """Return a reduction over dimensions, which the result does not have.

    >>> print(reduce_template(3, [1], reduction_operator="max").rule((4, 8, 2)))
    ([i, j, k]) -> ([i, k]) {i=4, j=8, k=2} reduction={j:max}
    >>> print(reduce_template(2, [0], keepdims=True).rule((4, 8)))
    ([i, j]) -> ([k, j]) {i=4, j=8, k=1} reduction={i}
    """
    check_int(rank, "rank", SpecError)
    reduced = dimensions(rank, reduce_dims)
    if reduction_operator not in REDUCTIONS:
        raise SpecError(
            f"unknown reduction {reduction_operator!r}; it is one of {', '.join(REDUCTIONS)}"
        )
    # With keepdims a factor of size 1, of the result alone, stands for each reduced dimension.
    ones = {dim: rank + number for number, dim in enumerate(reduced)} if keepdims else {}
    result = [ones.get(dim, dim) for dim in range(rank) if keepdims or dim not in reduced]
    return Template(
        (_as_plain(range(rank)),),
        (_as_plain(result),),
        (None,) * rank + (1,) * len(ones),
        reduction=reduced,
        reduction_operator=reduction_operator,
    )


def transpose_template(rank: int, perm: Sequence[int]) -> Template:
    """Return a transposition: dimension `d` of the result is `perm[d]` of the operand.

    >>> print(transpose_template(3, (2, 0, 1)).rule((4, 8, 2)))
    ([j, k, i]) -> ([i, j, k]) {i=2, j=4, k=8}
    """
    check_int(rank, "rank", SpecError)
    permutation = check_ints(perm, "permutation", SpecError, None)
    axes = tuple(axis + rank if axis < 0 else axis for axis in permutation)
    if sorted(axes) != list(range(rank)):
        raise SpecError(f"permutation {permutation} of {rank} dimensions; name each of them once")
    # Factors are numbered by the result's dimensions.
    operand = [axes.index(dim) for dim in range(rank)]
    return Template((_as_plain(operand),), (_as_plain(range(rank)),), (None,) * rank)


def broadcast_with_shapes_template(in_shape: Sequence[int], out_shape: Sequence[int]) -> Template:
    """Return NumPy's broadcasting: aligned at the end, with size 1 expanded.

    >>> print(broadcast_with_shapes_template((1, 8), (4, 3, 8)).rule((1, 8)))
    ([j, l]) -> ([i, k, l]) {i=4, j=1, k=3, l=8} need_replication={j}
    """
    in_shape, out_shape = (check_ints(shape, "shape", SpecError) for shape in (in_shape, out_shape))
    missing = len(out_shape) - len(in_shape)
    operand: list[int] = []
    result: list[int] = []
    sizes: list[int] = []
    whole: list[int] = []
    for dim, size in enumerate(out_shape):
        source = dim - missing
        if source >= 0 and in_shape[source] != size:
            # -1 marks shapes that do not broadcast, as it does for a longer operand.
            if in_shape[source] != 1:
                missing = -1
                break
            whole.append(len(sizes))
            operand.append(len(sizes))
            sizes.append(1)
        elif source >= 0:
            operand.append(len(sizes))
        result.append(len(sizes))
        sizes.append(size)
    if missing < 0:
        raise SpecError(
            f"shape {tuple(in_shape)} does not broadcast to {tuple(out_shape)}; sizes counted "
            "from the end must be equal, or 1"
        )
    return Template(
        (_as_plain(operand),), (_as_plain(result),), tuple(sizes), need_replication=tuple(whole)
    )


def reshape_template(in_shape: Sequence[int], out_shape: Sequence[int]) -> Template:
    """Return a reshape: dimensions that split or merge have several factors, shared if common.

    A factor that only the operand or only the result has must be whole on each device, unless its
    size is 1: it cannot be sharded on one side only.

    >>> print(reshape_template((8,), (2, 4)).rule((8,)))
    ([ij]) -> ([i, j]) {i=2, j=4}
    >>> print(reshape_template((6, 4), (8, 3)).rule((6, 4)))
    ([ij, l]) -> ([ik, m]) {i=2, j=3, k=4, l=4, m=3} need_replication={j, k, l, m}
    """
    in_shape, out_shape = (check_ints(shape, "shape", SpecError) for shape in (in_shape, out_shape))
    operand, result, sizes = reshape_factors(in_shape, out_shape)
    of_operand = {factor for dim in operand for factor in dim}
    of_result = {factor for dim in result for factor in dim}
    whole = (of_operand - of_result) | {f for f in of_result - of_operand if sizes[f] != 1}
    return Template((operand,), (result,), sizes, need_replication=tuple(sorted(whole)))


def einsum_template(text: str) -> Template:
    """Return the template of `numpy.einsum` subscripts: letters that the result lacks are summed.

    >>> print(einsum_template("bik,bkj->bij"))
    ([i, j, l], [i, l, k]) -> ([i, j, k]) reduction={l}
    """
    if not isinstance(text, str):
        raise SpecError(f"{text!r} is not an einsum; write it as bik,bkj->bij")
    match = re.fullmatch(r"([a-zA-Z]*(?:,[a-zA-Z]*)*)->([a-zA-Z]*)", re.sub(r"\s", "", text))
    if match is None:
        raise SpecError(f"{text!r} is not an einsum; write it as bik,bkj->bij")
    operands, result = match[1].split(","), match[2]
    for letters in (*operands, result):
        if len(set(letters)) != len(letters):
            raise SpecError(f"{letters!r} of {text!r} has a letter twice; take the diagonal first")
    reduced = [x for x in dict.fromkeys("".join(operands)) if x not in result]
    if not set(result) <= set("".join(operands)):
        raise SpecError(f"{text!r} has a letter in its result alone; broadcast it afterwards")
    # Factors of the result come first: their numbers decide ties of propagation.
    index = {letter: number for number, letter in enumerate([*result, *reduced])}
    return Template(
        tuple(_as_plain(index[x] for x in letters) for letters in operands),
        (_as_plain(index[x] for x in result),),
        (None,) * len(index),
        reduction=tuple(index[x] for x in reduced),
    )


def dimensions(rank: int, dims: Iterable[int]) -> tuple[int, ...]:
    """Return dimensions counted from the start, in ascending order.

    Raises:
        SpecError: a dimension that does not exist, or is named twice.

    >>> dimensions(3, [-1, 0])
    (0, 2)
    """
    asked = tuple(dims)
    try:
        numbers = tuple(map(index, asked))
    except TypeError:
        raise SpecError(f"dimensions {asked} of {rank}; name them by whole numbers") from None
    resolved = sorted(dim + rank if dim < 0 else dim for dim in numbers)
    if len(set(resolved)) != len(resolved) or any(not 0 <= dim < rank for dim in resolved):
        raise SpecError(f"dimensions {numbers} of {rank}; name some of 0 to {rank - 1}, each once")
    return tuple(resolved)


def reshape_factors(
    in_shape: Sequence[int], out_shape: Sequence[int]
) -> tuple[Mapping, Mapping, tuple[int, ...]]:
    """Return the factors of the operand's dimensions, of the result's, and the factors' sizes.

    The factors of an empty array (a size 0) cannot be compared: equal leading and trailing
    dimensions share their factors, and the other dimensions have no common factors.

    Raises:
        SpecError: shapes of different numbers of elements, or sizes below 0.

    >>> reshape_factors((8,), (2, 4))
    (((0, 1),), ((0,), (1,)), (2, 4))
    """
    shapes = (tuple(in_shape), tuple(out_shape))
    if math.prod(shapes[0]) != math.prod(shapes[1]) or min((0, *shapes[0], *shapes[1])) < 0:
        raise SpecError(
            f"shape {shapes[0]} cannot be reshaped to {shapes[1]}; "
            "both need the same number of elements, and sizes of 0 or more"
        )
    if 0 in shapes[0]:
        return _factor_nothing(*shapes)
    # The number of an element, in row-major order, is written in digits: the indices of either
    # shape's dimensions. Factors are digits of both, from the major digit on. Per side: the factors
    # of each dimension, what is left of its size, the stride of what is left, and the dimension.
    factors: list[list[list[int]]] = [[[] for _ in shape] for shape in shapes]
    left = [list(shape) for shape in shapes]
    strides = [math.prod(shape) for shape in shapes]
    place = [0, 0]
    sizes: list[int] = []

    def take(sides: Sequence[int], size: int) -> None:
        for side in sides:
            factors[side][place[side]].append(len(sizes))
            left[side][place[side]] //= size
            strides[side] //= size
        sizes.append(size)

    while True:
        # 1. Skip dimensions that are used up.
        for side, shape in enumerate(shapes):
            while place[side] < len(shape) and left[side][place[side]] == 1:
                if shape[place[side]] == 1:
                    take([side], 1)
                place[side] += 1
        if all(place[side] == len(shape) for side, shape in enumerate(shapes)):
            break
        # The remaining size of each side's dimension; 1 after the last dimension.
        here = [own[at] if at < len(own) else 1 for own, at in zip(left, place, strict=True)]
        common = math.gcd(*here)
        # 2. At equal strides, both sides share what their dimensions have in common.
        if strides[0] == strides[1]:
            if common > 1:
                take([0, 1], common)
            else:
                take([0], here[0])
                take([1], here[1])
            continue
        # 3. Otherwise the side at the larger stride advances until the strides are equal again.
        ahead = 0 if strides[0] > strides[1] else 1
        ratio, rest = divmod(strides[ahead], strides[1 - ahead])
        size = here[ahead]
        if rest == 0 and size % ratio == 0:
            size = ratio
        # `common` stays for a later match with the other side's dimension.
        elif size > common:
            size //= common
        take([ahead], size)
    operand, result = (tuple(map(tuple, side)) for side in factors)
    return operand, result, tuple(sizes)


def _factor_nothing(
    in_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> tuple[Mapping, Mapping, tuple[int, ...]]:
    least = min(len(in_shape), len(out_shape))
    # Equal dimensions at either end share a factor; the others get a factor on each side.
    head = 0
    while head < least and in_shape[head] == out_shape[head]:
        head += 1
    tail = 0
    while tail < least - head and in_shape[-1 - tail] == out_shape[-1 - tail]:
        tail += 1
    sizes: list[int] = list(in_shape)
    operand = tuple((dim,) for dim in range(len(in_shape)))
    result: list[tuple[int, ...]] = []
    for dim, size in enumerate(out_shape):
        if dim < head:
            result.append((dim,))
        elif dim >= len(out_shape) - tail:
            result.append((len(in_shape) - (len(out_shape) - dim),))
        else:
            result.append((len(sizes),))
            sizes.append(size)
    return operand, tuple(result), tuple(sizes)
