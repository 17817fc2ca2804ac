"""Recipes cut for Megatron as Megatron-core did when `make engines` recorded it."""

from __future__ import annotations

import json

import pytest

from engines.megatron_core.records import SIZES, hold_by_recipe, path_of, shapes


@pytest.mark.parametrize(("sizes", "experts"), SIZES)
def test_recipes_cut_as_recorded(sizes: dict[str, int], experts: int | None) -> None:
    record = json.loads(path_of(sizes, experts).read_text())
    held, used = hold_by_recipe(sizes, experts, record["held"])
    assert record["megatron-core"] and held == record["held"]
    assert used == set(shapes(experts))
