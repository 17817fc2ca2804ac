"""Sources that form no grid: the cells that meet give what the product of dimensions gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oracle import dense_of, least_moved, reduced, shards_of
from reshard.errors import PlanError
from reshard.geometry.holders import find_holders
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.overlap import find_key_intersections, find_overlap
from reshard.geometry.routes import RouteFinder, Routes, contribution_sources, find_needs
from reshard.geometry.transfers import Transfers, expand
from reshard.layout import Box, Layout
from reshard.plans.run import run_change
from reshard.runs import FRESH_HALO, OWNED, RunTable
from strategies import (
    LayoutAndContents,
    box_layouts,
    flat_range_layouts,
    layouts_with_contents,
    movements,
    overlapping_box_layouts,
    shapes,
)

Movement = tuple[LayoutAndContents, LayoutAndContents]
ROLES = (OWNED, FRESH_HALO)


@st.composite
def movements_of_boxes(draw: st.DrawFn) -> Movement:
    """Sources that mostly form no grid, to targets of every kind."""
    shape = draw(shapes(min_rank=1, max_rank=4, max_elements=200))
    source = draw(st.one_of(flat_range_layouts(shape), box_layouts(shape)))
    target = st.one_of(
        flat_range_layouts(shape), box_layouts(shape), overlapping_box_layouts(shape)
    )
    return source, draw(st.one_of(target, layouts_with_contents(shape, ("sum", "max"))))


def both_finders(source: Layout, target: Layout) -> tuple[RouteFinder, RouteFinder]:
    """The same by products of dimensions, and by cells that meet, whatever is the better one."""
    holders = find_holders(source)
    combines = contribution_sources(source, target)
    pairs = zip(holders.dimensions, target.tables, strict=True)
    overlaps = tuple(find_overlap(dimension, table) for dimension, table in pairs)
    by_products = RouteFinder(source, target, holders, overlaps, combines)
    overlaps, *met = find_key_intersections(source, target, combines)
    return by_products, RouteFinder(source, target, holders, overlaps, combines, tuple(met))


def rows(finder: RouteFinder, routes: Routes) -> list[list[Any]]:
    transfers = expand(finder.source, finder.target, finder.overlaps, routes)
    columns = [getattr(transfers, name).tolist() for name in Transfers.__dataclass_fields__]
    return [*columns, routes.elements.tolist()]


@settings(max_examples=3 * settings().max_examples)
@given(st.one_of(movements_of_boxes(), movements(("sum", "max"))))
def test_both_ways_give_equal_plans(movement: Movement) -> None:
    (source, _), (target, _) = movement
    assume(find_holders(source).is_exclusive)
    by_products, met = both_finders(source, target)
    every = np.arange(target.cells)
    assert rows(met, met.into(every)) == rows(by_products, by_products.into(every))
    for slot in range(source.slots):
        assert rows(met, met.out_of(slot)) == rows(by_products, by_products.out_of(slot))
    for slot in target.holders:
        cells = np.arange(target.cells)[target.cell_slot == slot]
        assert rows(met, met.into(cells)) == rows(by_products, by_products.into(cells))


@given(movements_of_boxes(), st.integers(0, 2**16))
def test_boxes_arrive_and_no_more_than_must(movement: Movement, seed: int) -> None:
    (source, held), (target, wanted) = movement
    plan = LayoutChange(source, target)
    assert plan.moved_elements == least_moved(held, wanted, plan.combines)
    plan.verify()
    size = (held.contributions, *held.shape)
    dense = list(np.random.default_rng(seed).integers(-99, 99, size))
    result = run_change(plan, shards_of(held, dense, rubbish=12345))
    assert np.array_equal(dense_of(wanted, result), reduced(held.reduction, dense))


@st.composite
def any_sources(draw: st.DrawFn) -> Layout:
    shape = draw(shapes(max_rank=3, max_elements=60))
    overlapping = overlapping_box_layouts(shape, max_slots=2)
    return draw(st.one_of(layouts_with_contents(shape), overlapping, box_layouts(shape)))[0]


@given(any_sources())
def test_a_source_is_exclusive_where_no_element_has_two_keys(source: Layout) -> None:
    holders = find_holders(source)
    seen = np.zeros((source.contributions, *source.shape), dtype=np.int64)
    for cell in holders.copies.first.tolist():
        indices = [
            np.concatenate(
                [np.arange(a, b) for a, b, _, role in table.runs_of(part) if role in ROLES]
                or [np.zeros(0, dtype=np.int64)]
            )
            for table, part in zip(source.tables, source.cell_part[cell].tolist(), strict=True)
        ]
        np.add.at(seen, np.ix_([source.cell_contribution[cell]], *indices), 1)
    assert holders.is_exclusive == bool((seen <= 1).all())


def test_parts_with_many_runs_that_lie_within_one_another() -> None:
    # Even and odd columns of the upper row; the lower one is whole.
    columns = RunTable(6, 3, [(0, 0, 1, 0, 3, 2, 1), (1, 1, 1, 0, 3, 2, 1), (2, 0, 6, 0)])
    lines = RunTable(2, 2, [(0, 0, 1, 0), (1, 1, 1, 0)])
    source = Layout((2, 6), [lines, columns], 3, [0, 1, 2], [[0, 0], [0, 1], [1, 2]])
    holders = find_holders(source)
    assert holders.is_exclusive and not holders.is_grid
    plan = LayoutChange(source, Layout.flat_ranges((2, 6), {0: (0, 3), 1: (3, 12)}))
    assert [str(plan.transfers.box(row)) for row in range(len(plan.transfers))] == [
        "[0:1, 0:1]",
        "[0:1, 2:3]",
        "[0:1, 1:2]",
        "[0:1, 4:5]",
        "[0:1, 3:4]",
        "[0:1, 5:6]",
        "[1:2, 0:6]",
    ]
    assert plan.transfers.source_slot.tolist() == [0, 0, 1, 0, 1, 1, 2]
    plan.verify()
    # The odd columns lie around column 2, and do not have it.
    boxes = [Box((0, 2), (1, 3)), Box((0, 0), (2, 2)), Box((0, 3), (2, 6)), Box((1, 2), (2, 3))]
    plan = LayoutChange(source, Layout.from_boxes((2, 6), list(enumerate(boxes))))
    assert plan.for_rank(0).source_slot.tolist()[0] == 0
    plan.verify()


def test_a_target_that_has_a_box_twice() -> None:
    source = Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})
    box = Box((1, 1), (3, 3))
    plan = LayoutChange(
        source, Layout.from_boxes((4, 4), [(0, box), (2, box), (2, box), (1, Box((0, 0), (1, 1)))])
    )
    assert plan.moved_elements == plan.lower_bound_elements == 3 + 2 * 4 + 1
    plan.verify()


def even_ranges(shape: tuple[int, ...], ranks: int) -> Layout:
    total = math.prod(shape)
    cuts = [total * i // ranks for i in range(ranks + 1)]
    return Layout.flat_ranges(shape, {i: (cuts[i], cuts[i + 1]) for i in range(ranks)})


@pytest.mark.parametrize("shape", [(8192, 28672), (64, 512, 1024)])
def test_overlaps_grow_with_the_routes(shape: tuple[int, ...]) -> None:
    source, target = even_ranges(shape, 1499), even_ranges(shape, 1501)
    plan = LayoutChange(source, target)
    edges = {math.prod(shape) * i // n for n in (1499, 1501) for i in range(1, n)}
    moves = set(zip(plan.transfers.source_slot, plan.transfers.target_slot, strict=True))
    # Each stretch between two edges has one sender and one receiver.
    assert len(moves) == len(edges) + 1
    assert len(plan.transfers) <= 2 * len(shape) * len(moves)
    for overlap in plan.overlaps:
        assert len(overlap.pair_part) == len(overlap.start) <= len(plan.transfers)
    assert plan.transfers.elements.sum() == math.prod(shape)
    needs = find_needs(source, target)
    assert len(needs) == len(plan.transfers)


def test_an_element_without_a_holder_is_an_error() -> None:
    source = Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 15)})
    assert not find_holders(source).is_grid
    target = Layout.flat_ranges((4, 4), {0: (0, 3), 1: (3, 16)})
    plan = LayoutChange(source, target)
    with pytest.raises(PlanError, match="only 11 of the 12 elements that rank 1 of the target"):
        _ = plan.transfers
    assert len(plan.routes_into(0).target_cell) == 1
    with pytest.raises(PlanError, match="only 11 of the 12 elements that rank 1 of the target"):
        find_needs(source, target)


def test_two_boxes_with_one_index_in_common_are_cut() -> None:
    boxes = [Box((0, 0), (2, 3)), Box((1, 2), (3, 4)), Box((0, 3), (1, 4)), Box((2, 0), (3, 2))]
    holders = find_holders(Layout.from_boxes((3, 4), list(enumerate(boxes))))
    assert not holders.is_grid and not holders.is_exclusive
