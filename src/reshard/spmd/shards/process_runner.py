"""One shard per process, over `torch.distributed`: each process has the shard of its own rank.

Every process runs the same program: all processes call the operations that move elements, in the
same order. Elements that are in the process's own shard are copied without a message. The others
move by the program that `chosen_program` finds, or by the direct exchange.

PyTorch records the computation of each rank on its own shards. A movement mixes the shards of all
ranks, and its gradient is the transposed movement (`with_gradient`). The gradient of a shard is the
effect of this shard alone on the result, which is the sum over ranks of the values on which each
calls `backward`:

    an axis that                 in the array       in its gradient
    shards a dimension           shards it          shards it in the same way
    shards nothing               copies             contributions: the effect of each copy
    holds contributions          contributions      copies: all have the same effect on the sum

Windows that overlap are contributions to the whole dimension, each to its own interval.

So the transpose of an all-gather is a reduce-scatter, and the transpose of a sum over ranks is a
copy: the programs that move arrays also move gradients. A mean's gradient is scaled like the mean.
The maximum passes its gradient to all contributions that equal it, in equal shares.

Where arrays enter and leave a program, each process has the same full array, or its copy of a
shard, and calls `backward` on the same number. There the gradient is the gradient of the full
array, the same on every process. `given` and `taken` convert between the two conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard._contexts import set_context
from reshard.collectives.steps import Exchange
from reshard.cut_rules import Windows
from reshard.errors import MeshError, ReshardError, RunError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.core.array_type import ArrayType, gradient_spec, replicated, without_partial
from reshard.spmd.core.backend import library, records_gradient
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.spmd.shards.runner import Begin, Runner, Transport
from reshard.spmd.shards.shard_copies import Movement, Shards, copies
from reshard.torch.exchange.agreement import CallSignature, agree, share
from reshard.torch.exchange.groups import RankGroup, rank_group
from reshard.torch.programs.run import PreparedMovement, agreed_sequence
from reshard.torch.redistribution import redistribute

Tensor = Any
Way = Callable[[Tensor], Tensor]


class TransposedMovement(torch.autograd.Function):  # type: ignore[misc]
    """An autograd function that moves a tensor by `forth` and its gradient by `back`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forth: Way, back: Way) -> Tensor:
        ctx.back = back
        return forth(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Gradients of sums are broadcast views, which cannot be sent as they are.
        return ctx.back(gradients[0].contiguous()), None, None


def with_gradient(
    runner: Runner, source: ArrayType, spec: ShardingSpec, move: Movement
) -> Movement:
    """Make a movement between processes differentiable for shards that record gradients.

    The movement raises UsageError for such a shard if the transposed movement is not a movement of
    arrays: from or to halos, or with contributions that are multiplied.
    """

    def back(gradient: Tensor) -> Tensor:
        before = source.spec or replicated(spec.mesh, source.ndim)
        apart, gradient = _spread(runner, source, spec, gradient)
        moved = _move(runner, source, gradient_spec(apart), gradient_spec(before), gradient)
        numerator, denominator = LayoutChange(before.layout(source.shape), after).scale
        if spec.reduction == "mean" and before.reduction != "mean":
            # The contributions to the mean share its gradient; each of them is the whole value.
            numerator *= after.contributions
        return moved if numerator == denominator else moved * numerator / denominator

    after = spec.layout(source.shape)

    meshes = [spec.mesh, *([] if source.spec is None else [source.spec.mesh])]
    has_everyone = all(map(runner.has_everyone, meshes))

    def moved(shards: Shards) -> Shards:
        if not has_everyone:
            refuse_gradient(runner, source, shards)
            return move(shards)
        (tensor,) = shards
        if not isinstance(tensor, torch.Tensor) or not records_gradient(tensor):
            return move(shards)
        _check(source, spec, may_share=True)
        before = source.spec
        if before is None:
            # Every process has the same whole array.
            whole = replicated(spec.mesh, source.ndim)
            return (
                _cross(runner, source, spec, whole, tensor, lambda x: move((x,))[0], enters=True),
            )
        # Which contribution is the maximum is known only after the movement, so it is not
        # transposed.
        if before.reduction in ("max", "min"):
            combined = _combine_extremes(runner, source, before, tensor)
            return runner.movement(source.with_spec(without_partial(before)), spec)((combined,))
        return (TransposedMovement.apply(tensor, lambda x: move((x,))[0], back),)

    return moved


def refuse_gradient(runner: Runner, kind: ArrayType, shards: Shards) -> None:
    """Raise UsageError if PyTorch records an array of which only some processes have shards.

    The other processes would not know that they must take part in the backward pass.
    """
    if any(isinstance(shard, torch.Tensor) and records_gradient(shard) for shard in shards):
        raise UsageError(
            f"a tensor that records gradients, as a shard of {kind} over a mesh without some of "
            "the processes: PyTorch's gradients do not go there; use sp.grad, or detach it"
        )


def _spread(
    runner: Runner, kind: ArrayType, spec: ShardingSpec, gradient: Tensor
) -> tuple[ShardingSpec, Tensor]:
    """Convert a gradient of overlapping parts to contributions to whole dimensions."""
    dims = list(spec.dim_specs)
    layout = spec.layout(kind.shape)
    for axis, size in enumerate(kind.shape):
        if not _has_windows(dims[axis], spec, size):
            continue
        cell = layout.cells_of(runner.ranks(spec.mesh)[0]).start
        runs = layout.tables[axis].runs_of(int(layout.cell_part[cell, axis]))
        start, stop = (runs[0][0], runs[-1][1]) if runs else (0, 0)
        before, after = (
            gradient.new_zeros((*gradient.shape[:axis], more, *gradient.shape[axis + 1 :]))
            for more in (start, size - stop)
        )
        gradient = torch.cat([before, gradient, after], axis)
        dims[axis] = DimSpec()
    if dims == list(spec.dim_specs):
        return spec, gradient
    return ShardingSpec(spec.mesh, dims), gradient


def _has_windows(dim: DimSpec, spec: ShardingSpec, size: int) -> bool:
    """Return whether the parts of a dimension are overlapping intervals."""
    if not any(isinstance(level.rule, Windows) for level in dim.levels):
        return False
    table = dim.table(spec.mesh, size)
    return len(dim.levels) == 1 and int(table.element_lengths.sum()) != size


def given(runner: Runner, kind: ArrayType, tensor: Tensor) -> Tensor:
    """Convert a shard that a program passes: its gradient is the sum over all of its copies."""
    if not records_gradient(tensor) or kind.spec is None:
        return tensor
    if not runner.has_everyone(kind.spec.mesh):
        refuse_gradient(runner, kind, (tensor,))
    _check(kind, kind.spec)
    outside = without_partial(kind.spec)
    return _cross(runner, kind, kind.spec, outside, tensor, lambda x: x, enters=True)


def taken(runner: Runner, kind: ArrayType, tensor: Tensor, gather: Way | None = None) -> Tensor:
    """Convert a shard for a program, or gather the array; every process has the same gradient.

    Args:
        runner: of the processes.
        kind: of the array.
        tensor: its shard here.
        gather: gathers the whole array from the shard; the shard itself is returned when None.
    """
    spec = kind.spec
    if not records_gradient(tensor) or spec is None:
        return tensor if gather is None else gather(tensor)
    if gather is None:
        _check(kind, spec)
        outside = without_partial(spec)
        return _cross(runner, kind, spec, outside, tensor, lambda x: x, enters=False)
    whole = replicated(spec.mesh, kind.ndim)
    if spec.partial_axes:
        # Contributions are combined first: the whole array has none.
        combined = runner.movement(kind, whole)((tensor,))[0]
        return taken(runner, kind.with_spec(whole), combined, lambda x: x)
    _check(kind, spec)
    return _cross(runner, kind, spec, whole, tensor, gather, enters=False)


def _cross(
    runner: Runner,
    kind: ArrayType,
    inside: ShardingSpec,
    outside: ShardingSpec,
    tensor: Tensor,
    forth: Way | None = None,
    *,
    enters: bool,
) -> Tensor:
    """Convert a tensor sharded by `outside` between programs to a shard of `inside`.

    If it does not enter, convert it in the other direction: each movement transposes the other.
    """
    ends = (outside, inside) if enters else (inside, outside)

    def back(gradient: Tensor) -> Tensor:
        return _cross(runner, kind, gradient_spec(inside), outside, gradient, enters=not enters)

    way = forth or (lambda x: _move(runner, kind, *ends, x))
    return TransposedMovement.apply(tensor, way, back) if records_gradient(tensor) else way(tensor)


def _move(
    runner: Runner, kind: ArrayType, before: ShardingSpec, after: ShardingSpec, shard: Tensor
) -> Tensor:
    if before is after:
        return shard
    return runner.movement(kind.with_spec(before), after)((shard,))[0]


def _combine_extremes(
    runner: Runner, kind: ArrayType, spec: ShardingSpec, tensor: Tensor
) -> Tensor:
    """Return the maximum (or minimum) of contributions, on all ranks that have contributions."""
    combined = without_partial(spec)
    counted = ShardingSpec(spec.mesh, spec.dim_specs, partial_axes=spec.partial_axes)
    extreme = runner.movement(kind, combined)((tensor.detach(),))[0]
    is_it = (tensor.detach() == extreme).to(tensor.dtype)
    # No contribution equals a maximum that is NaN: its count is 0.
    share = is_it / _move(runner, kind, counted, combined, is_it).clamp(min=1)

    def back(gradient: Tensor) -> Tensor:
        moved = _move(runner, kind, gradient_spec(combined), gradient_spec(spec), gradient)
        return moved * share

    return TransposedMovement.apply(tensor, lambda _: extreme, back)


def _check(source: ArrayType, spec: ShardingSpec, may_share: bool = False) -> None:
    """Raise UsageError if the transposed movement is not a movement of arrays.

    With `may_share`, the windows of the target sharding `spec` may overlap.
    """
    for side in (source.spec, spec):
        if side is None:
            continue
        for dim, size in zip(side.dim_specs, source.shape, strict=True):
            if all(level.rule.is_default for level in dim.levels):
                continue
            if may_share and side is spec and _has_windows(dim, spec, size):
                continue
            # The count includes halos: it exceeds the size if an element is in two parts.
            if int(dim.table(side.mesh, size).element_lengths.sum()) != size:
                raise UsageError(
                    f"a gradient through a movement of {source} from `{source.spec}` to `{spec}`: "
                    f"parts of `{dim}` have elements in common, and gradients between processes "
                    "go through parts that have none; reshard to a plain cut first, or detach"
                )
    before = None if source.spec is None else source.spec.reduction
    after = spec.reduction
    plain = (None, "sum", "mean")
    if after not in plain or (before not in plain and before not in ("max", "min")):
        raise UsageError(
            f"a gradient through a movement of {source} from `{source.spec}` to `{spec}`, by "
            f"{after if after not in plain else before}: between processes it goes through sums, "
            "means, and the reduction of a max or min; reshard by x.reduced() first, or detach"
        )


class OverProcesses(Runner):
    """A runner that stores this process's shard only. Create it with `over_processes`."""

    has_every_shard = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(library("torch"))
        self.group = group
        self.rank = dist.get_rank()

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        missing = set(mesh.devices) - set(self._everyone)
        if missing:
            raise MeshError(
                f"{mesh!r} has rank {min(missing)}, which is none of {len(self._everyone)} "
                "processes; give a mesh of theirs"
            )
        return (self.rank,) if self.rank in mesh.devices else ()

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.group or dist.group.WORLD))

    def has_everyone(self, mesh: DeviceMesh | None) -> bool:
        return mesh is None or len(mesh.devices) == len(self._everyone)

    def _new_movement(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        move = super()._new_movement(source, spec)
        return with_gradient(self, source, spec, move) if source.spec is None else move

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        # No elements move, for instance from a whole copy to a part of it: no messages, no waiting.
        if not plan.moved_elements and plan.target.reduction is None:
            ranks = self.ranks(spec.mesh)
            if not ranks:
                return lambda shards: ()
            return copies(plan, ranks, ranks, self.library)
        return with_gradient(self, source, spec, self._move_by_messages(source, spec))

    def _cross_meshes(self, source: ArrayType, mesh: DeviceMesh, spec: ShardingSpec) -> Movement:
        if set(mesh.devices) != set(spec.mesh.devices):
            return with_gradient(self, source, spec, self._move_by_messages(source, spec))
        plan = LayoutChange(source.layout, spec.layout(source.shape))
        if plan.source is plan.target:
            return lambda shards: shards
        return self._make_movement(source, spec, plan)

    def _move_by_messages(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        program = chosen_program(source, spec)
        prepared = PreparedMovement(program, source.dtype, self.group)
        is_exchange = any(isinstance(step, Exchange) for step in program.steps)
        by_hosts = self._move_by_exchange(source, spec.layout(source.shape))

        def moved(shards: Shards) -> Shards:
            if is_exchange and self._has_hosts():
                return by_hosts(shards)
            agreed = _agreed.get()
            is_own = agreed is not None and agreed.runner is self
            shard = prepared.run(_read_own(shards), agreed.group if agreed and is_own else None)
            return () if shard is None else (shard,)

        return moved

    def _has_hosts(self) -> bool:
        agreed = _agreed.get()
        # In a sequence that has failed, `rank_group` would wait for a rendezvous of all ranks.
        group = rank_group(self.group) if agreed is None else agreed.group
        return len(set(group.hosts)) > 1

    def transport(self, source: ArrayType, spec: ShardingSpec) -> Transport:
        """Return how the shards of an array are moved to another sharding."""
        if not self.is_moved(source, spec):
            return "here"
        # Between hosts, ranks agree on each direct exchange separately.
        program = chosen_program(source, spec)
        is_exchange = any(isinstance(step, Exchange) for step in program.steps)
        return "together" if is_exchange and self._has_hosts() else "messages"

    def _move_by_exchange(self, source: ArrayType, target: Layout) -> Movement:
        def moved(shards: Shards) -> Shards:
            own = _read_own(shards)
            dtype = getattr(torch, source.dtype.name)
            options: dict[str, Any] = {"source": source.layout, "group": self.group, "dtype": dtype}
            shard = redistribute(own, target, **options)
            return () if shard is None else (shard,)

        return moved

    def in_lockstep(self, digest: bytes) -> AbstractContextManager[Begin | None]:
        """Check on entry that all ranks have equal digests, and on exit that all have succeeded.

        If not, all ranks raise PlanError or RunError, see
        `reshard.torch.programs.run.agreed_sequence`.
        """
        return self._agree(digest)

    @contextmanager
    def _agree(self, digest: bytes) -> Iterator[Begin]:
        with agreed_sequence(self.group, digest) as sequence:

            def begin(move: Movement, shards: Shards) -> Callable[[], Shards]:
                # Streams of a device belong to threads.
                is_here = any(shard.device.type != "cpu" for shard in shards)
                return sequence.begin(partial(move, shards), is_here).result

            with set_context(_agreed, _Agreed(self, sequence.group)):
                yield begin

    def independent(self) -> AbstractContextManager[None]:
        return set_context(_agreed, None)

    def collective_error(self, error: Exception) -> Exception:
        rank_group(self.group).note_known(error)
        return error

    def on_any_rank(self, is_so: bool) -> bool:
        """Return whether a condition holds on any rank; all ranks must call this."""
        group = rank_group(self.group)
        with group.turn():
            return bool(agree(CallSignature({"a condition": b""}, notes=(int(is_so),)), group)[0])

    def failure_of_any(self, failure: Exception | None) -> Exception | None:
        """Return the failure of the first rank that failed, on all ranks."""
        group = rank_group(self.group)
        with group.turn():
            # Numbers decrease with the rank: the maximum belongs to the first rank that failed.
            own = 0 if failure is None else group.slots - group.rank
            (first,) = agree(CallSignature({"a failure": b""}, notes=(own,)), group)
            if not first:
                return None
            # Send the text, not the error itself: errors of libraries may not be picklable, and
            # their classes may take other arguments than a text.
            error_class = type(failure) if isinstance(failure, ReshardError) else RunError
            report = None if failure is None else (error_class, str(failure))
            kind, text = share(report, group.slots - first, group)
        repeated = self.collective_error(kind(text))
        # The rank that failed shows its own traceback; others have none.
        repeated.__cause__ = failure
        return repeated

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        if source.spec is None:
            return shards[0]
        # Every process of the group gets a copy, including processes outside the mesh.
        whole = Layout.whole(source.shape, self._everyone, max(self._everyone) + 1)
        if source.layout is whole:
            return taken(self, source, shards[0], lambda shard: shard)
        gather = self._move_by_exchange(source, whole)
        if not self.has_everyone(source.spec.mesh):
            refuse_gradient(self, source, shards)
            return gather(shards)[0]
        return taken(self, source, shards[0], lambda shard: gather((shard,))[0])

    def wrap_input(self, kind: ArrayType, shards: Shards) -> Shards:
        return tuple([given(self, kind, shard) for shard in shards])

    def unwrap_output(self, kind: ArrayType, shards: Shards) -> Shards:
        return tuple([taken(self, kind, shard) for shard in shards])

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "an array over processes cannot be pickled: each process has its own shard. Pickle "
            "x.shards and x.spec, and make it anew with sp.from_shards; or save a checkpoint"
        )

    def __repr__(self) -> str:
        return f"over_processes() of rank {self.rank}"


def _read_own(shards: Shards) -> torch.Tensor | None:
    """Return this rank's shard, or None if it has none."""
    return torch.as_tensor(shards[0]).contiguous() if shards else None


class _Agreed(NamedTuple):
    runner: OverProcesses
    group: RankGroup


# The runner whose movements all ranks have agreed on, and the ranks' group.
_agreed: ContextVar[_Agreed | None] = ContextVar("agreed", default=None)


# Operations compare runners by identity, so a group has a single runner.
@lru_cache(maxsize=8)
def over_processes(group: dist.ProcessGroup | None = None) -> Runner:
    """Return the runner with one shard in each process of a group (of all processes when None).

    Raises:
        MissingExtraError: where `array_api_compat` is not installed.
        UsageError: outside a `torch.distributed` job.
    """
    if not dist.is_initialized():
        raise UsageError(
            "over processes, without a job of them; call torch.distributed.init_process_group "
            "before, or compute in this process: sp.in_process('torch')"
        )
    return OverProcesses(group)
