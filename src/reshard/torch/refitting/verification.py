"""Comparison of values between ranks, by digests.

`verify_part` compares the target with the source after a run, without sending it again. Sender and
receiver know which elements of a tensor were sent. Each computes a digest of its own elements, in
the dtype in which they were sent, and the receiver compares them: 16 bytes for each tensor between
two ranks, whatever its size::

    sender     up.weight 0:4 of rank 2's  ->  digest  ----->  equal?  <-  digest of 0:4  receiver

Elements that a rank copies from itself are compared directly. Results of transforms, contributions
that are combined, and tensors moved by programs of collectives are not compared.

`check_replicas` compares the parts that several ranks have by their layouts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.runs import find_distinct
from reshard.text import first_lines
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import (
    LocalCopy,
    Piece,
    PiecesByPair,
    RankTransfers,
    cells_of,
    list_pieces,
)
from reshard.torch.models.local_tensors import tensor_digest
from reshard.torch.refitting.plan import PartItem, RefitPart

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification on a rank.

    Attributes:
        differences: tensors whose elements on this rank differ from the source's, with the sender.
        compared_bytes: the size of the compared elements, as they were sent.
        left_out: names of tensors that cannot be compared.
    """

    differences: tuple[str, ...]
    compared_bytes: int
    left_out: tuple[str, ...]


def verify_part(
    part: RefitPart,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    group: RankGroup,
) -> Verification:
    """Compare this rank's part of the target with the source. Collective.

    All ranks of the group call this. `source` and `target` are local tensors by name. Raises
    RunError if a rank does not answer.
    """
    sent: dict[int, list[bytes]] = {}
    received: dict[int, list[tuple[str, bytes]]] = {}
    differences, left_out, compared_bytes = list[str](), list[str](), 0
    for item in part.items:
        name = item.match.name
        if not _is_comparable(item):
            left_out.append(name)
            continue
        outgoing, incoming, local = _list_pieces(item, source, target, group.rank)
        for (_, peer), of in outgoing.items():
            sent.setdefault(peer, []).append(_digest(of))
        for (_, peer), of in incoming.items():
            received.setdefault(peer, []).append((name, _digest(of)))
            compared_bytes += sum(piece.size_bytes for piece in of)
        for copy in local.get(0, ()):
            compared_bytes += copy.target.nbytes
            if not _has_same_bits(copy.target, copy.source.to(copy.target.dtype)):
                differences.append(f"{name} (of this rank's own source)")
    theirs = _exchange_digests(sent, {peer: len(of) for peer, of in received.items()}, group)
    for peer, named in received.items():
        for (name, digest), expected in zip(named, theirs[peer], strict=True):
            if digest != expected:
                differences.append(f"{name} (from rank {peer})")
    return Verification(tuple(differences), compared_bytes, tuple(left_out))


def _is_comparable(item: PartItem) -> bool:
    is_plain = not item.match.is_transformed and item.chosen.program is None
    return is_plain and item.change.source.reduction is None


def _list_pieces(
    item: PartItem,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    rank: int,
) -> tuple[PiecesByPair, PiecesByPair, dict[int, list[LocalCopy]]]:
    match, travels = item.match, getattr(torch, as_dtype(item.match.dtype).name)
    before, after = match.source_view(source, rank), match.target_view(target, rank)
    stages = []
    # A forwarded tensor is compared with the rank that it was forwarded from.
    for change, rows in item.stages:
        stages.append(RankTransfers.of(change, rows, rank, before, after, travels))
        before = after
    return list_pieces(stages, rank)


def _digest(pieces: Iterable[Piece]) -> bytes:
    """Return the digest of pieces, in the dtype in which they are sent."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for data in _bytes_of(pieces):
        hasher.update(data)
    return hasher.digest()


def _bytes_of(pieces: Iterable[Piece]) -> Iterator[Any]:
    for piece in pieces:
        # The narrower of both types is sent, and its elements are exact in a wider target.
        dense = piece.view.detach().to(piece.dtype).contiguous().flatten()
        yield dense.view(torch.uint8).cpu().numpy()


def _has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    pair = [side.detach().contiguous().flatten().view(torch.uint8) for side in (first, second)]
    return bool(torch.equal(*pair))


def _exchange_digests(
    sent: Mapping[int, list[bytes]], expected: Mapping[int, int], group: RankGroup
) -> dict[int, list[bytes]]:
    """Send receivers the digests of what they were sent; return the received digests."""
    outgoing = {peer: b"".join(of) for peer, of in sent.items()}
    expected_bytes = {peer: count * _DIGEST_BYTES for peer, count in expected.items()}
    with group.errors("nothing was compared"):
        received = group.swap_bytes(outgoing, expected_bytes)
    digests = {}
    for peer, text in received.items():
        digests[peer] = [text[i : i + _DIGEST_BYTES] for i in range(0, len(text), _DIGEST_BYTES)]
    return digests


_SHOWN = 20


def check_replicas(
    items: Iterable[PartItem],
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    group: RankGroup,
) -> None:
    """Compare the parts of tensors that several ranks have. Collective.

    Args:
        items: this rank's part of the plan.
        source, target: this rank's local tensors by name.
        group: of all ranks.

    Raises ShardError, on all ranks, if replicas differ.
    """
    digests: dict[str, str] = {}
    for item in items:
        match = item.match
        sides = [("source", match.source, match.source_view(source, group.rank))]
        # A transform's output has its own layout.
        if not match.made_at:
            sides.append(("target", match.target, match.target_view(target, group.rank)))
        for side, layout, local in sides:
            for key, digest in _describe_cells(layout, group.rank, local):
                digests[f"{match.name} of the {side}, {key}"] = digest
    messages = gather(json.dumps(digests).encode(), group)
    by_key: dict[str, dict[str, int]] = {}
    for rank, text in messages.items():
        for key, digest in json.loads(text).items():
            by_key.setdefault(key, {}).setdefault(digest, rank)
    wrong = [
        f"{key}: {' and '.join(f'rank {rank}' for rank in list(ranks.values())[:2])} differ"
        for key, ranks in by_key.items()
        if len(ranks) > 1
    ]
    if wrong:
        told = first_lines(wrong, _SHOWN)
        group.raise_on_all(
            ShardError(f"{len(wrong)} replicas are not equal; whose values count?{told}")
        )


def _describe_cells(
    layout: Layout, rank: int, local: torch.Tensor | None
) -> Iterator[tuple[str, str]]:
    """Yield each part that other ranks also have, with its digest."""
    shared = _find_shared_cells(layout)
    for cell, tensor in cells_of(layout, rank, local).items():
        if shared[cell]:
            part = ", ".join(map(str, layout.cell_part[cell].tolist()))
            yield f"part ({part})", tensor_digest(tensor)


@lru_cache(maxsize=1024)
def _find_shared_cells(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each cell's part is also on another rank: shape `(cells,)`."""
    if layout.contributions > 1 or not layout.ndim:
        # Partial sums differ between ranks; a scalar without them is whole on all ranks.
        return np.full(layout.cells, layout.contributions == 1 < layout.cells)
    _, _, which = find_distinct(layout.cell_part)
    return np.asarray(np.bincount(which)[which] > 1)
