"""A prepared refit on a rank: its part, its tensors, and its batches.

Batches are created during preparation, and again over another group after a failed run.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import ReshardError, ShardError
from reshard.torch.exchange.agreement import device_of
from reshard.torch.exchange.changes import ChangedOnly
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.fully_sharded import free_gathered
from reshard.torch.models.memory import LocalTensors
from reshard.torch.models.model_inputs import ModuleSlots
from reshard.torch.models.model_manifest import ModelManifest
from reshard.torch.models.model_pairs import ModelPair, NameOptions
from reshard.torch.refitting.batches import RefitBatches
from reshard.torch.refitting.matching import Match
from reshard.torch.refitting.plan import RefitPart, RefitPlan
from reshard.torch.refitting.report import PlanningReport
from reshard.torch.refitting.transforms import Transform


def list_slots(
    models: ModelPair, part: RefitPart, before: LocalTensors, after: LocalTensors
) -> tuple[ModuleSlots, ModuleSlots]:
    """Return the slots of both models' modules that hold the tensors of a rank's part."""
    sources = {item.match.source_name for item in part.items}
    return (
        ModuleSlots.of(models.source, [t for n, t in before.tensors.items() if n in sources]),
        ModuleSlots.of(models.target, after.tensors.values()),
    )


# The latest live batches of each part: the next batches mostly send the same messages.
_LATEST: weakref.WeakValueDictionary[RefitPart, RefitBatches] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class PreparedRefit:
    """The state of a rank that is kept for every run."""

    part: RefitPart
    before: LocalTensors
    after: LocalTensors
    transforms: Mapping[str, Transform]
    extra_bytes: int
    changed_only: ChangedOnly
    report: PlanningReport
    digest: bytes
    whole: RefitPlan | None
    names: NameOptions
    target_roster: ModelManifest
    slots: tuple[ModuleSlots, ModuleSlots]

    def free_gathered(self, of_source: bool = True) -> str:
        """Free copies that FSDP2 gathered of both models; return why not, or an empty text."""
        try:
            problem = free_gathered(self.after.shard_groups)
            if of_source:
                # The source's shards have its values, even while it is computing.
                free_gathered(self.before.shard_groups)
        except Exception as error:
            # Errors within FSDP are returned, since the other ranks wait for this rank.
            return f"{type(error).__name__}: {error}"
        return problem and f"the target's parameters are in use: {problem}"

    def find_change(self) -> str | None:
        """Return the first change of a tensor since the preparation, or None if unchanged."""
        # Messages are views of the tensors' memory, so a tensor must still be where it was.
        for side in (self.before, self.after):
            for name, change in side.list_changes():
                return f"{name} {change}; give it its memory back, or prepare again"
        for slots, is_target in zip(self.slots, (False, True), strict=True):
            if problem := slots.find_merged(is_target):
                return problem
        for slots, may_compute in zip(self.slots, (True, False), strict=True):
            if name := slots.find_replaced(may_compute):
                return (
                    f"the module has another tensor as {name} than when it was prepared; copy "
                    "into the one that was there, or prepare again"
                )
        return None

    def prepare_batches(self, group: RankGroup) -> tuple[RefitBatches | None, str | None]:
        """Return the memory and messages for every run; or None and the reason."""
        try:
            devices = self.before.devices | self.after.devices
            if len(devices) > 1:
                raise ShardError(
                    f"tensors on {sorted(map(str, devices))}; a rank has all of them on one device"
                )
            for match in self.part.made:
                if match.made_at == "target" and match.made_of in self.after.locals:
                    self._check_transform(match, group.rank)
            batches = RefitBatches(
                self.part,
                self.before,
                self.after,
                self.transforms,
                devices.pop() if devices else device_of(group),
                self.extra_bytes,
                group,
                self.changed_only,
                _LATEST.get(self.part),
            )
            _LATEST[self.part] = batches
        except ReshardError as error:
            return None, str(error)
        except Exception as error:
            # Errors such as lack of memory are returned, since the other ranks wait for this rank.
            return None, f"{type(error).__name__}: {error}"
        return batches, None

    def _check_transform(self, match: Match, rank: int) -> None:
        name, tensors = match.made_of, self.after.locals
        transform = self.transforms[name]
        made = {one: tensors[one] for one in transform.outputs(name) if one in tensors}
        whole = match.target if match.target_range is None else match.target_range.whole
        transform.check(name, whole, rank, made)
