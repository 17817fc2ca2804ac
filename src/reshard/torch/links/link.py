"""Links between separate jobs: a trainer, and engines that come and go.

::

    trainer, 2 ranks          store at tcp://...            engine, 2 ranks
    connect(url, "trainer")  ---- sides, cards ----  connect(url, "engine")
    link.prepare(model)      ---- names, layouts ---  link.prepare(model)
    sync.run()               ======= weights ======>  sync.run()

1. Each side announces itself at the store that the trainer's first rank serves (`handshake`).
2. The trainer has a group with each engine, its ranks followed by the engine's: layouts of either
   side count that side's ranks, and the group renumbers them (`reshard.torch.exchange.groups`).
3. A sync is a refit in each of these groups (`sync`). Engines are admitted between runs, and only
   their part is prepared.
4. Engines forward weights to each other, in groups of the ranks of both (`relay_tree`).

Nothing that arrives is unpickled. Weights are not encrypted.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch.distributed as dist

from reshard._validation import check_int
from reshard.errors import LinkError, ReshardError, UsageError
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.rendezvous import Watch, leave_note, meet_at
from reshard.torch.links import handshake, heartbeat, messages
from reshard.torch.links.engine_sync import EngineSync
from reshard.torch.links.sealed_store import LinkAddress, SealedStore
from reshard.torch.links.sync import WeightSync
from reshard.torch.links.trainer_sync import (
    RunSummary,
    TrainerSync,
    exchange_summaries,
)
from reshard.torch.models.model_inputs import Model
from reshard.torch.models.model_pairs import is_megatron
from reshard.torch.models.naming import Naming
from reshard.torch.refitting.refit import Refit
from reshard.torch.refitting.transforms import Transform

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
            names. An engine that reconnects under its name replaces the earlier engine.
        engines: how many engines the trainer waits for.
        secret: known only to processes of the link; the environment variable RESHARD_LINK_SECRET
            when None. It is required unless the address is a loopback address.
        timeout_s: how long to wait for others, here and in every run. A trainer waits half of it
            for an engine, so that other engines do not time out because of an engine that hangs.
        silence_s: after how long an unreachable host counts as failed.
        insecure: allow an address outside private networks, though weights are not encrypted.

    Raises:
        LinkError: the other side does not come, has another secret, or does not match.
        UsageError: invalid arguments, an address other than loopback without a secret, or an
            address outside private networks without `insecure`.
    """
    if side not in ("trainer", "engine"):
        raise UsageError(f"side={side!r}; it is 'trainer' or 'engine'")
    ranks = check_int(ranks, "ranks", minimum=1)
    rank = check_int(rank, "rank")
    engines = check_int(engines, "engines")
    if rank >= ranks:
        raise UsageError(f"rank={rank} of ranks={ranks}; give a rank from 0 to {ranks - 1}")
    if not isinstance(name, str) or not name or (side == "engine" and name == handshake.TRAINER):
        raise UsageError(
            f"name={name!r}; give a name for the engine, other than {handshake.TRAINER!r}"
        )
    for what, given in (("timeout_s", timeout_s), ("silence_s", silence_s)):
        if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
            raise UsageError(f"{what}={given!r}; give a number of seconds above 0")
    address = LinkAddress.of(url)
    if not insecure:
        address.check_privacy()
    is_server = side == "trainer" and rank == 0
    with heartbeat.user_timeout_for_new_connections(silence_s):
        store = address.open_store(is_server, address.find_secret(secret), timeout_s)
    presence: heartbeat.Heartbeat | None = None
    own: handshake.Announcement | None = None
    try:
        trainer = None if side == "trainer" else handshake.find_trainer(store, timeout_s)
        if is_server:
            presence = heartbeat.HeartbeatServer(store, address.own_address(), silence_s)
        else:
            presence = heartbeat.HeartbeatClient(store, timeout_s, silence_s)
        store.check_others = presence.check
        own_name = handshake.TRAINER if side == "trainer" else name
        own = handshake.announce(store, own_name, rank, ranks, timeout_s, presence)
        link = WeightLink(own, trainer or own, rank, address, store, presence, timeout_s, silence_s)
        link._join(engines)
    except BaseException as error:
        # Report the reason to processes that wait for this process.
        if own is not None:
            with contextlib.suppress(RuntimeError, ReshardError):
                handshake.leave(store, own, rank, format_reason(error))
        if presence is not None:
            presence.close()
        is_ours = isinstance(error, ReshardError)
        if is_ours or not isinstance(error, RuntimeError | ValueError | OSError):
            raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise LinkError(f"the store at {address} does not answer: {line}") from error
    return link


Side = Literal["trainer", "engine"]
_LINGER_S = 1.0
# Timeouts are staggered so that the failing peer is reported by whoever waits on it directly:
# engine-to-engine first, then trainer-to-engine, then engine-to-trainer. These are their parts of
# `timeout_s`.
_TRAINER_SHARE, _HAND_ON_SHARE = 1 / 2, 1 / 4
# The seconds in which processes that are all present must connect.
_CONNECT_S = 60.0
# The maximum length of error texts that are sent to others.
_REASON_LENGTH = 400


class WeightLink:
    """A process's end of a link. Create it with `connect`; close it, or use it in a `with` block.

    Attributes:
        side: `"trainer"` or `"engine"`.
        name: of the engine; of the trainer, `"trainer"`.
        rank, ranks: the rank of this process, and the number of ranks of its side.
        url: the address of the store.
    """

    def __init__(
        self,
        own: handshake.Announcement,
        trainer: handshake.Announcement,
        rank: int,
        address: LinkAddress,
        store: SealedStore,
        presence: heartbeat.Heartbeat,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        self._own, self._trainer, self._presence = own, trainer, presence
        self._address, self._store = address, store
        store.check_others = self._check_first
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self.side: Side = "trainer" if own == trainer else "engine"
        self.name, self.rank, self.ranks = own.name, rank, own.ranks
        self.url = str(address)
        self.is_closed = False
        # On a trainer, each engine's group by number; on an engine, a single group.
        self._groups: dict[int, tuple[str, RankGroup]] = {}
        self._seen: set[int] = set()
        self._lost: dict[str, str] = {}
        self._syncs: list[TrainerSync] = []
        self._engine_syncs: list[EngineSync] = []
        # Runs of a link are serialized, for all its models.
        self._turn = threading.Lock()
        self._steps = 0
        # The start time of the last run.
        self._begun_s = 0.0

    @property
    def engines(self) -> tuple[str, ...]:
        """The trainer's engines, by name; an engine has only itself."""
        return tuple(name for name, _ in self._groups.values())

    def prepare(
        self,
        model: Model,
        *,
        names: Naming | None = None,
        transforms: Mapping[str, Transform] | None = None,
        topology: Any = None,
        relays: bool = True,
        **options: Any,
    ) -> WeightSync:
        """Compare the model with the other side's, plan, and allocate what every run needs.

        All processes of all sides call this, each with its own model.

        Args:
            model: as this process has it: see `reshard.torch.refit`. Layouts and DTensors use the
                ranks of this side's own job.
            names: map its names to names common to both sides.
            transforms: see `reshard.torch.refit`; the same on both sides.
            topology: the hosts of the ranks, the trainer's before the engine's.
            relays: on the trainer, whether engines on separate hosts forward weights to each other,
                so that weights leave the trainer's hosts only once.
            options: on the trainer: `ties`, `stacks`, `num_experts`, `cast`, `strict`, `method`,
                `extra_bytes`, `buckets`, `changed_only`, `quantize` of `reshard.torch.refit`.
                Engines receive them.

        Raises:
            ShardError: on every process, everything that does not match.
            LinkError: the other side is gone.
            UsageError: an unknown option, or any option on an engine.
        """
        self._check_open()
        unknown = sorted(set(options) - set(messages.OPTIONS))
        if unknown:
            raise UsageError(f"options {unknown}; a link takes {', '.join(messages.OPTIONS)}")
        if self.side == "engine" and options:
            raise UsageError(f"options {sorted(options)} on an engine; the trainer says them")
        given = {"transforms": transforms, "topology": topology}
        with self._turn:
            if self.side == "engine":
                return self._prepare_engine(model, names, given)
            return self._prepare_trainer(model, names, relays, options, given)

    def _prepare_engine(
        self, model: Model, names: Naming | None, given: Mapping[str, Any]
    ) -> EngineSync:
        (group,) = (group for _, group in self._groups.values())
        read = messages.read_options(gather(b"", group)[group.ranks[0]])
        refit = Refit.prepare(None, model, target_names=names, group=group, **read, **given)
        gather(refit.target_digest.encode(), group)

        def prepare_relay(group: RankGroup, is_source: bool, batches: Mapping[str, int]) -> Refit:
            message = json.dumps(dict(batches)).encode() if is_source and not self.rank else b""
            told = gather(message, group)[group.ranks[0]]
            buckets = messages.read_message(dict[str, int], told, "table of an engine's buckets")
            side = (model, None) if is_source else (None, model)
            given = {name: read[name] for name in messages.RELAYED if name in read}
            # The names of two engines that are not Megatron's need no new search.
            own = refit.names
            return Refit.prepare(
                *side,
                source_names=own.target if is_source else None,
                target_names=None if is_source else own.target,
                stacks=own.stacks,
                ties=own.ties,
                num_experts=read.get("num_experts") if is_megatron(model) else None,
                # The other engine may have more tensors, without the trainer's values yet.
                strict=False,
                check_replicas=False,
                method="exchange",
                buckets=buckets,
                group=group,
                **given,
            )

        sync = EngineSync(
            f"{self.name} rank {self.rank}",
            len(self._engine_syncs),
            self._turn,
            engine=self._own.number,
            refit=refit,
            group=group,
            meet=self._meet_engine,
            prepare=prepare_relay,
        )
        self._engine_syncs.append(sync)
        return sync

    def _prepare_trainer(
        self,
        model: Model,
        names: Naming | None,
        relays: bool,
        options: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> TrainerSync:
        said = messages.write_options({"buckets": "auto", **options})
        read = messages.read_options(said)

        def prepare_with(group: RankGroup) -> Refit:
            gather(said if self.rank == 0 else b"", group)
            return Refit.prepare(model, None, source_names=names, group=group, **read, **given)

        sync = TrainerSync(
            f"{self.name} rank {self.rank}",
            len(self._syncs),
            self._turn,
            ranks=self.ranks,
            relays=relays,
            needs_alike=bool(given["transforms"]),
            prepare=prepare_with,
            begin=self._begin_run,
            give_up=self._give_up,
            take_lost=self._take_lost,
            interrupt=self._interrupt,
            exchange_summaries=self._settle,
        )
        for number, (engine_name, group) in self._groups.items():
            sync.prepare_for(number, engine_name, group)
        self._syncs.append(sync)
        return sync

    def close(self) -> None:
        """Leave the link. Processes that wait for this process are notified.

        A trainer continues without the engine. The process that serves the store stays for a
        second, so that others can read the reason.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Close, and report the error that ends this side, if any."""
        if self.is_closed:
            return
        self.is_closed = True
        reason = format_reason(error)
        with contextlib.suppress(RuntimeError, ReshardError):
            handshake.leave(self._store, self._own, self.rank, reason)
        groups = [group for _, group in self._groups.values()]
        self._groups.clear()
        closed = LinkError(f"{self.name} closed the link{reason}")
        for group in groups:
            group.break_off(closed)
        for sync in self._engine_syncs:
            sync.close(closed)
        self._presence.close()
        if self.side == "trainer" and self.rank == 0:
            time.sleep(_LINGER_S if groups else 0)
        else:
            # The server's connection is needed as long as the first rank's process has it.
            self._store.close()

    def __enter__(self) -> WeightLink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _check_open(self) -> None:
        if self.is_closed:
            raise LinkError("this end of the link is closed; connect again")

    def _begin_run(self) -> tuple[str, list[tuple[int, str, RankGroup]]]:
        """Admit new engines and drop those that left; return all that are present."""
        self._check_open()
        place = self._admit(0)
        self._begun_s = time.monotonic()
        return place, [(number, *both) for number, both in self._groups.items()]

    def _admit(self, fewest: int) -> str:
        """Receive from the first rank which engines come and go, and meet new engines."""
        key = f"step/{self._steps}"
        self._steps += 1
        with self._store_errors():
            if self.rank == 0:
                came = handshake.wait_for_engines(
                    self._store, self._seen, fewest, self._timeout_s, self._own, self._presence
                )
                left = [n for n in self._groups if handshake.has_left(self._store, n)]
                numbers = [one.number for one in came]
                self._store.set(key, json.dumps({"came": numbers, "left": left}))
            step = json.loads(self._store.get(key))
            came = [handshake.read_announcement(self._store, number) for number in step["came"]]
        for number in step["left"]:
            self._give_up(number, "it left")
        for one in came:
            self._seen.add(one.number)
            # A returning engine replaces the earlier engine.
            for number, (name, _) in list(self._groups.items()):
                if name == one.name:
                    self._drop(number, "it came again")
            try:
                # Present engines wait meanwhile, so the limit is below their timeout.
                group = self._meet(one, self._timeout_s * _TRAINER_SHARE)
                self._groups[one.number] = (one.name, group)
                for sync in self._syncs:
                    sync.prepare_for(one.number, one.name, group)
            except ReshardError as error:
                self._give_up(one.number, str(error), one.name)
        return key

    def _settle(self, place: str, own: RunSummary) -> RunSummary:
        """Return the result of a run, combined over all ranks of the trainer."""
        with self._store_errors():
            limit_s = self._timeout_s * _TRAINER_SHARE
            if self.rank:
                # The first rank may wait this long for a hanging engine, and then for other ranks.
                limit_s = max(limit_s, self._begun_s + self._timeout_s - time.monotonic())
            return exchange_summaries(
                self._store, place, own, self._own, self.rank, limit_s, self._presence
            )

    def _join(self, engines: int) -> None:
        """Meet the other side."""
        if self.side == "trainer":
            self._admit(engines)
            if engines and not self._groups:
                told = "; ".join(f"{name}: {why}" for name, why in self._take_lost().items())
                raise LinkError(f"no engine could be linked: {told}")
            return
        self._groups[self._own.number] = (handshake.TRAINER, self._meet(self._own, self._timeout_s))

    def _meet(self, engine: handshake.Announcement, limit_s: float) -> RankGroup:
        """Return the group of the trainer's ranks and an engine's."""
        ahead = self._trainer.ranks if self.side == "engine" else 0
        ranks = self._trainer.ranks + engine.ranks
        sides = (self._trainer, engine)
        return self._meet_at(handshake.rendezvous_key(engine.number), ahead, ranks, sides, limit_s)

    def _meet_engine(self, hand_on: messages.ForwardOrder) -> RankGroup:
        """Return the group of an engine's ranks and those of the engine that it forwards to."""
        ahead = 0 if hand_on.source == self._own.number else hand_on.source_ranks
        ranks = hand_on.source_ranks + hand_on.target_ranks
        with self._store_errors():
            # The trainer ends the waiting for an engine that it lost; other ranks of that engine
            # are not detected if they are held here.
            pair = (hand_on.source, hand_on.target)
            sides = (
                self._trainer,
                *(handshake.read_announcement(self._store, one) for one in pair),
            )
            limit_s = self._timeout_s * _HAND_ON_SHARE
            return self._meet_at(f"relay/{hand_on.meeting}", ahead, ranks, sides, limit_s)

    def _interrupt(self, hand_on: messages.ForwardOrder, number: int) -> None:
        """End the waiting for a lost engine."""
        if self.rank:
            return
        position = 0 if number == hand_on.source else hand_on.source_ranks
        with contextlib.suppress(RuntimeError):
            store = dist.PrefixStore(f"relay/{hand_on.meeting}", self._store)
            leave_note(store, 0, position, "the trainer lost this engine")

    def _meet_at(
        self,
        place: str,
        ahead: int,
        ranks: int,
        sides: tuple[handshake.Announcement, ...],
        limit_s: float,
    ) -> RankGroup:
        """Return the group of the ranks that meet at a key, `ahead` of them before this side's.

        `limit_s` shortens the wait if other processes wait for this process meanwhile.
        """
        meeting = meet_at(
            dist.PrefixStore(place, self._store),
            ahead + self.rank,
            ranks,
            datetime.timedelta(seconds=limit_s),
            watch=Watch(
                lambda: self._find_lost(sides),
                lambda: self._find_silent(sides),
                lambda: self._presence.seems_disconnected,
                min(limit_s, _CONNECT_S),
                lambda: heartbeat.user_timeout_for_new_connections(self._silence_s),
            ),
            job=f"{self.name}/{self._own.number}",
            home_rank=self.rank,
            address=self._address.own_address(),
        )
        # Calls of a link have the same order on all ends, but their threads have different names.
        group = RankGroup(meeting, None, compares_threads=False)
        handshake.prove_secret(group, self._store.key)
        return group

    def _check_first(self) -> None:
        """Raise LinkError if the trainer's first rank is gone, with its reason."""
        try:
            self._presence.check()
        except LinkError as error:
            if self._presence.is_disconnected:
                # The store is unreachable as well.
                raise
            told = handshake.explain_departure(self._store, self._trainer, self._trainer.tokens[0])
            raise LinkError(told) from error

    def _find_lost(self, sides: tuple[handshake.Announcement, ...]) -> str:
        """Return which process of the sides has ended, or an empty text."""
        try:
            self._check_first()
        except LinkError as error:
            return str(error)
        for side in sides:
            token = self._presence.find_departed(side.tokens)
            if token:
                return handshake.explain_departure(self._store, side, token)
        return ""

    def _find_silent(self, sides: tuple[handshake.Announcement, ...]) -> str:
        """Return whose host is unreachable, or an empty text."""
        if self._presence.is_disconnected:
            return "the host of the trainer's first rank gives no sign of life"
        for side in sides:
            token = self._presence.find_departed(side.tokens, is_silent=True)
            if token:
                rank = side.tokens.index(token)
                return f"the host of {side.name_rank(rank)} gives no sign of life"
        return ""

    def _give_up(self, number: int, why: str, name: str = "") -> None:
        known = self._groups.get(number)
        with contextlib.suppress(RuntimeError):
            # Its connections close before the store has its note.
            if handshake.has_left(self._store, number):
                why = f"it left; {why}"
        self._lost[name or (known[0] if known else str(number))] = why
        self._drop(number, why)

    def _drop(self, number: int, why: str) -> None:
        known = self._groups.pop(number, None)
        for sync in self._syncs:
            sync.forget(number)
        if known is not None and not known[1].has_failed:
            known[1].break_off(LinkError(f"the trainer gave the engine up: {why}"))

    def _take_lost(self) -> dict[str, str]:
        lost, self._lost = self._lost, {}
        return lost

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise LinkError(f"the store at {self.url} does not answer: {line}") from error


def format_reason(error: BaseException | None) -> str:
    """Return an error's type and the beginning of its text, for other processes."""
    if error is None:
        return ""
    line = (str(error).splitlines() or [""])[0]
    shown = line if len(line) <= _REASON_LENGTH else f"{line[:_REASON_LENGTH]} ..."
    return f" after {type(error).__name__}" + (f": {shown}" if shown else "")
