"""Redistribution of one tensor to another layout, between the ranks of a running job.

1. Both sides become layouts over global ranks, whoever describes them (`endpoint`).
2. Every rank checks its own arguments; all agree that they mean the same (`exchange.agreement`).
   Ranks that hold nothing of the source may leave its description to those that do.
3. This rank's transfers are exchanged within a limit of memory (`exchange.exchange`), in stages or
   by a program of collectives where that is asked for, or is quicker (`programs.methods`).
4. All confirm that they are done: where one rank fails, all raise.

Gradients flow: the gradient of a redistribution is one from the target to the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reshard.collectives.program import Program
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, ReshardError, RunError, ShardError, UsageError
from reshard.execution.arrays import check_reduction
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.hierarchical import StagedJob
from reshard.plans.plan import Plan
from reshard.plans.plan import plan as create_plan
from reshard.plans.schedule import PipelineSpan, limit_message_bytes
from reshard.topology import Topology
from reshard.torch.distributed_tensor import sharding_of_dtensor
from reshard.torch.endpoint import (
    Description,
    TensorEndpoint,
    check_local,
    check_ranks,
    find_target_local,
    is_sharded_array,
    lay_out_array,
    shape_of,
)
from reshard.torch.exchange.agreement import CallSignature, agree, confirm, device_of, share
from reshard.torch.exchange.consistency import is_usable, mark_unusable, mark_usable
from reshard.torch.exchange.exchange import (
    DEFAULT_EXTRA_BYTES,
    BackgroundExchange,
    MessageExchange,
    limit_messages,
    next_tag,
)
from reshard.torch.exchange.groups import RankGroup, check_member, check_real, rank_group
from reshard.torch.exchange.packing.messages import RankTransfers, stage_transfers, transfers_of
from reshard.torch.forward_copies import forget_cached
from reshard.torch.fully_sharded import find_groups, find_storage, free_gathered
from reshard.torch.gradients import apply_with_gradient, backward_endpoints, replicated_spec
from reshard.torch.graph_breaks import break_graph
from reshard.torch.programs.methods import (
    Method,
    choose_method,
    find_gradient_program,
    stages_of,
)
from reshard.torch.programs.run import ProgramRun, method_digest


class RedistributionOptions(TypedDict, total=False):
    """Keyword arguments of `redistribute` that do not describe the tensor; see there."""

    out: torch.Tensor | None
    group: dist.ProcessGroup | None
    async_op: bool
    extra_bytes: int
    method: Method
    topology: Topology | None


class Redistribution:
    """A redistribution in progress. `wait()` returns its result; every rank calls it.

    `received_bytes`, `sent_bytes` and `extra_bytes` (memory beyond source and target) are those of
    this rank. `program` is the program of collectives, which runs in `wait`; None if messages are
    exchanged: in a background thread with gloo, and beyond the memory limit in `wait` on devices.
    """

    def __init__(
        self,
        prepared: _PreparedRedistribution,
        group: RankGroup,
        in_background: bool = False,
    ) -> None:
        self._prepared, self._group = prepared, group
        # Before all that may fail here only: ranks count alike, whether they wait or go on.
        tag = next_tag(group)
        with group.errors_on_all():
            run: MessageExchange | BackgroundExchange | ProgramRun = prepared.run(group)
        if isinstance(run, MessageExchange):
            run.tag = tag
            if in_background and run.can_leave_its_thread:
                run = BackgroundExchange(run, tag)
        self._run = run
        self._is_done = False
        self.program = prepared.program
        self.received_bytes, self.sent_bytes = run.received_bytes, run.sent_bytes
        try:
            run.start()
        except BaseException:
            self._mark_out(False)
            raise

    @property
    def plan(self) -> Plan:
        """The transfers between the ranks, as from `reshard.plan`."""
        change = self._prepared.change
        return create_plan(change.source, change.target, self._prepared.dtype)

    @property
    def is_usable(self) -> bool:
        """Whether the result, or `out`, is that of this redistribution: once it is done."""
        return self._is_done

    @property
    def extra_bytes(self) -> int:
        """The memory that is used beyond source and target; of a program, until now."""
        return self._run.extra_bytes

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has sent and received all, or failed; `wait` then takes no time."""
        if isinstance(self._run, BackgroundExchange):
            return self._run.is_done
        return self._is_done

    def wait(self) -> Any:
        """The result, once it is there.

        Raises RunError on every rank where a message does not come, or a rank does not finish;
        an `out` is partly new and partly old then, and not to be used.
        """
        if not self._is_done:
            with self._group.turn():
                self._finish()
        return self._prepared.result()

    def _finish(self) -> Any:
        prepared = self._prepared
        if self._run.has_failed:
            raise RunError("this redistribution failed; its result is not usable")
        try:
            self._run.finish()
            confirm(self._group)
        except BaseException as error:
            self._run.has_failed = True
            self._mark_out(False)
            self._group.break_off(error)
            if isinstance(error, ReshardError):
                what = "the result"
                if prepared.out is not None:
                    what = f"out, {prepared.dtype} of shape {list(prepared.out.shape)},"
                raise RunError(f"{error}; {what} is partly new and not usable") from error
            raise
        self._mark_out(True)
        self._is_done = True
        return prepared.result()

    def _mark_out(self, is_usable: bool) -> None:
        out, local = self._prepared.out, self._prepared.local
        if out is not None and local is not None:
            _count_write(local)
            forget_cached()
            (mark_usable if is_usable else mark_unusable)(out)


@break_graph
def redistribute(
    tensor: Any,
    target: Description,
    *,
    source: Description | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    extra_bytes: int = DEFAULT_EXTRA_BYTES,
    method: Method = "auto",
    topology: Topology | None = None,
) -> Any:
    """Change the layout of a tensor between ranks. All ranks of `group` call this.

    Each rank receives exactly the elements that it does not have. With a program of collectives it
    may receive more, in less time.

    Args:
        tensor: a DTensor, an array of `reshard.spmd` over processes, or this rank's local tensor of
            `source`; None on a rank without a part of it.
        target: `(torch DeviceMesh, placements)`, a `ShardingSpec` or a `Layout`, with global ranks.
            In a group of several jobs, specs and layouts use the ranks of the group, and meshes
            those of their own job.
        source: the layout of a local tensor, likewise; not needed for a DTensor. A rank whose
            tensor is None may omit it: it receives source, shape and dtype from the others.
        shape: of the full tensor, if neither a DTensor nor a `Layout` specifies it.
        dtype: of the tensor, on a rank that gives `source` but has no tensor.
        out: the target's local tensor (or DTensor) to write into, instead of a new one. It may be a
            view with any strides.
        group: contains all ranks of source and target; all ranks when None.
        async_op: whether to return a `Redistribution` immediately, whose `wait()` returns the
            result. Do not change the source before that. Ranks may use different values.
        extra_bytes: the maximum memory beyond source and target, on each rank.
        method: "exchange" sends messages with the elements that each rank does not have; "program"
            runs the collectives that `reshard.collectives.find_program` finds, or pass a `Program`
            to run; "stages" sends data into each host only once (`docs/hosts.md`); "auto" uses the
            fastest of these on `topology`. Without a topology, "auto" is the exchange, except for
            contributions that become replicated, and for ranks on several hosts.
        topology: the hosts of the ranks and the links between them; the same on all ranks.

    Returns:
        `out` if given; else a DTensor if the target is a torch mesh with torch's placements; else
        this rank's local tensor, None if it has no part. If gradients are recorded, a rank without
        a part gets an empty tensor to call `backward` on.

    Raises:
        RunError: on every rank, if a rank has invalid arguments, fails, or does not answer within
            the group's timeout.
        PlanError: on every rank, if the ranks' calls do not match.
        UsageError: a rank outside the group.
    """
    check_member(group)
    check_real(group)
    if is_sharded_array(tensor):
        if source is not None:
            raise UsageError("an array of reshard.spmd knows its layout; leave out source=")
        shape, dtype = tensor.shape, getattr(torch, tensor.dtype.name)
        tensor, source = lay_out_array(tensor)
    request = _Request(
        tensor, target, source, shape, dtype, out, extra_bytes, async_op, method, topology
    )
    among = rank_group(group)
    with among.turn():
        prepared = _agree_on_request(request, among)
        if prepared.has_gradient:
            return _with_gradient(tensor, prepared, among)
        begun = Redistribution(prepared, among, async_op)
        return begun if async_op else begun._finish()


def _with_gradient(
    tensor: torch.Tensor | None, prepared: _PreparedRedistribution, group: RankGroup
) -> Any:
    after, before = backward_endpoints(prepared.change, prepared.source)
    target: Description = before.layout
    if before.mesh is not None:
        target = (before.mesh, before.placements)

    def back(gradient: torch.Tensor) -> Any:
        source: Description | None = after
        options: dict[str, Any] = {"group": group, "extra_bytes": prepared.extra_bytes}
        spec = replicated_spec(prepared.target.spec)
        if isinstance(gradient, DTensor):
            source, spec = None, sharding_of_dtensor(gradient)
        program = None
        if prepared.program is not None:
            ranks = len(group.ranks)
            ends = (spec, before.spec, before.layout.shape)
            program = find_gradient_program(*ends, prepared.dtype, ranks, prepared.extra_bytes)
        into = target
        if program is not None:
            into = target if before.spec is None or before.mesh is not None else before.spec
            if source is not None:
                source, options["shape"] = spec, before.layout.shape
        return redistribute(
            gradient if prepared.local is not None or source is None else None,
            into,
            source=source,
            dtype=prepared.dtype,
            method=program or "exchange",
            **options,
        )

    return apply_with_gradient(tensor, lambda: Redistribution(prepared, group)._finish(), back)


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of one rank."""

    tensor: torch.Tensor | None
    target: Description
    source: Description | None
    shape: Sequence[int] | None
    dtype: torch.dtype | None
    out: torch.Tensor | None
    extra_bytes: int
    async_op: bool
    method: Method
    topology: Topology | None

    @property
    def is_open(self) -> bool:
        """Whether other ranks have to say what the source is."""
        return self.tensor is None and self.source is None

    @property
    def wants_gradient(self) -> bool:
        """Whether this rank's tensor asks for a gradient."""
        tensor = self.tensor
        return isinstance(tensor, torch.Tensor) and torch.is_grad_enabled() and tensor.requires_grad

    def notes(self, rank: int) -> tuple[int, ...]:
        """What all ranks must know of any: see `_agree_on_request`."""
        has_none = self.tensor is not None and not self.wants_gradient
        cannot = self.async_op or self.out is not None
        # The greatest note is learnt: minus the lowest rank that knows the source.
        speaker = _NOBODY if self.is_open else -rank
        return int(self.wants_gradient), int(has_none), int(cannot), int(self.is_open), speaker


# Less than minus any rank.
_NOBODY = -(1 << 40)


@dataclass(frozen=True, slots=True)
class _PreparedRedistribution:
    """What one rank will do, agreed upon by all."""

    change: LayoutChange
    source: TensorEndpoint
    target: TensorEndpoint
    own: torch.Tensor | None
    local: torch.Tensor | None
    out: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    extra_bytes: int
    program: Program | None
    staged: StagedJob | None
    has_gradient: bool = False

    def run(self, group: RankGroup) -> MessageExchange | ProgramRun:
        """This rank's part, to start and finish."""
        if self.program is not None:
            return ProgramRun(
                self.program,
                self.own,
                self.local,
                self.dtype,
                group,
                self.device,
                self.extra_bytes,
            )
        # No message has padding.
        if self.local is not None and self.change.target.is_padded:
            self.local.zero_()
        rank, ends = group.rank, (self.own, self.local)
        if self.staged is not None:
            stages, span = stages_of(self.staged, rank), PipelineSpan(0, self.staged.parts)
            tensors = list(stage_transfers(self.change, stages, span, rank, *ends))
        else:
            transfers = transfers_of(self.change, as_dtype(self.dtype), rank)
            tensors = [RankTransfers.of(self.change, transfers, rank, *ends)]
        return MessageExchange(tensors, rank, group, self.device, self.extra_bytes)

    def result(self) -> Any:
        """What the caller gets."""
        if self.out is not None:
            return self.out
        return self.target.wrap_local(self.local, self.device)


def _agree_on_request(request: _Request, group: RankGroup) -> _PreparedRedistribution:
    """What all ranks mean. Raises on all of them where they differ, or where one cannot."""
    prepared, problem = (None, None) if request.is_open else _try_to_prepare(request, group)
    notes = agree(_state_intent(prepared, problem, request, group.rank), group)
    has_gradient, lacks_gradient, cannot, someone_asks, speaker = notes
    # A rank without a source of its own learns it from one that has it; then all agree again.
    if someone_asks:
        if speaker == _NOBODY:
            raise UsageError("no rank says what the source is; give source=, shape= and dtype=")
        request = _share_source(request, prepared, -speaker, group)
        if prepared is None:
            prepared, problem = _try_to_prepare(request, group)
        agree(_state_intent(prepared, problem, request, group.rank), group)
    if prepared is None:
        raise RunError("nothing was moved: ranks agreed upon nothing")
    if has_gradient and lacks_gradient:
        raise PlanError(
            "some ranks' tensors require gradients and others' do not; give all of them alike, or "
            "tensor.detach()"
        )
    if has_gradient and cannot:
        raise UsageError(
            "async_op=True or out= with a tensor that requires gradients; give tensor.detach(), "
            "or leave them out on every rank"
        )
    return replace(prepared, has_gradient=bool(has_gradient))


def _try_to_prepare(
    request: _Request, group: RankGroup
) -> tuple[_PreparedRedistribution | None, str | None]:
    try:
        return _prepare(request, group), None
    except Exception as error:
        # Also what is of no use as an argument, or memory that is not there: the others wait.
        return None, f"{type(error).__name__}: {error}"


def _state_intent(
    prepared: _PreparedRedistribution | None, problem: str | None, request: _Request, rank: int
) -> CallSignature:
    parts, shown = {}, {}
    if prepared is not None:
        staged = prepared.staged
        method = method_digest(prepared.program) if staged is None else staged.digest.encode()
        parts = {
            "dtype": str(prepared.dtype).encode(),
            "source": prepared.change.source.fingerprint,
            "target": prepared.change.target.fingerprint,
            "extra_bytes": str(prepared.extra_bytes).encode(),
            "method": method,
        }
        shown = {
            "dtype": str(prepared.dtype),
            "source": prepared.source.describe(),
            "target": prepared.target.describe(),
            "extra_bytes": str(prepared.extra_bytes),
            "method": request.method if isinstance(request.method, str) else "a program of its own",
        }
    is_open = prepared is None and problem is None
    return CallSignature(parts, problem, is_open, request.notes(rank), shown)


def _share_source(
    request: _Request,
    prepared: _PreparedRedistribution | None,
    speaker: int,
    group: RankGroup,
) -> _Request:
    """The request with the source that one rank tells all others."""
    message: Any = None
    if prepared is not None:
        before = prepared.source
        message = before.spec or before.layout, before.layout.shape, prepared.dtype
    message = share(message, speaker, group)
    if not request.is_open:
        return request
    source, shape, dtype = message
    return replace(request, source=source, shape=shape, dtype=dtype)


def _prepare(request: _Request, group: RankGroup) -> _PreparedRedistribution:
    rank = group.rank
    # Both sides, and the type of the elements.
    tensor, dtype = request.tensor, request.dtype
    if isinstance(tensor, DTensor):
        if request.source is not None:
            raise UsageError("a DTensor knows its layout; leave out source=")
        before = TensorEndpoint.of_tensor(tensor, group)
    elif request.source is None:
        raise UsageError(
            "a local tensor needs source=, the layout it is a part of: (torch DeviceMesh, "
            "[placements]), a ShardingSpec or a Layout"
        )
    else:
        shape = request.shape
        if shape is None:
            shape = shape_of(request.source, request.target)
        before = TensorEndpoint.of(request.source, shape, "source", group)
    after = TensorEndpoint.of(request.target, before.layout.shape, "target", group)
    if isinstance(tensor, torch.Tensor):
        if not is_usable(tensor):
            raise ShardError(
                f"tensor, {tensor.dtype} of shape {list(tensor.shape)}, is partly new and partly "
                "old after a run into it that failed; fill it again"
            )
        _check_against_tensor(request, tensor.dtype, before.layout.shape)
        dtype = tensor.dtype
    elif tensor is not None:
        raise UsageError(f"tensor is a {type(tensor).__name__}; give a torch tensor, or None")
    if dtype is None:
        raise UsageError("a rank without a tensor that gives source= needs dtype= as well")
    change = LayoutChange(before.layout, after.layout)
    # Here, where the arguments are named, and not when messages are combined.
    for reduction in {before.layout.reduction, after.layout.reduction} - {None}:
        # Where only the target is a mean, its contributions are copies: nothing is divided.
        if reduction != "mean" or before.layout.reduction == "mean":
            check_reduction(str(reduction), as_dtype(dtype))
    if request.wants_gradient:
        backward_endpoints(change, before)
    check_ranks(change, group)
    limit_message_bytes(request.extra_bytes)
    # This rank's memory on both sides, and what moves between it and others.
    own = check_local(tensor, before, as_dtype(dtype), rank, "tensor")
    device = own.device if own is not None else device_of(group)
    local = find_target_local(request.out, after, dtype, own, device, group)
    if local is not None and request.out is not None:
        written = {find_storage(local)} - {0}
        if problem := free_gathered(find_groups(written, are_stale=True)):
            raise ShardError(f"out is in use: {problem}")
    method = request.method
    if request.async_op and method == "auto" and request.topology is None:
        method = "exchange"  # A program would run in `wait`, and not in the background.
    out, most_bytes = request.out, request.extra_bytes
    way = choose_method(method, request.topology, before, after, dtype, group, device, most_bytes)
    program = way if isinstance(way, Program) else None
    staged = way if isinstance(way, StagedJob) else None
    # Planned here, where all learn of a rank that cannot.
    rows = stages_of(staged, rank)[0] if staged else transfers_of(change, as_dtype(dtype), rank)
    limit_messages([RankTransfers.of(change, rows, rank, own, local, dtype)], most_bytes)
    return _PreparedRedistribution(
        change, before, after, own, local, out, dtype, device, most_bytes, program, staged
    )


def _check_against_tensor(request: _Request, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise UsageError where arguments contradict the tensor."""
    if request.dtype is not None and as_dtype(request.dtype) is not as_dtype(dtype):
        raise UsageError(
            f"dtype={request.dtype}, but the tensor is {dtype}; nothing is cast: tensor.to(dtype)"
        )
    if request.shape is not None and tuple(request.shape) != shape:
        raise UsageError(
            f"shape={list(request.shape)}, but the source has shape {list(shape)}; leave it out"
        )


def _count_write(local: torch.Tensor) -> None:
    """Messages are written behind autograd's back: a graph that saved the tensor must know."""
    if not local.is_inference():
        torch.autograd.graph.increment_version(local)
