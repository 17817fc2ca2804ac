"""Cut rules: how a dimension of a tensor is split into parts.

A cut rule is a small frozen value. `rule.table(length, parts)` returns the run table of a dimension
of that length. No rule requires the length to be divisible by the number of parts. A rule with
numbers of its own (sizes, blocks) raises `RuleError` if they do not add up to the length.

====================  =================================================  ==========================
text                  split                                              source
====================  =================================================  ==========================
(none)                equal parts by ceil, the last short or empty       MLIR, GSPMD, `torch.chunk`
`unit64`              the same, in whole units of 64                     attention heads
`balanced`            sizes differ by at most one                        `numpy.array_split`
`sizes[3,1]`          these sizes                                        MLIR offsets, pipelines
`windows[0:4,2:6]`    these intervals, which may overlap                 sliding windows
`heads8`              8 equal groups, replicated over further parts      key/value heads
`pad128`              equal parts, padded to a multiple of 128           XLA, padded vocabularies
`halo[1,1]`           the inner rule's parts, and copies of neighbours'  MLIR
`stride2`             2 equal blocks, each split over all parts          Megatron, `_StridedShard`
`blocks[6,2]`         blocks of these sizes, each split over all parts   fused weights, Mamba
`joined[4,2@heads1]`  blocks, each split by its own rule over all parts  fused weights, Mamba
`groups2`             pairs, split as the inner rule splits indices      gate and up of gpt-oss
`pieces[4:2,1:1]`     blocks, and the share of each part in each         PartitionedShard unaligned
`whole[6,2]`          blocks of these sizes, never split                 PartitionedShard aligned
`cyclic16`            blocks of 16 dealt in turn                         ScaLAPACK
`zigzag`              2 blocks a part, from both ends                    Megatron's context parallel
====================  =================================================  ==========================

The last eight divide the dimension into consecutive blocks first. A part gets a piece of each
block, or whole blocks::

    blocks of 4, 8 and 4 over 2 parts     |----|--------|----|
    a piece of each (`Blocks`, `Joined`)   0  1 0   1    0  1
    whole ones (`WholeBlocks`)             0    0        1
    blocks of 2, in turn (`BlockCyclic`)   0 1 0 1 0 1 0 1

`parse_rule(rule.text) == rule`: the text of a rule is a word followed by a number or a bracket.
Rules that wrap another rule (`blocks`, `groups`, `halo`) follow it: `balanced@halo[1,1]`. Nested
splits (DTensor: two mesh axes on one dimension) are `Nested`, written as levels in the text of a
sharding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

import numpy as np

from reshard._records import Record
from reshard._validation import check_int, check_ints
from reshard.errors import NotationError, RuleError
from reshard.runs import FRESH_HALO, HALO, MAX_RUNS, OWNED, PAD, IntArray, Run, RunTable


def ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def bracketed(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def set_number(rule: CutRule, name: str, what: str, minimum: int = 0) -> None:
    """Check a field of a rule during construction, and make it an int."""
    number = check_int(getattr(rule, name), what, RuleError, minimum)
    object.__setattr__(rule, name, number)


def set_numbers(rule: CutRule, name: str, what: str) -> None:
    """Check a field of a rule during construction, and make it a tuple of non-negative ints."""
    object.__setattr__(rule, name, check_ints(getattr(rule, name), what, RuleError))


def set_number_lists(rule: CutRule, name: str, what: str) -> None:
    """Check a field of a rule during construction, and make it a tuple of tuples of ints."""
    lists = getattr(rule, name)
    if not isinstance(lists, Iterable):
        raise RuleError(f"{what} {lists!r} must be a list of lists of whole numbers")
    object.__setattr__(rule, name, tuple(check_ints(numbers, what, RuleError) for numbers in lists))


def expect_rule(rule: object) -> None:
    if not isinstance(rule, CutRule):
        raise RuleError(
            f"{rule!r} is not a cut rule; give one of reshard.cut_rules, such as Balanced(), or "
            "leave it out for equal parts by ceil"
        )


def expect_count(what: str, items: Sequence[object], parts: int) -> None:
    if len(items) != parts:
        raise RuleError(f"{len(items)} {what} for {parts} parts; give one for each part")


def expect_sum(what: str, numbers: Sequence[int], total: int, of: str = "the length") -> None:
    if sum(numbers) != total:
        raise RuleError(
            f"{what} {list(numbers)} add up to {sum(numbers)}, but {of} is {total}"
            if of == "the length"
            else f"{what} {list(numbers)} add up to {sum(numbers)}, but there are {total} {of}"
        )


# Tensors of a model are sharded alike: a table that is in use is not built again.
_tables: WeakValueDictionary[tuple[CutRule, int, int], RunTable] = WeakValueDictionary()


class CutRule(Record):
    """The base class of cut rules."""

    def table(self, length: int, parts: int) -> RunTable:
        """Return the run table of a dimension of `length` indices over `parts` parts.

        Raises RuleError if they are not integers, or do not fit the rule.
        """
        length = check_int(length, "length of a dimension", RuleError)
        parts = check_int(parts, "number of parts", RuleError, minimum=1)
        key = (self, length, parts)
        table = _tables.get(key)
        if table is None:
            table = _tables[key] = self._cut(length, parts)
        return table

    def _cut(self, length: int, parts: int) -> RunTable:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The rule in the native notation, empty for the default rule."""
        raise NotImplementedError

    @property
    def is_default(self) -> bool:
        """Whether this is the plain split by ceil."""
        return self.text == ""


def chained(rule: CutRule) -> str:
    return "" if rule.is_default else f"{rule.text}@"


def _covering(rule: CutRule, table: RunTable) -> RunTable:
    holes = table.uncovered()
    if holes:
        raise RuleError(
            f"`{rule.text}` assigns indices {holes[0][0]}:{holes[0][1]} of "
            f"{table.dimension_length} to no part; together the parts must cover the dimension"
        )
    return table


def table_of_sizes(length: int, sizes: Sequence[int] | IntArray) -> RunTable:
    stop = np.cumsum(sizes)
    return RunTable.from_columns(
        length, len(sizes), np.arange(len(sizes)), stop - sizes, np.asarray(sizes), 0
    )


def ceil_sizes(length: int, parts: int, unit: int = 1) -> IntArray:
    # Every part has whole units, except that the last unit ends with the dimension.
    chunk = ceil_divide(ceil_divide(length, unit), parts) * unit
    # Clamp at the end, since the product beyond it could exceed 64 bits.
    chunks = np.minimum(np.arange(1, parts + 1, dtype=np.int64), ceil_divide(length, max(chunk, 1)))
    stops = np.minimum(chunks * chunk, length)
    sizes: IntArray = np.diff(stops, prepend=0)
    return sizes


class Ceil(CutRule):
    """Equal parts by ceil, in whole units if given; the last parts are short or empty.

    Source: `K ceildiv M` of MLIR's mesh dialect, GSPMD (Xu et al. 2021), `torch.chunk`.

    >>> Ceil().table(10, 4).local_lengths.tolist()
    [3, 3, 3, 1]
    >>> Ceil(unit=4).table(10, 2).local_lengths.tolist()
    [8, 2]
    """

    unit: int = 1

    def __post_init__(self) -> None:
        set_number(self, "unit", "unit", minimum=1)

    def _cut(self, length: int, parts: int) -> RunTable:
        return table_of_sizes(length, ceil_sizes(length, parts, self.unit))

    @property
    def text(self) -> str:
        return "" if self.unit == 1 else f"unit{self.unit}"


BY_CEIL: CutRule = Ceil()


class Balanced(CutRule):
    """Parts whose sizes differ by at most 1, larger parts first. Source: `numpy.array_split`.

    >>> Balanced().table(6, 4).local_lengths.tolist()
    [2, 2, 1, 1]
    """

    def _cut(self, length: int, parts: int) -> RunTable:
        small, more = divmod(length, parts)
        return table_of_sizes(length, np.where(np.arange(parts) < more, small + 1, small))

    @property
    def text(self) -> str:
        return "balanced"


class Sizes(CutRule):
    """Parts of the given sizes, in order. Source: MLIR `sharded_dims_offsets`.

    >>> Sizes((5, 0, 1)).table(6, 3).local_lengths.tolist()
    [5, 0, 1]
    >>> Sizes.from_offsets((0, 5, 5, 6)) == Sizes((5, 0, 1))
    True
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "sizes")

    @classmethod
    def from_offsets(cls, offsets: Sequence[int]) -> Sizes:
        """Return the split at `offsets`, of shape `(parts + 1,)`: from 0 up to the length."""
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


class Windows(CutRule):
    """An explicit interval `(start, stop)` for each part.

    Intervals may overlap, and together cover the dimension.

    >>> Windows(((0, 4), (2, 6))).table(6, 2).local_lengths.tolist()
    [4, 4]
    """

    windows: tuple[tuple[int, int], ...]

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


class Heads(CutRule):
    """`count` equal groups of indices (heads). With more parts than heads, heads are replicated.

    Up to `count` parts, whole heads are split by ceil. With more, part `p` holds head `p * count //
    parts`, so each head is held by several adjacent parts. Source: the key/value heads of
    grouped-query attention in Megatron-core and vLLM.

    >>> Heads(4).table(8, 8).local_lengths.tolist()
    [2, 2, 2, 2, 2, 2, 2, 2]
    >>> Heads(4).table(8, 8).runs_of(3)
    [(2, 4, 0, 0)]
    >>> Heads(4).table(8, 3).local_lengths.tolist()
    [4, 4, 0]
    """

    count: int

    def __post_init__(self) -> None:
        set_number(self, "count", "heads", minimum=1)

    def _cut(self, length: int, parts: int) -> RunTable:
        width, rest = divmod(length, self.count)
        if rest:
            raise RuleError(
                f"length {length} is not made of {self.count} equal heads; give the number of "
                "heads this tensor has, or split it with `sizes[...]`"
            )
        if parts <= self.count:
            return table_of_sizes(length, ceil_sizes(self.count, parts) * width)
        # More parts than heads: adjacent parts hold replicas of a head.
        part = np.arange(parts)
        return RunTable.from_columns(
            length, parts, part, part * self.count // parts * width, width, 0
        )

    @property
    def text(self) -> str:
        return f"heads{self.count}"


class Padded(CutRule):
    """Parts of equal local length, a multiple of `multiple`, with padding at the end.

    Sources: XLA pads every shard to the largest; Megatron pads a vocabulary to a multiple of
    `make_vocab_size_divisible_by` times the tensor-parallel size.

    >>> Padded(4).table(10, 2).local_lengths.tolist()
    [8, 8]
    >>> Padded(4).table(10, 2).element_lengths.tolist()
    [8, 2]
    """

    multiple: int = 1

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


class Halo(CutRule):
    """The parts of `rule`, each surrounded by copies of its neighbours' elements.

    The halo of an empty part is empty. At the ends of the dimension a halo is truncated, or with
    `padded_edges` replaced by padding, as in MLIR, where all halos have equal width. A halo is
    filled in a target, and is a source only if `fresh`.

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
                    f"{len(runs)} runs; use the halo with a rule that gives contiguous parts"
                )
            start, stop = runs[0][:2]
            left, right = max(0, start - self.before), min(length, stop + self.after)
            # At the ends of the tensor, padding replaces the halo.
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


class Nested(CutRule):
    """Levels of splits, major to minor: `(rule, parts)` splits each part of the previous level.

    Source: DTensor, where each mesh axis on a dimension chunks the shards of the previous axis.

    >>> Nested(((Ceil(), 2), (Ceil(), 2))).table(6, 4).local_lengths.tolist()
    [2, 1, 2, 1]
    >>> Ceil().table(6, 4).local_lengths.tolist()
    [2, 2, 2, 0]
    """

    levels: tuple[tuple[CutRule, int], ...]

    def _cut(self, length: int, parts: int) -> RunTable:
        expected = math.prod(count for _, count in self.levels)
        if parts != expected:
            raise RuleError(f"levels of {expected} parts in total cannot split into {parts} parts")
        table = RunTable(length, 1, [(0, 0, length, 0)])
        for rule, count in self.levels:
            lengths = table.local_lengths.tolist()
            cuts = {size: rule.table(size, count) for size in set(lengths)}
            table = table.cut([cuts[size] for size in lengths])
        return table

    @property
    def text(self) -> str:
        return " / ".join(f"{count}@{rule.text or 'ceil'}" for rule, count in self.levels)


class Strided(CutRule):
    """`stride` equal blocks by ceil, each split over all parts by ceil.

    Sources: Megatron's `partition_stride`, which is defined only where `stride * parts`
    divides the length (give the `local_lengths` it claims, and they are checked), and
    DTensor's `_StridedShard`, whose `split_factor` is the stride.

    >>> Strided(2).table(8, 2).runs_of(0)
    [(0, 2, 0, 0), (4, 6, 2, 0)]
    >>> Strided(2).table(6, 2).local_lengths.tolist()
    [4, 2]
    >>> Strided(2, local_lengths=(3, 3)).table(6, 2)
    Traceback (most recent call last):
        ...
    reshard.errors.RuleError: local lengths [3, 3] of stride 2 for length 6 over 2 parts: each of
    the 2 blocks split by ceil gives [4, 2]; Megatron defines a stride only where stride * parts
    divides the length. Give the blocks with `blocks[...]`, or the right local lengths
    """

    stride: int
    local_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_number(self, "stride", "stride", minimum=1)
        if self.local_lengths is not None:
            set_numbers(self, "local_lengths", "local lengths")

    def _cut(self, length: int, parts: int) -> RunTable:
        # With more blocks than indices, the blocks after the last index are empty.
        blocks = min(self.stride, max(length, 1))
        if blocks > MAX_RUNS:
            raise RuleError(
                f"stride {self.stride} splits length {length} into {blocks} blocks; at most "
                f"{MAX_RUNS} are supported"
            )
        sizes = ceil_sizes(length, blocks).tolist()
        table = Blocks(tuple(sizes)).table(length, parts)
        claimed, lengths = self.local_lengths, table.local_lengths.tolist()
        if claimed is not None and list(claimed) != lengths:
            raise RuleError(
                f"local lengths {list(claimed)} of stride {self.stride} for length {length} over "
                f"{parts} parts: each of the {self.stride} blocks split by ceil gives {lengths}; "
                "Megatron defines a stride only where stride * parts divides the length. Give "
                "the blocks with `blocks[...]`, or the right local lengths"
            )
        return table

    @property
    def text(self) -> str:
        claimed = "" if self.local_lengths is None else bracketed(self.local_lengths)
        return f"stride{self.stride}{claimed}"


class Blocks(CutRule):
    """Consecutive blocks of the given sizes, each split over all parts by `rule`.

    A part holds its piece of every block, in the order of the blocks. Sources: Megatron's
    `partition_sizes` (Mamba's in_proj), fused query-key-value weights, an unaligned
    PartitionedShard.

    >>> Blocks((4, 2)).table(6, 2).runs_of(1)
    [(2, 4, 0, 0), (5, 6, 2, 0)]
    """

    sizes: tuple[int, ...]
    rule: CutRule = BY_CEIL

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "blocks")
        expect_rule(self.rule)

    def _cut(self, length: int, parts: int) -> RunTable:
        if sum(self.sizes) * parts == length and length and parts > 1:
            # A list of sizes is ambiguous, and the length shows which meaning fits.
            whole = [size * parts for size in self.sizes]
            raise RuleError(
                f"blocks {list(self.sizes)} add up to {sum(self.sizes)}, but the length is "
                f"{length}, {parts} times as much: they are read as the sizes of whole blocks; if "
                f"they are the sizes on each of {parts} parts, give {whole}, or the sizes of every "
                "part"
            )
        expect_sum("blocks", self.sizes, length)
        return _join(length, parts, self.sizes, [self.rule] * len(self.sizes))

    @property
    def text(self) -> str:
        return chained(self.rule) + f"blocks{bracketed(self.sizes)}"


class Joined(CutRule):
    """Consecutive blocks of the given sizes, each split over all parts by its own rule.

    A part holds its piece of every block, in the order of the blocks. Sources: fused weights whose
    members have different numbers of heads, so that some are replicated over more parts than
    others: Mamba's in_proj (in vLLM's loader), fused query, key and value.

    >>> rule = Joined((8, 2, 2), (Heads(4), Heads(2), Heads(2)))
    >>> rule.text
    'joined[8@heads4,2@heads2,2@heads2]'
    >>> rule.table(12, 4).runs_of(1)
    [(2, 4, 0, 0), (8, 9, 2, 0), (10, 11, 3, 0)]
    """

    sizes: tuple[int, ...]
    rules: tuple[CutRule, ...]

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "blocks")
        if isinstance(self.rules, CutRule) or not isinstance(self.rules, Iterable):
            raise RuleError(f"rules {self.rules!r} of blocks; give a list with a rule per block")
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            expect_rule(rule)
        if len(self.rules) != len(self.sizes):
            raise RuleError(
                f"{len(self.rules)} rules for {len(self.sizes)} blocks; give one for each"
            )

    def _cut(self, length: int, parts: int) -> RunTable:
        expect_sum("blocks", self.sizes, length)
        return _join(length, parts, self.sizes, self.rules)

    @property
    def text(self) -> str:
        pairs = zip(self.sizes, self.rules, strict=True)
        blocks = [f"{n}" if rule.is_default else f"{n}@{rule.text}" for n, rule in pairs]
        return f"joined[{','.join(blocks)}]"


def _join(length: int, parts: int, sizes: Sequence[int], rules: Sequence[CutRule]) -> RunTable:
    """Return the table of consecutive blocks, each split by its rule."""
    rows: list[IntArray] = []
    # The local offset of the next block in each part.
    local = np.zeros(parts, dtype=np.int64)
    start = 0
    pairs = list(zip(sizes, rules, strict=True))
    tables = {(size, rule): rule.table(size, parts) for size, rule in set(pairs)}
    for size, rule in pairs:
        table = tables[size, rule]
        block = table.rows.copy()
        block[:, Run._fields.index("start")] += start
        block[:, Run._fields.index("local_start")] += local[block[:, 0]]
        rows.append(block)
        local += table.local_lengths
        start += size
    return RunTable(length, parts, np.concatenate(rows) if rows else [])


class Grouped(CutRule):
    """Groups of `size` indices that stay together, split by `rule` like single indices.

    Source: gate and up of an expert in alternate columns (gpt-oss), split where the rows of the
    next layer are.

    >>> Grouped(2, Ceil(4)).table(20, 2).local_lengths.tolist()
    [16, 4]
    """

    size: int
    rule: CutRule = BY_CEIL

    def __post_init__(self) -> None:
        set_number(self, "size", "indices of a group", minimum=1)
        expect_rule(self.rule)

    def _cut(self, length: int, parts: int) -> RunTable:
        if length % self.size:
            raise RuleError(
                f"length {length} is not made of groups of {self.size}; give the number of indices "
                "that stay together in this tensor"
            )
        rows = self.rule.table(length // self.size, parts).rows.copy()
        for field in ("start", "length", "local_start", "global_step", "local_step"):
            rows[:, Run._fields.index(field)] *= self.size
        return RunTable(length, parts, rows)

    @property
    def text(self) -> str:
        return chained(self.rule) + f"groups{self.size}"


class Pieces(CutRule):
    """Consecutive blocks, each split into pieces of the given sizes: `pieces[b][p]` for part `p`.

    A part holds its piece of every block, in the order of the blocks. Source: an unaligned
    PartitionedShard, whose splits give the share of each shard in every partition.

    >>> rule = Pieces.from_splits([(4, 6, 4, 2), (2, 4, 8, 2)])
    >>> rule.pieces
    ((4, 2), (6, 4), (4, 8), (2, 2))
    >>> print(rule.table(32, 2))
    part 0: 4 from 0
    part 0: 6 from 6
    part 0: 4 from 16
    part 0: 2 from 28
    part 1: 2 from 4
    part 1: 4 from 12
    part 1: 8 from 20
    part 1: 2 from 30
    """

    pieces: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        set_number_lists(self, "pieces", "pieces")
        if not all(self.pieces):
            raise RuleError("a block has no pieces; give a size for each part")

    @classmethod
    def from_splits(cls, splits: Sequence[Sequence[int]]) -> Pieces:
        """Return the split in which part `p` has the pieces `splits[p]`, block by block."""
        counts = {len(split) for split in splits}
        if len(counts) > 1:
            raise RuleError(f"splits {[list(split) for split in splits]} must be equally many")
        return cls(tuple(zip(*splits, strict=True)))

    def _cut(self, length: int, parts: int) -> RunTable:
        for block in self.pieces:
            expect_count("pieces", block, parts)
        expect_sum("pieces", [sum(block) for block in self.pieces], length)
        # Shape `(blocks, parts)`: rows are consecutive in the dimension, columns in the parts.
        size = np.array(self.pieces, dtype=np.int64).reshape(-1, parts)
        stop = np.cumsum(size).reshape(size.shape)
        local_stop = np.cumsum(size, axis=0)
        part = np.broadcast_to(np.arange(parts), size.shape)
        columns = (part, stop - size, size, local_stop - size)
        return RunTable.from_columns(length, parts, *(column.ravel() for column in columns))

    @property
    def text(self) -> str:
        return f"pieces[{','.join(':'.join(map(str, block)) for block in self.pieces)}]"


class WholeBlocks(CutRule):
    """Consecutive blocks of the given sizes, dealt whole: `counts[p]` blocks to part `p`.

    Without counts the blocks are dealt by ceil. Sources: experts under expert parallelism, an
    aligned PartitionedShard.

    >>> WholeBlocks((6, 10, 12, 4)).table(32, 2).local_lengths.tolist()
    [16, 16]
    >>> WholeBlocks((6, 10, 12, 4), counts=(1, 3)).table(32, 2).local_lengths.tolist()
    [6, 26]
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "blocks")
        if self.counts is not None:
            set_numbers(self, "counts", "block counts")
            expect_sum("block counts", self.counts, len(self.sizes), "blocks")

    def _cut(self, length: int, parts: int) -> RunTable:
        expect_sum("blocks", self.sizes, length)
        if self.counts is not None:
            expect_count("block counts", self.counts, parts)
        counts = self.counts or ceil_sizes(len(self.sizes), parts).tolist()
        # The bounds of the blocks of each part.
        edges = np.concatenate(([0], np.cumsum(self.sizes)))[np.cumsum((0, *counts))]
        return table_of_sizes(length, np.diff(edges).astype(np.int64))

    @property
    def text(self) -> str:
        counts = "" if self.counts is None else ";" + ",".join(map(str, self.counts))
        return f"whole[{','.join(map(str, self.sizes))}{counts}]"


class BlockCyclic(CutRule):
    """Blocks of `block` indices dealt to the parts in turn, starting with part `first`.

    Source: ScaLAPACK's block-cyclic distribution (`mb`, `rsrc`).

    >>> print(BlockCyclic(2).table(9, 2))
    part 0: 2 x 2 from 0 every 4
    part 0: 1 from 8
    part 1: 2 x 2 from 2 every 4
    """

    block: int
    first: int = 0

    def __post_init__(self) -> None:
        set_number(self, "block", "block", minimum=1)
        set_number(self, "first", "first part")

    def _cut(self, length: int, parts: int) -> RunTable:
        if self.first >= parts:
            raise RuleError(f"first part {self.first} of a cyclic split over {parts} parts")
        full, rest = divmod(length, self.block)
        rows = []
        # Every `parts`-th full block goes to the same part, so a row describes all blocks of a
        # part.
        for turn in range(min(parts, full)):
            count = ceil_divide(full - turn, parts)
            part = (self.first + turn) % parts
            step = self.block * parts
            rows.append(Run(part, turn * self.block, self.block, 0, count, step, self.block))
        # The last, shorter block follows the full blocks of its part.
        if rest:
            part = (self.first + full) % parts
            rows.append(Run(part, full * self.block, rest, full // parts * self.block))
        return RunTable(length, parts, rows)

    @property
    def text(self) -> str:
        return f"cyclic{self.block}" + (f"+{self.first}" if self.first else "")


class Zigzag(CutRule):
    """Two equal blocks per part, by ceil: part `p` has the `p`-th and the `p`-th from the end.

    All parts of a causal sequence then have equal work. Source: zigzag ring attention, and
    Megatron's context parallelism.

    >>> print(Zigzag().table(8, 2))
    part 0: 2 x 2 from 0 every 6
    part 1: 4 from 2
    """

    def _cut(self, length: int, parts: int) -> RunTable:
        sizes = ceil_sizes(length, 2 * parts)
        starts = np.cumsum(sizes) - sizes
        first = np.arange(parts)
        part = np.concatenate((first, first[::-1]))
        local = np.concatenate((np.zeros(parts, np.int64), sizes[:parts][::-1]))
        return RunTable.from_columns(length, parts, part, starts, sizes, local)

    @property
    def text(self) -> str:
        return "zigzag"


_FORMS = {
    "ceil": "ceil",
    "unit": "unit64",
    "balanced": "balanced",
    "sizes": "sizes[3,1]",
    "windows": "windows[0:4,2:6]",
    "heads": "heads8",
    "stride": "stride2",
    "blocks": "blocks[16,8,4]",
    "joined": "joined[6@heads3,2]",
    "groups": "groups2",
    "pieces": "pieces[4:2,6:4]",
    "whole": "whole[4,6,4] or whole[4,6,4;1,2]",
    "cyclic": "cyclic16 or cyclic16+1",
    "zigzag": "zigzag",
    "pad": "pad or pad128",
    "halo": "halo[1,1], halo[1,1,fresh] or halo[1,1,padded]",
}
_RULE = r"([a-z]+)(\d*)((?:\+\d+)?)(?:\[(.*)\])?"


def parse_rule(text: str) -> CutRule:
    """Parse the text of a cut rule.

    Raises:
        NotationError: an unknown rule, or numbers of the wrong form.

    >>> parse_rule("stride2"), parse_rule("")
    (Strided(stride=2, local_lengths=None), Ceil(unit=1))
    >>> parse_rule("balanced@halo[1,1,fresh]").text
    'balanced@halo[1,1,fresh]'
    """
    rule: CutRule = Ceil()
    for word in split_outside_brackets(text, "@") if text else ():
        rule = _parse_word(word.strip(), rule, text)
    return rule


def _parse_word(word: str, inner: CutRule, text: str) -> CutRule:
    match = re.fullmatch(_RULE, word)
    name = match[1] if match else ""
    if match is None or name not in _FORMS:
        raise NotationError(
            f"unknown cut rule {word!r} in {text!r}; the rules are {', '.join(_FORMS)}"
        )
    if not inner.is_default and name not in ("blocks", "groups", "halo"):
        raise NotationError(
            f"{word!r} in {text!r} cannot wrap another rule; only `blocks`, `groups` and `halo` can"
        )
    try:
        rule = _build(name, match[2], match[3], match[4], inner)
    except ValueError as error:
        # The errors of reshard are ValueErrors, too, and more precise.
        if isinstance(error, NotationError) or type(error) is not ValueError:
            raise
        rule = None
    if rule is None:
        raise NotationError(f"cannot read the cut rule {word!r}; write {_FORMS[name]}")
    return rule


def _build(
    name: str, number: str, plus: str, bracket: str | None, inner: CutRule
) -> CutRule | None:
    """Return the rule, or None (or raise ValueError) if the numbers do not have its form."""
    if bracket is None:
        if plus and name != "cyclic":
            return None
        # Words without brackets: `ceil`, `pad4`, `cyclic16+2`.
        plain: dict[str, CutRule] = {"ceil": Ceil(), "balanced": Balanced(), "zigzag": Zigzag()}
        if name in plain:
            return None if number else plain[name]
        if name == "groups":
            return Grouped(int(number), inner)
        if name == "pad":
            return Padded(int(number or 1))
        one_number: dict[str, Callable[[int], CutRule]] = {
            "unit": Ceil,
            "heads": Heads,
            "stride": Strided,
        }
        if name in one_number:
            return one_number[name](int(number))
        return BlockCyclic(int(number), int(plus or 0)) if name == "cyclic" else None
    if plus:
        return None
    # With brackets only `stride` has a number too, such as `stride2[4,4]`.
    if name == "stride":
        return Strided(int(number), _numbers(bracket))
    if number:
        return None
    if name == "sizes":
        return Sizes(_numbers(bracket))
    if name == "blocks":
        return Blocks(_numbers(bracket), inner)
    if name == "joined":
        return _parse_joined(bracket)
    if name == "windows":
        return Windows(tuple((start, stop) for start, stop in _groups(bracket)))
    if name == "pieces":
        return Pieces(_groups(bracket))
    if name == "whole":
        sizes, _, counts = bracket.partition(";")
        return WholeBlocks(_numbers(sizes), _numbers(counts) if counts else None)
    if name == "halo":
        before, after, *flags = (word.strip() for word in bracket.split(","))
        if len(set(flags)) != len(flags) or not set(flags) <= {"fresh", "padded"}:
            return None
        return Halo(int(before), int(after), "fresh" in flags, "padded" in flags, inner)
    return None


def _parse_joined(text: str) -> CutRule:
    blocks = split_outside_brackets(text, ",") if text.strip() else []
    pairs = [block.partition("@") for block in blocks]
    # `6@` lacks a rule, which is not the default rule.
    if any(at and not rule.strip() for _, at, rule in pairs):
        raise ValueError
    return Joined(
        tuple(int(size) for size, _, _ in pairs), tuple(parse_rule(rule) for _, _, rule in pairs)
    )


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split a text at a single-letter separator, except inside square brackets.

    >>> split_outside_brackets("tp@joined[6@heads3,2], -", ",")
    ['tp@joined[6@heads3,2]', ' -']
    """
    pieces, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == separator and depth <= 0:
            pieces.append(text[start:at])
            start = at + 1
    return [*pieces, text[start:]]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text.strip() else ()


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse numbers joined by `:`, in items separated by commas."""
    items = text.split(",") if text.strip() else ()
    return tuple(tuple(int(number) for number in item.split(":")) for item in items)
