"""Recipes beside what engines hold, as `make engines` recorded it of their real ranks.

A recipe cuts every tensor as the engine reads it, or the difference is one of those named here,
each with its reason: what an engine does otherwise than others, and ranks compute with it all the
same.
"""

from __future__ import annotations

import fnmatch

import pytest

from engines.known_differences import KNOWN, Known
from engines.layout_records import RecordedLayout, families_of, read_layouts
from reshard.recipes import Recipe, assign, choose_recipe
from reshard.recipes.engine_layouts.layout_differences import LayoutDifference, list_differences

# As a difference says it of a tensor that is not cut.
WHOLE = "all of it"


def options_of(recorded: RecordedLayout, recipe: Recipe) -> dict[str, str]:
    """The options with which a recipe deals experts out as the engine does: whole, over all."""
    if "ep=" not in recorded.parallelism:
        return {}
    over = [axis for axis in ("dp", "fsdp", "tp") if axis in recorded.layout.mesh.axis_names]
    # Where experts do not divide, counts differ by at most one.
    balanced = {"expert": "balanced"} if "expert" in recipe.numbers else {}
    return {"ep": " ".join(over), "etp": "", **balanced}


def find_differences(recorded: RecordedLayout) -> list[LayoutDifference]:
    """The patterns of tensors that recipe and engine place differently."""
    layout = recorded.layout
    recipe = choose_recipe(recorded.config)
    assert recipe is not None, recorded.config["model_type"]
    shapes = {name: source.shape for name, source in layout.sources.items()}
    recipe = recipe.with_options(options_of(recorded, recipe))
    found = assign(shapes, layout.mesh, (), recipe, recorded.config)
    return list_differences(found.layouts, layout.source_layouts())


def find_known(engine: str, family: str, found: LayoutDifference) -> Known | None:
    """The entry that a difference is one of, or None."""
    for one in KNOWN:
        is_of = one.engine == engine and fnmatch.fnmatchcase(family, one.families)
        if is_of and any(fnmatch.fnmatchcase(found.names[0], text) for text in one.patterns):
            return one
    return None


@pytest.mark.parametrize("family", families_of("vllm"))
def test_recipes_cut_as_vllm_reads(family: str) -> None:
    wrong = [
        f"{recorded.parallelism} {found}"
        for recorded in read_layouts("vllm", family)
        for found in find_differences(recorded)
        if find_known("vllm", family, found) is None
    ]
    assert not wrong


@pytest.mark.parametrize("family", families_of("transformers"))
def test_recipes_cut_as_transformers_does_where_its_plan_cuts(family: str) -> None:
    wrong = [
        str(found)
        for recorded in read_layouts("transformers", family)
        if recorded.parallelism == "tp=2"
        for found in find_differences(recorded)
        # Its plans leave much whole that ranks can share.
        if found.theirs != WHOLE and find_known("transformers", family, found) is None
    ]
    assert not wrong


def test_known_differences_still_differ() -> None:
    """No entry hides nothing."""
    seen = {
        find_known(engine, family, found)
        for engine in ("vllm", "transformers")
        for family in families_of(engine)
        if any(fnmatch.fnmatchcase(family, one.families) for one in KNOWN if one.families != "*")
        or family == "gpt2"
        for recorded in read_layouts(engine, family)
        if engine == "vllm" or recorded.parallelism == "tp=2"
        for found in find_differences(recorded)
    }
    assert {*KNOWN} <= seen
