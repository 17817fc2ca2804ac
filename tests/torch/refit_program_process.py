"""One rank of a job of four: tensors of a refit that move by programs of collectives.

Each case is compared, bit for bit, with the refit that exchanges all tensors.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import reshard
from rank_cases import report_each
from refit_models import Allocations, expect, refused
from reshard.cost import load_preset
from reshard.errors import LayoutError, PlanError, RunError, UsageError
from reshard.topology import Link, Topology
from reshard.torch import BlockQuantized, Refit, refit
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.programs.phases import between_bytes
from selection import choose

# One message costs no more than its bytes.
BYTES_ONLY = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e9))
SLOW_MESSAGES = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e9, 1.0))
SUM, MEAN, LARGEST = Partial("sum"), Partial("avg"), Partial("max")
TIMEOUT_S = 5

Placements = Sequence[Placement]
# Shapes and placements over 2 x 2 ranks, from and to; 5 x 7 divides by nothing.
MODEL: dict[str, tuple[tuple[int, ...], Placements, Placements]] = {
    "all": ((8, 6), [SUM, SUM], [Replicate(), Replicate()]),
    "uneven": ((5, 7), [SUM, SUM], [Replicate(), Replicate()]),
    "rows": ((6, 8), [SUM, Shard(0)], [Replicate(), Shard(0)]),
    "turned": ((8, 8), [Shard(0), SUM], [Replicate(), Shard(1)]),
    "mean": ((7,), [MEAN, MEAN], [Replicate(), Replicate()]),
    "largest": ((3, 3), [LARGEST, Replicate()], [Replicate(), Replicate()]),
    "scalar": ((), [SUM, SUM], [Replicate(), Replicate()]),
    "swapped": ((8, 8), [Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    "gathered": ((8, 4), [Shard(0), Shard(0)], [Replicate(), Replicate()]),
    "cut": ((8, 4), [Replicate(), Replicate()], [Shard(1), Shard(0)]),
    "same": ((4, 4), [Shard(0), Replicate()], [Shard(0), Replicate()]),
    "kept": ((4, 4), [SUM, Shard(0)], [SUM, Shard(1)]),
    "empty": ((0, 4), [SUM, Shard(0)], [Replicate(), Replicate()]),
}
COMBINED = [name for name, (_, before, after) in MODEL.items() if Replicate() in after]


@functools.cache
def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor(shape: tuple[int, ...], places: Placements, seed: int, dtype: torch.dtype) -> DTensor:
    """A DTensor of whole numbers, other contributions on every rank."""
    empty = DTensor.from_local(
        torch.zeros(_local_shape(shape, places), dtype=dtype),
        mesh(),
        places,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape).stride(),
    )
    local = empty.to_local()
    numbers = torch.Generator().manual_seed(10 * seed + _contribution(places))
    whole = torch.randint(-9, 9, shape, generator=numbers).to(dtype)
    layout = reshard.torch.layout_of(empty)
    (box,) = layout.boxes(dist.get_rank()) or (None,)
    if box is not None:
        cut = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        local.copy_(whole[cut])
    return empty


def _local_shape(shape: tuple[int, ...], places: Placements) -> tuple[int, ...]:
    size = list(shape)
    for axis, place in enumerate(places):
        if isinstance(place, Shard):
            parts = torch.empty(size[place.dim]).chunk(2)
            at = mesh().get_coordinate()[axis]
            size[place.dim] = len(parts[at]) if at < len(parts) else 0
    return tuple(size)


def _contribution(places: Placements) -> int:
    at = mesh().get_coordinate()
    return sum(
        (axis + 1) * at[axis] for axis, place in enumerate(places) if isinstance(place, Partial)
    )


def models(
    dtype: torch.dtype = torch.float32, seed: int = 1, names: Sequence[str] = tuple(MODEL)
) -> tuple[dict[str, DTensor], dict[str, DTensor]]:
    source, target = {}, {}
    for number, name in enumerate(names):
        shape, before, after = MODEL[name]
        source[name] = tensor(shape, before, seed + number, dtype)
        target[name] = tensor(shape, after, 99, dtype)
    return source, target


def bits(model: dict[str, DTensor]) -> dict[str, bytes]:
    return {
        name: value.to_local().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in model.items()
        if value.to_local().numel()
    }


def exchanged(source: dict[str, DTensor]) -> dict[str, bytes]:
    """What the refit that exchanges all tensors makes of a source."""
    target = models(next(iter(source.values())).dtype, names=tuple(source))[1]
    done = refit(source, target, method="exchange")
    expect(not done.report.programs and not done.report.exchanged, f"{done.report}")
    return bits(target)


def all_tensors_move_by_programs_of_every_step() -> None:
    """Every kind of step; two runs, local and centralized, in much and in little memory."""
    dtypes = choose((torch.float32, torch.int64), (torch.float32, torch.bfloat16, torch.int64))
    for number, dtype in enumerate(dtypes):
        names = [name for name in MODEL if dtype.is_floating_point or name != "mean"]
        source, target = models(dtype, names=names)
        expected = exchanged(source)
        for planning, extra_bytes in choose(
            (("centralized", 1024) if number else ("local", 64 << 20),),
            itertools.product(("local", "centralized"), (64 << 20, 4096, 1024)),
        ):
            for value in target.values():
                value.to_local().fill_(55)
            done = Refit.prepare(
                source, target, method="program", planning=planning, extra_bytes=extra_bytes
            )
            done.run()
            told = f"{dtype} {planning} {extra_bytes}"
            _expect_bits(target, expected, told)
            expect(done.extra_bytes <= extra_bytes, f"{done.extra_bytes} bytes: {told}")
            expect(done.report.exchanged == {"same": "every rank has what it needs"}, told)
            expect(set(done.report.programs) == set(source) - {"same"}, f"{done.report}")
            again = models(dtype, seed=50, names=names)[0]
            for name, value in source.items():
                value.to_local().copy_(again[name].to_local())
            done.run()
            _expect_bits(target, exchanged(source), "again " + told)
            for name, value in models(dtype, names=names)[0].items():
                source[name].to_local().copy_(value.to_local())
    told = done.report.programs
    expect(told["all"] == "all-reduce(dp tp): asked for", f"{told}")
    expect(told["kept"] == "all-to-all(tp): asked for", f"{told}")


def _expect_bits(target: dict[str, DTensor], expected: dict[str, bytes], told: str) -> None:
    found = bits(target)
    wrong = [name for name in expected if found[name] != expected[name]]
    expect(not wrong, f"{wrong} differ: {told}")


def large_sums_move_by_programs_without_a_topology() -> None:
    """Contributions that become replicas go by programs once they are large enough."""
    names = ["all", "rows", "swapped"]
    source, target = models(names=names)
    done = refit(source, target)
    why = "no topology is given, and nothing of it is combined"
    expect(not done.report.programs, f"{done.report}")
    expect(done.report.exchanged["swapped"] == why, f"{done.report}")
    _expect_bits(target, exchanged(source), "small")
    shape = (2048, 513)
    large = tensor(shape, [SUM, SUM], 3, torch.float32)
    both = {**source, "large": large}
    target = {**target, "large": tensor(shape, [Replicate(), Replicate()], 9, torch.float32)}
    done = refit(both, target)
    # The wait between both steps is there, so that small ones go the same way. Among two ranks a
    # program moves no less: they all are exchanged.
    expect(set(done.report.programs) == {"large", "all"}, f"{done.report}")
    told = done.report.programs["large"]
    size = large.to_local().nbytes
    expect(told.startswith("all-reduce(dp tp): "), told)
    expect(told.endswith(f"by its program, {3 * size} bytes in the exchange"), told)
    moved = torch.tensor(done.received_bytes)
    rest = Refit.prepare(source, {n: target[n] for n in source}, method="auto")
    dist.all_reduce(moved)
    expect(int(moved) < 2 * 3 * size + 4 * rest.received_bytes + 4096, f"{moved} bytes, {size}")
    plain = {"large": torch.zeros(shape)}
    done = refit({"large": large}, plain)
    expect("large" in done.report.programs, f"{done.report}")
    found = plain["large"].numpy().tobytes()
    expect(found == bits(target)["large"], "a plain target on all ranks")
    halves = {"large": (torch.zeros(512, 513), rows_of(shape))}
    done = refit({"large": target["large"]}, halves)
    expect(halves["large"][0].equal(plain["large"].chunk(4)[dist.get_rank()]), "a layout")


def rows_of(shape: tuple[int, ...]) -> reshard.Layout:
    return reshard.spec(reshard.DeviceMesh.of(x=4), "x, -").layout(shape)


def programs_are_chosen_by_the_costs_of_a_topology() -> None:
    """By bytes alone everything that moves less; nothing where messages cost most."""
    source, target = models()
    expected = exchanged(source)
    for planning in choose(("centralized",), ("local", "centralized")):
        done = refit(source, target, topology=BYTES_ONLY, planning=planning)
        expect({"all", "uneven"} <= set(done.report.programs), f"{done.report}")
        expect("swapped" in done.report.exchanged, f"{done.report}")
        expect(set(done.report.programs) | set(done.report.exchanged) == set(MODEL), "left out")
        _expect_bits(target, expected, "by bytes")
        done = refit(source, target, topology=SLOW_MESSAGES, planning=planning)
        expect(not done.report.programs, f"{done.report}")
        told = done.report.exchanged["all"]
        expect(told.endswith("which is less than what waits between steps take"), told)
    done = refit(source, target, topology=load_preset("gloo-host").topology())
    expect(not done.report.programs, f"{done.report}")
    done = refit(source, target, topology=BYTES_ONLY, method="exchange")
    expect(not done.report.programs, f"{done.report}")


def a_second_run_of_programs_plans_and_allocates_nothing() -> None:
    """The second run plans and allocates nothing."""
    names = [name for name in MODEL if name not in ("mean", "scalar")]
    source, target = models(names=names)
    done = refit(source, target, method="program")
    after = models(seed=30, names=names)[0]
    for name, value in source.items():
        value.to_local().copy_(after[name].to_local())
    with Allocations() as seen:
        done.run()
    expect(not seen.large, f"the second run allocates {seen.large}")
    expect(not seen.planned, f"the second run plans {seen.planned}")
    _expect_bits(target, exchanged(source), "the second run")


def programs_share_memory_in_batches() -> None:
    """Programs with shards of their own take turns in the memory between source and target."""
    places = [SUM, Shard(0)], [Shard(1), Shard(1)]
    shape = (16, 12)
    source = {f"w{i}": tensor(shape, places[0], i, torch.float32) for i in range(5)}
    target = {name: tensor(shape, places[1], 9, torch.float32) for name in source}
    first = Refit.prepare(source, target, method="program")
    program = first.part_items[0].chosen.program
    assert program is not None
    expect(len(program.steps) > 1, f"{program}")
    own = between_bytes(program, 4)
    expect(own > 0, "nothing lies between")
    expect(len(first._transfer.batches) == 2, "not in one batch")
    least = 4 * own
    done = refit(source, target, method="program", extra_bytes=least)
    expect(len(done._transfer.batches) == 4, f"{len(done._transfer.batches)} batches")
    expect(done.extra_bytes <= least, f"{done.extra_bytes} bytes")
    found = bits(target)
    refit(source, target, method="exchange")
    expect(found == bits(target), "batches")
    refused(
        lambda: refit(source, target, method="program", extra_bytes=own),
        PlanError,
        f"w0: its program needs {own} bytes between source and target",
    )


def casts_move_by_programs_and_transforms_by_exchange() -> None:
    """What is cast moves by a program as it travels; what is transformed is exchanged."""
    shape, places = (8, 8), ([Shard(0), Shard(1)], [Shard(1), Shard(0)])
    for before, after in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        source = {"w": tensor(shape, places[0], 4, before)}
        target = {"w": tensor(shape, places[1], 9, after)}
        done = refit(source, target, cast=True, method="program")
        expect(set(done.report.programs) == {"w"}, f"{done.report}")
        found = bits(target)
        refit(source, target, cast=True, method="exchange")
        expect(found == bits(target), f"{before} to {after}")
    source = {"w": tensor(shape, places[0], 4, torch.float32)}
    target = {
        "w": tensor(shape, [Shard(0), Shard(0)], 9, torch.float8_e4m3fn),
        "w_scale_inv": tensor((4, 2), [Shard(0), Shard(0)], 9, torch.float32),
    }
    block = {"w": BlockQuantized(block=(2, 4))}
    done = refit(source, target, transforms=block, topology=BYTES_ONLY)
    expect(set(done.report.exchanged.values()) == {"a transform makes it"}, f"{done.report}")
    refused(
        lambda: refit(source, target, transforms=block, method="program"),
        PlanError,
        "w: a transform makes it",
    )


def programs_run_on_other_meshes_groups_and_views() -> None:
    """Devices in another order and shape, a part of the job, views, and tensors of an engine."""
    turned, everyone = DeviceMesh("cpu", [3, 1, 2, 0]), list(range(4))
    some = dist.new_group([1, 2, 3])
    half = DeviceMesh("cpu", [2, 3, 1])
    for devices, before, after, ranks, group in (
        (turned, SUM, mesh(), everyone, None),
        (turned, Shard(0), turned, everyone, None),
        (turned, LARGEST, DeviceMesh("cpu", everyone), everyone, None),
        (half, SUM, half, [1, 2, 3], some),
    ):
        if dist.get_rank() not in ranks:
            continue
        shape = (12, 10)
        if isinstance(before, Shard):
            local = torch.arange(30.0).view(3, 10) + 100 * dist.get_rank()
        else:
            local = torch.full(shape, 2.0) * torch.arange(10) + dist.get_rank()
        own = DTensor.from_local(local, devices, [before], run_check=False)
        found = []
        for method in ("program", "exchange"):
            wide = torch.zeros(*shape, 2)
            with torch.inference_mode():
                view = wide[..., 1] if method == "program" else torch.zeros(shape)
            whole = [Replicate()] * after.ndim
            target = DTensor.from_local(view, after, whole, run_check=False)
            for _ in range(2):
                done = refit({"w": own}, {"w": target}, method=method, group=group)
                by_program = {"w"} if method == "program" else set()
                expect(set(done.report.programs) == by_program, f"{done.report}")
            found.append(view.clone())
            expect(not wide[..., 0].any(), "elements beside the target changed")
        expect(found[0].equal(found[1]), f"{devices}, {before}: {found}")
    dist.barrier()


def tensors_without_programs_are_refused_on_every_rank() -> None:
    """Before anything is written, on every rank."""
    rank = dist.get_rank()
    source, target = models(names=["all", "rows"])
    before = bits(target)
    plain = {name: value.full_tensor() for name, value in target.items()}
    layouts = {name: (value, rows_of(value.shape)) for name, value in plain.items()}
    others: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"method": "fastest"}, RunError, "method='fastest'; it is one of 'auto', 'exchange'"),
        ({"topology": 4}, RunError, "topology is a int"),
        ({"method": "program" if rank == 1 else "auto"}, PlanError, "the same by 'method'"),
        ({"topology": BYTES_ONLY if rank == 1 else None}, PlanError, "the same by 'topology'"),
        (
            {"topology": SLOW_MESSAGES if rank == 2 else BYTES_ONLY},
            PlanError,
            "the same by 'topology'",
        ),
        ({"topology": Topology([0, 0])}, LayoutError, "rank 2 of a topology over ranks 0 to 1"),
        ({"topology": Topology([0] * 4)}, LayoutError, "no within_host link"),
        ({"method": "program", "extra_bytes": 8}, RunError, "extra_bytes=8"),
    ]
    for planning in ("local", "centralized"):
        for options, kind, text in others:
            call = functools.partial(refit, source, target, planning=planning, **options)
            refused(call, kind, text)
    expect(bits(target) == before, "something was written")
    del layouts["rows"]
    told = refused(
        lambda: refit({"all": source["all"]}, layouts, method="program", strict=False),
        (PlanError, UsageError, reshard.errors.ShardError),
        "all",
    )
    expect(bool(told), "nothing is said")


def fails_between_steps(kills: bool) -> None:
    """A rank fails between two steps of the programs: all raise, and the target is not usable."""
    names = ["all", "uneven", "swapped"]
    source, target = models(names=names)
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    done = refit(source, target, method="program", group=group)
    expected = bits(target)
    runs = 0
    run = MessageExchange.run

    def fails(exchange: MessageExchange) -> None:
        nonlocal runs
        runs += 1
        if runs == 2 and dist.get_rank() == 1:
            if kills:
                os._exit(7)
            raise MemoryError("no more")
        run(exchange)

    MessageExchange.run = fails  # type: ignore[method-assign]
    try:
        done.run()
    except RunError as error:
        expect("not usable" in str(error), str(error))
    except MemoryError:
        expect(dist.get_rank() == 1, "another rank's error")
    else:
        raise SystemExit("a rank failed, and this one knows nothing of it")
    MessageExchange.run = run  # type: ignore[method-assign]
    expect(not done.is_usable, "a target that is partly new counts as usable")
    if kills:
        return
    done.renew(dist.new_group(timeout=datetime.timedelta(seconds=60)))
    done.run()
    _expect_bits(target, expected, "after a failure")


CASES: dict[str, Sequence[Callable[[], None]]] = {
    "moves": [
        all_tensors_move_by_programs_of_every_step,
        large_sums_move_by_programs_without_a_topology,
        programs_are_chosen_by_the_costs_of_a_topology,
        a_second_run_of_programs_plans_and_allocates_nothing,
        programs_share_memory_in_batches,
        casts_move_by_programs_and_transforms_by_exchange,
        programs_run_on_other_meshes_groups_and_views,
        tensors_without_programs_are_refused_on_every_rank,
        lambda: fails_between_steps(kills=False),
    ],
    "killed": [lambda: fails_between_steps(kills=True)],
}


def main(cases: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    report_each(CASES[cases])


if __name__ == "__main__":
    main(sys.argv[1])
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
