"""Costs of the stages of a pipeline, estimated from traces, for timetables.

The tasks of a stage follow one another in one trace, of which each has a part::

    F  what the stage makes of its array     | what later tasks read of this, and the array, is
    I  the cotangent of that array           | what a rank keeps until W
    W  the gradients of the parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.gradients.transforms import vjp_in_two
from reshard.spmd.programs.pipelines.stage_passes import Stage
from reshard.spmd.programs.pipelines.timetable import StageCosts
from reshard.spmd.shards.operation_call import placed
from reshard.spmd.shards.pending_sums import without_pending
from reshard.spmd.tracing.graph_recording import type_of
from reshard.spmd.tracing.memory import held_bytes
from reshard.spmd.tracing.trace import trace
from reshard.topology import Topology


def find_stage_costs(
    stages: Sequence[Stage],
    specs: Sequence[ShardingSpec | None],
    gradient_specs: Sequence[Any],
    parameters: Sequence[Any],
    microbatch: tuple[Any, Any],
    topology: Topology,
    library: str,
) -> tuple[StageCosts, ...]:
    """The costs of each stage, in seconds; see `Pipeline.costs`."""
    if topology.device is None:
        raise UsageError(
            "a topology without a device: computing has no times; give one that knows of its "
            "devices, such as reshard.cost.load_preset('h100-8').topology()"
        )
    x, targets = microbatch
    found = []
    for number, (function, own) in enumerate(zip(stages, parameters, strict=True)):
        ends = gradient_specs[number]
        is_last = number == len(stages) - 1
        given = (x, targets) if is_last else (x,)
        found.append(_costs_of(function, own, given, ends, number == 0, topology, library))
        if not is_last:
            (made,) = trace(function, own, x).outputs
            x = made if specs[number + 1] is None else made.with_spec(specs[number + 1])
            send_s = trace(placed, made, x.spec, topology=topology, library=library).seconds_s
            found[-1] = replace(found[-1], send=send_s or 0.0)
    return tuple(found)


def _costs_of(
    function: Stage,
    own: Any,
    given: tuple[Any, ...],
    specs: Any,
    is_first: bool,
    topology: Topology,
    library: str,
) -> StageCosts:
    """Those of one stage, but for what it sends.

    `given` are its array and the targets, `specs` the shardings of its gradients.
    """

    def run(tasks: int, own: Any, cotangent: Any, x: Any, *more: Any) -> Any:
        """So many tasks of the stage."""
        if is_first:
            made, pullback = vjp_in_two(lambda p: function(p, x, *more), own, None, specs)
        else:
            made, pullback = vjp_in_two(lambda p, x: function(p, x, *more), own, x, specs)
        found = [made]
        if tasks > 1:
            slope, rest = pullback(cotangent)
            found += [slope, rest() if tasks > 2 else None]
        return [leaf for _, leaf in leaves(found) if leaf is not None]

    (made,) = trace(function, own, *given).outputs
    cotangent = made if made.spec is None else made.with_spec(without_pending(made.spec))
    first, second = (len(trace(run, tasks, own, cotangent, *given).operations) for tasks in (1, 2))
    both = trace(run, 3, own, cotangent, *given, topology=topology, library=library)
    # A parameter as the stage reads it takes neither time nor memory.
    is_same = [one.operation.operator == "identity" for one in both.operations]
    times = [
        0.0 if is_it else one.seconds_s for one, is_it in zip(both.operations, is_same, strict=True)
    ]
    read = {number for one in both.graph.operations[first:] for number in one.operands}
    kept = [
        kind
        for one, is_it in zip(both.operations[:first], is_same, strict=False)
        if not is_it
        for number, kind in zip(one.operation.results, one.results, strict=True)
        if number in read
    ]
    # The first stage's array is the caller's; that of another lies here for its sake.
    array = None if is_first else type_of(given[0])
    return StageCosts(
        sum(times[:first]),
        sum(times[first:second]),
        sum(times[second:]),
        activation_bytes=max(held_bytes([array, *kept], both.ranks)),
    )
