"""A program as a Python function of JAX's collectives under `shard_map`.

::

    slice             lax.dynamic_slice_in_dim at the coordinates of the device along the axes
    all-gather        lax.all_gather(..., tiled=True)
    all-to-all        lax.all_to_all(..., tiled=True)
    joint all-to-all  the pieces for every device of the group, by tables of their offsets, a
                      lax.all_to_all, and an update with each piece at its offset
    permute           lax.ppermute over all axes
    reduce-scatter    lax.psum_scatter(..., tiled=True); for other reductions than the sum
                      lax.all_to_all, and a reduction of the received pieces
    all-reduce        lax.psum, pmax, pmin, pmean; of a product lax.all_gather, and multiplied

JAX names whole mesh axes, so an axis of which a step uses a part is split in the mesh of the
module. Its arrays have shards of equal size: a dimension that its axes do not divide is padded at
its end, as XLA pads, before and after the function. Contributions are indexed by an additional
first dimension, sharded over the partial axes. JAX's all-to-all is dense: in a joint step each
device sends a piece as large as the largest to every other device of its group, even if it needs
none, so more bytes move than the program counts.

Source: JAX, `jax.lax` and `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reshard.collectives import steps
from reshard.collectives.lowering import shardings
from reshard.collectives.program import Program
from reshard.dtypes import DType
from reshard.errors import NotationError
from reshard.mesh import Axis
from reshard.sharding import ShardingSpec

_SYSTEM = "JAX"
_REDUCTIONS = {"sum": "psum", "max": "pmax", "min": "pmin", "mean": "pmean"}
_COMBINE = {"max": "jnp.max", "min": "jnp.min", "mean": "jnp.mean", "product": "jnp.prod"}


def jax_module(program: Program, dtype: DType | str = "float32") -> str:
    """Return the text of a Python module with a mesh and a function `reshard` of an array.

    Args:
        program: whose steps become collectives.
        dtype: ignored; the function takes arrays of any dtype.

    Raises:
        NotationError: a step that JAX cannot express, or shards of different sizes.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> program = find_program(spec(mesh, "x y, -"), spec(mesh, "x, y"), (8, 4))
    >>> print("\\n".join(jax_module(program).splitlines()[-12:]))
    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(('x', 'y'), None),
        out_specs=P(('x',), ('y',)),
        check_vma=False,
    )
    def reshard(x):
        # all-to-all(y): to `x, y`
        x = lax.all_to_all(x, ('y',), split_axis=1, concat_axis=0, tiled=True)
        return x
    """
    specs = shardings.plain_shardings(program)
    _check_specs(program, specs)
    whole = shardings.WholeAxes(specs[0].mesh, specs, _SYSTEM)
    specs = tuple(map(whole.spec, specs))
    # Contributions are indexed by an additional first dimension, of length 1 on each device.
    lines = ["x = x[0]"] if specs[0].partial_axes else []
    tables: list[str] = []
    for number, step in enumerate(program.steps, 1):
        step_tables, texts = _write_numbered(number, step, specs[number - 1], specs[number], whole)
        lines += [f"# {step}: to `{step.target}`", *texts]
        tables += step_tables
    if specs[-1].partial_axes:
        lines.append("x = x[None]")
    mesh = whole.mesh
    return "\n".join(
        [
            *_explain_padding(specs, program.shape),
            "import functools",
            "",
            "import jax",
            "import jax.numpy as jnp",
            "import numpy as np",
            "from jax import lax",
            "from jax.sharding import PartitionSpec as P",
            "",
            f"devices = {list(mesh.devices)}",
            "by_id = {device.id: device for device in jax.devices()}",
            "grid = np.array([by_id[rank] for rank in devices], dtype=object)",
            f"axis_names = {mesh.axis_names}",
            f"mesh = jax.sharding.Mesh(grid.reshape({mesh.shape}), axis_names)",
            *tables,
            "",
            "",
            "@jax.jit",
            "@functools.partial(",
            "    jax.shard_map,",
            "    mesh=mesh,",
            f"    in_specs={_write_entries(specs[0])},",
            f"    out_specs={_write_entries(specs[-1])},",
            # The check cannot infer that an all_gather is equal on all devices, and refuses
            # the out_specs of a gathered dimension.
            "    check_vma=False,",
            ")",
            "def reshard(x):",
            *(f"    {line}" for line in lines),
            "    return x",
        ]
    )


def _check_specs(program: Program, specs: Sequence[ShardingSpec]) -> None:
    """Raise NotationError for shardings over several meshes, or with shards that JAX lacks."""
    for number, spec in enumerate(specs):
        where = f"step {number}, {program.steps[number - 1]}," if number else "the source"
        if spec.mesh is not specs[0].mesh:
            raise NotationError(
                f"{where} cannot be expressed in JAX: it leads to `{spec}` over devices in another "
                "order or grid; a shard_map has one mesh, describe both sides over it"
            )
        shardings.check_ceil(where, _SYSTEM, spec, program.shape)


def _write_numbered(
    number: int,
    step: steps.Step,
    before: ShardingSpec,
    after: ShardingSpec,
    whole: shardings.WholeAxes,
) -> tuple[list[str], list[str]]:
    """Return the tables and the lines of a step. Raises NotationError for a step that JAX lacks."""
    if isinstance(step, steps.Exchange):
        raise NotationError(
            f"step {number}, {step}, cannot be expressed in JAX: it sends messages of any "
            "size between any ranks; JAX only has collectives of groups"
        )
    try:
        texts = _write_step(step, before, after)
    except NotationError as error:
        if isinstance(step, steps.ReduceScatter):
            raise NotationError(
                f"step {number}, {step}, cannot be expressed in JAX: {error}"
            ) from error
        texts = None
    if texts is not None:
        return [], texts
    axes = whole.names(step.axes)
    if isinstance(step, steps.Permute):
        axes = whole.names(before.mesh.remaining_axes(before.partial_axes))
    return (
        _write_tables(number, step, before),
        _write_joint(number, step, before, after, axes),
    )


def padded_shape(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of JAX's array of a tensor: as long as its shards together.

    >>> from reshard import DeviceMesh
    >>> from reshard.sharding import spec
    >>> padded_shape(spec(DeviceMesh.of(x=4), "x, -"), (10, 3))
    (12, 3)
    """
    return tuple(
        shardings.part_length(spec, shape, dim) * shardings.parts_of(spec, dim)
        for dim in range(len(shape))
    )


def _explain_padding(specs: tuple[ShardingSpec, ...], shape: tuple[int, ...]) -> list[str]:
    before, after = padded_shape(specs[0], shape), padded_shape(specs[-1], shape)
    if before == after == shape:
        return []
    return [
        f"# A tensor of shape {shape}, whose shards are not of one size: `reshard` takes an array",
        f"# of shape {before} and returns one of shape {after}. Elements after the tensor's own",
        "# along a dimension are padding, of any value.",
    ]


def _list_names(axes: Iterable[Axis]) -> str:
    return repr(tuple(axis.name for axis in axes))


def _write_entries(spec: ShardingSpec) -> str:
    """Return the `PartitionSpec` of a sharding, with the contributions first."""
    dims = [dim.axes for dim in spec.dim_specs]
    if spec.partial_axes:
        dims = [spec.partial_axes, *dims]
    return f"P({', '.join(_list_names(axes) if axes else 'None' for axes in dims)})"


def _write_step(step: steps.Step, before: ShardingSpec, after: ShardingSpec) -> list[str] | None:
    """Return the lines of a step that is a collective of JAX, or None if it needs tables."""
    if isinstance(step, steps.AllReduce):
        return [_write_all_reduce(before, after)]
    if isinstance(step, steps.Permute):
        if shardings.ceil_shape(before, step.shape) != shardings.ceil_shape(after, step.shape):
            return None
        index = {rank: number for number, rank in enumerate(before.mesh.devices)}
        pairs = [(index[a], index[b]) for a, b in step.pairs]
        return [f"x = lax.ppermute(x, {before.mesh.axis_names}, {pairs})"]
    if isinstance(step, steps.AllToAll):
        return _write_all_to_all(step, before, after)
    if not isinstance(step, steps.AllGather | steps.Slice | steps.ReduceScatter):
        return None
    lines: list[str] = []
    # The axes of `short` are a prefix of those of `long`: a gather removes axes, the others add.
    short, long = (after, before) if isinstance(step, steps.AllGather) else (before, after)
    for dim in range(len(step.shape)):
        axes = shardings.axes_dropped(short, long, dim)
        if axes and not shardings.lines_up(short, long, step.shape, dim):
            return None
        if axes and isinstance(step, steps.AllGather):
            lines.append(f"x = lax.all_gather(x, {_list_names(axes)}, axis={dim}, tiled=True)")
            lines += _write_cut(short, long, step.shape, dim)
        elif axes:
            lines += _write_padding(short, long, step.shape, dim)
            length = shardings.part_length(long, step.shape, dim)
            if isinstance(step, steps.Slice):
                start = f"lax.axis_index({_list_names(axes)}) * {length}"
                lines.append(f"x = lax.dynamic_slice_in_dim(x, {start}, {length}, axis={dim})")
            else:
                lines += _write_scatter(axes, before, dim)
    return lines


def _count_excess(short: ShardingSpec, long: ShardingSpec, shape: tuple[int, ...], dim: int) -> int:
    """Count by how much the parts of `long` together exceed the part of `short` they form."""
    count = shardings.parts_of(long, dim) // shardings.parts_of(short, dim)
    return count * shardings.part_length(long, shape, dim) - shardings.part_length(
        short, shape, dim
    )


def _write_padding(
    short: ShardingSpec, long: ShardingSpec, shape: tuple[int, ...], dim: int
) -> list[str]:
    excess = _count_excess(short, long, shape, dim)
    widths = [(0, excess if d == dim else 0) for d in range(len(shape))]
    return [f"x = jnp.pad(x, {widths})"] if excess else []


def _write_cut(
    short: ShardingSpec, long: ShardingSpec, shape: tuple[int, ...], dim: int
) -> list[str]:
    length = shardings.part_length(short, shape, dim)
    is_longer = _count_excess(short, long, shape, dim) > 0
    return [f"x = lax.slice_in_dim(x, 0, {length}, axis={dim})"] if is_longer else []


def _write_all_to_all(
    step: steps.Step, before: ShardingSpec, after: ShardingSpec
) -> list[str] | None:
    giver, taker = step.dims
    axes = shardings.axes_dropped(after, before, giver)
    # A step that changes the order of its axes needs tables.
    if axes != shardings.axes_dropped(before, after, taker):
        return None
    ends = ((after, before, giver), (before, after, taker))
    if not all(shardings.lines_up(short, long, step.shape, dim) for short, long, dim in ends):
        return None
    return [
        *_write_padding(before, after, step.shape, taker),
        f"x = lax.all_to_all(x, {_list_names(axes)}, split_axis={taker}, concat_axis={giver}, "
        "tiled=True)",
        *_write_cut(after, before, step.shape, giver),
    ]


def _write_all_reduce(before: ShardingSpec, after: ShardingSpec) -> str:
    axes = _list_names(axis for axis in before.partial_axes if axis not in after.partial_axes)
    reduction = before.reduction or "sum"
    # JAX lacks a collective for products.
    if reduction == "product":
        # Without a dtype, JAX widens the product of narrow integers, as NumPy does.
        return f"x = jnp.prod(lax.all_gather(x, {axes}), axis=0, dtype=x.dtype)"
    return f"x = lax.{_REDUCTIONS[reduction]}(x, {axes})"


def _write_scatter(axes: tuple[Axis, ...], before: ShardingSpec, dim: int) -> list[str]:
    reduction = before.reduction or "sum"
    if reduction == "sum":
        return [
            f"x = lax.psum_scatter(x, {_list_names(axes)}, scatter_dimension={dim}, tiled=True)"
        ]
    # JAX only scatters sums: otherwise parts are exchanged, and each device combines its own.
    count = before.mesh.joint_size(axes)
    return [
        f"pieces = jnp.stack(jnp.split(x, {count}, axis={dim}))",
        f"pieces = lax.all_to_all(pieces, {_list_names(axes)}, 0, 0, tiled=True)",
        f"x = {_COMBINE[reduction]}(pieces, axis=0).astype(x.dtype)",
    ]


def _write_tables(number: int, step: steps.Step, before: ShardingSpec) -> list[str]:
    """Return tables of the offsets of pieces in the shards of senders and receivers, and sizes.

    Tables have shape `(devices, group, dims)`; sizes are 0 for no piece.
    """
    mesh, ndim = before.mesh, len(step.shape)
    index = {rank: number for number, rank in enumerate(mesh.devices)}
    send, receive, sizes = (
        np.zeros((mesh.size, len(step.groups[0]), ndim), dtype=int) for _ in range(3)
    )
    for group in step.groups:
        held, needed = (
            {rank: box for rank in group for box in layout.boxes(rank)}
            for layout in (step.source_layout, step.target_layout)
        )
        for to, receiver in enumerate(group):
            taken = set()
            # A rank is its own first source; of ranks with equal boxes, the first is a source.
            for sender in sorted(group, key=receiver.__ne__):
                if sender not in held or receiver not in needed or held[sender] in taken:
                    continue
                box, goal = held[sender], needed[receiver]
                common = box.intersect(goal)
                if common is None:
                    continue
                taken.add(box)
                at = index[receiver], group.index(sender)
                send[index[sender], to] = np.subtract(common.start, box.start)
                receive[at], sizes[at] = np.subtract(common.start, goal.start), common.shape
    # JAX's all-to-all is dense: all pieces have the size of the largest.
    piece = tuple(sizes.max(axis=(0, 1)).tolist())
    return [
        f"piece_{number} = {piece}",
        f"send_{number} = np.array({send.tolist()})",
        f"receive_{number} = np.array({receive.tolist()})",
        f"sizes_{number} = np.array({sizes.tolist()})",
    ]


def _write_joint(
    number: int, step: steps.Step, before: ShardingSpec, after: ShardingSpec, axes: Sequence[str]
) -> list[str]:
    """Return lines in which every device sends windows as large as the largest piece.

    Shards are padded by a window, because JAX shifts a window that extends beyond the end.
    """
    local = shardings.ceil_shape(after, step.shape)
    # The mask of the piece within its window.
    within = " & ".join(
        f"(lax.broadcasted_iota(int, piece_{number}, {dim}) < size[{dim}])"
        for dim in range(len(local))
    )
    end = ", ".join(f":{size}" for size in local)
    return [
        f"here = lax.axis_index({before.mesh.axis_names})",
        # dynamic_slice shifts a window that would extend beyond the end.
        f"x = jnp.pad(x, [(0, size) for size in piece_{number}])",
        f"cut = functools.partial(lax.dynamic_slice, slice_sizes=piece_{number})",
        f"pieces = jnp.stack([cut(x, list(start)) for start in jnp.asarray(send_{number})[here]])",
        f"pieces = lax.all_to_all(pieces, {tuple(axes)}, 0, 0, tiled=True)",
        # dynamic_update_slice shifts it, too.
        f"x = jnp.zeros([a + b for a, b in zip({local}, piece_{number})], x.dtype)",
        f"places = jnp.asarray(receive_{number})[here], jnp.asarray(sizes_{number})[here]",
        "for piece, start, size in zip(pieces, *places):",
        f"    piece = jnp.where({within}, piece, cut(x, list(start)))",
        "    x = lax.dynamic_update_slice(x, piece, list(start))",
        f"x = x[{end}]",
    ]
