"""Methods of a refit's tensors: each moves in the exchange of all, or by a program.

1. `"exchange"`: all in one exchange.
2. `"program"`: every tensor by the collectives that `find_program` finds. Those that have none are
   one error, raised before anything is written.
3. `"auto"`: what `reshard.collectives.divide` finds to be quicker on a topology. Without one,
   programs are looked for only where contributions are combined, since only there they move less
   than the exchange does; every message counts then as `assumed_topology` says.
4. `"stages"`: each byte enters a host once, and is handed on within it
   (`reshard.plans.hierarchical`). Of what has no program, `"auto"` takes stages for all tensors
   or for none, by what is quicker, on hosts that the topology or the ranks themselves have told
   of. Of what is compared with the run before, only runs in which everything travels go so:
   changes are few bytes, and each rank that wants them is sent them.

Programs are of whole tensors, as they are, whose shardings are over the same devices on both
sides. Memory between source and target has to fit in what `extra_bytes` leaves for it.
The answer follows from what all ranks know of both models, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from reshard.collectives.choice import Ways, divide
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.topology import Topology
from reshard.torch.programs.methods import assume_links, assumed_topology, can_be_staged
from reshard.torch.programs.phases import between_bytes
from reshard.torch.refitting.matching import Match

RefitMethod = Literal["auto", "exchange", "program", "stages"]
_SHOWN = 20
# On any backend the steps are messages of one exchange, as many as this library's.
_RUN_AS = "gloo"
_EXCHANGED = "every rank has what it needs"


@dataclass(frozen=True, slots=True)
class TensorMethod:
    """How one tensor moves: by a program, in stages, or in the exchange otherwise; and why.

    `is_staged_whole` where it is compared, and goes in stages in runs in which all of it travels.
    """

    program: Program | None = None
    why: str = ""
    is_staged: bool = False
    is_staged_whole: bool = False


BY_EXCHANGE = TensorMethod()


def job_of(matches: Iterable[Match]) -> Job:
    """Tensors as one job, so that senders are chosen for all together."""
    # Layers move alike, so that what is equal of their items is worked out once.
    known: dict[tuple[str, int, int], JobItem] = {}
    items = []
    for one in matches:
        # Layouts that are equal are one object.
        key = one.dtype, id(one.source), id(one.target)
        like = known.get(key)
        if like is None:
            ends = one.source, one.target
            like = known[key] = JobItem.between_ranks(one.name, as_dtype(one.dtype), *ends)
        items.append(like.named(one.name))
    return Job(items)


@dataclass(frozen=True, slots=True)
class RefitMethods:
    """How methods are chosen: the same on every rank.

    Args:
        method: "auto", "exchange" or "program".
        topology: the hosts of the ranks and the links between them, where known.
        hosts: of the ranks, as these have told each other; no speeds are known of it.
        changed_only: whether runs send what changed, of tensors that can be compared.
    """

    method: RefitMethod = "exchange"
    topology: Topology | None = None
    hosts: Topology | None = None
    changed_only: bool = False

    @property
    def stage_topology(self) -> Topology | None:
        """The hosts that stages are planned for; None where nothing is known of hosts."""
        return self.topology or self.hosts

    def of(self, matches: Sequence[Match], staging_bytes: int) -> tuple[TensorMethod, ...]:
        """The method of every tensor, in their order.

        Args:
            matches: the tensors.
            staging_bytes: the most memory that one of them may take between source and target.

        Raises:
            PlanError: programs are asked for, and tensors have none.
            LayoutError: a topology without a rank or link that is needed.
        """
        if self.method == "exchange":
            return (BY_EXCHANGE,) * len(matches)
        if self.method == "stages":
            return self._stage(matches, (BY_EXCHANGE,) * len(matches))
        found: list[Program | str] = [self._find_program(one, staging_bytes) for one in matches]
        if self.method == "program":
            return self._require_programs(matches, found)
        # Only tensors that have a program can be divided; the others are exchanged anyway.
        tensors = [
            (LayoutChange(match.source, match.target), as_dtype(match.dtype), program)
            for match, program in zip(matches, found, strict=True)
            if isinstance(program, Program)
        ]
        topology = self.topology
        if topology is None:
            ranks = [max(plan.source.slots, plan.target.slots) for plan, _, _ in tensors]
            topology = assumed_topology(max(ranks, default=1))
        division = divide(tensors, topology, _RUN_AS)
        divided = zip(division.by_program, division.ways, strict=True)
        chosen = []
        exchanged = {why: TensorMethod(None, why) for why in set(found) if isinstance(why, str)}
        for program in found:
            if isinstance(program, str):
                chosen.append(exchanged[program])
                continue
            # `divided` has an entry for each tensor with a program, in their order.
            is_chosen, ways = next(divided)
            chosen.append(
                TensorMethod(program if is_chosen else None, self._explain(ways, is_chosen))
            )
        return self._stage(matches, tuple(chosen))

    def _stage(
        self, matches: Sequence[Match], chosen: tuple[TensorMethod, ...]
    ) -> tuple[TensorMethod, ...]:
        """The methods, with stages for what has no program: where asked for, or quicker."""
        hosts = self.stage_topology
        # On one host nothing crosses.
        if hosts is None or (hosts.hosts == 1 and self.method != "stages"):
            return chosen
        can_be = [
            one.program is None and can_be_staged(LayoutChange(match.source, match.target))
            for match, one in zip(matches, chosen, strict=True)
        ]
        if not any(can_be):
            return chosen
        why = "asked for"
        if self.method != "stages":
            job = job_of(match for match, can in zip(matches, can_be, strict=True) if can)
            hosts = hosts if self.topology is not None else assume_links(hosts)
            staged_s, direct_s = StagedJob(job, hosts).pipelined_s, job.estimate(hosts).seconds_s
            if staged_s >= direct_s:
                return chosen
            why = f"{staged_s:.3g} s for all that is staged, {direct_s:.3g} s in the exchange"
            if self.topology is None:
                why = "hosts are told apart by their names, and links between them are slower"
        compares = self.changed_only and self.method == "auto"
        always, when_whole = (
            TensorMethod(None, why, is_staged=True),
            TensorMethod(None, f"where all of it travels: {why}", is_staged_whole=True),
        )
        return tuple(
            one if not can else when_whole if compares and match.can_be_compared else always
            for match, one, can in zip(matches, chosen, can_be, strict=True)
        )

    def _find_program(self, match: Match, staging_bytes: int) -> Program | str:
        """The program of a tensor; or why it has none, or none is looked for."""
        if match.is_transformed:
            return "a transform makes it"
        if match.source_range is not None or match.target_range is not None:
            return "it is a piece of a fused tensor"
        if match.specs is None:
            return "a side of it is not a DTensor"
        # Without a topology nothing is known of times: a program has to move less.
        is_assumed = self.method == "auto" and self.topology is None
        if is_assumed and match.source.contributions <= match.target.contributions:
            return "no topology is given, and nothing of it is combined"
        program = find_program(*match.specs, match.source.shape)
        if not program.steps:
            return _EXCHANGED
        if any(isinstance(step, Exchange) for step in program.steps):
            return f"no program leads from `{match.specs[0]}` to `{match.specs[1]}`"
        least = LayoutChange(match.source, match.target).moved_elements if is_assumed else 0
        if is_assumed and program.moved_elements >= least:
            return "no topology is given, and its program moves no less"
        needed = between_bytes(program, as_dtype(match.dtype).itemsize_bytes)
        if needed > staging_bytes:
            return (
                f"its program needs {needed} bytes between source and target, and extra_bytes "
                f"leaves {staging_bytes}"
            )
        return program

    def _require_programs(
        self, matches: Sequence[Match], found: Sequence[Program | str]
    ) -> tuple[TensorMethod, ...]:
        problems = [
            f"{match.name}: {program}"
            for match, program in zip(matches, found, strict=True)
            if isinstance(program, str) and program != _EXCHANGED
        ]
        if problems:
            shown = "\n  ".join(problems[:_SHOWN])
            rest = len(problems) - _SHOWN
            raise PlanError(
                f"method='program', but {len(problems)} of {len(matches)} tensors have no program; "
                f"take method='auto':\n  {shown}" + (f"\n  ... {rest} more" if rest > 0 else "")
            )
        return tuple(
            TensorMethod(None, program)
            if isinstance(program, str)
            else TensorMethod(program, "asked for")
            for program in found
        )

    def _explain(self, ways: Ways, is_chosen: bool) -> str:
        """Why a tensor that has a program moves by it, or does not."""
        if self.topology is None:
            by_exchange, by_program = (
                f"{int(sum(part.busiest_bytes for part in parts))} bytes"
                for parts in ((ways.exchange,), ways.program)
            )
        else:
            by_exchange, by_program = (
                f"{seconds_s:.3g} s" for seconds_s in (ways.exchange_s, ways.program_s)
            )
        text = f"{by_program} by its program, {by_exchange} in the exchange"
        saves = not is_chosen and ways.program_s < ways.exchange_s
        return text + (", which is less than what waits between steps take" if saves else "")
