"""Handshake: the ranks of a side find each other at the store, and prove the secret.

A side is all ranks of a trainer or an engine. Its first rank obtains a unique number, also if an
engine of the same name existed before. The other ranks claim their place, since a number may belong
to ranks that have died::

    first rank   number = 3   current = 3            sees the claim, welcomes it, announces 3
    rank 1                    reads 3, claims: token             finds its token: belongs to 3

The announcement contains the number of ranks, their tokens for the `heartbeat`, and the protocol
version. An engine is admitted once all of its ranks wait at its rendezvous with the trainer, so the
trainer waits for none. Between two sides all ranks connect (`reshard.torch.exchange.rendezvous`),
and each proves to every other rank that it knows the secret: it answers a nonce by a code of it.

Source: challenge and response as in RFC 2195.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reshard import __version__
from reshard.errors import LinkError, ReshardError
from reshard.log import LOGGER, WaitNotice
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.rendezvous import name_process, peer_key
from reshard.torch.links.heartbeat import Heartbeat
from reshard.torch.links.messages import OPTIONAL, read_message, write_message
from reshard.torch.links.sealed_store import SealedStore, code_of

# The protocol between both sides; releases with the same protocol are compatible.
PROTOCOL = 3
TRAINER = "trainer"
_POLL_S = 0.05
_CODE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Announcement:
    """A side, announced by its first rank, with a token, host and process of each rank."""

    number: int
    name: str
    ranks: int
    protocol: int = field(default=PROTOCOL, metadata=OPTIONAL)
    tokens: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    release: str = field(default="", metadata=OPTIONAL)
    processes: tuple[str, ...] = field(default=(), metadata=OPTIONAL)

    def name_rank(self, rank: int) -> str:
        """Return the name of a rank for errors.

        >>> Announcement(0, TRAINER, 2, processes=("host a, process 7", "host b, process 9")
        ... ).name_rank(1)
        'rank 1 of the trainer (host b, process 9)'
        """
        side = "the trainer" if self.name == TRAINER else self.name
        where = f" ({self.processes[rank]})" if rank < len(self.processes) else ""
        return f"rank {rank} of {side}{where}"

    def check_protocol(self) -> None:
        """Raise LinkError if the side uses another protocol."""
        if self.protocol != PROTOCOL:
            raise LinkError(
                f"{self.name} has reshard {self.release or 'of an unnamed release'}, whose links "
                f"speak protocol {self.protocol}, and this process has reshard {__version__}, "
                f"whose links speak protocol {PROTOCOL}; give both sides one release"
            )


def announce(
    store: SealedStore,
    name: str,
    rank: int,
    ranks: int,
    timeout_s: float,
    presence: Heartbeat | None = None,
) -> Announcement:
    """Return the announcement of the side of which this process is `rank`. All its ranks call this.

    Raises LinkError if a rank is late, or has another number of ranks.
    """
    presence = presence or Heartbeat()
    deadline_s = time.monotonic() + timeout_s
    if rank:
        return _claim_rank(store, name, rank, ranks, deadline_s, presence)
    number = store.add("sides", 1) - 1
    # Ranks of an earlier process of this name, which still wait, move on to this number.
    store.set(f"side/{name}", str(number))
    tokens, processes = [presence.token], [name_process(socket.gethostname(), os.getpid())]
    for other in range(1, ranks):
        claim = f"claim/{number}/{other}"
        is_there = functools.partial(store.check, [claim])
        if not _comes(is_there, deadline_s, presence, f"rank {other} of {name}"):
            raise LinkError(f"rank {other} of {name} did not come within {timeout_s:g} s")
        token, its_ranks, process = json.loads(store.get(claim))
        if its_ranks != ranks:
            problem = f"rank 0 of {name} has ranks={ranks}, rank {other} has ranks={its_ranks}"
            # The other rank raises the same error at once, rather than after its timeout.
            store.set(f"welcome/{number}/{other}", json.dumps(["", problem]))
            raise LinkError(f"{problem}; give all ranks of a side the same")
        store.set(f"welcome/{number}/{other}", json.dumps([token, ""]))
        tokens.append(token)
        processes.append(process)
    side = Announcement(
        number,
        name,
        ranks,
        tokens=tuple(tokens),
        release=__version__,
        processes=tuple(processes),
    )
    store.set(_announcement_key(number), write_message(side))
    return side


def _claim_rank(
    store: SealedStore, name: str, rank: int, ranks: int, deadline_s: float, presence: Heartbeat
) -> Announcement:
    token, claimed = presence.token, ""
    process = name_process(socket.gethostname(), os.getpid())
    current = f"side/{name}"
    welcome = ""
    notice = WaitNotice(lambda: f"rank 0 of {name}")
    while True:
        notice.check()
        if store.check([current]) and (number := store.get(current).decode()) != claimed:
            # A number of dead ranks is followed by another when they restart.
            claimed, welcome = number, f"welcome/{number}/{rank}"
            store.set(f"claim/{number}/{rank}", json.dumps([token, ranks, process]))
        if welcome and store.check([welcome]):
            welcomed, problem = json.loads(store.get(welcome))
            if problem:
                raise LinkError(f"{problem}; give all ranks of a side the same")
            if welcomed == token:
                break
        if time.monotonic() > deadline_s:
            raise LinkError(f"rank 0 of {name} did not let rank {rank} in; start it as well")
        presence.check()
        time.sleep(_POLL_S)
    key = _announcement_key(int(claimed))
    if not _comes(lambda: store.check([key]), deadline_s, presence):
        raise LinkError(f"rank 0 of {name} did not announce it")
    return read_announcement(store, int(claimed))


def leave(store: SealedStore, side: Announcement, rank: int, reason: str = "") -> None:
    """Store a note that a rank has left the link; `reason` continues "closed the link"."""
    store.set(_name_note(side.number, rank), reason)


def has_left(store: SealedStore, number: int) -> bool:
    """Return whether the first rank of a side has left."""
    return store.check([_name_note(number, 0)])


def explain_departure(store: SealedStore, side: Announcement, token: str) -> str:
    """Return that the process of a token has ended: its rank, host and reason if known."""
    rank, reason = side.tokens.index(token), ""
    key = _name_note(side.number, rank)
    # The store's process may have ended as well.
    with contextlib.suppress(RuntimeError, ReshardError):
        reason = store.get(key).decode() if store.check([key]) else ""
    return f"{side.name_rank(rank)} has ended, or closed the link{reason}"


def _name_note(number: int, rank: int) -> str:
    return f"left/{number}/{rank}"


def find_trainer(store: SealedStore, timeout_s: float) -> Announcement:
    """Return the trainer's announcement; raise LinkError if it is late or incompatible."""
    deadline_s, side = time.monotonic() + timeout_s, f"side/{TRAINER}"
    number = -1
    if _comes(lambda: store.check([side]), deadline_s, awaited="the trainer"):
        number = int(store.get(side))
    key = _announcement_key(number)
    if number < 0 or not _comes(lambda: store.check([key]), deadline_s):
        raise LinkError(f"no trainer came within {timeout_s:g} s")
    trainer = read_announcement(store, number)
    trainer.check_protocol()
    return trainer


def read_announcement(store: SealedStore, number: int) -> Announcement:
    """Return the announcement of a side by number; raise LinkError if invalid."""
    text = store.get(_announcement_key(number))
    return read_message(Announcement, text, "announcement of a side of a link")


def _announcement_key(number: int) -> str:
    return f"announcement/{number}"


def find_engines(store: SealedStore, seen: set[int]) -> list[Announcement]:
    """Return announced engines that are not among `seen`, in order.

    An engine with another protocol detects that itself, and leaves. It is added to `seen`, and a
    warning names it.
    """
    engines = []
    # `get` expects a sealed value, but counters are not sealed: adding 0 reads them.
    for number in range(store.add("sides", 0)):
        if number not in seen and store.check([_announcement_key(number)]):
            engine = read_announcement(store, number)
            if engine.name == TRAINER:
                continue
            try:
                engine.check_protocol()
            except LinkError as error:
                seen.add(number)
                LOGGER.warning("an engine is not admitted: %s", error)
            else:
                engines.append(engine)
    return engines


def rendezvous_key(number: int) -> str:
    """Return the store's prefix at which the trainer and an engine meet."""
    return f"pair/{number}"


def wait_for_engines(
    store: SealedStore,
    seen: set[int],
    fewest: int,
    timeout_s: float,
    trainer: Announcement,
    presence: Heartbeat,
) -> list[Announcement]:
    """Return engines not among `seen` that wait to be met, once they have `fewest` names.

    Engines with a process that has ended are skipped, and added to `seen`. Raises LinkError if
    engines are late, or a process of the trainer has ended.
    """
    ready: list[Announcement] = []
    failed: list[str] = []

    def are_here() -> bool:
        if gone := presence.find_departed(trainer.tokens):
            raise LinkError(explain_departure(store, trainer, gone))
        announced = find_engines(store, seen)
        for engine in announced:
            if gone := presence.find_departed(engine.tokens):
                seen.add(engine.number)
                failed.append(explain_departure(store, engine, gone))
                # Another engine may replace it, so the failure is logged before the timeout.
                LOGGER.warning("an engine failed before it was linked: %s", failed[-1])
        ready[:] = [engine for engine in announced if engine.number not in seen and waits(engine)]
        # By name: an engine that restarted may be there twice.
        return len({engine.name for engine in ready}) >= fewest

    def waits(engine: Announcement) -> bool:
        first = trainer.ranks
        cards = [peer_key(0, first + rank) for rank in range(engine.ranks)]
        return store.check([f"{rendezvous_key(engine.number)}/{card}" for card in cards])

    awaited = f"engines, {fewest} of which are expected"
    if not _comes(are_here, time.monotonic() + timeout_s, awaited=awaited):
        names = sorted({engine.name for engine in ready})
        if len(ready) > len(names):
            raise LinkError(
                f"{len(ready)} engines came within {timeout_s:g} s, but under {len(names)} of the "
                f"{fewest} names: {', '.join(names)}; give each a name= of its own"
            )
        raise LinkError(
            f"{len(ready)} of {fewest} engines came within {timeout_s:g} s; start all processes of "
            "each with side='engine', this address and the same secret, or give a longer timeout_s="
            + "".join(f"; {text}" for text in failed)
        )
    return ready


def wait_for_keys(
    store: SealedStore,
    keys: Mapping[int, str],
    timeout_s: float,
    side: Announcement,
    presence: Heartbeat,
) -> None:
    """Wait until ranks of a side have written their keys to the store.

    Raises LinkError if the keys of any rank are late, with one timeout for all of them, or if a
    rank has ended without writing them.
    """
    begun_s = time.monotonic()
    for rank, key in keys.items():
        while not store.check([key]):
            waited_s = time.monotonic() - begun_s
            if store.check_others is not None:
                store.check_others()
            # It may have written its key just before it ended.
            if presence.find_departed([side.tokens[rank]]) and not store.check([key]):
                raise LinkError(explain_departure(store, side, side.tokens[rank]))
            if waited_s > timeout_s:
                raise LinkError(f"{side.name_rank(rank)} does not answer for {timeout_s:g} s")
            # Short at first: keys mostly come within milliseconds.
            time.sleep(min(waited_s / 8, _POLL_S))


def prove_secret(group: RankGroup, key: bytes) -> None:
    """Check that all ranks know the secret from which `key` is derived. Collective.

    Raises LinkError with the name of a rank that does not know it.
    """
    own = group.rank
    # Fresh for each rank, so that an answer that was overheard proves nothing.
    nonces = {other: os.urandom(_CODE_BYTES) for other in group.ranks if other != own}
    theirs = _swap(group, nonces)
    answers = {
        # With the direction in it: an answer cannot be sent back as an answer.
        other: code_of(key, b"proof", nonce, f"{own} to {other}".encode())
        for other, nonce in theirs.items()
    }
    for other, answer in _swap(group, answers).items():
        expected = code_of(key, b"proof", nonces[other], f"{other} to {own}".encode())
        # In constant time, so that its duration reveals nothing of the code.
        if not hmac.compare_digest(answer, expected):
            raise LinkError(f"rank {other} of the link does not know its secret")


def _swap(group: RankGroup, messages: dict[int, bytes]) -> dict[int, bytes]:
    """Exchange messages of equal length with every other rank."""
    with group.errors("the link was not made"):
        return group.swap_bytes(messages, dict.fromkeys(messages, _CODE_BYTES))


def _comes(
    is_there: Callable[[], bool],
    deadline_s: float,
    presence: Heartbeat | None = None,
    awaited: str = "a process of the link",
) -> bool:
    """Wait for a condition; return whether it holds in time, or raise LinkError."""
    notice = WaitNotice(lambda: awaited)
    while not is_there():
        notice.check()
        if presence is not None:
            presence.check()
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
