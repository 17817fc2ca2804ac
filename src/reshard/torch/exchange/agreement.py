"""What ranks tell each other before anything moves, and after: agreement, metadata, confirmation.

*Agreement.* Every rank plans by itself, so ranks that were given different arguments would wait for
messages that nobody sends. One small all-reduce finds that out:

1. Each rank brings the digest of what it means to do, and whether it can.
2. The greatest and the least of all digests are found at once, as `max(d)` and `max(-d)`.
3. Where they differ, or a rank cannot, the ranks tell each other why, and all raise.

*Metadata.* What ranks say of their models is much alike: data-parallel copies say the same. Values
travel as bytes, equal ones once::

    rank 0  A          digests of all       A from rank 0 to all, or to the first rank only
    rank 1  A   --->   A A B A B     --->   B from rank 2
    rank 2  B          one all-reduce

What arrives is bytes that the caller reads, as text that it checks. The other way round, the first
rank gives every rank a value of its own, one after another, so that it has one of them in memory at
a time; these are pickled, and only ranks of one program are given them.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import PlanError, RunError, UsageError

_SHOWN_RANKS = 8
_SHOWN_PROBLEMS = 20
# Less than any half of a digest, of either sign.
_NOTHING = -(1 << 62)
_MOST_NOTES = 8
_UNFINISHED = "some rank did not finish"


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank means to do: the digest of each part, by a name that people know.

    Attributes:
        parts: digests by name.
        problem: why this rank cannot take part; None where it can.
        is_open: whether this rank does not know yet what is meant, and agrees with all others.
        notes: up to 8 small integers, of which all ranks learn the greatest of any rank.
    """

    parts: Mapping[str, bytes]
    problem: str | None = None
    is_open: bool = False
    notes: tuple[int, ...] = ()

    @property
    def digest(self) -> bytes:
        """14 bytes that are equal for equal parts, in the same order."""
        hasher = hashlib.blake2b(digest_size=14)
        for name, part in self.parts.items():
            hasher.update(f"{len(name)}:{name}:{len(part)}:".encode() + part)
        return hasher.digest()


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors of a group's collectives have to lie."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_member(group: dist.ProcessGroup | None) -> None:
    """Raise UsageError where this process is not in the group, or there are no process groups."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "no process group: torch.distributed is not initialised. Start the ranks with "
            "torchrun, and call torch.distributed.init_process_group in each"
        )
    known = group in (None, dist.GroupMember.NON_GROUP_MEMBER)
    if not (known or isinstance(group, dist.ProcessGroup)):
        raise UsageError(f"group={group!r}; give a torch process group, or None for all ranks")
    try:
        is_member = dist.get_rank(group) >= 0
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"group={group!r} cannot be used: {_take_first_line(error)}") from error
    if not is_member:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the group; only the group's ranks call this"
        )


def agree(intent: Intent, group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Return where all ranks of `group` mean the same and can do it; raise on all otherwise.

    Returns:
        For each of the notes, the greatest of all ranks.

    Raises:
        PlanError: ranks that intend different things; the message names the part and the ranks.
        RunError: a rank that cannot, and the message says which and why; or one that does not
            answer within the group's timeout.
    """
    digest = intent.digest
    low, high = (int.from_bytes(half) for half in (digest[:7], digest[7:]))
    # Maxima of `d` and `-d` give the greatest and the least. Seven bytes fit in a signed word.
    digits = [_NOTHING] * 4 if intent.is_open else [low, high, -low, -high]
    # Always as many numbers: ranks that call for different things still understand each other.
    notes = [*intent.notes, *[0] * (_MOST_NOTES - len(intent.notes))]
    numbers = [int(intent.problem is not None), *digits, *notes]
    most = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    with run_errors("nothing was moved"):
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        has_problem, *digits = most.tolist()[:5]
        if has_problem:
            _raise_problems(intent.problem, group, "nothing was moved")
        # All are alike where the greatest is the least, and where all ranks are open.
        if digits[:2] != [-digits[2], -digits[3]] and digits != [_NOTHING] * 4:
            _raise_difference(intent, group)
    return tuple(most.tolist()[5 : 5 + len(intent.notes)])


def confirm(group: dist.ProcessGroup | None = None, error: Exception | None = None) -> None:
    """Return where all ranks of `group` come to this point, without error; raise on all otherwise.

    A rank that fails and knows that no other waits for its messages comes here with its error. One
    that fails otherwise does not come, and the others learn it when their group's timeout ends, or
    at once where its process has ended.

    Raises:
        RunError: a rank that did not come, or came with an error; the message says which and why.
    """
    failed = torch.full((1,), error is not None, dtype=torch.int64, device=device_of(group))
    with run_errors(_UNFINISHED):
        dist.all_reduce(failed, dist.ReduceOp.MAX, group)
        # A collective on a device is only waited for by its stream.
        if any(failed.tolist()):
            problem = None if error is None else f"{type(error).__name__}: {error}"
            _raise_problems(problem, group, _UNFINISHED, error)


@contextmanager
def run_errors(otherwise: str) -> Iterator[None]:
    """What torch raises where ranks do not answer becomes a RunError that begins `otherwise`."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"{otherwise}: a rank does not answer ({_take_first_line(error)})"
        ) from error


def _take_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _raise_problems(
    own_problem: str | None,
    group: dist.ProcessGroup | None,
    otherwise: str,
    cause: Exception | None = None,
) -> None:
    # Texts are gathered only when it is known that some rank has a problem.
    every = gather((own_problem or "").encode(), group).values
    ranks_with: dict[str, list[int]] = {}
    for rank, problem in every.items():
        if problem:
            ranks_with.setdefault(problem.decode(errors="replace"), []).append(rank)
    lines = [
        f"{_name_ranks(of)}: {problem}"
        for problem, of in list(ranks_with.items())[:_SHOWN_PROBLEMS]
    ]
    raise RunError(f"{otherwise}: " + "; ".join(lines)) from cause


def _raise_difference(intent: Intent, group: dist.ProcessGroup | None) -> None:
    own = None if intent.is_open else [[name, part.hex()] for name, part in intent.parts.items()]
    every = gather(json.dumps(own).encode(), group).values
    told = {rank: json.loads(parts) for rank, parts in every.items()}
    pairs = [(rank, dict(parts)) for rank, parts in told.items() if parts is not None]
    names = list(dict.fromkeys(name for _, parts in pairs for name in parts))
    for name in names:
        by_digest: dict[str | None, list[int]] = {}
        for rank, parts in pairs:
            by_digest.setdefault(parts.get(name), []).append(rank)
        if len(by_digest) > 1:
            sides = [
                f"{_name_ranks(of)} {'have none of it' if digest is None else 'mean one thing'}"
                if digest is None or position == 0
                else f"{_name_ranks(of)} another"
                for position, (digest, of) in enumerate(by_digest.items())
            ]
            raise PlanError(
                f"the ranks do not mean the same by {name!r}: {', '.join(sides)}. Nothing was "
                "moved; give every rank the same shapes, dtypes and layouts"
            )
    raise PlanError(
        "the ranks name the same tensors in different orders; nothing was moved. Give every "
        "rank the same order"
    )


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


_DIGEST_WORDS = 2
_UNANSWERED = "nothing was moved"


@dataclass(frozen=True, slots=True)
class Gathered:
    """The bytes of every rank that was asked for, by global rank; how many this rank received.

    Ranks that have equal bytes have one object.
    """

    values: dict[int, bytes]
    received_bytes: int


def gather(own: bytes, group: dist.ProcessGroup | None, to_first: bool = False) -> Gathered:
    """The bytes of all ranks, on every rank; or on the group's first only, others get their own.

    Raises RunError where a rank does not answer.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = dist.get_rank()
    first_with: dict[tuple[int, ...], int] = {}
    found: dict[tuple[int, ...], bytes] = {}
    received_bytes = 0
    with run_errors(_UNANSWERED):
        digests = _gather_digests(own, group)
        for rank, digest in zip(ranks, digests, strict=True):
            # Equal values come from the first rank that has them.
            first_with.setdefault(digest, rank)
        for digest, rank in first_with.items():
            # Only the first rank and the one that has the value take part in its message.
            if to_first and (rank == ranks[0] or me not in (rank, ranks[0])):
                continue
            if not digest[0]:
                found[digest] = b""
                continue
            data = _as_tensor(own, group) if me == rank else _allocate(digest[0], group)
            if not to_first:
                dist.broadcast(data, rank, group)
            elif me == rank:
                dist.send(data, ranks[0], group)
            else:
                dist.recv(data, rank, group)
            if me != rank:
                received_bytes += len(data)
                found[digest] = _as_bytes(data)
    # What is not received is what this rank has itself.
    every = zip(ranks, digests, strict=True)
    return Gathered({rank: found.get(digest, own) for rank, digest in every}, received_bytes)


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
            data = _allocate(moved_bytes, group)
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


def _gather_digests(data: bytes, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
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


def _allocate(size_bytes: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device_of(group))


def _as_tensor(data: bytes, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))


def _as_bytes(data: torch.Tensor) -> bytes:
    return bytes(data.cpu().numpy())
