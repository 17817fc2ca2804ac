"""Jobs in stages: the same tensors come out, and every byte enters a host once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

import reshard
from reshard.binding import Binding, FileRange
from reshard.dtypes import dtype
from reshard.errors import LayoutError, PlanError, ShardError
from reshard.layout import Layout
from reshard.planning.job import Job, JobItem
from reshard.planning.stage_verification import verify_stages
from reshard.planning.stages import StagedJob
from reshard.planning.transfers import Transfers
from reshard.testing.oracle import Contents, contents_of_spec, dense_of, reduced, shards_of
from reshard.testing.rule_definitions import NO_ELEMENT
from reshard.testing.strategies import LayoutAndContents, movements
from reshard.topology import Topology

Movement = tuple[LayoutAndContents, LayoutAndContents]
EXACT_REDUCTIONS = ("sum", "max", "min", "product")
KINDS = ("int8", "int16", "int64")
# A job is several movements.
FEWER = settings(max_examples=settings().max_examples // 2)


@st.composite
def topologies(draw: st.DrawFn, ranks: int) -> Topology:
    """Hosts of `ranks` ranks, in any order."""
    hosts = draw(st.integers(1, min(4, ranks)))
    rest = draw(st.lists(st.integers(0, hosts - 1), min_size=ranks - hosts, max_size=ranks - hosts))
    return Topology(draw(st.permutations([*range(hosts), *rest])))


def job_of(moves: Sequence[Movement], kinds: Sequence[str]) -> Job:
    items = []
    for number, (((source, _), (target, _)), kind) in enumerate(zip(moves, kinds, strict=True)):
        items.append(JobItem.between_ranks(f"t{number}", dtype(kind), source, target))
    return Job(items)


@st.composite
def staged_jobs(
    draw: st.DrawFn, reductions: Sequence[str] = EXACT_REDUCTIONS
) -> tuple[StagedJob, list[Movement]]:
    """Small jobs on some hosts, some of their tensors laid out alike."""
    moves = draw(st.lists(movements(reductions), min_size=1, max_size=3))
    moves += draw(st.lists(st.sampled_from(moves), max_size=2))
    kinds = [draw(st.sampled_from(KINDS)) for _ in moves]
    job = job_of(moves, kinds)
    slots = max(max(i.plan.source.slots, i.plan.target.slots) for i in job.items)
    return StagedJob(job, draw(topologies(slots + draw(st.integers(0, 2))))), moves


def wanted(contents: Contents, slot: int, combines: Any) -> set[tuple[int, int]]:
    """The (element, contribution of the source) pairs that a slot is filled from."""
    if slot not in contents.elements:
        return set()
    elements = contents.elements[slot]
    return {
        (element, contribution)
        for element in elements[elements != NO_ELEMENT].tolist()
        for contribution in combines[contents.contribution[slot]]
    }


def least_across_hosts(staged: StagedJob, moves: Sequence[Movement]) -> int:
    """By sets: what the ranks of each host want and none of them holds."""
    total = 0
    for item, ((_, held), (_, target)) in zip(staged.job.items, moves, strict=True):
        for host in range(staged.topology.hosts):
            ranks = staged.topology.ranks_of(host)
            wants = set().union(*(wanted(target, rank, item.plan.combines) for rank in ranks))
            has = set().union(*(held.held(rank) for rank in ranks))
            total += len(wants - has) * item.dtype.itemsize_bytes
    return total


def random_dense(contents: Contents, seed: int) -> list[NDArray[Any]]:
    generator = np.random.default_rng(seed)
    size = (contents.contributions, *contents.shape)
    return list(generator.integers(1, 3, size))


def is_plain(staged: StagedJob) -> bool:
    return all(len(one) <= 1 for item in staged.job.items for one in item.plan.combines)


@given(staged_jobs(), st.integers(0, 99))
@FEWER
def test_the_target_comes_out(made: tuple[StagedJob, list[Movement]], seed: int) -> None:
    staged, moves = made
    shards, expected = {}, {}
    for item, ((_, held), (_, _)) in zip(staged.job.items, moves, strict=True):
        dense = [part.astype(item.dtype.numpy) for part in random_dense(held, seed)]
        shards[item.name] = shards_of(held, dense, rubbish=77)
        with np.errstate(over="ignore"):
            expected[item.name] = reduced(held.reduction, dense)
    result = staged.run(shards)
    assert result.keys() == expected.keys()
    for item, (_, (_, target)) in zip(staged.job.items, moves, strict=True):
        assert np.array_equal(dense_of(target, result[item.name]), expected[item.name])


@given(staged_jobs())
@FEWER
def test_what_crosses_and_what_moves(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, moves = made
    staged.verify()
    assert staged.moved_bytes == staged.job.lower_bound_bytes
    assert staged.sent_bytes.sum() == staged.received_bytes.sum() == staged.host_bytes.sum()
    assert staged.received_bytes[: len(staged.job.received_bytes)].tolist() == (
        staged.job.received_bytes.tolist()
    )
    assert staged.across_hosts_bound_bytes == least_across_hosts(staged, moves)
    assert staged.across_hosts_bytes >= staged.across_hosts_bound_bytes
    if is_plain(staged):
        assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes


@given(staged_jobs())
@FEWER
def test_bytes_are_those_of_the_transfers(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, _ = made
    ranks, hosts = staged.topology.ranks, staged.topology.hosts
    sent, received = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    between = np.zeros((hosts, hosts), np.int64)
    for number, item in enumerate(staged.job.items):
        for part in staged.transfers(number):
            moving = part.moving
            size = moving.elements * item.dtype.itemsize_bytes
            np.add.at(sent, moving.source_slot, size)
            np.add.at(received, moving.target_slot, size)
            host = staged.topology.rank_host
            np.add.at(between, (host[moving.source_slot], host[moving.target_slot]), size)
    assert sent.tolist() == staged.sent_bytes.tolist()
    assert received.tolist() == staged.received_bytes.tolist()
    assert between.tolist() == staged.host_bytes.tolist()


def rows(transfers: Transfers) -> set[tuple[object, ...]]:
    columns = [getattr(transfers, name).tolist() for name in Transfers.__dataclass_fields__]
    return {
        tuple(tuple(value) if isinstance(value, list) else value for value in row)
        for row in zip(*columns, strict=True)
    }


@given(staged_jobs())
@FEWER
def test_the_parts_of_all_ranks_are_the_whole(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, _ = made
    parts = [staged.for_rank(rank) for rank in range(staged.topology.ranks)]
    for number in range(len(staged.job.items)):
        for stage in (0, 1):
            whole = staged.transfers(number)[stage]
            for rank, part in enumerate(parts):
                mine = (whole.source_slot == rank) | (whole.target_slot == rank)
                assert rows(part[number][stage]) == rows(whole.take(mine))


def spec_job(
    source: str, target: str, shape: tuple[int, ...], mesh: reshard.DeviceMesh, kind: str = "int8"
) -> Job:
    layouts = [reshard.spec(mesh, text).layout(shape) for text in (source, target)]
    return Job([JobItem.between_ranks("w", dtype(kind), layouts[0], layouts[1])])


HOSTS = reshard.DeviceMesh.of(host=2, gpu=4)
ON_HOSTS = Topology.of(hosts=2, ranks_per_host=4)


def test_a_replica_for_every_rank_of_another_host_crosses_once() -> None:
    """Four ranks of host 0 hold a quarter each; each rank of host 1 wants all of it.

    By hand: 64 elements cross, 16 to each rank of host 1, which sends them to three others. A
    direct exchange would send 256 across.
    """
    job = spec_job("gpu | only(host=0)", "- | only(host=1)", (64,), HOSTS, "bfloat16")
    staged = StagedJob(job, ON_HOSTS)
    staged.verify()
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 128
    assert staged.host_bytes.tolist() == [[0, 128], [0, 384]]
    assert staged.sent_bytes.tolist() == [32] * 4 + [96] * 4
    assert staged.received_bytes.tolist() == [0] * 4 + [128] * 4
    exchange, fan_out = staged.transfers(0)
    assert (len(exchange), len(fan_out)) == (4, 12)
    assert sorted(zip(exchange.source_slot, exchange.target_slot, strict=True)) == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


def test_one_holder_does_not_send_to_its_whole_host() -> None:
    """Rank 0 has all, its 7 neighbours want it: it sends it once, and they do the rest."""
    mesh = reshard.DeviceMesh.of(gpu=8)
    job = spec_job("- | only(gpu=0)", "-", (5600,), mesh)
    staged = StagedJob(job, Topology.of(hosts=1, ranks_per_host=8))
    staged.verify()
    assert staged.moved_bytes == 7 * 5600
    assert staged.sent_bytes[0] == staged.sent_bytes.max() == 5600
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 0
    assert job.sent_bytes.max() == 7 * 5600


def test_what_is_balanced_without_it_is_not_handed_on() -> None:
    """An all-gather within a host: every rank sends its own part to the others."""
    staged = StagedJob(spec_job("gpu", "-", (64,), HOSTS), ON_HOSTS)
    exchange, fan_out = staged.transfers(0)
    assert len(fan_out) == 0
    assert len(exchange.moving) == 2 * 4 * 3
    assert staged.sent_bytes.tolist() == [48] * 8
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 0


def test_holders_on_the_host_of_the_receiver_send() -> None:
    """Copies on both hosts, cut anew: nothing crosses."""
    staged = StagedJob(spec_job("gpu, -", "-, gpu", (16, 16), HOSTS), ON_HOSTS)
    staged.verify()
    assert staged.across_hosts_bytes == 0
    assert staged.host_bytes.tolist() == [[192, 0], [0, 192]]
    # With quarters 0 and 2 on one host and 1 and 3 on the other, each host lacks two of four
    # blocks in two of its columns, which two ranks want: 4 blocks of 16 enter each host.
    turned = StagedJob(staged.job, Topology([0, 1, 0, 1, 0, 1, 0, 1]))
    turned.verify()
    assert turned.across_hosts_bytes == turned.across_hosts_bound_bytes == 2 * 4 * 16


def test_contributions_that_are_combined_come_directly() -> None:
    staged = StagedJob(spec_job("- | sum(gpu)", "-", (8,), HOSTS), ON_HOSTS)
    staged.verify()
    assert len(staged.transfers(0).fan_out) == 0
    assert staged.across_hosts_bytes == 0
    # Over both hosts, each rank of one wants all contributions of the other.
    staged = StagedJob(spec_job("- | sum(host)", "-", (8,), HOSTS), ON_HOSTS)
    staged.verify()
    assert staged.across_hosts_bound_bytes == 2 * 8
    assert staged.across_hosts_bytes == 4 * 2 * 8


def test_large_flows_are_divided_in_every_part_of_a_job() -> None:
    """Eight tensors of 64 MiB: each is sent by all four holders, and not a quarter of them by
    each holder.
    """
    mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    shape = (1 << 13, 1 << 13)
    layouts = [reshard.spec(mesh, f"-, - | only(host={host})").layout(shape) for host in range(2)]
    job = Job(
        JobItem.between_ranks(f"w{i}", dtype("int8"), layouts[0], layouts[1]) for i in range(8)
    )
    staged = StagedJob(job, ON_HOSTS)
    staged.verify()
    for number in range(8):
        exchange, _ = staged.transfers(number)
        sent = np.bincount(exchange.source_slot, exchange.elements)
        assert sent.tolist() == [shape[0] * shape[1] // 4] * 4
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == job.moved_bytes // 4


def least_load(staged: StagedJob, moves: Sequence[Movement]) -> float:
    """The least bytes that the most loaded rank can send, as a linear program.

    First copies come from holders, on the host where there are some; other copies from whoever
    is on the host and has, or gets, the element; contributions that are combined from holders.
    """
    classes: Counter[tuple[frozenset[int], frozenset[int], int]] = Counter()
    topology = staged.topology
    for item, ((_, held), (_, target)) in zip(staged.job.items, moves, strict=True):
        holders: dict[tuple[int, int], set[int]] = {}
        for rank in held.elements:
            for pair in held.held(rank):
                holders.setdefault(pair, set()).add(rank)
        for host in range(topology.hosts):
            here = set(topology.ranks_of(host))
            lacking: dict[tuple[int, int], set[int]] = {}
            combined = set()
            for rank in here:
                for pair in wanted(target, rank, item.plan.combines) - held.held(rank):
                    lacking.setdefault(pair, set()).add(rank)
                    if len(item.plan.combines[target.contribution[rank]]) > 1:
                        combined.add(pair)
            for pair, ranks in lacking.items():
                near = holders[pair] & here
                first = frozenset(near or holders[pair])
                others = first if pair in combined else frozenset(near | ranks)
                classes[first, others, len(ranks)] += item.dtype.itemsize_bytes
    rows: list[list[float]] = []
    demands: list[float] = []
    columns: list[int] = []
    for (first, others, copies), size in classes.items():
        for ranks, times in ((first, 1), (others, copies - 1)):
            demands.append(size * times)
            columns += sorted(ranks)
            rows.append([len(columns) - len(ranks), len(columns)])
    if not columns:
        return 0.0
    equal = np.zeros((len(rows), len(columns) + 1))
    for number, (low, high) in enumerate(rows):
        equal[number, int(low) : int(high)] = 1
    load = np.zeros((topology.ranks, len(columns) + 1))
    load[columns, np.arange(len(columns))] = 1
    load[:, -1] = -1
    cost = np.zeros(len(columns) + 1)
    cost[-1] = 1
    found = linprog(cost, load, np.zeros(topology.ranks), equal, np.array(demands))
    assert found.success
    return float(found.fun)


@st.composite
def larger_jobs(draw: st.DrawFn) -> tuple[StagedJob, list[Movement]]:
    """Tensors of some hundred elements on 8 ranks, held and wanted by some of them."""
    mesh = reshard.DeviceMesh.of(x=2, y=2, z=2)
    moves = []
    for _ in range(draw(st.integers(1, 3))):
        pair = []
        for _ in range(2):
            axes = draw(st.permutations("xyz"))
            cut = draw(st.integers(0, 3))
            texts = [" ".join(axes[:cut]) or "-", "-"]
            only = "".join(
                f" {axis}={draw(st.integers(0, 1))}" for axis in axes[cut:] if draw(st.booleans())
            )
            marks = f" | only({only.strip()})" if only else ""
            spec = reshard.spec(mesh, ", ".join(draw(st.permutations(texts))) + marks)
            pair.append((spec.layout((24, 16)), contents_of_spec(spec, (24, 16))))
        moves.append((pair[0], pair[1]))
    job = job_of(moves, [draw(st.sampled_from(KINDS)) for _ in moves])
    return StagedJob(job, draw(topologies(8))), moves


@given(larger_jobs())
@FEWER
def test_the_most_loaded_sender_is_close_to_the_optimum(
    made: tuple[StagedJob, list[Movement]],
) -> None:
    staged, moves = made
    staged.verify()
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes
    widest = max(item.dtype.itemsize_bytes for item in staged.job.items)
    # Handing one element on to 7 others cannot be divided.
    assert staged.sent_bytes.max() <= 1.05 * least_load(staged, moves) + 7 * widest


STAGED = StagedJob(
    spec_job("gpu, - | only(host=0)", "- , - | only(host=1)", (16, 8), HOSTS), ON_HOSTS
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.take(slice(1, None)), b), "the exchange brings 0 of its 32 elements"),
        (lambda a, b: (a, b.take(slice(1, None))), "slot 5 receives 96 elements .* of 128"),
        (lambda a, b: (a.take(np.append(np.arange(len(a)), 0)), b), "the exchange brings 64"),
        (lambda a, b: (a, b.take(np.append(np.arange(len(b)), 0))), "receives 160 elements"),
        (
            lambda a, b: (a, b.replace(start=np.add(b.start, [1, 0]))),
            "the relay does not have these indices of dimension 0",
        ),
        (
            lambda a, b: (
                a,
                b.replace(
                    start=np.subtract(b.start, [1, 0]),
                    source_start=np.subtract(b.source_start, [1, 0]),
                ),
            ),
            "does not have these indices",
        ),
        (
            lambda a, b: (a, b.replace(source_slot=b.source_slot[::-1].copy())),
            "the source slot has no such cell",
        ),
        (
            lambda a, b: (a.replace(source_start=np.add(a.source_start, [0, 1])), b),
            "the source does not have these indices",
        ),
        (
            lambda a, b: (
                a,
                b.replace(
                    source_slot=b.target_slot,
                    source_cell=b.target_cell,
                    target_slot=b.source_slot,
                    target_cell=b.source_cell,
                ),
            ),
            "the exchange brings 0 of its 32",
        ),
        (
            lambda a, b: (a.replace(shape=np.subtract(a.shape, [1, 0])), b),
            "the exchange brings 24 of its 32",
        ),
    ],
)
def test_stages_that_were_changed_are_found_out(
    change: Callable[[Transfers, Transfers], tuple[Transfers, Transfers]], message: str
) -> None:
    plan = STAGED.job.items[0].plan
    exchange, fan_out = STAGED.transfers(0)
    verify_stages(plan, exchange, fan_out)
    with pytest.raises(PlanError, match=message):
        verify_stages(plan, *change(exchange, fan_out))


def test_only_what_overloads_its_sender_is_handed_on() -> None:
    """Rank 0 alone has `a`; of `b` every rank has its part, which it can well send to all."""
    mesh = reshard.DeviceMesh.of(gpu=8)
    whole = reshard.spec(mesh, "-").layout((6400,))
    sources = {"a": "- | only(gpu=0)", "b": "gpu"}
    job = Job(
        JobItem.between_ranks(name, dtype("int8"), reshard.spec(mesh, text).layout((6400,)), whole)
        for name, text in sources.items()
    )
    assert job.items[1].plan.sent_elements.tolist() == [5600] * 8
    staged = StagedJob(job, Topology.of(hosts=1, ranks_per_host=8))
    staged.verify()
    assert staged.moved_bytes == 2 * 7 * 6400
    assert staged.sent_bytes.max() <= 1.05 * 2 * 7 * 6400 / 8
    assert len(staged.transfers(0).fan_out) > 0
    # Of `b`, others take over what is rank 0's, and the rest comes directly.
    fan_out = staged.transfers(1).fan_out
    assert (fan_out.start + fan_out.shape <= 800).all()
    assert set(staged.transfers(1).exchange.moving.source_slot.tolist()) == set(range(8))


def test_what_the_receiver_holds_must_not_be_handed_to_it() -> None:
    """Two ranks hold all: a fan-out from one to the other is wrong, in place of what stays too."""
    mesh = reshard.DeviceMesh.of(x=2)
    whole = reshard.spec(mesh, "-").layout((4,))
    plan = reshard.plan(whole, whole)
    stays = plan.transfers
    again = stays.take([0]).replace(
        target_slot=np.array([1]), target_cell=np.array([1]), stays=np.array([False])
    )
    verify_stages(plan, stays, stays.take(slice(0, 0)))
    with pytest.raises(PlanError, match="held it already"):
        verify_stages(plan, stays, again)
    with pytest.raises(PlanError, match="held it already"):
        verify_stages(plan, stays.take([0]), again)


def test_what_a_rank_sent_must_not_come_back_to_it() -> None:
    plan = reshard.plan(Layout.whole((4,), [0], 2), Layout.replicated((4,), 2))
    stays, moves = plan.transfers.take([0]), plan.transfers.take([1])
    back = moves.replace(
        source_slot=np.array([1]),
        source_cell=np.array([1]),
        target_slot=np.array([0]),
        target_cell=np.array([0]),
    )
    verify_stages(plan, plan.transfers, stays.take(slice(0, 0)))
    with pytest.raises(PlanError, match="exactly when both slots are one"):
        verify_stages(plan, moves, back)


def test_jobs_that_cannot_be_staged_are_refused() -> None:
    job = spec_job("gpu", "-", (8,), HOSTS)
    with pytest.raises(LayoutError, match=r"rank . of a topology over ranks 0 to 3"):
        StagedJob(job, Topology.of(hosts=1, ranks_per_host=4)).verify()
    item = job.items[0]
    in_files = {slot: FileRange("f", 0) for slot in range(8)}
    source = Binding(item.plan.source, in_files, {})
    with pytest.raises(PlanError, match="shard 0 of 'w' is at FileRange"):
        StagedJob(Job([JobItem("w", item.dtype, item.plan, source, item.target)]), ON_HOSTS)
    hole = Layout.flat_ranges((4,), {0: (0, 2)})
    holed = Job([JobItem.between_ranks("w", dtype("int8"), hole, Layout.whole((4,), [5], 6))])
    with pytest.raises(PlanError, match="only 2 of the 4 elements that slot 5"):
        StagedJob(holed, ON_HOSTS).fragments  # noqa: B018
    with pytest.raises(ShardError, match="no arrays for tensor 'w'; got"):
        StagedJob(job, ON_HOSTS).run({})


def test_a_job_of_nothing_is_staged() -> None:
    staged = StagedJob(Job([]), ON_HOSTS)
    staged.verify()
    assert (staged.moved_bytes, staged.across_hosts_bytes, staged.run({})) == (0, 0, {})
    assert staged.for_rank(3) == ()
    assert repr(staged) == "<StagedJob of 0 tensors on 2 hosts>"


def test_a_box_that_one_slot_wants_twice_is_brought_twice() -> None:
    box = reshard.Box((0,), (2,))
    source = Layout.whole((2,), [0], 1)
    target = Layout.from_boxes((2,), [(1, box), (1, box), (2, box)])
    staged = StagedJob(
        Job([JobItem.between_ranks("w", dtype("int64"), source, target)]), Topology([0, 0, 1])
    )
    staged.verify()
    assert staged.moved_bytes == 6 * 8
    result = staged.run({"w": {0: np.array([7, 8])}})["w"]
    assert {rank: array.tolist() for rank, array in result.items()} == {1: [7, 8, 7, 8], 2: [7, 8]}
