"""What does one rank do in a run of a refit, with memory that is prepared once?

Batches run one after the other, in the same memory::

    extra_bytes   | messages on their way | what is sent and arrives of transformed tensors |
    batch 0         straight from the source into the target, nothing beside it
    batch 1, ...    prepare_send  ->  exchange  ->  finish_receive

A part without transformed tensors has only batch 0, and all the memory for its messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from reshard.dtypes import dtype as as_dtype
from reshard.torch.exchange import Exchange, complete_contributions
from reshard.torch.messages import Movement, aligned
from reshard.torch.refit_parts import DIRECT, PartItem, RefitPart, staging_limit_bytes
from reshard.torch.transforms import Transform


@dataclass(frozen=True, slots=True, eq=False)
class Transformed:
    """A tensor that a transform makes: where it is, what is sent of it, and what arrives."""

    name: str
    transform: Transform
    source: torch.Tensor | None
    sent: torch.Tensor | None
    received: torch.Tensor | None
    target: Mapping[str, torch.Tensor]

    def prepare_send(self) -> None:
        """Before the exchange."""
        if self.source is not None and self.sent is not None:
            self.transform.prepare_send(self.name, self.source, self.sent)

    def finish_receive(self) -> None:
        """After the exchange."""
        if self.received is not None:
            self.transform.finish_receive(self.name, self.received, self.target)


@dataclass(slots=True, eq=False)
class Stage:
    """One batch: its messages, and what is done before and after them."""

    exchange: Exchange
    movements: list[Movement]
    transformed: list[Transformed] = field(default_factory=list)

    def run(self) -> None:
        """Raises RunError where a message does not come."""
        for one in self.transformed:
            one.prepare_send()
        self.exchange.run()
        for movement in self.movements:
            if movement.plan.source.contributions > 1 or movement.plan.target.contributions > 1:
                complete_contributions(movement.plan, dist.get_rank(), movement.target)
        for one in self.transformed:
            one.finish_receive()


class _Arena:
    """Memory that is given out piece by piece, and taken back as a whole."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._used_bytes = 0

    def clear(self) -> None:
        self._used_bytes = 0

    def like(self, local: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """A dense tensor of a local tensor's shape."""
        if local is None:
            return None
        begin, size_bytes = self._used_bytes, local.numel() * dtype.itemsize
        self._used_bytes += aligned(size_bytes)
        return self.memory[begin : begin + size_bytes].view(dtype).view(local.shape)


class Stages:
    """All batches of one rank. `extra_bytes` is what they take beyond source and target.

    Args:
        part: what the rank does.
        source, target: its local tensors by name.
        transforms: by the names of the targets they make.
        device: of the tensors.
        extra_bytes: the most memory to take.
        group: of all ranks.
    """

    def __init__(
        self,
        part: RefitPart,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        transforms: Mapping[str, Transform],
        device: torch.device,
        extra_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._source, self._target, self._transforms = source, target, transforms
        shared: torch.Tensor | None = None
        self._arena = _Arena(0, device)
        if part.batches > 1:
            self._arena = _Arena(part.staging_bytes, device)
            extra_bytes -= staging_limit_bytes(extra_bytes)
            shared = torch.empty(extra_bytes, dtype=torch.uint8, device=device)
        self.stages = []
        for number in range(part.batches):
            self._arena.clear()
            items = [item for item in part.items if item.batch == number]
            transformed = [self._transformed(item) for item in items if number != DIRECT]
            movements = [
                _movement(item, source.get(item.match.source_name), target.get(item.match.name))
                for item in items
                if number == DIRECT
            ]
            movements += [
                _movement(item, one.sent, one.received)
                for item, one in zip(items, transformed, strict=False)
            ]
            exchange = Exchange(
                movements, dist.get_rank(), group, device, extra_bytes, memory=shared
            )
            self.stages.append(Stage(exchange, movements, transformed))
        exchanges = [stage.exchange for stage in self.stages]
        self.sent_bytes = sum(exchange.sent_bytes for exchange in exchanges)
        self.received_bytes = sum(exchange.received_bytes for exchange in exchanges)
        own_bytes = sum(exchange.extra_bytes for exchange in exchanges)
        self.extra_bytes = self._arena.memory.numel() + (
            own_bytes if shared is None else shared.numel()
        )

    def _transformed(self, item: PartItem) -> Transformed:
        name = item.match.name
        dtype = getattr(torch, as_dtype(item.match.dtype).name)
        transform = self._transforms[name]
        source = self._source.get(item.match.source_name)
        outputs = {
            made: self._target[made] for made in transform.outputs(name) if made in self._target
        }
        sent = self._arena.like(source, dtype)
        received = self._arena.like(self._target.get(name), dtype)
        return Transformed(name, transform, source, sent, received, outputs)

    def run(self) -> None:
        """Run all batches. Raises RunError where a message does not come."""
        for stage in self.stages:
            stage.run()


def _movement(item: PartItem, source: torch.Tensor | None, target: torch.Tensor | None) -> Movement:
    dtype = getattr(torch, as_dtype(item.match.dtype).name)
    return Movement.of(item.plan, item.transfers, dist.get_rank(), source, target, dtype)
