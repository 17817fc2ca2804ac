"""Links between jobs that were started apart: a trainer, and engines that come and go.

::

    trainer, 2 ranks          store at tcp://...            engine, 2 ranks
    connect(url, "trainer")  ---- sides, cards ----  connect(url, "engine")
    link.prepare(model)      ---- names, layouts ---  link.prepare(model)
    sync.run()               ======= weights ======>  sync.run()

1. Each side tells of itself at the store that the trainer's first rank serves (`admission`).
2. With each engine the trainer has a group of its own, of its ranks and then the engine's: layouts
   of either side count that side's ranks, and the group gives them numbers
   (`reshard.torch.exchange.groups`).
3. A sync is a refit within each of these groups (`sync`). Engines that came are admitted between
   runs, and only what concerns them is prepared.
4. Engines hand on weights to each other (`fan_out`), in groups of the ranks of both (`relay`).

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

from reshard.errors import LinkError, ReshardError, UsageError
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.rendezvous import Watch, leave_note, meet_at
from reshard.torch.links.address import LinkAddress
from reshard.torch.links.admission import (
    TRAINER,
    Announcement,
    explain_gone,
    has_left,
    leave,
    place_of,
    prove_secret,
    read_announcement,
    wait_for_engines,
)
from reshard.torch.links.engine_sync import EngineEnd, EngineSync
from reshard.torch.links.orders import (
    OPTIONS,
    RELAYED,
    HandOn,
    read_buckets,
    read_options,
    write_options,
)
from reshard.torch.links.presence import Presence
from reshard.torch.links.sealed_store import SealedStore
from reshard.torch.links.silence import ending_when_silent
from reshard.torch.links.sync import WeightSync
from reshard.torch.links.trainer_sync import RunAccount, TrainerEnd, TrainerSync, settle
from reshard.torch.models.given_models import Model
from reshard.torch.models.model_pairs import is_megatrons
from reshard.torch.models.naming import Naming
from reshard.torch.refitting.refit import Refit
from reshard.torch.refitting.transforms import Transform

Side = Literal["trainer", "engine"]
_LINGER_S = 1.0
# Who keeps others waiting gives up before they do: engines each other, then the trainer an engine,
# then engines the trainer. These parts of `timeout_s` are theirs.
_TRAINER_SHARE, _HAND_ON_SHARE = 1 / 2, 1 / 4
# The most seconds until processes that are all here are connected.
_CONNECT_S = 60.0
# How much of an error's text others are told.
_REASON_LENGTH = 400


class WeightLink:
    """One process's end of a link. Create it with `connect`; close it, or use it in a `with` block.

    Attributes:
        side: `"trainer"` or `"engine"`.
        name: of the engine; of the trainer, `"trainer"`.
        rank, ranks: the rank of this process, and the number of ranks of its side.
        url: the address of the store.
    """

    def __init__(
        self,
        own: Announcement,
        trainer: Announcement,
        rank: int,
        address: LinkAddress,
        store: SealedStore,
        presence: Presence,
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
        # Of a trainer: each engine's group by number; of an engine, the one group.
        self._groups: dict[int, tuple[str, RankGroup]] = {}
        self._seen: set[int] = set()
        self._lost: dict[str, str] = {}
        self._syncs: list[TrainerSync] = []
        self._engine_syncs: list[EngineSync] = []
        # Runs of one link follow one another, whatever model they are of.
        self._turn = threading.Lock()
        self._steps = 0
        # When the run began that was begun last.
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
            UsageError: an unknown option, or one on an engine.
        """
        self._check_open()
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UsageError(f"options {unknown}; a link takes {', '.join(OPTIONS)}")
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
        read = read_options(gather(b"", group).values[group.ranks[0]])
        refit = Refit.prepare(None, model, target_names=names, group=group, **read, **given)
        gather(refit.target_digest.encode(), group)

        def prepare_relay(group: RankGroup, is_source: bool, batches: Mapping[str, int]) -> Refit:
            said = json.dumps(dict(batches)).encode() if is_source and not self.rank else b""
            told = read_buckets(gather(said, group).values[group.ranks[0]])
            side = (model, None) if is_source else (None, model)
            given = {name: read[name] for name in RELAYED if name in read}
            # Between two engines that are not Megatron's, nobody finds these anew.
            own = refit.names
            return Refit.prepare(
                *side,
                source_names=own.target if is_source else None,
                target_names=None if is_source else own.target,
                stacks=own.stacks,
                ties=own.ties,
                num_experts=read.get("num_experts") if is_megatrons(model) else None,
                # The other engine may have more, and what it has is not the trainer's yet.
                strict=False,
                check_replicas=False,
                method="exchange",
                buckets=told,
                group=group,
                **given,
            )

        label = f"{self.name} rank {self.rank}"
        end = EngineEnd(label, self._turn, self._own.number, self._meet_engine, prepare_relay)
        sync = EngineSync(end, len(self._engine_syncs), refit, group)
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
        said = write_options({"buckets": "auto", **options})
        read = read_options(said)

        def prepare_with(group: RankGroup) -> Refit:
            gather(said if self.rank == 0 else b"", group)
            return Refit.prepare(model, None, source_names=names, group=group, **read, **given)

        end = TrainerEnd(
            f"{self.name} rank {self.rank}",
            self._turn,
            prepare_with,
            self._begin_run,
            self._give_up,
            self._take_lost,
            self._interrupt,
            self._settle,
        )
        is_transformed = bool(given["transforms"])
        sync = TrainerSync(end, len(self._syncs), self.ranks, relays, is_transformed)
        for number, (engine_name, group) in self._groups.items():
            sync.prepare_for(number, engine_name, group)
        self._syncs.append(sync)
        return sync

    def close(self) -> None:
        """Leave the link. Processes that wait for this one are notified.

        A trainer continues without the engine. The process that serves the store stays for a
        second, so that others can read the reason.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Close, and tell the others of the error that ends this side, if any."""
        if self.is_closed:
            return
        self.is_closed = True
        reason = tell_reason(error)
        with contextlib.suppress(RuntimeError, ReshardError):
            leave(self._store, self._own, self.rank, reason)
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
            # The server's own is needed for as long as the first rank's process has it.
            self._store.close()

    def __enter__(self) -> WeightLink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _check_open(self) -> None:
        if self.is_closed:
            raise LinkError("this end of the link is closed; connect again")

    def _begin_run(self) -> tuple[str, list[tuple[int, str, RankGroup]]]:
        """Admit engines that came and leave out those that left; all that are there then."""
        self._check_open()
        place = self._admit(0)
        self._begun_s = time.monotonic()
        return place, [(number, *both) for number, both in self._groups.items()]

    def _admit(self, fewest: int) -> str:
        """All ranks of the trainer learn from the first which engines come and go, and where."""
        key = f"step/{self._steps}"
        self._steps += 1
        with self._store_errors():
            if self.rank == 0:
                came = wait_for_engines(
                    self._store, self._seen, fewest, self._timeout_s, self._own, self._presence
                )
                left = [n for n in self._groups if has_left(self._store, n)]
                numbers = [one.number for one in came]
                self._store.set(key, json.dumps({"came": numbers, "left": left}))
            step = json.loads(self._store.get(key))
            came = [read_announcement(self._store, number) for number in step["came"]]
        for number in step["left"]:
            self._give_up(number, "it left")
        for one in came:
            self._seen.add(one.number)
            # One that comes again stands for the one that was there.
            for number, (name, _) in list(self._groups.items()):
                if name == one.name:
                    self._drop(number, "it came again")
            try:
                # The engines that are there already wait meanwhile: not as long as they would.
                group = self._meet(one, self._timeout_s * _TRAINER_SHARE)
                self._groups[one.number] = (one.name, group)
                for sync in self._syncs:
                    sync.prepare_for(one.number, one.name, group)
            except ReshardError as error:
                self._give_up(one.number, str(error), one.name)
        return key

    def _settle(self, place: str, own: RunAccount) -> RunAccount:
        """What a run came to, as all ranks of the trainer saw it."""
        with self._store_errors():
            limit_s = self._timeout_s * _TRAINER_SHARE
            if self.rank:
                # The first may wait so long for an engine that hangs, and then for other ranks.
                limit_s = max(limit_s, self._begun_s + self._timeout_s - time.monotonic())
            return settle(self._store, place, own, self._own, self.rank, limit_s, self._presence)

    def _join(self, engines: int) -> None:
        """Meet the other side."""
        if self.side == "trainer":
            self._admit(engines)
            if engines and not self._groups:
                told = "; ".join(f"{name}: {why}" for name, why in self._take_lost().items())
                raise LinkError(f"no engine could be linked: {told}")
            return
        self._groups[self._own.number] = (TRAINER, self._meet(self._own, self._timeout_s))

    def _meet(self, engine: Announcement, limit_s: float) -> RankGroup:
        """The group of the trainer's ranks and then an engine's."""
        ahead = self._trainer.ranks if self.side == "engine" else 0
        ranks = self._trainer.ranks + engine.ranks
        sides = (self._trainer, engine)
        return self._meet_at(place_of(engine.number), ahead, ranks, sides, limit_s)

    def _meet_engine(self, hand_on: HandOn) -> RankGroup:
        """The group of the ranks of an engine and then those of the one that it hands on to."""
        ahead = 0 if hand_on.source == self._own.number else hand_on.source_ranks
        ranks = hand_on.source_ranks + hand_on.target_ranks
        with self._store_errors():
            # The trainer ends the waiting for one that it lost; where that one's other ranks are
            # held here, it does not see it.
            pair = (hand_on.source, hand_on.target)
            sides = (self._trainer, *(read_announcement(self._store, one) for one in pair))
            limit_s = self._timeout_s * _HAND_ON_SHARE
            return self._meet_at(f"relay/{hand_on.meeting}", ahead, ranks, sides, limit_s)

    def _interrupt(self, hand_on: HandOn, number: int) -> None:
        """End the waiting for an engine that is lost."""
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
        sides: tuple[Announcement, ...],
        limit_s: float,
    ) -> RankGroup:
        """The group of all that meet at a place of the store, `ahead` of them before this side.

        Whoever else waits for this process must not be kept for all of its patience: `limit_s`.
        """
        meeting = meet_at(
            dist.PrefixStore(place, self._store),
            ahead + self.rank,
            ranks,
            datetime.timedelta(seconds=limit_s),
            watch=Watch(
                lambda: self._find_lost(sides),
                lambda: self._find_silent(sides),
                lambda: self._presence.seems_cut_off,
                min(limit_s, _CONNECT_S),
                lambda: ending_when_silent(self._silence_s),
            ),
            job=f"{self.name}/{self._own.number}",
            home_rank=self.rank,
            address=self._address.own_address(),
        )
        # Calls of a link come in one order, from threads that its two ends name otherwise.
        group = RankGroup(meeting, None, compares_threads=False)
        prove_secret(group, self._store.key)
        return group

    def _check_first(self) -> None:
        """Raise LinkError where the trainer's first rank is gone, with the reason that it left."""
        try:
            self._presence.check()
        except LinkError as error:
            if self._presence.is_cut_off:
                # So is the store.
                raise
            told = explain_gone(self._store, self._trainer, self._trainer.tokens[0])
            raise LinkError(told) from error

    def _find_lost(self, sides: tuple[Announcement, ...]) -> str:
        """Which process of some sides has ended; empty where all are there."""
        try:
            self._check_first()
        except LinkError as error:
            return str(error)
        for side in sides:
            token = self._presence.find_gone(side.tokens)
            if token:
                return explain_gone(self._store, side, token)
        return ""

    def _find_silent(self, sides: tuple[Announcement, ...]) -> str:
        """Whose host cannot be reached; empty where all can."""
        if self._presence.is_cut_off:
            return "the host of the trainer's first rank gives no sign of life"
        for side in sides:
            token = self._presence.find_gone(side.tokens, is_silent=True)
            if token:
                rank = side.tokens.index(token)
                return f"the host of {side.name_rank(rank)} gives no sign of life"
        return ""

    def _give_up(self, number: int, why: str, name: str = "") -> None:
        found = self._groups.get(number)
        with contextlib.suppress(RuntimeError):
            # Its connections are closed before the store says that it left.
            if has_left(self._store, number):
                why = f"it left; {why}"
        self._lost[name or (found[0] if found else str(number))] = why
        self._drop(number, why)

    def _drop(self, number: int, why: str) -> None:
        found = self._groups.pop(number, None)
        for sync in self._syncs:
            sync.forget(number)
        if found is not None and not found[1].has_failed:
            found[1].break_off(LinkError(f"the trainer gave the engine up: {why}"))

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


def tell_reason(error: BaseException | None) -> str:
    """Why somebody leaves, as others read it: an error's type, and how its text begins."""
    if error is None:
        return ""
    line = (str(error).splitlines() or [""])[0]
    shown = line if len(line) <= _REASON_LENGTH else f"{line[:_REASON_LENGTH]} ..."
    return f" after {type(error).__name__}" + (f": {shown}" if shown else "")
