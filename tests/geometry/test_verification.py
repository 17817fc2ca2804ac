"""A plan that was tampered with must not pass: each way to go wrong by itself.

Every mutation is tried on one plan known to offer it, and on whatever plans Hypothesis finds
that do. The transfers are always changed: a mutation that finds nothing to change says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, OWNED, IntArray
from strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]
Mutation = Callable[[LayoutChange, np.random.Generator], Transfers | None]

EXAMPLES = max(settings().max_examples // 5, 1)
MUTATIONS: dict[str, tuple[Mutation, str]] = {}


def mutation(example: str) -> Callable[[Mutation], Mutation]:
    """Register a way to go wrong, with the name of a plan that offers it."""

    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = (function, example)
        return function

    return register


def some(generator: np.random.Generator, rows: IntArray) -> int | None:
    return int(generator.choice(rows)) if len(rows) else None


def any_row(plan: LayoutChange, generator: np.random.Generator) -> int | None:
    return some(generator, np.arange(len(plan.transfers)))


def changed(transfers: Transfers, row: int, **values: object) -> Transfers:
    """The transfers with other values in one row."""
    columns = {}
    for name, value in values.items():
        column = getattr(transfers, name).copy()
        column[row] = value
        columns[name] = column
    return replace(transfers, **columns)


@mutation("mesh transposed")
def dropped(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None:
        return None
    return plan.transfers.take(np.arange(len(plan.transfers)) != row)


@mutation("mesh transposed")
def doubled(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None:
        return None
    return plan.transfers.take(np.append(np.arange(len(plan.transfers)), row))


@mutation("equal boxes")
def one_doubled_in_place_of_another(
    plan: LayoutChange, generator: np.random.Generator
) -> Transfers | None:
    """The number of elements is right, and still one part is missing."""
    transfers = plan.transfers
    row = any_row(plan, generator)
    if row is None:
        return None
    alike = (transfers.shape == transfers.shape[row]).all(axis=1)
    alike &= transfers.target_cell == transfers.target_cell[row]
    alike &= transfers.order == transfers.order[row]
    alike[row] = False
    other = some(generator, np.flatnonzero(alike))
    if other is None:
        return None
    index = np.arange(len(transfers))
    index[other] = row
    return transfers.take(index)


def shifted(name: str, plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None or not plan.target.ndim:
        return None
    column = getattr(plan.transfers, name)
    place = column[row].copy()
    place[generator.integers(plan.target.ndim)] += generator.choice([-1, 1])
    return changed(plan.transfers, row, **{name: place})


@mutation("mesh transposed")
def start_shifted(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    return shifted("start", plan, generator)


@mutation("mesh transposed")
def source_start_shifted(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    return shifted("source_start", plan, generator)


@mutation("mesh transposed")
def target_start_shifted(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    return shifted("target_start", plan, generator)


@mutation("mesh transposed")
def all_starts_shifted(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    """A box that is true in itself, but the wrong one."""
    row = any_row(plan, generator)
    if row is None or not plan.target.ndim:
        return None
    step = np.zeros(plan.target.ndim, dtype=np.int64)
    step[generator.integers(plan.target.ndim)] += generator.choice([-1, 1])
    names = ("start", "source_start", "target_start")
    moved = {name: getattr(plan.transfers, name)[row] + step for name in names}
    return changed(plan.transfers, row, **moved)


@mutation("mesh transposed")
def shape_changed(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    return shifted("shape", plan, generator)


@mutation("mesh transposed")
def emptied(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None or not plan.target.ndim:
        return None
    return changed(plan.transfers, row, shape=0)


def from_cell(plan: LayoutChange, row: int, cell: int) -> Transfers:
    """One row taken from another source cell, the same place in it."""
    slot = plan.source.cell_slot[cell]
    stays = slot == plan.transfers.target_slot[row]
    return changed(plan.transfers, row, source_cell=cell, source_slot=slot, stays=stays)


def cells_with_the_same_parts(plan: LayoutChange, row: int, *, contribution: bool) -> np.ndarray:
    source, cell = plan.source, plan.transfers.source_cell[row]
    same = (source.cell_part == source.cell_part[cell]).all(axis=1)
    own = source.cell_contribution == source.cell_contribution[cell]
    return same & (own if contribution else ~own)


@mutation("mesh transposed")
def sent_by_a_rank_that_has_it_not(
    plan: LayoutChange, generator: np.random.Generator
) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None:
        return None
    box = plan.transfers.box(row)
    wanted = set(itertools.product(*map(range, box.start, box.stop)))
    cells = range(plan.source.cells)
    without = [cell for cell in cells if not wanted & elements_of(plan.source, cell)]
    cell = some(generator, np.array(without, dtype=np.int64))
    return None if cell is None else from_cell(plan, row, cell)


def elements_of(layout: Layout, cell: int) -> set[tuple[int, ...]]:
    """The elements that a cell may be a source of."""
    columns = []
    for d, table in enumerate(layout.tables):
        runs = table.runs_of(int(layout.cell_part[cell, d]))
        usable = [range(a, b) for a, b, _, role in runs if role in (OWNED, FRESH_HALO)]
        columns.append(list(itertools.chain(*usable)))
    return set(itertools.product(*columns))


@mutation("mesh transposed")
def slot_and_cell_disagree(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None:
        return None
    others = [slot for slot in plan.source.holders if slot != plan.transfers.source_slot[row]]
    slot = some(generator, np.array(others, dtype=np.int64))
    return None if slot is None else changed(plan.transfers, row, source_slot=slot)


@mutation("replicas")
def sent_though_the_receiver_held_it(
    plan: LayoutChange, generator: np.random.Generator
) -> Transfers | None:
    row = some(generator, np.flatnonzero(plan.transfers.stays))
    if row is None:
        return None
    copies = cells_with_the_same_parts(plan, row, contribution=True)
    copies &= plan.source.cell_slot != plan.transfers.target_slot[row]
    cell = some(generator, np.flatnonzero(copies))
    return None if cell is None else from_cell(plan, row, cell)


@mutation("mesh transposed")
def stays_though_it_moves(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = some(generator, np.flatnonzero(~plan.transfers.stays))
    return None if row is None else changed(plan.transfers, row, stays=True)


@mutation("mesh transposed")
def moves_though_it_stays(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = some(generator, np.flatnonzero(plan.transfers.stays))
    return None if row is None else changed(plan.transfers, row, stays=False)


@mutation("mesh transposed")
def sent_to_another(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None:
        return None
    transfers, target = plan.transfers, plan.target
    cell = some(generator, np.flatnonzero(np.arange(target.cells) != transfers.target_cell[row]))
    if cell is None:
        return None
    slot = target.cell_slot[cell]
    stays = slot == transfers.source_slot[row]
    return changed(transfers, row, target_cell=cell, target_slot=slot, stays=stays)


@mutation("partial sums")
def in_the_wrong_order(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    """A contribution in the place of another."""
    combined = {c for c, sources in enumerate(plan.combines) if len(sources) > 1}
    carried = plan.target.cell_contribution[plan.transfers.target_cell]
    row = some(generator, np.flatnonzero(np.isin(carried, list(combined))))
    if row is None:
        return None
    count = len(plan.combines[int(carried[row])])
    order = (plan.transfers.order[row] + generator.integers(1, count)) % count
    return changed(plan.transfers, row, order=order)


@mutation("partial sums")
def two_contributions_swapped(
    plan: LayoutChange, generator: np.random.Generator
) -> Transfers | None:
    """Every element gets every contribution once, but not in the order that all agreed on."""
    transfers = plan.transfers
    row = some(generator, np.flatnonzero(transfers.order == 1))
    if row is None:
        return None
    here = transfers.target_cell == transfers.target_cell[row]
    order = np.where(here & (transfers.order < 2), 1 - transfers.order, transfers.order)
    return replace(transfers, order=order)


@mutation("partial sums")
def a_contribution_too_many(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    row = any_row(plan, generator)
    if row is None:
        return None
    return changed(plan.transfers, row, order=plan.source.contributions)


@mutation("partial sums")
def another_contribution(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    """The right elements, of the wrong contribution."""
    row = any_row(plan, generator)
    if row is None:
        return None
    cells = np.flatnonzero(cells_with_the_same_parts(plan, row, contribution=False))
    cell = some(generator, cells)
    return None if cell is None else from_cell(plan, row, cell)


@mutation("mesh transposed")
def a_cell_that_is_not_there(
    plan: LayoutChange, generator: np.random.Generator
) -> Transfers | None:
    row = any_row(plan, generator)
    return None if row is None else changed(plan.transfers, row, source_cell=plan.source.cells)


@mutation("mesh transposed")
def nothing_at_all(plan: LayoutChange, generator: np.random.Generator) -> Transfers | None:
    return plan.transfers.take(np.zeros(0, dtype=np.int64)) if len(plan.transfers) else None


def example(name: str) -> LayoutChange:
    mesh = reshard.DeviceMesh.of(x=2, y=3, devices=[4, 0, 1, 7, 3, 2])
    source, target = {
        "mesh transposed": ("x, y", "y, x"),
        "equal boxes": ("x y, -", "-, x"),
        "replicas": ("x, -", "x, -"),
        "partial sums": ("x, - | sum(y)", "y, -"),
    }[name]
    shape = (6, 6)
    layouts = [reshard.spec(mesh, text).layout(shape) for text in (source, target)]
    return LayoutChange(*layouts)


def differ(a: Transfers, b: Transfers) -> bool:
    return len(a) != len(b) or any(
        not np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)
    )


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("seed", range(5))
def test_a_mutated_example_fails(name: str, seed: int) -> None:
    mutate, plan_name = MUTATIONS[name]
    plan = example(plan_name)
    plan.verify()
    mutated = mutate(plan, np.random.default_rng(seed))
    assert mutated is not None, "the example offers nothing to change"
    assert differ(mutated, plan.transfers)
    with pytest.raises(PlanError):
        plan.verify(mutated)


def test_a_mutated_plan_fails() -> None:
    """Each mutation on each of the same plans, of which some offer it nothing to change."""
    tried = Counter[str]()

    @settings(suppress_health_check=list(HealthCheck), max_examples=2 * EXAMPLES)
    @given(movements(("sum",)), st.integers(0, 2**16))
    def mutate_plans(movement: Movement, seed: int) -> None:
        (source, _), (target, _) = movement
        plan = LayoutChange(source, target)
        for name, (mutate, _) in MUTATIONS.items():
            mutated = mutate(plan, np.random.default_rng(seed))
            if mutated is None:
                continue
            tried[name] += 1
            assert differ(mutated, plan.transfers), name
            try:
                plan.verify(mutated)
            except PlanError:
                continue
            pytest.fail(f"{name} passes")

    mutate_plans()
    assert EXAMPLES == 1 or tried.keys() == MUTATIONS.keys(), tried


def test_a_stale_halo_is_no_source() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    stale, fresh = (
        reshard.spec(mesh, f"x@halo[1,1{word}]").layout((6,)) for word in ("", ",fresh")
    )
    target = Layout.whole((6,), [0], 1)
    wanted = LayoutChange(fresh, target)
    assert wanted.moved_elements == 2
    wanted.verify()
    with pytest.raises(PlanError, match="the source does not have these indices"):
        LayoutChange(stale, target).verify(wanted.transfers)


def test_the_error_names_the_wrong_transfer() -> None:
    plan = example("mesh transposed")
    wrong = changed(plan.transfers, 3, source_start=99)
    with pytest.raises(PlanError, match=r"transfer 3, \[.*\] from rank \d+ to rank \d+: the sour"):
        plan.verify(wrong)


def test_a_plan_of_its_own_is_compared_with_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = example("mesh transposed")
    monkeypatch.setattr(LayoutChange, "lower_bound_elements", 25)
    with pytest.raises(PlanError, match="moves 26 elements, but 25 suffice"):
        plan.verify()


@pytest.mark.parametrize("dims", [31, 62, 63, 64, 65, 100])
def test_plans_of_many_dimensions(dims: int) -> None:
    """NumPy's arrays have at most 64 dimensions, and a grid of so many edges has no memory."""
    mesh, shape = reshard.DeviceMesh.of(tp=2), (2, 2, *(1,) * (dims - 2))
    source, target = (
        reshard.spec(mesh, ", ".join([*cut, *["-"] * (dims - 2)])).layout(shape)
        for cut in (("tp", "-"), ("-", "tp"))
    )
    plan = reshard.plan(source, target, dtype="float32")
    plan.verify()
    assert plan.moved_bytes == 8
    if dims <= 64:
        whole = np.arange(4, dtype="float32").reshape(shape)
        out = plan.run({0: whole[:1], 1: whole[1:]})
        assert np.array_equal(out[0], whole[:, :1]) and np.array_equal(out[1], whole[:, 1:])
