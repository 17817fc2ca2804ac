"""Tensors of a source that are declared to be one, and are two.

`ties=` fills a target from the tensor of another name. Where the source has a tensor of each name,
as after `copy.deepcopy` of one or in an optimizer that updates both, their elements must be equal:
those of the name that nothing is filled from would be lost.

Where one rank has the same part of both, it compares them directly. Where they are on different
ranks, as the embedding of the first pipeline stage and the head of the last, each rank computes a
checksum of each box that it has, and all ranks compare those of the same boxes::

    rank 0    embed 0:4  ->  checksum  --+
    rank 3    head 0:4   ->  checksum  --+->  gathered, and equal?
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from reshard.errors import RunError
from reshard.layout import Layout
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import cells_of
from reshard.torch.models.naming import tied_root

Pairs = tuple[tuple[str, str], ...]
# Words of 8 bytes that a checksum takes at once.
_CHUNK_WORDS = 1 << 20
_FACTOR = -7046029254386353131  # 2^64 over the golden ratio, which is odd.


class DistantPair(NamedTuple):
    """An unused and a used name of one tied tensor, which different ranks have."""

    name: str
    other: str
    layout: Layout
    other_layout: Layout


def find_tied_pairs(
    ties: Mapping[str, str], locals_of: Mapping[str, torch.Tensor], used: Collection[str]
) -> Pairs:
    """Return pairs of an unused and a used name of one tied tensor, which this rank has apart.

    Args:
        ties: names that refer to the same tensor as another name.
        locals_of: this rank's parts of the source.
        used: names that targets are filled from, on any rank.

    >>> here = torch.zeros(2)
    >>> find_tied_pairs({"head": "embed"}, {"embed": here, "head": torch.ones(2)}, {"embed"})
    (('head', 'embed'),)
    >>> find_tied_pairs({"head": "embed"}, {"embed": here, "head": here}, {"embed"})
    ()
    """
    used_roots = {tied_root(name, ties): name for name in used if name in locals_of}
    pairs = []
    for name, local in locals_of.items():
        other = used_roots.get(tied_root(name, ties))
        if other is None or name in used:
            continue
        # Parts of other shapes are of another sharding: what they share is not on this rank.
        if local.shape == locals_of[other].shape and not _share_memory(local, locals_of[other]):
            pairs.append((name, other))
    return tuple(pairs)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


def find_difference(pairs: Iterable[tuple[str, str]], locals_of: Mapping[str, torch.Tensor]) -> str:
    """Return which tied tensors differ on this rank and what to do, or an empty text."""
    for name, other in pairs:
        one, two = locals_of[name], locals_of[other]
        if one.dtype != two.dtype or not torch.equal(_bytes_of(one), _bytes_of(two)):
            return _describe_difference(name, other)
    return ""


def _describe_difference(name: str, other: str) -> str:
    return (
        f"{name} of the source differs from {other}, to which ties= declares it tied: its elements "
        f"would be lost; tie them again (model.tie_weights()), or leave {name!r} out of ties="
    )


def find_distant_pairs(
    ties: Mapping[str, str],
    layouts: Mapping[str, Layout],
    used: Collection[str],
    shared: Collection[str] = (),
) -> tuple[DistantPair, ...]:
    """Return the tied tensors of a source of which different ranks have equal boxes.

    Args:
        ties: names that refer to the same tensor as another name.
        layouts: of the source's tensors.
        used: names that targets are filled from.
        shared: names of tensors that are another tensor's memory.

    >>> first, last = Layout.whole((4,), [0], 2), Layout.whole((4,), [1], 2)
    >>> layouts = {"embed": first, "head": last}
    >>> [pair[:2] for pair in find_distant_pairs({"head": "embed"}, layouts, {"embed"})]
    [('head', 'embed')]
    """
    used_roots = {tied_root(name, ties): name for name in used if name in layouts} if ties else {}
    pairs = []
    for name in {*ties, *ties.values()} & layouts.keys() if used_roots else ():
        other = used_roots.get(tied_root(name, ties))
        if other is None or name in used or name in shared:
            continue
        pair = DistantPair(name, other, layouts[name], layouts[other])
        both = pair.layout, pair.other_layout
        is_distant = {*both[0].holders} != {*both[1].holders}
        if is_distant and max(one.contributions for one in both) == 1:
            boxes = [{str(box) for rank in one.holders for box in one.boxes(rank)} for one in both]
            if both[0].shape == both[1].shape and boxes[0] == boxes[1]:
                pairs.append(pair)
    return tuple(sorted(pairs, key=lambda pair: pair.name))


def compare_distant(
    pairs: Sequence[DistantPair], locals_of: Mapping[str, torch.Tensor], group: RankGroup
) -> None:
    """Compare tied tensors that different ranks have. All ranks call this.

    Raises:
        RunError: on every rank, tensors that differ.
    """
    own: list[dict[str, int]] = []
    for pair in pairs:
        for name, layout in ((pair.name, pair.layout), (pair.other, pair.other_layout)):
            cells = cells_of(layout, group.rank, locals_of.get(name))
            boxes = layout.boxes(group.rank) if cells else ()
            own.append(
                {
                    str(box): compute_checksum(cell)
                    for box, cell in zip(boxes, cells.values(), strict=True)
                }
            )
    message = json.dumps(own).encode() if any(own) else b""
    found = gather(message, group).values
    sums = [json.loads(text) for text in dict.fromkeys(found.values()) if text]
    for number, pair in enumerate(pairs):
        seen: dict[str, int] = {}
        for of_rank in sums:
            for side in of_rank[2 * number : 2 * number + 2]:
                if any(seen.setdefault(box, value) != value for box, value in side.items()):
                    problem = _describe_difference(pair.name, pair.other)
                    group.raise_on_all(RunError(f"nothing was moved: {problem}"))


def compute_checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of all bytes of a tensor, on its own device.

    Any change of a single word changes it, and others do all but surely.

    >>> value = torch.arange(5)
    >>> compute_checksum(value) == compute_checksum(value.clone())
    True
    >>> compute_checksum(value) == compute_checksum(value.flip(0))
    False
    """
    data = _bytes_of(tensor.detach())
    whole = data[: len(data) // 8 * 8]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    words = whole.view(torch.int64)
    factors = torch.arange(min(len(words), _CHUNK_WORDS), device=tensor.device) * 2 + 1
    factors *= _FACTOR
    total = len(data)
    for at in range(0, len(words), _CHUNK_WORDS):
        chunk = words[at : at + _CHUNK_WORDS]
        total = (total * _FACTOR + int((chunk * factors[: len(chunk)]).sum())) % (1 << 64)
    for byte in data[len(words) * 8 :].tolist():
        total = (total * _FACTOR + byte) % (1 << 64)
    return total


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, a NaN is equal to itself.
    return tensor.contiguous().reshape(-1).view(torch.uint8)
