"""Origins: what the elements of a box are.

An element is taken from a source, made of some by operations, or one value. The origin of a whole
box says it for all of its elements: those taken from a source lie there in steps, one for each
dimension of the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What each type can hold without loss, beside itself.
_WIDER = {
    "float8_e4m3fn": {"bfloat16", "float16", "float32", "float64"},
    "float8_e5m2": {"bfloat16", "float16", "float32", "float64"},
    "float8_e8m0fnu": {"bfloat16", "float32", "float64"},
    "float16": {"float32", "float64"},
    "bfloat16": {"float32", "float64"},
    "float32": {"float64"},
    "uint8": {"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"},
    "int8": {"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"},
    "int16": {"int32", "int64", "float32", "float64"},
    "int32": {"int64", "float64"},
    "bool": {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"},
}
CAST, BITS = "to ", "bits as "


class Taken(NamedTuple):
    """Elements of source number `source`: at `offset`, with a stride for each dimension.

    `steps` are done to each of them: casts (`"to float32"`), bits that count as another type
    (`"bits as uint8"`), operations (`"exp"`).
    """

    source: int
    offset: int
    strides: tuple[int, ...]
    steps: tuple[str, ...] = ()

    @property
    def is_copied(self) -> bool:
        """Whether the elements are as they were, casts apart."""
        return all(step.startswith((CAST, BITS)) for step in self.steps)


class Filled(NamedTuple):
    """One value."""

    value: float


class Made(NamedTuple):
    """Elements made by operations of sources, of which nobody says which element of which."""

    operations: tuple[str, ...]
    sources: tuple[int, ...]


Origin = Taken | Filled | Made


def with_cast(steps: tuple[str, ...], source_dtype: str, dtype: str) -> tuple[str, ...]:
    """Steps and then a cast to `dtype`; what it undoes falls out.

    >>> with_cast(("to float32",), "bfloat16", "bfloat16")
    ()
    >>> with_cast(("to bfloat16",), "float32", "float32")
    ('to bfloat16', 'to float32')
    """
    while True:
        last = type_after(steps, source_dtype)
        if last == dtype:
            return steps
        if not steps or not steps[-1].startswith(CAST):
            return (*steps, CAST + dtype)
        before = type_after(steps[:-1], source_dtype)
        # A cast to a type that holds all values of the one before it loses nothing, so that the
        # next cast starts from there.
        if before is None or last not in _WIDER.get(before, ()):
            return (*steps, CAST + dtype)
        steps = steps[:-1]


def with_bits(steps: tuple[str, ...], source_dtype: str, dtype: str) -> tuple[str, ...]:
    """Steps, and then the same bits as another type of the same width.

    >>> with_bits(("bits as float8_e8m0fnu",), "uint8", "uint8")
    ()
    """
    if type_after(steps, source_dtype) == dtype:
        return steps
    if steps and steps[-1].startswith(BITS):
        return with_bits(steps[:-1], source_dtype, dtype)
    return (*steps, BITS + dtype)


def type_after(steps: tuple[str, ...], source_dtype: str) -> str | None:
    """The type that elements have after steps; None behind an operation that does not say it."""
    if not steps:
        return source_dtype
    for prefix in (CAST, BITS):
        if steps[-1].startswith(prefix):
            return steps[-1].removeprefix(prefix)
    return None


def joined_origin(operation: str, origins: Sequence[Origin | None]) -> Made:
    """What an operation makes of elements of several origins.

    >>> joined_origin("mul", [Taken(0, 0, (1,), ("to float32",)), Taken(2, 5, (1,)), None])
    Made(operations=('to float32', 'mul'), sources=(0, 2))
    """
    operations: list[str] = []
    sources: set[int] = set()
    for origin in origins:
        if isinstance(origin, Taken):
            operations += origin.steps
            sources.add(origin.source)
        elif isinstance(origin, Made):
            operations += origin.operations
            sources.update(origin.sources)
    return Made((*dict.fromkeys(operations), operation), tuple(sorted(sources)))
