"""Verification of a refit: both ends are compared, and nothing is sent again.

Sender and receiver know which elements of a tensor went from one to the other. Each takes the
digest of its own, as they travelled, and the receiver compares: 16 bytes for each tensor between
two ranks, however large it is::

    sender     up.weight 0:4 of rank 2's  ->  digest  ----->  equal?  <-  digest of 0:4  receiver

What a rank copies from itself is compared directly. Not compared are tensors that a transform makes
of other elements, contributions that are combined, and what moves by a program of collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reshard.dtypes import dtype as as_dtype
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import (
    LocalCopy,
    PiecesByPair,
    RankTransfers,
    list_pieces,
)
from reshard.torch.exchange.packing.pieces import Piece
from reshard.torch.refitting.plan import PartItem, RefitPart

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Verification:
    """What one rank found.

    Attributes:
        differences: tensors whose elements here are not the source's, with the rank that sent them.
        compared_bytes: of the target here that were compared, as they travelled.
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
    """Compare what this rank has of the target with what the others have of the source.

    All ranks of the group call this. `source` and `target` are local tensors by name. Raises
    RunError where a rank does not answer.
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
    # What is handed on is compared with what it was handed on from.
    for change, rows in item.stages:
        stages.append(RankTransfers.of(change, rows, rank, before, after, travels))
        before = after
    return list_pieces(stages, rank)


def _digest(pieces: Iterable[Piece]) -> bytes:
    """Of the elements of pieces, as they travel."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for data in _bytes_of(pieces):
        hasher.update(data)
    return hasher.digest()


def _bytes_of(pieces: Iterable[Piece]) -> Iterator[Any]:
    for piece in pieces:
        # Of two types the narrower travels: a wider target's elements are exact in it.
        dense = piece.view.detach().to(piece.dtype).contiguous().flatten()
        yield dense.view(torch.uint8).cpu().numpy()


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = [side.detach().contiguous().flatten().view(torch.uint8) for side in (one, other)]
    return bool(torch.equal(*pair))


def _exchange_digests(
    sent: Mapping[int, list[bytes]], expected: Mapping[int, int], group: RankGroup
) -> dict[int, list[bytes]]:
    """Give each receiver the digests of what it was sent, and get those of what came here."""
    given = {peer: b"".join(of) for peer, of in sent.items()}
    expected_bytes = {peer: count * _DIGEST_BYTES for peer, count in expected.items()}
    with group.errors("nothing was compared"):
        received = group.swap_bytes(given, expected_bytes)
    found = {}
    for peer, text in received.items():
        found[peer] = [text[i : i + _DIGEST_BYTES] for i in range(0, len(text), _DIGEST_BYTES)]
    return found
