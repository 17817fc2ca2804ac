"""Links between separate jobs: a trainer, and engines that come and go.

::

    trainer, 2 ranks          store at tcp://...            engine, 2 ranks
    connect(url, "trainer")  ---- sides, cards ----  connect(url, "engine")
    link.prepare(model)      ---- names, layouts ---  link.prepare(model)
    sync.run()               ======= weights ======>  sync.run()

1. Each side announces itself at the store that the trainer's first rank serves (`handshake`).
2. The trainer has a group with each engine (`membership`), its ranks followed by the engine's:
   layouts of either side count that side's ranks, and the group renumbers them
   (`reshard.torch.exchange.groups`).
3. A sync is a refit in each of these groups (`sync`). Engines are admitted between runs, and only
   their part is prepared.
4. Engines forward weights to each other, in groups of the ranks of both (`relay_tree`).

Nothing that arrives is unpickled. Weights are not encrypted.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from typing import Any, Literal

from reshard._validation import check_int
from reshard.errors import LinkError, ReshardError, UsageError
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.links import handshake, heartbeat, messages
from reshard.torch.links.engine_sync import EngineSync
from reshard.torch.links.membership import LinkMembers
from reshard.torch.links.sealed_store import LinkAddress
from reshard.torch.links.sync import WeightSync
from reshard.torch.links.trainer_sync import TrainerSync
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
    for what, value in (("timeout_s", timeout_s), ("silence_s", silence_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UsageError(f"{what}={value!r}; give a number of seconds above 0")
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
        members = LinkMembers(
            own, trainer or own, rank, address, store, presence, timeout_s, silence_s
        )
        members.join(engines)
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
    return WeightLink(members)


Side = Literal["trainer", "engine"]
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

    def __init__(self, members: LinkMembers) -> None:
        self._members = members
        self.side: Side = "trainer" if members.is_trainer else "engine"
        self.name, self.rank, self.ranks = members.own.name, members.rank, members.own.ranks
        self.url = str(members.address)
        # Runs of a link are serialized, for all its models.
        # A run in the background releases it in another thread, which an RLock would refuse.
        self._turn = threading.Lock()
        self._syncs = 0

    @property
    def is_closed(self) -> bool:
        """Whether this end has left the link."""
        return self._members.is_closed

    @property
    def engines(self) -> tuple[str, ...]:
        """The trainer's engines, by name; an engine has only itself."""
        return tuple(name for name, _ in self._members.groups.values())

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
        self._members.check_open()
        unknown = sorted(set(options) - set(messages.OPTIONS))
        if unknown:
            raise UsageError(f"options {unknown}; a link takes {', '.join(messages.OPTIONS)}")
        if self.side == "engine" and options:
            raise UsageError(f"options {sorted(options)} on an engine; the trainer says them")
        own_options = {"transforms": transforms, "topology": topology}
        with self._turn:
            if self.side == "engine":
                return self._prepare_engine(model, names, own_options)
            return self._prepare_trainer(model, names, relays, options, own_options)

    def _prepare_engine(
        self, model: Model, names: Naming | None, own_options: Mapping[str, Any]
    ) -> EngineSync:
        (group,) = (group for _, group in self._members.groups.values())
        read = messages.read_options(gather(b"", group)[group.ranks[0]])
        refit = Refit.prepare(None, model, target_names=names, group=group, **read, **own_options)
        gather(refit.target_digest.encode(), group)

        def prepare_relay(group: RankGroup, is_source: bool, batches: Mapping[str, int]) -> Refit:
            message = json.dumps(dict(batches)).encode() if is_source and not self.rank else b""
            first = gather(message, group)[group.ranks[0]]
            buckets = messages.read_message(dict[str, int], first, "table of an engine's buckets")
            side = (model, None) if is_source else (None, model)
            relayed = {name: read[name] for name in messages.RELAYED if name in read}
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
                **relayed,
            )

        sync = EngineSync(
            self._members, self._syncs, self._turn, refit=refit, group=group, prepare=prepare_relay
        )
        self._syncs += 1
        return sync

    def _prepare_trainer(
        self,
        model: Model,
        names: Naming | None,
        relays: bool,
        options: Mapping[str, Any],
        own_options: Mapping[str, Any],
    ) -> TrainerSync:
        message = messages.write_options({"buckets": "auto", **options})
        read = messages.read_options(message)

        def prepare_with(group: RankGroup) -> Refit:
            gather(message if self.rank == 0 else b"", group)
            return Refit.prepare(
                model, None, source_names=names, group=group, **read, **own_options
            )

        sync = TrainerSync(
            self._members,
            self._syncs,
            self._turn,
            relays=relays,
            needs_alike=bool(own_options["transforms"]),
            prepare=prepare_with,
        )
        for number, (engine_name, group) in self._members.groups.items():
            sync.prepare_for(number, engine_name, group)
        self._members.followers.append(sync)
        self._syncs += 1
        return sync

    def close(self) -> None:
        """Leave the link. Processes that wait for this process are notified.

        A trainer continues without the engine. The process that serves the store stays for a
        second, so that others can read the reason.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Close this end, and report the error that ends this side, if any."""
        if not self.is_closed:
            self._members.leave(format_reason(error))

    def __enter__(self) -> WeightLink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)


def format_reason(error: BaseException | None) -> str:
    """Return an error's type and the beginning of its text, for other processes."""
    if error is None:
        return ""
    line = (str(error).splitlines() or [""])[0]
    shown = line if len(line) <= _REASON_LENGTH else f"{line[:_REASON_LENGTH]} ..."
    return f" after {type(error).__name__}" + (f": {shown}" if shown else "")
