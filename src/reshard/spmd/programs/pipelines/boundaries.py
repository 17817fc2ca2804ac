"""Boundaries of stages over processes: each process runs the tasks of its stages.

    stage 0   F0  F1  F2  ..  B0          a pass starts to send its output, and the rank goes on
                \\   \\   \\    /
    stage 1      F0  F1  B0  F2           a pass waits for its input, which is requested before

Receives are posted some tasks before they are needed, in the schedule's `run_order`, which is the
same for all ranks. So the sender of each message has already started to send it, or will without
waiting for the receiver.

Each array is an exchange in a thread of its own, with a tag that both ends know. Before the first
exchange, the ranks of the earlier stage send the type of their output (shape, element type,
sharding) and a digest of the step; the ranks of the next stage raise an error if these differ from
their own. There is no barrier between neighbours at the beginning or the end of a step, so a rank
may be a step ahead. On devices, messages run in the main thread, in the order of the program, and
sender and receiver wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, SpecError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec, spec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import from_shards
from reshard.spmd.core.array_type import ArrayType, without_partial
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import Runner
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.groups import RankGroup, bytes_of, rank_group, tensor_of
from reshard.torch.exchange.packing.copies import empty_result
from reshard.torch.exchange.packing.messages import RankTransfers, transfers_of
from reshard.torch.exchange.transfer import Transfer, next_tag

# Of a microbatch, and whether it is a cotangent that goes back.
Crossing = tuple[int, bool]


@dataclass(frozen=True)
class _Begun:
    """A transfer in flight: `made` is the array that arrives here, or None."""

    transfer: Transfer
    made: torch.Tensor | None
    shape: tuple[int, ...]
    target: ShardingSpec

    def wait(self) -> None:
        if not self.transfer.is_done:
            self.transfer.finish()


class StageBoundary:
    """The boundary between two stages in a step. All ranks of both stages create it.

    Args:
        stage: the first of both.
        group: of the ranks of both.
        mesh: of the first stage.
        target: the sharding in which the second stage takes its array.
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
        # The first tag, so that both ends have the same, even if their steps differ.
        self._kind_tag = next_tag(group)
        # A tag for each crossing, because the two ends begin crossings in different orders.
        self._tags = {
            (microbatch, is_back): next_tag(group)
            for microbatch in range(n_microbatches)
            for is_back in (False, True)
        }
        # The type of the first stage's output, and its sharding.
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
            crossing: which; no effect if it has started.
            array: on ranks of the stage that made it.

        Raises:
            UsageError: an array of another shape, element type or sharding than the first, or
                over another mesh than its stage's.
            PlanError: ranks of the first stage that mean another step.
            RunError: a stage that failed.
        """
        if crossing in self._begun:
            return
        if self._kind is None:
            self._kind = self._learn_kind() if array is None else self._tell_kind(array.type)
        kind, output_spec = self._kind
        microbatch, is_back = crossing
        if array is not None and not is_back and array.type is not kind:
            raise UsageError(
                f"stage {self._stage} returned {array.type} for microbatch {microbatch}, and "
                f"{kind} before; cut the batch into equal microbatches"
            )
        source, target = output_spec, self._target
        if is_back:
            source, target = target, without_partial(source)
        change = LayoutChange(source.layout(kind.shape), target.layout(kind.shape))
        source_shard = target_shard = None
        if array is not None:
            (shard,) = (array if array.type.spec is source else array.shard(source)).shards.values()
            source_shard = torch.as_tensor(shard).contiguous()
        rank = self._group.rank
        shape = change.target.local_shape(rank) if rank in target.mesh.devices else None
        if shape is not None:
            target_shard = empty_result(shape, getattr(torch, kind.dtype.name), self._device)
            # No message has the padding.
            if change.target.is_padded:
                target_shard.zero_()
        transfers = RankTransfers.of(
            change, transfers_of(change, kind.dtype, rank), rank, source_shard, target_shard
        )
        # Without confirmation, because a neighbour may be a step ahead and would keep this rank
        # waiting.
        transfer = Transfer.prepare(
            lambda: MessageExchange([transfers], self._group, self._device),
            self._group,
            tag=self._tags[crossing],
            in_background=True,
            confirms=False,
        )
        if transfer.in_background:
            transfer.start()
        else:
            transfer.run()
        self._begun[crossing] = _Begun(transfer, target_shard, kind.shape, target)

    def take(self, crossing: Crossing) -> Any:
        """Return the array, on ranks of the stage that takes it, once it is there.

        Raises RunError where the other stage failed.
        """
        self.begin(crossing)
        begun = self._begun.pop(crossing)
        begun.wait()
        shards = {self._group.rank: begun.made}
        return from_shards(shards, begun.shape, begun.target, runner=self._keeper)

    def let_go(self, waits: bool = False) -> None:
        """Free the arrays that were sent and have arrived; if `waits`, wait for all of them.

        Raises RunError where the other stage failed.
        """
        for crossing, begun in list(self._begun.items()):
            is_sent = begun.made is None
            if is_sent and (waits or begun.transfer.has_arrived):
                begun.wait()
                del self._begun[crossing]
        with self._group.errors("a message could not be sent"):
            while waits and self._told:
                self._told.pop().wait()

    def _tell_kind(self, kind: ArrayType) -> tuple[ArrayType, ShardingSpec]:
        """Send the type of this stage's output to the next stage, without waiting for it."""
        if kind.spec is None or kind.spec.mesh is not self._mesh:
            raise UsageError(
                f"stage {self._stage} returned {kind}, which is not over its mesh {self._mesh!r}; "
                "shard it there"
            )
        if self._group.rank == self._mesh.devices[0]:
            message = [self._digest, kind.shape, kind.dtype.name, str(kind.spec)]
            data = tensor_of(json.dumps(message).encode())
            with self._group.errors("a message could not be sent"):
                for rank in set(self._group.ranks) - set(self._mesh.devices):
                    for part in (torch.tensor([len(data)]), data):
                        self._told.append(self._group.send(part, rank, self._kind_tag))
        return kind, kind.spec

    def _learn_kind(self) -> tuple[ArrayType, ShardingSpec]:
        """Receive the type of the first stage's output."""
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
        output_spec = spec(self._mesh, text)
        return ArrayType(shape, as_dtype(name), output_spec), output_spec


# Tasks of each rank by which the result of another stage is requested before it is taken.
_AHEAD = 2


class Boundaries:
    """The boundaries between the stages of this process and those of others, in a step.

    Args:
        schedule: the same on all processes.
        specs: the sharding in which each stage takes its array.
        parameters: of the stages that are here; None for others.
        n_microbatches: of the step.
        keeper: the runner of this process's arrays, over the group of its stage's ranks.

    Attributes:
        by_stage: each boundary, by the first of its two stages.

    Raises SpecError for a first stage without a sharding.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        specs: Sequence[ShardingSpec | None],
        parameters: Sequence[Any],
        n_microbatches: int,
        keeper: Runner,
    ) -> None:
        rank = dist.get_rank()
        input_specs = [sharding for sharding in specs if sharding is not None]
        if len(input_specs) < len(specs):
            raise SpecError(
                "a pipeline over processes whose first stage has no sharding; give one, whose mesh "
                "is where the stage is"
            )
        meshes = [sharding.mesh for sharding in input_specs]
        self._here = [rank in mesh.devices for mesh in meshes]
        device = _device_of(parameters)
        # On devices messages have the same order on both sides, so none is requested ahead.
        self._ahead = _AHEAD * schedule.n_ranks if device.type == "cpu" else 0
        groups = {}
        for stage, (mesh, next_mesh) in enumerate(pairwise(meshes)):
            ranks = tuple(sorted({*mesh.devices, *next_mesh.devices}))
            # All processes take part, in the same order, because `new_group` is a collective of
            # all.
            group = None if mesh is next_mesh else _group_of(ranks)
            if group is not None and rank in ranks:
                groups[stage] = group
        # Before anything below can fail: the ranks of a group that a failure broke meet again here,
        # all of them together.
        self._groups = [rank_group(group) for group in groups.values()]
        # The properties that must be equal on the ranks of neighbouring stages.
        tasks = [[str(task) for task in line] for line in schedule.tasks]
        meant = (
            tasks,
            [
                (sharding.mesh.text, sharding.mesh.devices, str(sharding))
                for sharding in input_specs
            ],
        )
        digest = hashlib.blake2b(repr(meant).encode(), digest_size=16).hexdigest()
        self.by_stage = {
            stage: StageBoundary(
                stage,
                among,
                meshes[stage],
                input_specs[stage + 1],
                n_microbatches,
                digest,
                keeper,
                device,
            )
            for stage, among in zip(groups, self._groups, strict=True)
        }

    @contextmanager
    def step(self, order: Sequence[PipelineTask]) -> Iterator[Iterator[PipelineTask]]:
        """Return the tasks of this process in an order of all, with messages requested ahead.

        An error inside is raised on the ranks of the neighbouring stages as well, which wait for
        this process.
        """
        try:
            yield self._own_tasks(order)
            for boundary in self.by_stage.values():
                boundary.let_go(waits=True)
        except BaseException as error:
            for group in self._groups:
                group.break_off(error)
            raise

    def _own_tasks(self, order: Sequence[PipelineTask]) -> Iterator[PipelineTask]:
        asked = 0
        for place, task in enumerate(order):
            while asked < min(len(order), place + self._ahead + 1):
                if not self._ask(order[asked], asked > place):
                    break
                asked += 1
            if self._here[task.stage]:
                yield task
                for boundary in self.by_stage.values():
                    boundary.let_go()

    def _ask(self, task: PipelineTask, is_ahead: bool) -> bool:
        """Request the result of a task, if another rank computes it for a local stage.

        Returns False if it cannot be requested ahead, because its type is not known yet.
        """
        if self._here[task.stage] or task.work is Work.BACKWARD_WEIGHTS:
            return True
        is_back = task.work is not Work.FORWARD
        boundary = self.by_stage.get(task.stage - is_back)
        taker = task.stage - 1 if is_back else task.stage + 1
        if boundary is None or not self._here[taker]:
            return True
        if is_ahead and not boundary.knows_kind:
            return False
        boundary.begin((task.microbatch, is_back))
        return True


def _device_of(parameters: Sequence[Any]) -> torch.device:
    """Return the device of the local shards of parameters."""
    arrays = (leaf for _, leaf in leaves(list(parameters)) if isinstance(leaf, ArrayValue))
    shards = (shard for leaf in arrays for shard in leaf._shards)
    return next(
        (shard.device for shard in shards if isinstance(shard, torch.Tensor)), torch.device("cpu")
    )


# By the group of all processes: groups of ranks end with it.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of some ranks, created once by all processes in the same order."""
    groups = _MADE.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks))
    return groups[ranks]
