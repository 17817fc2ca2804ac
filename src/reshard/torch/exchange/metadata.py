"""How do ranks learn what only other ranks know, before anything is planned?

What ranks say of their models is much alike: data-parallel copies say the same. Values travel as
bytes, equal ones once::

    rank 0  A          digests of all       A from rank 0 to all, or to the first rank only
    rank 1  A   --->   A A B A B     --->   B from rank 2
    rank 2  B          one all-reduce

The other way round, the first rank gives every rank a value of its own, one after the other, so
that it has one of them in memory at a time. Values are pickled: all ranks run one program.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reshard.torch.exchange.agreement import device_of, run_errors

_DIGEST_WORDS = 2
_UNANSWERED = "nothing was moved"


@dataclass(frozen=True, slots=True)
class Gathered:
    """The value of every rank that was asked for, by global rank; bytes that this rank received."""

    values: dict[int, Any]
    received_bytes: int


def gather(value: Any, group: dist.ProcessGroup | None, to_first: bool = False) -> Gathered:
    """The values of all ranks, on every rank; or on the group's first only, others get their own.

    Raises RunError where a rank does not answer.
    """
    own = pickle.dumps(value)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = dist.get_rank()
    first_with: dict[tuple[int, ...], int] = {}
    found: dict[tuple[int, ...], Any] = {}
    received_bytes = 0
    with run_errors(_UNANSWERED):
        digests = _digests(own, group)
        for rank, digest in zip(ranks, digests, strict=True):
            first_with.setdefault(digest, rank)
        for digest, rank in first_with.items():
            if to_first and (rank == ranks[0] or me not in (rank, ranks[0])):
                continue
            data = _as_tensor(own, group) if me == rank else _empty(digest[0], group)
            if not to_first:
                dist.broadcast(data, rank, group)
            elif me == rank:
                dist.send(data, ranks[0], group)
            else:
                dist.recv(data, rank, group)
            if me != rank:
                received_bytes += len(data)
                found[digest] = pickle.loads(_as_bytes(data))
    # What is not received is what this rank has itself.
    every = zip(ranks, digests, strict=True)
    return Gathered({rank: found.get(digest, value) for rank, digest in every}, received_bytes)


def scatter(parts: Iterable[Any] | None, group: dist.ProcessGroup | None) -> tuple[Any, int]:
    """This rank's part of what the group's first rank gives, and the bytes that it gave or got.

    Args:
        parts: on the first rank, one for each rank of the group in order; taken one at a time.

    Raises RunError where a rank does not answer.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    own: Any = None
    moved_bytes = 0
    with run_errors(_UNANSWERED):
        if parts is None:
            length = torch.zeros(1, dtype=torch.int64, device=device_of(group))
            dist.recv(length, ranks[0], group)
            moved_bytes = int(length.item())
            data = _empty(moved_bytes, group)
            dist.recv(data, ranks[0], group)
            return pickle.loads(_as_bytes(data)), moved_bytes
        for rank, part in zip(ranks, parts, strict=True):
            if rank == dist.get_rank():
                own = part
                continue
            data = _as_tensor(pickle.dumps(part), group)
            length = torch.tensor([len(data)], dtype=torch.int64, device=device_of(group))
            dist.send(length, rank, group)
            dist.send(data, rank, group)
            moved_bytes += len(data)
    return own, moved_bytes


def _digests(data: bytes, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """Length and digest of what every rank has."""
    digest = hashlib.blake2b(data, digest_size=8 * _DIGEST_WORDS).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], signed=True) for i in range(_DIGEST_WORDS)]
    # Every rank fills its own row, so that the sum is the table of all.
    table = torch.zeros(
        (dist.get_world_size(group), 1 + _DIGEST_WORDS), dtype=torch.int64, device=device_of(group)
    )
    table[dist.get_rank(group)] = torch.tensor([len(data), *words])
    dist.all_reduce(table, dist.ReduceOp.SUM, group)
    return [tuple(row) for row in table.tolist()]


def _empty(size_bytes: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device_of(group))


def _as_tensor(data: bytes, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))


def _as_bytes(data: torch.Tensor) -> bytes:
    return bytes(data.cpu().numpy())
