"""Refits: a model repeatedly fills another in a different layout, between ranks of a running job.

A trainer's weights move into the inference engine's, in place:

1. Every rank lists its tensors of both models (`models.parameters`), and gathers the lists of the
   others (`models.manifests`, `exchange.agreement`).
2. Names, shapes and types are compared (`matching`); all mismatches are a single error, raised on
   every rank before any tensor is written.
3. The tensors are a single job; each rank has its part of it (`planning`), and prepares memory and
   messages once (`batches`).
4. A run sends and receives. All ranks confirm its end: if a rank fails, all raise, and the target
   is marked as not usable.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist

from reshard._contexts import pause_gc
from reshard.errors import ReshardError, RunError, ShardError, UsageError
from reshard.torch.endpoint import is_sharded_array, lay_out_array
from reshard.torch.exchange.agreement import CallSignature, agree, device_of, share
from reshard.torch.exchange.consistency import find_unusable, written_states
from reshard.torch.exchange.groups import RankGroup, rank_group, real_group
from reshard.torch.exchange.timeline import span
from reshard.torch.exchange.transfer import BatchObserver, Verification
from reshard.torch.forward_copies import forget_cached
from reshard.torch.fully_sharded import free_gathered
from reshard.torch.graph_breaks import break_graph
from reshard.torch.models.local_tensors import LocalTensors, check_memory
from reshard.torch.models.model_inputs import Model, ModuleSlots, find_written_copies
from reshard.torch.models.model_manifest import write_manifest
from reshard.torch.models.model_pairs import ModelPair, NameOptions
from reshard.torch.programs.methods import find_hosts
from reshard.torch.refitting import tied_sources
from reshard.torch.refitting.batches import RefitTransfer
from reshard.torch.refitting.moves import RefitMoves, list_moves
from reshard.torch.refitting.options import RefitOptions, RefitSettings
from reshard.torch.refitting.plan import PartItem, RefitPart, list_complete_names
from reshard.torch.refitting.planning import PlanningReport, find_transforms, plan_part
from reshard.torch.refitting.replicas import compare_replicas
from reshard.torch.refitting.transforms import Transform


def lay_out_arrays(model: Model) -> Model:
    """Return a model with arrays of `reshard.spmd` as pairs of a tensor and a layout."""
    if not isinstance(model, Mapping) or not any(map(is_sharded_array, model.values())):
        return model
    laid = dict(model)
    for name, value in model.items():
        if is_sharded_array(value):
            tensor, spec = lay_out_array(value)
            laid[name] = (tensor, spec.layout(value.shape))
    return laid


# The latest live transfer of each part: the next mostly sends the same messages.
_LATEST: weakref.WeakValueDictionary[RefitPart, RefitTransfer] = weakref.WeakValueDictionary()


class Refit:
    """A prepared refit, which can run any number of times. Create one with `Refit.prepare`.

    `tensors`, `sent_bytes`, `received_bytes`, `extra_bytes` (memory beyond both models) and
    `kept_bytes` (the copies that `changed_only` compares with) are those of this rank. `report` is
    about the preparation. `is_usable` is whether the target has exactly the values of a single run.
    """

    # Its phases are methods, in the order in which they run. They set these.
    names: NameOptions
    report: PlanningReport
    _source: LocalTensors
    _target: LocalTensors
    _part: RefitPart
    _transforms: dict[str, Transform]
    _transfer: RefitTransfer

    def __init__(
        self, group: RankGroup, source: Model, target: Model, settings: RefitSettings
    ) -> None:
        self._group, self._settings = group, settings
        self._left: tuple[object, ...] = ()
        models = self._agree(source, target)
        self._plan(models)
        self._prepare_transfer(group)
        self._tied, self._distant = self._find_ties()

    @property
    def sent_bytes(self) -> int:
        """The bytes this rank sends in a run; with `changed_only` those of the last run."""
        return self._transfer.sent_bytes

    @property
    def received_bytes(self) -> int:
        """The bytes this rank receives, counted as `sent_bytes`."""
        return self._transfer.received_bytes

    @property
    def extra_bytes(self) -> int:
        """The memory that this rank uses beyond both models."""
        return self._transfer.extra_bytes

    @property
    def kept_bytes(self) -> int:
        """The memory of the copies or digests that `changed_only` compares with."""
        return self._transfer.kept_bytes

    @classmethod
    @break_graph
    def prepare(
        cls,
        source: Model,
        target: Model,
        **options: Unpack[RefitOptions],
    ) -> Refit:
        """Compare both models, plan, and allocate what every run needs. Nothing is written yet.

        All ranks of `group` call this.

        Args:
            source: the model that has the values, as this rank has it; see
                `reshard.torch.models.parameters`. None on a rank without a part of it.
            target: the model to fill, given in the same way.
            source_names, target_names: map each side's names to common names, by function or table
                (`reshard.torch.models.naming`), such as `Recipe.naming`.
            ties: names that refer to the same tensor as another name. If the source has a tensor
                of each, a run compares them, and raises where they differ; on different ranks it
                compares checksums of equal boxes.
            stacks: patterns of stacked tensors with those of their members, such as
                `{"*.experts.up": "*.experts.{}.up"}`, in common names; on either side.
            num_experts: in the full model, if Megatron's ranks number their own from 0, and the
                names given with a `MegatronModel` do not specify it.
            cast: whether a target may have another type than its source, for all or by name; or the
                type that it then has. The narrower type is sent; integers may wrap.
            strict: whether an unused source is an error. A target without a source always is.
            source_offset, target_offset: the rank in the group that is rank 0 of the layouts given
                with tensors, or of Megatron's ranks; None for rank 0 of this process's job, or the
                `first_rank` of `by_recipe`. DTensors and process groups have their own.
            transforms: create targets with other elements, by their common names or patterns; the
                first match is used.
            quantize: the format of float8 target tensors with scales, if the source has neither:
                "fp8-block128" applies `BlockQuantized()` to all of them.
            planning: "local": each rank plans its part; "centralized": the first rank plans all.
            method: "exchange" moves all tensors in an exchange of messages; "program" moves every
                tensor by the collectives that `reshard.collectives.find_program` finds; "stages"
                sends data into each host only once (`docs/hosts.md`); "auto" uses what is faster on
                `topology`. Without a topology, programs are used for contributions that become
                replicated, if they move fewer bytes, and stages between hosts of different names.
            topology: the hosts of the ranks and the links between them; the same on all ranks.
            extra_bytes: the maximum memory beyond both models, on each rank.
            check_replicas: whether to compare a sample of each plain tensor of the source, which
                counts as replicated, between the ranks that have it.
            buckets: the maximum number of bytes of tensors that are sent together, bucket after
                bucket; "auto" for 16 buckets of at least 1 MiB and at most `extra_bytes`; one
                bucket when None. There are at most 256. A table gives the bucket of each of the
                source's tensors, from 0.
            changed_only: whether a run sends only changes since the previous run: "elements"
                compares with a copy of the sent elements, "blocks" with a digest of each 4 KiB.
                True is "elements", but sends everything to ranks that share memory, which is
                faster. See `reshard.torch.exchange.changes`.
            group: of all ranks that have a part of either model; all ranks when None. Ranks of a
                group of several jobs are numbered by their positions in it.

        Raises:
            ShardError: on every rank, all names, shapes and types that do not match.
            PlanError, RunError: on every rank, if ranks' calls do not match, a rank fails, or a
                tensor has no program with method "program".
            LayoutError: on every rank, a topology without a rank or link that is needed.
            UsageError: a rank outside the group, or no process groups at all.
        """
        group = options.pop("group", None)
        settings = RefitSettings(**cast(Any, options))
        among = real_group(group)
        # Among very many tensors, collections of garbage take a third of the time and find none.
        with among.turn(), pause_gc(freeze=True):
            return cls(among, source, target, settings)

    def _agree(self, source: Model, target: Model) -> ModelPair:
        """Compare the arguments with those of all ranks, and list this rank's tensors."""
        settings, group = self._settings, self._group
        # `agree` reports problems: a rank that raised an error alone would leave others waiting.
        problem = settings.find_problem()
        try:
            source = lay_out_arrays(source)
        except UsageError as error:
            source, problem = None, problem or f"source: {error}"
        if isinstance(target, Mapping) and any(map(is_sharded_array, target.values())):
            problem = problem or "target: arrays of reshard.spmd are immutable; give torch tensors"
        models = ModelPair.of(source, target, settings.num_experts)
        problem = problem or models.problem or find_written_copies(models.target) or None
        notes = agree(settings.sign(problem, models.notes), group)
        self._source, self._target, self.names = models.list_tensors(
            notes,
            group,
            NameOptions(
                settings.source_names, settings.target_names, settings.stacks, settings.ties
            ),
            (settings.source_offset, settings.target_offset),
            settings.check_replicas,
        )
        self._settings = settings.replace(ties=self.names.ties or {})
        return models

    def _plan(self, models: ModelPair) -> None:
        """Compare both models, and find this rank's part of the plan."""
        settings, group, target = self._settings, self._group, self._target
        own, self._target_manifest = check_memory(self._source, target, settings.ties or {})
        manifests = own, self._target_manifest
        # The whole plan is known on ranks that plan.
        self._part, self.report, self._whole = plan_part(
            settings, find_hosts(group), *manifests, group
        )
        self.tensors = len(self._part.target_names)
        # Without a transform of its own, a tensor is quantized.
        made_of = dict.fromkeys(match.made_of for match in self._part.made)
        self._transforms = find_transforms(made_of, settings)
        if settings.quantized is not None:
            self._transforms = dict.fromkeys(made_of, settings.quantized) | self._transforms
        # If several refits are alike, ranks must run the same refit.
        self._digest = f"{self._part.digest} {group.generation} {group.next_number()}".encode()
        # The slots of both models' modules that hold the tensors.
        names = {item.match.source_name for item in self._part.items}
        sources = [tensor for name, tensor in self._source.tensors.items() if name in names]
        self._slots = (
            ModuleSlots.of(models.source, sources),
            ModuleSlots.of(models.target, target.tensors.values()),
        )

    def _prepare_transfer(self, group: RankGroup) -> None:
        """Prepare memory and messages for every run; raise on all ranks if any rank cannot.

        This is the second agreement: on the plan, and on the memory of each rank.
        """
        transfer, problem = None, None
        try:
            transfer = self._make_transfer(group)
        except Exception as error:
            # Errors such as lack of memory are reported too, since the others wait for this rank.
            is_ours = isinstance(error, ReshardError)
            problem = str(error) if is_ours else f"{type(error).__name__}: {error}"
        agree(CallSignature({"refit": self._digest}, problem), group)
        if transfer is None:
            raise RunError("nothing was moved: no messages could be prepared")
        self._transfer, self._group, self.is_usable = transfer, group, True

    def _make_transfer(self, group: RankGroup) -> RefitTransfer:
        source, target = self._source, self._target
        devices = source.devices | target.devices
        if len(devices) > 1:
            raise ShardError(
                f"tensors on {sorted(map(str, devices))}; a rank has all of them on one device"
            )
        for match in self._part.made:
            if match.made_at == "target" and match.made_of in target.locals:
                name, transform = match.made_of, self._transforms[match.made_of]
                outputs = transform.outputs(name)
                local_outputs = {
                    output: target.locals[output] for output in outputs if output in target.locals
                }
                whole = match.target if match.target_range is None else match.target_range.whole
                transform.check(name, whole, group.rank, local_outputs)
        transfer = RefitTransfer(
            self._part,
            source,
            target,
            self._transforms,
            devices.pop() if devices else device_of(group),
            self._settings.extra_bytes,
            group,
            self._settings.changed_only,
            _LATEST.get(self._part),
        )
        _LATEST[self._part] = transfer
        return transfer

    def _find_ties(self) -> tuple[tied_sources.Pairs, tuple[tied_sources.DistantPair, ...]]:
        """Return the tied source tensors that runs compare: on this rank, and between ranks."""
        ties, group = self._settings.ties, self._group
        if not ties:
            return (), ()
        tied: tuple[set[str], tuple[tied_sources.DistantPair, ...]] = (set(), ())
        if self._whole is not None:
            tied = {match.source_name for match in self._whole.matches}, self._whole.tied
        # With centralized planning only the first rank knows all tensors.
        if self._settings.planning == "centralized":
            tied = share(tied, group.ranks[0], group)
        used, distant = tied
        uncompared = tied_sources.describe_uncompared(distant)
        if uncompared and group.rank == group.ranks[0]:
            warnings.warn(uncompared, stacklevel=2)
        names = {pair.name for pair in distant}
        return tied_sources.find_tied_pairs(ties, self._source.locals, used, names), distant

    def free_gathered(self) -> None:
        """Free the copies that FSDP2 gathered of the source's shards (`fully_sharded`).

        Call it on the thread that computes, while another thread runs with `computes=True`.
        """
        self._free_gathered()

    def _free_gathered(self, of_source: bool = True) -> str:
        """Free copies that FSDP2 gathered of both models; return why not, or an empty text."""
        try:
            problem = free_gathered(self._target.shard_groups)
            if of_source:
                # The source's shards have its values, even while it is computing.
                free_gathered(self._source.shard_groups)
        except Exception as error:
            # Errors within FSDP are returned, since the other ranks wait for this rank.
            return f"{type(error).__name__}: {error}"
        return problem and f"the target's parameters are in use: {problem}"

    @break_graph
    def run(
        self,
        observer: BatchObserver | None = None,
        *,
        checks_source: bool = True,
        computes: bool = False,
    ) -> None:
        """Copy the source's current values into the target. All ranks of the group call this.

        Args:
            observer: its `begin` and `end` are called for every batch.
            checks_source: whether to require that the source's tensors are usable when the run
                begins.
            computes: whether the source may be computing in another thread.

        Raises:
            RunError: on every rank, if a rank fails or does not answer within the group's timeout.
                After the first byte, the target is then not usable.
            PlanError: on every rank, if ranks run different refits.
        """
        with real_group(self._group).turn():
            # Check before each run, since a rank may have failed, or its tensors may have moved.
            problem = self._problem(checks_source, computes or not checks_source)
            # Send all elements if no run has completed, or a target was written since the last run.
            is_new = not self._transfer.is_done or self._left != self._see_written()
            is_like_before = 0
            if not (problem or is_new):
                try:
                    is_like_before = int(not self._transfer.seems_changed())
                except Exception as error:
                    # `agree` reports the error, since the other ranks wait for this rank.
                    problem = f"{type(error).__name__}: {error}"
            notes = int(is_new), is_like_before
            with span("agree"):
                parts = {"refit": self._digest}
                any_new, any_like_before = agree(
                    CallSignature(parts, problem, notes=notes), self._group
                )
                if self._distant:
                    tied_sources.compare_distant(self._distant, self._source.locals, self._group)
            # Send all elements too if most have changed on each rank that sends any.
            self._transfer.send_all(bool(any_new or not any_like_before))
            # Before the first byte, so that a run that fails in any way leaves it False.
            self.is_usable = False
            # An engine's tensors may be inference tensors, which can only be written in this mode.
            with torch.inference_mode():
                self._transfer.run(observer)
            # A forward on another thread may have gathered shards meanwhile.
            self._free_gathered(of_source=False)
            forget_cached()
            self._left = self._see_written()
            self.is_usable = True

    def _see_written(self) -> tuple[object, ...]:
        """Return a state that differs after writes into the target, if changes are tracked."""
        return written_states(self._target.tensors.values()) if self._settings.changed_only else ()

    @break_graph
    def verify(self) -> Verification:
        """Compare the target with the source's current values, by digests. All ranks call this.

        Between two ranks, 16 bytes are sent for each tensor. Results of transforms and collectives
        cannot be compared; their names are in `left_out`.

        Raises:
            RunError: on every rank, elements that differ, with their tensors and ranks; or a rank
                that does not answer.
        """
        # Errors such as lack of memory are raised on all ranks, since others wait for this rank.
        with self._group.turn(), self._group.errors_on_all():
            agree(CallSignature({"refit": self._digest}, self._problem()), self._group)
            if self._distant:
                tied_sources.compare_distant(self._distant, self._source.locals, self._group)
            return self._transfer.verify()

    def _problem(self, checks_source: bool = True, computes: bool = False) -> str | None:
        """Return why this rank cannot run, or None. Frees gathered copies first."""
        if not self.is_usable:
            return (
                "an earlier run failed, and messages of it may still be on their way; call "
                "renew(group) with a new process group"
            )
        if problem := self._free_gathered(of_source=not computes):
            return problem
        # Messages are views of the tensors' memory, so a tensor must still be where it was.
        for side in (self._source, self._target):
            for name, change in side.list_changes():
                return f"{name} {change}; give it its memory back, or prepare again"
        for slots, is_target in zip(self._slots, (False, True), strict=True):
            if problem := slots.find_change(is_target):
                return problem
        if checks_source:
            for name in find_unusable(self._source.tensors):
                return f"{name} of the source is partly new and partly old after a run that failed"
        return tied_sources.find_difference(self._tied, self._source.locals) or None

    @cached_property
    def complete_names(self) -> tuple[tuple[str, ...], ...]:
        """By batch, the target's tensors on this rank that are complete after it."""
        part = self._part
        return list_complete_names([(item.batch, item.match) for item in part.items], part.batches)

    @cached_property
    def batch_of(self) -> dict[str, int]:
        """The batch that completes each tensor of the target, on all ranks whose plan is known."""
        whole = self._whole
        names = self.complete_names if whole is None else whole.complete_names
        return {name: batch for batch, of_batch in enumerate(names) for name in of_batch}

    @cached_property
    def source_names(self) -> tuple[tuple[str, ...], ...]:
        """By batch, the source's tensors on this rank that are read in it."""
        names = [dict[str, None]() for _ in range(self._part.batches)]
        for item in self._part.items:
            names[item.batch][item.match.source_name] = None
        return tuple(map(tuple, names))

    @property
    def batch_sent_bytes(self) -> tuple[int, ...]:
        """The bytes that this rank sends in each batch."""
        return tuple(
            sum(exchange.sent_bytes for exchange in batch.exchanges)
            for batch in self._transfer.batches
        )

    def target_bytes(self, names: Iterable[str]) -> int:
        """Return the size of this rank's parts of tensors of the target."""
        tensors = self._target.locals
        return sum(tensors[name].nbytes for name in names if name in tensors)

    @cached_property
    def target_digest(self) -> str:
        """A digest, equal on ranks whose parts of the target have equal tensors and shardings."""
        manifest = write_manifest(self._target_manifest)
        return hashlib.blake2b(manifest.encode(), digest_size=16).hexdigest()

    @cached_property
    def plan(self) -> RefitMoves:
        """The moves: which rank sends which slice of a tensor to which. Available before a run.

        All ranks' moves; with centralized planning, only the first rank has those of others.
        """
        if self._whole is None:
            return RefitMoves(tuple(list_moves(self._part.items)))
        moves = (list_moves(self._whole.part(rank).items, rank) for rank in self._group.ranks)
        return RefitMoves(tuple(chain.from_iterable(moves)))

    @property
    def source_tensors(self) -> Mapping[str, torch.Tensor]:
        """The local tensors of the source on this rank, by the names that all ranks share."""
        return self._source.locals

    @property
    def target_tensors(self) -> Mapping[str, torch.Tensor]:
        """The local tensors of the target on this rank, by the names that all ranks share."""
        return self._target.locals

    @property
    def part_items(self) -> tuple[PartItem, ...]:
        """The tensors that this rank sends, keeps or receives, with their transfers."""
        return self._part.items

    def compare_replicas(self) -> None:
        """Compare the replicas within both models. All ranks of the group call this.

        Every replica is read once; only digests are sent.

        Raises:
            ShardError: on every rank, tensors whose replicas differ, and the ranks that have them.
            RunError: a rank that does not answer.
        """
        with self._group.turn():
            agree(CallSignature({"refit": self._digest, "replicas": b""}), self._group)
            locals_of = self._source.locals, self._target.locals
            compare_replicas(self._part.items, *locals_of, self._group)

    def renew(self, group: dist.ProcessGroup | None) -> None:
        """Prepare the messages again, over a group of the same ranks, after a failed run.

        It may be the same group, if all its ranks are alive: they open new connections.

        All ranks of the group call this. Raises RunError on all ranks if any fails.
        """
        among = rank_group(group)
        with among.turn():
            self._prepare_transfer(among)


@break_graph
def refit(source: Model, target: Model, **options: Unpack[RefitOptions]) -> Refit:
    """Fill a model from another, once. The returned `Refit` can run again.

    Takes the arguments of `Refit.prepare`, and raises the errors of it and of `Refit.run`.
    """
    prepared = Refit.prepare(source, target, **options)
    prepared.run()
    return prepared
