"""Regions are disjoint, cover the target, and are needed by their cells only."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.plans.element_groups import find_regions
from reshard.runs import PAD, RunTable
from strategies import LayoutAndContents, movements


def elements_of(layout: Layout, cell: int) -> list[int]:
    """The elements of a cell, numbered in row-major order, halos included."""
    numbers = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    indices = []
    for d, table in enumerate(layout.tables):
        runs = table.runs_of(int(layout.cell_part[cell, d]))
        indices.append([i for a, b, _, role in runs if role != PAD for i in range(a, b)])
    found: list[int] = numbers[np.ix_(*indices)].ravel().tolist() if indices else [0]
    return found


@given(movements())
def test_a_region_has_the_elements_that_the_same_cells_need(
    movement: tuple[LayoutAndContents, LayoutAndContents],
) -> None:
    (source, _), (target, _) = movement
    combines = LayoutChange(source, target).combines
    regions = find_regions(target, combines)
    wanting: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for cell in range(target.cells):
        for element in elements_of(target, cell):
            key = (element, combines[int(target.cell_contribution[cell])])
            wanting.setdefault(key, []).append(cell)
    seen = set()
    for region in range(regions.layout.cells):
        cells = regions.cell[regions.begin[region] : regions.begin[region + 1]].tolist()
        sources = regions.combines[int(regions.layout.cell_contribution[region])]
        for element in elements_of(regions.layout, region):
            assert sorted(cells) == wanting[element, sources]
            assert (element, sources) not in seen
            seen.add((element, sources))
    assert seen == set(wanting)


def test_heads_that_ranks_share_are_regions_of_their_own() -> None:
    mesh = reshard.DeviceMesh.of(tp=4)
    target = reshard.spec(mesh, "tp@windows[0:3,2:4,4:6,5:8]").layout((8,))
    regions = find_regions(target, ((0,),))
    found = {
        tuple(elements_of(regions.layout, region)): regions.cell[
            regions.begin[region] : regions.begin[region + 1]
        ].tolist()
        for region in range(regions.layout.cells)
    }
    assert found == {(0, 1): [0], (2,): [0, 1], (3,): [1], (4,): [2], (5,): [2, 3], (6, 7): [3]}


@given(st.integers(0, 3))
def test_a_part_with_an_index_twice_raises(at: int) -> None:
    """Where parts overlap, an index that one part has twice cannot be handed on."""
    twice = RunTable(4, 2, [(0, 0, 4, 0), (0, at, 1, 4), (1, 0, 4, 0)])
    target = Layout((4,), [twice], 2, [0, 1], [[0], [1]])
    with pytest.raises(PlanError, match="has 5 elements, but only 4 distinct ones"):
        find_regions(target, ((0,),))
