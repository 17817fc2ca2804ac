"""Pipelines that run: their losses and gradients are those of the whole function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard
import reshard.spmd as sp
from pipeline_models import make_arrays, make_stages, place, whole
from reshard.errors import SpecError, UsageError
from reshard.spmd.gradients import transforms
from reshard.spmd.programs.pipelines import pipeline as pipelines
from reshard.spmd.shards.operation_call import recording

ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("order", "per_rank"), ORDERS)
@pytest.mark.parametrize(("ranks", "inner"), [(2, (1, 2)), (2, (2, 2)), (4, (2, 1))])
def test_losses_and_gradients_are_those_of_the_whole(
    order: str, per_rank: int, ranks: int, inner: tuple[int, int], library: str
) -> None:
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
