"""Transfers of jobs: correct, minimal, and with an even load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from oracle import Contents, shards_of
from plans.test_load_balancing import Classes, least_largest_load
from reshard.dtypes import dtype
from reshard.errors import PlanError, UsageError
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.job import Job, JobItem
from reshard.plans.run import run_stages
from strategies import layouts_with_contents, shapes

EVERY_KIND = ["balanced", "stable"]
DTYPES = ["int8", "bfloat16", "int32", "int64"]
EXACT_REDUCTIONS = ("sum", "max", "min")


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, dict[str, tuple[Contents, Contents]]]:
    """Jobs of some tensors, several of a plan, with what their layouts hold."""
    items: list[JobItem] = []
    contents: dict[str, tuple[Contents, Contents]] = {}
    for movement in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_rank=3, max_elements=120))
        pair = layouts_with_contents(shape, EXACT_REDUCTIONS)
        (source, held), (target, wanted) = draw(pair), draw(pair)
        kind = dtype(draw(st.sampled_from(DTYPES)))
        for copy in range(draw(st.integers(1, 3))):
            name = f"{movement}.{copy}"
            items.append(JobItem.between_ranks(name, kind, source, target))
            contents[name] = held, wanted
    order = draw(st.permutations(items))
    return Job(order, draw(st.sampled_from(EVERY_KIND))), contents


def rows(transfers: Mapping[str, Transfers]) -> Counter[tuple[object, ...]]:
    found = Counter[tuple[object, ...]]()
    for name, columns in transfers.items():
        lists = [getattr(columns, field).tolist() for field in Transfers.__dataclass_fields__]
        for row in zip(*lists, strict=True):
            found[name, *(tuple(value) if isinstance(value, list) else value for value in row)] += 1
    return found


@given(jobs())
def test_the_parts_of_all_ranks_are_the_job(example: tuple[Job, Any]) -> None:
    job, _ = example
    slots = [max(item.change.source.slots, item.change.target.slots) for item in job.items]
    received, sent = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for rank in range(max(slots) + 1):
        part = job.for_rank(rank)
        for row, count in rows(part).items():
            _, sender, receiver, *_ = row
            assert rank in (sender, receiver)
            (received if receiver == rank else sent)[row] += count
    whole = rows(job.transfers)
    assert received == whole
    assert sent == Counter({row: count for row, count in whole.items() if row[1] != row[2]})


def test_an_invalid_rank_of_a_job_raises() -> None:
    layout = Layout.replicated((2,))
    job = Job([JobItem.between_ranks("a", dtype("int8"), layout, layout)])
    assert job.for_rank(0).count == 1
    for rank in (-1, 1.5, "0", True, None):
        with pytest.raises(PlanError, match=f"rank {rank!r} must "):
            job.for_rank(rank)  # type: ignore[arg-type]


def test_invalid_jobs_raise() -> None:
    layout = Layout.replicated((2,))
    item = JobItem.between_ranks("a", "int8", layout, layout)
    assert item.dtype is dtype("int8")
    with pytest.raises(UsageError, match="float99"):
        JobItem.between_ranks("a", "float99", layout, layout)
    with pytest.raises(PlanError, match="a tensor named 3"):
        JobItem.between_ranks(3, "int8", layout, layout)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the target is None, not a Layout"):
        JobItem.between_ranks("a", "int8", layout, None)  # type: ignore[arg-type]
    for items in (None, 3, ["a"], [item, item.change]):
        with pytest.raises(PlanError, match=r"expected a JobItem|expected an iterable"):
            Job(items)  # type: ignore[arg-type]
    for seconds in (reshard.plan(layout, layout, "int8"), Job([item])):
        with pytest.raises(PlanError, match="expected a Topology"):
            seconds.estimate("dgx")


def test_senders_are_balanced_or_stable() -> None:
    with pytest.raises(PlanError, match="sources='random': expected 'balanced', or 'stable'"):
        Job([], "random")  # type: ignore[arg-type]


def test_an_empty_job() -> None:
    job = Job([])
    job.verify()
    assert job.moved_bytes == 0
    assert job.sent_bytes.tolist() == []
    assert len(job.transfers) == len(job.for_rank(3)) == 0


@pytest.mark.parametrize("sources", EVERY_KIND)
def test_a_source_without_some_elements_raises(sources: str) -> None:
    source = Layout.from_boxes((4,), [(2, reshard.Box((0,), (3,)))])
    job = Job([JobItem.between_ranks("a", dtype("int8"), source, Layout.replicated((4,)))], sources)
    for ask in (job.verify, lambda: job.for_rank(0), lambda: job.sent_bytes):
        with pytest.raises(PlanError, match=r"only 3 of the 4 elements that rank 0 .* index 3"):
            ask()


def test_the_digest_depends_on_the_policy() -> None:
    items = [
        JobItem.between_ranks(
            "a", dtype("int8"), Layout.replicated((2,), 2), Layout.replicated((2,), 3)
        )
    ]
    assert Job(items).digest == Job(items).digest
    assert Job(items).digest != Job(items, "stable").digest


@given(jobs())
def test_every_job_is_correct_and_moves_the_minimum(example: tuple[Job, Any]) -> None:
    job, _ = example
    job.verify()
    assert job.sent_bytes.sum() == job.received_bytes.sum() == job.moved_bytes
    sent, received = np.zeros_like(job.sent_bytes), np.zeros_like(job.received_bytes)
    for item in job.items:
        moving = job.transfers.get(item.name, Transfers.none(item.change.target.ndim)).moving
        size = moving.elements * item.dtype.itemsize_bytes
        np.add.at(sent, moving.source_slot, size)
        np.add.at(received, moving.target_slot, size)
    assert sent.tolist() == job.sent_bytes.tolist()
    assert received.tolist() == job.received_bytes.tolist()


@given(jobs(), st.integers(0, 2**32))
def test_data_arrives(example: tuple[Job, Any], seed: int) -> None:
    job, contents = example
    random = np.random.default_rng(seed)
    arrays, expected = {}, {}
    for item in job.items:
        held, _ = contents[item.name]
        kind = item.dtype.numpy
        size = (held.contributions, *held.shape)
        dense = [part.astype(kind) for part in random.integers(-8, 8, size)]
        if not held.elements:
            return
        arrays[item.name] = shards_of(held, dense, rubbish=99)
        expected[item.name] = reshard.plan(item.change.source, item.change.target, item.dtype).run(
            arrays[item.name]
        )
    changes = [(item.name, item.dtype, item.change) for item in job.items]
    transfers = [
        job.transfers.get(item.name, Transfers.none(item.change.target.ndim)) for item in job.items
    ]
    # From the ranks that were chosen as senders, and from any.
    for found in (run_stages(changes, lambda item: [transfers[item]], arrays), job.run(arrays)):
        for name, shards in expected.items():
            assert shards.keys() == found[name].keys()
            for rank, array in shards.items():
                assert array.tobytes() == found[name][rank].tobytes()


def classes_of(job: Job) -> Classes:
    """What each set of holders has to give, element by element."""
    demand: dict[tuple[int, ...], int] = {}
    for item in job.items:
        source, target = item.change.source, item.change.target
        holders: dict[tuple[int, int], set[int]] = {}
        for cell in range(source.cells):
            for element in elements_of(source, cell):
                key = (int(source.cell_contribution[cell]), element)
                holders.setdefault(key, set()).add(int(source.cell_slot[cell]))
        for cell in range(target.cells):
            slot = int(target.cell_slot[cell])
            for contribution in item.change.combines[int(target.cell_contribution[cell])]:
                for element in elements_of(target, cell):
                    held = holders[contribution, element]
                    if slot not in held:
                        key = tuple(sorted(held))
                        demand[key] = demand.get(key, 0) + item.dtype.itemsize_bytes
    return [(size, list(held)) for held, size in demand.items()]


def elements_of(layout: Layout, cell: int) -> list[int]:
    """The numbers of the elements of a cell without halos or pads."""
    numbers = np.arange(int(np.prod(layout.shape, dtype=np.int64))).reshape(layout.shape)
    index = [
        np.concatenate([np.arange(a, b) for a, b, *_ in table.runs_of(part)] or [np.zeros(0, int)])
        for table, part in zip(layout.tables, layout.cell_part[cell].tolist(), strict=True)
    ]
    return numbers[np.ix_(*index)].reshape(-1).tolist() if index else [0]


@st.composite
def replicated_jobs(draw: st.DrawFn) -> Job:
    """Jobs whose sources have copies of many sizes, and no halos."""
    items = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        length = draw(st.integers(1, 40))
        kind = dtype(draw(st.sampled_from(DTYPES)))
        layouts = []
        for _ in "st":
            parts = draw(st.integers(1, 3))
            boxes = []
            for part in range(parts):
                low, high = length * part // parts, length * (part + 1) // parts
                for slot in draw(st.sets(st.integers(0, 7), min_size=1)):
                    boxes.append((slot, reshard.Box((low,), (high,))))
            layouts.append(Layout.from_boxes((length,), boxes, 8))
        for copy in range(draw(st.integers(1, 3))):
            items.append(JobItem.between_ranks(f"{name}{copy}", kind, *layouts))
    return Job(items)


@given(replicated_jobs())
def test_the_maximum_load_is_minimal(job: Job) -> None:
    classes = classes_of(job)
    if classes:
        largest = max(item.dtype.itemsize_bytes for item in job.items)
        assert job.sent_bytes.max() <= 1.05 * least_largest_load(classes) + largest
    else:
        assert job.moved_bytes == 0
