"""How a process joins a link: it finds the store, tells of itself, and meets the other side."""

from __future__ import annotations

import contextlib

from reshard._validation import check_int
from reshard.errors import LinkError, ReshardError, UsageError
from reshard.torch.links.address import LinkAddress
from reshard.torch.links.admission import TRAINER, Announcement, announce, find_trainer, leave
from reshard.torch.links.link import Side, WeightLink, tell_reason
from reshard.torch.links.presence import Presence, PresenceDesk, PresenceLine
from reshard.torch.links.silence import ending_when_silent

_PATIENCE_S = 1800.0
_SILENCE_S = 3.0


def connect(
    url: str,
    side: Side,
    *,
    rank: int,
    ranks: int,
    name: str = "engine",
    engines: int = 1,
    secret: str | None = None,
    timeout_s: float = _PATIENCE_S,
    silence_s: float = _SILENCE_S,
    insecure: bool = False,
) -> WeightLink:
    """Connect this process to the other side, which is a separate job.

    All processes of a side call this. The trainer's processes wait for the first engines. Later
    engines are admitted at the trainer's next run; their `connect` returns then.

    Args:
        url: the address of the store, such as `tcp://10.0.0.1:29400`. The trainer's first rank
            serves it, and all processes of both sides must reach it.
        side: `"trainer"`, which sends weights, or `"engine"`, which receives them.
        rank, ranks: the rank of this process, and the number of ranks of its side.
        name: of the engine, the same on all of its processes; concurrent engines have different
            names. An engine that reconnects under its name replaces the earlier one.
        engines: how many engines the trainer waits for.
        secret: known only to processes of the link; the environment variable RESHARD_LINK_SECRET
            when None. It is required unless the address is a loopback address.
        timeout_s: how long to wait for others, here and in every run. A trainer waits half of it
            for an engine, so that other engines do not time out because of one that hangs.
        silence_s: after how long an unreachable host counts as failed.
        insecure: allow an address outside private networks, though weights are not encrypted.

    Raises:
        LinkError: the other side does not come, has another secret, or does not match.
        UsageError: invalid arguments, an address other than loopback without a secret, or one
            outside private networks without `insecure`.
    """
    if side not in ("trainer", "engine"):
        raise UsageError(f"side={side!r}; it is 'trainer' or 'engine'")
    ranks = check_int(ranks, "ranks", minimum=1)
    rank = check_int(rank, "rank")
    engines = check_int(engines, "engines")
    if rank >= ranks:
        raise UsageError(f"rank={rank} of ranks={ranks}; give a rank from 0 to {ranks - 1}")
    if not isinstance(name, str) or not name or (side == "engine" and name == TRAINER):
        raise UsageError(f"name={name!r}; give a name for the engine, other than {TRAINER!r}")
    for what, given in (("timeout_s", timeout_s), ("silence_s", silence_s)):
        if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
            raise UsageError(f"{what}={given!r}; give a number of seconds above 0")
    address = LinkAddress.of(url)
    if not insecure:
        address.check_privacy()
    is_server = side == "trainer" and rank == 0
    with ending_when_silent(silence_s):
        store = address.open_store(is_server, address.find_secret(secret), timeout_s)
    presence: Presence | None = None
    own: Announcement | None = None
    try:
        trainer = None if side == "trainer" else find_trainer(store, timeout_s)
        if is_server:
            presence = PresenceDesk(store, address.own_address(), silence_s)
        else:
            presence = PresenceLine(store, timeout_s, silence_s)
        store.check_others = presence.check
        own_name = TRAINER if side == "trainer" else name
        own = announce(store, own_name, rank, ranks, timeout_s, presence)
        link = WeightLink(own, trainer or own, rank, address, store, presence, timeout_s, silence_s)
        link._join(engines)
    except BaseException as error:
        # Who waits for this process learns that it does not come, and why.
        if own is not None:
            with contextlib.suppress(RuntimeError, ReshardError):
                leave(store, own, rank, tell_reason(error))
        if presence is not None:
            presence.close()
        is_ours = isinstance(error, ReshardError)
        if is_ours or not isinstance(error, RuntimeError | ValueError | OSError):
            raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise LinkError(f"the store at {address} does not answer: {line}") from error
    return link
