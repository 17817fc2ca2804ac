"""A program as a Python function of JAX's collectives under `shard_map`.

::

    slice             lax.dynamic_slice_in_dim at the place of the device along the axes
    all-gather        lax.all_gather(..., tiled=True)
    all-to-all        lax.all_to_all(..., tiled=True)
    joint all-to-all  the pieces for every device of the group, by tables of where they begin,
                      one lax.all_to_all, and each piece to its place
    permute           lax.ppermute over all axes
    reduce-scatter    lax.psum_scatter(..., tiled=True)
    all-reduce        lax.psum, pmax, pmin, pmean

JAX names whole mesh axes, so an axis of which a step takes a part is split in the mesh that is
written. It has shards of one size only: every cut on the way must divide its dimension.
Contributions have a dimension of their own in front, cut over the partial axes. JAX's all-to-all
is dense: in a joint step each device sends a piece to every other one of its group, also to those
that need none, so more travels than the program counts.

Source: JAX, `jax.lax` and `jax.shard_map`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from reshard.collectives.lowering.shardings import axes_dropped, plain_shardings
from reshard.collectives.program import Program
from reshard.collectives.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    JointAllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from reshard.dtypes import DType
from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import ShardingSpec

_REDUCTIONS = {"sum": "psum", "max": "pmax", "min": "pmin", "mean": "pmean"}


def jax_module(program: Program, dtype: DType | str = "float32") -> str:
    """The text of a module with a mesh and a function `reshard`, from array to array.

    Args:
        program: its steps, in order, become collectives.
        dtype: not written; the function takes arrays of any.

    Raises:
        NotationError: a step that JAX cannot say, or shards of different sizes.

    >>> from reshard import spec
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
    specs = plain_shardings(program)
    for number, spec in enumerate(specs):
        where = f"step {number}, {program.steps[number - 1]}," if number else "the source"
        if spec.mesh is not specs[0].mesh:
            raise NotationError(
                f"{where} cannot be said in JAX: it leads to `{spec}` over devices in another "
                "order or grid; a shard_map has one mesh, describe both sides over it"
            )
        _check_even(where, spec, program.shape)
    mesh = specs[0].mesh
    names = _Names(mesh, specs)
    lines = ["    x = x[0]"] if specs[0].partial_axes else []
    tables: list[str] = []
    for number, step in enumerate(program.steps):
        pair = specs[number], specs[number + 1]
        lines.append(f"    # {step}: to `{pair[1]}`")
        if isinstance(step, JointAllToAll) or _changes_order(step, *pair):
            tables += _tables(number + 1, step, mesh)
            lines += _joint(number + 1, step, names)
        else:
            try:
                lines += [f"    x = {text}" for text in _texts(step, *pair, names)]
            except NotationError as error:
                raise NotationError(
                    f"step {number + 1}, {step}, cannot be said in JAX: {error}"
                ) from error
    if specs[-1].partial_axes:
        lines.append("    x = x[None]")
    sizes = [mesh.axis_size(axis) for axis in names.axes]
    return "\n".join(
        [
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
            f"axis_names = {names.tuple(names.axes)}",
            f"mesh = jax.sharding.Mesh(grid.reshape({tuple(sizes)}), axis_names)",
            *tables,
            "",
            "",
            "@jax.jit",
            "@functools.partial(",
            "    jax.shard_map,",
            "    mesh=mesh,",
            f"    in_specs={names.entries(specs[0])},",
            f"    out_specs={names.entries(specs[-1])},",
            "    check_vma=False,",
            ")",
            "def reshard(x):",
            *lines,
            "    return x",
        ]
    )


class _Names:
    """The axes of the mesh that is written: those of the program, split where a part is used."""

    def __init__(self, mesh: DeviceMesh, specs: Iterable[ShardingSpec]) -> None:
        self.mesh = mesh
        cuts = {name: {1, size} for name, size in zip(mesh.axis_names, mesh.shape, strict=True)}
        for spec in specs:
            used = [axis for dim in spec.dim_specs for axis in dim.axes]
            for axis in (*used, *spec.partial_axes):
                cuts[axis.name] |= {axis.pre, axis.pre * mesh.axis_size(axis)}
        self.axes: list[Axis] = []
        self._names: dict[tuple[str, int], str] = {}
        for name, found in cuts.items():
            ends = sorted(found)
            parts = list(itertools.pairwise(ends)) or [(1, 1)]
            if any(high % low for low, high in parts):
                raise NotationError(
                    f"the program cannot be said in JAX: it uses parts of axis {name} that begin "
                    f"at {ends[:-1]}, which do not divide one another; JAX has whole axes"
                )
            for low, high in parts:
                self.axes.append(Axis(name, low, high // low))
                word = name if len(parts) == 1 else f"{name}_{low}_{high}"
                while len(parts) > 1 and word in cuts:
                    word += "_"
                self._names[name, low] = word

    def of(self, axes: Iterable[Axis]) -> list[str]:
        """The names of what axes are made of, major to minor."""
        found = []
        for axis in axes:
            end = axis.pre * self.mesh.axis_size(axis)
            found += [
                self._names[part.name, part.pre]
                for part in self.axes
                if part.name == axis.name
                and axis.pre <= part.pre
                and (part.pre < end or self.mesh.axis_size(axis) == 1 == part.size)
            ]
        return found

    def tuple(self, axes: Iterable[Axis]) -> str:
        return repr(tuple(self.of(axes)))

    def entries(self, spec: ShardingSpec) -> str:
        """The `PartitionSpec` of a sharding, contributions in front."""
        dims = [dim.axes for dim in spec.dim_specs]
        if spec.partial_axes:
            dims = [spec.partial_axes, *dims]
        return f"P({', '.join(self.tuple(axes) if axes else 'None' for axes in dims)})"


def _check_even(where: str, spec: ShardingSpec, shape: tuple[int, ...]) -> None:
    for size, dim in zip(shape, spec.dim_specs, strict=True):
        parts = math.prod(spec.mesh.axis_size(axis) for axis in dim.axes)
        if any(not level.rule.is_default for level in dim.levels) or spec.only or size % parts:
            raise NotationError(
                f"{where} cannot be said in JAX: `{spec}` has other shards of shape {list(shape)} "
                "than equal blocks in order; JAX has those alone"
            )


def _texts(step: Step, before: ShardingSpec, after: ShardingSpec, names: _Names) -> list[str]:
    """The expressions of `x`, one behind the other. Raises NotationError where there are none."""
    mesh, dims = before.mesh, range(len(step.shape))
    reduction = before.reduction or "sum"
    if isinstance(step, AllReduce):
        if reduction not in _REDUCTIONS:
            raise NotationError(f"it has no collective for the {reduction}")
        return [f"lax.{_REDUCTIONS[reduction]}(x, {names.tuple(step.axes)})"]
    if isinstance(step, Permute):
        place = {rank: number for number, rank in enumerate(mesh.devices)}
        pairs = [(place[a], place[b]) for a, b in step.pairs]
        return [f"lax.ppermute(x, {names.tuple(names.axes)}, {pairs})"]
    if isinstance(step, AllToAll):
        giver, taker = step.dims
        axes = axes_dropped(after, before, giver)
        return [
            f"lax.all_to_all(x, {names.tuple(axes)}, split_axis={taker}, concat_axis={giver}, "
            "tiled=True)"
        ]
    found = []
    for dim in dims:
        short, long = (after, before) if isinstance(step, AllGather) else (before, after)
        axes = axes_dropped(short, long, dim)
        if not axes:
            continue
        text = names.tuple(axes)
        parts = math.prod(mesh.axis_size(axis) for axis in after.dim_specs[dim].axes)
        size = step.shape[dim] // parts
        if isinstance(step, AllGather):
            found.append(f"lax.all_gather(x, {text}, axis={dim}, tiled=True)")
        elif isinstance(step, Slice):
            start = f"lax.axis_index({text}) * {size}"
            found.append(f"lax.dynamic_slice_in_dim(x, {start}, {size}, axis={dim})")
        elif isinstance(step, ReduceScatter) and reduction == "sum":
            found.append(f"lax.psum_scatter(x, {text}, scatter_dimension={dim}, tiled=True)")
        else:
            raise NotationError(f"it has no collective for the {step.name} of the {reduction}")
    return found


def _changes_order(step: Step, before: ShardingSpec, after: ShardingSpec) -> bool:
    """Whether an all-to-all takes axes in one order and puts them in another."""
    if not isinstance(step, AllToAll):
        return False
    giver, taker = step.dims
    return axes_dropped(after, before, giver) != axes_dropped(before, after, taker)


def _tables(number: int, step: Step, mesh: DeviceMesh) -> list[str]:
    """Where the pieces begin, in the sender's shard and in the receiver's: -1 for no piece."""
    ndim = len(step.shape)
    place = {rank: position for position, rank in enumerate(mesh.devices)}
    none = [-1] * ndim
    width = len(step.groups[0])
    send = [[none] * width for _ in mesh.devices]
    receive = [[none] * width for _ in mesh.devices]
    shapes = set()
    for group in step.groups:
        held = {rank: step.source_layout.boxes(rank)[0] for rank in group}
        wanted = {rank: step.target_layout.boxes(rank)[0] for rank in group}
        for to, receiver in enumerate(group):
            taken = set()
            # A rank takes from itself what it can, and from one of several that hold the same.
            for sender in sorted(group, key=receiver.__ne__):
                box, goal = held[sender], wanted[receiver]
                low = [max(a, b) for a, b in zip(box.start, goal.start, strict=True)]
                high = [min(a, b) for a, b in zip(box.stop, goal.stop, strict=True)]
                if box in taken or any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                taken.add(box)
                shapes.add(tuple(b - a for a, b in zip(low, high, strict=True)))
                away = [a - b for a, b in zip(low, box.start, strict=True)]
                back = [a - b for a, b in zip(low, goal.start, strict=True)]
                send[place[sender]][to] = away
                receive[place[receiver]][group.index(sender)] = back
    if len(shapes) != 1:
        raise NotationError(
            f"step {number}, {step}, cannot be said in JAX: its pieces have the different shapes "
            f"{sorted(shapes)}; JAX's all-to-all has equal ones. Take --steps classical, or "
            "steps='classical' in find_program"
        )
    return [
        f"piece_{number} = {shapes.pop()}",
        f"send_{number} = np.array({send})",
        f"receive_{number} = np.array({receive})",
    ]


def _joint(number: int, step: Step, names: _Names) -> list[str]:
    local = step.target_layout.local_shape(step.target_layout.holders[0])
    return [
        f"    here = lax.axis_index({names.tuple(names.axes)})",
        f"    starts = jnp.asarray(send_{number})[here]",
        f"    cut = functools.partial(lax.dynamic_slice, slice_sizes=piece_{number})",
        "    pieces = jnp.stack([cut(x, list(start)) for start in starts])",
        f"    pieces = lax.all_to_all(pieces, {names.tuple(step.axes)}, 0, 0, tiled=True)",
        f"    x = jnp.zeros({local}, x.dtype)",
        f"    for piece, start in zip(pieces, jnp.asarray(receive_{number})[here]):",
        "        placed = lax.dynamic_update_slice(x, piece, list(start))",
        "        x = jnp.where(start[0] >= 0, placed, x)",
    ]
