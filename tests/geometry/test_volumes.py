"""What every rank holds of what every place needs, element by element."""

from __future__ import annotations

from hypothesis import given

import reshard
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from rule_definitions import NO_ELEMENT
from strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]


@given(movements())
def test_kept_elements_are_those_that_both_have(movement: Movement) -> None:
    (source, held), (target, wanted) = movement
    plan = LayoutChange(source, target)
    kept = plan.overlap_elements()
    assert kept.shape == (source.slots, target.slots)
    total = 0
    for place in range(target.slots):
        needs: list[tuple[int, int]] = []
        if place in wanted.elements:
            elements = wanted.elements[place]
            needs = [
                (element, contribution)
                for element in elements[elements != NO_ELEMENT].tolist()
                for contribution in plan.combines[wanted.contribution[place]]
            ]
        total += len(needs)
        for rank in range(source.slots):
            has = held.held(rank)
            assert kept[rank, place] == sum(need in has for need in needs)
    assert plan.needed_elements == total


@given(movements())
def test_elements_that_stay_are_on_the_diagonal(movement: Movement) -> None:
    (source, _), (target, _) = movement
    plan = LayoutChange(source, target)
    stays = int(plan.overlap_elements().diagonal().sum())
    assert plan.needed_elements - stays == plan.lower_bound_elements == plan.moved_elements


def test_elements_that_a_slot_holds_twice_count_once() -> None:
    box = reshard.Box((0,), (3,))
    source = Layout.from_boxes((3,), [(0, box), (0, box), (1, box)])
    plan = LayoutChange(source, Layout.replicated((3,), 2))
    assert plan.overlap_elements().tolist() == [[3, 3], [3, 3]]
