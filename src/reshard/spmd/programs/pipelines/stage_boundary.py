"""The boundary between two stages over processes: asynchronous messages.

    stage 0   F0  F1  F2  ..  B0          a pass begins to send what it made, and the rank goes on
                \\   \\   \\    /
    stage 1      F0  F1  B0  F2           a pass waits for what it takes, which was asked for before

Each array is an exchange in a thread of its own, with a tag that both ends know. Before the first
one, the ranks of the earlier stage send the type of their output (shape, element type, sharding)
and the number of the step; the next stage's ranks raise an error if these differ from their own.
There is no barrier between neighbours at the beginning or the end of a step, so a rank may be a
step ahead.

On devices, messages run in the main thread, in the order of the program, on both sides the
schedule's `run_order`; sender and receiver wait for each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec, spec
from reshard.spmd.arrays.sharded_array import from_shards
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.shards.pending_sums import without_pending
from reshard.spmd.shards.runner import Runner
from reshard.torch.exchange.exchange import BackgroundExchange, MessageExchange, next_tag
from reshard.torch.exchange.groups import RankGroup, bytes_of, tensor_of
from reshard.torch.exchange.packing.copies import empty_result
from reshard.torch.exchange.packing.messages import RankTransfers, transfers_of

# Of a microbatch, and whether it is a cotangent that goes back.
Crossing = tuple[int, bool]


@dataclass(frozen=True)
class _Begun:
    """A crossing under way: `made` is what arrives here, None where nothing does."""

    exchange: BackgroundExchange | None
    made: torch.Tensor | None
    shape: tuple[int, ...]
    target: ShardingSpec

    def wait(self) -> None:
        if self.exchange is not None:
            self.exchange.finish()


class StageBoundary:
    """Between two stages in one step, as a rank of either sees it. All of them make one.

    Args:
        stage: the first of both.
        group: of the ranks of both.
        mesh: of the first stage.
        target: the sharding in which the second one takes its array.
        n_microbatches: of the step.
        digest: of the step, as all ranks have to mean it.
        keeper: the runner of this process's arrays.
        device: of their shards.
    """

    def __init__(
        self,
        stage: int,
        group: RankGroup,
        mesh: DeviceMesh,
        target: ShardingSpec,
        n_microbatches: int,
        digest: str,
        keeper: Runner,
        device: torch.device,
    ) -> None:
        self._stage, self._group, self._mesh, self._target = stage, group, mesh, target
        self._digest, self._keeper, self._device = digest, keeper, device
        # The first, which both ends have also where they mean other steps.
        self._kind_tag = next_tag(group)
        # Both ends begin crossings in orders of their own.
        self._tags = {
            (microbatch, is_back): next_tag(group)
            for microbatch in range(n_microbatches)
            for is_back in (False, True)
        }
        # What the first stage makes, and its sharding.
        self._kind: tuple[ArrayType, ShardingSpec] | None = None
        self._told: list[Any] = []
        self._begun: dict[Crossing, _Begun] = {}

    @property
    def knows_kind(self) -> bool:
        """Whether this rank knows what the first stage makes, and can ask for it ahead."""
        return self._kind is not None

    def begin(self, crossing: Crossing, array: Any = None) -> None:
        """Begin to bring an array to the other stage's mesh.

        Args:
            crossing: which; one that has begun is left as it is.
            array: on ranks of the stage that made it.

        Raises:
            UsageError: an array of another shape, element type or sharding than the first one, or
                over another mesh than its stage's.
            PlanError: ranks of the first stage that mean another step.
            RunError: a stage that failed.
        """
        if crossing in self._begun:
            return
        if self._kind is None:
            self._kind = self._learn_kind() if array is None else self._tell_kind(array.type)
        kind, made_as = self._kind
        microbatch, is_back = crossing
        if array is not None and not is_back and array.type is not kind:
            raise UsageError(
                f"stage {self._stage} returned {array.type} for microbatch {microbatch}, and "
                f"{kind} before; cut the batch into equal microbatches"
            )
        source, target = _ends(made_as, self._target, is_back)
        change = LayoutChange(source.layout(kind.shape), target.layout(kind.shape))
        own = made = None
        if array is not None:
            (shard,) = (array if array.type.spec is source else array.shard(source)).shards.values()
            own = torch.as_tensor(shard).contiguous()
        rank = self._group.rank
        shape = change.target.local_shape(rank) if rank in target.mesh.devices else None
        if shape is not None:
            made = empty_result(shape, getattr(torch, kind.dtype.name), self._device)
            if change.target.is_padded:
                made.zero_()
        transfers = RankTransfers.of(
            change, transfers_of(change, kind.dtype, rank), rank, own, made
        )
        exchange = MessageExchange([transfers], rank, self._group, self._device)
        begun = None
        if exchange.can_leave_its_thread:
            begun = BackgroundExchange(exchange, self._tags[crossing])
            begun.start()
        else:
            exchange.tag = self._tags[crossing]
            exchange.run()
        self._begun[crossing] = _Begun(begun, made, kind.shape, target)

    def take(self, crossing: Crossing) -> Any:
        """The array, on ranks of the stage that takes it, once it is there.

        Raises RunError where the other stage failed.
        """
        self.begin(crossing)
        begun = self._begun.pop(crossing)
        begun.wait()
        shards = {self._group.rank: begun.made}
        return from_shards(shards, begun.shape, begun.target, runner=self._keeper)

    def let_go(self, waits: bool = False) -> None:
        """Let go of what was sent and has arrived; of all that was sent, where it `waits`.

        Raises RunError where the other stage failed.
        """
        for crossing, begun in list(self._begun.items()):
            is_sent = begun.made is None
            if is_sent and (waits or begun.exchange is None or begun.exchange.is_done):
                begun.wait()
                del self._begun[crossing]
        with self._group.errors("a message could not be sent"):
            while waits and self._told:
                self._told.pop().wait()

    def _tell_kind(self, kind: ArrayType) -> tuple[ArrayType, ShardingSpec]:
        """Tell the next stage's ranks what this one makes, without waiting for them."""
        if kind.spec is None or kind.spec.mesh is not self._mesh:
            raise UsageError(
                f"stage {self._stage} returned {kind}, which is not over its mesh {self._mesh!r}; "
                "shard it there"
            )
        if self._group.rank == self._mesh.devices[0]:
            told = [self._digest, kind.shape, kind.dtype.name, str(kind.spec)]
            data = tensor_of(json.dumps(told).encode())
            with self._group.errors("a message could not be sent"):
                for rank in set(self._group.ranks) - set(self._mesh.devices):
                    for part in (torch.tensor([len(data)]), data):
                        self._told.append(self._group.send(part, rank, self._kind_tag))
        return kind, kind.spec

    def _learn_kind(self) -> tuple[ArrayType, ShardingSpec]:
        """What the first stage makes, as it tells."""
        first = self._mesh.devices[0]
        with self._group.errors("nothing was moved"):
            length = torch.zeros(1, dtype=torch.int64)
            self._group.receive(length, first, self._kind_tag).wait()
            data = torch.empty(int(length.item()), dtype=torch.uint8)
            self._group.receive(data, first, self._kind_tag).wait()
        digest, shape, name, text = json.loads(bytes_of(data))
        if digest != self._digest:
            raise PlanError(
                f"stage {self._stage} is in a step of another schedule, or of other shardings, "
                f"than stage {self._stage + 1}; give all ranks the same"
            )
        made_as = spec(self._mesh, text)
        return ArrayType(shape, as_dtype(name), made_as), made_as


def _ends(
    made: ShardingSpec, taken: ShardingSpec, is_back: bool
) -> tuple[ShardingSpec, ShardingSpec]:
    """The shardings from which, and to which, an array crosses."""
    return (taken, without_pending(made)) if is_back else (made, taken)
