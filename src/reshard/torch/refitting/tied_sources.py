"""Tied source tensors that are stored separately.

`ties=` fills a target from the tensor of another name. If the source has a separate tensor for each
name, as after a `copy.deepcopy` or with an optimizer that updates both, their elements must be
equal: otherwise the elements of the unused name would be lost.

If both have the same sharding, each rank compares its own parts. Otherwise, as for the embedding of
the first pipeline stage and the head of the last, all ranks compare checksums of the whole tensors.
A checksum is the sum, modulo 2**64, of all words of a tensor, each times a factor that depends on
its position, so each rank can compute the sum of its own parts, whatever the sharding. Among
replicas, only the first rank's are counted::

    embed over rows        rank 0   rows 0:2   ->  sum   --+
                           rank 1   rows 2:4   ->  sum   --+->  total  --+
                                                                         +-- equal?
    head over columns      rank 2   cols 0:3   ->  sum   --+->  total  --+
                           rank 3   cols 3:6   ->  sum   --+
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.errors import RunError
from reshard.layout import Layout
from reshard.megatron.names import resolve_tie
from reshard.runs import OWNED, IntArray, RunTable
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import cells_of, view_bytes

Pairs = tuple[tuple[str, str], ...]
# The number of 8-byte words that a checksum processes at once.
_CHUNK_WORDS = 1 << 20
# The finalizer of SplitMix64, which maps consecutive numbers to unrelated numbers.
_STEP, _FIRST_MIX, _SECOND_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class DistantPair(NamedTuple):
    """An unused and a used name of a tied tensor, whose tensors have different shardings.

    `unlike` describes a difference found in the plan, or is empty; `uncompared` is the reason why
    the tensors cannot be compared, or is empty.
    """

    name: str
    other: str
    layout: Layout
    other_layout: Layout
    unlike: str = ""
    uncompared: str = ""


def find_tied_pairs(
    ties: Mapping[str, str],
    locals_of: Mapping[str, torch.Tensor],
    used: Collection[str],
    distant: Collection[str] = (),
) -> Pairs:
    """Return pairs of an unused and a used name of a tied tensor that this rank stores separately.

    Args:
        ties: names that refer to the same tensor as another name.
        locals_of: this rank's parts of the source.
        used: names that targets are filled from, on any rank.
        distant: names of tensors that all ranks compare (`find_distant_pairs`).

    >>> here = torch.zeros(2)
    >>> find_tied_pairs({"head": "embed"}, {"embed": here, "head": torch.ones(2)}, {"embed"})
    (('head', 'embed'),)
    >>> find_tied_pairs({"head": "embed"}, {"embed": here, "head": here}, {"embed"})
    ()
    """
    used_roots = {resolve_tie(name, ties): name for name in used if name in locals_of}
    pairs = []
    for name, local in locals_of.items():
        other = used_roots.get(resolve_tie(name, ties))
        if other is None or name in used or name in distant:
            continue
        if local.shape == locals_of[other].shape and not _share_memory(local, locals_of[other]):
            pairs.append((name, other))
    return tuple(pairs)


def _share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride())


def find_difference(pairs: Iterable[tuple[str, str]], locals_of: Mapping[str, torch.Tensor]) -> str:
    """Return which tied tensors differ on this rank and what to do, or an empty text."""
    for name, other in pairs:
        local, tied = locals_of[name], locals_of[other]
        # Compared as bytes, a NaN equals itself.
        if local.dtype != tied.dtype or not torch.equal(view_bytes(local), view_bytes(tied)):
            return _describe_difference(name, other)
    return ""


def _describe_difference(name: str, other: str, unlike: str = "") -> str:
    return (
        f"{name} of the source differs from {other}"
        + (f" ({unlike})" if unlike else "")
        + ", to which ties= declares it tied: its elements would be lost; tie them again "
        f"(model.tie_weights()), or leave {name!r} out of ties="
    )


def find_distant_pairs(
    ties: Mapping[str, str],
    source: Mapping[str, tuple[Layout, str]],
    used: Collection[str],
    shared: Collection[str] = (),
) -> tuple[DistantPair, ...]:
    """Return the tied tensors of a source that no rank can compare by itself.

    Args:
        ties: names that refer to the same tensor as another name.
        source: layouts and types of the source's tensors.
        used: names that targets are filled from.
        shared: names of tensors that share another tensor's memory.

    >>> first, last = Layout.whole((4,), [0], 2), Layout.whole((4,), [1], 2)
    >>> source = {"embed": (first, "int8"), "head": (last, "int8")}
    >>> [pair[:2] for pair in find_distant_pairs({"head": "embed"}, source, {"embed"})]
    [('head', 'embed')]
    """
    used_roots = {resolve_tie(name, ties): name for name in used if name in source} if ties else {}
    pairs = []
    for name in sorted({*ties, *ties.values()} & source.keys() if used_roots else ()):
        other = used_roots.get(resolve_tie(name, ties))
        if other is None or name in used or name in shared:
            continue
        (layout, dtype), (other_layout, other_dtype) = source[name], source[other]
        unlike = uncompared = ""
        if dtype != other_dtype:
            unlike = f"{dtype} and {other_dtype}"
        elif layout.shape != other_layout.shape:
            unlike = f"shapes {list(layout.shape)} and {list(other_layout.shape)}"
        elif layout is other_layout:
            continue
        elif max(layout.contributions, other_layout.contributions) > 1:
            uncompared = "ranks have terms of a sum"
        elif not all(map(_is_tiled, (layout, other_layout))):
            uncompared = "ranks have parts that overlap without being equal"
        pairs.append(DistantPair(name, other, layout, other_layout, unlike, uncompared))
    return tuple(pairs)


def describe_uncompared(pairs: Iterable[DistantPair]) -> str:
    """Return which tied tensors of the source are not compared and why, or an empty text."""
    return "; ".join(
        f"{pair.name} of the source was not compared with {pair.other}, to which ties= declares it "
        f"tied ({pair.uncompared}): the target has the elements of {pair.other}"
        for pair in pairs
        if pair.uncompared
    )


def compare_distant(
    pairs: Sequence[DistantPair], locals_of: Mapping[str, torch.Tensor], group: RankGroup
) -> None:
    """Compare tied tensors by checksums of all their elements. All ranks call this.

    Raises:
        RunError: on every rank, tensors that differ.
    """
    for pair in pairs:
        if pair.unlike:
            _raise_difference(pair, group)
    compared = [pair for pair in pairs if not pair.uncompared]
    if not compared:
        return
    own: list[int] = []
    problem = ""
    try:
        for pair in compared:
            layouts = {pair.name: pair.layout, pair.other: pair.other_layout}
            own += [
                compute_checksum(layout, group.rank, locals_of.get(name), [*layouts.values()])
                for name, layout in layouts.items()
            ]
    except RuntimeError as error:
        # The error is collected, since the other ranks wait for this rank.
        problem = f"rank {group.rank} cannot compare tied tensors: {error}"
    # Ranks without a part of these tensors send nothing.
    message = problem or (json.dumps(own) if any(own) else "")
    sums = [0] * (2 * len(compared))
    for data in gather(message.encode(), group).values():
        text = data.decode()
        if text and not text.startswith("["):
            group.raise_on_all(RunError(f"nothing was moved: {text}"))
        for number, value in enumerate(json.loads(text) if text else ()):
            sums[number] = (sums[number] + value) % (1 << 64)
    for number, pair in enumerate(compared):
        if sums[2 * number] != sums[2 * number + 1]:
            _raise_difference(pair, group)


def _raise_difference(pair: DistantPair, group: RankGroup) -> NoReturn:
    problem = _describe_difference(pair.name, pair.other, pair.unlike)
    group.raise_on_all(RunError(f"nothing was moved: {problem}"))


def _is_tiled(layout: Layout) -> bool:
    """Return whether each element belongs to a single part, which ranks may replicate."""
    lengths = [
        np.array([_owned(table, part).size for part in range(table.parts)])
        for table in layout.tables
    ]
    counted = layout.cell_part[_list_first_cells(layout)]
    held = math.prod((column[counted[:, d]] for d, column in enumerate(lengths)), start=1)
    total = int(np.sum(held)) if layout.ndim else len(counted)
    return total == math.prod(layout.shape)


def _list_first_cells(layout: Layout) -> list[int]:
    """Return the first of the cells that own the same elements, for each set of elements."""
    owned = [
        [_owned(table, part).tobytes() for part in range(table.parts)] for table in layout.tables
    ]
    seen: dict[tuple[bytes, ...], int] = {}
    for cell, parts in enumerate(layout.cell_part.tolist()):
        seen.setdefault(tuple(owned[d][part] for d, part in enumerate(parts)), cell)
    return [*seen.values()]


def _owned(table: RunTable, part: int) -> IntArray:
    """Return the indices that a part owns, in the order of its memory."""
    runs = [(start, stop) for start, stop, _, role in table.runs_of(part) if role == OWNED]
    return np.concatenate([np.arange(*run) for run in runs] or [np.arange(0)])


def compute_checksum(
    layout: Layout, rank: int, local: torch.Tensor | None, layouts: Sequence[Layout]
) -> int:
    """Return this rank's part of the checksum of a tensor, computed on the tensor's device.

    Add the parts of other ranks to it, modulo 2**64. A change of a single word always changes the
    total; any other change is missed with a probability of 1 in 2**64.

    Args:
        layout: of the tensor.
        rank: this rank.
        local: this rank's part, or None if absent.
        layouts: of all tensors whose checksums are compared.

    >>> whole, halves = Layout.whole((4,), [0], 2), Layout.flat_ranges((4,), {0: (0, 2), 1: (2, 4)})
    >>> value, layouts = torch.arange(4), [whole, halves]
    >>> total = compute_checksum(whole, 0, value, layouts)
    >>> parts = [compute_checksum(halves, rank, value.chunk(2)[rank], layouts) for rank in (0, 1)]
    >>> total == sum(parts) % (1 << 64)
    True
    """
    counted = {*_list_first_cells(layout)}
    total = 0
    for number, cell in cells_of(layout, rank, local).items():
        if number in counted and cell.numel():
            word_bytes = _word_bytes(cell.element_size(), layouts)
            total += _sum_words(cell, layout, number, word_bytes)
    return total % (1 << 64)


def _word_bytes(itemsize_bytes: int, layouts: Iterable[Layout]) -> int:
    """Return the word size, which divides every run of the last dimension: at most 8 bytes."""
    divisor = 0
    for layout in layouts:
        if not layout.ndim:
            return math.gcd(itemsize_bytes, 8)
        single = layout.tables[-1].single_runs()
        columns = (single.start, single.length, single.local_start)
        divisor = math.gcd(divisor, layout.shape[-1], *(int(n) for c in columns for n in c))
        divisor = math.gcd(divisor, *layout.cell_shape[:, -1].tolist())
    return math.gcd(divisor * itemsize_bytes, 8)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_words(cell: torch.Tensor, layout: Layout, number: int, word_bytes: int) -> int:
    """Return the sum of all words of a cell, times the factors of their positions."""
    itemsize_bytes, device = cell.element_size(), cell.device
    data = view_bytes(cell)
    # PyTorch views elements as wider ones only from a multiple of their size on.
    if data.storage_offset() % word_bytes:
        data = data.clone()
    parts = layout.cell_part[number].tolist()
    sizes = [(1, 1)] * (layout.ndim - 1) + [(itemsize_bytes, word_bytes)]
    factors = [
        _factors_of(table, part, d, *sizes[d])
        for d, (table, part) in enumerate(zip(layout.tables, parts, strict=True))
    ]
    # A scalar has a single element.
    last = factors.pop() if factors else _mix(np.arange(itemsize_bytes // word_bytes), 0)
    rows = np.ones(1, np.uint64)
    for factor in factors:
        rows = (rows[:, None] * factor).reshape(-1)
    words = data.view(_WORDS[word_bytes]).view(len(rows), len(last))
    # PyTorch supports uint64 only in part; int64 wraps around to the same bits.
    by_row, by_column = (torch.from_numpy(f.view(np.int64)).to(device) for f in (rows, last))
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = max(_CHUNK_WORDS // len(last), 1)
    for row in range(0, len(rows), step):
        for column in range(0, len(last), _CHUNK_WORDS):
            chunk = words[row : row + step, column : column + _CHUNK_WORDS].to(torch.int64)
            sums = (chunk * by_column[column : column + _CHUNK_WORDS]).sum(1)
            total += (sums * by_row[row : row + step]).sum()
    return int(total)


def _factors_of(
    table: RunTable, part: int, dimension: int, unit: int, word: int
) -> NDArray[np.uint64]:
    """Return the factors along a dimension of a part: zeros for elements that it does not own.

    Each position has `unit` bytes, and each factor belongs to `word` bytes.
    """
    factors = np.zeros(int(table.local_lengths[part]) * unit // word, np.uint64)
    for start, stop, local_start, role in table.runs_of(part):
        if role == OWNED:
            first, last, at = (n * unit // word for n in (start, stop, local_start))
            factors[at : at + last - first] = _mix(np.arange(first, last), dimension)
    return factors


def _mix(positions: IntArray, dimension: int) -> NDArray[np.uint64]:
    """Return an odd factor for each position along a dimension."""
    mixed = (positions.astype(np.uint64) + np.uint64(dimension << 48)) * np.uint64(_STEP)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST_MIX)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_MIX)
    # Odd numbers are invertible modulo 2**64: a change of a single word always changes the sum.
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
