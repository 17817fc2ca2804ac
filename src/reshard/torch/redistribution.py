"""Redistribution of a tensor to another layout, between the ranks of a running job.

Phases are methods of `Redistribution`, in the order in which they run:

1. *Agree.* Every rank plans by itself, and all compare their calls (`exchange.agreement`). Ranks
   without a part of the source may omit its description, and receive it from the other ranks.
2. *Plan.* Both sides become layouts over global ranks (`endpoint`). Messages are exchanged, in
   stages or by a program of collectives if requested or faster (`programs.methods`).
3. *Move.* This rank's transfers run within a limit of memory (`exchange.transfer`), and all ranks
   confirm: if a rank fails, all raise.
4. *Verify*, on request: the result is compared with the source by digests.

Gradients flow: the gradient of a redistribution is redistributed from the target's layout to the
source's. The gradient of a partial tensor's contribution is that of the whole, as in DTensor: if a
side is partial, its gradient is replicated. Replicas of an element are assumed to have equal
gradients. Every rank takes part in the backward pass, so autograd must reach it from every rank's
result: a rank without a part of the source attaches its result to an empty tensor that requires a
gradient, and a rank without a part of the target gets an empty result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from reshard.collectives.program import Program
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, RunError, ShardError, UsageError
from reshard.execution.arrays import check_reduction
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.plans.hierarchical import StagedJob
from reshard.plans.plan import Plan
from reshard.plans.plan import plan as create_plan
from reshard.plans.schedule import PipelineSpan, limit_message_bytes
from reshard.sharding import ShardingSpec
from reshard.topology import Topology
from reshard.torch import endpoint
from reshard.torch.exchange.agreement import CallSignature, agree, device_of, share
from reshard.torch.exchange.consistency import is_usable
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES, MessageExchange, limit_messages
from reshard.torch.exchange.groups import RankGroup, real_group
from reshard.torch.exchange.packing.messages import RankTransfers, stage_transfers, transfers_of
from reshard.torch.exchange.transfer import Transfer, Verification
from reshard.torch.forward_copies import forget_cached
from reshard.torch.fully_sharded import find_groups, find_storage, free_gathered
from reshard.torch.graph_breaks import break_graph
from reshard.torch.programs import methods
from reshard.torch.programs.run import ProgramRun, method_digest


class RedistributionOptions(TypedDict, total=False):
    """Keyword arguments of `redistribute` that do not describe the tensor; see there."""

    out: torch.Tensor | None
    group: dist.ProcessGroup | None
    async_op: bool
    extra_bytes: int
    method: methods.Method
    topology: Topology | None


class Redistribution:
    """A redistribution in progress. `wait()` returns its result; every rank calls it.

    `received_bytes`, `sent_bytes` and `extra_bytes` (memory beyond source and target) are those of
    this rank. `program` is the program of collectives, which runs in `wait`; None if messages are
    exchanged: in a background thread with gloo, and beyond the memory limit in `wait` on devices.
    """

    # Its phases are methods, in the order in which they run. `_plan` sets these.
    _before: endpoint.TensorEndpoint
    _after: endpoint.TensorEndpoint
    _change: LayoutChange
    _own: torch.Tensor | None
    _local: torch.Tensor | None
    _device: torch.device
    _staged: StagedJob | None
    _tensors: list[RankTransfers]
    _transfer: Transfer
    program: Program | None

    def __init__(
        self,
        group: RankGroup,
        tensor: torch.Tensor | None,
        target: endpoint.Description,
        source: endpoint.Description | None,
        shape: Sequence[int] | None,
        dtype: torch.dtype | None,
        *,
        out: torch.Tensor | None,
        async_op: bool,
        extra_bytes: int,
        method: methods.Method,
        topology: Topology | None,
    ) -> None:
        self._group, self._tensor = group, tensor
        self._given_target, self._given_source = target, source
        self._shape, self._dtype, self._out = shape, dtype, out
        self._is_async, self._limit_bytes = async_op, extra_bytes
        self._method, self._topology = method, topology
        self._is_planned = self._has_gradient = False
        self._wants_gradient = (
            isinstance(tensor, torch.Tensor) and torch.is_grad_enabled() and tensor.requires_grad
        )
        # Other ranks have to send the source's description.
        self._is_open = tensor is None and source is None
        self._agree()

    def _agree(self) -> None:
        """Plan the call, and compare it with those of all ranks; raise on all if any differs."""
        problem = None if self._is_open else self._try_to_plan()
        notes = agree(self._sign(problem), self._group)
        self._has_gradient, lacks_gradient, cannot, is_any_open, speaker = (
            bool(notes[0]),
            *notes[1:],
        )
        # A rank without a source of its own receives the description; then all agree again.
        if is_any_open:
            if speaker == _NOBODY:
                raise UsageError("no rank says what the source is; give source=, shape= and dtype=")
            self._share_source(-speaker)
            if not self._is_planned:
                problem = self._try_to_plan()
            agree(self._sign(problem), self._group)
        if not self._is_planned:
            raise RunError("nothing was moved: ranks agreed upon nothing")
        if self._has_gradient and lacks_gradient:
            raise PlanError(
                "some ranks' tensors require gradients and others' do not; give all of them alike, "
                "or tensor.detach()"
            )
        if self._has_gradient and cannot:
            raise UsageError(
                "async_op=True or out= with a tensor that requires gradients; give "
                "tensor.detach(), or leave them out on every rank"
            )

    def _sign(self, problem: str | None) -> CallSignature:
        parts = {}
        if self._is_planned:
            staged, layouts = self._staged, self._change
            method = method_digest(self.program) if staged is None else staged.digest.encode()
            parts = {
                "dtype": str(self._dtype).encode(),
                "source": layouts.source.fingerprint,
                "target": layouts.target.fingerprint,
                "extra_bytes": str(self._limit_bytes).encode(),
                "method": method,
            }
        lacks_gradient = self._tensor is not None and not self._wants_gradient
        cannot = self._is_async or self._out is not None
        # Ranks learn the maximum: minus the lowest rank that knows the source.
        speaker = _NOBODY if self._is_open else -self._group.rank
        flags = self._wants_gradient, lacks_gradient, cannot, self._is_open
        is_open = not self._is_planned and problem is None
        return CallSignature(parts, problem, is_open, (*map(int, flags), speaker), self._show)

    def _show(self) -> dict[str, str]:
        """Return this rank's call as text, if it was planned."""
        if not self._is_planned:
            return {}
        is_named = isinstance(self._method, str)
        return {
            "dtype": str(self._dtype),
            "source": self._before.describe(),
            "target": self._after.describe(),
            "extra_bytes": str(self._limit_bytes),
            "method": str(self._method) if is_named else "a program of its own",
        }

    def _share_source(self, speaker: int) -> None:
        """Receive the description of the source from a rank that has it, or send it."""
        described: Any = None
        if self._is_planned:
            before = self._before
            described = before.spec or before.layout, before.layout.shape, self._dtype
        described = share(described, speaker, self._group)
        if self._is_open:
            self._given_source, self._shape, self._dtype = described
            self._is_open = False

    def _try_to_plan(self) -> str | None:
        """Plan the call; return the problem if this rank cannot."""
        try:
            self._plan()
        except Exception as error:
            # Return errors such as lack of memory too, since the other ranks wait for this rank.
            return f"{type(error).__name__}: {error}"
        return None

    def _plan(self) -> None:
        """Check the arguments, choose a method, and allocate the result."""
        group, rank = self._group, self._group.rank
        # Both sides, and the type of the elements.
        tensor, dtype = self._tensor, self._dtype
        if isinstance(tensor, DTensor):
            if self._given_source is not None:
                raise UsageError("a DTensor knows its layout; leave out source=")
            before = endpoint.TensorEndpoint.of_tensor(tensor, group)
        elif self._given_source is None:
            raise UsageError(
                "a local tensor needs source=, the layout it is a part of: (torch DeviceMesh, "
                "[placements]), a ShardingSpec or a Layout"
            )
        else:
            shape = self._shape
            if shape is None:
                shape = endpoint.shape_of(self._given_source, self._given_target)
            before = endpoint.TensorEndpoint.of(self._given_source, shape, "source", group)
        after = endpoint.TensorEndpoint.of(self._given_target, before.layout.shape, "target", group)
        if isinstance(tensor, torch.Tensor):
            if not is_usable(tensor):
                raise ShardError(
                    f"tensor, {tensor.dtype} of shape {list(tensor.shape)}, is partly new and "
                    "partly old after a run into it that failed; fill it again"
                )
            self._check_against_tensor(tensor.dtype, before.layout.shape)
            dtype = tensor.dtype
        elif tensor is not None:
            raise UsageError(f"tensor is a {type(tensor).__name__}; give a torch tensor, or None")
        if dtype is None:
            raise UsageError("a rank without a tensor that gives source= needs dtype= as well")
        change = LayoutChange(before.layout, after.layout)
        # Raise here, where the arguments are named, rather than when messages are combined.
        for reduction in {before.layout.reduction, after.layout.reduction} - {None}:
            # If only the target is a mean, its contributions are replicas: nothing is divided.
            if reduction != "mean" or before.layout.reduction == "mean":
                check_reduction(str(reduction), as_dtype(dtype))
        if self._wants_gradient:
            backward_endpoints(change, before)
        endpoint.check_ranks(change, group)
        limit_message_bytes(self._limit_bytes)
        # This rank's memory on both sides, and the transfers between it and other ranks.
        own = endpoint.check_local(tensor, before, as_dtype(dtype), rank, "tensor")
        device = own.device if own is not None else device_of(group)
        local = endpoint.find_target_local(self._out, after, dtype, own, device, group)
        if local is not None and self._out is not None:
            written = {find_storage(local)} - {0}
            if problem := free_gathered(find_groups(written, are_stale=True)):
                raise ShardError(f"out is in use: {problem}")
        method = self._method
        if self._is_async and method == "auto" and self._topology is None:
            method = "exchange"  # A program would run in `wait`, and not in the background.
        limit_bytes = self._limit_bytes
        chosen = methods.choose_method(
            method, self._topology, before, after, dtype, group, device, limit_bytes
        )
        program = chosen if isinstance(chosen, Program) else None
        staged = chosen if isinstance(chosen, StagedJob) else None
        if not isinstance(chosen, Program):
            # Planned here, so that all ranks receive the error of a rank that cannot.
            self._tensors = _list_transfers(change, staged, rank, own, local, dtype)
            limit_messages(self._tensors, limit_bytes)
        self._before, self._after, self._change = before, after, change
        self._own, self._local, self._dtype, self._device = own, local, dtype, device
        self.program, self._staged, self._is_planned = program, staged, True

    def _check_against_tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raise UsageError if arguments contradict the tensor."""
        if self._dtype is not None and as_dtype(self._dtype) is not as_dtype(dtype):
            raise UsageError(
                f"dtype={self._dtype}, but the tensor is {dtype}; nothing is cast: tensor.to(dtype)"
            )
        if self._shape is not None and tuple(self._shape) != shape:
            raise UsageError(
                f"shape={list(self._shape)}, but the source has shape {list(shape)}; leave it out"
            )

    def _make_exchange(self) -> MessageExchange | ProgramRun:
        """Prepare the exchange or program that moves this rank's tensors."""
        ends, dtype = (self._own, self._local), cast(Any, self._dtype)
        if self.program is not None:
            return ProgramRun(
                self.program, *ends, dtype, self._group, self._device, self._limit_bytes
            )
        # Zero the target, since padding is not sent.
        if self._local is not None and self._change.target.is_padded:
            with self._writing():
                self._local.zero_()
        return MessageExchange(self._tensors, self._group, self._device, self._limit_bytes)

    def _start(self) -> Redistribution:
        out, result = self._out, "the result"
        written: tuple[list[torch.Tensor], ...] = ()
        if out is not None and self._local is not None:
            written = [out], [self._local]
            result = f"out, {out.dtype} of shape {list(out.shape)},"
        is_compared = self.program is None and self._change.source.reduction is None
        self._transfer = Transfer.prepare(
            self._make_exchange,
            self._group,
            *written,
            contents=[("the tensor", self._tensors if is_compared else None)],
            result=result,
            in_background=self._is_async,
        )
        self.received_bytes = self._transfer.received_bytes
        self.sent_bytes = self._transfer.sent_bytes
        with self._writing():
            self._transfer.start()
        return self

    def _writing(self) -> AbstractContextManager[object]:
        """Enter inference mode if the result is an inference tensor, which needs it for writes."""
        local = self._local
        return (
            torch.inference_mode() if local is not None and local.is_inference() else nullcontext()
        )

    def wait(self) -> Any:
        """Return the result, once it is complete.

        Raises RunError on every rank if a message does not arrive, or a rank does not finish. An
        `out` is then partly new and partly old, and not usable.
        """
        if not self.is_usable:
            with self._group.turn():
                return self._finish()
        return self._result()

    @break_graph
    def verify(self) -> Verification:
        """Compare the result with the source as it is now, by digests. All ranks call this.

        Results of programs and of combined contributions cannot be compared: then the tensor is in
        `left_out`.

        Raises:
            RunError: on every rank, elements that differ; a rank that did not wait for the
                result, or does not answer.
        """
        group, tag = self._group, self._transfer.exchanges[0].tag
        # Errors such as lack of memory are raised on all ranks, since others wait for this rank.
        with group.turn(), group.errors_on_all():
            problem = None if self.is_usable else "the result is not complete; call wait() first"
            agree(CallSignature({"redistribution": str(tag).encode()}, problem), group)
            return self._transfer.verify()

    def _finish(self) -> Any:
        try:
            with self._writing():
                self._transfer.finish()
        # Also after an error, since parts of `out` may have been written.
        finally:
            if self._out is not None:
                forget_cached()
        return self._result()

    def _result(self) -> Any:
        if self._out is not None:
            return self._out
        return self._after.wrap_local(self._local, cast(Any, self._dtype), self._device)

    @property
    def plan(self) -> Plan:
        """The transfers between the ranks, as from `reshard.plan`."""
        return create_plan(self._change.source, self._change.target, cast(Any, self._dtype))

    @property
    def is_usable(self) -> bool:
        """Whether the result, or `out`, is complete and was not left partly written."""
        return self._transfer.is_done

    @property
    def extra_bytes(self) -> int:
        """The memory used beyond source and target; of a program, the memory used so far."""
        return self._transfer.extra_bytes

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has sent and received all, or failed; then `wait` does not block."""
        return self._transfer.has_arrived

    def _run_with_gradient(self) -> Any:
        """Return the result, whose gradient is redistributed to the source's layout."""
        after, before = backward_endpoints(self._change, self._before)
        group, limit_bytes, dtype = self._group, self._limit_bytes, cast(Any, self._dtype)
        result_spec, program, holds = self._after.spec, self.program, self._local is not None
        target: endpoint.Description = before.layout
        if before.mesh is not None:
            target = (before.mesh, before.placements)

        def back(gradient: torch.Tensor) -> Any:
            source: endpoint.Description | None = after
            options: dict[str, Any] = {"group": group, "extra_bytes": limit_bytes}
            spec = replicated_spec(result_spec)
            if isinstance(gradient, DTensor):
                source, spec = None, endpoint.sharding_of_dtensor(gradient)
            program_back = None
            if program is not None:
                ends = (spec, before.spec, before.layout.shape)
                program_back = methods.find_gradient_program(
                    *ends, dtype, len(group.ranks), limit_bytes
                )
            into = target
            if program_back is not None:
                into = target if before.spec is None or before.mesh is not None else before.spec
                if source is not None:
                    source, options["shape"] = spec, before.layout.shape
            return redistribute(
                gradient if holds or source is None else None,
                into,
                source=source,
                dtype=dtype,
                method=program_back or "exchange",
                **options,
            )

        return apply_with_gradient(self._tensor, lambda: self._start()._finish(), back)


def apply_with_gradient(
    tensor: torch.Tensor | None, forth: Callable[[], Any], back: Callable[[Any], Any]
) -> Any:
    """Return the result of `forth()`; `back` maps its gradient to the tensor's gradient."""
    # The result also requires a gradient on a rank without a part of the source.
    anchor = torch.empty(0, requires_grad=True)
    return _Flow.apply(anchor, tensor, forth, back)


class _Flow(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tensor: torch.Tensor | None,
        forth: Callable[[], Any],
        back: Callable[[Any], Any],
    ) -> Any:
        ctx.back = back
        ctx.has_source = tensor is not None
        result = forth()
        # An autograd function has to return a tensor.
        return anchor.new_empty(0) if result is None else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = ctx.back(gradients[0])
        return None, gradient if ctx.has_source else None, None, None


def backward_endpoints(
    change: LayoutChange, source: endpoint.TensorEndpoint
) -> tuple[Layout, endpoint.TensorEndpoint]:
    """Return the layout of the result's gradient, and the side of the tensor's gradient.

    Raises:
        ShardError: a redistribution without gradients: contributions that are not added, or a
            target that omits elements.
    """
    for reduction in {change.source.reduction, change.target.reduction} - {None, "sum", "mean"}:
        raise ShardError(f"a {reduction} of contributions has no gradient here; detach the tensor")
    before, after = (_replicate_contributions(layout) for layout in (change.source, change.target))
    try:
        _ = LayoutChange(after, before).routes
    except PlanError as error:
        raise ShardError(
            f"the target leaves out elements, so gradients cannot flow back ({error}); "
            "detach the tensor"
        ) from error
    spec = replicated_spec(source.spec)
    if source.mesh is None:
        return after, endpoint.TensorEndpoint(before, spec=spec)
    placements = [
        Replicate() if placement.is_partial() else placement for placement in source.placements
    ]
    return after, endpoint.TensorEndpoint(before, source.mesh, tuple(placements), spec)


def replicated_spec(spec: ShardingSpec | None) -> ShardingSpec | None:
    """Return the sharding with contributions as copies of the whole, or None if unknown."""
    if spec is None or spec.only:
        return None
    return ShardingSpec(spec.mesh, spec.dim_specs)


def _replicate_contributions(layout: Layout) -> Layout:
    """Return the layout with contributions as copies of the whole."""
    return Layout(layout.shape, layout.tables, layout.slots, layout.cell_slot, layout.cell_part)


def _list_transfers(
    change: LayoutChange,
    staged: StagedJob | None,
    rank: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[RankTransfers]:
    """Return a rank's transfers of a tensor, all at once or in stages."""
    if staged is None:
        rows = transfers_of(change, as_dtype(dtype), rank)
        return [RankTransfers.of(change, rows, rank, source, target, dtype)]
    stages, span = methods.stages_of(staged, rank), PipelineSpan(0, staged.parts)
    return list(stage_transfers(change, stages, span, rank, source, target, dtype))


# Less than the negative of any rank.
_NOBODY = -(1 << 40)


@break_graph
def redistribute(
    tensor: Any,
    target: endpoint.Description,
    *,
    source: endpoint.Description | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    extra_bytes: int = DEFAULT_EXTRA_BYTES,
    method: methods.Method = "auto",
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
        source: the layout of a local tensor, in the same forms; not needed for a DTensor. A rank
            whose tensor is None may omit it: it receives source, shape and dtype from the others.
        shape: of the full tensor, if neither a DTensor nor a `Layout` specifies it.
        dtype: of the tensor, on a rank that gives `source` without a tensor.
        out: the target's local tensor (or DTensor) to write into, instead of a new tensor. It may
            be a view with any strides.
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
        this rank's local tensor, None without a part. If gradients are recorded, a rank without
        a part gets an empty tensor to call `backward` on.

    Raises:
        RunError: on every rank, if a rank has invalid arguments, fails, or does not answer within
            the group's timeout.
        PlanError: on every rank, if the ranks' calls do not match.
        UsageError: a rank outside the group.
    """
    among = real_group(group)
    if endpoint.is_sharded_array(tensor):
        if source is not None:
            raise UsageError("an array of reshard.spmd knows its layout; leave out source=")
        shape, dtype = tensor.shape, getattr(torch, tensor.dtype.name)
        tensor, source = endpoint.lay_out_array(tensor)
    with among.turn():
        begun = Redistribution(
            among,
            tensor,
            target,
            source,
            shape,
            dtype,
            out=out,
            async_op=async_op,
            extra_bytes=extra_bytes,
            method=method,
            topology=topology,
        )
        if begun._has_gradient:
            return begun._run_with_gradient()
        begun._start()
        return begun if async_op else begun._finish()
