"""Operators that create arrays: constants, ranges, random bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import has_plain_parts
from reshard.spmd.core.operator import Example, Infer, Operator
from reshard.spmd.core.result_types import asked
from reshard.spmd.local import random
from reshard.spmd.operators.elementwise import elementwise
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import counted


def filled(
    shapes: Sequence[Shape], shape: int | Sequence[int] = (), *, adjusted: bool = False
) -> Inferred:
    """A result of a shape, of which each device makes its part. Operands are scalars.

    >>> print(filled([], (4, 8)).rule)
    () -> ([i, j]) {i=4, j=8}
    """
    result = (shape,) if isinstance(shape, int) else tuple(shape)
    builder = RuleBuilder(shapes, [result])
    for dim in range(len(result)):
        builder.factor((), [dim], adjusted=adjusted)
    return builder.build()


def constant(shapes: Sequence[Shape], shape: int | Sequence[int] = (), **_: Any) -> Inferred:
    """An array of one value."""
    return filled(shapes, shape)


def arange(
    shapes: Sequence[Shape], start: float = 0, stop: float | None = None, step: float = 1, **_: Any
) -> Inferred:
    """Numbers at equal steps, `start` being the end if there is no `stop`.

    >>> arange([], 2, 9, 3).result_shapes
    ((3,),)
    """
    # As NumPy: with one number it is where the range ends.
    low, high = (0, start) if stop is None else (start, stop)
    return filled(shapes, max(math.ceil((high - low) / step), 0), adjusted=True)


def linspace(
    shapes: Sequence[Shape], start: complex = 0, stop: complex = 1, num: int = 50, **_: Any
) -> Inferred:
    """`num` numbers at equal distances from `start` to `stop`."""
    return filled(shapes, num, adjusted=True)


def eye(shapes: Sequence[Shape], n_rows: int, n_cols: int | None = None, k: int = 0) -> Inferred:
    """Ones on a diagonal."""
    return filled(shapes, (n_rows, n_rows if n_cols is None else n_cols), adjusted=True)


def iota(shapes: Sequence[Shape], shape: Sequence[int], axis: int = 0) -> Inferred:
    """Each element's index along an axis."""
    return filled(shapes, shape, adjusted=True)


def frequencies(halves: bool) -> Any:
    """The frequencies of a Fourier transform of `n` elements."""

    def infer(shapes: Sequence[Shape], n: int, d: float = 1.0, **_: Any) -> Inferred:
        return filled(shapes, n // 2 + 1 if halves else n, adjusted=True)

    return infer


def random_bits(shapes: Sequence[Shape], shape: Sequence[int]) -> Inferred:
    """A generator's state, and bits of a shape drawn from it: the next state, and the bits.

    >>> print(random_bits([(2,)], (4, 8)).rule)
    ([i]) -> ([i], [j, k]) {i=2, j=4, k=8} need_replication={i} blocked={i}
    """
    counted("random_bits", shapes, 1)
    builder = RuleBuilder(shapes, [shapes[0], tuple(shape)])
    for dim in range(len(shapes[0])):
        # Each device draws from the same state, and has the next one whole.
        builder.factor([dim], [dim], kind="need_replication", blocked=True)
    for dim in range(len(shape)):
        builder.factor((), [None, dim], adjusted=True)
    return builder.build()


def random_numbers(shapes: Sequence[Shape]) -> Inferred:
    """A key, and an array whose places get numbers; its elements are not read.

    A third operand, a whole number, counts how many arrays of that shape come before in the key's
    stream.

    >>> print(random_numbers([(2,), (4, 8)]).rule)
    ([k], [i, j]) -> ([i, j]) {i=4, j=8, k=2} need_replication={k}
    """
    counted("random_numbers", shapes[:2], 2)
    key, like, *before = shapes
    if key != (2,):
        raise SpecError(f"a key of shape {list(key)}; one of sp.random.key(seed) was expected")
    if before not in ([], [()]):
        raise SpecError(f"random_numbers of {before}; one number was expected at most")
    # The key gets no factor here, so that `build` makes it whole.
    builder = RuleBuilder(shapes, [like])
    for dim in range(len(like)):
        builder.factor([None, dim], [dim], adjusted=True)
    return builder.build()


def _has_plain_parts(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    return all(map(has_plain_parts, specs))


_PLACES = "a part has the numbers of its own places"


def _row(name: str, infer: Infer, example: Example, note: str = _PLACES) -> Operator:
    return Operator(name, "creation", infer, example=example, note=note)


_FILLED: Example = ([], {"shape": (4, 8)})
_BESIDE: Example = ([(4, 8)], {})

OPERATORS: tuple[Operator, ...] = (
    *(_row(name, constant, _FILLED, "") for name in ("zeros", "ones", "empty", "full")),
    *(
        _row(name, elementwise, _BESIDE, "")
        for name in ("zeros_like", "ones_like", "empty_like", "full_like")
    ),
    _row("arange", arange, ([], {"start": 8})),
    _row("linspace", linspace, ([], {"start": 0, "stop": 1, "num": 8})),
    _row("eye", eye, ([], {"n_rows": 4})),
    _row("iota", iota, _FILLED),
    _row("fftfreq", frequencies(False), ([], {"n": 8})),
    _row("rfftfreq", frequencies(True), ([], {"n": 8})),
    _row(
        "random_bits",
        random_bits,
        ([(2,)], {"shape": (4, 8)}),
        "a part draws the bits of its places",
    ),
    Operator(
        "random_numbers",
        "creation",
        random_numbers,
        example=([(2,), (4, 8)], {}),
        local=random.random_numbers,
        knows_place=_has_plain_parts,
        result_types=asked,
        note="a part draws the numbers of its places: the same for every sharding",
    ),
)
