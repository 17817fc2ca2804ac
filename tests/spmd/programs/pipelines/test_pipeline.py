"""Pipelines that run: their losses and gradients are those of the whole function."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest

import reshard
import reshard.spmd as sp
from pipeline_models import make_arrays, make_stages, place, whole
from reshard.cost import load_preset
from reshard.errors import SpecError, UsageError
from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.core.array_type import without_partial
from reshard.spmd.gradients import transforms
from reshard.spmd.gradients.transforms import vjp_in_two
from reshard.spmd.programs.pipelines import pipeline as pipelines
from reshard.spmd.programs.pipelines import stages as stage_passes
from reshard.spmd.shards.operation_call import recording
from reshard.topology import Topology
from selection import keep_covering

ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


@pytest.mark.parametrize(
    ("sizes", "stages", "library"),
    keep_covering(
        1,
        itertools.product([(2, (1, 2)), (2, (2, 2)), (4, (2, 1))], ORDERS, ["numpy", "torch"]),
        "every combination; each order, mesh and library is in a default case",
    ),
)
def test_losses_and_gradients_are_those_of_the_whole(
    sizes: tuple[int, tuple[int, int]], stages: tuple[str, int], library: str
) -> None:
    (ranks, inner), (order, per_rank) = sizes, stages
    if library == "torch":
        pytest.importorskip("torch")
    size = inner[0] * inner[1]
    meshes = [
        reshard.DeviceMesh.of(dp=inner[0], tp=inner[1], devices=range(n * size, (n + 1) * size))
        for n in range(ranks)
    ]
    schedule = sp.pipeline_schedule(order, ranks, 4, stages_per_rank=per_rank)
    parameters, batch = make_arrays(schedule.n_stages, 4)
    expected_loss, expected = whole(parameters, batch)
    with sp.running(sp.in_process(library)):
        given, microbatches, specs = place(parameters, batch, schedule, meshes)
        pipeline = sp.Pipeline(make_stages(schedule.n_stages), schedule, specs)
        loss, gradients = pipeline(given, microbatches)
    assert abs(float(loss) - expected_loss) < 1e-12
    for stage, (found, wanted) in enumerate(zip(gradients, expected, strict=True)):
        for name, slope in found.items():
            # A gradient lies as its parameter.
            assert slope.spec is given[stage][name].spec
            difference = np.asarray(slope.to_dense()) - np.asarray(wanted[name].to_dense())
            assert np.abs(difference).max() < 1e-12, (stage, name)


@pytest.mark.parametrize("order", ["1f1b", "zb-h1"])
def test_stages_may_pass_on_what_they_are_given(order: str) -> None:
    """Their array as it is, and its cotangent as a gradient."""
    meshes = [reshard.DeviceMesh.of(x=2, devices=(2 * n, 2 * n + 1)) for n in range(4)]
    rows = [reshard.spec(mesh, "x") for mesh in meshes]
    stages: list[Any] = [
        lambda p, x: x * p["w"],
        lambda p, x: x,
        lambda p, x: x + p["w"],
        lambda p, x, y: sp.sum(x * p["w"] * y),
    ]
    numbers = [{"w": 2.0}, {}, {"w": 3.0}, {"w": 5.0}]
    parameters = [
        {name: sp.full((4,), value, spec=rows[stage]) for name, value in one.items()}
        for stage, one in enumerate(numbers)
    ]
    batch = [(sp.full((4,), 7.0, spec=rows[0]), sp.full((4,), 11.0, spec=rows[3]))] * 4
    pipeline = sp.Pipeline(stages, sp.pipeline_schedule(order, 4, 4), rows)
    loss, gradients = pipeline(parameters, batch)
    assert float(loss) == 4 * (7 * 2 + 3) * 5 * 11
    found = [{name: x.to_dense().tolist() for name, x in one.items()} for one in gradients]
    expected = [{"w": 7 * 5 * 11}, {}, {"w": 5 * 11}, {"w": (7 * 2 + 3) * 11}]
    assert found == [{name: [x] * 4 for name, x in one.items()} for one in expected]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("order", "per_rank"), [("1f1b", 1), ("zb-v", 2)])
def test_gradients_of_each_microbatch_are_reduced_to_parts(
    order: str, per_rank: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    schedule = sp.pipeline_schedule(order, 2, 4, stages_per_rank=per_rank)
    parameters, batch = make_arrays(schedule.n_stages, 4)
    _, expected = whole(parameters, batch)
    meshes = [reshard.DeviceMesh.of(dp=2, tp=1, devices=(2 * n, 2 * n + 1)) for n in range(2)]
    added: list[Any] = []
    do = pipelines.PipelineRun.do

    def watched(self: Any, task: sp.PipelineTask) -> None:
        do(self, task)
        added.extend(self.gradients.items())

    monkeypatch.setattr(pipelines.PipelineRun, "do", watched)
    with sp.running(sp.in_process(library)):
        given, microbatches, specs = place(parameters, batch, schedule, meshes)
        on = [meshes[schedule.rank_of[stage]] for stage in range(schedule.n_stages)]
        over = [sp.specs_over(own, mesh, "dp") for own, mesh in zip(given, on, strict=True)]
        # The first stage's end as its parameters lie.
        ends = [None, *over[1:]]
        pipeline = sp.Pipeline(make_stages(schedule.n_stages), schedule, specs, ends)
        _, gradients = pipeline(given, microbatches)
        monkeypatch.setattr(stage_passes.StagePasses, "_find_programs", lambda *_: None)
        _, eager = pipeline(given, microbatches)
    for stage, found in [*added, *enumerate(gradients), *enumerate(eager)]:
        for name, slope in found.items():
            assert slope.spec is (over[stage][name] if stage else given[stage][name].spec)
    for found in (gradients, eager):
        for one, other in zip(found, expected, strict=True):
            for name, slope in one.items():
                np.testing.assert_allclose(slope.to_dense(), other[name].to_dense(), 0, 1e-12)


@pytest.mark.parametrize(("order", "per_rank"), ORDERS)
def test_ranks_hold_what_the_schedule_says(
    order: str, per_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = sp.pipeline_schedule(order, 2, 4, stages_per_rank=per_rank)
    parameters, batch = make_arrays(schedule.n_stages, 4)
    meshes = [reshard.DeviceMesh.of(dp=1, tp=1, devices=(n,)) for n in range(2)]
    given, microbatches, specs = place(parameters, batch, schedule, meshes)
    peaks = [0, 0]
    do = pipelines.PipelineRun.do

    def watched(self: Any, task: sp.PipelineTask) -> None:
        do(self, task)
        for rank in range(2):
            held = sum(1 for stage, _ in self.held if schedule.rank_of[stage] == rank)
            peaks[rank] = max(peaks[rank], held)

    monkeypatch.setattr(pipelines.PipelineRun, "do", watched)
    sp.Pipeline(make_stages(schedule.n_stages), schedule, specs)(given, microbatches)
    assert tuple(peaks) == schedule.peak_activations


def test_weights_wait_for_their_task() -> None:
    """The gradient of the input takes its products alone; those of the weights come later."""
    x, w = sp.array(np.ones((2, 3))), sp.array(np.arange(12.0).reshape(3, 4))
    calls: list[str] = []

    class Watched:
        """What is carried out while it records."""

        def record(self, call: Any, operands: Any, results: Any) -> None:
            calls.append(call.name)

        def record_reshard(self, operand: Any, result: Any) -> None:
            calls.append("reshard")

        def record_read(self, array: Any) -> None:
            calls.append("read")

    def function(w: Any, x: Any) -> Any:
        return (x @ w) @ sp.exp(w).T

    value, pullback = transforms.vjp_in_two(function, w, x)
    with recording(Watched()):
        slope, rest = pullback(sp.ones_like(value))
        first = calls.count("matmul")
        assert not {"tensordot", "multiply"} & {*calls}
        weights = rest()
    # The products of the way back to `x`; those of the weights, and of what they went through.
    assert first == calls.count("matmul") == 2 and {"tensordot", "multiply"} <= {*calls}
    both = sp.vjp(function, w, x)[1](sp.ones_like(value))
    assert np.allclose(weights.to_dense(), both[0].to_dense(), atol=1e-12, rtol=0)
    assert np.allclose(slope.to_dense(), both[1].to_dense(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("order", "per_rank"), ORDERS)
def test_stages_are_traced_once(order: str, per_rank: int) -> None:
    """Their Python runs for the first microbatch of the first step alone."""
    schedule = sp.pipeline_schedule(order, 2, 4, stages_per_rank=per_rank)
    parameters, batch = make_arrays(schedule.n_stages, 4)
    meshes = [reshard.DeviceMesh.of(dp=1, tp=1, devices=(n,)) for n in range(2)]
    given, microbatches, specs = place(parameters, batch, schedule, meshes)
    calls: list[int] = []

    def counted(number: int, stage: Any) -> Any:
        def run(*given: Any) -> Any:
            calls.append(number)
            return stage(*given)

        return run

    stages = [counted(n, one) for n, one in enumerate(make_stages(schedule.n_stages))]
    pipeline = sp.Pipeline(stages, schedule, specs)
    found = [pipeline(given, microbatches) for _ in range(3)]
    assert sorted(calls) == list(range(schedule.n_stages))
    assert [float(loss) for loss, _ in found[1:]] == [float(found[0][0])] * 2
    _, expected = whole(parameters, batch)
    for _, gradients in found:
        for slopes, wanted in zip(gradients, expected, strict=True):
            for name, slope in slopes.items():
                difference = np.asarray(slope.to_dense()) - np.asarray(wanted[name].to_dense())
                assert np.abs(difference).max() < 1e-12, name


def two_stages(first: Any, last: Any, order: str = "1f1b") -> sp.Pipeline:
    rows = [reshard.spec(reshard.DeviceMesh.of(tp=1, devices=(n,)), "-") for n in range(2)]
    return sp.Pipeline([first, last], sp.pipeline_schedule(order, 2, 3), rows)


def slopes_of(pipeline: sp.Pipeline, parameters: list[Any]) -> tuple[float, list[Any]]:
    rows = pipeline.specs
    batch = [
        (sp.array(np.arange(3.0) + n, rows[0]), sp.array(np.ones(3) * n, rows[1])) for n in range(3)
    ]
    for _ in range(2):
        loss, gradients = pipeline(parameters, batch)
    return float(loss), [
        np.asarray(leaf.to_dense()).tolist() for _, leaf in leaves(gradients) if leaf is not None
    ]


@pytest.mark.parametrize("order", ["1f1b", "zb-h1"])
def test_a_stage_that_asks_for_elements_goes_operation_by_operation(order: str) -> None:
    def doubled(w: Any, x: Any) -> Any:
        return x * w * (2 if float(sp.sum(x)) > 4 else 1)

    def chosen(w: Any, x: Any) -> Any:
        return x * w * sp.where(sp.sum(x) > 4, 2.0, 1.0)

    def last(w: Any, x: Any, y: Any) -> Any:
        return sp.sum((x * w - y) ** 2)

    weights = [sp.array(2.0), sp.array(3.0)]
    found = slopes_of(two_stages(doubled, last, order), weights)
    assert found == slopes_of(two_stages(chosen, last, order), weights)


@pytest.mark.parametrize("order", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("first", "parameters"),
    [
        # Gradients that are the cotangent itself, of two parameters and of the array.
        (lambda w, x: w[0] + w[1] + x, [[np.ones(3), np.zeros(3)], np.ones(3)]),
        # Parameters that are none, or have no part in what is made.
        (lambda w, x: x * w["a"], [{"a": np.ones(3), "b": None, "c": np.ones(2)}, np.ones(3)]),
        (lambda w, x: x * 2.0, [[], np.ones(3)]),
        # What a stage makes is its parameter, or what it was given.
        (lambda w, x: x, [np.ones(3), np.ones(3)]),
        (lambda w, x: w, [np.ones(3), np.ones(3)]),
        (sp.rematerialized(lambda w, x: sp.exp(x * w) * w), [np.ones(3), np.ones(3)]),
        (sp.eagerly(lambda w, x: sp.exp(x * w) * w), [np.ones(3), np.ones(3)]),
    ],
)
def test_gradients_of_any_form_add_up(order: str, first: Any, parameters: Any) -> None:
    def last(w: Any, x: Any, y: Any) -> Any:
        return sp.sum((x * w - y) ** 2)

    given = replaced(parameters, lambda leaf: None if leaf is None else sp.array(leaf))
    loss, found = slopes_of(two_stages(first, last, order), given)

    def whole_loss(given: Any) -> Any:
        total = sp.array(0.0)
        for n in range(3):
            x, y = sp.array(np.arange(3.0) + n), sp.array(np.ones(3) * n)
            total = total + last(given[1], first(given[0], x), y)
        return total / 3

    value, slopes = sp.value_and_grad(whole_loss)(given)
    expected = [np.asarray(leaf.to_dense()) for _, leaf in leaves(slopes) if leaf is not None]
    assert abs(loss - float(value)) < 1e-12 * max(1, abs(loss))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_what_a_pass_kept_is_free_after_its_way_back() -> None:
    """Only gradients, losses and the arrays of the caller are left of a step."""
    kept: list[Any] = []

    def first(w: Any, x: Any) -> Any:
        return sp.exp(x * w)

    def last(w: Any, x: Any, y: Any) -> Any:
        return sp.sum((sp.exp(x * w) - y) ** 2)

    pipeline = two_stages(first, last, "gpipe")
    weights = [sp.array(0.1), sp.array(0.2)]
    slopes_of(pipeline, weights)
    go_back = stage_passes.ProgramPass.go_back
    with pytest.MonkeyPatch.context() as patch:

        def watched(self: Any, cotangent: Any, known: Any) -> Any:
            held = [one for one in self._values.values() if one.type.shape == (3,)]
            kept.append([weakref.ref(shard) for one in held for shard in one._shards])
            found = go_back(self, cotangent, known)
            assert not self._values
            return found

        patch.setattr(stage_passes.ProgramPass, "go_back", watched)
        slopes_of(pipeline, weights)
    gc.collect()
    made = [reference() for some in kept for reference in some]
    assert made and all(one is None for one in made)


def test_what_is_refused() -> None:
    mesh = reshard.DeviceMesh.of(tp=1)
    schedule = sp.pipeline_schedule("gpipe", 2, 1)
    rows = [reshard.spec(mesh, "-")] * 2
    stages = [lambda w, x: w * x, lambda w, x, y: sp.sum(w * x * y)]
    with pytest.raises(UsageError, match="functions of parameters"):
        sp.Pipeline([stages[0], 7], schedule, rows)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="1 stages for a schedule of 2"):
        sp.Pipeline(stages[:1], schedule, rows[:1])
    with pytest.raises(SpecError, match="for 2 stages"):
        sp.Pipeline(stages, schedule, rows[:1])
    with pytest.raises(SpecError, match="gradient_specs of 1 stages for 2"):
        sp.Pipeline(stages, schedule, rows, [None])
    with pytest.raises(SpecError, match="None at most for the first"):
        sp.Pipeline(stages, schedule, [rows[0], None])
    pipeline = sp.Pipeline(stages, schedule, rows)
    one = sp.ones((2,), spec=rows[0])
    with pytest.raises(UsageError, match="parameters of 1 stages for 2"):
        pipeline([one], [(one, one)])
    with pytest.raises(UsageError, match="2 microbatches for a schedule of 1"):
        pipeline([one, one], [(one, one)] * 2)
    with pytest.raises(UsageError, match="microbatch 0 of ShardedArray; a pair of"):
        pipeline([one, one], [one])  # type: ignore[list-item]
    wrong = sp.Pipeline([stages[0], lambda w, x, y: w * x * y], schedule, rows)
    with pytest.raises(UsageError, match=r"stage 1 returned .*the loss, an array without dim"):
        wrong([one, one], [(one, one)])
    wrong = sp.Pipeline([lambda w, x: (w, x), stages[1]], schedule, rows)
    with pytest.raises(UsageError, match="stage 0 returned tuple; one array, was expected"):
        wrong([one, one], [(one, one)])


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
        slope = made.with_spec(without_partial(made.spec))

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
