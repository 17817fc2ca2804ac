"""Padding, and slices whose start is an array."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from reshard.errors import SpecError, UsageError
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.functions.array_arguments import (
    of_arrays,
    whole_number,
    whole_numbers,
    whole_pairs,
)
from reshard.spmd.functions.elementwise import operands
from reshard.spmd.functions.indexing import places_in
from reshard.spmd.functions.manipulation import take_ranges
from reshard.spmd.rules.shapes import axis_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

Sizes = int | Sequence[int]


@of_arrays
def pad(x: Any, /, pad_width: Sequence[Sequence[int]], *, constant_values: float = 0) -> Any:
    """Pad each dimension with a number, `(before, after)`."""
    pairs = whole_pairs("pads", pad_width, x.ndim)
    return call("pad", (x,), {"pad_width": pairs, "constant_values": constant_values})


@of_arrays
def split(x: Any, indices_or_sections: Sizes, /, *, axis: int = 0) -> tuple[Any, ...]:
    """Split along an axis: into a number of equal parts, or before the given indices.

    Indices are those of slices: below 0 they count from the end.
    """
    place = axis_of(x.ndim, axis)
    size = x.shape[place]
    if hasattr(indices_or_sections, "__index__"):
        count = whole_number("equal parts,", indices_or_sections, 1)
        if size % count:
            raise SpecError(f"{size} in {count} equal parts; give a divisor")
        # Where each part but the last ends.
        ends = [size // count * (number + 1) for number in range(count - 1)]
    elif isinstance(indices_or_sections, Iterable):
        ends = [whole_number("a part beginning at", end, -size) for end in indices_or_sections]
    else:
        raise UsageError(f"split at {indices_or_sections!r}; give whole numbers, or how many parts")
    parts = []
    for first, last in itertools.pairwise([0, *ends, size]):
        # As NumPy: counted from the end where negative, clipped, and empty where they do not rise.
        start, stop, _ = slice(first, last).indices(size)
        parts.append(take_ranges(x, {place: (start, max(start, stop), 1)}))
    return tuple(parts)


@of_arrays
def scatter(x: Any, indices: Any, updates: Any, /, *, axis: int = 0, mode: str = "set") -> Any:
    """The array with slices along an axis, at indices, replaced by updates, or added to ("add").

    `updates` have the indices' dimensions in the axis's place. Of equal indices one is set.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    if mode not in ("set", "add"):
        raise SpecError(f"mode {mode!r} of scatter; it is 'set' or 'add'")
    place = axis_of(x.ndim, axis)
    x, chosen = places_in(x, place, indices)
    _, updates = operands(x, updates)
    _check_fits("scatter", x, updates)
    return call("scatter", operands(x, chosen, updates), {"axis": place, "mode": mode})


@of_arrays
def dynamic_slice(x: Any, starts: Sequence[Any], /, sizes: Sequence[int]) -> Any:
    """A slice of fixed size that starts at scalars, which are clamped to stay inside."""
    wanted = whole_numbers("sizes", sizes, x.ndim)
    return call("dynamic_slice", _add_starts([x], starts), {"sizes": wanted})


@of_arrays
def dynamic_update_slice(x: Any, update: Any, starts: Sequence[Any], /) -> Any:
    """The array with a slice replaced, whose start is clamped to stay inside."""
    x, update = operands(x, update)
    _check_fits("dynamic_update_slice", x, update)
    return call("dynamic_update_slice", _add_starts([x, update], starts))


def _add_starts(arrays: Sequence[Any], starts: Sequence[Any]) -> list[Any]:
    """The operands, where a rectangle begins among them: whole numbers. Raises UsageError."""
    if not isinstance(starts, Iterable) or getattr(starts, "shape", None) == ():
        raise UsageError(f"a rectangle that begins at {starts!r}; give a start for each dimension")
    given = operands(*arrays, *starts)
    for start in given[len(arrays) :]:
        kind = kind_of(start.type.dtype) if isinstance(start, ArrayValue) else ""
        is_number = isinstance(start, int) or kind in ("signed integer", "unsigned integer")
        if not is_number or getattr(start, "shape", ()) != ():
            raise UsageError(
                f"a rectangle that begins at {start!r}; give a whole number, or an array of one "
                "without dimensions, for each dimension"
            )
    return given


# In the order of promotion: updates of a later kind than the array's would be rounded.
_KINDS = ("bool", "unsigned integer", "signed integer", "real floating", "complex floating")


def _check_fits(name: str, x: Any, updates: Any) -> None:
    """Raises UsageError for updates that would lose what they are: 0.5 as a whole number."""
    kinds = [_KINDS.index(kind_of(one.dtype)) for one in (x, updates) if hasattr(one, "dtype")]
    if len(kinds) == 2 and kinds[1] > kinds[0]:
        raise UsageError(
            f"{name} of updates of {updates.dtype} into {x.dtype} would round them; cast one of "
            "both with sp.astype"
        )
