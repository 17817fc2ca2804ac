"""One rank of a job of four: pipelines whose stages are in other processes."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard
import reshard.spmd as sp
from pipeline_models import make_arrays, make_stages, place, whole
from rank_cases import report_each, reported
from refit_models import expect
from reshard.errors import PlanError, ReshardError, RunError
from reshard.spmd.programs.pipelines import boundaries
from reshard.torch.exchange.exchange import MessageExchange
from selection import choose

RANKS = 4
# Stages of a pipeline, and the axes of each one's mesh.
MESHES = [(2, (2, 1)), (2, (1, 2)), (4, (1, 1))]
ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


def make_meshes(count: int, inner: tuple[int, int]) -> list[reshard.DeviceMesh]:
    size = inner[0] * inner[1]
    return [
        reshard.DeviceMesh.of(dp=inner[0], tp=inner[1], devices=range(n * size, (n + 1) * size))
        for n in range(count)
    ]


def losses_and_gradients_are_those_of_one_function(
    count: int, inner: tuple[int, int], group: Any, max_orders: int = len(ORDERS)
) -> None:
    """The loss and the gradients of every order are those of one function on one device."""
    rank, meshes = dist.get_rank(), make_meshes(count, inner)
    # By default each order is on one of the meshes.
    orders = choose(ORDERS[MESHES.index((count, inner)) :: 3], ORDERS)
    for order, per_rank in orders[:max_orders]:
        schedule = sp.pipeline_schedule(order, count, 4, stages_per_rank=per_rank)
        parameters, batch = make_arrays(schedule.n_stages, 4)
        with sp.running(sp.in_process("numpy")):
            expected_loss, expected = whole(parameters, batch)
        with sp.running(sp.over_processes(group)):
            given, microbatches, specs = place(parameters, batch, schedule, meshes, rank)
            pipeline = sp.Pipeline(make_stages(schedule.n_stages), schedule, specs)
            for _ in range(2):
                loss, gradients = pipeline(given, microbatches)
            is_last = rank in specs[-1].mesh.devices
            expect((loss is not None) == is_last, "a loss where there is none, or none")
            if loss is not None:
                expect(abs(float(loss) - expected_loss) < 1e-12, f"{order}: loss {float(loss)}")
            for stage, found in enumerate(gradients):
                is_here = rank in specs[stage].mesh.devices
                expect((found is not None) == is_here, f"{order}: gradients of stage {stage}")
                for name, slope in (found or {}).items():
                    wanted = np.asarray(expected[stage][name].to_dense())
                    difference = np.abs(np.asarray(slope.to_dense()) - wanted).max()
                    expect(difference < 1e-12, f"{order}: {name} of stage {stage}: {difference}")


def a_failing_stage_ends_all_ranks_soon(group: Any) -> None:
    """A stage that fails ends all ranks soon, with its cause on those beside it."""
    rank, meshes = dist.get_rank(), make_meshes(4, (1, 1))
    schedule = sp.pipeline_schedule("1f1b", 4, 4)
    parameters, batch = make_arrays(4, 4)
    stages = make_stages(4)
    calls = [0]

    @sp.eagerly
    def failing(p: Any, x: Any) -> Any:
        calls[0] += not x.runner.is_abstract
        if calls[0] == 2:
            raise MemoryError("no memory left")
        return stages[2](p, x)

    with sp.running(sp.over_processes(group)):
        given, microbatches, specs = place(parameters, batch, schedule, meshes, rank)
        broken = sp.Pipeline([*stages[:2], failing, stages[3]], schedule, specs)
        begin_s = time.monotonic()
        try:
            broken(given, microbatches)
        except MemoryError:
            expect(rank == 2, "another rank's error")
        except ReshardError as error:
            expect(isinstance(error, RunError) and rank != 2, f"{type(error)}: {error}")
        else:
            raise SystemExit("it ended well")
        expect(time.monotonic() - begin_s < 30, "others were held")
        dist.barrier()
        # The connections are made anew.
        loss, _ = sp.Pipeline(stages, schedule, specs)(given, microbatches)
        expect((loss is not None) == (rank == 3), "no step after the failed one")


def a_stage_continues_before_its_messages_are_received(group: Any) -> None:
    """The first stage makes all it has to before the second one takes any of it."""
    rank, meshes = dist.get_rank(), make_meshes(4, (1, 1))
    parameters, batch = make_arrays(4, 4)
    stages = make_stages(4)
    calls, signal = [0], torch.zeros(1)

    @sp.eagerly
    def first(p: Any, tokens: Any) -> Any:
        calls[0] += not tokens.runner.is_abstract
        if calls[0] == 4:
            dist.send(signal, 1)
        return stages[0](p, tokens)

    @sp.eagerly
    def second(p: Any, x: Any) -> Any:
        calls[0] += not x.runner.is_abstract
        if calls[0] == 1 and not x.runner.is_abstract:
            dist.recv(signal, 0)
        return stages[1](p, x)

    with sp.running(sp.in_process("numpy")):
        expected, _ = whole(parameters, batch)
    with sp.running(sp.over_processes(group)):
        schedule = sp.pipeline_schedule("gpipe", 4, 4)
        given, microbatches, specs = place(parameters, batch, schedule, meshes, rank)
        pipeline = sp.Pipeline([first, second, *stages[2:]], schedule, specs)
        loss, _ = pipeline(given, microbatches)
        expect(loss is None or abs(float(loss) - expected) < 1e-12, f"loss {loss}")


def stages_run_where_messages_stay_on_their_thread(group: Any) -> None:
    """The same where messages may not leave the thread of the program, as on devices."""
    ahead, leaves = boundaries._AHEAD, MessageExchange.can_leave_its_thread
    boundaries._AHEAD, MessageExchange.can_leave_its_thread = 0, False  # type: ignore
    try:
        losses_and_gradients_are_those_of_one_function(2, (1, 2), group, choose(1, len(ORDERS)))
    finally:
        boundaries._AHEAD, MessageExchange.can_leave_its_thread = ahead, leaves  # type: ignore


def other_schedules_are_refused(group: Any) -> None:
    """A rank that means another schedule than the stage before raises, and others hear of it."""
    rank, meshes = dist.get_rank(), make_meshes(4, (1, 1))
    parameters, batch = make_arrays(4, 4)
    with sp.running(sp.over_processes(group)):
        schedule = sp.pipeline_schedule("gpipe" if rank == 3 else "1f1b", 4, 4)
        given, microbatches, specs = place(parameters, batch, schedule, meshes, rank)
        pipeline = sp.Pipeline(make_stages(4), schedule, specs)
        try:
            pipeline(given, microbatches)
        except PlanError as error:
            expect(rank == 3 and "step of another schedule" in str(error), str(error))
        except RunError as error:
            expect(rank < 3 and (rank < 2 or "another schedule" in str(error)), str(error))
        else:
            raise SystemExit("it ended well")
    dist.barrier()


def begin_anew() -> None:
    """Another job of the same processes, of other ranks, whose groups are others."""
    rank, told = (dist.get_rank() + 1) % RANKS, [tempfile.mkdtemp()]
    dist.broadcast_object_list(told, src=0)
    dist.destroy_process_group()
    address = f"file://{told[0]}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([one]) for one in range(RANKS)]
    for count, inner in MESHES:
        group = halves[rank // 2] if count == 2 else alone[rank]
        with reported(f"losses_of_{count}_stages_on_meshes_of_{inner}_are_those_of_one_function"):
            losses_and_gradients_are_those_of_one_function(count, inner, group)
    report_each([stages_run_where_messages_stay_on_their_thread], halves[rank // 2])
    report_each(
        [
            a_stage_continues_before_its_messages_are_received,
            other_schedules_are_refused,
            a_failing_stage_ends_all_ranks_soon,
        ],
        alone[rank],
    )
    dist.barrier()
    begin_anew()
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with reported("pipelines_run_in_another_job_of_the_same_processes"):
        orders = choose(1, len(ORDERS))
        losses_and_gradients_are_those_of_one_function(2, (2, 1), halves[rank // 2], orders)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
