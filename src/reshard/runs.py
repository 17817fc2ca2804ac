"""Run tables: the indices of a dimension that each part holds, and their local offsets.

A dimension of length `n` is split into parts. A part holds *runs*: ranges of consecutive global
indices that are consecutive in the local order of the part, too. The run table lists them, with a
single row for all runs of a part that are equally long and equally far apart, so an interleaved
split is as small as a contiguous split::

    length 12 over 2 parts, in blocks of 2 dealt in turn

    global  0  1  2  3  4  5  6  7  8  9 10 11
    part    0  0  1  1  0  0  1  1  0  0  1  1

    part  start  length  local_start repeat  global_step  local_step  role
       0      0       2            0      3            4           2  owned
       1      2       2            0      3            4           2  owned

Parts may overlap: two parts may own the same index. A run has the role of its elements:
`OWNED` elements may be sent to others; `HALO` elements are copies of a neighbour's, and a source
only if they are declared fresh (`FRESH_HALO`); `PAD` is padding.

Every table is canonicalized when it is built:

1. Runs are sorted by part and local position, and empty runs are dropped.
2. The runs of each part must tile its local positions from 0, without gaps or overlaps.
3. Runs that are adjacent globally are joined.
4. From left to right, runs of equal length at equal distances become a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reshard._interning import Interned
from reshard._validation import MAX_ELEMENTS, check_int, check_int_array
from reshard.errors import LayoutError

# If a part is split again, the larger of two roles wins: a copy is fresh only if both are.
OWNED, FRESH_HALO, HALO, PAD = 0, 1, 2, 3
ROLE_NAMES = ("owned", "fresh halo", "halo", "pad")

# Larger tables take gigabytes, and are mostly mistakes: single indices instead of blocks.
MAX_RUNS = 1 << 26
_MAX_KEY_ROWS = 64

IntArray = NDArray[np.int64]
Number = TypeVar("Number", bound=np.integer[Any])


class Run(NamedTuple):
    """A row of a run table; the module's docstring explains the fields."""

    part: int
    start: int
    length: int
    local_start: int
    repeat: int = 1
    global_step: int = 0
    local_step: int = 0
    role: int = OWNED


@dataclass(frozen=True, slots=True, eq=False)
class SingleRuns:
    """A run table with every run listed (`repeat` is 1), sorted by part and local position.

    All columns are int64 arrays of shape `(runs,)`.
    """

    part: IntArray
    start: IntArray
    length: IntArray
    local_start: IntArray
    role: IntArray

    @property
    def stop(self) -> IntArray:
        """The global stop of each run."""
        return self.start + self.length

    def take(self, index: Any) -> SingleRuns:
        """Return the chosen rows, in the given order."""
        return SingleRuns(*(getattr(self, field.name)[index] for field in fields(self)))


_MAX_REMEMBERED_ROWS = 64
# Building a table takes 0.3 ms, and jobs describe the tables of equal tensors again and again.
_tables: WeakValueDictionary[tuple[int, int, bytes], RunTable] = WeakValueDictionary()


class RunTable(Interned):
    """The runs of a dimension, canonical and interned.

    Args:
        dimension_length: number of global indices.
        parts: number of parts; a part without a row holds nothing.
        rows: the runs, in any order and in any equivalent form: `Run`s or shorter tuples of its
            first fields, or an int64 array of shape `(rows, 8)`.

    Raises:
        LayoutError: a run outside the dimension or of an unknown part, or local positions
            that overlap or leave a gap.

    >>> table = RunTable(12, 2, [Run(0, 0, 2, 0, 3, 4, 2), Run(1, 2, 2, 0, 3, 4, 2)])
    >>> table.local_lengths.tolist()
    [6, 6]
    >>> table is RunTable(12, 2, [(p, 4 * i + 2 * p, 2, 2 * i) for p in (0, 1) for i in range(3)])
    True
    >>> print(table)
    part 0: 3 x 2 from 0 every 4
    part 1: 3 x 2 from 2 every 4
    """

    def __init__(
        self, dimension_length: int, parts: int, rows: Iterable[Sequence[int]] | IntArray
    ) -> None:
        dimension_length = check_int(dimension_length, "dimension length", LayoutError)
        parts = check_int(parts, "number of parts", LayoutError, minimum=1)
        if isinstance(rows, np.ndarray):
            matrix = rows.astype(np.int64, copy=False)
        else:
            listed = [tuple(Run(*row)) for row in rows]
            matrix = check_int_array(listed, "runs", LayoutError).reshape(-1, 8)
        if len(matrix):
            _check_magnitudes(matrix)
        self._build(dimension_length, parts, matrix)

    @classmethod
    def from_columns(
        cls,
        dimension_length: int,
        parts: int,
        part: ArrayLike,
        start: ArrayLike,
        length: ArrayLike,
        local_start: ArrayLike,
        role: ArrayLike = OWNED,
    ) -> RunTable:
        """Build a table from columns of single runs, each of shape `(runs,)` or a
        scalar for all.
        """
        # In the order of the fields of `Run`, with `repeat` 1.
        columns = np.broadcast_arrays(part, start, length, local_start, 1, 0, 0, role)
        return cls.from_matrix(dimension_length, parts, np.stack(columns, axis=-1))

    @classmethod
    def from_matrix(cls, dimension_length: int, parts: int, rows: IntArray) -> RunTable:
        """Build a table from an integer array of shape `(rows, 8)`.

        A small array that equals the array of a table in use gives that table at once.
        """
        rows = rows.astype(np.int64, copy=False)
        if len(rows) > _MAX_REMEMBERED_ROWS:
            return cls(dimension_length, parts, rows)
        key = (dimension_length, parts, rows.tobytes())
        table = _tables.get(key)
        if table is None:
            table = _tables[key] = cls(dimension_length, parts, rows)
        return table

    def _build(self, dimension_length: int, parts: int, matrix: IntArray) -> None:
        self.dimension_length = dimension_length
        self.parts = parts
        single = _single_runs(matrix)
        single = single.take(single.length > 0)
        single = single.take(np.lexsort((single.local_start, single.part)))
        self._check(single)
        single = joined(single)
        self._single = single
        self.rows: IntArray = _progressions(single)
        # Tables are interned and shared, so their columns are read-only.
        for array in (self.rows, *(getattr(single, field.name) for field in fields(single))):
            array.flags.writeable = False

    def _check(self, single: SingleRuns) -> None:
        if not len(single.part):
            return
        bad = (single.part < 0) | (single.part >= self.parts)
        if bad.any():
            raise LayoutError(
                f"a run belongs to part {single.part[bad][0]}, but there are {self.parts} parts"
            )
        real = single.role != PAD
        bad = real & ((single.start < 0) | (single.stop > self.dimension_length))
        if bad.any():
            run = single.take(bad)
            raise LayoutError(
                f"part {run.part[0]} has indices {run.start[0]}:{run.stop[0]}, outside a "
                f"dimension of length {self.dimension_length}"
            )
        # The first run of a part begins at local position 0, any other where the previous run ends.
        first = np.diff(single.part, prepend=-1) != 0
        expected = np.where(first, 0, np.roll(single.local_start + single.length, 1))
        bad = single.local_start != expected
        if bad.any():
            index = int(np.flatnonzero(bad)[0])
            problem = "overlap" if single.local_start[index] < expected[index] else "leave a gap"
            raise LayoutError(
                f"local positions of part {single.part[index]} {problem}: a run begins at "
                f"{single.local_start[index]} where {expected[index]} was expected"
            )

    def interning_key(self) -> object:
        return (self.dimension_length, self.parts, self.rows.tobytes())

    @classmethod
    def arguments_key(cls, *args: Any, **kwargs: Any) -> object:
        """Return the arguments if they are ints and few rows, as most are."""
        if kwargs or len(args) != 3:
            return None
        length, parts, rows = args
        if type(rows) is not list or len(rows) > _MAX_KEY_ROWS:
            return None
        # True and 1.0 equal 1, but are errors.
        if type(length) is not int or type(parts) is not int:
            return None
        for row in rows:
            if type(row) is not tuple or any(type(number) is not int for number in row):
                return None
        return (length, parts, tuple(rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunTable, (self.dimension_length, self.parts, self.rows.tolist()))

    def single_runs(self) -> SingleRuns:
        """Return every run individually, sorted by part and local position."""
        return self._single

    def splits_groups(self, size: int) -> NDArray[np.bool_]:
        """Return for each single run whether it splits groups of `size` consecutive indices.

        The groups of a whole run are also whole in the memory of its part.
        """
        runs, length = self._single, self.dimension_length
        ends = (runs.stop % size == 0) | (runs.stop == length)
        splits: NDArray[np.bool_]
        splits = (runs.start % size != 0) | ~ends | (runs.local_start % size != 0)
        return splits

    @cached_property
    def max_local_length(self) -> int:
        """The largest local length of any part."""
        return int(self.local_lengths.max())

    @cached_property
    def local_lengths(self) -> IntArray:
        """Number of local positions of each part, including padding and halos: shape `(parts,)`."""
        return self._lengths(np.ones(len(self._single.part), dtype=bool))

    @cached_property
    def element_lengths(self) -> IntArray:
        """Number of tensor elements of each part, including halos: shape `(parts,)`."""
        return self._lengths(self._single.role != PAD)

    def _lengths(self, chosen: NDArray[np.bool_]) -> IntArray:
        lengths = np.zeros(self.parts, dtype=np.int64)
        np.add.at(lengths, self._single.part[chosen], self._single.length[chosen])
        lengths.flags.writeable = False
        return lengths

    def uncovered(self) -> list[tuple[int, int]]:
        """Return the ranges `(start, stop)` that no part owns.

        >>> RunTable(10, 2, [(0, 0, 4, 0), (1, 6, 2, 0)]).uncovered()
        [(4, 6), (8, 10)]
        """
        runs = self._single.take(self._single.role == OWNED)
        order = np.argsort(runs.start, kind="stable")
        starts = np.append(runs.start[order], self.dimension_length)
        # The furthest stop of all previous runs; there is a gap if the next run begins after it.
        reach = np.maximum.accumulate(np.append(0, runs.stop[order]))
        holes = np.flatnonzero(starts > reach)
        return [(int(reach[i]), int(starts[i])) for i in holes]

    def runs_of(self, part: int) -> list[tuple[int, int, int, int]]:
        """Return the single runs of a part: `(start, stop, local_start, role)` in local order."""
        single = self._single
        # Runs are sorted by part.
        low, high = np.searchsorted(single.part, (part, part + 1))
        columns = (single.start, single.stop, single.local_start, single.role)
        return list(zip(*(column[low:high].tolist() for column in columns), strict=True))

    def cut(self, inner: Sequence[RunTable]) -> RunTable:
        """Split every part again: part `p` by `inner[p]`, whose length is the local length of `p`.

        Part `p * q + c` of the result is part `c` of `inner[p]`, with `q` inner parts each.
        Halos and padding of this table remain so, whatever their role in the inner table, and a
        copy that is stale in either table is stale.

        >>> outer = RunTable(6, 2, [(0, 0, 3, 0), (1, 3, 3, 0)])
        >>> inner = RunTable(3, 2, [(0, 0, 2, 0), (1, 2, 1, 0)])
        >>> outer.cut([inner, inner]).local_lengths.tolist()
        [2, 1, 2, 1]
        """
        inner_parts = inner[0].parts
        for part, table in enumerate(inner):
            if table.parts != inner_parts or table.dimension_length != self.local_lengths[part]:
                raise LayoutError(
                    f"part {part} of local length {self.local_lengths[part]} cannot be cut by a "
                    f"table of length {table.dimension_length} into {table.parts} parts"
                )
        # Lay the local positions of all parts end to end. Both the outer runs, which tile them,
        # and the inner runs, which address them, are then on a common line.
        outer = self._single
        base = np.concatenate(([0], np.cumsum(self.local_lengths)))
        line_start = base[outer.part] + outer.local_start
        sizes = [len(table.single_runs().part) for table in inner]
        owner = np.repeat(np.arange(len(inner)), sizes)
        runs = SingleRuns(
            *(
                np.concatenate([getattr(table.single_runs(), field.name) for table in inner])
                for field in fields(SingleRuns)
            )
        )
        # Padding is without indices, so outer runs do not divide it.
        pad = runs.role == PAD
        begin, end = base[owner] + runs.start, base[owner] + runs.stop
        # Inner run `i` has a piece in each of the outer runs `first[i]` to `last[i] - 1`.
        first = np.searchsorted(line_start, begin, side="right") - 1
        last = np.searchsorted(line_start, end, side="left")
        pieces = np.where(pad, 1, last - first)
        # Columns of shape `(pieces,)`: the inner run, the outer run, and both ends on the line.
        row = np.repeat(np.arange(len(owner)), pieces)
        outer_row = np.where(pad[row], 0, first[row] + ragged_arange(pieces))
        left = np.maximum(line_start[outer_row], begin[row])
        right = np.minimum(line_start[outer_row] + outer.length[outer_row], end[row])
        is_pad = pad[row]
        return RunTable.from_columns(
            self.dimension_length,
            self.parts * inner_parts,
            owner[row] * inner_parts + runs.part[row],
            np.where(is_pad, 0, outer.start[outer_row] + left - line_start[outer_row]),
            np.where(is_pad, runs.length[row], right - left),
            runs.local_start[row] + np.where(is_pad, 0, left - begin[row]),
            np.where(is_pad, PAD, np.maximum(outer.role[outer_row], runs.role[row])),
        )

    def __str__(self) -> str:
        lines = []
        for row in self.rows.tolist():
            run = Run(*row)
            many = f"{run.repeat} x {run.length}" if run.repeat > 1 else f"{run.length}"
            step = f" every {run.global_step}" if run.repeat > 1 else ""
            role = "" if run.role == OWNED else f" ({ROLE_NAMES[run.role]})"
            begin = "" if run.role == PAD else f" from {run.start}{step}"
            lines.append(f"part {run.part}: {many}{begin}{role}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<RunTable of length {self.dimension_length} in {self.parts} parts>"


def find_distinct(values: NDArray[Number]) -> tuple[NDArray[Number], IntArray, IntArray]:
    """Return the distinct values, rising, the first index of each, and the number of each value.

    The values of a matrix are its rows.

    >>> [column.tolist() for column in find_distinct(np.array([3, 1, 3]))]
    [[1, 3], [1, 0], [1, 0, 1]]
    >>> [column.tolist() for column in find_distinct(np.array([[3, 0], [1, 9], [3, 0]]))]
    [[[1, 9], [3, 0]], [1, 0], [1, 0, 1]]
    """
    # Stable, so that the first of equal values comes first.
    order = np.argsort(values, kind="stable") if values.ndim == 1 else np.lexsort(values.T[::-1])
    rising = values[order]
    new = np.ones(len(rising), dtype=bool)
    differs = rising[1:] != rising[:-1]
    new[1:] = differs if values.ndim == 1 else differs.any(axis=1)
    number = np.empty(len(rising), dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return rising[new], order[new], number


def concatenate(columns: Iterable[IntArray]) -> IntArray:
    """Concatenate columns of integers; the result is empty if there are none.

    >>> concatenate([]).tolist(), concatenate([np.array([1]), np.array([3, 2])]).tolist()
    ([], [1, 3, 2])
    """
    return np.concatenate([np.zeros(0, dtype=np.int64), *columns])


def sum_by(shape: int | tuple[int, ...], index: Any, values: ArrayLike) -> IntArray:
    """Return an array of `shape` with the sum of the values at each index, which may repeat.

    >>> sum_by(3, np.array([0, 2, 0]), np.array([1, 5, 2])).tolist()
    [3, 0, 5]
    """
    total = np.zeros(shape, dtype=np.int64)
    # `total[index] += values` would count repeated indices once.
    np.add.at(total, index, values)
    return total


def ragged_arange(counts: IntArray) -> IntArray:
    """Return `0..c-1` for every `c` of `counts`, concatenated.

    >>> ragged_arange(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Return the distinct values, rising.

    For millions of numbers, sorting is faster than the hash table of `np.unique`, which also
    imports `numpy.ma` on its first call, and that takes longer than planning a job.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    rising = np.sort(values)
    new = np.ones(len(rising), dtype=bool)
    np.not_equal(rising[1:], rising[:-1], out=new[1:])
    return rising[new]


def ragged_ranges(low: IntArray, counts: IntArray) -> tuple[IntArray | slice, IntArray]:
    """Return `low[i]..low[i] + counts[i] - 1` for every `i`, concatenated, and the `i` of each.

    If every count is 1, the `i` are `slice(None)`: indexing with it copies nothing.

    >>> of, numbers = ragged_ranges(np.array([7, 0, 4]), np.array([2, 0, 1]))
    >>> of.tolist(), numbers.tolist()
    ([0, 0, 2], [7, 8, 4])
    """
    if (counts == 1).all():
        return slice(None), low
    ends = np.cumsum(counts)
    numbers = np.arange(int(ends[-1]), dtype=np.int64)
    numbers += np.repeat(low - (ends - counts), counts)
    return np.repeat(np.arange(len(counts)), counts), numbers


def ragged_numbers(low: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return every number `low[i]..low[i] + counts[i] - 1`, preceded by the `i` of each.

    >>> of, numbers = ragged_numbers(np.array([7, 0, 4]), np.array([2, 0, 1]))
    >>> of.tolist(), numbers.tolist()
    ([0, 0, 2], [7, 8, 4])
    """
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.repeat(low, counts) + ragged_arange(counts)


def ragged_rows(begin: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return the entries of `rows` of a ragged array, and the index in `rows` of each.

    The entries of row `r` are numbered from `begin[r]` up to `begin[r + 1]`.

    >>> index, entries = ragged_rows(np.array([0, 2, 2, 5]), np.array([2, 0]))
    >>> index.tolist(), entries.tolist()
    ([0, 0, 0, 1, 1], [2, 3, 4, 0, 1])
    """
    low = begin[rows]
    return ragged_numbers(low, begin[rows + 1] - low)


def _check_magnitudes(matrix: IntArray) -> None:
    """Raise LayoutError for rows whose positions, or whose number written out, is too large."""
    repeat = matrix[:, Run._fields.index("repeat")]
    low, high = int(matrix.min()), int(matrix.max())
    if int(repeat.max()) > 1:
        # The last repetition of a run is the furthest.
        steps = matrix[:, [Run._fields.index(name) for name in ("global_step", "local_step")]]
        # The product may exceed 64 bits; a float keeps its magnitude, which is sufficient.
        far = np.abs(steps).astype(np.float64) * repeat[:, np.newaxis]
        high = max(high, int(far.max()))
    if int(repeat.min()) < 0 or high > MAX_ELEMENTS or low < -MAX_ELEMENTS:
        raise LayoutError(
            f"a run table with numbers from {low} to {high}; positions must be at most "
            f"{MAX_ELEMENTS}, and a run repeats 0 times or more"
        )
    # As floats, which do not overflow.
    runs = int(repeat.sum(dtype=np.float64))
    if runs > MAX_RUNS:
        raise LayoutError(
            f"a dimension cut into {runs} runs; at most {MAX_RUNS} are supported, cut it in "
            "larger blocks"
        )


def _single_runs(matrix: IntArray) -> SingleRuns:
    part, start, length, local_start, repeat, global_step, local_step, role = matrix.T
    # For each run, its row, and the number of runs before it in that row.
    row = np.arange(len(repeat)).repeat(repeat)
    step = ragged_arange(repeat)
    begin = np.where(role == PAD, 0, start)[row] + np.where(role == PAD, 0, global_step)[row] * step
    local = local_start[row] + local_step[row] * step
    return SingleRuns(part[row], begin, length[row], local, role[row])


def joined(single: SingleRuns) -> SingleRuns:
    """Join sorted runs that continue the previous run."""
    if len(single.part) < 2:
        return single
    same = (single.part[1:] == single.part[:-1]) & (single.role[1:] == single.role[:-1])
    # Runs of padding do not have indices to compare, only local positions.
    follows = same & ((single.start[1:] == single.stop[:-1]) | (single.role[1:] == PAD))
    follows &= single.local_start[1:] == single.local_start[:-1] + single.length[:-1]
    if not follows.any():
        return single
    # The first run of every chain; the length of a chain is the sum of its runs.
    first = np.flatnonzero(np.append(True, ~follows))
    runs = single.take(first)
    return SingleRuns(
        runs.part,
        runs.start,
        np.add.reduceat(single.length, first),
        runs.local_start,
        runs.role,
    )


def _progressions(single: SingleRuns) -> IntArray:
    """Gather single runs of equal length and distance into rows: shape `(rows, 8)`."""
    n = len(single.part)
    firsts: list[int] | IntArray
    if n < 2 or (np.diff(single.part) != 0).all():
        firsts = np.arange(n, dtype=np.int64)
    else:
        # Whether run `i + 1` may share a row with run `i`. Padding is not repeated.
        alike = (
            (np.diff(single.part) == 0)
            & (np.diff(single.role) == 0)
            & (np.diff(single.length) == 0)
            & (single.role[1:] != PAD)
        ).tolist()
        # As lists, since the loop below reads single numbers, which is slow in NumPy.
        global_steps = np.diff(single.start).tolist()
        local_steps = np.diff(single.local_start).tolist()
        firsts = []
        i = 0
        # Greedy from the left: a row takes runs as long as both steps stay the same.
        while i < n:
            firsts.append(i)
            link = i
            while (
                link < n - 1
                and alike[link]
                and global_steps[link] == global_steps[i]
                and local_steps[link] == local_steps[i]
            ):
                link += 1
            i = link + 1
    first = np.asarray(firsts, dtype=np.int64)
    count = np.diff(first, append=n)
    # The steps of a row are the distances from its first run to its second, 0 for a single run.
    following = np.minimum(first + 1, max(n - 1, 0))
    many = count > 1
    return np.stack(
        (
            single.part[first],
            single.start[first],
            single.length[first],
            single.local_start[first],
            count,
            np.where(many, single.start[following] - single.start[first], 0),
            np.where(many, single.local_start[following] - single.local_start[first], 0),
            single.role[first],
        ),
        axis=-1,
    ).reshape(-1, 8)
