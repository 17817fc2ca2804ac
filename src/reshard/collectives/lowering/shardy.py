"""A program as a module of Shardy, the partitioner of XLA.

::

    slice             sdy.all_slice [{"y"}, {}] %0 out_sharding=<@mesh, [{"x", "y"}, {}]>
    all-gather        sdy.all_gather [{"y"}, {}] %0 out_sharding=<@mesh, [{"x"}, {}]>
    all-to-all        sdy.all_to_all [{"y"}: 0->1] %0 out_sharding=<@mesh, [{"x"}, {"y"}]>
    permute           sdy.collective_permute %0 out_sharding=<@mesh, [{"y"}, {"x"}]>
    reduce-scatter    sdy.reduce_scatter [{"y"}, {}] %0 out_sharding=<@mesh, [{"x", "y"}, {}]>
    all-reduce        sdy.all_reduce {"y"} %0 out_sharding=<@mesh, [{"x"}, {}]>

Tensors keep their global shape; shardings define the shards of devices. Shardy has no joint
all-to-all (its all-to-all with several moves allows each dimension in a single move), no levels
in a dimension, and no reduction but the sum: such a step is refused, with its number.

Source: the Shardy project, `shardy/dialect/sdy/ir/ops.td`.
"""

from __future__ import annotations

from reshard.collectives import steps
from reshard.collectives.lowering import shardings
from reshard.collectives.lowering.mlir import TensorType, element_text
from reshard.collectives.program import Program
from reshard.dtypes import DType
from reshard.errors import NotationError
from reshard.notation.parsing import Vocabulary, in_mesh_order, symbol_text
from reshard.notation.shardy import shardy_mesh_text, shardy_text, write_axes
from reshard.sharding import ShardingSpec

# The operations sum contributions; attributes for other reductions have no effect.
_SUMS = Vocabulary("Shardy", reductions=("sum",), has_sub_axes=True)


def shardy_module(
    program: Program, dtype: DType | str = "float32", function: str = "reshard"
) -> str:
    """Return the text of a module with a function that runs a program.

    Args:
        program: whose steps become operations.
        dtype: of the elements.
        function: the name of the function.

    Raises:
        NotationError: a step, a mesh, a sharding or a dtype that Shardy cannot express.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> program = find_program(spec(mesh, "-, x"), spec(mesh, "x, -"), (4, 4), steps="classical")
    >>> print(shardy_module(program))  # doctest: +NORMALIZE_WHITESPACE
    module {
      sdy.mesh @mesh = <["x"=2, "y"=2]>
      func.func @reshard(%0: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>})
          -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
        %1 = sdy.all_to_all [{"x"}: 1->0] %0 out_sharding=<@mesh, [{"x"}, {}]> : tensor<4x4xf32>
        return %1 : tensor<4x4xf32>
      }
    }
    """
    tensor = TensorType(program.shape, element_text(dtype, "Shardy"))
    specs = shardings.with_own_mesh_names(shardings.plain_shardings(program))
    for spec in (specs[0], specs[-1]):
        _SUMS.check(spec)
    lines = [f"  {shardy_mesh_text(mesh)}" for mesh in dict.fromkeys(s.mesh for s in specs)]
    ends = [f"{{sdy.sharding = {shardy_text(specs[end])}}}" for end in (0, -1)]
    lines.append(f"  func.func {symbol_text(function)}(%0: {tensor} {ends[0]})")
    lines.append(f"      -> ({tensor} {ends[1]}) {{")
    for number, step in enumerate(program.steps):
        before, after = specs[number], specs[number + 1]
        try:
            operation = _write_operation(step, before, after)
            out = shardy_text(after).removeprefix("#sdy.sharding")
        except NotationError as error:
            raise NotationError(
                f"step {number + 1}, {step}, cannot be expressed in Shardy: {error}"
            ) from error
        words = f"{operation} %{number} out_sharding={out} : {tensor}"
        lines.append(f"    %{number + 1} = sdy.{words}")
    lines += [f"    return %{len(program.steps)} : {tensor}", "  }", "}"]
    return "\n".join(["module {", *lines])


def _write_operation(step: steps.Step, before: ShardingSpec, after: ShardingSpec) -> str:
    """Return the operation and its axes. Raises NotationError if Shardy has none."""
    mesh, target_mesh = before.mesh, after.mesh
    if isinstance(step, steps.Permute):
        if (mesh.shape, mesh.axis_names) != (target_mesh.shape, target_mesh.axis_names):
            raise NotationError(
                f"its meshes {mesh.text} and {target_mesh.text} have different axes; describe both "
                "sides over one of them"
            )
        return "collective_permute"
    if mesh is not target_mesh:
        raise NotationError(
            f"the meshes {mesh.text} and {target_mesh.text} have other devices or axes, which only "
            "a permute may have; describe both sides over one of them"
        )
    if isinstance(step, steps.AllReduce):
        # In the order of the mesh, sub-axes may become adjacent; a sharding joins them.
        reduced = ShardingSpec(mesh, [], partial_axes=in_mesh_order(mesh, step.axes))
        return f"all_reduce {write_axes(reduced.partial_axes)}"
    if isinstance(step, steps.Slice | steps.ReduceScatter):
        word = "all_slice" if isinstance(step, steps.Slice) else "reduce_scatter"
        return f"{word} {_write_axis_lists(before, after)}"
    if isinstance(step, steps.AllGather):
        return f"all_gather {_write_axis_lists(after, before)}"
    if isinstance(step, steps.AllToAll):
        giver, taker = step.dims
        # Shardy's operation keeps the order of the axes that it moves.
        moved = shardings.axes_dropped(after, before, giver)
        if moved == shardings.axes_dropped(before, after, taker):
            return f"all_to_all [{write_axes(moved)}: {giver}->{taker}]"
        raise NotationError("it changes the order of its axes; the order must be kept")
    raise NotationError(
        "it has slices, gathers, all-to-alls between two dimensions, permutes and reductions; "
        "take a program of those: --steps classical, or steps='classical' in find_program"
    )


def _write_axis_lists(short: ShardingSpec, long: ShardingSpec) -> str:
    dims = range(len(short.dim_specs))
    return f"[{', '.join(write_axes(shardings.axes_dropped(short, long, dim)) for dim in dims)}]"
