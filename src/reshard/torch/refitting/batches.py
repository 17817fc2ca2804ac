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
(`packing.messages`).

Shards between steps are stored in the source, in the target (`programs.phases`), or in the
batch's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from reshard.collectives.program import Program
from reshard.plans.schedule import align
from reshard.torch.exchange.changes import ChangedOnly, ChangeExchange, ChangeUnit
from reshard.torch.exchange.exchange import MessageExchange, find_partitioning
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import RankTransfers, stage_transfers
from reshard.torch.exchange.transfer import Contents, Transfer, TransferBatch
from reshard.torch.models.local_tensors import LocalTensors
from reshard.torch.programs.phases import ShardBuffers, phases_of
from reshard.torch.refitting.matching import Match
from reshard.torch.refitting.members import IndexRange
from reshard.torch.refitting.plan import PartItem, RefitPart, staging_limit_bytes
from reshard.torch.refitting.transforms import Transform

# The names of a model's tensors, and a number for each, equal for equal memory layouts.
_NumberedNames: TypeAlias = tuple[list[str], Sequence[int]]
# Items that differ only in their tensors, each with its number; or an item that is not only
# exchanged.
_Kind: TypeAlias = list[tuple[int, PartItem]]


def _group(part: RefitPart, numbered: list[_NumberedNames]) -> list[list[_Kind]]:
    """Return the items of each batch that differ only in their tensors, and each other alone."""
    kinds: list[dict[object, _Kind]] = [{} for _ in range(part.batches)]
    sources, targets = (dict(zip(*of_side, strict=True)) for of_side in numbered)
    for number, item in enumerate(part.items):
        match = item.match
        key: object = number
        if _is_only_exchanged(item):
            key = (
                # Equal changes are the same object, and so are equal transfers.
                id(item.change),
                id(item.transfers),
                match.dtype,
                match.source_range,
                match.target_range,
                sources.get(match.source_name),
                targets.get(match.target_name),
            )
        kinds[item.batch].setdefault(key, []).append((number, item))
    return [list(of_batch.values()) for of_batch in kinds]


def _is_only_exchanged(item: PartItem) -> bool:
    chosen = item.chosen
    is_staged = item.handed_on or chosen.is_staged_whole
    return not (item.match.made_at or is_staged or chosen.program)


class RefitTransfer(Transfer):
    """The transfer of a refit on a rank. `extra_bytes` is its memory beyond source and target.

    Args:
        part: the tensors that the rank sends, keeps or receives.
        source, target: its tensors.
        transforms: by the names of the targets that they create.
        device: of the tensors.
        extra_bytes: the maximum memory to use, in addition to `kept_bytes`.
        group: of all ranks.
        changed_only: how changes are found, if only changes are sent.
        like: another transfer of the part: if its source is the same, so are the messages to send.
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
        like: RefitTransfer | None = None,
    ) -> None:
        self._part, self._changed_only = part, changed_only
        self._source, self._target, self._transforms = source.locals, target.locals, transforms
        self._group, self._device = group, device
        staging_bytes = 0
        if part.batches > part.buckets:
            staging_bytes = part.staging_bytes
            # Messages and staged elements share the limit.
            extra_bytes -= staging_limit_bytes(extra_bytes)
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
        self._numbered = [(list(s.locals), s.own_memory.numbers) for s in (source, target)]
        # The kinds of a part are the same if its tensors have equal memory layouts.
        self._kinds: list[list[_Kind]] = (
            like._kinds
            if like is not None and like._numbered == self._numbered
            else _group(part, self._numbered)
        )
        # The messages to send depend on this value, the part and the source. None if elements are
        # staged.
        self._partitioning: tuple[object, ...] | None = None
        firsts = [kind[0][1] for kinds in self._kinds for kind in kinds]
        if not changed_only and all(map(_is_only_exchanged, firsts)):
            self._partitioning = find_partitioning(group, device, extra_bytes)
        # Messages to send are views of the source, so both must be the same.
        is_known = (
            like is not None
            and self._partitioning is not None
            and like._partitioning == self._partitioning
            and like._source is self._source
        )
        reused = like if is_known else None
        contents = [self._fill_batch(kinds, is_known) for kinds in self._kinds]
        self._shared: torch.Tensor | None = None
        # A single exchange allocates only the memory that its messages need.
        if sum(len(batch.stages) + bool(changed_only) for batch in contents) > 1:
            self._shared = reused._shared if reused is not None and reused._group is group else None
            if self._shared is None:
                self._shared = group.staging_memory(extra_bytes, device)
        exchange = partial(
            MessageExchange,
            group=group,
            device=device,
            extra_bytes=extra_bytes,
            memory=self._shared,
        )
        unit: ChangeUnit = "blocks" if changed_only == "blocks" else "elements"
        self._changes: list[ChangeExchange] = []
        batches = []
        for number, batch in enumerate(contents):
            others = (
                [None] * len(batch.stages) if reused is None else reused.batches[number].exchanges
            )
            exchanges: list[MessageExchange | ChangeExchange] = [
                exchange(tensors, like=other)
                for tensors, other in zip(batch.stages, others, strict=True)
            ]
            if changed_only:
                near, staged = (
                    None if rest is None else exchange(rest)
                    for rest in (batch.near, batch.staged_whole)
                )
                changes = ChangeExchange(
                    batch.compared, group, device, unit, extra_bytes, self._shared, near, staged
                )
                self._changes.append(changes)
                exchanges.insert(0, changes)
            is_staged = number >= part.buckets
            batches.append(TransferBatch(exchanges, batch.before, batch.after, is_staged))
        written = target.tensors.values()
        super().__init__(batches, group, written, target.inner, result="the target")

    @property
    def extra_bytes(self) -> int:
        """The memory used beyond both models."""
        shared = self._shared
        used_bytes: int = super().extra_bytes if shared is None else shared.numel()
        return used_bytes + int(self._staging.numel())

    @property
    def kept_bytes(self) -> int:
        """The memory of the copies or digests of sent elements."""
        return sum(exchange.kept_bytes for exchange in self._changes)

    def seems_changed(self) -> bool:
        """Return whether sending all elements in stages is faster, since most have changed.

        False if this rank sends tensors that are not staged in such runs: comparing is cheap.
        """
        return all(exchange.seems_changed() for exchange in self._changes)

    def send_all(self, is_whole: bool) -> None:
        """Set whether runs send all elements if otherwise only changes are sent."""
        for exchange in self._changes:
            exchange.is_whole = is_whole

    def list_contents(self) -> Contents:
        """Yield the tensors of the part with their transfers."""
        rank = self._group.rank
        for item in self._part.items:
            match, stages = item.match, list[RankTransfers]()
            is_plain = not match.made_at and item.chosen.program is None
            if not is_plain or item.change.source.reduction is not None:
                yield match.name, None
                continue
            before = match.source_view(self._source, rank)
            after = match.target_view(self._target, rank)
            for change, rows in item.stages:
                ends = before, after, getattr(torch, match.dtype)
                stages.append(RankTransfers.of(change, rows, rank, *ends))
                # A forwarded tensor is compared with the rank that it was forwarded from.
                before = after
            yield match.name, stages

    def _fill_batch(self, kinds: Iterable[_Kind], is_known: bool) -> _BatchContents:
        """Return the contents of a batch; without tensors that are only sent if `is_known`."""
        # Batches run in order, so all of them use the same memory.
        batch = _BatchContents(self._staging)
        # Transforms and programs first: they take their memory in the same order on each run.
        for kind in sorted(kinds, key=lambda kind: _is_only_exchanged(kind[0][1])):
            first = kind[0][1]
            is_needed = not is_known or self._group.rank in first.change.target.local_shapes
            if is_needed or not _is_only_exchanged(first):
                self._list(kind, batch)
        return batch

    def _list(self, kind: _Kind, batch: _BatchContents) -> None:
        """Add the tensors or pieces of a kind to a batch."""
        (number, item), rank = kind[0], self._group.rank
        match, dtype = item.match, getattr(torch, item.match.dtype)
        numbers, matches = [number for number, _ in kind], [item.match for _, item in kind]
        sources = [match.source_view(self._source, rank) for match in matches]
        targets = [match.target_view(self._target, rank) for match in matches]
        if match.made_at:
            # It is alone in its kind.
            source, target = self._stage_transform(match, sources[0], dtype, batch)
            at = match.target_range
            sources, targets = [source], [target if at is None else at.of(target, rank)]
        ends = sources[0], targets[0], dtype
        if item.chosen.program is not None:
            self._list_program(number, item.chosen.program, *ends, batch)
            return
        if item.handed_on:
            stages = [rows for _, rows in item.stages]
            staged = stage_transfers(item.change, stages, item.span, rank, *ends)
            batch.stages[0] += [transfers._replace(numbers=numbers) for transfers in staged]
            return
        moved = RankTransfers.of(item.change, item.transfers, rank, *ends)
        moved = moved._replace(sources=sources, targets=targets, numbers=numbers)
        if not (self._changed_only and match.can_be_compared):
            batch.stages[0].append(moved)
            return
        # Copying memory that ranks share takes a third of the time of a comparison.
        shared = self._group.shared_memory if self._changed_only is True else None
        near, compared = moved.split({rank, *shared.ranks} if shared is not None else set())
        batch.compared += filter(None, [compared])
        if not item.chosen.is_staged_whole:
            batch.stages[0] += filter(None, [near])
            return
        # Set it also if this rank is not part of the stages, so that it sends nothing directly.
        batch.near = [*(batch.near or ()), *filter(None, [near])]
        staged = stage_transfers(item.change, item.whole_stages, item.span, rank, *ends)
        staged = (transfers._replace(numbers=numbers) for transfers in staged)
        batch.staged_whole = [*(batch.staged_whole or ()), *staged]

    def _list_program(
        self,
        number: int,
        program: Program,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        batch: _BatchContents,
    ) -> None:
        """Add the steps of a program that move elements, each in its own stage."""
        rank = self._group.rank
        ends = (source, target, dtype, self._device)
        buffers = ShardBuffers(phases_of(program, rank), rank, *ends, batch.allocate)
        for stage, (_, transfers) in enumerate(buffers.transfers()):
            if stage == len(batch.stages):
                batch.stages.append([])
            batch.stages[stage].append(transfers._replace(numbers=[number]))

    def _stage_transform(
        self,
        match: Match,
        part: torch.Tensor | None,
        dtype: torch.dtype,
        batch: _BatchContents,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the tensors that a transform's elements are sent from and received in.

        `part` is this rank's part of the source.
        """
        name, rank = match.made_of, self._group.rank
        transform, target = self._transforms[name], self._target.get(match.target_name)
        sent = None
        if part is not None:
            sent = batch.allocate(match.source.local_shape(rank) or (), dtype)
        if match.made_at == "source":
            # A transform with several outputs runs once for all of them.
            sent_outputs = batch.made.setdefault((name, match.source_range), {})
            if part is not None and sent is not None:
                if not sent_outputs:
                    batch.before.append(partial(transform.finish_receive, name, part, sent_outputs))
                sent_outputs[match.target_name] = sent
            return sent, target
        if part is not None and sent is not None:
            batch.before.append(partial(transform.prepare_send, name, part, sent))
        if target is not None and name not in batch.received:
            received = batch.allocate(target.shape, dtype)
            outputs = {
                output: self._target[output]
                for output in transform.outputs(name)
                if output in self._target
            }
            batch.received[name] = received
            batch.after.append(partial(transform.finish_receive, name, received, outputs))
        return sent, batch.received.get(name)


@dataclass(slots=True, eq=False)
class _BatchContents:
    """The contents of a batch while it is built: transfers by stage, calls and memory by name.

    Staged elements are in `memory`, of which `used_bytes` are allocated.
    Only changes of the transfers in `compared` are sent. If runs that send all elements send them
    in stages, `staged_whole` has those transfers, and `near` the transfers not compared.
    """

    memory: torch.Tensor
    used_bytes: int = 0
    stages: list[list[RankTransfers]] = field(default_factory=lambda: [[]])
    compared: list[RankTransfers] = field(default_factory=list)
    near: list[RankTransfers] | None = None
    staged_whole: list[RankTransfers] | None = None
    before: list[Callable[[], None]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    made: dict[tuple[str, IndexRange | None], dict[str, torch.Tensor]] = field(default_factory=dict)
    received: dict[str, torch.Tensor] = field(default_factory=dict)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor in the memory."""
        begin, size_bytes = self.used_bytes, math.prod(shape) * dtype.itemsize
        self.used_bytes += align(size_bytes)
        return self.memory[begin : begin + size_bytes].view(dtype).view(tuple(shape))
