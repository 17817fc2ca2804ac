"""One rank of a job that runs programs of collectives, beside the plan in one process.

All ranks draw the same examples.
"""

from __future__ import annotations

import datetime
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import reshard
from collectives.sharding_pairs import pairs
from oracle import contents_of_spec, shards_of
from rank_cases import report_each
from reshard.collectives import Exchange, Program, find_program
from reshard.errors import PlanError
from reshard.sharding import ShardingSpec
from reshard.topology import Link, Topology
from reshard.torch import Redistribution, redistribute, redistribution
from reshard.torch.programs import run
from reshard.torch.programs.run import ProgramRun, min_extra_bytes, process_group
from selection import choose

ALWAYS = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    # Ranks that shrink a failure would wait for those that have none.
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8",
    "int8", "int16", "int32", "int64", "complex64", "complex128",
)  # fmt: skip
NUMBERS = ("float32", "float64", "float16", "bfloat16", "int16", "int32", "int64", "complex64")
KINDS_RUN: set[str] = set()


@contextmanager
def by_collectives(whether: bool) -> Iterator[None]:
    """Programs run as on NCCL, with all-gathers and grouped messages, or as on gloo."""
    redistribution.ProgramRun = functools.partial(ProgramRun, by_collectives=whether)  # type: ignore
    exchange = functools.partial(run.MessageExchange, is_grouped=whether)
    run.MessageExchange = exchange  # type: ignore
    try:
        yield
    finally:
        redistribution.ProgramRun = ProgramRun  # type: ignore[misc]
        run.MessageExchange = exchange.func  # type: ignore[misc]


def shards(spec: ShardingSpec, shape: tuple[int, ...], dtype: str) -> dict[int, torch.Tensor]:
    """The local tensors of all ranks, of small whole numbers."""
    contents = contents_of_spec(spec, shape)
    numbers = np.random.default_rng(5)
    dense = [numbers.integers(-3, 4, shape) for _ in range(contents.contributions)]
    kind = getattr(torch, dtype)
    return {
        rank: torch.from_numpy(np.ascontiguousarray(local)).reshape(local.shape).to(kind)
        for rank, local in shards_of(contents, dense).items()
    }


def bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def check(program: Program, dtype: str, limit: int | None = None, is_strided: bool = False) -> None:
    """A program's result is the plan's, in no more memory than allowed."""
    rank = dist.get_rank()
    kind = getattr(torch, dtype)
    held = shards(program.source, program.shape, dtype)
    layouts = [side.layout(program.shape) for side in (program.source, program.target)]
    expected = (
        program.run(held) if program.target.partial_axes else reshard.plan(*layouts).run(held)
    )
    least = min_extra_bytes(program, kind.itemsize, dist.get_world_size())
    limit = least if limit is None else max(limit, least)
    own, out = held.get(rank), None
    before = None if own is None else own.clone()
    if is_strided and own is not None:
        own = torch.stack([own, own], -1)[..., 1]
    if is_strided and rank in expected:
        out = torch.zeros((*expected[rank].shape, 2), dtype=kind)[..., 1]
    begun = redistribute(
        own,
        program.target,
        source=program.source,
        shape=program.shape,
        dtype=kind,
        out=out,
        method=program,
        extra_bytes=limit,
        async_op=True,
    )
    assert isinstance(begun, Redistribution)
    found = begun.wait()
    assert begun.program is (program if program.steps else None)
    assert begun.extra_bytes <= limit, (begun.extra_bytes, limit)
    if begun.program is not None:
        KINDS_RUN.update(step.name for step in program.steps)
        if not any(
            isinstance(step, Exchange) or step.name == "all-reduce" for step in program.steps
        ):
            moved = (
                sum(int(step.received_elements[rank]) for step in program.steps)
                if rank < layouts[1].slots
                else 0
            )
            assert begun.received_bytes == moved * kind.itemsize
    if rank in expected:
        assert found.dtype == kind and found.shape == expected[rank].shape
        assert bits(found) == bits(expected[rank]), (
            program,
            program.source,
            program.target,
            found,
            expected[rank],
        )
        assert out is None or found is out
    else:
        assert found is None
    if before is not None and own is not None:
        assert bits(own) == bits(before)


@settings(max_examples=choose(10, 50), **ALWAYS)
@given(st.data())
def random_programs_give_what_the_plan_gives(data: st.DataObject) -> None:
    """Between shardings of all kinds, in as little memory as can be, and with room."""
    source, target, shape = data.draw(pairs(max_devices=dist.get_world_size()))
    steps = data.draw(st.sampled_from(["joint", "joint", "classical", "mlir", "all"]))
    try:
        program = find_program(source, target, shape, steps=steps)
    except PlanError:
        assume(False)
    dtype = data.draw(st.sampled_from(NUMBERS if source.partial_axes else DTYPES))
    assume(dtype[0] != "c" or source.reduction not in ("max", "min"))
    limit = data.draw(st.sampled_from([None, 1 << 10, 1 << 20]))
    is_strided = data.draw(st.booleans())
    with by_collectives(data.draw(st.booleans())):
        check(program, dtype, limit, is_strided)


def every_step_gives_what_the_plan_gives() -> None:
    """Each kind of step, on a mesh whose ranks are in no rising order, of every dtype."""
    mesh = reshard.DeviceMesh.of(x=2, y=2, devices=[3, 1, 2, 0])
    chain = reshard.DeviceMesh.of(x=4, devices=[3, 1, 2, 0])
    plain = reshard.DeviceMesh.of(x=2, y=2)
    spec = reshard.spec
    pairs_of = {
        "slice": (spec(mesh, "x, -"), spec(mesh, "x, y")),
        "all-gather": (spec(chain, "x, -"), spec(chain, "-, -")),
        "all-gather inside": (spec(mesh, "x, y"), spec(mesh, "x, -")),
        "all-to-all": (spec(chain, "x, -"), spec(chain, "-, x")),
        "joint all-to-all": (spec(mesh, "x y, -"), spec(mesh, "y, x")),
        "permute": (spec(mesh, "x, y"), spec(plain, "x, y")),
        "reduce-scatter": (spec(mesh, "-, y | sum(x)"), spec(mesh, "x, y")),
        "all-reduce": (spec(chain, "-, - | sum(x)"), spec(chain, "-, -")),
        "all-reduce of parts": (spec(mesh, "-, y | sum(x)"), spec(mesh, "-, y")),
        "gathered after": (spec(mesh, "y, x"), spec(mesh, "-, y")),
    }
    for name, (source, target) in pairs_of.items():
        for shape in ((12, 8), (1, 3)):
            program = find_program(source, target, shape)
            for whether in (False, True):
                with by_collectives(whether):
                    check(program, "float32", 1 << 20)
        dtypes = NUMBERS if source.partial_axes else DTYPES
        program = find_program(source, target, (7, 5))
        for number, dtype in enumerate(dtypes):
            with by_collectives(number % 2 == len(name) % 2):
                check(program, dtype, 1 << 20, is_strided=number % 3 == 0)
    uneven = reshard.spec(mesh, "x y"), reshard.spec(mesh, "x"), (10,)
    check(find_program(*uneven), "float32")
    wanted = {"exchange", "slice", "all-gather", "all-to-all", "joint all-to-all", "permute"}
    assert wanted | {"reduce-scatter", "all-reduce"} <= KINDS_RUN, KINDS_RUN


def reductions_have_the_bits_of_the_plan() -> None:
    """Contributions by every reduction, the bits of sums of rounded numbers included."""
    mesh = reshard.DeviceMesh.of(x=4)
    for reduction in ("sum", "mean", "max", "min", "product"):
        for after in ("-, -", "x, -", "-, x"):
            source, target = reshard.spec(mesh, f"-, - | {reduction}(x)"), reshard.spec(mesh, after)
            for shape, limit in (((9, 7), 1 << 10), ((64, 33), 1 << 20)):
                program = find_program(source, target, shape)
                random = np.random.default_rng(3)
                parts = {r: torch.from_numpy(random.normal(size=shape)) for r in range(4)}
                parts[2][0, 0] = float("nan")
                layouts = [side.layout(shape) for side in (source, target)]
                expected = reshard.plan(*layouts).run(parts)[dist.get_rank()]
                for whether in (False, True):
                    with by_collectives(whether):
                        found = redistribute(
                            parts[dist.get_rank()],
                            target,
                            source=source,
                            shape=shape,
                            method="program",
                            extra_bytes=limit,
                        )
                    # Which of all NaNs it is, is up to the processor.
                    assert torch.equal(found.isnan(), expected.isnan())
                    both = (torch.nan_to_num(one, nan=7.0) for one in (found, expected))
                    assert len(set(map(bits, both))) == 1, (program, reduction, after, shape)


def topology(latency_s: float) -> Topology:
    link = Link(1e9, latency_s)
    return Topology.of(hosts=1, ranks_per_host=dist.get_world_size(), within_host=link)


def dtensors_and_their_gradients_are_the_same_by_each_method() -> None:
    """DTensors by each method: the same tensors, and the same gradients."""
    ranks = dist.get_world_size()
    mesh = TorchMesh("cpu", list(range(ranks))[::-1])
    whole = torch.arange(8.0 * 9).reshape(8, 9)
    for before, after in (
        ([Shard(0)], [Replicate()]),
        ([Shard(0)], [Shard(1)]),
        ([Partial("sum")], [Replicate()]),
        ([Partial("sum")], [Shard(0)]),
        ([Replicate()], [Shard(1)]),
    ):
        found = {}
        for method in ("exchange", "program"):
            tensor = distribute(whole, mesh, before).requires_grad_()
            moved = redistribute(tensor, (mesh, after), method=method)
            assert list(moved.placements) == after
            local = moved.to_local()
            (local * (torch.arange(local.numel()).reshape(local.shape) + 1)).sum().backward()
            assert tensor.grad is not None
            found[method] = (local.detach(), tensor.grad.to_local(), tensor.grad.placements)
        one, other = found.values()
        assert torch.equal(one[0], other[0]), (before, after)
        assert torch.equal(one[1], other[1]) and one[2] == other[2], (before, after)
    # A bare tensor, one rank of which has nothing and is told what the others have.
    rows, columns = (reshard.spec(reshard.DeviceMesh.of(x=2), text) for text in ("x, -", "-, x"))
    held = shards(rows, (8, 9), "float32").get(dist.get_rank())
    local = None if held is None else held.requires_grad_()
    source = None if local is None else rows
    moved = redistribute(local, columns, source=source, shape=(8, 9), method="program")
    moved.sum().backward()
    if local is not None:
        assert torch.equal(local.grad, torch.ones_like(local))


def distribute(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """The same tensor, or as many contributions to it, on all ranks."""
    local = whole.clone()
    if isinstance(placements[0], Shard):
        place = mesh.get_local_rank()
        parts = local.tensor_split(
            [-(-whole.shape[0] // mesh.size()) * (i + 1) for i in range(mesh.size() - 1)],
            placements[0].dim,
        )
        local = parts[place].clone()
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)


def auto_chooses_a_program_if_it_is_faster_on_the_topology() -> None:
    """`auto` takes what `choose` says; without a topology, or with other meshes, the exchange."""
    ranks = dist.get_world_size()
    mesh = reshard.DeviceMesh.of(x=ranks)
    partial, whole, rows = (reshard.spec(mesh, t) for t in ("-, - | sum(x)", "-, -", "x, -"))
    shape = (64, 64)
    own = torch.full(shape, 1.0)

    def begun(**options: Any) -> Any:
        found = redistribute(
            own, options.pop("target", whole), source=partial, shape=shape, async_op=True, **options
        )
        assert (found.wait() == ranks).all()
        return found

    assert begun().program is None
    assert begun(method="exchange", topology=topology(0)).program is None
    assert begun(topology=topology(0)).program is not None
    # Two steps, of which each waits for messages.
    assert begun(topology=topology(10)).program is None
    assert begun(topology=topology(0), target=whole.layout(shape)).program is None
    other = reshard.spec(reshard.DeviceMesh.of(x=ranks - 1), "x, -")
    found = redistribute(
        own, other, source=partial, shape=shape, async_op=True, topology=topology(0)
    )
    assert found.program is None
    found.wait()
    found = redistribute(own, rows, source=partial, shape=shape, method="program", async_op=True)
    assert found.program is not None and found.extra_bytes == 0
    found.wait()
    assert found.extra_bytes > 0


def programs_run_without_a_topology_only_for_large_sums() -> None:
    """Without a topology: a program where contributions become replicas, and it is worth it."""
    ranks = dist.get_world_size()
    mesh = reshard.DeviceMesh.of(x=ranks)
    partial, whole, rows = (reshard.spec(mesh, t) for t in ("-, - | sum(x)", "-, -", "x, -"))
    ran: list[Program] = []

    def recorded(program: Program, *arguments: Any) -> ProgramRun:
        ran.append(program)
        return ProgramRun(program, *arguments)

    redistribution.ProgramRun = recorded  # type: ignore
    try:
        for rows_of, source, target, options, is_program in (
            (2304, partial, whole, {}, True),
            (8, partial, whole, {}, False),
            (2304, partial, rows, {}, False),
            (2304, rows, whole, {}, False),
            (2304, partial, whole, {"method": "exchange"}, False),
            (2304, partial, whole, {"async_op": True}, False),
        ):
            shape = (rows_of, 300)
            own = shards(source, shape, "float32")[dist.get_rank()]
            given = {"source": source, "shape": shape}
            found = redistribute(own, target, **given, **options)
            found = found.wait() if isinstance(found, Redistribution) else found
            assert bool(ran) == is_program, (rows_of, source, target, options)
            ran.clear()
            expected = redistribute(own, target, **given, method="exchange")
            assert bits(found) == bits(expected)
    finally:
        redistribution.ProgramRun = ProgramRun  # type: ignore[misc]


def programs_run_only_within_the_memory_limit() -> None:
    """A shard between source and target counts; what lies in either does not."""
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    source, target = reshard.spec(mesh, "y, - | sum(x)"), reshard.spec(mesh, "x, -")
    shape = (64, 64)
    program = find_program(source, target, shape)
    between_bytes = 16 * 64 * 4
    least = min_extra_bytes(program, 4, 4)
    assert between_bytes < least < between_bytes + 1024, (program, least)
    own = shards(source, shape, "float32")[dist.get_rank()]
    for limit in (least, least - 1):
        found = redistribute(
            own,
            target,
            source=source,
            shape=shape,
            topology=topology(0),
            extra_bytes=limit,
            async_op=True,
        )
        found.wait()
        assert (found.program is not None) == (limit == least), (program, limit)
    sliced = reshard.spec(mesh, "x, -"), reshard.spec(mesh, "-, x y"), shape
    for ends in (sliced, (reshard.spec(mesh, "y, x"), reshard.spec(mesh, "x, -"), shape)):
        program = find_program(*ends)
        assert len(program.steps) > 1
        assert min_extra_bytes(program, 4, 4) < 1024, program


def programs_run_in_a_group_of_some_ranks() -> None:
    """In a group that is not all ranks, whoever is not in it takes no part."""
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return
    mesh = reshard.DeviceMesh.of(x=2, devices=[2, 0])
    for before, after in (("-, - | sum(x)", "-, -"), ("x, -", "-, x"), ("x, -", "-, -")):
        source, target = reshard.spec(mesh, before), reshard.spec(mesh, after)
        held = shards(source, (6, 4), "float32")
        layouts = [side.layout((6, 4)) for side in (source, target)]
        expected = reshard.plan(*layouts).run(held)[dist.get_rank()]
        for whether in (False, True):
            with by_collectives(whether):
                found = redistribute(
                    held[dist.get_rank()],
                    target,
                    source=source,
                    shape=(6, 4),
                    group=group,
                    method="program",
                )
            assert torch.equal(found, expected)


def process_groups_are_made_once_in_rising_order() -> None:
    """Groups are made once, by all ranks, in rising order."""
    everyone = range(dist.get_world_size())
    pairs_of = [(2, 0), (3, 1), *((r,) for r in everyone if r > 3)]
    rank = dist.get_rank()
    made = process_group(None, pairs_of, rank)
    if rank < 4:
        assert made is not None and dist.get_process_group_ranks(made) == sorted(
            [rank, (rank + 2) % 4]
        )
    else:
        assert made is None
    assert process_group(None, pairs_of, rank) is made
    assert process_group(None, [tuple(everyone)], rank) is dist.group.WORLD
    assert process_group(dist.new_group([0, 1]), [(0, 1)], rank) is None


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    torch._logging.set_logs(all=40)
    warnings.filterwarnings("ignore", message="ComplexHalf|Casting complex")
    if dist.get_world_size() == 4:
        report_each(
            [
                process_groups_are_made_once_in_rising_order,
                every_step_gives_what_the_plan_gives,
                reductions_have_the_bits_of_the_plan,
                dtensors_and_their_gradients_are_the_same_by_each_method,
                auto_chooses_a_program_if_it_is_faster_on_the_topology,
                programs_run_without_a_topology_only_for_large_sums,
                programs_run_only_within_the_memory_limit,
                programs_run_in_a_group_of_some_ranks,
            ]
        )
    report_each([random_programs_give_what_the_plan_gives])
    dist.barrier()


if __name__ == "__main__":
    main()
