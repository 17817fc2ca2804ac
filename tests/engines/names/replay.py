"""Recorded tensors of model classes against the recipes: which names no rule matches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.library import choose_recipe

RECORDS = Path(__file__).resolve().parents[2] / "golden" / "engines" / "names"


def recorded_model_types() -> list[str]:
    """The model types that have a record."""
    return sorted(path.stem for path in RECORDS.glob("*.json"))


def read_records(model_type: str) -> list[dict[str, Any]]:
    """The variants recorded of a model type."""
    records: list[dict[str, Any]] = json.loads((RECORDS / f"{model_type}.json").read_text())
    return records


def describe_unmatched(record: dict[str, Any]) -> Iterator[str]:
    """A line for each tensor that no rule of the model's recipe matches.

    Raises RecipeError for a rule that matches a tensor it does not fit.
    """
    recipe = choose_recipe(record["config"])
    if recipe is None:
        yield f"no recipe for {record['config'].get('model_type')!r}"
        return
    if not record["tensors"]:
        yield f"no class could be built: {record['classes']}"
        return
    # A name has several shapes where classes have heads of one name.
    for number in range(max(map(len, record["tensors"].values()))):
        shapes = {
            name: tuple(map(int, found[number].split("x"))) if found[number] else ()
            for name, found in record["tensors"].items()
            if len(found) > number
        }
        found = assign(
            *(shapes, DeviceMesh.of(tp=1), (), recipe, record["config"]), allow=["unknown"]
        )
        for name in found.unknown:
            yield f"{name} {list(shapes[name])}"
