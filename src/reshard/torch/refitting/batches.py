"""Batches of a refit on a rank: exchanges and transforms, with memory prepared once.

Batches run in order, in the same memory::

    extra_bytes   | messages in transit | elements of transformed tensors, sent and received |
    buckets         straight from the source into the target, no memory in between
    other batches   prepare_send  ->  exchange  ->  finish_receive
                    computed at the source  ->  exchange, straight into the target

A part without transformed tensors has only buckets, and all the memory for their messages.

A batch has a single stage, or as many stages as its longest program has steps. The first steps of
all programs share an exchange of messages with the exchanged tensors; then all second steps run::

    stage 0   exchanged tensors, first steps     source -> target, source -> next shard
    stage 1   second steps                       shard  -> shard or target

A tensor that is sent in stages between hosts has all steps of its pipeline in stage 0
(`exchange.stages`).

Shards between steps are stored in the source, in the target (`programs.phases`), or in the
batch's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import torch

from reshard.collectives.program import Program
from reshard.plans.schedule import align
from reshard.torch.exchange.agreement import confirm
from reshard.torch.exchange.changes import ChangedOnly, ChangeExchange, ChangeUnit
from reshard.torch.exchange.exchange import MessageExchange, find_partitioning
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import RankTransfers, stage_transfers
from reshard.torch.exchange.timeline import span
from reshard.torch.models.memory import LocalTensors
from reshard.torch.programs.phases import ShardBuffers, phases_of
from reshard.torch.refitting.matching import Match
from reshard.torch.refitting.members import IndexRange
from reshard.torch.refitting.plan import PartItem, RefitPart, staging_limit_bytes
from reshard.torch.refitting.transforms import Transform

# The names of a model's tensors, and a number for each, equal for equal memory layouts.
_Looks: TypeAlias = tuple[list[str], Sequence[int]]


class BatchObserver(Protocol):
    """Callbacks of a run, called in its thread with each batch's number; errors end the run."""

    def begin(self, number: int, /) -> None:
        """Handle the start of a batch, before this rank reads or writes any of its tensors."""

    def end(self, number: int, /) -> None:
        """Handle the end of a batch, when this rank has read and written all of its tensors."""


@dataclass(slots=True, eq=False)
class RefitBatch:
    """The exchanges of a batch, in order, and the calls of transforms before and after them."""

    exchanges: list[MessageExchange | ChangeExchange]
    before: list[Callable[[], None]]
    after: list[Callable[[], None]]


class _Arena:
    """Memory that is allocated piece by piece and released as a whole."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._used_bytes = 0

    def clear(self) -> None:
        self._used_bytes = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor in the memory."""
        begin, size_bytes = self._used_bytes, math.prod(shape) * dtype.itemsize
        self._used_bytes += align(size_bytes)
        return self.memory[begin : begin + size_bytes].view(dtype).view(tuple(shape))


@dataclass(slots=True, eq=False)
class _ItemKind:
    """Items that differ only in their tensors: the first item, and all numbers and names."""

    first: PartItem
    numbers: list[int] = field(default_factory=list)
    source_names: list[str] = field(default_factory=list)
    target_names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _GroupedItems:
    """The items of each batch: kinds of items that are only exchanged, and numbered other items.

    `signatures` describe which tensors of source and target have equal memory layouts.
    """

    signatures: list[_Looks]
    kinds: list[list[_ItemKind]]
    singles: list[list[tuple[int, PartItem]]]


def _group(part: RefitPart, signatures: list[_Looks]) -> _GroupedItems:
    """Group the items of a part by kind."""
    kinds: list[dict[object, _ItemKind]] = [{} for _ in range(part.batches)]
    singles: list[list[tuple[int, PartItem]]] = [[] for _ in range(part.batches)]
    sources, targets = (dict(zip(*of_side, strict=True)) for of_side in signatures)
    for number, item in enumerate(part.items):
        match, change, transfers, batch, chosen, handed_on, *_ = item
        if match.made_at or handed_on or chosen.program or chosen.is_staged_whole:
            singles[batch].append((number, item))
            continue
        key = (
            # Equal changes are the same object, and so are equal transfers.
            id(change),
            id(transfers),
            match.dtype,
            match.source_range,
            match.target_range,
            sources.get(match.source_name),
            targets.get(match.target_name),
        )
        kind = kinds[batch].get(key)
        if kind is None:
            kind = kinds[batch][key] = _ItemKind(item)
        kind.numbers.append(number)
        kind.source_names.append(match.source_name)
        kind.target_names.append(match.target_name)
    return _GroupedItems(signatures, [list(of_batch.values()) for of_batch in kinds], singles)


class RefitBatches:
    """All batches of a rank. `extra_bytes` is the memory they need beyond source and target.

    Args:
        part: the tensors that the rank sends, keeps or receives.
        source, target: its tensors.
        transforms: by the names of the targets that they create.
        device: of the tensors.
        extra_bytes: the maximum memory to use, in addition to `kept_bytes`.
        group: of all ranks.
        changed_only: how changes are found, if only changes are sent.
        like: other batches of the part: if their source is the same, so are the messages to send.
    """

    def __init__(
        self,
        part: RefitPart,
        source: LocalTensors,
        target: LocalTensors,
        transforms: Mapping[str, Transform],
        device: torch.device,
        extra_bytes: int,
        group: RankGroup,
        changed_only: ChangedOnly = False,
        like: RefitBatches | None = None,
    ) -> None:
        self._changed_only = changed_only
        # Whether the target has the source's values of a run that all ranks confirmed.
        self.is_complete = False
        self._source, self._target, self._transforms = source.locals, target.locals, transforms
        self._group, self._device = group, device
        self._arena = _Arena(0, device)
        self._buckets = part.buckets
        if part.batches > part.buckets:
            self._arena = _Arena(part.staging_bytes, device)
            # Messages and staged elements share the limit.
            extra_bytes -= staging_limit_bytes(extra_bytes)
        signatures = [(list(s.locals), s.own_memory.numbers) for s in (source, target)]
        # Batches of a part have the same kinds if their tensors have equal memory layouts.
        grouped = None if like is None else like._grouped
        if grouped is None or grouped.signatures != signatures:
            grouped = _group(part, signatures)
        self._grouped: _GroupedItems = grouped
        kinds, singles = grouped.kinds, grouped.singles
        # The messages to send depend on this value, the part and the source. None if elements are
        # staged.
        self._partitioning: tuple[object, ...] | None = None
        if not changed_only and not any(singles):
            self._partitioning = find_partitioning(group, device, extra_bytes)
        is_like = (
            like is not None
            and self._partitioning is not None
            and like._partitioning == self._partitioning
            and like._source is self._source
        )
        known = like if is_like else None
        listed = [_BatchContents() for _ in range(part.batches)]
        for of_kinds, alone, found in zip(kinds, singles, listed, strict=True):
            # Batches run in order, so all of them use the same memory.
            self._arena.clear()
            for number, item in alone:
                self._list(number, item, found)
            for kind in of_kinds:
                if known is None or group.rank in kind.first.change.target.local_shapes:
                    self._list_kind(kind, found)
        self._shared: torch.Tensor | None = None
        # A single exchange allocates only the memory that its messages need.
        if sum(len(found.stages) + bool(changed_only) for found in listed) > 1:
            self._shared = known._shared if known is not None and known._group is group else None
            if self._shared is None:
                self._shared = group.staging_memory(extra_bytes, device)
        shared = self._shared
        self.batches = []
        unit: ChangeUnit = "blocks" if changed_only == "blocks" else "elements"
        for number, found in enumerate(listed):
            others = [] if known is None else known._messages_of(number)
            ends = (group.rank, group, device, extra_bytes)
            exchanges: list[MessageExchange | ChangeExchange] = [
                MessageExchange(
                    tensors, *ends, memory=shared, like=others[stage] if others else None
                )
                for stage, tensors in enumerate(found.stages)
            ]
            if changed_only:
                near, staged = (
                    None if of is None else MessageExchange(of, *ends, memory=shared)
                    for of in (found.near, found.staged_whole)
                )
                changes = ChangeExchange(
                    found.compared, group, device, unit, extra_bytes, shared, near, staged
                )
                exchanges.insert(0, changes)
            self.batches.append(RefitBatch(exchanges, found.before, found.after))
        own_bytes = sum(exchange.extra_bytes for exchange in self._exchanges)
        self.extra_bytes = self._arena.memory.numel() + (
            own_bytes if shared is None else shared.numel()
        )

    @property
    def _exchanges(self) -> Iterator[MessageExchange | ChangeExchange]:
        return (exchange for batch in self.batches for exchange in batch.exchanges)

    def _messages_of(self, number: int) -> list[MessageExchange]:
        return [one for one in self.batches[number].exchanges if isinstance(one, MessageExchange)]

    @property
    def sent_bytes(self) -> int:
        """The bytes this rank sends in a run; if only changes are sent, those of the last run."""
        return sum(exchange.sent_bytes for exchange in self._exchanges)

    @property
    def received_bytes(self) -> int:
        """The bytes this rank receives, counted as `sent_bytes`."""
        return sum(exchange.received_bytes for exchange in self._exchanges)

    @property
    def kept_bytes(self) -> int:
        """The memory of the copies or digests of sent elements."""
        return sum(one.kept_bytes for one in self._compared)

    @property
    def _compared(self) -> Iterator[ChangeExchange]:
        return (one for one in self._exchanges if isinstance(one, ChangeExchange))

    def seems_changed(self) -> bool:
        """Return whether sending all elements in stages is faster, since most have changed.

        False if this rank sends tensors that are not staged in such runs: comparing is cheap.
        """
        return all(one.seems_changed() for one in self._compared)

    def _list_kind(self, kind: _ItemKind, found: _BatchContents) -> None:
        """Add the transfers of the tensors or pieces of a kind to a batch."""
        first, rank = kind.first, self._group.rank
        match, dtype = first.match, getattr(torch, first.match.dtype)
        sources = list(map(self._source.get, kind.source_names))
        targets = list(map(self._target.get, kind.target_names))
        if match.source_range is not None:
            sources = [match.source_range.of(local, rank) for local in sources]
        if match.target_range is not None:
            targets = [match.target_range.of(local, rank) for local in targets]
        moved = RankTransfers.of(first.change, first.transfers, rank, None, None, dtype)
        moved = moved._replace(sources=sources, targets=targets, numbers=kind.numbers)
        near, compared = self._split(moved, match)
        found.compared += filter(None, [compared])
        found.stages[0] += filter(None, [near])

    def _split(
        self, moved: RankTransfers, match: Match
    ) -> tuple[RankTransfers | None, RankTransfers | None]:
        """Split transfers into those sent whole, and those of which only changes are sent."""
        if not (self._changed_only and match.can_be_compared):
            return moved, None
        # Copying memory that ranks share takes a third of the time of a comparison.
        shared = self._group.shared_memory if self._changed_only is True else None
        return moved.split({self._group.rank, *shared.ranks} if shared is not None else set())

    def _list(self, number: int, item: PartItem, found: _BatchContents) -> None:
        """Add a tensor or piece that is not only exchanged to a batch."""
        match, rank = item.match, self._group.rank
        dtype = getattr(torch, match.dtype)
        source = self._source.get(match.source_name)
        target = self._target.get(match.target_name)
        if item.chosen.program is not None:
            self._list_program(number, item.chosen.program, source, target, dtype, found)
            return
        if match.made_at:
            source, target = self._stage_transform(match, source, target, dtype, found)
        elif match.source_range is not None:
            source = match.source_range.of(source, rank)
        if match.target_range is not None:
            target = match.target_range.of(target, rank)
        ends = (source, target, dtype)
        if item.handed_on:
            stages = [rows for _, rows in item.stages]
            staged = stage_transfers(item.change, stages, item.span, rank, *ends)
            found.stages[0] += [one._replace(numbers=[number]) for one in staged]
            return
        moved = RankTransfers.of(item.change, item.transfers, rank, *ends)
        moved = moved._replace(numbers=[number])
        near, compared = self._split(moved, match)
        found.compared += filter(None, [compared])
        if not (self._changed_only and match.can_be_compared and item.chosen.is_staged_whole):
            found.stages[0] += filter(None, [near])
            return
        # Set it also if this rank has no part in the stages, so that it sends nothing directly.
        found.near = [*(found.near or ()), *filter(None, [near])]
        staged = stage_transfers(item.change, item.whole_stages, item.span, rank, *ends)
        staged = (one._replace(numbers=[number]) for one in staged)
        found.staged_whole = [*(found.staged_whole or ()), *staged]

    def _list_program(
        self,
        number: int,
        program: Program,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        found: _BatchContents,
    ) -> None:
        """Add the steps of a program that move elements, each in its own stage."""
        rank = self._group.rank
        ends = (source, target, dtype, self._device)
        buffers = ShardBuffers(phases_of(program, rank), rank, *ends, self._arena.tensor)
        for stage, (_, transfers) in enumerate(buffers.transfers()):
            if stage == len(found.stages):
                found.stages.append([])
            found.stages[stage].append(transfers._replace(numbers=[number]))

    def _stage_transform(
        self,
        match: Match,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        found: _BatchContents,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the tensors that a transform's elements are sent from and received in."""
        name, rank = match.made_of, self._group.rank
        transform, index_range = self._transforms[name], match.source_range
        part = source if index_range is None else index_range.of(source, rank)
        sent = None
        if part is not None:
            sent = self._arena.tensor(match.source.local_shape(rank) or (), dtype)
        if match.made_at == "source":
            made = found.made.setdefault((name, index_range), {})
            if part is not None and sent is not None:
                if not made:
                    found.before.append(partial(transform.finish_receive, name, part, made))
                made[match.target_name] = sent
            return sent, target
        if part is not None and sent is not None:
            found.before.append(partial(transform.prepare_send, name, part, sent))
        if target is not None and name not in found.received:
            received = self._arena.tensor(target.shape, dtype)
            outputs = {
                one: self._target[one] for one in transform.outputs(name) if one in self._target
            }
            found.received[name] = received
            found.after.append(partial(transform.finish_receive, name, received, outputs))
        return sent, found.received.get(name)

    def run(self, observer: BatchObserver | None = None, *, is_whole: bool = True) -> None:
        """Run all batches; all ranks confirm the end.

        If only changes are sent, `is_whole` sends all elements; it is equal on all ranks.

        Raises RunError if a message does not arrive, and on every rank if a transform fails on any
        rank: ranks exchange their state before each batch with transforms.
        """
        error: Exception | None = None
        for number, batch in enumerate(self.batches):
            if observer is not None:
                observer.begin(number)
            if number >= self._buckets:
                # A rank whose transform fails must not leave others waiting for its messages.
                error = error or _run_calls(batch.before)
                confirm(self._group, error)
            name = "bucket" if number < self._buckets else "batch"
            with span(name, partial(dict, number=number)):
                for exchange in batch.exchanges:
                    if isinstance(exchange, ChangeExchange):
                        with span("send changes"):
                            exchange.run(is_whole)
                    else:
                        exchange.run()
                error = _run_calls(batch.after)
            if observer is not None and error is None:
                observer.end(number)
        with span("confirm the end"):
            confirm(self._group, error)
        self.is_complete = True


def _run_calls(calls: Sequence[Callable[[], None]]) -> Exception | None:
    """Call each until a call fails. Return its error, or None if all succeed."""
    try:
        for call in calls:
            call()
    except Exception as error:
        return error
    return None


@dataclass(slots=True, eq=False)
class _BatchContents:
    """The contents of a batch while it is built: transfers by stage, calls and memory by name.

    Only changes of the transfers in `compared` are sent. If runs that send all elements send them
    in stages, `staged_whole` has those transfers, and `near` the transfers not compared.
    """

    stages: list[list[RankTransfers]] = field(default_factory=lambda: [[]])
    compared: list[RankTransfers] = field(default_factory=list)
    near: list[RankTransfers] | None = None
    staged_whole: list[RankTransfers] | None = None
    before: list[Callable[[], None]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    made: dict[tuple[str, IndexRange | None], dict[str, torch.Tensor]] = field(default_factory=dict)
    received: dict[str, torch.Tensor] = field(default_factory=dict)
