"""Factors of a reshape: the factors that its input and output dimensions share.

Both shapes are read from the major dimension to the minor one, taking factors off until nothing
is left. What a side has left at or below its place is its *stride*::

    6x4 -> 8x3       strides 24, 24   both can give 2        i: shared
                     strides 12, 12   3 against 4: nothing   j of the operand, k of the result
                     strides  4,  3   the larger steps       l of the operand
                     strides  1,  3                          m of the result
                     ([ij, l]) -> ([ik, m])

1. A dimension of size 1 is a factor of its own side.
2. At equal strides the greatest common divisor is a shared factor: it is the same digit of an
   element's place in both shapes. Without one, each side gives what it has left of its dimension.
3. At unequal strides the side of the larger one steps: to the other's stride if it can; else it
   keeps the divisor that both dimensions have in common for a later match; else it gives all.

A factor of one side only cannot be kept cut through the reshape. The factors and their order are
those of Shardy's rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reshard.errors import SpecError
from reshard.spmd.rules.sharding_rule import Mapping


def reshape_factors(
    in_shape: Sequence[int], out_shape: Sequence[int]
) -> tuple[Mapping, Mapping, tuple[int, ...]]:
    """The factors of the operand's dimensions, of the result's, and the factors' sizes.

    A reshape of nothing (a size 0) has no digits to compare: leading and trailing dimensions that
    are equal share their factor there, and the rest have none in common.

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
    digits = _Digits(*shapes)
    while digits.skip_ones():
        digits.step()
    return digits.mapping(0), digits.mapping(1), tuple(digits.sizes)


class _Digits:
    """The factors taken so far, and what is left of both sides."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self.left = [list(shape) for shape in shapes]
        self.strides = [math.prod(shape) for shape in shapes]
        self.place = [0, 0]
        self.factors: list[list[list[int]]] = [[[] for _ in shape] for shape in shapes]
        self.sizes: list[int] = []

    def mapping(self, side: int) -> Mapping:
        return tuple(tuple(dim) for dim in self.factors[side])

    def take(self, sides: Sequence[int], size: int) -> None:
        for side in sides:
            dim = self.place[side]
            self.factors[side][dim].append(len(self.sizes))
            self.left[side][dim] //= size
            self.strides[side] //= size
        self.sizes.append(size)

    def skip_ones(self) -> bool:
        """Passes dimensions that have nothing left; whether any dimension is not yet done."""
        for side, shape in enumerate(self.shapes):
            while self.place[side] < len(shape) and self.left[side][self.place[side]] == 1:
                if shape[self.place[side]] == 1:
                    self.take([side], 1)
                self.place[side] += 1
        return any(self.place[side] < len(shape) for side, shape in enumerate(self.shapes))

    def step(self) -> None:
        # What each side has left of its dimension; 1 beyond the last one.
        here = [
            left[place] if place < len(left) else 1
            for left, place in zip(self.left, self.place, strict=True)
        ]
        common = math.gcd(*here)
        # Step 2 of the module: both sides are at the same place of the element's number.
        if self.strides[0] == self.strides[1]:
            if common > 1:
                self.take([0, 1], common)
            else:
                self.take([0], here[0])
                self.take([1], here[1])
            return
        # Step 3: the side at the larger stride steps until both are at one place again.
        ahead = 0 if self.strides[0] > self.strides[1] else 1
        ratio, rest = divmod(self.strides[ahead], self.strides[1 - ahead])
        size = here[ahead]
        if rest == 0 and size % ratio == 0:
            size = ratio
        # `common` stays for a later match with the other side's dimension.
        elif size > common:
            size //= common
        self.take([ahead], size)


def _factor_nothing(
    in_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> tuple[Mapping, Mapping, tuple[int, ...]]:
    least = min(len(in_shape), len(out_shape))
    # Equal dimensions at either end share a factor; those between have one on each side.
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
