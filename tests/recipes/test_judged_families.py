"""The records of the judge: every recipe still says what was judged.

The judge itself needs transformers, see tests/engines/judge.
"""

from __future__ import annotations

from typing import Any

import pytest

from engines.judge.records import load_records, replay_case
from engines.judge.table import PAGE, fill_in
from reshard.recipes import load_recipe, shipped_recipes
from selection import keep_where

RECORDS = load_records()
RECIPES = {record["recipe"]: name for name, record in RECORDS.items()}
# The family that stands for its recipe: that of its name, where there is one.
FAMILY_OF_RECIPE = {recipe: recipe if recipe in RECORDS else RECIPES[recipe] for recipe in RECIPES}

# Of these there is no record: Kimi K2 is DeepSeek-V3 under another name, Llama 4 with images has
# Llama 4's text model. The recipes of the others were not judged.
NOT_JUDGED = {"kimi_k2", "siglip2_text_model", "siglip2_vision_model"}


def test_every_model_type_of_a_recipe_is_judged() -> None:
    judged = {
        (record["recipe"], case["config"]["model_type"])
        for record in RECORDS.values()
        for case in record["cases"]
    }
    for name in shipped_recipes():
        not_judged = {
            model_type
            for model_type in load_recipe(name).model_types
            if (name, model_type) not in judged
        }
        assert not_judged <= NOT_JUDGED, name


@pytest.mark.parametrize(
    "is_whole",
    keep_where(lambda is_whole: not is_whole, (False, True), "every verdict of every family"),
    ids=("spread", "whole"),
)
@pytest.mark.parametrize(
    "name",
    keep_where(
        lambda name: FAMILY_OF_RECIPE[RECORDS[name]["recipe"]] == name,
        RECORDS,
        "another family of a recipe of which one family is replayed by default",
    ),
)
def test_a_recipe_agrees_with_the_recorded_judgements(name: str, is_whole: bool) -> None:
    """By default one family a recipe: in every second case some of the parallelisms."""
    wrong: list[Any] = []
    cases = RECORDS[name]["cases"]
    for turn, case in enumerate(cases):
        for number, (parallelism, verdict) in enumerate(case["verdicts"].items()):
            if not is_whole and (number + turn) % (2 * len(cases)):
                continue
            if (found := replay_case(case, parallelism)) != verdict:
                wrong.append((parallelism, verdict, found))
    assert not wrong, f"judge {name} again: python -m engines.judge {name}"


def test_every_record_has_refusals_and_several_ranks() -> None:
    for name, record in RECORDS.items():
        verdicts = [v for case in record["cases"] for v in case["verdicts"].items()]
        equal = {parallelism for parallelism, verdict in verdicts if "equal" in verdict}
        assert {"tp=1", "tp=2"} <= equal, name


def test_the_page_of_models_agrees_with_the_records() -> None:
    page = PAGE.read_text()
    assert fill_in(page, RECORDS) == page, "run python -m engines.judge.table"
