"""Each cut rule against the definition of the system it comes from, and what it refuses.

Where the system is at hand (torch, NumPy) it is asked itself; elsewhere its formula is
written down here once more, so that the oracle and the package cannot be wrong together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.cut_rules import (
    Balanced,
    BlockCyclic,
    Blocks,
    Ceil,
    CutRule,
    Grouped,
    Halo,
    Heads,
    Joined,
    Nested,
    Padded,
    Pieces,
    Sizes,
    Strided,
    WholeBlocks,
    Windows,
    Zigzag,
    parse_rule,
)
from reshard.errors import LayoutError, NotationError, RuleError
from reshard.layout import Layout
from reshard.plans.plan import plan
from reshard.runs import PAD, RunTable
from strategies import rules

lengths = st.integers(0, 60)
counts = st.integers(1, 9)


def indices_of(table: RunTable) -> list[list[int]]:
    """The indices of every part in local order, -1 for padding."""
    return [
        [
            -1 if role == PAD else index
            for start, stop, _, role in table.runs_of(part)
            for index in range(start, stop)
        ]
        for part in range(table.parts)
    ]


def torch_chunks(indices: Sequence[int], count: int) -> list[list[int]]:
    """`torch.chunk`, with the parts it leaves out as empty ones."""
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.tensor(indices), count)]
    chunks = chunks if len(indices) else []
    return chunks + [[] for _ in range(count - len(chunks))]


@given(lengths, counts)
def test_ceil_is_torch_chunk(length: int, parts: int) -> None:
    assert indices_of(Ceil().table(length, parts)) == torch_chunks(range(length), parts)


@given(lengths, counts)
def test_ceil_is_the_ceildiv_of_mlir(length: int, parts: int) -> None:
    found = indices_of(Ceil().table(length, parts))
    width = -(-length // parts)
    for index in range(length):
        assert found[index // width][index % width] == index


@given(lengths, counts, st.integers(1, 8))
def test_ceil_in_units_cuts_whole_units(length: int, parts: int, unit: int) -> None:
    units = [list(range(i, min(i + unit, length))) for i in range(0, length, unit)]
    chunks = torch_chunks(range(len(units)), parts)
    expected = [[index for u in chunk for index in units[u]] for chunk in chunks]
    assert indices_of(Ceil(unit).table(length, parts)) == expected


@given(lengths, counts)
def test_balanced_is_numpy_array_split(length: int, parts: int) -> None:
    expected = [piece.tolist() for piece in np.array_split(np.arange(length), parts)]
    assert indices_of(Balanced().table(length, parts)) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_sizes_are_the_offsets_of_mlir(sizes: list[int]) -> None:
    offsets = [0, *itertools.accumulate(sizes)]
    expected = [list(range(a, b)) for a, b in itertools.pairwise(offsets)]
    for rule in (Sizes(tuple(sizes)), Sizes.from_offsets(offsets)):
        assert indices_of(rule.table(sum(sizes), len(sizes))) == expected


@given(lengths, st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_nested_is_a_chunk_of_a_chunk(length: int, outer: int, inner: int, third: int) -> None:
    rule = Nested(((Ceil(), outer), (Ceil(), inner), (Ceil(), third)))
    expected = [
        chunk
        for whole in torch_chunks(range(length), outer)
        for part in torch_chunks(whole, inner)
        for chunk in torch_chunks(part, third)
    ]
    assert indices_of(rule.table(length, outer * inner * third)) == expected


def test_six_over_two_by_two() -> None:
    nested = Nested(((Ceil(), 2), (Ceil(), 2)))
    assert nested.table(6, 4).local_lengths.tolist() == [2, 1, 2, 1]
    assert Ceil().table(6, 4).local_lengths.tolist() == [2, 2, 2, 0]
    assert Balanced().table(6, 4).local_lengths.tolist() == [2, 2, 1, 1]


@given(st.integers(1, 60), st.integers(1, 6), counts)
def test_strided_splits_as_dtensor_does(length: int, stride: int, parts: int) -> None:
    shards, _ = _StridedShard(0, split_factor=stride)._split_tensor(
        torch.arange(length), parts, with_padding=False
    )
    expected = [shard.tolist() for shard in shards]
    assert indices_of(Strided(stride).table(length, parts)) == expected


@given(st.integers(0, 6), st.integers(1, 5), counts)
def test_strided_is_megatrons_where_megatron_defines_it(
    width: int, stride: int, parts: int
) -> None:
    # Megatron cuts into `stride * parts` pieces and gives part `p` every `parts`-th from `p`.
    length = width * stride * parts
    pieces = [list(range(i * width, (i + 1) * width)) for i in range(stride * parts)]
    expected = [list(itertools.chain(*pieces[part::parts])) for part in range(parts)]
    rule = Strided(stride, local_lengths=(width * stride,) * parts)
    assert indices_of(rule.table(length, parts)) == expected


def test_a_stride_megatron_does_not_define_is_refused() -> None:
    with pytest.raises(RuleError, match=r"local lengths \[3, 3\] of stride 2 for length 6"):
        Strided(2, local_lengths=(3, 3)).table(6, 2)


def test_strided_equals_a_permuted_axis_order_only_where_lengths_agree() -> None:
    def strided(length: int, dp: int, tp: int) -> list[list[int]]:
        """Part (dp, tp) of DTensor's right-to-left sharding, written left to right."""
        rule = Nested(((Strided(tp), dp), (Ceil(), tp)))
        return indices_of(rule.table(length, dp * tp))

    def permuted(length: int, dp: int, tp: int) -> list[list[int]]:
        """The same parts, cut over tp first and over dp second."""
        found = indices_of(Nested(((Ceil(), tp), (Ceil(), dp))).table(length, dp * tp))
        return [found[t * dp + d] for d in range(dp) for t in range(tp)]

    assert strided(24, 2, 4) == permuted(24, 2, 4)
    assert strided(7, 3, 2) != permuted(7, 3, 2)


@given(st.lists(st.integers(0, 12), max_size=6), counts)
def test_blocks_are_cut_each_by_itself(sizes: list[int], parts: int) -> None:
    blocks = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]) if sizes else []
    for rule, cut in (
        (Ceil(), torch_chunks),
        (Balanced(), lambda block, n: [piece.tolist() for piece in np.array_split(block, n)]),
    ):
        expected: list[list[int]] = [[] for _ in range(parts)]
        for block in blocks:
            for part, piece in zip(expected, cut(block.tolist(), parts), strict=True):
                part += [int(i) for i in piece]
        table = Blocks(tuple(sizes), rule).table(sum(sizes), parts)
        assert indices_of(table) == expected


def test_joined_blocks_follow_their_own_rules() -> None:
    # Mamba's in_proj of 4 heads of 2 and 2 groups of 3 states: z, x, B, C, dt.
    rule = Joined((8, 8, 6, 6, 4), (Heads(4), Heads(4), Heads(2), Heads(2), Heads(4)))
    z, x, b, c, dt = (
        np.arange(32)[a:e].tolist() for a, e in itertools.pairwise((0, 8, 16, 22, 28, 32))
    )
    assert indices_of(rule.table(32, 2))[1] == z[4:] + x[4:] + b[3:] + c[3:] + dt[2:]
    # With more ranks than groups, those whose heads use a group hold it.
    assert indices_of(rule.table(32, 4))[1] == z[2:4] + x[2:4] + b[:3] + c[:3] + dt[1:2]
    assert indices_of(rule.table(32, 4))[2] == z[4:6] + x[4:6] + b[3:] + c[3:] + dt[2:3]


@given(st.lists(st.integers(0, 12), max_size=6), counts)
def test_blocks_joined_by_one_rule_are_blocks(sizes: list[int], parts: int) -> None:
    joined = Joined(tuple(sizes), (Balanced(),) * len(sizes))
    assert joined.table(sum(sizes), parts) is Blocks(tuple(sizes), Balanced()).table(
        sum(sizes), parts
    )


@given(st.lists(st.integers(0, 12), max_size=8), counts)
def test_whole_blocks_are_dealt_by_ceil(sizes: list[int], parts: int) -> None:
    offsets = [0, *itertools.accumulate(sizes)]
    expected = [
        [index for block in chunk for index in range(offsets[block], offsets[block + 1])]
        for chunk in torch_chunks(range(len(sizes)), parts)
    ]
    assert indices_of(WholeBlocks(tuple(sizes)).table(sum(sizes), parts)) == expected


def test_whole_blocks_are_dealt_by_counts() -> None:
    table = WholeBlocks((1, 2, 3), counts=(0, 2, 1)).table(6, 3)
    assert indices_of(table) == [[], [0, 1, 2], [3, 4, 5]]


@given(lengths, st.integers(1, 7), counts, st.integers(0, 8))
def test_block_cyclic_is_scalapacks(length: int, block: int, parts: int, first: int) -> None:
    first %= parts
    found = indices_of(BlockCyclic(block, first).table(length, parts))
    for index in range(length):
        part = (index // block + first) % parts
        assert found[part][index // (block * parts) * block + index % block] == index
    assert sum(map(len, found)) == length
    for part in range(parts):
        # NUMROC: the number of rows that a process has.
        distance = (part - first) % parts
        whole, extra = length // block // parts, length // block % parts
        rows = whole * block
        rows += block if distance < extra else length % block if distance == extra else 0
        assert len(found[part]) == rows


@given(lengths, counts)
def test_zigzag_is_megatrons_context_parallelism(length: int, parts: int) -> None:
    """Blocks as a list, the first with the last of what is left; in whole sizes as long as fit."""
    block = max(-(-length // (2 * parts)), 1)
    blocks = [list(range(length))[at * block : (at + 1) * block] for at in range(2 * parts)]
    expected = [blocks[part] + blocks[-1 - part] for part in range(parts)]
    assert indices_of(Zigzag().table(length, parts)) == expected


@given(st.integers(1, 200), st.sampled_from((1, 2, 8, 16)), st.sampled_from((1, 2, 4, 8)))
def test_padded_is_megatrons_vocabulary(vocabulary: int, divisible_by: int, tp: int) -> None:
    padded = vocabulary
    while padded % (divisible_by * tp):
        padded += 1
    each = padded // tp
    expected = [
        [i if i < vocabulary else -1 for i in range(rank * each, (rank + 1) * each)]
        for rank in range(tp)
    ]
    table = Padded(divisible_by).table(vocabulary, tp)
    assert indices_of(table) == expected
    assert table.element_lengths.sum() == vocabulary


def test_padding_beyond_the_first_empty_part() -> None:
    assert indices_of(Padded(4).table(3, 3)) == [[0, 1, 2, -1], [-1] * 4, [-1] * 4]


@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4, 16)))
def test_heads_are_placed_as_vllm_does(heads: int, head_size: int, tp: int) -> None:
    found = indices_of(Heads(heads).table(heads * head_size, tp))
    for rank in range(tp):
        if tp >= heads:
            first, own = rank // (tp // heads), 1
        else:
            first, own = rank * (heads // tp), heads // tp
        assert found[rank] == list(range(first * head_size, (first + own) * head_size))


def test_eight_ranks_over_four_heads_hold_each_twice() -> None:
    assert indices_of(Heads(4).table(4, 8)) == [[0], [0], [1], [1], [2], [2], [3], [3]]


def test_halos_are_copies_of_neighbours() -> None:
    table = Halo(1, 2).table(6, 3)
    assert indices_of(table) == [[0, 1, 2, 3], [1, 2, 3, 4, 5], [3, 4, 5]]
    assert [role for *_, role in table.runs_of(0)] == [0, 2]
    assert table.uncovered() == []


def test_padded_halos_are_equally_wide() -> None:
    table = Halo(1, 2, padded_edges=True).table(6, 3)
    assert indices_of(table) == [[-1, 0, 1, 2, 3], [1, 2, 3, 4, 5], [3, 4, 5, -1, -1]]


def test_windows_may_overlap_and_come_in_any_order() -> None:
    assert indices_of(Windows(((2, 6), (0, 4))).table(6, 2)) == [[2, 3, 4, 5], [0, 1, 2, 3]]


def test_pieces_of_blocks_are_a_parts_splits() -> None:
    rule = Pieces.from_splits([(2, 0, 1), (1, 3, 1)])
    assert indices_of(rule.table(8, 2)) == [[0, 1, 6], [2, 3, 4, 5, 7]]


def partitioned_shard_example() -> tuple[Layout, Layout]:
    """Four partitions over two shards, and the same aligned: shards [4,6,4,2] and [2,4,8,2]."""
    rule = Pieces.from_splits([(4, 6, 4, 2), (2, 4, 8, 2)])
    unaligned = Layout((32,), [rule.table(32, 2)], 2, [0, 1], [[0], [1]])
    sizes = tuple(sum(block) for block in rule.pieces)
    table = WholeBlocks(sizes).table(32, 2)
    return unaligned, Layout((32,), [table], 2, [0, 1], [[0], [1]])


def test_the_partitioned_shard_example_moves_twelve_elements_both_ways() -> None:
    unaligned, aligned = partitioned_shard_example()
    for source, target in ((unaligned, aligned), (aligned, unaligned)):
        there = plan(source, target)
        there.verify()
        assert there.moved_elements == there.lower_bound_elements == 12


def test_the_partitioned_shard_example_has_the_pieces_of_its_text() -> None:
    unaligned, aligned = partitioned_shard_example()
    sizes = {"P00": 4, "P10": 2, "P01": 6, "P11": 4, "P02": 4, "P12": 8, "P03": 2, "P13": 2}
    names = [name for name, size in sizes.items() for _ in range(size)]

    def pieces(layout: Layout, part: int) -> list[str]:
        indices = indices_of(layout.tables[0])[part]
        return [name for name, _ in itertools.groupby(names[i] for i in indices)]

    assert pieces(unaligned, 0) == ["P00", "P01", "P02", "P03"]
    assert pieces(unaligned, 1) == ["P10", "P11", "P12", "P13"]
    assert pieces(aligned, 0) == ["P00", "P10", "P01", "P11"]
    assert pieces(aligned, 1) == ["P02", "P12", "P03", "P13"]
    # What each rank sends, summed per receiver (what stays included).
    there = plan(unaligned, aligned)
    sent = np.zeros((2, 2), dtype=int)
    for row in range(len(there.transfers)):
        ends = there.transfers.source_slot[row], there.transfers.target_slot[row]
        sent[ends] += there.transfers.elements[row]
    assert sent.tolist() == [[10, 6], [6, 10]]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: Ceil(0), "unit 0 must be at least 1"),
        (lambda: Sizes((3, -1)), r"sizes \[3, -1\] must not be negative"),
        (lambda: Sizes((3, 1)).table(5, 2), r"\[3, 1\] add up to 4, but the length is 5"),
        (lambda: Sizes((3, 1)).table(4, 3), "2 sizes for 3 parts"),
        (lambda: Sizes.from_offsets((1, 2)), r"offsets \[1, 2\] must begin with 0"),
        (lambda: Sizes.from_offsets((0,)), r"offsets \[0\]"),
        (lambda: Sizes.from_offsets((0, 3, 2)), r"\[3, -1\] must not be negative"),
        (lambda: Windows(((2, 1),)), r"window \[2, 1\] must be \(start, stop\)"),
        (lambda: Windows(((-1, 1),)), r"window \[-1, 1\] must not be negative"),
        (lambda: Windows(((0, 4),)).table(4, 2), "1 windows for 2 parts"),
        (lambda: Windows(((0, 4), (2, 7))).table(6, 2), "window 2:7 reaches outside"),
        (lambda: Windows(((0, 2), (3, 6))).table(6, 2), "assigns indices 2:3 of 6"),
        (lambda: Heads(0), "heads 0"),
        (lambda: Heads(4).table(6, 2), "length 6 is not made of 4 equal heads"),
        (lambda: Strided(0), "stride 0"),
        (lambda: Blocks((4, -1)), r"blocks \[4, -1\]"),
        (lambda: Blocks((4, 1)).table(6, 2), r"\[4, 1\] add up to 5, but the length is 6"),
        (lambda: Blocks((4, 2), Sizes((3, 1))).table(6, 2), "add up to 4, but the length is 2"),
        (lambda: Grouped(0), "indices of a group"),
        (lambda: Grouped(2).table(7, 2), "7 is not made of groups of 2"),
        (lambda: Joined((4, -1), (Ceil(), Ceil())), r"blocks \[4, -1\]"),
        (lambda: Joined((4, 2), (Ceil(),)), "1 rules for 2 blocks; give one for each"),
        (lambda: Joined((4,), Ceil()), "give a list with a rule per block"),  # type: ignore[arg-type]
        (lambda: Joined((4,), (2,)), "2 is not a cut rule"),  # type: ignore[arg-type]
        (lambda: Joined((4, 2), (Ceil(), Ceil())).table(7, 2), r"\[4, 2\] add up to 6"),
        (lambda: Joined((4,), (Heads(3),)).table(4, 2), "4 is not made of 3 equal heads"),
        (lambda: Pieces(((4, -2),)), r"pieces \[4, -2\]"),
        (lambda: Pieces(((),)), "a block has no pieces"),
        (lambda: Pieces(((4, 2),)).table(6, 3), "2 pieces for 3 parts"),
        (lambda: Pieces(((4, 2), (1, 1))).table(6, 2), r"\[6, 2\] add up to 8"),
        (lambda: Pieces.from_splits([(1, 2), (3,)]), "must be equally many"),
        (lambda: WholeBlocks((4, -1)), r"blocks \[4, -1\]"),
        (lambda: WholeBlocks((4, 1)).table(6, 2), r"\[4, 1\] add up to 5"),
        (lambda: WholeBlocks((4, 1), counts=(1, 2)), r"\[1, 2\] add up to 3, but there are 2"),
        (lambda: WholeBlocks((4, 1), counts=(3, -1)), r"\[3, -1\] must not be negative"),
        (lambda: WholeBlocks((4, 2), counts=(2,)).table(6, 2), "1 block counts for 2 parts"),
        (lambda: BlockCyclic(0), "block 0"),
        (lambda: BlockCyclic(2, -1), "first part -1 must not be negative"),
        (lambda: BlockCyclic(2, 2).table(6, 2), "first part 2 of a cyclic split over 2 parts"),
        (lambda: Padded(0), "multiple 0"),
        (lambda: Halo(-1, 0), "halo -1 must not be negative"),
        (lambda: Halo(1, 1, rule=Strided(2)).table(8, 2), "`stride2` gives part 0 2 runs"),
        (lambda: Blocks((4, 2), 2), "2 is not a cut rule"),  # type: ignore[arg-type]
        (lambda: Halo(1, 1, rule="unit2"), "'unit2' is not a cut rule"),  # type: ignore[arg-type]
        (lambda: Nested(((Ceil(), 2), (Ceil(), 2))).table(6, 3), "4 parts in total"),
        (lambda: Nested(((Ceil(), 2), (Sizes((2, 1)), 2))).table(5, 4), "length is 2"),
    ],
)
def test_errors_of_rules_that_do_not_fit_name_the_reason(
    refused: Callable[[], object], message: str
) -> None:
    with pytest.raises(RuleError, match=message):
        refused()


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: Ceil(2.0), r"unit 2\.0 must be a whole number"),
        (lambda: Ceil("2"), "unit '2' must be a whole number"),
        (lambda: Ceil(True), "unit True must be a whole number"),
        (lambda: Ceil().table(7.9, 2), r"length of a dimension 7\.9"),
        (lambda: Ceil().table(8, 2.5), r"number of parts 2\.5"),
        (lambda: Ceil().table(8, 0), "number of parts 0 must be at least 1"),
        (lambda: Ceil().table(-1, 2), "length of a dimension -1"),
        (lambda: Ceil().table(2**62, 2), "must be at most"),
        (lambda: Sizes((3.5, 0.5)), r"sizes \[3\.5, 0\.5\] must be a list of whole numbers"),
        (lambda: Sizes("31"), "sizes '31' must be a list of whole numbers"),
        (lambda: Sizes(4), "sizes 4 must be a list of whole numbers"),
        (lambda: Sizes((2**62, 2**62, 2**62)), "must be at most"),
        (lambda: Sizes.from_offsets((0, 1.5)), r"offsets \[0, 1\.5\]"),
        (lambda: Windows(((0, 2.5),)), r"window \[0, 2\.5\]"),
        (lambda: Windows((4,)), "window 4 must be a list of whole numbers"),
        (lambda: Windows(4), "window 4 must be a list of lists"),
        (lambda: Windows(((0, 1, 2),)), r"window \[0, 1, 2\] must be \(start, stop\)"),
        (lambda: Heads(4.0), r"heads 4\.0"),
        (lambda: Padded(1.5), r"multiple 1\.5"),
        (lambda: Padded(2**70), "multiple .* must be at most"),
        (lambda: Halo(1, 0.5), r"halo 0\.5"),
        (lambda: Strided(2.0), r"stride 2\.0"),
        (lambda: Strided(2, (2.0,)), r"local lengths \[2\.0\]"),
        (lambda: Blocks((True, 2)), r"blocks \[True, 2\]"),
        (lambda: Pieces(((1.5,),)), r"pieces \[1\.5\]"),
        (lambda: Pieces(3), "pieces 3 must be a list of lists"),
        (lambda: WholeBlocks((2.5,)), r"blocks \[2\.5\]"),
        (lambda: WholeBlocks((2, 2), (1.0, 1.0)), r"block counts \[1\.0, 1\.0\]"),
        (lambda: BlockCyclic(2.5), r"block 2\.5"),
        (lambda: BlockCyclic(2, 0.5), r"first part 0\.5"),
    ],
)
def test_the_numbers_of_a_rule_are_whole_numbers(
    refused: Callable[[], object], message: str
) -> None:
    with pytest.raises(RuleError, match=message):
        refused()


def test_lists_and_integers_of_numpy_make_the_same_rules() -> None:
    assert Sizes([3, 1]) == Sizes(np.array([3, 1])) == Sizes((3, 1))  # type: ignore[arg-type]
    assert hash(Sizes([3, 1])) == hash(Sizes((3, 1)))  # type: ignore[arg-type]
    assert Pieces(np.array([[4, 2], [1, 1]])).text == "pieces[4:2,1:1]"  # type: ignore[arg-type]
    assert Ceil(np.int32(2)).table(np.int64(5), np.uint8(2)) is Ceil(2).table(5, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rule", [Ceil(), Balanced(), Strided(3), BlockCyclic(2), Zigzag(), Padded(4)]
)
def test_a_dimension_of_no_indices_is_cut_too(rule: CutRule) -> None:
    table = rule.table(0, 3)
    assert table.element_lengths.tolist() == [0, 0, 0]
    assert table.uncovered() == []


@given(st.data())
def test_every_rule_reads_back(data: st.DataObject) -> None:
    rule = data.draw(rules([data.draw(st.integers(0, 12))], data.draw(st.integers(1, 5))))
    assert parse_rule(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", Ceil()),
        ("ceil", Ceil()),
        ("unit64", Ceil(64)),
        ("unit1", Ceil()),
        ("balanced", Balanced()),
        ("sizes[3,1]", Sizes((3, 1))),
        ("sizes[ 3, 1 ]", Sizes((3, 1))),
        ("windows[0:4,2:6]", Windows(((0, 4), (2, 6)))),
        ("heads8", Heads(8)),
        ("stride2", Strided(2)),
        ("stride2[4,2]", Strided(2, (4, 2))),
        ("blocks[16,8,4]", Blocks((16, 8, 4))),
        ("blocks[]", Blocks(())),
        ("balanced@blocks[6,2]", Blocks((6, 2), Balanced())),
        ("stride2@blocks[6,2]", Blocks((6, 2), Strided(2))),
        ("joined[6@heads3,2]", Joined((6, 2), (Heads(3), Ceil()))),
        ("groups2", Grouped(2)),
        ("unit32@groups2", Grouped(2, Ceil(32))),
        ("groups2@blocks[6,2]", Blocks((6, 2), Grouped(2))),
        ("joined[]", Joined((), ())),
        (
            "joined[ 6@sizes[3, 3], 4@balanced@blocks[2,2] ]",
            Joined((6, 4), (Sizes((3, 3)), Blocks((2, 2), Balanced()))),
        ),
        ("pieces[4:2,6:4]", Pieces(((4, 2), (6, 4)))),
        ("whole[4,6,4]", WholeBlocks((4, 6, 4))),
        ("whole[4,6,4;1,2]", WholeBlocks((4, 6, 4), (1, 2))),
        ("cyclic16", BlockCyclic(16)),
        ("cyclic16+1", BlockCyclic(16, 1)),
        ("zigzag", Zigzag()),
        ("pad", Padded()),
        ("pad128", Padded(128)),
        ("halo[1,2]", Halo(1, 2)),
        ("halo[1,1,fresh]", Halo(1, 1, fresh=True)),
        ("halo[1,1,padded,fresh]", Halo(1, 1, fresh=True, padded_edges=True)),
        ("heads4@halo[1,0]", Halo(1, 0, rule=Heads(4))),
    ],
)
def test_a_text_means_its_rule(text: str, rule: CutRule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spiral", "unknown cut rule 'spiral' in 'spiral'; the rules are ceil, unit, balanced"),
        ("Stride2", "unknown cut rule 'Stride2'"),
        ("stride2@", "unknown cut rule ''"),
        ("stride", "cannot read the cut rule 'stride'; write stride2"),
        ("stride2+1", r"cannot read the cut rule 'stride2\+1'"),
        ("balanced2", "cannot read the cut rule 'balanced2'; write balanced"),
        ("unit", "cannot read the cut rule 'unit'"),
        ("sizes", "cannot read the cut rule 'sizes'"),
        ("sizes2[3,1]", "cannot read the cut rule 'sizes2"),
        ("sizes[3,x]", r"cannot read the cut rule 'sizes\[3,x\]'"),
        ("sizes[3,]", "cannot read the cut rule"),
        ("windows[4]", "cannot read the cut rule 'windows"),
        ("windows[1:2:3]", "cannot read the cut rule 'windows"),
        ("pieces[4:x]", "cannot read the cut rule 'pieces"),
        ("joined", "cannot read the cut rule 'joined'; write joined"),
        ("groups", "cannot read the cut rule 'groups'; write groups2"),
        ("groups[2]", "cannot read the cut rule"),
        ("joined[heads3@6]", "cannot read the cut rule"),
        ("joined[6@]", "cannot read the cut rule"),
        ("joined[6@spiral]", "unknown cut rule 'spiral'"),
        ("balanced@joined[6]", "cannot wrap another rule"),
        ("whole", "cannot read the cut rule 'whole'"),
        ("cyclic", "cannot read the cut rule 'cyclic'"),
        ("cyclic4[1]", "cannot read the cut rule"),
        ("halo[1]", r"cannot read the cut rule 'halo\[1\]'; write halo\[1,1\]"),
        ("halo[1,1,stale]", "cannot read the cut rule"),
        ("halo[1,1,fresh,fresh]", "cannot read the cut rule"),
        ("halo", "cannot read the cut rule 'halo'"),
        ("balanced@stride2", "'stride2' in 'balanced@stride2' cannot wrap another rule"),
    ],
)
def test_errors_of_unreadable_rules_show_their_form(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_rule(text)


@pytest.mark.parametrize("text", ["stride0", "sizes[-1,2]", "windows[4:2]", "unit0", "halo[-1,0]"])
def test_invalid_numbers_are_errors_of_the_rule(text: str) -> None:
    with pytest.raises(RuleError):
        parse_rule(text)


@given(st.text(alphabet="stridehaloblockspieces@[]+;:,0123", max_size=14))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        rule = parse_rule(text)
    except LayoutError:
        return
    assert parse_rule(rule.text) == rule


class Counted(CutRule):
    """Cuts by ceil, and counts how often it does."""

    name: ClassVar[str] = "counted"
    cuts: ClassVar[list[int]] = []

    def _cut(self, length: int, parts: int) -> RunTable:
        self.cuts.append(length)
        return Ceil().table(length, parts)


def test_a_table_in_use_is_not_built_again() -> None:
    tables = [Counted().table(6, 2), Counted().table(6, 2), Counted().table(8, 2)]
    assert tables[0] is tables[1] is not tables[2] and Counted.cuts == [6, 8]
