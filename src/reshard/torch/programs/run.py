"""How does a program of collectives run between the ranks of a process group?

1. This rank's phases are found, and the places of the shards between them (`program_phases`).
2. The process groups of the steps are made, in the order of the steps (`program_groups`).
3. The phases run one behind the other, each by what is quickest where it runs::

                              NCCL, and others        gloo, and groups that are not all ranks
    ------------------------  ----------------------  ---------------------------------------
    slice                     a view, or a copy       the same
    permute, exchange         messages                the same
    all-to-all, joint         rounds of all-to-alls   messages within the group
    all-gather                rounds of all-gathers   messages within the group
    reduce-scatter            rounds of all-to-alls   rounds of messages
    all-reduce                a reduce-scatter and an all-gather of parts of the shard

   Gloo's own all-to-all and all-gather are nothing but messages, and slower ones: they take dense
   memory, and ranks wait for one another. Messages go from and to where the pieces lie.
4. Contributions are combined by the code that combines them in one process, in the order of the
   plan. So every rank gets the same bits, those of the direct plan where one step combines all,
   whatever the dtype.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from reshard.collectives.program import Program
from reshard.errors import RunError
from reshard.torch.exchange.exchange import Exchange, complete_contributions
from reshard.torch.exchange.group_rounds import GatherRounds, GroupRounds, is_gather
from reshard.torch.exchange.messages import ALIGNMENT_BYTES, Listing, Movement
from reshard.torch.programs.groups import process_group
from reshard.torch.programs.phases import GATHER, LOCAL, MESSAGES, Phase, Places, phases_of

# What the smallest messages of any phase need, for each rank of the group.
_SMALLEST_BYTES = 4 * ALIGNMENT_BYTES


def least_extra_bytes(program: Program, itemsize_bytes: int, ranks: int) -> int:
    """The least memory beyond source and target that a program can run in, among so many ranks.

    Of shards that lie in neither, the whole, and of all others the smallest messages.
    """
    phases = phases_of(program, program.source.mesh.devices[0])
    return phases.most_between_elements * itemsize_bytes + max(ranks, 2) * _SMALLEST_BYTES


class ProgramRun:
    """A program on one rank, prepared to run once. All ranks of `group` make and finish one.

    `sent_bytes`, `received_bytes` and `extra_bytes`, the memory beyond source and target, are this
    rank's; the last is known when it has run.

    Args:
        program: what to do.
        source, target: this rank's local tensors, None where it has none.
        dtype: of them.
        group: of all ranks of the program; of all ranks when None.
        device: of the tensors.
        extra_bytes: the most memory beyond source and target; the same on all ranks, and at least
            `least_extra_bytes`.
        by_collectives: whether to use all-to-alls and all-gathers of process groups; by default
            where the group is none of gloo. It has to be all ranks.
    """

    def __init__(
        self,
        program: Program,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        device: torch.device,
        extra_bytes: int,
        by_collectives: bool | None = None,
    ) -> None:
        is_gloo = dist.get_backend(group) == "gloo"
        self._by_collectives = not is_gloo if by_collectives is None else by_collectives
        self._rank = dist.get_rank()
        self._group = group
        self._dtype = dtype
        self._device = device
        self._limit_bytes = extra_bytes
        self._phases = phases_of(program, self._rank)
        self._places = Places(self._phases, self._rank, source, target, dtype, device)
        transfers = [phase.transfers(self._rank).moving for phase in self._phases.phases]
        self.sent_bytes, self.received_bytes = (
            sum(int(rows.elements[slots == self._rank].sum()) for rows, slots in side)
            * dtype.itemsize
            for side in (
                [(rows, rows.source_slot) for rows in transfers],
                [(rows, rows.target_slot) for rows in transfers],
            )
        )
        self.extra_bytes = 0
        self.has_failed = False

    def start(self) -> None:
        """Nothing travels yet: steps wait for one another, so `finish` does all of them."""

    def finish(self) -> None:
        """Carry the program out.

        Raises RunError where a rank does not answer; the target is not usable then.
        """
        step = "the program"
        try:
            groups = [self._group_of(phase) for phase in self._phases.phases]
            for number, phase in enumerate(self._phases.phases):
                step = f"step {phase.step}"
                before, after = self._places.at(number), self._places.at(number + 1)
                staged_bytes = self._carried_out(number, phase, groups[number], before, after)
                complete_contributions(phase.plan, self._rank, after)
                held_bytes = self._places.held_bytes + staged_bytes
                self.extra_bytes = max(self.extra_bytes, held_bytes)
                self._places.free_before(number + 1)
        except BaseException as error:
            self.has_failed = True
            if isinstance(error, RuntimeError):
                raise RunError(f"{step} did not end: {error}") from error
            raise

    def _group_of(self, phase: Phase) -> dist.ProcessGroup | None:
        """The process group of a phase; None where it needs none, or none can be made."""
        if not self._by_collectives or phase.kind in (LOCAL, MESSAGES):
            return None
        return process_group(self._group, phase.step.groups, self._rank)

    def _carried_out(
        self,
        number: int,
        phase: Phase,
        group: dist.ProcessGroup | None,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
    ) -> int:
        """Run one phase, by collectives where its group is given; the bytes that it packed into."""
        is_there = self._phases.is_view(number)
        if phase.kind == LOCAL and is_there:
            return 0
        transfers = phase.transfers(self._rank)
        if is_there:
            transfers = transfers.moving
        movement = Movement.of(phase.plan, transfers, self._rank, before, after)
        if phase.kind == LOCAL or (phase.kind != MESSAGES and len(phase.ranks) < 2):
            listing = Listing()
            listing.add(movement, self._rank)
            for one in listing.kept.get(0, []):
                one.target.copy_(one.source)
            return 0
        between_bytes = self._phases.between_elements(number) * self._dtype.itemsize
        limit_bytes = self._limit_bytes - between_bytes
        is_combined = phase.plan.source.contributions > phase.plan.target.contributions
        if phase.kind == MESSAGES or (group is None and not is_combined):
            exchange = Exchange([movement], self._rank, self._group, self._device, limit_bytes)
            exchange.run()
            return exchange.extra_bytes
        memory = (self._dtype, self._device, limit_bytes)
        rounds: GatherRounds | GroupRounds
        if group is not None and phase.kind == GATHER and is_gather(phase.plan):
            rounds = GatherRounds(movement, self._rank, group, *memory)
        else:
            within = self._group if group is None else group
            ranks, by_messages = phase.ranks, group is None
            rounds = GroupRounds(movement, self._rank, ranks, within, *memory, by_messages)
        rounds.run()
        return rounds.extra_bytes
