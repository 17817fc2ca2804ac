"""Run tables: which part of one dimension holds which indices, and where in the part they lie.

A dimension of length `n` is cut into parts. A part holds *runs*: stretches of
consecutive global indices that lie consecutively in the part's own (local) order. The
run table lists them, one row for all runs of a part that are alike and equally far
apart, so an interleaved cut stays as small as a plain one::

    length 12 over 2 parts, in blocks of 2 dealt in turn

    global  0  1  2  3  4  5  6  7  8  9 10 11
    part    0  0  1  1  0  0  1  1  0  0  1  1

    part  start  length  local_start repeat  global_step  local_step  role
       0      0       2            0      3            4           2  owned
       1      2       2            0      3            4           2  owned

Parts may overlap: two parts may own the same index. A run's role says what its elements
are: `OWNED` may be sent to others; `HALO` is a copy of a neighbour's, and is a source
only when it is declared fresh (`FRESH_HALO`); `PAD` is no element of the tensor at all.

Every table is brought to one canonical form when it is built:

1. runs are sorted by part and local position, and empty ones are dropped;
2. each part's runs must tile its local positions from 0, without gap or overlap;
3. runs that continue one another globally are joined;
4. from left to right, runs of equal length at equal distances become one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reshard._interning import Interned
from reshard._validation import MAX_ELEMENTS, check_int, check_int_array
from reshard.errors import LayoutError

# Of two roles the larger one wins where a part is cut again: a copy is fresh only if both are.
OWNED, FRESH_HALO, HALO, PAD = 0, 1, 2, 3
ROLE_NAMES = ("owned", "fresh halo", "halo", "pad")

# A table of more runs takes gigabytes: an interleaved cut of indices where blocks were meant.
MAX_RUNS = 1 << 26

IntArray = NDArray[np.int64]
Number = TypeVar("Number", bound=np.integer[Any])


class Run(NamedTuple):
    """One row of a run table, see the module's docstring for what each field says."""

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
    """A run table with every run spelled out (`repeat` is 1), sorted by part and local position.

    All columns are int64 arrays of shape `(runs,)`.
    """

    part: IntArray
    start: IntArray
    length: IntArray
    local_start: IntArray
    role: IntArray

    @property
    def stop(self) -> IntArray:
        """The global index behind each run."""
        return self.start + self.length

    def take(self, index: Any) -> SingleRuns:
        """The chosen rows, in the order asked for."""
        return SingleRuns(*(getattr(self, field.name)[index] for field in fields(self)))


class RunTable(Interned):
    """The runs of one dimension, canonical and interned.

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
        """A table from columns of single runs, each of shape `(runs,)` or a scalar for all."""
        # In the order of `Run`'s fields; each run is there once.
        columns = np.broadcast_arrays(part, start, length, local_start, 1, 0, 0, role)
        return cls(dimension_length, parts, np.stack(columns, axis=-1).astype(np.int64))

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
        # Tables are interned and shared, so nobody may write to their columns.
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
        # A part's first run begins at local position 0, any other where the one before it ends.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunTable, (self.dimension_length, self.parts, self.rows.tolist()))

    def single_runs(self) -> SingleRuns:
        """Every run by itself, sorted by part and local position."""
        return self._single

    @cached_property
    def max_local_length(self) -> int:
        """The local length of the part that has the most."""
        return int(self.local_lengths.max())

    @cached_property
    def local_lengths(self) -> IntArray:
        """How many local positions each part has, pads and halos included: shape `(parts,)`."""
        return self._lengths(np.ones(len(self._single.part), dtype=bool))

    @cached_property
    def element_lengths(self) -> IntArray:
        """How many elements of the tensor each part has, halos included: shape `(parts,)`."""
        return self._lengths(self._single.role != PAD)

    def _lengths(self, chosen: NDArray[np.bool_]) -> IntArray:
        lengths = np.zeros(self.parts, dtype=np.int64)
        np.add.at(lengths, self._single.part[chosen], self._single.length[chosen])
        lengths.flags.writeable = False
        return lengths

    def uncovered(self) -> list[tuple[int, int]]:
        """The stretches `(start, stop)` that no part owns.

        >>> RunTable(10, 2, [(0, 0, 4, 0), (1, 6, 2, 0)]).uncovered()
        [(4, 6), (8, 10)]
        """
        runs = self._single.take(self._single.role == OWNED)
        order = np.argsort(runs.start, kind="stable")
        starts = np.append(runs.start[order], self.dimension_length)
        # How far the runs before each one reach; a hole is where the next begins behind that.
        reach = np.maximum.accumulate(np.append(0, runs.stop[order]))
        holes = np.flatnonzero(starts > reach)
        return [(int(reach[i]), int(starts[i])) for i in holes]

    def runs_of(self, part: int) -> list[tuple[int, int, int, int]]:
        """The single runs of one part: `(start, stop, local_start, role)` in local order."""
        single = self._single
        # Runs are sorted by part.
        low, high = np.searchsorted(single.part, (part, part + 1))
        columns = (single.start, single.stop, single.local_start, single.role)
        return list(zip(*(column[low:high].tolist() for column in columns), strict=True))

    def cut(self, inner: Sequence[RunTable]) -> RunTable:
        """Cut every part again: part `p` by `inner[p]`, whose length is `p`'s local length.

        Part `p * q + c` of the result is part `c` of `inner[p]`, with `q` inner parts each.
        A halo or pad of this table stays one whatever the inner table calls it, and what is a
        stale copy in one of the two tables is stale.

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
        # Lay the local positions of all parts end to end: both the outer runs, which tile
        # them, and the inner runs, which address them, then live on one line.
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
        # Padding has no indices, so outer runs do not divide it.
        pad = runs.role == PAD
        begin, end = base[owner] + runs.start, base[owner] + runs.stop
        # Inner run `i` meets the outer runs `first[i]` to `last[i] - 1`, with one piece in each.
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
            every = f" every {run.global_step}" if run.repeat > 1 else ""
            role = "" if run.role == OWNED else f" ({ROLE_NAMES[run.role]})"
            begin = "" if run.role == PAD else f" from {run.start}{every}"
            lines.append(f"part {run.part}: {many}{begin}{role}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<RunTable of length {self.dimension_length} in {self.parts} parts>"


def ragged_arange(counts: IntArray) -> IntArray:
    """`0..c-1` for every `c` of `counts`, end to end.

    >>> ragged_arange(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Each number once, rising.

    For millions of numbers sorting beats the hashes of NumPy's `unique`, which also loads
    `numpy.ma` the first time, and that takes longer than planning a job.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    rising = np.sort(values)
    new = np.ones(len(rising), dtype=bool)
    np.not_equal(rising[1:], rising[:-1], out=new[1:])
    return rising[new]


def ragged_ranges(low: IntArray, counts: IntArray) -> tuple[IntArray | slice, IntArray]:
    """The numbers `low[i]..low[i] + counts[i] - 1` of every `i`, end to end, and each one's `i`.

    Where every count is 1, the `i` are `slice(None)`: indexing by it copies nothing.

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


def _check_magnitudes(matrix: IntArray) -> None:
    """Raise LayoutError for rows whose positions, or whose number written out, is too large."""
    repeat = matrix[:, Run._fields.index("repeat")]
    low, high = int(matrix.min()), int(matrix.max())
    if int(repeat.max()) > 1:
        # Of a run that repeats, the last one lies furthest away.
        steps = matrix[:, [Run._fields.index(name) for name in ("global_step", "local_step")]]
        # The product may exceed 64 bits; a float keeps its magnitude, which is all that counts.
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
    # For each run, its row and how many runs of that row come before it.
    row = np.arange(len(repeat)).repeat(repeat)
    step = ragged_arange(repeat)
    begin = np.where(role == PAD, 0, start)[row] + np.where(role == PAD, 0, global_step)[row] * step
    local = local_start[row] + local_step[row] * step
    return SingleRuns(part[row], begin, length[row], local, role[row])


def joined(single: SingleRuns) -> SingleRuns:
    """Sorted runs, with those that continue the one before them joined to it."""
    if len(single.part) < 2:
        return single
    same = (single.part[1:] == single.part[:-1]) & (single.role[1:] == single.role[:-1])
    # Two runs of padding have no indices to compare; their local positions have to meet.
    follows = same & ((single.start[1:] == single.stop[:-1]) | (single.role[1:] == PAD))
    follows &= single.local_start[1:] == single.local_start[:-1] + single.length[:-1]
    if not follows.any():
        return single
    # The first run of every chain; a chain is as long as its runs together.
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
        # Whether run `i + 1` may stand in one row with run `i`. Padding is not repeated.
        alike = (
            (np.diff(single.part) == 0)
            & (np.diff(single.role) == 0)
            & (np.diff(single.length) == 0)
            & (single.role[1:] != PAD)
        ).tolist()
        global_steps = np.diff(single.start).tolist()
        local_steps = np.diff(single.local_start).tolist()
        firsts = []
        i = 0
        # Greedy from the left: a row takes runs for as long as both steps stay the same.
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
    # A row's steps are the distances from its first run to its second, 0 where it has one run.
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
