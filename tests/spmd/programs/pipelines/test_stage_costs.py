"""Costs of stages that are traced: against what stages read when they run, and other traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard
import reshard.spmd as sp
from pipeline_models import make_arrays, make_stages, place
from reshard.cost import load_preset
from reshard.errors import UsageError
from reshard.spmd.gradients.transforms import vjp_in_two
from reshard.spmd.shards.operation_call import recording
from reshard.spmd.shards.pending_sums import without_pending
from reshard.topology import Topology

TOPOLOGY = load_preset("h100-8").topology()


class Reads:
    """What operations make, and what they read, by its memory. All of it is kept."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.read: dict[int, Any] = {}

    def record(self, call: Any, operands: Any, results: Any) -> None:
        self.read |= {id(one._shards[0]): one for one in operands if hasattr(one, "_shards")}
        if call.name != "identity":
            self.made |= {id(one._shards[0]): one for one in results}

    def record_reshard(self, operand: Any, result: Any) -> None:
        self.read[id(operand._shards[0])] = operand

    def record_read(self, array: Any) -> None:
        pass


def make_pipeline(inner: tuple[int, int]) -> tuple[sp.Pipeline, Any, Any]:
    size = inner[0] * inner[1]
    schedule = sp.pipeline_schedule("zb-h1", 4, 4)
    meshes = [
        reshard.DeviceMesh.of(dp=inner[0], tp=inner[1], devices=range(n * size, (n + 1) * size))
        for n in range(4)
    ]
    given, batch, specs = place(*make_arrays(4, 4), schedule, meshes)
    return sp.Pipeline(make_stages(4), schedule, specs), given, batch


def test_a_stage_keeps_what_its_way_back_reads() -> None:
    pipeline, parameters, batch = make_pipeline((1, 1))
    costs = pipeline.costs(parameters, batch[0], TOPOLOGY)
    x, targets = batch[0]
    for stage, (function, own) in enumerate(zip(pipeline.stages, parameters, strict=True)):
        more = (targets,) if stage == 3 else ()
        forward, backward = Reads(), Reads()
        with recording(forward):
            if stage == 0:
                made, pullback = vjp_in_two(lambda p: function(p, x), own, None)  # noqa: B023
            else:
                made, pullback = vjp_in_two(lambda p, x: function(p, x, *more), own, x)  # noqa: B023
        with recording(backward):
            pullback(sp.ones_like(made))[1]()
        kept = [forward.made[one] for one in forward.made.keys() & backward.read.keys()]
        kept += [x] if stage else []
        expected = sum(np.asarray(one.to_dense()).nbytes for one in kept)
        assert costs[stage].activation_bytes == expected
        x = made if stage == 3 else made.shard(pipeline.specs[stage + 1])


@pytest.mark.parametrize("inner", [(1, 1), (2, 1), (1, 2)])
def test_times_are_those_of_traces(inner: tuple[int, int]) -> None:
    pipeline, parameters, batch = make_pipeline(inner)
    costs = pipeline.costs(parameters, batch[0], TOPOLOGY)
    x, targets = batch[0]
    for stage, (function, own, found) in enumerate(
        zip(pipeline.stages, parameters, costs, strict=True)
    ):
        given = (x, targets) if stage == 3 else (x,)
        forward = sp.trace(function, own, *given, topology=TOPOLOGY)
        # Cross-entropy that is differentiated also makes what its way back reads.
        assert found.forward == pytest.approx(
            forward.seconds_s, rel=1e-9, abs=6e-11 if stage == 3 else 0
        )

        made = forward.outputs[0]
        slope = made.with_spec(without_pending(made.spec))

        def both(own: Any, slope: Any, x: Any, *more: Any, function: Any = function) -> Any:
            if x.dtype.name == "int64":
                return sp.vjp(lambda p: function(p, x), own)[1](slope)
            return sp.vjp(lambda p, x: function(p, x, *more), own, x)[1](slope)

        whole = sp.trace(both, own, slope, *given, topology=TOPOLOGY)
        total = sum(
            one.seconds_s for one in whole.operations if one.operation.operator != "identity"
        )
        assert sum(found.times[:3]) == pytest.approx(total, rel=1e-9)
        assert (found.backward_input > 0) == (stage > 0)
        assert (found.send > 0) == (stage < 3)
        if stage < 3:
            x = made.with_spec(pipeline.specs[stage + 1])
    table = sp.Timetable(pipeline.schedule, costs)
    assert table.length > max(sum(one.times[:3]) for one in costs) * 4


def test_a_topology_that_knows_no_device_is_refused() -> None:
    pipeline, parameters, batch = make_pipeline((1, 1))
    with pytest.raises(UsageError, match="a topology without a device"):
        pipeline.costs(parameters, batch[0], Topology.of(hosts=1, ranks_per_host=8))
    with pytest.raises(UsageError, match="parameters of 1 stages for 4"):
        pipeline.costs(parameters[:1], batch[0], TOPOLOGY)
