"""Cut rules of a dimension that is made of blocks.

The blocks lie one behind another. A part gets a piece of each of them, or whole ones::

    blocks of 4, 8 and 4 over 2 parts     |----|--------|----|
    a piece of each (`Blocks`, `Joined`)   0  1 0   1    0  1
    whole ones (`WholeBlocks`)             0    0        1
    blocks of 2, in turn (`BlockCyclic`)   0 1 0 1 0 1 0 1

See `reshard.cut_rules` for what a rule is, and for those without blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reshard.cut_rules import (
    BY_CEIL,
    CutRule,
    bracketed,
    ceil_divide,
    ceil_sizes,
    chained,
    expect_count,
    expect_rule,
    expect_sum,
    set_number,
    set_number_lists,
    set_numbers,
    table_of_sizes,
)
from reshard.errors import RuleError
from reshard.runs import LARGEST_RUNS, IntArray, Run, RunTable


@dataclass(frozen=True, slots=True)
class Strided(CutRule):
    """`stride` equal blocks by ceil, each cut over all parts by ceil.

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
    the 2 blocks cut by ceil gives [4, 2]; Megatron defines a stride only where stride * parts
    divides the length. Give the blocks with `blocks[...]`, or the right local lengths
    """

    stride: int
    local_lengths: tuple[int, ...] | None = None
    name: ClassVar[str] = "stride"

    def __post_init__(self) -> None:
        set_number(self, "stride", "stride", minimum=1)
        if self.local_lengths is not None:
            set_numbers(self, "local_lengths", "local lengths")

    def _cut(self, length: int, parts: int) -> RunTable:
        # With more blocks than indices, those behind the last index are empty.
        blocks = min(self.stride, max(length, 1))
        if blocks > LARGEST_RUNS:
            raise RuleError(
                f"stride {self.stride} cuts length {length} into {blocks} blocks; at most "
                f"{LARGEST_RUNS} are supported"
            )
        sizes = ceil_sizes(length, blocks).tolist()
        table = Blocks(tuple(sizes)).table(length, parts)
        claimed, found = self.local_lengths, table.local_lengths.tolist()
        if claimed is not None and list(claimed) != found:
            raise RuleError(
                f"local lengths {list(claimed)} of stride {self.stride} for length {length} over "
                f"{parts} parts: each of the {self.stride} blocks cut by ceil gives {found}; "
                "Megatron defines a stride only where stride * parts divides the length. Give "
                "the blocks with `blocks[...]`, or the right local lengths"
            )
        return table

    @property
    def text(self) -> str:
        claimed = "" if self.local_lengths is None else bracketed(self.local_lengths)
        return f"stride{self.stride}{claimed}"


@dataclass(frozen=True, slots=True)
class Blocks(CutRule):
    """Consecutive blocks of the given sizes, each cut over all parts by `rule`.

    A part holds its piece of every block, in the order of the blocks. Sources: Megatron's
    `partition_sizes` (Mamba's in_proj), fused query-key-value weights, an unaligned
    PartitionedShard.

    >>> Blocks((4, 2)).table(6, 2).runs_of(1)
    [(2, 4, 0, 0), (5, 6, 2, 0)]
    """

    sizes: tuple[int, ...]
    rule: CutRule = BY_CEIL
    name: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "blocks")
        expect_rule(self.rule)

    def _cut(self, length: int, parts: int) -> RunTable:
        if sum(self.sizes) * parts == length and length and parts > 1:
            # A list of sizes can be meant both ways, and the length says which one fits.
            whole = [size * parts for size in self.sizes]
            raise RuleError(
                f"blocks {list(self.sizes)} add up to {sum(self.sizes)}, but the length is "
                f"{length}, {parts} times as much: they are read as the sizes of whole blocks; if "
                f"they are those on each of {parts} parts, give {whole}, or every part's own sizes"
            )
        expect_sum("blocks", self.sizes, length)
        return _join(length, parts, self.sizes, [self.rule] * len(self.sizes))

    @property
    def text(self) -> str:
        return chained(self.rule) + f"blocks{bracketed(self.sizes)}"


@dataclass(frozen=True, slots=True)
class Joined(CutRule):
    """Consecutive blocks of the given sizes, each cut over all parts by a rule of its own.

    A part holds its piece of every block, in the order of the blocks. Sources: fused weights
    whose members do not have equally many heads, so that with more parts than some have they
    are shared: Mamba's in_proj (vLLM's loader of it), fused query, key and value.

    >>> from reshard.cut_rules import Heads
    >>> rule = Joined((8, 2, 2), (Heads(4), Heads(2), Heads(2)))
    >>> rule.text
    'joined[8@heads4,2@heads2,2@heads2]'
    >>> rule.table(12, 4).runs_of(1)
    [(2, 4, 0, 0), (8, 9, 2, 0), (10, 11, 3, 0)]
    """

    sizes: tuple[int, ...]
    rules: tuple[CutRule, ...]
    name: ClassVar[str] = "joined"

    def __post_init__(self) -> None:
        set_numbers(self, "sizes", "blocks")
        if isinstance(self.rules, CutRule) or not isinstance(self.rules, Iterable):
            raise RuleError(f"rules {self.rules!r} of blocks; give a list with one for each block")
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
    """The table of blocks one behind another, each cut by its rule."""
    rows: list[IntArray] = []
    # Where the next block begins in the local order of each part.
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


@dataclass(frozen=True, slots=True)
class Grouped(CutRule):
    """Groups of `size` indices that stay together, cut by `rule` like single indices.

    Source: gate and up of an expert in alternate columns (gpt-oss), cut where the rows of the layer
    behind them are.

    >>> from reshard.cut_rules import Ceil
    >>> Grouped(2, Ceil(4)).table(20, 2).local_lengths.tolist()
    [16, 4]
    """

    size: int
    rule: CutRule = BY_CEIL
    name: ClassVar[str] = "groups"

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


@dataclass(frozen=True, slots=True)
class Pieces(CutRule):
    """Consecutive blocks, each cut into pieces of the given sizes: `pieces[b][p]` for part `p`.

    A part holds its piece of every block, in the order of the blocks. Source: an unaligned
    PartitionedShard, whose splits say how much of every partition each shard has.

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
    name: ClassVar[str] = "pieces"

    def __post_init__(self) -> None:
        set_number_lists(self, "pieces", "pieces")
        if not all(self.pieces):
            raise RuleError("pieces of a block are none; give one size for each part")

    @classmethod
    def from_splits(cls, splits: Sequence[Sequence[int]]) -> Pieces:
        """The cut where part `p` has pieces of `splits[p]`, one a block."""
        counts = {len(split) for split in splits}
        if len(counts) > 1:
            raise RuleError(f"splits {[list(split) for split in splits]} must be equally many")
        return cls(tuple(zip(*splits, strict=True)))

    def _cut(self, length: int, parts: int) -> RunTable:
        for block in self.pieces:
            expect_count("pieces", block, parts)
        expect_sum("pieces", [sum(block) for block in self.pieces], length)
        # Of shape `(blocks, parts)`: row by row in the dimension, column by column in the parts.
        size = np.array(self.pieces, dtype=np.int64).reshape(-1, parts)
        stop = np.cumsum(size).reshape(size.shape)
        local_stop = np.cumsum(size, axis=0)
        part = np.broadcast_to(np.arange(parts), size.shape)
        columns = (part, stop - size, size, local_stop - size)
        return RunTable.from_columns(length, parts, *(column.ravel() for column in columns))

    @property
    def text(self) -> str:
        return f"pieces[{','.join(':'.join(map(str, block)) for block in self.pieces)}]"


@dataclass(frozen=True, slots=True)
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
    name: ClassVar[str] = "whole"

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
        # Where the blocks of each part begin and end.
        edges = np.concatenate(([0], np.cumsum(self.sizes)))[np.cumsum((0, *counts))]
        return table_of_sizes(length, np.diff(edges).astype(np.int64))

    @property
    def text(self) -> str:
        counts = "" if self.counts is None else ";" + ",".join(map(str, self.counts))
        return f"whole[{','.join(map(str, self.sizes))}{counts}]"


@dataclass(frozen=True, slots=True)
class BlockCyclic(CutRule):
    """Blocks of `block` indices dealt to the parts in turn, beginning with part `first`.

    Source: ScaLAPACK's block-cyclic distribution (`mb`, `rsrc`).

    >>> print(BlockCyclic(2).table(9, 2))
    part 0: 2 x 2 from 0 every 4
    part 0: 1 from 8
    part 1: 2 x 2 from 2 every 4
    """

    block: int
    first: int = 0
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        set_number(self, "block", "block", minimum=1)
        set_number(self, "first", "first part")

    def _cut(self, length: int, parts: int) -> RunTable:
        if self.first >= parts:
            raise RuleError(f"first part {self.first} of a cyclic cut over {parts} parts")
        full, rest = divmod(length, self.block)
        rows = []
        # Every `parts`-th full block goes to one part, so one row describes all blocks of a part.
        for turn in range(min(parts, full)):
            count = ceil_divide(full - turn, parts)
            part = (self.first + turn) % parts
            step = self.block * parts
            rows.append(Run(part, turn * self.block, self.block, 0, count, step, self.block))
        # The last, shorter block lies behind the full ones of its part.
        if rest:
            part = (self.first + full) % parts
            rows.append(Run(part, full * self.block, rest, full // parts * self.block))
        return RunTable(length, parts, rows)

    @property
    def text(self) -> str:
        return f"cyclic{self.block}" + (f"+{self.first}" if self.first else "")


@dataclass(frozen=True, slots=True)
class Zigzag(CutRule):
    """Two equal blocks for each part, by ceil: part `p` has the `p`-th and the `p`-th from the end.

    Of a sequence in which places see those before them, all parts have equal work then. Source:
    zigzag ring attention, and Megatron's context parallelism.

    >>> print(Zigzag().table(8, 2))
    part 0: 2 x 2 from 0 every 6
    part 1: 4 from 2
    """

    name: ClassVar[str] = "zigzag"

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
