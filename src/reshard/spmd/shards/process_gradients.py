"""Gradients of movements between processes: each is the transposed movement.

PyTorch records the computation of each rank on its own shards. A movement mixes the shards of all
ranks, and its gradient is the transposed movement. The gradient of a shard is the effect of this
shard alone on the result, which is the sum over ranks of the values on which each calls `backward`:

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

from collections.abc import Callable
from typing import Any

import torch

from reshard.cut_rules import Windows
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import records_gradient
from reshard.spmd.shards.partial_sums import without_partial
from reshard.spmd.shards.runner import Runner, replicated
from reshard.spmd.shards.shard_copies import Movement, Shards

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
        return ctx.back(gradients[0].contiguous()), None, None


def gradient_spec(spec: ShardingSpec) -> ShardingSpec:
    """Return the sharding of an array's gradient, which swaps copies and contributions.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=2)
    >>> for text in ("x, -", "-, -", "x, - | sum(y)"):
    ...     print(gradient_spec(reshard.spec(mesh, text)))
    x, - | sum(y)
    -, - | sum(x y)
    x, -
    """
    used = [axis for dim in spec.dim_specs for axis in dim.axes] + list(spec.partial_axes)
    return ShardingSpec(spec.mesh, spec.dim_specs, partial_axes=spec.mesh.remaining_axes(used))


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
        if before.reduction in ("max", "min"):
            combined = _combine_extremes(runner, source, before, tensor)
            return runner.movement(source.with_spec(without_partial(before)), spec)((combined,))
        return (TransposedMovement.apply(tensor, lambda x: move((x,))[0], back),)

    return moved


def refuse_gradient(runner: Runner, kind: ArrayType, shards: Shards) -> None:
    """Raise UsageError if PyTorch records an array of which only some processes have shards.

    The other processes would not know that they must take part in the backward pass.
    """
    if any(isinstance(one, torch.Tensor) and records_gradient(one) for one in shards):
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
    found = runner.movement(kind, combined)((tensor.detach(),))[0]
    is_it = (tensor.detach() == found).to(tensor.dtype)
    share = is_it / _move(runner, kind, counted, combined, is_it).clamp(min=1)

    def back(gradient: Tensor) -> Tensor:
        own = _move(runner, kind, gradient_spec(combined), gradient_spec(spec), gradient)
        return own * share

    return TransposedMovement.apply(tensor, lambda _: found, back)


def _check(source: ArrayType, spec: ShardingSpec, may_share: bool = False) -> None:
    """Raise UsageError if the transposed movement is not a movement of arrays.

    With `may_share`, the windows of the target sharding `spec` may overlap.
    """
    for one in (source.spec, spec):
        if one is None:
            continue
        for dim, size in zip(one.dim_specs, source.shape, strict=True):
            if all(level.rule.is_default for level in dim.levels):
                continue
            if may_share and one is spec and _has_windows(dim, spec, size):
                continue
            # The count includes halos: it exceeds the size if an element is in two parts.
            if int(dim.table(one.mesh, size).element_lengths.sum()) != size:
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
