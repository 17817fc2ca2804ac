"""Do all ranks of a process group mean the same, before a byte of theirs moves?

Every rank plans by itself, so ranks that were given different arguments would wait for
messages that nobody sends. One small all-reduce finds that out:

1. Each rank brings the digest of what it means to do, and whether it can.
2. The greatest and the least of all digests are found at once, as `max(d)` and `max(-d)`.
3. Where they differ, or a rank cannot, the ranks tell each other why, and all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

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
    """Raise UsageError where this process is none of the group's ranks, or there are no groups."""
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
        raise UsageError(f"group={group!r} cannot be used: {_first_line(error)}") from error
    if not is_member:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the group; only the group's ranks call this"
        )


def agree(intent: Intent, group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Return where all ranks of `group` mean the same and can do it; raise on all otherwise.

    Returns:
        For each of the notes, the greatest of all ranks.

    Raises:
        PlanError: ranks that mean different things; the message names the part and the ranks.
        RunError: a rank that cannot, and the message says which and why; or one that does not
            answer within the group's timeout.
    """
    digest = intent.digest
    low, high = (int.from_bytes(half) for half in (digest[:7], digest[7:]))
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
            told = None if error is None else f"{type(error).__name__}: {error}"
            _raise_problems(told, group, _UNFINISHED, error)


@contextmanager
def run_errors(otherwise: str) -> Iterator[None]:
    """What torch raises where ranks do not answer becomes a RunError that begins `otherwise`."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(f"{otherwise}: a rank does not answer ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _raise_problems(
    own_problem: str | None,
    group: dist.ProcessGroup | None,
    otherwise: str,
    cause: Exception | None = None,
) -> None:
    every: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own_problem, group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    told: dict[str, list[int]] = {}
    for rank, problem in zip(ranks, every, strict=True):
        if problem is not None:
            told.setdefault(problem, []).append(rank)
    lines = [f"{_ranks(of)}: {problem}" for problem, of in list(told.items())[:_SHOWN_PROBLEMS]]
    raise RunError(f"{otherwise}: " + "; ".join(lines)) from cause


def _raise_difference(intent: Intent, group: dist.ProcessGroup | None) -> None:
    every: list[dict[str, bytes] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, None if intent.is_open else dict(intent.parts), group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    pairs = [(rank, parts) for rank, parts in zip(members, every, strict=True) if parts is not None]
    names = list(dict.fromkeys(name for _, parts in pairs for name in parts))
    for name in names:
        by_digest: dict[bytes | None, list[int]] = {}
        for rank, parts in pairs:
            by_digest.setdefault(parts.get(name), []).append(rank)
        if len(by_digest) > 1:
            sides = [
                f"{_ranks(of)} {'have none of it' if digest is None else 'mean one thing'}"
                if digest is None or position == 0
                else f"{_ranks(of)} another"
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


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
