"""Agreement of ranks before anything moves, metadata, and confirmation at the end.

*Agreement.* Every rank plans by itself, so ranks with different arguments would wait for messages
that no rank sends. A single all-reduce detects this (`RankGroup.allreduce_max`):

1. Each rank contributes the digest of its call, and whether it can take part.
2. The maximum and the minimum of all digests follow from `max(d)` and `max(-d)`.
3. If they differ, or a rank cannot take part, the ranks exchange the reasons, and all raise.
4. If several threads use a group, equal digests may belong to different calls: the ranks also
   compare the names of the calling threads.

*Metadata.* Descriptions of models are largely equal: data-parallel replicas send the same. Values
are exchanged as bytes, and equal values are sent once::

    rank 0  A          digests of all       A from rank 0 to all, or to the first rank only
    rank 1  A   --->   A A B A B     --->   B from rank 2
    rank 2  B          one all-reduce

Received bytes are text, which the caller checks. In the other direction, the first rank scatters a
value to each rank in turn, so that a single value is in memory at a time. These are pickled, and
are sent between ranks of the same program only.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import PlanError, RunError
from reshard.text import first_text
from reshard.torch.exchange.groups import CPU, RankGroup, bytes_of, rank_group, tensor_of

_SHOWN_RANKS = 8
_SHOWN_PROBLEMS = 20
_MAX_SHOWN = 200
# Less than any half of a digest, of either sign.
_NOTHING = -(1 << 62)
_MOST_NOTES = 8
_END = {"the end of a run": b""}


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The call of a rank: a digest of each part, by a name for error messages.

    Attributes:
        parts: digests by name.
        problem: why this rank cannot take part, or None.
        is_open: whether this rank lacks a description of the call, and agrees with all others.
        notes: up to 8 small integers; all ranks receive the maximum of each.
        show: returns parts as text; called only for the error if ranks differ.
    """

    parts: Mapping[str, bytes]
    problem: str | None = None
    is_open: bool = False
    notes: tuple[int, ...] = ()
    show: Callable[[], Mapping[str, str]] = dict

    @property
    def digest(self) -> bytes:
        """14 bytes that are equal for equal parts, in the same order."""
        hasher = hashlib.blake2b(digest_size=14)
        for name, part in self.parts.items():
            # With lengths, since parts that are divided differently must have different digests.
            hasher.update(f"{len(name)}:{name}:{len(part)}:".encode() + part)
        return hasher.digest()


Group: TypeAlias = "dist.ProcessGroup | RankGroup | None"


def device_of(group: Group) -> torch.device:
    """Return the device of tensors for a group's own collectives: the CPU if supported."""
    if isinstance(group, RankGroup):
        return CPU
    process_group = group or dist.group.WORLD
    types = [device_type.type for device_type in process_group._device_types]
    if "cpu" in types or "cuda" not in types:
        return CPU
    return torch.device("cuda", torch.cuda.current_device())


def agree(intent: CallSignature, group: Group = None) -> tuple[int, ...]:
    """Return if the calls of all ranks of `group` match and can be done; raise on all otherwise.

    Returns:
        The maximum over ranks of each note.

    Raises:
        PlanError: ranks whose calls differ; the message names the part and the ranks.
        RunError: a rank cannot take part, and the message names it and the reason; or a rank does
            not answer within the group's timeout.
    """
    return _compare(intent, rank_group(group), "nothing was moved")


def confirm(group: Group = None, error: Exception | None = None) -> None:
    """Return if all ranks of `group` reach this point without error; raise on all otherwise.

    A rank that fails while no other rank waits for its messages passes its error. Other failures
    close the group's connections.

    Raises:
        RunError: a rank failed or was lost; the message names it and the reason.
        PlanError: a rank is at another point, such as threads that call in another order.
    """
    problem = None if error is None else f"{type(error).__name__}: {error}"
    signature = CallSignature(_END, problem)
    _compare(signature, rank_group(group), "some rank did not finish", error)


def _compare(
    intent: CallSignature, group: RankGroup, otherwise: str, cause: Exception | None = None
) -> tuple[int, ...]:
    digest = intent.digest
    low, high = (int.from_bytes(half) for half in (digest[:7], digest[7:]))
    # Maxima of `d` and `-d` give the maximum and the minimum. Seven bytes fit in a signed word.
    digits = [_NOTHING] * 4 if intent.is_open else [low, high, -low, -high]
    name = threading.current_thread().name
    caller = _hash_name(name)
    threads = [int(group.compares_thread(name)), caller, -caller]
    # Always the same number of values, so that ranks with different calls can compare them.
    notes = [*intent.notes, *[0] * (_MOST_NOTES - len(intent.notes))]
    numbers = [int(intent.problem is not None), *digits, *threads, *notes]
    # Not by `group.errors`: a generator for each agreement takes longer than the rest of this.
    try:
        most = group.allreduce_max(numbers)
        has_problem, *digits = most[:5]
        has_threads, greatest, least = most[5:8]
        # All are equal if the maximum equals the minimum, or if all ranks are open.
        is_like = digits[:2] == [-digits[2], -digits[3]] or digits == [_NOTHING] * 4
        if has_problem:
            _raise_problems(intent.problem, group, otherwise, cause)
        if not is_like:
            _raise_difference(intent, group)
        if has_threads and greatest != -least:
            _raise_threads(name, group)
    except RuntimeError as error:
        group.lose(otherwise, error)
    return tuple(most[8 : 8 + len(intent.notes)])


# Cached, since a thread compares its name in every call.
@lru_cache(maxsize=64)
def _hash_name(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


def _raise_problems(
    own_problem: str | None, group: RankGroup, otherwise: str, cause: Exception | None = None
) -> NoReturn:
    # Texts are gathered only when it is known that some rank has a problem.
    problems_by_rank = gather((own_problem or "").encode(), group)
    ranks_with: dict[str, list[int]] = {}
    for rank, problem in problems_by_rank.items():
        if problem:
            ranks_with.setdefault(problem.decode(errors="replace"), []).append(rank)
    lines = [
        f"{_name_ranks(holders)}: {problem}"
        for problem, holders in list(ranks_with.items())[:_SHOWN_PROBLEMS]
    ]
    group.raise_on_all(RunError(f"{otherwise}: " + "; ".join(lines)), cause)


def _raise_threads(name: str, group: RankGroup) -> NoReturn:
    names_by_rank = gather(name.encode(), group)
    shown = ", ".join(
        f"rank {rank} calls from {other.decode(errors='replace')!r}"
        for rank, other in names_by_rank.items()
    )
    group.raise_on_all(
        PlanError(
            f"several threads use one group, and not in one order on all ranks: {shown}. Nothing "
            "was moved; let them call in one order, under the same names of threads, or give each "
            "thread a process group of its own"
        )
    )


def _raise_difference(intent: CallSignature, group: RankGroup) -> NoReturn:
    shown = {} if intent.is_open else intent.show()
    own = [
        (name, (part.hex(), shown.get(name, "")[:_MAX_SHOWN]))
        for name, part in intent.parts.items()
    ]
    gathered = gather(json.dumps(None if intent.is_open else own).encode(), group)
    parts_by_rank = {rank: json.loads(parts) for rank, parts in gathered.items()}
    # Compare only digests, since equal calls may have differently spelled texts.
    pairs = [
        (rank, {name: digest for name, (digest, _) in parts})
        for rank, parts in parts_by_rank.items()
        if parts is not None
    ]
    texts = {
        digest: text
        for parts in parts_by_rank.values()
        for _, (digest, text) in parts or ()
        if text
    }
    names = list(dict.fromkeys(name for _, parts in pairs for name in parts))
    for name in names:
        by_digest: dict[str | None, list[int]] = {}
        for rank, parts in pairs:
            by_digest.setdefault(parts.get(name), []).append(rank)
        if len(by_digest) > 1:
            sides = [
                f"{_name_ranks(holders)} {_describe_side(digest, texts, position)}"
                for position, (digest, holders) in enumerate(by_digest.items())
            ]
            group.raise_on_all(
                PlanError(
                    f"the ranks do not mean the same by {name!r}: {'; '.join(sides)}. Nothing was "
                    "moved; give every rank the same shapes, dtypes and layouts, those of whole "
                    "tensors and not of a rank's part, in one order"
                )
            )
    group.raise_on_all(
        PlanError(
            "the ranks name the same tensors in different orders; nothing was moved. Give every "
            "rank the same order"
        )
    )


def _describe_side(digest: str | None, texts: Mapping[str, str], position: int) -> str:
    if digest is None:
        return "have none of it"
    if digest in texts:
        return f"mean `{texts[digest]}`"
    return "another" if position else "mean one thing"


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {first_text(ranks, _SHOWN_RANKS)}"


_DIGEST_WORDS = 2
_UNANSWERED = "nothing was moved"


def gather(
    own: bytes, group: Group, to_first: bool = False, otherwise: str = _UNANSWERED
) -> dict[int, bytes]:
    """Return the bytes of all ranks, on every rank or on the group's first rank only.

    Equal bytes are the same object. Raises RunError, with the prefix `otherwise`, if a rank does
    not answer.
    """
    ((values,), _) = gather_all([own], group, to_first, otherwise)
    return values


def gather_all(
    values: Sequence[bytes], group: Group, to_first: bool = False, otherwise: str = _UNANSWERED
) -> tuple[list[dict[int, bytes]], int]:
    """Return each of several values of all ranks, and the bytes received. See `gather`.

    All ranks have as many values.
    """
    among = rank_group(group)
    with among.errors(otherwise):
        digests = _gather_digests(values, among)
        gathered = [
            _gather_unequal(own, [row[number] for row in digests], among, to_first)
            for number, own in enumerate(values)
        ]
    received_bytes = sum(of_value_bytes for _, of_value_bytes in gathered)
    return [by_rank for by_rank, _ in gathered], received_bytes


def _gather_unequal(
    own: bytes, digests: list[tuple[int, ...]], among: RankGroup, to_first: bool
) -> tuple[dict[int, bytes], int]:
    """Return the values of all ranks; equal values come from the first rank that has them."""
    ranks, me = among.ranks, among.rank
    first_with: dict[tuple[int, ...], int] = {}
    received: dict[tuple[int, ...], bytes] = {}
    received_bytes = 0
    for rank, digest in zip(ranks, digests, strict=True):
        first_with.setdefault(digest, rank)
    for digest, rank in first_with.items():
        # Only the first rank and the owner of the value take part in its message.
        if to_first and (rank == ranks[0] or me not in (rank, ranks[0])):
            continue
        if not digest[0]:
            received[digest] = b""
            continue
        # The first word of a digest is the length.
        data = tensor_of(own) if me == rank else torch.empty(digest[0], dtype=torch.uint8)
        if not to_first:
            among.broadcast(data, rank)
        elif me == rank:
            among.send(data, ranks[0]).wait()
        else:
            among.receive(data, rank).wait()
        if me != rank:
            received_bytes += len(data)
            received[digest] = bytes_of(data)
    # Values that were not received are this rank's own.
    pairs = zip(ranks, digests, strict=True)
    return {rank: received.get(digest, own) for rank, digest in pairs}, received_bytes


def share(value: Any, sender: int, group: Group) -> Any:
    """Return the value of rank `sender` on all ranks. Raise RunError if a rank does not answer."""
    among = rank_group(group)
    own = pickle.dumps(value) if among.rank == sender else b""
    length = torch.tensor([len(own)])
    with among.errors(_UNANSWERED):
        among.broadcast(length, sender)
        data = tensor_of(own) if own else torch.empty(int(length.item()), dtype=torch.uint8)
        among.broadcast(data, sender)
    return value if own else pickle.loads(bytes_of(data))


def scatter(parts: Iterable[Any] | None, group: Group) -> tuple[Any, int]:
    """Return this rank's value from the group's first rank, and the bytes sent or received.

    Args:
        parts: on the first rank, a value for each rank of the group in order; an iterator.

    Raises RunError if a rank does not answer.
    """
    among = rank_group(group)
    first = among.ranks[0]
    own: Any = None
    moved_bytes = 0
    with among.errors(_UNANSWERED):
        if parts is None:
            length = torch.zeros(1, dtype=torch.int64)
            among.receive(length, first).wait()
            moved_bytes = int(length.item())
            data = torch.empty(moved_bytes, dtype=torch.uint8)
            among.receive(data, first).wait()
            return pickle.loads(bytes_of(data)), moved_bytes
        for rank, part in zip(among.ranks, parts, strict=True):
            if rank == among.rank:
                own = part
                continue
            data = tensor_of(pickle.dumps(part))
            among.send(torch.tensor([len(data)]), rank).wait()
            among.send(data, rank).wait()
            moved_bytes += len(data)
    return own, moved_bytes


def _gather_digests(values: Sequence[bytes], group: RankGroup) -> list[list[tuple[int, ...]]]:
    """Return the length and digest of each value of every rank."""
    words = []
    for data in values:
        digest = hashlib.blake2b(data, digest_size=8 * _DIGEST_WORDS).digest()
        words += [len(data), *np.frombuffer(digest, np.int64).tolist()]
    size = 1 + _DIGEST_WORDS
    return [
        [tuple(row[at : at + size].tolist()) for at in range(0, len(row), size)]
        for row in group.all_gather(torch.tensor(words))
    ]
