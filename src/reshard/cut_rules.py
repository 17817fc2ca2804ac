"""Cut rules: how one dimension of a tensor is cut into parts.

A cut rule is a small frozen value. `rule.table(length, parts)` answers with the run table
of a dimension of that length, whatever the two numbers are: no rule needs one to divide the
other. A rule with numbers of its own (sizes, blocks) says in a `RuleError` when they do not
add up to the length.

====================  =================================================  ==========================
text                  cut                                                found in
====================  =================================================  ==========================
(none)                equal parts by ceil, the last short or empty       MLIR, GSPMD, `torch.chunk`
`unit64`              the same, in whole units of 64                     attention heads
`balanced`            sizes differ by at most one                        `numpy.array_split`
`sizes[3,1]`          these sizes                                        MLIR offsets, pipelines
`windows[0:4,2:6]`    these intervals, which may overlap                 sliding windows
`heads8`              8 equal groups, shared where there are more parts  key/value heads
`pad128`              equal parts, padded to a multiple of 128           XLA, padded vocabularies
`halo[1,1]`           the rule before it, and copies of the neighbours'  MLIR
`stride2`             2 equal blocks, each cut over all parts            Megatron, `_StridedShard`
`blocks[6,2]`         blocks of these sizes, each cut over all parts     fused weights, Mamba
`joined[4,2@heads1]`  blocks, each by its own rule over all parts        fused weights, Mamba
`groups2`             pairs, cut as the rule before it cuts indices    gate and up of gpt-oss
`pieces[4:2,1:1]`     blocks, and how much of each a part has            PartitionedShard unaligned
`whole[6,2]`          blocks of these sizes, never cut                   PartitionedShard aligned
`cyclic16`            blocks of 16 dealt in turn                         ScaLAPACK
`zigzag`              2 blocks a part, from both ends                    Megatron's context parallel
====================  =================================================  ==========================

The last eight are made of blocks, and live in `reshard.block_rules`. A cut of a cut
(DTensor: two mesh axes on one dimension) is `Nested`, written as levels in a sharding's text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reshard._validation import check_int, check_ints
from reshard.errors import RuleError
from reshard.runs import FRESH_HALO, HALO, OWNED, PAD, IntArray, Run, RunTable


def ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def bracketed(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def set_number(rule: CutRule, name: str, what: str, minimum: int = 0) -> None:
    """Check a field of a rule that is being built, and make it an int."""
    number = check_int(getattr(rule, name), what, RuleError, minimum)
    object.__setattr__(rule, name, number)


def set_numbers(rule: CutRule, name: str, what: str) -> None:
    """Check a field of a rule that is being built, and make it a tuple of ints from 0 up."""
    object.__setattr__(rule, name, check_ints(getattr(rule, name), what, RuleError))


def set_number_lists(rule: CutRule, name: str, what: str) -> None:
    """Check a field of a rule that is being built, and make it tuples of ints from 0 up."""
    lists = getattr(rule, name)
    if not isinstance(lists, Iterable):
        raise RuleError(
            f"{what} {lists!r} must be a list with a list of whole numbers in each place"
        )
    object.__setattr__(rule, name, tuple(check_ints(one, what, RuleError) for one in lists))


def expect_rule(rule: object) -> None:
    if not isinstance(rule, CutRule):
        raise RuleError(
            f"{rule!r} is no cut rule; give one of reshard.cut_rules, such as Balanced(), or leave "
            "it out for equal parts by ceil"
        )


def expect_count(what: str, given: Sequence[object], parts: int) -> None:
    if len(given) != parts:
        raise RuleError(f"{len(given)} {what} for {parts} parts; give one for each part")


def expect_sum(what: str, numbers: Sequence[int], total: int, of: str = "the length") -> None:
    if sum(numbers) != total:
        raise RuleError(
            f"{what} {list(numbers)} add up to {sum(numbers)}, but {of} is {total}"
            if of == "the length"
            else f"{what} {list(numbers)} add up to {sum(numbers)}, but there are {total} {of}"
        )


class CutRule:
    """What every cut rule answers."""

    __slots__ = ()
    name: ClassVar[str]

    def table(self, length: int, parts: int) -> RunTable:
        """The run table of a dimension of `length` indices over `parts` parts.

        Raises RuleError where the rule does not fit them, or they are no whole numbers.
        """
        return self._cut(
            check_int(length, "length of a dimension", RuleError),
            check_int(parts, "number of parts", RuleError, minimum=1),
        )

    def _cut(self, length: int, parts: int) -> RunTable:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """How the native notation writes this rule, empty for the default one."""
        raise NotImplementedError

    @property
    def is_default(self) -> bool:
        """Whether this is the plain cut by ceil."""
        return self.text == ""


def chained(rule: CutRule) -> str:
    return "" if rule.is_default else f"{rule.text}@"


def _covering(rule: CutRule, table: RunTable) -> RunTable:
    holes = table.uncovered()
    if holes:
        raise RuleError(
            f"`{rule.text}` leaves indices {holes[0][0]}:{holes[0][1]} of "
            f"{table.dimension_length} to no part; together the parts must cover the dimension"
        )
    return table


def table_of_sizes(length: int, sizes: Sequence[int] | IntArray) -> RunTable:
    stop = np.cumsum(sizes)
    return RunTable.from_columns(
        length, len(sizes), np.arange(len(sizes)), stop - sizes, np.asarray(sizes), 0
    )


def ceil_sizes(length: int, parts: int, unit: int = 1) -> IntArray:
    # Whole units for every part; the tensor's end cuts the last one off.
    chunk = ceil_divide(ceil_divide(length, unit), parts) * unit
    # A part counts no further than the end: beyond it the product could leave 64 bits.
    chunks = np.minimum(np.arange(1, parts + 1, dtype=np.int64), ceil_divide(length, max(chunk, 1)))
    stops = np.minimum(chunks * chunk, length)
    sizes: IntArray = np.diff(stops, prepend=0)
    return sizes


@dataclass(frozen=True, slots=True)
class Ceil(CutRule):
    """Equal parts by ceil; the last ones are short or empty. In whole units, if asked.

    Source: `K ceildiv M` of MLIR's mesh dialect, GSPMD (Xu et al. 2021), `torch.chunk`.

    >>> Ceil().table(10, 4).local_lengths.tolist()
    [3, 3, 3, 1]
    >>> Ceil(unit=4).table(10, 2).local_lengths.tolist()
    [8, 2]
    """

    unit: int = 1
    name: ClassVar[str] = "unit"

    def __post_init__(self) -> None:
        set_number(self, "unit", "unit", minimum=1)

    def _cut(self, length: int, parts: int) -> RunTable:
        return table_of_sizes(length, ceil_sizes(length, parts, self.unit))

    @property
    def text(self) -> str:
        return "" if self.unit == 1 else f"unit{self.unit}"


BY_CEIL: CutRule = Ceil()


@dataclass(frozen=True, slots=True)
class Balanced(CutRule):
    """Parts whose sizes differ by at most one, larger ones first. Source: `numpy.array_split`.

    >>> Balanced().table(6, 4).local_lengths.tolist()
    [2, 2, 1, 1]
    """

    name: ClassVar[str] = "balanced"

    def _cut(self, length: int, parts: int) -> RunTable:
        small, more = divmod(length, parts)
        return table_of_sizes(length, np.where(np.arange(parts) < more, small + 1, small))

    @property
    def text(self) -> str:
        return "balanced"


@dataclass(frozen=True, slots=True)
class Sizes(CutRule):
    """Parts of the given sizes, in order. Source: MLIR `sharded_dims_offsets`.

    >>> Sizes((5, 0, 1)).table(6, 3).local_lengths.tolist()
    [5, 0, 1]
    >>> Sizes.from_offsets((0, 5, 5, 6)) == Sizes((5, 0, 1))
    True
    """

    sizes: tuple[int, ...]
    name: ClassVar[str] = "sizes"

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "sizes")

    @classmethod
    def from_offsets(cls, offsets: Sequence[int]) -> Sizes:
        """The cut at `offsets`, of shape `(parts + 1,)`: from 0 up to the length."""
        offsets = check_ints(offsets, "offsets", RuleError)
        if len(offsets) < 2 or offsets[0] != 0:
            raise RuleError(f"offsets {list(offsets)} must begin with 0 and end with the length")
        return cls(tuple(b - a for a, b in itertools.pairwise(offsets)))

    def _cut(self, length: int, parts: int) -> RunTable:
        expect_count("sizes", self.sizes, parts)
        expect_sum("sizes", self.sizes, length)
        return table_of_sizes(length, np.array(self.sizes, dtype=np.int64))

    @property
    def text(self) -> str:
        return f"sizes{bracketed(self.sizes)}"


@dataclass(frozen=True, slots=True)
class Windows(CutRule):
    """One interval `(start, stop)` a part. Intervals may overlap, together they cover all.

    >>> Windows(((0, 4), (2, 6))).table(6, 2).local_lengths.tolist()
    [4, 4]
    """

    windows: tuple[tuple[int, int], ...]
    name: ClassVar[str] = "windows"

    def __post_init__(self) -> None:
        set_number_lists(self, "windows", "window")
        for window in self.windows:
            if len(window) != 2 or window[0] > window[1]:
                raise RuleError(f"window {list(window)} must be (start, stop) with start <= stop")

    def _cut(self, length: int, parts: int) -> RunTable:
        expect_count("windows", self.windows, parts)
        bad = [f"{a}:{b}" for a, b in self.windows if b > length]
        if bad:
            raise RuleError(f"window {bad[0]} reaches outside a dimension of length {length}")
        table = RunTable(length, parts, [(p, a, b - a, 0) for p, (a, b) in enumerate(self.windows)])
        return _covering(self, table)

    @property
    def text(self) -> str:
        return f"windows[{','.join(f'{a}:{b}' for a, b in self.windows)}]"


@dataclass(frozen=True, slots=True)
class Heads(CutRule):
    """`count` equal groups of indices (heads). With more parts than heads, parts share them.

    Up to `count` parts, whole heads are cut by ceil. With more, part `p` holds head
    `p * count // parts`, so each head is held by several neighbouring parts. Source: the
    key/value heads of grouped-query attention, as Megatron-core and vLLM place them.

    >>> Heads(4).table(8, 8).local_lengths.tolist()
    [2, 2, 2, 2, 2, 2, 2, 2]
    >>> Heads(4).table(8, 8).runs_of(3)
    [(2, 4, 0, 0)]
    >>> Heads(4).table(8, 3).local_lengths.tolist()
    [4, 4, 0]
    """

    count: int
    name: ClassVar[str] = "heads"

    def __post_init__(self) -> None:
        set_number(self, "count", "heads", minimum=1)

    def _cut(self, length: int, parts: int) -> RunTable:
        width, rest = divmod(length, self.count)
        if rest:
            raise RuleError(
                f"length {length} is not made of {self.count} equal heads; give the number of "
                "heads this tensor has, or cut it with `sizes[...]`"
            )
        if parts <= self.count:
            return table_of_sizes(length, ceil_sizes(self.count, parts) * width)
        # More parts than heads: neighbouring parts hold copies of one head.
        part = np.arange(parts)
        return RunTable.from_columns(
            length, parts, part, part * self.count // parts * width, width, 0
        )

    @property
    def text(self) -> str:
        return f"heads{self.count}"


@dataclass(frozen=True, slots=True)
class Padded(CutRule):
    """Parts of one equal local length, a multiple of `multiple`; what lies behind is padding.

    Sources: XLA pads every shard to the largest; Megatron pads a vocabulary to a multiple of
    `make_vocab_size_divisible_by` times the tensor-parallel size.

    >>> Padded(4).table(10, 2).local_lengths.tolist()
    [8, 8]
    >>> Padded(4).table(10, 2).element_lengths.tolist()
    [8, 2]
    """

    multiple: int = 1
    name: ClassVar[str] = "pad"

    def __post_init__(self) -> None:
        set_number(self, "multiple", "multiple", minimum=1)

    def _cut(self, length: int, parts: int) -> RunTable:
        local = ceil_divide(ceil_divide(length, parts), self.multiple) * self.multiple
        rows = []
        for part in range(parts):
            start = min(part * local, length)
            held = min(local, length - start)
            rows += [Run(part, start, held, 0), Run(part, 0, local - held, held, role=PAD)]
        return RunTable(length, parts, rows)

    @property
    def text(self) -> str:
        return "pad" if self.multiple == 1 else f"pad{self.multiple}"


@dataclass(frozen=True, slots=True)
class Halo(CutRule):
    """The parts of `rule`, each with copies of its neighbours' elements around it.

    A part that is empty has no halo. At the ends of the dimension a halo is cut off, or with
    `padded_edges` is padding, as in MLIR, where all halos are equally wide. A halo is filled
    when it is a target; it is a source only when `fresh`.

    >>> Halo(1, 1).table(6, 3).runs_of(1)
    [(1, 2, 0, 2), (2, 4, 1, 0), (4, 5, 3, 2)]
    >>> Halo(1, 1, padded_edges=True).table(6, 3).local_lengths.tolist()
    [4, 4, 4]
    """

    before: int
    after: int
    fresh: bool = False
    padded_edges: bool = False
    rule: CutRule = BY_CEIL
    name: ClassVar[str] = "halo"

    def __post_init__(self) -> None:
        set_number(self, "before", "halo")
        set_number(self, "after", "halo")
        expect_rule(self.rule)

    def _cut(self, length: int, parts: int) -> RunTable:
        inner = self.rule.table(length, parts)
        role = FRESH_HALO if self.fresh else HALO
        rows: list[Run] = []
        for part in range(parts):
            runs = inner.runs_of(part)
            if not runs:
                continue
            if len(runs) > 1 or runs[0][3] != OWNED:
                raise RuleError(
                    f"a halo needs parts of one run each, but `{self.rule.text}` gives part {part} "
                    f"{len(runs)} runs; put the halo on a rule that cuts in one piece"
                )
            start, stop = runs[0][:2]
            left, right = max(0, start - self.before), min(length, stop + self.after)
            # There is no neighbour at the ends of the tensor: padding takes the halo's place.
            spare_left = self.before - (start - left) if self.padded_edges else 0
            spare_right = self.after - (right - stop) if self.padded_edges else 0
            local = 0
            for begin, size, kind in (
                (0, spare_left, PAD),
                (left, start - left, role),
                (start, stop - start, OWNED),
                (stop, right - stop, role),
                (0, spare_right, PAD),
            ):
                rows.append(Run(part, begin, size, local, role=kind))
                local += size
        return RunTable(length, parts, rows)

    @property
    def text(self) -> str:
        words = [str(self.before), str(self.after)]
        words += ["fresh"] * self.fresh + ["padded"] * self.padded_edges
        return chained(self.rule) + f"halo[{','.join(words)}]"


@dataclass(frozen=True, slots=True)
class Nested(CutRule):
    """Levels of cuts, major to minor: each `(rule, parts)` cuts every part of the one above.

    Source: DTensor, where each mesh axis on a dimension chunks what the one before left.

    >>> Nested(((Ceil(), 2), (Ceil(), 2))).table(6, 4).local_lengths.tolist()
    [2, 1, 2, 1]
    >>> Ceil().table(6, 4).local_lengths.tolist()
    [2, 2, 2, 0]
    """

    levels: tuple[tuple[CutRule, int], ...]
    name: ClassVar[str] = "nested"

    def _cut(self, length: int, parts: int) -> RunTable:
        expected = math.prod(count for _, count in self.levels)
        if parts != expected:
            raise RuleError(f"levels of {expected} parts in all cannot cut into {parts} parts")
        table = RunTable(length, 1, [(0, 0, length, 0)])
        for rule, count in self.levels:
            lengths = table.local_lengths.tolist()
            cuts = {size: rule.table(size, count) for size in set(lengths)}
            table = table.cut([cuts[size] for size in lengths])
        return table

    @property
    def text(self) -> str:
        return " / ".join(f"{count}@{rule.text or 'ceil'}" for rule, count in self.levels)
